//! Folders and log files of tasks that have ended, kept for the next ones.
//!
//! Making and removing files is among the slowest things that can be asked of a file system. ext4 gives the number of a
//! file that was removed to no other for some minutes, and looks through all of those whenever it needs one; where tasks
//! are short, that soon takes longer than the tasks. So a folder that a task has left as it was when it was new, and a log
//! file that nobody has open, go to the next task.
//!
//! Nothing here judges who may still use a folder: whoever keeps one has seen the end of its task's processes.

use std::fs::File;
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::fs::{AtFlags, CWD, StatxAttributes, StatxFlags, statx};
use rustix::io::Errno;

use super::work_dir::WorkDirLock;
use crate::limits::{SPARE_LOG_BYTES_MAX, SPARES_MAX};

/// Where spare folders and files lie, within the folder of the tasks. No task's folder is called so.
const PLACE: &str = "spare";

/// What is kept. Clones share it; with the last one it is removed.
#[derive(Debug, Clone)]
pub(crate) struct Spares {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    hold: WorkDirLock,
    place: PathBuf,
    most: usize,
    kept: Mutex<Kept>,
}

#[derive(Debug, Default)]
struct Kept {
    folders: Vec<PathBuf>,
    /// Open, for to close a file that was emptied makes ext4 write it out.
    logs: Vec<Log>,
    /// What a folder is like that was just made.
    new: Option<About>,
    number: u64,
}

#[derive(Debug)]
struct Log {
    path: PathBuf,
    file: File,
}

/// All that can be told of a folder but what it is called, when it was changed, and what is in it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct About {
    mode: u16,
    owner: [u32; 2],
    links: u32,
    size: u64,
    attributes: StatxAttributes,
    device: [u32; 2],
}

impl About {
    fn of(folder: &Path) -> io::Result<Self> {
        let about = statx(CWD, folder, AtFlags::SYMLINK_NOFOLLOW, StatxFlags::BASIC_STATS)?;
        Ok(Self {
            mode: about.stx_mode,
            owner: [about.stx_uid, about.stx_gid],
            links: about.stx_nlink,
            size: about.stx_size,
            attributes: about.stx_attributes,
            device: [about.stx_dev_major, about.stx_dev_minor],
        })
    }
}

/// Lists of who may enter, labels and the like.
fn has_extras(path: &Path) -> io::Result<bool> {
    match rustix::fs::llistxattr_query(path) {
        Ok(bytes) => Ok(bytes > 0),
        Err(Errno::NOTSUP) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

impl Inner {
    fn kept(&self) -> MutexGuard<'_, Kept> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes a folder or a file in under a name of its own.
    fn take_in(&self, path: &Path) -> io::Result<PathBuf> {
        let mut kept = self.kept();
        kept.number += 1;
        let place = self.place.join(kept.number.to_string());
        drop(kept);
        match std::fs::rename(path, &place) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                super::work_dir::create_task_dir(&self.place)?;
                std::fs::rename(path, &place)?;
            }
            renamed => renamed?,
        }
        Ok(place)
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        let kept = self.kept.get_mut().unwrap_or_else(PoisonError::into_inner);
        if kept.number > 0 && self.hold.verify().is_ok() {
            // Where that fails, the next start of a worker in this folder does it.
            drop(super::work_dir::remove_tree(&self.place));
        }
    }
}

impl Spares {
    /// Keeps at most as many folders, and as many files, as tasks run at once. `tasks` is the folder that theirs are in, and
    /// `hold` tells whether it is still this worker's.
    pub(crate) fn new(tasks: &Path, hold: WorkDirLock, capacity: u32) -> Self {
        let most = usize::try_from(capacity).map_or(SPARES_MAX, |capacity| capacity.min(SPARES_MAX));
        Self { inner: Arc::new(Inner { hold, place: tasks.join(PLACE), most, kept: Mutex::default() }) }
    }

    /// Whether what is found at the tasks' paths is another worker's by now, or nobody's.
    pub(crate) fn lost(&self) -> bool {
        self.inner.hold.verify().is_err()
    }

    /// Makes an empty folder, or gives one its name that was kept.
    ///
    /// # Errors
    ///
    /// Where none can be made.
    pub(crate) fn folder(&self, path: &Path) -> io::Result<()> {
        let spare = self.inner.kept().folders.pop();
        if let Some(spare) = spare {
            if std::fs::rename(&spare, path).is_ok() {
                return Ok(());
            }
            drop(super::work_dir::remove_tree(&spare));
        }
        super::work_dir::create_task_dir(path)?;
        let known = self.inner.kept().new.is_some();
        if !known && let Ok(about) = About::of(path) {
            self.inner.kept().new = Some(about);
        }
        Ok(())
    }

