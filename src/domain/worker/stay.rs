//! How long a worker stays, and when it asks for nothing although it could: paused, or its host is short of something.
//!
//! Leaving because of a limit is decided between polls alone. A worker whose limit is reached starts no poll any more; what
//! the polls under way still bring is executed, and only when all of them are back does the drain begin. So no claim is
//! ever caught between the decision and the exit.

use alloc::vec::Vec;
use core::time::Duration;

use super::{Alert, Effect, Exit, Held, Mode, Proof, Worker};
use crate::domain::fitness::PROVEN_AFTER;
use crate::domain::id::{SourceId, Token};
use crate::domain::service::Serving;
use crate::domain::time::Instant;

/// When a worker leaves by itself. `None` everywhere is never.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Stay {
    /// After holding nothing for so long. The time it is paused does not count.
    pub idle_exit: Option<Duration>,
    /// After so many claims.
    pub max_tasks: Option<u64>,
    /// After so long in all.
    pub max_uptime: Option<Duration>,
}

/// What the host must have left for claiming to go on. Zero is no bound.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Least {
    /// Bytes free in the work folder's file system.
    pub disk: u64,
    /// Bytes of memory that can be had.
    pub memory: u64,
}

/// What the host has left.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Room {
    /// Bytes free in the work folder's file system; `None` where it cannot be told.
    pub disk: Option<u64>,
    /// Bytes of memory that can be had; `None` where it cannot be told.
    pub memory: Option<u64>,
}

/// Why nothing is asked for although slots are free.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Hold {
    /// Somebody said so.
    Paused {
        /// Until when; `None` is until they say otherwise.
        until: Option<Instant>,
    },
    /// Too little disk is free.
    Disk {
        /// Bytes that are free.
        free: u64,
        /// Bytes that there must be.
        least: u64,
    },
    /// Too little memory can be had.
    Memory {
        /// Bytes that can be had.
        free: u64,
        /// Bytes that there must be.
        least: u64,
    },
    /// A task could not be run here because of the host.
    Unfit {
        /// When the host is looked at; `None` is at present.
        until: Option<Instant>,
    },
    /// What runs the tasks of every source is not there.
    Service,
    /// It was found fit since, and has as many tasks as it is tried with.
    Trial {
        /// How many tasks at once.
        tasks: u32,
    },
}

/// What a worker does about claiming, for a person who wonders.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Claiming {
    /// It asks, or waits for the next time to ask.
    Asking,
    /// Every slot is taken.
    Full,
    /// It could, and does not.
    Held(Hold),
    /// A limit of its own is reached; it leaves when its polls are back.
    Leaving(Exit),
    /// It finishes what it holds, since then.
    Draining {
        /// Since when.
        since: Instant,
        /// When the rest is handed back.
        deadline: Option<Instant>,
    },
    /// It hands back what it holds.
    HandingBack {
        /// When the host goes.
        deadline: Option<Instant>,
    },
    /// It has exited.
    Exited,
}

/// Whether the work folder is still this worker's.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
enum Folder {
    #[default]
    Kept,
    Lost,
}

/// When the payload of a claim has shown that the host can run it.
struct Due {
    claim: Token,
    at: Instant,
}

#[derive(Debug, Default)]
pub(super) struct Staying {
    began: Option<Instant>,
    /// Since when nothing has been held.
    idle: Option<Instant>,
    granted: u64,
    paused: Option<Option<Instant>>,
    short: Option<Hold>,
    folder: Folder,
    leaving: Option<Exit>,
}

impl Staying {
    /// A claim was granted to be executed.
    pub(super) const fn granted(&mut self) {
        self.granted += 1;
    }

    fn hold(&self) -> Option<Hold> {
        self.paused.map(|until| Hold::Paused { until }).or(self.short)
    }

    const fn busy(&mut self) {
        self.idle = None;
    }
}

impl Least {
    fn short(&self, room: Room) -> Option<Hold> {
        match room {
            Room { disk: Some(free), .. } if free < self.disk => Some(Hold::Disk { free, least: self.disk }),
            Room { memory: Some(free), .. } if free < self.memory => Some(Hold::Memory { free, least: self.memory }),
            Room { .. } => None,
        }
    }
}

