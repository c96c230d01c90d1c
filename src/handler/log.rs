//! A task's log: streamed to disk, and capped by keeping its start and its end.
//!
//! Nothing is written before the first byte, so a task without a log touches no disk. Bytes go to the file until it
//! holds [`LogLimits::head_bytes`]; what follows goes round in a second, nameless file of [`LogLimits::tail_bytes`], and
//! is put behind the head when the log is finished, with a line between them that says how much is missing. A disk that
//! does not take the log never fails the task and never holds it up: the first error ends the writing, what comes after
//! is counted, and a line says so.
//!
//! Secrets are replaced on the way, see [`redact`]. What may be the beginning of one is held back until more comes, until
//! nothing has come for [`REDACT_HOLD_MAX`], or until the log is finished.
//!
//! This file neither reads the log again nor uploads it. To follow a log, read the file at
//! [`TaskLog::path`] as [`TaskLog::wait_for_growth`] tells; between the end of the head and the end of the task it does not grow.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use rustix::fs::{MemfdFlags, OFlags};
use tokio::runtime::Handle;
use tokio::sync::Notify;
use tokio_util::task::AbortOnDropHandle;

use crate::host::spare::Spares;
use crate::host::work_dir;
use crate::limits::{
    LOG_HEAD_BYTES, LOG_NOTE_BYTES_MAX, LOG_NOTES_PENDING_BYTES_MAX, LOG_TAIL_BYTES, REDACT_HOLD_MAX,
    REDACT_SECRET_CHARS_MIN, REDACT_TASK_BYTES_MAX,
};
use crate::redact::{self, Patterns, RedactFilter, SecretSet};

/// The artifact that a task's log becomes.
pub const BACKING_NAME: &str = "public/logs/live_backing.log";
/// The artifact that links to [`BACKING_NAME`].
pub const LIVE_NAME: &str = "public/logs/live.log";
/// The media type of both.
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

/// A log that has been finished: an open file, to be read with positioned reads.
#[derive(Debug, Clone)]
pub struct FinishedLog {
    /// The file.
    pub file: Arc<File>,
    /// How many bytes of it are the log.
    pub bytes: u64,
}

/// A task's log. Clones write to the same file; a single [`TaskLog::write`] is never torn apart by another.
#[derive(Debug, Clone)]
pub struct TaskLog {
    shared: Arc<LogShared>,
}

#[derive(Debug)]
struct LogShared {
    path: PathBuf,
    limits: LogLimits,
    spares: Option<Spares>,
    state: Mutex<State>,
    /// Apart from the state, whose lock is held while a disk takes its time.
    written: AtomicBool,
    bytes_stored: AtomicU64,
    finished: AtomicBool,
    grown: Notify,
}

#[derive(Debug, Default)]
struct State {
    head: Option<Arc<File>>,
    head_bytes: u64,
    ring: Option<File>,
    /// All that ever went into the ring, overwritten bytes included.
    ring_bytes: u64,
    /// All that was ever offered.
    bytes_offered: u64,
    fault: Option<WriteFault>,
    finished: Option<FinishedLog>,
    filter: RedactFilter,
    /// What this log alone hides.
    task_secrets: Option<Box<SecretSet>>,
    /// Hands out what the filter holds back when nothing follows.
    idle_flush: Option<AbortOnDropHandle<()>>,
    /// How often something was written.
    write_count: u64,
    /// Lines of the worker's that come after what is held back.
    pending_notes: Vec<u8>,
}

#[derive(Debug)]
struct WriteFault {
    error: io::Error,
    bytes_lost: u64,
}

impl TaskLog {
    /// A log that will be at `path`. An existing file there is overwritten; a symbolic link is not followed.
    #[must_use]
    pub fn new(path: impl Into<PathBuf>, limits: LogLimits) -> Self {
        Self::with(path.into(), limits, None)
    }

    /// The same with a file that an earlier log had, if there is one.
    pub(crate) fn of_spares(path: PathBuf, limits: LogLimits, spares: Spares) -> Self {
        Self::with(path, limits, Some(spares))
    }

