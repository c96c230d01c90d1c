//! Starts programs in a control group through the exec shim.
//!
//! A process that is moved into a group after it was started may have forked by then, and moving it between `fork` and `exec`
//! takes `unsafe` code. So the worker starts the exec shim (`exec_shim.rs`) instead, which enters the group and becomes the
//! payload. The payload's standard input, output and working directory are those of the shim, and its arguments contain nothing
//! of the worker's.
//!
//! The shim is a small static program that this library embeds and starts from a sealed memfd, because starting a program as
//! large as the worker takes longer than a short payload.
//!
//! The shim's standard error is a socket: the worker sends the payload's environment over it, and the shim reports a failure.
//! The shim keeps a copy that closes on `exec` and replaces standard error by standard output. So no descriptor is used up, and
//! the dynamic loader applies the payload's environment to the payload alone.

use std::fs::File;
use std::io::{self, Write as _};
use std::mem::ManuallyDrop;
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::fs::{MemfdFlags, SealFlags};
use rustix::io::Errno;

use super::exec_shim::{ENVIRONMENT_BYTES_MAX, ShimError};

/// The name of the process until it becomes the payload.
pub const SHIM_NAME: &str = "[journeyman shim]";

/// The place where the build left the program that is embedded; for tests.
pub const SHIM_BUILT: &str = env!("JOURNEYMAN_EXEC_SHIM");
static SHIM_BINARY: &[u8] = include_bytes!(env!("JOURNEYMAN_EXEC_SHIM"));

static SHIM_CALLED: AtomicBool = AtomicBool::new(false);
static SHIM_COPY: OnceLock<Result<PathBuf, String>> = OnceLock::new();

/// Allows workers in this process to adopt and reap processes that payloads leave behind, and to use control groups where the
/// host offers them. Has to be called first in `main`, before any thread is started.
///
/// A program that starts child processes by other means than this crate should do so on another thread than its first, one
/// that lives as long as they do: otherwise they may be mistaken for processes of a payload. So may the processes that such
/// children or a controller's workers leave running, so a controller belongs into another process than a worker.
///
/// Without this call, a payload is contained by its process group alone.
pub fn shim() {
    SHIM_CALLED.store(true, Ordering::Relaxed);
}

pub(super) fn is_shim_called() -> bool {
    SHIM_CALLED.load(Ordering::Relaxed)
}

/// The path of the exec shim's copy in memory, which stays open as long as this process runs.
///
/// # Errors
///
/// The kernel has no memfd.
pub(super) fn shim_path() -> io::Result<&'static Path> {
    let copy = SHIM_COPY.get_or_init(|| match copy_to_memfd() {
        Ok(file) => Ok(fd_path(&ManuallyDrop::new(file))),
        Err(error) => Err(format!("cannot copy the exec shim: {error}")),
    });
    copy.as_deref().map_err(|error| io::Error::other(error.as_str()))
}

/// Writes the exec shim into a directory, for users that do not reach the copy in memory.
///
/// # Errors
///
/// The directory cannot be created or written, or other users cannot enter it.
pub fn install_shim(dir: &Path) -> io::Result<PathBuf> {
    std::fs::create_dir_all(dir)?;
    for part in std::path::absolute(dir)?.ancestors() {
        if part.metadata()?.permissions().mode() & 0o001 == 0 {
            let text = format!("other users cannot enter {}; change its mode with `chmod o+x`", part.display());
            return Err(io::Error::other(text));
        }
    }
    let mut file = tempfile::NamedTempFile::new_in(dir)?;
    file.write_all(SHIM_BINARY)?;
    rustix::fs::fchmod(&file, rustix::fs::Mode::from_raw_mode(0o755))?;
    let path = std::path::absolute(dir)?.join("exec-shim");
    file.persist(&path)?;
    Ok(path)
}

fn fd_path(file: &File) -> PathBuf {
    format!("/proc/self/fd/{}", file.as_raw_fd()).into()
}

