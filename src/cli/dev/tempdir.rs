//! The folder that `dev` keeps everything in. It goes with the process; that of one that was killed goes with the next `dev`.

use std::fs;
use std::io;
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};

use crate::cli::exit::{Exit, Failure};
use crate::cli::output;
use crate::host::file_lock::FileLock;
use crate::host::work_dir;
use crate::limits::{DEV_TEMPDIR_UNNAMED_AGE_MAX, DEV_TEMPDIRS_CLEANED_MAX};
use crate::worker::kill_leftovers_in;

const PREFIX: &str = "journeyman-dev-";
/// What stands before that until it is locked.
const UNLOCKED_PREFIX: &str = ".";
/// The file in it that is locked for as long as the process lives.
const LOCK: &str = "dev.lock";
/// Where in it its worker works, or each of its workers in a folder of its own.
pub(super) const WORK_DIR: &str = "work";

/// A folder that goes with this process.
pub(super) struct TempDir {
    path: PathBuf,
    _lock: FileLock,
}

impl TempDir {
    /// Makes one, and ends what others have left whose process was killed.
    ///
    /// # Errors
    ///
    /// [`Exit::HostUnusable`] where it cannot be made.
    pub(super) fn create() -> Result<Self, Failure> {
        let home = std::env::temp_dir();
        remove_stale(&home);
        let path = home.join(format!("{PREFIX}{}", uuid::Uuid::new_v4().simple()));
        let failed = |error| Failure::new(Exit::HostUnusable, format!("cannot make {}: {error}", path.display()));
        let lock = create_locked(&home, &path).map_err(failed)?;
        Ok(Self { path, _lock: lock })
    }

    /// Where it is.
    pub(super) fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for TempDir {
    fn drop(&mut self) {
        if let Err(error) = work_dir::remove_tree(&self.path) {
            tracing::warn!(path = %self.path.display(), %error, "this folder could not be removed");
        }
    }
}

/// It has its name once it is locked, so that nobody takes it for one that was left.
fn create_locked(home: &Path, path: &Path) -> io::Result<FileLock> {
    let unnamed = home.join(format!("{UNLOCKED_PREFIX}{PREFIX}{}", uuid::Uuid::new_v4().simple()));
    fs::DirBuilder::new().mode(0o700).create(&unnamed)?;
    let named = (|| {
        let lock = FileLock::acquire(&unnamed.join(LOCK))?.ok_or(io::ErrorKind::ResourceBusy)?;
        fs::rename(&unnamed, path)?;
        Ok(lock)
    })();
    if named.is_err() {
        drop(fs::remove_dir_all(&unnamed));
    }
    named
}

/// Ends what is left of every `dev` of this user that was killed.
fn remove_stale(home: &Path) {
    let entries: Vec<fs::DirEntry> = fs::read_dir(home).into_iter().flatten().flatten().collect();
    let called = |entry: &&fs::DirEntry, prefix: &str| {
        entry.file_name().to_string_lossy().strip_prefix(prefix).is_some_and(|name| name.starts_with(PREFIX))
    };
    for entry in entries.iter().filter(|entry| called(entry, UNLOCKED_PREFIX) && is_own(entry) && is_stale(entry)) {
        // Nothing but the lock can be in it.
        drop(fs::remove_dir_all(entry.path()));
    }
    let rooms = entries.iter().filter(|entry| called(entry, "") && is_own(entry));
    let mut left = 0;
    for room in rooms.map(fs::DirEntry::path) {
        if left == DEV_TEMPDIRS_CLEANED_MAX {
            break;
        }
        let ended = clean_up(&room);
        left += usize::from(!matches!(ended, Ok(None)));
        match ended {
            Ok(None) => {}
            Ok(Some(tasks)) => {
                let tasks = match tasks {
                    0 => String::new(),
                    1 => ", and a task that still ran is ended".to_owned(),
                    many => format!(", and {many} tasks that still ran are ended"),
                };
                output::print_stderr(&format!("note: {} of a `dev` that was killed is removed{tasks}", room.display()));
            }
            Err(error) => output::print_stderr(&format!(
                "note: {} of a `dev` that was killed stays: {error}; end what is in it, and remove it",
                room.display()
            )),
        }
    }
}

/// Nobody else may have written in it.
fn is_own(entry: &fs::DirEntry) -> bool {
    let own = rustix::process::geteuid().as_raw();
    entry.metadata().is_ok_and(|about| about.is_dir() && about.uid() == own && about.mode() & 0o077 == 0)
}

/// Whether its process cannot still be at making it.
fn is_stale(entry: &fs::DirEntry) -> bool {
    let made = entry.metadata().and_then(|about| about.modified());
    made.is_ok_and(|made| made.elapsed().is_ok_and(|age| age > DEV_TEMPDIR_UNNAMED_AGE_MAX))
}

/// Ends the payloads of one, and removes it. Answers how many tasks had any; `None` where its `dev` lives.
fn clean_up(room: &Path) -> io::Result<Option<usize>> {
    let Some(_lock) = FileLock::try_acquire_existing(&room.join(LOCK))? else { return Ok(None) };
    let mut ended = 0;
    let work = room.join(WORK_DIR);
    let of_groups = fs::read_dir(&work).into_iter().flatten().flatten().map(|entry| entry.path());
    for work in std::iter::once(work).chain(of_groups).filter(|work| work_dir::is_work_dir(work)) {
        // The workers of a controller that was killed live on.
        let lives =
            || io::Error::new(io::ErrorKind::ResourceBusy, format!("a worker still lives in {}", work.display()));
        let tasks = kill_leftovers_in(&work)?.ok_or_else(lives)?;
        ended += tasks;
    }
    work_dir::remove_tree(room)?;
    Ok(Some(ended))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_dev_has_left_that_was_killed_before_it_had_a_name_is_removed_an_hour_later() {
        let home = tempfile::tempdir().unwrap();
        let [old, new] = ["old", "new"].map(|name| home.path().join(format!("{UNLOCKED_PREFIX}{PREFIX}{name}")));
        for path in [&old, &new] {
            fs::DirBuilder::new().mode(0o700).create(path).unwrap();
            fs::write(path.join(LOCK), "").unwrap();
        }
        let then = old.metadata().unwrap().modified().unwrap() - DEV_TEMPDIR_UNNAMED_AGE_MAX * 2;
        fs::File::open(&old).unwrap().set_modified(then).unwrap();
        remove_stale(home.path());
        assert_eq!((old.exists(), new.exists()), (false, true));
    }
}
