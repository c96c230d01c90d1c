//! The exec shim, as the worker starts it.

use std::io::{Read as _, Write as _};
use std::net::Shutdown;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use journeyman_platform::host::containment::SHIM_BUILT as SHIM;

/// Runs a payload through the shim. Returns its output and the shim's report.
fn run_payload(procs: &Path, program: &str, arguments: &[&str]) -> (Output, String) {
    let (mut worker, shim) = UnixStream::pair().expect("a socket");
    worker.write_all(b"GREETING=hello there\0spring.host=h\0\0").expect("the environment is sent");
    worker.shutdown(Shutdown::Write).expect("the socket is half closed");
    let mut command = Command::new(SHIM);
    command.arg("payload").arg(procs).args([program, "called-so"]).args(arguments);
    command.env("OF_THE_WORKER", "1").stdin(Stdio::null()).stdout(Stdio::piped()).stderr(OwnedFd::from(shim));
    let child = command.spawn().expect("the shim starts");
    // The command holds a copy of the socket's other end.
    drop(command);
    let output = child.wait_with_output().expect("the shim ends");
    let mut report = String::new();
    worker.read_to_string(&mut report).expect("the report is text");
    (output, report)
}

/// A stand-in for `cgroup.procs`.
fn procs_file(dir: &tempfile::TempDir) -> PathBuf {
    let path = dir.path().join("cgroup.procs");
    std::fs::write(&path, "").expect("the file is created");
    path
}

#[test]
fn the_shim_enters_the_group_and_becomes_the_payload() {
    let dir = tempfile::tempdir().expect("a directory");
    let procs = procs_file(&dir);
    let script = "echo \"$0, $GREETING, ${OF_THE_WORKER-nothing else}\"; echo too >&2; exit 7";
    let (output, report) = run_payload(&procs, "/bin/sh", &["-c", script, "argument"]);
    assert_eq!(std::fs::read_to_string(&procs).expect("the file exists"), "0", "the shim has entered");
    let text = String::from_utf8(output.stdout).expect("text");
    assert_eq!(text, "argument, hello there, nothing else\ntoo\n", "both outputs are the payload's");
    assert_eq!((output.status.code(), report.as_str()), (Some(7), ""));
}

#[test]
fn the_shim_reports_why_it_did_not_become_the_payload() {
    let dir = tempfile::tempdir().expect("a directory");
    let (output, report) = run_payload(&procs_file(&dir), "/no/such/program", &[]);
    assert_eq!(output.status.code(), Some(127));
    assert!(report.ends_with("journeyman shim\u{2}x2"), "no such file: {report:?}");
    let (output, report) = run_payload(&dir.path().join("none/cgroup.procs"), "/bin/true", &[]);
    assert_eq!(output.status.code(), Some(127));
    assert!(report.ends_with("journeyman shim\u{2}g2"), "no such group: {report:?}");
}

#[test]
fn the_shim_executes_a_program_with_its_own_environment_and_descriptors() {
    let dir = tempfile::tempdir().expect("a directory");
    let procs = procs_file(&dir);
    let run = |procs: &Path, arguments: &[&str]| {
        let mut command = Command::new(SHIM);
        command.arg("exec").arg(procs).args(arguments).env_clear().env("spring.host", "h").env("PS4", "p");
        command.output().expect("the shim runs")
    };
    let output = run(&procs, &["/usr/bin/env"]);
    assert_eq!(String::from_utf8_lossy(&output.stdout), "PS4=p\nspring.host=h\n");
    assert_eq!(std::fs::read_to_string(&procs).expect("the file exists"), "0", "the shim has entered");
    for (procs, program) in [(procs.as_path(), "/no/such/program"), (&dir.path().join("none/x"), "/bin/true")] {
        let output = run(procs, &[program]);
        assert_eq!(output.status.code(), Some(127));
        assert!(String::from_utf8_lossy(&output.stderr).contains("cannot e"), "{output:?}");
    }
}
