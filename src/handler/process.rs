//! Payload processes: started in a group of their own, and ended as a group.
//!
//! The leader's exit does not end a payload: its group must be empty. Until then the leader is left unreaped, so that the
//! group's number cannot belong to anybody else when it is signaled. Standard output and error are one pipe, read as
//! bytes into the task's log in the order they were written; nothing is held back, so a line without end costs nothing.
//!
//! What a payload moves out of its group (`setsid`) is the business of the [`ProcessScope`] it is started in: it belongs to
//! the payload as well, and has to be gone before the payload's end is told.

use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use command_fds::{CommandFdExt, FdMapping};
use rustix::io::Errno;
use rustix::process::{Pid, Signal};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::UnixStream;
use tokio::net::unix::pipe;
use tokio::process::{Child, ChildStdin, Command};
use tokio::time::{sleep, timeout};

use crate::host::containment::children::{self, ChildRegistration, StartedChild};
use crate::host::containment::{
    COOKIE_VARIABLE, LaunchMethod, LimitExceeded, ProcessScope, SHIM, ScopedProcess, ShimError,
};
use crate::host::containment::{encode_environment, is_larger_than, shim_path, wait_larger_than};
use crate::host::crash_points::crash_point;
use crate::host::program_path::find_program;
use crate::limits::{
    DISK_USAGE_INTERVAL, PROCESS_KILL_MARGIN, PROCESS_KILL_TIMEOUT, PROCESS_OUTPUT_DRAIN, PROCESS_READ_BYTES,
    PROCESS_START_TIMEOUT, SHIM_MESSAGE_BYTES_MAX,
};

use super::environment::Variables;
use super::exit_watcher::{self, ExitWatcher};
use super::log::TaskLog;
use super::{Cancellation, Context};

/// What is to be started.
#[derive(Debug)]
pub struct Launch<'a> {
    /// The program and its arguments.
    pub argv: &'a [String],
    /// The whole environment.
    pub env: &'a Variables,
    /// The folder it starts in.
    pub workdir: &'a Path,
    /// What it can read.
    pub input: Input,
    /// What it finds as descriptor 3.
    pub message_channel: Option<OwnedFd>,
    /// What is around it and whatever it starts.
    pub scope: &'a ProcessScope,
}

/// What a process finds as standard input.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Input {
    /// Nothing.
    Null,
    /// What is written to [`RunningProcess::input`].
    Pipe,
}

/// How long a process may take.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RunLimits {
    /// Until it is told to end; `None` is as long as the claim lasts.
    pub run_time: Option<Duration>,
    /// From then until it is killed.
    pub termination_grace: Duration,
}

/// How the leader of a group ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ProcessStatus {
    /// By itself.
    Code(i32),
    /// By a signal.
    Signal(i32),
    /// Not at all, although it was killed.
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
            Self::Stuck => out.write_str("not ended although it was killed"),
        }
    }
}

/// Why a payload ended when it did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EndCause {
    /// Its leader exited.
    Exited,
    /// It had used up its time.
    RunTime,
    /// It went beyond a limit that the worker itself watches.
    Exceeded(LimitExceeded),
    /// The task had to end early.
    Canceled(Cancellation),
}

/// How much it takes to end a payload.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StopEffort {
    /// It ended, or did as it was told within its grace.
    Graceful,
    /// It, or a part of it, was killed.
    Killed,
}

/// How a payload ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProcessEnd {
    /// What became of its leader.
    pub status: ProcessStatus,
    /// Why it ended.
    pub cause: EndCause,
    /// How much it took to end it.
    pub effort: StopEffort,
    /// Lines for the task's log about what it left behind.
    pub notes: Vec<String>,
    /// Processes of it that are still there, although they were killed.
    pub survivors: Vec<i32>,
    /// The limit that it came up against.
    pub limit_exceeded: Option<LimitExceeded>,
}

impl ProcessEnd {
    /// How its leader ended, and the limit that may be why.
    #[must_use]
    pub fn describe(&self) -> String {
        match self.limit_exceeded {
            Some(exceeded) => format!("{}; {exceeded}", self.status),
            None => self.status.to_string(),
        }
    }

    /// Whether its folder was too large at its end.
    #[must_use]
    pub const fn exceeded_disk_limit(&self) -> bool {
        matches!(self.limit_exceeded, Some(LimitExceeded::Disk { .. }))
    }
}

