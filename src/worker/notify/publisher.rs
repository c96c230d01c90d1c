//! Calls a notifier over HTTP: hands it events, and asks what operators ask.

use std::time::Duration;

use reqwest::{Client, RequestBuilder, StatusCode, Url};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use tokio::time::{Instant, timeout_at};

use super::event::Event;
use journeyman_domain::backoff::Policy;
use journeyman_domain::limits::{NOTIFIER_ROWS_BYTES_MAX, NOTIFY_CALL_TIMEOUT, NOTIFY_CONNECT_TIMEOUT};
use journeyman_platform::host::clock::stamp;
use journeyman_platform::http::client::{client_builder, read_body, retry_after, root_cause};
use journeyman_platform::retry::Retry;
use journeyman_platform::settings::values::Secret;

const RETRY: Policy = Policy { first: Duration::from_millis(500), max: Duration::from_secs(30) };

/// Holds neither an event nor the token.
#[derive(Debug, thiserror::Error)]
pub enum CallError {
    #[error("the notifier rejects the token: {0}")]
    Denied(String),
    #[error("the notifier refuses: {0}")]
    Refused(String),
    /// The notifier may have done what it was asked for.
    #[error("no result from the notifier at {origin}: {why}")]
    Unavailable { origin: String, why: String, retry_after: Option<Duration> },
}

/// Makes one call at a time.
pub struct NotifierClient {
    http: Client,
    base: Url,
    token: Secret,
}

impl NotifierClient {
    /// # Errors
    ///
    /// Fails if the client cannot be built.
    pub fn new(base: Url, token: Secret) -> Result<Self, reqwest::Error> {
        let http = client_builder().connect_timeout(NOTIFY_CONNECT_TIMEOUT).timeout(NOTIFY_CALL_TIMEOUT).build()?;
        Ok(Self { http, base, token })
    }

    /// Parameters without a value are left out.
    pub async fn get(&self, path: &[&str], parameters: &[(&str, Option<String>)]) -> Result<Vec<u8>, CallError> {
        let mut url = self.url(path);
        let given = parameters.iter().filter_map(|(name, value)| Some((name, value.as_ref()?)));
        url.query_pairs_mut().extend_pairs(given);
        self.call(self.http.get(url)).await
    }

    pub async fn post(&self, path: &[&str], body: &(impl Serialize + ?Sized)) -> Result<Vec<u8>, CallError> {
        self.call(self.http.post(self.url(path)).json(body)).await
    }

    fn url(&self, path: &[&str]) -> Url {
        let mut url = self.base.clone();
        if let Ok(mut segments) = url.path_segments_mut() {
            segments.pop_if_empty().push("v1").extend(path);
        }
        url
    }

    pub fn unavailable(&self, why: impl Into<String>) -> CallError {
        CallError::Unavailable { origin: self.base.origin().ascii_serialization(), why: why.into(), retry_after: None }
    }

    async fn call(&self, request: RequestBuilder) -> Result<Vec<u8>, CallError> {
        #[derive(Deserialize)]
        struct Refusal {
            message: String,
        }
        let call = request.bearer_auth(self.token.reveal()).send();
        let silent = |error: reqwest::Error| {
            self.unavailable(format!("{}; is it running? is this its address?", root_cause(&error.without_url())))
        };
        let mut answer = call.await.map_err(silent)?;
        let status = answer.status();
        let retry_after = retry_after(answer.headers(), stamp());
        let body = read_body(&mut answer, NOTIFIER_ROWS_BYTES_MAX).await;
        let body = body.map_err(|_| self.unavailable("its answer broke off or is too long"))?;
        if status.is_success() {
            return Ok(body);
        }
        let message = serde_json::from_slice(&body).ok().map(|Refusal { message }| message);
        let is_its = message.is_some();
        let why = message.unwrap_or_else(|| status.to_string());
        match status {
            StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => Err(CallError::Denied(why)),
            StatusCode::TOO_MANY_REQUESTS | StatusCode::REQUEST_TIMEOUT => {
                let origin = self.base.origin().ascii_serialization();
                Err(CallError::Unavailable { origin, why, retry_after })
            }
            StatusCode::BAD_REQUEST | StatusCode::PAYLOAD_TOO_LARGE | StatusCode::UNPROCESSABLE_ENTITY => {
                Err(CallError::Refused(why))
            }
            StatusCode::NOT_FOUND | StatusCode::CONFLICT if is_its => Err(CallError::Refused(why)),
            // Of what stands before the notifier, or has taken its place: it may pass.
            _ => Err(self.unavailable(why)),
        }
    }
}

/// Hands events over, and repeats that as long as it may.
pub struct Publisher {
    client: NotifierClient,
    retry: Retry,
}

impl Publisher {
    pub fn new(client: NotifierClient) -> Self {
        Self { client, retry: Retry::new(RETRY) }
    }

    /// Makes one call.
    ///
    /// # Errors
    ///
    /// Fails if the notifier does not have the events, or may not have them.
    pub async fn publish(&self, events: &[Event]) -> Result<(), CallError> {
        let answer: Value = serde_json::from_slice(&self.client.post(&["events"], events).await?).unwrap_or_default();
        // A proxy answers 200 to anything.
        let is_its = answer["accepted"].is_u64();
        is_its.then_some(()).ok_or_else(|| self.client.unavailable("its answer is not that of a notifier"))
    }

    /// Repeats the call while the notifier is unavailable, up to `within`.
    ///
    /// # Errors
    ///
    /// Publishes as [`Publisher::publish`] does.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe; the notifier may have the events.
    pub async fn publish_within(&mut self, events: &[Event], within: Duration) -> Result<(), CallError> {
        let deadline = Instant::now() + within;
        let mut last = self.client.unavailable(format!("none within {} s", within.as_secs()));
        loop {
            match timeout_at(deadline, self.publish(events)).await {
                Ok(Ok(())) => {
                    self.retry.on_success();
                    return Ok(());
                }
                Ok(Err(error)) => last = error,
                Err(_) => return Err(last),
            }
            let CallError::Unavailable { retry_after, .. } = &last else { return Err(last) };
            let wait = self.retry.next_wait(*retry_after);
            if deadline.duration_since(Instant::now()) <= wait {
                return Err(last);
            }
            tokio::time::sleep(wait).await;
        }
    }
}
