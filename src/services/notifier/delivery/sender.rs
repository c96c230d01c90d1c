//! Posts a message to a webhook once and reads the beginning of the answer, within the bounds of time and memory.
//!
//! Without a proxy, every address is judged before the client connects to it. An egress proxy resolves names itself, so there only
//! the addresses in URLs are judged: the proxy has to judge the rest, as smokescreen does.

use std::borrow::Cow;
use std::error::Error;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use std::{fmt, io};

use bytes::Bytes;
use ipnet::IpNet;
use reqwest::header::{
    CONNECTION, CONTENT_LENGTH, CONTENT_TYPE, EXPECT, HOST, HeaderMap, HeaderName, HeaderValue, TE, TRAILER,
    TRANSFER_ENCODING, UPGRADE,
};
use reqwest::{Certificate, Client, Identity, Proxy, Response};
use secrecy::{ExposeSecret as _, SecretString};
use tokio::time::{Instant, timeout_at};
use url::{Host, Url};

use super::address::AddressPolicy;
use super::signature::{SigningKey, sign};
use journeyman_domain::lane::{Control, ErrorClass};
use journeyman_domain::limits::{
    REDACT_SECRET_CHARS_MIN, WEBHOOK_ANSWER_BYTES_MAX, WEBHOOK_CONNECT_TIMEOUT, WEBHOOK_DNS_TIMEOUT,
    WEBHOOK_ERROR_CHARS_MAX, WEBHOOK_IDLE_TIMEOUT, WEBHOOK_SECRET_PATH_BYTES_MIN,
};
use journeyman_domain::staged::Stamp;
use journeyman_platform::http::client::{client_builder, retry_after, root_cause, tls_hint};
use journeyman_platform::http::resolver::{FilteringResolver, Lookup, ResolveError, system_lookup};
use journeyman_platform::redact::{self, SecretSet};

const WEBHOOK_ID: HeaderName = HeaderName::from_static("webhook-id");
const WEBHOOK_TIMESTAMP: HeaderName = HeaderName::from_static("webhook-timestamp");
const WEBHOOK_SIGNATURE: HeaderName = HeaderName::from_static("webhook-signature");
const WEBHOOK_DELIVERY: HeaderName = HeaderName::from_static("webhook-delivery");

/// Headers that describe the connection, the body or the message.
pub(super) const RESERVED: [HeaderName; 11] = [
    CONNECTION,
    CONTENT_LENGTH,
    EXPECT,
    HOST,
    TE,
    TRAILER,
    TRANSFER_ENCODING,
    UPGRADE,
    WEBHOOK_ID,
    WEBHOOK_TIMESTAMP,
    WEBHOOK_SIGNATURE,
];

#[derive(Default)]
pub struct SenderConfig {
    /// Networks that webhooks may reach although they are not public.
    pub allowed_networks: Vec<IpNet>,
    pub https_only: bool,
    /// The URL of an egress proxy, with its credentials: `http`, `https` (both CONNECT for HTTPS endpoints) or `socks5`.
    pub proxy: Option<SecretString>,
    /// Certificates (PEM) of CAs that are trusted in addition to the system's.
    pub ca: Option<PathBuf>,
    pub client_certificate: Option<ClientCertificate>,
}

/// What the notifier shows to endpoints that ask for a certificate (PEM).
pub struct ClientCertificate {
    /// The certificate and its intermediates.
    pub certificate: PathBuf,
    pub key: SecretString,
}

/// Settings that cannot be used. Holds no credential.
#[derive(Debug, thiserror::Error)]
#[error("cannot deliver webhooks: {0}")]
pub struct InvalidSenderConfig(String);

/// One attempt.
pub(crate) struct DeliveryRequest {
    pub(crate) url: Url,
    pub(crate) webhook_id: HeaderValue,
    /// The time of the attempt, since 1970.
    pub(crate) at: Duration,
    /// The headers of the endpoint and of the lane; they may be secret.
    pub(crate) headers: HeaderMap,
    /// The content type, unless `headers` has one.
    pub(crate) content_type: HeaderValue,
    pub(crate) body: Bytes,
    /// Each signs; the message is not signed if there are none.
    pub(crate) keys: Arc<[SigningKey]>,
    pub(crate) timeout: Duration,
}

#[derive(Debug)]
pub(crate) struct AttemptResult {
    pub(crate) took: Duration,
    pub(crate) result: Result<Answer, DeliveryError>,
}

/// The answer of an endpoint, whatever its status. The status counts even if the body breaks off.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) status: u16,
    /// The pause that the receiver asks for, from the time of the attempt on.
    pub(crate) retry_after: Option<Duration>,
    pub(crate) control: Option<Control>,
    /// The beginning of the body.
    pub(crate) head: Bytes,
}

/// Why there is no answer.
#[derive(Debug, thiserror::Error)]
#[error("{text}")]
pub(crate) struct DeliveryError {
    pub(crate) class: ErrorClass,
    /// Names of the URL its origin only: a path can be as secret as a query.
    pub(crate) text: String,
}

pub struct Sender {
    client: Client,
    policy: Arc<AddressPolicy>,
    https_only: bool,
}

