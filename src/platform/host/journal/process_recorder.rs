//! Journals the processes of a payload or a sidecar, so that the next worker process can kill them.

use std::io;

use rustix::io::Errno;
use tokio::sync::OnceCell;

use super::Journal;
use journeyman_domain::id::Run;
use journeyman_domain::journal::{ClaimRecord, EntryId, JournalRecord, Leader, ProcessRecord};

/// What to record before the first process starts.
#[derive(Debug)]
pub enum FirstRecord {
    /// The claim is recorded already.
    Nothing,
    Claim {
        run: Run,
        claimant: Box<str>,
    },
    Sidecar,
}

/// Records the processes of one journal entry.
#[derive(Debug)]
pub struct ProcessRecorder {
    journal: Journal,
    entry: EntryId,
    first: FirstRecord,
    recorded: OnceCell<()>,
}

impl ProcessRecorder {
    pub fn new(journal: Journal, entry: EntryId, first: FirstRecord) -> Self {
        Self { journal, entry, first, recorded: OnceCell::new() }
    }

    /// Resolves when a process may start: the next worker process would find it in the journal (I27). Cancel safe.
    ///
    /// # Errors
    ///
    /// The journal cannot be written, which is a fault of the host.
    pub async fn ensure_recorded(&self, processes: ProcessRecord) -> io::Result<()> {
        let record = async || {
            let pending = match &self.first {
                FirstRecord::Nothing => return Ok(()),
                FirstRecord::Claim { run, claimant } => {
                    let claim =
                        ClaimRecord { run: run.clone(), claimant: claimant.clone(), processes: Some(processes) };
                    self.journal.record_claim(self.entry, claim)
                }
                FirstRecord::Sidecar => {
                    self.journal.store_now(JournalRecord::SidecarStarted { entry: self.entry, processes })
                }
            };
            pending.stored().await
        };
        self.recorded.get_or_try_init(record).await.map(drop).map_err(|error| {
            tracing::error!("cannot start a process: {error}");
            Errno::IO.into()
        })
    }

    pub(crate) fn record_leader(&self, leader: Leader) {
        self.journal.record(JournalRecord::ProcessStarted { entry: self.entry, leader });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::journal::PreviousJournal;
    use crate::host::work_dir::WorkDir;
    use journeyman_domain::journal::BootId;

    #[tokio::test]
    async fn i27_a_failed_journal_write_is_a_host_fault_and_is_retried_before_the_next_process() {
        let dir = tempfile::tempdir().unwrap();
        let blocked = dir.path().join("journal.next");
        std::fs::create_dir(&blocked).unwrap();
        let lock = WorkDir::acquire(dir.path()).unwrap().work_dir_lock().unwrap();
        let boot = BootId("b".into());
        let journal = Journal::create(lock, boot.clone(), std::iter::empty());
        let recorder = ProcessRecorder::new(journal.clone(), EntryId(1), FirstRecord::Sidecar);
        let processes = ProcessRecord { cookie: "c".into(), ..ProcessRecord::default() };
        let error = recorder.ensure_recorded(processes.clone()).await.unwrap_err();
        assert!(crate::host::host_errors::is_host_error(&error), "{error}");
        std::fs::remove_dir(&blocked).unwrap();
        recorder.ensure_recorded(processes.clone()).await.unwrap();
        let recorded = || PreviousJournal::read(dir.path()).journal.recovery_plan(&boot, &[]).kill;
        assert_eq!(recorded(), std::slice::from_ref(&processes));
        recorder.ensure_recorded(processes.clone()).await.unwrap();
        recorder.record_leader(Leader { pid: 7, start_ticks: 8 });
        journal.flush().await;
        assert_eq!(recorded(), [ProcessRecord { leaders: vec![Leader { pid: 7, start_ticks: 8 }], ..processes }]);
        journal.record_closed(EntryId(1));
        journal.flush().await;
        assert_eq!(recorded(), []);
    }
}
