//! The work directory of a worker: locked while the worker runs, cleared of the previous process's task directories.

use std::collections::HashMap;
use std::ffi::{CStr, OsStr};
use std::io;
use std::os::fd::{AsFd as _, AsRawFd as _, BorrowedFd, OwnedFd};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;

use rustix::fs::{AtFlags, CWD, Dir, Mode, OFlags};
use rustix::io::Errno;

use crate::host::file_lock::FileLock;
use journeyman_domain::limits::{FOLDER_REMOVALS_MAX, LEFTOVER_FOLDERS_MAX};

/// Never removed, so that two workers cannot lock two files of this name.
const LOCK_FILE: &str = "worker.lock";
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

/// Removes a directory that tasks have written, changing permissions where this user may. Unmounts what tasks have mounted in
/// it first, so that only its own files are removed. A missing directory is a success.
///
/// # Errors
///
/// The last attempt failed; parts may be removed. Nothing is removed while anything is mounted in it.
pub fn remove_tree(dir: &Path) -> io::Result<()> {
    // Most tasks leave nothing, and nothing is mounted in an empty directory.
    if std::fs::remove_dir(dir).or_else(ignore_missing).is_ok() {
        return Ok(());
    }
    super::mounts::unmount_below(dir)?;
    let mut result = Ok(());
    for _ in 0..FOLDER_REMOVALS_MAX {
        result = match remove_content(dir).and_then(|()| std::fs::remove_dir(dir)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            Ok(()) | Err(_) => return Ok(()),
        };
    }
    result
}

/// Removes what is in a directory, or a file or link in its place. Directories in directories are moved up before they are removed, so
/// that neither the stack nor the number of descriptors grows with the depth.
fn remove_content(dir: &Path) -> io::Result<()> {
    let root = match open_for_removal(CWD, dir) {
        Err(Errno::NOTDIR | Errno::LOOP) => {
            std::fs::remove_file(dir)?;
            return Err(io::ErrorKind::NotFound.into());
        }
        opened => opened?,
    };
    let prefix = uuid::Uuid::new_v4().simple().to_string();
    let mut moved = 0_u64;
    loop {
        let (mut has_progress, mut failed) = (false, None);
        each_entry(&root, |name| {
            let removed = remove_entry(root.as_fd(), name, &mut |parent, name| {
                moved += 1;
                rustix::fs::renameat(parent, name, &root, format!("{prefix}-{moved}"))
            });
            has_progress |= removed.is_ok();
            failed = failed.or_else(|| removed.err());
        })?;
        match failed {
            _ if has_progress => {}
            Some(error) => return Err(error.into()),
            None => return Ok(()),
        }
    }
}

