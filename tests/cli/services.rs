//! HTTP services as sidecars: a worker starts them and forwards tasks to them.

use std::path::{Path, PathBuf};

use rustix::process::{Pid, Signal, kill_process, test_kill_process};

use crate::cli::host::Host;
use crate::cli::server::{Server, fifo, get};

#[path = "../../examples/echo_service.rs"]
#[expect(dead_code, reason = "its main is run by `cargo run --example echo_service`")]
mod example;

/// The service in Rust, as its own process: a worker starts this very program with this test alone.
#[test]
#[ignore = "it is a service, which another test lets a worker start"]
fn serves_as_the_example_in_rust() {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().expect("a runtime");
    runtime.block_on(example::serve()).expect("it serves");
}

fn source(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(name)
}

/// An address of this host for one test.
fn own_address() -> String {
    let bytes = uuid::Uuid::new_v4().into_bytes();
    format!("http://127.{}.{}.{}:8080", bytes[0], bytes[1], bytes[2].clamp(1, 254))
}

/// A queue, and a worker with a service.
struct Scene {
    host: Host,
}

impl Drop for Scene {
    fn drop(&mut self) {
        // A failed test leaves them running.
        for pid in self.services() {
            let line = std::fs::read_to_string(format!("/proc/{}/cmdline", pid.as_raw_pid())).unwrap_or_default();
            if line.contains("odd_service.py") {
                kill_process(pid, Signal::KILL).unwrap_or_default();
            }
        }
    }
}

impl Scene {
    /// The handler has these keys.
    fn new(handler: &str) -> Self {
        let host = Host::with_queue();
        let rest = "dialect = \"azure\"\naccess_token_file = \"token\"\nhandler = \"echo\"\n[worker]\nwork_dir = \"work\"\n\
                    capacity = 2\n[handler.echo]\nkind = \"http\"\n";
        host.write("journeyman.toml", &format!("{}{rest}{handler}\n", host.source()));
        host.write("token", crate::cli::host::TOKEN);
        let scene = Self { host };
        std::fs::create_dir_all(scene.service_dir()).expect("a directory");
        scene
    }

    /// The handler has the service of these tests.
    fn odd(more: &str) -> Self {
        let program = source("tests/support/odd_service.py");
        Self::new(&format!(
            "url = \"unix:echo.sock\"\nhealth = \"/health\"\nhealth_interval = \"100ms\"\nexec = [\"{}\"]\n{more}",
            program.display()
        ))
    }

    fn service_dir(&self) -> PathBuf {
        self.host.join("work/sidecars/echo")
    }

    fn worker(&self) -> Server {
        self.worker_with(&[])
    }

    fn worker_with(&self, arguments: &[&str]) -> Server {
        let mut command = self.host.journeyman(&["worker"]);
        Server::start(command.args(arguments).env("JOURNEYMAN__LOG__FORMAT", "human").env("NO_COLOR", "1"))
    }

    fn create(&self, payload: &str) -> String {
        self.host.create(&["--payload", payload])
    }

    /// Waits until a task is resolved, and returns whether it completed.
    fn completes(&self, id: &str) -> bool {
        self.host.task(&["wait", id]).code == 0
    }

    /// The reasons of the runs of a task.
    fn runs(&self, id: &str) -> Vec<String> {
        let said = self.host.task(&["status", id, "-o", "json"]);
        let status: serde_json::Value = serde_json::from_str(&said.out).expect("JSON");
        let reason = |run: &serde_json::Value| run["reasonResolved"].as_str().unwrap_or_default().to_owned();
        status["runs"].as_array().expect("runs").iter().map(reason).collect()
    }

    /// The artifact with the response of the service.
    fn answer(&self, id: &str) -> String {
        download(&format!("{}/api/queue/v1/task/{id}/artifacts/public/answer", self.host.root()))
    }

    /// A named pipe in the service's directory.
    fn pipe(&self, name: &str) -> PathBuf {
        fifo(self.service_dir().join(name))
    }

    /// The processes that the service has had.
    fn services(&self) -> Vec<Pid> {
        let text = std::fs::read_to_string(self.service_dir().join("lives")).unwrap_or_default();
        text.lines().filter_map(|line| Pid::from_raw(line.parse().ok()?)).collect()
    }

    fn set_flag(&self, name: &str) {
        std::fs::write(self.service_dir().join(name), "").expect("it is written");
    }

    fn remove_flag(&self, name: &str) {
        std::fs::remove_file(self.service_dir().join(name)).expect("it exists");
    }
}