    fn with(path: PathBuf, limits: LogLimits, spares: Option<Spares>) -> Self {
        Self {
            shared: Arc::new(LogShared {
                path,
                limits,
                spares,
                state: Mutex::default(),
                written: AtomicBool::new(false),
                bytes_stored: AtomicU64::new(0),
                finished: AtomicBool::new(false),
                grown: Notify::new(),
            }),
        }
    }

    /// Where the file is, once something was written.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.shared.path
    }

    /// Appends bytes, without the secrets in them. After [`TaskLog::finish`] they are thrown away.
    ///
    /// Blocks for as long as the page cache takes them.
    pub fn write(&self, bytes: &[u8]) {
        let mut state = self.state();
        if bytes.is_empty() || state.finished.is_some() {
            return;
        }
        self.shared.written.store(true, Ordering::Relaxed);
        state.write_count += 1;
        let mut told = Vec::with_capacity(bytes.len());
        let State { filter, task_secrets: own, .. } = &mut *state;
        redact::stream(filter, own.as_deref(), bytes, &mut told);
        if state.filter.held_back() > 0 && state.idle_flush.is_none() {
            state.idle_flush = self.spawn_idle_flush();
        }
        self.emit(&mut state, &told);
    }

    /// Stores what the filter lets go, and what waited for it: where nothing is held back any more, or else after a line.
    fn emit(&self, state: &mut State, told: &[u8]) {
        let end_of_line = || told.iter().rposition(|byte| *byte == b'\n').map(|at| at + 1);
        let (before, after) = match state.filter.held_back() {
            0 => (told, &[][..]),
            _ => told.split_at(end_of_line().unwrap_or_default()),
        };
        self.store(state, before);
        if state.filter.held_back() == 0 || !before.is_empty() {
            let notes = std::mem::take(&mut state.pending_notes);
            self.store(state, &notes);
        }
        self.store(state, after);
    }

    /// Hides a text in this log from here on, in all the ways it may be encoded.
    ///
    /// # Errors
    ///
    /// Where it is too short to be told from ordinary text, or one secret too many.
    pub fn add_secret(&self, secret: &str) -> Result<(), AddSecretError> {
        if secret.trim().chars().count() < REDACT_SECRET_CHARS_MIN {
            return Err(AddSecretError::TooShort);
        }
        let mut state = self.state();
        let own = state.task_secrets.get_or_insert_with(|| Box::new(SecretSet::new(Patterns::Excluded)));
        if own.bytes() + secret.len() > REDACT_TASK_BYTES_MAX {
            return Err(AddSecretError::LimitReached);
        }
        own.add(secret);
        Ok(())
    }

    /// What this log hides besides what every log does.
    pub(crate) fn task_secrets(&self) -> Option<Box<SecretSet>> {
        self.state().task_secrets.clone()
    }

    fn store(&self, state: &mut State, bytes: &[u8]) {
        if bytes.is_empty() {
            return;
        }
        self.shared.written.store(true, Ordering::Relaxed);
        state.bytes_offered += bytes.len() as u64;
        if let Some(fault) = &mut state.fault {
            fault.bytes_lost += bytes.len() as u64;
            self.shared.bytes_stored.store(state.bytes_offered, Ordering::Release);
            return;
        }
        let before = state.stored();
        if let Err(error) = state.append(bytes, &self.shared) {
            let taken = state.stored() - before;
            let lost = bytes.len() as u64 - taken;
            tracing::warn!(path = %self.path().display(), %error, "a task's log can no longer be written; the task goes on");
            state.fault = Some(WriteFault { error, bytes_lost: lost });
        }
        // After the bytes themselves, so that who follows the log finds them.
        self.shared.bytes_stored.store(state.bytes_offered, Ordering::Release);
        self.shared.grown.notify_waiters();
    }

    /// Outside of a runtime there is no timer: what is held back stays so until more comes.
    fn spawn_idle_flush(&self) -> Option<AbortOnDropHandle<()>> {
        let idle = flush_when_idle(Arc::downgrade(&self.shared));
        Handle::try_current().ok().map(|runtime| AbortOnDropHandle::new(runtime.spawn(idle)))
    }

    /// Appends a line of the handler's: the text, then a line end.
    pub fn write_line(&self, text: &str) {
        let mut line = Vec::with_capacity(text.len() + 1);
        line.extend_from_slice(text.as_bytes());
        line.push(b'\n');
        self.write(&line);
    }

    /// Appends a line of the worker's, marked as such and with the time of day. Control characters are escaped, and
    /// what is longer than [`LOG_NOTE_BYTES_MAX`] is cut, so that no text can pass for another line. It comes after what the
    /// filter holds back of the payload's own, or where that takes long, after a line of it.
    pub fn write_note(&self, text: &str) {
        let now = jiff::Timestamp::now();
        let line = format!("[journeyman {now:.3}] {}\n", printable(text));
        let mut state = self.state();
        if state.finished.is_some() {
            return;
        }
        // By itself, so that neither what a payload has begun hides it nor it what a payload has begun.
        let line = redact::bytes(line.as_bytes(), state.task_secrets.as_deref());
        self.shared.written.store(true, Ordering::Relaxed);
        let waits = state.filter.held_back() > 0 && state.pending_notes.len() < LOG_NOTES_PENDING_BYTES_MAX;
        state.pending_notes.extend_from_slice(&line);
        if !waits {
            let notes = std::mem::take(&mut state.pending_notes);
            self.store(&mut state, &notes);
        }
    }

    /// How many bytes the log has until now, without those that are held back. Does not wait for a write that a slow disk
    /// holds up.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.shared.bytes_stored.load(Ordering::Acquire)
    }

    /// Whether nothing was written yet. Does not wait for a write that a slow disk holds up.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        !self.shared.written.load(Ordering::Relaxed)
    }

    /// Whether it is finished. Does not wait, as [`TaskLog::bytes`].
    #[must_use]
    pub fn is_finished(&self) -> bool {
        self.shared.finished.load(Ordering::Acquire)
    }

    /// Resolves when the log has more than `bytes`, or the log is finished: for those who follow it.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe.
    pub async fn wait_for_growth(&self, bytes: u64) {
        let mut next = std::pin::pin!(self.shared.grown.notified());
        loop {
            next.as_mut().enable();
            if self.bytes() > bytes || self.is_finished() {
                return;
            }
            next.as_mut().await;
            next.set(self.shared.grown.notified());
        }
    }

    /// How many of these will be missing in the finished log, if nothing more comes.
    #[must_use]
    pub fn bytes_dropped(&self) -> u64 {
        let state = self.state();
        let (limits, held) = (self.shared.limits, (state.filter.held_back() + state.pending_notes.len()) as u64);
        match &state.fault {
            Some(fault) => state.overwritten(limits) + fault.bytes_lost + held,
            None => {
                let room = limits.head_bytes.saturating_sub(state.head_bytes);
                (state.ring_bytes + held.saturating_sub(room)).saturating_sub(limits.tail_bytes)
            }
        }
    }

    /// Ends the log and hands it over, or `None` where nothing was ever written. May be repeated.
    ///
    /// Blocks while the tail (16 MiB by default) is copied behind the head; call it off the async threads where
    /// [`TaskLog::bytes_dropped`] or a large [`TaskLog::bytes`] says that there is a tail.
    ///
    /// # Errors
    ///
    /// Where not even the line that says what went wrong can be stored anywhere.
    pub fn finish(&self) -> io::Result<Option<FinishedLog>> {
        let mut state = self.state();
        if state.finished.is_none() {
            state.idle_flush = None;
            let mut told = Vec::new();
            let State { filter, task_secrets: own, .. } = &mut *state;
            redact::end_stream(filter, own.as_deref(), &mut told);
            self.emit(&mut state, &told);
        }
        if state.bytes_offered == 0 {
            return Ok(None);
        }
        if state.finished.is_none() {
            state.finished = Some(state.assemble(&self.shared)?);
            state.ring = None;
            self.shared.finished.store(true, Ordering::Release);
        }
        self.shared.grown.notify_waiters();
        Ok(state.finished.clone())
    }

    /// Deletes the file. Files that are already open stay readable; a file that is not there is a success.
    ///
    /// # Errors
    ///
    /// Whatever the file system says.
    pub fn remove(&self) -> io::Result<()> {
        match std::fs::remove_file(&self.shared.path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            Ok(()) | Err(_) => Ok(()),
        }
    }

    /// Leaves the file to a later log where nobody reads or writes this one any more, and deletes it otherwise.
    ///
    /// # Errors
    ///
    /// As [`TaskLog::remove`].
    pub(crate) fn leave(&self) -> io::Result<()> {
        let Some(spares) = self.shared.spares.as_ref().filter(|_| Arc::strong_count(&self.shared) == 1) else {
            return self.remove();
        };
        let mut state = self.state();
        let (head, finished) = (state.head.take(), state.finished.take());
        drop(state);
        match head.or_else(|| finished.map(|finished| finished.file)).and_then(Arc::into_inner) {
            Some(file) => spares.keep_log(file, &self.shared.path),
            None => self.remove(),
        }
    }

    // A panic of another writer leaves counters that are at worst too low; the log goes on.
    fn state(&self) -> MutexGuard<'_, State> {
        self.shared.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Why a text is not hidden.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum AddSecretError {
    /// It could not be told from ordinary text.
    #[error("it is not hidden: it has fewer than {REDACT_SECRET_CHARS_MIN} characters")]
    TooShort,
    /// The task's secrets are too many, or too long.
    #[error(
        "it is not hidden: the task's secrets take more than {REDACT_TASK_BYTES_MAX} bytes with all their encodings"
    )]
    LimitReached,
}

