//! The bodies of requests: each read within its bound, and all of them within one.
//!
//! The content of artifacts is not read here; it goes to its file piece by piece.

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
    QUEUE_INLINE_BODY_BYTES_MAX, QUEUE_SMALL_BODY_BYTES_MAX, QUEUE_UNAUTHENTICATED_BODY_BYTES_MAX,
};

/// Who sends a body.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum CallerKind {
    Authenticated,
    Unauthenticated,
}

/// The largest body of a call.
pub(crate) const fn bytes_max(call: ApiMethod, from: CallerKind) -> usize {
    match (from, call) {
        (CallerKind::Unauthenticated, _) => QUEUE_UNAUTHENTICATED_BODY_BYTES_MAX,
        (CallerKind::Authenticated, ApiMethod::CreateTask) => QUEUE_BODY_BYTES_MAX,
        (CallerKind::Authenticated, ApiMethod::CreateUpload) => QUEUE_INLINE_BODY_BYTES_MAX,
        (CallerKind::Authenticated, _) => QUEUE_SMALL_BODY_BYTES_MAX,
    }
}

/// What all bodies together may hold of this process.
#[derive(Debug, Clone)]
pub(crate) struct BodyBudget(Arc<Semaphore>);

impl BodyBudget {
    pub(crate) fn new() -> Self {
        Self(Arc::new(Semaphore::new(QUEUE_BODIES_BYTES_MAX)))
    }

    /// A share of so many bytes, held until it is dropped.
    pub(crate) fn reserve(&self, bytes: usize) -> Result<OwnedSemaphorePermit, QueueError> {
        let many = u32::try_from(bytes).unwrap_or(u32::MAX);
        Arc::clone(&self.0).try_acquire_many_owned(many).map_err(|_| {
            QueueError::new(
                QueueErrorCode::ServiceUnavailable,
                "Too many requests are being read at once; try again in a moment",
            )
        })
    }
}

/// A body that was read, with its share of the budget.
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

/// Reads a body of at most so many bytes. One that is refused is read on for a moment, so that its sender hears why
/// rather than find its connection broken.
pub(crate) async fn read(
    mut body: Body,
    head: &HeaderMap,
    most: usize,
    budget: &BodyBudget,
) -> Result<RequestBody, QueueError> {
    let read = timeout(QUEUE_BODY_TIMEOUT, read_bounded(&mut body, most, budget)).await;
    let fault = match read {
        Ok(Ok(held)) => return Ok(held),
        Ok(Err(fault)) => fault,
        Err(_) => return Err(timeout_error(QUEUE_BODY_TIMEOUT)),
    };
    // Who waits to be told to go on has not sent it, and is told no.
    if !head.contains_key(EXPECT) {
        timeout(QUEUE_DISCARD_TIMEOUT, drain(&mut body)).await.ok();
    }
    Err(fault)
}

fn timeout_error(limit: Duration) -> QueueError {
    QueueError::new(
        QueueErrorCode::MalformedPayload,
        format!("The request's body did not come within {} s", limit.as_secs()),
    )
}

fn too_large_error(most: usize) -> QueueError {
    QueueError::new(QueueErrorCode::InputTooLarge, format!("Request body too large; at most {most} bytes are read"))
}

async fn read_bounded(body: &mut Body, most: usize, budget: &BodyBudget) -> Result<RequestBody, QueueError> {
    if body.size_hint().lower() > most as u64 {
        return Err(too_large_error(most));
    }
    let mut held = RequestBody::default();
    while let Some(data) = next_chunk(body).await? {
        if held.bytes.len().saturating_add(data.len()) > most {
            return Err(too_large_error(most));
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

/// The next piece of a body; `None` at its end.
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
                return Err(QueueError::new(QueueErrorCode::MalformedPayload, "The request's body was cut short"));
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
