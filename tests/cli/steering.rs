//! A running worker, asked and steered through its control socket.

use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::sync::{Arc, Mutex};

use rustix::process::Signal;

use crate::running::{queue, worker};
use crate::server::{Server, create_at, dev, fifo, task};
use crate::support::{Said, journeyman, run};

fn steer(folder: &Path, arguments: &[&str]) -> Said {
    let said = run(journeyman(folder).env("USER", "ana").args(arguments), "");
    assert_eq!(said.code, 0, "{arguments:?}: {}", said.err);
    said
}

fn status(folder: &Path) -> serde_json::Value {
    serde_json::from_str(&steer(folder, &["status", "-o", "json"]).out).expect("JSON")
}

#[test]
fn a_status_shows_claims_and_their_leases() {
    let folder = tempfile::tempdir().expect("a folder");
    let here = folder.path();
    let mut server = dev(here, &[]);
    task(here, &["create", "--", "/bin/sleep", "600"]);
    server.logs("claimed");
    let seen = status(here);
    assert_eq!(seen["state"], "running");
    assert_eq!((seen["claims"][0]["source"].as_str(), seen["claims"][0]["run"].as_u64()), (Some("command"), Some(0)));
    assert!(seen["claims"][0]["lease_left_seconds"].as_f64().is_some_and(|left| left > 600.0), "{seen}");
    assert!(seen["host"]["disk_free"].as_u64().is_some_and(|bytes| bytes > 0), "{seen}");
    assert!(seen["sources"][0]["clock_skew_seconds"].as_i64().is_some_and(|ahead| ahead.abs() <= 60), "{seen}");
    let table = steer(here, &["status"]).out;
    for part in ["RUNNING", "1/4 busy", "LEASE LEFT", "last hour", "next       reclaim "] {
        assert!(table.contains(part), "{part}: {table}");
    }
    let name = seen["claims"][0]["task"].as_str().expect("the task");
    let ls = steer(here, &["claims", "list"]).out;
    assert!(ls.contains(name), "{ls}");
    server.signal(Signal::QUIT);
    assert_eq!(server.ends().code, 14);
}

#[test]
fn a_paused_worker_names_the_operator_and_claims_nothing_until_resumed() {
    let folder = tempfile::tempdir().expect("a folder");
    let here = folder.path();
    let mut server = dev(here, &["--dialect", "azure"]);
    steer(here, &["pause", "--for", "1h", "--note", "kernel update"]);
    let seen = status(here);
    assert_eq!((seen["state"].as_str(), seen["note"]["by"].as_str()), (Some("paused"), Some("ana")));
    let table = steer(here, &["status"]).out;
    assert!(table.contains("PAUSED") && table.contains("\"kernel update\""), "{table}");
    // Where no variable names who it is, the system does.
    assert_eq!(run(journeyman(here).arg("pause"), "").code, 0);
    let user = rustix::process::getuid();
    let expected = if user.is_root() { "root".to_owned() } else { format!("user {}", user.as_raw()) };
    assert_eq!(status(here)["note"]["by"].as_str(), Some(expected.as_str()));
    let created = task(here, &["create", "--", "/bin/true"]);
    let id = created.out.split_whitespace().next().expect("the id").to_owned();
    assert_eq!(status(here)["counts"]["claims"], 0);
    steer(here, &["resume"]);
    assert_eq!(task(here, &["wait", &id]).code, 0);
    server.logs("command: resume");
}

#[test]
fn a_drain_finishes_what_runs_and_waits_for_it() {
    let folder = tempfile::tempdir().expect("a folder");
    let here = folder.path();
    let mut server = dev(here, &[]);
    // It runs until something is written to the pipe.
    fifo(here.join("pipe"));
    let script = format!("cat {}/pipe", here.display());
    let created = task(here, &["create", "--", "/bin/sh", "-c", &script]);
    let id = created.out.split_whitespace().next().expect("the id").to_owned();
    server.logs("claimed");
    steer(here, &["drain"]);
    assert_eq!(status(here)["state"], "draining");
    std::fs::write(here.join("pipe"), "go\n").expect("the task reads");
    let said = server.ends();
    assert_eq!(said.code, 0, "{}", said.err);
    assert!(said.err.contains(&id) && said.err.contains("outcome=completed"), "{}", said.err);
}

