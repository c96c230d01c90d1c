//! The forerunner of a payload: it enters the payload's control group and becomes the payload.
//!
//! The standard library alone: this file is also compiled by itself, into the small program that `build.rs` beside it makes
//! for the worker to carry along. It reads what the worker writes, and judges nothing.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::{Error, ErrorKind, Read as _, Result, Write as _};
use std::os::fd::AsFd as _;
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};
use std::os::unix::process::CommandExt as _;
use std::process::{Command, Stdio};

/// In place of a program: wait to be killed, for probing.
pub(super) const WAIT: &str = "";
/// The largest environment that is handed over. The kernel takes less.
pub(super) const ENVIRONMENT_BYTES_MAX: usize = 8 << 20;
/// How much likelier than others a payload is to be chosen where the host runs out of memory.
pub(super) const OOM_SCORE: &str = "300";

/// Why a payload was not started, as the forerunner tells it.
#[derive(Debug)]
pub(crate) struct ShimError;

impl ShimError {
    /// The status of a forerunner that failed.
    pub(super) const EXIT_CODE: i32 = 127;
    /// What the word begins with. Other things may be written before: by a library that the host has preloaded, say.
    pub(super) const MARKER: &str = "\u{1}journeyman shim\u{2}";
    pub(super) const ENTER: char = 'g';
    pub(super) const EXEC: char = 'x';
}

/// Does as its arguments say: the file whose writers enter the group, the program, what that is called, and its arguments.
/// Comes back, with an exit status, where it does not become the payload.
pub(super) fn run(mut arguments: impl Iterator<Item = OsString>) -> i32 {
    let (Some(entrance), Some(program), argv0) = (arguments.next(), arguments.next(), arguments.next()) else {
        return ShimError::EXIT_CODE;
    };
    match exec_payload(&entrance, &program, argv0.as_deref(), arguments) {
        Ok(()) => 0,
        Err(code) => code,
    }
}

fn exec_payload(
    entrance: &OsStr,
    program: &OsStr,
    argv0: Option<&OsStr>,
    arguments: impl Iterator<Item = OsString>,
) -> std::result::Result<(), i32> {
    // A copy that closes on `exec`, so that its number does not matter to the payload.
    let kept = std::io::stderr().as_fd().try_clone_to_owned().map(File::from).map_err(|_| ShimError::EXIT_CODE)?;
    let entering = |error: Error| report_error(&kept, ShimError::ENTER, &error);
    // First, so that the worker's end never sees a socket that was closed with something unread.
    let environment = if program == WAIT { Vec::new() } else { read_environment(&kept).map_err(entering)? };
    std::fs::write(entrance, "0").map_err(entering)?;
    // The worker is worth more than any payload, and may itself be protected by a value that is inherited.
    drop(std::fs::write("/proc/self/oom_score_adj", OOM_SCORE));
    if program == WAIT {
        drop(std::io::stdin().read(&mut [0]));
        return Ok(());
    }
    let output = std::io::stdout().as_fd().try_clone_to_owned().map_err(entering)?;
    #[allow(clippy::disallowed_methods, reason = "this process becomes it; nothing is started")]
    let mut command = Command::new(program);
    command.arg0(argv0.unwrap_or(program)).args(arguments).env_clear().envs(environment).stderr(Stdio::from(output));
    Err(report_error(&kept, ShimError::EXEC, &command.exec()))
}

fn report_error(mut kept: &File, what: char, error: &Error) -> i32 {
    let text = format!("{}{what}{}", ShimError::MARKER, error.raw_os_error().unwrap_or_default());
    drop(kept.write_all(text.as_bytes()));
    ShimError::EXIT_CODE
}

/// Each variable, and in the end an empty one, followed by a zero.
pub(super) fn read_environment(from: &File) -> Result<Vec<(OsString, OsString)>> {
    let mut bytes = Vec::new();
    let most = u64::try_from(ENVIRONMENT_BYTES_MAX).unwrap_or(u64::MAX);
    from.take(most).read_to_end(&mut bytes)?;
    // A worker that ended meanwhile has not said everything.
    let whole = bytes.strip_suffix(b"\0").filter(|variables| variables.is_empty() || variables.ends_with(b"\0"));
    let whole = whole.ok_or_else(|| Error::from(ErrorKind::BrokenPipe))?;
    let variables = whole.split(|byte| *byte == 0).filter(|variable| !variable.is_empty());
    Ok(variables.map(split_variable).collect())
}

/// A name may begin with `=`, as the standard library has it.
fn split_variable(variable: &[u8]) -> (OsString, OsString) {
    let at = variable.iter().skip(1).position(|byte| *byte == b'=').map_or(variable.len(), |at| at + 1);
    let (name, value) = variable.split_at_checked(at).unwrap_or((variable, b""));
    let value = value.strip_prefix(b"=").unwrap_or_default();
    (OsString::from_vec(name.to_vec()), OsStr::from_bytes(value).to_owned())
}