impl Sender {
    /// Reads the files.
    ///
    /// # Errors
    ///
    /// Fails if a file or the proxy's URL cannot be used.
    pub fn new(config: SenderConfig) -> Result<Self, InvalidSenderConfig> {
        Self::with_lookup(config, system_lookup())
    }

    pub(super) fn with_lookup(config: SenderConfig, lookup: Lookup) -> Result<Self, InvalidSenderConfig> {
        let policy = Arc::new(AddressPolicy::new(config.allowed_networks));
        // The head of an answer is held whole; hyper refuses more than 408 KiB of it, and reqwest has no setting for less.
        let mut builder = client_builder()
            .http1_only()
            .connect_timeout(WEBHOOK_CONNECT_TIMEOUT)
            .pool_idle_timeout(WEBHOOK_IDLE_TIMEOUT)
            .https_only(config.https_only);
        builder = match &config.proxy {
            Some(url) => builder.proxy(proxy(url)?),
            None => {
                let policy = Arc::clone(&policy);
                builder.dns_resolver(FilteringResolver {
                    judge: Arc::new(move |_, address| policy.judge(address)),
                    lookup,
                    timeout: WEBHOOK_DNS_TIMEOUT,
                })
            }
        };
        if let Some(path) = &config.ca {
            let certificates = Certificate::from_pem_bundle(&read(path)?).map_err(|error| unusable(path, &error))?;
            if certificates.is_empty() {
                return Err(InvalidSenderConfig(format!("{} holds no certificate (PEM)", path.display())));
            }
            builder = builder.tls_certs_merge(certificates);
        }
        if let Some(own) = &config.client_certificate {
            let pem = [&read(&own.certificate)?, own.key.expose_secret().as_bytes()].join(&b'\n');
            let identity = Identity::from_pem(&pem).map_err(|error| {
                let certificate = own.certificate.display();
                InvalidSenderConfig(format!("cannot use {certificate} with its key: {}", root_cause(&error)))
            })?;
            builder = builder.identity(identity);
        }
        let client = builder
            .build()
            .map_err(|error| InvalidSenderConfig(format!("cannot build the HTTP client: {}", root_cause(&error))))?;
        Ok(Self { client, policy, https_only: config.https_only })
    }

    /// Makes one attempt, within the request's timeout.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe; the endpoint may have received the message.
    pub(crate) async fn send(&self, request: &DeliveryRequest) -> AttemptResult {
        let begun = Instant::now();
        let deadline = begun + request.timeout;
        let result = match self.judge(&request.url) {
            Ok(()) => self.attempt(request, deadline).await,
            Err(text) => Err((ErrorClass::Policy, text)),
        };
        let result = result.map_err(|(class, why)| {
            let text = format!("no delivery to {}: {why}", request.url.origin().ascii_serialization());
            DeliveryError { class, text: text.chars().take(WEBHOOK_ERROR_CHARS_MAX).collect() }
        });
        AttemptResult { took: begun.elapsed(), result }
    }

    /// The client resolves no address that stands in the URL, so the resolver does not judge it.
    fn judge(&self, url: &Url) -> Result<(), String> {
        match url.scheme() {
            "https" => {}
            "http" if !self.https_only => {}
            "http" => return Err("only HTTPS is allowed".to_owned()),
            scheme => return Err(format!("webhooks are HTTP or HTTPS, not `{scheme}`")),
        }
        let address: IpAddr = match url.host() {
            Some(Host::Ipv4(address)) => address.into(),
            Some(Host::Ipv6(address)) => address.into(),
            Some(Host::Domain(name)) => return self.policy.judge_name(name),
            None => return Ok(()),
        };
        self.policy.judge(address)
    }

    async fn attempt(&self, request: &DeliveryRequest, deadline: Instant) -> Result<Answer, (ErrorClass, String)> {
        let headers = headers(request).map_err(|error| (ErrorClass::Protocol, error.to_string()))?;
        let sent = self.client.post(request.url.clone()).headers(headers).body(request.body.clone()).send();
        let mut response = match timeout_at(deadline, sent).await {
            Ok(sent) => sent.map_err(|error| (classify(&error), describe(error)))?,
            Err(_) => return Err((ErrorClass::Timeout, "no answer in time".to_owned())),
        };
        let mut head = Vec::new();
        let now = Stamp(request.at.as_millis().try_into().unwrap_or_default());
        // A body that breaks off, or takes too long, leaves what was read. The connection is closed when `response` is dropped.
        let is_cut = timeout_at(deadline, read_head(&mut response, &mut head)).await.unwrap_or(true);
        Ok(Answer {
            status: response.status().as_u16(),
            retry_after: retry_after(response.headers(), now),
            control: control(response.headers()),
            head: redacted(head, is_cut, request),
        })
    }
}

fn read(path: &Path) -> Result<Vec<u8>, InvalidSenderConfig> {
    std::fs::read(path).map_err(|error| unusable(path, &error))
}

fn unusable(path: &Path, error: &dyn fmt::Display) -> InvalidSenderConfig {
    InvalidSenderConfig(format!("cannot use {}: {error}", path.display()))
}

