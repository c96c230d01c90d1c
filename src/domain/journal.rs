//! The journal of claims and their processes, and what a restarted worker does about it.
//!
//! A [`Journal`] is a state; every change is a [`JournalRecord`], and replaying the records restores it.
//! `host::journal` stores them. The journal holds no secret: a recovered claim gets new credentials.

use alloc::boxed::Box;
use alloc::collections::BTreeMap;
use alloc::vec::Vec;
use core::time::Duration;

use serde::{Deserialize, Serialize};

use super::claim::{ClaimEnd, LossReason};
use super::id::{LocalToken, Run, SourceId};
use super::outcome::{ExceptionReason, Outcome};
use super::worker::RecoveredClaim;

/// Superfluous records that trigger a compaction.
pub const RECORDS_SLACK: usize = 4096;

/// Identifies an entry within one journal.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct EntryId(pub u64);

/// The kernel's id of one boot of the host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BootId(pub Box<str>);

/// A claim; its payload may start.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClaimRecord {
    pub run: Run,
    /// The service and the worker id.
    pub claimant: Box<str>,
    /// `None` if they are known to be gone.
    pub processes: Option<ProcessRecord>,
}

/// Identifies the processes of a payload or a sidecar.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct ProcessRecord {
    /// A value of their environment. Never reused.
    pub cookie: Box<str>,
    pub cgroup: Option<Box<str>>,
    /// Leaders of their process groups, as far as journaled in time.
    pub leaders: Vec<Leader>,
}

/// The leader of a process group. A pid may be reused; pid, start time and boot together are unique.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Leader {
    /// The pid, and the process group id.
    pub pid: i32,
    /// The start in clock ticks since the boot.
    pub start_ticks: u64,
}

/// A change of a journal.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub enum JournalRecord {
    /// The first record.
    JournalStarted {
        boot: BootId,
    },
    /// A claim was granted, and its payload may start.
    Claimed {
        entry: EntryId,
        claim: ClaimRecord,
    },
    /// The processes of a sidecar may start.
    SidecarStarted {
        entry: EntryId,
        processes: ProcessRecord,
    },
    ProcessStarted {
        entry: EntryId,
        leader: Leader,
    },
    /// The outcome is about to be reported.
    OutcomeDecided {
        entry: EntryId,
        outcome: Outcome,
    },
    Closed {
        entry: EntryId,
    },
    /// When the oldest unread claiming poll was sent: its claims may be in no other record.
    UnreadPoll {
        claimant: Box<str>,
        /// Since 1970, on the wall clock; `None` if every answer was read.
        sent_at: Option<Duration>,
    },
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct OpenClaim {
    claim: ClaimRecord,
    outcome: Option<Outcome>,
}

/// The claims and sidecars of a worker that are not closed.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Journal {
    boot: Option<BootId>,
    open_claims: BTreeMap<EntryId, OpenClaim>,
    sidecars: BTreeMap<EntryId, ProcessRecord>,
    unread_polls: BTreeMap<Box<str>, Duration>,
}

/// What a previous process left, and what to do about it.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct RecoveryPlan {
    /// Processes to kill before anything else.
    pub kill: Vec<ProcessRecord>,
    /// Runs to report if the queue grants the claim again, with the outcome decided then, or `worker-shutdown`. A
    /// source is an index into the given claimants.
    pub report: Vec<RecoveredClaim>,
    /// Runs that cannot be reported here and will expire.
    pub abandon: Vec<Run>,
}

/// Whether the queue may still count a run as ours after its claim was closed, so that the next process requests it.
pub const fn is_left_to_next_process(end: ClaimEnd) -> bool {
    match end {
        ClaimEnd::NotGranted => true,
        // A reclaim without an answer may have extended the lease.
        ClaimEnd::Lost(loss) | ClaimEnd::Unconfirmed { loss, .. } => {
            matches!(loss, LossReason::ShutdownDeadline | LossReason::LeaseExpired | LossReason::GrantedTooLate)
        }
        ClaimEnd::Reported(_) | ClaimEnd::AlreadyResolved(_) | ClaimEnd::ReportRejected(_) => false,
    }
}

/// What becomes of work that a run has left elsewhere, such as a pod.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LeftWork {
    /// The next run goes on with it, or the next process decides.
    Kept,
    Removed,
    RemovedIfResolved,
}

/// Work outlives its claim until its outcome is accepted: it tells the next run how it ended.
pub const fn left_work(end: ClaimEnd) -> LeftWork {
    match end {
        ClaimEnd::Reported(Outcome::Exception(ExceptionReason::WorkerShutdown) | Outcome::Deferred) => LeftWork::Kept,
        ClaimEnd::Reported(_) => LeftWork::Removed,
        end if is_left_to_next_process(end) => LeftWork::Kept,
        ClaimEnd::NotGranted
        | ClaimEnd::Lost(_)
        | ClaimEnd::Unconfirmed { .. }
        | ClaimEnd::AlreadyResolved(_)
        | ClaimEnd::ReportRejected(_) => LeftWork::RemovedIfResolved,
    }
}

impl Journal {
    /// A journal that begins in this boot of the host.
    pub const fn new(boot: BootId) -> Self {
        Self {
            boot: Some(boot),
            open_claims: BTreeMap::new(),
            sidecars: BTreeMap::new(),
            unread_polls: BTreeMap::new(),
        }
    }

