//! `journeyman doctor` on a host that is well, and on hosts with one thing wrong each.

use std::io::{BufRead as _, BufReader, Write as _};
use std::net::TcpListener;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use crate::running::queue;
use crate::support::{Said, beside, golden, journeyman, run};

const TOKEN: &str = "a-token-for-tests";

/// A configuration for a queue at `root`, which is on no cloud.
fn configured(folder: &Path, root: &str, more: &str) -> Command {
    let config = format!(
        "[worker]\nid = \"w\"\ngroup = \"g\"\nwork_dir = \"work\"\n\
         [host]\nmetadata_service = \"off\"\nmin_free_disk = \"1KiB\"\nmin_free_memory = \"1KiB\"\n\
         [source.ci]\nkind = \"taskcluster\"\nroot_url = \"{root}\"\ntask_queue = \"build/linux\"\n\
         client_id = \"me\"\naccess_token_file = \"token\"\n{more}"
    );
    std::fs::write(folder.join("journeyman.toml"), config).expect("the file can be written");
    if !folder.join("token").exists() {
        std::fs::write(folder.join("token"), TOKEN).expect("the file can be written");
        let closed = std::os::unix::fs::PermissionsExt::from_mode(0o600);
        std::fs::set_permissions(folder.join("token"), closed).expect("it is ours");
    }
    let mut command = journeyman(folder);
    command.arg("doctor");
    command
}

/// What it says, without the lines that depend on where the test runs, and with places and amounts that are the same
/// everywhere.
fn plain(folder: &Path, root: &str, said: &Said) -> String {
    assert!(!said.out.contains(TOKEN) && !said.err.contains(TOKEN), "a secret is shown: {}{}", said.out, said.err);
    assert_eq!(said.err, "");
    let port = root.rsplit(':').next().expect("a port");
    let of_the_host = ["disk ", "memory ", "open files ", "control groups "];
    let mut left_out = false;
    let mut text = String::new();
    for line in said.out.lines() {
        // What is wrong with the one before is mended by the next.
        let is_fix = line.trim_start().starts_with("> ");
        left_out =
            if is_fix { left_out } else { of_the_host.iter().any(|of| line[9.min(line.len())..].starts_with(of)) };
        if !left_out && !line.ends_with(" failed") {
            text.push_str(line);
            text.push('\n');
        }
    }
    text.replace(folder.to_str().expect("UTF-8"), "FOLDER").replace(port, "PORT")
}

fn shown(name: &str, folder: &Path, root: &str, said: &Said) {
    golden(&beside("doctor").join(format!("{name}.txt")), &plain(folder, root, said));
}

/// The lines about the host are there, and none of them is a failure here.
fn looks_at_the_host(said: &Said) {
    for part in ["disk ", "memory ", "open files ", "control groups "] {
        let line = said.out.lines().find(|line| line.get(9..).is_some_and(|rest| rest.starts_with(part)));
        let line = line.expect(part);
        assert!(line.starts_with("ok ") || line.starts_with("warning "), "{line}");
    }
}

#[test]
fn doctor_reports_no_failure_on_a_healthy_host() {
    let folder = tempfile::tempdir().expect("a folder");
    let here = folder.path();
    let (_queue, root) = queue(here);
    let said = run(&mut configured(here, &root, ""), "");
    assert_eq!(said.code, 0, "{}{}", said.out, said.err);
    looks_at_the_host(&said);
    shown("well", here, &root, &said);
    let left: Vec<_> =
        std::fs::read_dir(here).expect("it is there").filter_map(Result::ok).map(|at| at.file_name()).collect();
    assert!(left.iter().all(|name| !name.to_string_lossy().contains("doctor")), "{left:?}");

    let said = run(configured(here, &root, "").args(["-o", "json"]), "");
    let told: serde_json::Value = serde_json::from_str(&said.out).expect("JSON");
    assert_eq!((said.code, &told["failed"]), (0, &0.into()));
    let names: Vec<_> =
        told["checks"].as_array().expect("a list").iter().filter_map(|check| check["name"].as_str()).collect();
    assert!(names.contains(&"ci: credentials") && names.contains(&"memory"), "{names:?}");
}

#[test]
fn doctor_distinguishes_a_wrong_token_from_an_unreachable_queue() {
    let folder = tempfile::tempdir().expect("a folder");
    let here = folder.path();
    let (_queue, root) = queue(here);
    let mut command = configured(here, &root, "");
    std::fs::write(here.join("token"), "another-token-for-tests").expect("it can be written");
    let said = run(&mut command, "");
    assert_eq!(said.code, 1, "{}", said.out);
    assert!(!said.out.contains("another-token-for-tests"), "{}", said.out);
    shown("wrong-token", here, &root, &said);
}

