//! The signed HTTP client of a Taskcluster deployment.
//!
//! It follows no redirect, retries nothing, requests no compression and ignores proxy variables of the environment.
//! Each body is read up to a limit. Callers decide what a response means.

use std::fmt::Write as _;
use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use parking_lot::Mutex;
use reqwest::header::{AUTHORIZATION, CONTENT_TYPE, DATE};
use reqwest::{Client, Method, RequestBuilder, Response};
use serde::de::DeserializeOwned;
use serde_json::Value;
use url::{Position, Url};

use super::address_policy::AddressPolicy;
use super::credentials::{Credentials, Swap};
use super::error_response::{ErrorResponse, classify_service_error, transport_error};
use crate::source::CallError;
use journeyman_domain::limits::{
    ARTIFACT_TRANSFER_TIMEOUT_MAX, CALL_TIMEOUT, CONNECT_TIMEOUT, ERROR_BODY_BYTES_MAX, JSON_BODY_BYTES_MAX,
    LONG_POLL_TIMEOUT, POOL_IDLE_TIMEOUT,
};
use journeyman_domain::refusal::Refusal;
use journeyman_platform::host::clock::stamp;
use journeyman_platform::http::client::{self, BodyError, client_builder};
use journeyman_platform::http::resolver::{FilteringResolver, Judge, system_lookup};

/// Minimum clock difference to blame a rejected signature on.
const CLOCK_SKEW_TOLERATED_S: u64 = 60;

/// Reads the client's credentials again; `None` if they are those that it read last.
pub type RereadCredentials = Arc<dyn Fn() -> Option<Credentials> + Send + Sync>;

/// Address and credentials of a deployment.
#[derive(Clone)]
pub struct ApiConfig {
    /// The deployment, such as `https://taskcluster.example.com`.
    pub root_url: String,
    /// `None` leaves requests unsigned.
    pub credentials: Option<Credentials>,
    /// Called when the service answers 401: credentials in files may have been renewed.
    pub reread_credentials: Option<RereadCredentials>,
    /// Hosts that signed URLs and redirects may have although their addresses are private, besides that of the root
    /// URL. A leading dot matches every subdomain, `*` every host.
    pub allow_hosts: Vec<String>,
    /// Time limits.
    pub timeouts: Timeouts,
}

impl ApiConfig {
    /// Allows no private hosts but that of the root URL, with the usual time limits.
    pub fn new(root_url: &str, credentials: Option<Credentials>) -> Self {
        let root_url = root_url.to_owned();
        let timeouts = Timeouts::default();
        Self { root_url, credentials, reread_credentials: None, allow_hosts: Vec::new(), timeouts }
    }
}

/// Time limits of one request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Timeouts {
    /// Establishing a connection.
    pub connect: Duration,
    /// An ordinary call, up to the last byte of its response.
    pub call: Duration,
    /// A long poll.
    pub long_poll: Duration,
}

impl Default for Timeouts {
    fn default() -> Self {
        Self { connect: CONNECT_TIMEOUT, call: CALL_TIMEOUT, long_poll: LONG_POLL_TIMEOUT }
    }
}

/// An invalid setting.
#[derive(Debug, thiserror::Error)]
#[error("{setting}: {what}")]
pub struct InvalidConfig {
    /// The key in the configuration.
    pub setting: &'static str,
    /// What is wrong and what is expected.
    pub what: String,
}

impl InvalidConfig {
    pub(super) fn new(setting: &'static str, what: impl Into<String>) -> Self {
        Self { setting, what: what.into() }
    }
}

/// A client for one Taskcluster deployment. Cheap to clone; clones share connections and credentials.
#[derive(Clone)]
pub struct Api(pub(super) Arc<ClientState>);

pub(super) struct ClientState {
    pub(super) http: Client,
    /// Without a trailing slash.
    root_url: String,
    pub(super) queue_url: String,
    pub(super) address_policy: Arc<AddressPolicy>,
    credentials: Swap<Option<Credentials>>,
    reread_credentials: Option<RereadCredentials>,
    pub(super) timeouts: Timeouts,
    /// Local time minus service time at the latest response with a `Date`.
    clock_ahead_s: Mutex<Option<i64>>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum TimeoutClass {
    Call,
    LongPoll,
    /// The head within the time of a call; the body may take as long as a transfer.
    Transfer,
}

pub(super) struct ApiRequest<'a> {
    /// The words of logs: `claimTask T/0`.
    pub(super) operation: String,
    /// `queue`, `object`, `auth` or `worker-manager`.
    pub(super) service: &'static str,
    pub(super) method: Method,
    /// Path below the service's base URL, with a leading slash and encoded segments.
    pub(super) path: String,
    pub(super) body: Option<Value>,
    /// Credentials of a claim or an upload, in place of the client's.
    pub(super) credentials: Option<&'a Credentials>,
    pub(super) timeout_class: TimeoutClass,
}

