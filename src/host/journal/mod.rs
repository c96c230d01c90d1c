//! Where a worker's journal is kept: a file of its work folder, written by one thread at a time.
//!
//! What the records mean is decided in [`crate::domain::journal`]. Here they are appended together, as many as there are
//! whenever the disk is done with those before, and synced where somebody waits for it. The state in memory is what counts:
//! where writing went wrong, or the file holds much that is over, the file is written anew from it.

mod record_format;

use std::fs::File;
use std::io::{self, Read as _, Write as _};
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::runtime::Handle;
use tokio::sync::oneshot;

use super::crash_points::{crash, crash_due, crash_point};
use super::work_dir::WorkDirLock;
use crate::domain::journal::{BootId, ClaimRecord, EntryId, Journal as Rules, JournalRecord, JournalTimestamp, Leader};
use crate::domain::outcome::Outcome;
use crate::limits::{
    JOURNAL_BYTES_MAX, JOURNAL_CLOSE_TIMEOUT, JOURNAL_PENDING_BYTES_MAX, JOURNAL_POLL_TIMEOUT, JOURNAL_WRITE_TIMEOUT,
};

/// The file in the work folder.
const JOURNAL_FILE: &str = "journal";
/// What is to take its place.
const NEXT_JOURNAL_FILE: &str = "journal.next";

/// What an earlier worker has left of its journal, and this boot of the host.
#[derive(Debug)]
pub(crate) struct PreviousJournal {
    /// What could be read of it.
    pub(crate) journal: Rules,
    /// What could not, one sentence each.
    pub(crate) damage: Vec<String>,
    /// This boot of the host.
    pub(crate) boot: BootId,
}

impl PreviousJournal {
    /// Reads what lies in a work folder. Whatever lies there keeps no worker from starting.
    pub(crate) fn read(folder: &Path) -> Self {
        let path = folder.join(JOURNAL_FILE);
        let (mut bytes, mut damage) = (Vec::new(), Vec::new());
        let read = File::open(&path).and_then(|file| file.take(JOURNAL_BYTES_MAX).read_to_end(&mut bytes));
        match read {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => damage.push(format!("{}: {error}", path.display())),
            Ok(_) if bytes.len() as u64 == JOURNAL_BYTES_MAX => {
                damage.push(format!("{}: only its first {JOURNAL_BYTES_MAX} bytes were read", path.display()));
            }
            Ok(_) => {}
        }
        let record_format::ParsedJournal { journal, damaged_lines: damaged, .. } = record_format::parse_journal(&bytes);
        if let (Some(first), many) = (damaged.first(), damaged.len()) {
            damage.push(format!("{}: {many} lines cannot be read, the first of them line {first}", path.display()));
        }
        Self { journal, damage, boot: current_boot() }
    }
}

/// The kernel's name for the time since the host was started.
pub(crate) fn current_boot() -> BootId {
    // Where there is none, no two lives are of one boot, so that no number of a process is believed.
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id");
    BootId(boot.map_or_else(|_| uuid::Uuid::new_v4().to_string(), |boot| boot.trim().to_owned()).into())
}

/// What a life leaves to the next one after this.
pub(crate) enum CarriedRecord {
    /// A claim that is still to be reported.
    Claim {
        /// Names it.
        entry: EntryId,
        /// The claim.
        held: ClaimRecord,
        /// What is reported.
        outcome: Outcome,
    },
    /// Polls whose answers nobody has read.
    UnreadPolls {
        /// Who sent them.
        claimant: Box<str>,
        /// When.
        unread: Vec<JournalTimestamp>,
    },
}

/// A worker's journal. Clones are the same one.
#[derive(Debug, Clone)]
pub(crate) struct Journal {
    inner: Arc<JournalInner>,
}

#[derive(Debug)]
struct JournalInner {
    lock: WorkDirLock,
    runtime: Handle,
    state: Mutex<JournalState>,
}

