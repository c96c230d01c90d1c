//! When a source is opened, polled and left alone: strictly from the highest lane down, from the top again after a
//! hit, a short sleep when all are empty, a longer one after trouble (I16).

use core::time::Duration;

use super::backoff::{self, Backoff};
use super::id::PriorityQueue;
use super::jitter::Jitter;
use super::refusal::Refusal;
use super::time::Instant;
use super::unread_polls::UnreadPolls;

/// The waits after a poll or an open that brought no definite answer.
pub const POLL_RETRY: backoff::Policy =
    backoff::Policy { first: Duration::from_millis(500), max: Duration::from_secs(30) };
/// The waits after a refusal of our credentials or pace.
pub const DENIED_RETRY: backoff::Policy =
    backoff::Policy { first: Duration::from_secs(2), max: Duration::from_secs(120) };

/// How often a recovery without a definite answer is tried before polling goes on without it.
pub const RECOVERY_ATTEMPTS_MAX: u32 = 5;
/// The waits between the tries beside polling that follow, where a poll is unread.
pub const LATE_RECOVERY_RETRY: backoff::Policy =
    backoff::Policy { first: Duration::from_secs(30), max: Duration::from_secs(600) };
/// How many of these there are. They span half an hour at most; by then what a lost poll claimed has run out.
pub const LATE_RECOVERY_ATTEMPTS_MAX: u32 = 6;

/// What the rules of polling depend on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PollPolicy {
    /// The sleep when all lanes are empty, up to a fifth shorter by jitter.
    pub interval: Duration,
}

/// How a source behaves, for the rules that depend on it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Capabilities {
    /// A poll may be held open by the service until there is something to claim.
    pub long_poll: bool,
    /// The source may be asked for claims whose reply was lost.
    pub supports_recovery: bool,
    /// The source tells whether a run is still wanted without touching its lease.
    pub reports_cancellation: bool,
    /// A claim ends with the worker that holds it, however that ends: nothing of it can be reported later.
    pub connection_scoped: bool,
}

/// What a source is ready for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NextCall {
    /// To be opened.
    Open,
    /// To be asked for claims whose reply was lost.
    Recover,
    /// To be polled.
    Poll(PriorityQueue),
    /// Nothing: a call is under way.
    InFlight,
    /// Nothing before this time.
    NotBefore(Instant),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Closed,
    Opening,
    Idle,
    Polling { sent_at: Instant, queue: PriorityQueue },
    Recovering,
}

/// One source as seen by the rules.
#[derive(Debug)]
pub struct Poller {
    policy: PollPolicy,
    capabilities: Capabilities,
    state: State,
    not_before: Instant,
    claim_backoff_until: Instant,
    woken: bool,
    priority_queues: u16,
    next_queue: u16,
    usable_until: Option<Instant>,
    recovery_due: bool,
    /// When it is asked once more although it was given up.
    recovery_retry_at: Option<Instant>,
    unread_polls: UnreadPolls,
    /// What the poll under way has claimed could not be read.
    reply_unreadable: bool,
    recovery_backoff: Backoff,
    late_recovery_backoff: Backoff,
    poll_backoff: Backoff,
    claim_backoff: Backoff,
    open_denied_backoff: Backoff,
    claim_denied_backoff: Backoff,
    /// Our credentials were refused, and nothing has shown since that there is nothing to do.
    denied: bool,
}

impl Poller {
    /// A source that was never opened.
    #[must_use]
    pub const fn new(policy: PollPolicy, capabilities: Capabilities) -> Self {
        Self {
            policy,
            capabilities,
            state: State::Closed,
            not_before: Instant::ORIGIN,
            claim_backoff_until: Instant::ORIGIN,
            woken: false,
            priority_queues: 0,
            next_queue: 0,
            usable_until: None,
            recovery_due: capabilities.supports_recovery,
            recovery_retry_at: None,
            unread_polls: UnreadPolls::EMPTY,
            reply_unreadable: false,
            recovery_backoff: Backoff::NEW,
            late_recovery_backoff: Backoff::NEW,
            poll_backoff: Backoff::NEW,
            claim_backoff: Backoff::NEW,
            open_denied_backoff: Backoff::NEW,
            claim_denied_backoff: Backoff::NEW,
            denied: false,
        }
    }

