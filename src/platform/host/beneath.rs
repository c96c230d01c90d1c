//! Directories below a root in which tasks write: reached component by component, without following a link that a task made.

use std::io;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::path::{Component, Path};

use rustix::fs::{AtFlags, CWD, FileType, Mode, OFlags};
use rustix::io::Errno;

use super::task_user::TaskUser;

const DIRECTORY: OFlags = OFlags::DIRECTORY.union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);

/// What to do about a directory that is missing.
#[derive(Debug, Clone, Copy)]
pub enum Missing<'a> {
    /// It is created, and belongs to the task's user if there is one.
    Create(Option<&'a TaskUser>),
    Fail,
}

/// Opens a directory below `root`.
///
/// # Errors
///
/// `ENOTDIR` or `ELOOP` if a component is a file or a link, `EXDEV` if the path leads outside.
pub fn open_dir(root: &Path, path: &Path, missing: Missing<'_>) -> io::Result<OwnedFd> {
    let mut dir = rustix::fs::openat(CWD, root, DIRECTORY, Mode::empty())?;
    for component in path.components() {
        let name = match component {
            Component::Normal(name) => name,
            Component::CurDir => continue,
            Component::ParentDir | Component::RootDir | Component::Prefix(_) => return Err(Errno::XDEV.into()),
        };
        let mut owner = None;
        if let Missing::Create(user) = missing {
            match rustix::fs::mkdirat(&dir, name, Mode::RWXU | Mode::RGRP | Mode::XGRP | Mode::ROTH | Mode::XOTH) {
                Ok(()) => owner = user,
                Err(Errno::EXIST) => {}
                Err(error) => return Err(error.into()),
            }
        }
        dir = rustix::fs::openat(&dir, name, DIRECTORY, Mode::empty())?;
        owner.map_or(Ok(()), |user| user.give(&dir))?;
    }
    Ok(dir)
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
