//! Runs a helper program to its end, with bounded output.

use std::fs::File;
use std::io;
use std::process::{ExitStatus, Stdio};

use rustix::process::{Pid, Signal, kill_process_group};
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWriteExt as _};
use tokio::process::{Child, Command};

use super::containment::children::{self, StartedChild};
use crate::redact;
use journeyman_domain::limits::{DRIVER_LOG_TAIL_BYTES_MAX, DRIVER_OUTPUT_BYTES_MAX};

pub struct ProgramOutput {
    pub status: ExitStatus,
    pub stdout: String,
    /// Its end, without secrets.
    pub stderr: String,
}

struct ProcessGroupGuard(Option<Pid>);

impl Drop for ProcessGroupGuard {
    fn drop(&mut self) {
        if let Some(group) = self.0 {
            // It may have exited.
            kill_process_group(group, Signal::KILL).ok();
        }
    }
}

/// Runs a program in a process group of its own, which is killed on drop.
pub async fn run(mut command: Command, input: &[u8]) -> io::Result<ProgramOutput> {
    command.stdin(Stdio::piped()).stdout(Stdio::piped());
    run_to_end(command, input).await
}

/// Does the same as [`run`], with a file as standard input.
pub async fn run_on_file(mut command: Command, input: File) -> io::Result<ProgramOutput> {
    command.stdin(input).stdout(Stdio::piped());
    run_to_end(command, &[]).await
}

async fn run_to_end(mut command: Command, input: &[u8]) -> io::Result<ProgramOutput> {
    let program = command.as_std().get_program().to_string_lossy().into_owned();
    command.process_group(0).stderr(Stdio::piped());
    let started = children::start_child(None, || command.spawn(), Child::id);
    // Closes this process's copies of its descriptors.
    drop(command);
    let StartedChild { mut child, registration: _known } =
        started.map_err(|error| io::Error::new(error.kind(), format!("cannot run {program}: {error}")))?;
    let mut group = ProcessGroupGuard(child.id().and_then(|id| i32::try_from(id).ok()).and_then(Pid::from_raw));
    let (stdin, stdout, stderr) = (child.stdin.take(), child.stdout.take(), child.stderr.take());
    let (mut out, mut err) = (Vec::new(), Vec::new());
    let write = async move {
        if let Some(mut stdin) = stdin {
            // A program may close its stdin unread.
            stdin.write_all(input).await.ok();
        }
    };
    let (status, (), (), ()) =
        tokio::join!(child.wait(), write, read_limited(stdout, &mut out), read_limited(stderr, &mut err));
    let status = status?;
    group.0 = None;
    if out.len() > DRIVER_OUTPUT_BYTES_MAX {
        return Err(io::Error::other(format!("{program} printed more than {DRIVER_OUTPUT_BYTES_MAX} bytes")));
    }
    let out = String::from_utf8(out).map_err(|_| io::Error::other(format!("{program} printed invalid UTF-8")))?;
    let from = err.len().saturating_sub(usize::try_from(DRIVER_LOG_TAIL_BYTES_MAX).unwrap_or(usize::MAX));
    // The status of the pool shows it.
    let err = redact::text(String::from_utf8_lossy(&err[from..]).trim()).into_owned();
    Ok(ProgramOutput { status, stdout: out, stderr: err })
}

impl ProgramOutput {
    /// The line of a program that says the reason first and advice after it.
    pub fn first_error(&self) -> String {
        self.describe(self.stderr.lines().next())
    }

    pub fn last_error(&self) -> String {
        self.describe(self.stderr.lines().next_back())
    }

    fn describe(&self, line: Option<&str>) -> String {
        line.map_or_else(|| self.status.to_string(), |why| format!("{why} ({})", self.status))
    }
}

async fn read_limited(from: Option<impl AsyncRead + Unpin>, into: &mut Vec<u8>) {
    let Some(mut from) = from else { return };
    let mut piece = vec![0; 8192];
    while let Ok(count @ 1..) = from.read(&mut piece).await {
        let room = (DRIVER_OUTPUT_BYTES_MAX + 1).saturating_sub(into.len());
        into.extend_from_slice(&piece[..count.min(room)]);
    }
}
