//! Opens a path below a directory while other processes may change the directory.
//!
//! No component may be a symbolic link, and no path leads outside the directory, even if components are swapped during
//! the call. Callers check the type of a file on the open descriptor. Mount points and hard links are not checked.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Component, Path};

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PathKind {
    File,
    Directory,
}

impl PathKind {
    const fn flags(self) -> OFlags {
        let common = OFlags::RDONLY.union(OFlags::CLOEXEC).union(OFlags::NOFOLLOW);
        match self {
            Self::File => common.union(OFlags::NONBLOCK).union(OFlags::NOCTTY),
            Self::Directory => common.union(OFlags::DIRECTORY),
        }
    }
}

pub fn open_root(folder: &Path) -> io::Result<OwnedFd> {
    Ok(rustix::fs::open(folder, PathKind::Directory.flags(), Mode::empty())?)
}

/// Opens `path` below `root`, one component after the other; an empty path is `root` itself.
pub fn open(root: BorrowedFd<'_>, path: &Path, kind: PathKind) -> io::Result<OwnedFd> {
    let path = if path.as_os_str().is_empty() { Path::new(".") } else { path };
    let mut directory: Option<OwnedFd> = None;
    let mut components = path.components().peekable();
    while let Some(component) = components.next() {
        let name = match component {
            Component::Normal(name) => name,
            Component::CurDir => ".".as_ref(),
            Component::ParentDir | Component::RootDir | Component::Prefix(_) => {
                return Err(Errno::XDEV.into());
            }
        };
        let flags = match components.peek() {
            Some(_) => OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC,
            None => kind.flags(),
        };
        let parent = directory.as_ref().map_or(root, AsFd::as_fd);
        directory = Some(rustix::fs::openat(parent, name, flags, Mode::empty())?);
    }
    directory.ok_or_else(|| Errno::INVAL.into())
}

#[must_use]
pub fn open_error_message(error: &io::Error) -> String {
    match error.raw_os_error().map(Errno::from_raw_os_error) {
        Some(Errno::XDEV) => "the path leads outside the task directory".to_owned(),
        Some(Errno::LOOP) => "the path goes through a symbolic link, which is not followed".to_owned(),
        Some(_) | None => error.to_string(),
    }
}
