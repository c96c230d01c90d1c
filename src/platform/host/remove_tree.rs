//! Removes what tasks have written, however deep, write-protected or mounted it is.

use std::collections::HashMap;
use std::ffi::{CStr, OsStr};
use std::io;
use std::os::fd::{AsFd as _, AsRawFd as _, BorrowedFd, OwnedFd};
use std::path::{Component, Path, PathBuf};

use rustix::fs::{AtFlags, CWD, Dir, Mode, OFlags};
use rustix::io::Errno;

use super::work_dir::ignore_missing;
use journeyman_domain::limits::FOLDER_REMOVALS_MAX;

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

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::super::work_dir::WorkDir;
    use super::*;

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

    /// Runs itself again as an unprivileged user, because permissions do not apply to root.
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
            .args(["--exact", &format!("host::remove_tree::tests::{test}")]);
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
}
