//! Opens a path below a directory while other processes may change the directory.
//!
//! Symbolic links are followed as long as they stay below the directory, and no path leads outside, even if components are
//! swapped during the call. Callers check the type of a file on the open descriptor. Mount points and hard links are not
//! checked.

use std::ffi::{OsStr, OsString};
use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::ffi::OsStringExt as _;
use std::path::{Component, Path, PathBuf};

use rustix::fs::{FileType, Mode, OFlags};
use rustix::io::Errno;

use crate::task::ArtifactErrorReason;
use journeyman_domain::limits::LINKS_FOLLOWED_MAX;

const FLAGS: OFlags = OFlags::CLOEXEC.union(OFlags::NOFOLLOW);

/// A directory that paths are opened below.
#[derive(Debug)]
pub struct Root {
    folder: OwnedFd,
    /// Its path as given and without links, as processes in it may have learned it.
    paths: [PathBuf; 2],
}

impl Root {
    pub fn open(folder: &Path) -> io::Result<Self> {
        let paths = [folder.to_owned(), folder.canonicalize()?];
        Ok(Self { folder: rustix::fs::open(folder, FLAGS | OFlags::DIRECTORY, Mode::empty())?, paths })
    }

    /// Opens a file or directory, one component after the other; an empty path is the root itself.
    pub fn open_below(&self, path: &Path) -> io::Result<OwnedFd> {
        let mut opened: Vec<OwnedFd> = Vec::new();
        let (mut pending, mut links) = (Vec::new(), 0);
        push_components(&mut pending, path)?;
        while let Some(name) = pending.pop() {
            if name == ".." {
                opened.pop().ok_or(Errno::XDEV)?;
                continue;
            }
            let parent = opened.last().unwrap_or(&self.folder);
            let seen = rustix::fs::openat(parent, &name, FLAGS | OFlags::PATH, Mode::empty())?;
            match FileType::from_raw_mode(rustix::fs::fstat(&seen)?.st_mode) {
                FileType::Symlink if links >= LINKS_FOLLOWED_MAX => return Err(Errno::LOOP.into()),
                FileType::Symlink => {
                    links += 1;
                    let target = OsString::from_vec(rustix::fs::readlinkat(&seen, "", Vec::new())?.into_bytes());
                    let mut target = Path::new(&target);
                    if target.is_absolute() {
                        let below = self.paths.iter().find_map(|root| target.strip_prefix(root).ok());
                        target = below.ok_or(Errno::XDEV)?;
                        opened.clear();
                    }
                    push_components(&mut pending, target)?;
                }
                FileType::Directory => opened.push(seen),
                // A device may act when it is opened.
                FileType::Fifo | FileType::Socket | FileType::CharacterDevice | FileType::BlockDevice => {
                    return Err(Errno::NXIO.into());
                }
                FileType::RegularFile | FileType::Unknown => {
                    let flags = FLAGS | OFlags::NONBLOCK | OFlags::NOCTTY;
                    let is_last = pending.is_empty();
                    let opened = is_last.then(|| rustix::fs::openat(parent, &name, flags, Mode::empty()));
                    return Ok(opened.ok_or(Errno::NOTDIR)??);
                }
            }
        }
        let folder = opened.last().unwrap_or(&self.folder).as_fd();
        Ok(rustix::fs::openat(folder, ".", FLAGS | OFlags::DIRECTORY, Mode::empty())?)
    }
}

/// The first component comes last.
fn push_components(pending: &mut Vec<OsString>, path: &Path) -> io::Result<()> {
    for component in path.components().rev() {
        match component {
            Component::Normal(name) => pending.push(name.to_owned()),
            Component::ParentDir => pending.push(OsStr::new("..").to_owned()),
            Component::CurDir => {}
            Component::RootDir | Component::Prefix(_) => return Err(Errno::XDEV.into()),
        }
    }
    Ok(())
}

/// Returns true if there is no such file, or another kind of file in its place.
pub(super) fn is_of_path(error: &io::Error) -> bool {
    let errno = error.raw_os_error().map(Errno::from_raw_os_error);
    matches!(errno, Some(Errno::NOENT | Errno::NOTDIR | Errno::LOOP))
}

/// Why [`Root::open_below`] failed.
pub fn classify_error(error: &io::Error) -> (ArtifactErrorReason, String) {
    let (reason, message) = match error.raw_os_error().map(Errno::from_raw_os_error) {
        Some(Errno::NOENT) => (ArtifactErrorReason::Missing, "no such file or directory"),
        Some(Errno::NOTDIR) => (ArtifactErrorReason::Missing, "a component of the path is not a directory"),
        Some(Errno::LOOP) => (ArtifactErrorReason::Irregular, "too many symbolic links"),
        Some(Errno::XDEV) => (ArtifactErrorReason::Irregular, "the path leads outside the task directory"),
        Some(Errno::NXIO | Errno::NODEV) => (ArtifactErrorReason::Irregular, "not a regular file"),
        Some(_) | None => return (ArtifactErrorReason::Unreadable, error.to_string()),
    };
    (reason, message.to_owned())
}