#[test]
fn stop_releases_claims_and_status_reports_an_exited_worker() {
    let folder = tempfile::tempdir().expect("a folder");
    let here = folder.path();
    let mut server = dev(here, &[]);
    task(here, &["create", "--", "/bin/sleep", "600"]);
    server.logs("claimed");
    steer(here, &["stop", "--wait", "--note", "done for today"]);
    let said = server.ends();
    assert_eq!(said.code, 14, "{}", said.err);
    assert!(said.err.contains("done for today") && said.err.contains("worker-shutdown"), "{}", said.err);
    assert!(said.err.contains("the worker exits: 1 claims, 0 completed"), "{}", said.err);
    assert!(said.err.contains("command: release"), "{}", said.err);
    let gone = run(journeyman(here).arg("status"), "");
    assert_eq!(gone.code, 32, "{}", gone.err);
    assert!(gone.err.contains("nothing is listening at") && gone.err.contains("--socket"), "{}", gone.err);
    // A shell may have the variables of a worker.
    let gone = run(journeyman(here).arg("status").env("WORKER_KEY", "42").env("WORKER_AMQP_URI", "amqp://h"), "");
    assert_eq!(gone.code, 32, "{}", gone.err);
}

/// A worker that gives these replies, one after the other. Returns the requests.
fn scripted(folder: &Path, replies: Vec<(u16, serde_json::Value)>) -> Arc<Mutex<Vec<String>>> {
    use axum::http::{Method, StatusCode, Uri};
    let listener = std::os::unix::net::UnixListener::bind(folder.join("socket")).expect("a socket");
    listener.set_nonblocking(true).expect("it can be");
    let requests = Arc::new(Mutex::new(Vec::new()));
    let (received, mut replies) = (Arc::clone(&requests), replies.into_iter());
    let replies = Arc::new(Mutex::new(move || replies.next().expect("there is one more")));
    let router = axum::Router::new().fallback(async move |method: Method, uri: Uri| {
        received.lock().expect("not poisoned").push(format!("{method} {uri}"));
        let (status, body) = replies.lock().expect("not poisoned")();
        (StatusCode::from_u16(status).expect("a status"), axum::Json(body))
    });
    std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        runtime.block_on(async {
            let listener = tokio::net::UnixListener::from_std(listener).expect("a listener");
            axum::serve(listener, router).await
        })
    });
    requests
}

#[test]
fn waiting_for_a_release_survives_a_timeout_of_the_worker() {
    let said = |text: &str| serde_json::json!({ "message": text });
    let task = serde_json::json!({
        "task": "fN1SbArXTPSVFNUvaOlinQ", "run": 0, "source": "ci", "state": "running", "progress": null,
        "held_seconds": 1.0, "lease_left_seconds": null, "reclaimed_seconds_ago": null, "log_bytes": 0, "source_description": "here",
        "handler": "command", "reclaims": 0, "reclaim_in_seconds": null, "containment": "group", "processes": [], "phases": [],
    });
    for (last, code) in [(404, 0), (503, 0), (409, 1)] {
        let folder = tempfile::tempdir().expect("a folder");
        let answers = vec![
            (200, task.clone()),
            (200, said("told to end")),
            (504, said("no answer in time")),
            (200, task.clone()),
            (last, said("the last word")),
        ];
        let asked = scripted(folder.path(), answers);
        let arguments = ["claims", "release", "fN1", "--wait", "--socket", "socket"];
        let ended = run(journeyman(folder.path()).args(arguments), "");
        assert_eq!(ended.code, code, "{last}: {}", ended.err);
        let asked = asked.lock().expect("not poisoned");
        assert_eq!(asked.len(), 5, "it was asked again until the last word: {asked:?}");
        assert!(asked[2..].iter().all(|line| line.starts_with("GET /v1/claim?")), "{asked:?}");
    }
}

#[test]
fn the_log_of_a_running_task_is_followed_to_its_end() {
    let folder = tempfile::tempdir().expect("a folder");
    let here = folder.path();
    let mut server = dev(here, &[]);
    fifo(here.join("pipe"));
    let script = format!("echo first; cat {}/pipe; echo last", here.display());
    task(here, &["create", "--", "/bin/sh", "-c", &script]);
    server.logs("claimed");
    let id = status(here)["claims"][0]["task"].as_str().expect("the task").to_owned();
    let mut follow = Server::start(journeyman(here).args(["claims", "logs", "-f", &id]));
    follow.prints("first");
    std::fs::write(here.join("pipe"), "second\n").expect("the task reads");
    follow.prints("second");
    follow.prints("last");
    assert_eq!(follow.ends().code, 0);
    let gone = run(journeyman(here).args(["claims", "logs", "unknown"]), "");
    assert_eq!(gone.code, 1);
    assert!(gone.err.contains("holds no task unknown"), "{}", gone.err);
}