impl<'a> ApiRequest<'a> {
    pub(super) fn to_queue(operation: String, method: Method, path: String) -> Self {
        Self {
            operation,
            service: "queue",
            method,
            path,
            body: None,
            credentials: None,
            timeout_class: TimeoutClass::Call,
        }
    }

    pub(super) fn body(mut self, body: Value) -> Self {
        self.body = Some(body);
        self
    }

    pub(super) const fn signed_by(mut self, credentials: &'a Credentials) -> Self {
        self.credentials = Some(credentials);
        self
    }
}

pub(super) struct ApiResponse {
    operation: String,
    pub(super) date: Option<Timestamp>,
    body: Vec<u8>,
}

pub(super) struct FailedCall {
    /// `None` without a complete response.
    pub(super) status: Option<u16>,
    pub(super) error: CallError,
}

impl From<CallError> for FailedCall {
    fn from(error: CallError) -> Self {
        Self { status: None, error }
    }
}

impl From<FailedCall> for CallError {
    fn from(failed: FailedCall) -> Self {
        failed.error
    }
}

impl ApiResponse {
    pub(super) fn json<T: DeserializeOwned>(&self) -> Result<T, CallError> {
        serde_json::from_slice(&self.body).map_err(|error| {
            let operation = &self.operation;
            // An error of serde_json may quote the unexpected value; only the position is permitted.
            CallError::retry(format!(
                "{operation}: unexpected JSON in the response (line {}, column {})",
                error.line(),
                error.column()
            ))
        })
    }

    /// The service's clock, or the local one if the response has no `Date`.
    pub(super) fn date_or_now(&self) -> Timestamp {
        self.date.unwrap_or_else(Timestamp::now)
    }
}

impl Api {
    /// Creates a client; sends nothing.
    ///
    /// # Errors
    ///
    /// An invalid URL, or no usable TLS configuration on this host.
    pub fn new(config: ApiConfig) -> Result<Self, InvalidConfig> {
        let root = parse_root_url(&config.root_url)?;
        let root_url = root.as_str().trim_end_matches('/').to_owned();
        let address_policy = Arc::new(AddressPolicy::new(&root, &config.allow_hosts));
        let http = build_http_client(&config, &address_policy)?;
        Ok(Self(Arc::new(ClientState {
            http,
            queue_url: format!("{root_url}/api/queue/v1"),
            root_url,
            address_policy,
            credentials: Swap::new(config.credentials),
            reread_credentials: config.reread_credentials,
            timeouts: config.timeouts,
            clock_ahead_s: Mutex::default(),
        })))
    }

    /// The root URL without a trailing slash.
    pub fn root_url(&self) -> &str {
        &self.0.root_url
    }

    /// Replaces the worker's or user's credentials for all later calls.
    pub fn replace_credentials(&self, credentials: Credentials) {
        self.0.credentials.store(Some(credentials));
    }

    /// Uses renewed credentials if the files hold some.
    pub fn reread_credentials(&self) -> bool {
        let renewed = self.0.reread_credentials.as_ref().and_then(|reread| reread());
        let is_renewed = renewed.is_some();
        if let Some(credentials) = renewed {
            tracing::info!(
                client_id = credentials.client_id(),
                "the credentials in the files have changed; using them"
            );
            self.replace_credentials(credentials);
        }
        is_renewed
    }

    /// Local time minus service time at the latest response with a `Date`.
    pub(super) fn clock_ahead(&self) -> Option<i64> {
        *self.0.clock_ahead_s.lock()
    }

    pub(super) async fn call(&self, call: ApiRequest<'_>) -> Result<ApiResponse, FailedCall> {
        let operation = call.operation.clone();
        let response = self.send(call).await?;
        let date = date_header(&response);
        let body = read_body(&operation, response, JSON_BODY_BYTES_MAX).await?;
        Ok(ApiResponse { operation, date, body })
    }

    /// Returns the head of a 2xx response, or of a 303 response to a transfer; any other response is an error.
    pub(super) async fn send(&self, call: ApiRequest<'_>) -> Result<Response, FailedCall> {
        let result = self.send_once(&call).await;
        let was_denied = result.as_ref().is_err_and(|failed| failed.status == Some(401));
        if was_denied && call.credentials.is_none() && self.reread_credentials() {
            return self.send_once(&call).await;
        }
        result
    }