#[derive(Debug)]
struct JournalState {
    journal: Rules,
    /// Lines that are to be appended.
    pending: Vec<u8>,
    pending_count: usize,
    /// Who waits for them.
    waiters: Vec<WriteWaiter>,
    /// Some lines were dropped.
    backlog: Backlog,
    /// Not here while something is being written.
    writer: Option<JournalWriter>,
}

#[derive(Debug)]
struct WriteWaiter {
    result_sender: oneshot::Sender<Result<(), Arc<str>>>,
    sync_mode: SyncMode,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Backlog {
    Complete,
    Truncated,
}

/// Who holds the file.
#[derive(Debug)]
struct JournalWriter {
    /// `None` where it has to be written anew.
    file: Option<File>,
    record_count: usize,
    failure_log: FailureLog,
}

/// Whether the operator was told that the journal cannot be written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum FailureLog {
    NotLogged,
    Logged,
}

/// Word of whether a record is where it has to be.
#[derive(Debug)]
pub(crate) struct PendingWrite(oneshot::Receiver<Result<(), Arc<str>>>);

impl PendingWrite {
    /// Waits until the kernel has the record, so that it outlives this process, or cannot have it, or it takes too long.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe.
    pub(crate) async fn written(self) {
        // What cannot be written was told already.
        tokio::time::timeout(JOURNAL_POLL_TIMEOUT, self.0).await.ok();
    }
}

/// Word of whether a record is safe.
#[derive(Debug)]
pub(crate) struct PendingSync(oneshot::Receiver<Result<(), Arc<str>>>);

impl PendingSync {
    /// For tests of what comes after.
    #[cfg(test)]
    pub(crate) fn succeeded() -> Self {
        let (sender, receiver) = oneshot::channel();
        sender.send(Ok(())).unwrap();
        Self(receiver)
    }

    /// For tests of what comes of that.
    #[cfg(test)]
    pub(crate) fn failed() -> Self {
        let (sender, receiver) = oneshot::channel();
        sender.send(Err("the disk is full".into())).unwrap();
        Self(receiver)
    }

    /// Waits until the record is on the disk.
    ///
    /// # Errors
    ///
    /// Where it cannot be written, or not in time. The text is for the log.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe; the record is written all the same.
    pub(crate) async fn synced(self) -> Result<(), Arc<str>> {
        match tokio::time::timeout(JOURNAL_WRITE_TIMEOUT, self.0).await {
            Ok(Ok(answer)) => answer,
            Ok(Err(_)) => Err("nobody writes the journal any more".into()),
            Err(_) => Err(format!("the journal was not written within {} s", JOURNAL_WRITE_TIMEOUT.as_secs()).into()),
        }
    }
}

impl Journal {
    /// Begins the journal of this life in a work folder with what is still to be reported of an earlier one. To be called on
    /// a runtime, whose threads for blocking calls it uses.
    ///
    /// Where it cannot be written that is told, and tried again with the first claim.
    pub(crate) fn create(hold: WorkDirLock, boot: BootId, carried: impl Iterator<Item = CarriedRecord>) -> Self {
        let mut rules = Rules::new(boot);
        for one in carried {
            match one {
                CarriedRecord::Claim { entry, held, outcome } => {
                    rules.apply(JournalRecord::Claimed { entry, claim: held });
                    rules.apply(JournalRecord::OutcomeDecided { entry, outcome });
                }
                CarriedRecord::UnreadPolls { claimant, unread } => {
                    rules.apply(JournalRecord::UnreadPolls { claimant, unread })
                }
            }
        }
        let mut keeper = JournalWriter { file: None, record_count: 0, failure_log: FailureLog::NotLogged };
        // Said there, and tried again.
        keeper.rewrite(&hold, &rules.compacted()).ok();
        let shared = JournalState {
            journal: rules,
            pending: Vec::new(),
            pending_count: 0,
            waiters: Vec::new(),
            backlog: Backlog::Complete,
            writer: Some(keeper),
        };
        let inner = JournalInner { lock: hold, runtime: Handle::current(), state: Mutex::new(shared) };
        Self { inner: Arc::new(inner) }
    }

