//! The signed HTTP client of a Taskcluster deployment: addresses, time limits, one request at a time.
//!
//! It follows no redirect, repeats nothing, asks for no compression, and takes no proxy from the environment. Each
//! answer is read up to a bound. What an answer means is decided by the callers.

use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::{Duration, SystemTime};

use jiff::{SignedDuration, Timestamp};
use reqwest::header::{AUTHORIZATION, CONTENT_LENGTH, CONTENT_TYPE, DATE, RETRY_AFTER};
use reqwest::{Client, Method, RequestBuilder, Response};
use serde::de::DeserializeOwned;
use serde_json::Value;
use url::{Position, Url};

use super::address_policy::{AddressPolicy, ForbiddenUrl};
use super::credentials::{Credentials, Swap};
use super::error_response::{self, ErrorResponse, classify_service_error, retryable, transport_error};
use crate::limits::{
    ARTIFACT_TRANSFER_TIMEOUT_MAX, CALL_TIMEOUT, CONNECT_TIMEOUT, ERROR_BODY_BYTES_MAX, JSON_BODY_BYTES_MAX,
    LONG_POLL_TIMEOUT, POOL_IDLE_TIMEOUT,
};
use crate::source::CallError;

/// No answer has said what time it is.
const CLOCK_UNKNOWN: i64 = i64::MIN;
/// How far the service's clock must be from ours before a refused signature is blamed on it.
const CLOCK_SKEW_TOLERATED: SignedDuration = SignedDuration::from_secs(60);

/// Where a deployment is and who we are there.
#[derive(Clone)]
pub struct ApiConfig {
    /// The deployment, such as `https://taskcluster.example.com`.
    pub root_url: String,
    /// Where its queue service is, if not at `<root_url>/api/queue/v1`.
    pub queue_url: Option<String>,
    /// Who signs; `None` leaves requests unsigned.
    pub credentials: Option<Credentials>,
    /// A proxy for every request. The environment's proxy variables are not looked at.
    pub proxy: Option<String>,
    /// Hosts, besides those of the addresses above, that signed URLs and redirects may lead to although their addresses are
    /// private. A leading dot stands for every name below it, `*` for every host.
    pub allow_hosts: Vec<String>,
    /// Time limits.
    pub timeouts: Timeouts,
}

/// Time limits of one request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Timeouts {
    /// Making a connection.
    pub connect: Duration,
    /// An ordinary call, from sending it to the last byte of its answer.
    pub call: Duration,
    /// A call that the service may hold open.
    pub long_poll: Duration,
    /// How long an unused connection is kept.
    pub idle: Duration,
}

impl Default for Timeouts {
    fn default() -> Self {
        Self { connect: CONNECT_TIMEOUT, call: CALL_TIMEOUT, long_poll: LONG_POLL_TIMEOUT, idle: POOL_IDLE_TIMEOUT }
    }
}

/// Settings that no client can be made of.
#[derive(Debug, thiserror::Error)]
#[error("{setting}: {what}")]
pub struct InvalidConfig {
    /// The setting, as it is spelled in the configuration.
    pub setting: &'static str,
    /// What is wrong with it and what would be right.
    pub what: String,
}

impl InvalidConfig {
    pub(super) fn new(setting: &'static str, what: impl Into<String>) -> Self {
        Self { setting, what: what.into() }
    }
}

/// A client for one Taskcluster deployment. Cheap to clone; clones share connections and credentials.
#[derive(Clone)]
pub struct Api(Arc<ClientState>);

struct ClientState {
    http: Client,
    root: Url,
    queue: Url,
    object: Url,
    auth: Url,
    address_policy: Arc<AddressPolicy>,
    credentials: Swap<Option<Credentials>>,
    timeouts: Timeouts,
    /// The service's clock minus ours, in seconds, as learnt from a refused signature.
    signing_skew_s: AtomicI64,
    /// How far our clock was ahead at the last answer that said what time it is.
    clock_ahead_s: AtomicI64,
}

