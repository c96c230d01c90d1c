//! A task's log: streamed to disk, redacted, and limited in size by keeping its head and its tail.
//!
//! The first write creates the file. Bytes go to the file until it holds [`LogLimits::head_bytes`]; later bytes go to a
//! ring of [`LogLimits::tail_bytes`] in an unlinked file, which [`TaskLog::finish`] appends to the head after a line that
//! says how many bytes were omitted. A write error never fails or delays the task: the first error ends the writing, later
//! bytes are counted, and the log ends with a line that says so, if the disk has room for it.
//!
//! Secrets are replaced before they are stored, see [`redact`]. Bytes that may be the beginning of a secret are held back
//! until more bytes come, [`TaskLog::flush`] is called, or the log is finished.
//!
//! To follow a log, read the file at [`TaskLog::path`] after each [`TaskLog::wait_for_growth`]. The file does not grow
//! between the end of the head and the end of the task.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use parking_lot::Mutex;
use rustix::fs::OFlags;
use tokio::sync::watch;

use journeyman_domain::limits::{
    LOG_HEAD_BYTES, LOG_NOTE_BYTES_MAX, LOG_TAIL_BYTES, REDACT_SECRET_CHARS_MIN, REDACT_TASK_BYTES_MAX,
};
use journeyman_platform::host::work_dir::{self, WorkDirLock};
use journeyman_platform::redact::{self, RedactFilter, SecretSet};

/// The name of the artifact that holds a task's log.
pub const BACKING_NAME: &str = "public/logs/live_backing.log";
/// The name of the artifact that links to [`BACKING_NAME`].
pub const LIVE_NAME: &str = "public/logs/live.log";
/// The media type of both artifacts.
pub const CONTENT_TYPE: &str = "text/plain; charset=utf-8";

/// How much of a log is kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LogLimits {
    /// Bytes kept from the start.
    pub head_bytes: u64,
    /// Bytes kept from the end.
    pub tail_bytes: u64,
}

impl Default for LogLimits {
    fn default() -> Self {
        Self { head_bytes: LOG_HEAD_BYTES, tail_bytes: LOG_TAIL_BYTES }
    }
}

/// A finished log as an open file. Clones share the file offset, so use positioned reads.
#[derive(Debug, Clone)]
pub struct FinishedLog {
    /// The file.
    pub file: Arc<File>,
    /// The length of the log.
    pub bytes: u64,
    /// How many bytes were omitted from its middle or could not be written.
    pub omitted: u64,
}

/// A task's log. Clones write to the same file; a single [`TaskLog::write`] is never interleaved with another.
#[derive(Debug, Clone)]
pub struct TaskLog {
    shared: Arc<LogShared>,
}

#[derive(Debug)]
struct LogShared {
    path: PathBuf,
    limits: LogLimits,
    work_dir_lock: Option<WorkDirLock>,
    state: Mutex<State>,
    // Outside `state`, whose lock is held while a slow disk takes a write.
    progress: watch::Sender<LogProgress>,
}

#[derive(Debug, Default)]
struct LogProgress {
    /// Something was written, held back or not.
    written: bool,
    bytes: u64,
    finished: bool,
}

#[derive(Debug, Default)]
struct State {
    head: Option<Arc<File>>,
    head_bytes: u64,
    ring: Option<File>,
    /// All bytes that went into the ring, overwritten ones included.
    ring_bytes: u64,
    bytes_offered: u64,
    /// The first error, which ended the writing.
    error: Option<io::Error>,
    finished: Option<FinishedLog>,
    filter: RedactFilter,
    task_secrets: Option<Box<SecretSet>>,
}

impl TaskLog {
    /// Creates a log at `path`. An existing file is overwritten; a symbolic link is not followed.
    #[must_use]
    pub fn new(path: impl Into<PathBuf>, limits: LogLimits) -> Self {
        Self::in_work_dir(path.into(), limits, None)
    }

    /// As [`TaskLog::new`], but fails to create the file once the work directory has been replaced.
    pub(crate) fn in_work_dir(path: PathBuf, limits: LogLimits, work_dir_lock: Option<WorkDirLock>) -> Self {
        Self {
            shared: Arc::new(LogShared {
                path,
                limits,
                work_dir_lock,
                state: Mutex::default(),
                progress: watch::Sender::default(),
            }),
        }
    }

    /// Fails once the work directory has been replaced.
    pub(super) fn verify_work_dir(&self) -> io::Result<()> {
        self.shared.work_dir_lock.as_ref().map_or(Ok(()), WorkDirLock::verify)
    }

