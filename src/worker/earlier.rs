//! What an earlier life of this worker has left: killed before anything else is done, reported where the queue still grants
//! it, and forgotten otherwise. What it means is decided by [`crate::domain::journal`] and by the rules; this carries it out,
//! and keeps count for whoever looks.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::Path;

use crate::domain::claim::End;
use crate::domain::id::{Run, SourceId, Token};
use crate::domain::journal::{EntryId, Held, Plan, PollLeft};
use crate::domain::outcome::{Outcome, Reason};
use crate::domain::refusal::Refusal;
use crate::domain::time::Instant;
use crate::domain::worker::{Event, LeftOver};
use crate::host::containment::{self, Unproven, end_of_earlier_life, kill_leftovers};
use crate::host::crash::crash_point;
use crate::host::folder::{self, Hold};
use crate::host::journal::{self, Carried, Journal};
use crate::host::presence::Presence;
use crate::host::remains;
use crate::source::{Grant, Refused};

use super::calls;
use super::counters::count;
use super::engine::Engine;
use super::live::Recording;
use super::view::Recovered;

/// The folder in the work folder that services beside the tasks have.
pub(super) const SERVICES: &str = "services";

/// Takes the names that this worker claims by: whoever else has one is no earlier life of it, but lives.
///
/// # Errors
///
/// Where another worker of this host claims by one of them.
pub(super) fn take_names(claimants: &[Box<str>]) -> io::Result<Vec<Presence>> {
    let mut taken = Vec::new();
    let names: BTreeSet<&Box<str>> = claimants.iter().collect();
    for name in names {
        match Presence::take(name) {
            Ok(Some(presence)) => taken.push(presence),
            Ok(None) => {
                let text = format!(
                    "another worker on this host claims by the same name ({name}), and the queue could not tell them apart; \
                     give each worker an `id` of its own"
                );
                return Err(io::Error::new(io::ErrorKind::ResourceBusy, text));
            }
            Err(error) => tracing::debug!(%error, "whether another worker claims by the same name cannot be told here"),
        }
    }
    Ok(taken)
}

/// What was found at the start, with its processes gone.
pub(super) struct Past {
    found: journal::Earlier,
    plan: Plan,
    polls_left: Vec<PollLeft>,
    killed: usize,
}

/// Reads what an earlier life has written down, and kills what is left of its payloads.
///
/// # Errors
///
/// Where something cannot be killed, unless that is allowed. The text says what to do.
pub(super) fn look_back(folder: &Path, claimants: &[Box<str>], unproven: Unproven) -> io::Result<Past> {
    let found = journal::Earlier::read(folder);
    crash_point("start-read");
    let plan = found.journal.plan(&found.boot, claimants);
    let polls_left = found.journal.polls_left(&found.boot, claimants);
    // I27
    let killed = match kill_leftovers(&plan.kill) {
        Ok(killed) => killed,
        Err(error) => {
            end_of_earlier_life(&error.to_string(), unproven)?;
            plan.kill.len()
        }
    };
    let services = folder.join(SERVICES);
    let left = remains::read(&services, &found.boot);
    match kill_leftovers(&left) {
        Ok(0) => {}
        Ok(killed) => {
            tracing::warn!(services = killed, "what an earlier life of this worker left of its services was killed")
        }
        Err(error) => end_of_earlier_life(&error.to_string(), unproven)?,
    }
    remains::forget_all(&services);
    Ok(Past { found, plan, polls_left, killed })
}

/// Kills what a worker that was killed has left of its payloads and services in its work folder, for somebody who removes that.
/// Answers how many tasks had anything left; `None` where a worker lives in it.
///
/// # Errors
///
/// Where something cannot be killed, or what was written down of it cannot be read.
pub(crate) fn end_left_in(folder: &Path) -> io::Result<Option<usize>> {
    let Some(lock) = folder::take_left(folder)? else { return Ok(None) };
    let found = journal::Earlier::read(folder);
    let killed = kill_leftovers(&found.journal.plan(&found.boot, &[]).kill)?;
    if let Some(damage) = found.damage.into_iter().next() {
        return Err(io::Error::other(format!("{damage}; what it said of running tasks is lost")));
    }
    kill_leftovers(&remains::read(&folder.join(SERVICES), &found.boot))?;
    containment::leave(&folder::hold(folder, &lock)?.identity());
    Ok(Some(killed))
}

/// The journal of this life, and what the rules are to be told first.
pub(super) struct Begun {
    pub(super) journal: Journal,
    pub(super) earlier: Earlier,
    pub(super) left_over: Vec<LeftOver>,
    pub(super) polls_left: Vec<PollLeft>,
}

