//! Payload processes: starts them in a process group of their own and ends the whole group.
//!
//! A payload ends when its process group is empty, not when the leader exits. Until then the leader is not reaped, so that
//! the kernel cannot reuse the group's number. Standard output and standard error share one pipe, which is copied to the
//! task's log in the order of the writes.
//!
//! The [`ProcessScope`] contains processes that leave the group by `setsid`; they too must be gone before the payload ends.

use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use command_fds::{CommandFdExt, FdMapping};
use rustix::fs::Gid;
use rustix::io::Errno;
use rustix::process::{Pid, Signal};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::UnixStream;
use tokio::net::unix::pipe;
use tokio::process::{Child, ChildStdin, Command};
use tokio::time::{sleep, timeout};

use journeyman_domain::limits::{
    DISK_USAGE_INTERVAL, PROCESS_KILL_MARGIN, PROCESS_KILL_TIMEOUT, PROCESS_OUTPUT_DRAIN, PROCESS_READ_BYTES,
    PROCESS_START_TIMEOUT, REDACT_HOLD_MAX, SHIM_MESSAGE_BYTES_MAX,
};
use journeyman_platform::host::clock::or_pending;
use journeyman_platform::host::containment::children::{self, ChildRegistration, StartedChild};
use journeyman_platform::host::containment::{
    COOKIE_VARIABLE, LaunchMethod, LimitExceeded, ProcessScope, SHIM_NAME, ScopedProcess, ShimError,
    encode_environment, is_larger_than, wait_larger_than,
};
use journeyman_platform::host::crash_points::crash_point;
use journeyman_platform::host::program_path::find_program;
use journeyman_platform::host::task_user::TaskUser;

use super::environment::Variables;
use super::exit_watcher::{self, ExitWatcher};
use super::log::TaskLog;
use super::{Cancellation, Context, ExecuteError};

/// A process to start.
#[derive(Debug)]
pub struct Launch<'a> {
    /// The program and its arguments.
    pub argv: &'a [String],
    /// The complete environment.
    pub env: &'a Variables,
    /// The working directory.
    pub workdir: &'a Path,
    /// Standard input.
    pub input: Stdio,
    /// Descriptor 3.
    pub message_channel: Option<OwnedFd>,
    /// The scope that contains the process and its descendants.
    pub scope: &'a ProcessScope,
    /// The user that it runs as, and further groups of it; `None` for the worker's own.
    pub user: Option<(&'a TaskUser, &'a [Gid])>,
}

impl<'a> Launch<'a> {
    /// A process of a task: in its directory and its scope, without input and messages.
    pub fn new(argv: &'a [String], env: &'a Variables, context: &'a Context) -> Self {
        Self {
            argv,
            env,
            workdir: context.workdir(),
            input: Stdio::null(),
            message_channel: None,
            scope: context.scope(),
            user: context.user().map(|user| (&**user, &[][..])),
        }
    }
}

/// Time limits of a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RunLimits {
    /// Time until SIGTERM; `None` for no limit.
    pub run_time: Option<Duration>,
    /// Time between SIGTERM and SIGKILL.
    pub termination_grace: Duration,
}

/// How the leader of a process group ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ProcessStatus {
    /// It exited with this status.
    Code(i32),
    /// This signal ended it.
    Signal(i32),
    /// It, or a process that it started, survived SIGKILL.
    Stuck,
}

impl std::fmt::Display for ProcessStatus {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Code(code) => write!(out, "exit status {code}"),
            Self::Signal(number) => match Signal::from_named_raw(*number) {
                Some(signal) => out.write_str(&format!("{signal:?}").trim_matches('"').replace("Signal::", "SIG")),
                None => write!(out, "signal {number}"),
            },
            Self::Stuck => out.write_str("survived SIGKILL"),
        }
    }
}

/// Why a payload ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EndCause {
    /// Its leader exited.
    Exited,
    /// Its run time expired.
    RunTime,
    /// It exceeded a limit that the worker enforces.
    Exceeded(LimitExceeded),
    /// The worker canceled it.
    Canceled(Cancellation),
}

