//! What goes wrong, by name, and how often it did.

use std::collections::BTreeMap;

macro_rules! faults {
    ($($name:ident),+ $(,)?) => {
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
        pub enum Fault { $($name),+ }
        pub const ALL: &[Fault] = &[$(Fault::$name),+];
    };
}

faults! {
    // The network.
    Refused, BlackHole, DnsFailure, TlsFailure, ReplyLost, ResetMidBody, SlowReply, LateRequest, PartitionedReplies,
    // HTTP.
    Proxy502, Proxy504AfterCommit, Html200, Redirect, InternalErrorBeforeCommit, InternalErrorAfterCommit,
    InternalErrorForMinutes, UnauthorizedOnce, ForbiddenForAWhile, TooManyRequests, TooManyRequestsWithRetryAfter,
    // Azure queues.
    QueueNotFound, UrlsExpired, SameMessageTwice, Undecodable, UnknownTask, HighDequeueCount, MoreThanAsked,
    DeleteForbidden, DeleteMismatch,
    // The queue service.
    TaskCanceled, QueueRestart, Quarantine, ClaimWorkUnasked, ClaimUnreadable, RecoveryPartly, WorkerRequestRejected, SessionLost,
    // The host.
    Crash, Suspend, TimerLate, ClockFast, ClockSlow, Drain, HandBackNoDeadline, HandBack120s, HandBack30s, HandBackNow,
    SecondSignal, Abort, SpotNotice120s, SpotNotice30s, SpotNoticeWithoutTime, SpotNoticeThenSignal, EarlierNotice,
    HostUnfit, ServiceGone, OperatorHandsBack, OperatorCancels,
    // The payload.
    IgnoresTerm, NeverEnds, Malformed, Unavailable, Panics, Intermittent, SlowPrepare, ArtifactMissing, ArtifactUnstored,
    SlowSettle,
}

#[derive(Debug, Default, Clone)]
pub struct FaultTotals(pub BTreeMap<Fault, u64>);

impl FaultTotals {
    pub fn count(&mut self, fault: Fault) {
        *self.0.entry(fault).or_default() += 1;
    }

    pub fn add(&mut self, other: &Self) {
        for (fault, count) in &other.0 {
            *self.0.entry(*fault).or_default() += count;
        }
    }
}
