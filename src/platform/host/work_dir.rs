//! The work directory of a worker: locked while the worker runs, cleared of the previous process's task directories.

use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::file_lock::FileLock;
use super::remove_tree::remove_tree;
use journeyman_domain::limits::LEFTOVER_FOLDERS_MAX;

/// Never removed, so that two workers cannot lock two files of this name.
pub const LOCK_FILE: &str = "worker.lock";
const TASKS_DIR: &str = "tasks";

/// A work directory, locked by this worker.
#[derive(Debug)]
pub struct WorkDir {
    path: PathBuf,
    tasks_dir: PathBuf,
    lock: FileLock,
}

/// The identity of the locked file; valid while the [`WorkDir`] lives.
#[derive(Debug, Clone)]
pub struct WorkDirLock {
    lock_path: Arc<Path>,
    device: u64,
    inode: u64,
}

impl WorkDirLock {
    pub fn dir(&self) -> &Path {
        self.lock_path.parent().unwrap_or(&self.lock_path)
    }

    pub fn tasks_dir(&self) -> PathBuf {
        self.dir().join(TASKS_DIR)
    }

    /// Unique on this host while the lock is held, and the same for the next worker in this directory. A path is neither: it
    /// may name two directories, one after the other or in two mount namespaces.
    pub fn identity(&self) -> String {
        format!("{}:{}", self.device, self.inode)
    }

    /// Checks that the path still leads to the locked file: no later worker finds what is written to a removed directory. Any
    /// error but a missing file counts as unchanged.
    ///
    /// # Errors
    ///
    /// The directory was removed or replaced.
    pub fn verify(&self) -> io::Result<()> {
        let lost = match self.lock_path.metadata() {
            Ok(metadata) => (metadata.dev(), metadata.ino()) != (self.device, self.inode),
            Err(error) => matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory),
        };
        if !lost {
            return Ok(());
        }
        let lock = self.lock_path.display();
        let text = format!("work_dir was removed or replaced while in use: {lock} is no longer the locked file");
        Err(io::Error::new(io::ErrorKind::NotFound, text))
    }
}

impl WorkDir {
    /// Creates the directory if it is missing, and locks it. Its content stays until [`WorkDir::remove_task_dirs`].
    ///
    /// # Errors
    ///
    /// It cannot be created, written or locked, or it contains `tasks` that no worker created.
    pub fn acquire(path: &Path) -> io::Result<Self> {
        let at = |error: io::Error| io::Error::new(error.kind(), format!("{}: {error}", path.display()));
        std::fs::create_dir_all(path).map_err(at)?;
        let path = path.canonicalize().map_err(at)?;
        // Files that no worker created must not be removed.
        let is_new = !path.join(LOCK_FILE).exists();
        if is_new && std::fs::read_dir(path.join(TASKS_DIR)).is_ok_and(|mut entries| entries.next().is_some()) {
            let text = "refusing to use this work_dir: it contains `tasks` but no `worker.lock`, so it was not created by \
                        journeyman; use an empty directory or remove `tasks`";
            return Err(at(io::Error::new(io::ErrorKind::AlreadyExists, text)));
        }
        let text = "work_dir is in use by another worker; give each worker its own `work_dir` and `id`";
        let lock = FileLock::acquire(&path.join(LOCK_FILE)).map_err(at)?;
        let lock = lock.ok_or_else(|| at(io::Error::new(io::ErrorKind::ResourceBusy, text)))?;
        Ok(Self { tasks_dir: path.join(TASKS_DIR), path, lock })
    }

