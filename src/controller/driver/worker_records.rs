//! Records of worker processes, by which the next controller finds them.

use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use serde::{Deserialize, Serialize};

const PENDING_EXTENSION: &str = "begun";
const RECORD_EXTENSION: &str = "json";

#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct PendingStart {
    pub(super) id: String,
    pub(super) key: String,
    pub(super) boot: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) group: Option<PathBuf>,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct WorkerRecord {
    pub(super) id: String,
    pub(super) key: String,
    pub(super) pid: i32,
    pub(super) started: u64,
    pub(super) boot: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) group: Option<PathBuf>,
}

impl PendingStart {
    pub(super) fn started(&self, pid: i32, started: u64) -> WorkerRecord {
        let Self { id, key, boot, group } = self.clone();
        WorkerRecord { id, key, pid, started, boot, group }
    }
}

#[derive(Debug)]
pub(super) enum RecordFile {
    Pending(PendingStart, Duration),
    Started(WorkerRecord),
    Unreadable(PathBuf),
}

pub(super) struct WorkerRecords {
    folder: PathBuf,
}

impl WorkerRecords {
    pub(super) const fn new(folder: PathBuf) -> Self {
        Self { folder }
    }

    pub(super) fn modified_at(&self) -> io::Result<SystemTime> {
        std::fs::metadata(&self.folder)?.modified()
    }

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

    pub(super) fn store_pending(&self, begun: &PendingStart) -> io::Result<()> {
        self.write(&begun.id, PENDING_EXTENSION, serde_json::to_vec(begun)?)
    }

    pub(super) fn store(&self, record: &WorkerRecord) -> io::Result<()> {
        self.write(&record.id, RECORD_EXTENSION, serde_json::to_vec(record)?)?;
        remove_file(&self.path(&record.id, PENDING_EXTENSION));
        Ok(())
    }

    pub(super) fn remove(&self, id: &str) {
        remove_file(&self.path(id, RECORD_EXTENSION));
        remove_file(&self.path(id, PENDING_EXTENSION));
    }

    pub(super) fn contains(&self, id: &str) -> bool {
        self.path(id, RECORD_EXTENSION).exists()
    }

    fn path(&self, id: &str, kind: &str) -> PathBuf {
        self.folder.join(format!("{id}.{kind}"))
    }

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
    let since = std::fs::metadata(path).and_then(|about| about.modified()).ok();
    let age = since.and_then(|since| since.elapsed().ok()).unwrap_or_default();
    Ok(Some(RecordFile::Pending(begun, age)))
}

fn read_if_present(path: &Path) -> io::Result<Option<Vec<u8>>> {
    match std::fs::read(path) {
        Ok(bytes) => Ok(Some(bytes)),
        Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::IsADirectory) => Ok(None),
        Err(error) => Err(error),
    }
}

pub(super) fn remove_file(path: &Path) {
    if let Err(error) = std::fs::remove_file(path)
        && error.kind() != ErrorKind::NotFound
    {
        tracing::debug!(%error, path = %path.display(), "cannot remove the record of a worker");
    }
}