    /// How the source behaves.
    #[must_use]
    pub const fn capabilities(&self) -> Capabilities {
        self.capabilities
    }

    /// The rules changed.
    pub const fn reconfigure(&mut self, policy: PollPolicy) {
        self.policy = policy;
    }

    /// What it is ready for.
    #[must_use]
    pub fn next_call(&self, now: Instant) -> NextCall {
        let not_before = self.not_before.max(self.claim_backoff_until);
        match self.state {
            State::Opening | State::Polling { .. } | State::Recovering => NextCall::InFlight,
            State::Closed | State::Idle if now < not_before => NextCall::NotBefore(not_before),
            State::Closed => NextCall::Open,
            State::Idle if self.usable_until.is_some_and(|until| now >= until) => NextCall::Open,
            State::Idle if self.recovery_due || self.recovery_retry_at.is_some_and(|at| now >= at) => NextCall::Recover,
            State::Idle => NextCall::Poll(PriorityQueue(self.next_queue)),
        }
    }

    /// Since when it has been ready; earlier means longer waited.
    #[must_use]
    pub const fn ready_since(&self) -> Instant {
        self.not_before
    }

    /// Whether a poll is under way.
    #[must_use]
    pub const fn is_polling(&self) -> bool {
        matches!(self.state, State::Polling { .. } | State::Recovering)
    }

    /// Whether a poll is under way that the service answers as soon as something is pending.
    #[must_use]
    pub const fn is_long_polling(&self) -> bool {
        self.capabilities.long_poll && matches!(self.state, State::Polling { .. })
    }

