//! Sends requests to a metadata service: without proxy, redirects or retries, with a timeout and a size limit.

use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use reqwest::header::{DATE, HeaderMap, HeaderValue};
use reqwest::{Client, Method};
use serde::de::DeserializeOwned;
use url::Url;

use crate::host::clock::Clock;
use crate::http::client::{BodyError, client_builder, error_chain, read_body};
use journeyman_domain::limits::{METADATA_BODY_BYTES_MAX, METADATA_CONNECT_TIMEOUT, POOL_IDLE_TIMEOUT};
use journeyman_domain::time::Instant;

/// The link-local address of the metadata service of every cloud.
const ENDPOINT: &str = "http://169.254.169.254";

#[derive(Debug)]
pub(super) struct MetadataClient {
    http: Client,
    base: String,
    pub(super) clock: Clock,
}

/// A reply of any status.
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

    /// The body of a reply with status 200.
    pub(super) fn json<T: DeserializeOwned>(&self) -> Result<T, String> {
        let parsed = (self.status == 200).then(|| serde_json::from_slice(self.body.as_bytes()).ok()).flatten();
        parsed.ok_or_else(|| self.unexpected_reply())
    }

    /// The service's time, at the end of the second of its `Date` header; our time without one.
    fn server_time(&self) -> Timestamp {
        let date = self.header(DATE.as_str()).and_then(|text| jiff::fmt::rfc2822::parse(text).ok());
        let end_of_second = date.and_then(|zoned| zoned.timestamp().checked_add(SignedDuration::from_secs(1)).ok());
        end_of_second.unwrap_or_else(Timestamp::now)
    }

    /// Converts a time of the service to our clock. Counted from the start of the request, so that it is not late.
    pub(super) fn to_local_clock(&self, until: Timestamp, sent_at: Instant) -> Instant {
        sent_at.plus(super::time_left(until, self.server_time()))
    }

    pub(super) fn unexpected_reply(&self) -> String {
        format!("unexpected reply with status {}", self.status)
    }
}

impl MetadataClient {
    pub(super) fn new(endpoint: Option<&str>, clock: Clock) -> Result<Self, String> {
        let base = endpoint.unwrap_or(ENDPOINT).trim_end_matches('/').to_owned();
        let plain = Url::parse(&base).is_ok_and(|url| url.scheme() == "http" && url.has_host());
        if !plain {
            return Err(format!("{base} is not an http:// address"));
        }
        let http = client_builder()
            .http1_only()
            // Without TLS, so load no certificates.
            .tls_certs_only([])
            .connect_timeout(METADATA_CONNECT_TIMEOUT)
            .pool_idle_timeout(POOL_IDLE_TIMEOUT)
            .build()
            .map_err(|error| format!("cannot build an HTTP client: {error}"))?;
        Ok(Self { http, base, clock })
    }

    /// `path` includes the query. Cancel safe: the requests change nothing.
    pub(super) async fn send(
        &self,
        method: Method,
        path: &str,
        (name, value): (&'static str, HeaderValue),
        timeout: Duration,
    ) -> Result<MetadataReply, String> {
        let request = self.http.request(method, format!("{}{path}", self.base)).header(name, value);
        let replied = async {
            let lost = |error: reqwest::Error| error_chain(&error.without_url());
            let mut response = request.send().await.map_err(lost)?;
            let body = read_body(&mut response, METADATA_BODY_BYTES_MAX).await.map_err(|error| match error {
                BodyError::Connection(error) => lost(error),
                BodyError::TooLong => format!("reply longer than {METADATA_BODY_BYTES_MAX} bytes"),
            })?;
            let body = String::from_utf8(body).map_err(|_| "reply is not UTF-8".to_owned())?;
            Ok::<_, String>(MetadataReply {
                status: response.status().as_u16(),
                headers: std::mem::take(response.headers_mut()),
                body,
            })
        };
        let path = path.split('?').next().unwrap_or_default();
        match tokio::time::timeout(timeout, replied).await {
            Ok(Ok(reply)) => Ok(reply),
            Ok(Err(error)) => Err(format!("{path}: {error}")),
            Err(_) => Err(format!("{path}: no reply within {timeout:?}")),
        }
    }
}