/// Runs while something is held back.
async fn flush_when_idle(log: Weak<LogShared>) {
    let writes = || log.upgrade().map(|shared| TaskLog { shared }.state().write_count);
    while let Some(before) = writes() {
        tokio::time::sleep(REDACT_HOLD_MAX).await;
        let Some(shared) = log.upgrade() else { return };
        let log = TaskLog { shared };
        let mut state = log.state();
        if state.write_count != before && state.filter.held_back() > 0 {
            continue;
        }
        let mut told = Vec::new();
        state.filter.flush(&mut told);
        // The next one that holds something back starts another.
        state.idle_flush = None;
        return log.emit(&mut state, &told);
    }
}

impl State {
    const fn stored(&self) -> u64 {
        self.head_bytes + self.ring_bytes
    }

    const fn overwritten(&self, limits: LogLimits) -> u64 {
        self.ring_bytes.saturating_sub(limits.tail_bytes)
    }

    fn append(&mut self, bytes: &[u8], shared: &LogShared) -> io::Result<()> {
        let room = shared.limits.head_bytes.saturating_sub(self.head_bytes);
        let (to_head, to_ring) = bytes.split_at(bytes.len().min(to_usize(room)));
        if !to_head.is_empty() {
            let head = match &self.head {
                Some(head) => Arc::clone(head),
                None => Arc::clone(self.head.insert(Arc::new(shared.create_file()?))),
            };
            write_counted(&head, self.head_bytes, to_head, &mut self.head_bytes)?;
        }
        self.append_ring(to_ring, shared)
    }

