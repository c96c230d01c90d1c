//! Commands about one claim of a running worker.

use std::path::Path;

use rustix::process::Signal;

use crate::cli::host::Host;
use crate::cli::server::Server;

/// Starts a task that writes `ready` to its log and does not end by itself. The log begins with the command: there the word
/// has quotes in it.
fn start(server: &mut Server, host: &Host, script: &str) -> String {
    let id = host.create_script(script);
    server.logs(&format!("{id}/0"));
    Server::start(&mut host.journeyman(&["claims", "logs", "-f", &id])).prints("ready");
    id
}

/// The reason of the last run, and the number of runs.
fn last_reason(host: &Host, id: &str) -> (String, usize) {
    let status = host.json(&["task", "status", id]);
    let runs = status["runs"].as_array().expect("its runs");
    let reason = runs.last().and_then(|run| run["reasonResolved"].as_str()).unwrap_or_default();
    (reason.to_owned(), runs.len())
}

const SLEEPER: &str = "echo rea''dy; sleep 600";
const STUBBORN: &str = "trap '' TERM; echo rea''dy; while :; do sleep 1; done";

#[test]
fn claims_show_prints_all_details() {
    let (host, mut server) = Host::with_dev(&["--dialect", "azure"]);
    let id = start(&mut server, &host, "echo $$ >pid; pwd; echo rea''dy; sleep 600");
    let shown = host.json(&["claims", "show", &id[..6]]);
    assert_eq!((shown["task"].as_str(), shown["run"].as_u64()), (Some(id.as_str()), Some(0)), "{shown}");
    assert_eq!((shown["state"].as_str(), shown["handler"].as_str()), (Some("running"), Some("command")), "{shown}");
    assert_eq!((shown["dequeue_count"].as_u64(), shown["reclaims"].as_u64()), (Some(1), Some(0)), "{shown}");
    assert!(shown["lease_seconds"].as_f64() > shown["lease_left_seconds"].as_f64(), "{shown}");
    assert!(shown["reclaim_in_seconds"].as_f64().is_some_and(|left| left > 60.0), "{shown}");
    assert!(shown["source_description"].as_str().is_some_and(|place| place.contains("dev/command")), "{shown}");
    assert!(shown["log_bytes"].as_u64().is_some_and(|bytes| bytes > 0), "{shown}");
    memory_is_shown(&host, &shown);
    assert_eq!(shown["cgroup"].is_null(), shown["cpu_seconds"].is_null(), "{shown}");
    let pid_file = Path::new(shown["work_dir"].as_str().expect("its directory")).join("pid");
    let pid = std::fs::read_to_string(&pid_file).expect("the task wrote it").trim().to_owned();
    let processes = shown["processes"].as_array().expect("a list");
    assert!(processes.iter().any(|process| process.as_i64() == pid.parse().ok()), "{pid} in {shown}");
    let phases = shown["phases"].as_array().expect("a list");
    let names: Vec<_> = phases.iter().map(|phase| phase["phase"].as_str()).collect();
    assert_eq!(names, [Some("claim"), Some("prepare"), Some("run")], "{shown}");
    assert!(phases[1]["duration_seconds"].is_f64() && phases[2]["duration_seconds"].is_null(), "{shown}");
    let table = host.run(&["claims", "show", &id]).out;
    let task = format!("{id}/0\n");
    for part in [&task, "1 times", "0 times, next in ", &pid, "ago, running"] {
        assert!(table.contains(part), "{part}: {table}");
    }
    server.quit();
}

fn memory_is_shown(host: &Host, shown: &serde_json::Value) {
    let status = host.status();
    for memory in [&shown["memory_bytes"], &status["claims"][0]["memory_bytes"]] {
        assert!(memory.as_u64().is_some_and(|bytes| bytes > 0), "{shown} {status}");
    }
}

#[test]
fn the_memory_of_a_task_is_shown_without_control_groups_as_well() {
    let (host, mut server) = Host::with_dev(&["--set", "host.containment=group"]);
    let id = start(&mut server, &host, SLEEPER);
    let shown = host.json(&["claims", "show", &id]);
    assert!(shown["cgroup"].is_null(), "{shown}");
    memory_is_shown(&host, &shown);
    server.quit();
}