/// Removes an entry of a directory. `move_up` moves a directory that is not empty out of it.
fn remove_entry(
    parent: BorrowedFd<'_>,
    name: &CStr,
    move_up: &mut dyn FnMut(BorrowedFd<'_>, &CStr) -> rustix::io::Result<()>,
) -> rustix::io::Result<()> {
    if unlink(parent, name)? {
        return Ok(());
    }
    let dir = open_for_removal(parent, name)?;
    let mut failed = None;
    each_entry(&dir, |inner| {
        let removed = match unlink(dir.as_fd(), inner) {
            // A directory can be moved by who may write it.
            Ok(false) => open_for_removal(dir.as_fd(), inner).and_then(|_| move_up(dir.as_fd(), inner)),
            removed => removed.map(drop),
        };
        failed = failed.or_else(|| removed.err());
    })?;
    failed.map_or_else(|| rustix::fs::unlinkat(parent, name, AtFlags::REMOVEDIR), Err)
}

/// `false` for a directory that is not empty.
fn unlink(parent: BorrowedFd<'_>, name: &CStr) -> rustix::io::Result<bool> {
    match rustix::fs::unlinkat(parent, name, AtFlags::empty()) {
        Err(Errno::ISDIR) => match rustix::fs::unlinkat(parent, name, AtFlags::REMOVEDIR) {
            Err(Errno::NOTEMPTY | Errno::EXIST) => Ok(false),
            Ok(()) | Err(Errno::NOENT) => Ok(true),
            Err(error) => Err(error),
        },
        Ok(()) | Err(Errno::NOENT) => Ok(true),
        Err(error) => Err(error),
    }
}

/// Opens a directory, and makes it writable for its owner: some tools write-protect their downloads, such as Go's module cache.
fn open_for_removal(parent: BorrowedFd<'_>, name: impl rustix::path::Arg) -> rustix::io::Result<OwnedFd> {
    let flags = OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let dir = rustix::fs::openat(parent, name, flags | OFlags::PATH, Mode::empty())?;
    let mode = Mode::from_raw_mode(rustix::fs::fstat(&dir)?.st_mode);
    if !mode.contains(Mode::RWXU) {
        // On failure the removal reports the error.
        rustix::fs::chmod(format!("/proc/self/fd/{}", dir.as_raw_fd()), mode | Mode::RWXU).ok();
    }
    rustix::fs::openat(&dir, ".", flags, Mode::empty())
}

fn each_entry(dir: &OwnedFd, mut each: impl FnMut(&CStr)) -> rustix::io::Result<()> {
    for entry in Dir::read_from(dir)? {
        let entry = entry?;
        if !matches!(entry.file_name().to_bytes(), b"." | b"..") {
            each(entry.file_name());
        }
    }
    Ok(())
}

/// Removes what a directory that tasks have written contains besides the paths of `keep`, which are relative to it. Removes
/// nothing while anything is mounted in it, because a kept path may lead into the mount.
///
/// # Errors
///
/// The last error; the other files are removed.
pub fn remove_all_but(dir: &Path, keep: &[PathBuf]) -> io::Result<()> {
    if super::mounts::is_mounted_below(dir)? { Ok(()) } else { remove_siblings(dir, keep) }
}

fn remove_siblings(dir: &Path, keep: &[PathBuf]) -> io::Result<()> {
    let mut kept: HashMap<&OsStr, Vec<PathBuf>> = HashMap::new();
    for path in keep {
        let mut names = path.components().filter(|component| *component != Component::CurDir);
        let Some(name) = names.next() else { return Ok(()) };
        kept.entry(name.as_os_str()).or_default().push(names.collect());
    }
    // By its descriptor: a task may have put a link in the place of a directory, and what that leads to is not the task's.
    let opened = match rustix::fs::open(dir, OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty()) {
        Err(Errno::LOOP | Errno::NOTDIR | Errno::NOENT) => return Ok(()),
        opened => opened?,
    };
    let mut result = Ok(());
    for entry in std::fs::read_dir(format!("/proc/self/fd/{}", opened.as_raw_fd()))? {
        let entry = entry?;
        let (path, is_dir) = (entry.path(), entry.file_type()?.is_dir());
        let removed = match kept.get(&*entry.file_name()) {
            Some(inner) if is_dir => remove_siblings(&path, inner),
            Some(_) => Ok(()),
            None if is_dir => remove_tree(&path),
            None => std::fs::remove_file(&path).or_else(ignore_missing),
        };
        result = removed.and(result);
    }
    result
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
    use std::os::unix::fs::PermissionsExt as _;

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
    fn b6_nothing_is_removed_or_changed_behind_a_link_that_a_task_put_in_place_of_a_directory() {
        let home = tempfile::tempdir().unwrap();
        let (task, precious) = (home.path().join("task"), home.path().join("precious"));
        let inner = precious.join("inner");
        std::fs::create_dir_all(&inner).unwrap();
        std::fs::write(precious.join("file"), "kept").unwrap();
        let mode = |mode| std::fs::set_permissions(&inner, std::fs::Permissions::from_mode(mode)).unwrap();
        let is_kept =
            || precious.join("file").exists() && inner.metadata().unwrap().permissions().mode() & 0o777 == 0o500;
        mode(0o500);
        std::os::unix::fs::symlink(&precious, &task).unwrap();
        remove_all_but(&task, &["a".into()]).unwrap();
        assert!(is_kept() && task.is_symlink());
        remove_tree(&task).unwrap();
        assert!(is_kept() && !task.is_symlink());
        std::fs::create_dir(&task).unwrap();
        std::os::unix::fs::symlink(&precious, task.join("a")).unwrap();
        remove_all_but(&task, &["a/b".into(), "./c".into()]).unwrap();
        assert!(is_kept() && task.join("a").is_symlink());
        mode(0o700);
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

    /// Runs itself again in a mount namespace.
    #[test]
    fn removing_a_task_directory_unmounts_and_keeps_mounted_files() {
        let test = "removing_a_task_directory_unmounts_and_keeps_mounted_files";
        if std::env::var_os("JOURNEYMAN_TEST_MOUNTS").is_none() {
            let root = rustix::process::geteuid().is_root();
            let flags: &[&str] = if root { &["--mount"] } else { &["--user", "--map-root-user", "--mount"] };
            return rerun(&[&["unshare"], flags, &["env", "JOURNEYMAN_TEST_MOUNTS=1"]].concat(), test);
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
        bind(&task);
        remove_tree(&task).unwrap();
        assert!(!task.exists() && precious.join("file").exists());
        bind(&task.join("b"));
        work.remove_task_dirs().unwrap();
        assert!(!task.exists() && precious.join("file").exists());
        // A shared mount keeps its content.
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
        // The mount is also under another mount of the tree, or covered by a later one.
        rustix::mount::mount_bind(&precious, &inner).unwrap();
        let table = || String::from_utf8(crate::host::mounts::mount_table().unwrap()).unwrap();
        let shared_mounts: Vec<String> = table().lines().map(ToOwned::to_owned).collect();
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
        assert!(shared_mounts.iter().all(|line| left.contains(line.as_str())), "{shared_mounts:#?} {left}");
        // A mount that propagated into the task's directory from outside cannot be told from its source, and stays.
        let plain = home.path().join("shared/plain");
        std::fs::create_dir(&plain).unwrap();
        std::fs::create_dir_all(task.join("b")).unwrap();
        rustix::mount::mount_bind(&plain, task.join("b")).unwrap();
        rustix::mount::mount_bind(&precious, &plain).unwrap();
        assert!(task.join("b/file").exists(), "the mount propagates");
        let error = remove_tree(&task).unwrap_err().to_string();
        assert!(error.contains("task_0/b is mounted and cannot be unmounted"), "{error}");
        assert!(plain.join("file").exists());
        rustix::mount::unmount(&plain, rustix::mount::UnmountFlags::empty()).unwrap();
        remove_tree(&task).unwrap();
        // A mount on another one stays.
        bind(&task.join("b"));
        bind(&task.join("b"));
        let error = remove_tree(&task).unwrap_err().to_string();
        assert!(error.contains("task_0/b is mounted and cannot be unmounted"), "{error}");
        assert!(precious.join("file").exists());
        rustix::mount::unmount(task.join("b"), rustix::mount::UnmountFlags::empty()).unwrap();
        // A later mount whose symlinks lead elsewhere.
        let (covered, elsewhere) = (task.join("root"), home.path().join("elsewhere"));
        bind(&covered.join("run/lock"));
        bind(&elsewhere.join("lock"));
        let image = home.path().join("image");
        std::fs::create_dir(&image).unwrap();
        std::os::unix::fs::symlink(&elsewhere, image.join("run")).unwrap();
        rustix::mount::mount_bind(&image, &covered).unwrap();
        remove_tree(&task).unwrap();
        assert!(!task.exists() && precious.join("file").exists() && elsewhere.join("lock/file").exists());
        // Without the capability to unmount, nothing is removed.
        bind(&task.join("b"));
        let none = rustix::thread::CapabilitySet::empty();
        let sets = rustix::thread::CapabilitySets { effective: none, permitted: none, inheritable: none };
        rustix::thread::set_capabilities(None, sets).unwrap();
        let error = remove_tree(&task).unwrap_err().to_string();
        assert!(error.contains("task_0/b is mounted and cannot be unmounted"), "{error}");
        assert!(precious.join("file").exists());
    }

    /// Runs itself again as an unprivileged user, because permissions do not apply to root.
    /// Neither the stack of a thread nor its descriptors suffice for a level each, and no path is as long.
    #[test]
    fn a_tree_of_any_depth_is_removed() {
        let home = tempfile::tempdir().unwrap();
        let top = home.path().join("top");
        std::fs::create_dir(&top).unwrap();
        let mut dir = open_for_removal(CWD, &top).unwrap();
        for _ in 0..20_000 {
            rustix::fs::mkdirat(&dir, "d", Mode::RWXU).unwrap();
            rustix::fs::symlinkat("/", &dir, "link").unwrap();
            dir = open_for_removal(dir.as_fd(), "d").unwrap();
        }
        remove_tree(&top).unwrap();
        assert!(!top.exists());
    }

    #[test]
    fn write_protected_directories_are_removed() {
        if rustix::process::geteuid().is_root() {
            return rerun_unprivileged("write_protected_directories_are_removed");
        }
        let dir = tempfile::tempdir().unwrap();
        let work = WorkDir::acquire(dir.path()).unwrap();
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

    fn rerun_unprivileged(test: &str) {
        rerun(&["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "--"], test);
    }

    #[expect(clippy::disallowed_methods, reason = "a test that starts itself, or says why not")]
    fn rerun(prefix: &[&str], test: &str) {
        let mut command = std::process::Command::new(prefix[0]);
        command
            .args(&prefix[1..])
            .arg(std::env::current_exe().unwrap())
            .args(["--exact", &format!("host::work_dir::tests::{test}")]);
        match command.env_remove("TMPDIR").output() {
            Ok(out) if [Some(126), Some(127)].contains(&out.status.code()) => {
                eprintln!("SKIPPED {test}: {}", String::from_utf8_lossy(&out.stderr));
            }
            Ok(out) => {
                let stdout = String::from_utf8_lossy(&out.stdout);
                assert!(out.status.success() && stdout.contains("1 passed"), "{stdout}");
            }
            Err(error) => eprintln!("SKIPPED {test}: {}: {error}", prefix[0]),
        }
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
