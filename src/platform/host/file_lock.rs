//! An exclusive file lock, which the kernel releases however the process ends.

use std::fs::{File, TryLockError};
use std::io;
use std::path::Path;

use journeyman_domain::limits::{LOCK_ATTEMPTS_MAX, LOCK_RETRY_INTERVAL};

/// A locked file. Dropping it releases the lock.
#[derive(Debug)]
pub struct FileLock(File);

impl FileLock {
    /// Creates the file if it is missing, and locks it. `None` if another process holds the lock.
    ///
    /// A process that is killed between `fork` and `exec` of a child leaves the lock to the child until its `exec`. A lock that
    /// is held is therefore tried [`LOCK_ATTEMPTS_MAX`] times.
    pub fn acquire(path: &Path) -> io::Result<Option<Self>> {
        let file = File::options().write(true).create(true).truncate(false).open(path)?;
        let locked = retry_while_held(|| match file.try_lock() {
            Ok(()) => Ok(Some(())),
            Err(TryLockError::WouldBlock) => Ok(None),
            Err(TryLockError::Error(error)) => Err(error),
        })?;
        Ok(locked.map(|()| Self(file)))
    }

    pub const fn file(&self) -> &File {
        &self.0
    }
}

/// Tries to take a lock until `try_lock` returns one, at most [`LOCK_ATTEMPTS_MAX`] times. Blocks meanwhile.
pub(super) fn retry_while_held<T>(mut try_lock: impl FnMut() -> io::Result<Option<T>>) -> io::Result<Option<T>> {
    for _ in 1..LOCK_ATTEMPTS_MAX {
        if let Some(lock) = try_lock()? {
            return Ok(Some(lock));
        }
        std::thread::sleep(LOCK_RETRY_INTERVAL);
    }
    try_lock()
}

impl Drop for FileLock {
    /// Closing is not enough: a child between `fork` and `exec` has a copy of the descriptor.
    fn drop(&mut self) {
        drop(self.0.unlock());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dropping_a_lock_releases_it_even_if_a_copy_of_its_descriptor_exists() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("lock");
        let first = FileLock::acquire(&path).unwrap().unwrap();
        let copy = first.file().try_clone().unwrap();
        assert!(FileLock::acquire(&path).unwrap().is_none());
        drop(first);
        let second = FileLock::acquire(&path).unwrap().unwrap();
        assert!(FileLock::acquire(&path).unwrap().is_none(), "it is taken");
        drop((second, copy));
    }
}
