//! Reads request bodies, each within its own limit and all of them within one budget.
//!
//! Artifact content is not read here; it is streamed to its file.

use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use axum::body::{Body, Bytes, HttpBody as _};
use axum::http::HeaderMap;
use axum::http::header::EXPECT;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::timeout;

use super::queue_error::{QueueError, QueueErrorCode};
use super::route::ApiMethod;
use crate::limits::{
    QUEUE_BODIES_BYTES_MAX, QUEUE_BODY_BYTES_MAX, QUEUE_BODY_TIMEOUT, QUEUE_DISCARD_BYTES_MAX, QUEUE_DISCARD_TIMEOUT,
    QUEUE_SMALL_BODY_BYTES_MAX, QUEUE_UNAUTHENTICATED_BODY_BYTES_MAX,
};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum CallerKind {
    Authenticated,
    Unauthenticated,
}

pub(crate) const fn bytes_max(call: ApiMethod, from: CallerKind) -> usize {
    match (from, call) {
        (CallerKind::Unauthenticated, _) => QUEUE_UNAUTHENTICATED_BODY_BYTES_MAX,
        (CallerKind::Authenticated, ApiMethod::CreateTask) => QUEUE_BODY_BYTES_MAX,
        (CallerKind::Authenticated, _) => QUEUE_SMALL_BODY_BYTES_MAX,
    }
}

#[derive(Debug, Clone)]
pub(crate) struct BodyBudget(Arc<Semaphore>);

impl BodyBudget {
    pub(crate) fn new() -> Self {
        Self(Arc::new(Semaphore::new(QUEUE_BODIES_BYTES_MAX)))
    }

    /// A share of the budget, returned on drop.
    pub(crate) fn reserve(&self, bytes: usize) -> Result<OwnedSemaphorePermit, QueueError> {
        let many = u32::try_from(bytes).unwrap_or(u32::MAX);
        Arc::clone(&self.0).try_acquire_many_owned(many).map_err(|_| {
            QueueError::new(QueueErrorCode::ServiceUnavailable, "too many request bodies in flight; retry later")
        })
    }
}

#[derive(Debug, Default)]
pub(crate) struct RequestBody {
    bytes: Vec<u8>,
    permit: Option<OwnedSemaphorePermit>,
}

impl std::ops::Deref for RequestBody {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.bytes
    }
}

/// Reads a body of at most `limit` bytes. A rejected body is drained for a moment, so that the client reads the
/// response instead of a connection reset.
pub(crate) async fn read(
    mut body: Body,
    head: &HeaderMap,
    limit: usize,
    budget: &BodyBudget,
) -> Result<RequestBody, QueueError> {
    let read = timeout(QUEUE_BODY_TIMEOUT, read_bounded(&mut body, limit, budget)).await;
    let error = match read {
        Ok(Ok(held)) => return Ok(held),
        Ok(Err(error)) => error,
        Err(_) => return Err(timeout_error(QUEUE_BODY_TIMEOUT)),
    };
    // A client that sent `Expect: 100-continue` has not sent the body.
    if !head.contains_key(EXPECT) {
        timeout(QUEUE_DISCARD_TIMEOUT, drain(&mut body)).await.ok();
    }
    Err(error)
}

fn timeout_error(limit: Duration) -> QueueError {
    QueueError::new(QueueErrorCode::MalformedPayload, format!("request body not received within {} s", limit.as_secs()))
}

fn too_large_error(limit: usize) -> QueueError {
    QueueError::new(QueueErrorCode::InputTooLarge, format!("request body exceeds the limit of {limit} bytes"))
}

async fn read_bounded(body: &mut Body, limit: usize, budget: &BodyBudget) -> Result<RequestBody, QueueError> {
    if body.size_hint().lower() > limit as u64 {
        return Err(too_large_error(limit));
    }
    let mut held = RequestBody::default();
    while let Some(data) = next_chunk(body).await? {
        if held.bytes.len().saturating_add(data.len()) > limit {
            return Err(too_large_error(limit));
        }
        let share = budget.reserve(data.len())?;
        match &mut held.permit {
            Some(whole) => whole.merge(share),
            none => *none = Some(share),
        }
        held.bytes.extend_from_slice(&data);
    }
    Ok(held)
}

async fn next_chunk(body: &mut Body) -> Result<Option<Bytes>, QueueError> {
    loop {
        match std::future::poll_fn(|cx| Pin::new(&mut *body).poll_frame(cx)).await {
            None => return Ok(None),
            Some(Ok(frame)) => {
                if let Ok(data) = frame.into_data() {
                    return Ok(Some(data));
                }
            }
            Some(Err(_)) => {
                return Err(QueueError::new(QueueErrorCode::MalformedPayload, "request body ended early"));
            }
        }
    }
}

async fn drain(body: &mut Body) {
    let mut seen = 0_usize;
    while let Ok(Some(data)) = next_chunk(body).await {
        seen = seen.saturating_add(data.len());
        if seen > QUEUE_DISCARD_BYTES_MAX {
            return;
        }
    }
}
