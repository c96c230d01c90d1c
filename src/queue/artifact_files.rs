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
    format!("{task}/{run}-{}", hex::encode(Sha256::digest(name.as_bytes())))
}

pub(crate) fn remove(folder: &Path, path: &str) {
    let path = folder.join(path);
    let gone = if path.is_dir() { std::fs::remove_dir_all(&path) } else { std::fs::remove_file(&path) };
    if let Err(error) = gone.or_else(ignore_missing) {
        tracing::warn!(%error, path = %path.display(), "cannot remove expired artifact");
    }
}

fn ignore_missing(error: io::Error) -> io::Result<()> {
    if error.kind() == io::ErrorKind::NotFound { Ok(()) } else { Err(error) }
}

const INCOMING: &str = "incoming";

pub(crate) fn sync(path: &Path) -> io::Result<()> {
    File::open(path)?.sync_all()
}

fn create_dir(folder: &Path) -> io::Result<()> {
    DirBuilder::new().recursive(true).mode(0o700).create(folder)
}

/// Creates the artifact directory, and removes uploads that a previous process did not finish; none of them was
/// acknowledged.
pub(crate) fn prepare(artifacts: &Path) -> io::Result<()> {
    create_dir(artifacts)?;
    std::fs::remove_dir_all(artifacts.join(INCOMING)).or_else(ignore_missing)?;
    create_dir(&artifacts.join(INCOMING))?;
    artifacts.ancestors().skip(1).take(2).filter(|parent| !parent.as_os_str().is_empty()).try_for_each(sync)
}

/// An unfinished upload; removed on drop unless it was committed.
pub(crate) struct IncomingFile {
    artifacts: PathBuf,
    path: PathBuf,
    file: File,
}

impl IncomingFile {
    pub(crate) fn create(artifacts: &Path) -> io::Result<Self> {
        let path = artifacts.join(INCOMING).join(uuid::Uuid::new_v4().to_string());
        let file = File::create_new(&path)?;
        Ok(Self { artifacts: artifacts.to_owned(), path, file })
    }

    pub(crate) fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.file.write_all(bytes)
    }

    /// Flushes the content before the rename, and the directories after it.
    pub(crate) fn commit(self, path: &str, mut sync: impl FnMut(&Path) -> io::Result<()>) -> io::Result<()> {
        self.file.sync_all()?;
        let path = self.artifacts.join(path);
        let task_dir = path.parent().unwrap_or(&self.artifacts);
        create_dir(task_dir)?;
        std::fs::rename(&self.path, &path)?;
        sync(task_dir)?;
        // The task directory may be new, created by another upload that has not flushed it yet.
        sync(&self.artifacts)
    }
}

impl Drop for IncomingFile {
    fn drop(&mut self) {
        // Fails after a commit, when the file has its final name.
        std::fs::remove_file(&self.path).ok();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn upload(artifacts: &Path) -> IncomingFile {
        prepare(artifacts).unwrap();
        let mut upload = IncomingFile::create(artifacts).unwrap();
        upload.write(b"content").unwrap();
        upload
    }

    #[test]
    fn an_upload_is_stored_once_its_directory_and_the_one_above_are_on_disk() {
        let artifacts = tempfile::tempdir().unwrap();
        let upload = upload(artifacts.path());
        let task = artifacts.path().join("task");
        let path = task.join("0-name");
        let mut synced = Vec::new();
        let record = |folder: &Path| {
            assert!(path.is_file(), "the rename comes first");
            synced.push(folder.to_owned());
            sync(folder)
        };
        upload.commit("task/0-name", record).unwrap();
        assert_eq!(synced, [task, artifacts.path().to_owned()]);
        assert_eq!(std::fs::read(&path).unwrap(), b"content");
    }

    #[test]
    fn an_upload_whose_directory_cannot_be_flushed_fails() {
        let artifacts = tempfile::tempdir().unwrap();
        let failed = upload(artifacts.path()).commit("task/0-name", |_| Err(io::ErrorKind::StorageFull.into()));
        assert_eq!(failed.unwrap_err().kind(), io::ErrorKind::StorageFull);
    }

    #[test]
    fn an_unfinished_upload_is_removed_on_restart() {
        let artifacts = tempfile::tempdir().unwrap();
        let upload = upload(artifacts.path());
        let path = upload.path.clone();
        std::mem::forget(upload);
        prepare(artifacts.path()).unwrap();
        assert!(!path.exists());
    }
}
