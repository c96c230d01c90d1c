//! Payload processes: started in a group of their own, and ended as a group.
//!
//! The leader's exit does not end a payload: its group must be empty. Until then the leader is left unreaped, so that the
//! group's number cannot belong to anybody else when it is signaled. Standard output and error are one pipe, read as
//! bytes into the task's log in the order they were written; nothing is held back, so a line without end costs nothing.
//!
//! What a payload moves out of its group (`setsid`) is the business of the [`Enclosure`] it is started in: it belongs to
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

use crate::host::containment::children::{self, Known, Started};
use crate::host::containment::{COOKIE, Enclosure, Entry, Exceeded, Failed, SHIM, Way};
use crate::host::containment::{larger_than, outgrown, program as forerunner, written};
use crate::host::crash::crash_point;
use crate::host::program::locate;
use crate::limits::{
    DISK_LOOK_EVERY, PROCESS_DRAIN, PROCESS_KILL_MARGIN, PROCESS_KILLED_WAIT, PROCESS_READ_BYTES, PROCESS_START_WAIT,
    SHIM_WORD_BYTES_MAX,
};

use super::environment::Variables;
use super::exit::{self, Exit};
use super::log::TaskLog;
use super::{Cancel, Context};

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
    pub channel: Option<OwnedFd>,
    /// What is around it and whatever it starts.
    pub within: &'a Enclosure,
}

/// What a process finds as standard input.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Input {
    /// Nothing.
    Null,
    /// What is written to [`Running::input`].
    Pipe,
}

/// How long a process may take.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Bounds {
    /// Until it is told to end; `None` is as long as the claim lasts.
    pub run_time: Option<Duration>,
    /// From then until it is killed.
    pub grace: Duration,
}

/// How the leader of a group ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Status {
    /// By itself.
    Code(i32),
    /// By a signal.
    Signal(i32),
    /// Not at all, although it was killed.
    Stuck,
}

impl std::fmt::Display for Status {
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
pub enum Cause {
    /// Its leader exited.
    Itself,
    /// It had used up its time.
    RunTime,
    /// It went beyond a limit that the worker itself watches.
    Exceeded(Exceeded),
    /// The task had to end early.
    Canceled(Cancel),
}

/// How much it takes to end a payload.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Effort {
    /// It ended, or did as it was told within its grace.
    None,
    /// It, or a part of it, was killed.
    Killed,
}

/// How a payload ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ended {
    /// What became of its leader.
    pub status: Status,
    /// Why it ended.
    pub cause: Cause,
    /// How much it took to end it.
    pub effort: Effort,
    /// Lines for the task's log about what it left behind.
    pub remarks: Vec<String>,
    /// Processes of it that are still there, although they were killed.
    pub survivors: Vec<i32>,
    /// The limit that it came up against.
    pub exceeded: Option<Exceeded>,
}

impl Ended {
    /// How its leader ended, and the limit that may be why.
    #[must_use]
    pub fn said(&self) -> String {
        match self.exceeded {
            Some(exceeded) => format!("{}; {exceeded}", self.status),
            None => self.status.to_string(),
        }
    }

    /// Whether its folder was too large at its end.
    #[must_use]
    pub const fn over_its_disk(&self) -> bool {
        matches!(self.exceeded, Some(Exceeded::Disk { .. }))
    }
}

/// A started process. Dropping it kills its group and what is around it.
#[derive(Debug)]
pub struct Running {
    // Dropped in this order: the group is killed, then what is around it, and the leader is reaped last. See `Group`.
    group: Group,
    entry: Entry,
    child: Child,
    exit: Exit,
    output: pipe::Receiver,
    /// Where its standard input is written, if it has one.
    pub input: Option<ChildStdin>,
    // Dropped last: until the leader is reaped, or left to be, it is no orphan.
    _known: Known,
}

/// A process group whose leader has not been reaped.
#[derive(Debug)]
struct Group {
    leader: Pid,
    reaped: bool,
}

