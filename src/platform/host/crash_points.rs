//! Named points at which tests kill a worker, to check its recovery.
//!
//! Only in debug builds: `JOURNEYMAN_CRASH_POINT=NAME` kills the process when it reaches the point, and `NAME:3` when it
//! reaches it for the third time.

use std::sync::LazyLock;
use std::sync::atomic::{AtomicU32, Ordering};

/// Points of every source, and of Taskcluster alone.
pub const CLAIM_CRASH_POINTS: &[&str] = &[
    "startup-journal-read",
    "startup-processes-killed",
    "startup-dirs-cleared",
    "journal-before-rename",
    "claim-granted",
    "journal-before-write",
    "journal-torn-write",
    "journal-before-sync",
    "journal-after-sync",
    "prepared",
    "spawned",
    "reclaimed",
    "exited",
    "before-upload",
    "after-upload",
    "before-report",
    "after-report",
    "before-journal-close",
    "releasing",
    "taken-over",
    "before-delete",
    "after-delete",
];

/// Points of AMQP requests.
pub const REQUEST_CRASH_POINTS: &[&str] =
    &["request-delivered", "request-copied", "request-published", "request-confirmed", "request-acknowledged"];

/// Points of requests whose work runs elsewhere.
pub const DEFERRAL_CRASH_POINTS: &[&str] = &["deferral-confirmed"];

/// Points of pods.
pub const POD_CRASH_POINTS: &[&str] = &["before-discard"];

/// Points of the builds of a Screwdriver.
pub const BUILD_CRASH_POINTS: &[&str] = &["build-pod-created", "build-secret-created", "build-failure-reported"];

/// Points of events and webhooks.
pub const NOTIFIER_CRASH_POINTS: &[&str] = &["notifier-stored", "notifier-sent", "notifier-committed"];

/// Points of Mistral's queues, beside those of events.
pub const MISTRAL_CRASH_POINTS: &[&str] = &["mistral-consumer-ended"];

/// Points of requests in a ZooKeeper.
pub const ZOOKEEPER_CRASH_POINTS: &[&str] =
    &["zookeeper-claimed", "zookeeper-locked", "zookeeper-running", "zookeeper-completed"];

static TRIGGER: LazyLock<Option<CrashTrigger>> = LazyLock::new(|| {
    let text = std::env::var_os("JOURNEYMAN_CRASH_POINT")?.into_string().ok()?;
    let (name, hits) = text.split_once(':').unwrap_or((&text, "1"));
    Some(CrashTrigger { name: name.to_owned(), remaining_hits: AtomicU32::new(hits.parse().unwrap_or(1)) })
});

struct CrashTrigger {
    name: String,
    remaining_hits: AtomicU32,
}

pub(crate) fn crash_due(name: &str) -> bool {
    if !cfg!(debug_assertions) {
        return false;
    }
    let known = [
        CLAIM_CRASH_POINTS,
        REQUEST_CRASH_POINTS,
        DEFERRAL_CRASH_POINTS,
        POD_CRASH_POINTS,
        BUILD_CRASH_POINTS,
        NOTIFIER_CRASH_POINTS,
        MISTRAL_CRASH_POINTS,
        ZOOKEEPER_CRASH_POINTS,
    ];
    debug_assert!(known.iter().any(|points| points.contains(&name)), "{name}");
    let trigger = TRIGGER.as_ref().filter(|trigger| trigger.name == name);
    trigger.is_some_and(|trigger| trigger.remaining_hits.fetch_sub(1, Ordering::Relaxed) == 1)
}

/// Ends the process like `kill -9`: no destructor runs, no buffer is flushed.
pub fn crash() {
    rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL).ok();
    std::process::abort();
}

pub fn crash_point(name: &str) {
    if crash_due(name) {
        crash();
    }
}