fn copy_to_memfd() -> io::Result<File> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let file = match rustix::fs::memfd_create("journeyman-exec-shim", flags | MemfdFlags::EXEC) {
        // Before Linux 6.3 every memfd may be executed.
        Err(Errno::INVAL) => rustix::fs::memfd_create("journeyman-exec-shim", flags),
        created => created,
    }?;
    let mut file = File::from(file);
    file.write_all(SHIM_BINARY)?;
    rustix::fs::fcntl_add_seals(&file, SealFlags::SEAL | SealFlags::SHRINK | SealFlags::GROW | SealFlags::WRITE)?;
    Ok(file)
}

/// Encodes an environment for the shim: variables that are each terminated by a zero, and a final empty one.
///
/// # Errors
///
/// What the system returns for an invalid environment.
pub fn encode_environment<'a>(variables: impl Iterator<Item = (&'a str, &'a str)>) -> io::Result<Vec<u8>> {
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
    /// Parses the shim's report; `None` without a report: the shim has become the payload.
    pub fn parse(report: &[u8]) -> Option<io::Error> {
        let report = String::from_utf8_lossy(report);
        let mut rest = report.rsplit_once(Self::MARKER)?.1.chars();
        let stage = rest.next()?;
        let code = rest.as_str().parse().unwrap_or(Errno::IO.raw_os_error());
        let error = io::Error::from_raw_os_error(code);
        Some(match stage {
            Self::EXEC => error,
            // A fault of the host, so without an error number that could be blamed on the task.
            _ => io::Error::other(format!("cannot enter its control group: {error}")),
        })
    }
}

#[cfg(test)]
mod tests {
    use std::ffi::OsString;

    use super::super::exec_shim::read_environment;
    use super::*;

    #[test]
    fn the_copy_of_the_shim_is_complete_and_sealed() {
        let mut copy = copy_to_memfd().unwrap();
        assert_eq!(std::fs::read(fd_path(&copy)).unwrap(), SHIM_BINARY);
        assert_eq!(copy.write(b"x").unwrap_err().raw_os_error(), Some(Errno::PERM.raw_os_error()));
        assert_eq!(copy.set_len(0).unwrap_err().raw_os_error(), Some(Errno::PERM.raw_os_error()));
    }

    #[test]
    fn an_exec_error_keeps_its_number_and_a_host_error_does_not() {
        let read = |report: &str| ShimError::parse(format!("a warning\n{}{report}", ShimError::MARKER).as_bytes());
        assert_eq!(read("x8").unwrap().raw_os_error(), Some(Errno::NOEXEC.raw_os_error()));
        let error = read("g13").unwrap();
        assert_eq!(error.raw_os_error(), None);
        assert!(error.to_string().contains("control group"), "{error}");
    }

    #[test]
    fn other_output_is_not_a_report_of_the_shim() {
        for text in ["", "x8", "ERROR: ld.so: object '/nope.so' from LD_PRELOAD cannot be preloaded: ignored.\n"] {
            assert!(ShimError::parse(text.as_bytes()).is_none(), "{text}");
        }
        assert!(ShimError::parse(b"\xff\xfe").is_none());
    }

    fn received(bytes: &[u8]) -> io::Result<Vec<(OsString, OsString)>> {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(bytes).unwrap();
        io::Seek::rewind(&mut file).unwrap();
        read_environment(&file)
    }

    #[test]
    fn an_environment_arrives_completely_or_not_at_all() {
        let variables = [("A", "1"), ("EMPTY", ""), ("LD_PRELOAD", "/a b.so"), ("LINES", "x=1\ny=2"), ("NAME", "é")];
        let bytes = encode_environment(variables.into_iter()).unwrap();
        let wanted: Vec<_> = variables.iter().map(|(name, value)| (name.into(), value.into())).collect();
        assert_eq!(received(&bytes).unwrap(), wanted);
        for cut in 0..bytes.len() {
            assert!(received(&bytes[..cut]).is_err(), "cut at {cut}");
        }
        assert_eq!(received(&encode_environment(std::iter::empty()).unwrap()).unwrap(), []);
    }

    #[test]
    fn an_invalid_environment_is_rejected_with_the_systems_error() {
        let error = |value: &str| encode_environment([("A", value)].into_iter()).unwrap_err();
        assert_eq!(error("a\0B=b").kind(), io::ErrorKind::InvalidInput);
        let long = "x".repeat(ENVIRONMENT_BYTES_MAX);
        assert_eq!(error(&long).raw_os_error(), Some(Errno::TOOBIG.raw_os_error()));
    }
}