    /// Returns the path of the file, which the first write creates.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.shared.path
    }

    /// Appends bytes, with secrets replaced. Bytes after [`TaskLog::finish`] are discarded.
    ///
    /// Blocks until the page cache has the bytes.
    pub fn write(&self, bytes: &[u8]) {
        let mut state = self.shared.state.lock();
        if bytes.is_empty() || state.finished.is_some() {
            return;
        }
        self.shared.progress.send_modify(|progress| progress.written = true);
        let mut redacted = Vec::with_capacity(bytes.len());
        let State { filter, task_secrets, .. } = &mut *state;
        redact::stream(filter, task_secrets.as_deref(), bytes, &mut redacted);
        self.store(&mut state, &redacted);
    }

    /// Redacts a secret and its encodings in everything written from here on.
    ///
    /// # Errors
    ///
    /// See [`AddSecretError`].
    pub fn add_secret(&self, secret: &str) -> Result<(), AddSecretError> {
        if secret.trim().chars().count() < REDACT_SECRET_CHARS_MIN {
            return Err(AddSecretError::TooShort);
        }
        let mut state = self.shared.state.lock();
        let secrets = state.task_secrets.get_or_insert_with(|| Box::new(SecretSet::default()));
        if secrets.bytes() + secret.len() > REDACT_TASK_BYTES_MAX {
            return Err(AddSecretError::LimitReached);
        }
        secrets.add(secret);
        Ok(())
    }

    /// The secrets that only this log redacts.
    pub(crate) fn task_secrets(&self) -> Option<Box<SecretSet>> {
        self.shared.state.lock().task_secrets.clone()
    }

    fn store(&self, state: &mut State, bytes: &[u8]) {
        if bytes.is_empty() {
            return;
        }
        state.bytes_offered += bytes.len() as u64;
        if state.error.is_none()
            && let Err(error) = state.append(bytes, &self.shared)
        {
            tracing::warn!(path = %self.path().display(), %error, "cannot write a task's log any more; the task continues");
            state.error = Some(error);
        }
        // After the bytes, so that a follower finds them in the file.
        self.shared.progress.send_modify(|progress| {
            (progress.written, progress.bytes) = (true, state.bytes_offered);
        });
    }

    /// Appends a line written by the handler.
    pub fn write_line(&self, text: &str) {
        self.write(format!("{text}\n").as_bytes());
    }

    /// Appends a line written by the worker, marked with `[journeyman TIME]`. Control characters are escaped and the text is
    /// cut to [`LOG_NOTE_BYTES_MAX`], so that no text can imitate another line.
    pub fn write_note(&self, text: &str) {
        let now = jiff::Timestamp::now();
        let line = format!("[journeyman {now:.3}] {}\n", printable(text));
        let mut state = self.shared.state.lock();
        if state.finished.is_some() {
            return;
        }
        // Filtered separately from the payload's stream, so that neither affects the other.
        let line = redact::bytes(line.as_bytes(), state.task_secrets.as_deref());
        self.store(&mut state, &line);
    }

    /// Stores the bytes that are held back, at the end of a payload's output or while it pauses.
    pub fn flush(&self) {
        let mut state = self.shared.state.lock();
        if state.finished.is_none() {
            let mut redacted = Vec::new();
            state.filter.flush(&mut redacted);
            self.store(&mut state, &redacted);
        }
    }

    /// Returns how many bytes the log has, without those held back. Does not wait for a write in progress.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.shared.progress.borrow().bytes
    }

    /// Returns whether nothing was written yet. Does not wait for a write in progress.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        !self.shared.progress.borrow().written
    }

    /// Returns whether the log is finished. Does not wait for a write in progress.
    #[must_use]
    pub fn is_finished(&self) -> bool {
        self.shared.progress.borrow().finished
    }

    /// Ends the waiting of followers, also if the log is never finished.
    pub(crate) fn end_following(&self) {
        self.shared.progress.send_modify(|progress| progress.finished = true);
    }

    /// Resolves when the log has more than `bytes` bytes or is finished.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe.
    pub async fn wait_for_growth(&self, bytes: u64) {
        let mut progress = self.shared.progress.subscribe();
        // The sender lives as long as `self`, so there is no error.
        drop(progress.wait_for(|progress| progress.bytes > bytes || progress.finished).await);
    }

    /// Ends the log and returns it; `None` if nothing was ever written. Repeated calls return the same log.
    ///
    /// Blocks while the tail (16 MiB by default) is appended to the head; call it on a blocking thread if
    /// [`TaskLog::bytes`] is large.
    ///
    /// # Errors
    ///
    /// Fails if the file cannot be created.
    pub fn finish(&self) -> io::Result<Option<FinishedLog>> {
        let mut state = self.shared.state.lock();
        if state.finished.is_none() {
            let mut redacted = Vec::new();
            let State { filter, task_secrets, .. } = &mut *state;
            redact::end_stream(filter, task_secrets.as_deref(), &mut redacted);
            self.store(&mut state, &redacted);
        }
        if state.bytes_offered == 0 {
            return Ok(None);
        }
        if state.finished.is_none() {
            state.finished = Some(state.assemble(&self.shared)?);
            self.shared.progress.send_modify(|progress| progress.finished = true);
        }
        Ok(state.finished.clone())
    }

    /// Deletes the file; a missing file is a success. Open files stay readable.
    ///
    /// # Errors
    ///
    /// The error of the file system.
    pub fn remove(&self) -> io::Result<()> {
        std::fs::remove_file(&self.shared.path).or_else(work_dir::ignore_missing)
    }
}

