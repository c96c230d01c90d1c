//! Artifact files: one file each below the artifact directory, complete and durable once it has its name.

use std::fs::{DirBuilder, File};
use std::io::{self, Write as _};
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};

use sha2::{Digest as _, Sha256};
use tempfile::TempPath;

use journeyman_platform::host::work_dir::ignore_missing;

/// An artifact name may hold any character, so the file name is its digest.
pub(crate) fn relative_path(task: &str, run: u32, name: &str) -> String {
    format!("{task}/{run}-{}", hex::encode(Sha256::digest(name.as_bytes())))
}

/// The path of content that is stored compressed with gzip.
pub(crate) fn gzip_path(path: &str) -> String {
    format!("{path}.gz")
}

pub(crate) fn remove(folder: &Path, path: &str) {
    drop(std::fs::remove_file(folder.join(gzip_path(path))));
    let path = folder.join(path);
    let gone = if path.is_dir() { std::fs::remove_dir_all(&path) } else { std::fs::remove_file(&path) };
    if let Err(error) = gone.or_else(ignore_missing) {
        tracing::warn!(%error, path = %path.display(), "cannot remove expired artifact");
    }
}

/// How an upload says that it is compressed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum StoredEncoding {
    Identity,
    Gzip,
}

const INCOMING: &str = "incoming";

fn sync(path: &Path) -> io::Result<()> {
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

/// An unfinished upload; removed on drop unless it was committed. Its methods block.
pub(crate) struct IncomingFile {
    artifacts: PathBuf,
    path: TempPath,
    pub(crate) file: File,
}

impl IncomingFile {
    /// Creates it with the start of its content.
    pub(crate) fn create(artifacts: &Path, head: &[u8]) -> io::Result<Self> {
        // `NamedTempFile` would hide the number of the system's error.
        let path = artifacts.join(INCOMING).join(uuid::Uuid::new_v4().simple().to_string());
        let file = File::create_new(&path)?;
        let mut incoming = Self { artifacts: artifacts.to_owned(), path: TempPath::try_from_path(path)?, file };
        incoming.file.write_all(head).map(|()| incoming)
    }

    /// Flushes the content before the rename, and the directories after it. Content of the other encoding goes.
    pub(crate) fn commit(self, path: &str, encoding: StoredEncoding) -> io::Result<()> {
        self.file.sync_all()?;
        let (plain, packed) = (self.artifacts.join(path), self.artifacts.join(gzip_path(path)));
        let (path, other) = match encoding {
            StoredEncoding::Identity => (plain, packed),
            StoredEncoding::Gzip => (packed, plain),
        };
        let task_dir = path.parent().unwrap_or(&self.artifacts);
        create_dir(task_dir)?;
        self.path.persist(&path)?;
        std::fs::remove_file(other).or_else(ignore_missing)?;
        sync(task_dir)?;
        // The task directory may be new, created by another upload that has not flushed it yet.
        sync(&self.artifacts)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unfinished_upload_is_removed_on_restart() {
        let artifacts = tempfile::tempdir().unwrap();
        prepare(artifacts.path()).unwrap();
        let upload = IncomingFile::create(artifacts.path(), b"x").unwrap();
        let path = upload.path.to_path_buf();
        std::mem::forget(upload);
        prepare(artifacts.path()).unwrap();
        assert!(!path.exists());
    }
}