    fn append_ring(&mut self, mut bytes: &[u8], shared: &LogShared) -> io::Result<()> {
        let size = shared.limits.tail_bytes;
        if size == 0 {
            self.ring_bytes += bytes.len() as u64;
            return Ok(());
        }
        // Of a single huge write only the last lap can stay.
        let skipped = bytes.len().saturating_sub(to_usize(size));
        self.ring_bytes += skipped as u64;
        bytes = bytes.get(skipped..).unwrap_or_default();
        while !bytes.is_empty() {
            let ring = match &self.ring {
                Some(ring) => ring,
                None => self.ring.insert(create_unlinked(&shared.path)?),
            };
            let place = self.ring_bytes % size;
            let (lap, rest) = bytes.split_at(bytes.len().min(to_usize(size - place)));
            write_counted(ring, place, lap, &mut self.ring_bytes)?;
            bytes = rest;
        }
        Ok(())
    }

    fn assemble(&mut self, shared: &LogShared) -> io::Result<FinishedLog> {
        let head = match self.head.take() {
            Some(head) => head,
            None => match shared.create_file() {
                Ok(file) => Arc::new(file),
                Err(error) => {
                    let lost = self.bytes_offered;
                    self.fault.get_or_insert(WriteFault { error, bytes_lost: lost });
                    Arc::new(memory_file()?)
                }
            },
        };
        if let Err(error) = self.append_tail(&head, shared.limits) {
            let lost = self.ring_bytes.min(shared.limits.tail_bytes);
            self.fault.get_or_insert(WriteFault { error, bytes_lost: 0 }).bytes_lost += lost;
        }
        let Some(fault) = &self.fault else {
            return Ok(FinishedLog { file: head, bytes: self.head_bytes });
        };
        let marker = format!(
            "\n[journeyman] the log ends here: {} bytes could not be stored: {}\n",
            fault.bytes_lost, fault.error
        );
        append_marker(head, self.head_bytes, marker.as_bytes())
    }

