//! Where the content of artifacts lies: one file each, under a folder of the queue's own. A file that has its name is
//! whole, and both survive a loss of power.
//!
//! Everything here blocks, so it is used off the async threads, in as few steps as there are.

use std::fs::{DirBuilder, File};
use std::io::{self, Write as _};
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};

use sha2::{Digest as _, Sha256};

/// The place of an artifact within the folder. Its name may hold anything, so the file is named by a digest of it.
pub(crate) fn relative_path(task: &str, run: u32, name: &str) -> String {
    let digest = Sha256::digest(name.as_bytes());
    let hex: String = digest.iter().map(|byte| format!("{byte:02x}")).collect();
    format!("{task}/{run}-{hex}")
}

/// Removes a file, or a task's whole folder. What is not there is no trouble; anything else is told in the log.
pub(crate) fn remove(folder: &Path, place: &str) {
    let path = folder.join(place);
    let gone = if path.is_dir() { std::fs::remove_dir_all(&path) } else { std::fs::remove_file(&path) };
    match gone {
        Ok(()) => {}
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => {
            tracing::warn!(%error, path = %path.display(), "an expired artifact could not be removed");
        }
    }
}

/// The folder of the files that have no name yet.
const INCOMING: &str = "incoming";

/// Flushes a file or a folder to the disk.
pub(crate) fn sync(path: &Path) -> io::Result<()> {
    File::open(path)?.sync_all()
}

/// Makes a folder that only its owner may enter, and those above it where they are missing, and flushes each into the
/// one above.
pub(crate) fn create_dir_synced(folder: &Path, mut sync: impl FnMut(&Path) -> io::Result<()>) -> io::Result<()> {
    let missing: Vec<&Path> =
        folder.ancestors().take_while(|path| !path.as_os_str().is_empty() && !path.is_dir()).collect();
    DirBuilder::new().recursive(true).mode(0o700).create(folder)?;
    for made in missing.into_iter().rev() {
        sync(parent_of(made))?;
    }
    Ok(())
}

fn parent_of(path: &Path) -> &Path {
    path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or_else(|| Path::new("."))
}

/// Removes what an earlier life was writing when it ended. Nobody was told that it was stored.
pub(crate) fn remove_incoming(artifacts: &Path) -> io::Result<()> {
    match std::fs::remove_dir_all(artifacts.join(INCOMING)) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        Ok(()) | Err(_) => Ok(()),
    }
}

/// A file on its way to its name; removed again where it does not get there.
pub(crate) struct IncomingFile {
    path: PathBuf,
    file: File,
}

impl IncomingFile {
    pub(crate) fn create(artifacts: &Path) -> io::Result<Self> {
        let folder = artifacts.join(INCOMING);
        let path = folder.join(uuid::Uuid::new_v4().to_string());
        let file = retry_with_dir(|| File::create_new(&path), &folder)?;
        Ok(Self { path, file })
    }

    pub(crate) fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.file.write_all(bytes)
    }

    /// Gives the file its name: its content goes to the disk before the name does, and the folder's own name after.
    pub(crate) fn commit(self, path: &Path, mut sync: impl FnMut(&Path) -> io::Result<()>) -> io::Result<()> {
        self.file.sync_all()?;
        let folder = parent_of(path);
        retry_with_dir(|| std::fs::rename(&self.path, path), folder)?;
        sync(folder)?;
        // Also where somebody else has made the folder, who may not have come to this yet.
        sync(parent_of(folder))
    }
}

impl Drop for IncomingFile {
    fn drop(&mut self) {
        // Gone already where it was settled.
        std::fs::remove_file(&self.path).ok();
    }
}

/// Tries again with the folder made, where it was missing.
fn retry_with_dir<T>(act: impl Fn() -> io::Result<T>, folder: &Path) -> io::Result<T> {
    match act() {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            DirBuilder::new().recursive(true).mode(0o700).create(folder)?;
            act()
        }
        done => done,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_artifact_is_stored_once_its_folder_and_the_one_above_are_on_disk() {
        let artifacts = tempfile::tempdir().unwrap();
        let task = artifacts.path().join("task");
        let path = task.join("0-name");
        let mut draft = IncomingFile::create(artifacts.path()).unwrap();
        draft.write(b"content").unwrap();
        let mut synced = Vec::new();
        let note = |folder: &Path| {
            assert!(path.is_file(), "the name comes first");
            synced.push(folder.to_owned());
            sync(folder)
        };
        draft.commit(&path, note).unwrap();
        assert_eq!(synced, [task, artifacts.path().to_owned()]);
        assert_eq!(std::fs::read(&path).unwrap(), b"content");
    }

    #[test]
    fn an_artifact_whose_folder_cannot_be_flushed_is_not_stored() {
        let artifacts = tempfile::tempdir().unwrap();
        let draft = IncomingFile::create(artifacts.path()).unwrap();
        let failed = draft.commit(&artifacts.path().join("task/0-name"), |_| Err(io::ErrorKind::StorageFull.into()));
        assert_eq!(failed.unwrap_err().kind(), io::ErrorKind::StorageFull);
    }

    #[test]
    fn each_new_folder_is_flushed_into_the_one_above() {
        let room = tempfile::tempdir().unwrap();
        let mut synced = Vec::new();
        let note = |folder: &Path| {
            synced.push(folder.to_owned());
            Ok(())
        };
        create_dir_synced(&room.path().join("a/b"), note).unwrap();
        assert_eq!(synced, [room.path().to_owned(), room.path().join("a")]);
        create_dir_synced(&room.path().join("a/b"), |folder| panic!("{folder:?} was there")).unwrap();
    }

    #[test]
    fn what_was_half_written_is_gone_after_a_restart() {
        let artifacts = tempfile::tempdir().unwrap();
        let mut draft = IncomingFile::create(artifacts.path()).unwrap();
        draft.write(b"half").unwrap();
        let path = draft.path.clone();
        std::mem::forget(draft);
        remove_incoming(artifacts.path()).unwrap();
        assert!(!path.exists());
        remove_incoming(artifacts.path()).unwrap();
    }
}
