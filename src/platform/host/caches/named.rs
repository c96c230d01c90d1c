//! Directories that have a name and that tasks write, one task at a time.
//!
//! Tasks that run at the same time use several directories of one name, so that none waits for another. A directory is called after
//! its name and the time at which it was created, which is all that is recorded of it.

use std::io;
use std::os::fd::AsFd as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rustix::fs::{CWD, RenameFlags};
use rustix::io::Errno;

use super::super::beneath::{self, Missing};
use super::super::clock::stamp;
use super::super::task_user::TaskUser;
use super::{CacheStore, NAMED_DIR, USED_NOW, entries, file_name_of};

/// A named directory that a task uses. Dropping it leaves the directory to the task, with whose directory it goes.
#[derive(Debug)]
pub struct HeldCache {
    store: Arc<CacheStore>,
    entry: String,
    workdir: PathBuf,
    path: PathBuf,
}

/// Says whether a directory was there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Found {
    Kept,
    New,
}

impl CacheStore {
    /// Moves the directory of this name that was used last to `path` below `workdir`, or creates one there, and gives it to the task's
    /// user. Blocks.
    ///
    /// # Errors
    ///
    /// `EEXIST` or `ENOTEMPTY` if there is something at the path already.
    pub fn take_named(
        self: &Arc<Self>,
        name: &str,
        workdir: &Path,
        path: &Path,
        user: Option<&TaskUser>,
    ) -> io::Result<(HeldCache, Found)> {
        let dir = self.dir(NAMED_DIR)?;
        let (parent, target) = beneath::open_parent(workdir, path, Missing::Create(user))?;
        let held =
            |entry| HeldCache { store: Arc::clone(self), entry, workdir: workdir.to_owned(), path: path.to_owned() };
        for found in entries(&dir)? {
            let entry = found.path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            if !is_of(&entry, name) {
                continue;
            }
            match rustix::fs::renameat_with(CWD, &found.path, &parent, target, RenameFlags::NOREPLACE) {
                Ok(()) => {
                    let given = user.map_or(Ok(()), |user| {
                        let dir = beneath::open_dir(workdir, path, Missing::Fail)?;
                        let owner = rustix::fs::fstat(&dir)?.st_uid;
                        user.give_tree(dir.as_fd(), owner)
                    });
                    let Err(error) = given else { return Ok((held(entry), Found::Kept)) };
                    tracing::warn!(cache = name, %error, "a cache cannot be given to its next user, and is removed");
                    rustix::fs::renameat(&parent, target, CWD, &found.path)?;
                    self.remove(&found.path)?;
                }
                // Another task was faster.
                Err(Errno::NOENT) => {}
                Err(error) => return Err(error.into()),
            }
        }
        rustix::fs::mkdirat(&parent, target, rustix::fs::Mode::RWXU)?;
        user.map_or(Ok(()), |user| user.give(beneath::open_dir(workdir, path, Missing::Fail)?))?;
        Ok((held(new_entry(name)), Found::New))
    }

    /// Removes the directories of this name that were created before a time and are not in use, and says how many. Blocks.
    pub fn purge_named(&self, name: &str, before: SystemTime) -> io::Result<usize> {
        let mut removed = 0;
        for found in entries(&self.dir(NAMED_DIR)?)? {
            let entry = found.path.file_name().unwrap_or_default().to_string_lossy();
            if is_of(&entry, name) && created_at(&entry).is_none_or(|created| created < before) {
                self.remove(&found.path)?;
                removed += 1;
            }
        }
        Ok(removed)
    }
}

impl HeldCache {
    /// Moves the directory back, for the next task. Its processes must have ended. Blocks.
    ///
    /// # Errors
    ///
    /// The task has removed it, or has put something else in its place.
    pub fn give_back(self) -> io::Result<()> {
        let (parent, name) = beneath::open_parent(&self.workdir, &self.path, Missing::Fail)?;
        if !beneath::is_dir(parent.as_fd(), name) {
            return Err(Errno::NOTDIR.into());
        }
        let dir = self.store.dir(NAMED_DIR)?;
        rustix::fs::utimensat(&parent, name, &USED_NOW, rustix::fs::AtFlags::SYMLINK_NOFOLLOW)?;
        rustix::fs::renameat_with(&parent, name, CWD, dir.join(&self.entry), RenameFlags::NOREPLACE)?;
        self.store.make_room(0)
    }

    /// The path below the task's directory.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

fn new_entry(name: &str) -> String {
    format!("{}-{}-{}", file_name_of(name), stamp().0, uuid::Uuid::new_v4().simple())
}

fn is_of(entry: &str, name: &str) -> bool {
    entry.strip_prefix(&file_name_of(name)).is_some_and(|rest| rest.starts_with('-'))
}

fn created_at(entry: &str) -> Option<SystemTime> {
    UNIX_EPOCH.checked_add(Duration::from_millis(entry.split('-').nth(1)?.parse().ok()?))
}
