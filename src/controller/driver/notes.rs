//! What is written down of workers of this host, so that the next controller finds them: that one is about to be started, and
//! which process it is.

use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use serde::{Deserialize, Serialize};

/// What the names of the two kinds end with.
const BEGUN: &str = "begun";
const KNOWN: &str = "json";

/// A worker that is about to be started.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Begun {
    pub(super) id: String,
    pub(super) key: String,
    pub(super) boot: String,
    /// The control group that it will be in.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) group: Option<PathBuf>,
}

/// By what one is found again.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Record {
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

impl Begun {
    /// It is there, as this process.
    pub(super) fn as_process(&self, pid: i32, started: u64) -> Record {
        let Self { id, key, boot, group } = self.clone();
        Record { id, key, pid, started, boot, group }
    }
}

/// One file.
#[derive(Debug)]
pub(super) enum Note {
    /// Since then.
    Begun(Begun, Duration),
    Known(Record),
    /// Nothing that we have written.
    Strange(PathBuf),
}

/// The folder of a pool.
pub(super) struct Notes {
    folder: PathBuf,
}

impl Notes {
    pub(super) const fn new(folder: PathBuf) -> Self {
        Self { folder }
    }

    /// When anything was last written down, or struck out.
    pub(super) fn changed(&self) -> io::Result<SystemTime> {
        std::fs::metadata(&self.folder)?.modified()
    }

    /// All of them.
    ///
    /// # Errors
    ///
    /// Where one cannot be read: a worker that cannot be read of is none that is not there.
    pub(super) fn read(&self) -> io::Result<Vec<Note>> {
        let mut notes = Vec::new();
        for entry in std::fs::read_dir(&self.folder)? {
            let path = entry?.path();
            let Some(kind) = path.extension().and_then(std::ffi::OsStr::to_str) else { continue };
            if kind == KNOWN || kind == BEGUN {
                let note = if kind == KNOWN { known(&path) } else { begun(&path) };
                notes.extend(
                    note.map_err(|error| io::Error::new(error.kind(), format!("{}: {error}", path.display())))?,
                );
            }
        }
        Ok(notes)
    }

    /// One is about to be started.
    pub(super) fn begin(&self, begun: &Begun) -> io::Result<()> {
        self.write(&begun.id, BEGUN, serde_json::to_vec(begun)?)
    }

    /// It is there.
    pub(super) fn know(&self, record: &Record) -> io::Result<()> {
        self.write(&record.id, KNOWN, serde_json::to_vec(record)?)?;
        forget(&self.path(&record.id, BEGUN));
        Ok(())
    }

    /// It will not be there, or is there no more.
    pub(super) fn strike(&self, id: &str) {
        forget(&self.path(id, KNOWN));
        forget(&self.path(id, BEGUN));
    }

    /// Whether it is known as a process.
    pub(super) fn has(&self, id: &str) -> bool {
        self.path(id, KNOWN).exists()
    }

    fn path(&self, id: &str, kind: &str) -> PathBuf {
        self.folder.join(format!("{id}.{kind}"))
    }

    /// Whoever reads it finds the whole of it.
    fn write(&self, id: &str, kind: &str, bytes: Vec<u8>) -> io::Result<()> {
        let fresh = self.path(id, "new");
        let written = std::fs::write(&fresh, bytes).and_then(|()| std::fs::rename(&fresh, self.path(id, kind)));
        written.inspect_err(|_| forget(&fresh))
    }
}

fn known(path: &Path) -> io::Result<Option<Note>> {
    let Some(bytes) = bytes(path)? else { return Ok(None) };
    let record = serde_json::from_slice(&bytes);
    Ok(Some(record.map_or_else(|_| Note::Strange(path.to_owned()), Note::Known)))
}

fn begun(path: &Path) -> io::Result<Option<Note>> {
    let Some(bytes) = bytes(path)? else { return Ok(None) };
    let Ok(begun) = serde_json::from_slice(&bytes) else { return Ok(Some(Note::Strange(path.to_owned()))) };
    // One that was struck out meanwhile is of no age.
    let since = std::fs::metadata(path).and_then(|about| about.modified()).ok();
    let age = since.and_then(|since| since.elapsed().ok()).unwrap_or_default();
    Ok(Some(Note::Begun(begun, age)))
}

/// What is in one; `None` where it was struck out meanwhile, and where it is a folder.
fn bytes(path: &Path) -> io::Result<Option<Vec<u8>>> {
    match std::fs::read(path) {
        Ok(bytes) => Ok(Some(bytes)),
        Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::IsADirectory) => Ok(None),
        Err(error) => Err(error),
    }
}

/// Removes a note.
pub(super) fn forget(path: &Path) {
    if let Err(error) = std::fs::remove_file(path)
        && error.kind() != ErrorKind::NotFound
    {
        tracing::debug!(%error, path = %path.display(), "what is written down of a worker cannot be removed");
    }
}
