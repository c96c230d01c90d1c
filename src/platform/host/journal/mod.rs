//! Writes and reads the worker's journal, a file in the work directory.
//!
//! [`journeyman_domain::journal`] defines what the records mean. One thread at a time appends all pending records in one write, and
//! syncs the file if a caller waits for it. The state in memory is authoritative: after a failed write, or when most records are
//! obsolete, the file is rewritten from it.

mod process_recorder;
mod record_format;

use std::fs::File;
use std::io::{self, Read as _, Write as _};
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::runtime::Handle;
use tokio::sync::oneshot;

use super::crash_points::{crash, crash_due, crash_point};
use super::work_dir::{WorkDirLock, ignore_missing};
use journeyman_domain::journal::{BootId, ClaimRecord, EntryId, Journal as Rules, JournalRecord};
use journeyman_domain::limits::{
    JOURNAL_BYTES_MAX, JOURNAL_CLOSE_TIMEOUT, JOURNAL_PENDING_BYTES_MAX, JOURNAL_POLL_TIMEOUT, JOURNAL_WRITE_TIMEOUT,
};
pub use process_recorder::{FirstRecord, ProcessRecorder};

const JOURNAL_FILE: &str = "journal";
/// Replaces the journal by a rename.
const NEXT_JOURNAL_FILE: &str = "journal.next";

/// The journal of the previous worker process, and the current boot id.
#[derive(Debug)]
pub struct PreviousJournal {
    pub journal: Rules,
    /// What cannot be read, one message each.
    pub damage: Vec<String>,
    pub boot: BootId,
}

