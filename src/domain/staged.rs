//! Work that is launched elsewhere and looked at later: when to look again, how long each phase may last, what is launched
//! again, and what ends it.
//!
//! The times of a phase are those that the external system stamped, compared with its own clock only: hosts whose clocks
//! differ decide the same. A look without an answer decides nothing and costs no budget. Wake-ups make a look early; the
//! scheduled one is what counts on.

use alloc::boxed::Box;
use alloc::collections::BTreeMap;
use alloc::format;
use alloc::vec::Vec;
use core::time::Duration;

use serde::{Deserialize, Serialize};

use super::backoff::{self, Backoff};
use super::jitter::Jitter;
use super::time::Instant;

/// Between calls without an answer.
pub const UNKNOWN_RETRY: backoff::Policy =
    backoff::Policy { first: Duration::from_secs(1), max: Duration::from_secs(60) };
/// Before work that was lost is launched again; doubled each time.
pub const LAUNCH_AGAIN_FIRST: Duration = Duration::from_secs(1);
pub const LAUNCH_AGAIN_MAX: Duration = Duration::from_secs(60);
/// The shortest time between two scheduled looks.
pub const CHECK_IN_MIN: Duration = Duration::from_millis(100);

/// Milliseconds since 1970 by the clock of the external system.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Stamp(pub i64);

impl Stamp {
    /// Zero if `earlier` is in the future.
    pub fn since(self, earlier: Self) -> Duration {
        Duration::from_millis(u64::try_from(self.0.saturating_sub(earlier.0)).unwrap_or(0))
    }

    /// Saturates at the largest representable time.
    pub fn plus(self, span: Duration) -> Self {
        Self(self.0.saturating_add(i64::try_from(span.as_millis()).unwrap_or(i64::MAX)))
    }
}

/// What failed, which decides whether the work is launched again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum FailureClass {
    /// The task's own code.
    Task,
    /// What the task declares: it can never run like this.
    Config,
    /// There is no room for it, such as a quota.
    Capacity,
    /// The external system lost it or disturbed it.
    Infrastructure,
    /// The external system lets this worker launch nothing.
    Access,
}

/// How long a phase may last.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct PhaseLimit {
    pub lasts_max: Duration,
    /// What a phase that lasts longer counts as.
    pub class: FailureClass,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct StagedPolicy {
    /// Other phases have no limit.
    pub phases: BTreeMap<Box<str>, PhaseLimit>,
    /// How often the work is launched again after failures of the external system.
    pub infrastructure_retries: u32,
    /// How often a start is tried again because there was no room.
    pub capacity_retries: u32,
    /// Between two looks, unless the handler says otherwise.
    pub check_interval: Duration,
}

/// All that another worker needs to go on.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct StagedRecord {
    /// How often the work was launched before.
    pub launch: u32,
    /// How the handler finds it; `None` before it has started.
    pub handle: Option<Box<str>>,
    /// The handle that a start named before it failed, or before its answer was lost.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub announced: Option<Box<str>>,
    pub phase: Box<str>,
    pub phase_since: Option<Stamp>,
    /// The number of the next scheduled look. Of two records the lower one is out of date.
    pub seq: u64,
    pub infrastructure_failures: u32,
    pub capacity_failures: u32,
    /// Why it ends once it is gone, and is not launched again.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub failure: Option<(FailureClass, Box<str>)>,
}

/// What the external system says about work that has started.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Progress {
    pub phase: Box<str>,
    /// The time at which the phase began; `None` if the external system does not tell.
    pub since: Option<Stamp>,
    /// The time at which the external system answered.
    pub observed_at: Stamp,
    /// The time of the next look, if nothing happens before.
    pub check_in: Option<Duration>,
}

