//! Client of the API server of a kubeconfig, or of the cluster that this pod runs in.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use hyper::{HeaderMap, StatusCode};
use jiff::Timestamp;
use parking_lot::Mutex;
use reqwest::{Method, Response};
use serde::Deserialize;
use serde::de::{DeserializeOwned, IgnoredAny};
use serde_json::Value;
use tokio::time::{Duration, Instant, timeout};

use super::connection::{Call, Connection};
use super::object::{Kind, List, PODS, PartialObject};
use crate::host::clock::stamp;
use crate::http::client::{self, BodyError, read_body, root_cause};
use journeyman_domain::limits::{
    ERROR_BODY_BYTES_MAX, KUBERNETES_ANSWER_BYTES_MAX, KUBERNETES_CALL_TIMEOUT, KUBERNETES_RENEWAL_RETRY,
    KUBERNETES_RETRY_AFTER_MAX,
};

const JSON: &str = "application/json";
const METADATA: &str = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1";
const METADATA_LIST: &str = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1";
/// The API server reads YAML here, which JSON is.
const APPLY: &str = "application/apply-patch+yaml";
const FIELD_MANAGER: &str = "journeyman";

/// Named by what the caller does next.
#[derive(Debug, thiserror::Error)]
pub enum KubernetesError {
    /// There is no such object.
    #[error("{0}")]
    Gone(String),
    /// The object exists already or has changed: read it.
    #[error("{0}")]
    Conflict(String),
    /// An operator has to grant access, or quota.
    #[error("{0}")]
    Denied(String),
    /// The request is wrong: do not repeat it.
    #[error("{0}")]
    Rejected(String),
    /// The server does not accept the credentials, which are read again for the next call: repeat it.
    #[error("{0}")]
    Unauthorized(String),
    /// The call may have taken effect: read, then repeat it.
    #[error("{0}")]
    Retry(String),
}

pub struct KubernetesClient {
    kubeconfig: Option<PathBuf>,
    namespace: String,
    /// Made anew after a failure, so that rotated credentials and certificates are read.
    pub(super) connection: tokio::sync::Mutex<Option<Current>>,
    /// The time that `Retry-After` has set.
    not_before: Mutex<Option<Instant>>,
    /// The server's clock at its last answer.
    server_time: Mutex<Option<(Timestamp, Instant)>>,
}

pub(super) struct Current {
    connection: Arc<Connection>,
    /// The time at which its credentials are read again.
    pub(super) renew_at: Option<Instant>,
}

/// What a call is about, for its error.
#[derive(Clone, Copy)]
struct Subject<'a> {
    verb: &'a str,
    noun: &'a str,
    name: &'a str,
}

/// An answer that is no success.
#[derive(Default, Deserialize)]
#[serde(default)]
struct Status {
    message: String,
}

impl KubernetesClient {
    pub fn new(kubeconfig: Option<PathBuf>, namespace: String) -> Self {
        Self {
            kubeconfig,
            namespace,
            connection: tokio::sync::Mutex::default(),
            not_before: Mutex::default(),
            server_time: Mutex::default(),
        }
    }

    /// The time by the server's clock; by this host's before its first answer.
    pub fn now(&self) -> Timestamp {
        let since = |(time, at): (Timestamp, Instant)| time.checked_add(at.elapsed()).ok();
        self.server_time.lock().and_then(since).unwrap_or_else(Timestamp::now)
    }

    pub async fn get<T: DeserializeOwned>(&self, kind: &Kind, name: &str) -> Result<T, KubernetesError> {
        self.read(Subject::of("read", kind, name), &self.call(Method::GET, kind, name)).await
    }

    pub async fn get_metadata(&self, kind: &Kind, name: &str) -> Result<PartialObject, KubernetesError> {
        let call = Call { accept: METADATA, ..self.call(Method::GET, kind, name) };
        self.read(Subject::of("read", kind, name), &call).await
    }

    /// `of` and `name` say in an error what was to be listed.
    pub async fn list<T: DeserializeOwned>(
        &self,
        kind: &Kind,
        (of, name): (&str, &str),
        query: &[(&str, &str)],
    ) -> Result<List<T>, KubernetesError> {
        let call = Call { query, ..self.call(Method::GET, kind, "") };
        self.read(Subject { verb: "list", noun: of, name }, &call).await
    }

    pub async fn list_metadata(
        &self,
        kind: &Kind,
        (of, name): (&str, &str),
        query: &[(&str, &str)],
    ) -> Result<List<PartialObject>, KubernetesError> {
        let call = Call { query, accept: METADATA_LIST, ..self.call(Method::GET, kind, "") };
        self.read(Subject { verb: "list", noun: of, name }, &call).await
    }