/// How a payload ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProcessEnd {
    /// How its leader ended.
    pub status: ProcessStatus,
    /// Why it ended.
    pub cause: EndCause,
    /// Whether a part of it had to be killed, because it did not exit within its termination grace.
    pub was_killed: bool,
    /// Notes for the task's log.
    pub notes: Vec<String>,
    /// The limit that it reached.
    pub limit_exceeded: Option<LimitExceeded>,
}

impl ProcessEnd {
    /// Describes how the leader ended, and the limit that may have caused it.
    pub fn describe(&self) -> String {
        match self.limit_exceeded {
            Some(exceeded) => format!("{}; {exceeded}", self.status),
            None => self.status.to_string(),
        }
    }

    /// Maps the end to the outcome of its task; `on_exit` maps an exit status, given with a message about it.
    pub(super) fn outcome(
        &self,
        subject: &str,
        time_limit: &str,
        on_exit: impl FnOnce(i32, String) -> Result<(), ExecuteError>,
    ) -> Result<(), ExecuteError> {
        if self.status == ProcessStatus::Stuck {
            return Err(ExecuteError::internal(format!("{subject}: processes survived SIGKILL")));
        }
        let failed = |why: &str| Err(ExecuteError::failed(format!("{subject}: {why}")));
        match (self.cause, self.status) {
            (EndCause::RunTime, _) => failed(&format!("stopped after {time_limit}")),
            (EndCause::Canceled(cancellation), _) => failed(cancellation.cause.message()),
            (EndCause::Exceeded(limit), _) => failed(&limit.to_string()),
            (EndCause::Exited, ProcessStatus::Code(code))
                if !matches!(self.limit_exceeded, Some(LimitExceeded::Disk { .. })) =>
            {
                on_exit(code, format!("{subject}: {}", self.describe()))
            }
            (EndCause::Exited, _) => failed(&self.describe()),
        }
    }
}

/// A running process. Dropping it kills its process group and its scope.
#[derive(Debug)]
pub struct RunningProcess {
    // Dropped in this order: kills the group, then the scope, then reaps the leader. See `ProcessGroup`.
    group: ProcessGroup,
    entry: ScopedProcess,
    child: Child,
    exit_watcher: ExitWatcher,
    output: pipe::Receiver,
    /// The writing end of its standard input, for [`Stdio::piped`].
    pub input: Option<ChildStdin>,
    // Dropped last: until the leader is reaped it must not be taken for an orphan.
    _registration: ChildRegistration,
}

/// A process group whose leader has not been reaped.
#[derive(Debug)]
struct ProcessGroup {
    leader: Pid,
    reaped: bool,
}

impl ProcessGroup {
    fn signal(&self, signal: Signal) {
        if self.reaped {
            return;
        }
        match rustix::process::kill_process_group(self.leader, signal) {
            Ok(()) | Err(Errno::SRCH) => {}
            Err(error) => {
                tracing::warn!(process_group = self.leader.as_raw_pid(), ?signal, %error, "cannot signal the process group of a payload");
            }
        }
    }
}

impl Drop for ProcessGroup {
    fn drop(&mut self) {
        self.signal(Signal::KILL);
    }
}

