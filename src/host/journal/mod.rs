//! Where a worker's journal is kept: a file of its work folder, written by one thread at a time.
//!
//! What the records mean is decided in [`crate::domain::journal`]. Here they are appended together, as many as there are
//! whenever the disk is done with those before, and synced where somebody waits for it. The state in memory is what counts:
//! where writing went wrong, or the file holds much that is over, the file is written anew from it.

mod line;

use std::fs::File;
use std::io::{self, Read as _, Write as _};
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::runtime::Handle;
use tokio::sync::oneshot;

use super::crash::{crash, crash_due, crash_point};
use super::folder::Hold;
use crate::domain::journal::{Boot, EntryId, Held, Journal as Rules, Leader, Record, Stamp};
use crate::domain::outcome::Outcome;
use crate::limits::{JOURNAL_BYTES_MAX, JOURNAL_LAST_WAIT, JOURNAL_PENDING_BYTES_MAX, JOURNAL_POLL_WAIT, JOURNAL_WAIT};

/// The file in the work folder.
const FILE: &str = "journal";
/// What is to take its place.
const NEXT: &str = "journal.next";

/// What an earlier worker has left of its journal, and this boot of the host.
#[derive(Debug)]
pub(crate) struct Earlier {
    /// What could be read of it.
    pub(crate) journal: Rules,
    /// What could not, one sentence each.
    pub(crate) damage: Vec<String>,
    /// This boot of the host.
    pub(crate) boot: Boot,
}

impl Earlier {
    /// Reads what lies in a work folder. Whatever lies there keeps no worker from starting.
    pub(crate) fn read(folder: &Path) -> Self {
        let path = folder.join(FILE);
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
        let line::Reading { journal, damaged, .. } = line::read(&bytes);
        if let (Some(first), many) = (damaged.first(), damaged.len()) {
            damage.push(format!("{}: {many} lines cannot be read, the first of them line {first}", path.display()));
        }
        Self { journal, damage, boot: this_boot() }
    }
}

/// The kernel's name for the time since the host was started.
pub(crate) fn this_boot() -> Boot {
    // Where there is none, no two lives are of one boot, so that no number of a process is believed.
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id");
    Boot(boot.map_or_else(|_| uuid::Uuid::new_v4().to_string(), |boot| boot.trim().to_owned()).into())
}

/// What a life leaves to the next one after this.
pub(crate) enum Carried {
    /// A claim that is still to be reported.
    Claim {
        /// Names it.
        entry: EntryId,
        /// The claim.
        held: Held,
        /// What is reported.
        outcome: Outcome,
    },
    /// Polls whose answers nobody has read.
    Polls {
        /// Who sent them.
        claimant: Box<str>,
        /// When.
        unread: Vec<Stamp>,
    },
}

/// A worker's journal. Clones are the same one.
#[derive(Debug, Clone)]
pub(crate) struct Journal {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    hold: Hold,
    runtime: Handle,
    shared: Mutex<Shared>,
}

#[derive(Debug)]
struct Shared {
    rules: Rules,
    /// Lines that are to be appended.
    pending: Vec<u8>,
    records: usize,
    /// Who waits for them.
    waiting: Vec<Waiting>,
    /// Some lines were dropped.
    gaps: Gaps,
    /// Not here while something is being written.
    keeper: Option<Keeper>,
}

#[derive(Debug)]
struct Waiting {
    told: oneshot::Sender<Result<(), Arc<str>>>,
    until: Sync,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Gaps {
    None,
    Some,
}

/// Who holds the file.
#[derive(Debug)]
struct Keeper {
    /// `None` where it has to be written anew.
    file: Option<File>,
    records: usize,
    trouble: Trouble,
}

/// Whether the operator was told that the journal cannot be written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Trouble {
    None,
    Said,
}

/// Word of whether a record is where it has to be.
#[derive(Debug)]
pub(crate) struct Noted(oneshot::Receiver<Result<(), Arc<str>>>);

impl Noted {
    /// Waits until the kernel has the record, so that it outlives this process, or cannot have it, or it takes too long.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe.
    pub(crate) async fn outlives(self) {
        // What cannot be written was told already.
        tokio::time::timeout(JOURNAL_POLL_WAIT, self.0).await.ok();
    }
}