impl Group {
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

impl Drop for Group {
    fn drop(&mut self) {
        self.signal(Signal::KILL);
    }
}

impl Running {
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
        launch.within.registered().await?;
        let (output, writer) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)?;
        let entry = launch.within.open()?;
        let Prepared { mut command, forerunner } = prepare(launch, &entry, writer)?;
        let started = children::start(entry.claim(), || command.spawn(), Child::id);
        // The command holds our copies of the writing ends.
        drop(command);
        let Started { mut child, known } = started?;
        let leader = child.id().and_then(|id| Pid::from_raw(id.cast_signed())).ok_or(Errno::SRCH)?;
        let group = Group { leader, reaped: false };
        entry.started(leader.as_raw_pid());
        crash_point("spawned");
        let running = Self {
            group,
            entry,
            exit: Exit::of(leader)?,
            output: pipe::Receiver::from_owned_fd(output)?,
            input: child.stdin.take(),
            child,
            _known: known,
        };
        match forerunner {
            Some(forerunner) => running.become_payload(forerunner).await,
            None => Ok(running),
        }
    }

    /// Waits until the forerunner has become the payload, or has said why it could not.
    async fn become_payload(mut self, forerunner: Forerunner) -> io::Result<Self> {
        let failed = match timeout(PROCESS_START_WAIT, forerunner.seen_off()).await {
            Ok(failed) => failed,
            Err(_) => Some(io::Error::other(format!("not started within {}", shown(PROCESS_START_WAIT)))),
        };
        let Some(failed) = failed else { return Ok(self) };
        self.group.signal(Signal::KILL);
        if timeout(PROCESS_KILLED_WAIT, self.child.wait()).await.is_ok() {
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
    pub async fn finish(mut self, bounds: Bounds, context: &Context) -> io::Result<Ended> {
        let log = context.log();
        let mut pump = Pump { output: &self.output, log, state: Flow::Open };
        let (mut remarks, mut effort) = (Vec::new(), Effort::None);
        let cause = pump.during(cause(&mut self.exit, bounds, context)).await;
        if cause == Cause::Itself {
            if timeout(PROCESS_DRAIN, pump.drain()).await.is_err() {
                effort = Effort::Killed;
                remarks.push(
                    "processes in the background held the output open; those of the payload's group were killed"
                        .to_owned(),
                );
            }
        } else {
            self.group.signal(Signal::TERM);
            // What has stopped itself hears no order.
            self.group.signal(Signal::CONT);
            self.entry.terminate_others(self.group.leader.as_raw_pid());
            let gone = async {
                if self.entry.holds_its_group() {
                    self.exit.seen().await;
                } else {
                    exit::group_gone(&mut self.exit, self.group.leader).await;
                }
                self.entry.deserted().await;
            };
            let grace = grace(cause, bounds.grace, context);
            // An order may come, or be brought forward, while we wait.
            let ended = async {
                tokio::select! {
                    biased;
                    () = gone => true,
                    () = sleep(grace) => false,
                    () = context.kill_due() => false,
                }
            };
            if !pump.during(ended).await {
                effort = Effort::Killed;
                remarks.push(format!("not ended {} after it was told to, and killed", shown(grace)));
            }
        }
        self.group.signal(Signal::KILL);
        self.entry.kill();
        // The kernel passes over a leader that has left its group and whose first thread has ended.
        self.child.start_kill().ok();
        let dead = timeout(PROCESS_KILLED_WAIT, self.exit.seen());
        let status = match pump.during(dead).await {
            Ok(()) => {
                let status = self.child.wait().await?;
                self.group.reaped = true;
                status_of(status)
            }
            Err(_) => Status::Stuck,
        };
        let survivors = pump.during(survivors(self.group.leader, &self.entry)).await;
        if timeout(PROCESS_DRAIN, pump.drain()).await.is_err() {
            remarks.push(
                "a process outside the payload's group holds the output open; what it writes is no longer read"
                    .to_owned(),
            );
        }
        if !survivors.is_empty() {
            remarks.push(format!("processes that could not be killed: {survivors:?}"));
        }
        let exceeded = exceeded(cause, &self.entry, context).await;
        remarks.extend(exceeded.map(|exceeded| exceeded.to_string()));
        Ok(Ended { status, cause, effort, remarks, survivors, exceeded })
    }
}

/// What is to be started, and where word of it comes from.
struct Prepared {
    command: Command,
    forerunner: Option<Forerunner>,
}

/// A process that is to become the payload.
struct Forerunner {
    socket: UnixStream,
    environment: Vec<u8>,
}

impl Forerunner {
    /// Gives it the payload's environment, and waits for its word; `None` where it has become the payload.
    async fn seen_off(mut self) -> Option<io::Error> {
        // One that fails early may still have said why.
        let given = match self.socket.write_all(&self.environment).await {
            Ok(()) => self.socket.shutdown().await,
            failed => failed,
        };
        let (mut said, mut buffer) = (Vec::new(), [0; SHIM_WORD_BYTES_MAX]);
        let heard = loop {
            match self.socket.read(&mut buffer).await {
                Ok(0) => break Ok(()),
                Ok(taken) => said.extend_from_slice(buffer.get(..taken).unwrap_or_default()),
                Err(error) => break Err(error),
            }
            // Its word is the last that is said.
            said.drain(..said.len().saturating_sub(SHIM_WORD_BYTES_MAX));
        };
        // Not the task's fault, so without a number that says so.
        let cut_off = |error| io::Error::other(format!("it ended before it could become the payload: {error}"));
        Failed::read(&said).or_else(|| given.and(heard).err().map(cut_off))
    }
}

fn prepare(launch: Launch<'_>, entry: &Entry, writer: OwnedFd) -> io::Result<Prepared> {
    let (program, arguments) =
        launch.argv.split_first().ok_or_else(|| io::Error::new(io::ErrorKind::InvalidInput, "no program is named"))?;
    let place = locate(program, launch.env, launch.workdir)?;
    let cookie = launch.within.cookie().map(|cookie| (COOKIE, cookie));
    let (mut command, forerunner) = match entry.way(&place, program) {
        Way::Direct => {
            let mut command = Command::new(place);
            command.arg0(program).stdout(writer.try_clone()?).stderr(writer);
            command.env_clear().envs(launch.env);
            (command, None)
        }
        Way::Through(before) => {
            // The dynamic loader would act on the payload's environment before the forerunner's first line.
            let ours = |(name, _): &(&str, &str)| cookie.is_some() && *name == COOKIE;
            let variables = launch.env.iter().map(|(name, value)| (name.as_str(), value.as_str()));
            let environment = written(variables.filter(|variable| !ours(variable)).chain(cookie))?;
            let (socket, its) = UnixStream::pair()?;
            let its = its.into_std()?;
            its.set_nonblocking(false)?;
            let mut command = Command::new(forerunner());
            command.env_clear().arg0(SHIM).args(before).stdout(writer).stderr(OwnedFd::from(its));
            (command, Some(Forerunner { socket, environment }))
        }
    };
    command.current_dir(launch.workdir).args(arguments).envs(cookie);
    command.process_group(0).kill_on_drop(true).stdin(match launch.input {
        Input::Null => Stdio::null(),
        Input::Pipe => Stdio::piped(),
    });
    if let Some(parent_fd) = launch.channel {
        let mapping = FdMapping { parent_fd, child_fd: 3 };
        command.fd_mappings(vec![mapping]).map_err(io::Error::other)?;
    }
    Ok(Prepared { command, forerunner })
}

async fn survivors(group: Pid, entry: &Entry) -> Vec<i32> {
    let mut survivors = entry.survivors().await;
    if !entry.holds_its_group() {
        survivors.extend(exit::survivors(group, PROCESS_KILLED_WAIT).await);
    }
    survivors.sort_unstable();
    survivors.dedup();
    survivors
}

async fn exceeded(cause: Cause, entry: &Entry, context: &Context) -> Option<Exceeded> {
    if let Cause::Exceeded(exceeded) = cause {
        return Some(exceeded);
    }
    if let Some(exceeded) = entry.exceeded() {
        return Some(exceeded);
    }
    let bytes = context.enclosure().disk()?;
    larger_than(context.workdir().to_owned(), bytes).await.then_some(Exceeded::Disk { bytes })
}

async fn cause(exit: &mut Exit, bounds: Bounds, context: &Context) -> Cause {
    let over = async {
        match bounds.run_time {
            Some(span) => sleep(span).await,
            None => std::future::pending().await,
        }
    };
    let outgrows = async {
        match context.enclosure().disk() {
            Some(bytes) => {
                outgrown(context.workdir().to_owned(), bytes, DISK_LOOK_EVERY).await;
                Exceeded::Disk { bytes }
            }
            None => std::future::pending().await,
        }
    };
    tokio::select! {
        biased;
        () = exit.seen() => Cause::Itself,
        order = context.canceled() => Cause::Canceled(order),
        () = over => Cause::RunTime,
        exceeded = outgrows => Cause::Exceeded(exceeded),
    }
}

/// What an order leaves may be shorter than the grace, and at its end we are no longer there to see anything.
fn grace(cause: Cause, configured: Duration, context: &Context) -> Duration {
    match cause {
        Cause::Itself | Cause::RunTime | Cause::Exceeded(_) => configured,
        Cause::Canceled(order) => {
            let left = context.left(order.deadline);
            configured.min(left - PROCESS_KILL_MARGIN.min(left / 4))
        }
    }
}

fn status_of(status: std::process::ExitStatus) -> Status {
    use std::os::unix::process::ExitStatusExt;
    match (status.code(), status.signal()) {
        (Some(code), _) => Status::Code(code),
        (None, Some(signal)) => Status::Signal(signal),
        (None, None) => Status::Stuck,
    }
}

/// A span for a reader, such as `1.250s`.
#[must_use]
pub fn shown(span: Duration) -> String {
    format!("{:.3}s", span.as_secs_f64())
}

/// Moves output into the log.
struct Pump<'a> {
    output: &'a pipe::Receiver,
    log: &'a TaskLog,
    state: Flow,
}

#[derive(PartialEq)]
enum Flow {
    Open,
    Ended,
}

impl Pump<'_> {
    /// Until nobody can write any more.
    ///
    /// Cancel safe: nothing is read that is not written to the log at once.
    async fn drain(&mut self) {
        while self.state == Flow::Open {
            if self.output.readable().await.is_err() {
                self.state = Flow::Ended;
                return;
            }
            self.read();
        }
    }

    /// While something else happens.
    async fn during<T>(&mut self, other: impl Future<Output = T>) -> T {
        let mut other = std::pin::pin!(other);
        loop {
            tokio::select! {
                biased;
                out = &mut other => return out,
                () = self.drain(), if self.state == Flow::Open => {}
            }
        }
    }

    // The buffer lives on the stack for the length of this call, so a payload that is silent costs no memory.
    fn read(&mut self) {
        let mut buffer = [0; PROCESS_READ_BYTES];
        match self.output.try_read(&mut buffer) {
            Ok(0) => self.state = Flow::Ended,
            Ok(taken) => self.log.write(buffer.get(..taken).unwrap_or_default()),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => {
                self.log.note(&format!("the output can no longer be read: {error}"));
                self.state = Flow::Ended;
            }
        }
    }
}
