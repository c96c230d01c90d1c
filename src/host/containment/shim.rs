//! How a process comes into its control group before it can run anything.
//!
//! A process that is moved after it was started may have forked by then, and one that is to move itself between `fork` and
//! `exec` takes `unsafe` code. So the worker's own program is started in the payload's place: it enters the group, and
//! becomes the payload. Descriptors and folder are the payload's all along, and its arguments hold nothing of ours once it
//! is the payload.
//!
//! Standard error is a socket: the payload's environment comes from the worker there, and word of a failure goes back. A
//! copy that closes on `exec` is kept of it, and in its place comes what standard output is. So no descriptor is used that a
//! payload could miss; and what the dynamic loader makes of the payload's environment, it makes of the payload alone.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::{Read as _, Write as _};
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::io::{Errno, fcntl_dupfd_cloexec};
use rustix::stdio::{dup2_stderr, stderr, stdin, stdout};

use crate::limits::SHIM_ENVIRONMENT_BYTES_MAX;

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
    let kept = fcntl_dupfd_cloexec(stderr(), KEPT_MIN).map(File::from).map_err(|_| Failed::CODE)?;
    // First, so that the worker's end never sees a socket that was closed with something unread.
    let environment = if program == WAIT {
        Vec::new()
    } else {
        read_environment(&kept).map_err(|error| tell(&kept, Failed::ENTER, &error))?
    };
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
    let error = command.arg0(argv0.unwrap_or(program)).args(arguments).env_clear().envs(environment).exec();
    Err(tell(&kept, Failed::EXEC, &error))
}

/// How much likelier than others a payload is to be chosen where the host runs out of memory.
pub(super) const OOM_SCORE: &str = "300";

fn tell(mut kept: &File, what: char, error: &std::io::Error) -> i32 {
    let text = format!("{}{what}{}", Failed::MARK, error.raw_os_error().unwrap_or_default());
    drop(kept.write_all(text.as_bytes()));
    Failed::CODE
}

/// An environment as it is handed to the forerunner: each variable, and in the end an empty one, followed by a zero.
///
/// # Errors
///
/// What the system says of an environment that cannot be one.
pub(crate) fn written<'a>(variables: impl Iterator<Item = (&'a str, &'a str)>) -> std::io::Result<Vec<u8>> {
    let mut out = Vec::new();
    for (name, value) in variables {
        if name.contains('\0') || value.contains('\0') {
            return Err(std::io::Error::new(std::io::ErrorKind::InvalidInput, "nul byte found in provided data"));
        }
        for part in [name, "=", value, "\0"] {
            out.extend_from_slice(part.as_bytes());
        }
        if out.len() >= SHIM_ENVIRONMENT_BYTES_MAX {
            return Err(Errno::TOOBIG.into());
        }
    }
    out.push(0);
    Ok(out)
}

fn read_environment(from: &File) -> std::io::Result<Vec<(OsString, OsString)>> {
    let mut bytes = Vec::new();
    let most = u64::try_from(SHIM_ENVIRONMENT_BYTES_MAX).unwrap_or(u64::MAX);
    from.take(most).read_to_end(&mut bytes)?;
    // A worker that ended meanwhile has not said everything.
    let whole = bytes.strip_suffix(b"\0").filter(|variables| variables.is_empty() || variables.ends_with(b"\0"));
    let variables = whole.ok_or(Errno::PIPE)?.split(|byte| *byte == 0).filter(|variable| !variable.is_empty());
    Ok(variables.map(pair).collect())
}

/// A name may begin with `=`, as the standard library has it.
fn pair(variable: &[u8]) -> (OsString, OsString) {
    let at = variable.iter().skip(1).position(|byte| *byte == b'=').map_or(variable.len(), |at| at + 1);
    let (name, value) = variable.split_at_checked(at).unwrap_or((variable, b""));
    let value = value.strip_prefix(b"=").unwrap_or_default();
    (OsString::from_vec(name.to_vec()), OsStr::from_bytes(value).to_owned())
}

/// Why a payload was not started.
#[derive(Debug)]
pub(crate) struct Failed;

impl Failed {
    const CODE: i32 = 127;
    /// What the word begins with. Other things may be written before: by a library that the host has preloaded, say.
    const MARK: &str = "\u{1}journeyman shim\u{2}";
    const ENTER: char = 'g';
    const EXEC: char = 'x';

    /// Reads what was written where the forerunner's word is expected; `None` where there is none, so that it has become
    /// the payload.
    pub(crate) fn read(said: &[u8]) -> Option<std::io::Error> {
        let said = String::from_utf8_lossy(said);
        let mut rest = said.rsplit_once(Self::MARK)?.1.chars();
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
        let read = |word: &str| Failed::read(format!("a warning\n{}{word}", Failed::MARK).as_bytes());
        let error = read("x8").unwrap();
        assert_eq!(error.raw_os_error(), Some(Errno::NOEXEC.raw_os_error()));
        let error = read("g13").unwrap();
        assert_eq!(error.raw_os_error(), None);
        assert!(error.to_string().contains("control group"), "{error}");
    }

    #[test]
    fn what_others_write_is_not_the_forerunners_word() {
        for said in ["", "x8", "ERROR: ld.so: object '/nope.so' from LD_PRELOAD cannot be preloaded: ignored.\n"] {
            assert!(Failed::read(said.as_bytes()).is_none(), "{said}");
        }
        assert!(Failed::read(b"\xff\xfe").is_none());
    }

    fn handed_over(bytes: &[u8]) -> std::io::Result<Vec<(OsString, OsString)>> {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(bytes).unwrap();
        std::io::Seek::rewind(&mut file).unwrap();
        read_environment(&file)
    }

    #[test]
    fn an_environment_arrives_as_it_was_or_not_at_all() {
        let variables = [("A", "1"), ("EMPTY", ""), ("LD_PRELOAD", "/a b.so"), ("LINES", "x=1\ny=2"), ("NAME", "é")];
        let bytes = written(variables.into_iter()).unwrap();
        let wanted: Vec<_> = variables.iter().map(|(name, value)| (name.into(), value.into())).collect();
        assert_eq!(handed_over(&bytes).unwrap(), wanted);
        for cut in 0..bytes.len() {
            assert!(handed_over(&bytes[..cut]).is_err(), "cut at {cut}");
        }
        assert_eq!(handed_over(&written(std::iter::empty()).unwrap()).unwrap(), []);
    }

    #[test]
    fn what_cannot_be_an_environment_is_refused_as_by_the_system() {
        let refused = |value: &str| written([("A", value)].into_iter()).unwrap_err();
        assert_eq!(refused("a\0B=b").kind(), std::io::ErrorKind::InvalidInput);
        let long = "x".repeat(SHIM_ENVIRONMENT_BYTES_MAX);
        assert_eq!(refused(&long).raw_os_error(), Some(Errno::TOOBIG.raw_os_error()));
    }
}