#[test]
fn doctor_reports_a_refused_connection() {
    let folder = tempfile::tempdir().expect("a folder");
    let free = TcpListener::bind("127.0.0.1:0").expect("a port").local_addr().expect("its number");
    let root = format!("http://{free}");
    let said = run(&mut configured(folder.path(), &root, ""), "");
    assert_eq!(said.code, 1, "{}", said.out);
    shown("wrong-port", folder.path(), &root, &said);
}

/// A Taskcluster that has this time and gives these scopes, for as long as the test runs.
fn stand_in(date: &'static str, scopes: &'static [&'static str]) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let root = format!("http://{}", listener.local_addr().expect("its number"));
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let Ok(stream) = stream else { return };
            let mut lines = BufReader::new(&stream).lines();
            // A connection that is opened to see whether it can be says nothing.
            let Some(Ok(first)) = lines.next() else { continue };
            while lines.next().is_some_and(|line| line.is_ok_and(|line| !line.is_empty())) {}
            let body = match first.split(' ').nth(1).unwrap_or_default() {
                path if path.ends_with("/scopes/current") => serde_json::json!({ "scopes": scopes }),
                path if path.contains("/pending/") => serde_json::json!({ "pendingTasks": 5 }),
                _ => serde_json::json!({ "alive": true }),
            };
            let body = body.to_string();
            let head = format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\nConnection: close\r\n{date}", body.len());
            drop((&stream).write_all(format!("{head}\r\n{body}").as_bytes()));
        }
    });
    root
}

#[test]
fn doctor_reports_a_wrong_clock_and_missing_scopes() {
    let folder = tempfile::tempdir().expect("a folder");
    let root = stand_in("Date: Thu, 01 Jan 2026 00:00:00 GMT\r\n", &["queue:claim-work:build/*"]);
    let said = run(&mut configured(folder.path(), &root, ""), "");
    assert_eq!(said.code, 1, "{}", said.out);
    let text = plain(folder.path(), &root, &said);
    let seconds = text.split("clock is ").nth(1).and_then(|rest| rest.split(' ').next()).expect("how far");
    assert!(seconds.parse::<u64>().is_ok_and(|seconds| seconds > 60), "{text}");
    golden(&beside("doctor").join("wrong-clock.txt"), &text.replace(seconds, "MANY"));
}

#[test]
fn doctor_warns_about_optional_scopes_and_a_missing_date() {
    let folder = tempfile::tempdir().expect("a folder");
    let root = stand_in("", &["queue:claim-work:build/linux", "queue:worker-id:g/*", "queue:status:*"]);
    let said = run(&mut configured(folder.path(), &root, ""), "");
    assert_eq!(said.code, 0, "{}", said.out);
    shown("useful-scopes", folder.path(), &root, &said);
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
    let place = lines.find_map(|line| Some(line.ok()?.strip_prefix("ACCEPT ")?.to_owned())).expect("it says where");
    // It goes on writing.
    std::thread::spawn(move || lines.for_each(drop));
    Some((Killed(server), format!("https://{place}")))
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
    let folder = tempfile::tempdir().expect("a folder");
    let Some((_server, root)) = with_tls(folder.path()) else { return };
    let line = |said: &Said| said.out.lines().find(|line| line.contains("ci: tls")).expect("the line").to_owned();
    let said = run(&mut configured(folder.path(), &root, ""), "");
    let found = line(&said);
    assert!(said.code == 1 && found.starts_with("failed ") && found.contains("UnknownIssuer"), "{}", said.out);
    assert!(said.out.contains("> check the certificate"), "{}", said.out);
    assert!(!said.out.contains("ci: credentials"), "{}", said.out);
}

#[test]
fn doctor_does_not_wait_for_a_silent_service() {
    let folder = tempfile::tempdir().expect("a folder");
    let silent = TcpListener::bind("127.0.0.1:0").expect("a port");
    let root = format!("http://{}", silent.local_addr().expect("its number"));
    let said = run(&mut configured(folder.path(), &root, ""), "");
    assert_eq!(said.code, 1, "{}", said.out);
    let line = said.out.lines().find(|line| line.contains("ci: queue")).expect("the line");
    assert!(line.starts_with("failed ") && line.contains("ping of the queue: timed out"), "{line}");
    assert!(said.out.contains("control socket"), "the rest is looked at all the same: {}", said.out);
}

#[test]
fn doctor_reports_all_problems_of_files_directories_and_programs() {
    let folder = tempfile::tempdir().expect("a folder");
    let here = folder.path();
    let (_queue, root) = queue(here);
    let mut command = configured(here, &root, "handler = \"build\"\n[handler.build]\nexec = [\"./not-there\"]\n");
    std::fs::set_permissions(here.join("token"), std::os::unix::fs::PermissionsExt::from_mode(0o644))
        .expect("it is ours");
    // Not even root makes a folder there.
    command.args(["--set", "worker.work_dir=/proc/journeyman/work"]);
    let said = run(&mut command, "");
    assert_eq!(said.code, 1, "{}", said.out);
    shown("host", here, &root, &said);
}