    /// Applies a record, and returns whether it changes anything. One that does not fit is ignored: its claim is closed,
    /// or was lost.
    pub fn apply(&mut self, record: JournalRecord) -> bool {
        match record {
            JournalRecord::JournalStarted { boot } => self.boot.replace(boot.clone()) != Some(boot),
            JournalRecord::Claimed { entry, claim } => {
                let changes = self.open_claims.get(&entry).is_none_or(|open| open.claim != claim);
                if changes {
                    self.open_claims.insert(entry, OpenClaim { claim, outcome: None });
                }
                changes
            }
            JournalRecord::SidecarStarted { entry, processes } => {
                self.sidecars.insert(entry, processes.clone()) != Some(processes)
            }
            JournalRecord::ProcessStarted { entry, leader } => {
                let claimed = self.open_claims.get_mut(&entry).and_then(|open| open.claim.processes.as_mut());
                let processes = claimed.or_else(|| self.sidecars.get_mut(&entry));
                processes.map(|processes| processes.leaders.push(leader)).is_some()
            }
            JournalRecord::OutcomeDecided { entry, outcome } => {
                self.open_claims.get_mut(&entry).is_some_and(|open| open.outcome.replace(outcome) != Some(outcome))
            }
            JournalRecord::Closed { entry } => {
                self.open_claims.remove(&entry).is_some() | self.sidecars.remove(&entry).is_some()
            }
            JournalRecord::UnreadPoll { claimant, sent_at: None } => self.unread_polls.remove(&claimant).is_some(),
            JournalRecord::UnreadPoll { claimant, sent_at: Some(sent_at) } => {
                self.unread_polls.insert(claimant, sent_at) != Some(sent_at)
            }
        }
    }

    /// As [`Journal::apply`], for a new record. Returns the record if it has to be stored.
    pub fn record(&mut self, record: JournalRecord) -> Option<JournalRecord> {
        self.apply(record.clone()).then_some(record)
    }

    /// The smallest list of records that restores this state.
    pub fn compacted(&self) -> Vec<JournalRecord> {
        let mut records = Vec::new();
        records.extend(self.boot.clone().map(|boot| JournalRecord::JournalStarted { boot }));
        for (entry, open) in &self.open_claims {
            records.push(JournalRecord::Claimed { entry: *entry, claim: open.claim.clone() });
            records.extend(open.outcome.map(|outcome| JournalRecord::OutcomeDecided { entry: *entry, outcome }));
        }
        let sidecars = self.sidecars.iter();
        records.extend(
            sidecars.map(|(entry, processes)| JournalRecord::SidecarStarted {
                entry: *entry,
                processes: processes.clone(),
            }),
        );
        let polls = self.unread_polls.iter();
        records.extend(polls.map(|(claimant, sent_at)| JournalRecord::UnreadPoll {
            claimant: claimant.clone(),
            sent_at: Some(*sent_at),
        }));
        records
    }

    /// True if so many stored records should be compacted.
    pub fn needs_compaction(&self, records: usize) -> bool {
        records > self.open_claims.len().saturating_mul(4).saturating_add(RECORDS_SLACK)
    }

    /// What the next process does in this boot of the host, with these claimants.
    ///
    /// Nothing is resumed (I28). A decided outcome is reported, since its log and artifacts are uploaded. Everything
    /// else is released.
    pub fn recovery_plan(&self, boot: &BootId, claimants: &[Box<str>]) -> RecoveryPlan {
        let sidecars = self.sidecars.values().filter_map(|processes| self.surviving_processes(processes, boot));
        let mut plan = RecoveryPlan { kill: sidecars.collect(), ..RecoveryPlan::default() };
        for OpenClaim { claim: held, outcome: decided } in self.open_claims.values() {
            plan.kill.extend(held.processes.as_ref().and_then(|remains| self.surviving_processes(remains, boot)));
            let outcome = decided.unwrap_or(Outcome::Exception(ExceptionReason::WorkerShutdown));
            let run = held.run.clone();
            match claimants.iter().position(|claimant| *claimant == held.claimant) {
                // A run is reported once, with the last decision.
                Some(index) => {
                    let source = SourceId::from_index(index);
                    plan.report.retain(|other| other.source != source || other.run != run);
                    plan.report.push(RecoveredClaim { token: LocalToken(0), source, run, outcome });
                }
                None => plan.abandon.push(run),
            }
        }
        for (token, claim) in (1..).map(LocalToken).zip(&mut plan.report) {
            claim.token = token;
        }
        plan
    }

    /// The time at which this claimant sent its oldest unread poll.
    pub fn unread_poll(&self, claimant: &str) -> Option<Duration> {
        self.unread_polls.get(claimant).copied()
    }

    /// The processes that may remain of a payload: none after a reboot; if the boot is unknown, only those identified
    /// without doubt.
    fn surviving_processes(&self, remains: &ProcessRecord, boot: &BootId) -> Option<ProcessRecord> {
        match &self.boot {
            Some(then) if then == boot => Some(remains.clone()),
            Some(_) => None,
            None => Some(ProcessRecord { leaders: Vec::new(), ..remains.clone() }),
        }
    }
}