impl PreviousJournal {
    /// Reads the journal in a work directory. A damaged journal does not prevent a start.
    pub fn read(dir: &Path) -> Self {
        let path = dir.join(JOURNAL_FILE);
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

pub fn current_boot() -> BootId {
    // Without a boot id, a new one each time ensures that no recorded PID is trusted.
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id");
    BootId(boot.map_or_else(|_| uuid::Uuid::new_v4().to_string(), |boot| boot.trim().to_owned()).into())
}

/// The journal of this worker process. Clones share it.
#[derive(Debug, Clone)]
pub struct Journal {
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
    pending: PendingRecords,
    /// `None` while a thread writes.
    writer: Option<JournalWriter>,
}

#[derive(Debug, Default)]
struct PendingRecords {
    /// The lines to append.
    lines: Vec<u8>,
    count: usize,
    waiters: Vec<WriteWaiter>,
    /// Records were dropped because too many were pending, so the file has to be rewritten.
    overflowed: bool,
}

#[derive(Debug)]
struct WriteWaiter {
    result_sender: oneshot::Sender<Result<(), Arc<str>>>,
    sync_mode: SyncMode,
}

#[derive(Debug)]
struct JournalWriter {
    /// `None` if the file has to be rewritten.
    file: Option<File>,
    record_count: usize,
    /// The current write failure was logged.
    failure_logged: bool,
}

/// A record that is not stored yet.
#[derive(Debug)]
pub struct PendingRecord {
    result: oneshot::Receiver<Result<(), Arc<str>>>,
    timeout: Duration,
}

impl PendingRecord {
    /// A record that is on the disk.
    pub fn succeeded() -> Self {
        let (sender, result) = oneshot::channel();
        sender.send(Ok(())).ok();
        Self { result, timeout: JOURNAL_WRITE_TIMEOUT }
    }

    /// Waits until the record is on the disk, or in the kernel if that is enough for it.
    ///
    /// # Errors
    ///
    /// The record cannot be written, or not in time. The text is for the log.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe; the record is written nevertheless.
    pub async fn stored(self) -> Result<(), Arc<str>> {
        match tokio::time::timeout(self.timeout, self.result).await {
            Ok(Ok(result)) => result,
            Ok(Err(_)) => Err("the journal writer stopped".into()),
            Err(_) => Err(format!("the journal was not written within {} s", self.timeout.as_secs()).into()),
        }
    }
}

impl Journal {
    /// Replaces the previous journal by records that are still needed. Has to be called on a runtime, whose blocking threads it
    /// uses.
    ///
    /// A failed write is logged, and retried with the first claim.
    pub fn create(lock: WorkDirLock, boot: BootId, carried: impl Iterator<Item = JournalRecord>) -> Self {
        let mut rules = Rules::new(boot);
        for record in carried {
            rules.apply(record);
        }
        let mut writer = JournalWriter { file: None, record_count: 0, failure_logged: false };
        // The failure is logged there, and the write is retried.
        writer.rewrite(&lock, &rules.compacted()).ok();
        let state = JournalState { journal: rules, pending: PendingRecords::default(), writer: Some(writer) };
        let inner = JournalInner { lock, runtime: Handle::current(), state: Mutex::new(state) };
        Self { inner: Arc::new(inner) }
    }

    /// Has to be stored before anything of the payload exists (I27).
    pub fn record_claim(&self, entry: EntryId, claim: ClaimRecord) -> PendingRecord {
        self.store_now(JournalRecord::Claimed { entry, claim })
    }

    /// Syncs the record to the disk.
    fn store_now(&self, record: JournalRecord) -> PendingRecord {
        self.store(Some(record), SyncMode::Immediately, JOURNAL_WRITE_TIMEOUT)
    }

    /// Records when the oldest poll was sent whose reply was not read. It has to survive the end of this process, and not that of
    /// the host.
    pub fn record_unread_poll(&self, claimant: Box<str>, sent_at: Option<Duration>) -> PendingRecord {
        let record = JournalRecord::UnreadPoll { claimant, sent_at };
        self.store(Some(record), SyncMode::Eventually, JOURNAL_POLL_TIMEOUT)
    }

    /// Records a fact that no caller has to wait for.
    pub fn record(&self, record: JournalRecord) {
        self.enqueue(Some(record), None);
    }

    pub fn record_closed(&self, entry: EntryId) {
        self.record(JournalRecord::Closed { entry });
    }

    /// Waits at shutdown until all records are on the disk, or failed, or for [`JOURNAL_CLOSE_TIMEOUT`].
    pub async fn flush(&self) {
        // The writer has logged a failure.
        self.store(None, SyncMode::Immediately, JOURNAL_CLOSE_TIMEOUT).stored().await.ok();
    }

    fn store(&self, record: Option<JournalRecord>, sync_mode: SyncMode, timeout: Duration) -> PendingRecord {
        let (result_sender, result) = oneshot::channel();
        self.enqueue(record, Some(WriteWaiter { result_sender, sync_mode }));
        PendingRecord { result, timeout }
    }

    fn enqueue(&self, record: Option<JournalRecord>, waiters: Option<WriteWaiter>) {
        let mut state = self.inner.state.lock();
        let record = record.and_then(|record| state.journal.record(record));
        if record.is_none() && waiters.is_none() {
            return;
        }
        if let Some(record) = record {
            if state.pending.lines.len() >= JOURNAL_PENDING_BYTES_MAX {
                state.pending.overflowed = true;
            } else {
                state.pending.count += 1;
                record_format::append_record(&record, &mut state.pending.lines);
            }
        }
        state.pending.waiters.extend(waiters);
        let Some(writer) = state.writer.take() else { return };
        drop(state);
        let inner = Arc::clone(&self.inner);
        self.inner.runtime.spawn_blocking(move || inner.write_pending(writer));
    }
}

impl JournalInner {
    /// Writes until no record and no waiter is pending.
    fn write_pending(&self, mut writer: JournalWriter) {
        loop {
            let mut state = self.state.lock();
            let PendingRecords { lines, count, waiters, overflowed } = std::mem::take(&mut state.pending);
            if lines.is_empty() && waiters.is_empty() && !overflowed {
                state.writer = Some(writer);
                return;
            }
            let is_oversized = state.journal.needs_compaction(writer.record_count + count);
            let rewrite = !writer.has_open_file() || overflowed || is_oversized;
            let all_records = if rewrite { state.journal.compacted() } else { Vec::new() };
            drop(state);
            let result = if rewrite {
                writer.rewrite(&self.lock, &all_records)
            } else {
                let sync = waiters.iter().map(|waiter| waiter.sync_mode).max().unwrap_or(SyncMode::Eventually);
                writer.append(&self.lock, &lines, count, sync)
            };
            for waiter in waiters {
                // The waiter may have been cancelled.
                drop(waiter.result_sender.send(result.clone()));
            }
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum SyncMode {
    /// The kernel writes back when it chooses.
    Eventually,
    Immediately,
}

impl JournalWriter {
    /// A file that was removed does not count.
    fn has_open_file(&self) -> bool {
        self.file.as_ref().is_some_and(|file| file.metadata().is_ok_and(|metadata| metadata.nlink() > 0))
    }

    fn append(&mut self, lock: &WorkDirLock, lines: &[u8], records: usize, sync: SyncMode) -> Result<(), Arc<str>> {
        crash_point("journal-before-write");
        if let Err(error) = lock.verify() {
            return self.note_result(Err(error));
        }
        let Some(file) = &mut self.file else { return Err("the journal is not open".into()) };
        if crash_due("journal-torn-write") {
            drop(file.write_all(lines.get(..lines.len() / 2).unwrap_or_default()));
            crash();
        }
        let mut result = file.write_all(lines);
        crash_point("journal-before-sync");
        if result.is_ok() && sync == SyncMode::Immediately {
            result = file.sync_data();
        }
        crash_point("journal-after-sync");
        self.record_count += records;
        self.note_result(result)
    }

    fn rewrite(&mut self, lock: &WorkDirLock, records: &[JournalRecord]) -> Result<(), Arc<str>> {
        self.file = None;
        let mut lines = Vec::new();
        records.iter().for_each(|record| record_format::append_record(record, &mut lines));
        // Another worker may own the journal at this path by now.
        let replaced = lock.verify().and_then(|()| replace_file(lock.dir(), &lines));
        self.record_count = records.len();
        let replaced = replaced.map(|file| self.file = Some(file));
        self.note_result(replaced)
    }

    /// A failed write leaves the file in an unknown state, so it is closed and rewritten.
    fn note_result(&mut self, result: io::Result<()>) -> Result<(), Arc<str>> {
        match result {
            Ok(()) => {
                self.failure_logged = false;
                Ok(())
            }
            Err(error) => {
                self.file = None;
                let text: Arc<str> = format!("cannot write the journal: {error}").into();
                if !std::mem::replace(&mut self.failure_logged, true) {
                    tracing::error!(%error, "cannot write the journal; no task starts until it succeeds");
                }
                Err(text)
            }
        }
    }
}

/// Replaces the journal atomically.
fn replace_file(dir: &Path, lines: &[u8]) -> io::Result<File> {
    let (path, next) = (dir.join(JOURNAL_FILE), dir.join(NEXT_JOURNAL_FILE));
    // A worker that was killed here left a partial file.
    std::fs::remove_file(&next).or_else(ignore_missing)?;
    let created = File::options().append(true).create_new(true).mode(0o600).open(&next).and_then(|mut file| {
        file.write_all(lines)?;
        file.sync_all()?;
        Ok(file)
    });
    crash_point("journal-before-rename");
    let renamed = created.and_then(|file| {
        std::fs::rename(&next, &path)?;
        File::open(dir)?.sync_all()?;
        Ok(file)
    });
    if renamed.is_err() {
        // The disk may be full.
        drop(std::fs::remove_file(&next));
    }
    renamed
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;
    use crate::host::work_dir::WorkDir;
    use journeyman_domain::id::{Run, TaskId};
    use journeyman_domain::journal::{Leader, ProcessRecord, RECORDS_SLACK, RecoveryPlan};
    use journeyman_domain::outcome::Outcome;

    const NAME: &str = "queue worker";

    fn held(task: &str) -> ClaimRecord {
        let run = Run { task: TaskId::parse(task).unwrap(), run: 0 };
        let remains = ProcessRecord { cookie: task.into(), ..ProcessRecord::default() };
        ClaimRecord { run, claimant: NAME.into(), processes: Some(remains) }
    }

    fn create(dir: &Path) -> Journal {
        let lock = WorkDir::acquire(dir).unwrap().work_dir_lock().unwrap();
        Journal::create(lock, current_boot(), std::iter::empty())
    }

    fn plan(dir: &Path) -> RecoveryPlan {
        let previous = PreviousJournal::read(dir);
        assert_eq!(previous.damage, [""; 0]);
        previous.journal.recovery_plan(&previous.boot, &[NAME.into()])
    }

    fn tasks(dir: &Path) -> Vec<String> {
        plan(dir).report.iter().map(|claim| claim.run.task.to_string()).collect()
    }

    /// All records are written and the writer is idle.
    async fn wait_idle(journal: &Journal) {
        journal.flush().await;
        while journal.inner.state.lock().writer.is_none() {
            tokio::task::yield_now().await;
        }
    }

    #[tokio::test]
    async fn the_next_process_reads_open_claims_and_no_closed_ones() {
        let dir = tempfile::tempdir().unwrap();
        let journal = create(dir.path());
        let recorded: Vec<PendingRecord> =
            (1..=50).map(|number| journal.record_claim(EntryId(number), held(&format!("t{number}")))).collect();
        for pending in recorded {
            pending.stored().await.unwrap();
        }
        (1..=48).for_each(|number| journal.record_closed(EntryId(number)));
        let leader = Leader { pid: 7, start_ticks: 8 };
        journal.record(JournalRecord::ProcessStarted { entry: EntryId(49), leader });
        journal.record(JournalRecord::OutcomeDecided { entry: EntryId(50), outcome: Outcome::Completed });
        wait_idle(&journal).await;
        let plan = plan(dir.path());
        assert_eq!(plan.kill.len(), 2);
        assert_eq!(plan.kill[0].leaders, [Leader { pid: 7, start_ticks: 8 }]);
        let claims: Vec<_> = plan.report.iter().map(|claim| (claim.run.task.as_str(), claim.outcome)).collect();
        let released = Outcome::Exception(journeyman_domain::outcome::ExceptionReason::WorkerShutdown);
        assert_eq!(claims, [("t49", released), ("t50", Outcome::Completed)]);
        let mode = std::fs::metadata(dir.path().join(JOURNAL_FILE)).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
    }

    #[tokio::test]
    async fn a_journal_does_not_grow_with_the_number_of_claims() {
        let dir = tempfile::tempdir().unwrap();
        let journal = create(dir.path());
        journal.record_claim(EntryId(0), held("stays")).stored().await.unwrap();
        let mut lengths = Vec::new();
        for round in 0..4_u64 {
            for number in 1..=1_000 {
                let entry = EntryId(round * 1_000 + number);
                drop(journal.record_claim(entry, held("passes")));
                journal.record(JournalRecord::OutcomeDecided { entry, outcome: Outcome::Completed });
                journal.record_closed(entry);
            }
            wait_idle(&journal).await;
            lengths.push(std::fs::read(dir.path().join(JOURNAL_FILE)).unwrap().split(|byte| *byte == b'\n').count());
        }
        // Compaction happens after a batch was written.
        assert!(lengths.iter().all(|lines| *lines < RECORDS_SLACK + 3_100), "{lengths:?}");
        assert_eq!(tasks(dir.path()), ["stays"]);
    }

    #[tokio::test]
    async fn the_journal_is_rewritten_after_a_failed_write() {
        let dir = tempfile::tempdir().unwrap();
        let journal = create(dir.path());
        journal.record_claim(EntryId(1), held("before")).stored().await.unwrap();
        wait_idle(&journal).await;
        // A read-only descriptor stands for a failing disk.
        let read_only = File::open(dir.path().join(JOURNAL_FILE)).unwrap();
        journal.inner.state.lock().writer.as_mut().expect("the writer is idle").file = Some(read_only);
        let error = journal.record_claim(EntryId(2), held("during")).stored().await.unwrap_err();
        assert!(error.contains("journal"), "{error}");
        assert_eq!(tasks(dir.path()), ["before"]);
        // The claim was released.
        journal.record_closed(EntryId(2));
        journal.record_claim(EntryId(3), held("after")).stored().await.unwrap();
        assert_eq!(tasks(dir.path()), ["before", "after"]);
    }

    #[tokio::test]
    async fn a_removed_journal_is_rewritten_unless_the_work_dir_was_replaced() {
        let home = tempfile::tempdir().unwrap();
        let dir = home.path().join("work");
        let work = WorkDir::acquire(&dir).unwrap();
        let journal = Journal::create(work.work_dir_lock().unwrap(), current_boot(), std::iter::empty());
        journal.record_claim(EntryId(1), held("before")).stored().await.unwrap();
        wait_idle(&journal).await;
        std::fs::remove_file(dir.join(JOURNAL_FILE)).unwrap();
        journal.record_claim(EntryId(2), held("after")).stored().await.unwrap();
        wait_idle(&journal).await;
        assert_eq!(tasks(&dir), ["before", "after"]);
        std::fs::remove_dir_all(&dir).unwrap();
        let error = journal.record_claim(EntryId(3), held("gone")).stored().await.unwrap_err();
        assert!(error.contains("removed or replaced"), "{error}");
        assert!(!dir.exists());
        // The inode stays in use while the first worker lives.
        let work = WorkDir::acquire(&dir).unwrap();
        let other = Journal::create(work.work_dir_lock().unwrap(), current_boot(), std::iter::empty());
        other.record_claim(EntryId(1), held("other")).stored().await.unwrap();
        wait_idle(&other).await;
        journal.record_claim(EntryId(4), held("replaced")).stored().await.unwrap_err();
        assert_eq!(tasks(&dir), ["other"]);
    }

    #[tokio::test]
    async fn a_journal_that_cannot_be_created_is_retried_with_the_first_claim() {
        let dir = tempfile::tempdir().unwrap();
        let blocked = dir.path().join(NEXT_JOURNAL_FILE);
        std::fs::create_dir(&blocked).unwrap();
        let journal = create(dir.path());
        assert!(journal.record_claim(EntryId(1), held("one")).stored().await.is_err());
        std::fs::remove_dir(&blocked).unwrap();
        journal.record_claim(EntryId(2), held("two")).stored().await.unwrap();
        assert_eq!(tasks(dir.path()), ["one", "two"]);
    }

    #[tokio::test]
    async fn an_overflow_of_pending_records_is_rewritten_without_loss() {
        let dir = tempfile::tempdir().unwrap();
        let journal = create(dir.path());
        wait_idle(&journal).await;
        // A slow disk.
        let writer = journal.inner.state.lock().writer.take();
        let many = u64::try_from(JOURNAL_PENDING_BYTES_MAX / 60).unwrap();
        (1..=many).for_each(|number| drop(journal.record_claim(EntryId(number), held(&format!("t{number}")))));
        assert!(journal.inner.state.lock().pending.overflowed);
        assert!(journal.inner.state.lock().pending.lines.len() < JOURNAL_PENDING_BYTES_MAX + 1_000);
        journal.inner.state.lock().writer = writer;
        wait_idle(&journal).await;
        assert_eq!(tasks(dir.path()).len() as u64, many);
    }

    #[test]
    fn a_damaged_journal_is_described_and_does_not_prevent_a_start() {
        let dir = tempfile::tempdir().unwrap();
        assert!(PreviousJournal::read(dir.path()).damage.is_empty(), "a missing file is not damage");
        std::fs::write(dir.path().join(JOURNAL_FILE), "what is this\n\u{0}\nand torn").unwrap();
        let previous = PreviousJournal::read(dir.path());
        assert!(previous.damage[0].contains("2 lines cannot be read, the first of them line 1"), "{previous:?}");
        std::fs::remove_file(dir.path().join(JOURNAL_FILE)).unwrap();
        std::fs::create_dir(dir.path().join(JOURNAL_FILE)).unwrap();
        assert_eq!(PreviousJournal::read(dir.path()).damage.len(), 1);
    }
}
