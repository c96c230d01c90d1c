//! The whole worker as one machine: sources, slots, messages, claims and the way out.
//!
//! `handle` takes what happened, `next_effect` says what to do, `next_deadline` when to come back. Every effect that starts
//! a call is answered by exactly one event, whatever becomes of the call; an answer about something already over is ignored.

mod claims;
mod event;
mod leave;
mod left_over;
mod messages;
mod ring;
mod sources;
mod stay;

use alloc::boxed::Box;
use alloc::collections::{BTreeMap, BTreeSet, VecDeque};
use alloc::vec::Vec;
use core::time::Duration;

use super::backoff::{self, Backoff};
use super::claim::{self, Happening, Machine};
use super::fitness::Fitness;
use super::id::{Deployment, Run, SourceId, Token};
use super::jitter::Jitter;
use super::outcome::Unprepared;
use super::poll::{self, Poller, Ready};
use super::service::Serving;
use super::slots::{Slot, Slots};
use super::time::Instant;

pub use event::{Alert, Brought, Effect, Event, Exit, Found, Haul, Lanes, LeftOver, Retried, Seen};
use ring::Ring;
use stay::Staying;
pub use stay::{Claiming, Hold, Least, Room, Stay};

/// The most that is asked for in one poll; the protocol's own limit.
pub const POLL_MAX: u32 = 32;
/// How often a delete is sent in all.
pub const DELETES_MAX: u32 = 6;
/// The waits between them; together well within the minutes that a message stays invisible.
pub const DELETE_RETRY: backoff::Policy =
    backoff::Policy { first: Duration::from_millis(500), max: Duration::from_secs(10) };
/// After how many failures in a row a source that gives no definite answer is told of; two to three minutes of them.
pub const TROUBLES_SAID: u32 = 10;
/// After how many more it is told of again; most of an hour.
pub const TROUBLES_SAID_EVERY: u32 = 100;
/// How many messages are remembered as having raised their alert.
pub const ALERTED_MAX: usize = 4096;
/// How many ended runs are remembered, and how many that were given up, so that none is taken up again.
pub const ENDED_MAX: usize = 4096;

/// What the rules depend on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Policy {
    /// How many claims may be held at once.
    pub capacity: u32,
    /// How sources are polled.
    pub poll: poll::Policy,
    /// How claims are kept.
    pub claim: claim::Policy,
    /// A dequeue count above this raises an alert.
    pub dequeue_alert: u32,
    /// How many refusals of our credentials in a row end the worker.
    pub denied_max: u32,
    /// How long a drain may take before what is left is handed back; `None` is as long as it takes.
    pub drain_deadline: Option<Duration>,
    /// When it leaves by itself.
    pub stay: Stay,
    /// What the host must have left for claiming to go on.
    pub least: Least,
    /// What becomes of running payloads once it is known when the host goes.
    pub noticed: Noticed,
}

/// What becomes of running payloads once it is known when the host goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Noticed {
    /// They may finish. What still runs this long before the host goes is handed back; earlier where grace and reports need
    /// more.
    MayFinish {
        /// How long before.
        margin: Duration,
    },
    /// They are handed back at once.
    HandedBack,
}

impl Noticed {
    /// When payloads that have `grace` to end are told to, for a host that goes at `deadline`; `None` is at once.
    #[must_use]
    pub fn hand_back_at(self, deadline: Instant, grace: Duration) -> Option<Instant> {
        match self {
            Self::MayFinish { margin } => Some(deadline.minus(margin.max(grace.saturating_add(claim::REPORT_RESERVE)))),
            Self::HandedBack => None,
        }
    }
}

/// Where the worker is on its way out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Mode {
    Running,
    Draining { since: Instant },
    HandingBack { deadline: Option<Instant> },
    Exited,
}

#[derive(Debug)]
struct Held {
    source: SourceId,
    run: Run,
    slot: Option<Slot>,
    machine: Machine,
    overlap: Overlap,
    /// When its payload was started.
    started: Option<Instant>,
    proof: Proof,
    /// The receptions of messages that led here; deleted when the request is answered.
    messages: Vec<Token>,
    due: Option<Instant>,
}

