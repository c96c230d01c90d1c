//! A task's log: streamed to disk, redacted, and limited in size by keeping its head and its tail.
//!
//! The first write creates the file. Bytes go to the file until it holds [`LogLimits::head_bytes`]; later bytes go to a
//! ring of [`LogLimits::tail_bytes`] in an unlinked file, which [`TaskLog::finish`] appends to the head after a line that
//! says how many bytes were omitted. A write error never fails or delays the task: the first error ends the writing, later
//! bytes are counted, and the log ends with a line that says so and with the last lines, for which room is kept.
//!
//! Writes go to a bounded buffer, which a blocking thread of the runtime writes to the disk: a disk that does not answer
//! delays neither the caller nor another task. What copies a payload's output waits for [`TaskLog::ready`] first. Without a
//! runtime a write waits for the disk.
//!
//! Secrets are replaced before they are stored, see [`redact`]. Bytes that may be the beginning of a secret are held back
//! until more bytes come, [`TaskLog::flush`] is called, or the log is finished.
//!
//! To follow a log, read the file at [`TaskLog::path`] after each [`TaskLog::wait_for_growth`]. The file does not grow
//! between the end of the head and the end of the task.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::runtime::Handle;
use tokio::sync::watch;

use crate::task::TaskFile;
use journeyman_domain::limits::{
    LOG_HEAD_BYTES, LOG_NOTE_BYTES_MAX, LOG_PENDING_BYTES, LOG_TAIL_BYTES, REDACT_SECRET_CHARS_MIN,
    REDACT_TASK_BYTES_MAX,
};
use journeyman_platform::host::work_dir::{self, WorkDirLock};
use journeyman_platform::redact::{self, RedactFilter, SecretSet};

use super::log_file::LogFile;

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
    pub file: TaskFile,
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
    work_dir_lock: Option<WorkDirLock>,
    secrets: Mutex<Option<Arc<SecretSet>>>,
    /// Locked before `pending`, so that the pieces of a stream stay in order.
    output: Mutex<Output>,
    pending: Mutex<Pending>,
    /// Locked while a slow disk takes a write, on a thread that may block.
    file: Mutex<LogFile>,
    progress: watch::Sender<LogProgress>,
}

/// The stream of a payload.
#[derive(Debug, Default)]
struct Output {
    filter: RedactFilter,
    has_times: bool,
    is_mid_line: bool,
}

impl Output {
    /// Puts the time before each line that begins here.
    fn with_times(&mut self, redacted: Vec<u8>) -> Vec<u8> {
        if !self.has_times {
            return redacted;
        }
        let time = format!("[{:.3}] ", jiff::Timestamp::now());
        let mut timed = Vec::with_capacity(redacted.len() + time.len());
        for line in redacted.split_inclusive(|byte| *byte == b'\n') {
            if !self.is_mid_line {
                timed.extend_from_slice(time.as_bytes());
            }
            timed.extend_from_slice(line);
            self.is_mid_line = !line.ends_with(b"\n");
        }
        timed
    }
}

/// What the writer takes next.
#[derive(Debug, Default)]
struct Pending {
    bytes: Vec<u8>,
    /// Bytes of notes that found the buffer full.
    dropped: u64,
    /// A thread writes, or is about to.
    is_writing: bool,
    /// Nothing more is taken.
    is_closed: bool,
}

#[derive(Debug, Default)]
struct LogProgress {
    /// Something was written, held back or not.
    written: bool,
    /// What the writer was given.
    bytes_taken: u64,
    /// What the writer has written.
    bytes: u64,
    finished: bool,
}

impl LogProgress {
    const fn is_ready(&self) -> bool {
        self.bytes_taken - self.bytes < LOG_PENDING_BYTES
    }
}

impl TaskLog {
    /// Creates a log at `path`. An existing file is overwritten; a symbolic link is not followed.
    pub fn new(path: impl Into<PathBuf>, limits: LogLimits) -> Self {
        Self::in_work_dir(path.into(), limits, false, None)
    }

