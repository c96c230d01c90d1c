//! How a process comes into its control group before it can run anything.
//!
//! A process that is moved after it was started may have forked by then, and one that is to move itself between `fork` and
//! `exec` takes `unsafe` code. So a program of ours is started in the payload's place, its forerunner: it enters the group,
//! and becomes the payload. Descriptors and folder are the payload's all along, and its arguments hold nothing of ours once
//! it is the payload.
//!
//! That program is a small one of its own, which this one carries along: what is started is a copy in memory that cannot be
//! changed. To start a program as large as a worker costs more than most of what else a short task takes. Where no copy can
//! be made or run, the worker's own program is the forerunner.
//!
//! Standard error is a socket: the payload's environment comes from the worker there, and word of a failure goes back. A
//! copy that closes on `exec` is kept of it, and in its place comes what standard output is. So no descriptor is used that a
//! payload could miss; and what the dynamic loader makes of the payload's environment, it makes of the payload alone.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::fs::{MemfdFlags, SealFlags};
use rustix::io::Errno;

use super::exec_shim::{ENVIRONMENT_BYTES_MAX, ShimError, WAIT, run};

/// What the program is called where it is to enter a group and become something else.
pub(crate) const SHIM_NAME: &str = "[journeyman shim]";
/// This program, even if its file has been replaced.
const OWN_EXECUTABLE: &str = "/proc/self/exe";

/// The small program, or nothing where it could not be built.
static SHIM_BINARY: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/exec_shim"));

static SHIM_CALLED: AtomicBool = AtomicBool::new(false);
static SHIM_COPY: OnceLock<Option<ShimCopy>> = OnceLock::new();

/// The small program as a file in memory, for as long as this process lives.
#[derive(Debug)]
struct ShimCopy {
    path: PathBuf,
    _file: OwnedFd,
}

/// Lets this program take part in containment. To be called first thing in `main`, before any thread is started.
///
/// Where the program was started as a payload's forerunner, this call becomes the payload and does not return. Anywhere
/// else it returns at once, and from then on workers in this process put payloads into control groups where the host
/// allows it, and adopt and reap processes that payloads leave behind. A program that starts children of its own by other
/// means than this crate should do so on another thread than its first, which lives as long as they do: others could be taken
/// for a payload's. So could what such children, or a driver's program, leave running, and workers that outlive their
/// controller: a controller belongs into another process than a worker.
///
/// Without this call, a payload is a process group and nothing more.
pub fn shim() {
    let mut arguments = std::env::args_os();
    if arguments.next().as_deref() != Some(OsStr::new(SHIM_NAME)) {
        SHIM_CALLED.store(true, Ordering::Relaxed);
        return;
    }
    std::process::exit(run(arguments));
}

/// Whether [`shim`] was called.
pub(super) fn is_shim_called() -> bool {
    SHIM_CALLED.load(Ordering::Relaxed)
}

/// Where the forerunner is found.
pub(crate) fn shim_path() -> &'static Path {
    let copy = SHIM_COPY.get_or_init(|| {
        let copied = copy_to_memfd();
        if let Err(why) = &copied {
            tracing::debug!("payloads start through the worker's own program, which takes longer: {why}");
        }
        copied.ok()
    });
    copy.as_ref().map_or_else(|| Path::new(OWN_EXECUTABLE), |copy| &copy.path)
}

/// Copies the small program into a file that nobody can change, and tries whether it can be run.
fn copy_to_memfd() -> io::Result<ShimCopy> {
    if SHIM_BINARY.is_empty() {
        return Err(io::Error::other("no other was built"));
    }
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let file = match rustix::fs::memfd_create("journeyman-exec-shim", flags | MemfdFlags::EXEC) {
        // A kernel before 6.3, where every such file may be executed.
        Err(Errno::INVAL) => rustix::fs::memfd_create("journeyman-exec-shim", flags),
        made => made,
    }?;
    let mut copied = File::from(file);
    write_copy(&mut copied)?;
    let seals = SealFlags::SEAL | SealFlags::SHRINK | SealFlags::GROW | SealFlags::WRITE;
    rustix::fs::fcntl_add_seals(&copied, seals)?;
    let copy = ShimCopy { path: format!("/proc/self/fd/{}", copied.as_raw_fd()).into(), _file: copied.into() };
    #[expect(clippy::disallowed_methods, reason = "at the start only, and for a millisecond")]
    let mut command = std::process::Command::new(&copy.path);
    command.env_clear().stdin(std::process::Stdio::null()).stderr(std::process::Stdio::null());
    let started = super::children::start_child(None, || command.spawn(), |child| Some(child.id()))?;
    let super::children::StartedChild { mut child, registration: known } = started;
    let status = child.wait();
    drop(known);
    // Without arguments it can do nothing, and says so.
    match status?.code() {
        Some(ShimError::EXIT_CODE) => Ok(copy),
        code => Err(io::Error::other(format!("the small one ended with {code:?} where it was tried"))),
    }
}

