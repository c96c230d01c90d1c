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

use super::credentials::{Credentials, Swap};
use super::reach::{Forbidden, Reach};
use super::refuse::{self, Answered, by_service, retry, transport};
use crate::limits::{
    ARTIFACT_TRANSFER_TIMEOUT_MAX, CALL_TIMEOUT, CONNECT_TIMEOUT, ERROR_BODY_BYTES_MAX, JSON_BODY_BYTES_MAX,
    LONG_POLL_TIMEOUT, POOL_IDLE_TIMEOUT,
};
use crate::source::Refused;

/// No answer has said what time it is.
const UNKNOWN: i64 = i64::MIN;
/// How far the service's clock must be from ours before a refused signature is blamed on it.
const SKEW_TOLERATED: SignedDuration = SignedDuration::from_secs(60);

/// Where a deployment is and who we are there.
#[derive(Clone)]
pub struct ApiSettings {
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
pub struct Unusable {
    /// The setting, as it is spelled in the configuration.
    pub setting: &'static str,
    /// What is wrong with it and what would be right.
    pub what: String,
}

impl Unusable {
    pub(super) fn new(setting: &'static str, what: impl Into<String>) -> Self {
        Self { setting, what: what.into() }
    }
}

/// A client for one Taskcluster deployment. Cheap to clone; clones share connections and credentials.
#[derive(Clone)]
pub struct Api(Arc<Shared>);

struct Shared {
    http: Client,
    root: Url,
    queue: Url,
    object: Url,
    auth: Url,
    reach: Arc<Reach>,
    own: Swap<Option<Credentials>>,
    timeouts: Timeouts,
    /// The service's clock minus ours, in seconds, as learnt from a refused signature.
    skew_s: AtomicI64,
    /// How far our clock was ahead at the last answer that said what time it is.
    ahead_s: AtomicI64,
}

/// Which service a call is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Service {
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
pub(super) enum Patience {
    Call,
    LongPoll,
    /// The head of the answer comes as soon as that of a call; its body may take as long as a transfer.
    Transfer,
}

/// One call of a service.
pub(super) struct Call<'a> {
    /// What is done to what, for the log: `claimTask T/0`.
    pub(super) operation: String,
    pub(super) service: Service,
    pub(super) method: Method,
    /// Everything after the service's base, with `/` in front, segments encoded.
    pub(super) path: String,
    pub(super) body: Option<Value>,
    pub(super) signer: Signer<'a>,
    pub(super) patience: Patience,
}