/// Which service a call is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ServiceName {
    Queue,
    Object,
    Auth,
}

/// Who signs a call.
#[derive(Clone, Copy)]
pub(super) enum Signer<'a> {
    /// The worker or user itself.
    Own,
    /// The credentials of a task or an upload.
    With(&'a Credentials),
}

/// How long a call may take.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum TimeoutClass {
    Call,
    LongPoll,
    /// The head of the answer comes as soon as that of a call; its body may take as long as a transfer.
    Transfer,
}

/// One call of a service.
pub(super) struct ApiRequest<'a> {
    /// What is done to what, for the log: `claimTask T/0`.
    pub(super) operation: String,
    pub(super) service: ServiceName,
    pub(super) method: Method,
    /// Everything after the service's base, with `/` in front, segments encoded.
    pub(super) path: String,
    pub(super) body: Option<Value>,
    pub(super) signer: Signer<'a>,
    pub(super) timeout_class: TimeoutClass,
}

impl<'a> ApiRequest<'a> {
    pub(super) fn to_queue(operation: String, method: Method, path: String) -> Self {
        Self {
            operation,
            service: ServiceName::Queue,
            method,
            path,
            body: None,
            signer: Signer::Own,
            timeout_class: TimeoutClass::Call,
        }
    }

    pub(super) fn body(mut self, body: Value) -> Self {
        self.body = Some(body);
        self
    }

    pub(super) const fn signed_by(mut self, credentials: &'a Credentials) -> Self {
        self.signer = Signer::With(credentials);
        self
    }
}

/// An answer with a 2xx status.
pub(super) struct ApiResponse {
    operation: String,
    pub(super) date: Option<Timestamp>,
    body: Vec<u8>,
}

/// A call without a 2xx answer.
pub(super) struct FailedCall {
    /// The answer's status; `None` where there was no complete answer.
    pub(super) status: Option<u16>,
    pub(super) error: CallError,
}

impl From<CallError> for FailedCall {
    fn from(refused: CallError) -> Self {
        Self { status: None, error: refused }
    }
}

impl From<FailedCall> for CallError {
    fn from(failed: FailedCall) -> Self {
        failed.error
    }
}

impl ApiResponse {
    /// The body as JSON of the shape `T`.
    pub(super) fn json<T: DeserializeOwned>(&self) -> Result<T, CallError> {
        serde_json::from_slice(&self.body).map_err(|error| {
            let operation = &self.operation;
            // The error of serde_json may quote the value it did not expect; only the place is kept.
            retryable(format!(
                "{operation}: the answer is not the JSON it should be (line {}, column {})",
                error.line(),
                error.column()
            ))
        })
    }

    /// The service's clock, or ours where it does not tell.
    pub(super) fn date_or_now(&self) -> Timestamp {
        self.date.unwrap_or_else(Timestamp::now)
    }
}

impl Api {
    /// Makes a client. Nothing is sent yet.
    ///
    /// # Errors
    ///
    /// Where an address cannot be used, or where no TLS client can be set up on this host.
    pub fn new(settings: ApiConfig) -> Result<Self, InvalidConfig> {
        let root = parse_base_url("root_url", &settings.root_url)?;
        let queue = match &settings.queue_url {
            Some(url) => parse_base_url("queue_url", url)?,
            None => service_url(&root, "queue"),
        };
        let object = service_url(&root, "object");
        let auth = service_url(&root, "auth");
        let reach = Arc::new(AddressPolicy::new(&root, &queue, &settings.allow_hosts));
        let http = build_http_client(&settings, &reach)?;
        Ok(Self(Arc::new(ClientState {
            http,
            root,
            queue,
            object,
            auth,
            address_policy: reach,
            credentials: Swap::new(settings.credentials),
            timeouts: settings.timeouts,
            signing_skew_s: AtomicI64::new(0),
            clock_ahead_s: AtomicI64::new(CLOCK_UNKNOWN),
        })))
    }