fn proxy(url: &SecretString) -> Result<Proxy, InvalidSenderConfig> {
    let invalid =
        || InvalidSenderConfig("the proxy's URL is not like `http://host:port` or `socks5://host:port`".to_owned());
    let mut url = Url::parse(url.expose_secret()).map_err(|_| invalid())?;
    match url.scheme() {
        "http" | "https" | "socks5h" => {}
        // `socks5` would resolve names here.
        "socks5" => url.set_scheme("socks5h").map_err(|()| invalid())?,
        _ => return Err(invalid()),
    }
    Proxy::all(url).map_err(|_| invalid())
}

fn headers(request: &DeliveryRequest) -> Result<HeaderMap, reqwest::header::InvalidHeaderValue> {
    let mut headers = request.headers.clone();
    for name in RESERVED {
        headers.remove(name);
    }
    headers.entry(CONTENT_TYPE).or_insert_with(|| request.content_type.clone());
    headers.insert(WEBHOOK_ID, request.webhook_id.clone());
    headers.insert(WEBHOOK_TIMESTAMP, request.at.as_secs().into());
    if !request.keys.is_empty() {
        headers.insert(WEBHOOK_SIGNATURE, sign(&request.keys, &request.webhook_id, request.at, &request.body)?);
    }
    Ok(headers)
}

/// A receiver may echo the request, and its answer is stored and shown. Where it is cut a secret may have begun.
fn redacted(mut head: Vec<u8>, is_cut: bool, request: &DeliveryRequest) -> Bytes {
    if head.len() < REDACT_SECRET_CHARS_MIN {
        return head.into();
    }
    let (mut secrets, mut longest) = (SecretSet::default(), 0);
    let mut add = |text: &str| {
        if text.len() >= REDACT_SECRET_CHARS_MIN {
            longest = longest.max(text.len());
            secrets.add(text);
        }
    };
    let own = |name: &HeaderName| name.as_str().starts_with("journeyman-");
    for (_, value) in request.headers.iter().filter(|(name, _)| !own(name)) {
        if let Ok(text) = value.to_str() {
            add(text);
            text.split(' ').for_each(&mut add);
        }
    }
    let url = &request.url;
    url.path_segments()
        .into_iter()
        .flatten()
        .filter(|part| part.len() >= WEBHOOK_SECRET_PATH_BYTES_MIN)
        .for_each(&mut add);
    url.query_pairs().for_each(|(_, value)| add(&value));
    url.password().into_iter().for_each(&mut add);
    if is_cut {
        head.truncate(head.len().saturating_sub(longest));
    }
    match redact::bytes(&head, Some(&secrets)) {
        Cow::Borrowed(_) => head.into(),
        Cow::Owned(redacted) => redacted.into(),
    }
}

/// Returns whether there is more.
async fn read_head(response: &mut Response, head: &mut Vec<u8>) -> bool {
    while head.len() < WEBHOOK_ANSWER_BYTES_MAX {
        match response.chunk().await {
            Ok(Some(chunk)) => {
                let room = WEBHOOK_ANSWER_BYTES_MAX - head.len();
                head.extend_from_slice(&chunk[..chunk.len().min(room)]);
            }
            Ok(None) => return false,
            Err(_) => return true,
        }
    }
    true
}

fn control(headers: &HeaderMap) -> Option<Control> {
    match headers.get(WEBHOOK_DELIVERY)?.to_str().ok()?.trim() {
        "disable" => Some(Control::DisableEndpoint),
        "abort-message" => Some(Control::AbortMessage),
        _ => None,
    }
}

fn classify(error: &reqwest::Error) -> ErrorClass {
    let is_connect = error.is_connect();
    let mut cause = error.source();
    while let Some(error) = cause {
        if let Some(error) = error.downcast_ref::<ResolveError>() {
            return match error {
                ResolveError::Denied(_) => ErrorClass::Policy,
                ResolveError::NoAddress | ResolveError::Timeout(_) | ResolveError::Failed(_) => ErrorClass::Dns,
            };
        }
        if is_tls(error, is_connect) {
            return ErrorClass::Tls;
        }
        cause = error.source();
    }
    if error.is_dns() {
        ErrorClass::Dns
    } else if error.is_timeout() {
        ErrorClass::Timeout
    } else if is_connect {
        ErrorClass::Connect
    } else {
        ErrorClass::Protocol
    }
}

/// `io::Error` hides the error it wraps from its `source()`. A connection that ends within the handshake is an `UnexpectedEof`.
fn is_tls(error: &(dyn Error + 'static), is_connect: bool) -> bool {
    error.is::<rustls::Error>()
        || error.downcast_ref::<io::Error>().is_some_and(|error| {
            (is_connect && error.kind() == io::ErrorKind::UnexpectedEof)
                || error.get_ref().is_some_and(|inner| is_tls(inner, is_connect))
        })
}

fn describe(error: reqwest::Error) -> String {
    let text = root_cause(&error.without_url());
    format!("{text}{}", tls_hint(&text))
}