impl Worker {
    /// What it does about claiming, and why.
    #[must_use]
    pub fn claiming(&self) -> Claiming {
        match self.mode {
            Mode::Draining { since } => Claiming::Draining { since, deadline: self.drain_ends(since) },
            Mode::HandingBack { deadline } => Claiming::HandingBack { deadline },
            Mode::Exited => Claiming::Exited,
            Mode::Running => match (self.staying.leaving, self.hold_off()) {
                (Some(exit), _) => Claiming::Leaving(exit),
                (None, Some(hold)) => Claiming::Held(hold),
                (None, None) if self.unserved() => Claiming::Held(Hold::Service),
                (None, None) if self.full() => Claiming::Full,
                (None, None) if let Some(tasks) = self.tried() => Claiming::Held(Hold::Trial { tasks }),
                (None, None) => Claiming::Asking,
            },
        }
    }

    /// Whether nobody is there to run any source's tasks.
    fn unserved(&self) -> bool {
        !self.feeds.is_empty() && self.feeds.iter().all(|feed| feed.serving == Serving::Down)
    }

    fn full(&self) -> bool {
        self.slots.free() == 0 && self.feeds.iter().all(|feed| feed.reserved.is_empty())
    }

    pub(super) const fn pause(&mut self, until: Option<Instant>) {
        self.staying.paused = Some(until);
    }

    pub(super) const fn resume(&mut self) {
        self.staying.paused = None;
        self.staying.idle = None;
    }

    pub(super) fn on_room(&mut self, room: Room) {
        self.staying.short = self.policy.least.short(room);
    }

    /// I27: nothing is begun that a later life would not know of. What runs is finished, and then the next worker of this host
    /// makes the folder anew.
    pub(super) fn on_folder_lost(&mut self) {
        if core::mem::replace(&mut self.staying.folder, Folder::Lost) == Folder::Kept {
            self.effects.push_back(Effect::Alert(Alert::FolderLost));
        }
    }

    /// Why nothing is asked for, if anything speaks against it.
    fn hold_off(&self) -> Option<Hold> {
        let unfit = self.fitness.unfit().then(|| Hold::Unfit { until: self.fitness.next_deadline() });
        self.staying.hold().or(unfit)
    }

    /// How many more claims may be asked for.
    pub(super) fn allowance(&self) -> u32 {
        let most = self.policy.stay.max_tasks.map_or(u32::MAX, |most| {
            let asked = self.held.values().filter(|held| held.slot.is_some() && !held.machine.granted()).count();
            let spoken_for = self.staying.granted.saturating_add((self.reserved() + asked) as u64);
            u32::try_from(most.saturating_sub(spoken_for)).unwrap_or(u32::MAX)
        });
        most.min(self.untried())
    }

    /// How many slots are in polls.
    fn reserved(&self) -> usize {
        self.feeds.iter().map(|feed| feed.reserved.len()).sum()
    }

    /// How many more tasks a host on trial may have (I33).
    fn untried(&self) -> u32 {
        let Some(trial) = self.fitness.trial() else { return u32::MAX };
        let counts = |held: &&Held| held.slot.is_some() && held.started.is_none_or(|started| started >= trial.since);
        let tried = self.reserved() + self.held.values().filter(counts).count();
        trial.tasks.saturating_sub(u32::try_from(tried).unwrap_or(u32::MAX))
    }

    /// How many tasks a host on trial has, if it may have no more and waits for none.
    fn tried(&self) -> Option<u32> {
        let trial = self.fitness.trial()?;
        (self.untried() == 0 && self.reserved() == 0).then_some(trial.tasks)
    }

    /// Payloads that may yet show that the host can run them, with when they have.
    fn proofs(&self) -> impl Iterator<Item = Due> {
        let trial = self.fitness.trial();
        let tried = trial.into_iter().flat_map(|trial| self.held.iter().map(move |(claim, held)| (trial, claim, held)));
        tried.filter_map(|(trial, claim, held)| {
            let started = held.started.filter(|at| held.proof == Proof::Owed && *at >= trial.since)?;
            Some(Due { claim: *claim, at: started.plus(PROVEN_AFTER) })
        })
    }

