//! Opens a path below a folder that somebody else may be changing at this very moment.
//!
//! No component may be a symbolic link, and nothing outside the folder can be reached, whatever is swapped meanwhile:
//! the kernel's `openat2` sees to it, or, where there is none, each component is opened by itself. What a path leads to
//! is judged by its open descriptor only. Mount points and hard links are not looked at.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Component, Path};

use rustix::fs::{Mode, OFlags, ResolveFlags};
use rustix::io::Errno;

/// How a path is walked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PathResolver {
    /// By the kernel, and by component where the kernel cannot.
    Kernel,
    /// By component.
    Components,
}

/// What a path has to lead to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PathKind {
    /// Something to read. A named pipe does not block; whether it is a regular file is for the caller to see.
    File,
    /// A folder to list.
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

/// Opens the folder that paths are looked up in.
///
/// # Errors
///
/// Whatever the file system says; a symbolic link is not followed.
pub fn open_root(folder: &Path) -> io::Result<OwnedFd> {
    Ok(rustix::fs::open(folder, PathKind::Directory.flags(), Mode::empty())?)
}

/// Opens `path` below `root`. An empty path and `.` are `root` itself.
///
/// # Errors
///
/// `ELOOP` or `ENOTDIR` where a component is a symbolic link, `EXDEV` where the path leads out, and whatever else the
/// file system says.
pub fn open(root: BorrowedFd<'_>, path: &Path, kind: PathKind, walk: PathResolver) -> io::Result<OwnedFd> {
    let path = if path.as_os_str().is_empty() { Path::new(".") } else { path };
    if walk == PathResolver::Kernel {
        let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
        // The kernel gives up with EAGAIN when something is renamed meanwhile; by component it cannot happen.
        match rustix::fs::openat2(root, path, kind.flags(), Mode::empty(), resolve) {
            Err(Errno::NOSYS | Errno::PERM | Errno::AGAIN) => {}
            opened => return Ok(opened?),
        }
    }
    open_by_component(root, path, kind)
}

/// Why a path was not opened, for people.
#[must_use]
pub fn open_error_message(error: &io::Error) -> String {
    match error.raw_os_error().map(Errno::from_raw_os_error) {
        Some(Errno::XDEV) => "it leads out of the task's folder".to_owned(),
        Some(Errno::LOOP) => "a symbolic link is not followed".to_owned(),
        Some(_) | None => error.to_string(),
    }
}

fn open_by_component(root: BorrowedFd<'_>, path: &Path, kind: PathKind) -> io::Result<OwnedFd> {
    let mut at: Option<OwnedFd> = None;
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
        let folder = at.as_ref().map_or(root, AsFd::as_fd);
        at = Some(rustix::fs::openat(folder, name, flags, Mode::empty())?);
    }
    at.ok_or_else(|| Errno::INVAL.into())
}