    pub async fn create<T: DeserializeOwned>(&self, kind: &Kind, object: &Value) -> Result<T, KubernetesError> {
        let name = object["metadata"]["name"].as_str().unwrap_or_default();
        let call = Call { body: Some(object), ..self.call(Method::POST, kind, "") };
        self.read(Subject::of("create", kind, name), &call).await
    }

    /// Creates an object, unless there is one of its name.
    pub async fn create_if_missing(&self, kind: &Kind, object: &Value) -> Result<(), KubernetesError> {
        match self.create::<IgnoredAny>(kind, object).await {
            Ok(_) | Err(KubernetesError::Conflict(_)) => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// Fails with a conflict if the object has another version than this one.
    pub async fn replace(&self, kind: &Kind, name: &str, object: &Value) -> Result<(), KubernetesError> {
        let call = Call { body: Some(object), ..self.call(Method::PUT, kind, name) };
        self.answer(Subject::of("change", kind, name), &call).await.map(drop)
    }

    /// Creates an object, or gives an existing one these fields.
    pub async fn apply(&self, kind: &Kind, name: &str, object: &Value) -> Result<(), KubernetesError> {
        let query = &[("fieldManager", FIELD_MANAGER), ("force", "true")];
        let call = Call { query, content_type: APPLY, body: Some(object), ..self.call(Method::PATCH, kind, name) };
        self.answer(Subject::of("apply", kind, name), &call).await.map(drop)
    }

    /// Returns whether it was there. `options` are the fields of a `DeleteOptions`.
    pub async fn delete(&self, kind: &Kind, name: &str, options: &Value) -> Result<bool, KubernetesError> {
        let call = Call { body: Some(options), ..self.call(Method::DELETE, kind, name) };
        existing(self.answer(Subject::of("delete", kind, name), &call).await).map(|deleted| deleted.is_some())
    }

    pub async fn delete_all(&self, kind: &Kind, (of, name): (&str, &str), labels: &str) -> Result<(), KubernetesError> {
        let query = &[("labelSelector", labels)];
        let call = Call { query, ..self.call(Method::DELETE, kind, "") };
        self.answer(Subject { verb: "delete", noun: of, name }, &call).await.map(drop)
    }

    /// The log of a pod, while it is written or up to its end. Reading it takes any time.
    pub async fn log(&self, pod: &str, query: &[(&str, &str)]) -> Result<Response, KubernetesError> {
        let subject = Subject { verb: "read the log of", noun: PODS.noun, name: pod };
        let call = Call { query, accept: "*/*", ..self.call(Method::GET, &PODS, &format!("{pod}/log")) };
        self.open(subject, &call).await
    }

    /// The same, as far as it is written, within the time of a call.
    pub async fn log_tail(&self, pod: &str, query: &[(&str, &str)]) -> Result<String, KubernetesError> {
        let subject = Subject { verb: "read the log of", noun: PODS.noun, name: pod };
        let call = Call { query, accept: "*/*", ..self.call(Method::GET, &PODS, &format!("{pod}/log")) };
        self.answer(subject, &call).await.map(|log| String::from_utf8_lossy(&log).into_owned())
    }

    /// The changes of metadata from a version on, one a line. Reading them takes any time.
    pub(super) async fn watch_metadata(
        &self,
        kind: &Kind,
        (of, name): (&str, &str),
        query: &[(&str, &str)],
    ) -> Result<Response, KubernetesError> {
        let call = Call { query, accept: METADATA, ..self.call(Method::GET, kind, "") };
        self.open(Subject { verb: "watch", noun: of, name }, &call).await
    }

    /// A call without a query and a body.
    fn call(&self, method: Method, kind: &Kind, name: &str) -> Call<'static> {
        let Kind { api, plural, .. } = kind;
        let slash = if name.is_empty() { "" } else { "/" };
        let path = format!("/{api}/namespaces/{}/{plural}{slash}{name}", self.namespace);
        Call { method, path, query: &[], accept: JSON, content_type: JSON, body: None }
    }

    async fn read<T: DeserializeOwned>(&self, subject: Subject<'_>, call: &Call<'_>) -> Result<T, KubernetesError> {
        let body = self.answer(subject, call).await?;
        serde_json::from_slice(&body).map_err(|error| subject.retry(&format!("the answer is not valid: {error}")))
    }

    async fn answer(&self, subject: Subject<'_>, call: &Call<'_>) -> Result<Vec<u8>, KubernetesError> {
        // A credential plugin has a time limit of its own.
        self.connection().await?;
        let answering = async {
            let mut response = self.open(subject, call).await?;
            let body = read_body(&mut response, KUBERNETES_ANSWER_BYTES_MAX).await;
            body.map_err(|error| match error {
                BodyError::TooLong => {
                    subject.retry(&format!("the answer has more than {KUBERNETES_ANSWER_BYTES_MAX} bytes"))
                }
                BodyError::Connection(error) => subject.retry(&root_cause(&error)),
            })
        };
        match timeout(KUBERNETES_CALL_TIMEOUT, answering).await {
            Ok(Ok(body)) => Ok(body),
            Ok(Err(error)) => Err(error),
            Err(_) => {
                *self.connection.lock().await = None;
                Err(subject.retry(&format!("the Kubernetes API did not reply in {KUBERNETES_CALL_TIMEOUT:?}")))
            }
        }
    }

    /// Sends a call; once more if credentials are refused that were good before, as they may have been rotated.
    async fn open(&self, subject: Subject<'_>, call: &Call<'_>) -> Result<Response, KubernetesError> {
        let mut is_repeated = false;
        loop {
            let connection = self.connection().await?;
            let request = connection.request(call).map_err(KubernetesError::Rejected)?;
            let sent = request.send().await;
            let mut response = match sent {
                Ok(response) => response,
                Err(error) => {
                    self.forget(&connection).await;
                    return Err(subject.retry(&root_cause(&error)));
                }
            };
            let (status, headers) = (response.status(), response.headers());
            if let Some(wait) = retry_after(status, headers) {
                *self.not_before.lock() = Some(Instant::now() + wait);
            }
            if let Some(time) = date(headers) {
                *self.server_time.lock() = Some((time, Instant::now()));
            }
            if status.is_success() {
                connection.was_accepted.store(true, Ordering::Relaxed);
                return Ok(response);
            }
            let body = read_body(&mut response, ERROR_BODY_BYTES_MAX).await.unwrap_or_default();
            if status == StatusCode::UNAUTHORIZED {
                self.forget(&connection).await;
                if connection.was_accepted.load(Ordering::Relaxed) && !std::mem::replace(&mut is_repeated, true) {
                    continue;
                }
                tracing::warn!("the Kubernetes API rejects the credentials, which are read again for the next call");
            }
            let message = serde_json::from_slice(&body).map(|Status { message }| message).unwrap_or_default();
            return Err(classify(subject, status, &message));
        }
    }

    async fn connection(&self) -> Result<Arc<Connection>, KubernetesError> {
        let wait = self.not_before.lock().map(|at| at.duration_since(Instant::now()));
        if let Some(wait) = wait.filter(|wait| !wait.is_zero()) {
            let text = format!("the Kubernetes API is overloaded and asked to wait; {wait:.1?} are left");
            return Err(KubernetesError::Retry(text));
        }
        let mut current = self.connection.lock().await;
        let is_valid = |one: &&Current| one.renew_at.is_none_or(|at| Instant::now() < at);
        if let Some(Current { connection, .. }) = current.as_ref().filter(is_valid) {
            return Ok(Arc::clone(connection));
        }
        match (Connection::open(self.kubeconfig.as_deref()).await, &mut *current) {
            (Ok(new), current) => {
                let (renew_at, connection) = (new.valid_until, Arc::new(new));
                *current = Some(Current { connection: Arc::clone(&connection), renew_at });
                Ok(connection)
            }
            // The server says whether they are valid.
            (Err(error), Some(old)) => {
                tracing::warn!("cannot renew the credentials for the Kubernetes API, using the last ones: {error}");
                old.renew_at = Some(Instant::now() + KUBERNETES_RENEWAL_RETRY);
                Ok(Arc::clone(&old.connection))
            }
            (Err(error), None) => {
                Err(KubernetesError::Denied(format!("cannot configure the Kubernetes client: {error}")))
            }
        }
    }

    async fn forget(&self, connection: &Arc<Connection>) {
        let mut current = self.connection.lock().await;
        if current.as_ref().is_some_and(|current| Arc::ptr_eq(&current.connection, connection)) {
            *current = None;
        }
    }
}

impl KubernetesClient {
    /// Any call, for a test that plays a part of the cluster.
    pub async fn request(
        &self,
        method: Method,
        path: &str,
        content_type: &'static str,
        body: &Value,
    ) -> Result<Value, KubernetesError> {
        let body = Some(body).filter(|body| !body.is_null());
        let call = Call { method, path: path.to_owned(), query: &[], accept: JSON, content_type, body };
        self.read(Subject { verb: "call", noun: "path", name: path }, &call).await
    }
}

impl<'a> Subject<'a> {
    const fn of(verb: &'a str, kind: &Kind, name: &'a str) -> Self {
        Self { verb, noun: kind.noun, name }
    }