impl<'a> Call<'a> {
    pub(super) fn queue(operation: String, method: Method, path: String) -> Self {
        Self {
            operation,
            service: Service::Queue,
            method,
            path,
            body: None,
            signer: Signer::Own,
            patience: Patience::Call,
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
pub(super) struct Reply {
    operation: String,
    pub(super) date: Option<Timestamp>,
    body: Vec<u8>,
}

/// A call without a 2xx answer.
pub(super) struct Failed {
    /// The answer's status; `None` where there was no complete answer.
    pub(super) status: Option<u16>,
    pub(super) refused: Refused,
}

impl From<Refused> for Failed {
    fn from(refused: Refused) -> Self {
        Self { status: None, refused }
    }
}

impl From<Failed> for Refused {
    fn from(failed: Failed) -> Self {
        failed.refused
    }
}

impl Reply {
    /// The body as JSON of the shape `T`.
    pub(super) fn json<T: DeserializeOwned>(&self) -> Result<T, Refused> {
        serde_json::from_slice(&self.body).map_err(|error| {
            let operation = &self.operation;
            // The error of serde_json may quote the value it did not expect; only the place is kept.
            retry(format!(
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
    pub fn new(settings: ApiSettings) -> Result<Self, Unusable> {
        let root = base("root_url", &settings.root_url)?;
        let queue = match &settings.queue_url {
            Some(url) => base("queue_url", url)?,
            None => service(&root, "queue"),
        };
        let object = service(&root, "object");
        let auth = service(&root, "auth");
        let reach = Arc::new(Reach::new(&root, &queue, &settings.allow_hosts));
        let http = client(&settings, &reach)?;
        Ok(Self(Arc::new(Shared {
            http,
            root,
            queue,
            object,
            auth,
            reach,
            own: Swap::new(settings.credentials),
            timeouts: settings.timeouts,
            skew_s: AtomicI64::new(0),
            ahead_s: AtomicI64::new(UNKNOWN),
        })))
    }

    /// The deployment's address, without the slash at its end.
    #[must_use]
    pub fn root_url(&self) -> &str {
        self.0.root.as_str().trim_end_matches('/')
    }

    /// Replaces the credentials that the worker or user signs with, for every later call.
    pub fn replace_credentials(&self, credentials: Credentials) {
        self.0.own.store(Some(credentials));
    }

    /// How far our clock is ahead of the service's, in seconds, as its last answer told.
    pub(super) fn clock_ahead(&self) -> Option<i64> {
        Some(self.0.ahead_s.load(Ordering::Relaxed)).filter(|ahead| *ahead != UNKNOWN)
    }

    /// Where the service may send us.
    pub(super) fn reach(&self) -> &Reach {
        &self.0.reach
    }

    pub(super) fn queue_base(&self) -> &str {
        self.0.queue.as_str().trim_end_matches('/')
    }

    pub(super) fn timeouts(&self) -> &Timeouts {
        &self.0.timeouts
    }

    pub(super) fn http(&self) -> &Client {
        &self.0.http
    }

    /// Makes one call and reads its whole answer.
    pub(super) async fn call(&self, call: Call<'_>) -> Result<Reply, Failed> {
        let operation = call.operation.clone();
        let response = self.send(call).await?;
        let date = date(&response);
        let body = read_body(&operation, response, JSON_BODY_BYTES_MAX).await?;
        Ok(Reply { operation, date, body })
    }

    /// Makes one call and answers with the head of a 2xx answer, or of a 303 one to a transfer; everything else is a
    /// refusal.
    pub(super) async fn send(&self, call: Call<'_>) -> Result<Response, Failed> {
        let Call { operation, body, .. } = &call;
        let base = match call.service {
            Service::Queue => &self.0.queue,
            Service::Object => &self.0.object,
            Service::Auth => &self.0.auth,
        };
        let text = format!("{}{}", base.as_str().trim_end_matches('/'), call.path);
        let url = Url::parse(&text).map_err(|_| {
            refuse::refused(
                crate::domain::refusal::Refusal::Rejected,
                format!("{operation}: no address can be made for it"),
            )
        })?;
        let timeout = match call.patience {
            Patience::Call => self.0.timeouts.call,
            Patience::LongPoll => self.0.timeouts.long_poll,
            Patience::Transfer => ARTIFACT_TRANSFER_TIMEOUT_MAX,
        };
        let skew_s = self.0.skew_s.load(Ordering::Relaxed);
        let own = self.0.own.load();
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
        let response = match call.patience {
            Patience::Call | Patience::LongPoll => request.send().await.map_err(|error| transport(operation, error))?,
            Patience::Transfer => self.head(operation, request).await?,
        };
        if let Some(date) = date(&response) {
            self.0.ahead_s.store(Timestamp::now().duration_since(date).as_secs(), Ordering::Relaxed);
        }
        let leads_on = call.patience == Patience::Transfer && response.status().as_u16() == 303;
        if response.status().is_success() || leads_on {
            return Ok(response);
        }
        Err(self.refusal(operation, response, skew_s).await)
    }

    /// Sends a request whose answer's head may take no longer than a call, though its body may.
    pub(super) async fn head(&self, operation: &str, request: RequestBuilder) -> Result<Response, Refused> {
        match tokio::time::timeout(self.0.timeouts.call, request.send()).await {
            Ok(sent) => sent.map_err(|error| transport(operation, error)),
            Err(_) => Err(retry(format!("{operation}: no answer in time"))),
        }
    }

    async fn refusal(&self, operation: &str, response: Response, skew_s: i64) -> Failed {
        let date = date(&response);
        let answered = answered(response).await;
        let mut refused = by_service(operation, &answered);
        if answered.status == 401
            && let Some(date) = date
            && let Some(hint) = self.blame_clock(date, skew_s)
        {
            refused.what.push_str("; ");
            refused.what.push_str(&hint);
        }
        Failed { status: Some(answered.status), refused }
    }

    /// A refused signature may mean that our clock is wrong: the service's own is used from then on. Where that was
    /// tried already, the clocks are not the reason, and ours is used again.
    fn blame_clock(&self, date: Timestamp, skew_s: i64) -> Option<String> {
        let skew = date.duration_since(Timestamp::now());
        let tried = skew.as_secs().abs_diff(skew_s) <= SKEW_TOLERATED.as_secs().unsigned_abs();
        if tried {
            if skew_s != 0 {
                self.0.skew_s.store(0, Ordering::Relaxed);
            }
            return None;
        }
        self.0.skew_s.store(skew.as_secs(), Ordering::Relaxed);
        let apart = skew.as_secs().unsigned_abs();
        Some(format!(
            "this host's clock is {apart} s from the service's, so the service's time is used to sign from now on"
        ))
    }
}

/// What is kept of an answer that is not a success.
pub(super) async fn answered(response: Response) -> Answered {
    let header = |name| {
        let value: Option<&reqwest::header::HeaderValue> = response.headers().get(name);
        value.and_then(|value| value.to_str().ok()).map(str::to_owned)
    };
    let status = response.status().as_u16();
    let after = refuse::retry_after(header(RETRY_AFTER).as_deref());
    let content_type = header(CONTENT_TYPE).unwrap_or_default();
    let body = read_body("", response, ERROR_BODY_BYTES_MAX).await.unwrap_or_default();
    Answered { status, after, content_type, body }
}

/// Reads a body up to `bytes_max`; a longer one is refused as soon as that is known.
pub(super) async fn read_body(operation: &str, mut response: Response, bytes_max: usize) -> Result<Vec<u8>, Refused> {
    let too_long = || retry(format!("{operation}: the answer is longer than {bytes_max} bytes and was not read"));
    let announced = response.headers().get(CONTENT_LENGTH).and_then(|value| value.to_str().ok()?.parse::<usize>().ok());
    if announced.is_some_and(|bytes| bytes > bytes_max) {
        return Err(too_long());
    }
    let mut body = Vec::with_capacity(announced.unwrap_or(0).min(ERROR_BODY_BYTES_MAX));
    while let Some(chunk) = response.chunk().await.map_err(|error| transport(operation, error))? {
        if body.len() + chunk.len() > bytes_max {
            return Err(too_long());
        }
        body.extend_from_slice(&chunk);
    }
    Ok(body)
}

/// The clock of whoever answered.
pub(super) fn date(response: &Response) -> Option<Timestamp> {
    let text = response.headers().get(DATE)?.to_str().ok()?;
    jiff::fmt::rfc2822::parse(text).ok().map(|zoned| zoned.timestamp())
}

/// A path segment, every byte but unreserved ones percent-encoded.
pub(super) fn segment(text: &str) -> impl fmt::Display + '_ {
    urlencoding::encode(text)
}

fn service_time(skew_s: i64) -> SystemTime {
    let now = Timestamp::now();
    let there = now.checked_add(SignedDuration::from_secs(skew_s)).unwrap_or(now);
    SystemTime::from(there)
}

fn base(setting: &'static str, text: &str) -> Result<Url, Unusable> {
    let example = "it should look like https://taskcluster.example.com";
    let url = Url::parse(text).map_err(|error| Unusable::new(setting, format!("{error}; {example}")))?;
    let plain = matches!(url.scheme(), "http" | "https")
        && url.has_host()
        && url.username().is_empty()
        && url.password().is_none()
        && url[Position::AfterPath..].is_empty();
    if plain {
        Ok(url)
    } else {
        let what = format!("not a plain http or https address; {example}");
        Err(Unusable::new(setting, what))
    }
}

fn service(root: &Url, name: &str) -> Url {
    let mut url = root.clone();
    let path = format!("{}/api/{name}/v1", root.path().trim_end_matches('/'));
    url.set_path(&path);
    url
}

fn client(settings: &ApiSettings, reach: &Arc<Reach>) -> Result<Client, Unusable> {
    crate::host::tls::choose();
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
        .dns_resolver(Arc::new(Within(Arc::clone(reach))));
    if let Some(proxy) = &settings.proxy {
        let proxy = reqwest::Proxy::all(proxy).map_err(|_| Unusable::new("proxy", "not an address of a proxy"))?;
        builder = builder.proxy(proxy);
    }
    builder.build().map_err(|error| {
        let cause = std::error::Error::source(&error).map(ToString::to_string);
        let cause = cause.unwrap_or_default();
        let what = format!("no TLS client can be set up: {cause}; are CA certificates installed?");
        Unusable::new("root_url", what)
    })
}

/// The system's resolver, without the addresses that may not be spoken to. The connection is made to the very addresses
/// that were looked at.
struct Within(Arc<Reach>);

impl reqwest::dns::Resolve for Within {
    fn resolve(&self, name: reqwest::dns::Name) -> reqwest::dns::Resolving {
        let reach = Arc::clone(&self.0);
        Box::pin(async move {
            let found = tokio::net::lookup_host((name.as_str(), 0)).await?;
            let kept = within(&reach, name.as_str(), found).map_err(|forbidden| forbidden.to_string())?;
            Ok(Box::new(kept.into_iter()) as reqwest::dns::Addrs)
        })
    }
}

/// The addresses of a host that may be spoken to, or why none may.
fn within(reach: &Reach, host: &str, found: impl Iterator<Item = SocketAddr>) -> Result<Vec<SocketAddr>, Forbidden> {
    let (mut kept, mut refused) = (Vec::new(), Ok(Vec::new()));
    for address in found {
        match reach.judge_address(host, address.ip()) {
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
        let reach = Reach::new(&root, &root, &["minio".to_owned()]);
        let found = || ["10.0.0.1:0", "8.8.8.8:0", "169.254.169.254:0", "[::1]:0"].map(|text| text.parse().unwrap());
        let kept = |host: &str| within(&reach, host, found().into_iter()).unwrap();
        assert_eq!(kept("rebound.example"), ["8.8.8.8:0".parse::<SocketAddr>().unwrap()]);
        assert_eq!(kept("minio").len(), 3);
        let private = found().into_iter().take(1);
        assert!(within(&reach, "rebound.example", private).unwrap_err().to_string().contains("allow_hosts"));
    }
}
