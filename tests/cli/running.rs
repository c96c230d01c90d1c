//! `dev`, `queue` and `worker` as processes, with signals and with the task commands beside them.

use std::path::Path;
use std::process::Command;

use rustix::process::Signal;

use crate::server::{Server, dev, left, task, task_at};
use crate::support::{journeyman, run};

#[test]
fn tasks_are_created_watched_read_listed_and_canceled_against_dev() {
    let folder = tempfile::tempdir().expect("a folder");
    let here = folder.path();
    let server = dev(here, &[]);

    let completed = task(here, &["create", "--wait", "--", "/bin/sh", "-c", "echo hello"]);
    assert_eq!(completed.code, 0, "{}", completed.err);
    let id = completed.out.split_whitespace().next().expect("the id").to_owned();
    let log = task(here, &["log", &id]);
    assert!(log.code == 0 && log.out.contains("hello\n"), "{}{}", log.out, log.err);
    let status = task(here, &["status", &id, "-o", "json"]);
    let status: serde_json::Value = serde_json::from_str(&status.out).expect("JSON");
    assert_eq!((&status["taskId"], &status["state"]), (&id.as_str().into(), &"completed".into()));

    let failed = task(here, &["create", "--wait", "--", "/bin/false"]);
    assert_eq!(failed.code, 1, "{}", failed.out);
    let malformed = task(here, &["create", "--wait", "--payload", "{\"command\": 3}"]);
    assert!(malformed.code == 1 && malformed.out.contains("malformed-payload"), "{}", malformed.out);

    let sleeper = task(here, &["create", "--", "/bin/sleep", "600"]).out.trim().to_owned();
    let listed = task(here, &["list"]);
    assert!(listed.code == 0 && listed.out.contains(&sleeper), "{}", listed.out);
    assert_eq!(task(here, &["log", &sleeper]).code, 1);
    let canceled = task(here, &["cancel", "AAAAAAAAQACAAAAAAAAAAA", &sleeper]);
    assert_eq!(canceled.code, 1, "{}", canceled.err);
    assert!(canceled.err.contains("404") && canceled.out.contains("canceled"), "{}{}", canceled.err, canceled.out);
    assert_eq!(task(here, &["cancel", &sleeper]).code, 0, "it is canceled");
    let late = task(here, &["cancel", &id]);
    assert!(late.code == 1 && late.err.contains("already completed"), "{}{}", late.err, late.out);
    let waited = task(here, &["wait", &sleeper]);
    assert!(waited.code == 1 && waited.out.contains("canceled"), "{}", waited.out);

    let unknown = task(here, &["status", "AAAAAAAAQACAAAAAAAAAAA"]);
    assert!(unknown.code == 1 && unknown.err.contains("404"), "{}", unknown.err);
    assert_eq!(task(here, &["create"]).code, 2, "nothing to do");
    assert_eq!(task(here, &["create", "--payload", "{"]).code, 2, "no JSON");

    server.signal(Signal::INT);
    let said = server.ends();
    assert_eq!(said.code, 0, "{}", said.err);
    assert_eq!(left(here), Vec::<String>::new());
    let gone = task(here, &["list"]);
    assert!(gone.code == 2 && gone.err.contains("journeyman dev"), "{}", gone.err);
}

#[test]
fn a_log_reports_only_the_kills_that_the_worker_observed() {
    let folder = tempfile::tempdir().expect("a folder");
    let here = folder.path();
    let server = dev(here, &[]);
    let script = "setsid sh -c 'echo $$ >pid; exec sleep 600' & while [ ! -s pid ]; do :; done; cat pid";
    let created = task(here, &["create", "--wait", "--", "/bin/sh", "-c", script]);
    let log = task(here, &["log", created.out.split_whitespace().next().expect("the id")]).out;
    let pid = log.lines().find_map(|line| line.parse().ok()).and_then(rustix::process::Pid::from_raw);
    // Where it could not be contained it has to be ended here.
    rustix::process::kill_process(pid.expect("the task says its number"), Signal::KILL).unwrap_or_default();
    assert!(log.contains("held the output open"), "{log}");
    assert!(!log.contains("; they were killed"), "{log}");
    server.signal(Signal::TERM);
    assert_eq!(server.ends().code, 0);
}

