//! Artifact files: one file each below the artifact directory, complete and durable once it has its name.
//!
//! Everything here blocks.

use std::fs::{DirBuilder, File};
use std::io::{self, Write as _};
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};

use sha2::{Digest as _, Sha256};

/// An artifact name may hold any character, so the file name is its digest.
pub(crate) fn relative_path(task: &str, run: u32, name: &str) -> String {
    let digest = Sha256::digest(name.as_bytes());
    let hex: String = digest.iter().map(|byte| format!("{byte:02x}")).collect();
    format!("{task}/{run}-{hex}")
}

pub(crate) fn remove(folder: &Path, path: &str) {
    let path = folder.join(path);
    let gone = if path.is_dir() { std::fs::remove_dir_all(&path) } else { std::fs::remove_file(&path) };
    match gone {
        Ok(()) => {}
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => {
            tracing::warn!(%error, path = %path.display(), "cannot remove expired artifact");
        }
    }
}

const INCOMING: &str = "incoming";

pub(crate) fn sync(path: &Path) -> io::Result<()> {
    File::open(path)?.sync_all()
}

/// Creates a private directory with its missing parents, and flushes each into its parent.
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

/// Removes uploads that a previous process did not finish; none of them was acknowledged.
pub(crate) fn remove_incoming(artifacts: &Path) -> io::Result<()> {
    match std::fs::remove_dir_all(artifacts.join(INCOMING)) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        Ok(()) | Err(_) => Ok(()),
    }
}

/// An unfinished upload; removed on drop unless it was committed.
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

    /// Flushes the content before the rename, and the directories after it.
    pub(crate) fn commit(self, path: &Path, mut sync: impl FnMut(&Path) -> io::Result<()>) -> io::Result<()> {
        self.file.sync_all()?;
        let folder = parent_of(path);
        retry_with_dir(|| std::fs::rename(&self.path, path), folder)?;
        sync(folder)?;
        // The task directory may be new, created by another upload that has not flushed it yet.
        sync(parent_of(folder))
    }
}

impl Drop for IncomingFile {
    fn drop(&mut self) {
        // Fails after a commit, when the file has its final name.
        std::fs::remove_file(&self.path).ok();
    }
}

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
        let tx = tempfile::tempdir().unwrap();
        let mut synced = Vec::new();
        let note = |folder: &Path| {
            synced.push(folder.to_owned());
            Ok(())
        };
        create_dir_synced(&tx.path().join("a/b"), note).unwrap();
        assert_eq!(synced, [tx.path().to_owned(), tx.path().join("a")]);
        create_dir_synced(&tx.path().join("a/b"), |folder| panic!("{folder:?} was there")).unwrap();
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
