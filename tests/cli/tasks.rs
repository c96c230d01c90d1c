//! `journeyman task`: lists of tasks and logs.

use std::io::{Read as _, Write as _};
use std::net::TcpStream;

use axum::Router;
use axum::http::StatusCode;
use axum::response::IntoResponse as _;
use axum::routing::get;
use serde_json::json;

use crate::cli::host::Host;
use crate::cli::server::{Server, fifo, serve};

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
fn e3_an_address_that_readers_cannot_use_is_a_configuration_error() {
    let host = Host::new();
    let check = |text: &str| {
        host.write("journeyman.toml", text);
        host.run(&["config", "check", "journeyman.toml"])
    };
    let refused = check("[worker]\nlive_log = \"0.0.0.0:60098\"\n");
    assert!(refused.code == 30 && refused.err.contains("live_log_url"), "{}", refused.err);
    for text in [
        "[worker]\nlive_log = \"0.0.0.0:60098\"\nlive_log_url = \"https://logs.example.com/host7\"\n",
        "[worker]\nlive_log = \"127.0.0.1:0\"\n",
    ] {
        let accepted = check(text);
        assert_eq!(accepted.code, 0, "{}", accepted.err);
    }
}

/// Address, cookie and key of the page of `journeyman dev`, by the address that it prints.
fn open_page(printed: &str) -> (String, String, String) {
    let address = printed.split("http://").nth(1).expect("an address");
    let (host, path) = address.split_once('/').expect("a path");
    let first = request(host, "GET", &format!("/{path}"), "", "");
    assert!(first.starts_with("HTTP/1.1 303") && first.contains("location: /\r\n"), "{first}");
    let cookie = first.split("set-cookie: ").nth(1).and_then(|rest| rest.split(';').next()).expect("a cookie");
    let key = cookie.split('=').nth(1).expect("a key").to_owned();
    (host.to_owned(), cookie.to_owned(), key)
}

fn request(host: &str, method: &str, path: &str, headers: &str, body: &str) -> String {
    let mut stream = TcpStream::connect(host).expect("a connection");
    let length = body.len();
    let text = format!(
        "{method} {path} HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\ncontent-length: {length}\r\n\
         content-type: application/x-www-form-urlencoded\r\n{headers}\r\n{body}"
    );
    stream.write_all(text.as_bytes()).expect("the request is sent");
    let mut response = String::new();
    stream.read_to_string(&mut response).expect("the response is UTF-8");
    response
}

#[test]
fn e1_dev_serves_a_page_of_tasks_for_the_printed_key_only() {
    let host = Host::new();
    let mut command = host.journeyman(&["dev"]);
    let mut server = Server::start(command.env("NO_COLOR", "1"));
    let printed = server.prints("page ");
    server.prints("Ctrl-C");
    let (address, cookie, key) = open_page(&printed);
    let cookie = format!("cookie: other=1; {cookie}\r\n");
    let get = |path: &str| request(&address, "GET", path, &cookie, "");
    assert!(get("/").contains("No tasks yet"));

    let done = host.create(&["--name", "<b>build</b>", "--", "/bin/sh", "-c", "echo hello; exit 1"]);
    assert_eq!(host.task(&["wait", &done]).code, 1);
    let list = get("/");
    assert!(list.contains("&lt;b&gt;build&lt;/b&gt;") && list.contains(&done) && list.contains("failed"), "{list}");
    assert!(list.contains("form-action 'self'") && list.contains("default-src 'none'"), "{list}");
    assert!(!get("/?state=pending").contains(&done) && get("/?state=failed&name=BUILD").contains(&done));
    let task = get(&format!("/tasks/{done}"));
    for part in ["public/logs/live_backing.log", "Log of run 0", "rerun", "Definition", "exit 1", "deadline"] {
        assert!(task.contains(part), "{part}: {task}");
    }
    let log = get(&format!("/tasks/{done}/0/log"));
    assert!(log.contains("text/plain") && log.contains("hello\n"), "{log}");
    let later = get(&format!("/tasks/{done}/0/log?from=6"));
    assert!(later.contains("\neyman ") && later.contains("hello\n"), "{later}");
    let artifact = get(&format!("/tasks/{done}/0/artifacts/public/logs/live_backing.log"));
    assert!(artifact.starts_with("HTTP/1.1 303") && artifact.contains("/artifact-store/"), "{artifact}");
    assert!(get("/worker").contains("recent results"));

    // Without the key, with another's form, and under another name.
    for (path, headers, status) in
        [("/", "", 403), (&format!("/tasks/{done}/0/log"), "cookie: journeyman-1=x\r\n", 403), ("/?key=x", "", 403)]
    {
        let refused = request(&address, "GET", path, headers, "");
        assert!(refused.starts_with(&format!("HTTP/1.1 {status}")), "{path}: {refused}");
    }
    let rerun =
        |token: &str| request(&address, "POST", &format!("/tasks/{done}/rerun"), &cookie, &format!("token={token}"));
    assert!(rerun("x").starts_with("HTTP/1.1 403"));
    assert_eq!(host.json(&["task", "status", &done])["runs"].as_array().map(Vec::len), Some(1));
    assert!(rerun(&key).starts_with("HTTP/1.1 303"), "{}", rerun(&key));
    assert_eq!(host.task(&["wait", &done]).code, 1);
    assert_eq!(host.json(&["task", "status", &done])["runs"].as_array().map(Vec::len), Some(2));

    let endless = host.create(&["--", "/bin/sleep", "600"]);
    let cancel = request(&address, "POST", &format!("/tasks/{endless}/cancel"), &cookie, &format!("token={key}"));
    assert!(cancel.starts_with("HTTP/1.1 303"), "{cancel}");
    assert_eq!(host.json(&["task", "status", &endless])["runs"][0]["reasonResolved"], "canceled");
    server.drain();
}
