//! Tells which connections of a server have no request, and ends bodies that do not arrive.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::{Body, Bytes, HttpBody};
use axum::{BoxError, Error};
use hyper::body::{Frame, SizeHint};
use tokio::sync::Notify;
use tokio::time::{Sleep, sleep};

/// What one connection does.
pub(super) struct Activity {
    requests: AtomicUsize,
    /// Wakes its server, which may wait for an idle connection.
    is_idle: Arc<Notify>,
}

impl Activity {
    pub(super) fn new(is_idle: Arc<Notify>) -> Self {
        Self { requests: AtomicUsize::new(0), is_idle }
    }

    pub(super) fn begin(self: &Arc<Self>) -> Busy {
        self.requests.fetch_add(1, Ordering::Relaxed);
        Busy(Arc::clone(self))
    }

    pub(super) fn is_idle(&self) -> bool {
        self.requests.load(Ordering::Relaxed) == 0
    }
}

pub(super) struct Busy(Arc<Activity>);

impl Drop for Busy {
    fn drop(&mut self) {
        self.0.requests.fetch_sub(1, Ordering::Relaxed);
        self.0.is_idle.notify_one();
    }
}

/// A body that fails at a time, or keeps its connection busy.
pub(super) struct Watched {
    body: Body,
    ends: Option<Pin<Box<Sleep>>>,
    _busy: Option<Busy>,
}

impl Watched {
    /// A body that fails unless all of it arrives in time.
    pub(super) fn until<B>(body: B, limit: Duration) -> Self
    where
        B: HttpBody<Data = Bytes, Error: Into<BoxError>> + Send + 'static,
    {
        Self { body: Body::new(body), ends: Some(Box::pin(sleep(limit))), _busy: None }
    }

    pub(super) fn holding(body: Body, busy: Busy) -> Self {
        Self { body, ends: None, _busy: Some(busy) }
    }
}

impl HttpBody for Watched {
    type Data = Bytes;
    type Error = Error;

    fn poll_frame(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Error>>> {
        if let Poll::Ready(frame) = Pin::new(&mut self.body).poll_frame(context) {
            return Poll::Ready(frame);
        }
        match &mut self.ends {
            Some(ends) => ends.as_mut().poll(context).map(|()| Some(Err(Error::new("not received in time")))),
            None => Poll::Pending,
        }
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
