//! The services of the deployment beside the queue, as a task and its worker call them.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use jiff::Timestamp;
use reqwest::Method;
use reqwest::header::HeaderValue;
use serde::Deserialize;
use serde_json::{Value, json};
use url::Url;

use super::claim_calls::TaskclusterClaim;
use super::credentials::Credentials;
use super::transport::ApiRequest;
use crate::source::SourceFuture;
use crate::task::{Deployment, PurgeRequest, RunCredentials};
use journeyman_domain::id::{Run, TaskId};
use journeyman_domain::refusal::CallError;

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct WireIndexed {
    task_id: String,
}

#[derive(Deserialize)]
struct WireScopes {
    scopes: Vec<String>,
}

#[derive(Deserialize)]
struct WirePurgeRequests {
    requests: Vec<WirePurgeRequest>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct WirePurgeRequest {
    cache_name: String,
    before: Timestamp,
}

impl TaskclusterClaim {
    fn task_credentials(&self) -> Credentials {
        self.credentials.load().restricted_to(Arc::clone(&self.task_scopes))
    }
}

impl Deployment for TaskclusterClaim {
    fn root_url(&self) -> &str {
        self.service.api.root_url()
    }

    fn worker(&self) -> (&str, &str) {
        let identity = &self.service.worker_identity;
        (&identity.group, &identity.id)
    }

    fn task_scopes(&self) -> &[String] {
        &self.task_scopes
    }

    fn sign(&self, method: &str, url: &Url) -> Option<HeaderValue> {
        self.task_credentials().sign(method, url, Timestamp::now().into())
    }

    fn sign_url(&self, url: &Url, lifetime: Duration) -> Option<Url> {
        self.task_credentials().sign_url(url, SystemTime::from(Timestamp::now()).checked_add(lifetime)?)
    }

    fn run_credentials(&self) -> RunCredentials {
        self.credentials.load().exposed()
    }

    fn find_indexed<'a>(&'a self, namespace: &'a str) -> SourceFuture<'a, TaskId> {
        Box::pin(async move {
            let operation = format!("findTask of {namespace:?}");
            let path = format!("/task/{}", urlencoding::encode(namespace));
            let call = ApiRequest { service: "index", ..ApiRequest::to_queue(operation.clone(), Method::GET, path) };
            let credentials = self.task_credentials();
            let found: WireIndexed = self.service.api.call(call.signed_by(&credentials)).await?.json()?;
            TaskId::parse(&found.task_id).ok_or_else(|| CallError::retry(format!("{operation}: invalid task id")))
        })
    }

    fn expand_scopes(&self) -> SourceFuture<'_, Vec<String>> {
        Box::pin(async move {
            let call = ApiRequest::to_queue("expandScopes".to_owned(), Method::POST, "/scopes/expand".to_owned());
            let call = ApiRequest { service: "auth", ..call }.body(json!({ "scopes": *self.task_scopes }));
            Ok(self.service.api.call(call).await?.json::<WireScopes>()?.scopes)
        })
    }

    fn purge_requests(&self) -> SourceFuture<'_, Vec<PurgeRequest>> {
        Box::pin(async move {
            let queue = &self.service.task_queue;
            let path = format!("/purge-cache/{}", urlencoding::encode(queue));
            let call = ApiRequest::to_queue(format!("purgeRequests of {queue}"), Method::GET, path);
            let call = ApiRequest { service: "purge-cache", ..call };
            let found: WirePurgeRequests = self.service.api.call(call).await?.json()?;
            let requests = found.requests.into_iter();
            Ok(requests
                .map(|WirePurgeRequest { cache_name, before }| PurgeRequest { cache_name, before: before.into() })
                .collect())
        })
    }
}

/// What requests of a task may use: its own scopes, and that for its artifacts, which no task can name.
pub(super) fn task_scopes(task: &Value, run: &Run) -> Arc<[String]> {
    let scopes = task.get("scopes").and_then(Value::as_array).into_iter().flatten();
    let own = format!("queue:create-artifact:{}/{}", run.task, run.run);
    scopes.filter_map(Value::as_str).map(str::to_owned).chain([own]).collect()
}
