//! The folder that a worker works in: its own for as long as it lives, and free of what an earlier worker left.

use std::io;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

use crate::host::file_lock::FileLock;
use crate::limits::{FOLDER_REMOVALS_MAX, LEFTOVER_FOLDERS_MAX};

/// The file in it that is locked. It is never removed, so that two workers cannot lock two files of its name.
const LOCK_FILE: &str = "worker.lock";
/// The folder in it that the tasks' folders are in.
const TASKS_DIR: &str = "tasks";

/// A work folder that no other worker uses.
#[derive(Debug)]
pub(crate) struct WorkDir {
    path: PathBuf,
    tasks_dir: PathBuf,
    lock: FileLock,
}

/// Which file a worker has locked in its work folder, and where. It is no other's for as long as the [`WorkDir`] lives.
#[derive(Debug, Clone)]
pub(crate) struct WorkDirLock {
    lock_path: PathBuf,
    device: u64,
    inode: u64,
}

impl WorkDirLock {
    /// The folder.
    pub(crate) fn dir(&self) -> &Path {
        self.lock_path.parent().unwrap_or(&self.lock_path)
    }

    /// What no other worker on this host has at the same time, and the next one in this folder has again: which file it has
    /// locked. The path says less, since one path may lead to two folders, one after the other or in two mount namespaces.
    pub(crate) fn identity(&self) -> String {
        format!("{}:{}", self.device, self.inode)
    }

    /// Whether the folder at this path is still the worker's: what is written to one that was removed, or that is another
    /// one by now, no later worker finds. A file system that does not say has not lost it.
    ///
    /// # Errors
    ///
    /// Where it is not.
    pub(crate) fn verify(&self) -> io::Result<()> {
        let lost = match self.lock_path.metadata() {
            Ok(about) => (about.dev(), about.ino()) != (self.device, self.inode),
            Err(error) => matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory),
        };
        if !lost {
            return Ok(());
        }
        let lock = self.lock_path.display();
        let text =
            format!("the work folder was removed or replaced under this worker: {lock} is not what it has locked");
        Err(io::Error::new(io::ErrorKind::NotFound, text))
    }
}

impl WorkDir {
    /// Makes the folder where it is missing, and takes it for this worker. What an earlier worker left in it is still there.
    ///
    /// # Errors
    ///
    /// Where it cannot be made or written, or where another worker uses it. The text names the path.
    pub(crate) fn acquire(path: &Path) -> io::Result<Self> {
        let at = |error: io::Error| io::Error::new(error.kind(), format!("{}: {error}", path.display()));
        std::fs::create_dir_all(path).map_err(at)?;
        let path = path.canonicalize().map_err(at)?;
        // What nobody of us has made is nobody's to remove.
        let fresh = !path.join(LOCK_FILE).exists();
        if fresh && std::fs::read_dir(path.join(TASKS_DIR)).is_ok_and(|mut entries| entries.next().is_some()) {
            let text = "it holds a folder `tasks` that no worker has made, for there is no `worker.lock` beside it; name an \
                        empty folder as `work_dir`, or remove `tasks` if nobody needs it";
            return Err(at(io::Error::new(io::ErrorKind::AlreadyExists, text)));
        }
        let text = "another worker uses it; give each worker a `work_dir` and an `id` of its own";
        let lock = FileLock::acquire(&path.join(LOCK_FILE)).map_err(at)?;
        let lock = lock.ok_or_else(|| at(io::Error::new(io::ErrorKind::ResourceBusy, text)))?;
        Ok(Self { tasks_dir: path.join(TASKS_DIR), path, lock })
    }

    /// Removes the task folders in it, which a worker that was killed could not. To be called once that worker's payloads
    /// are gone. What cannot be removed is put aside. Answers how much lies there by now.
    ///
    /// # Errors
    ///
    /// Where it can neither be removed nor put aside, or the folder cannot be written. The text names the path.
    pub(crate) fn remove_task_dirs(&self) -> io::Result<usize> {
        let tasks = &self.tasks_dir;
        self.retry_set_aside();
        let at = |error: io::Error| io::Error::new(error.kind(), format!("{}: {error}", tasks.display()));
        if let Err(error) = remove_tree(tasks) {
            let aside = set_aside(tasks).map_err(at)?;
            tracing::warn!(
                folder = %aside.display(), %error,
                "what earlier tasks left cannot be removed and was put aside; end what still writes to it, if anything \
                 does, and remove it as its owner"
            );
        }
        std::fs::create_dir(tasks).map_err(at)?;
        Ok(set_aside_names(tasks).filter(|path| path.symlink_metadata().is_ok()).count())
    }