    async fn send_once(&self, call: &ApiRequest<'_>) -> Result<Response, FailedCall> {
        let ApiRequest { operation, body, .. } = call;
        let text = format!("{}/api/{}/v1{}", self.0.root_url, call.service, call.path);
        let invalid = |_| CallError::new(Refusal::Rejected, format!("{operation}: the URL is invalid"));
        let url = Url::parse(&text).map_err(invalid)?;
        let timeout = match call.timeout_class {
            TimeoutClass::Call => self.0.timeouts.call,
            TimeoutClass::LongPoll => self.0.timeouts.long_poll,
            TimeoutClass::Transfer => ARTIFACT_TRANSFER_TIMEOUT_MAX,
        };
        let own = self.0.credentials.load();
        let signer = call.credentials.or_else(|| own.as_ref().as_ref());
        let authorization =
            signer.and_then(|credentials| credentials.sign(call.method.as_str(), &url, Timestamp::now().into()));
        let mut request = self.0.http.request(call.method.clone(), url).timeout(timeout);
        if let Some(value) = authorization {
            request = request.header(AUTHORIZATION, value);
        }
        if let Some(body) = body {
            request = request.json(body);
        }
        let response = match call.timeout_class {
            TimeoutClass::Call | TimeoutClass::LongPoll => {
                request.send().await.map_err(|error| transport_error(operation, error))?
            }
            TimeoutClass::Transfer => self.send_for_head(operation, request).await?,
        };
        if let Some(date) = date_header(&response) {
            *self.0.clock_ahead_s.lock() = Some(Timestamp::now().duration_since(date).as_secs());
        }
        let is_redirect = call.timeout_class == TimeoutClass::Transfer && response.status().as_u16() == 303;
        if response.status().is_success() || is_redirect {
            return Ok(response);
        }
        Err(self.failed_call(operation, response).await)
    }

    /// Limits the time to the response head to that of a call; the body may take longer.
    pub(super) async fn send_for_head(&self, operation: &str, request: RequestBuilder) -> Result<Response, CallError> {
        match tokio::time::timeout(self.0.timeouts.call, request.send()).await {
            Ok(sent) => sent.map_err(|error| transport_error(operation, error)),
            Err(_) => Err(CallError::retry(format!("{operation}: timed out"))),
        }
    }

    async fn failed_call(&self, operation: &str, response: Response) -> FailedCall {
        let answered = read_error_response(response).await;
        let mut error = classify_service_error(operation, &answered);
        let ahead_s = self.clock_ahead().unwrap_or_default();
        if answered.status == 401 && ahead_s.unsigned_abs() > CLOCK_SKEW_TOLERATED_S {
            write!(error.message, "; this host's clock is off by {} s: synchronize it", ahead_s.unsigned_abs()).ok();
        }
        if answered.status == 401 && error.message.contains("Bad mac") {
            error.message.push_str("; the access token is not the one of this client");
        }
        FailedCall { status: Some(answered.status), error }
    }
}

pub(super) async fn read_error_response(response: Response) -> ErrorResponse {
    let header = |name| {
        let value: Option<&reqwest::header::HeaderValue> = response.headers().get(name);
        value.and_then(|value| value.to_str().ok()).map(str::to_owned)
    };
    let status = response.status().as_u16();
    let retry_after = client::retry_after(response.headers(), stamp());
    let content_type = header(CONTENT_TYPE).unwrap_or_default();
    let body = read_body("", response, ERROR_BODY_BYTES_MAX).await.unwrap_or_default();
    ErrorResponse { status, retry_after, content_type, body }
}

/// Reads a body of at most `bytes_max`; fails as soon as it is longer.
pub(super) async fn read_body(operation: &str, mut response: Response, bytes_max: usize) -> Result<Vec<u8>, CallError> {
    client::read_body(&mut response, bytes_max).await.map_err(|error| match error {
        BodyError::Connection(error) => transport_error(operation, error),
        BodyError::TooLong => CallError::retry(format!("{operation}: response exceeds {bytes_max} bytes")),
    })
}

pub(super) fn date_header(response: &Response) -> Option<Timestamp> {
    let text = response.headers().get(DATE)?.to_str().ok()?;
    jiff::fmt::rfc2822::parse(text).ok().map(|zoned| zoned.timestamp())
}

fn parse_root_url(text: &str) -> Result<Url, InvalidConfig> {
    let example = "expected a URL such as https://taskcluster.example.com";
    let url = Url::parse(text).map_err(|error| InvalidConfig::new("root_url", format!("{error}; {example}")))?;
    let plain = matches!(url.scheme(), "http" | "https")
        && url.has_host()
        && url.username().is_empty()
        && url.password().is_none()
        && url[Position::AfterPath..].is_empty();
    if plain {
        Ok(url)
    } else {
        let what = format!("not a plain http or https URL; {example}");
        Err(InvalidConfig::new("root_url", what))
    }
}

fn build_http_client(config: &ApiConfig, address_policy: &Arc<AddressPolicy>) -> Result<Client, InvalidConfig> {
    let policy = Arc::clone(address_policy);
    let judge: Judge =
        Arc::new(move |host, address| policy.check_address(host, address).map_err(|why| why.to_string()));
    let builder = client_builder()
        .connect_timeout(config.timeouts.connect)
        .pool_idle_timeout(POOL_IDLE_TIMEOUT)
        .dns_resolver(FilteringResolver { judge, lookup: system_lookup(), timeout: config.timeouts.connect });
    builder.build().map_err(|error| {
        let cause = std::error::Error::source(&error).map(ToString::to_string);
        let cause = cause.unwrap_or_default();
        let what = format!("cannot set up TLS: {cause}; are CA certificates installed?");
        InvalidConfig::new("root_url", what)
    })
}
