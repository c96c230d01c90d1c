//! The file of a task's log: its head, a ring for its tail, and its last lines when the disk takes no more.
//!
//! Blocks behind the end of the head are allocated ahead, where the file system can. A full disk leaves that room to the
//! last lines, which wait for it in memory.

use std::collections::VecDeque;
use std::fs::{File, OpenOptions};
use std::io::{self, ErrorKind};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::{FallocateFlags, MemfdFlags, OFlags, fallocate, memfd_create};
use rustix::io::Errno;

use crate::task::TaskFile;
use crate::task::file::ClosedOffThread;
use journeyman_domain::limits::{LOG_LAST_BYTES, LOG_RESERVE_BYTES};
use journeyman_platform::host::work_dir::{self, WorkDirLock};

use super::log::{FinishedLog, LogLimits};

#[derive(Debug, Default)]
pub(super) struct LogFile {
    path: PathBuf,
    limits: LogLimits,
    work_dir_lock: Option<WorkDirLock>,
    head: Option<TaskFile>,
    head_bytes: u64,
    /// The end of the allocated blocks of the head.
    allocated: u64,
    ring: Option<ClosedOffThread<File>>,
    /// All bytes that went into the ring, overwritten ones included.
    ring_bytes: u64,
    pub(super) bytes_offered: u64,
    /// The first error, which ended the writing.
    error: Option<io::Error>,
    /// The last bytes that were offered after the error.
    last: VecDeque<u8>,
    finished: Option<FinishedLog>,
}

impl LogFile {
    pub(super) fn new(path: PathBuf, limits: LogLimits, work_dir_lock: Option<WorkDirLock>) -> Self {
        Self { path, limits, work_dir_lock, ..Self::default() }
    }

    pub(super) fn append(&mut self, bytes: &[u8]) {
        self.bytes_offered += bytes.len() as u64;
        let stored_before = self.head_bytes + self.ring_bytes;
        if self.error.is_none()
            && let Err(error) = self.store(bytes)
        {
            tracing::warn!(path = %self.path.display(), %error, "cannot write a task's log any more; the task continues");
            self.error = Some(error);
        }
        if self.error.is_some() {
            let stored = to_usize(self.head_bytes + self.ring_bytes - stored_before);
            self.last.extend(bytes.get(stored..).unwrap_or_default());
            self.last.drain(..self.last.len().saturating_sub(LOG_LAST_BYTES));
        }
    }

    /// Counts bytes that were dropped before they came here.
    /// `None` if nothing was ever written.
    pub(super) fn finish(&mut self) -> io::Result<Option<FinishedLog>> {
        if self.finished.is_none() && self.bytes_offered > 0 {
            self.finished = Some(self.assemble()?);
        }
        Ok(self.finished.clone())
    }

    fn store(&mut self, bytes: &[u8]) -> io::Result<()> {
        let room = self.limits.head_bytes.saturating_sub(self.head_bytes);
        let (to_head, mut to_ring) = bytes.split_at(bytes.len().min(to_usize(room)));
        if !to_head.is_empty() {
            let head = self.open_head()?;
            self.allocate(&head, self.head_bytes + to_head.len() as u64)?;
            self.append_to(&head, to_head)?;
        }
        let size = self.limits.tail_bytes;
        while !to_ring.is_empty() {
            let ring = match &self.ring {
                Some(ring) => ring,
                None => {
                    let ring = tempfile::tempfile_in(self.path.parent().unwrap_or(&self.path))?;
                    self.ring.insert(ClosedOffThread::new(ring))
                }
            };
            let place = self.ring_bytes % size;
            let (lap, rest) = to_ring.split_at(to_ring.len().min(to_usize(size - place)));
            ring.write_all_at(lap, place)?;
            self.ring_bytes += lap.len() as u64;
            to_ring = rest;
        }
        Ok(())
    }

    fn open_head(&mut self) -> io::Result<TaskFile> {
        if self.head.is_none() {
            self.work_dir_lock.as_ref().map_or(Ok(()), WorkDirLock::verify)?;
            self.head = Some(create_log_file(&self.path)?.into());
        }
        self.head.clone().ok_or_else(|| Errno::NOENT.into())
    }

    /// Fails if the disk has no room for a head of `bytes` and the last lines. What was allocated before stays.
    fn allocate(&mut self, head: &TaskFile, bytes: u64) -> io::Result<()> {
        if bytes + LOG_RESERVE_BYTES > self.allocated {
            // Twice the reserve, so that few writes need more.
            let end = bytes + 2 * LOG_RESERVE_BYTES;
            match fallocate(&**head, FallocateFlags::KEEP_SIZE, self.allocated, end - self.allocated) {
                Ok(()) => self.allocated = end,
                Err(error @ (Errno::NOSPC | Errno::DQUOT)) => return Err(error.into()),
                // The file system allocates nothing ahead.
                Err(_) => self.allocated = u64::MAX,
            }
        }
        Ok(())
    }

    fn append_to(&mut self, head: &File, bytes: &[u8]) -> io::Result<()> {
        head.write_all_at(bytes, self.head_bytes)?;
        self.head_bytes += bytes.len() as u64;
        Ok(())
    }