/// Gets the body, after redirects.
fn download(url: &str) -> String {
    let (host, path) = url.strip_prefix("http://").and_then(|url| url.split_once('/')).expect("an address with a path");
    let response = get(host, &format!("/{path}"));
    let (head, body) = response.split_once("\r\n\r\n").expect("a head and a body");
    let location = head.lines().find_map(|line| line.strip_prefix("location: "));
    assert!(location.is_some() || head.starts_with("HTTP/1.1 200"), "{response}");
    location.map_or_else(|| body.to_owned(), download)
}

/// Waits until the service has written to a pipe.
fn wait_for(pipe: &Path) {
    assert!(!std::fs::read_to_string(pipe).expect("the service writes").is_empty());
}

fn is_gone(pid: Pid) -> bool {
    // An exited process exists until its parent has waited for it.
    let stat = std::fs::read_to_string(format!("/proc/{}/stat", pid.as_raw_pid())).unwrap_or_default();
    test_kill_process(pid).is_err() || stat.contains(") Z ")
}

const TCP: &str = "url";
const UNIX: &str = "socket";

fn echoes(exec: &[String], listens: &str) {
    let exec = serde_json::to_string(exec).expect("JSON is TOML here");
    let place =
        if listens == TCP { format!("url = \"{}\"", own_address()) } else { "url = \"unix:echo.sock\"".to_owned() };
    let scene = Scene::new(&format!("{place}\nhealth = \"/health\"\nexec = {exec}\n"));
    let mut worker = scene.worker();
    let group = worker.logs("service started");
    worker.logs("service is up");
    let id = scene.create(r#"{"path": "/echo", "json": {"x": 1}}"#);
    assert!(scene.completes(&id), "{}", scene.host.task(&["log", &id]).out);
    let answer: serde_json::Value = serde_json::from_str(&scene.answer(&id)).expect("JSON");
    assert_eq!(answer, serde_json::json!({"echo": {"x": 1}, "path": "/echo", "task": id}));
    let count = scene.create(r#"{"path": "/count", "body": "3"}"#);
    assert!(scene.completes(&count));
    assert_eq!(scene.answer(&count), "1\n2\n3\n\"done\"");
    let odd = scene.create(r#"{"path": "/echo", "body": "no JSON"}"#);
    assert!(!scene.completes(&odd));
    assert_eq!(scene.runs(&odd), ["failed"]);
    let log = scene.host.task(&["log", &odd]).out;
    assert!(log.contains("the service echo answered 400 Bad Request"), "{log}");
    worker.drain();
    let group =
        group.split("process_group=").nth(1).and_then(|rest| rest.split_whitespace().next()).expect("its number");
    assert!(is_gone(Pid::from_raw(group.parse().expect("a number")).expect("a process")));
}

#[test]
fn the_example_service_in_python_echoes() {
    let exec = [source("examples/services/echo.py").display().to_string()];
    echoes(&exec, TCP);
    echoes(&exec, UNIX);
}

#[test]
fn the_example_service_in_rust_echoes() {
    let own = std::env::current_exe().expect("this program").display().to_string();
    let words = ["--exact", "cli::services::serves_as_the_example_in_rust", "--ignored", "--nocapture"];
    let exec: Vec<String> = std::iter::once(own).chain(words.map(str::to_owned)).collect();
    echoes(&exec, TCP);
    echoes(&exec, UNIX);
}

#[test]
fn a_service_gets_only_the_allowed_variables() {
    let program = source("tests/support/odd_service.py");
    let scene = Scene::new(&format!(
        "url = \"unix:echo.sock\"\nexec = [\"/bin/sh\", \"-c\", \"env >environment; exec {}\"]\nenv_allow = [\"PATH\", \"GIVEN\"]",
        program.display()
    ));
    let mut worker = Server::start(scene.host.journeyman(&["worker"]).env("GIVEN", "yes").env("KEPT", "a secret"));
    worker.logs("service is up");
    let text = scene.host.read("work/sidecars/echo/environment");
    let mut names: Vec<&str> = text.lines().filter_map(|line| Some(line.split_once('=')?.0)).collect();
    // What the shell itself adds, and the cookie.
    names.retain(|name| !["PWD", "OLDPWD", "SHLVL", "_", "JOURNEYMAN_CLAIM_COOKIE"].contains(name));
    names.sort_unstable();
    assert_eq!(names, ["GIVEN", "HOME", "JOURNEYMAN_HANDLER", "JOURNEYMAN_SERVICE_SOCKET", "PATH"]);
    worker.drain();
}

#[test]
fn a_service_killed_during_a_request_is_restarted_and_the_task_retried() {
    let scene = Scene::odd("");
    let (waiting, go) = (scene.pipe("waiting"), scene.pipe("go"));
    let mut worker = scene.worker();
    worker.logs("service is up");
    let id = scene.create(r#"{"path": "/wait"}"#);
    wait_for(&waiting);
    kill_process(scene.services()[0], Signal::KILL).expect("it runs");
    worker.logs("exited (SIGKILL)");
    worker.logs("service is up");
    wait_for(&waiting);
    let seen = scene.host.status();
    assert_eq!(
        (seen["sidecars"][0]["up"].as_bool(), seen["sidecars"][0]["restarts"].as_u64()),
        (Some(true), Some(1)),
        "{seen}"
    );
    std::fs::write(&go, "go").expect("the service waits");
    assert!(scene.completes(&id));
    assert_eq!(
        (scene.runs(&id), scene.answer(&id).as_str()),
        (vec!["intermittent-task".into(), "completed".into()], "waited")
    );
    assert_eq!(scene.services().len(), 2);
    worker.drain();
}

#[test]
fn nothing_is_claimed_while_the_service_is_unhealthy_and_the_status_says_why() {
    let scene = Scene::odd("startup_timeout = \"3s\"");
    scene.set_flag("never");
    let mut worker = scene.worker_with(&["--set", "http.listen=127.0.0.1:0"]);
    let id = scene.create(r#"{"path": "/echo", "body": "x"}"#);
    let at = worker.logs("http://127.0.0.1:");
    worker.logs("alert=\"sidecar-crash-loop\"");
    let seen = scene.host.status();
    assert_eq!(
        (seen["blocked_reason"].as_str(), seen["counts"]["claims"].as_u64()),
        (Some("sidecar-down"), Some(0)),
        "{seen}"
    );
    let why = seen["blocked_message"].as_str().expect("why");
    assert!(why.contains("the sidecar of handler echo is down") && why.contains("not healthy within"), "{why}");
    assert!(why.contains("work/sidecars/echo.log"), "{why}");
    let table = scene.host.succeed(&["status"]).out;
    assert!(table.contains("DOWN") && table.contains("waiting-for-sidecar"), "{table}");
    let root = at.split_whitespace().find_map(|word| word.find("http://").map(|at| &word[at..])).expect("an address");
    let metrics = download(&format!("{}/metrics", root.trim_end_matches(['"', '/'])));
    assert!(metrics.contains("journeyman_sidecar_up{handler=\"echo\"} 0"), "{metrics}");
    assert!(metrics.contains("journeyman_claiming_blocked{reason=\"sidecar-down\"} 1"), "{metrics}");
    scene.remove_flag("never");
    worker.logs("service is up");
    assert!(scene.completes(&id));
    assert_eq!(scene.runs(&id), ["completed"]);
    worker.drain();
}

#[test]
fn a_service_that_crashes_at_start_is_reported_with_exit_status_and_log() {
    let scene = Scene::odd("");
    scene.set_flag("crash");
    let mut worker = scene.worker();
    worker.logs("alert=\"sidecar-crash-loop\"");
    let seen = scene.host.status();
    let why = seen["sidecars"][0]["message"].as_str().expect("why");
    assert!(why.contains("exit status 3") && why.contains("times in a row"), "{why}");
    let log = scene.host.read("work/sidecars/echo.log.previous");
    assert!(log.contains("the map cannot be loaded"), "{log}");
    worker.drain();
}

#[test]
fn a_draining_worker_finishes_requests_before_it_stops_the_service() {
    let scene = Scene::odd("");
    let (waiting, go, ended) = (scene.pipe("waiting"), scene.pipe("go"), scene.pipe("ended"));
    let mut worker = scene.worker();
    worker.logs("service is up");
    let id = scene.create(r#"{"path": "/wait"}"#);
    wait_for(&waiting);
    worker.signal(Signal::TERM);
    worker.logs("command: ");
    std::fs::write(&go, "go").expect("the service waits");
    // It is told by TERM.
    wait_for(&ended);
    worker.ends_with(0);
    assert_eq!(scene.runs(&id), ["completed"]);
    assert!(is_gone(scene.services()[0]));
}

#[test]
fn the_next_worker_kills_the_service_of_a_killed_worker() {
    for containment in ["auto", "group"] {
        let scene = Scene::odd("");
        let (waiting, go) = (scene.pipe("waiting"), scene.pipe("go"));
        let set = format!("host.containment={containment}");
        let mut first = scene.worker_with(&["--set", &set]);
        first.logs("service is up");
        let id = scene.create(r#"{"path": "/wait"}"#);
        wait_for(&waiting);
        first.signal(Signal::KILL);
        first.ends();
        assert!(!is_gone(scene.services()[0]), "{containment}: it still runs");
        let mut second = scene.worker_with(&["--set", &set]);
        second.logs("service is up");
        assert!(is_gone(scene.services()[0]), "{containment}");
        wait_for(&waiting);
        std::fs::write(&go, "go").expect("the service waits");
        assert!(scene.completes(&id), "{containment}");
        assert_eq!(scene.runs(&id), ["worker-shutdown", "completed"], "{containment}");
        second.drain();
    }
}
