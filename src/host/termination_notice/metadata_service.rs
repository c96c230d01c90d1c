//! One call to a metadata service: to the fixed address, without proxy, redirect or a second try, within a time and a size.

use std::fmt;
use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use reqwest::header::{DATE, HeaderMap, HeaderValue};
use reqwest::{Client, Method};
use url::Url;

use crate::domain::time::Instant;
use crate::host::clock::Clock;
use crate::limits::{METADATA_BODY_BYTES_MAX, METADATA_CONNECT_TIMEOUT, POOL_IDLE_TIMEOUT};

/// Where every cloud has its metadata service: a link-local address that never leaves the host.
const ENDPOINT: &str = "http://169.254.169.254";

/// Settings that no watch can be made of.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct EndpointError(String);

/// A metadata service.
pub(super) struct MetadataService {
    http: Client,
    base: String,
    clock: Clock,
}

impl fmt::Debug for MetadataService {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "Service({})", self.base)
    }
}

/// A question.
#[derive(Debug)]
pub(super) struct MetadataRequest {
    pub(super) method: Method,
    /// From the first slash, query included.
    pub(super) path: String,
    pub(super) headers: HeaderMap,
    pub(super) timeout: Duration,
}

impl MetadataRequest {
    /// A `GET` with one header.
    pub(super) fn get(path: impl Into<String>, header: &'static str, value: HeaderValue, timeout: Duration) -> Self {
        let mut headers = HeaderMap::new();
        headers.insert(header, value);
        Self { method: Method::GET, path: path.into(), headers, timeout }
    }
}

/// An answer, whatever its status.
#[derive(Debug)]
pub(super) struct MetadataReply {
    pub(super) status: u16,
    headers: HeaderMap,
    pub(super) body: String,
}

impl MetadataReply {
    pub(super) fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name)?.to_str().ok()
    }

    /// The time of whoever answered, at the end of the second they named; ours where they did not.
    fn server_time(&self) -> Timestamp {
        let date = self.header(DATE.as_str()).and_then(|text| jiff::fmt::rfc2822::parse(text).ok());
        let theirs = date.and_then(|zoned| zoned.timestamp().checked_add(SignedDuration::from_secs(1)).ok());
        theirs.unwrap_or_else(Timestamp::now)
    }

    /// When a time of theirs comes on our clock. Counted from when they were asked, so that it is not late.
    pub(super) fn to_local_clock(&self, until: Timestamp, sent_at: Instant) -> Instant {
        sent_at.plus(super::time_left(until, self.server_time()))
    }

    /// What to say of an answer that is none.
    pub(super) fn unexpected_reply(&self) -> String {
        format!("an answer with status {} that cannot be understood", self.status)
    }
}

impl MetadataService {
    pub(super) fn new(endpoint: Option<&str>, clock: Clock) -> Result<Self, EndpointError> {
        let base = endpoint.unwrap_or(ENDPOINT).trim_end_matches('/').to_owned();
        let plain = Url::parse(&base).is_ok_and(|url| url.scheme() == "http" && url.has_host());
        if !plain {
            return Err(EndpointError(format!("{base} is no address of a metadata service, which speaks plain http")));
        }
        // An error says that a provider is installed already, which is what is wanted.
        rustls::crypto::ring::default_provider().install_default().ok();
        let http = Client::builder()
            .user_agent(concat!("journeyman/", env!("CARGO_PKG_VERSION")))
            .redirect(reqwest::redirect::Policy::none())
            .retry(reqwest::retry::never())
            .referer(false)
            .no_proxy()
            .http1_only()
            // Plain http only, so no certificates are loaded.
            .tls_certs_only([])
            .connect_timeout(METADATA_CONNECT_TIMEOUT)
            .pool_idle_timeout(POOL_IDLE_TIMEOUT)
            .tcp_nodelay(true)
            .build()
            .map_err(|error| EndpointError(format!("no client for it can be made: {error}")))?;
        Ok(Self { http, base, clock })
    }

    pub(super) const fn clock(&self) -> Clock {
        self.clock
    }

    /// Makes a call.
    ///
    /// # Errors
    ///
    /// A sentence about why there is no whole answer.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe: nothing is changed by it.
    pub(super) async fn send(&self, call: MetadataRequest) -> Result<MetadataReply, String> {
        let name = call.path.split('?').next().unwrap_or_default().to_owned();
        let request = self.http.request(call.method, format!("{}{}", self.base, call.path));
        let answered = async {
            let mut response = request.headers(call.headers).send().await.map_err(without_url)?;
            let mut body = Vec::new();
            while let Some(chunk) = response.chunk().await.map_err(without_url)? {
                if body.len() + chunk.len() > METADATA_BODY_BYTES_MAX {
                    return Err(format!("an answer longer than {METADATA_BODY_BYTES_MAX} bytes"));
                }
                body.extend_from_slice(&chunk);
            }
            let body = String::from_utf8(body).map_err(|_| "an answer that is no text".to_owned())?;
            Ok(MetadataReply {
                status: response.status().as_u16(),
                headers: std::mem::take(response.headers_mut()),
                body,
            })
        };
        match tokio::time::timeout(call.timeout, answered).await {
            Ok(Ok(reply)) => Ok(reply),
            Ok(Err(what)) => Err(format!("{name}: {what}")),
            Err(_) => Err(format!("{name}: no answer within {:?}", call.timeout)),
        }
    }
}

fn without_url(error: reqwest::Error) -> String {
    let error = error.without_url();
    let mut what = error.to_string();
    let mut cause = std::error::Error::source(&error);
    while let Some(error) = cause {
        what = format!("{what}: {error}");
        cause = error.source();
    }
    what
}