/// Why a secret is not redacted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum AddSecretError {
    /// The secret is too short to be distinguished from ordinary text.
    #[error("secret not redacted: it has fewer than {REDACT_SECRET_CHARS_MIN} characters")]
    TooShort,
    /// The task's secrets take too much memory.
    #[error("secret not redacted: the task's secrets and their encodings exceed {REDACT_TASK_BYTES_MAX} bytes")]
    LimitReached,
}

impl State {
    fn append(&mut self, bytes: &[u8], shared: &LogShared) -> io::Result<()> {
        let room = shared.limits.head_bytes.saturating_sub(self.head_bytes);
        let (to_head, mut to_ring) = bytes.split_at(bytes.len().min(to_usize(room)));
        if !to_head.is_empty() {
            let head = self.open_head(shared)?;
            self.append_to(&head, to_head)?;
        }
        let size = shared.limits.tail_bytes;
        while !to_ring.is_empty() {
            let ring = match &self.ring {
                Some(ring) => ring,
                None => self.ring.insert(tempfile::tempfile_in(shared.path.parent().unwrap_or(&shared.path))?),
            };
            let place = self.ring_bytes % size;
            let (lap, rest) = to_ring.split_at(to_ring.len().min(to_usize(size - place)));
            ring.write_all_at(lap, place)?;
            self.ring_bytes += lap.len() as u64;
            to_ring = rest;
        }
        Ok(())
    }

    fn open_head(&mut self, shared: &LogShared) -> io::Result<Arc<File>> {
        Ok(Arc::clone(match &self.head {
            Some(head) => head,
            None => {
                shared.work_dir_lock.as_ref().map_or(Ok(()), WorkDirLock::verify)?;
                self.head.insert(Arc::new(create_log_file(&shared.path)?))
            }
        }))
    }

    fn append_to(&mut self, head: &File, bytes: &[u8]) -> io::Result<()> {
        head.write_all_at(bytes, self.head_bytes)?;
        self.head_bytes += bytes.len() as u64;
        Ok(())
    }

    fn assemble(&mut self, shared: &LogShared) -> io::Result<FinishedLog> {
        let head = self.open_head(shared)?;
        let overwritten = self.ring_bytes.saturating_sub(shared.limits.tail_bytes);
        let mut lost = self.bytes_offered - self.head_bytes - self.ring_bytes;
        if let Err(error) = self.append_tail(&head, shared.limits.tail_bytes) {
            lost += self.ring_bytes - overwritten;
            self.error.get_or_insert(error);
        }
        if let Some(error) = &self.error {
            let marker = format!("\n[journeyman] log truncated: {lost} bytes could not be written: {error}\n");
            // A full disk has no room for it either; the worker's log has the error.
            self.append_to(&head, marker.as_bytes()).ok();
        }
        Ok(FinishedLog { file: head, bytes: self.head_bytes, omitted: overwritten + lost })
    }

    fn append_tail(&mut self, head: &File, tail_bytes: u64) -> io::Result<()> {
        let mut at = self.ring_bytes.saturating_sub(tail_bytes);
        if at > 0 {
            self.append_to(head, format!("\n[journeyman] {at} bytes omitted\n").as_bytes())?;
        }
        let Some(ring) = self.ring.take() else { return Ok(()) };
        let mut buffer = vec![0; 1 << 16];
        while at < self.ring_bytes {
            let place = at % tail_bytes;
            let lap = (self.ring_bytes - at).min(tail_bytes - place);
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
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            path.parent().map_or(Ok(()), work_dir::create_dir_if_missing)?;
            options.open(path)
        }
        opened => opened,
    }
}

fn to_usize(bytes: u64) -> usize {
    usize::try_from(bytes).unwrap_or(usize::MAX)
}

/// Escapes control characters and cuts the text to [`LOG_NOTE_BYTES_MAX`].
pub(crate) fn printable(text: &str) -> String {
    let mut out = String::with_capacity(text.len().min(LOG_NOTE_BYTES_MAX));
    for character in text.chars() {
        if out.len() + 8 > LOG_NOTE_BYTES_MAX {
            out.push('…');
            break;
        }
        if character.is_control() {
            out.extend(character.escape_default());
        } else {
            out.push(character);
        }
    }
    out
}

/// Cuts a text to at most `bytes_max` bytes at a character boundary.
pub(crate) fn truncate_at_char(text: &mut String, bytes_max: usize) {
    let mut end = bytes_max.min(text.len());
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    text.truncate(end);
}