    /// Removes what an earlier start had to put aside, as far as that can be done by now.
    fn retry_set_aside(&self) {
        for path in set_aside_names(&self.tasks_dir).filter(|path| path.symlink_metadata().is_ok()) {
            match remove_tree(&path) {
                Ok(()) => tracing::info!(folder = %path.display(), "what was put aside is removed"),
                Err(error) => {
                    tracing::warn!(folder = %path.display(), %error, "what was put aside still cannot be removed");
                }
            }
        }
    }

    /// What tells whether the folder is still this worker's.
    ///
    /// # Errors
    ///
    /// Where the file system says nothing of the locked file.
    pub(crate) fn work_dir_lock(&self) -> io::Result<WorkDirLock> {
        work_dir_lock(&self.path, &self.lock)
    }

    /// The folder itself.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Where the tasks' folders go.
    pub(crate) fn tasks_dir(&self) -> &Path {
        &self.tasks_dir
    }
}

/// Locks a work folder that a worker may have left; `None` where it is none, or a worker lives in it.
///
/// # Errors
///
/// Where its lock cannot be read.
pub(crate) fn try_lock_abandoned(path: &Path) -> io::Result<Option<FileLock>> {
    FileLock::try_acquire_existing(&path.join(LOCK_FILE))
}

/// What tells whether a folder is still its own who has locked it.
///
/// # Errors
///
/// Where the file system says nothing of the locked file.
pub(crate) fn work_dir_lock(folder: &Path, lock: &FileLock) -> io::Result<WorkDirLock> {
    let about = lock.file().metadata()?;
    Ok(WorkDirLock { lock_path: folder.join(LOCK_FILE), device: about.dev(), inode: about.ino() })
}

/// Whether a worker has made this folder its own at any time.
pub(crate) fn is_work_dir(path: &Path) -> bool {
    path.join(LOCK_FILE).exists()
}

/// Makes a folder in the one for tasks, and that one where somebody has removed it. Nothing above it is made: a work folder
/// that is gone is one without a lock, and the next worker's to make.
///
/// # Errors
///
/// Where it cannot be made.
pub(crate) fn create_task_dir(path: &Path) -> io::Result<()> {
    match create_dir_if_missing(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            path.parent().map_or(Ok(()), create_dir_if_missing)?;
            create_dir_if_missing(path)
        }
        made => made,
    }
}

/// Makes a folder where it is missing, in one that is there.
///
/// # Errors
///
/// Where it cannot be made.
pub(crate) fn create_dir_if_missing(path: &Path) -> io::Result<()> {
    match std::fs::create_dir(path) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists && path.is_dir() => Ok(()),
        made => made,
    }
}

/// Removes a folder that tasks have written, whatever its permissions say, as far as this user may change them. One that
/// is not there is removed. What tasks have mounted in it is unmounted first, for it lies elsewhere.
///
/// # Errors
///
/// Why the last attempt failed; parts of it may be gone. Nothing is gone while anything is mounted in it.
pub(crate) fn remove_tree(folder: &Path) -> io::Result<()> {
    super::mounts::unmount_below(folder)?;
    let mut last = Ok(());
    for _ in 0..FOLDER_REMOVALS_MAX {
        last = match std::fs::remove_dir_all(folder) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            Ok(()) | Err(_) => return Ok(()),
        };
        if last.as_ref().is_err_and(|error| error.kind() == io::ErrorKind::PermissionDenied) {
            make_writable(folder.to_owned());
        }
    }
    last
}

/// Lets the owner write to a folder and to those below it: some tools protect what they have downloaded from everybody.
fn make_writable(folder: PathBuf) {
    let mut folders = vec![folder];
    while let Some(folder) = folders.pop() {
        let Ok(about) = folder.symlink_metadata() else { continue };
        let mode = about.permissions().mode();
        if about.is_dir() && mode & 0o700 != 0o700 {
            // Where that fails, the removal says so.
            drop(std::fs::set_permissions(&folder, std::fs::Permissions::from_mode(mode | 0o700)));
        }
        let entries = std::fs::read_dir(&folder).into_iter().flatten().flatten();
        let inner = entries.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()));
        folders.extend(inner.map(|entry| entry.path()));
    }
}

