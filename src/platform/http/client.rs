//! Shared by HTTP clients: how they connect, reading a body up to a limit, and the description of errors.

use std::error::Error;
use std::time::{Duration, SystemTime};

use reqwest::header::{HeaderMap, RETRY_AFTER};
use reqwest::redirect::Policy;
use reqwest::{Client, ClientBuilder, Response};

use crate::crypto_provider::install_crypto_provider;
use journeyman_domain::staged::Stamp;

/// A client that sends each request once, and to no other host than that of its URL.
pub fn client_builder() -> ClientBuilder {
    install_crypto_provider();
    Client::builder()
        .user_agent(concat!("journeyman/", env!("CARGO_PKG_VERSION")))
        .redirect(Policy::none())
        .retry(reqwest::retry::never())
        .referer(false)
        .no_proxy()
        .tcp_nodelay(true)
}

#[derive(Debug)]
pub enum BodyError {
    TooLong,
    Connection(reqwest::Error),
}

/// Reads a body of at most `bytes_max`; fails at once if it is announced to be longer, or as soon as it is longer.
///
/// # Cancel safety
///
/// Cancel safe; the connection is closed.
pub async fn read_body(response: &mut Response, bytes_max: usize) -> Result<Vec<u8>, BodyError> {
    if response.content_length().is_some_and(|bytes| bytes > bytes_max as u64) {
        return Err(BodyError::TooLong);
    }
    let mut body = Vec::new();
    while let Some(chunk) = response.chunk().await.map_err(BodyError::Connection)? {
        if body.len() + chunk.len() > bytes_max {
            return Err(BodyError::TooLong);
        }
        body.extend_from_slice(&chunk);
    }
    Ok(body)
}

/// `Retry-After`, in seconds or as an HTTP date; a date in the past is no wait. The caller bounds it.
pub fn retry_after(headers: &HeaderMap, now: Stamp) -> Option<Duration> {
    let text = headers.get(RETRY_AFTER)?.to_str().ok()?.trim();
    if let Ok(seconds) = text.parse::<u32>() {
        return Some(Duration::from_secs(seconds.into()));
    }
    let date = httpdate::parse_http_date(text).ok()?;
    let date = date.duration_since(SystemTime::UNIX_EPOCH).ok()?.as_millis();
    Some(Stamp(date.try_into().ok()?).since(now))
}

/// The innermost error: of a request, the one that names the reason and not the URL.
pub fn root_cause(error: &dyn Error) -> String {
    let mut last = error;
    while let Some(cause) = last.source() {
        last = cause;
    }
    last.to_string()
}

/// What to add to the error of a TLS handshake that says too little.
pub fn tls_hint(error: &str) -> &'static str {
    if error.contains("InvalidContentType") {
        "; this port does not speak TLS: is the scheme of the address right?"
    } else if error.contains("UnknownIssuer") {
        "; no CA that is trusted here has issued the server's certificate: name its CA in the configuration, or add it to the system's"
    } else {
        ""
    }
}

/// The error and its causes, outermost first.
pub fn error_chain(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text = format!("{text}: {error}");
        cause = error.source();
    }
    text
}