    /// Removes the task directories of a previous process that was killed; its payloads must have ended. A directory that
    /// cannot be removed is moved aside, and its removal is retried at the next start.
    ///
    /// # Errors
    ///
    /// A directory can neither be removed nor moved, or the new one cannot be created.
    pub fn remove_task_dirs(&self) -> io::Result<()> {
        let tasks = &self.tasks_dir;
        for path in set_aside_names(tasks).filter(|path| path.symlink_metadata().is_ok()) {
            if let Err(error) = remove_tree(&path) {
                tracing::warn!(
                    dir = %path.display(), %error,
                    "still cannot remove a directory that was moved aside; remove it as its owner"
                );
            }
        }
        let at = |error: io::Error| io::Error::new(error.kind(), format!("{}: {error}", tasks.display()));
        if let Err(error) = remove_tree(tasks) {
            let aside = set_aside(tasks).map_err(at)?;
            tracing::warn!(
                dir = %aside.display(), %error,
                "cannot remove the task directories of the previous process; moved them aside: end the processes that \
                 still write there, and remove the directory as its owner"
            );
        }
        std::fs::create_dir(tasks).map_err(at)
    }

    pub fn work_dir_lock(&self) -> io::Result<WorkDirLock> {
        let metadata = self.lock.file().metadata()?;
        Ok(WorkDirLock { lock_path: self.path.join(LOCK_FILE).into(), device: metadata.dev(), inode: metadata.ino() })
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    pub fn tasks_dir(&self) -> &Path {
        &self.tasks_dir
    }
}

/// Creates a task directory, and `tasks` if it is missing, but not the work directory: without its lock it belongs to the
/// next worker.
pub fn create_task_dir(path: &Path) -> io::Result<()> {
    match create_dir_if_missing(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            path.parent().map_or(Ok(()), create_dir_if_missing)?;
            create_dir_if_missing(path)
        }
        result => result,
    }
}

/// The file of a removal or a rename may be missing.
pub fn ignore_missing(error: io::Error) -> io::Result<()> {
    if error.kind() == io::ErrorKind::NotFound { Ok(()) } else { Err(error) }
}

pub fn create_dir_if_missing(path: &Path) -> io::Result<()> {
    match std::fs::create_dir(path) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists && path.is_dir() => Ok(()),
        result => result,
    }
}

pub(super) fn child_dirs(parent: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(parent).into_iter().flatten().flatten();
    let dirs = entries.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()));
    dirs.map(|entry| entry.path()).collect()
}

fn set_aside_names(dir: &Path) -> impl Iterator<Item = PathBuf> {
    (1..=LEFTOVER_FOLDERS_MAX).map(move |number| dir.with_extension(format!("set-aside-{number}")))
}

