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

use super::fault::{Code, Fault};
use super::route::Call;
use crate::limits::{
    QUEUE_BODIES_BYTES_MAX, QUEUE_BODY_BYTES_MAX, QUEUE_BODY_TIMEOUT, QUEUE_DISCARD_BYTES_MAX, QUEUE_DISCARD_TIMEOUT,
    QUEUE_INLINE_BODY_BYTES_MAX, QUEUE_SMALL_BODY_BYTES_MAX, QUEUE_STRANGER_BODY_BYTES_MAX,
};

/// Who sends a body.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum From {
    Known,
    Stranger,
}

/// The largest body of a call.
pub(crate) const fn bytes_max(call: Call, from: From) -> usize {
    match (from, call) {
        (From::Stranger, _) => QUEUE_STRANGER_BODY_BYTES_MAX,
        (From::Known, Call::CreateTask) => QUEUE_BODY_BYTES_MAX,
        (From::Known, Call::CreateUpload) => QUEUE_INLINE_BODY_BYTES_MAX,
        (From::Known, _) => QUEUE_SMALL_BODY_BYTES_MAX,
    }
}

/// What all bodies together may hold of this process.
#[derive(Debug, Clone)]
pub(crate) struct Budget(Arc<Semaphore>);

impl Budget {
    pub(crate) fn new() -> Self {
        Self(Arc::new(Semaphore::new(QUEUE_BODIES_BYTES_MAX)))
    }

    /// A share of so many bytes, held until it is dropped.
    pub(crate) fn take(&self, bytes: usize) -> Result<OwnedSemaphorePermit, Fault> {
        let many = u32::try_from(bytes).unwrap_or(u32::MAX);
        Arc::clone(&self.0).try_acquire_many_owned(many).map_err(|_| {
            Fault::new(Code::ServiceUnavailable, "Too many requests are being read at once; try again in a moment")
        })
    }
}

/// A body that was read, with its share of the budget.
#[derive(Debug, Default)]
pub(crate) struct Held {
    bytes: Vec<u8>,
    share: Option<OwnedSemaphorePermit>,
}

impl std::ops::Deref for Held {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.bytes
    }
}

/// Reads a body of at most so many bytes. One that is refused is read on for a moment, so that its sender hears why
/// rather than find its connection broken.
pub(crate) async fn read(mut body: Body, head: &HeaderMap, most: usize, budget: &Budget) -> Result<Held, Fault> {
    let read = timeout(QUEUE_BODY_TIMEOUT, gather(&mut body, most, budget)).await;
    let fault = match read {
        Ok(Ok(held)) => return Ok(held),
        Ok(Err(fault)) => fault,
        Err(_) => return Err(late(QUEUE_BODY_TIMEOUT)),
    };
    // Who waits to be told to go on has not sent it, and is told no.
    if !head.contains_key(EXPECT) {
        timeout(QUEUE_DISCARD_TIMEOUT, discard(&mut body)).await.ok();
    }
    Err(fault)
}

fn late(limit: Duration) -> Fault {
    Fault::new(Code::MalformedPayload, format!("The request's body did not come within {} s", limit.as_secs()))
}

fn too_large(most: usize) -> Fault {
    Fault::new(Code::InputTooLarge, format!("Request body too large; at most {most} bytes are read"))
}

async fn gather(body: &mut Body, most: usize, budget: &Budget) -> Result<Held, Fault> {
    if body.size_hint().lower() > most as u64 {
        return Err(too_large(most));
    }
    let mut held = Held::default();
    while let Some(data) = next(body).await? {
        if held.bytes.len().saturating_add(data.len()) > most {
            return Err(too_large(most));
        }
        let share = budget.take(data.len())?;
        match &mut held.share {
            Some(whole) => whole.merge(share),
            none => *none = Some(share),
        }
        held.bytes.extend_from_slice(&data);
    }
    Ok(held)
}

/// The next piece of a body; `None` at its end.
async fn next(body: &mut Body) -> Result<Option<Bytes>, Fault> {
    loop {
        match std::future::poll_fn(|cx| Pin::new(&mut *body).poll_frame(cx)).await {
            None => return Ok(None),
            Some(Ok(frame)) => {
                if let Ok(data) = frame.into_data() {
                    return Ok(Some(data));
                }
            }
            Some(Err(_)) => return Err(Fault::new(Code::MalformedPayload, "The request's body was cut short")),
        }
    }
}

async fn discard(body: &mut Body) {
    let mut seen = 0_usize;
    while let Ok(Some(data)) = next(body).await {
        seen = seen.saturating_add(data.len());
        if seen > QUEUE_DISCARD_BYTES_MAX {
            return;
        }
    }
}
