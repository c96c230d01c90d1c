//! What an earlier life of this worker has left: killed before anything else is done, reported where the queue still grants
//! it, and expired otherwise. What it means is decided by [`crate::domain::journal`] and by the rules; this carries it out,
//! and keeps count for whoever looks.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::Path;

use crate::domain::claim::ClaimEnd;
use crate::domain::id::{LocalToken, Run, SourceId};
use crate::domain::journal::{ClaimRecord, EntryId, RecoveryPlan, UnreadPoll};
use crate::domain::outcome::{ExceptionReason, Outcome};
use crate::domain::refusal::Refusal;
use crate::domain::time::Instant;
use crate::domain::worker::{Event, RecoveredClaim};
use crate::host::containment::{self, OnLeak, apply_on_leak, kill_recorded_processes};
use crate::host::crash_points::crash_point;
use crate::host::journal::{self, CarriedRecord, Journal};
use crate::host::name_lock::NameLock;
use crate::host::service_record;
use crate::host::work_dir::{self, WorkDirLock};
use crate::source::{CallError, Grant};

use super::calls;
use super::claim_runtime::TraceRecording;
use super::counters::count;
use super::engine::Engine;
use super::status::RecoverySummary;

/// The folder in the work folder that services beside the tasks have.
pub(super) const SIDECARS_DIR: &str = "sidecars";

