//! What a worker writes down of the claims whose payloads it is about to start, when, and what that means to its next life.
//!
//! A [`Journal`] is the state of the matter; every change of it is a [`Record`], and the records in their order lead to the
//! state again. Where they are kept, and how they survive, is `host::journal`'s business. Nothing in here is a secret: what
//! is reported later is reported with credentials that are asked for then.

use alloc::boxed::Box;
use alloc::collections::BTreeMap;
use alloc::vec::Vec;
use core::time::Duration;

use super::claim::{End, Loss};
use super::id::Run;
use super::outcome::{Outcome, Reason};
use super::poll::Manner;
use super::time::Instant;

/// So many more records than are needed may be kept before they are written anew without the others.
pub const RECORDS_SLACK: usize = 4096;

/// When a claim is written down.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Keeping {
    /// Before its handler prepares.
    AtOnce,
    /// Before the first of its processes is started. One without processes never is.
    WithProcesses,
}

impl Keeping {
    /// What the claims of such a source need. One that outlives the worker is reported by the next life, whatever had been done
    /// of it. One that ends with the worker leaves at most processes, which the next life has to find (I27).
    #[must_use]
    pub const fn of(manner: Manner) -> Self {
        if manner.ends_with_worker { Self::WithProcesses } else { Self::AtOnce }
    }
}

/// Names an entry among those of one journal.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct EntryId(pub u64);

/// One boot of the host, by its own name for it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Boot(pub Box<str>);

/// A moment as it can be told in another life.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stamp {
    /// On the boot clock of the boot that is written down with it; `None` where that was an earlier one. It never steps.
    pub boot: Option<Instant>,
    /// Since 1970, on the host's own clock, which may.
    pub wall: Duration,
}

impl Stamp {
    /// How long ago it was at `now`, of the same boot where both tell the boot's clock. Zero where a clock was set back.
    #[must_use]
    pub fn ago(&self, now: Self) -> Duration {
        match (self.boot, now.boot) {
            (Some(then), Some(now)) => now.since(then),
            (None, _) | (_, None) => now.wall.saturating_sub(self.wall),
        }
    }
}

/// A poll that an earlier life sent and is not known to have read the answer of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PollLeft {
    /// Which of the claimants asked for has sent it.
    pub claimant: usize,
    /// When.
    pub sent: Stamp,
}

/// A claim whose payload may be started.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Held {
    /// The run.
    pub run: Run,
    /// Who claimed it: the service and the worker's name there.
    pub claimant: Box<str>,
    /// By what its processes are found; `None` where they are known to be gone.
    pub remains: Option<Remains>,
}

/// By what the processes of a payload are found.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Remains {
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
    pub started: u64,
}

/// A change of a journal.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Record {
    /// A worker began to keep it. The first record.
    Began {
        /// When the host was started last.
        boot: Boot,
    },
    /// A claim was granted, and its payload comes into being.
    Held {
        /// Names it.
        entry: EntryId,
        /// The claim.
        held: Held,
    },
    /// A process group of its payload exists.
    Leads {
        /// The claim.
        entry: EntryId,
        /// The group's leader.
        leader: Leader,
    },
    /// Its outcome is settled and about to be reported.
    Decided {
        /// The claim.
        entry: EntryId,
        /// What is reported.
        outcome: Outcome,
    },
    /// There is nothing left to do about it.
    Over {
        /// The claim.
        entry: EntryId,
    },
    /// These are the polls that claim and whose answers nobody has read: what they have claimed may be in no other record.
    Polls {
        /// Who sent them.
        claimant: Box<str>,
        /// When. None is the usual end.
        unread: Vec<Stamp>,
    },
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Entry {
    held: Held,
    decided: Option<Outcome>,
}

/// The claims that a worker has taken in hand, as far as they are not over.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Journal {
    boot: Option<Boot>,
    open: BTreeMap<EntryId, Entry>,
    polls: BTreeMap<Box<str>, Vec<Stamp>>,
}

/// What is left of an earlier life of the worker, and what is to be done about it.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Plan {
    /// Whose processes may be there. To be killed before anything else is done.
    pub kill: Vec<Remains>,
    /// What can still be reported, if the queue grants the claim once more.
    pub report: Vec<Unreported>,
    /// What nobody here can report: it is left to expire.
    pub forget: Vec<Run>,
}

/// A run that an earlier life held and whose outcome may still be wanted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Unreported {
    /// Which of the claimants asked for has claimed it.
    pub claimant: usize,
    /// The run.
    pub run: Run,
    /// What is reported: what was decided then, or that the worker went.
    pub outcome: Outcome,
}

/// What is left to do about a run when its claim is over here.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum After {
    /// Nothing: the queue knows more, or the lease is over.
    Nothing,
    /// The queue may still count it as ours: the next life asks.
    AskAgain,
}

impl After {
    /// What the last word about a claim leaves to do.
    #[must_use]
    pub const fn of(end: End) -> Self {
        match end {
            End::Reported(_)
            | End::Superseded(_)
            | End::Unreportable(_)
            | End::Lost(Loss::Refused | Loss::Canceled | Loss::LeaseOver | Loss::GrantedLate)
            | End::Unconfirmed { loss: Loss::Refused | Loss::Canceled | Loss::LeaseOver | Loss::GrantedLate, .. } => {
                Self::Nothing
            }
            End::Lost(Loss::NoTime) | End::Unconfirmed { loss: Loss::NoTime, .. } | End::NotGranted => Self::AskAgain,
        }
    }
}

