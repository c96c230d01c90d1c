//! The exec shim: a small program that moves itself into a control group and then becomes another program.
//!
//! `build.rs` compiles this file by itself into a static program that the worker embeds, so it uses the standard library alone.
//! In the library only its constants are used. `shim_launch.rs` describes the protocol with the worker.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::{Error, ErrorKind, Read as _, Result, Write as _};
use std::os::fd::AsFd as _;
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};
use std::os::unix::process::CommandExt as _;
use std::process::{Command, Stdio};

/// `payload PROCS PROGRAM ARGV0 [ARGUMENT]...`: become a payload, whose environment the worker sends over standard error.
pub(super) const PAYLOAD: &str = "payload";
/// `exec PROCS PROGRAM [ARGUMENT]...`: become a program with this environment and these descriptors.
pub(super) const EXEC: &str = "exec";
/// `wait PROCS`: wait to be killed, for the probe.
pub(super) const WAIT: &str = "wait";
/// The kernel accepts less.
pub(super) const ENVIRONMENT_BYTES_MAX: usize = 8 << 20;
/// Makes the kernel choose a payload rather than the worker when the host runs out of memory.
pub(super) const OOM_SCORE: &str = "300";

/// Why a payload was not started, as the shim reports it.
#[derive(Debug)]
pub struct ShimError;

impl ShimError {
    /// The exit status of a shim that failed.
    pub(super) const EXIT_CODE: i32 = 127;
    /// Starts the report. A library that the host preloads, for example, may write before it.
    pub(super) const MARKER: &str = "\u{1}journeyman shim\u{2}";
    pub(super) const ENTER: char = 'g';
    pub(super) const EXEC: char = 'x';
}

/// Does what the arguments say. Returns an exit status unless it becomes another program.
pub fn run(mut arguments: impl Iterator<Item = OsString>) -> i32 {
    let (Some(mode), Some(procs)) = (arguments.next(), arguments.next()) else { return ShimError::EXIT_CODE };
    let exit = match mode.to_str() {
        Some(PAYLOAD) => exec_payload(&procs, arguments),
        Some(EXEC) => exec_program(&procs, arguments),
        Some(WAIT) => wait(&procs),
        Some(_) | None => None,
    };
    exit.unwrap_or(ShimError::EXIT_CODE)
}

fn exec_payload(procs: &OsStr, mut arguments: impl Iterator<Item = OsString>) -> Option<i32> {
    let (program, argv0) = (arguments.next()?, arguments.next()?);
    // A copy that closes on `exec`, so that the payload has no descriptor of the shim's.
    let worker = std::io::stderr().as_fd().try_clone_to_owned().map(File::from).ok()?;
    let entering = |error: Error| report_error(&worker, ShimError::ENTER, &error);
    // Before anything else: unread bytes would make the worker's end of the socket fail with ECONNRESET.
    let started = read_environment(&worker)
        .and_then(|environment| enter(procs).map(|()| environment))
        .and_then(|environment| Ok((environment, std::io::stdout().as_fd().try_clone_to_owned()?)));
    let (environment, output) = match started {
        Ok(started) => started,
        Err(error) => return entering(error),
    };
    // The worker's own value may protect it, and is inherited.
    drop(std::fs::write("/proc/self/oom_score_adj", OOM_SCORE));
    #[allow(clippy::disallowed_methods, reason = "this process becomes the program; it starts none")]
    let mut command = Command::new(program);
    command.arg0(argv0).args(arguments).env_clear().envs(environment).stderr(Stdio::from(output));
    report_error(&worker, ShimError::EXEC, &command.exec())
}

fn report_error(mut worker: &File, stage: char, error: &Error) -> Option<i32> {
    let text = format!("{}{stage}{}", ShimError::MARKER, error.raw_os_error().unwrap_or_default());
    drop(worker.write_all(text.as_bytes()));
    None
}

fn exec_program(procs: &OsStr, mut arguments: impl Iterator<Item = OsString>) -> Option<i32> {
    let program = arguments.next()?;
    if let Err(error) = enter(procs) {
        drop(writeln!(std::io::stderr(), "cannot enter control group {}: {error}", procs.display()));
        return None;
    }
    #[allow(clippy::disallowed_methods, reason = "this process becomes the program; it starts none")]
    let error = Command::new(&program).args(arguments).exec();
    drop(writeln!(std::io::stderr(), "cannot execute {}: {error}", program.display()));
    None
}

fn wait(procs: &OsStr) -> Option<i32> {
    enter(procs).ok()?;
    drop(std::io::stdin().read(&mut [0]));
    Some(0)
}

fn enter(procs: &OsStr) -> Result<()> {
    std::fs::write(procs, "0")
}

/// Reads variables that are each terminated by a zero, and a final empty one.
pub(super) fn read_environment(from: &File) -> Result<Vec<(OsString, OsString)>> {
    let mut bytes = Vec::with_capacity(4 << 10);
    let max = u64::try_from(ENVIRONMENT_BYTES_MAX).unwrap_or(u64::MAX);
    from.take(max).read_to_end(&mut bytes)?;
    // Without the empty variable the worker ended before it had sent everything.
    let complete = bytes.strip_suffix(b"\0").filter(|variables| variables.is_empty() || variables.ends_with(b"\0"));
    let complete = complete.ok_or_else(|| Error::from(ErrorKind::BrokenPipe))?;
    let variables = complete.split(|byte| *byte == 0).filter(|variable| !variable.is_empty());
    Ok(variables.map(split_variable).collect())
}

/// A name may start with `=`, as in the standard library.
fn split_variable(variable: &[u8]) -> (OsString, OsString) {
    let at = variable.iter().skip(1).position(|byte| *byte == b'=').map_or(variable.len(), |at| at + 1);
    let (name, value) = variable.split_at_checked(at).unwrap_or((variable, b""));
    let value = value.strip_prefix(b"=").unwrap_or_default();
    (OsString::from_vec(name.to_vec()), OsStr::from_bytes(value).to_owned())
}
