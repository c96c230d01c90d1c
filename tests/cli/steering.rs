//! Commands to a running worker through its control socket.

use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::sync::{Arc, Mutex};

use rustix::process::Signal;

use crate::cli::host::{Host, TOKEN};
use crate::cli::server::{Server, fifo};
use crate::cli::support::{journeyman, run};

#[test]
fn a_status_shows_claims_and_their_leases() {
    let (host, mut server) = Host::with_dev(&[]);
    host.task(&["create", "--", "/bin/sleep", "600"]);
    server.logs("claimed");
    let seen = host.status();
    assert_eq!(seen["state"], "running");
    assert_eq!((seen["claims"][0]["source"].as_str(), seen["claims"][0]["run"].as_u64()), (Some("command"), Some(0)));
    assert!(seen["claims"][0]["lease_left_seconds"].as_f64().is_some_and(|left| left > 600.0), "{seen}");
    assert!(seen["host"]["disk_free"].as_u64().is_some_and(|bytes| bytes > 0), "{seen}");
    assert!(seen["sources"][0]["clock_skew_seconds"].as_i64().is_some_and(|ahead| ahead.abs() <= 60), "{seen}");
    let without_certificates = run(host.journeyman(&["status"]).env("SSL_CERT_FILE", "/dev/null"), "");
    assert_eq!((without_certificates.code, without_certificates.err.as_str()), (0, ""));
    let table = host.succeed(&["status"]).out;
    for part in ["RUNNING", "1/4 busy", "LEASE LEFT"] {
        assert!(table.contains(part), "{part}: {table}");
    }
    let list = host.succeed(&["claims", "list"]).out;
    assert!(list.contains(seen["claims"][0]["task"].as_str().expect("the task")), "{list}");
    server.quit();
}

#[test]
fn a_paused_worker_names_the_operator_and_claims_nothing_until_resumed() {
    let (host, mut server) = Host::with_dev(&["--dialect", "azure"]);
    host.succeed(&["pause", "--for", "1h", "--note", "kernel update"]);
    let seen = host.status();
    assert_eq!((seen["state"].as_str(), seen["note"]["by"].as_str()), (Some("paused"), Some("ana")));
    let table = host.succeed(&["status"]).out;
    assert!(table.contains("PAUSED") && table.contains("“kernel update”"), "{table}");
    // Without a variable, the operator is named by number.
    assert_eq!(run(journeyman(host.path()).arg("pause"), "").code, 0);
    let user = format!("user {}", rustix::process::getuid().as_raw());
    assert_eq!(host.status()["note"]["by"].as_str(), Some(user.as_str()));
    let id = host.create(&["--", "/bin/true"]);
    assert_eq!(host.status()["counts"]["claims"], 0);
    host.succeed(&["resume"]);
    assert_eq!(host.task(&["wait", &id]).code, 0);
    server.logs("command: resume");
}

#[test]
fn e4_commands_print_json() {
    let (host, _server) = Host::with_dev(&[]);
    for command in ["pause", "resume", "drain"] {
        let said = host.succeed(&[command, "-o", "json"]).out;
        let answer: serde_json::Value = serde_json::from_str(&said).expect("JSON");
        assert!(answer["message"].as_str().is_some_and(|message| !message.is_empty()), "{command}: {said}");
    }
}

#[test]
fn a_drain_finishes_what_runs_and_waits_for_it() {
    let (host, mut server) = Host::with_dev(&[]);
    // It runs until something is written to the pipe.
    fifo(host.join("pipe"));
    let id = host.create_script(&format!("cat {}/pipe", host.path().display()));
    server.logs("claimed");
    host.succeed(&["drain"]);
    assert_eq!(host.status()["state"], "draining");
    host.write("pipe", "go\n");
    let said = server.ends_with(0);
    assert!(said.err.contains(&id) && said.err.contains("outcome=completed"), "{}", said.err);
}