    /// Writes down a claim. Its payload may come into being once that is safe.
    pub(crate) fn record_claim(&self, entry: EntryId, held: ClaimRecord) -> PendingSync {
        let (told, receiver) = oneshot::channel();
        self.enqueue(
            Some(JournalRecord::Claimed { entry, claim: held }),
            Some(WriteWaiter { result_sender: told, sync_mode: SyncMode::Immediately }),
        );
        PendingSync(receiver)
    }

    /// Writes down a claim without a payload, of which something is about to be reported.
    pub(crate) fn record_claim_without_processes(&self, entry: EntryId, held: ClaimRecord) {
        self.enqueue(Some(JournalRecord::Claimed { entry, claim: held }), None);
    }

    /// Writes down the polls that nobody has read the answers of.
    pub(crate) fn record_unread_polls(&self, claimant: Box<str>, unread: Vec<JournalTimestamp>) -> PendingWrite {
        let (told, receiver) = oneshot::channel();
        self.enqueue(
            Some(JournalRecord::UnreadPolls { claimant, unread }),
            Some(WriteWaiter { result_sender: told, sync_mode: SyncMode::Eventually }),
        );
        PendingWrite(receiver)
    }

    /// Writes down the leader of a process group of its payload.
    pub(crate) fn record_leader(&self, entry: EntryId, leader: Leader) {
        self.enqueue(Some(JournalRecord::ProcessStarted { entry, leader }), None);
    }

    /// Writes down what is about to be reported.
    pub(crate) fn record_outcome(&self, entry: EntryId, outcome: Outcome) {
        self.enqueue(Some(JournalRecord::OutcomeDecided { entry, outcome }), None);
    }

    /// Writes down that nothing is left to do.
    pub(crate) fn record_closed(&self, entry: EntryId) {
        self.enqueue(Some(JournalRecord::Closed { entry }), None);
    }

    /// Waits until everything is on the disk, or cannot be, or it takes too long for somebody who leaves.
    pub(crate) async fn flush(&self) {
        // What could not be written was told already.
        tokio::time::timeout(JOURNAL_CLOSE_TIMEOUT, self.wait_synced()).await.ok();
    }

    /// Resolves when all that was noted is on the disk, or cannot be written.
    async fn wait_synced(&self) {
        let (told, receiver) = oneshot::channel();
        self.enqueue(None, Some(WriteWaiter { result_sender: told, sync_mode: SyncMode::Immediately }));
        receiver.await.ok();
    }

    fn enqueue(&self, record: Option<JournalRecord>, waiting: Option<WriteWaiter>) {
        let mut shared = self.inner.lock_state();
        let record = record.and_then(|record| shared.journal.record(record));
        if record.is_none() && waiting.is_none() {
            return;
        }
        if let Some(record) = record {
            if shared.pending.len() >= JOURNAL_PENDING_BYTES_MAX {
                shared.backlog = Backlog::Truncated;
            } else {
                shared.pending_count += 1;
                record_format::append_record(&record, &mut shared.pending);
            }
        }
        shared.waiters.extend(waiting);
        let Some(keeper) = shared.writer.take() else { return };
        drop(shared);
        let inner = Arc::clone(&self.inner);
        self.inner.runtime.spawn_blocking(move || inner.write_pending(keeper));
    }
}

impl JournalInner {
    fn lock_state(&self) -> MutexGuard<'_, JournalState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Writes until nothing is left to be written.
    fn write_pending(&self, mut keeper: JournalWriter) {
        loop {
            let mut shared = self.lock_state();
            if shared.pending.is_empty() && shared.waiters.is_empty() && shared.backlog == Backlog::Complete {
                shared.writer = Some(keeper);
                return;
            }
            let waiting = std::mem::take(&mut shared.waiters);
            let lines = std::mem::take(&mut shared.pending);
            let records = std::mem::take(&mut shared.pending_count);
            let gaps = std::mem::replace(&mut shared.backlog, Backlog::Complete);
            let outgrown = shared.journal.needs_compaction(keeper.record_count + records);
            let anew = !keeper.has_open_file() || gaps == Backlog::Truncated || outgrown;
            let whole = if anew { shared.journal.compacted() } else { Vec::new() };
            drop(shared);
            let written = if anew {
                keeper.rewrite(&self.lock, &whole)
            } else {
                let sync = waiting.iter().map(|one| one.sync_mode).max().unwrap_or(SyncMode::Eventually);
                keeper.append(&self.lock, &lines, records, sync)
            };
            for waiting in waiting {
                // Who waited may have been told to end meanwhile.
                drop(waiting.result_sender.send(written.clone()));
            }
        }
    }
}