impl RunningProcess {
    /// Starts a process and waits until it has executed its program.
    ///
    /// # Errors
    ///
    /// The error of the operating system. No process is left running.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future kills the process.
    pub async fn start(launch: Launch<'_>) -> io::Result<Self> {
        launch.scope.ensure_recorded().await?;
        let (output, writer) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)?;
        let mut entry = launch.scope.admit_process()?;
        let (mut command, shim) = build_command(launch, &entry, writer)?;
        let started = children::start_child(entry.orphan_cookie(), || command.spawn(), Child::id);
        // Closes this process's copies of the pipes' writing ends.
        drop(command);
        let StartedChild { mut child, registration } = started?;
        let leader = child.id().and_then(|id| Pid::from_raw(id.cast_signed())).ok_or(Errno::SRCH)?;
        let group = ProcessGroup { leader, reaped: false };
        entry.on_started(leader);
        crash_point("spawned");
        let running = Self {
            group,
            entry,
            exit_watcher: ExitWatcher::of(leader),
            output: pipe::Receiver::from_owned_fd(output)?,
            input: child.stdin.take(),
            child,
            _registration: registration,
        };
        match shim {
            Some(shim) => running.await_exec(shim).await,
            None => Ok(running),
        }
    }

    /// Waits until the exec shim has executed the payload or reported an error.
    async fn await_exec(mut self, shim: ExecShim) -> io::Result<Self> {
        let error = match timeout(PROCESS_START_TIMEOUT, shim.await_exec()).await {
            Ok(error) => error,
            Err(_) => Some(io::Error::other(format!("not started within {}", format_seconds(PROCESS_START_TIMEOUT)))),
        };
        let Some(error) = error else { return Ok(self) };
        self.group.signal(Signal::KILL);
        self.entry.before_reaping();
        if timeout(PROCESS_KILL_TIMEOUT, self.child.wait()).await.is_ok() {
            self.group.reaped = true;
        }
        Err(error)
    }

    /// Returns the process group id, which is the leader's process id.
    pub const fn group(&self) -> i32 {
        self.group.leader.as_raw_pid()
    }

    /// Waits until the payload has ended. At its time limit, or when it is canceled, it gets SIGTERM and, after the
    /// termination grace, SIGKILL.
    ///
    /// # Errors
    ///
    /// Fails if the exit status cannot be read.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future kills the group.
    pub async fn finish(mut self, limits: RunLimits, context: &Context) -> io::Result<ProcessEnd> {
        let log = context.log();
        let mut pump = OutputPump { output: &self.output, log, ended: false };
        let (mut notes, mut was_killed) = (Vec::new(), false);
        context.on_process_started();
        let cause = pump.pump_while(wait_for_end(&mut self.exit_watcher, limits, context)).await;
        if cause == EndCause::Exited {
            if pump.drain_rest().await == OutputEnd::HeldOpen {
                was_killed = true;
                notes.push(
                    "background processes held the output open; the payload's process group was killed".to_owned(),
                );
            }
        } else {
            self.group.signal(Signal::TERM);
            // A stopped process does not handle SIGTERM until it continues.
            self.group.signal(Signal::CONT);
            self.entry.terminate_outside_group(self.group.leader.as_raw_pid());
            let gone = async {
                self.exit_watcher.exited().await;
                if !self.entry.contains_process_group() {
                    exit_watcher::wait_until_empty(self.group.leader).await;
                }
                self.entry.wait_exited().await;
            };
            let grace = effective_grace(cause, limits.termination_grace, context);
            // A cancellation may arrive, or its deadline may move forward, during the grace.
            let ended = async {
                tokio::select! {
                    biased;
                    () = gone => true,
                    () = sleep(grace) => false,
                    () = context.kill_due() => false,
                }
            };
            if !pump.pump_while(ended).await {
                was_killed = true;
                notes.push(format!("did not exit within {} of SIGTERM; killed", format_seconds(grace)));
            }
        }
        self.group.signal(Signal::KILL);
        self.entry.kill();
        // A signal to the group misses a leader that has left the group and whose first thread has exited.
        self.child.start_kill().ok();
        let dead = timeout(PROCESS_KILL_TIMEOUT, self.exit_watcher.exited());
        let mut status = match pump.pump_while(dead).await {
            Ok(()) => {
                self.entry.before_reaping();
                let status = self.child.wait().await?;
                self.group.reaped = true;
                process_status(status)
            }
            Err(_) => ProcessStatus::Stuck,
        };
        if !pump.pump_while(have_ended(self.group.leader, &self.entry)).await {
            status = ProcessStatus::Stuck;
        }
        // What was killed does not wait for a disk that does not answer.
        if let Ok(OutputEnd::HeldOpen) | Err(_) = timeout(2 * PROCESS_OUTPUT_DRAIN, pump.drain_rest()).await {
            let why = if log.is_ready() {
                "a process outside the payload's group holds the output open"
            } else {
                "the disk of this log does not answer"
            };
            notes.push(format!("{why}; the worker stops reading the output"));
        }
        if status == ProcessStatus::Stuck {
            notes.push("processes survived SIGKILL".to_owned());
        }
        if cause == EndCause::Exited && status != ProcessStatus::Stuck {
            context.on_process_exited();
        }
        let limit_exceeded = limit_exceeded(cause, &self.entry, context).await;
        notes.extend(limit_exceeded.map(|limit| limit.to_string()));
        Ok(ProcessEnd { status, cause, was_killed, notes, limit_exceeded })
    }
}