#[test]
fn stop_releases_claims_and_status_reports_an_exited_worker() {
    let (host, mut server) = Host::with_dev(&[]);
    host.task(&["create", "--", "/bin/sleep", "600"]);
    server.logs("claimed");
    host.succeed(&["stop", "--wait", "--note", "done for today"]);
    let log = server.ends_with(14).err;
    for words in ["done for today", "worker-shutdown", "the worker exits: 1 claims, 0 completed", "command: release"] {
        assert!(log.contains(words), "{words}: {log}");
    }
    let gone = host.run(&["status"]);
    assert_eq!(gone.code, 32, "{}", gone.err);
    assert!(gone.err.contains("nothing is listening at") && gone.err.contains("--socket"), "{}", gone.err);
    // A shell may have the variables of a worker.
    let mut command = host.journeyman(&["status"]);
    let gone = run(command.env("WORKER_KEY", "42").env("WORKER_AMQP_URI", "amqp://h"), "");
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
    let message = |text: &str| serde_json::json!({ "message": text });
    let task = serde_json::json!({
        "task": "fN1SbArXTPSVFNUvaOlinQ", "run": 0, "source": "ci", "state": "running", "progress": null,
        "held_seconds": 1.0, "lease_left_seconds": null, "reclaimed_seconds_ago": null, "log_bytes": 0, "source_description": "here",
        "handler": "command", "reclaims": 0, "reclaim_in_seconds": null, "containment": "group", "processes": [], "phases": [],
    });
    for (last, code) in [(404, 0), (503, 0), (409, 1)] {
        let host = Host::new();
        let replies = vec![
            (200, task.clone()),
            (200, message("it ends")),
            (504, message("no response in time")),
            (200, task.clone()),
            (last, message("last")),
        ];
        let requests = scripted(host.path(), replies);
        let ended = host.run(&["claims", "release", "fN1", "--wait", "--socket", "socket"]);
        assert_eq!(ended.code, code, "{last}: {}", ended.err);
        let requests = requests.lock().expect("not poisoned");
        assert_eq!(requests.len(), 5, "{requests:?}");
        assert!(requests[2..].iter().all(|line| line.starts_with("GET /v1/claim?")), "{requests:?}");
    }
}

#[test]
fn the_log_of_a_running_task_is_followed_to_its_end() {
    let (host, mut server) = Host::with_dev(&[]);
    fifo(host.join("pipe"));
    let id = host.create_script(&format!("echo first; cat {}/pipe; echo last", host.path().display()));
    server.logs("claimed");
    let mut follow = Server::start(&mut host.journeyman(&["claims", "logs", "-f", &id]));
    follow.prints("first");
    host.write("pipe", "second\n");
    follow.prints("second");
    follow.prints("last");
    follow.ends_with(0);
    let gone = host.run(&["claims", "logs", "unknown"]);
    assert_eq!(gone.code, 1);
    assert!(gone.err.contains("holds no task unknown"), "{}", gone.err);
}

#[test]
fn a_reload_applies_all_of_a_configuration_or_nothing() {
    let host = Host::with_queue();
    let configure = |capacity: &str, more: &str, group: &str, rest: &str| {
        let worker =
            format!("[worker]\nid = \"w\"\ngroup = \"{group}\"\ncapacity = {capacity}\nwork_dir = \"work\"\n{more}\n");
        host.write("journeyman.toml", &(worker + &host.source() + rest));
    };
    configure("2", "", "g", "");
    let token = "JOURNEYMAN__SOURCE__CI__ACCESS_TOKEN_FILE";
    let mut server = Server::start(host.journeyman(&["worker"]).env(token, "env:TEST_TOKEN").env("TEST_TOKEN", TOKEN));
    server.logs("source: ");
    let command = |arguments: &[&str]| {
        run(host.journeyman(arguments).env("JOURNEYMAN_SOCKET", host.join("work/control.sock")), "")
    };
    let capacity = || {
        let status: serde_json::Value = serde_json::from_str(&command(&["status", "-o", "json"]).out).expect("JSON");
        status["capacity"].as_u64()
    };
    assert_eq!(capacity(), Some(2));

    configure("5", "max_tasks = 9", "g", "");
    let said = command(&["reload"]);
    assert!(said.out.contains("changed: worker.capacity, worker.max_tasks"), "{}{}", said.out, said.err);
    assert_eq!(capacity(), Some(5));

    configure("7", "capacitee = 1", "g", "");
    let said = command(&["reload"]);
    assert_eq!(said.code, 1);
    assert!(said.err.contains("capacitee") && said.err.contains("journeyman.toml:6:1"), "{}", said.err);
    server.signal(Signal::HUP);
    server.logs("configuration rejected");
    assert_eq!(capacity(), Some(5));

    configure("9", "", "h", "");
    server.signal(Signal::HUP);
    let line = server.logs("a restart is needed");
    assert!(line.contains("worker.group") && line.contains("worker.capacity"), "{line}");
    assert_eq!(capacity(), Some(9));

    configure("9", "", "g", "[log]\nlevel = \"error\"\n");
    assert_eq!(command(&["reload"]).out, "changed: log.level\n");
    server.signal(Signal::QUIT);
    assert!(!server.ends().err.contains("changed: log.level"), "only errors are logged");
}

