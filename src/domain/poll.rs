//! When a source is opened, polled and left alone: strictly from the highest lane down, from the top again after a
//! hit, a short sleep when all are empty, a longer one after trouble (I16).

use core::time::Duration;

use super::backoff::{self, Backoff};
use super::id::Lane;
use super::jitter::Jitter;
use super::refusal::Refusal;
use super::time::Instant;
use super::unread::Unread;

/// The waits after a poll or an open that brought no definite answer.
pub const TROUBLE: backoff::Policy =
    backoff::Policy { first: Duration::from_millis(500), max: Duration::from_secs(30) };
/// The waits after a refusal of our credentials or pace.
pub const DENIED: backoff::Policy = backoff::Policy { first: Duration::from_secs(2), max: Duration::from_secs(120) };

/// How often a recovery without a definite answer is tried before polling goes on without it.
pub const RECOVERIES_MAX: u32 = 5;
/// The waits between the tries beside polling that follow, where a poll is unread.
pub const RECOVER_LATER: backoff::Policy =
    backoff::Policy { first: Duration::from_secs(30), max: Duration::from_secs(600) };
/// How many of these there are. They span half an hour at most; by then what a lost poll claimed has run out.
pub const RECOVERIES_LATER_MAX: u32 = 6;

/// What the rules of polling depend on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Policy {
    /// The sleep when all lanes are empty, up to a fifth shorter by jitter.
    pub interval: Duration,
}

/// How a source behaves, for the rules that depend on it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Manner {
    /// A poll may be held open by the service until there is something to claim.
    pub long_poll: bool,
    /// The source may be asked for claims whose reply was lost.
    pub recovers: bool,
    /// The source tells whether a run is still wanted without touching its lease.
    pub tells_canceled: bool,
    /// A claim ends with the worker that holds it, however that ends: nothing of it can be reported later.
    pub ends_with_worker: bool,
}

/// What a source is ready for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ready {
    /// To be opened.
    Open,
    /// To be asked for claims whose reply was lost.
    Recover,
    /// To be polled.
    Poll(Lane),
    /// Nothing: a call is under way.
    Busy,
    /// Nothing before this time.
    At(Instant),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Closed,
    Opening,
    Idle,
    Polling { sent_at: Instant, lane: Lane },
    Recovering,
}

/// One source as seen by the rules.
#[derive(Debug)]
pub struct Poller {
    policy: Policy,
    manner: Manner,
    state: State,
    not_before: Instant,
    held_until: Instant,
    woken: bool,
    lanes: u16,
    cursor: u16,
    usable_until: Option<Instant>,
    recover: bool,
    /// When it is asked once more although it was given up.
    recover_at: Option<Instant>,
    unread: Unread,
    /// What the poll under way has claimed could not be read.
    garbled: bool,
    recoveries: Backoff,
    recoveries_later: Backoff,
    trouble: Backoff,
    trouble_claim: Backoff,
    denied_open: Backoff,
    denied_claim: Backoff,
    /// Our credentials were refused, and nothing has shown since that there is nothing to do.
    denied: bool,
}

impl Poller {
    /// A source that was never opened.
    #[must_use]
    pub const fn new(policy: Policy, manner: Manner) -> Self {
        Self {
            policy,
            manner,
            state: State::Closed,
            not_before: Instant::ORIGIN,
            held_until: Instant::ORIGIN,
            woken: false,
            lanes: 0,
            cursor: 0,
            usable_until: None,
            recover: manner.recovers,
            recover_at: None,
            unread: Unread::NONE,
            garbled: false,
            recoveries: Backoff::NEW,
            recoveries_later: Backoff::NEW,
            trouble: Backoff::NEW,
            trouble_claim: Backoff::NEW,
            denied_open: Backoff::NEW,
            denied_claim: Backoff::NEW,
            denied: false,
        }
    }

    /// How the source behaves.
    #[must_use]
    pub const fn manner(&self) -> Manner {
        self.manner
    }

    /// The rules changed.
    pub const fn reconfigure(&mut self, policy: Policy) {
        self.policy = policy;
    }

    /// What it is ready for.
    #[must_use]
    pub fn ready(&self, now: Instant) -> Ready {
        let not_before = self.not_before.max(self.held_until);
        match self.state {
            State::Opening | State::Polling { .. } | State::Recovering => Ready::Busy,
            State::Closed | State::Idle if now < not_before => Ready::At(not_before),
            State::Closed => Ready::Open,
            State::Idle if self.usable_until.is_some_and(|until| now >= until) => Ready::Open,
            State::Idle if self.recover || self.recover_at.is_some_and(|at| now >= at) => Ready::Recover,
            State::Idle => Ready::Poll(Lane(self.cursor)),
        }
    }

    /// Since when it has been ready; earlier means longer waited.
    #[must_use]
    pub const fn waiting_since(&self) -> Instant {
        self.not_before
    }

