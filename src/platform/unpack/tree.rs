//! The directory that entries of an archive are placed in.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read, Write as _};
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::path::Path;

use rustix::fs::{AtFlags, FileType, Mode, OFlags, Timespec, Timestamps};
use rustix::io::Errno;

use super::UnpackLimits;
use super::decoders::{BUFFER_BYTES, Fault, broken, refused};
use crate::host::beneath::{self, Missing};
use crate::host::task_user::TaskUser;

/// Linux's `PATH_MAX`.
pub(super) const NAME_BYTES_MAX: usize = 4095;
/// Linux's `NAME_MAX`.
const COMPONENT_BYTES_MAX: usize = 255;
const DEPTH_MAX: usize = 128;
/// The names of all directories are kept until their modes are set.
const DIRECTORY_NAMES_BYTES_MAX: usize = 64 * 1024 * 1024;
const FOLDER: OFlags = OFlags::PATH.union(OFlags::DIRECTORY).union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);

pub(super) enum Content<'a> {
    Directory,
    File { from: &'a mut dyn Read, size: u64 },
    Symlink(Vec<u8>),
    HardLink(Vec<u8>),
}

struct Attributes {
    mode: Mode,
    times: Timestamps,
}

/// The directory that entries are placed in.
pub(super) struct Tree<'a> {
    root: OwnedFd,
    /// Owns what is created.
    user: Option<&'a TaskUser>,
    limits: &'a UnpackLimits,
    budget: Budget,
    entries: u64,
    /// The parent of the last entry. Directories are never replaced, so it stays valid.
    parent: Option<(Vec<u8>, OwnedFd)>,
    /// Set last: an entry may lie in a directory that is read-only.
    directories: BTreeMap<Vec<u8>, Attributes>,
    directory_names_bytes: usize,
}

impl<'a> Tree<'a> {
    pub(super) fn open(root: &Path, user: Option<&'a TaskUser>, limits: &'a UnpackLimits) -> Result<Self, Fault> {
        let root = rustix::fs::open(root, FOLDER, Mode::empty())?;
        let (budget, directories) = (Budget::new(limits), BTreeMap::new());
        Ok(Self { root, user, limits, budget, entries: 0, parent: None, directories, directory_names_bytes: 0 })
    }

    pub(super) fn count_entry(&mut self) -> Result<(), Fault> {
        self.entries += 1;
        if self.entries > self.limits.entries_max {
            return refused(format!("the archive has more than {} entries", self.limits.entries_max));
        }
        Ok(())
    }

    pub(super) fn place(
        &mut self,
        name: &[u8],
        content: Content<'_>,
        mode: u32,
        mtime: Option<i64>,
    ) -> Result<(), Fault> {
        self.count_entry()?;
        let components = split_name(name)?;
        let Some((&last, parents)) = components.split_last() else {
            // Most archives of a directory begin with "./".
            return if matches!(content, Content::Directory) {
                Ok(())
            } else {
                refused("an entry that is no directory has no name")
            };
        };
        let key = parents.join(&b'/');
        let parent = match self.parent.take() {
            Some((cached, folder)) if cached == key => folder,
            _ => self.open_folder(parents, Missing::Create(self.user))?,
        };
        let attributes = Attributes { mode: Mode::from_raw_mode(mode & 0o777), times: timestamps(mtime) };
        match content {
            Content::Directory => self.place_directory(&parent, &components, attributes)?,
            Content::File { from, size } => self.place_file(&parent, last, from, size, &attributes)?,
            Content::Symlink(target) => {
                check_symlink(&target, parents.len())?;
                replace(&parent, last, &mut || rustix::fs::symlinkat(target.as_slice(), &parent, last))?;
                give(self.user, parent.as_fd(), last)?;
                rustix::fs::utimensat(&parent, last, &attributes.times, AtFlags::SYMLINK_NOFOLLOW)?;
            }
            Content::HardLink(target) => self.place_hard_link(&parent, &components, &target)?,
        }
        self.parent = Some((key, parent));
        Ok(())
    }

    fn place_directory(&mut self, parent: &OwnedFd, path: &[&[u8]], attributes: Attributes) -> Result<(), Fault> {
        let last = path.last().copied().unwrap_or_default();
        if enter(parent.as_fd(), last, Missing::Create(self.user)).is_err() {
            replace(parent, last, &mut || rustix::fs::mkdirat(parent, last, Mode::RWXU))?;
            give(self.user, parent.as_fd(), last)?;
        }
        let name = path.join(&b'/');
        self.directory_names_bytes += name.len();
        if self.directory_names_bytes > DIRECTORY_NAMES_BYTES_MAX {
            return refused("the archive has too many directories");
        }
        self.directories.insert(name, attributes);
        Ok(())
    }

    fn place_file(
        &mut self,
        parent: &OwnedFd,
        last: &[u8],
        from: &mut dyn Read,
        size: u64,
        attributes: &Attributes,
    ) -> Result<(), Fault> {
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let open = &mut || rustix::fs::openat(parent, last, flags, Mode::RUSR | Mode::WUSR);
        let mut file = File::from(replace(parent, last, open)?);
        if copy(from, &mut file, &mut self.budget)? != size {
            return Err(Fault::Archive);
        }
        give(self.user, parent.as_fd(), last)?;
        rustix::fs::fchmod(&file, attributes.mode)?;
        Ok(rustix::fs::futimens(&file, &attributes.times)?)
    }