/// Whether somebody waits until it is on the disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum SyncMode {
    /// The kernel writes it by and by.
    Eventually,
    Immediately,
}

impl JournalWriter {
    /// Whether there is a file that lines can be appended to. One that was removed is none.
    fn has_open_file(&self) -> bool {
        self.file.as_ref().is_some_and(|file| file.metadata().is_ok_and(|about| about.nlink() > 0))
    }

    fn append(&mut self, hold: &WorkDirLock, lines: &[u8], records: usize, sync: SyncMode) -> Result<(), Arc<str>> {
        crash_point("journal-before-write");
        if let Err(error) = hold.verify() {
            return self.note_result(Err(error));
        }
        let Some(file) = &mut self.file else { return Err("the journal is not open".into()) };
        if crash_due("journal-torn-write") {
            drop(file.write_all(lines.get(..lines.len() / 2).unwrap_or_default()));
            crash();
        }
        let mut written = file.write_all(lines);
        crash_point("journal-before-sync");
        if written.is_ok() && sync == SyncMode::Immediately {
            written = file.sync_data();
        }
        crash_point("journal-after-sync");
        self.record_count += records;
        self.note_result(written)
    }

    fn rewrite(&mut self, hold: &WorkDirLock, records: &[JournalRecord]) -> Result<(), Arc<str>> {
        self.file = None;
        let mut lines = Vec::new();
        records.iter().for_each(|record| record_format::append_record(record, &mut lines));
        // Another worker's journal is not ours to replace.
        let replaced = hold.verify().and_then(|()| replace_file(hold.dir(), &lines));
        self.record_count = records.len();
        let replaced = replaced.map(|file| self.file = Some(file));
        self.note_result(replaced)
    }

    /// After a failure nobody knows what the file holds: it is written anew.
    fn note_result(&mut self, written: io::Result<()>) -> Result<(), Arc<str>> {
        match written {
            Ok(()) => {
                self.failure_log = FailureLog::NotLogged;
                Ok(())
            }
            Err(error) => {
                self.file = None;
                let text: Arc<str> = format!("the journal cannot be written: {error}").into();
                if self.failure_log == FailureLog::NotLogged {
                    tracing::error!(%error, "the journal cannot be written; no task is started before it can");
                }
                self.failure_log = FailureLog::Logged;
                Err(text)
            }
        }
    }
}