    fn failed(self, why: &str) -> String {
        let Self { verb, noun, name } = self;
        format!("cannot {verb} {noun} {name}: {why}")
    }

    fn retry(self, why: &str) -> KubernetesError {
        KubernetesError::Retry(self.failed(why))
    }
}

fn date(headers: &HeaderMap) -> Option<Timestamp> {
    Some(jiff::fmt::rfc2822::parse(headers.get("date")?.to_str().ok()?).ok()?.timestamp())
}

fn retry_after(status: StatusCode, headers: &HeaderMap) -> Option<Duration> {
    let is_overloaded = matches!(status, StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE);
    let asked = client::retry_after(headers, stamp()).filter(|_| is_overloaded)?;
    Some(asked.min(KUBERNETES_RETRY_AFTER_MAX))
}

fn classify(subject: Subject<'_>, status: StatusCode, message: &str) -> KubernetesError {
    let message = if message.is_empty() { status.canonical_reason().unwrap_or_default() } else { message };
    let text = subject.failed(&format!("{} {message}", status.as_u16()));
    match status.as_u16() {
        404 => KubernetesError::Gone(text),
        409 => KubernetesError::Conflict(text),
        403 if is_about_object(message) => KubernetesError::Rejected(text),
        403 => KubernetesError::Denied(text),
        // Credentials are renewed, or mended: nothing follows for the object.
        401 => KubernetesError::Unauthorized(text),
        429 | 500.. => KubernetesError::Retry(text),
        _ => KubernetesError::Rejected(text),
    }
}

/// Whether an admission check refuses this object, and not this worker, its namespace or its quota.
fn is_about_object(message: &str) -> bool {
    const OF_OTHERS: [&str; 4] = [
        " is forbidden: User \"",
        " is forbidden: exceeded quota",
        "because it is being terminated",
        "error looking up service account",
    ];
    let is_by_check = message.contains(" is forbidden: ") || message.contains("denied the request");
    is_by_check && !OF_OTHERS.iter().any(|words| message.contains(words))
}

/// `None` for an object that does not exist.
pub fn existing<T>(answer: Result<T, KubernetesError>) -> Result<Option<T>, KubernetesError> {
    match answer {
        Ok(object) => Ok(Some(object)),
        Err(KubernetesError::Gone(_)) => Ok(None),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn classified(code: u16) -> KubernetesError {
        classify(Subject::of("read", &PODS, "a"), StatusCode::from_u16(code).unwrap(), "why")
    }

    #[test]
    fn b4_a_wait_may_be_a_date() {
        let wait = |status, text: &str| {
            retry_after(status, &HeaderMap::from_iter([(hyper::header::RETRY_AFTER, text.parse().unwrap())]))
        };
        for text in ["3600", "Fri, 27 Nov 2099 00:02:00 GMT"] {
            assert_eq!(wait(StatusCode::TOO_MANY_REQUESTS, text), Some(KUBERNETES_RETRY_AFTER_MAX), "{text}");
            assert_eq!(wait(StatusCode::CONFLICT, text), None, "{text}");
        }
    }

    #[test]
    fn an_error_is_named_by_what_the_caller_does_next() {
        assert!(matches!(classified(404), KubernetesError::Gone(_)));
        assert!(matches!(classified(409), KubernetesError::Conflict(_)));
        assert!(matches!(classified(403), KubernetesError::Denied(_)));
        assert!(matches!(classified(422), KubernetesError::Rejected(_)));
        assert!(matches!(classified(401), KubernetesError::Unauthorized(_)));
        for code in [429, 500, 503, 504] {
            assert!(matches!(classified(code), KubernetesError::Retry(_)), "{code}");
        }
        assert_eq!(classified(422).to_string(), "cannot read pod a: 422 why");
    }

    #[test]
    fn e2_a_403_about_the_pod_is_told_from_one_about_the_worker() {
        let of = |message: &str| classify(Subject::of("create", &PODS, "a"), StatusCode::FORBIDDEN, message);
        for message in [
            "pods \"a\" is forbidden: violates PodSecurity \"restricted:latest\": privileged",
            "pods \"a\" is forbidden: maximum memory usage per Container is 1Gi, but limit is 2Gi",
            "admission webhook \"images.example.com\" denied the request: no such registry",
        ] {
            assert!(matches!(of(message), KubernetesError::Rejected(_)), "{message}");
        }
        for message in [
            "pods is forbidden: User \"w\" cannot create resource \"pods\" in API group \"\" in the namespace \"n\"",
            "pods \"a\" is forbidden: unable to create new content in namespace n because it is being terminated",
            "pods \"a\" is forbidden: error looking up service account n/builder: serviceaccount \"builder\" not found",
            "pods \"a\" is forbidden: exceeded quota: pods, requested: 1, used: 9",
            "",
        ] {
            assert!(matches!(of(message), KubernetesError::Denied(_)), "{message}");
        }
    }
}