/// Whether a payload has been counted as one that the host could run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Proof {
    Owed,
    Given,
}

/// An entry of a queue, at every reception. Two sources may use the same names.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
struct Entry {
    source: SourceId,
    id: Box<str>,
}

#[derive(Debug)]
struct Kept {
    source: SourceId,
    id: Box<str>,
    dequeue_count: u32,
    deletion: Deletion,
    retry: Backoff,
}

/// Whether the operator was told of a payload that may have outlived its claim (I7).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Overlap {
    Unsaid,
    Said,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Deletion {
    NotYet,
    UnderWay,
    At(Instant),
}

/// A run, wherever it is heard of. Two deployments may use the same names for different tasks.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
struct Work {
    deployment: Deployment,
    run: Run,
}

/// A source as the rules know it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Place {
    /// How it behaves.
    pub manner: poll::Manner,
    /// The service behind it.
    pub deployment: Deployment,
}

#[derive(Debug)]
struct Feed {
    deployment: Deployment,
    poller: Poller,
    reserved: Vec<Slot>,
    accepted: bool,
    polled: bool,
    /// How many claims under our name nobody here knows of, as it was told last.
    others: usize,
    serving: Serving,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Timer {
    at: Instant,
    claim: Token,
}

/// A claim as a person may look at it.
#[derive(Debug, Clone, Copy)]
pub struct ClaimView<'a> {
    /// Names it.
    pub claim: Token,
    /// Where it comes from.
    pub source: SourceId,
    /// The run.
    pub run: &'a Run,
    /// Lease and step.
    pub machine: &'a Machine,
}

/// A source as a person may look at it.
#[derive(Debug, Clone, Copy)]
pub struct SourceView<'a> {
    /// How it is polled.
    pub poller: &'a Poller,
    /// The slots that wait in its poll.
    pub asked: usize,
    /// Whether what runs its tasks can take any.
    pub serving: Serving,
    /// How many claims the service counts under our name that nobody here knows of, as it was told last.
    pub others: usize,
}

/// The worker.
#[derive(Debug)]
pub struct Worker {
    policy: Policy,
    jitter: Jitter,
    mode: Mode,
    exit: Exit,
    /// When the first thing happened.
    began: Option<Instant>,
    /// When the host goes, by the earliest notice.
    host_goes: Option<Instant>,
    /// The hand back's deadline has passed: only payloads are waited for.
    overdue: bool,
    staying: Staying,
    /// When a drain turns into a hand back, where somebody said so.
    drain_by: Option<Instant>,
    fitness: Fitness,
    slots: Slots,
    feeds: Vec<Feed>,
    held: BTreeMap<Token, Held>,
    by_run: BTreeMap<Work, Token>,
    /// Claims whose payload may still be there, with the slot of those that are over.
    occupied: BTreeMap<Token, Option<Slot>>,
    kept: BTreeMap<Token, Kept>,
    /// Sources whose poll an order waits for.
    awaited: BTreeSet<SourceId>,
    /// When each claim wants to be woken.
    timers: BTreeSet<Timer>,
    alerted: Ring<Entry>,
    /// Runs that the queue has an outcome for.
    ended: Ring<Work>,
    /// Runs that were given up here. Apart from the others, since the queue may still count one as ours when thousands have
    /// ended after it.
    given_up: Ring<Work>,
    effects: VecDeque<Effect>,
}

