//! What a worker writes down of the claims whose payloads it is about to start, when, and what that means to its next life.
//!
//! A [`Journal`] is the state of the matter; every change of it is a [`JournalRecord`], and the records in their order lead to the
//! state again. Where they are kept, and how they survive, is `host::journal`'s business. Nothing in here is a secret: what
//! is reported later is reported with credentials that are asked for then.

use alloc::boxed::Box;
use alloc::collections::BTreeMap;
use alloc::vec::Vec;
use core::time::Duration;

use super::claim::{ClaimEnd, LossReason};
use super::id::Run;
use super::outcome::{ExceptionReason, Outcome};
use super::poll::Capabilities;
use super::time::Instant;

/// So many more records than are needed may be kept before they are written anew without the others.
pub const RECORDS_SLACK: usize = 4096;

/// When a claim is written down.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum JournalTiming {
    /// Before its handler prepares.
    BeforePrepare,
    /// Before the first of its processes is started. One without processes never is.
    BeforeFirstProcess,
}

impl JournalTiming {
    /// What the claims of such a source need. One that outlives the worker is reported by the next life, whatever had been done
    /// of it. One that ends with the worker leaves at most processes, which the next life has to find (I27).
    #[must_use]
    pub const fn of(manner: Capabilities) -> Self {
        if manner.connection_scoped { Self::BeforeFirstProcess } else { Self::BeforePrepare }
    }
}

/// Names an entry among those of one journal.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct EntryId(pub u64);

/// One boot of the host, by its own name for it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BootId(pub Box<str>);

/// A moment as it can be told in another life.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct JournalTimestamp {
    /// On the boot clock of the boot that is written down with it; `None` where that was an earlier one. It never steps.
    pub boot: Option<Instant>,
    /// Since 1970, on the host's own clock, which may.
    pub wall: Duration,
}

impl JournalTimestamp {
    /// How long ago it was at `now`, of the same boot where both tell the boot's clock. Zero where a clock was set back.
    #[must_use]
    pub fn age_at(&self, now: Self) -> Duration {
        match (self.boot, now.boot) {
            (Some(then), Some(now)) => now.since(then),
            (None, _) | (_, None) => now.wall.saturating_sub(self.wall),
        }
    }
}

/// A poll that an earlier life sent and is not known to have read the answer of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct UnreadPoll {
    /// Which of the claimants asked for has sent it.
    pub claimant: usize,
    /// When.
    pub sent_at: JournalTimestamp,
}

/// A claim whose payload may be started.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClaimRecord {
    /// The run.
    pub run: Run,
    /// Who claimed it: the service and the worker's name there.
    pub claimant: Box<str>,
    /// By what its processes are found; `None` where they are known to be gone.
    pub processes: Option<ProcessRecord>,
}

/// By what the processes of a payload are found.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ProcessRecord {
    /// What stands in their environment. Never given out twice.
    pub cookie: Box<str>,
    /// Their control group, where they have one.
    pub cgroup: Option<Box<str>>,
    /// The leaders of their process groups, as far as that was written down in time.
    pub leaders: Vec<Leader>,
}

/// The leader of a process group. Its number may be another's once it has ended; number, start and boot together are not.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Leader {
    /// Its number, and the group's.
    pub pid: i32,
    /// When it was started, in clock ticks since the host was.
    pub start_ticks: u64,
}

/// A change of a journal.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum JournalRecord {
    /// A worker began to keep it. The first record.
    JournalStarted {
        /// When the host was started last.
        boot: BootId,
    },
    /// A claim was granted, and its payload comes into being.
    Claimed {
        /// Names it.
        entry: EntryId,
        /// The claim.
        claim: ClaimRecord,
    },
    /// A process group of its payload exists.
    ProcessStarted {
        /// The claim.
        entry: EntryId,
        /// The group's leader.
        leader: Leader,
    },
    /// Its outcome is settled and about to be reported.
    OutcomeDecided {
        /// The claim.
        entry: EntryId,
        /// What is reported.
        outcome: Outcome,
    },
    /// There is nothing left to do about it.
    Closed {
        /// The claim.
        entry: EntryId,
    },
    /// These are the polls that claim and whose answers nobody has read: what they have claimed may be in no other record.
    UnreadPolls {
        /// Who sent them.
        claimant: Box<str>,
        /// When. None is the usual end.
        unread: Vec<JournalTimestamp>,
    },
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct OpenClaim {
    claim: ClaimRecord,
    outcome: Option<Outcome>,
}

