//! Directories below a root in which tasks write: reached component by component, without following a link that a task made.

use std::io;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::path::{Component, Path};

use rustix::fs::{AtFlags, CWD, FileType, Mode, OFlags};
use rustix::io::Errno;
use rustix::path::Arg;

use super::task_user::TaskUser;

const DIRECTORY: OFlags = OFlags::DIRECTORY.union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);
const PLACE: OFlags = OFlags::PATH.union(DIRECTORY);

/// What to do about a directory that is missing.
#[derive(Debug, Clone, Copy)]
pub enum Missing<'a> {
    /// It is created, and belongs to the task's user if there is one.
    Create(Option<&'a TaskUser>),
    Fail,
}

/// Opens a directory as a place from which others are reached, but not listed.
pub fn enter(parent: BorrowedFd<'_>, name: impl Arg + Copy, missing: Missing<'_>) -> rustix::io::Result<OwnedFd> {
    if let Missing::Create(user) = missing {
        match rustix::fs::mkdirat(parent, name, Mode::from_raw_mode(0o755)) {
            Ok(()) => user.map_or(Ok(()), |user| user.give_entry(parent, name))?,
            Err(Errno::EXIST) => {}
            Err(error) => return Err(error),
        }
    }
    rustix::fs::openat(parent, name, PLACE, Mode::empty())
}

/// Opens a directory below `root`.
///
/// # Errors
///
/// `ENOTDIR` or `ELOOP` if a component is a file or a link, `EXDEV` if the path leads outside.
pub fn open_dir(root: &Path, path: &Path, missing: Missing<'_>) -> io::Result<OwnedFd> {
    let mut dir = rustix::fs::openat(CWD, root, PLACE, Mode::empty())?;
    for component in path.components() {
        dir = match component {
            Component::Normal(name) => enter(dir.as_fd(), name, missing)?,
            Component::CurDir => continue,
            Component::ParentDir | Component::RootDir | Component::Prefix(_) => return Err(Errno::XDEV.into()),
        };
    }
    Ok(rustix::fs::openat(&dir, ".", DIRECTORY, Mode::empty())?)
}

/// Opens the directory that holds the last component of `path`, which names a file or directory below `root`.
///
/// # Errors
///
/// The same as for [`open_dir`]; `EINVAL` if the path names the root.
pub fn open_parent<'a>(root: &Path, path: &'a Path, missing: Missing<'_>) -> io::Result<(OwnedFd, &'a Path)> {
    let name = path.file_name().ok_or(Errno::INVAL)?;
    let parent = path.parent().unwrap_or_else(|| Path::new(""));
    Ok((open_dir(root, parent, missing)?, Path::new(name)))
}

/// Returns whether the entry is a directory, and no link to one.
pub fn is_dir(parent: BorrowedFd<'_>, name: &Path) -> bool {
    let stat = rustix::fs::statat(parent.as_fd(), name, AtFlags::SYMLINK_NOFOLLOW);
    stat.is_ok_and(|stat| FileType::from_raw_mode(stat.st_mode) == FileType::Directory)
}
