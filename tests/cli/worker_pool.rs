//! A worker in a pool of Taskcluster's worker-manager, which the tests play together with an empty queue.

use std::io::Write as _;
use std::process::Stdio;
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex};

use axum::Router;
use axum::body::Bytes;
use axum::http::{HeaderMap, Method, StatusCode, Uri};
use serde_json::{Value, json};

use crate::cli::host::Host;
use crate::cli::server::{Server, serve};
use crate::cli::support::TIMEOUT;

const STATIC_SECRET: &str = "static-canary-0123456789-0123456789-01234567";

/// A call to worker-manager.
#[derive(Debug)]
struct Call {
    path: String,
    /// Who signed it.
    client: Option<String>,
    body: Value,
}

struct Manager {
    root: String,
    /// Those to the queue have no body.
    calls: Receiver<Call>,
}

impl Manager {
    /// `answer` gets the path of a call to worker-manager, and how often it was called before.
    fn start(answer: impl Fn(&str, usize) -> (u16, Value) + Send + Sync + 'static) -> Self {
        Self::with_queue(|| (200, json!({ "tasks": [] })), answer)
    }

    fn with_queue(
        queue: fn() -> (u16, Value),
        answer: impl Fn(&str, usize) -> (u16, Value) + Send + Sync + 'static,
    ) -> Self {
        let (sender, calls) = channel();
        let seen = Arc::new(Mutex::new((sender, Vec::<String>::new())));
        let answer = Arc::new(answer);
        let router = Router::new().fallback(move |method: Method, uri: Uri, headers: HeaderMap, body: Bytes| {
            let (seen, answer) = (Arc::clone(&seen), Arc::clone(&answer));
            async move {
                let authorization = headers.get("authorization").map(|value| value.to_str().expect("text"));
                let client =
                    authorization.and_then(|text| Some(text.split_once("id=\"")?.1.split_once('"')?.0.to_owned()));
                let path = uri.path().strip_prefix("/api/").expect("a call").to_owned();
                let body = serde_json::from_slice(&body).unwrap_or_default();
                let before = {
                    let mut seen = seen.lock().expect("no panic");
                    let before = seen.1.iter().filter(|known| **known == path).count();
                    seen.1.push(path.clone());
                    // The test may have seen enough.
                    seen.0.send(Call { path: format!("{method} {path}"), client, body }).ok();
                    before
                };
                let (status, reply) = match path.strip_prefix("worker-manager/v1") {
                    Some(path) => answer(path, before),
                    None => queue(),
                };
                (StatusCode::from_u16(status).expect("a status"), axum::Json(reply))
            }
        });
        Self { root: serve(router), calls }
    }

    /// The next call of this path, whose parts are separated by blanks from its method.
    fn call(&self, path: &str) -> Call {
        loop {
            let call = self.calls.recv_timeout(TIMEOUT).expect("it is called");
            if call.path == path {
                return call;
            }
        }
    }

    /// All calls until now, without those to the queue.
    fn rest(&self) -> Vec<Call> {
        self.calls.try_iter().filter(|call| call.path.contains("worker-manager")).collect()
    }
}

fn registered(seconds: i64, number: usize) -> Value {
    let expires = jiff::Timestamp::now() + jiff::SignedDuration::from_secs(seconds);
    json!({
        "expires": expires.to_string(), "secret": format!("one-time-canary-{number}"),
        "credentials": { "clientId": format!("worker/{number}"), "accessToken": format!("token-canary-{number}") },
    })
}

const REGISTER: &str = "POST worker-manager/v1/worker/register";
const REREGISTER: &str = "POST worker-manager/v1/worker/reregister";
const CHECK: &str = "GET worker-manager/v1/workers/build%2Flinux/g/w/should-terminate";
const CLAIM_WORK: &str = "POST queue/v1/claim-work/build%2Flinux";