    /// What there is to do about claiming, now.
    pub(super) fn stay(&mut self, now: Instant) {
        let began = *self.staying.began.get_or_insert(now);
        if self.staying.paused.flatten().is_some_and(|until| now >= until) {
            self.resume();
        }
        if self.fitness.look(now) {
            self.effects.push_back(Effect::Look);
        }
        let proven: Vec<Token> = self.proofs().filter(|due| now >= due.at).map(|due| due.claim).collect();
        for claim in proven {
            self.prove(claim);
        }
        // Nobody knows what there would be to do for one that is refused.
        let refused = self.feeds.iter().any(|feed| feed.poller.is_denied());
        if !self.held.is_empty() || self.staying.paused.is_some() || refused {
            self.staying.busy();
        }
        let idle = if self.held.is_empty() { Some(*self.staying.idle.get_or_insert(now)) } else { None };
        let stay = self.policy.stay;
        let over = |since: Instant, span: Option<Duration>| span.is_some_and(|span| now >= since.plus(span));
        let overstayed = over(began, stay.max_uptime);
        let lost = self.staying.folder == Folder::Lost;
        self.staying.leaving = if lost {
            Some(Exit::FolderLost)
        } else if overstayed || stay.max_tasks.is_some_and(|most| self.staying.granted >= most) {
            Some(Exit::Limit)
        } else if self.staying.paused.is_none() && idle.is_some_and(|since| over(since, stay.idle_exit)) {
            Some(Exit::Idle)
        } else {
            None
        };
        match self.staying.leaving {
            // The last task of a worker that has had its number may take as long as it takes.
            Some(exit) if self.between_polls() && (lost || overstayed || self.held.is_empty()) => {
                self.drain(exit, now);
                self.proceed(now);
            }
            Some(_) => self.open_for_deletes(now),
            None if self.hold_off().is_none() => self.start_polls(now),
            None => self.open_for_deletes(now),
        }
    }

    /// Whether nothing is under way that may still bring a claim.
    fn between_polls(&self) -> bool {
        self.feeds.iter().all(|feed| !feed.poller.polling())
            && self.held.values().all(|held| held.machine.granted() || held.slot.is_none())
    }

    /// When claiming changes by itself.
    pub(super) fn next_stay(&self) -> Option<Instant> {
        if self.staying.leaving.is_some() {
            return None;
        }
        let uptime = self.staying.began.zip(self.policy.stay.max_uptime).map(|(began, span)| began.plus(span));
        let idle = self.staying.idle.filter(|_| self.staying.paused.is_none() && self.held.is_empty());
        let idle = idle.zip(self.policy.stay.idle_exit).map(|(since, span)| since.plus(span));
        let proof = self.proofs().map(|due| due.at).min();
        [uptime, idle, self.staying.paused.flatten(), self.fitness.next_deadline(), proof].into_iter().flatten().min()
    }

    /// Whether anything that comes is taken. What a poll still brings that was under way when this host ran short of something, or
    /// was told to go, goes back, which costs a retry. A pause is none of that: it only asks for nothing more. But what ends with the
    /// worker's connection goes back at no cost, and does so then, too.
    pub(super) fn takes(&self, source: SourceId) -> bool {
        let feed = self.feeds.get(usize::from(source.0));
        let is_free = feed.is_some_and(|feed| feed.poller.manner().ends_with_worker);
        let paused = self.staying.paused.is_some() && is_free;
        let fit = self.staying.short.is_none() && self.staying.folder == Folder::Kept && !self.fitness.unfit();
        self.mode == Mode::Running && fit && !paused
    }

    /// Whether a message of this source is asked for: what is not claimed yet is left, which costs nobody anything.
    pub(super) fn takes_up(&self, source: SourceId) -> bool {
        self.takes(source) && self.staying.paused.is_none()
    }

    /// Whether a poll may be started.
    pub(super) fn may_poll(&self) -> bool {
        self.asks() && self.slots.free() > 0 && self.allowance() > 0
    }

    /// Whether claims are asked for as slots come free.
    pub(super) fn asks(&self) -> bool {
        self.mode == Mode::Running && self.staying.leaving.is_none() && self.hold_off().is_none()
    }
}
