//! Opens a path below a directory while other processes may change the directory.
//!
//! No component may be a symbolic link, and no path leads outside the directory, even if components are swapped during
//! the call. Callers check the type of a file on the open descriptor. Mount points and hard links are not checked.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Component, Path};

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;

use crate::task::ArtifactErrorReason;

const FLAGS: OFlags = OFlags::CLOEXEC.union(OFlags::NOFOLLOW);

pub fn open_root(folder: &Path) -> io::Result<OwnedFd> {
    Ok(rustix::fs::open(folder, FLAGS | OFlags::DIRECTORY, Mode::empty())?)
}

/// Opens a file or directory below `root`, one component after the other; an empty path is `root` itself.
pub fn open(root: BorrowedFd<'_>, path: &Path) -> io::Result<OwnedFd> {
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
            Some(_) => FLAGS | OFlags::PATH | OFlags::DIRECTORY,
            None => FLAGS | OFlags::NONBLOCK | OFlags::NOCTTY,
        };
        let parent = directory.as_ref().map_or(root, AsFd::as_fd);
        directory = Some(rustix::fs::openat(parent, name, flags, Mode::empty())?);
    }
    directory.ok_or_else(|| Errno::INVAL.into())
}

/// Whether there is no such file, or another kind of file in its place.
pub(super) fn is_of_path(error: &io::Error) -> bool {
    let errno = error.raw_os_error().map(Errno::from_raw_os_error);
    matches!(errno, Some(Errno::NOENT | Errno::NOTDIR | Errno::LOOP))
}

/// Why [`open`] failed.
#[must_use]
pub fn classify_error(error: &io::Error) -> (ArtifactErrorReason, String) {
    let (reason, message) = match error.raw_os_error().map(Errno::from_raw_os_error) {
        Some(Errno::NOENT) => (ArtifactErrorReason::Missing, "no such file or directory"),
        Some(Errno::NOTDIR) => {
            (ArtifactErrorReason::Missing, "a component of the path is not a directory, or is a symbolic link")
        }
        Some(Errno::LOOP) => (ArtifactErrorReason::Irregular, "a symbolic link, which is not followed"),
        Some(Errno::XDEV) => (ArtifactErrorReason::Irregular, "the path leads outside the task directory"),
        Some(Errno::NXIO | Errno::NODEV) => (ArtifactErrorReason::Irregular, "not a regular file"),
        Some(_) | None => return (ArtifactErrorReason::Unreadable, error.to_string()),
    };
    (reason, message.to_owned())
}