#[test]
fn doctor_reports_low_disk_low_memory_and_a_missing_metadata_service() {
    let folder = tempfile::tempdir().expect("a folder");
    let free = TcpListener::bind("127.0.0.1:0").expect("a port").local_addr().expect("its number");
    let root = format!("http://{free}");
    let mut command = configured(folder.path(), &root, "");
    command.args(["--set", "host.min_free_disk=921600GiB", "--set", "host.min_free_memory=921600GiB"]);
    command.args(["--set", "host.metadata_service=aws", "--set", &format!("host.metadata_endpoint=http://{free}")]);
    let said = run(&mut command, "");
    assert_eq!(said.code, 1, "{}", said.out);
    for (part, words) in [
        ("disk ", "free, host.min_free_disk is 900.0 TiB"),
        ("memory ", "free, host.min_free_memory is 900.0 TiB"),
        ("cloud ", "the metadata service of aws does not respond, so termination notices are missed"),
    ] {
        let line = said.out.lines().find(|line| line.get(9..).is_some_and(|rest| rest.starts_with(part))).expect(part);
        assert!(line.starts_with("failed ") && line.contains(words), "{line}");
    }
}

#[test]
fn doctor_checks_broker_and_state_directories_of_a_controller() {
    let folder = tempfile::tempdir().expect("a folder");
    let text = "[pool.core]\ncommand = [\"/bin/true\"]\nstate_dir = \"pool\"\n[pool.odd]\ncommand = [\"./not-there\"]\n\
                state_dir = \"/proc/journeyman\"\n[worker]\nwork_dir = \"/proc/journeyman/work\"\n";
    std::fs::write(folder.path().join("journeyman.toml"), text).expect("it can be written");
    let said = run(journeyman(folder.path()).arg("doctor").env("WORKER_AMQP_URI", "amqp://127.0.0.1:1"), "");
    assert_eq!(said.code, 1, "{}", said.out);
    for line in [
        "ok       configuration          journeyman.toml: pools 2\n",
        "failed   files                  `pool.odd.command`: ",
        "failed   pools: broker          ",
        "ok       core: state directory  pool is writable\n",
        "failed   odd: state directory   /proc/journeyman is not writable: ",
    ] {
        assert!(said.out.contains(line), "{line}: {}", said.out);
    }
    assert!(!said.out.contains("work directory") && !said.out.contains("control socket"), "{}", said.out);
}

#[test]
fn doctor_checks_only_the_scopes_of_counting_for_a_controller() {
    let folder = tempfile::tempdir().expect("a folder");
    let root = stand_in("", &["queue:pending-count:build/linux"]);
    let more = "[pool.core]\ncommand = [\"/bin/true\"]\nstate_dir = \"pool\"\n\
                [demand.ci]\nsource = \"ci\"\npool = \"core\"\nkey = \"ci\"\n";
    let said = run(configured(folder.path(), &root, more).env("WORKER_AMQP_URI", "amqp://127.0.0.1:1"), "");
    for line in
        ["journeyman.toml: pools 1\n", "all required; optional scopes missing: queue:claimed-list:build/linux\n"]
    {
        assert!(said.out.contains(line), "{line}: {}", said.out);
    }
    assert!(!said.out.contains("work directory") && !said.out.contains("control socket"), "{}", said.out);
}

#[test]
fn doctor_does_not_wait_for_a_blocked_control_socket() {
    use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, connect, listen, socket_with};
    let folder = tempfile::tempdir().expect("a folder");
    let address = SocketAddrUnix::new(folder.path().join("full")).expect("it is short");
    let socket = || {
        let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
        socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None).expect("a socket")
    };
    let listener = socket();
    bind(&listener, &address).expect("it is bound");
    listen(&listener, 0).expect("it listens");
    let mut waiting = Vec::new();
    let full = loop {
        let one = socket();
        if let Err(error) = connect(&one, &address) {
            break error;
        }
        waiting.push(one);
    };
    assert_eq!(full, rustix::io::Errno::AGAIN, "so many wait: {}", waiting.len());
    let free = TcpListener::bind("127.0.0.1:0").expect("a port").local_addr().expect("its number");
    let said = run(configured(folder.path(), &format!("http://{free}"), "").args(["--set", "control.socket=full"]), "");
    assert_eq!(said.code, 1, "{}", said.out);
    assert!(said.out.contains("full: the listening process accepts no connection"), "{}", said.out);
}