/// The answer to a call.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum StagedAnswer {
    /// No work of this task exists.
    Absent,
    Started {
        handle: Box<str>,
        progress: Progress,
    },
    Progress(Progress),
    /// A start named work, and ended otherwise.
    Announced {
        handle: Box<str>,
        answer: Box<StagedAnswer>,
    },
    Done,
    /// It was not launched, and may be later.
    Retry {
        after: Duration,
        class: FailureClass,
        reason: Box<str>,
    },
    Failed {
        class: FailureClass,
        reason: Box<str>,
    },
    /// It was started and is gone.
    Lost {
        reason: Box<str>,
    },
    /// It was ended and removed, or is not wanted any more.
    Canceled,
    /// There is a later launch, or a later look is scheduled: the record is out of date.
    Superseded,
    /// No answer, or none that says anything about the work.
    Unknown,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum StagedEvent {
    Answered(StagedAnswer),
    /// Something about the work may have changed.
    WokenUp,
    /// The deadline has come.
    Due,
    CancelRequested,
}

/// A call to make or what else to do. At most one call is in flight.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum StagedAction {
    /// Look for work of this task that was started already.
    Adopt,
    Start,
    Verify,
    /// End the work, if it runs, and remove it.
    Cancel,
    /// The record is to be kept, and `Due` to be told after this time.
    Rest(Duration),
    End(StagedEnd),
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum StagedEnd {
    Done,
    Failed {
        class: FailureClass,
        reason: Box<str>,
    },
    Canceled,
    /// Another worker goes on with it, and nothing is reported here.
    Superseded,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Call {
    Adopt,
    Start,
    Verify,
    /// It is canceled.
    Cancel,
    /// It has failed. Once it is gone, it is launched again or ends.
    Remove(FailureClass),
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
enum Stage {
    Calling(Call),
    Resting { until: Instant, next: Call },
    Ended,
}

/// The state of one piece of work.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct StagedState {
    policy: StagedPolicy,
    record: StagedRecord,
    stage: Stage,
    unknown: Backoff,
    /// A wake-up came during a call that may have looked before it.
    is_woken: bool,
    is_canceled: bool,
    jitter: Jitter,
}

impl StagedState {
    /// Goes on from a record, which is empty for new work. Also that may have been started before, by a worker that is gone.
    pub fn new(policy: StagedPolicy, record: StagedRecord, jitter: Jitter, actions: &mut Vec<StagedAction>) -> Self {
        let first = match (&record.failure, &record.handle) {
            (Some((class, _)), _) => Call::Remove(*class),
            (None, Some(_)) => Call::Verify,
            (None, None) => Call::Adopt,
        };
        let (stage, unknown) = (Stage::Ended, Backoff::NEW);
        let mut state = Self { policy, record, stage, unknown, is_woken: false, is_canceled: false, jitter };
        state.call(first, actions);
        state
    }

    pub fn record(&self) -> &StagedRecord {
        &self.record
    }

    /// The time at which [`StagedEvent::Due`] has to be told.
    pub fn next_deadline(&self) -> Option<Instant> {
        match self.stage {
            Stage::Resting { until, .. } => Some(until),
            Stage::Calling(_) | Stage::Ended => None,
        }
    }

    pub fn handle(&mut self, event: StagedEvent, now: Instant, actions: &mut Vec<StagedAction>) {
        match (event, self.stage.clone()) {
            (StagedEvent::Answered(answer), Stage::Calling(call)) => self.on_answer(call, answer, now, actions),
            (StagedEvent::WokenUp, Stage::Calling(_)) => self.is_woken = true,
            (StagedEvent::WokenUp, Stage::Resting { next: Call::Verify, .. }) => self.call(Call::Verify, actions),
            (StagedEvent::Due, Stage::Resting { until, next }) if until <= now => self.call(next, actions),
            (StagedEvent::CancelRequested, Stage::Calling(_)) => self.is_canceled = true,
            // Also before it has started: a launch without an answer may have done so.
            (StagedEvent::CancelRequested, Stage::Resting { .. }) => {
                self.is_canceled = true;
                self.call(Call::Cancel, actions);
            }
            (StagedEvent::Answered(_) | StagedEvent::WokenUp | StagedEvent::Due, Stage::Resting { .. })
            | (StagedEvent::Due, Stage::Calling(_))
            | (_, Stage::Ended) => {}
        }
    }

    fn on_answer(&mut self, call: Call, answer: StagedAnswer, now: Instant, actions: &mut Vec<StagedAction>) {
        match (answer, call) {
            (StagedAnswer::Unknown, call) | (StagedAnswer::Failed { .. }, call @ (Call::Cancel | Call::Remove(_))) => {
                let next = match call {
                    _ if self.is_canceled => Call::Cancel,
                    // The answer was lost, perhaps, and not the launch.
                    Call::Start => Call::Adopt,
                    Call::Adopt | Call::Verify | Call::Cancel | Call::Remove(_) => call,
                };
                let wait = self.unknown.wait(UNKNOWN_RETRY, None, &mut self.jitter);
                return self.rest(wait, next, now, actions);
            }
            (StagedAnswer::Announced { handle, answer }, call) => {
                self.record.announced = Some(handle);
                return self.on_answer(call, *answer, now, actions);
            }
            (StagedAnswer::Done, _) => {
                self.record.announced = None;
                self.end(StagedEnd::Done, actions);
            }
            (StagedAnswer::Superseded, _) => self.end(StagedEnd::Superseded, actions),
            (
                StagedAnswer::Absent | StagedAnswer::Canceled | StagedAnswer::Retry { .. } | StagedAnswer::Lost { .. },
                call,
            ) if self.is_canceled => {
                if self.record.announced.is_some() && !matches!(call, Call::Cancel | Call::Remove(_)) {
                    return self.call(Call::Cancel, actions);
                }
                self.end(StagedEnd::Canceled, actions);
            }
            // Starts without an answer wait longer each time, although each is looked for before the next.
            (StagedAnswer::Absent, Call::Adopt) => return self.call(Call::Start, actions),
            (StagedAnswer::Absent | StagedAnswer::Canceled | StagedAnswer::Lost { .. }, Call::Remove(class)) => {
                match self.record.failure.take() {
                    Some((class, reason)) => {
                        self.record.handle = None;
                        self.end(StagedEnd::Failed { class, reason }, actions);
                    }
                    None => self.launch_again(class, now, actions),
                }
            }
            (StagedAnswer::Absent, _) => self.on_lost("it is gone", now, actions),
            (StagedAnswer::Canceled, _) => self.end(StagedEnd::Canceled, actions),
            (StagedAnswer::Lost { reason }, _) => self.on_lost(&reason, now, actions),
            // Nothing was made: the launch keeps its name, so that another worker may have made it.
            (StagedAnswer::Retry { after, class, reason }, _) => {
                if self.may_launch_again(class, &reason, actions) {
                    self.count(class);
                    self.rest(after, Call::Adopt, now, actions);
                }
            }
            (StagedAnswer::Started { handle, progress }, call) => {
                (self.record.handle, self.record.announced) = (Some(handle), None);
                self.on_progress(call, progress, now, actions);
            }
            (StagedAnswer::Progress(progress), call) => self.on_progress(call, progress, now, actions),
            (StagedAnswer::Failed { .. }, _) if self.is_canceled => self.call(Call::Cancel, actions),
            (StagedAnswer::Failed { class, reason }, _) => {
                if self.may_launch_again(class, &reason, actions) {
                    self.call(Call::Remove(class), actions);
                }
            }
        }
        self.unknown.reset();
    }

    fn on_progress(&mut self, call: Call, progress: Progress, now: Instant, actions: &mut Vec<StagedAction>) {
        let Progress { phase, since, observed_at, check_in } = progress;
        if self.record.phase != phase {
            self.record.phase_since = None;
            self.record.phase = phase;
        }
        let since = *self.record.phase_since.insert(since.or(self.record.phase_since).unwrap_or(observed_at));
        let check_in = check_in.unwrap_or(self.policy.check_interval).max(CHECK_IN_MIN);
        match call {
            // It takes its time to end.
            Call::Cancel | Call::Remove(_) => return self.rest(check_in, call, now, actions),
            Call::Adopt | Call::Start | Call::Verify if self.is_canceled => return self.call(Call::Cancel, actions),
            Call::Adopt | Call::Start | Call::Verify => {}
        }
        let Some(PhaseLimit { lasts_max, class }) = self.policy.phases.get(&self.record.phase).cloned() else {
            return self.look_again(check_in, now, actions);
        };
        let lasted = observed_at.since(since);
        if lasted < lasts_max {
            return self.look_again(check_in.min(lasts_max - lasted), now, actions);
        }
        let (phase, lasted, limit) = (&self.record.phase, lasted.as_secs(), lasts_max.as_secs());
        let reason = format!("it was {phase} for {lasted} s; the limit is {limit} s");
        // It has waited for room already.
        let is_launched_again = class != FailureClass::Capacity && self.has_retries(class);
        self.record.failure = (!is_launched_again).then(|| (class, reason.into()));
        self.call(Call::Remove(class), actions);
    }

    fn look_again(&mut self, check_in: Duration, now: Instant, actions: &mut Vec<StagedAction>) {
        if core::mem::take(&mut self.is_woken) {
            self.call(Call::Verify, actions);
        } else {
            self.rest(check_in, Call::Verify, now, actions);
        }
    }

    fn on_lost(&mut self, reason: &str, now: Instant, actions: &mut Vec<StagedAction>) {
        if self.may_launch_again(FailureClass::Infrastructure, reason, actions) {
            self.launch_again(FailureClass::Infrastructure, now, actions);
        }
    }

    /// Ends the work if the budget of the class is spent.
    fn may_launch_again(&mut self, class: FailureClass, reason: &str, actions: &mut Vec<StagedAction>) -> bool {
        let has_retries = self.has_retries(class);
        if !has_retries {
            self.end(StagedEnd::Failed { class, reason: reason.into() }, actions);
        }
        has_retries
    }

    fn has_retries(&self, class: FailureClass) -> bool {
        let (failures, retries) = match class {
            FailureClass::Task | FailureClass::Config | FailureClass::Access => (0, 0),
            FailureClass::Infrastructure => (self.record.infrastructure_failures, self.policy.infrastructure_retries),
            FailureClass::Capacity => (self.record.capacity_failures, self.policy.capacity_retries),
        };
        failures < retries
    }

    fn count(&mut self, class: FailureClass) {
        let failures = match class {
            FailureClass::Capacity => &mut self.record.capacity_failures,
            FailureClass::Task | FailureClass::Config | FailureClass::Infrastructure | FailureClass::Access => {
                &mut self.record.infrastructure_failures
            }
        };
        *failures = failures.saturating_add(1);
    }

    /// Each launch has a name of its own, so that an earlier one is not taken for it.
    fn launch_again(&mut self, class: FailureClass, now: Instant, actions: &mut Vec<StagedAction>) {
        self.count(class);
        let StagedRecord { launch, seq, infrastructure_failures, capacity_failures, .. } = self.record;
        let launch = launch.saturating_add(1);
        self.record =
            StagedRecord { launch, seq, infrastructure_failures, capacity_failures, ..StagedRecord::default() };
        let failures = infrastructure_failures.saturating_add(capacity_failures);
        let wait = LAUNCH_AGAIN_FIRST.saturating_mul(2_u32.saturating_pow(failures.saturating_sub(1)));
        self.rest(wait.min(LAUNCH_AGAIN_MAX), Call::Adopt, now, actions);
    }

    fn call(&mut self, call: Call, actions: &mut Vec<StagedAction>) {
        self.is_woken = false;
        self.stage = Stage::Calling(call);
        actions.push(match call {
            Call::Adopt => StagedAction::Adopt,
            Call::Start => StagedAction::Start,
            Call::Verify => StagedAction::Verify,
            Call::Cancel | Call::Remove(_) => StagedAction::Cancel,
        });
    }

    fn rest(&mut self, wait: Duration, next: Call, now: Instant, actions: &mut Vec<StagedAction>) {
        self.record.seq = self.record.seq.saturating_add(1);
        self.stage = Stage::Resting { until: now.plus(wait), next };
        actions.push(StagedAction::Rest(wait));
    }

    fn end(&mut self, end: StagedEnd, actions: &mut Vec<StagedAction>) {
        self.stage = Stage::Ended;
        actions.push(StagedAction::End(end));
    }
}