fn set_aside(dir: &Path) -> io::Result<PathBuf> {
    let full = || io::Error::other(format!("{LEFTOVER_FOLDERS_MAX} directories were moved aside already; remove them"));
    let aside = set_aside_names(dir).find(|path| path.symlink_metadata().is_err()).ok_or_else(full)?;
    std::fs::rename(dir, &aside).map(|()| aside)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_work_dir_has_one_worker_at_a_time() {
        let dir = tempfile::tempdir().unwrap();
        let first = WorkDir::acquire(dir.path()).unwrap();
        let second = WorkDir::acquire(dir.path()).unwrap_err().to_string();
        assert!(second.contains("in use by another worker") && second.contains(&dir.path().display().to_string()));
        drop(first);
        WorkDir::acquire(dir.path()).unwrap();
    }

    #[test]
    fn only_the_task_directories_of_a_killed_worker_are_removed() {
        let dir = tempfile::tempdir().unwrap();
        let first = WorkDir::acquire(dir.path()).unwrap();
        first.remove_task_dirs().unwrap();
        let left = first.tasks_dir().join("task_0");
        std::fs::create_dir(&left).unwrap();
        std::fs::write(dir.path().join("mine.txt"), "kept").unwrap();
        drop(first);
        let second = WorkDir::acquire(dir.path()).unwrap();
        assert!(left.exists(), "its processes have to end first");
        second.remove_task_dirs().unwrap();
        assert!(!left.exists() && second.tasks_dir().exists() && dir.path().join("mine.txt").exists());
    }

    #[test]
    fn a_directory_is_moved_aside_under_an_unused_name() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("tasks.set-aside-1")).unwrap();
        let tasks = dir.path().join(TASKS_DIR);
        std::fs::create_dir_all(tasks.join("task_0")).unwrap();
        let aside = set_aside(&tasks).unwrap();
        assert_eq!(aside, dir.path().join("tasks.set-aside-2"));
        assert!(aside.join("task_0").exists() && !tasks.exists());
    }

    #[test]
    fn the_next_start_retries_the_removal_of_set_aside_directories() {
        let dir = tempfile::tempdir().unwrap();
        let work = WorkDir::acquire(dir.path()).unwrap();
        let aside = |number| dir.path().join(format!("tasks.set-aside-{number}"));
        std::fs::create_dir_all(aside(1).join("task_0")).unwrap();
        std::fs::create_dir_all(aside(3).join("task_1")).unwrap();
        std::fs::create_dir(dir.path().join("tasks.set-aside-mine")).unwrap();
        work.remove_task_dirs().unwrap();
        assert!(!aside(1).exists() && !aside(3).exists() && dir.path().join("tasks.set-aside-mine").exists());
    }

    #[test]
    fn the_identity_is_kept_across_workers_and_changes_with_the_directory() {
        let home = tempfile::tempdir().unwrap();
        let path = home.path().join("work");
        let identity = |work: &WorkDir| work.work_dir_lock().unwrap().identity();
        let first = identity(&WorkDir::acquire(&path).unwrap());
        let alive = WorkDir::acquire(&path).unwrap();
        assert_eq!(identity(&alive), first);
        std::fs::remove_dir_all(&path).unwrap();
        assert_ne!(identity(&WorkDir::acquire(&path).unwrap()), first);
    }

    #[test]
    fn a_removed_or_replaced_work_dir_is_detected_and_not_created_again() {
        let home = tempfile::tempdir().unwrap();
        let path = home.path().join("work");
        let work = WorkDir::acquire(&path).unwrap();
        work.remove_task_dirs().unwrap();
        let lock = work.work_dir_lock().unwrap();
        lock.verify().unwrap();
        let task = work.tasks_dir().join("task_0");
        std::fs::remove_dir(work.tasks_dir()).unwrap();
        create_task_dir(&task).unwrap();
        assert!(task.is_dir(), "only `tasks` is created again");
        std::fs::rename(&path, home.path().join("moved")).unwrap();
        let error = lock.verify().unwrap_err().to_string();
        assert!(error.contains("removed or replaced") && error.contains("worker.lock"), "{error}");
        assert_eq!(create_task_dir(&task).unwrap_err().kind(), io::ErrorKind::NotFound);
        assert!(!path.exists());
        let other = WorkDir::acquire(&path).unwrap();
        lock.verify().unwrap_err();
        other.work_dir_lock().unwrap().verify().unwrap();
        drop(other);
        std::fs::remove_dir_all(&path).unwrap();
        std::fs::rename(home.path().join("moved"), &path).unwrap();
        lock.verify().unwrap();
        std::fs::remove_dir_all(&path).unwrap();
        std::fs::write(&path, "in the way").unwrap();
        lock.verify().unwrap_err();
    }

    #[test]
    fn a_tasks_directory_without_a_lock_file_is_not_touched() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join(TASKS_DIR)).unwrap();
        std::fs::write(dir.path().join(TASKS_DIR).join("mine.txt"), "kept").unwrap();
        let error = WorkDir::acquire(dir.path()).unwrap_err().to_string();
        assert!(error.contains("not created by journeyman"), "{error}");
        assert!(dir.path().join(TASKS_DIR).join("mine.txt").exists() && !dir.path().join(LOCK_FILE).exists());
    }

    #[test]
    fn an_error_names_the_path() {
        let error = WorkDir::acquire(Path::new("/dev/full")).unwrap_err().to_string();
        assert!(error.starts_with("/dev/full: "), "{error}");
    }
}
