//! `journeyman task`: lists of tasks and logs.

use axum::Router;
use axum::http::StatusCode;
use axum::response::IntoResponse as _;
use axum::routing::get;
use serde_json::json;

use crate::cli::host::Host;
use crate::cli::server::{Server, fifo, get as fetch, serve};

#[test]
fn e2_tasks_are_found_by_state_queue_name_and_age() {
    let host = Host::with_queue();
    let build = host.create(&["--name", "build \u{202e}linux", "--", "/bin/true"]);
    let lint = host.create(&["--name", "lint", "--", "/bin/true"]);
    assert_eq!(host.task(&["cancel", &lint]).code, 0);
    let find = |arguments: &[&str]| host.task(&[&["list", "-o", "json"], arguments].concat()).out;
    for (arguments, finds) in [
        (&["--state", "pending", "--queue", "build/linux", "--since", "1h"][..], [true, false]),
        (&["--state", "exception", "--name", "LIN"], [false, true]),
        (&["--all", "--since", "0s"], [false, false]),
    ] {
        let found = find(arguments);
        assert_eq!([&build, &lint].map(|id| found.contains(id.as_str())), finds, "{arguments:?}: {found}");
    }
    let table = host.task(&["list", "--all"]).out;
    assert!(table.contains("build  linux") && table.contains("exception (canceled)"), "{table}");
    assert!(host.task(&["ls", "--state", "failed"]).out.contains("no such tasks"));
}

#[test]
fn many_tasks_are_changed_by_what_a_search_finds() {
    let host = Host::with_queue();
    let kept = host.create(&["--name", "keep", "--", "/bin/true"]);
    let all: Vec<String> = (0..3).map(|_| host.create(&["--name", "nightly", "--", "/bin/true"])).collect();
    let search = ["--queue", "build/linux", "--name", "night", "--since", "1h"];
    let cancel = |more: &[&str]| host.task(&[&["cancel"], &search[..], more].concat());
    let listed = cancel(&["--dry-run"]);
    assert!(listed.code == 0 && all.iter().all(|id| listed.out.contains(id)), "{}{}", listed.out, listed.err);
    assert!(!listed.out.contains(&kept), "{}", listed.out);
    let asked = cancel(&[]);
    assert!(
        asked.code == 2 && asked.err.contains("--yes does not ask"),
        "without a terminal the answer is no: {}",
        asked.err
    );
    let done = cancel(&["--yes"]);
    assert!(done.code == 0 && done.out.contains("3 done, 0 failed"), "{}{}", done.out, done.err);
    // Canceled tasks are no longer found by what cancels, and are by what runs them again.
    assert!(cancel(&["--yes"]).out.contains("no such tasks"));
    let again = host.task(&["rerun", "--since", "1h", "--yes", "-o", "json"]);
    let again: serde_json::Value = serde_json::from_str(&again.out).expect("JSON");
    assert_eq!((again["succeeded"].as_array().map(Vec::len), &again["failed"]), (Some(3), &json!({})));
    assert!(host.task(&["rerun", "--failed", "--dry-run"]).out.contains("no such tasks"));
    let nothing = host.task(&["rerun"]);
    assert!(nothing.code == 2 && nothing.err.contains("no task: name tasks"), "{}", nothing.err);
}

#[test]
fn b14_the_log_of_a_canceled_task_is_said_to_be_canceled() {
    let host = Host::with_queue();
    let id = host.create(&["--", "/bin/true"]);
    assert_eq!(host.task(&["cancel", &id]).code, 0);
    let said = host.task(&["log", &id]);
    assert_eq!(said.code, 1, "{}", said.err);
    assert!(
        said.err.contains("is exception (canceled): it never started") && !said.err.contains("expired"),
        "{}",
        said.err
    );
}

/// A task with one resolved run, whose artifacts are these; those without text are listed and missing.
fn queue_with(artifacts: &'static [(&'static str, Option<&'static str>)]) -> Host {
    let status = json!({ "status": { "taskId": "fN1SbArXTPSVFNUvaOlinQ", "provisionerId": "a", "workerType": "b",
        "state": "completed", "runs": [{ "runId": 0, "state": "completed", "reasonResolved": "completed" }] } });
    let listed: Vec<_> = artifacts.iter().map(|(name, _)| json!({ "name": name })).collect();
    let task = "/api/queue/v1/task/fN1SbArXTPSVFNUvaOlinQ";
    let missing = || (StatusCode::NOT_FOUND, axum::Json(json!({ "code": "ResourceNotFound", "message": "none" })));
    let artifact = move |name: axum::extract::Path<String>| async move {
        let found = artifacts.iter().find(|(known, _)| *known == name.0).and_then(|(_, text)| *text);
        found.map_or_else(|| missing().into_response(), |text| text.into_response())
    };
    let router = Router::new()
        .route(&format!("{task}/status"), get(async move || axum::Json(status)))
        .route(&format!("{task}/runs/0/artifacts"), get(async move || axum::Json(json!({ "artifacts": listed }))))
        .route(&format!("{task}/runs/0/artifacts/{{name}}"), get(artifact));
    Host::with_root(&serve(router))
}

#[test]
fn b14_a_log_is_found_under_each_usual_name() {
    for artifacts in [
        &[("public/logs/live.log", Some("hello\n"))][..],
        &[("public/logs/live.log", None), ("public/logs/live_backing.log", Some("hello\n"))],
        &[("public/logs/chain_of_custody.log", Some("hello\n")), ("public/build.log", Some("another\n"))],
        &[("public/logs/chain_of_custody.log", Some("another\n")), ("private/logs/live_backing.log", Some("hello\n"))],
    ] {
        let said = queue_with(artifacts).task(&["log", "fN1SbArXTPSVFNUvaOlinQ"]);
        assert_eq!((said.code, said.out.as_str()), (0, "hello\n"), "{artifacts:?}: {}", said.err);
    }
    let none = queue_with(&[("public/build.log", Some("another\n"))]).task(&["log", "fN1SbArXTPSVFNUvaOlinQ"]);
    assert!(none.code == 1 && none.err.contains("completed: no log is stored"), "{}", none.err);
}

#[test]
fn e3_a_log_is_followed_through_the_queue_while_the_task_runs() {
    let (host, mut server) = Host::with_dev(&[]);
    let go = fifo(host.join("go"));
    let id = host.create_script(&format!("echo fir''st; cat {}; echo la''st", go.display()));
    let mut follow = Server::start(&mut host.journeyman(&["task", "log", "--follow", &id]));
    assert_eq!(follow.prints("first"), "first");
    let running = host.json(&["task", "status", &id]);
    assert_eq!(running["state"], "running", "{running}");
    std::fs::write(&go, "second\n").expect("the task reads");
    let said = follow.ends_with(0);
    assert!(said.out.contains("second\nlast\n") && !said.out.contains("first"), "once: {}", said.out);
    server.logs("reported");
    let stored = host.task(&["log", &id]).out;
    assert!(stored.contains("\nfirst\nsecond\nlast\n"), "{stored}");
    server.drain();
}

#[test]
fn e1_dev_serves_the_status_page_of_its_worker() {
    let host = Host::new();
    let mut server = Server::start(host.journeyman(&["dev"]).env("NO_COLOR", "1"));
    let line = server.logs("a status page: http://");
    let address = line.split("http://").nth(1).and_then(|rest| rest.split('/').next()).expect("an address");
    let page = fetch(address, "/");
    assert!(page.contains("recent results") && page.contains("default-src 'none'"), "{page}");
    server.drain();
}