#[test]
fn a_reload_applies_all_of_a_configuration_or_nothing() {
    let folder = tempfile::tempdir().expect("a folder");
    let here = folder.path();
    let (_queue, root) = queue(here);
    let file = here.join("journeyman.toml");
    let text = |capacity: &str, more: &str| {
        format!(
            "[worker]\nid = \"w\"\ngroup = \"g\"\ncapacity = {capacity}\nwork_dir = \"work\"\n{more}\n[source.ci]\nkind = \
             \"taskcluster\"\nroot_url = \"{root}\"\ntask_queue = \"build/linux\"\nclient_id = \"me\"\n"
        )
    };
    std::fs::write(&file, text("2", "")).expect("a file");
    let mut command = journeyman(here);
    command
        .args(["worker"])
        .env("JOURNEYMAN__SOURCE__CI__ACCESS_TOKEN_FILE", "env:TEST_TOKEN")
        .env("TEST_TOKEN", "a-token-for-tests");
    let mut server = Server::start(&mut command);
    server.logs("source: ");
    let told = |arguments: &[&str]| {
        run(journeyman(here).env("JOURNEYMAN_SOCKET", here.join("work/control.sock")).args(arguments), "")
    };
    let capacity = || {
        let seen: serde_json::Value = serde_json::from_str(&told(&["status", "-o", "json"]).out).expect("JSON");
        seen["capacity"].as_u64()
    };
    assert_eq!(capacity(), Some(2));

    std::fs::write(&file, text("5", "poll_interval = \"3s\"")).expect("a file");
    let said = told(&["reload"]);
    assert!(said.out.contains("changed: worker.capacity, worker.poll_interval"), "{}{}", said.out, said.err);
    assert_eq!(capacity(), Some(5));

    std::fs::write(&file, text("7", "capacitee = 1")).expect("a file");
    let said = told(&["reload"]);
    assert_eq!(said.code, 1);
    assert!(said.err.contains("capacitee") && said.err.contains("journeyman.toml:6:1"), "{}", said.err);
    server.signal(Signal::HUP);
    server.logs("configuration rejected");
    std::fs::write(&file, text("5", "")).expect("a file");
    assert_eq!(capacity(), Some(5));

    std::fs::write(&file, text("9", "").replace("\"g\"", "\"h\"")).expect("a file");
    server.signal(Signal::HUP);
    let line = server.logs("a restart is needed");
    assert!(line.contains("worker.group") && line.contains("worker.capacity"), "{line}");
    assert_eq!(capacity(), Some(9));

    std::fs::write(&file, format!("{}[log]\nlevel = \"error\"\n", text("9", ""))).expect("a file");
    assert_eq!(told(&["reload"]).out, "changed: log.level\n");
    server.signal(Signal::QUIT);
    assert!(!server.ends().err.contains("changed: log.level"), "only errors are logged");
}

#[test]
fn a_worker_exits_when_idle_or_at_max_tasks() {
    for (flag, value, code) in [("--max-tasks", "1", 13), ("--exit-when-idle", "10s", 10)] {
        let folder = tempfile::tempdir().expect("a folder");
        let here = folder.path();
        let (_queue, root) = queue(here);
        create_at(here, &root, "true");
        let mut command = worker(here, &root, "a-token-for-tests");
        let server = Server::start(command.args([flag, value]));
        let said = server.ends();
        assert_eq!(said.code, code, "{flag}: {}", said.err);
        assert!(said.err.contains("1 claims, 1 completed"), "{flag}: {}", said.err);
    }
}

