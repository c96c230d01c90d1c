//! Turns a panic in a future, or in its drop, into a value.

use std::future::{Future, poll_fn};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;

use journeyman_platform::tasks::panic_message;

#[derive(Debug)]
pub(super) struct Panicked(pub(super) String);

/// After a panic the future is only dropped.
pub(super) async fn catch_panic<F: Future + Unpin>(future: F) -> Result<F::Output, Panicked> {
    let mut future = GuardedDrop(Some(future));
    poll_fn(|context| match &mut future.0 {
        Some(future) => match catch_unwind(AssertUnwindSafe(|| Pin::new(future).poll(context))) {
            Ok(poll) => poll.map(Ok),
            Err(panic) => std::task::Poll::Ready(Err(Panicked(panic_message(panic.as_ref())))),
        },
        None => std::task::Poll::Pending,
    })
    .await
}

/// Drops a handler's or adapter's value; a panic is logged.
pub(super) fn drop_guarded<T>(value: T) {
    if let Err(panic) = catch_unwind(AssertUnwindSafe(|| drop(value))) {
        tracing::error!(panic = panic_message(panic.as_ref()), "a handler panicked while it was dropped");
    }
}

struct GuardedDrop<T>(Option<T>);

impl<T> Drop for GuardedDrop<T> {
    fn drop(&mut self) {
        drop_guarded(self.0.take());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Bomb;

    impl Drop for Bomb {
        fn drop(&mut self) {
            panic!("dropped");
        }
    }

    #[tokio::test]
    async fn a_panic_is_a_value_and_that_of_a_drop_is_nothing() {
        let both = catch_panic(Box::pin(async {
            let _bomb = Bomb;
            std::future::ready(()).await;
        }));
        // The drop at the end of the block is part of the future's last poll.
        assert_eq!(both.await.unwrap_err().0, "dropped");
        let pending = catch_panic(Box::pin(async {
            let _bomb = Bomb;
            std::future::pending::<()>().await;
        }));
        assert!(tokio::time::timeout(std::time::Duration::ZERO, pending).await.is_err());
        drop_guarded(Bomb);
    }
}
