//! Users of this host that tasks run as: what they own, their processes, and what they leave.

use std::ffi::OsString;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use nix::unistd::{Group, User};
use rustix::fs::{AtFlags, CWD, Dir, FileType, Gid, Mode, OFlags, Uid};

use super::process::PROCESS_POLL_INTERVAL;
use super::remove_tree::remove_tree;
use super::worker_id_lock::WorkerIdLock;
use super::{run_program, work_dir};
use journeyman_domain::limits::{PROCESS_KILL_TIMEOUT, USER_TREE_DEPTH_MAX};

/// Directories that every user can write.
const SHARED_DIRS: [&str; 3] = ["/tmp", "/var/tmp", "/dev/shm"];
/// Becomes another user and executes a program.
const SETPRIV: &str = "/usr/bin/setpriv";

/// A user that the processes of one task at a time run as.
#[derive(Debug, Clone)]
pub struct TaskUser {
    name: String,
    uid: Uid,
    gid: Gid,
    shim: PathBuf,
    /// No other worker of this host ends its processes.
    _lock: Arc<WorkerIdLock>,
}

impl TaskUser {
    /// Its programs are started by a shim from [`install_shim`](super::containment::install_shim).
    ///
    /// # Errors
    ///
    /// There is no such user, it is the superuser, another worker of this host has it, or the host's list of users cannot be read.
    pub fn find(name: &str, shim: &Path) -> io::Result<Self> {
        let other = |what: &str| io::Error::other(format!("user {name}: {what}"));
        let user = User::from_name(name).map_err(|errno| other(&errno.to_string()))?;
        let user = user.ok_or_else(|| other("there is no such user; `journeyman setup users` creates some"))?;
        if user.uid.is_root() {
            return Err(other("tasks must not run as the superuser"));
        }
        let (uid, gid) = (Uid::from_raw(user.uid.as_raw()), Gid::from_raw(user.gid.as_raw()));
        let lock = WorkerIdLock::acquire(&format!("user {uid}")).map_err(|error| other(&error.to_string()))?;
        let lock =
            lock.ok_or_else(|| other("another worker of this host has it; give each worker users of its own"))?;
        Ok(Self { name: name.to_owned(), uid, gid, shim: shim.to_owned(), _lock: Arc::new(lock) })
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    /// The command line that becomes this user, in these further groups, and then the shim. It runs as root at first, where variables
    /// of a payload could load a library.
    pub(super) fn command_line(&self, groups: &[Gid]) -> Vec<OsString> {
        let groups: Vec<_> = groups.iter().map(|group| group.as_raw().to_string()).collect();
        let groups =
            if groups.is_empty() { "--clear-groups".to_owned() } else { format!("--groups={}", groups.join(",")) };
        let (uid, gid) = (self.uid.as_raw(), self.gid.as_raw());
        let arguments = [SETPRIV.into(), format!("--reuid={uid}"), format!("--regid={gid}"), groups, "--".into()];
        arguments.into_iter().map(Into::into).chain([self.shim.clone().into()]).collect()
    }

    /// Gives an open file or directory to the user, without what is in it.
    pub fn give(&self, file: impl AsFd) -> io::Result<()> {
        Ok(rustix::fs::fchown(file, Some(self.uid), Some(self.gid))?)
    }

    /// Gives an entry of a directory to the user: a link itself, a directory without what is in it.
    pub fn give_entry(&self, parent: BorrowedFd<'_>, name: impl rustix::path::Arg) -> rustix::io::Result<()> {
        rustix::fs::chownat(parent, name, Some(self.uid), Some(self.gid), AtFlags::SYMLINK_NOFOLLOW)
    }

    /// Gives a task's directory to the user, and keeps others out of it.
    pub fn give_task_dir(&self, path: &Path) -> io::Result<()> {
        let dir = open_dir(CWD, path)?;
        rustix::fs::fchmod(&dir, Mode::RWXU)?;
        self.give(&dir)
    }

    /// Gives a directory to the user, and what is in it, as far as it belongs to the user `from`: a file that a task has linked to
    /// from elsewhere keeps its owner. Nothing may write there meanwhile. Blocks.
    ///
    /// # Errors
    ///
    /// It is nested too deep, or the file system fails; parts may be given.
    pub fn give_tree(&self, dir: BorrowedFd<'_>, from: u32) -> io::Result<()> {
        if from == self.uid.as_raw() {
            return Ok(());
        }
        self.give_below(dir, from, USER_TREE_DEPTH_MAX)?;
        if rustix::fs::fstat(dir)?.st_uid == from { self.give(dir) } else { Ok(()) }
    }

    fn give_below(&self, dir: BorrowedFd<'_>, owner: u32, depth: usize) -> io::Result<()> {
        for entry in Dir::read_from(dir)? {
            let entry = entry?;
            let name = entry.file_name();
            if matches!(name.to_bytes(), b"." | b"..") {
                continue;
            }
            let stat = rustix::fs::statat(dir, name, AtFlags::SYMLINK_NOFOLLOW)?;
            if stat.st_uid != owner {
                continue;
            }
            let kind = FileType::from_raw_mode(stat.st_mode);
            if !matches!(kind, FileType::Directory | FileType::RegularFile | FileType::Symlink) {
                continue;
            }
            if kind == FileType::Directory {
                let below = depth.checked_sub(1).ok_or_else(|| io::Error::other("directories are nested too deep"))?;
                let inner = rustix::fs::openat(dir, name, DIRECTORY, Mode::empty())?;
                self.give_below(inner.as_fd(), owner, below)?;
            }
            self.give_entry(dir, name)?;
        }
        Ok(())
    }

    /// Kills every process of the user, and removes what it has left in directories that all users share.
    ///
    /// # Errors
    ///
    /// Processes or files of the user are left.
    pub async fn clean(&self) -> io::Result<()> {
        let ended = async {
            while self.clone().blocking(|user| user.has_processes()).await? {
                // The kernel sends it to all at once, so that no process escapes by forking.
                let [program, arguments @ .., _] = &self.command_line(&[])[..] else { break };
                let mut command = tokio::process::Command::new(program);
                command.args(arguments).args(["/bin/sh", "-c", "kill -KILL -1"]);
                run_program::run(command, b"").await?;
                tokio::time::sleep(PROCESS_POLL_INTERVAL).await;
            }
            Ok(())
        };
        let survived = || Err(io::Error::other(format!("processes of user {} survived SIGKILL", self.name)));
        tokio::time::timeout(PROCESS_KILL_TIMEOUT, ended).await.unwrap_or_else(|_| survived())?;
        self.clone().blocking(|user| user.remove_shared_files()).await
    }

    async fn blocking<T: Send + 'static>(self, work: fn(&Self) -> io::Result<T>) -> io::Result<T> {
        tokio::task::spawn_blocking(move || work(&self)).await.map_err(io::Error::other).flatten()
    }