    /// Only files are linked to: a symbolic link may lead outside from another directory.
    fn place_hard_link(&self, parent: &OwnedFd, path: &[&[u8]], target: &[u8]) -> Result<(), Fault> {
        let target = split_name(target)?;
        let (Some((&name, folder)), Some(&last)) = (target.split_last(), path.last()) else {
            return refused("it links to no name");
        };
        let folder = self.open_folder(folder, Missing::Fail)?;
        let seen = rustix::fs::statat(&folder, name, AtFlags::SYMLINK_NOFOLLOW);
        let seen = seen.map_err(|errno| match errno {
            Errno::NOENT => Fault::Refused("it links to a file that does not exist".to_owned()),
            _ => errno.into(),
        })?;
        if FileType::from_raw_mode(seen.st_mode) != FileType::RegularFile {
            return refused("it is a hard link to something else than a file");
        }
        if target == path {
            return Ok(());
        }
        replace(parent, last, &mut || rustix::fs::linkat(&folder, name, parent, last, AtFlags::empty()))
    }

    fn open_folder(&self, path: &[&[u8]], missing: Missing<'_>) -> Result<OwnedFd, Fault> {
        let mut folder = rustix::fs::openat(&self.root, ".", FOLDER, Mode::empty())?;
        for name in path {
            folder = enter(folder.as_fd(), name, missing)?;
        }
        Ok(folder)
    }

    pub(super) fn finish(mut self) -> Result<(), Fault> {
        // The last in order is the deepest.
        while let Some((name, attributes)) = self.directories.pop_last() {
            let folder = self.open_folder(&split_name(&name)?, Missing::Fail)?;
            let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
            let folder = rustix::fs::openat(&folder, ".", flags, Mode::empty())?;
            rustix::fs::fchmod(&folder, attributes.mode)?;
            rustix::fs::futimens(&folder, &attributes.times)?;
        }
        Ok(())
    }
}

fn give(user: Option<&TaskUser>, parent: BorrowedFd<'_>, name: &[u8]) -> rustix::io::Result<()> {
    user.map_or(Ok(()), |user| user.give_entry(parent, name))
}

fn enter(parent: BorrowedFd<'_>, name: &[u8], missing: Missing<'_>) -> Result<OwnedFd, Fault> {
    beneath::enter(parent, name, missing).map_err(|errno| match errno {
        Errno::NOTDIR | Errno::LOOP => Fault::Refused("its path leads through a link or a file".to_owned()),
        Errno::NOENT => Fault::Refused("it links to a file that does not exist".to_owned()),
        _ => errno.into(),
    })
}

/// Makes something in the place of what has the name, unless that is a directory.
fn replace<T>(parent: &OwnedFd, name: &[u8], make: &mut dyn FnMut() -> rustix::io::Result<T>) -> Result<T, Fault> {
    match make() {
        Err(Errno::EXIST) => match rustix::fs::unlinkat(parent, name, AtFlags::empty()) {
            Ok(()) => Ok(make()?),
            Err(Errno::ISDIR) => refused("a directory has the same name"),
            Err(errno) => Err(errno.into()),
        },
        made => Ok(made?),
    }
}

fn split_name(name: &[u8]) -> Result<Vec<&[u8]>, Fault> {
    let components: Vec<_> = name.split(|&byte| byte == b'/').filter(|part| !matches!(*part, b"" | b".")).collect();
    let why = if name.starts_with(b"/") {
        "its path is absolute"
    } else if name.contains(&0) {
        "its path has a NUL byte"
    } else if name.len() > NAME_BYTES_MAX || components.len() > DEPTH_MAX {
        "its path is too long"
    } else if components.contains(&b"..".as_slice()) {
        "its path has '..'"
    } else if components.iter().any(|part| part.len() > COMPONENT_BYTES_MAX) {
        "a component of its path is too long"
    } else {
        return Ok(components);
    };
    refused(why)
}

/// `..` is allowed at the start only: behind another component, which may be a link, it may lead outside.
fn check_symlink(target: &[u8], depth: usize) -> Result<(), Fault> {
    let mut parts = target.split(|&byte| byte == b'/').filter(|part| !matches!(*part, b"" | b".")).peekable();
    let mut up = 0;
    while parts.next_if_eq(&b"..".as_slice()).is_some() {
        up += 1;
    }
    if target.is_empty() || target.contains(&0) || target.len() > NAME_BYTES_MAX {
        return refused("the target of the link is empty, too long or not a path");
    }
    if target.starts_with(b"/") || up > depth || parts.any(|part| part == b"..") {
        return refused("it links to a path that may lead outside");
    }
    Ok(())
}

fn timestamps(mtime: Option<i64>) -> Timestamps {
    let omit = Timespec { tv_sec: 0, tv_nsec: rustix::fs::UTIME_OMIT };
    Timestamps { last_access: omit, last_modification: mtime.map_or(omit, |tv_sec| Timespec { tv_sec, tv_nsec: 0 }) }
}

pub(super) struct Budget {
    bytes_left: u64,
    bytes_max: u64,
}

impl Budget {
    pub(super) fn new(limits: &UnpackLimits) -> Self {
        Self { bytes_left: limits.bytes_max, bytes_max: limits.bytes_max }
    }
}

pub(super) fn copy(from: &mut dyn Read, to: &mut File, budget: &mut Budget) -> Result<u64, Fault> {
    let (mut buffer, mut copied) = (vec![0; BUFFER_BYTES], 0);
    loop {
        let bytes = match from.read(&mut buffer) {
            Ok(0) => return Ok(copied),
            Ok(bytes) => bytes,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => return Err(broken(error)),
        };
        let Some(left) = budget.bytes_left.checked_sub(bytes as u64) else {
            return refused(format!("the content is larger than {} bytes", budget.bytes_max));
        };
        budget.bytes_left = left;
        copied += bytes as u64;
        to.write_all(&buffer[..bytes]).map_err(Fault::Host)?;
    }
}