    /// Keeps a task's folder if it is as it was when it was new, and removes it otherwise.
    ///
    /// # Errors
    ///
    /// Where it cannot be removed.
    pub(crate) fn keep_folder(&self, path: &Path) -> io::Result<()> {
        let room = self.inner.kept().folders.len() < self.inner.most;
        if room
            && self.as_new(path).unwrap_or_default()
            && let Ok(place) = self.inner.take_in(path)
        {
            let mut kept = self.inner.kept();
            if kept.folders.len() < self.inner.most {
                kept.folders.push(place);
                return Ok(());
            }
            drop(kept);
            return super::work_dir::remove_tree(&place);
        }
        super::work_dir::remove_tree(path)
    }

    fn as_new(&self, path: &Path) -> io::Result<bool> {
        let new = self.inner.kept().new;
        Ok(new == Some(About::of(path)?) && !has_extras(path)? && std::fs::read_dir(path)?.next().is_none())
    }

    /// A kept log file, under its new name. What is there is replaced, and no symbolic link is followed.
    pub(crate) fn log(&self, path: &Path) -> Option<File> {
        let Log { path: spare, file } = self.inner.kept().logs.pop()?;
        if std::fs::rename(&spare, path).is_ok() {
            return Some(file);
        }
        drop(std::fs::remove_file(&spare));
        None
    }

    /// Keeps a log file that nobody else has open, if it is small and nobody gave it another name, and removes it
    /// otherwise.
    ///
    /// # Errors
    ///
    /// Where it cannot be removed.
    pub(crate) fn keep_log(&self, file: File, path: &Path) -> io::Result<()> {
        let room = self.inner.kept().logs.len() < self.inner.most;
        if room
            && Self::is_plain(&file).unwrap_or_default()
            && file.set_len(0).is_ok()
            && let Ok(place) = self.inner.take_in(path)
        {
            let mut kept = self.inner.kept();
            if kept.logs.len() < self.inner.most {
                kept.logs.push(Log { path: place, file });
                return Ok(());
            }
            drop(kept);
            return std::fs::remove_file(place);
        }
        match std::fs::remove_file(path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            Ok(()) | Err(_) => Ok(()),
        }
    }

    fn is_plain(file: &File) -> io::Result<bool> {
        let about = file.metadata()?;
        Ok(about.is_file()
            && about.nlink() == 1
            && about.len() <= SPARE_LOG_BYTES_MAX
            && about.mode() & 0o7777 == 0o600)
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;
    use std::os::unix::fs::PermissionsExt as _;

    use super::super::work_dir::WorkDir;
    use super::*;

    struct Bench {
        _home: tempfile::TempDir,
        work: WorkDir,
        spares: Spares,
    }

    impl Bench {
        fn of(capacity: u32) -> Self {
            let home = tempfile::tempdir().unwrap();
            let work = WorkDir::acquire(home.path()).unwrap();
            work.remove_task_dirs().unwrap();
            let spares = Spares::new(work.tasks_dir(), work.work_dir_lock().unwrap(), capacity);
            Self { _home: home, work, spares }
        }

        fn path(&self, name: &str) -> PathBuf {
            self.work.tasks_dir().join(name)
        }

        fn folder(&self, name: &str) -> u64 {
            self.spares.folder(&self.path(name)).unwrap();
            self.path(name).metadata().unwrap().ino()
        }

        fn log(&self, name: &str) -> File {
            let mut options = File::options();
            options.read(true).write(true).create_new(true);
            std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
            options.open(self.path(name)).unwrap()
        }
    }

    #[test]
    fn a_folder_that_was_left_as_it_was_goes_to_the_next_task() {
        let bench = Bench::of(4);
        let first = bench.folder("first");
        std::fs::write(bench.path("first").join("file"), "x").unwrap();
        std::fs::remove_file(bench.path("first").join("file")).unwrap();
        bench.spares.keep_folder(&bench.path("first")).unwrap();
        assert!(!bench.path("first").exists());
        assert_eq!(bench.folder("second"), first);
        assert_eq!(std::fs::read_dir(bench.path("second")).unwrap().count(), 0);
        assert_ne!(bench.folder("third"), first);
    }

    #[test]
    fn a_folder_that_was_changed_in_any_way_is_removed() {
        let bench = Bench::of(4);
        type Change = (&'static str, fn(&Path));
        let changes: [Change; 5] = [
            ("something is in it", |path| std::fs::write(path.join("file"), "x").unwrap()),
            ("other permissions", |path| {
                std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o777)).unwrap();
            }),
            ("an attribute", |path| {
                let set = rustix::fs::setxattr(path, "user.x", b"1", rustix::fs::XattrFlags::empty());
                if set == Err(Errno::NOTSUP) {
                    std::fs::write(path.join("file"), "x").unwrap();
                }
            }),
            ("another in its place", |path| {
                std::fs::remove_dir(path).unwrap();
                std::os::unix::fs::symlink("/tmp", path).unwrap();
            }),
            ("a folder below it", |path| std::fs::create_dir(path.join("below")).unwrap()),
        ];
        for (what, change) in changes {
            bench.folder("task");
            change(&bench.path("task"));
            let kept = bench.spares.keep_folder(&bench.path("task"));
            assert!(bench.spares.inner.kept().folders.is_empty(), "{what}");
            // A link in a folder's place is nothing that a folder's removal takes away.
            if kept.is_err() {
                std::fs::remove_file(bench.path("task")).unwrap();
            }
            assert!(bench.path("task").symlink_metadata().is_err(), "{what}");
        }
    }

