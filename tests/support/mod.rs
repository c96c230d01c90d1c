//! What several suites use.

pub(crate) mod broker;
#[cfg(feature = "kubernetes")]
pub(crate) mod cluster;
pub(crate) mod exchange;
pub(crate) mod gremlin;
pub(crate) mod headless;
pub(crate) mod process;
pub(crate) mod task_queue;
pub(crate) mod wire;

use std::time::Duration;

/// Longest wait of a test for one event. Everything may be slow while other tests run.
pub(crate) const TEST_TIMEOUT: Duration = Duration::from_secs(90);

pub(crate) async fn within<T>(what: &str, future: impl Future<Output = T>) -> T {
    tokio::time::timeout(TEST_TIMEOUT, future).await.unwrap_or_else(|_| panic!("{what}: not within {TEST_TIMEOUT:?}"))
}

/// Polls the condition until it holds.
pub(crate) async fn until(what: &str, mut condition: impl AsyncFnMut() -> bool) {
    let waiting = async {
        while !condition().await {
            tokio::task::yield_now().await;
        }
    };
    within(what, waiting).await;
}
