//! `dev`, `queue` and `worker` as processes, with signals and task commands.

use rustix::process::Signal;

use crate::cli::host::Host;
use crate::cli::server::{Server, get, left};

#[test]
fn tasks_are_created_watched_read_listed_and_canceled_against_dev() {
    let (host, server) = Host::with_dev(&[]);

    let id = host.create(&["--wait", "--", "/bin/sh", "-c", "echo hello"]);
    let log = host.task(&["log", &id]);
    assert!(log.code == 0 && log.out.contains("hello\n"), "{}{}", log.out, log.err);
    let status = host.json(&["task", "status", &id]);
    assert_eq!((&status["taskId"], &status["state"]), (&id.as_str().into(), &"completed".into()));

    let failed = host.task(&["create", "--wait", "--", "/bin/false"]);
    assert_eq!(failed.code, 1, "{}", failed.out);
    let malformed = host.task(&["create", "--wait", "--payload", "{\"command\": 3}"]);
    assert!(malformed.code == 1 && malformed.out.contains("malformed-payload"), "{}", malformed.out);

    let sleeper = host.create(&["--", "/bin/sh", "-c", "echo begun; exec sleep 600"]);
    let listed = host.task(&["list"]);
    assert!(listed.code == 0 && listed.out.contains(&sleeper), "{}", listed.out);
    // Without --follow, what the log has so far.
    while !host.task(&["log", &sleeper]).out.contains("begun\n") {}
    let canceled = host.task(&["cancel", "AAAAAAAAQACAAAAAAAAAAA", &sleeper]);
    assert_eq!(canceled.code, 1, "{}", canceled.err);
    assert!(canceled.err.contains("404") && canceled.out.contains("canceled"), "{}{}", canceled.err, canceled.out);
    assert_eq!(host.task(&["cancel", &sleeper]).code, 0, "it is canceled");
    let late = host.task(&["cancel", &id]);
    assert!(late.code == 1 && late.err.contains("already completed"), "{}{}", late.err, late.out);
    let waited = host.task(&["wait", &sleeper]);
    assert!(waited.code == 1 && waited.out.contains("canceled"), "{}", waited.out);

    let unknown = host.task(&["status", "AAAAAAAAQACAAAAAAAAAAA"]);
    assert!(unknown.code == 1 && unknown.err.contains("404"), "{}", unknown.err);
    assert_eq!(host.task(&["create"]).code, 2, "nothing to do");
    assert_eq!(host.task(&["create", "--payload", "{"]).code, 2, "no JSON");

    server.drain();
    assert_eq!(left(host.path()), Vec::<String>::new());
    let gone = host.task(&["list"]);
    assert!(gone.code == 2 && gone.err.contains("journeyman dev"), "{}", gone.err);
}

#[test]
fn a_log_reports_only_the_kills_that_the_worker_observed() {
    let (host, server) = Host::with_dev(&[]);
    let script = "setsid sh -c 'echo $$ >pid; exec sleep 600' & while [ ! -s pid ]; do :; done; cat pid";
    let id = host.create(&["--wait", "--", "/bin/sh", "-c", script]);
    let log = host.task(&["log", &id]).out;
    let pid = log.lines().find_map(|line| line.parse().ok()).and_then(rustix::process::Pid::from_raw);
    // Without a control group it still runs.
    rustix::process::kill_process(pid.expect("the task says its number"), Signal::KILL).unwrap_or_default();
    assert!(log.contains("held the output open"), "{log}");
    assert!(!log.contains("; they were killed"), "{log}");
    server.drain();
}

#[test]
fn the_first_signal_drains_and_the_second_releases() {
    let (host, mut server) = Host::with_dev(&["--termination-grace", "100ms", "--set", "handler.command.kind=command"]);
    host.create(&["--", "/bin/sleep", "600"]);
    server.logs("claimed");
    for step in ["draining", "releasing all claims"] {
        server.signal(Signal::TERM);
        server.logs(step);
    }
    let said = server.ends_with(14);
    assert!(said.err.contains("worker-shutdown"), "{}", said.err);
}

#[test]
fn the_third_signal_aborts() {
    let (host, mut server) = Host::with_dev(&["--termination-grace", "1h", "--set", "handler.command.kind=command"]);
    host.create_script("trap '' TERM; while :; do sleep 1; done");
    server.logs("claimed");
    for step in ["draining", "releasing all claims", "ending at once"] {
        server.signal(Signal::TERM);
        server.logs(step);
    }
    server.ends_with(40);
}

/// The scopes that the guide names for each dialect are enough.
#[test]
fn a_worker_needs_no_more_scopes_than_the_guide_names() {
    for (dialect, client) in [("claim-work", "claim_work"), ("azure", "azure")] {
        let host = Host::with_queue();
        let mut command = host.worker();
        command.args(["--id", "w", "--group", "g", "--set", &format!("source.ci.client_id={client}")]);
        let worker = Server::start(command.args(["--set", &format!("source.ci.dialect={dialect}")]));
        let unsigned = ["task", "create", "--queue", "a/b", "--root-url", host.root(), "--", "/bin/true"];
        assert_eq!(host.run(&unsigned).code, 31);
        let payload = serde_json::json!({
            "command": [["/bin/sh", "-c", "echo kept > kept.txt"]],
            "maxRunTime": 60,
            "artifacts": [{ "type": "file", "name": "public/kept.txt", "path": "kept.txt" }],
        });
        host.create(&["--wait", "--payload", &payload.to_string()]);
        worker.signal(Signal::TERM);
        host.queue().signal(Signal::TERM);
        worker.ends_with(0);
    }
}