    /// The deployment's address, without the slash at its end.
    #[must_use]
    pub fn root_url(&self) -> &str {
        self.0.root.as_str().trim_end_matches('/')
    }

    /// Replaces the credentials that the worker or user signs with, for every later call.
    pub fn replace_credentials(&self, credentials: Credentials) {
        self.0.credentials.store(Some(credentials));
    }

    /// How far our clock is ahead of the service's, in seconds, as its last answer told.
    pub(super) fn clock_ahead(&self) -> Option<i64> {
        Some(self.0.clock_ahead_s.load(Ordering::Relaxed)).filter(|ahead| *ahead != CLOCK_UNKNOWN)
    }

    /// Where the service may send us.
    pub(super) fn address_policy(&self) -> &AddressPolicy {
        &self.0.address_policy
    }

    pub(super) fn queue_base_url(&self) -> &str {
        self.0.queue.as_str().trim_end_matches('/')
    }

    pub(super) fn timeouts(&self) -> &Timeouts {
        &self.0.timeouts
    }

    pub(super) fn http(&self) -> &Client {
        &self.0.http
    }

    /// Makes one call and reads its whole answer.
    pub(super) async fn call(&self, call: ApiRequest<'_>) -> Result<ApiResponse, FailedCall> {
        let operation = call.operation.clone();
        let response = self.send(call).await?;
        let date = date_header(&response);
        let body = read_body(&operation, response, JSON_BODY_BYTES_MAX).await?;
        Ok(ApiResponse { operation, date, body })
    }

    /// Makes one call and answers with the head of a 2xx answer, or of a 303 one to a transfer; everything else is a
    /// refusal.
    pub(super) async fn send(&self, call: ApiRequest<'_>) -> Result<Response, FailedCall> {
        let ApiRequest { operation, body, .. } = &call;
        let base = match call.service {
            ServiceName::Queue => &self.0.queue,
            ServiceName::Object => &self.0.object,
            ServiceName::Auth => &self.0.auth,
        };
        let text = format!("{}{}", base.as_str().trim_end_matches('/'), call.path);
        let url = Url::parse(&text).map_err(|_| {
            error_response::call_error(
                crate::domain::refusal::Refusal::Rejected,
                format!("{operation}: no address can be made for it"),
            )
        })?;
        let timeout = match call.timeout_class {
            TimeoutClass::Call => self.0.timeouts.call,
            TimeoutClass::LongPoll => self.0.timeouts.long_poll,
            TimeoutClass::Transfer => ARTIFACT_TRANSFER_TIMEOUT_MAX,
        };
        let skew_s = self.0.signing_skew_s.load(Ordering::Relaxed);
        let own = self.0.credentials.load();
        let signer = match call.signer {
            Signer::Own => own.as_ref().as_ref(),
            Signer::With(credentials) => Some(credentials),
        };
        let authorization = signer.and_then(|who| who.sign(call.method.as_str(), &url, service_time(skew_s)));
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
            self.0.clock_ahead_s.store(Timestamp::now().duration_since(date).as_secs(), Ordering::Relaxed);
        }
        let leads_on = call.timeout_class == TimeoutClass::Transfer && response.status().as_u16() == 303;
        if response.status().is_success() || leads_on {
            return Ok(response);
        }
        Err(self.failed_call(operation, response, skew_s).await)
    }

    /// Sends a request whose answer's head may take no longer than a call, though its body may.
    pub(super) async fn send_for_head(&self, operation: &str, request: RequestBuilder) -> Result<Response, CallError> {
        match tokio::time::timeout(self.0.timeouts.call, request.send()).await {
            Ok(sent) => sent.map_err(|error| transport_error(operation, error)),
            Err(_) => Err(retryable(format!("{operation}: no answer in time"))),
        }
    }

    async fn failed_call(&self, operation: &str, response: Response, skew_s: i64) -> FailedCall {
        let date = date_header(&response);
        let answered = read_error_response(response).await;
        let mut refused = classify_service_error(operation, &answered);
        if answered.status == 401
            && let Some(date) = date
            && let Some(hint) = self.correct_clock_skew(date, skew_s)
        {
            refused.message.push_str("; ");
            refused.message.push_str(&hint);
        }
        FailedCall { status: Some(answered.status), error: refused }
    }

    /// A refused signature may mean that our clock is wrong: the service's own is used from then on. Where that was
    /// tried already, the clocks are not the reason, and ours is used again.
    fn correct_clock_skew(&self, date: Timestamp, skew_s: i64) -> Option<String> {
        let skew = date.duration_since(Timestamp::now());
        let tried = skew.as_secs().abs_diff(skew_s) <= CLOCK_SKEW_TOLERATED.as_secs().unsigned_abs();
        if tried {
            if skew_s != 0 {
                self.0.signing_skew_s.store(0, Ordering::Relaxed);
            }
            return None;
        }
        self.0.signing_skew_s.store(skew.as_secs(), Ordering::Relaxed);
        let apart = skew.as_secs().unsigned_abs();
        Some(format!(
            "this host's clock is {apart} s from the service's, so the service's time is used to sign from now on"
        ))
    }
}

