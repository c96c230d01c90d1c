//! Recovers after a previous process: kills its processes, reports its outcomes where the queue still grants the
//! claim, drops the rest. [`journeyman_domain::journal`] and the rules decide; this performs and counts.

use std::collections::BTreeSet;
use std::io;
use std::path::Path;
use std::time::Duration;

use journeyman_domain::claim::ClaimEnd;
use journeyman_domain::journal::{ClaimRecord, EntryId, JournalRecord, RecoveryPlan};
use journeyman_domain::outcome::{ExceptionReason, Outcome};
use journeyman_platform::host::containment::{kill_recorded_processes, survivors_error};
use journeyman_platform::host::crash_points::crash_point;
use journeyman_platform::host::journal::{Journal, PreviousJournal};
use journeyman_platform::host::work_dir::WorkDirLock;
use journeyman_platform::host::worker_id_lock::WorkerIdLock;

use super::SourceBinding;
use super::claim_runtime::ClaimRuntime;
use super::event_loop::{ClaimJournal, Engine};
use super::status::RecoverySummary;

/// Locks the worker ids of this worker.
///
/// # Errors
///
/// Fails if another worker on this host has one of them.
pub(super) fn lock_worker_ids(claimants: &[Box<str>]) -> io::Result<Vec<WorkerIdLock>> {
    let mut locks = Vec::new();
    let names: BTreeSet<&Box<str>> = claimants.iter().collect();
    for name in names {
        match WorkerIdLock::acquire(name) {
            Ok(Some(lock)) => locks.push(lock),
            Ok(None) => {
                let text = format!(
                    "another worker on this host has the same worker id ({name}), and the queue cannot tell them apart; \
                     give each worker an `id` of its own"
                );
                return Err(io::Error::new(io::ErrorKind::ResourceBusy, text));
            }
            Err(error) => {
                tracing::debug!(%error, "cannot check whether another worker on this host has the same worker id")
            }
        }
    }
    Ok(locks)
}

/// Ends what runs of a previous process outside of its processes.
///
/// # Errors
///
/// If something may still run. The message says what to do.
pub(super) async fn end_leftovers(sources: &[SourceBinding]) -> io::Result<()> {
    for binding in sources {
        let Some(ending) = binding.handler.end_leftovers() else { continue };
        // I27
        let ended = ending.await.map_err(|why| {
            let text = format!("cannot remove what a previous worker process may have left: {why}");
            io::Error::new(io::ErrorKind::ResourceBusy, text)
        })?;
        if ended > 0 {
            tracing::warn!(ended, "removed containers that a previous worker process has left");
        }
    }
    Ok(())
}

pub(super) struct PreviousProcess {
    contents: PreviousJournal,
    plan: RecoveryPlan,
    claimants: Vec<Box<str>>,
    unread_polls: Vec<Option<Duration>>,
    killed: usize,
}

impl PreviousProcess {
    /// Reads the journal of a previous process and kills its payloads and sidecars.
    ///
    /// # Errors
    ///
    /// If something cannot be killed. The message says what to do.
    pub(super) fn recover(folder: &Path, claimants: Vec<Box<str>>) -> io::Result<Self> {
        let contents = PreviousJournal::read(folder);
        crash_point("startup-journal-read");
        let plan = contents.journal.recovery_plan(&contents.boot, &claimants);
        let unread_polls = claimants.iter().map(|claimant| contents.journal.unread_poll(claimant)).collect();
        // I27
        let killed = kill_recorded_processes(&plan.kill).map_err(|error| survivors_error(&error.to_string()))?;
        Ok(Self { contents, plan, claimants, unread_polls, killed })
    }

    /// To be called once the previous process's payloads and directories are gone.
    pub(super) fn start_journal(self, lock: WorkDirLock, id_locks: Vec<WorkerIdLock>) -> ClaimJournal {
        let Self { contents, plan, claimants, unread_polls, killed } = self;
        let journal_errors = contents.damage.len();
        for what in contents.damage {
            tracing::error!(
                alert = "journal-corrupt",
                "[alert operator] {what}; its entries about a previous process's claims are lost, and those claims expire"
            );
        }
        for run in &plan.abandon {
            tracing::warn!(claim.run = %run, "claimed by a previous process under another worker id; the claim expires");
        }
        let carried = plan.report.iter().flat_map(|claim| {
            let (entry, claimant) = (EntryId(claim.token.0), claimants[claim.source.index()].clone());
            let record = ClaimRecord { run: claim.run.clone(), claimant, processes: None };
            let outcome = claim.outcome;
            [JournalRecord::Claimed { entry, claim: record }, JournalRecord::OutcomeDecided { entry, outcome }]
        });
        let polls = claimants
            .iter()
            .zip(&unread_polls)
            .map(|(claimant, sent_at)| JournalRecord::UnreadPoll { claimant: claimant.clone(), sent_at: *sent_at });
        let records = Journal::create(lock, contents.boot, carried.chain(polls));
        let recovery = RecoverySummary {
            killed,
            expired: plan.abandon.len(),
            pending: plan.report.len(),
            journal_errors,
            ..RecoverySummary::default()
        };
        ClaimJournal {
            records,
            unread_polls: vec![None; claimants.len()],
            claimants,
            recovery,
            recovered_claims: plan.report,
            recovered_polls: unread_polls,
            _id_locks: id_locks,
        }
    }
}

impl Engine {
    /// Logs the result once nothing is pending.
    pub(super) fn log_recovery(&self) {
        let recovered = self.journal.recovery;
        if recovered.pending == 0 && recovered != RecoverySummary::default() {
            let RecoverySummary { killed, reported, released, expired, .. } = recovered;
            tracing::warn!(
                killed,
                reported,
                released,
                expired,
                "recovered a previous process of this worker: {recovered}"
            );
        }
    }

    /// Counted separately: this process lost nothing.
    pub(super) fn close_recovered_claim(&mut self, live: &ClaimRuntime, end: ClaimEnd) {
        let run = &live.run;
        self.journal.recovery.pending -= 1;
        if let ClaimEnd::Reported(outcome) = end {
            self.history.on_claim_ended(live.source, end, self.config.clock.now());
            if outcome == Outcome::Exception(ExceptionReason::WorkerShutdown) {
                self.journal.recovery.released += 1;
                tracing::info!(claim.run = %run, %outcome, "reported; held by a previous process of this worker");
            } else {
                self.journal.recovery.reported += 1;
                tracing::info!(claim.run = %run, %outcome, "reported; decided by a previous process of this worker");
            }
        } else {
            self.journal.recovery.expired += 1;
            tracing::info!(claim.run = %run, ?end, "held by a previous process of this worker; not reported");
        }
        self.log_recovery();
    }
}