/// Word of whether a record is safe.
#[derive(Debug)]
pub(crate) struct Recorded(oneshot::Receiver<Result<(), Arc<str>>>);

impl Recorded {
    /// For tests of what comes after.
    #[cfg(test)]
    pub(crate) fn already() -> Self {
        let (sender, receiver) = oneshot::channel();
        sender.send(Ok(())).unwrap();
        Self(receiver)
    }

    /// For tests of what comes of that.
    #[cfg(test)]
    pub(crate) fn refused() -> Self {
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
    pub(crate) async fn safe(self) -> Result<(), Arc<str>> {
        match tokio::time::timeout(JOURNAL_WAIT, self.0).await {
            Ok(Ok(answer)) => answer,
            Ok(Err(_)) => Err("nobody writes the journal any more".into()),
            Err(_) => Err(format!("the journal was not written within {} s", JOURNAL_WAIT.as_secs()).into()),
        }
    }
}

impl Journal {
    /// Begins the journal of this life in a work folder with what is still to be reported of an earlier one. To be called on
    /// a runtime, whose threads for blocking calls it uses.
    ///
    /// Where it cannot be written that is told, and tried again with the first claim.
    pub(crate) fn begin(hold: Hold, boot: Boot, carried: impl Iterator<Item = Carried>) -> Self {
        let mut rules = Rules::begun(boot);
        for one in carried {
            match one {
                Carried::Claim { entry, held, outcome } => {
                    rules.apply(Record::Held { entry, held });
                    rules.apply(Record::Decided { entry, outcome });
                }
                Carried::Polls { claimant, unread } => rules.apply(Record::Polls { claimant, unread }),
            }
        }
        let mut keeper = Keeper { file: None, records: 0, trouble: Trouble::None };
        // Said there, and tried again.
        keeper.write_anew(&hold, &rules.records()).ok();
        let shared = Shared {
            rules,
            pending: Vec::new(),
            records: 0,
            waiting: Vec::new(),
            gaps: Gaps::None,
            keeper: Some(keeper),
        };
        let inner = Inner { hold, runtime: Handle::current(), shared: Mutex::new(shared) };
        Self { inner: Arc::new(inner) }
    }

    /// Writes down a claim. Its payload may come into being once that is safe.
    pub(crate) fn hold(&self, entry: EntryId, held: Held) -> Recorded {
        let (told, receiver) = oneshot::channel();
        self.write(Some(Record::Held { entry, held }), Some(Waiting { told, until: Sync::Now }));
        Recorded(receiver)
    }

    /// Writes down a claim without a payload, of which something is about to be reported.
    pub(crate) fn hold_idle(&self, entry: EntryId, held: Held) {
        self.write(Some(Record::Held { entry, held }), None);
    }

    /// Writes down the polls that nobody has read the answers of.
    pub(crate) fn polls(&self, claimant: Box<str>, unread: Vec<Stamp>) -> Noted {
        let (told, receiver) = oneshot::channel();
        self.write(Some(Record::Polls { claimant, unread }), Some(Waiting { told, until: Sync::Later }));
        Noted(receiver)
    }

    /// Writes down the leader of a process group of its payload.
    pub(crate) fn leads(&self, entry: EntryId, leader: Leader) {
        self.write(Some(Record::Leads { entry, leader }), None);
    }

    /// Writes down what is about to be reported.
    pub(crate) fn decided(&self, entry: EntryId, outcome: Outcome) {
        self.write(Some(Record::Decided { entry, outcome }), None);
    }

    /// Writes down that nothing is left to do.
    pub(crate) fn over(&self, entry: EntryId) {
        self.write(Some(Record::Over { entry }), None);
    }

    /// Waits until everything is on the disk, or cannot be, or it takes too long for somebody who leaves.
    pub(crate) async fn settled(&self) {
        // What could not be written was told already.
        tokio::time::timeout(JOURNAL_LAST_WAIT, self.written()).await.ok();
    }

    /// Resolves when all that was noted is on the disk, or cannot be written.
    async fn written(&self) {
        let (told, receiver) = oneshot::channel();
        self.write(None, Some(Waiting { told, until: Sync::Now }));
        receiver.await.ok();
    }

