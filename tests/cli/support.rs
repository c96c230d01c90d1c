//! Runs the built binary in an empty environment, and compares what it says with what is written down.

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::mpsc::RecvTimeoutError;
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};

/// What a command said and how it ended.
#[derive(Debug)]
pub(crate) struct Said {
    pub(crate) code: i32,
    pub(crate) out: String,
    pub(crate) err: String,
}

/// The binary, with nothing of this process's environment but `PATH`.
pub(crate) fn journeyman(folder: &Path) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_journeyman"));
    command.env_clear().current_dir(folder).stdin(Stdio::null());
    command.env("PATH", std::env::var_os("PATH").unwrap_or_default()).env("TZ", "UTC").env("HOME", folder);
    command
}

/// The longest that a command may take which is expected to end by itself.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(180);

/// Runs a command to its end, with `input` on its standard input. One that does not end is killed, which fails the test.
pub(crate) fn run(command: &mut Command, input: &str) -> Said {
    let mut child =
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("the binary starts");
    let mut stdin = child.stdin.take().expect("stdin is piped");
    // A command that does not read its input closes it.
    drop(stdin.write_all(input.as_bytes()));
    drop(stdin);
    let pid = Pid::from_child(&child);
    let (ended, watch) = std::sync::mpsc::channel::<()>();
    let watchdog = std::thread::spawn(move || {
        if watch.recv_timeout(TIMEOUT) == Err(RecvTimeoutError::Timeout) {
            kill_process(pid, Signal::KILL).expect("it has not been waited for");
        }
    });
    let output = child.wait_with_output().expect("the binary ends");
    drop(ended);
    watchdog.join().expect("nothing panics there");
    Said {
        code: output.status.code().unwrap_or(-1),
        out: String::from_utf8(output.stdout).expect("stdout is UTF-8"),
        err: String::from_utf8(output.stderr).expect("stderr is UTF-8"),
    }
}

/// A folder beside this file.
pub(crate) fn beside(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/cli").join(name)
}

/// Compares a text with the file that holds what it should be. `UPDATE_GOLDEN=1` writes the file.
pub(crate) fn golden(path: &Path, text: &str) {
    if std::env::var_os("UPDATE_GOLDEN").is_some() {
        std::fs::write(path, text).expect("the golden file can be written");
        return;
    }
    let expected = std::fs::read_to_string(path).unwrap_or_default();
    assert_eq!(text, expected, "\n{} differs; UPDATE_GOLDEN=1 writes it anew\n", path.display());
}
