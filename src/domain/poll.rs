//! Schedules open, poll and recovery of one source: strictly from the highest priority queue down, from the top again
//! after a hit, a short sleep when all queues are empty, a longer one after failures (I16).

use core::time::Duration;

use super::backoff::{self, Backoff};
use super::host_health::FAULT_BACKOFF;
use super::id::PriorityQueue;
use super::jitter::Jitter;
use super::refusal::Refusal;
use super::time::Instant;
use super::turns::{Demand, Turn};

/// After a poll or an open without a definite answer.
pub const POLL_RETRY: backoff::Policy =
    backoff::Policy { first: Duration::from_millis(500), max: Duration::from_secs(30) };
/// After the credentials were rejected or requests throttled.
pub const DENIED_RETRY: backoff::Policy =
    backoff::Policy { first: Duration::from_secs(2), max: Duration::from_secs(120) };

/// The time between two polls that are not held open, over the quiet sources of a worker. A poll costs it a tenth of a millisecond.
pub const POLL_SPACING: Duration = Duration::from_millis(6);

/// Attempts at a recovery without a definite answer before polling continues without it.
pub const RECOVERY_ATTEMPTS_MAX: u32 = 5;
/// A queue that restarts cuts the long polls of all its workers at once, which send the next ones within this span.
pub const CUT_POLLS_SPREAD: Duration = Duration::from_secs(12);
/// Tolerated difference of two clocks; services report whole seconds.
pub const CLOCK_SKEW_MAX: Duration = Duration::from_secs(2);

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Capabilities {
    /// The service may hold a poll open until there is something to claim.
    pub long_poll: bool,
    /// The source can list the claims of lost replies.
    pub supports_recovery: bool,
    /// The source can tell whether a run was canceled without touching its lease.
    pub reports_cancellation: bool,
    /// A claim ends with the connection of the worker that holds it: it cannot be reported later.
    pub connection_scoped: bool,
    /// A report itself finds out whether the run is still this worker's, so that a late one does no harm.
    pub fenced_reports: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NextCall {
    Open,
    Recover,
    Poll(PriorityQueue),
    InFlight,
    NotBefore(Instant),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
enum State {
    #[default]
    Closed,
    Opening,
    Idle,
    Polling {
        sent_at: Instant,
        queue: PriorityQueue,
        is_closing: bool,
    },
    Recovering,
}

/// The oldest unread claiming poll. Of the claims under this worker's id that no record has, those
/// made since are this worker's; an older one belongs to another worker with the same id.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum UnreadPoll {
    Sent(Instant),
    /// Its age is by the wall clock, which alone spans a reboot.
    OfPreviousProcess {
        age: Duration,
        recorded_at: Instant,
    },
}

impl UnreadPoll {
    pub const fn age(self, now: Instant) -> Duration {
        match self {
            Self::Sent(at) => now.since(at),
            Self::OfPreviousProcess { age, recorded_at } => now.since(recorded_at).saturating_add(age),
        }
    }
}

#[derive(Debug, Default)]
pub struct Poller {
    /// The sleep when all queues are empty, up to a fifth shorter by jitter.
    interval: Duration,
    pub(crate) capabilities: Capabilities,
    state: State,
    not_before: Instant,
    claim_backoff_until: Instant,
    priority_queues: u16,
    next_queue: u16,
    /// What the last poll has shown.
    demand: Demand,
    usable_until: Option<Instant>,
    pub(crate) recovery_due: bool,
    unread_poll: Option<UnreadPoll>,
    /// The answer of the current poll could not be read.
    reply_unreadable: bool,
    recovery_tries: u32,
    /// Recoveries and opens share it: in an outage, waits that begin anew with each kind of call would stay short.
    poll_backoff: Backoff,
    claim_backoff: Backoff,
    open_denied_backoff: Backoff,
    claim_denied_backoff: Backoff,
    /// Of tasks that could not run because this worker may not use what runs them.
    access_backoff: Backoff,
    /// The credentials were rejected, and no answer since has shown otherwise.
    pub(crate) denied: bool,
}

impl Poller {
    pub fn new(interval: Duration, capabilities: Capabilities) -> Self {
        Self { interval, capabilities, recovery_due: capabilities.supports_recovery, ..Self::default() }
    }

    pub const fn set_interval(&mut self, interval: Duration) {
        self.interval = interval;
    }

    /// The polls that find nothing between two sleeps, apart from those that are held open.
    pub fn polls_a_round(&self) -> u32 {
        if self.capabilities.long_poll { 0 } else { self.priority_queues.into() }
    }

    pub fn next_call(&self, now: Instant) -> NextCall {
        let not_before = self.not_before.max(self.claim_backoff_until);
        match self.state {
            State::Opening | State::Polling { .. } | State::Recovering => NextCall::InFlight,
            State::Closed | State::Idle if now < not_before => NextCall::NotBefore(not_before),
            State::Closed => NextCall::Open,
            State::Idle if self.usable_until.is_some_and(|until| now >= until) => NextCall::Open,
            State::Idle if self.recovery_due => NextCall::Recover,
            State::Idle => NextCall::Poll(PriorityQueue(self.next_queue)),
        }
    }

    /// Its place among the sources that share the slots.
    pub fn turn(&self) -> Turn {
        match self.state {
            State::Polling { sent_at, is_closing, .. } if self.capabilities.long_poll => {
                Turn::Holding { since: sent_at, is_closing }
            }
            State::Polling { .. } => Turn::Out,
            State::Idle if !self.recovery_due => {
                Turn::Waiting { since: self.not_before.max(self.claim_backoff_until), demand: self.demand }
            }
            State::Idle | State::Closed | State::Opening | State::Recovering => Turn::Next,
        }
    }

    /// The time of its next call if that is no poll.
    pub fn next_slotless_call(&self) -> Option<Instant> {
        match self.state {
            State::Closed => Some(self.not_before.max(self.claim_backoff_until)),
            State::Idle if self.recovery_due => Some(self.not_before.max(self.claim_backoff_until)),
            State::Idle | State::Opening | State::Polling { .. } | State::Recovering => None,
        }
    }

    /// The open poll is being closed.
    pub const fn on_closing(&mut self) {
        if let State::Polling { is_closing, .. } = &mut self.state {
            *is_closing = true;
        }
    }

    pub const fn is_polling(&self) -> bool {
        matches!(self.state, State::Polling { .. } | State::Recovering)
    }

    pub const fn poll_sent_at(&self) -> Option<Instant> {
        match self.state {
            State::Polling { sent_at, .. } => Some(sent_at),
            State::Closed | State::Opening | State::Idle | State::Recovering => None,
        }
    }

    /// Whether a poll is in flight that the service answers as soon as a task is pending.
    pub const fn is_long_polling(&self) -> bool {
        self.capabilities.long_poll && matches!(self.state, State::Polling { .. })
    }

    pub fn state_name(&self, now: Instant) -> &'static str {
        match self.state {
            State::Opening => "opening",
            State::Polling { .. } => "polling",
            State::Recovering => "recovering",
            State::Closed | State::Idle => match self.next_call(now) {
                NextCall::NotBefore(_) if self.is_failing() => "backing-off",
                NextCall::NotBefore(_) => "waiting",
                NextCall::Open | NextCall::Recover | NextCall::Poll(_) | NextCall::InFlight => "ready",
            },
        }
    }

    pub const fn is_failing(&self) -> bool {
        self.poll_backoff.tries() > 0
            || self.claim_backoff.tries() > 0
            || self.open_denied_backoff.tries() > 0
            || self.claim_denied_backoff.tries() > 0
            || self.access_backoff.tries() > 0
    }

    pub const fn on_open_sent(&mut self) {
        self.state = State::Opening;
    }

    pub const fn on_recovery_sent(&mut self) {
        self.state = State::Recovering;
    }

    pub fn on_poll_sent(&mut self, queue: PriorityQueue, now: Instant) {
        if self.capabilities.supports_recovery {
            self.unread_poll.get_or_insert(UnreadPoll::Sent(now));
        }
        self.state = State::Polling { sent_at: now, queue, is_closing: false };
    }

    /// Failures are reset when a poll is answered, not here: URLs that are rejected as soon as they are issued would
    /// be fetched in a busy loop. For the same reason they are used for one sleep at least, however short their
    /// lifetime.
    pub fn on_opened(&mut self, queues: u16, usable_until: Option<Instant>, now: Instant) {
        self.open_denied_backoff.reset();
        self.state = State::Idle;
        self.priority_queues = queues.max(1);
        self.next_queue = 0;
        self.usable_until = usable_until.map(|until| until.max(now.plus(self.interval)));
        self.not_before = now;
    }

    /// A poll returned `found` entries, or a recovery has completed.
    pub fn on_answered(&mut self, found: usize, now: Instant, jitter: &mut Jitter) {
        // A recovery does not reset the backoff of polls: failing polls would be sent at full speed where recoveries
        // succeed.
        if let State::Polling { sent_at, .. } = self.state {
            self.poll_backoff.reset();
            if self.capabilities.long_poll {
                self.claim_denied_backoff.reset();
            }
            self.denied &= found > 0 && !self.capabilities.long_poll;
            self.mark_poll_read(sent_at);
            self.demand = if found > 0 { Demand::Busy } else { Demand::Quiet };
        }
        match core::mem::replace(&mut self.state, State::Idle) {
            State::Polling { .. } if found > 0 => {
                self.next_queue = 0;
                self.not_before = now;
            }
            State::Polling { sent_at, queue, .. } => {
                self.next_queue = queue.0.saturating_add(1);
                self.not_before = now;
                if self.next_queue >= self.priority_queues {
                    self.next_queue = 0;
                    // Measured from when the poll was sent: a poll that was held open has slept already, and a
                    // quarantined worker, which is answered at once, does not spin.
                    let from = if self.capabilities.long_poll { sent_at } else { now };
                    self.not_before = from.plus(self.interval - jitter.below(self.interval / 5)).max(now);
                }
            }
            State::Recovering => {
                self.recovery_due = false;
                self.unread_poll = None;
                self.recovery_tries = 0;
                self.not_before = now;
            }
            State::Closed | State::Opening | State::Idle => {}
        }
    }

    /// An open, a poll or a recovery was refused. Returns the number of consecutive credential rejections.
    pub fn on_refused(&mut self, refusal: Refusal, now: Instant, jitter: &mut Jitter) -> u32 {
        let was = core::mem::replace(&mut self.state, State::Idle);
        self.next_queue = 0;
        if matches!(was, State::Recovering) {
            self.on_recovery_refused(refusal, now, jitter);
            return 0;
        }
        let mut is_cut = false;
        if let State::Polling { sent_at, .. } = was {
            let was_held = self.capabilities.supports_recovery && now.since(sent_at) > POLL_RETRY.first;
            is_cut = was_held && self.poll_backoff.tries() == 0;
            if matches!(refusal, Refusal::Retry { .. }) {
                self.request_recovery();
            }
            self.mark_poll_read(sent_at);
            self.demand = Demand::Quiet;
        }
        if matches!(was, State::Opening) || refusal == Refusal::Stale {
            self.state = State::Closed;
        }
        let denied =
            if matches!(was, State::Opening) { &mut self.open_denied_backoff } else { &mut self.claim_denied_backoff };
        let wait = match refusal {
            Refusal::Throttled { retry_after } => self.poll_backoff.wait(DENIED_RETRY, retry_after, jitter),
            // The first stale URL is routine; one right after an open is a failure.
            Refusal::Stale if self.poll_backoff.tries() == 0 => {
                self.poll_backoff.wait(POLL_RETRY, None, jitter);
                Duration::ZERO
            }
            Refusal::Denied => denied.wait(DENIED_RETRY, None, jitter),
            Refusal::Retry { .. } | Refusal::Full | Refusal::Stale | Refusal::Gone | Refusal::Rejected => {
                let wait = self.poll_backoff.wait(POLL_RETRY, refusal.retry_after(), jitter);
                if is_cut { wait.max(jitter.below(CUT_POLLS_SPREAD)) } else { wait }
            }
        };
        let count = if refusal == Refusal::Denied { denied.tries() } else { 0 };
        self.denied |= refusal == Refusal::Denied;
        self.not_before = now.plus(wait);
        count
    }

    /// Recovery is optional (its scopes often are not granted) and never delays polling for long.
    fn on_recovery_refused(&mut self, refusal: Refusal, now: Instant, jitter: &mut Jitter) {
        let wait = match refusal {
            Refusal::Denied => Duration::ZERO,
            Refusal::Throttled { retry_after } => self.poll_backoff.wait(DENIED_RETRY, retry_after, jitter),
            Refusal::Retry { .. } | Refusal::Full | Refusal::Gone | Refusal::Rejected | Refusal::Stale => {
                self.poll_backoff.wait(POLL_RETRY, refusal.retry_after(), jitter)
            }
        };
        self.recovery_tries += 1;
        let passing = matches!(refusal, Refusal::Retry { .. } | Refusal::Throttled { .. });
        self.recovery_due = passing && self.recovery_tries < RECOVERY_ATTEMPTS_MAX;
        if !self.recovery_due {
            self.recovery_tries = 0;
        }
        if refusal == Refusal::Stale {
            self.state = State::Closed;
        }
        self.not_before = now.plus(wait);
    }

    pub const fn consecutive_failures(&self) -> u32 {
        self.poll_backoff.tries()
    }

    pub const fn consecutive_claim_failures(&self) -> u32 {
        self.claim_backoff.tries()
    }

    /// A claim of the current poll is lost to us: recover before the next poll. To be called before the poll is
    /// answered or refused.
    pub const fn request_recovery(&mut self) {
        self.recovery_due = self.capabilities.supports_recovery;
        self.reply_unreadable = self.capabilities.supports_recovery;
    }

    fn mark_poll_read(&mut self, sent_at: Instant) {
        let read = !core::mem::take(&mut self.reply_unreadable);
        if read && self.unread_poll == Some(UnreadPoll::Sent(sent_at)) {
            self.unread_poll = None;
        }
    }

    pub const fn set_unread_poll_of_previous_process(&mut self, age: Duration, now: Instant) {
        if self.capabilities.supports_recovery {
            self.unread_poll = Some(UnreadPoll::OfPreviousProcess { age, recorded_at: now });
        }
    }

    pub const fn unread_poll(&self) -> Option<UnreadPoll> {
        self.unread_poll
    }

    pub const fn on_claim_accepted(&mut self) {
        self.claim_denied_backoff.reset();
        self.claim_backoff.reset();
        self.denied = false;
    }

    /// There is no free slot for the due poll. The round restarts: what a higher queue answered will be out of date
    /// by then (I16).
    pub const fn on_no_free_slot(&mut self) {
        self.next_queue = 0;
    }

    /// A claim of this source was refused: back off. Returns as [`Poller::on_refused`].
    pub fn on_claim_refused(&mut self, refusal: Refusal, now: Instant, jitter: &mut Jitter) -> u32 {
        let denied = refusal == Refusal::Denied;
        let row = if denied { &mut self.claim_denied_backoff } else { &mut self.claim_backoff };
        let slow = denied || matches!(refusal, Refusal::Throttled { .. });
        let policy = if slow { DENIED_RETRY } else { POLL_RETRY };
        // One wait for all claims of a batch that are refused alike.
        if now >= self.claim_backoff_until {
            self.claim_backoff_until = now.plus(row.wait(policy, refusal.retry_after(), jitter));
        }
        self.denied |= denied;
        if denied { row.tries() } else { 0 }
    }

    /// What runs the tasks of this source refuses this worker: back off, once for several tasks. Returns whether it is the first time.
    pub fn on_access_denied(&mut self, now: Instant, jitter: &mut Jitter) -> bool {
        let is_first = self.access_backoff.tries() == 0;
        if now >= self.claim_backoff_until {
            self.claim_backoff_until = now.plus(self.access_backoff.wait(FAULT_BACKOFF, None, jitter));
        }
        is_first
    }

    /// A task that was started at `started` ran. One from before the refusal says nothing.
    pub fn on_ran(&mut self, started: Instant) {
        if started >= self.claim_backoff_until {
            self.access_backoff.reset();
        }
    }

    /// True if its tasks would be refused for now.
    pub fn is_access_denied(&self, now: Instant) -> bool {
        self.access_backoff.tries() > 0 && now < self.claim_backoff_until
    }

    /// Its URLs are rejected: open it again before the next poll.
    pub const fn reopen(&mut self) {
        if matches!(self.state, State::Idle) {
            self.state = State::Closed;
        } else {
            self.usable_until = Some(Instant::ORIGIN);
        }
    }
}