/// From the file that this program is, and not from this process's memory, which would grow by it.
fn write_copy(copied: &mut File) -> io::Result<()> {
    use std::io::{Seek as _, Write as _};
    let whole = u64::try_from(SHIM_BINARY.len()).unwrap_or(u64::MAX);
    if let Ok(Some(mut at)) = own_file_offset(SHIM_BINARY.as_ptr().addr()) {
        let own = File::open(OWN_EXECUTABLE)?;
        let mut sent = 0;
        while sent < SHIM_BINARY.len() {
            match rustix::fs::sendfile(&*copied, &own, Some(&mut at), SHIM_BINARY.len() - sent) {
                Ok(0) | Err(_) => break,
                Ok(more) => sent += more,
            }
        }
        if copied.metadata()?.len() == whole {
            return Ok(());
        }
        copied.set_len(0)?;
    }
    copied.rewind()?;
    copied.write_all(SHIM_BINARY)
}

/// Where in this program's file the memory at an address comes from.
fn own_file_offset(address: usize) -> io::Result<Option<u64>> {
    Ok(offset_of_address(&std::fs::read_to_string("/proc/self/maps")?, address))
}

/// Reads lines of `start-end permissions offset device number path`.
fn offset_of_address(maps: &str, address: usize) -> Option<u64> {
    let address = u64::try_from(address).ok()?;
    maps.lines().find_map(|line| {
        let mut fields = line.split_ascii_whitespace();
        let (start, end) = fields.next()?.split_once('-')?;
        let hex = |text| u64::from_str_radix(text, 16).ok();
        let (start, end, offset) = (hex(start)?, hex(end)?, hex(fields.nth(1)?)?);
        // Only memory that a file stands behind has a number there.
        let of_file = fields.nth(1)? != "0";
        (of_file && (start..end).contains(&address)).then(|| offset + (address - start))
    })
}

/// An environment as it is handed to the forerunner: each variable, and in the end an empty one, followed by a zero.
///
/// # Errors
///
/// What the system says of an environment that cannot be one.
pub(crate) fn encode_environment<'a>(variables: impl Iterator<Item = (&'a str, &'a str)>) -> io::Result<Vec<u8>> {
    let mut out = Vec::new();
    for (name, value) in variables {
        if name.contains('\0') || value.contains('\0') {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "nul byte found in provided data"));
        }
        for part in [name, "=", value, "\0"] {
            out.extend_from_slice(part.as_bytes());
        }
        if out.len() >= ENVIRONMENT_BYTES_MAX {
            return Err(Errno::TOOBIG.into());
        }
    }
    out.push(0);
    Ok(out)
}

impl ShimError {
    /// Reads what was written where the forerunner's word is expected; `None` where there is none, so that it has become
    /// the payload.
    pub(crate) fn parse(said: &[u8]) -> Option<io::Error> {
        let said = String::from_utf8_lossy(said);
        let mut rest = said.rsplit_once(Self::MARKER)?.1.chars();
        let what = rest.next()?;
        let code = rest.as_str().parse().unwrap_or(Errno::IO.raw_os_error());
        let error = io::Error::from_raw_os_error(code);
        Some(match what {
            Self::EXEC => error,
            // Not the task's fault, so without a number that says so.
            _ => io::Error::other(format!("its control group cannot be entered: {error}")),
        })
    }
}