/// The worker's end of an exec shim that will execute the payload.
struct ExecShim {
    socket: UnixStream,
    environment: Vec<u8>,
}

impl ExecShim {
    /// Sends the payload's environment and waits until the shim has executed the payload (`None`) or failed.
    async fn await_exec(mut self) -> Option<io::Error> {
        // A shim that failed early may still have reported an error, so a failed write is not returned yet.
        let sent = match self.socket.write_all(&self.environment).await {
            Ok(()) => self.socket.shutdown().await,
            failed => failed,
        };
        let (mut message, mut buffer) = (Vec::new(), [0; SHIM_MESSAGE_BYTES_MAX]);
        let received = loop {
            match self.socket.read(&mut buffer).await {
                Ok(0) => break Ok(()),
                Ok(bytes) => message.extend_from_slice(buffer.get(..bytes).unwrap_or_default()),
                Err(error) => break Err(error),
            }
            // The dynamic loader may write first; the shim's report comes last.
            message.drain(..message.len().saturating_sub(SHIM_MESSAGE_BYTES_MAX));
        };
        // Without an errno, so that it is not taken for the task's fault.
        let broken = |error| io::Error::other(format!("the exec shim ended before it executed the payload: {error}"));
        ShimError::parse(&message).or_else(|| sent.and(received).err().map(broken))
    }
}

/// The command, and the shim that it starts if it does not start the payload itself.
fn build_command(
    launch: Launch<'_>,
    entry: &ScopedProcess,
    writer: OwnedFd,
) -> io::Result<(Command, Option<ExecShim>)> {
    let (program, arguments) = launch
        .argv
        .split_first()
        .ok_or_else(|| io::Error::new(io::ErrorKind::InvalidInput, "the argument vector is empty"))?;
    let path = find_program(program, launch.env, launch.workdir)?;
    let cookie = launch.scope.cookie().map(|cookie| (COOKIE_VARIABLE, cookie));
    let (mut command, shim) = match entry.launch_method(&path, program, launch.user)? {
        LaunchMethod::Direct => {
            let mut command = Command::new(path);
            command.arg0(program).stdout(writer.try_clone()?).stderr(writer);
            command.env_clear().envs(launch.env);
            (command, None)
        }
        LaunchMethod::ViaShim { program, arguments } => {
            // Sent over a socket: the dynamic loader would apply the payload's environment to the shim itself.
            let is_cookie = |(name, _): &(&str, &str)| cookie.is_some() && *name == COOKIE_VARIABLE;
            let variables = launch.env.iter().map(|(name, value)| (name.as_str(), value.as_str()));
            let environment = encode_environment(variables.filter(|variable| !is_cookie(variable)).chain(cookie))?;
            let (socket, shim_socket) = UnixStream::pair()?;
            let shim_socket = shim_socket.into_std()?;
            shim_socket.set_nonblocking(false)?;
            let mut command = Command::new(program);
            command.env_clear().arg0(SHIM_NAME).args(arguments).stdout(writer).stderr(OwnedFd::from(shim_socket));
            (command, Some(ExecShim { socket, environment }))
        }
    };
    command.current_dir(launch.workdir).args(arguments).envs(cookie);
    command.process_group(0).kill_on_drop(true).stdin(launch.input);
    if let Some(parent_fd) = launch.message_channel {
        let mapping = FdMapping { parent_fd, child_fd: 3 };
        command.fd_mappings(vec![mapping]).map_err(io::Error::other)?;
    }
    Ok((command, shim))
}

async fn have_ended(group: Pid, entry: &ScopedProcess) -> bool {
    let scope_ended = entry.end().await;
    let group_ended = entry.contains_process_group() || exit_watcher::has_ended(group, PROCESS_KILL_TIMEOUT).await;
    scope_ended && group_ended
}

async fn limit_exceeded(cause: EndCause, entry: &ScopedProcess, context: &Context) -> Option<LimitExceeded> {
    if let EndCause::Exceeded(exceeded) = cause {
        return Some(exceeded);
    }
    if let Some(exceeded) = entry.take_exceeded_limit() {
        return Some(exceeded);
    }
    let bytes = context.scope().disk_limit()?;
    is_larger_than(context.workdir().to_owned(), bytes).await.then_some(LimitExceeded::Disk { bytes })
}