/// The names that a folder may be put aside under.
fn set_aside_names(folder: &Path) -> impl Iterator<Item = PathBuf> {
    let folder = folder.as_os_str().to_owned();
    (1..=LEFTOVER_FOLDERS_MAX).map(move |number| {
        let mut name = folder.clone();
        name.push(format!(".set-aside-{number}"));
        PathBuf::from(name)
    })
}

fn set_aside(folder: &Path) -> io::Result<PathBuf> {
    let full = || io::Error::other(format!("{LEFTOVER_FOLDERS_MAX} folders were put aside already; remove them"));
    let aside = set_aside_names(folder).find(|path| path.symlink_metadata().is_err()).ok_or_else(full)?;
    std::fs::rename(folder, &aside).map(|()| aside)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_has_one_worker_at_a_time() {
        let folder = tempfile::tempdir().unwrap();
        let first = WorkDir::acquire(folder.path()).unwrap();
        let second = WorkDir::acquire(folder.path()).unwrap_err().to_string();
        assert!(second.contains("another worker uses it") && second.contains(&folder.path().display().to_string()));
        drop(first);
        WorkDir::acquire(folder.path()).unwrap();
    }

    #[test]
    fn what_a_killed_worker_left_is_removed_and_nothing_else() {
        let folder = tempfile::tempdir().unwrap();
        let first = WorkDir::acquire(folder.path()).unwrap();
        first.remove_task_dirs().unwrap();
        let left = first.tasks_dir().join("task_0");
        std::fs::create_dir(&left).unwrap();
        std::fs::write(folder.path().join("mine.txt"), "kept").unwrap();
        drop(first);
        let second = WorkDir::acquire(folder.path()).unwrap();
        assert!(left.exists(), "what still runs has to end first");
        second.remove_task_dirs().unwrap();
        assert!(!left.exists() && second.tasks_dir().exists() && folder.path().join("mine.txt").exists());
    }

    /// It runs itself again where nobody else sees what it mounts.
    #[test]
    fn what_a_task_has_mounted_in_its_folder_stays_where_it_is() {
        let test = "what_a_task_has_mounted_in_its_folder_stays_where_it_is";
        if std::env::var_os("JOURNEYMAN_TEST_MOUNTS").is_none() {
            let root = rustix::process::geteuid().is_root();
            let ways: &[&str] = if root { &["--mount"] } else { &["--user", "--map-root-user", "--mount"] };
            return again(&[&["unshare"], ways, &["env", "JOURNEYMAN_TEST_MOUNTS=1"]].concat(), test);
        }
        let home = tempfile::tempdir().unwrap();
        let (work, precious) = (home.path().join("work"), home.path().join("precious"));
        std::fs::create_dir(&precious).unwrap();
        std::fs::write(precious.join("file"), "kept").unwrap();
        let work = WorkDir::acquire(&work).unwrap();
        work.remove_task_dirs().unwrap();
        let bind = |at: &Path| {
            std::fs::create_dir_all(at).unwrap();
            rustix::mount::mount_bind(&precious, at).unwrap();
        };
        let task = work.tasks_dir().join("task_0");
        bind(&task.join("a folder/b"));
        bind(&task.join("a folder/b"));
        bind(&task);
        remove_tree(&task).unwrap();
        assert!(!task.exists() && precious.join("file").exists());
        bind(&task.join("b"));
        work.remove_task_dirs().unwrap();
        assert!(!task.exists() && precious.join("file").exists());
        // What is shared with others stays with them.
        let (shared, inner) = (home.path().join("shared"), home.path().join("shared/inner"));
        std::fs::create_dir_all(&inner).unwrap();
        rustix::mount::mount_bind(&shared, &shared).unwrap();
        rustix::mount::mount_change(&shared, rustix::mount::MountPropagationFlags::SHARED).unwrap();
        std::fs::create_dir_all(&inner).unwrap();
        rustix::mount::mount_bind(&precious, &inner).unwrap();
        std::fs::create_dir_all(task.join("b")).unwrap();
        rustix::mount::mount_bind_recursive(&shared, task.join("b")).unwrap();
        assert!(task.join("b/inner/file").exists());
        remove_tree(&task).unwrap();
        assert!(!task.exists() && inner.join("file").exists());
        // Also where it lies under another mount of that tree, or is covered by a later one.
        rustix::mount::mount_bind(&precious, &inner).unwrap();
        let table = || String::from_utf8(crate::host::mounts::mount_table().unwrap()).unwrap();
        let of_others: Vec<String> = table().lines().map(ToOwned::to_owned).collect();
        let (outer, cover) = (task.join("o"), task.join("o/a"));
        std::fs::create_dir_all(cover.join("root")).unwrap();
        rustix::mount::mount_bind(&outer, &outer).unwrap();
        rustix::mount::mount_bind(&cover, &cover).unwrap();
        rustix::mount::mount_bind_recursive(&shared, cover.join("root")).unwrap();
        rustix::mount::mount_bind_recursive(&shared, cover.join("root")).unwrap();
        bind(&cover);
        remove_tree(&task).unwrap();
        assert!(!task.exists() && inner.join("file").exists());
        let left = table();
        assert!(of_others.iter().all(|line| left.contains(line.as_str())), "{of_others:#?} {left}");
        // Where others have mounted something on what a task has of theirs, it cannot be told from theirs, and stays.
        let plain = home.path().join("shared/plain");
        std::fs::create_dir(&plain).unwrap();
        std::fs::create_dir_all(task.join("b")).unwrap();
        rustix::mount::mount_bind(&plain, task.join("b")).unwrap();
        rustix::mount::mount_bind(&precious, &plain).unwrap();
        assert!(task.join("b/file").exists(), "it is seen there as well");
        let error = remove_tree(&task).unwrap_err().to_string();
        assert!(error.contains("task_0/b is mounted and cannot be unmounted"), "{error}");
        assert!(plain.join("file").exists());
        rustix::mount::unmount(&plain, rustix::mount::UnmountFlags::empty()).unwrap();
        remove_tree(&task).unwrap();
        // However often it is mounted at one place, and wherever a later mount's links lead.
        for _ in 0..70 {
            bind(&task.join("b"));
        }
        let (covered, elsewhere) = (task.join("root"), home.path().join("elsewhere"));
        bind(&covered.join("run/lock"));
        bind(&elsewhere.join("lock"));
        let image = home.path().join("image");
        std::fs::create_dir(&image).unwrap();
        std::os::unix::fs::symlink(&elsewhere, image.join("run")).unwrap();
        rustix::mount::mount_bind(&image, &covered).unwrap();
        remove_tree(&task).unwrap();
        assert!(!task.exists() && precious.join("file").exists() && elsewhere.join("lock/file").exists());
        // Where it may not be unmounted, nothing is removed.
        bind(&task.join("b"));
        let none = rustix::thread::CapabilitySet::empty();
        let sets = rustix::thread::CapabilitySets { effective: none, permitted: none, inheritable: none };
        rustix::thread::set_capabilities(None, sets).unwrap();
        let error = remove_tree(&task).unwrap_err().to_string();
        assert!(error.contains("task_0/b is mounted and cannot be unmounted"), "{error}");
        assert!(precious.join("file").exists());
    }

    /// As root, to whom permissions mean nothing, it runs itself again as somebody else.
    #[test]
    fn what_a_task_protected_from_being_written_is_removed() {
        if rustix::process::geteuid().is_root() {
            return as_nobody("what_a_task_protected_from_being_written_is_removed");
        }
        let folder = tempfile::tempdir().unwrap();
        let work = WorkDir::acquire(folder.path()).unwrap();
        work.remove_task_dirs().unwrap();
        let protect =
            |path: &Path, mode| std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
        let protected = |task: &Path| {
            let (module, sealed) = (task.join("go/pkg/mod"), task.join("sealed"));
            std::fs::create_dir_all(&module).unwrap();
            std::fs::create_dir_all(sealed.join("in")).unwrap();
            std::fs::write(module.join("go.mod"), "module x").unwrap();
            std::os::unix::fs::symlink("/", module.join("root")).unwrap();
            protect(&module, 0o555);
            protect(&task.join("go/pkg"), 0o555);
            protect(&sealed, 0o000);
        };
        let task = work.tasks_dir().join("task_0");
        protected(&task);
        assert_eq!(std::fs::remove_dir_all(&task).unwrap_err().kind(), io::ErrorKind::PermissionDenied);
        remove_tree(&task).unwrap();
        assert!(!task.exists());
        protected(&task);
        work.remove_task_dirs().unwrap();
        assert!(!task.exists() && work.tasks_dir().exists());
    }

    fn as_nobody(test: &str) {
        again(&["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "--"], test);
    }

    #[expect(clippy::disallowed_methods, reason = "a test that starts itself, or says why not")]
    fn again(through: &[&str], test: &str) {
        let mut command = std::process::Command::new(through[0]);
        command
            .args(&through[1..])
            .arg(std::env::current_exe().unwrap())
            .args(["--exact", &format!("host::folder::tests::{test}")]);
        match command.env_remove("TMPDIR").output() {
            Ok(out) if [Some(126), Some(127)].contains(&out.status.code()) => {
                eprintln!("SKIPPED {test}: {}", String::from_utf8_lossy(&out.stderr));
            }
            Ok(out) => {
                let said = String::from_utf8_lossy(&out.stdout);
                assert!(out.status.success() && said.contains("1 passed"), "{said}");
            }
            Err(error) => eprintln!("SKIPPED {test}: {}: {error}", through[0]),
        }
    }

    #[test]
    fn what_cannot_be_removed_is_put_aside_under_a_name_of_its_own() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::create_dir(folder.path().join("tasks.set-aside-1")).unwrap();
        let tasks = folder.path().join(TASKS_DIR);
        std::fs::create_dir_all(tasks.join("task_0")).unwrap();
        let aside = set_aside(&tasks).unwrap();
        assert_eq!(aside, folder.path().join("tasks.set-aside-2"));
        assert!(aside.join("task_0").exists() && !tasks.exists());
    }

    #[test]
    fn what_was_put_aside_is_removed_by_the_next_start_that_can() {
        let folder = tempfile::tempdir().unwrap();
        let work = WorkDir::acquire(folder.path()).unwrap();
        let aside = |number| folder.path().join(format!("tasks.set-aside-{number}"));
        std::fs::create_dir_all(aside(1).join("task_0")).unwrap();
        std::fs::create_dir_all(aside(3).join("task_1")).unwrap();
        std::fs::create_dir(folder.path().join("tasks.set-aside-mine")).unwrap();
        assert_eq!(work.remove_task_dirs().unwrap(), 0);
        assert!(!aside(1).exists() && !aside(3).exists() && folder.path().join("tasks.set-aside-mine").exists());
    }

    #[test]
    fn a_folder_is_the_same_for_the_next_worker_and_another_one_at_its_path_is_not() {
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
    fn a_folder_that_was_removed_or_replaced_is_no_longer_its_workers_and_is_not_made_again() {
        let home = tempfile::tempdir().unwrap();
        let path = home.path().join("work");
        let work = WorkDir::acquire(&path).unwrap();
        work.remove_task_dirs().unwrap();
        let hold = work.work_dir_lock().unwrap();
        hold.verify().unwrap();
        let task = work.tasks_dir().join("task_0");
        std::fs::remove_dir(work.tasks_dir()).unwrap();
        create_task_dir(&task).unwrap();
        assert!(task.is_dir(), "the folder for tasks alone is made again");
        std::fs::rename(&path, home.path().join("moved")).unwrap();
        let error = hold.verify().unwrap_err().to_string();
        assert!(error.contains("removed or replaced") && error.contains("worker.lock"), "{error}");
        assert_eq!(create_task_dir(&task).unwrap_err().kind(), io::ErrorKind::NotFound);
        assert!(!path.exists());
        let other = WorkDir::acquire(&path).unwrap();
        hold.verify().unwrap_err();
        other.work_dir_lock().unwrap().verify().unwrap();
        drop(other);
        std::fs::remove_dir_all(&path).unwrap();
        std::fs::rename(home.path().join("moved"), &path).unwrap();
        hold.verify().unwrap();
        std::fs::remove_dir_all(&path).unwrap();
        std::fs::write(&path, "in the way").unwrap();
        hold.verify().unwrap_err();
    }

    #[test]
    fn a_folder_that_no_worker_has_made_is_not_touched() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::create_dir(folder.path().join(TASKS_DIR)).unwrap();
        std::fs::write(folder.path().join(TASKS_DIR).join("mine.txt"), "kept").unwrap();
        let error = WorkDir::acquire(folder.path()).unwrap_err().to_string();
        assert!(error.contains("no worker has made"), "{error}");
        assert!(folder.path().join(TASKS_DIR).join("mine.txt").exists() && !folder.path().join(LOCK_FILE).exists());
    }

    #[test]
    fn a_path_that_is_no_folder_is_named() {
        let error = WorkDir::acquire(Path::new("/dev/full")).unwrap_err().to_string();
        assert!(error.starts_with("/dev/full: "), "{error}");
    }
}