    /// As [`TaskLog::new`], but fails to create the file once the work directory has been replaced. The lines of the payload
    /// begin with their times if `has_times`.
    pub(crate) fn in_work_dir(
        path: PathBuf,
        limits: LogLimits,
        has_times: bool,
        work_dir_lock: Option<WorkDirLock>,
    ) -> Self {
        let file = LogFile::new(path.clone(), limits, work_dir_lock.clone());
        Self {
            shared: Arc::new(LogShared {
                path,
                work_dir_lock,
                secrets: Mutex::default(),
                output: Mutex::new(Output { has_times, ..Output::default() }),
                pending: Mutex::default(),
                file: Mutex::new(file),
                progress: watch::Sender::default(),
            }),
        }
    }

    /// Fails once the work directory has been replaced.
    pub(super) fn verify_work_dir(&self) -> io::Result<()> {
        self.shared.work_dir_lock.as_ref().map_or(Ok(()), WorkDirLock::verify)
    }

    /// Returns the path of the file, which the first write creates.
    pub fn path(&self) -> &Path {
        &self.shared.path
    }

    /// Appends bytes, with secrets replaced. Bytes after [`TaskLog::finish`] are discarded.
    ///
    /// Blocks while the buffer is full; [`TaskLog::ready`] waits for room without blocking the thread.
    pub fn write(&self, bytes: &[u8]) {
        if bytes.is_empty() {
            return;
        }
        if !self.is_ready() {
            self.shared.write_pending();
        }
        let mut output = self.shared.output.lock();
        let mut redacted = Vec::with_capacity(bytes.len());
        redact::stream(&mut output.filter, self.task_secrets().as_deref(), bytes, &mut redacted);
        self.give(&output.with_times(redacted));
    }

    /// Resolves when there is room for a write that does not wait for the disk.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe.
    pub async fn ready(&self) {
        if !self.is_ready() {
            // The sender lives as long as `self`, so there is no error.
            drop(self.shared.progress.subscribe().wait_for(LogProgress::is_ready).await);
        }
    }

    pub(crate) fn is_ready(&self) -> bool {
        self.shared.progress.borrow().is_ready()
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
        let mut secrets = self.shared.secrets.lock();
        let secrets = Arc::make_mut(secrets.get_or_insert_default());
        if secrets.bytes() + secret.len() > REDACT_TASK_BYTES_MAX {
            return Err(AddSecretError::LimitReached);
        }
        secrets.add(secret);
        Ok(())
    }

    /// The secrets that only this log redacts.
    pub(crate) fn task_secrets(&self) -> Option<Arc<SecretSet>> {
        self.shared.secrets.lock().clone()
    }

    /// Gives bytes to the writer, and starts it. Waits for no disk.
    fn give(&self, bytes: &[u8]) {
        let mut pending = self.shared.pending.lock();
        if pending.is_closed {
            return;
        }
        pending.bytes.extend_from_slice(bytes);
        self.shared.progress.send_modify(|progress| {
            progress.written = true;
            progress.bytes_taken += bytes.len() as u64;
        });
        if bytes.is_empty() || std::mem::replace(&mut pending.is_writing, true) {
            return;
        }
        drop(pending);
        match Handle::try_current() {
            Ok(runtime) => {
                let shared = Arc::clone(&self.shared);
                drop(runtime.spawn_blocking(move || shared.write_pending()));
            }
            Err(_) => self.shared.write_pending(),
        }
    }

    /// Appends a line written by the handler.
    pub fn write_line(&self, text: &str) {
        self.write(format!("{text}\n").as_bytes());
    }

    /// Appends a line written by the worker, marked with `[journeyman TIME]`. Control characters are escaped and the text is
    /// cut to [`LOG_NOTE_BYTES_MAX`], so that no text can imitate another line. Waits for no disk and no payload: while the
    /// disk does not answer, lines beyond the buffer are dropped and counted.
    pub fn write_note(&self, text: &str) {
        let now = jiff::Timestamp::now();
        let line = format!("[journeyman {now:.3}] {}\n", printable(text));
        // Filtered separately from the payload's stream, so that neither affects the other.
        let line = redact::bytes(line.as_bytes(), self.task_secrets().as_deref());
        let mut pending = self.shared.pending.lock();
        if pending.bytes.len() as u64 > 2 * LOG_PENDING_BYTES {
            pending.dropped += line.len() as u64;
            return;
        }
        drop(pending);
        self.give(&line);
    }