/// A started process. Dropping it kills its group and what is around it.
#[derive(Debug)]
pub struct RunningProcess {
    // Dropped in this order: the group is killed, then what is around it, and the leader is reaped last. See `Group`.
    group: ProcessGroup,
    entry: ScopedProcess,
    child: Child,
    exit_watcher: ExitWatcher,
    output: pipe::Receiver,
    /// Where its standard input is written, if it has one.
    pub input: Option<ChildStdin>,
    // Dropped last: until the leader is reaped, or left to be, it is no orphan.
    _known: ChildRegistration,
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
                tracing::warn!(group = self.leader.as_raw_pid(), ?signal, %error, "a payload's group cannot be signaled");
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
    /// Starts a process, and sees it become the payload.
    ///
    /// # Errors
    ///
    /// What the operating system said; nothing is left running then.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future kills what it has started.
    pub async fn start(launch: Launch<'_>) -> io::Result<Self> {
        launch.scope.ensure_recorded().await?;
        let (output, writer) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)?;
        let entry = launch.scope.admit_process()?;
        let PreparedCommand { mut command, shim } = build_command(launch, &entry, writer)?;
        let started = children::start_child(entry.orphan_cookie(), || command.spawn(), Child::id);
        // The command holds our copies of the writing ends.
        drop(command);
        let StartedChild { mut child, registration: known } = started?;
        let leader = child.id().and_then(|id| Pid::from_raw(id.cast_signed())).ok_or(Errno::SRCH)?;
        let group = ProcessGroup { leader, reaped: false };
        entry.on_started(leader.as_raw_pid());
        crash_point("spawned");
        let running = Self {
            group,
            entry,
            exit_watcher: ExitWatcher::of(leader)?,
            output: pipe::Receiver::from_owned_fd(output)?,
            input: child.stdin.take(),
            child,
            _known: known,
        };
        match shim {
            Some(shim) => running.await_exec(shim).await,
            None => Ok(running),
        }
    }

    /// Waits until the forerunner has become the payload, or has said why it could not.
    async fn await_exec(mut self, shim: ExecShim) -> io::Result<Self> {
        let failed = match timeout(PROCESS_START_TIMEOUT, shim.await_exec()).await {
            Ok(failed) => failed,
            Err(_) => Some(io::Error::other(format!("not started within {}", format_seconds(PROCESS_START_TIMEOUT)))),
        };
        let Some(failed) = failed else { return Ok(self) };
        self.group.signal(Signal::KILL);
        if timeout(PROCESS_KILL_TIMEOUT, self.child.wait()).await.is_ok() {
            self.group.reaped = true;
        }
        Err(failed)
    }

    /// The number of the group, which is that of its leader.
    #[must_use]
    pub const fn group(&self) -> i32 {
        self.group.leader.as_raw_pid()
    }

    /// Sees the payload to its end: by itself, or by TERM, the grace, and KILL to the whole group.
    ///
    /// # Errors
    ///
    /// Where the exit status cannot be had.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future kills the group.
    pub async fn finish(mut self, bounds: RunLimits, context: &Context) -> io::Result<ProcessEnd> {
        let log = context.log();
        let mut pump = OutputPump { output: &self.output, log, state: PumpState::Open };
        let (mut remarks, mut effort) = (Vec::new(), StopEffort::Graceful);
        let cause = pump.pump_while(wait_for_end(&mut self.exit_watcher, bounds, context)).await;
        if cause == EndCause::Exited {
            if timeout(PROCESS_OUTPUT_DRAIN, pump.drain()).await.is_err() {
                effort = StopEffort::Killed;
                remarks.push(
                    "processes in the background held the output open; those of the payload's group were killed"
                        .to_owned(),
                );
            }
        } else {
            self.group.signal(Signal::TERM);
            // What has stopped itself hears no order.
            self.group.signal(Signal::CONT);
            self.entry.terminate_outside_group(self.group.leader.as_raw_pid());
            let gone = async {
                if self.entry.contains_process_group() {
                    self.exit_watcher.exited().await;
                } else {
                    exit_watcher::group_exited(&mut self.exit_watcher, self.group.leader).await;
                }
                self.entry.wait_exited().await;
            };
            let grace = effective_grace(cause, bounds.termination_grace, context);
            // An order may come, or be brought forward, while we wait.
            let ended = async {
                tokio::select! {
                    biased;
                    () = gone => true,
                    () = sleep(grace) => false,
                    () = context.kill_due() => false,
                }
            };
            if !pump.pump_while(ended).await {
                effort = StopEffort::Killed;
                remarks.push(format!("not ended {} after it was told to, and killed", format_seconds(grace)));
            }
        }
        self.group.signal(Signal::KILL);
        self.entry.kill();
        // The kernel passes over a leader that has left its group and whose first thread has ended.
        self.child.start_kill().ok();
        let dead = timeout(PROCESS_KILL_TIMEOUT, self.exit_watcher.exited());
        let status = match pump.pump_while(dead).await {
            Ok(()) => {
                let status = self.child.wait().await?;
                self.group.reaped = true;
                process_status(status)
            }
            Err(_) => ProcessStatus::Stuck,
        };
        let survivors = pump.pump_while(survivors(self.group.leader, &self.entry)).await;
        if timeout(PROCESS_OUTPUT_DRAIN, pump.drain()).await.is_err() {
            remarks.push(
                "a process outside the payload's group holds the output open; what it writes is no longer read"
                    .to_owned(),
            );
        }
        if !survivors.is_empty() {
            remarks.push(format!("processes that could not be killed: {survivors:?}"));
        }
        let exceeded = limit_exceeded(cause, &self.entry, context).await;
        remarks.extend(exceeded.map(|exceeded| exceeded.to_string()));
        Ok(ProcessEnd { status, cause, effort, notes: remarks, survivors, limit_exceeded: exceeded })
    }
}