    fn assemble(&mut self) -> io::Result<FinishedLog> {
        // What is on no disk is small enough for memory.
        let is_full = |error: &io::Error| matches!(error.kind(), ErrorKind::StorageFull | ErrorKind::QuotaExceeded);
        let is_unwritable = self.error.as_ref().is_some_and(|error| self.head.is_some() || is_full(error));
        let is_in_memory = is_unwritable && self.head_bytes + self.ring_bytes == 0;
        let in_memory = || io::Result::Ok(File::from(memfd_create("log", MemfdFlags::CLOEXEC)?).into());
        let head = if is_in_memory { in_memory()? } else { self.open_head()? };
        let mut lost = self.bytes_offered - self.head_bytes - self.ring_bytes - self.last.len() as u64;
        let tail = self.ring_bytes.min(self.limits.tail_bytes);
        let has_room = self.allocate(&head, self.head_bytes + tail).is_ok();
        let tail = if has_room { tail } else { tail.min(LOG_LAST_BYTES as u64) };
        let omitted = self.ring_bytes - tail;
        if let Err(error) = self.append_tail(&head, omitted) {
            lost += tail;
            self.error.get_or_insert(error);
        }
        let mut end = Vec::new();
        if lost > 0 {
            let why = self.error.as_ref().map_or_else(|| "the disk did not answer".to_owned(), ToString::to_string);
            end = format!("\n[journeyman] log truncated: {lost} bytes could not be written: {why}\n").into_bytes();
        }
        end.extend(&self.last);
        // The worker's log has the error.
        if self.append_to(&head, &end).is_err() {
            lost += self.last.len() as u64;
        }
        // What was allocated ahead is free again.
        head.set_len(self.head_bytes).ok();
        Ok(FinishedLog { file: head, bytes: self.head_bytes, omitted: omitted + lost })
    }

    fn append_tail(&mut self, head: &File, mut at: u64) -> io::Result<()> {
        if at > 0 {
            self.append_to(head, format!("\n[journeyman] {at} bytes omitted\n").as_bytes())?;
        }
        let Some(ring) = self.ring.take() else { return Ok(()) };
        let mut buffer = vec![0; 1 << 16];
        while at < self.ring_bytes {
            let place = at % self.limits.tail_bytes;
            let lap = (self.ring_bytes - at).min(self.limits.tail_bytes - place);
            let part = buffer.len().min(to_usize(lap));
            let part = buffer.get_mut(..part).unwrap_or_default();
            ring.read_exact_at(part, place)?;
            self.append_to(head, part)?;
            at += part.len() as u64;
        }
        Ok(())
    }
}

fn create_log_file(path: &Path) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.read(true).write(true).create(true).truncate(true);
    options.mode(0o600);
    options.custom_flags(OFlags::NOFOLLOW.bits().cast_signed());
    match options.open(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => {
            path.parent().map_or(Ok(()), work_dir::create_dir_if_missing)?;
            options.open(path)
        }
        opened => opened,
    }
}

fn to_usize(bytes: u64) -> usize {
    usize::try_from(bytes).unwrap_or(usize::MAX)
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    fn text(finished: &FinishedLog) -> String {
        let mut bytes = vec![0; to_usize(finished.bytes)];
        finished.file.read_exact_at(&mut bytes, 0).unwrap();
        String::from_utf8(bytes).unwrap()
    }

    /// Fills the disk to its last byte.
    fn fill(folder: &Path, name: &str) {
        let filler = File::create(folder.join(name)).unwrap();
        let mut at = 0;
        for size in [4096, 1] {
            while filler.write_all_at(&vec![0; size], at).is_ok() {
                at += size as u64;
            }
        }
    }

    /// Runs itself again in a mount namespace.
    #[test]
    #[expect(clippy::disallowed_methods, reason = "a test that runs itself")]
    fn b5_the_last_lines_of_a_log_are_kept_on_a_full_disk() {
        let test = "handler::log_file::tests::b5_the_last_lines_of_a_log_are_kept_on_a_full_disk";
        if std::env::var_os("JOURNEYMAN_TEST_MOUNTS").is_none() {
            let root = rustix::process::geteuid().is_root();
            let flags: &[&str] = if root { &["--mount"] } else { &["--user", "--map-root-user", "--mount"] };
            let mut again = Command::new("unshare");
            again.args(flags).arg(std::env::current_exe().unwrap()).args(["--exact", test]);
            let output = again.env("JOURNEYMAN_TEST_MOUNTS", "1").output().unwrap();
            return assert!(output.status.success(), "{output:?}");
        }
        let folder = tempfile::tempdir().unwrap();
        let options = c"size=4m";
        rustix::mount::mount("b5", folder.path(), "tmpfs", rustix::mount::MountFlags::empty(), options).unwrap();
        for (head_bytes, fills_before) in [(1 << 30, false), (64 << 10, false), (1 << 30, true)] {
            let limits = LogLimits { head_bytes, tail_bytes: 1 << 20 };
            let mut log = LogFile::new(folder.path().join("log"), limits, None);
            if fills_before {
                fill(folder.path(), "filler");
            }
            log.append(b"the first line\n");
            log.append(&[b'x'; 200 << 10]);
            if !fills_before {
                fill(folder.path(), "filler");
            }
            for number in 0..100_000 {
                log.append(format!("line {number}\n").as_bytes());
            }
            log.append(b"[journeyman] failed: No space left on device\n");
            fill(folder.path(), "second");
            let finished = log.finish().unwrap().unwrap();
            let text = text(&finished);
            let shown = &text[text.len() - 200..];
            assert!(text.ends_with("line 99999\n[journeyman] failed: No space left on device\n"), "{shown}");
            assert!(text.contains("bytes could not be written: No space left"), "{shown}");
            assert!(fills_before || text.starts_with("the first line\n"), "{}", &text[..50]);
            assert!(finished.omitted > 500_000, "{}", finished.omitted);
            for file in ["filler", "second", "log"] {
                std::fs::remove_file(folder.path().join(file)).or_else(work_dir::ignore_missing).unwrap();
            }
        }
        rustix::mount::unmount(folder.path(), rustix::mount::UnmountFlags::DETACH).unwrap();
    }
}