    /// Stores the bytes that are held back, at the end of a payload's output or while it pauses.
    pub fn flush(&self) {
        let (mut output, mut redacted) = (self.shared.output.lock(), Vec::new());
        output.filter.flush(&mut redacted);
        if !redacted.is_empty() {
            self.give(&output.with_times(redacted));
        }
    }

    /// Returns how many bytes the log has, without those held back. Does not wait for a write in progress.
    pub fn bytes(&self) -> u64 {
        self.shared.progress.borrow().bytes
    }

    /// Returns whether nothing was written yet. Does not wait for a write in progress.
    pub fn is_empty(&self) -> bool {
        !self.shared.progress.borrow().written
    }

    /// Returns whether the log is finished. Does not wait for a write in progress.
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
    /// Blocks until the disk has the whole log; call it on a blocking thread.
    ///
    /// # Errors
    ///
    /// Fails if the file cannot be created.
    pub fn finish(&self) -> io::Result<Option<FinishedLog>> {
        let (mut output, mut redacted) = (self.shared.output.lock(), Vec::new());
        redact::end_stream(&mut output.filter, self.task_secrets().as_deref(), &mut redacted);
        if !redacted.is_empty() {
            self.give(&output.with_times(redacted));
        }
        drop(output);
        self.shared.pending.lock().is_closed = true;
        self.shared.write_pending();
        let finished = self.shared.file.lock().finish()?;
        if finished.is_some() {
            self.shared.progress.send_modify(|progress| progress.finished = true);
        }
        Ok(finished)
    }

    /// Deletes the file; a missing file is a success. Open files stay readable.
    ///
    /// # Errors
    ///
    /// The error of the file system.
    pub fn remove(&self) -> io::Result<()> {
        std::fs::remove_file(&self.shared.path).or_else(work_dir::ignore_missing)
    }