impl Worker {
    /// A worker for these sources, in their order. `seed` decides every jitter.
    #[must_use]
    pub fn new(policy: Policy, sources: &[Place], seed: u64) -> Self {
        let feed = |place: &Place| Feed {
            deployment: place.deployment,
            poller: Poller::new(policy.poll, place.manner),
            reserved: Vec::new(),
            accepted: false,
            polled: false,
            others: 0,
            serving: Serving::Up,
        };
        Self {
            jitter: Jitter::seeded(seed),
            mode: Mode::Running,
            exit: Exit::Drained,
            began: None,
            host_goes: None,
            overdue: false,
            staying: Staying::default(),
            drain_by: None,
            fitness: Fitness::new(),
            slots: Slots::new(policy.capacity),
            feeds: sources.iter().map(feed).collect(),
            held: BTreeMap::new(),
            by_run: BTreeMap::new(),
            occupied: BTreeMap::new(),
            kept: BTreeMap::new(),
            awaited: BTreeSet::new(),
            timers: BTreeSet::new(),
            alerted: Ring::of(ALERTED_MAX),
            ended: Ring::of(ENDED_MAX),
            given_up: Ring::of(ENDED_MAX),
            effects: VecDeque::new(),
            policy,
        }
    }

    /// How many slots nobody holds.
    #[must_use]
    pub const fn free(&self) -> u32 {
        self.slots.free()
    }

