//! What several suites use.

pub(crate) mod broker;
pub(crate) mod browser;
pub(crate) mod cluster;
pub(crate) mod exchange;
pub(crate) mod gremlin;
pub(crate) mod headless;
pub(crate) mod http;
pub(crate) mod process;
pub(crate) mod scripted;
pub(crate) mod server;
pub(crate) mod task_queue;
pub(crate) mod wire;

use std::time::{Duration, Instant, SystemTime};

/// Longest wait of a test for one event. Everything may be slow while other tests run.
pub(crate) const TEST_TIMEOUT: Duration = Duration::from_secs(60);

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

/// Lets time pass for every timer of this test's runtime at once.
pub(crate) async fn pass(time: Duration) {
    tokio::time::pause();
    tokio::time::advance(time).await;
    tokio::time::resume();
}

pub(crate) fn named(variable: &str) -> Option<String> {
    std::env::var(variable).ok().filter(|value| !value.is_empty())
}

/// The value of a variable that tests/run sets. A test that has none is not run, which is a failure in CI.
pub(crate) fn needs(variable: &str) -> Option<String> {
    let value = named(variable);
    let is_needed = std::env::var("CI").is_ok_and(|value| value == "true");
    assert!(value.is_some() || !is_needed, "{variable} is not set; tests/run sets it");
    if value.is_none() {
        eprintln!("NOT TESTED: {variable} is not set; tests/run sets it");
    }
    value
}

/// How long a test repeats itself: as often as its variable says, otherwise for a time.
#[derive(Clone, Copy)]
pub(crate) struct Repeats {
    pub(crate) count: Option<usize>,
    until: Instant,
}

impl Repeats {
    pub(crate) fn new(variable: &str, time: Duration) -> Self {
        let count = std::env::var(variable).ok().and_then(|text| text.parse().ok());
        Self { count, until: Instant::now() + time }
    }

    /// Whether one more round starts after so many. The first always does.
    pub(crate) fn again(&self, rounds: usize) -> bool {
        self.count.map_or_else(|| rounds == 0 || Instant::now() < self.until, |count| rounds < count)
    }
}

/// The seed of tests that choose at random: `JOURNEYMAN_TEST_SEED`, otherwise the number of this day, so that each day tries others.
pub(crate) fn seed() -> u64 {
    let given = std::env::var("JOURNEYMAN_TEST_SEED").ok().and_then(|text| text.parse().ok());
    let day = || SystemTime::UNIX_EPOCH.elapsed().expect("it is after 1970").as_secs() / 86_400;
    let seed = given.unwrap_or_else(day);
    println!("JOURNEYMAN_TEST_SEED={seed}");
    seed
}