#[test]
fn a_control_socket_is_private_to_one_worker_and_its_path_may_be_long() {
    let folder = tempfile::tempdir().expect("a folder");
    let long = folder.path().join("a-folder-with-a-long-name-".repeat(6));
    std::fs::create_dir(&long).expect("a folder");
    let socket = long.join("control.sock");
    // A killed worker leaves its socket.
    std::fs::write(&socket, "").expect("a file");
    let path = socket.display().to_string();
    let (_queue, root) = queue(folder.path());
    let set = format!("control.socket={path}");
    let mut command = worker(folder.path(), &root, "a-token-for-tests");
    let mut server = Server::start(command.args(["--set", &set]));
    server.logs("source: ");
    let mode = std::fs::metadata(&socket).expect("it is there").permissions().mode();
    assert_eq!(mode & 0o777, 0o660);
    assert_eq!(run(journeyman(folder.path()).args(["status", "--socket", &path]), "").code, 0);
    let mut command = worker(folder.path(), &root, "a-token-for-tests");
    let other = format!("worker.work_dir={}/other", folder.path().display());
    let second = Server::start(command.args(["--set", &set, "--set", &other])).ends();
    assert_eq!(second.code, 21, "{}", second.err);
    assert!(second.err.contains("in use by another worker"), "{}", second.err);
    server.signal(Signal::QUIT);
    assert_eq!(server.ends().code, 14);
    assert!(!socket.exists());
}

#[test]
fn notices_and_reloads_are_counted() {
    let folder = tempfile::tempdir().expect("a folder");
    let here = folder.path();
    let (_queue, root) = queue(here);
    let create = |script: &str| create_at(here, &root, script);
    fifo(here.join("pipe"));
    fifo(here.join("up"));
    create(&format!("echo up >{0}/up; cat {0}/pipe", here.display()));
    create("sleep 600");
    let notice = here.join("terminate-at");
    let mut command = worker(here, &root, "a-token-for-tests");
    let file = format!("host.termination_file={}", notice.display());
    let mut server = Server::start(command.args(["--capacity", "2", "--set", &file]));
    server.logs("\"claimed\"");
    server.logs("\"claimed\"");
    // What has not begun when the notice comes never does.
    assert_eq!(std::fs::read_to_string(here.join("up")).expect("the payload runs"), "up\n");
    let told = |arguments: &[&str]| {
        run(journeyman(here).env("JOURNEYMAN_SOCKET", here.join("work/control.sock")).args(arguments), "")
    };
    let seen = || -> serde_json::Value { serde_json::from_str(&told(&["status", "-o", "json"]).out).expect("JSON") };
    assert_eq!(told(&["reload"]).code, 0);
    let before = seen();
    assert_eq!((before["notice"].is_null(), before["blocked_reason"].as_str()), (true, Some("full")), "{before}");

    let time = jiff::Timestamp::now() + jiff::SignedDuration::from_secs(3600);
    std::fs::write(here.join("new"), time.to_string()).expect("a file");
    std::fs::rename(here.join("new"), &notice).expect("it can be renamed");
    server.logs("command: host termination at a known time");
    std::fs::write(here.join("pipe"), "go\n").expect("the task reads");
    server.logs("\"reported\"");
    let after = seen();
    assert!(after["notice"]["last_claim_ended_after_seconds"].as_f64().is_some_and(|span| span >= 0.0), "{after}");
    let (counts, source) = (&after["counts"], &after["sources"][0]["counts"]);
    assert_eq!((counts["notices"].as_u64(), counts["config_reloads"].as_u64()), (Some(1), Some(1)), "{after}");
    assert!(counts["log_bytes"].as_u64().is_some_and(|bytes| bytes > 0), "{after}");
    assert_eq!((source["claims"].as_u64(), source["ends"]["completed"].as_u64()), (Some(2), Some(1)), "{after}");
    server.signal(Signal::QUIT);
    assert_eq!(server.ends().code, 12);
}

#[test]
fn a_payload_inherits_no_descriptor_of_the_workers_parent() {
    let folder = tempfile::tempdir().expect("a folder");
    let here = folder.path();
    std::fs::write(here.join("secret"), "hunter2").expect("it is written");
    let mut shell = std::process::Command::new("sh");
    let ours = journeyman(here);
    shell.current_dir(here).env_clear().envs(ours.get_envs().filter_map(|(name, value)| Some((name, value?))));
    shell.args(["-c", "exec 9<secret; exec \"$0\" dev"]).arg(ours.get_program());
    let mut server = Server::start(&mut shell);
    server.logs("claim");
    let said =
        task(here, &["create", "--wait", "--", "/bin/sh", "-c", "ls -l /proc/self/fd; test ! -e /proc/self/fd/9"]);
    let id = said.out.split_whitespace().find(|word| word.len() == 22).map(str::to_owned);
    let log = id.map(|id| task(here, &["log", &id]).out).unwrap_or_default();
    assert_eq!(said.code, 0, "{}{}{log}", said.out, said.err);
    server.signal(Signal::QUIT);
    server.ends();
}
