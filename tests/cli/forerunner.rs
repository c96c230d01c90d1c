//! The worker's own program as the forerunner of a payload: what starts payloads where the small one that it carries along
//! cannot be built or run.

use std::io::{Read as _, Write as _};
use std::net::Shutdown;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Command, Output, Stdio};

/// What it does with this program and its arguments, and what it tells the worker.
fn run(entrance: &Path, program: &str, arguments: &[&str]) -> (Output, String) {
    let (mut worker, own) = UnixStream::pair().expect("a socket");
    // Each variable, and in the end an empty one, followed by a zero.
    worker.write_all(b"GREETING=hello there\0\0").expect("it is handed over");
    worker.shutdown(Shutdown::Write).expect("that is all of it");
    let mut command = Command::new(env!("CARGO_BIN_EXE_journeyman"));
    command.arg0("[journeyman shim]").arg(entrance).args([program, "called-so"]).args(arguments);
    command.env("OF_THE_WORKER", "1").stdin(Stdio::null()).stdout(Stdio::piped()).stderr(OwnedFd::from(own));
    let child = command.spawn().expect("it starts");
    // It keeps the other end of the socket, which would never end.
    drop(command);
    let output = child.wait_with_output().expect("it ends");
    let mut told = String::new();
    worker.read_to_string(&mut told).expect("it tells in text");
    (output, told)
}

#[test]
fn the_workers_own_program_enters_the_group_and_becomes_the_payload() {
    let folder = tempfile::tempdir().expect("a folder");
    let entrance = folder.path().join("cgroup.procs");
    std::fs::write(&entrance, "").expect("a file");
    let script = "echo \"$0, $GREETING, ${OF_THE_WORKER-nothing else}\"; echo too >&2; exit 7";
    let (output, told) = run(&entrance, "/bin/sh", &["-c", script, "argument"]);
    assert_eq!(std::fs::read_to_string(&entrance).expect("it is there"), "0", "it has entered by itself");
    let said = String::from_utf8(output.stdout).expect("text");
    assert_eq!(said, "argument, hello there, nothing else\ntoo\n", "both outputs are the payload's");
    assert_eq!((output.status.code(), told.as_str()), (Some(7), ""));
}

#[test]
fn the_workers_own_program_tells_what_kept_it_from_becoming_the_payload() {
    let folder = tempfile::tempdir().expect("a folder");
    let entrance = folder.path().join("cgroup.procs");
    std::fs::write(&entrance, "").expect("a file");
    let (output, told) = run(&entrance, "/no/such/program", &[]);
    assert_eq!(output.status.code(), Some(127));
    assert!(told.ends_with("journeyman shim\u{2}x2"), "no such file: {told:?}");
    let (output, told) = run(&folder.path().join("none/cgroup.procs"), "/bin/true", &[]);
    assert_eq!(output.status.code(), Some(127));
    assert!(told.ends_with("journeyman shim\u{2}g2"), "no such group: {told:?}");
}