/// The arguments that make the forerunner enter a group and become `program`, called `argv0`.
pub(super) fn launch_arguments(entrance: &Path, program: &Path, argv0: &str) -> [OsString; 3] {
    [entrance.into(), program.into(), argv0.into()]
}

/// The arguments that make it enter a group and wait there.
pub(super) fn wait_arguments(entrance: &Path) -> [OsString; 2] {
    [entrance.into(), WAIT.into()]
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use super::super::exec_shim::read_environment;
    use super::*;

    #[test]
    fn the_small_program_is_built_and_its_copy_is_the_whole_of_it_and_cannot_be_changed() {
        assert!(SHIM_BINARY.starts_with(b"\x7fELF"), "it takes a static C library to build it");
        let copy = copy_to_memfd().unwrap();
        assert_eq!(std::fs::read(&copy.path).unwrap(), SHIM_BINARY);
        let mut file = File::from(copy._file);
        assert_eq!(file.write(b"x").unwrap_err().raw_os_error(), Some(Errno::PERM.raw_os_error()));
        assert_eq!(file.set_len(0).unwrap_err().raw_os_error(), Some(Errno::PERM.raw_os_error()));
    }

    #[test]
    fn memory_is_found_in_the_file_that_it_comes_from() {
        let maps = "55d0a000-55d0b000 r--p 00000000 fe:00 4660 /bin/x\n\
                    55d0b000-55d0f000 r-xp 00001000 fe:00 4660 /bin/x\n\
                    7ffd1000-7ffd3000 rw-p 00000000 00:00 0 [stack]\n";
        assert_eq!(offset_of_address(maps, 0x55d0_b010), Some(0x1010));
        assert_eq!(offset_of_address(maps, 0x55d0_f000), None);
        assert_eq!(offset_of_address(maps, 0x7ffd_1000), None, "no file stands behind it");
    }

    #[test]
    fn what_cannot_be_executed_keeps_its_number_and_what_the_host_refuses_does_not() {
        let read = |word: &str| ShimError::parse(format!("a warning\n{}{word}", ShimError::MARKER).as_bytes());
        let error = read("x8").unwrap();
        assert_eq!(error.raw_os_error(), Some(Errno::NOEXEC.raw_os_error()));
        let error = read("g13").unwrap();
        assert_eq!(error.raw_os_error(), None);
        assert!(error.to_string().contains("control group"), "{error}");
    }

    #[test]
    fn what_others_write_is_not_the_forerunners_word() {
        for said in ["", "x8", "ERROR: ld.so: object '/nope.so' from LD_PRELOAD cannot be preloaded: ignored.\n"] {
            assert!(ShimError::parse(said.as_bytes()).is_none(), "{said}");
        }
        assert!(ShimError::parse(b"\xff\xfe").is_none());
    }

    fn handed_over(bytes: &[u8]) -> io::Result<Vec<(OsString, OsString)>> {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(bytes).unwrap();
        io::Seek::rewind(&mut file).unwrap();
        read_environment(&file)
    }

    #[test]
    fn an_environment_arrives_as_it_was_or_not_at_all() {
        let variables = [("A", "1"), ("EMPTY", ""), ("LD_PRELOAD", "/a b.so"), ("LINES", "x=1\ny=2"), ("NAME", "é")];
        let bytes = encode_environment(variables.into_iter()).unwrap();
        let wanted: Vec<_> = variables.iter().map(|(name, value)| (name.into(), value.into())).collect();
        assert_eq!(handed_over(&bytes).unwrap(), wanted);
        for cut in 0..bytes.len() {
            assert!(handed_over(&bytes[..cut]).is_err(), "cut at {cut}");
        }
        assert_eq!(handed_over(&encode_environment(std::iter::empty()).unwrap()).unwrap(), []);
    }

    #[test]
    fn what_cannot_be_an_environment_is_refused_as_by_the_system() {
        let refused = |value: &str| encode_environment([("A", value)].into_iter()).unwrap_err();
        assert_eq!(refused("a\0B=b").kind(), io::ErrorKind::InvalidInput);
        let long = "x".repeat(ENVIRONMENT_BYTES_MAX);
        assert_eq!(refused(&long).raw_os_error(), Some(Errno::TOOBIG.raw_os_error()));
    }
}
