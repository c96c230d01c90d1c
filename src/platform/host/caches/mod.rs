//! What a worker keeps from one task to the next: content that it downloaded, and directories with a name.
//!
//! Entries appear and go by a rename, so a worker that is killed leaves none half made. A named directory in use is not here:
//! it was moved into the directory of its task, and goes with that unless it is moved back.

mod downloads;
mod named;

use std::collections::HashMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock, Weak};
use std::time::SystemTime;

use parking_lot::Mutex;
use rustix::fs::{Timespec, Timestamps, UTIME_NOW, UTIME_OMIT};
use sha2::{Digest as _, Sha256};

use super::remove_tree::remove_tree;
use super::{resources, work_dir};

pub use downloads::NewDownload;
pub use named::{Found, HeldCache};

const DOWNLOADS_DIR: &str = "downloads";
const NAMED_DIR: &str = "named";
/// What is being removed, and what is not complete. A start clears it.
const TEMPORARY_DIR: &str = "temporary";

/// Entries are removed in the order in which they were used last.
const USED_NOW: Timestamps = Timestamps {
    last_access: Timespec { tv_sec: 0, tv_nsec: UTIME_OMIT },
    last_modification: Timespec { tv_sec: 0, tv_nsec: UTIME_NOW },
};

/// How much is kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CacheLimits {
    /// Bytes of all downloads together.
    pub downloads_bytes_max: u64,
    /// Free bytes of the disk below which entries are removed.
    pub free_bytes_min: u64,
}

/// The caches of a worker, below its work directory.
#[derive(Debug)]
pub struct CacheStore {
    dir: PathBuf,
    limits: CacheLimits,
    created: OnceLock<Result<(), String>>,
    in_progress: Mutex<HashMap<String, Weak<tokio::sync::Mutex<()>>>>,
}

/// An entry that may be removed.
struct Entry {
    path: PathBuf,
    bytes: u64,
    used_at: SystemTime,
}

impl CacheStore {
    /// Caches below `dir`, which is created when it is first used.
    pub fn new(dir: PathBuf, limits: CacheLimits) -> Arc<Self> {
        Arc::new(Self { dir, limits, created: OnceLock::new(), in_progress: Mutex::default() })
    }

    pub const fn limits(&self) -> &CacheLimits {
        &self.limits
    }

    /// The directory on whose disk everything is.
    pub fn path(&self) -> &Path {
        &self.dir
    }

    /// A directory of the store. What a killed worker left half made is removed before.
    fn dir(&self, name: &str) -> io::Result<PathBuf> {
        let created = self.created.get_or_init(|| self.create().map_err(|error| error.to_string()));
        created.clone().map_err(|text| io::Error::other(format!("{}: {text}", self.dir.display())))?;
        Ok(self.dir.join(name))
    }

    fn create(&self) -> io::Result<()> {
        remove_tree(&self.dir.join(TEMPORARY_DIR))?;
        work_dir::create_dir_if_missing(&self.dir)?;
        // Other users of the host reach no entry.
        rustix::fs::chmod(&self.dir, rustix::fs::Mode::RWXU)?;
        for name in [DOWNLOADS_DIR, NAMED_DIR, TEMPORARY_DIR] {
            work_dir::create_dir_if_missing(&self.dir.join(name))?;
        }
        Ok(())
    }

    /// Removes entries, the least recently used first, until `extra` bytes more may be stored: downloads, then named
    /// directories. Blocks.
    ///
    /// # Errors
    ///
    /// The disk is too full for `extra` bytes although every entry is gone, or an error of the file system.
    pub fn make_room(&self, extra: u64) -> io::Result<()> {
        let mut downloads = entries(&self.dir(DOWNLOADS_DIR)?)?;
        let mut bytes = downloads.iter().map(|entry| entry.bytes).sum::<u64>().saturating_add(extra);
        while bytes > self.limits.downloads_bytes_max
            && let Some(oldest) = downloads.pop()
        {
            bytes = bytes.saturating_sub(oldest.bytes);
            self.remove(&oldest.path)?;
        }
        let needed = self.limits.free_bytes_min.saturating_add(extra);
        let is_short = || resources::measure(&self.dir).disk.is_some_and(|free| free < needed);
        let mut named = None;
        while is_short() {
            let oldest = match downloads.pop() {
                Some(oldest) => oldest,
                None => match named.get_or_insert(entries(&self.dir(NAMED_DIR)?)?).pop() {
                    Some(oldest) => oldest,
                    None if extra == 0 => return Ok(()),
                    None => {
                        let text = format!("{extra} bytes do not fit: {needed} bytes of the disk must be free");
                        return Err(io::Error::new(io::ErrorKind::StorageFull, text));
                    }
                },
            };
            self.remove(&oldest.path)?;
        }
        Ok(())
    }

    /// Removes an entry by a rename first, because removing a large directory takes a while.
    fn remove(&self, path: &Path) -> io::Result<()> {
        tracing::info!(entry = %path.display(), "removing an entry of the caches");
        let aside = self.dir(TEMPORARY_DIR)?.join(uuid::Uuid::new_v4().simple().to_string());
        std::fs::rename(path, &aside).or_else(work_dir::ignore_missing)?;
        if aside.is_dir() {
            remove_tree(&aside)
        } else {
            std::fs::remove_file(&aside).or_else(work_dir::ignore_missing)
        }
    }

    /// One task at a time fetches what has this name; the others wait and find it.
    pub async fn exclusive(&self, name: &str) -> tokio::sync::OwnedMutexGuard<()> {
        let lock = {
            let mut locks = self.in_progress.lock();
            locks.retain(|_, lock| lock.strong_count() > 0);
            let found = locks.get(name).and_then(Weak::upgrade);
            found.unwrap_or_else(|| {
                let lock = Arc::default();
                locks.insert(name.to_owned(), Arc::downgrade(&lock));
                lock
            })
        };
        lock.lock_owned().await
    }
}

/// The most recently used first.
fn entries(dir: &Path) -> io::Result<Vec<Entry>> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(dir)? {
        let entry = entry?;
        // A task may take or remove it meanwhile.
        let Ok(metadata) = entry.metadata() else { continue };
        found.push(Entry { path: entry.path(), bytes: metadata.len(), used_at: metadata.modified()? });
    }
    found.sort_by_key(|entry| std::cmp::Reverse(entry.used_at));
    Ok(found)
}

/// A file name for any text.
fn file_name_of(text: &str) -> String {
    hex::encode(Sha256::digest(text))
}
