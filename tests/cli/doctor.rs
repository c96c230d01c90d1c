//! `journeyman doctor` on a healthy host, and on hosts with one fault each.

use std::io::{BufRead as _, BufReader, Write as _};
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use crate::cli::host::{Host, TOKEN};
use crate::cli::support::{Said, beside, golden, run};

/// Configures a worker on no cloud.
fn configure(host: &Host, more: &str) {
    let rest = "[worker]\nid = \"w\"\ngroup = \"g\"\nwork_dir = \"work\"\n\
                [host]\nmetadata_service = \"off\"\nmin_free_disk = \"1KiB\"\nmin_free_memory = \"1KiB\"\n";
    host.write("journeyman.toml", &format!("{}access_token_file = \"token\"\n{more}{rest}", host.source()));
    host.write("token", TOKEN);
    set_mode(host, 0o600);
}

fn set_mode(host: &Host, mode: u32) {
    std::fs::set_permissions(host.join("token"), std::fs::Permissions::from_mode(mode)).expect("the mode is set");
}

/// Runs the doctor, which ends with this code.
fn doctor(host: &Host, arguments: &[&str], code: i32) -> Said {
    let said = run(host.journeyman(&["doctor"]).args(arguments).env("WORKER_AMQP_URI", "amqp://127.0.0.1:1"), "");
    assert_eq!((said.code, said.err.as_str()), (code, ""), "{}", said.out);
    assert!(!said.out.contains(TOKEN), "a secret is shown: {}", said.out);
    said
}

const OF_THE_HOST: [&str; 4] = ["disk ", "memory ", "open files ", "control groups "];

/// The line of a check.
fn line<'a>(said: &'a Said, check: &str) -> &'a str {
    said.out.lines().find(|line| line.get(9..).is_some_and(|rest| rest.starts_with(check))).expect(check)
}

/// The output without the lines that depend on the host, and with the same directory and port everywhere.
fn plain(host: &Host, said: &Said) -> String {
    let port = host.root().rsplit(':').next().expect("a port");
    let mut skips = false;
    let mut text = String::new();
    for line in said.out.lines() {
        // A fix belongs to the line before it.
        if !line.trim_start().starts_with("> ") {
            skips = OF_THE_HOST.iter().any(|check| line[9.min(line.len())..].starts_with(check));
        }
        if !skips && !line.ends_with(" failed") {
            text.push_str(line);
            text.push('\n');
        }
    }
    text.replace(host.path().to_str().expect("UTF-8"), "FOLDER").replace(port, "PORT")
}

fn assert_golden(name: &str, host: &Host, said: &Said) {
    golden(&beside("doctor").join(format!("{name}.txt")), &plain(host, said));
}

/// No process listens there.
fn unused_root() -> String {
    format!("http://{}", TcpListener::bind("127.0.0.1:0").expect("a port").local_addr().expect("its number"))
}

#[test]
fn doctor_reports_no_failure_on_a_healthy_host() {
    let host = Host::with_queue();
    configure(&host, "");
    let said = doctor(&host, &[], 0);
    for check in OF_THE_HOST {
        let line = line(&said, check);
        assert!(line.starts_with("ok ") || line.starts_with("warning "), "{line}");
    }
    assert_golden("well", &host, &said);
    let names = std::fs::read_dir(host.path()).expect("a directory").map(|entry| entry.expect("an entry").file_name());
    assert!(names.into_iter().all(|name| !name.to_string_lossy().contains("doctor")), "a file is left");

    let report: serde_json::Value = serde_json::from_str(&doctor(&host, &["-o", "json"], 0).out).expect("JSON");
    assert_eq!(report["failed"], 0);
    let checks = report["checks"].as_array().expect("a list");
    for name in ["ci: credentials", "memory"] {
        assert!(checks.iter().any(|check| check["name"] == name), "{name}: {report}");
    }
}

#[test]
fn doctor_distinguishes_a_wrong_token_from_an_unreachable_queue() {
    let host = Host::with_queue();
    configure(&host, "");
    host.write("token", "another-token-for-tests");
    let said = doctor(&host, &[], 1);
    assert!(!said.out.contains("another-token-for-tests"), "{}", said.out);
    assert_golden("wrong-token", &host, &said);
    let host = Host::with_root(&unused_root());
    configure(&host, "");
    assert_golden("wrong-port", &host, &doctor(&host, &[], 1));
}