    #[test]
    fn a_log_file_goes_to_the_next_log_and_is_empty() {
        let bench = Bench::of(4);
        let mut file = bench.log("first.log");
        file.write_all(b"what nobody else may read").unwrap();
        let number = file.metadata().unwrap().ino();
        bench.spares.keep_log(file, &bench.path("first.log")).unwrap();
        assert!(!bench.path("first.log").exists());
        assert!(bench.spares.log(&bench.path("second.log")).is_some());
        let second = bench.path("second.log").metadata().unwrap();
        assert_eq!((second.ino(), second.len()), (number, 0));
        assert!(bench.spares.log(&bench.path("third.log")).is_none());
    }

    #[test]
    fn a_log_file_that_is_large_or_has_another_name_is_removed() {
        let bench = Bench::of(4);
        let large = bench.log("large.log");
        large.set_len(SPARE_LOG_BYTES_MAX + 1).unwrap();
        bench.spares.keep_log(large, &bench.path("large.log")).unwrap();
        let linked = bench.log("linked.log");
        std::fs::hard_link(bench.path("linked.log"), bench.path("other")).unwrap();
        bench.spares.keep_log(linked, &bench.path("linked.log")).unwrap();
        assert!(bench.spares.inner.kept().logs.is_empty());
        assert!(!bench.path("large.log").exists() && !bench.path("linked.log").exists());
    }

    #[test]
    fn no_more_is_kept_than_tasks_run_at_once_and_nothing_when_the_worker_ends() {
        let bench = Bench::of(1);
        for name in ["one", "two"] {
            bench.folder(name);
        }
        let logs = ["one.log", "two.log"].map(|name| (bench.log(name), bench.path(name)));
        for (file, path) in logs {
            bench.spares.keep_log(file, &path).unwrap();
        }
        for name in ["one", "two"] {
            bench.spares.keep_folder(&bench.path(name)).unwrap();
        }
        assert_eq!(std::fs::read_dir(bench.path(PLACE)).unwrap().count(), 2);
        let Bench { _home, work, spares } = bench;
        drop(spares);
        assert_eq!(std::fs::read_dir(work.tasks_dir()).unwrap().count(), 0);
    }

    #[test]
    fn what_the_next_worker_keeps_in_a_folder_that_was_replaced_is_not_removed() {
        let bench = Bench::of(1);
        bench.folder("one");
        bench.spares.keep_folder(&bench.path("one")).unwrap();
        let Bench { _home: home, work, spares } = bench;
        let clone = spares.clone();
        assert!(!clone.lost());
        std::fs::remove_dir_all(home.path()).unwrap();
        let next = WorkDir::acquire(home.path()).unwrap();
        next.remove_task_dirs().unwrap();
        std::fs::create_dir_all(work.tasks_dir().join(PLACE).join("1")).unwrap();
        assert!(clone.lost());
        drop((spares, clone));
        assert!(next.tasks_dir().join(PLACE).join("1").exists());
    }
}