    fn has_processes(&self) -> io::Result<bool> {
        let uid = self.uid.as_raw();
        for entry in std::fs::read_dir("/proc")? {
            let entry = entry?;
            let is_process = entry.file_name().as_encoded_bytes().iter().all(u8::is_ascii_digit);
            // It may end meanwhile.
            let Some(status) =
                is_process.then(|| std::fs::read_to_string(entry.path().join("status"))).and_then(Result::ok)
            else {
                continue;
            };
            let field = |name: &str| status.lines().find_map(|line| line.strip_prefix(name)).unwrap_or_default();
            let is_dead = matches!(field("State:").trim_start().chars().next(), Some('Z' | 'X'));
            if !is_dead && field("Uid:").split_whitespace().any(|word| word.parse() == Ok(uid)) {
                return Ok(true);
            }
        }
        Ok(false)
    }

    fn remove_shared_files(&self) -> io::Result<()> {
        for dir in SHARED_DIRS {
            let Ok(entries) = std::fs::read_dir(dir) else { continue };
            for entry in entries {
                let (entry, uid) = (entry?, self.uid.as_raw());
                let Some(metadata) = entry.metadata().ok().filter(|metadata| metadata.uid() == uid) else { continue };
                if metadata.is_dir() {
                    remove_tree(&entry.path())?;
                } else {
                    std::fs::remove_file(entry.path()).or_else(work_dir::ignore_missing)?;
                }
            }
        }
        Ok(())
    }
}

/// The number of a group; `None` if there is no such group.
pub fn find_group(name: &str) -> io::Result<Option<Gid>> {
    Ok(Group::from_name(name).map_err(io::Error::from)?.map(|group| Gid::from_raw(group.gid.as_raw())))
}

const DIRECTORY: OFlags = OFlags::RDONLY.union(OFlags::DIRECTORY).union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);

fn open_dir(parent: BorrowedFd<'_>, path: &Path) -> io::Result<OwnedFd> {
    Ok(rustix::fs::openat(parent, path, DIRECTORY, Mode::empty())?)
}