#[test]
fn b8_a_task_that_declines_its_log_has_none() {
    let host = Host::with_queue();
    let mut command = host.worker();
    let worker = Server::start(command.args(["--set", "worker.live_log=127.0.0.1:0"]));
    for (features, command, live, stored) in [
        (serde_json::json!({"liveLog": true, "backingLog": true}), "true", "303", "303"),
        (serde_json::json!({"liveLog": false}), "true", "404", "303"),
        (serde_json::json!({"backingLog": false}), "true", "404", "404"),
        (serde_json::json!({"backingLog": false}), "no such program", "303", "303"),
    ] {
        let payload = serde_json::json!({"command": [[command]], "maxRunTime": 60, "features": features}).to_string();
        let said = host.task(&["create", "--queue", "build/linux", "--wait", "--payload", &payload]);
        let id = said.out.split_whitespace().next().expect("the id");
        for (name, expected) in [("live", live), ("live_backing", stored)] {
            let path = format!("/api/queue/v1/task/{id}/artifacts/public/logs/{name}.log");
            let answer = get(host.root().trim_start_matches("http://"), &path);
            let status = answer.split(' ').nth(1).unwrap_or_default();
            assert_eq!(status, expected, "{name} of {features} {command}: {answer}");
        }
    }
    worker.drain();
}

#[test]
fn handler_test_uses_an_empty_payload_by_default() {
    let host = Host::new();
    let test = |program: &str| host.run(&["handler", "test", program]);
    let said = test("./nowhere");
    assert_eq!(said.code, 1, "{}", said.out);
    assert!(said.out.contains("FAIL     accepts a good payload"), "{}", said.out);
    assert!(said.err.contains("--payload"), "{}", said.err);
    let said = test(concat!(env!("CARGO_MANIFEST_DIR"), "/examples/handlers/echo.py"));
    assert_eq!(said.code, 0, "an answer is a valid message: {}", said.out);
    let said = test("true");
    assert_eq!(said.code, 0, "{}", said.out);
    assert!(said.out.contains("pass     completes a good payload"), "{}", said.out);
}

#[test]
fn e4_handler_test_prints_json() {
    let host = Host::new();
    for (program, code) in [("./nowhere", 1), ("true", 0)] {
        let said = host.run(&["handler", "test", "-o", "json", "--payload", "{}", program]);
        let report: serde_json::Value = serde_json::from_str(&said.out).expect("JSON");
        assert_eq!((said.code, &report["passed"]), (code, &serde_json::json!(code == 0)), "{report}");
        let rule = &report["rules"][0];
        assert!(rule["rule"].is_string() && rule["outcome"].is_string(), "{report}");
        let logs = report["logs"].as_array().expect("a list");
        assert_eq!(logs.is_empty(), code == 0, "{report}");
    }
}

#[test]
fn failed_starts_have_distinct_exit_codes() {
    let host = Host::new();
    for (arguments, code) in [
        (&["worker"][..], 30),
        (&["worker", "--capacity", "none"], 30),
        (&["worker", "--nonsense"], 2),
        (&["queue"], 30),
        (&["queue", "--set", "queue.auth=open", "--db", "/proc/none/queue.db"], 21),
        (&["dev", "--handler", "nonsense"], 2),
        (&["dev", "--handler", "x=./nosuch"], 21),
        (&["task", "list", "--root-url", "http://127.0.0.1:9", "--queue", "a/b"], 32),
        (&["handler", "schema", "nonsense"], 30),
    ] {
        assert_eq!(host.run(arguments).code, code, "{arguments:?}");
    }
    host.write("empty", "");
    let source = "[source.ci]\nkind = \"taskcluster\"\nroot_url = \"http://127.0.0.1:9\"\ntask_queue = \"a/b\"\n\
                  client_id = \"me\"\naccess_token_file = \"empty\"\n";
    host.write("journeyman.toml", source);
    assert_eq!(host.run(&["worker"]).code, 30, "an empty secret");
}

#[test]
fn an_unread_log_blocks_neither_tasks_nor_signals() {
    let host = Host::with_queue();
    let mut command = host.worker();
    command.args(["--log-level", "trace"]).env("JOURNEYMAN__HOST__METADATA_SERVICE", "off");
    let mut child = command.stderr(std::process::Stdio::piped()).spawn().expect("the binary starts");
    let unread = child.stderr.take().expect("stderr is piped");
    rustix::pipe::fcntl_setpipe_size(&unread, 4096).expect("a small pipe");
    for _ in 0..3 {
        host.create(&["--wait", "--", "/bin/true"]);
    }
    host.status();
    rustix::process::kill_process(rustix::process::Pid::from_child(&child), Signal::QUIT).expect("it is there");
    assert_eq!(child.wait().expect("it ends").code(), Some(14));
    drop(unread);
}
