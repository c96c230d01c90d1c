//! How a process comes into its control group before it can run anything.
//!
//! A process that is moved after it was started may have forked by then, and one that is to move itself between `fork` and
//! `exec` takes `unsafe` code. So the worker's own program is started in the payload's place: it enters the group, and
//! becomes the payload. Descriptors, folder and environment are the payload's all along, and its arguments hold nothing of
//! ours once it is the payload.
//!
//! Standard error carries word of a failure to the worker; a copy that closes on `exec` is kept of it, and in its place
//! comes what standard output is. So no descriptor is used that a payload could miss.

use std::ffi::{OsStr, OsString};
use std::io::Write as _;
use std::os::fd::OwnedFd;
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::io::{Errno, fcntl_dupfd_cloexec};
use rustix::stdio::{dup2_stderr, stderr, stdin, stdout};

/// What the program is called where it is to enter a group and become something else.
pub(crate) const NAME: &str = "[journeyman shim]";
/// In place of a program: wait to be killed, for probing.
const WAIT: &str = "";
/// The lowest number of the descriptor that is kept; those below are the payload's.
const KEPT_MIN: i32 = 10;

static CALLED: AtomicBool = AtomicBool::new(false);

/// Lets this program take part in containment. To be called first thing in `main`, before any thread is started.
///
/// Where the program was started as a payload's forerunner, this call becomes the payload and does not return. Anywhere
/// else it returns at once, and from then on workers in this process put payloads into control groups where the host
/// allows it, and adopt and reap processes that payloads leave behind. A program that starts children of its own by other
/// means than this crate should therefore not call it: they could be taken for a payload's.
///
/// Without this call, a payload is a process group and nothing more.
pub fn shim() {
    let mut arguments = std::env::args_os();
    if arguments.next().as_deref() != Some(OsStr::new(NAME)) {
        CALLED.store(true, Ordering::Relaxed);
        return;
    }
    let mut arguments = arguments.collect::<Vec<_>>().into_iter();
    let (Some(entrance), Some(program), argv0) = (arguments.next(), arguments.next(), arguments.next()) else {
        std::process::exit(Failed::CODE);
    };
    if let Err(failed) = become_payload(&entrance, &program, argv0.as_deref(), arguments.as_slice()) {
        std::process::exit(failed);
    }
    std::process::exit(0);
}

/// Whether [`shim`] was called.
pub(super) fn called() -> bool {
    CALLED.load(Ordering::Relaxed)
}

fn become_payload(entrance: &OsStr, program: &OsStr, argv0: Option<&OsStr>, arguments: &[OsString]) -> Result<(), i32> {
    let kept = fcntl_dupfd_cloexec(stderr(), KEPT_MIN).map_err(|_| Failed::CODE)?;
    std::fs::write(entrance, "0").map_err(|error| tell(&kept, Failed::ENTER, &error))?;
    // The worker is worth more than any payload, and may itself be protected by a value that is inherited.
    drop(std::fs::write("/proc/self/oom_score_adj", OOM_SCORE));
    if program == WAIT {
        let mut byte = [0];
        rustix::io::read(stdin(), &mut byte).ok();
        return Ok(());
    }
    dup2_stderr(stdout()).map_err(|error| tell(&kept, Failed::ENTER, &error.into()))?;
    #[expect(clippy::disallowed_methods, reason = "this process becomes it; nothing is started")]
    let mut command = std::process::Command::new(program);
    let error = command.arg0(argv0.unwrap_or(program)).args(arguments).exec();
    Err(tell(&kept, Failed::EXEC, &error))
}

/// How much likelier than others a payload is to be chosen where the host runs out of memory.
pub(super) const OOM_SCORE: &str = "300";

fn tell(kept: &OwnedFd, what: char, error: &std::io::Error) -> i32 {
    let text = format!("{what}{}", error.raw_os_error().unwrap_or_default());
    let copy = kept.try_clone().map(std::fs::File::from);
    drop(copy.and_then(|mut file| file.write_all(text.as_bytes())));
    Failed::CODE
}

/// Why a payload was not started.
#[derive(Debug)]
pub(crate) struct Failed;

impl Failed {
    const CODE: i32 = 127;
    const ENTER: char = 'g';
    const EXEC: char = 'x';

    /// Reads what the forerunner said before it ended; `None` where it has become the payload.
    pub(crate) fn read(said: &str) -> Option<std::io::Error> {
        let mut rest = said.chars();
        let what = rest.next()?;
        let code = rest.as_str().parse().unwrap_or(Errno::IO.raw_os_error());
        let error = std::io::Error::from_raw_os_error(code);
        Some(match what {
            Self::EXEC => error,
            // Not the task's fault, so without a number that says so.
            _ => std::io::Error::other(format!("its control group cannot be entered: {error}")),
        })
    }
}

/// The arguments that make this program enter a group and become `program`, called `argv0`.
pub(super) fn arguments(entrance: &Path, program: &Path, argv0: &str) -> [OsString; 3] {
    [entrance.into(), program.into(), argv0.into()]
}

/// The arguments that make this program enter a group and wait there.
pub(super) fn waiting(entrance: &Path) -> [OsString; 2] {
    [entrance.into(), WAIT.into()]
}

/// Where this program is found, even if its file has been replaced.
pub(crate) const PROGRAM: &str = "/proc/self/exe";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_cannot_be_executed_keeps_its_number_and_what_the_host_refuses_does_not() {
        assert!(Failed::read("").is_none());
        let error = Failed::read("x8").unwrap();
        assert_eq!(error.raw_os_error(), Some(Errno::NOEXEC.raw_os_error()));
        let error = Failed::read("g13").unwrap();
        assert_eq!(error.raw_os_error(), None);
        assert!(error.to_string().contains("control group"), "{error}");
    }
}