/// What is to be started, and where word of it comes from.
struct PreparedCommand {
    command: Command,
    shim: Option<ExecShim>,
}

/// A process that is to become the payload.
struct ExecShim {
    socket: UnixStream,
    environment: Vec<u8>,
}

impl ExecShim {
    /// Gives it the payload's environment, and waits for its word; `None` where it has become the payload.
    async fn await_exec(mut self) -> Option<io::Error> {
        // One that fails early may still have said why.
        let given = match self.socket.write_all(&self.environment).await {
            Ok(()) => self.socket.shutdown().await,
            failed => failed,
        };
        let (mut said, mut buffer) = (Vec::new(), [0; SHIM_MESSAGE_BYTES_MAX]);
        let heard = loop {
            match self.socket.read(&mut buffer).await {
                Ok(0) => break Ok(()),
                Ok(taken) => said.extend_from_slice(buffer.get(..taken).unwrap_or_default()),
                Err(error) => break Err(error),
            }
            // Its word is the last that is said.
            said.drain(..said.len().saturating_sub(SHIM_MESSAGE_BYTES_MAX));
        };
        // Not the task's fault, so without a number that says so.
        let cut_off = |error| io::Error::other(format!("it ended before it could become the payload: {error}"));
        ShimError::parse(&said).or_else(|| given.and(heard).err().map(cut_off))
    }
}

fn build_command(launch: Launch<'_>, entry: &ScopedProcess, writer: OwnedFd) -> io::Result<PreparedCommand> {
    let (program, arguments) =
        launch.argv.split_first().ok_or_else(|| io::Error::new(io::ErrorKind::InvalidInput, "no program is named"))?;
    let place = find_program(program, launch.env, launch.workdir)?;
    let cookie = launch.scope.cookie().map(|cookie| (COOKIE_VARIABLE, cookie));
    let (mut command, shim) = match entry.launch_method(&place, program) {
        LaunchMethod::Direct => {
            let mut command = Command::new(place);
            command.arg0(program).stdout(writer.try_clone()?).stderr(writer);
            command.env_clear().envs(launch.env);
            (command, None)
        }
        LaunchMethod::ViaShim(before) => {
            // The dynamic loader would act on the payload's environment before the forerunner's first line.
            let ours = |(name, _): &(&str, &str)| cookie.is_some() && *name == COOKIE_VARIABLE;
            let variables = launch.env.iter().map(|(name, value)| (name.as_str(), value.as_str()));
            let environment = encode_environment(variables.filter(|variable| !ours(variable)).chain(cookie))?;
            let (socket, its) = UnixStream::pair()?;
            let its = its.into_std()?;
            its.set_nonblocking(false)?;
            let mut command = Command::new(shim_path());
            command.env_clear().arg0(SHIM).args(before).stdout(writer).stderr(OwnedFd::from(its));
            (command, Some(ExecShim { socket, environment }))
        }
    };
    command.current_dir(launch.workdir).args(arguments).envs(cookie);
    command.process_group(0).kill_on_drop(true).stdin(match launch.input {
        Input::Null => Stdio::null(),
        Input::Pipe => Stdio::piped(),
    });
    if let Some(parent_fd) = launch.message_channel {
        let mapping = FdMapping { parent_fd, child_fd: 3 };
        command.fd_mappings(vec![mapping]).map_err(io::Error::other)?;
    }
    Ok(PreparedCommand { command, shim })
}