/// A worker in a pool with these further keys.
fn worker(manager: &Manager, worker: &str, pool: &str) -> (Host, Server) {
    let host = Host::with_root(&manager.root);
    host.write("secret", STATIC_SECRET);
    host.write(
        "journeyman.toml",
        &format!(
            "[worker]\nid = \"w\"\ngroup = \"g\"\nwork_dir = \"work\"\npoll_interval = \"100ms\"\n{worker}\n[source.ci]\n\
             kind = \"taskcluster\"\nroot_url = \"{}\"\ntask_queue = \"build/linux\"\n[source.ci.worker_pool]\n{pool}\n",
            manager.root
        ),
    );
    let server = Server::start(&mut host.journeyman(&["worker"]));
    (host, server)
}

const STATIC: &str = "provider_id = \"static\"\nstatic_secret_file = \"secret\"";

#[test]
fn a_worker_registers_with_its_secret_and_signs_with_the_credentials_that_it_gets() {
    let manager = Manager::start(|path, _| match path {
        "/worker/register" => (200, registered(3600, 0)),
        _ => (200, json!({ "terminate": false, "reason": "needed" })),
    });
    let (_host, server) = worker(&manager, "", STATIC);
    let registration = manager.call(REGISTER);
    assert_eq!(registration.client, None);
    let expected = json!({
        "workerPoolId": "build/linux", "workerGroup": "g", "workerId": "w", "providerId": "static",
        "workerIdentityProof": { "staticSecret": STATIC_SECRET },
    });
    assert_eq!(registration.body, expected);
    assert_eq!(manager.call(CHECK).client.as_deref(), Some("worker/0"), "before the first claim");
    assert_eq!(manager.call(CLAIM_WORK).client.as_deref(), Some("worker/0"));
    let said = server.drain();
    assert!(!said.err.contains("canary"), "{}", said.err);
    assert_eq!(manager.rest().len(), 0, "an operator's drain leaves the worker in its pool");
}

#[test]
fn a_worker_that_is_not_needed_exits_before_it_claims_and_is_removed_if_wanted() {
    for (key, removed) in [("", 0), ("remove_on_exit = true", 1)] {
        let manager = Manager::start(|path, _| match path {
            "/worker/register" => (200, registered(3600, 0)),
            path if path.ends_with("/should-terminate") => {
                (200, json!({ "terminate": true, "reason": "over capacity" }))
            }
            _ => (200, json!({})),
        });
        let (_host, server) = worker(&manager, "", &format!("{STATIC}\n{key}"));
        let said = server.ends_with(15);
        assert!(said.err.contains("over capacity"), "{}", said.err);
        let calls: Vec<_> = manager.calls.try_iter().map(|call| call.path).collect();
        assert!(!calls.iter().any(|path| path == CLAIM_WORK), "{calls:?}");
        let remove = "DELETE worker-manager/v1/workers/build%2Flinux/g/w";
        assert_eq!(calls.iter().filter(|path| *path == remove).count(), removed, "{calls:?}");
    }
}

#[test]
fn a_worker_whose_secret_is_refused_does_not_start() {
    let refused = || (400, json!({ "code": "InputError", "message": "bad staticSecret" }));
    let manager = Manager::start(move |_, _| refused());
    let (_host, server) = worker(&manager, "", STATIC);
    let said = server.ends_with(31);
    assert!(said.err.contains("bad staticSecret") && !said.err.contains("canary"), "{}", said.err);
}

#[test]
fn credentials_are_renewed_with_the_one_time_secret_and_without_one_the_worker_reports_it_and_leaves() {
    let manager = Manager::start(|path, before| match (path, before) {
        ("/worker/register", 0) => (200, registered(4, 0)),
        ("/worker/reregister", 0) => (200, registered(4, 1)),
        (path, _) if path.starts_with("/worker/") => (400, json!({ "code": "InputError", "message": "expired" })),
        _ => (200, json!({ "terminate": false, "reason": "needed" })),
    });
    let (_host, server) = worker(&manager, "", STATIC);
    let first = manager.call(REREGISTER);
    assert_eq!((first.client.as_deref(), &first.body["secret"]), (Some("worker/0"), &json!("one-time-canary-0")));
    let second = manager.call(REREGISTER);
    assert_eq!((second.client.as_deref(), &second.body["secret"]), (Some("worker/1"), &json!("one-time-canary-1")));
    assert_eq!(manager.call(REGISTER).client, None, "the static secret is tried as well");
    let said = server.ends_with(31);
    assert!(said.err.contains("not renew the credentials") && !said.err.contains("canary"), "{}", said.err);
    assert_eq!(manager.rest().last().expect("a report").body["title"], "worker failed");
}

