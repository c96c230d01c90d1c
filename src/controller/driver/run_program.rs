//! Programs that a driver runs to have something done: a line in, what they say out, within limits.

use std::process::{ExitStatus, Stdio};

use rustix::process::{Pid, Signal, kill_process_group};
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWriteExt as _};
use tokio::process::{Child, Command};
use tokio::time::timeout;

use super::DriverError;
use super::subprocess::inherited_variables;
use crate::host::containment::children::{self, StartedChild};
use crate::limits::{DRIVER_LOG_TAIL_BYTES_MAX, DRIVER_OUTPUT_BYTES_MAX, DRIVER_OUTPUT_TIMEOUT};
use crate::redact;

/// How a program ended.
pub(super) struct ProgramOutput {
    pub(super) status: ExitStatus,
    /// What it wrote to standard output.
    pub(super) stdout: String,
    /// The end of what it wrote to standard error, for people.
    pub(super) stderr: String,
}

/// Kills the group of a program that nobody waits for any more.
struct ProcessGroupGuard(Option<Pid>);

impl Drop for ProcessGroupGuard {
    fn drop(&mut self) {
        if let Some(group) = self.0 {
            // It may have ended.
            kill_process_group(group, Signal::KILL).ok();
        }
    }
}

/// Runs a program to its end, with this as its standard input. What it has started and left behind may go on.
///
/// # Errors
///
/// Where it cannot be run, or says more than there is room for.
///
/// # Cancel safety
///
/// A program that is not waited for is killed, with its group.
pub(super) async fn run(argv: &[String], input: &[u8]) -> Result<ProgramOutput, DriverError> {
    let Some((program, arguments)) = argv.split_first() else {
        return Err(DriverError("no command is configured".to_owned()));
    };
    let mut command = Command::new(program);
    command.args(arguments).env_clear().envs(inherited_variables()).process_group(0);
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let started = children::start_child(None, || command.spawn(), Child::id);
    let StartedChild { mut child, registration: _known } =
        started.map_err(|error| DriverError(format!("{program} cannot be run: {error}")))?;
    let mut group = ProcessGroupGuard(child.id().and_then(|id| i32::try_from(id).ok()).and_then(Pid::from_raw));
    let (stdin, stdout, stderr) = (child.stdin.take(), child.stdout.take(), child.stderr.take());
    let (mut out, mut err) = (Vec::new(), Vec::new());
    let status = {
        let writing = async move {
            if let Some(mut stdin) = stdin {
                // One that does not care for its input may have closed it.
                stdin.write_all(input).await.ok();
            }
        };
        let reading = async {
            tokio::join!(writing, read_limited(stdout, &mut out), read_limited(stderr, &mut err));
        };
        let mut reading = std::pin::pin!(reading);
        let mut all_is_read = false;
        let status = tokio::select! {
            status = child.wait() => status,
            () = &mut reading => {
                all_is_read = true;
                child.wait().await
            }
        };
        if !all_is_read {
            // What it has left running may hold its output open.
            timeout(DRIVER_OUTPUT_TIMEOUT, reading).await.ok();
        }
        status?
    };
    group.0 = None;
    if out.len() > DRIVER_OUTPUT_BYTES_MAX {
        return Err(DriverError(format!("{program} says more than {DRIVER_OUTPUT_BYTES_MAX} bytes")));
    }
    let out = String::from_utf8(out).map_err(|_| DriverError(format!("{program} says what is not UTF-8")))?;
    let from = err.len().saturating_sub(usize::try_from(DRIVER_LOG_TAIL_BYTES_MAX).unwrap_or(usize::MAX));
    // It is shown to whoever asks for the state of the pool.
    let err = redact::text(String::from_utf8_lossy(&err[from..]).trim()).into_owned();
    Ok(ProgramOutput { status, stdout: out, stderr: err })
}

/// The same, where only success is good.
///
/// # Errors
///
/// As above, and where it fails: its own last line.
pub(super) async fn run_checked(argv: &[String], input: &[u8]) -> Result<String, DriverError> {
    let ran = run(argv, input).await?;
    if ran.status.success() { Ok(ran.stdout) } else { Err(ran.error()) }
}

impl ProgramOutput {
    /// Why it has failed.
    pub(super) fn error(&self) -> DriverError {
        let why = self.stderr.lines().next_back().unwrap_or_default();
        DriverError(if why.is_empty() { self.status.to_string() } else { format!("{why} ({})", self.status) })
    }
}

/// Reads all of it, and keeps one byte more than there is room for.
async fn read_limited(from: Option<impl AsyncRead + Unpin>, into: &mut Vec<u8>) {
    let Some(mut from) = from else { return };
    let mut piece = vec![0; 8192];
    while let Ok(count @ 1..) = from.read(&mut piece).await {
        let room = (DRIVER_OUTPUT_BYTES_MAX + 1).saturating_sub(into.len());
        into.extend_from_slice(&piece[..count.min(room)]);
    }
}