    fn append_tail(&mut self, head: &File, limits: LogLimits) -> io::Result<()> {
        let overwritten = self.overwritten(limits);
        if overwritten > 0 {
            let marker = format!("\n[journeyman] {overwritten} bytes of the log are left out here\n");
            write_counted(head, self.head_bytes, marker.as_bytes(), &mut self.head_bytes)?;
        }
        let Some(ring) = &self.ring else {
            return Ok(());
        };
        let mut at = overwritten;
        let mut buffer = vec![0; 1 << 16];
        while at < self.ring_bytes {
            let place = at % limits.tail_bytes;
            let lap = (self.ring_bytes - at).min(limits.tail_bytes - place);
            let part = buffer.len().min(to_usize(lap));
            let part = buffer.get_mut(..part).unwrap_or_default();
            ring.read_exact_at(part, place)?;
            write_counted(head, self.head_bytes, part, &mut self.head_bytes)?;
            at += part.len() as u64;
        }
        Ok(())
    }
}

/// Puts the marker behind the log; on a full disk over its last bytes; and if there is no place at all, into memory.
fn append_marker(file: Arc<File>, bytes: u64, marker: &[u8]) -> io::Result<FinishedLog> {
    let (mut end, length) = (bytes, marker.len() as u64);
    if write_counted(&file, bytes, marker, &mut end).is_ok() {
        return Ok(FinishedLog { file, bytes: end });
    }
    if bytes >= length && file.write_all_at(marker, bytes - length).is_ok() {
        return Ok(FinishedLog { file, bytes });
    }
    let mut content = vec![0; to_usize(bytes.min(LOG_NOTE_BYTES_MAX as u64))];
    if file.read_exact_at(&mut content, 0).is_err() {
        content.clear();
    }
    content.extend_from_slice(marker);
    let memory = memory_file()?;
    memory.write_all_at(&content, 0)?;
    Ok(FinishedLog { file: Arc::new(memory), bytes: content.len() as u64 })
}

/// Writes all of `bytes` at `at`, and counts in `count` what was taken even where the rest was not.
fn write_counted(file: &File, at: u64, bytes: &[u8], count: &mut u64) -> io::Result<()> {
    let mut done = 0;
    while let Some(rest) = bytes.get(done..).filter(|rest| !rest.is_empty()) {
        match file.write_at(rest, at + done as u64) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(taken) => {
                done += taken;
                *count += taken as u64;
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

impl LogShared {
    fn create_file(&self) -> io::Result<File> {
        if self.spares.as_ref().is_some_and(Spares::lost) {
            return Err(io::Error::new(io::ErrorKind::NotFound, "the work folder is no longer this worker's"));
        }
        self.spares.as_ref().and_then(|spares| spares.log(&self.path)).map_or_else(|| create_log_file(&self.path), Ok)
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

/// A file beside the log that has no name, so that nothing of it is left behind whatever happens.
fn create_unlinked(log: &Path) -> io::Result<File> {
    let mut path = log.as_os_str().to_owned();
    path.push(".tail");
    let path = PathBuf::from(path);
    let file = create_log_file(&path)?;
    std::fs::remove_file(&path)?;
    Ok(file)
}

fn memory_file() -> io::Result<File> {
    Ok(File::from(rustix::fs::memfd_create("task-log", MemfdFlags::CLOEXEC)?))
}

fn to_usize(bytes: u64) -> usize {
    usize::try_from(bytes).unwrap_or(usize::MAX)
}

/// The text on one line, without control characters, and not longer than [`LOG_NOTE_BYTES_MAX`].
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

/// Shortens a text to at most `bytes_max` bytes, and never within a character.
pub(crate) fn truncate_at_char(text: &mut String, bytes_max: usize) {
    let mut end = bytes_max.min(text.len());
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    text.truncate(end);
}
