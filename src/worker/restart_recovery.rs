//! Recovers after a previous process: kills its processes, reports its outcomes where the queue still grants the
//! claim, drops the rest. [`crate::domain::journal`] and the rules decide; this performs and counts.

use std::collections::BTreeSet;
use std::io;
use std::path::Path;
use std::time::Duration;

use crate::domain::claim::ClaimEnd;
use crate::domain::id::{LocalToken, SourceId};
use crate::domain::journal::{ClaimRecord, EntryId, JournalRecord, RecoveryPlan};
use crate::domain::outcome::{ExceptionReason, Outcome};
use crate::domain::worker::RecoveredClaim;
use crate::host::containment::{kill_recorded_processes, survivors_error};
use crate::host::crash_points::crash_point;
use crate::host::journal::{self, Journal};
use crate::host::name_lock::NameLock;
use crate::host::work_dir::WorkDirLock;

use super::claim_runtime::ClaimRuntime;
use super::engine::Engine;
use super::status::RecoverySummary;

/// Locks the worker ids of this worker.
///
/// # Errors
///
/// If another worker on this host has one of them.
pub(super) fn lock_worker_names(claimants: &[Box<str>]) -> io::Result<Vec<NameLock>> {
    let mut taken = Vec::new();
    let names: BTreeSet<&Box<str>> = claimants.iter().collect();
    for name in names {
        match NameLock::acquire(name) {
            Ok(Some(presence)) => taken.push(presence),
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
    Ok(taken)
}

pub(super) struct PreviousProcess {
    contents: journal::PreviousJournal,
    plan: RecoveryPlan,
    recovered_polls: Vec<Option<Duration>>,
    killed: usize,
}

/// Reads the journal of a previous process and kills its payloads and sidecars.
///
/// # Errors
///
/// If something cannot be killed. The message says what to do.
pub(super) fn recover_previous_process(folder: &Path, claimants: &[Box<str>]) -> io::Result<PreviousProcess> {
    let found = journal::PreviousJournal::read(folder);
    crash_point("startup-journal-read");
    let plan = found.journal.recovery_plan(&found.boot, claimants);
    let polls_left = claimants.iter().map(|claimant| found.journal.unread_poll(claimant)).collect();
    // I27
    let killed = kill_recorded_processes(&plan.kill).map_err(|error| survivors_error(&error.to_string()))?;
    Ok(PreviousProcess { contents: found, plan, recovered_polls: polls_left, killed })
}

pub(super) struct RecoveredState {
    pub(super) journal: Journal,
    pub(super) recovery: RecoverySummary,
    pub(super) recovered_claims: Vec<RecoveredClaim>,
    pub(super) recovered_polls: Vec<Option<Duration>>,
}

impl PreviousProcess {
    /// To be called once the previous process's payloads and directories are gone.
    pub(super) fn start_journal(self, hold: WorkDirLock, claimants: &[Box<str>]) -> RecoveredState {
        let Self { contents: found, plan, recovered_polls: polls_left, killed } = self;
        let damage = found.damage.len();
        for what in found.damage {
            tracing::error!(
                alert = "journal-corrupt",
                "[alert operator] {what}; its entries about a previous process's claims are lost, and those claims expire"
            );
        }
        for run in &plan.abandon {
            tracing::warn!(claim.run = %run, "claimed by a previous process under another worker id; the claim expires");
        }
        let token = |index: usize| LocalToken(index as u64 + 1);
        let carried = plan.report.iter().enumerate().flat_map(|(index, left)| {
            let claimant = claimants.get(left.claimant).cloned().unwrap_or_default();
            let claim = ClaimRecord { run: left.run.clone(), claimant, processes: None };
            let (entry, outcome) = (EntryId(token(index).0), left.outcome);
            [JournalRecord::Claimed { entry, claim }, JournalRecord::OutcomeDecided { entry, outcome }]
        });
        let polls = claimants
            .iter()
            .zip(&polls_left)
            .map(|(claimant, sent_at)| JournalRecord::UnreadPoll { claimant: claimant.clone(), sent_at: *sent_at });
        let journal = Journal::create(hold, found.boot, carried.chain(polls));
        let recovery = RecoverySummary {
            killed,
            expired: plan.abandon.len(),
            pending: plan.report.len(),
            journal_errors: damage,
            ..RecoverySummary::default()
        };
        let mut left_over = Vec::new();
        for (index, left) in plan.report.into_iter().enumerate() {
            let (token, source) = (token(index), SourceId::from_index(left.claimant));
            left_over.push(RecoveredClaim { token, source, run: left.run, outcome: left.outcome });
        }
        RecoveredState { journal, recovery, recovered_claims: left_over, recovered_polls: polls_left }
    }
}

impl Engine {
    /// Logs the result once nothing is pending.
    pub(super) fn log_recovery(&self) {
        if self.recovery.pending > 0 {
            return;
        }
        let recovered = self.recovery;
        if recovered != RecoverySummary::default() {
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
        self.recovery.pending -= 1;
        if let ClaimEnd::Reported(_) = end {
            self.count_end(live.source, end);
        }
        match end {
            ClaimEnd::Reported(outcome @ Outcome::Exception(ExceptionReason::WorkerShutdown)) => {
                self.recovery.released += 1;
                tracing::info!(claim.run = %run, %outcome, "reported; held by a previous process of this worker");
            }
            ClaimEnd::Reported(outcome) => {
                self.recovery.reported += 1;
                tracing::info!(claim.run = %run, %outcome, "reported; decided by a previous process of this worker");
            }
            ClaimEnd::AlreadyResolved(_)
            | ClaimEnd::ReportRejected(_)
            | ClaimEnd::Unconfirmed { .. }
            | ClaimEnd::Lost(_)
            | ClaimEnd::NotGranted => {
                self.recovery.expired += 1;
                tracing::info!(claim.run = %run, ?end, "held by a previous process of this worker; not reported");
            }
        }
        self.log_recovery();
    }
}
