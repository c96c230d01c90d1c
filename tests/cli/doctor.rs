//! `journeyman doctor` on a host that is well, and on hosts with one thing wrong each.

use std::io::{BufRead as _, BufReader, Write as _};
use std::net::TcpListener;
use std::path::Path;
use std::process::Command;

use crate::running::queue;
use crate::support::{Said, beside, golden, journeyman, run};

const TOKEN: &str = "a-token-for-tests";

/// A configuration for a queue at `root`, which is on no cloud.
fn configured(folder: &Path, root: &str, more: &str) -> Command {
    let config = format!(
        "[worker]\nid = \"w\"\ngroup = \"g\"\nwork_dir = \"work\"\n\
         [host]\nspot = \"off\"\nmin_free_disk = \"1KiB\"\nmin_free_memory = \"1KiB\"\n\
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
    let of_the_host = ["disk ", "inodes ", "memory ", "open files ", "control groups "];
    let mut left_out = false;
    let mut text = String::new();
    for line in said.out.lines() {
        // What is wrong with the one before is mended by the next.
        let is_fix = line.trim_start().starts_with("> ");
        left_out =
            if is_fix { left_out } else { of_the_host.iter().any(|of| line[9.min(line.len())..].starts_with(of)) };
        if !left_out && !line.contains(" warnings, ") {
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
fn a_host_that_is_well_has_nothing_that_failed() {
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
fn a_token_that_is_wrong_is_told_from_a_queue_that_is_down() {
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
fn a_port_where_nobody_listens_is_said() {
    let folder = tempfile::tempdir().expect("a folder");
    let free = TcpListener::bind("127.0.0.1:0").expect("a port").local_addr().expect("its number");
    let root = format!("http://{free}");
    let said = run(&mut configured(folder.path(), &root, ""), "");
    assert_eq!(said.code, 1, "{}", said.out);
    shown("wrong-port", folder.path(), &root, &said);
}

#[test]
fn a_name_that_nobody_knows_is_said() {
    let folder = tempfile::tempdir().expect("a folder");
    // Longer than a name may be, so that no server is asked.
    let root = format!("http://{}.invalid:7070", "x".repeat(70));
    let said = run(&mut configured(folder.path(), &root, ""), "");
    assert_eq!(said.code, 1, "{}", said.out);
    let line = said.out.lines().find(|line| line.contains("ci: name")).expect("the line");
    assert!(line.starts_with("failed   ci: name ") && line.contains("xxx.invalid is not found: "), "{line}");
    assert!(said.out.contains("> is source.ci.root_url right, and does this host's resolver know it"), "{}", said.out);
    assert!(!said.out.contains("ci: connection"), "{}", said.out);
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
fn a_clock_that_is_wrong_and_scopes_that_are_missing_are_said() {
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
fn scopes_that_would_be_useful_are_a_warning_and_a_missing_clock_too() {
    let folder = tempfile::tempdir().expect("a folder");
    let root = stand_in("", &["queue:claim-work:build/linux", "queue:worker-id:g/*", "queue:status:*"]);
    let said = run(&mut configured(folder.path(), &root, ""), "");
    assert_eq!(said.code, 0, "{}", said.out);
    shown("useful-scopes", folder.path(), &root, &said);
}

#[test]
fn what_is_wrong_with_files_folders_and_programs_is_said_at_once() {
    let folder = tempfile::tempdir().expect("a folder");
    let here = folder.path();
    let (_queue, root) = queue(here);
    let mut command = configured(here, &root, "handler = \"build\"\n[handler.build]\nexec = [\"./not-there\"]\n");
    std::fs::set_permissions(here.join("token"), std::os::unix::fs::PermissionsExt::from_mode(0o644))
        .expect("it is ours");
    // Not even root makes a folder there.
    command.args(["--set", "worker.work_dir=/proc/journeyman/work"]);
    std::fs::write(here.join("no-socket"), "").expect("it can be written");
    command.args(["--set", "control.socket=no-socket"]);
    let said = run(&mut command, "");
    assert_eq!(said.code, 1, "{}", said.out);
    shown("host", here, &root, &said);
}

#[test]
fn a_host_that_is_short_of_disk_memory_or_its_cloud_is_said() {
    let folder = tempfile::tempdir().expect("a folder");
    let free = TcpListener::bind("127.0.0.1:0").expect("a port").local_addr().expect("its number");
    let root = format!("http://{free}");
    let mut command = configured(folder.path(), &root, "");
    command.args(["--set", "host.min_free_disk=921600GiB", "--set", "host.min_free_memory=921600GiB"]);
    command.args(["--set", "host.spot=aws", "--set", &format!("host.spot_endpoint=http://{free}")]);
    let said = run(&mut command, "");
    assert_eq!(said.code, 1, "{}", said.out);
    for (part, words) in [
        ("disk ", "free, host.min_free_disk is 900.0 TiB"),
        ("memory ", "can be had, host.min_free_memory is 900.0 TiB"),
        ("cloud ", "the metadata service of aws does not answer, so no notice will be heard"),
    ] {
        let line = said.out.lines().find(|line| line.get(9..).is_some_and(|rest| rest.starts_with(part))).expect(part);
        assert!(line.starts_with("failed ") && line.contains(words), "{line}");
    }
}

#[test]
fn a_configuration_that_cannot_be_read_is_all_that_is_said() {
    let folder = tempfile::tempdir().expect("a folder");
    std::fs::write(folder.path().join("journeyman.toml"), "[worker]\ncapcity = 3\n").expect("it can be written");
    let said = run(journeyman(folder.path()).arg("doctor"), "");
    assert_eq!(said.code, 1, "{}", said.out);
    assert!(
        said.out.starts_with("failed   configuration") && said.out.contains("did you mean `capacity`"),
        "{}",
        said.out
    );
    assert!(said.out.ends_with("0 ok, 0 warnings, 1 failed\n"), "{}", said.out);
}
