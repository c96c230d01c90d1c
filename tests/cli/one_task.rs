//! One task of a running worker, looked at and ended through its control socket.

use std::path::Path;

use rustix::process::Signal;

use crate::server::{Server, dev, task};
use crate::support::{Said, journeyman, run};

fn told(folder: &Path, arguments: &[&str]) -> Said {
    run(journeyman(folder).env("USER", "ana").args(arguments), "")
}

fn json(said: &Said) -> serde_json::Value {
    assert_eq!(said.code, 0, "{}", said.err);
    serde_json::from_str(&said.out).expect("JSON")
}

/// A task that has written `ready` to its log, and does not end by itself. Its log begins with what is to be run: there the word
/// has quotes in it.
pub(crate) fn started(server: &mut Server, folder: &Path, script: &str) -> String {
    let created = task(folder, &["create", "--", "/bin/sh", "-c", script]);
    assert_eq!(created.code, 0, "{}", created.err);
    let id = created.out.trim().to_owned();
    server.logs(&format!("{id}/0"));
    let mut log = Server::start(journeyman(folder).args(["claims", "logs", "-f", &id]));
    log.prints("ready");
    id
}

/// How the last run of a task ended, and how many runs it had.
fn ended(folder: &Path, id: &str) -> (String, usize) {
    let status = json(&task(folder, &["status", id, "-o", "json"]));
    let runs = status["runs"].as_array().expect("its runs");
    let reason = runs.last().and_then(|run| run["reasonResolved"].as_str()).unwrap_or_default();
    (reason.to_owned(), runs.len())
}

const STUBBORN: &str = "trap '' TERM; echo rea''dy; while :; do sleep 1; done";

#[test]
fn claims_show_prints_all_details() {
    let folder = tempfile::tempdir().expect("a folder");
    let here = folder.path();
    let mut server = dev(here, &["--dialect", "azure"]);
    let id = started(&mut server, here, "echo $$ >pid; pwd; echo rea''dy; sleep 600");
    let shown = json(&told(here, &["claims", "show", &id[..6], "-o", "json"]));
    assert_eq!((shown["task"].as_str(), shown["run"].as_u64()), (Some(id.as_str()), Some(0)), "{shown}");
    assert_eq!((shown["state"].as_str(), shown["handler"].as_str()), (Some("running"), Some("command")), "{shown}");
    assert_eq!((shown["dequeue_count"].as_u64(), shown["reclaims"].as_u64()), (Some(1), Some(0)), "{shown}");
    assert!(shown["lease_seconds"].as_f64() > shown["lease_left_seconds"].as_f64(), "{shown}");
    assert!(shown["reclaim_in_seconds"].as_f64().is_some_and(|left| left > 60.0), "{shown}");
    assert!(shown["source_description"].as_str().is_some_and(|place| place.contains("dev/command")), "{shown}");
    assert!(shown["log_bytes"].as_u64().is_some_and(|bytes| bytes > 0), "{shown}");
    memory_is_shown(here, &shown);
    let kept = Path::new(shown["work_dir"].as_str().expect("its folder")).join("pid");
    let pid: i64 = std::fs::read_to_string(&kept).expect("it wrote there").trim().parse().expect("a number");
    let processes: Vec<i64> =
        shown["processes"].as_array().expect("a list").iter().filter_map(serde_json::Value::as_i64).collect();
    assert!(processes.contains(&pid), "{pid} in {shown}");
    let phases: Vec<_> =
        shown["phases"].as_array().expect("a list").iter().map(|phase| phase["phase"].as_str()).collect();
    assert_eq!(phases, [Some("claim"), Some("prepare"), Some("run")], "{shown}");
    assert!(
        shown["phases"][1]["duration_seconds"].is_f64() && shown["phases"][2]["duration_seconds"].is_null(),
        "{shown}"
    );
    let table = told(here, &["claims", "show", &id]).out;
    for part in [
        &format!("task         {id}/0\n"),
        "received     1 times\n",
        "state        running\n",
        "reclaimed 0 times, next in ",
    ] {
        assert!(table.contains(part), "{part}: {table}");
    }
    assert!(table.contains(&pid.to_string()) && table.contains("ago   running"), "{table}");
    server.signal(Signal::QUIT);
    assert_eq!(server.ends().code, 14);
}

fn memory_is_shown(here: &Path, shown: &serde_json::Value) {
    let held = json(&told(here, &["status", "-o", "json"]));
    for memory in [&shown["memory_bytes"], &held["claims"][0]["memory_bytes"]] {
        assert!(memory.as_u64().is_some_and(|bytes| bytes > 0), "{shown} {held}");
    }
}

#[test]
fn the_memory_of_a_task_is_shown_without_control_groups_as_well() {
    let folder = tempfile::tempdir().expect("a folder");
    let here = folder.path();
    let mut command = journeyman(here);
    command.env("TMPDIR", here).env("NO_COLOR", "1").env("JOURNEYMAN__HOST__CONTAINMENT", "group").arg("dev");
    let mut server = Server::start(&mut command);
    server.prints("Ctrl-C");
    let id = started(&mut server, here, "echo rea''dy; sleep 600");
    let shown = json(&told(here, &["claims", "show", &id, "-o", "json"]));
    assert!(shown["cgroup"].is_null(), "{shown}");
    memory_is_shown(here, &shown);
    server.signal(Signal::QUIT);
    assert_eq!(server.ends().code, 14);
}