/// A task that says so when it runs, and does not end when it is told to.
fn start_stubborn_task(server: &mut Server, folder: &Path) {
    let stubborn = "trap '' TERM; while :; do sleep 1; done";
    let created = task(folder, &["create", "--", "/bin/sh", "-c", stubborn]);
    assert_eq!(created.code, 0, "{}", created.err);
    server.logs("claimed");
}

#[test]
fn the_first_signal_drains_and_the_second_releases() {
    let folder = tempfile::tempdir().expect("a folder");
    let mut server = dev(folder.path(), &["--termination-grace", "100ms", "--set", "handler.command.kind=command"]);
    let created = task(folder.path(), &["create", "--", "/bin/sleep", "600"]);
    assert_eq!(created.code, 0, "{}", created.err);
    server.logs("claimed");
    server.signal(Signal::TERM);
    server.logs("draining");
    server.signal(Signal::TERM);
    server.logs("releasing all claims");
    let said = server.ends();
    assert_eq!(said.code, 14, "{}", said.err);
    assert!(said.err.contains("worker-shutdown"), "{}", said.err);
}

#[test]
fn the_third_signal_aborts() {
    let folder = tempfile::tempdir().expect("a folder");
    let mut server = dev(folder.path(), &["--termination-grace", "1h", "--set", "handler.command.kind=command"]);
    start_stubborn_task(&mut server, folder.path());
    for said in ["draining", "releasing all claims", "ending at once"] {
        server.signal(Signal::TERM);
        server.logs(said);
    }
    let said = server.ends();
    assert_eq!(said.code, 40, "{}", said.err);
}

/// A queue with the client `me`, and its root.
pub(crate) fn queue(folder: &Path) -> (Server, String) {
    let mut command = journeyman(folder);
    command
        .args(["queue", "--db", "queue.db", "--listen", "127.0.0.1:0"])
        .env("TEST_TOKEN", "a-token-for-tests")
        .env("JOURNEYMAN__QUEUE__CLIENTS__ME__ACCESS_TOKEN_FILE", "env:TEST_TOKEN")
        .env("JOURNEYMAN__QUEUE__CLIENTS__CLAIM_WORK__ACCESS_TOKEN_FILE", "env:TEST_TOKEN")
        .env("JOURNEYMAN__QUEUE__CLIENTS__CLAIM_WORK__SCOPES", "queue:claim-work:build/linux,queue:worker-id:g/w")
        .env("JOURNEYMAN__QUEUE__CLIENTS__AZURE__ACCESS_TOKEN_FILE", "env:TEST_TOKEN")
        .env(
            "JOURNEYMAN__QUEUE__CLIENTS__AZURE__SCOPES",
            "queue:poll-task-urls:build/linux,queue:claim-task:build/linux,queue:worker-id:g/w",
        );
    let mut queue = Server::start(&mut command);
    let line: serde_json::Value =
        serde_json::from_str(&queue.logs("root_url")).expect("a log without a terminal is JSON");
    let root = line["root_url"].as_str().expect("the root").to_owned();
    (queue, root)
}

pub(crate) fn worker(folder: &Path, root: &str, token: &str) -> Command {
    let config = format!(
        "[source.ci]\nkind = \"taskcluster\"\nroot_url = \"{root}\"\ntask_queue = \"build/linux\"\n\
         client_id = \"me\"\naccess_token_file = \"token\"\n[worker]\nwork_dir = \"work\"\n[host]\nmetadata_service = \"off\"\n"
    );
    std::fs::write(folder.join("journeyman.toml"), config).expect("the file can be written");
    std::fs::write(folder.join("token"), token).expect("the file can be written");
    let mut command = journeyman(folder);
    command.arg("worker");
    command
}

/// The scopes that the guide names for each dialect are enough.
#[test]
fn a_worker_needs_no_more_scopes_than_the_guide_names() {
    for (protocol, client) in [("claim-work", "claim_work"), ("azure", "azure")] {
        let folder = tempfile::tempdir().expect("a folder");
        let here = folder.path();
        let (queue, root) = queue(here);
        let mut worker = worker(here, &root, "a-token-for-tests");
        worker.args(["--id", "w", "--group", "g", "--set", &format!("source.ci.client_id={client}")]);
        worker.args(["--set", &format!("source.ci.dialect={protocol}")]);
        let worker = Server::start(&mut worker);
        let unsigned = ["task", "create", "--queue", "a/b", "--root-url", &root, "--", "/bin/true"];
        assert_eq!(run(journeyman(here).args(unsigned), "").code, 31);
        let script = "echo kept > kept.txt";
        let payload = serde_json::json!({
            "command": [["/bin/sh", "-c", script]],
            "maxRunTime": 60,
            "artifacts": [{ "type": "file", "name": "public/kept.txt", "path": "kept.txt" }],
        });
        let payload = payload.to_string();
        let created = task_at(here, &root, &["create", "--wait", "--queue", "build/linux", "--payload", &payload]);
        assert_eq!(created.code, 0, "{protocol}: {}{}", created.out, created.err);
        worker.signal(Signal::TERM);
        queue.signal(Signal::TERM);
        assert_eq!(worker.ends().code, 0, "{protocol}");
    }
}