    fn write(&self, record: Option<Record>, waiting: Option<Waiting>) {
        let mut shared = self.inner.shared();
        let record = record.and_then(|record| shared.rules.note(record));
        if record.is_none() && waiting.is_none() {
            return;
        }
        if let Some(record) = record {
            if shared.pending.len() >= JOURNAL_PENDING_BYTES_MAX {
                shared.gaps = Gaps::Some;
            } else {
                shared.records += 1;
                line::write(&record, &mut shared.pending);
            }
        }
        shared.waiting.extend(waiting);
        let Some(keeper) = shared.keeper.take() else { return };
        drop(shared);
        let inner = Arc::clone(&self.inner);
        self.inner.runtime.spawn_blocking(move || inner.keep_up(keeper));
    }
}

impl Inner {
    fn shared(&self) -> MutexGuard<'_, Shared> {
        self.shared.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Writes until nothing is left to be written.
    fn keep_up(&self, mut keeper: Keeper) {
        loop {
            let mut shared = self.shared();
            if shared.pending.is_empty() && shared.waiting.is_empty() && shared.gaps == Gaps::None {
                shared.keeper = Some(keeper);
                return;
            }
            let waiting = std::mem::take(&mut shared.waiting);
            let lines = std::mem::take(&mut shared.pending);
            let records = std::mem::take(&mut shared.records);
            let gaps = std::mem::replace(&mut shared.gaps, Gaps::None);
            let outgrown = shared.rules.is_outgrown_by(keeper.records + records);
            let anew = !keeper.has_file() || gaps == Gaps::Some || outgrown;
            let whole = if anew { shared.rules.records() } else { Vec::new() };
            drop(shared);
            let written = if anew {
                keeper.write_anew(&self.hold, &whole)
            } else {
                let sync = waiting.iter().map(|one| one.until).max().unwrap_or(Sync::Later);
                keeper.append(&self.hold, &lines, records, sync)
            };
            for waiting in waiting {
                // Who waited may have been told to end meanwhile.
                drop(waiting.told.send(written.clone()));
            }
        }
    }
}

/// Whether somebody waits until it is on the disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Sync {
    /// The kernel writes it by and by.
    Later,
    Now,
}

impl Keeper {
    /// Whether there is a file that lines can be appended to. One that was removed is none.
    fn has_file(&self) -> bool {
        self.file.as_ref().is_some_and(|file| file.metadata().is_ok_and(|about| about.nlink() > 0))
    }

    fn append(&mut self, hold: &Hold, lines: &[u8], records: usize, sync: Sync) -> Result<(), Arc<str>> {
        crash_point("journal-before-write");
        if let Err(error) = hold.check() {
            return self.judge(Err(error));
        }
        let Some(file) = &mut self.file else { return Err("the journal is not open".into()) };
        if crash_due("journal-torn-write") {
            drop(file.write_all(lines.get(..lines.len() / 2).unwrap_or_default()));
            crash();
        }
        let mut written = file.write_all(lines);
        crash_point("journal-before-sync");
        if written.is_ok() && sync == Sync::Now {
            written = file.sync_data();
        }
        crash_point("journal-after-sync");
        self.records += records;
        self.judge(written)
    }

    fn write_anew(&mut self, hold: &Hold, records: &[Record]) -> Result<(), Arc<str>> {
        self.file = None;
        let mut lines = Vec::new();
        records.iter().for_each(|record| line::write(record, &mut lines));
        // Another worker's journal is not ours to replace.
        let replaced = hold.check().and_then(|()| replace(hold.folder(), &lines));
        self.records = records.len();
        let replaced = replaced.map(|file| self.file = Some(file));
        self.judge(replaced)
    }

    /// After a failure nobody knows what the file holds: it is written anew.
    fn judge(&mut self, written: io::Result<()>) -> Result<(), Arc<str>> {
        match written {
            Ok(()) => {
                self.trouble = Trouble::None;
                Ok(())
            }
            Err(error) => {
                self.file = None;
                let text: Arc<str> = format!("the journal cannot be written: {error}").into();
                if self.trouble == Trouble::None {
                    tracing::error!(%error, "the journal cannot be written; no task is started before it can");
                }
                self.trouble = Trouble::Said;
                Err(text)
            }
        }
    }
}