async fn wait_for_end(exit: &mut ExitWatcher, limits: RunLimits, context: &Context) -> EndCause {
    let disk_exceeded = context.scope().disk_limit().map(|bytes| async move {
        wait_larger_than(context.workdir().to_owned(), bytes, DISK_USAGE_INTERVAL).await;
        LimitExceeded::Disk { bytes }
    });
    tokio::select! {
        biased;
        () = exit.exited() => EndCause::Exited,
        cancellation = context.canceled() => EndCause::Canceled(cancellation),
        () = or_pending(limits.run_time.map(sleep)) => EndCause::RunTime,
        exceeded = or_pending(disk_exceeded) => EndCause::Exceeded(exceeded),
    }
}

/// The configured grace, or less where the cancellation leaves less: the worker drops this future at the deadline, so the
/// payload is killed a margin earlier.
fn effective_grace(cause: EndCause, configured: Duration, context: &Context) -> Duration {
    let EndCause::Canceled(cancellation) = cause else { return configured };
    let remaining = context.time_until(cancellation.deadline);
    configured.min(remaining - PROCESS_KILL_MARGIN.min(remaining / 4))
}

fn process_status(status: std::process::ExitStatus) -> ProcessStatus {
    use std::os::unix::process::ExitStatusExt;
    match (status.code(), status.signal()) {
        (Some(code), _) => ProcessStatus::Code(code),
        (None, Some(signal)) => ProcessStatus::Signal(signal),
        (None, None) => ProcessStatus::Stuck,
    }
}

/// Formats a duration as `1.250s`.
pub fn format_seconds(span: Duration) -> String {
    format!("{:.3}s", span.as_secs_f64())
}

#[derive(Debug, PartialEq, Eq)]
enum OutputEnd {
    Closed,
    /// A process still has the output open.
    HeldOpen,
}

/// Copies output to the log.
struct OutputPump<'a> {
    output: &'a pipe::Receiver,
    log: &'a TaskLog,
    ended: bool,
}

impl OutputPump<'_> {
    /// Copies until every writing end is closed. While the payload pauses, the log holds nothing back. While the disk does
    /// not answer, the payload waits for its reader.
    ///
    /// Cancel safe: bytes that were read are given to the log at once.
    async fn drain(&mut self) {
        while !self.ended {
            self.log.ready().await;
            match timeout(REDACT_HOLD_MAX, self.output.readable()).await {
                // Another writer has filled the log meanwhile.
                Ok(Ok(())) if !self.log.is_ready() => {}
                Ok(Ok(())) => {
                    self.read();
                    // A payload that writes without pause would keep the worker from stopping it.
                    tokio::task::yield_now().await;
                }
                Ok(Err(_)) => self.ended = true,
                Err(_) => self.log.flush(),
            }
        }
    }

    /// Copies what an ended payload has written. Time in which the log takes nothing does not count.
    async fn drain_rest(&mut self) -> OutputEnd {
        while timeout(PROCESS_OUTPUT_DRAIN, self.drain()).await.is_err() {
            if self.log.is_ready() {
                return OutputEnd::HeldOpen;
            }
        }
        OutputEnd::Closed
    }

    /// Copies until `other` resolves.
    async fn pump_while<T>(&mut self, other: impl Future<Output = T>) -> T {
        let mut other = std::pin::pin!(other);
        loop {
            tokio::select! {
                biased;
                out = &mut other => return out,
                () = self.drain(), if !self.ended => {}
            }
        }
    }

    // Not async, so that a silent payload holds no buffer.
    fn read(&mut self) {
        let mut buffer = [0; PROCESS_READ_BYTES];
        match self.output.try_read(&mut buffer) {
            Ok(0) => {
                self.log.flush();
                self.ended = true;
            }
            Ok(bytes) => self.log.write(buffer.get(..bytes).unwrap_or_default()),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => {
                self.log.write_note(&format!("cannot read the output: {error}"));
                self.ended = true;
            }
        }
    }
}