    /// Whether a poll is under way.
    #[must_use]
    pub const fn polling(&self) -> bool {
        matches!(self.state, State::Polling { .. } | State::Recovering)
    }

    /// Whether a poll is under way that the service answers as soon as something is pending.
    #[must_use]
    pub const fn waiting_for_work(&self) -> bool {
        self.manner.long_poll && matches!(self.state, State::Polling { .. })
    }

    /// One word for a person: what it is doing.
    #[must_use]
    pub fn step(&self, now: Instant) -> &'static str {
        match self.state {
            State::Opening => "opening",
            State::Polling { .. } => "polling",
            State::Recovering => "recovering",
            State::Closed | State::Idle => match self.ready(now) {
                Ready::At(_) if self.in_trouble() => "backing off",
                Ready::At(_) => "resting",
                Ready::Open | Ready::Recover | Ready::Poll(_) | Ready::Busy => "ready",
            },
        }
    }

    /// Whether its last answers were refusals.
    #[must_use]
    pub const fn in_trouble(&self) -> bool {
        self.trouble.tries() > 0
            || self.trouble_claim.tries() > 0
            || self.denied_open.tries() > 0
            || self.denied_claim.tries() > 0
    }

    /// It is being opened.
    pub const fn opening(&mut self) {
        self.state = State::Opening;
    }

    /// It is being asked for lost claims.
    pub const fn recovering(&mut self) {
        self.state = State::Recovering;
    }

    /// It is being polled.
    pub fn poll_sent(&mut self, lane: Lane, now: Instant) {
        if lane.0 == 0 {
            self.woken = false;
        }
        if self.manner.recovers {
            self.unread.sent(now);
        }
        self.state = State::Polling { sent_at: now, lane };
    }

    /// The lanes were found.
    ///
    /// Trouble is over when a poll is answered, not here: URLs that are refused as soon as they are made would be
    /// fetched in a busy loop. For the same reason they are believed for one sleep at least, however short they live.
    pub fn opened(&mut self, lanes: u16, usable_until: Option<Instant>, now: Instant) {
        self.denied_open.reset();
        self.state = State::Idle;
        self.lanes = lanes.max(1);
        self.cursor = 0;
        self.usable_until = usable_until.map(|until| until.max(now.plus(self.policy.interval)));
        self.not_before = now;
    }

    /// A poll brought `found` entries, or a recovery has found all there was.
    pub fn answered(&mut self, found: usize, now: Instant, jitter: &mut Jitter) {
        // A recovery says nothing of polls: were it to end their row of waits, polls that fail would be made at full speed
        // where recoveries succeed.
        if matches!(self.state, State::Polling { .. }) {
            self.trouble.reset();
            if self.manner.long_poll {
                self.denied_claim.reset();
            }
            self.denied &= found > 0 && !self.manner.long_poll;
            self.poll_read();
        }
        match core::mem::replace(&mut self.state, State::Idle) {
            State::Polling { .. } if found > 0 => {
                self.cursor = 0;
                self.not_before = now;
            }
            State::Polling { sent_at, lane } => {
                self.cursor = lane.0.saturating_add(1);
                self.not_before = now;
                if self.cursor >= self.lanes {
                    self.cursor = 0;
                    if self.woken {
                        return;
                    }
                    // Measured from when the poll was sent: a poll that was held open has slept already, and a
                    // quarantined worker, answered at once, does not spin.
                    let from = if self.manner.long_poll { sent_at } else { now };
                    self.not_before = from.plus(self.policy.interval - jitter.below(self.policy.interval / 5)).max(now);
                }
            }
            State::Recovering => {
                self.recover = false;
                self.recover_at = None;
                self.unread.accounted();
                self.recoveries.reset();
                self.recoveries_later.reset();
                self.not_before = now;
            }
            State::Closed | State::Opening | State::Idle => {}
        }
    }

    /// An open, a poll or a recovery was refused. Answers with how many refusals of our credentials there have been in a row.
    pub fn refused(&mut self, refusal: Refusal, now: Instant, jitter: &mut Jitter) -> u32 {
        let was = core::mem::replace(&mut self.state, State::Idle);
        self.cursor = 0;
        if matches!(was, State::Recovering) {
            self.recovery_refused(refusal, now, jitter);
            return 0;
        }
        if matches!(was, State::Polling { .. }) {
            if matches!(refusal, Refusal::Retry { .. }) {
                self.look_for_lost();
            }
            self.poll_read();
        }
        if matches!(was, State::Opening) || refusal == Refusal::Stale {
            self.state = State::Closed;
        }
        let denied = if matches!(was, State::Opening) { &mut self.denied_open } else { &mut self.denied_claim };
        let wait = match refusal {
            Refusal::Retry { after } => self.trouble.wait(TROUBLE, after, jitter),
            Refusal::Throttled { after } => self.trouble.wait(DENIED, after, jitter),
            // The first stale URL is routine; one right after an open is trouble.
            Refusal::Stale if self.trouble.tries() == 0 => {
                self.trouble.wait(TROUBLE, None, jitter);
                Duration::ZERO
            }
            Refusal::Stale | Refusal::Gone | Refusal::Rejected => self.trouble.wait(TROUBLE, None, jitter),
            Refusal::Denied => denied.wait(DENIED, None, jitter),
        };
        let count = if refusal == Refusal::Denied { denied.tries() } else { 0 };
        self.denied |= refusal == Refusal::Denied;
        self.not_before = now.plus(wait);
        count
    }

    /// Optional by nature (its scopes often are not granted): never in the way of polling for long.
    fn recovery_refused(&mut self, refusal: Refusal, now: Instant, jitter: &mut Jitter) {
        let wait = match refusal {
            Refusal::Retry { after } => self.recoveries.wait(TROUBLE, after, jitter),
            Refusal::Throttled { after } => self.recoveries.wait(DENIED, after, jitter),
            Refusal::Gone | Refusal::Rejected | Refusal::Stale => self.recoveries.wait(TROUBLE, None, jitter),
            Refusal::Denied => Duration::ZERO,
        };
        let passing = matches!(refusal, Refusal::Retry { .. } | Refusal::Throttled { .. });
        // One that was made beside polling is not tried again at once.
        self.recover &= passing && self.recoveries.tries() < RECOVERIES_MAX;
        self.recover_at = None;
        if !self.recover {
            self.recoveries.reset();
            let later =
                passing && !self.unread.polls().is_empty() && self.recoveries_later.tries() < RECOVERIES_LATER_MAX;
            self.recover_at = later.then(|| now.plus(self.recoveries_later.wait(RECOVER_LATER, None, jitter)));
        }
        if refusal == Refusal::Stale {
            self.state = State::Closed;
        }
        self.not_before = now.plus(wait);
    }

    /// How many polls and opens have failed in a row.
    #[must_use]
    pub const fn troubles(&self) -> u32 {
        self.trouble.tries()
    }

    /// Whether our credentials were refused, and nothing has shown since that there is nothing to do.
    #[must_use]
    pub const fn is_denied(&self) -> bool {
        self.denied
    }

    /// How often in a row claiming was put off because of claims that failed.
    #[must_use]
    pub const fn claim_troubles(&self) -> u32 {
        self.trouble_claim.tries()
    }

    /// What the poll under way claimed did not reach us: to be looked for before the next one, where the source can be asked.
    /// To be said before the poll is answered or refused.
    pub const fn look_for_lost(&mut self) {
        self.recover = self.manner.recovers;
        self.recoveries_later.reset();
        self.garbled = self.manner.recovers;
    }

    /// The poll under way has ended.
    fn poll_read(&mut self) {
        if self.manner.recovers && !core::mem::take(&mut self.garbled) {
            self.unread.read();
        }
    }

    /// An earlier life sent a poll so long ago, and is not known to have read its answer.
    pub fn poll_left(&mut self, now: Instant, ago: Duration) {
        if self.manner.recovers {
            self.unread.left(now, ago);
        }
    }

    /// The polls that nobody has read the answers of, the one under way included.
    #[must_use]
    pub const fn unread(&self) -> &Unread {
        &self.unread
    }

    /// Whether it is to be asked for lost claims before it is polled.
    #[must_use]
    pub const fn owes_a_recovery(&self) -> bool {
        self.recover
    }

    /// A claim from this source was answered in a way that shows our credentials are good.
    pub const fn accepted(&mut self) {
        self.denied_claim.reset();
        self.trouble_claim.reset();
        self.denied = false;
    }

    /// There is no slot for the poll it is ready for. The round is over: what a higher lane said is out of date by the
    /// time there is one (I16).
    pub const fn passed_over(&mut self) {
        self.cursor = 0;
    }

    /// A claim from this source met trouble: leave it alone for a while. Answers as [`Poller::refused`].
    pub fn hold(&mut self, refusal: Refusal, now: Instant, jitter: &mut Jitter) -> u32 {
        let (row, policy, after) = match refusal {
            Refusal::Denied => (&mut self.denied_claim, DENIED, None),
            Refusal::Throttled { after } => (&mut self.trouble_claim, DENIED, after),
            Refusal::Retry { after } => (&mut self.trouble_claim, TROUBLE, after),
            Refusal::Gone | Refusal::Rejected | Refusal::Stale => (&mut self.trouble_claim, TROUBLE, None),
        };
        // One wait for all claims of a batch that meet the same trouble.
        if now >= self.held_until {
            self.held_until = now.plus(row.wait(policy, after, jitter));
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
        if self.state == State::Idle && self.trouble.tries() == 0 && self.denied_claim.tries() == 0 {
            self.not_before = self.not_before.min(now);
        }
    }
}