#[test]
fn a_reload_keeps_the_logs_live() {
    let host = Host::with_queue();
    let configure = |capacity: &str| {
        let worker =
            "[worker]\nid = \"w\"\ngroup = \"g\"\nwork_dir = \"work\"\nlive_log = \"127.0.0.1:0\"\ncapacity = ";
        host.write("journeyman.toml", &format!("{worker}{capacity}\n{}", host.source()));
    };
    configure("1");
    let token = "JOURNEYMAN__SOURCE__CI__ACCESS_TOKEN_FILE";
    let mut server = Server::start(host.journeyman(&["worker"]).env(token, "env:TEST_TOKEN").env("TEST_TOKEN", TOKEN));
    server.logs("source: ");
    configure("2");
    server.signal(Signal::HUP);
    server.logs("worker.capacity");
    // It runs until something is written to the pipe.
    fifo(host.join("pipe"));
    let id = host.create_script(&format!("echo begun; cat {}/pipe", host.path().display()));
    let mut follow = host.journeyman(&["task", "log", "--follow", &id]);
    follow.env("TASKCLUSTER_ROOT_URL", host.root()).env("TASKCLUSTER_CLIENT_ID", "me");
    let mut follow = Server::start(follow.env("TASKCLUSTER_ACCESS_TOKEN", TOKEN));
    follow.prints("begun");
    host.write("pipe", "go\n");
    follow.ends_with(0);
    server.quit();
}

#[test]
fn b2_a_reload_reads_a_renewed_token() {
    let host = Host::with_queue();
    let source = host.source();
    host.write("token-of-worker", "wrong-and-long-enough");
    host.write("journeyman.toml", &format!("[worker]\nid = \"w\"\ngroup = \"g\"\nwork_dir = \"work\"\n{source}"));
    let file = host.join("token-of-worker").display().to_string();
    let mut command = host.journeyman(&["worker"]);
    let mut server = Server::start(command.env("JOURNEYMAN__SOURCE__CI__ACCESS_TOKEN_FILE", file));
    server.logs("Bad mac");
    host.write("token-of-worker", TOKEN);
    let reloaded = run(host.journeyman(&["reload"]).env("JOURNEYMAN_SOCKET", host.join("work/control.sock")), "");
    // A retry after the 401 may have read it before.
    assert!(reloaded.out == "new credentials: source.ci\n" || reloaded.out.contains("not changed"), "{}", reloaded.out);
    server.logs("the credentials in the files have changed");
    host.create_script("true");
    server.logs("completed");
    server.quit();
}

#[test]
fn a_worker_exits_when_idle_or_at_max_tasks() {
    for (flag, value, code) in [("--max-tasks", "1", 13), ("--exit-when-idle", "10s", 10)] {
        let host = Host::with_queue();
        host.create_script("true");
        let mut command = host.worker();
        let said = Server::start(command.args([flag, value])).ends_with(code);
        assert!(said.err.contains("1 claims, 1 completed"), "{flag}: {}", said.err);
    }
}

#[test]
fn a_control_socket_is_private_to_one_worker_and_its_path_may_be_long() {
    let host = Host::with_queue();
    let long = host.join(&"a-folder-with-a-long-name-".repeat(6));
    std::fs::create_dir(&long).expect("a folder");
    let socket = long.join("control.sock");
    // A killed worker leaves its socket.
    std::fs::write(&socket, "").expect("a file");
    let path = socket.display().to_string();
    let set = format!("control.socket={path}");
    let mut command = host.worker();
    let mut server = Server::start(command.args(["--set", &set]));
    server.logs("source: ");
    let mode = std::fs::metadata(&socket).expect("it is there").permissions().mode();
    assert_eq!(mode & 0o777, 0o660);
    assert_eq!(host.run(&["status", "--socket", &path]).code, 0);
    let mut command = host.worker();
    let other = format!("worker.work_dir={}/other", host.path().display());
    let second = Server::start(command.args(["--set", &set, "--set", &other])).ends_with(21);
    assert!(second.err.contains("in use by another worker"), "{}", second.err);
    server.quit();
    assert!(!socket.exists());
}

