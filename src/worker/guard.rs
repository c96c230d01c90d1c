//! Turns a panic inside a future into a value, so that it costs nobody else anything.

use std::future::{Future, poll_fn};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::pin;

/// A future panicked; what it said.
#[derive(Debug)]
pub(super) struct Panicked(pub(super) String);

/// Runs a future to its end or its panic. After a panic the future is only dropped.
pub(super) async fn guarded<F: Future>(future: F) -> Result<F::Output, Panicked> {
    let mut future = pin!(future);
    poll_fn(|context| match catch_unwind(AssertUnwindSafe(|| future.as_mut().poll(context))) {
        Ok(poll) => poll.map(Ok),
        Err(panic) => std::task::Poll::Ready(Err(Panicked(text(panic.as_ref())))),
    })
    .await
}

fn text(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(ToString::to_string);
    text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_else(|| "no text".to_owned())
}
