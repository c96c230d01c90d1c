//! What Screwdriver's API is told of a build, with the token of the build's message.

use jiff::Timestamp;
use reqwest::{Client, StatusCode};
use serde_json::{Value, json};

use super::message::Build;
use super::rules::WAITING_FOR_RESOURCES;
use journeyman_domain::limits::{
    CONNECT_TIMEOUT, ERROR_BODY_BYTES_MAX, REFUSAL_TEXT_BYTES_MAX, SCREWDRIVER_API_TIMEOUT,
};
use journeyman_platform::http::client::{client_builder, read_body, root_cause};
use journeyman_platform::kubernetes::Pod;
use journeyman_platform::redact;
use journeyman_platform::settings::values::Url;

pub(crate) struct BuildApi {
    http: Client,
    /// Instead of the address in the messages.
    base: Option<Url>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Update {
    /// The text is for the build's users.
    Failure(String),
    WaitingForResources,
    Node {
        name: String,
        /// The time of the assignment, by the API server's clock.
        assigned_at: Option<Timestamp>,
    },
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum PutResult {
    Accepted,
    /// It will be refused again.
    Refused(String),
    /// No answer, or none that says that it will be refused again: the update may have been accepted.
    Later(String),
}

impl Update {
    /// Where a pod runs, or that it waits for a node. The same each time, so that a later look at the pod changes nothing.
    pub(crate) fn of_pod(pod: &Pod) -> Self {
        let Some(name) = pod.spec.as_ref().and_then(|spec| spec.node_name.clone()) else {
            return Self::WaitingForResources;
        };
        let status = pod.status.as_ref();
        let scheduled =
            status.and_then(|status| status.conditions.iter().flatten().find(|one| one.type_ == "PodScheduled"));
        let since = scheduled.and_then(|one| one.last_transition_time);
        let since = since.or_else(|| status?.start_time).or(pod.metadata.creation_timestamp);
        Self::Node { name, assigned_at: since }
    }

    fn body(&self) -> Value {
        match self {
            Self::Failure(text) => json!({ "status": "FAILURE", "statusMessage": text }),
            Self::WaitingForResources => json!({ "statusMessage": WAITING_FOR_RESOURCES }),
            Self::Node { name, assigned_at: None } => json!({ "stats": { "hostname": name } }),
            Self::Node { name, assigned_at: Some(at) } => {
                json!({ "stats": { "hostname": name, "imagePullStartTime": format!("{at:.3}") } })
            }
        }
    }
}

impl BuildApi {
    /// # Errors
    ///
    /// Fails if the system's certificates cannot be read.
    pub(crate) fn new(base: Option<Url>) -> reqwest::Result<Self> {
        let http = client_builder().connect_timeout(CONNECT_TIMEOUT).timeout(SCREWDRIVER_API_TIMEOUT).build()?;
        Ok(Self { http, base })
    }

    /// Sends an update once. What it returns holds no token.
    ///
    /// # Cancel safety
    ///
    /// The update may have been accepted.
    pub(crate) async fn put(&self, build: &Build, update: &Update) -> PutResult {
        let base = self.base.as_ref().unwrap_or(&build.known.api_uri);
        let url = format!("{}/v4/builds/{}", base.as_str(), build.id());
        let failed =
            |why: &str| redact::text(&format!("cannot update build {} at {url}: {why}", build.id())).into_owned();
        let request = self.http.put(&url).bearer_auth(build.known.token.reveal()).json(&update.body());
        let mut answer = match request.send().await {
            Ok(answer) => answer,
            Err(error) if error.is_builder() => {
                return PutResult::Refused(failed("its token is not valid in a header"));
            }
            Err(error) => return PutResult::Later(failed(&root_cause(&error.without_url()))),
        };
        let status = answer.status();
        if status.is_success() {
            return PutResult::Accepted;
        }
        let body = read_body(&mut answer, ERROR_BODY_BYTES_MAX).await.unwrap_or_else(|_| Vec::new());
        let body = String::from_utf8_lossy(&body[..body.len().min(REFUSAL_TEXT_BYTES_MAX)]).into_owned();
        let why = failed(format!("{status} {body}").trim());
        let is_final =
            status.is_client_error() && !matches!(status, StatusCode::REQUEST_TIMEOUT | StatusCode::TOO_MANY_REQUESTS);
        if is_final { PutResult::Refused(why) } else { PutResult::Later(why) }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};
    use std::time::Duration;

    use axum::Router;
    use axum::extract::{Path, State};
    use axum::http::{HeaderMap, StatusCode};
    use axum::routing::put;
    use tokio::io::AsyncReadExt as _;
    use tokio::net::TcpListener;
    use tokio::task::JoinSet;

    use super::*;
    use crate::screwdriver::message::Message;

    const TOKEN: &str = "eyJhbGciOiJIUzI1NiJ9.eyJ1c2VybmFtZSI6MX0.c2ln";

    fn build(api: &str) -> Build {
        let fields = json!({ "buildId": 7, "container": "scn/a:1", "apiUri": api, "token": TOKEN });
        let Ok(Message::Start(build)) = Message::from_json(json!({ "job": "start", "buildConfig": fields })) else {
            panic!("a start")
        };
        build
    }

    type Calls = Arc<Mutex<Vec<(String, String, Value)>>>;

    /// A build API that answers with this status, repeats the token, and remembers its calls.
    async fn api(status: u16, serving: &mut JoinSet<()>) -> (String, Calls) {
        let calls = Calls::default();
        let status = StatusCode::from_u16(status).unwrap();
        let answer = move |State(calls): State<Calls>, Path(id): Path<String>, headers: HeaderMap, body: String| async move {
            let token = headers["authorization"].to_str().unwrap().to_owned();
            calls.lock().unwrap().push((id, token.clone(), serde_json::from_str(&body).unwrap()));
            (status, [("location", "/v4/builds/8")], format!("no {token}"))
        };
        let router = Router::new().route("/sd/v4/builds/{id}", put(answer)).with_state(Arc::clone(&calls));
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = format!("http://{}/sd", listener.local_addr().unwrap());
        serving.spawn(async move { axum::serve(listener, router).await.unwrap() });
        (address, calls)
    }

    async fn put_at(address: &str, base: Option<&str>) -> PutResult {
        let api = BuildApi::new(base.map(|base| base.parse().unwrap())).unwrap();
        api.put(&build(address), &Update::Failure("why".to_owned())).await
    }

    #[tokio::test]
    async fn an_update_is_accepted_or_refused_or_tried_later_by_its_status() {
        for status in [200, 204, 302, 400, 401, 403, 404, 408, 409, 429, 500, 503] {
            let mut serving = JoinSet::new();
            let (address, calls) = api(status, &mut serving).await;
            let result = put_at(&address, None).await;
            let text = match (&result, status) {
                (PutResult::Accepted, 200 | 204) => "",
                (PutResult::Refused(text), 400 | 401 | 403 | 404 | 409) => text,
                (PutResult::Later(text), 302 | 408 | 429 | 500 | 503) => text,
                _ => panic!("{status}: {result:?}"),
            };
            assert!(text.is_empty() || text.contains(&format!("build 7 at {address}/v4/builds/7: {status}")), "{text}");
            assert!(!text.contains(TOKEN), "{text}");
            let call =
                ("7".to_owned(), format!("Bearer {TOKEN}"), json!({ "status": "FAILURE", "statusMessage": "why" }));
            assert_eq!(*calls.lock().unwrap(), [call], "once, and nowhere else");
        }
    }

    #[tokio::test]
    async fn an_address_of_the_configuration_replaces_that_of_the_message() {
        let mut serving = JoinSet::new();
        let (address, calls) = api(200, &mut serving).await;
        assert_eq!(put_at("http://127.0.0.1:1", Some(&address)).await, PutResult::Accepted);
        assert_eq!(calls.lock().unwrap().len(), 1);
    }

    #[tokio::test]
    async fn s7_without_an_answer_an_update_is_sent_again_later() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = format!("http://{}", listener.local_addr().unwrap());
        let mut serving = JoinSet::new();
        serving.spawn(async move {
            let (mut lost, _) = listener.accept().await.unwrap();
            // The request has arrived, and its answer is lost.
            assert!(lost.read(&mut [0; 1024]).await.unwrap() > 0);
            drop(lost);
            let _silent = listener.accept().await.unwrap();
            std::future::pending::<()>().await;
        });
        let lost = put_at(&address, None).await;
        let api = BuildApi { http: client_builder().timeout(Duration::from_millis(200)).build().unwrap(), base: None };
        let silent = api.put(&build(&address), &Update::WaitingForResources).await;
        let closed = put_at("http://127.0.0.1:1", None).await;
        for result in [lost, silent, closed] {
            let PutResult::Later(text) = &result else { panic!("{result:?}") };
            assert!(text.contains("cannot update build 7") && !text.contains(TOKEN), "{text}");
        }
    }

    #[test]
    fn updates_have_the_form_that_the_existing_worker_sends() {
        let at = "2026-11-21T09:46:22.722Z".parse().unwrap();
        let node = |assigned_at| Update::Node { name: "node-a".to_owned(), assigned_at };
        for (update, body) in [
            (
                node(Some(at)),
                json!({ "stats": { "hostname": "node-a", "imagePullStartTime": "2026-11-21T09:46:22.722Z" } }),
            ),
            (node(None), json!({ "stats": { "hostname": "node-a" } })),
            (Update::WaitingForResources, json!({ "statusMessage": "Waiting for resources to be available." })),
        ] {
            assert_eq!(update.body(), body);
        }
    }

    #[test]
    fn a_pod_tells_its_node_and_since_when_by_the_servers_clock() {
        let told = |spec: Value, status: Value| {
            let pod =
                json!({ "metadata": { "creationTimestamp": "2026-01-01T00:00:00Z" }, "spec": spec, "status": status });
            Update::of_pod(&serde_json::from_value(pod).unwrap())
        };
        let node = |at: &str| Update::Node { name: "node-a".to_owned(), assigned_at: Some(at.parse().unwrap()) };
        let spec = json!({ "containers": [], "nodeName": "node-a" });
        assert_eq!(told(json!({ "containers": [] }), json!({})), Update::WaitingForResources);
        assert_eq!(told(spec.clone(), json!({})), node("2026-01-01T00:00:00Z"));
        let started = json!({ "startTime": "2026-01-01T00:00:02Z" });
        assert_eq!(told(spec.clone(), started), node("2026-01-01T00:00:02Z"));
        let scheduled =
            json!({ "type": "PodScheduled", "status": "True", "lastTransitionTime": "2026-01-01T00:00:01Z" });
        let status = json!({ "startTime": "2026-01-01T00:00:02Z", "conditions": [scheduled] });
        assert_eq!(told(spec, status), node("2026-01-01T00:00:01Z"));
    }
}