/// Takes the names that this worker claims by: whoever else has one is no earlier life of it, but lives.
///
/// # Errors
///
/// Where another worker of this host claims by one of them.
pub(super) fn lock_worker_names(claimants: &[Box<str>]) -> io::Result<Vec<NameLock>> {
    let mut taken = Vec::new();
    let names: BTreeSet<&Box<str>> = claimants.iter().collect();
    for name in names {
        match NameLock::acquire(name) {
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
pub(super) struct PreviousProcess {
    contents: journal::PreviousJournal,
    plan: RecoveryPlan,
    recovered_polls: Vec<UnreadPoll>,
    killed: usize,
}

/// Reads what an earlier life has written down, and kills what is left of its payloads.
///
/// # Errors
///
/// Where something cannot be killed, unless that is allowed. The text says what to do.
pub(super) fn recover_previous_process(
    folder: &Path,
    claimants: &[Box<str>],
    unproven: OnLeak,
) -> io::Result<PreviousProcess> {
    let found = journal::PreviousJournal::read(folder);
    crash_point("startup-journal-read");
    let plan = found.journal.recovery_plan(&found.boot, claimants);
    let polls_left = found.journal.unread_polls(&found.boot, claimants);
    // I27
    let killed = match kill_recorded_processes(&plan.kill) {
        Ok(killed) => killed,
        Err(error) => {
            apply_on_leak(&error.to_string(), unproven)?;
            plan.kill.len()
        }
    };
    let services = folder.join(SIDECARS_DIR);
    let left = service_record::read_all(&services, &found.boot);
    match kill_recorded_processes(&left) {
        Ok(0) => {}
        Ok(killed) => {
            tracing::warn!(services = killed, "what an earlier life of this worker left of its services was killed")
        }
        Err(error) => apply_on_leak(&error.to_string(), unproven)?,
    }
    service_record::remove_all(&services);
    Ok(PreviousProcess { contents: found, plan, recovered_polls: polls_left, killed })
}

/// Kills what a worker that was killed has left of its payloads and services in its work folder, for somebody who removes that.
/// Answers how many tasks had anything left; `None` where a worker lives in it.
///
/// # Errors
///
/// Where something cannot be killed, or what was written down of it cannot be read.
pub(crate) fn kill_leftovers_in(folder: &Path) -> io::Result<Option<usize>> {
    let Some(lock) = work_dir::try_lock_abandoned(folder)? else { return Ok(None) };
    let found = journal::PreviousJournal::read(folder);
    let killed = kill_recorded_processes(&found.journal.recovery_plan(&found.boot, &[]).kill)?;
    if let Some(damage) = found.damage.into_iter().next() {
        return Err(io::Error::other(format!("{damage}; what it said of running tasks is lost")));
    }
    kill_recorded_processes(&service_record::read_all(&folder.join(SIDECARS_DIR), &found.boot))?;
    containment::remove_worker_cgroup(&work_dir::work_dir_lock(folder, &lock)?.identity());
    Ok(Some(killed))
}

/// The journal of this life, and what the rules are to be told first.
pub(super) struct RecoveredState {
    pub(super) journal: Journal,
    pub(super) recovery: RecoveryProgress,
    pub(super) recovered_claims: Vec<RecoveredClaim>,
    pub(super) recovered_polls: Vec<UnreadPoll>,
}

impl PreviousProcess {
    /// Begins the journal of this life. To be called once the earlier life's processes and folders are gone.
    pub(super) fn start_journal(self, hold: WorkDirLock, claimants: &[Box<str>]) -> RecoveredState {
        let Self { contents: found, plan, recovered_polls: polls_left, killed } = self;
        let damage = found.damage.len();
        for what in found.damage {
            tracing::error!(
                alert = "journal-corrupt",
                "[alert operator] {what}; what it said of an earlier life's claims is lost, and those are left to expire"
            );
        }
        for run in &plan.abandon {
            tracing::warn!(claim.run = %run, "claimed by an earlier life under another name, and left to expire");
        }
        let token = |index: usize| LocalToken(index as u64 + 1);
        let carried = plan.report.iter().enumerate().map(|(index, left)| {
            let claimant = claimants.get(left.claimant).cloned().unwrap_or_default();
            let held = ClaimRecord { run: left.run.clone(), claimant, processes: None };
            CarriedRecord::Claim { entry: EntryId(token(index).0), held, outcome: left.outcome }
        });
        let polls = claimants.iter().enumerate().map(|(index, claimant)| {
            let of_it = polls_left.iter().filter(|left| left.claimant == index);
            CarriedRecord::UnreadPolls { claimant: claimant.clone(), unread: of_it.map(|left| left.sent_at).collect() }
        });
        // Equal names are one, and the first of them has all.
        let named_first = |at: &usize| claimants.iter().position(|name| Some(name) == claimants.get(*at)) == Some(*at);
        let polls = polls.enumerate().filter(|(index, _)| named_first(index)).map(|(_, polls)| polls);
        let journal = Journal::create(hold, found.boot, carried.chain(polls));
        let mut earlier =
            RecoveryProgress { killed, expired: plan.abandon.len(), damage, ..RecoveryProgress::default() };
        let mut left_over = Vec::new();
        for (index, left) in plan.report.into_iter().enumerate() {
            let (token, source) = (token(index), SourceId(u16::try_from(left.claimant).unwrap_or(u16::MAX)));
            earlier.open.insert(token, left.run.clone());
            left_over.push(RecoveredClaim { token, source, run: left.run, outcome: left.outcome });
        }
        RecoveredState { journal, recovery: earlier, recovered_claims: left_over, recovered_polls: polls_left }
    }
}

/// What has become of it so far.
#[derive(Debug, Default)]
pub(super) struct RecoveryProgress {
    killed: usize,
    reported: usize,
    released: usize,
    expired: usize,
    damage: usize,
    /// What is still being asked for or reported.
    open: BTreeMap<LocalToken, Run>,
}

impl RecoveryProgress {
    /// For those who look; `None` where there was nothing.
    pub(super) fn summary(&self) -> Option<RecoverySummary> {
        let view = RecoverySummary {
            killed: self.killed,
            reported: self.reported,
            released: self.released,
            expired: self.expired,
            pending: self.open.len(),
            journal_errors: self.damage,
        };
        (view != RecoverySummary::default()).then_some(view)
    }
}

impl Engine {
    /// Tells what was recovered once nothing of it is open any more.
    pub(super) fn log_recovery(&self) {
        if !self.recovery.open.is_empty() {
            return;
        }
        if let Some(recovered) = self.recovery.summary() {
            let RecoverySummary { killed, reported, released, expired, .. } = recovered;
            tracing::warn!(killed, reported, released, expired, "an earlier life of this worker: {recovered}");
        }
    }

    /// Asks for an earlier life's claim once more.
    pub(super) fn take_over(&mut self, claim: LocalToken) {
        let Some(run) = self.recovery.open.get(&claim).cloned() else { return };
        let Some(feed) = self.claims.get(&claim).and_then(|live| self.sources.get(live.source_index)) else { return };
        self.calls.spawn(calls::take_over(feed.source.clone(), claim, run, self.clock));
    }

    /// The answer to that.
    pub(super) fn on_taken_over(
        &mut self,
        claim: LocalToken,
        sent_at: Instant,
        answer: Result<Grant, CallError>,
    ) -> Event {
        crash_point("taken-over");
        let answer = match answer {
            Ok(grant) => {
                let length = grant.lease;
                if let Some(live) = self.claims.get_mut(&claim) {
                    // What an earlier life held was its to record.
                    live.on_granted(grant, sent_at, TraceRecording::Off, self.clock.now());
                }
                Ok(length)
            }
            // The most usual end: reported by then, or expired.
            Err(refused) if refused.refusal == Refusal::Gone => {
                tracing::debug!("{}", refused.message);
                Err(refused.refusal)
            }
            Err(refused) if refused.refusal == Refusal::Denied => {
                let feed = self.claims.get(&claim).map_or(usize::MAX, |live| live.source_index);
                Err(self.log_recovery_refusal(SourceId(u16::try_from(feed).unwrap_or(u16::MAX)), refused))
            }
            Err(refused) => Err(self.log_refusal("take over", refused)),
        };
        Event::TakenOver { claim, sent_at, answer }
    }

    /// Whether it was an earlier life's claim that has ended. It is counted apart: nothing of this life was lost with it.
    pub(super) fn close_recovered_claim(&mut self, claim: LocalToken, feed: usize, end: ClaimEnd) -> bool {
        let Some(run) = self.recovery.open.remove(&claim) else { return false };
        if let ClaimEnd::Reported(_) = end {
            self.count_end(feed, end);
        }
        match end {
            ClaimEnd::Reported(outcome @ Outcome::Exception(ExceptionReason::WorkerShutdown)) => {
                self.recovery.released += 1;
                count(&self.counters().released);
                tracing::info!(claim.run = %run, %outcome, "reported; held by an earlier life of this worker");
            }
            ClaimEnd::Reported(outcome) => {
                self.recovery.reported += 1;
                let counters = self.counters();
                count(match outcome {
                    Outcome::Completed => &counters.completed,
                    Outcome::Failed => &counters.failed,
                    Outcome::Exception(_) => &counters.exceptions,
                });
                tracing::info!(claim.run = %run, %outcome, "reported; decided by an earlier life of this worker");
            }
            ClaimEnd::AlreadyResolved(_)
            | ClaimEnd::ReportRejected(_)
            | ClaimEnd::Unconfirmed { .. }
            | ClaimEnd::Lost(_)
            | ClaimEnd::NotGranted => {
                self.recovery.expired += 1;
                tracing::info!(claim.run = %run, ?end, "held by an earlier life of this worker; nothing is reported of it");
            }
        }
        self.log_recovery();
        true
    }
}