/// The claims that a worker has taken in hand, as far as they are not over.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Journal {
    boot: Option<BootId>,
    open_claims: BTreeMap<EntryId, OpenClaim>,
    unread_polls: BTreeMap<Box<str>, Vec<JournalTimestamp>>,
}

/// What is left of an earlier life of the worker, and what is to be done about it.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct RecoveryPlan {
    /// Whose processes may be there. To be killed before anything else is done.
    pub kill: Vec<ProcessRecord>,
    /// What can still be reported, if the queue grants the claim once more.
    pub report: Vec<UnreportedRun>,
    /// What nobody here can report: it is left to expire.
    pub abandon: Vec<Run>,
}

/// A run that an earlier life held and whose outcome may still be wanted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UnreportedRun {
    /// Which of the claimants asked for has claimed it.
    pub claimant: usize,
    /// The run.
    pub run: Run,
    /// What is reported: what was decided then, or that the worker went.
    pub outcome: Outcome,
}

/// What is left to do about a run when its claim is over here.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AfterClose {
    /// Nothing: the queue knows more, or the lease is over.
    Nothing,
    /// The queue may still count it as ours: the next life asks.
    RetryAfterRestart,
}

impl AfterClose {
    /// What the last word about a claim leaves to do.
    #[must_use]
    pub const fn of(end: ClaimEnd) -> Self {
        match end {
            ClaimEnd::Reported(_)
            | ClaimEnd::AlreadyResolved(_)
            | ClaimEnd::ReportRejected(_)
            | ClaimEnd::Lost(
                LossReason::Revoked | LossReason::Canceled | LossReason::LeaseExpired | LossReason::GrantedTooLate,
            )
            | ClaimEnd::Unconfirmed {
                loss: LossReason::Revoked | LossReason::Canceled | LossReason::LeaseExpired | LossReason::GrantedTooLate,
                ..
            } => Self::Nothing,
            ClaimEnd::Lost(LossReason::ShutdownDeadline)
            | ClaimEnd::Unconfirmed { loss: LossReason::ShutdownDeadline, .. }
            | ClaimEnd::NotGranted => Self::RetryAfterRestart,
        }
    }
}

impl Journal {
    /// A journal that is begun during this boot of the host.
    #[must_use]
    pub const fn new(boot: BootId) -> Self {
        Self { boot: Some(boot), open_claims: BTreeMap::new(), unread_polls: BTreeMap::new() }
    }

    /// Takes over what a record says. Records that fit nothing are passed over: what they are about is over, or was lost.
    pub fn apply(&mut self, record: JournalRecord) {
        match record {
            JournalRecord::JournalStarted { boot } => self.boot = Some(boot),
            JournalRecord::Claimed { entry, claim: held } => {
                self.open_claims.insert(entry, OpenClaim { claim: held, outcome: None });
            }
            JournalRecord::ProcessStarted { entry, leader } => {
                if let Some(remains) = self.open_claims.get_mut(&entry).and_then(|open| open.claim.processes.as_mut()) {
                    remains.leaders.push(leader);
                }
            }
            JournalRecord::OutcomeDecided { entry, outcome } => {
                if let Some(open) = self.open_claims.get_mut(&entry) {
                    open.outcome = Some(outcome);
                }
            }
            JournalRecord::Closed { entry } => {
                self.open_claims.remove(&entry);
            }
            JournalRecord::UnreadPolls { claimant, unread } if unread.is_empty() => {
                self.unread_polls.remove(&claimant);
            }
            JournalRecord::UnreadPolls { claimant, unread } => {
                self.unread_polls.insert(claimant, unread);
            }
        }
    }

