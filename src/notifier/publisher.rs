//! Hands events to a notifier over HTTP.

use std::time::Duration;

use reqwest::header::RETRY_AFTER;
use reqwest::{Client, StatusCode, Url};
use serde::Deserialize;
use tokio::time::{Instant, timeout_at};

use super::event::Event;
use crate::config::values::Secret;
use crate::domain::backoff::{Backoff, Policy};
use crate::domain::jitter::Jitter;
use crate::http::client::{client_builder, read_body, root_cause};
use crate::limits::{NOTIFY_ANSWER_BYTES_MAX, NOTIFY_CALL_TIMEOUT, NOTIFY_CONNECT_TIMEOUT};

const RETRY: Policy = Policy { first: Duration::from_millis(500), max: Duration::from_secs(30) };

pub(crate) struct Publisher {
    client: Client,
    events: Url,
    token: Secret,
    backoff: Backoff,
    jitter: Jitter,
}

/// What the notifier did with the events of a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
pub(crate) struct Accepted {
    pub(crate) accepted: usize,
    /// That it had already.
    pub(crate) duplicates: usize,
}

/// Holds neither an event nor the token.
#[derive(Debug, thiserror::Error)]
pub(crate) enum PublishError {
    #[error("the notifier rejects the token: {0}")]
    Denied(String),
    #[error("the notifier refuses the event: {0}")]
    Refused(String),
    /// The notifier may have the events; the same ones may be sent again.
    #[error("no answer of the notifier at {origin}: {why}")]
    Unavailable { origin: String, why: String, retry_after: Option<Duration> },
}

#[derive(Deserialize)]
struct Refusal {
    message: String,
}

impl Publisher {
    /// # Errors
    ///
    /// If the client cannot be built.
    pub(crate) fn new(notifier: &Url, token: Secret) -> Result<Self, reqwest::Error> {
        let client = client_builder().connect_timeout(NOTIFY_CONNECT_TIMEOUT).timeout(NOTIFY_CALL_TIMEOUT).build()?;
        let mut events = notifier.clone();
        events.set_path(&format!("{}/v1/events", notifier.path().trim_end_matches('/')));
        let jitter = Jitter::seeded(uuid::Uuid::new_v4().as_u64_pair().0);
        Ok(Self { client, events, token, backoff: Backoff::NEW, jitter })
    }

    fn origin(&self) -> String {
        self.events.origin().ascii_serialization()
    }

    /// Makes one call.
    ///
    /// # Errors
    ///
    /// If the notifier does not have the events, or may not have them.
    pub(crate) async fn publish(&self, events: &[Event]) -> Result<Accepted, PublishError> {
        let unavailable = |why: String| PublishError::Unavailable { origin: self.origin(), why, retry_after: None };
        let call = self.client.post(self.events.clone()).bearer_auth(self.token.reveal()).json(events).send();
        let mut answer = call.await.map_err(|error| unavailable(root_cause(&error.without_url())))?;
        let status = answer.status();
        let asked = answer.headers().get(RETRY_AFTER).and_then(|value| value.to_str().ok()?.parse().ok());
        let body = read_body(&mut answer, NOTIFY_ANSWER_BYTES_MAX).await;
        let body = body.map_err(|_| unavailable("its answer broke off or is too long".to_owned()))?;
        if status.is_success() {
            return serde_json::from_slice(&body)
                .map_err(|_| unavailable("its answer is not that of a notifier".to_owned()));
        }
        let message = serde_json::from_slice(&body).map_or_else(|_| status.to_string(), |Refusal { message }| message);
        match status {
            StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => Err(PublishError::Denied(message)),
            StatusCode::TOO_MANY_REQUESTS | StatusCode::REQUEST_TIMEOUT => Err(PublishError::Unavailable {
                origin: self.origin(),
                why: message,
                retry_after: asked.map(Duration::from_secs),
            }),
            _ if status.is_server_error() => Err(unavailable(message)),
            _ => Err(PublishError::Refused(message)),
        }
    }

    /// Repeats the call while the notifier is unavailable, up to `within`.
    ///
    /// # Errors
    ///
    /// As [`Publisher::publish`].
    ///
    /// # Cancel safety
    ///
    /// Cancel safe; the notifier may have the events.
    pub(crate) async fn publish_within(
        &mut self,
        events: &[Event],
        within: Duration,
    ) -> Result<Accepted, PublishError> {
        let deadline = Instant::now() + within;
        let why = || format!("none within {} s", within.as_secs());
        let mut last = PublishError::Unavailable { origin: self.origin(), why: why(), retry_after: None };
        loop {
            let Ok(result) = timeout_at(deadline, self.publish(events)).await else { return Err(last) };
            let PublishError::Unavailable { retry_after, .. } = (match result {
                Ok(accepted) => {
                    self.backoff.reset();
                    return Ok(accepted);
                }
                Err(error) => {
                    last = error;
                    &last
                }
            }) else {
                return Err(last);
            };
            let wait = self.backoff.wait(RETRY, *retry_after, &mut self.jitter);
            if deadline.duration_since(Instant::now()) <= wait {
                return Err(last);
            }
            tokio::time::sleep(wait).await;
        }
    }
}