/// Puts a new file in the journal's place, or leaves the old one where it is.
fn replace_file(folder: &Path, lines: &[u8]) -> io::Result<File> {
    let (path, next) = (folder.join(JOURNAL_FILE), folder.join(NEXT_JOURNAL_FILE));
    // What lies there is half a journal of somebody who was killed.
    match std::fs::remove_file(&next) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        Ok(()) | Err(_) => {}
    }
    let made = File::options().append(true).create_new(true).mode(0o600).open(&next).and_then(|mut file| {
        file.write_all(lines)?;
        file.sync_all()?;
        Ok(file)
    });
    crash_point("journal-before-rename");
    let renamed = made.and_then(|file| {
        std::fs::rename(&next, &path)?;
        File::open(folder)?.sync_all()?;
        Ok(file)
    });
    if renamed.is_err() {
        // A disk that is full is the fuller for it.
        drop(std::fs::remove_file(&next));
    }
    renamed
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;
    use crate::domain::id::{Run, TaskId};
    use crate::domain::journal::{ProcessRecord, RECORDS_SLACK, RecoveryPlan};
    use crate::host::work_dir::WorkDir;

    const NAME: &str = "queue worker";

    fn held(task: &str) -> ClaimRecord {
        let run = Run { task: TaskId::parse(task).unwrap(), run: 0 };
        let remains = ProcessRecord { cookie: task.into(), ..ProcessRecord::default() };
        ClaimRecord { run, claimant: NAME.into(), processes: Some(remains) }
    }

    fn begun(folder: &Path) -> Journal {
        let hold = WorkDir::acquire(folder).unwrap().work_dir_lock().unwrap();
        Journal::create(hold, current_boot(), std::iter::empty())
    }

    /// What the next life would make of it.
    fn plan(folder: &Path) -> RecoveryPlan {
        let earlier = PreviousJournal::read(folder);
        assert_eq!(earlier.damage, [""; 0]);
        earlier.journal.recovery_plan(&earlier.boot, &[NAME.into()])
    }

    fn tasks(folder: &Path) -> Vec<String> {
        plan(folder).report.iter().map(|left| left.run.task.to_string()).collect()
    }

    /// All is written, and nobody writes.
    async fn written(journal: &Journal) {
        journal.wait_synced().await;
        while journal.inner.lock_state().writer.is_none() {
            tokio::task::yield_now().await;
        }
    }

    #[tokio::test]
    async fn what_is_safe_is_known_to_the_next_life_and_what_is_over_is_not() {
        let folder = tempfile::tempdir().unwrap();
        let journal = begun(folder.path());
        let recorded: Vec<PendingSync> =
            (1..=50).map(|number| journal.record_claim(EntryId(number), held(&format!("t{number}")))).collect();
        for one in recorded {
            one.synced().await.unwrap();
        }
        (1..=48).for_each(|number| journal.record_closed(EntryId(number)));
        journal.record_leader(EntryId(49), Leader { pid: 7, start_ticks: 8 });
        journal.record_outcome(EntryId(50), Outcome::Completed);
        written(&journal).await;
        let plan = plan(folder.path());
        assert_eq!(plan.kill.len(), 2);
        assert_eq!(plan.kill[0].leaders, [Leader { pid: 7, start_ticks: 8 }]);
        let left: Vec<_> = plan.report.iter().map(|left| (left.run.task.as_str(), left.outcome)).collect();
        let handed_back = Outcome::Exception(crate::domain::outcome::ExceptionReason::WorkerShutdown);
        assert_eq!(left, [("t49", handed_back), ("t50", Outcome::Completed)]);
        let mode = std::fs::metadata(folder.path().join(JOURNAL_FILE)).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
    }

    #[tokio::test]
    async fn a_journal_does_not_grow_with_the_number_of_claims() {
        let folder = tempfile::tempdir().unwrap();
        let journal = begun(folder.path());
        journal.record_claim(EntryId(0), held("stays")).synced().await.unwrap();
        let mut lengths = Vec::new();
        for round in 0..4_u64 {
            for number in 1..=1_000 {
                let entry = EntryId(round * 1_000 + number);
                drop(journal.record_claim(entry, held("passes")));
                journal.record_outcome(entry, Outcome::Completed);
                journal.record_closed(entry);
            }
            written(&journal).await;
            lengths.push(std::fs::read(folder.path().join(JOURNAL_FILE)).unwrap().split(|byte| *byte == b'\n').count());
        }
        // What is written together is written whole before it is counted.
        assert!(lengths.iter().all(|lines| *lines < RECORDS_SLACK + 3_100), "{lengths:?}");
        assert_eq!(tasks(folder.path()), ["stays"]);
    }

    #[tokio::test]
    async fn after_a_write_that_failed_everything_is_written_anew() {
        let folder = tempfile::tempdir().unwrap();
        let journal = begun(folder.path());
        journal.record_claim(EntryId(1), held("before")).synced().await.unwrap();
        written(&journal).await;
        // As a disk that fails: what is read only cannot be written.
        let read_only = File::open(folder.path().join(JOURNAL_FILE)).unwrap();
        journal.inner.lock_state().writer.as_mut().expect("nothing is being written").file = Some(read_only);
        let error = journal.record_claim(EntryId(2), held("during")).synced().await.unwrap_err();
        assert!(error.contains("journal"), "{error}");
        assert_eq!(tasks(folder.path()), ["before"]);
        // Its claim is handed back, which is over.
        journal.record_closed(EntryId(2));
        journal.record_claim(EntryId(3), held("after")).synced().await.unwrap();
        assert_eq!(tasks(folder.path()), ["before", "after"]);
    }

    #[tokio::test]
    async fn a_journal_that_was_removed_is_written_anew_unless_its_folder_is_another() {
        let home = tempfile::tempdir().unwrap();
        let folder = home.path().join("work");
        let taken = WorkDir::acquire(&folder).unwrap();
        let journal = Journal::create(taken.work_dir_lock().unwrap(), current_boot(), std::iter::empty());
        journal.record_claim(EntryId(1), held("before")).synced().await.unwrap();
        written(&journal).await;
        std::fs::remove_file(folder.join(JOURNAL_FILE)).unwrap();
        journal.record_claim(EntryId(2), held("after")).synced().await.unwrap();
        written(&journal).await;
        assert_eq!(tasks(&folder), ["before", "after"]);
        std::fs::remove_dir_all(&folder).unwrap();
        let error = journal.record_claim(EntryId(3), held("gone")).synced().await.unwrap_err();
        assert!(error.contains("removed or replaced"), "{error}");
        assert!(!folder.exists());
        // As long as it lives, its file is no other's.
        let work = WorkDir::acquire(&folder).unwrap();
        let other = Journal::create(work.work_dir_lock().unwrap(), current_boot(), std::iter::empty());
        other.record_claim(EntryId(1), held("other")).synced().await.unwrap();
        written(&other).await;
        journal.record_claim(EntryId(4), held("replaced")).synced().await.unwrap_err();
        assert_eq!(tasks(&folder), ["other"]);
    }

    #[tokio::test]
    async fn a_journal_that_cannot_be_written_at_the_start_is_tried_again_with_the_first_claim() {
        let folder = tempfile::tempdir().unwrap();
        let blocked = folder.path().join(NEXT_JOURNAL_FILE);
        std::fs::create_dir(&blocked).unwrap();
        let journal = begun(folder.path());
        assert!(journal.record_claim(EntryId(1), held("one")).synced().await.is_err());
        std::fs::remove_dir(&blocked).unwrap();
        journal.record_claim(EntryId(2), held("two")).synced().await.unwrap();
        assert_eq!(tasks(folder.path()), ["one", "two"]);
    }

    #[tokio::test]
    async fn more_than_may_wait_is_written_anew_and_nothing_is_missing() {
        let folder = tempfile::tempdir().unwrap();
        let journal = begun(folder.path());
        written(&journal).await;
        // As a disk that has not answered yet.
        let keeper = journal.inner.lock_state().writer.take();
        let many = u64::try_from(JOURNAL_PENDING_BYTES_MAX / 60).unwrap();
        (1..=many).for_each(|number| drop(journal.record_claim(EntryId(number), held(&format!("t{number}")))));
        assert_eq!(journal.inner.lock_state().backlog, Backlog::Truncated);
        assert!(journal.inner.lock_state().pending.len() < JOURNAL_PENDING_BYTES_MAX + 1_000);
        journal.inner.lock_state().writer = keeper;
        written(&journal).await;
        assert_eq!(tasks(folder.path()).len() as u64, many);
    }

    #[test]
    fn whatever_lies_in_its_place_is_told_of_and_no_more() {
        let folder = tempfile::tempdir().unwrap();
        assert!(PreviousJournal::read(folder.path()).damage.is_empty(), "nothing is no damage");
        std::fs::write(folder.path().join(JOURNAL_FILE), "what is this\n\u{0}\nand torn").unwrap();
        let earlier = PreviousJournal::read(folder.path());
        assert!(earlier.damage[0].contains("2 lines cannot be read, the first of them line 1"), "{earlier:?}");
        std::fs::remove_file(folder.path().join(JOURNAL_FILE)).unwrap();
        std::fs::create_dir(folder.path().join(JOURNAL_FILE)).unwrap();
        assert_eq!(PreviousJournal::read(folder.path()).damage.len(), 1);
    }
}
