//! A worker under Taskcluster's worker-runner, which the test plays: it writes the file, says welcome, renews credentials
//! and tells the worker to go.

use std::io::{BufRead as _, BufReader, Write as _};
use std::path::Path;
use std::process::{ChildStdin, Stdio};

use rustix::process::{Pid, Signal, kill_process};

use crate::running::queue;
use crate::server::{Server, create_at};
use crate::support::journeyman;

const WELCOME: &str =
    r#"~{"type":"welcome","capabilities":["graceful-termination","new-credentials","error-report","log","shutdown"]}"#;

fn file(folder: &Path, root: &str, token: &str, more: &str) {
    let text = format!(
        r#"{{"rootURL":"{root}","clientId":"me","accessToken":"{token}","certificate":"","provisionerId":"build",
            "workerType":"linux","workerGroup":"g","workerId":"w","workerLocation":"{{\"cloud\":\"test\"}}",
            "journeyman":{{"worker":{{"work_dir":"work","termination_grace":"100ms"}},"host":{{"metadata_service":"off"}}{more}}}}}"#
    );
    std::fs::write(folder.join("runner.json"), text).expect("the file can be written");
}

fn start(folder: &Path) -> (Server, ChildStdin) {
    let mut command = journeyman(folder);
    command.args(["run", "--config", "runner.json", "--with-worker-runner"]).stdin(Stdio::piped());
    let mut server = Server::start(&mut command);
    let stdin = server.input();
    (server, stdin)
}

fn say(to: &mut ChildStdin, line: &str) {
    writeln!(to, "{line}").expect("the worker listens");
}

#[test]
fn the_worker_greets_logs_through_the_runner_and_releases_on_request() {
    let folder = tempfile::tempdir().expect("a folder");
    let (_queue, root) = queue(folder.path());
    file(folder.path(), &root, "a-token-for-tests", "");
    let (mut server, mut runner) = start(folder.path());
    say(&mut runner, "some text that is no message");
    say(&mut runner, r#"~{"type":"graceful-termination","finish-tasks":false}"#);
    say(&mut runner, WELCOME);
    server.prints(
        r#"~{"type":"hello","capabilities":["error-report","graceful-termination","log","new-credentials","shutdown"]}"#,
    );
    // The first order came before welcome and was not obeyed.
    create_at(folder.path(), &root, "sleep 600");
    let line = server.says("claimed");
    assert!(line.starts_with("~{") && line.contains(r#""textPayload":"claimed""#), "{line}");
    say(&mut runner, r#"~{"type":"graceful-termination","finish-tasks":false}"#);
    let said = server.ends();
    assert_eq!(said.code, 12, "{}{}", said.out, said.err);
    assert!(said.out.contains("worker-shutdown"), "{}", said.out);
    assert!(!said.out.contains("a-token-for-tests") && !said.err.contains("a-token-for-tests"));
}

#[test]
fn new_credentials_are_used_and_an_idle_host_is_reported() {
    let folder = tempfile::tempdir().expect("a folder");
    let (_queue, root) = queue(folder.path());
    file(folder.path(), &root, "a-token-that-ran-out", r#","log":{"level":"info"}"#);
    create_at(folder.path(), &root, "true");
    let text = std::fs::read_to_string(folder.path().join("runner.json")).expect("the file");
    std::fs::write(folder.path().join("runner.json"), text.replacen('{', r#"{"numberOfTasksToRun":1,"#, 1))
        .expect("it");
    let (mut server, mut runner) = start(folder.path());
    say(&mut runner, WELCOME);
    server.prints("the queue rejects the credentials");
    say(&mut runner, r#"~{"type":"new-credentials","client-id":"me","access-token":"a-token-for-tests"}"#);
    let said = server.ends();
    assert_eq!(said.code, 13, "{}{}", said.out, said.err);
    assert!(said.out.contains("new credentials") && said.out.contains("completed"), "{}", said.out);
    assert!(said.out.ends_with("~{\"type\":\"shutdown\"}\n"), "{}", said.out);
}

#[test]
fn the_runner_can_drain_the_worker_and_gets_errors_of_its_file() {
    let folder = tempfile::tempdir().expect("a folder");
    let (_queue, root) = queue(folder.path());
    file(folder.path(), &root, "a-token-for-tests", "");
    let (mut server, mut runner) = start(folder.path());
    say(&mut runner, WELCOME);
    server.prints("hello");
    say(&mut runner, r#"~{"type":"graceful-termination","finish-tasks":true}"#);
    assert_eq!(server.ends().code, 0);

    file(folder.path(), &root, "a-token-for-tests", r#","worker":{"capacitee":1}"#);
    let (server, mut runner) = start(folder.path());
    say(&mut runner, WELCOME);
    let said = server.ends();
    assert_eq!(said.code, 30);
    assert!(said.err.contains("capacitee") && !said.err.contains("a-token-for-tests"), "{}", said.err);
    let lines: Vec<&str> = said.out.lines().collect();
    assert!(lines.first().is_some_and(|hello| hello.starts_with("~{\"type\":\"hello\"")), "{}", said.out);
    let report = lines.last().expect("a report");
    assert!(report.contains(r#""type":"error-report""#) && report.contains("capacitee"), "{}", said.out);
    std::fs::write(folder.path().join("runner.json"), "not json").expect("the file");
    // A runner that is gone has nothing to be told.
    let (server, runner) = start(folder.path());
    drop(runner);
    let said = server.ends();
    assert!(said.code == 30 && said.err.contains("runner.json"), "{}", said.err);
}

#[test]
fn the_log_goes_to_standard_error_if_hello_could_not_be_written() {
    let folder = tempfile::tempdir().expect("a folder");
    file(folder.path(), "http://127.0.0.1:1", "a-token-for-tests", "");
    let mut command = journeyman(folder.path());
    command.args(["run", "--config", "runner.json", "--with-worker-runner"]);
    let (reader, writer) = std::io::pipe().expect("a pipe");
    drop(reader);
    let mut worker = command
        .env("JOURNEYMAN__HOST__METADATA_SERVICE", "off")
        .stdin(Stdio::piped())
        .stdout(writer)
        .stderr(Stdio::piped())
        .spawn()
        .expect("the binary starts");
    let mut runner = worker.stdin.take().expect("stdin is piped");
    let mut log = BufReader::new(worker.stderr.take().expect("stderr is piped")).lines().map_while(Result::ok);
    say(&mut runner, WELCOME);
    let failed = log.find(|line| line.contains("cannot write to the worker-runner"));
    kill_process(Pid::from_child(&worker), Signal::TERM).expect("the process is there");
    let rest: Vec<String> = log.collect();
    drop(worker.wait());
    assert!(failed.is_some() && !rest.is_empty(), "{rest:?}");
}