/// Puts a new file in the journal's place, or leaves the old one where it is.
fn replace(folder: &Path, lines: &[u8]) -> io::Result<File> {
    let (path, next) = (folder.join(FILE), folder.join(NEXT));
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
    use crate::domain::journal::{Plan, RECORDS_SLACK, Remains};
    use crate::host::folder::WorkFolder;

    const NAME: &str = "queue worker";

    fn held(task: &str) -> Held {
        let run = Run { task: TaskId::parse(task).unwrap(), run: 0 };
        let remains = Remains { cookie: task.into(), ..Remains::default() };
        Held { run, claimant: NAME.into(), remains: Some(remains) }
    }

    fn begun(folder: &Path) -> Journal {
        let hold = WorkFolder::take(folder).unwrap().hold().unwrap();
        Journal::begin(hold, this_boot(), std::iter::empty())
    }

    /// What the next life would make of it.
    fn plan(folder: &Path) -> Plan {
        let earlier = Earlier::read(folder);
        assert_eq!(earlier.damage, [""; 0]);
        earlier.journal.plan(&earlier.boot, &[NAME.into()])
    }

    fn tasks(folder: &Path) -> Vec<String> {
        plan(folder).report.iter().map(|left| left.run.task.to_string()).collect()
    }

    /// All is written, and nobody writes.
    async fn written(journal: &Journal) {
        journal.written().await;
        while journal.inner.shared().keeper.is_none() {
            tokio::task::yield_now().await;
        }
    }

    #[tokio::test]
    async fn what_is_safe_is_known_to_the_next_life_and_what_is_over_is_not() {
        let folder = tempfile::tempdir().unwrap();
        let journal = begun(folder.path());
        let recorded: Vec<Recorded> =
            (1..=50).map(|number| journal.hold(EntryId(number), held(&format!("t{number}")))).collect();
        for one in recorded {
            one.safe().await.unwrap();
        }
        (1..=48).for_each(|number| journal.over(EntryId(number)));
        journal.leads(EntryId(49), Leader { pid: 7, started: 8 });
        journal.decided(EntryId(50), Outcome::Completed);
        written(&journal).await;
        let plan = plan(folder.path());
        assert_eq!(plan.kill.len(), 2);
        assert_eq!(plan.kill[0].leaders, [Leader { pid: 7, started: 8 }]);
        let left: Vec<_> = plan.report.iter().map(|left| (left.run.task.as_str(), left.outcome)).collect();
        let handed_back = Outcome::Exception(crate::domain::outcome::Reason::WorkerShutdown);
        assert_eq!(left, [("t49", handed_back), ("t50", Outcome::Completed)]);
        let mode = std::fs::metadata(folder.path().join(FILE)).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
    }

    #[tokio::test]
    async fn a_journal_does_not_grow_with_the_number_of_claims() {
        let folder = tempfile::tempdir().unwrap();
        let journal = begun(folder.path());
        journal.hold(EntryId(0), held("stays")).safe().await.unwrap();
        let mut lengths = Vec::new();
        for round in 0..4_u64 {
            for number in 1..=1_000 {
                let entry = EntryId(round * 1_000 + number);
                drop(journal.hold(entry, held("passes")));
                journal.decided(entry, Outcome::Completed);
                journal.over(entry);
            }
            written(&journal).await;
            lengths.push(std::fs::read(folder.path().join(FILE)).unwrap().split(|byte| *byte == b'\n').count());
        }
        // What is written together is written whole before it is counted.
        assert!(lengths.iter().all(|lines| *lines < RECORDS_SLACK + 3_100), "{lengths:?}");
        assert_eq!(tasks(folder.path()), ["stays"]);
    }

    #[tokio::test]
    async fn after_a_write_that_failed_everything_is_written_anew() {
        let folder = tempfile::tempdir().unwrap();
        let journal = begun(folder.path());
        journal.hold(EntryId(1), held("before")).safe().await.unwrap();
        written(&journal).await;
        // As a disk that fails: what is read only cannot be written.
        let read_only = File::open(folder.path().join(FILE)).unwrap();
        journal.inner.shared().keeper.as_mut().expect("nothing is being written").file = Some(read_only);
        let error = journal.hold(EntryId(2), held("during")).safe().await.unwrap_err();
        assert!(error.contains("journal"), "{error}");
        assert_eq!(tasks(folder.path()), ["before"]);
        // Its claim is handed back, which is over.
        journal.over(EntryId(2));
        journal.hold(EntryId(3), held("after")).safe().await.unwrap();
        assert_eq!(tasks(folder.path()), ["before", "after"]);
    }

    #[tokio::test]
    async fn a_journal_that_was_removed_is_written_anew_unless_its_folder_is_another() {
        let home = tempfile::tempdir().unwrap();
        let folder = home.path().join("work");
        let taken = WorkFolder::take(&folder).unwrap();
        let journal = Journal::begin(taken.hold().unwrap(), this_boot(), std::iter::empty());
        journal.hold(EntryId(1), held("before")).safe().await.unwrap();
        written(&journal).await;
        std::fs::remove_file(folder.join(FILE)).unwrap();
        journal.hold(EntryId(2), held("after")).safe().await.unwrap();
        written(&journal).await;
        assert_eq!(tasks(&folder), ["before", "after"]);
        std::fs::remove_dir_all(&folder).unwrap();
        let error = journal.hold(EntryId(3), held("gone")).safe().await.unwrap_err();
        assert!(error.contains("removed or replaced"), "{error}");
        assert!(!folder.exists());
        // As long as it lives, its file is no other's.
        let work = WorkFolder::take(&folder).unwrap();
        let other = Journal::begin(work.hold().unwrap(), this_boot(), std::iter::empty());
        other.hold(EntryId(1), held("other")).safe().await.unwrap();
        written(&other).await;
        journal.hold(EntryId(4), held("replaced")).safe().await.unwrap_err();
        assert_eq!(tasks(&folder), ["other"]);
    }

    #[tokio::test]
    async fn a_journal_that_cannot_be_written_at_the_start_is_tried_again_with_the_first_claim() {
        let folder = tempfile::tempdir().unwrap();
        let blocked = folder.path().join(NEXT);
        std::fs::create_dir(&blocked).unwrap();
        let journal = begun(folder.path());
        assert!(journal.hold(EntryId(1), held("one")).safe().await.is_err());
        std::fs::remove_dir(&blocked).unwrap();
        journal.hold(EntryId(2), held("two")).safe().await.unwrap();
        assert_eq!(tasks(folder.path()), ["one", "two"]);
    }

    #[tokio::test]
    async fn more_than_may_wait_is_written_anew_and_nothing_is_missing() {
        let folder = tempfile::tempdir().unwrap();
        let journal = begun(folder.path());
        written(&journal).await;
        // As a disk that has not answered yet.
        let keeper = journal.inner.shared().keeper.take();
        let many = u64::try_from(JOURNAL_PENDING_BYTES_MAX / 60).unwrap();
        (1..=many).for_each(|number| drop(journal.hold(EntryId(number), held(&format!("t{number}")))));
        assert_eq!(journal.inner.shared().gaps, Gaps::Some);
        assert!(journal.inner.shared().pending.len() < JOURNAL_PENDING_BYTES_MAX + 1_000);
        journal.inner.shared().keeper = keeper;
        written(&journal).await;
        assert_eq!(tasks(folder.path()).len() as u64, many);
    }

    #[test]
    fn whatever_lies_in_its_place_is_told_of_and_no_more() {
        let folder = tempfile::tempdir().unwrap();
        assert!(Earlier::read(folder.path()).damage.is_empty(), "nothing is no damage");
        std::fs::write(folder.path().join(FILE), "what is this\n\u{0}\nand torn").unwrap();
        let earlier = Earlier::read(folder.path());
        assert!(earlier.damage[0].contains("2 lines cannot be read, the first of them line 1"), "{earlier:?}");
        std::fs::remove_file(folder.path().join(FILE)).unwrap();
        std::fs::create_dir(folder.path().join(FILE)).unwrap();
        assert_eq!(Earlier::read(folder.path()).damage.len(), 1);
    }
}