    /// One word for a person: what it is doing.
    #[must_use]
    pub fn state_name(&self, now: Instant) -> &'static str {
        match self.state {
            State::Opening => "opening",
            State::Polling { .. } => "polling",
            State::Recovering => "recovering",
            State::Closed | State::Idle => match self.next_call(now) {
                NextCall::NotBefore(_) if self.is_failing() => "backing off",
                NextCall::NotBefore(_) => "resting",
                NextCall::Open | NextCall::Recover | NextCall::Poll(_) | NextCall::InFlight => "ready",
            },
        }
    }

    /// Whether its last answers were refusals.
    #[must_use]
    pub const fn is_failing(&self) -> bool {
        self.poll_backoff.tries() > 0
            || self.claim_backoff.tries() > 0
            || self.open_denied_backoff.tries() > 0
            || self.claim_denied_backoff.tries() > 0
    }

    /// It is being opened.
    pub const fn on_open_sent(&mut self) {
        self.state = State::Opening;
    }

    /// It is being asked for lost claims.
    pub const fn on_recovery_sent(&mut self) {
        self.state = State::Recovering;
    }

    /// It is being polled.
    pub fn on_poll_sent(&mut self, lane: PriorityQueue, now: Instant) {
        if lane.0 == 0 {
            self.woken = false;
        }
        if self.capabilities.supports_recovery {
            self.unread_polls.record_sent(now);
        }
        self.state = State::Polling { sent_at: now, queue: lane };
    }

    /// The lanes were found.
    ///
    /// Trouble is over when a poll is answered, not here: URLs that are refused as soon as they are made would be
    /// fetched in a busy loop. For the same reason they are believed for one sleep at least, however short they live.
    pub fn on_opened(&mut self, lanes: u16, usable_until: Option<Instant>, now: Instant) {
        self.open_denied_backoff.reset();
        self.state = State::Idle;
        self.priority_queues = lanes.max(1);
        self.next_queue = 0;
        self.usable_until = usable_until.map(|until| until.max(now.plus(self.policy.interval)));
        self.not_before = now;
    }

    /// A poll brought `found` entries, or a recovery has found all there was.
    pub fn on_answered(&mut self, found: usize, now: Instant, jitter: &mut Jitter) {
        // A recovery says nothing of polls: were it to end their row of waits, polls that fail would be made at full speed
        // where recoveries succeed.
        if matches!(self.state, State::Polling { .. }) {
            self.poll_backoff.reset();
            if self.capabilities.long_poll {
                self.claim_denied_backoff.reset();
            }
            self.denied &= found > 0 && !self.capabilities.long_poll;
            self.mark_poll_read();
        }
        match core::mem::replace(&mut self.state, State::Idle) {
            State::Polling { .. } if found > 0 => {
                self.next_queue = 0;
                self.not_before = now;
            }
            State::Polling { sent_at, queue: lane } => {
                self.next_queue = lane.0.saturating_add(1);
                self.not_before = now;
                if self.next_queue >= self.priority_queues {
                    self.next_queue = 0;
                    if self.woken {
                        return;
                    }
                    // Measured from when the poll was sent: a poll that was held open has slept already, and a
                    // quarantined worker, answered at once, does not spin.
                    let from = if self.capabilities.long_poll { sent_at } else { now };
                    self.not_before = from.plus(self.policy.interval - jitter.below(self.policy.interval / 5)).max(now);
                }
            }
            State::Recovering => {
                self.recovery_due = false;
                self.recovery_retry_at = None;
                self.unread_polls.clear();
                self.recovery_backoff.reset();
                self.late_recovery_backoff.reset();
                self.not_before = now;
            }
            State::Closed | State::Opening | State::Idle => {}
        }
    }

    /// An open, a poll or a recovery was refused. Answers with how many refusals of our credentials there have been in a row.
    pub fn on_refused(&mut self, refusal: Refusal, now: Instant, jitter: &mut Jitter) -> u32 {
        let was = core::mem::replace(&mut self.state, State::Idle);
        self.next_queue = 0;
        if matches!(was, State::Recovering) {
            self.on_recovery_refused(refusal, now, jitter);
            return 0;
        }
        if matches!(was, State::Polling { .. }) {
            if matches!(refusal, Refusal::Retry { .. }) {
                self.request_recovery();
            }
            self.mark_poll_read();
        }
        if matches!(was, State::Opening) || refusal == Refusal::Stale {
            self.state = State::Closed;
        }
        let denied =
            if matches!(was, State::Opening) { &mut self.open_denied_backoff } else { &mut self.claim_denied_backoff };
        let wait = match refusal {
            Refusal::Retry { retry_after: after } => self.poll_backoff.wait(POLL_RETRY, after, jitter),
            Refusal::Throttled { retry_after: after } => self.poll_backoff.wait(DENIED_RETRY, after, jitter),
            // The first stale URL is routine; one right after an open is trouble.
            Refusal::Stale if self.poll_backoff.tries() == 0 => {
                self.poll_backoff.wait(POLL_RETRY, None, jitter);
                Duration::ZERO
            }
            Refusal::Stale | Refusal::Gone | Refusal::Rejected => self.poll_backoff.wait(POLL_RETRY, None, jitter),
            Refusal::Denied => denied.wait(DENIED_RETRY, None, jitter),
        };
        let count = if refusal == Refusal::Denied { denied.tries() } else { 0 };
        self.denied |= refusal == Refusal::Denied;
        self.not_before = now.plus(wait);
        count
    }

    /// Optional by nature (its scopes often are not granted): never in the way of polling for long.
    fn on_recovery_refused(&mut self, refusal: Refusal, now: Instant, jitter: &mut Jitter) {
        let wait = match refusal {
            Refusal::Retry { retry_after: after } => self.recovery_backoff.wait(POLL_RETRY, after, jitter),
            Refusal::Throttled { retry_after: after } => self.recovery_backoff.wait(DENIED_RETRY, after, jitter),
            Refusal::Gone | Refusal::Rejected | Refusal::Stale => self.recovery_backoff.wait(POLL_RETRY, None, jitter),
            Refusal::Denied => Duration::ZERO,
        };
        let passing = matches!(refusal, Refusal::Retry { .. } | Refusal::Throttled { .. });
        // One that was made beside polling is not tried again at once.
        self.recovery_due &= passing && self.recovery_backoff.tries() < RECOVERY_ATTEMPTS_MAX;
        self.recovery_retry_at = None;
        if !self.recovery_due {
            self.recovery_backoff.reset();
            let later = passing
                && !self.unread_polls.polls().is_empty()
                && self.late_recovery_backoff.tries() < LATE_RECOVERY_ATTEMPTS_MAX;
            self.recovery_retry_at =
                later.then(|| now.plus(self.late_recovery_backoff.wait(LATE_RECOVERY_RETRY, None, jitter)));
        }
        if refusal == Refusal::Stale {
            self.state = State::Closed;
        }
        self.not_before = now.plus(wait);
    }

    /// How many polls and opens have failed in a row.
    #[must_use]
    pub const fn consecutive_failures(&self) -> u32 {
        self.poll_backoff.tries()
    }

    /// Whether our credentials were refused, and nothing has shown since that there is nothing to do.
    #[must_use]
    pub const fn is_denied(&self) -> bool {
        self.denied
    }

    /// How often in a row claiming was put off because of claims that failed.
    #[must_use]
    pub const fn consecutive_claim_failures(&self) -> u32 {
        self.claim_backoff.tries()
    }

    /// What the poll under way claimed did not reach us: to be looked for before the next one, where the source can be asked.
    /// To be said before the poll is answered or refused.
    pub const fn request_recovery(&mut self) {
        self.recovery_due = self.capabilities.supports_recovery;
        self.late_recovery_backoff.reset();
        self.reply_unreadable = self.capabilities.supports_recovery;
    }

    /// The poll under way has ended.
    fn mark_poll_read(&mut self) {
        if self.capabilities.supports_recovery && !core::mem::take(&mut self.reply_unreadable) {
            self.unread_polls.record_read();
        }
    }

    /// An earlier life sent a poll so long ago, and is not known to have read its answer.
    pub fn add_unread_poll(&mut self, now: Instant, ago: Duration) {
        if self.capabilities.supports_recovery {
            self.unread_polls.record_previous_process(now, ago);
        }
    }

    /// The polls that nobody has read the answers of, the one under way included.
    #[must_use]
    pub const fn unread_polls(&self) -> &UnreadPolls {
        &self.unread_polls
    }

    /// Whether it is to be asked for lost claims before it is polled.
    #[must_use]
    pub const fn is_recovery_due(&self) -> bool {
        self.recovery_due
    }

    /// A claim from this source was answered in a way that shows our credentials are good.
    pub const fn on_claim_accepted(&mut self) {
        self.claim_denied_backoff.reset();
        self.claim_backoff.reset();
        self.denied = false;
    }

    /// There is no slot for the poll it is ready for. The round is over: what a higher lane said is out of date by the
    /// time there is one (I16).
    pub const fn on_no_free_slot(&mut self) {
        self.next_queue = 0;
    }

    /// A claim from this source met trouble: leave it alone for a while. Answers as [`Poller::on_refused`].
    pub fn on_claim_refused(&mut self, refusal: Refusal, now: Instant, jitter: &mut Jitter) -> u32 {
        let (row, policy, after) = match refusal {
            Refusal::Denied => (&mut self.claim_denied_backoff, DENIED_RETRY, None),
            Refusal::Throttled { retry_after: after } => (&mut self.claim_backoff, DENIED_RETRY, after),
            Refusal::Retry { retry_after: after } => (&mut self.claim_backoff, POLL_RETRY, after),
            Refusal::Gone | Refusal::Rejected | Refusal::Stale => (&mut self.claim_backoff, POLL_RETRY, None),
        };
        // One wait for all claims of a batch that meet the same trouble.
        if now >= self.claim_backoff_until {
            self.claim_backoff_until = now.plus(row.wait(policy, after, jitter));
        }
        if refusal == Refusal::Denied {
            self.denied = true;
            row.tries()
        } else {
            0
        }
    }

    /// Its URLs are refused: open it again before the next poll.
    pub const fn reopen(&mut self) {
        if matches!(self.state, State::Idle) {
            self.state = State::Closed;
        } else {
            self.usable_until = Some(Instant::ORIGIN);
        }
    }

    /// Something became pending: no need to sleep on.
    pub fn wake(&mut self, now: Instant) {
        self.woken = true;
        if self.state == State::Idle && self.poll_backoff.tries() == 0 && self.claim_denied_backoff.tries() == 0 {
            self.not_before = self.not_before.min(now);
        }
    }
}
