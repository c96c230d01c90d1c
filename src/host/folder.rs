//! The folder that a worker works in: its own for as long as it lives, and free of what an earlier worker left.

use std::fs::{File, TryLockError};
use std::io;
use std::path::{Path, PathBuf};

/// The file in it that is locked. It is never removed, so that two workers cannot lock two files of its name.
const LOCK: &str = "worker.lock";
/// The folder in it that the tasks' folders are in.
const TASKS: &str = "tasks";

/// A work folder that no other worker uses.
#[derive(Debug)]
pub(crate) struct WorkFolder {
    tasks: PathBuf,
    _lock: File,
}

impl WorkFolder {
    /// Makes the folder where it is missing, takes it for this worker, and removes the task folders in it: a worker that
    /// was killed could not.
    ///
    /// # Errors
    ///
    /// Where it cannot be made or written, or where another worker uses it. The text names the path.
    pub(crate) fn take(path: &Path) -> io::Result<Self> {
        let at = |error: io::Error| io::Error::new(error.kind(), format!("{}: {error}", path.display()));
        std::fs::create_dir_all(path).map_err(at)?;
        let path = path.canonicalize().map_err(at)?;
        let lock = File::create(path.join(LOCK)).map_err(at)?;
        match lock.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                let text = "another worker uses it; give each worker a `work_dir` and an `id` of its own";
                return Err(at(io::Error::new(io::ErrorKind::ResourceBusy, text)));
            }
            Err(TryLockError::Error(error)) => return Err(at(error)),
        }
        let tasks = path.join(TASKS);
        match std::fs::remove_dir_all(&tasks) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(at(error)),
            Ok(()) | Err(_) => {}
        }
        std::fs::create_dir(&tasks).map_err(at)?;
        Ok(Self { tasks, _lock: lock })
    }

    /// Where the tasks' folders go.
    pub(crate) fn tasks(&self) -> &Path {
        &self.tasks
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_has_one_worker_at_a_time() {
        let folder = tempfile::tempdir().unwrap();
        let first = WorkFolder::take(folder.path()).unwrap();
        let second = WorkFolder::take(folder.path()).unwrap_err().to_string();
        assert!(second.contains("another worker uses it") && second.contains(&folder.path().display().to_string()));
        drop(first);
        WorkFolder::take(folder.path()).unwrap();
    }

    #[test]
    fn what_a_killed_worker_left_is_removed_and_nothing_else() {
        let folder = tempfile::tempdir().unwrap();
        let left = WorkFolder::take(folder.path()).unwrap().tasks().join("task_0");
        std::fs::create_dir(&left).unwrap();
        std::fs::write(folder.path().join("mine.txt"), "kept").unwrap();
        WorkFolder::take(folder.path()).unwrap();
        assert!(!left.exists() && folder.path().join("mine.txt").exists());
    }

    #[test]
    fn a_path_that_is_no_folder_is_named() {
        let error = WorkFolder::take(Path::new("/dev/full")).unwrap_err().to_string();
        assert!(error.starts_with("/dev/full: "), "{error}");
    }
}