    /// As [`Journal::apply`], of something that happens now. Answers with the record where it is worth keeping.
    pub fn record(&mut self, record: JournalRecord) -> Option<JournalRecord> {
        let news = match &record {
            JournalRecord::JournalStarted { .. } => true,
            JournalRecord::Claimed { entry, claim: held } => {
                self.open_claims.get(entry).is_none_or(|open| open.claim != *held)
            }
            JournalRecord::UnreadPolls { claimant, unread } => {
                self.unread_polls.get(claimant).map_or(&[][..], Vec::as_slice) != unread.as_slice()
            }
            JournalRecord::ProcessStarted { entry, .. } | JournalRecord::Closed { entry } => {
                self.open_claims.contains_key(entry)
            }
            JournalRecord::OutcomeDecided { entry, outcome } => {
                self.open_claims.get(entry).is_some_and(|open| open.outcome != Some(*outcome))
            }
        };
        if news {
            self.apply(record.clone());
        }
        news.then_some(record)
    }

    /// How many claims are not over.
    #[must_use]
    pub fn open_count(&self) -> usize {
        self.open_claims.len()
    }

    /// The fewest records that lead to this state.
    #[must_use]
    pub fn compacted(&self) -> Vec<JournalRecord> {
        let mut records = Vec::new();
        records.extend(self.boot.clone().map(|boot| JournalRecord::JournalStarted { boot }));
        for (entry, open) in &self.open_claims {
            let mut held = open.claim.clone();
            let leaders = held.processes.as_mut().map(|remains| core::mem::take(&mut remains.leaders));
            records.push(JournalRecord::Claimed { entry: *entry, claim: held });
            let leads =
                leaders.into_iter().flatten().map(|leader| JournalRecord::ProcessStarted { entry: *entry, leader });
            records.extend(leads);
            records.extend(open.outcome.map(|outcome| JournalRecord::OutcomeDecided { entry: *entry, outcome }));
        }
        let polls = self.unread_polls.iter();
        records.extend(polls.map(|(claimant, unread)| JournalRecord::UnreadPolls {
            claimant: claimant.clone(),
            unread: unread.clone(),
        }));
        records
    }

    /// Whether so many records are so many more than are needed that they should be written anew.
    #[must_use]
    pub fn needs_compaction(&self, records: usize) -> bool {
        records > self.open_claims.len().saturating_mul(4).saturating_add(RECORDS_SLACK)
    }

    /// What the next life of the worker is to do, in this boot of the host, if it claims by these names.
    ///
    /// Nothing is resumed (I28). What was decided is reported as it was decided: its log and artifacts are stored. Whatever
    /// else was under way is handed back.
    #[must_use]
    pub fn recovery_plan(&self, boot: &BootId, claimants: &[Box<str>]) -> RecoveryPlan {
        let mut plan = RecoveryPlan::default();
        for OpenClaim { claim: held, outcome: decided } in self.open_claims.values() {
            plan.kill.extend(held.processes.as_ref().and_then(|remains| self.surviving_processes(remains, boot)));
            let outcome = decided.unwrap_or(Outcome::Exception(ExceptionReason::WorkerShutdown));
            let run = held.run.clone();
            let Some(claimant) = claimants.iter().position(|claimant| *claimant == held.claimant) else {
                plan.abandon.push(run);
                continue;
            };
            // One run is reported once, as it was decided last.
            plan.report.retain(|other| other.claimant != claimant || other.run != run);
            plan.report.push(UnreportedRun { claimant, run, outcome });
        }
        plan
    }

    /// The polls of these claimants whose answers are not known to have been read, as the next life may tell of them in this boot
    /// of the host.
    #[must_use]
    pub fn unread_polls(&self, boot: &BootId, claimants: &[Box<str>]) -> Vec<UnreadPoll> {
        let same = self.boot.as_ref() == Some(boot);
        let told = |sent: &JournalTimestamp| JournalTimestamp { boot: sent.boot.filter(|_| same), ..*sent };
        let mut left = Vec::new();
        for (name, unread) in &self.unread_polls {
            if let Some(claimant) = claimants.iter().position(|claimant| claimant == name) {
                left.extend(unread.iter().map(|sent| UnreadPoll { claimant, sent_at: told(sent) }));
            }
        }
        left
    }

    /// What may be left of a payload's processes. Of another boot of the host, nothing. Where it is not known which boot it
    /// was, only what cannot be mistaken.
    fn surviving_processes(&self, remains: &ProcessRecord, boot: &BootId) -> Option<ProcessRecord> {
        match &self.boot {
            Some(then) if then == boot => Some(remains.clone()),
            Some(_) => None,
            None => Some(ProcessRecord { leaders: Vec::new(), ..remains.clone() }),
        }
    }
}