async fn survivors(group: Pid, entry: &ScopedProcess) -> Vec<i32> {
    let mut survivors = entry.survivors().await;
    if !entry.contains_process_group() {
        survivors.extend(exit_watcher::survivors(group, PROCESS_KILL_TIMEOUT).await);
    }
    survivors.sort_unstable();
    survivors.dedup();
    survivors
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

async fn wait_for_end(exit: &mut ExitWatcher, bounds: RunLimits, context: &Context) -> EndCause {
    let over = async {
        match bounds.run_time {
            Some(span) => sleep(span).await,
            None => std::future::pending().await,
        }
    };
    let outgrows = async {
        match context.scope().disk_limit() {
            Some(bytes) => {
                wait_larger_than(context.workdir().to_owned(), bytes, DISK_USAGE_INTERVAL).await;
                LimitExceeded::Disk { bytes }
            }
            None => std::future::pending().await,
        }
    };
    tokio::select! {
        biased;
        () = exit.exited() => EndCause::Exited,
        order = context.canceled() => EndCause::Canceled(order),
        () = over => EndCause::RunTime,
        exceeded = outgrows => EndCause::Exceeded(exceeded),
    }
}

/// What an order leaves may be shorter than the grace, and at its end we are no longer there to see anything.
fn effective_grace(cause: EndCause, configured: Duration, context: &Context) -> Duration {
    match cause {
        EndCause::Exited | EndCause::RunTime | EndCause::Exceeded(_) => configured,
        EndCause::Canceled(order) => {
            let left = context.time_until(order.deadline);
            configured.min(left - PROCESS_KILL_MARGIN.min(left / 4))
        }
    }
}

fn process_status(status: std::process::ExitStatus) -> ProcessStatus {
    use std::os::unix::process::ExitStatusExt;
    match (status.code(), status.signal()) {
        (Some(code), _) => ProcessStatus::Code(code),
        (None, Some(signal)) => ProcessStatus::Signal(signal),
        (None, None) => ProcessStatus::Stuck,
    }
}

/// A span for a reader, such as `1.250s`.
#[must_use]
pub fn format_seconds(span: Duration) -> String {
    format!("{:.3}s", span.as_secs_f64())
}

/// Moves output into the log.
struct OutputPump<'a> {
    output: &'a pipe::Receiver,
    log: &'a TaskLog,
    state: PumpState,
}

#[derive(PartialEq)]
enum PumpState {
    Open,
    Ended,
}

impl OutputPump<'_> {
    /// Until nobody can write any more.
    ///
    /// Cancel safe: nothing is read that is not written to the log at once.
    async fn drain(&mut self) {
        while self.state == PumpState::Open {
            if self.output.readable().await.is_err() {
                self.state = PumpState::Ended;
                return;
            }
            self.read();
        }
    }

    /// While something else happens.
    async fn pump_while<T>(&mut self, other: impl Future<Output = T>) -> T {
        let mut other = std::pin::pin!(other);
        loop {
            tokio::select! {
                biased;
                out = &mut other => return out,
                () = self.drain(), if self.state == PumpState::Open => {}
            }
        }
    }

    // The buffer lives on the stack for the length of this call, so a payload that is silent costs no memory.
    fn read(&mut self) {
        let mut buffer = [0; PROCESS_READ_BYTES];
        match self.output.try_read(&mut buffer) {
            Ok(0) => self.state = PumpState::Ended,
            Ok(taken) => self.log.write(buffer.get(..taken).unwrap_or_default()),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => {
                self.log.write_note(&format!("the output can no longer be read: {error}"));
                self.state = PumpState::Ended;
            }
        }
    }
}