#[test]
fn a_released_task_is_stopped_and_its_next_run_is_claimed() {
    let settings = ["--dialect", "azure", "--termination-grace", "200ms", "--set", "handler.command.kind=command"];
    let (host, mut server) = Host::with_dev(&settings);
    let id = start(&mut server, &host, &format!("[ $RUN_ID = 1 ] && exit 0; {STUBBORN}"));
    let other = start(&mut server, &host, SLEEPER);
    host.run(&["pause"]);
    let said = host.succeed(&["claims", "release", &format!("{id}/0"), "--note", "disk is slow", "--wait"]);
    let expected = "/0: it ends and will be reported as exception (worker-shutdown)";
    assert!(said.out.contains(&format!("{id}{expected}")), "{}", said.out);
    let held = host.json(&["claims", "list"]);
    let held: Vec<_> = held.as_array().expect("a list").iter().map(|task| task["task"].as_str()).collect();
    assert_eq!(held, [Some(other.as_str())], "its slot is free, and its neighbour runs on");
    assert!(host.task(&["log", &id, "--run", "0"]).out.contains("released by operator ana: disk is slow"));
    host.run(&["resume"]);
    assert_eq!(host.task(&["wait", &id]).code, 0);
    assert_eq!(last_reason(&host, &id), ("completed".to_owned(), 2));
    server.signal(Signal::QUIT);
    let said = server.ends_with(14);
    let command = said.err.lines().find(|line| line.contains("command about a claim")).expect("it is in the log");
    assert!(command.contains("disk is slow") && command.contains("ana") && command.contains("release"), "{command}");
    assert_eq!(
        said.err.lines().filter(|line| line.contains("reported") && line.contains(&format!("{id}/0"))).count(),
        1
    );
}

#[test]
fn a_canceled_claim_is_not_retried_and_the_log_names_the_operator() {
    let (host, mut server) = Host::with_dev(&["--termination-grace", "200ms", "--set", "handler.command.kind=command"]);
    let id = start(&mut server, &host, STUBBORN);
    let said = host.run(&["claims", "cancel", &id[..8], "--wait", "--note", "eats the\u{1b} disk"]);
    assert!(said.code == 0 && said.out.contains("reported as exception (internal-error)"), "{}{}", said.out, said.err);
    assert_eq!(host.json(&["claims", "list"]), serde_json::json!([]));
    assert_eq!(last_reason(&host, &id), ("internal-error".to_owned(), 1));
    let log = host.task(&["log", &id]);
    assert!(log.out.contains("canceled by operator ana: eats the  disk"), "{}{}", log.out, log.err);
    assert!(log.out.contains("stopped: canceled by an operator"), "{}", log.out);
    server.drain();
}

#[test]
fn a_canceled_claim_cannot_be_released() {
    let (host, mut server) = Host::with_dev(&["--termination-grace", "60s", "--set", "handler.command.kind=command"]);
    // It ends after the commands.
    let script = format!(
        "trap 'until [ -e {}/go ]; do sleep 0.1; done; exit' TERM; echo rea''dy; while :; do sleep 0.1; done",
        host.path().display()
    );
    let id = start(&mut server, &host, &script);
    host.succeed(&["claims", "cancel", &id]);
    let said = host.run(&["claims", "release", &id, "--wait"]);
    let expected = "/0 is not released: it ends and will be reported as exception (internal-error)";
    assert!(said.code == 1 && said.err.contains(&format!("{id}{expected}")), "{} {}", said.code, said.err);
    host.succeed(&["claims", "cancel", &id]);
    host.write("go", "");
    assert_eq!(host.task(&["wait", &id]).code, 1);
    assert_eq!(last_reason(&host, &id), ("internal-error".to_owned(), 1));
    server.drain();
}

#[test]
fn an_unknown_or_ambiguous_claim_is_an_error_that_lists_the_claims() {
    let (host, mut server) = Host::with_dev(&[]);
    let none = host.run(&["claims", "cancel", "unknown"]);
    assert!(none.code == 1 && none.err.contains("holds no task unknown; it holds nothing"), "{}", none.err);
    let (one, other) = (start(&mut server, &host, SLEEPER), start(&mut server, &host, SLEEPER));
    for command in ["show", "cancel", "release", "logs"] {
        let none = host.run(&["claims", command, "unknown"]);
        let names = none.err.contains(&format!("{one}/0")) && none.err.contains(&format!("{other}/0"));
        assert!(none.code == 1 && names, "{command}: {}", none.err);
        let empty = host.run(&["claims", command, ""]);
        assert!(empty.code == 1 && empty.err.contains("it holds"), "{command}: {}", empty.err);
        let another_run = host.run(&["claims", command, &format!("{one}/1")]);
        assert_eq!(another_run.code, 1, "{command}: {}", another_run.err);
    }
    let held = host.json(&["claims", "list"]);
    assert_eq!(held.as_array().map(Vec::len), Some(2), "both are still held");
    server.quit();
}