/// What is kept of an answer that is not a success.
pub(super) async fn read_error_response(response: Response) -> ErrorResponse {
    let header = |name| {
        let value: Option<&reqwest::header::HeaderValue> = response.headers().get(name);
        value.and_then(|value| value.to_str().ok()).map(str::to_owned)
    };
    let status = response.status().as_u16();
    let after = error_response::retry_after(header(RETRY_AFTER).as_deref());
    let content_type = header(CONTENT_TYPE).unwrap_or_default();
    let body = read_body("", response, ERROR_BODY_BYTES_MAX).await.unwrap_or_default();
    ErrorResponse { status, retry_after: after, content_type, body }
}

/// Reads a body up to `bytes_max`; a longer one is refused as soon as that is known.
pub(super) async fn read_body(operation: &str, mut response: Response, bytes_max: usize) -> Result<Vec<u8>, CallError> {
    let too_long = || retryable(format!("{operation}: the answer is longer than {bytes_max} bytes and was not read"));
    let announced = response.headers().get(CONTENT_LENGTH).and_then(|value| value.to_str().ok()?.parse::<usize>().ok());
    if announced.is_some_and(|bytes| bytes > bytes_max) {
        return Err(too_long());
    }
    let mut body = Vec::with_capacity(announced.unwrap_or(0).min(ERROR_BODY_BYTES_MAX));
    while let Some(chunk) = response.chunk().await.map_err(|error| transport_error(operation, error))? {
        if body.len() + chunk.len() > bytes_max {
            return Err(too_long());
        }
        body.extend_from_slice(&chunk);
    }
    Ok(body)
}

/// The clock of whoever answered.
pub(super) fn date_header(response: &Response) -> Option<Timestamp> {
    let text = response.headers().get(DATE)?.to_str().ok()?;
    jiff::fmt::rfc2822::parse(text).ok().map(|zoned| zoned.timestamp())
}

/// A path segment, every byte but unreserved ones percent-encoded.
pub(super) fn encode_segment(text: &str) -> impl fmt::Display + '_ {
    urlencoding::encode(text)
}

fn service_time(skew_s: i64) -> SystemTime {
    let now = Timestamp::now();
    let there = now.checked_add(SignedDuration::from_secs(skew_s)).unwrap_or(now);
    SystemTime::from(there)
}

fn parse_base_url(setting: &'static str, text: &str) -> Result<Url, InvalidConfig> {
    let example = "it should look like https://taskcluster.example.com";
    let url = Url::parse(text).map_err(|error| InvalidConfig::new(setting, format!("{error}; {example}")))?;
    let plain = matches!(url.scheme(), "http" | "https")
        && url.has_host()
        && url.username().is_empty()
        && url.password().is_none()
        && url[Position::AfterPath..].is_empty();
    if plain {
        Ok(url)
    } else {
        let what = format!("not a plain http or https address; {example}");
        Err(InvalidConfig::new(setting, what))
    }
}