#[test]
fn handler_test_uses_an_empty_payload_by_default() {
    let folder = tempfile::tempdir().expect("a folder");
    let here = folder.path();
    let tried = |program: &str| run(journeyman(here).env("TMPDIR", here).args(["handler", "test", program]), "");
    let said = tried("./nowhere");
    assert_eq!(said.code, 1, "{}", said.out);
    assert!(said.out.contains("FAIL     accepts a good payload"), "{}", said.out);
    assert!(said.err.contains("--payload"), "{}", said.err);
    let said = tried(concat!(env!("CARGO_MANIFEST_DIR"), "/examples/handlers/echo.py"));
    assert_eq!(said.code, 0, "an answer is a valid message: {}", said.out);
    let said = tried("true");
    assert_eq!(said.code, 0, "{}", said.out);
    assert!(said.out.contains("pass     completes a good payload"), "{}", said.out);
}

#[test]
fn failed_starts_have_distinct_exit_codes() {
    let folder = tempfile::tempdir().expect("a folder");
    let here = folder.path();
    let code = |arguments: &[&str]| run(journeyman(here).args(arguments), "").code;
    assert_eq!(code(&["worker"]), 30, "no source");
    assert_eq!(code(&["worker", "--capacity", "none"]), 30, "a bad value");
    assert_eq!(code(&["worker", "--nonsense"]), 2, "no such flag");
    assert_eq!(code(&["queue"]), 30, "no clients");
    assert_eq!(code(&["queue", "--set", "queue.auth=open", "--db", "/proc/none/queue.db"]), 21, "no such folder");
    assert_eq!(code(&["dev", "--handler", "nonsense"]), 2, "no NAME=PROGRAM");
    assert_eq!(code(&["dev", "--handler", "x=./nosuch"]), 21, "no such program");
    assert_eq!(code(&["task", "list", "--root-url", "http://127.0.0.1:9", "--queue", "a/b"]), 32, "no listener");
    assert_eq!(code(&["handler", "schema", "nonsense"]), 30, "no such handler");
    let token = here.join("empty");
    std::fs::write(&token, "").expect("the file can be written");
    let source = "[source.ci]\nkind = \"taskcluster\"\nroot_url = \"http://127.0.0.1:9\"\ntask_queue = \"a/b\"\n\
                  client_id = \"me\"\naccess_token_file = \"empty\"\n";
    std::fs::write(here.join("journeyman.toml"), source).expect("the file can be written");
    assert_eq!(code(&["worker"]), 30, "an empty secret");
}

#[test]
fn an_unread_log_blocks_neither_tasks_nor_signals() {
    let folder = tempfile::tempdir().expect("a folder");
    let (_queue, root) = queue(folder.path());
    let mut command = worker(folder.path(), &root, "a-token-for-tests");
    command.args(["--log-level", "trace"]).env("JOURNEYMAN__HOST__METADATA_SERVICE", "off");
    let mut child = command.stderr(std::process::Stdio::piped()).spawn().expect("the binary starts");
    let unread = child.stderr.take().expect("stderr is piped");
    rustix::pipe::fcntl_setpipe_size(&unread, 4096).expect("a small pipe");
    for _ in 0..3 {
        let said = task_at(folder.path(), &root, &["create", "--wait", "--queue", "build/linux", "--", "/bin/true"]);
        assert_eq!(said.code, 0, "{}", said.err);
    }
    let status = run(journeyman(folder.path()).args(["status", "-o", "json"]), "");
    assert_eq!(status.code, 0, "{}", status.err);
    rustix::process::kill_process(rustix::process::Pid::from_child(&child), Signal::QUIT).expect("it is there");
    assert_eq!(child.wait().expect("it ends").code(), Some(14));
    drop(unread);
}