    /// Deletes the file for good: nothing that still waits for the writer creates it again. Blocks.
    pub(crate) fn discard(&self) -> io::Result<()> {
        let mut pending = self.shared.pending.lock();
        (pending.is_closed, pending.bytes) = (true, Vec::new());
        drop(pending);
        let _no_write = self.shared.file.lock();
        self.remove()
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

impl LogShared {
    /// Writes until nothing is pending. Blocks.
    fn write_pending(&self) {
        let mut file = self.file.lock();
        loop {
            let mut pending = self.pending.lock();
            let (bytes, dropped) = (std::mem::take(&mut pending.bytes), std::mem::take(&mut pending.dropped));
            if bytes.is_empty() && dropped == 0 {
                pending.is_writing = false;
                return;
            }
            drop(pending);
            file.append(&bytes);
            file.bytes_offered += dropped;
            // After the bytes, so that a follower finds them in the file.
            self.progress.send_modify(|progress| progress.bytes += bytes.len() as u64);
        }
    }
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

#[cfg(test)]
impl TaskLog {
    /// A disk that takes no write until this is dropped.
    pub(crate) fn stall_disk(&self) -> std::sync::mpsc::Sender<()> {
        let (release, released) = std::sync::mpsc::channel();
        let (stalled, is_stalled) = std::sync::mpsc::channel();
        let log = self.clone();
        std::thread::spawn(move || {
            let _file = log.shared.file.lock();
            stalled.send(()).unwrap();
            released.recv().ok();
        });
        is_stalled.recv().unwrap();
        release
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt as _;
    use std::time::Duration;

    use journeyman_platform::host::clock::Clock;

    use super::*;
    use crate::handler::process::{EndCause, Launch, RunLimits, RunningProcess};
    use crate::handler::{Cancellation, Context};

    fn text(log: &TaskLog) -> String {
        let finished = log.finish().unwrap().unwrap();
        let mut bytes = vec![0; usize::try_from(finished.bytes).unwrap()];
        finished.file.read_exact_at(&mut bytes, 0).unwrap();
        String::from_utf8(bytes).unwrap()
    }

    #[tokio::test]
    async fn a1_notes_and_secrets_wait_for_no_write_of_a_payload_and_their_buffer_is_bounded() {
        let folder = tempfile::tempdir().unwrap();
        let log = TaskLog::new(folder.path().join("log"), LogLimits::default());
        let disk = log.stall_disk();
        log.write(b"output\n");
        log.write_note("canceled by operator");
        log.add_secret("a secret").unwrap();
        assert!(log.task_secrets().is_some());
        for _ in 0..1000 {
            log.write_note(&"x".repeat(LOG_NOTE_BYTES_MAX));
        }
        assert!(log.shared.pending.lock().bytes.len() as u64 <= 3 * LOG_PENDING_BYTES);
        assert!(!log.is_ready() && log.bytes() == 0);
        drop(disk);
        log.ready().await;
        let text = text(&log);
        assert!(text.starts_with("output\n[journeyman ") && text.contains("canceled by operator"), "{}", &text[..200]);
        assert!(text.contains("bytes could not be written: the disk did not answer"), "{}", &text[text.len() - 200..]);
    }

    #[test]
    fn each_line_of_a_payload_begins_with_its_time_once() {
        let folder = tempfile::tempdir().unwrap();
        let log = TaskLog::in_work_dir(folder.path().join("log"), LogLimits::default(), true, None);
        for bytes in [&b"one\ntw"[..], b"o", b"\n", b"\n", b"end"] {
            log.write(bytes);
        }
        let text = text(&log);
        let lines: Vec<_> = text.lines().map(|line| line.split_once("] ").unwrap()).collect();
        assert_eq!(lines.iter().map(|(_, line)| *line).collect::<Vec<_>>(), ["one", "two", "", "end"]);
        for (time, _) in lines {
            time.strip_prefix('[').unwrap().parse::<jiff::Timestamp>().unwrap();
        }
    }

    type Cancel = watch::Sender<Option<Cancellation>>;

    /// A payload whose output goes to a log.
    async fn started(folder: &Path, script: &str) -> (TaskLog, Context, Cancel, RunningProcess) {
        let log = TaskLog::new(folder.join("log"), LogLimits::default());
        let (workdir, clock) = (folder.join("task"), Clock::boot());
        let (context, cancel) =
            Context::without_claim("printer", crate::task::Definition::default(), workdir, log.clone(), clock).unwrap();
        let argv = ["/bin/sh", "-c", script].map(str::to_owned);
        let running = RunningProcess::start(Launch::new(&argv, &std::iter::empty().collect(), &context)).await.unwrap();
        (log, context, cancel, running)
    }

    #[tokio::test]
    async fn a2_a_printing_payload_is_killed_within_its_grace_while_the_disk_takes_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let script = "trap '' TERM; while :; do echo xxxxxxxxxxxxxxxxxxxxxxxx; done";
        let (log, context, cancel, running) = started(folder.path(), script).await;
        let disk = log.stall_disk();
        let full = async {
            log.shared.progress.subscribe().wait_for(|progress| !progress.is_ready()).await.unwrap();
            cancel.send_replace(Some(Cancellation::shutdown(Duration::from_secs(1), Clock::boot())));
        };
        let limits = RunLimits { run_time: None, termination_grace: Duration::from_secs(60) };
        let (end, ()) = tokio::join!(running.finish(limits, &context), full);
        let end = end.unwrap();
        assert!(matches!(end.cause, EndCause::Canceled(_)) && end.was_killed, "{end:?}");
        assert!(end.notes.iter().any(|note| note.contains("the disk of this log does not answer")), "{end:?}");
        drop(disk);
    }

    #[tokio::test]
    async fn a2_output_that_comes_after_another_writer_has_filled_the_log_blocks_no_thread() {
        let folder = tempfile::tempdir().unwrap();
        let script = "until [ -e go ]; do sleep 0.02; done; echo output; : >printed";
        let (log, context, _cancel, running) = started(folder.path(), script).await;
        let disk = log.stall_disk();
        let filling = async {
            // The output is waited for by then.
            tokio::task::yield_now().await;
            while log.is_ready() {
                log.write_note(&"x".repeat(LOG_NOTE_BYTES_MAX));
            }
            std::fs::write(context.workdir().join("go"), "").unwrap();
            let mut turns_left = 1_000;
            while turns_left > 0 {
                tokio::task::yield_now().await;
                turns_left -= u32::from(context.workdir().join("printed").exists());
            }
            drop(disk);
        };
        let limits = RunLimits { run_time: None, termination_grace: Duration::from_secs(60) };
        let (end, ()) = tokio::join!(running.finish(limits, &context), filling);
        assert_eq!(end.unwrap().cause, EndCause::Exited);
        assert!(text(&log).contains("output\n"));
    }
}