fn service_url(root: &Url, name: &str) -> Url {
    let mut url = root.clone();
    let path = format!("{}/api/{name}/v1", root.path().trim_end_matches('/'));
    url.set_path(&path);
    url
}

fn build_http_client(settings: &ApiConfig, reach: &Arc<AddressPolicy>) -> Result<Client, InvalidConfig> {
    crate::host::crypto_provider::install_crypto_provider();
    let timeouts = settings.timeouts;
    let mut builder = Client::builder()
        .user_agent(concat!("journeyman/", env!("CARGO_PKG_VERSION")))
        .redirect(reqwest::redirect::Policy::none())
        .retry(reqwest::retry::never())
        .referer(false)
        .no_proxy()
        .tls_info(true)
        .connect_timeout(timeouts.connect)
        .pool_idle_timeout(timeouts.idle)
        .tcp_nodelay(true)
        .dns_resolver(Arc::new(FilteringResolver(Arc::clone(reach))));
    if let Some(proxy) = &settings.proxy {
        let proxy = reqwest::Proxy::all(proxy).map_err(|_| InvalidConfig::new("proxy", "not an address of a proxy"))?;
        builder = builder.proxy(proxy);
    }
    builder.build().map_err(|error| {
        let cause = std::error::Error::source(&error).map(ToString::to_string);
        let cause = cause.unwrap_or_default();
        let what = format!("no TLS client can be set up: {cause}; are CA certificates installed?");
        InvalidConfig::new("root_url", what)
    })
}

/// The system's resolver, without the addresses that may not be spoken to. The connection is made to the very addresses
/// that were looked at.
struct FilteringResolver(Arc<AddressPolicy>);

impl reqwest::dns::Resolve for FilteringResolver {
    fn resolve(&self, name: reqwest::dns::Name) -> reqwest::dns::Resolving {
        let reach = Arc::clone(&self.0);
        Box::pin(async move {
            let found = tokio::net::lookup_host((name.as_str(), 0)).await?;
            let kept = permitted_addresses(&reach, name.as_str(), found).map_err(|forbidden| forbidden.to_string())?;
            Ok(Box::new(kept.into_iter()) as reqwest::dns::Addrs)
        })
    }
}

/// The addresses of a host that may be spoken to, or why none may.
fn permitted_addresses(
    reach: &AddressPolicy,
    host: &str,
    found: impl Iterator<Item = SocketAddr>,
) -> Result<Vec<SocketAddr>, ForbiddenUrl> {
    let (mut kept, mut refused) = (Vec::new(), Ok(Vec::new()));
    for address in found {
        match reach.check_address(host, address.ip()) {
            Ok(()) => kept.push(address),
            Err(forbidden) => refused = Err(forbidden),
        }
    }
    if kept.is_empty() { refused } else { Ok(kept) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_several_addresses_only_those_are_connected_to_that_may_be() {
        let root = Url::parse("https://tc.example").unwrap();
        let reach = AddressPolicy::new(&root, &root, &["minio".to_owned()]);
        let found = || ["10.0.0.1:0", "8.8.8.8:0", "169.254.169.254:0", "[::1]:0"].map(|text| text.parse().unwrap());
        let kept = |host: &str| permitted_addresses(&reach, host, found().into_iter()).unwrap();
        assert_eq!(kept("rebound.example"), ["8.8.8.8:0".parse::<SocketAddr>().unwrap()]);
        assert_eq!(kept("minio").len(), 3);
        let private = found().into_iter().take(1);
        assert!(
            permitted_addresses(&reach, "rebound.example", private).unwrap_err().to_string().contains("allow_hosts")
        );
    }
}