impl Past {
    /// Begins the journal of this life. To be called once the earlier life's processes and folders are gone.
    pub(super) fn begin(self, hold: Hold, claimants: &[Box<str>]) -> Begun {
        let Self { found, plan, polls_left, killed } = self;
        let damage = found.damage.len();
        for what in found.damage {
            tracing::error!(
                alert = "journal-damaged",
                "[alert operator] {what}; what it said of an earlier life's claims is lost, and those are left to expire"
            );
        }
        for run in &plan.forget {
            tracing::warn!(claim.run = %run, "claimed by an earlier life under another name, and left to expire");
        }
        let token = |index: usize| Token(index as u64 + 1);
        let carried = plan.report.iter().enumerate().map(|(index, left)| {
            let claimant = claimants.get(left.claimant).cloned().unwrap_or_default();
            let held = Held { run: left.run.clone(), claimant, remains: None };
            Carried::Claim { entry: EntryId(token(index).0), held, outcome: left.outcome }
        });
        let polls = claimants.iter().enumerate().map(|(index, claimant)| {
            let of_it = polls_left.iter().filter(|left| left.claimant == index);
            Carried::Polls { claimant: claimant.clone(), unread: of_it.map(|left| left.sent).collect() }
        });
        // Equal names are one, and the first of them has all.
        let named_first = |at: &usize| claimants.iter().position(|name| Some(name) == claimants.get(*at)) == Some(*at);
        let polls = polls.enumerate().filter(|(index, _)| named_first(index)).map(|(_, polls)| polls);
        let journal = Journal::begin(hold, found.boot, carried.chain(polls));
        let mut earlier = Earlier { killed, forgotten: plan.forget.len(), damage, ..Earlier::default() };
        let mut left_over = Vec::new();
        for (index, left) in plan.report.into_iter().enumerate() {
            let (token, source) = (token(index), SourceId(u16::try_from(left.claimant).unwrap_or(u16::MAX)));
            earlier.open.insert(token, left.run.clone());
            left_over.push(LeftOver { token, source, run: left.run, outcome: left.outcome });
        }
        Begun { journal, earlier, left_over, polls_left }
    }
}

/// What has become of it so far.
#[derive(Debug, Default)]
pub(super) struct Earlier {
    killed: usize,
    reported: usize,
    handed_back: usize,
    forgotten: usize,
    damage: usize,
    /// What is still being asked for or reported.
    open: BTreeMap<Token, Run>,
}

impl Earlier {
    /// For those who look; `None` where there was nothing.
    pub(super) fn view(&self) -> Option<Recovered> {
        let view = Recovered {
            killed: self.killed,
            reported: self.reported,
            handed_back: self.handed_back,
            forgotten: self.forgotten,
            open: self.open.len(),
            damage: self.damage,
        };
        (view != Recovered::default()).then_some(view)
    }
}

impl Engine {
    /// Tells what was recovered once nothing of it is open any more.
    pub(super) fn say_recovered(&self) {
        if !self.earlier.open.is_empty() {
            return;
        }
        if let Some(recovered) = self.earlier.view() {
            let Recovered { killed, reported, handed_back, forgotten, .. } = recovered;
            tracing::warn!(killed, reported, handed_back, forgotten, "an earlier life of this worker: {recovered}");
        }
    }

    /// Asks for an earlier life's claim once more.
    pub(super) fn take_over(&mut self, claim: Token) {
        let Some(run) = self.earlier.open.get(&claim).cloned() else { return };
        let Some(feed) = self.live.get(&claim).and_then(|live| self.feeds.get(live.feed)) else { return };
        self.calls.spawn(calls::take_over(feed.source.clone(), claim, run, self.clock));
    }

    /// The answer to that.
    pub(super) fn taken_over(&mut self, claim: Token, sent_at: Instant, answer: Result<Grant, Refused>) -> Event {
        crash_point("taken-over");
        let answer = match answer {
            Ok(grant) => {
                let length = grant.lease;
                if let Some(live) = self.live.get_mut(&claim) {
                    // What an earlier life held was its to record.
                    live.granted(grant, sent_at, Recording::Off, self.clock.now());
                }
                Ok(length)
            }
            // The most usual end: reported by then, or expired.
            Err(refused) if refused.refusal == Refusal::Gone => {
                tracing::debug!("{}", refused.what);
                Err(refused.refusal)
            }
            Err(refused) if refused.refusal == Refusal::Denied => {
                let feed = self.live.get(&claim).map_or(usize::MAX, |live| live.feed);
                Err(self.recovery_refusal(SourceId(u16::try_from(feed).unwrap_or(u16::MAX)), refused))
            }
            Err(refused) => Err(self.note("take over", refused)),
        };
        Event::TakenOver { claim, sent_at, answer }
    }

    /// Whether it was an earlier life's claim that has ended. It is counted apart: nothing of this life was lost with it.
    pub(super) fn left_over_ended(&mut self, claim: Token, feed: usize, end: End) -> bool {
        let Some(run) = self.earlier.open.remove(&claim) else { return false };
        if let End::Reported(_) = end {
            self.count_end(feed, end);
        }
        match end {
            End::Reported(outcome @ Outcome::Exception(Reason::WorkerShutdown)) => {
                self.earlier.handed_back += 1;
                count(&self.counters().handed_back);
                tracing::info!(claim.run = %run, %outcome, "reported; held by an earlier life of this worker");
            }
            End::Reported(outcome) => {
                self.earlier.reported += 1;
                let counters = self.counters();
                count(match outcome {
                    Outcome::Completed => &counters.completed,
                    Outcome::Failed => &counters.failed,
                    Outcome::Exception(_) => &counters.exceptions,
                });
                tracing::info!(claim.run = %run, %outcome, "reported; decided by an earlier life of this worker");
            }
            End::Superseded(_) | End::Unreportable(_) | End::Unconfirmed { .. } | End::Lost(_) | End::NotGranted => {
                self.earlier.forgotten += 1;
                tracing::info!(claim.run = %run, ?end, "held by an earlier life of this worker; nothing is reported of it");
            }
        }
        self.say_recovered();
        true
    }
}