#[test]
fn notices_and_reloads_are_counted() {
    let host = Host::with_queue();
    fifo(host.join("pipe"));
    fifo(host.join("up"));
    host.create_script(&format!("echo up >{0}/up; cat {0}/pipe", host.path().display()));
    host.create_script("sleep 600");
    let notice = host.join("terminate-at");
    let mut command = host.worker();
    let file = format!("host.termination_file={}", notice.display());
    let mut server = Server::start(command.args(["--capacity", "2", "--set", &file]));
    server.logs("\"claimed\"");
    server.logs("\"claimed\"");
    // What has not begun when the notice comes never does.
    assert_eq!(host.read("up"), "up\n");
    host.succeed(&["reload"]);
    let before = host.status();
    assert_eq!((before["notice"].is_null(), before["blocked_reason"].as_str()), (true, Some("full")), "{before}");

    let time = jiff::Timestamp::now() + jiff::SignedDuration::from_secs(3600);
    host.write("new", &time.to_string());
    std::fs::rename(host.join("new"), &notice).expect("it can be renamed");
    server.logs("command: host termination at a known time");
    host.write("pipe", "go\n");
    server.logs("\"reported\"");
    let after = host.status();
    assert!(after["notice"]["last_claim_ended_after_seconds"].as_f64().is_some_and(|span| span >= 0.0), "{after}");
    let (counts, source) = (&after["counts"], &after["sources"][0]["counts"]);
    assert_eq!((counts["notices"].as_u64(), counts["config_reloads"].as_u64()), (Some(1), Some(1)), "{after}");
    assert!(counts["log_bytes"].as_u64().is_some_and(|bytes| bytes > 0), "{after}");
    assert_eq!((source["claims"].as_u64(), source["completed"].as_u64()), (Some(2), Some(1)), "{after}");
    server.signal(Signal::QUIT);
    server.ends_with(12);
}

#[test]
fn a_payload_inherits_no_descriptor_of_the_workers_parent() {
    let host = Host::new();
    host.write("secret", "hunter2");
    let mut shell = std::process::Command::new("sh");
    let ours = host.journeyman(&[]);
    shell.current_dir(host.path()).env_clear().envs(ours.get_envs().filter_map(|(name, value)| Some((name, value?))));
    let mut server = Server::start(shell.args(["-c", "exec 9<secret; exec \"$0\" dev"]).arg(ours.get_program()));
    server.logs("claim");
    let id = host.create_script("ls -l /proc/self/fd; test ! -e /proc/self/fd/9");
    assert_eq!(host.task(&["wait", &id]).code, 0, "{}", host.task(&["log", &id]).out);
    server.quit();
}

#[test]
fn e2_status_and_claims_name_tasks_and_results_that_have_ended() {
    let (host, mut server) = Host::with_dev(&[]);
    let failing = host.create(&["--name", "lint of main", "--", "/bin/false"]);
    assert_eq!(host.task(&["wait", &failing]).code, 1);
    // After the report was answered.
    server.logs("reported");
    host.create(&["--name", "build of main", "--", "/bin/sleep", "600"]);
    server.logs("claimed");
    let seen = host.status();
    let ended = &seen["recent_results"][0];
    assert_eq!((&ended["task"], &ended["name"]), (&failing.into(), &"lint of main".into()), "{seen}");
    assert_eq!((&ended["outcome"], &ended["source"]), (&"failed".into(), &"command".into()), "{seen}");
    assert_eq!(seen["claims"][0]["name"], "build of main", "{seen}");
    for arguments in [&["status"][..], &["claims", "list"], &["claims", "show", ""]] {
        let task = seen["claims"][0]["task"].as_str().expect("a task");
        let arguments: Vec<_> = arguments.iter().map(|word| if word.is_empty() { task } else { word }).collect();
        let said = host.succeed(&arguments).out;
        assert!(said.contains("build of main"), "{arguments:?}: {said}");
    }
    server.quit();
}

#[test]
fn d3_a_task_cannot_command_its_own_worker() {
    let (host, mut server) = Host::with_dev(&[]);
    let socket = host.dev_socket();
    let journeyman = env!("CARGO_BIN_EXE_journeyman");
    let command = |prefix: &str, command: &str| format!("{prefix} {journeyman} {command} --socket {socket}; echo $?");
    // In its session, in one of its own, without its environment, and as an orphan.
    let script = [
        command("", "drain"),
        command("setsid -w", "pause"),
        command("env -i", "status"),
        format!("(setsid sh -c '{journeyman} stop --socket {socket} >orphan 2>&1; echo >done' &)"),
        "while ! [ -e done ]; do sleep 0.05; done; cat orphan".to_owned(),
    ];
    let task = host.create_script(&script.join("\n"));
    assert_eq!(host.task(&["wait", &task]).code, 0);
    let log = host.task(&["log", &task]).out;
    assert_eq!(log.matches("refused: the caller was started by the process").count(), 4, "{log}");
    server.logs("tried to use the control socket");
    let seen = host.status();
    assert_eq!((seen["state"].as_str(), seen["note"].as_object()), (Some("running"), None), "{seen}");
    server.quit();
}