impl Journal {
    /// A journal that is begun during this boot of the host.
    #[must_use]
    pub const fn begun(boot: Boot) -> Self {
        Self { boot: Some(boot), open: BTreeMap::new(), polls: BTreeMap::new() }
    }

    /// Takes over what a record says. Records that fit nothing are passed over: what they are about is over, or was lost.
    pub fn apply(&mut self, record: Record) {
        match record {
            Record::Began { boot } => self.boot = Some(boot),
            Record::Held { entry, held } => {
                self.open.insert(entry, Entry { held, decided: None });
            }
            Record::Leads { entry, leader } => {
                if let Some(remains) = self.open.get_mut(&entry).and_then(|open| open.held.remains.as_mut()) {
                    remains.leaders.push(leader);
                }
            }
            Record::Decided { entry, outcome } => {
                if let Some(open) = self.open.get_mut(&entry) {
                    open.decided = Some(outcome);
                }
            }
            Record::Over { entry } => {
                self.open.remove(&entry);
            }
            Record::Polls { claimant, unread } if unread.is_empty() => {
                self.polls.remove(&claimant);
            }
            Record::Polls { claimant, unread } => {
                self.polls.insert(claimant, unread);
            }
        }
    }

    /// As [`Journal::apply`], of something that happens now. Answers with the record where it is worth keeping.
    pub fn note(&mut self, record: Record) -> Option<Record> {
        let news = match &record {
            Record::Began { .. } => true,
            Record::Held { entry, held } => self.open.get(entry).is_none_or(|open| open.held != *held),
            Record::Polls { claimant, unread } => {
                self.polls.get(claimant).map_or(&[][..], Vec::as_slice) != unread.as_slice()
            }
            Record::Leads { entry, .. } | Record::Over { entry } => self.open.contains_key(entry),
            Record::Decided { entry, outcome } => {
                self.open.get(entry).is_some_and(|open| open.decided != Some(*outcome))
            }
        };
        if news {
            self.apply(record.clone());
        }
        news.then_some(record)
    }

    /// How many claims are not over.
    #[must_use]
    pub fn open(&self) -> usize {
        self.open.len()
    }

    /// The fewest records that lead to this state.
    #[must_use]
    pub fn records(&self) -> Vec<Record> {
        let mut records = Vec::new();
        records.extend(self.boot.clone().map(|boot| Record::Began { boot }));
        for (entry, open) in &self.open {
            let mut held = open.held.clone();
            let leaders = held.remains.as_mut().map(|remains| core::mem::take(&mut remains.leaders));
            records.push(Record::Held { entry: *entry, held });
            let leads = leaders.into_iter().flatten().map(|leader| Record::Leads { entry: *entry, leader });
            records.extend(leads);
            records.extend(open.decided.map(|outcome| Record::Decided { entry: *entry, outcome }));
        }
        let polls = self.polls.iter();
        records.extend(
            polls.map(|(claimant, unread)| Record::Polls { claimant: claimant.clone(), unread: unread.clone() }),
        );
        records
    }

    /// Whether so many records are so many more than are needed that they should be written anew.
    #[must_use]
    pub fn is_outgrown_by(&self, records: usize) -> bool {
        records > self.open.len().saturating_mul(4).saturating_add(RECORDS_SLACK)
    }

    /// What the next life of the worker is to do, in this boot of the host, if it claims by these names.
    ///
    /// Nothing is resumed (I28). What was decided is reported as it was decided: its log and artifacts are stored. Whatever
    /// else was under way is handed back.
    #[must_use]
    pub fn plan(&self, boot: &Boot, claimants: &[Box<str>]) -> Plan {
        let mut plan = Plan::default();
        for Entry { held, decided } in self.open.values() {
            plan.kill.extend(held.remains.as_ref().and_then(|remains| self.left(remains, boot)));
            let outcome = decided.unwrap_or(Outcome::Exception(Reason::WorkerShutdown));
            let run = held.run.clone();
            let Some(claimant) = claimants.iter().position(|claimant| *claimant == held.claimant) else {
                plan.forget.push(run);
                continue;
            };
            // One run is reported once, as it was decided last.
            plan.report.retain(|other| other.claimant != claimant || other.run != run);
            plan.report.push(Unreported { claimant, run, outcome });
        }
        plan
    }

    /// The polls of these claimants whose answers are not known to have been read, as the next life may tell of them in this boot
    /// of the host.
    #[must_use]
    pub fn polls_left(&self, boot: &Boot, claimants: &[Box<str>]) -> Vec<PollLeft> {
        let same = self.boot.as_ref() == Some(boot);
        let told = |sent: &Stamp| Stamp { boot: sent.boot.filter(|_| same), ..*sent };
        let mut left = Vec::new();
        for (name, unread) in &self.polls {
            if let Some(claimant) = claimants.iter().position(|claimant| claimant == name) {
                left.extend(unread.iter().map(|sent| PollLeft { claimant, sent: told(sent) }));
            }
        }
        left
    }

    /// What may be left of a payload's processes. Of another boot of the host, nothing. Where it is not known which boot it
    /// was, only what cannot be mistaken.
    fn left(&self, remains: &Remains, boot: &Boot) -> Option<Remains> {
        match &self.boot {
            Some(then) if then == boot => Some(remains.clone()),
            Some(_) => None,
            None => Some(Remains { leaders: Vec::new(), ..remains.clone() }),
        }
    }
}