#[test]
fn an_alert_is_an_error_of_the_pool() {
    let denied = || (403, json!({ "code": "InsufficientScopes", "message": "queue-said" }));
    let manager = Manager::with_queue(denied, |path, _| match path {
        "/worker/register" => (200, registered(3600, 0)),
        _ => (200, json!({ "terminate": false, "reason": "needed" })),
    });
    let (_host, server) = worker(&manager, "", STATIC);
    let report = manager.call("POST worker-manager/v1/worker-pool-errors/build%2Flinux");
    assert_eq!(report.client.as_deref(), Some("worker/0"));
    let expected = ["workerGroup", "workerId", "kind", "title"].map(|key| report.body[key].as_str().expect("text"));
    assert_eq!(expected, ["g", "w", "journeyman", "auth-denied"]);
    let text = report.body["description"].as_str().expect("text");
    assert!(text.contains("rejects the credentials") && !text.contains("canary"), "{text}");
    server.drain();
}

#[test]
fn a_pool_that_does_not_answer_changes_nothing() {
    let manager = Manager::start(|_, _| (403, json!({ "code": "InsufficientScopes", "message": "no scope" })));
    let (_host, server) = worker(&manager, "exit_when_idle = \"1s\"", "");
    let said = server.ends_with(10);
    assert_eq!(said.err.matches("no scope").count(), 1, "{}", said.err);
    assert_eq!(manager.rest().len(), 1, "a refused check is not repeated soon");
}

#[test]
fn the_exit_codes_of_generic_worker_are_behind_a_key() {
    for (terminate, more, code) in [(true, "", 70), (false, "max_uptime = \"1s\"", 0)] {
        let manager = Manager::start(move |_, _| (200, json!({ "terminate": terminate, "reason": "" })));
        let (_host, server) = worker(&manager, &format!("exit_codes = \"generic-worker\"\n{more}"), "");
        server.ends_with(code);
    }
    let manager = Manager::start(|_, _| (403, json!({})));
    let (_host, server) = worker(&manager, "exit_codes = \"generic-worker\"\nexit_when_idle = \"100ms\"", "");
    server.ends_with(68);
}

#[test]
fn a_worker_under_a_worker_runner_asks_with_its_credentials_and_has_the_host_shut_down() {
    let manager = Manager::start(|_, _| (200, json!({ "terminate": true, "reason": "archived" })));
    let host = Host::with_root(&manager.root);
    let config = json!({
        "rootURL": manager.root, "clientId": "worker/runner", "accessToken": "token", "certificate": "",
        "provisionerId": "build", "workerType": "linux", "workerGroup": "g", "workerId": "w",
        "journeyman": { "worker": { "work_dir": "work" }, "host": { "metadata_service": "off" } },
    });
    host.write("runner.json", &config.to_string());
    let mut command = host.journeyman(&["run", "--config", "runner.json", "--with-worker-runner"]);
    let mut server = Server::start(command.stdin(Stdio::piped()));
    let mut runner = server.input();
    writeln!(runner, "~{}", json!({ "type": "welcome", "capabilities": ["shutdown"] })).expect("the worker listens");
    assert_eq!(manager.call(CHECK).client.as_deref(), Some("worker/runner"));
    let said = server.ends_with(15);
    assert!(said.out.ends_with("~{\"type\":\"shutdown\"}\n"), "{}", said.out);
}