/// A Taskcluster that answers each path with a status and a body, until the test ends.
fn service(date: &'static str, answer: impl Fn(&str) -> (u16, serde_json::Value) + Send + 'static) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let root = format!("http://{}", listener.local_addr().expect("its number"));
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let Ok(stream) = stream else { return };
            let mut lines = BufReader::new(&stream).lines();
            let Some(Ok(first)) = lines.next() else { continue };
            while lines.next().is_some_and(|line| line.is_ok_and(|line| !line.is_empty())) {}
            let (status, body) = answer(first.split(' ').nth(1).unwrap_or_default());
            let body = body.to_string();
            let length = body.len();
            let head = format!(
                "HTTP/1.1 {status} X\r\nContent-Type: application/json\r\nContent-Length: {length}\r\nConnection: close\r\n{date}"
            );
            drop((&stream).write_all(format!("{head}\r\n{body}").as_bytes()));
        }
    });
    root
}

/// A Taskcluster with this time and these scopes.
fn stand_in(date: &'static str, scopes: &'static [&'static str]) -> String {
    service(date, move |path| match path {
        path if path.ends_with("/scopes/current") => (200, serde_json::json!({ "scopes": scopes })),
        path if path.ends_with("/counts") => (200, serde_json::json!({ "pendingTasks": 5 })),
        _ => (200, serde_json::json!({ "alive": true })),
    })
}

#[test]
fn b3_a_queue_of_2019_and_a_client_that_cannot_read_its_scopes_are_healthy() {
    let root = service("", |path| match path {
        path if path.ends_with("/scopes/current") => {
            (403, serde_json::json!({ "code": "InsufficientScopes", "message": "no" }))
        }
        path if path.ends_with("/pending/build/linux") => (200, serde_json::json!({ "pendingTasks": 5 })),
        path if ["/pending/", "/workers/", "/counts"].iter().any(|part| path.contains(part)) => {
            (404, serde_json::json!({ "error": "Not found" }))
        }
        _ => (200, serde_json::json!({ "alive": true })),
    });
    let host = Host::with_root(&root);
    configure(&host, "");
    let said = doctor(&host, &[], 0);
    assert!(line(&said, "ci: scopes").contains("not shown by this service to this client"), "{}", said.out);
    assert!(line(&said, "ci: task queue").contains("5 pending"), "{}", said.out);
}

#[test]
fn b3_a_service_that_fails_is_not_blamed_on_the_client() {
    let root = service("", |path| match path {
        path if path.ends_with("/ping") => (200, serde_json::json!({ "alive": true })),
        _ => (500, serde_json::json!({ "code": "InternalServerError", "message": "Internal Server Error" })),
    });
    let host = Host::with_root(&root);
    configure(&host, "");
    let said = doctor(&host, &[], 1);
    assert!(said.out.contains("is its database up?") && !said.out.contains("access token of source"), "{}", said.out);
}

#[test]
fn b10_doctor_says_that_the_worker_is_in_quarantine() {
    let root = service("", |path| match path {
        path if path.ends_with("/scopes/current") => (200, serde_json::json!({ "scopes": ["*"] })),
        path if path.ends_with("/provisioners/build/worker-types/linux/workers/g/w") => {
            (200, serde_json::json!({ "quarantineUntil": "3017-11-21T08:52:20.024Z" }))
        }
        path if path.ends_with("/counts") => (200, serde_json::json!({ "pendingTasks": 5 })),
        _ => (200, serde_json::json!({ "alive": true })),
    });
    let host = Host::with_root(&root);
    configure(&host, "");
    let said = doctor(&host, &[], 1);
    assert!(line(&said, "ci: quarantine").contains("g/w is in quarantine until 3017-11-21"), "{}", said.out);
}

#[test]
fn doctor_reports_a_wrong_clock_and_missing_scopes() {
    let host = Host::with_root(&stand_in("Date: Thu, 01 Jan 2026 00:00:00 GMT\r\n", &["queue:claim-work:build/*"]));
    configure(&host, "");
    let text = plain(&host, &doctor(&host, &[], 1));
    let seconds = text.split("clock is ").nth(1).and_then(|rest| rest.split(' ').next()).expect("the skew");
    assert!(seconds.parse::<u64>().is_ok_and(|seconds| seconds > 60), "{text}");
    golden(&beside("doctor").join("wrong-clock.txt"), &text.replace(seconds, "MANY"));
}

#[test]
fn doctor_warns_about_optional_scopes_and_a_missing_date() {
    let scopes = &["queue:claim-work:build/linux", "queue:worker-id:g/*", "queue:status:*"];
    let host = Host::with_root(&stand_in("", scopes));
    configure(&host, "");
    assert_golden("useful-scopes", &host, &doctor(&host, &[], 0));
}

/// A server with a certificate of three days that is in `cert.pem`, and where it listens; `None` without openssl.
fn with_tls(folder: &Path) -> Option<(Killed, String)> {
    if Command::new("openssl").arg("version").output().is_err() {
        assert!(std::env::var_os("CI").is_none(), "openssl is needed to serve TLS");
        eprintln!("NOT TESTED: there is no openssl here");
        return None;
    }
    std::fs::create_dir_all(folder.join("api/queue/v1")).expect("the folder can be made");
    std::fs::write(folder.join("api/queue/v1/ping"), "{\"alive\":true}").expect("it can be written");
    let key = ["req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "3"];
    let name = ["-subj", "/CN=journeyman-test", "-addext", "subjectAltName=IP:127.0.0.1"];
    let leaf = ["-addext", "basicConstraints=critical,CA:FALSE", "-keyout", "key.pem", "-out", "cert.pem"];
    let made = Command::new("openssl").args(key).args(name).args(leaf).current_dir(folder).output().expect("it runs");
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    let serve = ["s_server", "-accept", "127.0.0.1:0", "-cert", "cert.pem", "-key", "key.pem", "-WWW"];
    let mut server = Command::new("openssl")
        .args(serve)
        .current_dir(folder)
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .expect("it runs");
    let mut lines = BufReader::new(server.stdout.take().expect("it is piped")).lines();
    let address = lines.find_map(|line| Some(line.ok()?.strip_prefix("ACCEPT ")?.to_owned())).expect("its address");
    // Its output must be read.
    std::thread::spawn(move || lines.for_each(drop));
    Some((Killed(server), format!("https://{address}")))
}

/// A process that is killed when the test is over.
struct Killed(Child);

impl Drop for Killed {
    fn drop(&mut self) {
        drop(self.0.kill());
        drop(self.0.wait());
    }
}

#[test]
fn a_certificate_of_an_unknown_issuer_fails() {
    let folder = tempfile::tempdir().expect("a directory");
    let Some((_server, root)) = with_tls(folder.path()) else { return };
    let host = Host::with_root(&root);
    configure(&host, "");
    let said = doctor(&host, &[], 1);
    let tls = line(&said, "ci: tls");
    assert!(tls.starts_with("failed ") && tls.contains("UnknownIssuer; no CA that is trusted here"), "{}", said.out);
    assert!(said.out.contains("> check the certificate"), "{}", said.out);
    assert!(!said.out.contains("ci: credentials"), "{}", said.out);
}

#[test]
fn doctor_does_not_wait_for_a_silent_service() {
    let silent = TcpListener::bind("127.0.0.1:0").expect("a port");
    let host = Host::with_root(&format!("http://{}", silent.local_addr().expect("its number")));
    configure(&host, "");
    let said = doctor(&host, &[], 1);
    let queue = line(&said, "ci: queue");
    assert!(queue.starts_with("failed ") && queue.contains("ping of the queue: timed out"), "{queue}");
    assert!(said.out.contains("control socket"), "the other checks run: {}", said.out);
}

#[test]
fn doctor_reports_all_problems_of_files_directories_and_programs() {
    let host = Host::with_queue();
    configure(&host, "handler = \"build\"\n[handler.build]\nexec = [\"./not-there\"]\n");
    set_mode(&host, 0o644);
    // Root cannot create a directory there either.
    assert_golden("host", &host, &doctor(&host, &["--set", "worker.work_dir=/proc/journeyman/state"], 1));
}

#[test]
fn doctor_reports_low_disk_low_memory_and_a_missing_metadata_service() {
    let host = Host::with_root(&unused_root());
    configure(&host, "");
    let endpoint = format!("host.metadata_endpoint={}", host.root());
    let pairs =
        ["host.min_free_disk=921600GiB", "host.min_free_memory=921600GiB", "host.metadata_service=aws", &endpoint];
    let said = doctor(&host, &pairs.map(|pair| ["--set", pair]).concat(), 1);
    for (check, words) in [
        ("disk ", "free, host.min_free_disk is 900.0 TiB"),
        ("memory ", "free, host.min_free_memory is 900.0 TiB"),
        ("cloud ", "the metadata service of aws does not respond, so termination notices are missed"),
    ] {
        let line = line(&said, check);
        assert!(line.starts_with("failed ") && line.contains(words), "{line}");
    }
}

#[test]
fn doctor_checks_the_broker_and_the_programs_of_a_controller() {
    let host = Host::new();
    let text = "[pool.core]\ncommand = [\"/bin/true\"]\nstate_dir = \"pool\"\n[pool.odd]\ncommand = [\"./not-there\"]\n\
                state_dir = \"/proc/journeyman\"\n[worker]\nwork_dir = \"/proc/journeyman/state\"\n";
    host.write("journeyman.toml", text);
    let said = doctor(&host, &[], 1);
    for line in [
        "ok       configuration  journeyman.toml: pools 2\n",
        "failed   files          `pool.odd.command`: ",
        "failed   pools: broker  ",
    ] {
        assert!(said.out.contains(line), "{line}: {}", said.out);
    }
    assert!(!said.out.contains("work directory") && !said.out.contains("control socket"), "{}", said.out);
}

#[test]
fn b13_doctor_names_the_key_whose_address_is_taken() {
    let host = Host::new();
    host.write("journeyman.toml", "[pool.core]\ncommand = [\"/bin/true\"]\nstate_dir = \"pool\"\n");
    let taken = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = taken.local_addr().expect("its number").to_string();
    let doctor = || {
        let [http, log] = ["http.listen", "worker.live_log"].map(|key| format!("{key}={address}"));
        doctor(&host, &["--set", &http, "--set", &log], 1)
    };
    let said = doctor();
    for key in ["http.listen", "worker.live_log"] {
        let line = line(&said, key);
        assert!(line.starts_with("failed ") && line.contains(&format!("cannot listen on {address}: ")), "{}", said.out);
    }
    let _running = std::os::unix::net::UnixListener::bind(host.join("pool.sock")).expect("a socket");
    host.write(
        "journeyman.toml",
        "[pool.core]\ncommand = [\"/bin/true\"]\nstate_dir = \"pool\"\n[control]\nsocket = \"pool.sock\"\n",
    );
    let said = doctor();
    assert!(line(&said, "http.listen").starts_with("ok ") && said.out.contains("is running"), "{}", said.out);
    drop(taken);
    let said = doctor();
    let (http, log) = (line(&said, "http.listen"), line(&said, "worker.live_log"));
    assert!(http.starts_with("ok ") && http.ends_with("is free") && !log.ends_with("is free"), "{}", said.out);
}

#[test]
fn a_notifier_needs_no_source() {
    let host = Host::new();
    host.write("token", TOKEN);
    set_mode(&host, 0o600);
    host.write("journeyman.toml", "[notifier]\ntoken_file = \"token\"\n");
    assert!(line(&run(&mut host.journeyman(&["doctor"]), ""), "configuration").starts_with("ok "));
    host.write("journeyman.toml", "[worker]\ncapacity = 1\n");
    let nothing = run(&mut host.journeyman(&["doctor"]), "");
    assert!(line(&nothing, "configuration").contains("no [source.NAME] is configured"), "{}", nothing.out);
}

#[test]
fn b13_a_newline_after_the_path_in_kubeconfig_is_not_part_of_it() {
    let host = Host::new();
    let server = service("", |_| (200, serde_json::json!({ "items": null })));
    host.write(
        "journeyman.toml",
        "[pool.core]\ncommand = [\"/bin/true\"]\nstate_dir = \"pool\"\n[handler.pods]\nkind = \"kubernetes\"\n",
    );
    let config = serde_json::json!({
        "current-context": "a", "contexts": [{ "name": "a", "context": { "cluster": "a" } }],
        "clusters": [{ "name": "a", "cluster": { "server": server } }],
    });
    host.write("kubeconfig", &config.to_string());
    let said = run(host.journeyman(&["doctor"]).env("KUBECONFIG", "kubeconfig\n"), "");
    assert!(line(&said, "pods: cluster").starts_with("ok "), "{}", said.out);
}

#[test]
fn doctor_does_not_wait_for_a_blocked_control_socket() {
    use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, connect, listen, socket_with};
    let host = Host::with_root(&unused_root());
    configure(&host, "");
    let address = SocketAddrUnix::new(host.join("full")).expect("it is short");
    let socket = || {
        let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
        socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None).expect("a socket")
    };
    let listener = socket();
    bind(&listener, &address).expect("it is bound");
    listen(&listener, 0).expect("it listens");
    let mut waiting = Vec::new();
    while waiting.last().is_none_or(|last| connect(last, &address).is_ok()) {
        waiting.push(socket());
    }
    let said = doctor(&host, &["--set", "control.socket=full"], 1);
    assert!(said.out.contains("full: the listening process accepts no connection"), "{}", said.out);
}
