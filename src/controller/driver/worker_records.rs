//! What is written down of workers of this host, so that the next controller finds them: that one is about to be started, and
//! which process it is.

use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use serde::{Deserialize, Serialize};

/// What the names of the two kinds end with.
const PENDING_EXTENSION: &str = "begun";
const RECORD_EXTENSION: &str = "json";

/// A worker that is about to be started.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct PendingStart {
    pub(super) id: String,
    pub(super) key: String,
    pub(super) boot: String,
    /// The control group that it will be in.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) group: Option<PathBuf>,
}

/// By what one is found again.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct WorkerRecord {
    pub(super) id: String,
    pub(super) key: String,
    pub(super) pid: i32,
    /// In clock ticks since the host was started: number and start together are nobody else's.
    pub(super) started: u64,
    pub(super) boot: String,
    /// The control group that it is in.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) group: Option<PathBuf>,
}

impl PendingStart {
    /// It is there, as this process.
    pub(super) fn started(&self, pid: i32, started: u64) -> WorkerRecord {
        let Self { id, key, boot, group } = self.clone();
        WorkerRecord { id, key, pid, started, boot, group }
    }
}

/// One file.
#[derive(Debug)]
pub(super) enum RecordFile {
    /// Since then.
    Pending(PendingStart, Duration),
    Started(WorkerRecord),
    /// Nothing that we have written.
    Unreadable(PathBuf),
}

/// The folder of a pool.
pub(super) struct WorkerRecords {
    folder: PathBuf,
}

impl WorkerRecords {
    pub(super) const fn new(folder: PathBuf) -> Self {
        Self { folder }
    }

    /// When anything was last written down, or struck out.
    pub(super) fn modified_at(&self) -> io::Result<SystemTime> {
        std::fs::metadata(&self.folder)?.modified()
    }

    /// All of them.
    ///
    /// # Errors
    ///
    /// Where one cannot be read: a worker that cannot be read of is none that is not there.
    pub(super) fn load(&self) -> io::Result<Vec<RecordFile>> {
        let mut notes = Vec::new();
        for entry in std::fs::read_dir(&self.folder)? {
            let path = entry?.path();
            let Some(kind) = path.extension().and_then(std::ffi::OsStr::to_str) else { continue };
            if kind == RECORD_EXTENSION || kind == PENDING_EXTENSION {
                let note = if kind == RECORD_EXTENSION { read_record(&path) } else { read_pending(&path) };
                notes.extend(
                    note.map_err(|error| io::Error::new(error.kind(), format!("{}: {error}", path.display())))?,
                );
            }
        }
        Ok(notes)
    }

    /// One is about to be started.
    pub(super) fn store_pending(&self, begun: &PendingStart) -> io::Result<()> {
        self.write(&begun.id, PENDING_EXTENSION, serde_json::to_vec(begun)?)
    }

    /// It is there.
    pub(super) fn store(&self, record: &WorkerRecord) -> io::Result<()> {
        self.write(&record.id, RECORD_EXTENSION, serde_json::to_vec(record)?)?;
        remove_file(&self.path(&record.id, PENDING_EXTENSION));
        Ok(())
    }

    /// It will not be there, or is there no more.
    pub(super) fn remove(&self, id: &str) {
        remove_file(&self.path(id, RECORD_EXTENSION));
        remove_file(&self.path(id, PENDING_EXTENSION));
    }

    /// Whether it is known as a process.
    pub(super) fn contains(&self, id: &str) -> bool {
        self.path(id, RECORD_EXTENSION).exists()
    }

    fn path(&self, id: &str, kind: &str) -> PathBuf {
        self.folder.join(format!("{id}.{kind}"))
    }

    /// Whoever reads it finds the whole of it.
    fn write(&self, id: &str, kind: &str, bytes: Vec<u8>) -> io::Result<()> {
        let fresh = self.path(id, "new");
        let written = std::fs::write(&fresh, bytes).and_then(|()| std::fs::rename(&fresh, self.path(id, kind)));
        written.inspect_err(|_| remove_file(&fresh))
    }
}

fn read_record(path: &Path) -> io::Result<Option<RecordFile>> {
    let Some(bytes) = read_if_present(path)? else { return Ok(None) };
    let record = serde_json::from_slice(&bytes);
    Ok(Some(record.map_or_else(|_| RecordFile::Unreadable(path.to_owned()), RecordFile::Started)))
}

fn read_pending(path: &Path) -> io::Result<Option<RecordFile>> {
    let Some(bytes) = read_if_present(path)? else { return Ok(None) };
    let Ok(begun) = serde_json::from_slice(&bytes) else { return Ok(Some(RecordFile::Unreadable(path.to_owned()))) };
    // One that was struck out meanwhile is of no age.
    let since = std::fs::metadata(path).and_then(|about| about.modified()).ok();
    let age = since.and_then(|since| since.elapsed().ok()).unwrap_or_default();
    Ok(Some(RecordFile::Pending(begun, age)))
}

/// What is in one; `None` where it was struck out meanwhile, and where it is a folder.
fn read_if_present(path: &Path) -> io::Result<Option<Vec<u8>>> {
    match std::fs::read(path) {
        Ok(bytes) => Ok(Some(bytes)),
        Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::IsADirectory) => Ok(None),
        Err(error) => Err(error),
    }
}

/// Removes a note.
pub(super) fn remove_file(path: &Path) {
    if let Err(error) = std::fs::remove_file(path)
        && error.kind() != ErrorKind::NotFound
    {
        tracing::debug!(%error, path = %path.display(), "what is written down of a worker cannot be removed");
    }
}