    /// The sources, in their order.
    pub fn sources(&self) -> impl Iterator<Item = SourceView<'_>> {
        self.feeds.iter().map(|feed| SourceView {
            poller: &feed.poller,
            asked: feed.reserved.len(),
            serving: feed.serving,
            others: feed.others,
        })
    }

    /// How many slots there are.
    #[must_use]
    pub const fn capacity(&self) -> u32 {
        self.slots.capacity()
    }

    /// How many claims have left processes behind that cannot be killed, or may have.
    #[must_use]
    pub fn occupied(&self) -> usize {
        self.occupied.len()
    }

    /// The claims asked for or held.
    pub fn claims(&self) -> impl Iterator<Item = ClaimView<'_>> {
        self.held.iter().map(|(claim, held)| ClaimView {
            claim: *claim,
            source: held.source,
            run: &held.run,
            machine: &held.machine,
        })
    }

    /// Whether it is on its way out, or gone.
    #[must_use]
    pub fn stopping(&self) -> bool {
        self.mode != Mode::Running
    }

    /// Says whether what runs a source's tasks can take any. Of the start; later [`Event::Serving`] says it.
    pub fn serve(&mut self, source: SourceId, serving: Serving) {
        if let Some(feed) = self.feeds.get_mut(usize::from(source.0)) {
            feed.serving = serving;
        }
    }

    /// The rules changed. What is held keeps the rules that it was taken in hand under.
    fn reconfigure(&mut self, policy: Policy) {
        self.slots.resize(policy.capacity);
        for feed in &mut self.feeds {
            feed.poller.reconfigure(policy.poll);
        }
        self.policy = policy;
    }

    /// Takes in what happened. To be called with [`Event::Tick`] at the start and at each [`Worker::next_deadline`].
    pub fn handle(&mut self, event: Event, now: Instant) {
        if self.mode == Mode::Exited {
            return;
        }
        self.began.get_or_insert(now);
        match event {
            Event::LeftOver(list) => self.on_left_over(list, now),
            Event::PollLeft { source, ago } => {
                if let Some(feed) = self.feeds.get_mut(usize::from(source.0)) {
                    feed.poller.poll_left(now, ago);
                }
            }
            Event::TakenOver { claim, sent_at, answer } => self.on_taken_over(claim, sent_at, answer, now),
            Event::Opened { source, sent_at, answer } => self.on_opened(source, sent_at, answer, now),
            Event::Polled { source, lane: _, sent_at, answer } => self.on_polled(source, sent_at, answer, now),
            Event::Recovered { source, sent_at, answer } => self.on_recovered(source, sent_at, answer, now),
            Event::Claimed { claim, sent_at, answer } => self.on_claimed(claim, sent_at, answer, now),
            Event::Deleted { message, answer } => self.on_deleted(message, answer, now),
            Event::Prepared { claim, answer } => {
                match answer {
                    Err(Unprepared::Host) => self.on_host_fault(claim, now),
                    Err(Unprepared::Away) => self.on_away(claim, now),
                    Ok(()) | Err(Unprepared::Malformed | Unprepared::Unavailable | Unprepared::Internal) => {}
                }
                self.tell(claim, Happening::Prepared(answer), now);
            }
            Event::Started { claim } => self.tell(claim, Happening::Started, now),
            Event::Ended { claim, verdict } => {
                self.note_overlap(claim, now);
                self.judge_host(claim, verdict, now);
                self.tell(claim, Happening::Ended(verdict), now);
            }
            Event::Occupied { claim } => self.on_occupied(claim),
            Event::Vacated { claim } => self.slots.give(self.occupied.remove(&claim).flatten()),
            Event::Settled { claim, settled } => self.tell(claim, Happening::Settled(settled), now),
            Event::Reported { claim, answer } => self.tell(claim, Happening::Reported(answer), now),
            Event::Reclaimed { claim, sent_at, answer } => {
                self.tell(claim, Happening::Reclaimed { sent_at, answer }, now);
            }
            Event::Checked { claim, answer } => self.tell(claim, Happening::Checked(answer), now),
            Event::Ordered { claim, order } => self.on_ordered(claim, order, now),
            Event::Lost { claim } => self.tell(claim, Happening::Lost, now),
            Event::Wake(source) => {
                if let Some(feed) = self.feeds.get_mut(usize::from(source.0)) {
                    feed.poller.wake(now);
                }
            }
            Event::Pause { until } => self.pause(until),
            Event::Resume => self.resume(),
            Event::Serving { source, serving } => self.serve(source, serving),
            Event::Looked(condition) => self.fitness.looked(condition, now, &mut self.jitter),
            Event::Measured(room) => self.on_room(room),
            Event::FolderLost => self.on_folder_lost(),
            Event::Reconfigured(policy) => self.reconfigure(*policy),
            Event::Drain => self.drain(Exit::Drained, now),
            Event::DrainBy { deadline } => {
                self.drain_by = Some(deadline);
                self.drain(Exit::Drained, now);
            }
            Event::HandBack { deadline } => self.hand_back(deadline, now),
            Event::Terminate { deadline } => self.terminate(deadline, now),
            Event::Retire => self.drain(Exit::HostGoes, now),
            Event::Abort => self.leave(Exit::Aborted),
            Event::Tick => self.on_tick(now),
        }
        self.proceed(now);
    }

    /// The next thing to do, in order.
    pub fn next_effect(&mut self) -> Option<Effect> {
        self.effects.pop_front()
    }

    /// When it next wants [`Event::Tick`].
    #[must_use]
    pub fn next_deadline(&self) -> Option<Instant> {
        if self.mode == Mode::Exited {
            return None;
        }
        let claims = self.timers.first().map(|timer| timer.at);
        let deletes = self.kept.values().filter_map(|kept| kept.deletion.due()).min();
        let polls = if self.may_poll() { self.next_poll() } else { None };
        let way_out = match self.mode {
            Mode::Draining { since } => self.drain_ends(since),
            Mode::HandingBack { deadline } => deadline.filter(|_| !self.overdue),
            Mode::Running => self.next_stay(),
            Mode::Exited => None,
        };
        [claims, deletes, polls, way_out].into_iter().flatten().min()
    }

    fn next_poll(&self) -> Option<Instant> {
        let due = |feed: &Feed| match feed.poller.ready(Instant::ORIGIN) {
            Ready::At(at) => Some(at),
            Ready::Open | Ready::Recover | Ready::Poll(_) => Some(Instant::ORIGIN),
            Ready::Busy => None,
        };
        self.feeds.iter().filter(|feed| feed.is_wanted()).filter_map(due).min()
    }
}

impl Feed {
    /// Whether anything is asked of it. While nobody is there to run its tasks, only what an earlier life has left is.
    const fn is_wanted(&self) -> bool {
        matches!(self.serving, Serving::Up) || self.poller.owes_a_recovery()
    }
}

impl Deletion {
    const fn due(self) -> Option<Instant> {
        match self {
            Self::At(at) => Some(at),
            Self::NotYet | Self::UnderWay => None,
        }
    }
}