#[test]
fn a_released_task_is_stopped_and_its_next_run_is_claimed() {
    let folder = tempfile::tempdir().expect("a folder");
    let here = folder.path();
    let settings = ["--dialect", "azure", "--termination-grace", "200ms", "--set", "handler.command.kind=command"];
    let mut server = dev(here, &settings);
    let id = started(&mut server, here, &format!("[ $RUN_ID = 1 ] && exit 0; {STUBBORN}"));
    let other = started(&mut server, here, "echo rea''dy; sleep 600");
    told(here, &["pause"]);
    let said = told(here, &["claims", "release", &format!("{id}/0"), "--note", "disk is slow", "--wait"]);
    assert_eq!(said.code, 0, "{}", said.err);
    let expected = "/0 ends and will be reported as exception (worker-shutdown)";
    assert!(said.out.contains(&format!("{id}{expected}")), "{}", said.out);
    let held = json(&told(here, &["claims", "list", "-o", "json"]));
    let held: Vec<_> = held.as_array().expect("a list").iter().map(|task| task["task"].as_str()).collect();
    assert_eq!(held, [Some(other.as_str())], "its slot is free, and its neighbour runs on");
    assert_eq!(task(here, &["log", &id, "--run", "0"]).code, 0);
    assert!(task(here, &["log", &id, "--run", "0"]).out.contains("released by operator ana: disk is slow"));
    told(here, &["resume"]);
    assert_eq!(task(here, &["wait", &id]).code, 0);
    assert_eq!(ended(here, &id), ("completed".to_owned(), 2));
    server.signal(Signal::QUIT);
    let said = server.ends();
    let ordered = said.err.lines().find(|line| line.contains("command about a claim")).expect("it is in the log");
    assert!(ordered.contains("disk is slow") && ordered.contains("ana") && ordered.contains("release"), "{ordered}");
    assert_eq!(
        said.err.lines().filter(|line| line.contains("reported") && line.contains(&format!("{id}/0"))).count(),
        1
    );
}

#[test]
fn a_canceled_claim_is_not_retried_and_the_log_names_the_operator() {
    let folder = tempfile::tempdir().expect("a folder");
    let here = folder.path();
    let mut server = dev(here, &["--termination-grace", "200ms", "--set", "handler.command.kind=command"]);
    let id = started(&mut server, here, STUBBORN);
    let said = told(here, &["claims", "cancel", &id[..8], "--wait", "--note", "eats the\u{1b} disk"]);
    assert!(said.code == 0 && said.out.contains("reported as exception (internal-error)"), "{}{}", said.out, said.err);
    assert_eq!(json(&told(here, &["claims", "list", "-o", "json"])), serde_json::json!([]));
    assert_eq!(ended(here, &id), ("internal-error".to_owned(), 1));
    let log = task(here, &["log", &id]);
    assert!(log.out.contains("canceled by operator ana: eats the  disk"), "{}{}", log.out, log.err);
    assert!(log.out.contains("stopped: canceled by an operator"), "{}", log.out);
    server.signal(Signal::TERM);
    assert_eq!(server.ends().code, 0);
}

#[test]
fn a_canceled_claim_cannot_be_released() {
    let folder = tempfile::tempdir().expect("a folder");
    let here = folder.path();
    let mut server = dev(here, &["--termination-grace", "60s", "--set", "handler.command.kind=command"]);
    let go = here.join("go");
    // It ends when the orders have been given.
    let script = format!(
        "trap 'until [ -e {} ]; do sleep 0.1; done; exit' TERM; echo rea''dy; while :; do sleep 0.1; done",
        go.display()
    );
    let id = started(&mut server, here, &script);
    assert_eq!(told(here, &["claims", "cancel", &id]).code, 0);
    let said = told(here, &["claims", "release", &id, "--wait"]);
    let expected = "/0 is not released: it ends and will be reported as exception (internal-error)";
    assert!(said.code == 1 && said.err.contains(&format!("{id}{expected}")), "{} {}", said.code, said.err);
    assert_eq!(told(here, &["claims", "cancel", &id]).code, 0, "what was wanted comes of it");
    std::fs::write(&go, "").expect("it may end");
    assert_eq!(task(here, &["wait", &id]).code, 1);
    assert_eq!(ended(here, &id), ("internal-error".to_owned(), 1));
    server.signal(Signal::TERM);
    assert_eq!(server.ends().code, 0);
}

#[test]
fn an_unknown_or_ambiguous_claim_is_an_error_that_lists_the_claims() {
    let folder = tempfile::tempdir().expect("a folder");
    let here = folder.path();
    let mut server = dev(here, &[]);
    let none = told(here, &["claims", "cancel", "unknown"]);
    assert!(none.code == 1 && none.err.contains("holds no task unknown; it holds nothing"), "{}", none.err);
    let (one, other) =
        (started(&mut server, here, "echo rea''dy; sleep 600"), started(&mut server, here, "echo rea''dy; sleep 600"));
    for command in ["show", "cancel", "release", "logs"] {
        let none = told(here, &["claims", command, "unknown"]);
        let names = none.err.contains(&format!("{one}/0")) && none.err.contains(&format!("{other}/0"));
        assert!(none.code == 1 && names, "{command}: {}", none.err);
        let empty = told(here, &["claims", command, ""]);
        assert!(empty.code == 1 && empty.err.contains("it holds"), "{command}: {}", empty.err);
        let another_run = told(here, &["claims", command, &format!("{one}/1")]);
        assert_eq!(another_run.code, 1, "{command}: {}", another_run.err);
    }
    let held = json(&told(here, &["claims", "list", "-o", "json"]));
    assert_eq!(held.as_array().map(Vec::len), Some(2), "both are still held");
    server.signal(Signal::QUIT);
    assert_eq!(server.ends().code, 14);
}
