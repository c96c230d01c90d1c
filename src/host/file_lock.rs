//! A file that one process has at a time, for as long as it lives, however it ends.

use std::fs::{File, TryLockError};
use std::io;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;

use rustix::fs::OFlags;

use crate::limits::{LOCK_ATTEMPTS_MAX, LOCK_RETRY_INTERVAL};

/// A file that is locked. Dropping it frees it.
#[derive(Debug)]
pub(crate) struct FileLock(File);

impl FileLock {
    /// Makes the file where it is missing, and locks it. `None` is that another process has it.
    ///
    /// A process that is killed while it starts a program leaves the lock to that program until its `exec`. That is
    /// waited for: a lock that is taken is tried [`LOCK_ATTEMPTS_MAX`] times.
    ///
    /// # Errors
    ///
    /// Where the file cannot be made or locked.
    pub(crate) fn acquire(path: &Path) -> io::Result<Option<Self>> {
        let file = File::create(path)?;
        for left in (0..LOCK_ATTEMPTS_MAX).rev() {
            match file.try_lock() {
                Ok(()) => return Ok(Some(Self(file))),
                Err(TryLockError::WouldBlock) if left > 0 => std::thread::sleep(LOCK_RETRY_INTERVAL),
                Err(TryLockError::WouldBlock) => {}
                Err(TryLockError::Error(error)) => return Err(error),
            }
        }
        Ok(None)
    }

    /// Locks a file that somebody may have left. `None` is that it is not there, or that another process has it: nobody waits.
    ///
    /// # Errors
    ///
    /// Where the file cannot be opened or locked.
    pub(crate) fn try_acquire_existing(path: &Path) -> io::Result<Option<Self>> {
        // A task may have put anything in its place.
        let flags = OFlags::NOFOLLOW | OFlags::NONBLOCK;
        let file = match File::options().read(true).custom_flags(flags.bits().cast_signed()).open(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            opened => opened?,
        };
        if !file.metadata()?.is_file() {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, format!("{} is no file", path.display())));
        }
        match file.try_lock() {
            Ok(()) => Ok(Some(Self(file))),
            Err(TryLockError::WouldBlock) => Ok(None),
            Err(TryLockError::Error(error)) => Err(error),
        }
    }

    /// The file.
    pub(crate) const fn file(&self) -> &File {
        &self.0
    }
}

impl Drop for FileLock {
    /// Closing it would not do: a program that is being started has a copy until its `exec`.
    fn drop(&mut self) {
        drop(self.0.unlock());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lock_is_free_once_it_is_dropped_although_a_copy_of_its_file_lives() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("lock");
        let first = FileLock::acquire(&path).unwrap().unwrap();
        let copy = first.file().try_clone().unwrap();
        assert!(FileLock::acquire(&path).unwrap().is_none());
        drop(first);
        let second = FileLock::try_acquire_existing(&path).unwrap().unwrap();
        assert!(FileLock::try_acquire_existing(&path).unwrap().is_none(), "it is taken");
        drop((second, copy));
        assert!(FileLock::try_acquire_existing(&folder.path().join("none")).unwrap().is_none());
        assert!(!folder.path().join("none").exists());
        let pipe = folder.path().join("pipe");
        rustix::fs::mknodat(rustix::fs::CWD, &pipe, rustix::fs::FileType::Fifo, 0o600.into(), 0).unwrap();
        assert!(
            FileLock::try_acquire_existing(&pipe).unwrap_err().to_string().contains("is no file"),
            "and nobody waits"
        );
    }
}
