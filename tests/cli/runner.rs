//! A worker under Taskcluster's worker-runner, which the tests play.

use std::io::{BufRead as _, BufReader, Write as _};
use std::process::{ChildStdin, Stdio};

use rustix::process::{Pid, Signal, kill_process};

use crate::cli::host::{Host, TOKEN};
use crate::cli::server::Server;

const WELCOME: &str =
    r#"~{"type":"welcome","capabilities":["graceful-termination","new-credentials","error-report","log","shutdown"]}"#;

fn configure(host: &Host, token: &str, more: &str) {
    let root = if host.root().is_empty() { "http://127.0.0.1:1" } else { host.root() };
    let text = format!(
        r#"{{"rootURL":"{root}","clientId":"me","accessToken":"{token}","certificate":"","provisionerId":"build",
            "workerType":"linux","workerGroup":"g","workerId":"w","workerLocation":"{{\"cloud\":\"test\"}}",
            "journeyman":{{"worker":{{"work_dir":"work","termination_grace":"100ms"}},"host":{{"metadata_service":"off"}}{more}}}}}"#
    );
    host.write("runner.json", &text);
}

fn start(host: &Host) -> (Server, ChildStdin) {
    let mut command = host.journeyman(&["run", "--config", "runner.json", "--with-worker-runner"]);
    let mut server = Server::start(command.stdin(Stdio::piped()));
    let stdin = server.input();
    (server, stdin)
}

fn say(to: &mut ChildStdin, line: &str) {
    writeln!(to, "{line}").expect("the worker listens");
}

#[test]
fn the_worker_greets_logs_through_the_runner_and_releases_on_request() {
    let host = Host::with_queue();
    configure(&host, TOKEN, "");
    let (mut server, mut runner) = start(&host);
    say(&mut runner, "some text that is no message");
    say(&mut runner, r#"~{"type":"graceful-termination","finish-tasks":false}"#);
    say(&mut runner, WELCOME);
    server.prints(
        r#"~{"type":"hello","capabilities":["error-report","graceful-termination","log","new-credentials","shutdown"]}"#,
    );
    // The first request came before `welcome` and was ignored.
    host.create_script("sleep 600");
    let line = server.prints("claimed");
    assert!(line.starts_with("~{") && line.contains(r#""textPayload":"claimed""#), "{line}");
    say(&mut runner, r#"~{"type":"graceful-termination","finish-tasks":false}"#);
    let said = server.ends_with(12);
    assert!(said.out.contains("worker-shutdown"), "{}", said.out);
    assert!(!said.out.contains(TOKEN) && !said.err.contains(TOKEN));
}

#[test]
fn new_credentials_are_used_and_an_idle_host_is_reported() {
    let host = Host::with_queue();
    configure(&host, "a-token-that-ran-out", r#","log":{"level":"info"}"#);
    host.create_script("true");
    host.write("runner.json", &host.read("runner.json").replacen('{', r#"{"numberOfTasksToRun":1,"#, 1));
    let (mut server, mut runner) = start(&host);
    say(&mut runner, WELCOME);
    server.prints("the queue rejects the credentials");
    say(&mut runner, r#"~{"type":"new-credentials","client-id":"me","access-token":"a-token-for-tests"}"#);
    let said = server.ends_with(13);
    assert!(said.out.contains("new credentials") && said.out.contains("completed"), "{}", said.out);
    assert!(said.out.ends_with("~{\"type\":\"shutdown\"}\n"), "{}", said.out);
}

#[test]
fn b9_the_pools_configuration_is_used_and_alerts_are_reported() {
    let host = Host::with_queue();
    configure(&host, "a-token-that-ran-out", "");
    let keys = r#"{"numberOfTasksToRun":1,"maxTaskRunTime":60,"capacity":2,"instanceType":"large","livelogPort":9,"#;
    host.write("runner.json", &host.read("runner.json").replacen('{', keys, 1));
    host.create_script(
        "test \"$TASKCLUSTER_INSTANCE_TYPE $TASKCLUSTER_WORKER_LOCATION\" = 'large {\"cloud\":\"test\"}'",
    );
    let (mut server, mut runner) = start(&host);
    say(&mut runner, WELCOME);
    let report = server.prints(r#""type":"error-report""#);
    assert!(report.contains(r#""title":"auth-denied""#) && report.contains("rejects the credentials"), "{report}");
    say(&mut runner, r#"~{"type":"new-credentials","client-id":"me","access-token":"a-token-for-tests"}"#);
    let said = server.ends_with(13);
    assert!(said.out.contains("completed"), "{}", said.out);
    assert!(format!("{}{}", said.out, said.err).contains("ignores: livelogPort"), "{}", said.err);
}

#[test]
fn the_runner_can_drain_the_worker_and_gets_errors_of_its_file() {
    let host = Host::with_queue();
    configure(&host, TOKEN, "");
    let (mut server, mut runner) = start(&host);
    say(&mut runner, WELCOME);
    server.prints("hello");
    say(&mut runner, r#"~{"type":"graceful-termination","finish-tasks":true}"#);
    server.ends_with(0);

    configure(&host, TOKEN, r#","worker":{"capacitee":1}"#);
    let (server, mut runner) = start(&host);
    say(&mut runner, WELCOME);
    let said = server.ends_with(30);
    assert!(said.err.contains("capacitee") && !said.err.contains(TOKEN), "{}", said.err);
    let lines: Vec<&str> = said.out.lines().collect();
    assert!(lines.first().is_some_and(|hello| hello.starts_with("~{\"type\":\"hello\"")), "{}", said.out);
    let report = lines.last().expect("a report");
    assert!(report.contains(r#""type":"error-report""#) && report.contains("capacitee"), "{}", said.out);
    host.write("runner.json", "not json");
    // The pipe of a runner that has exited gets no report.
    let (server, runner) = start(&host);
    drop(runner);
    assert!(server.ends_with(30).err.contains("runner.json"));
}

#[test]
fn the_log_goes_to_standard_error_if_hello_could_not_be_written() {
    let host = Host::new();
    configure(&host, TOKEN, "");
    let mut command = host.journeyman(&["run", "--config", "runner.json", "--with-worker-runner"]);
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
