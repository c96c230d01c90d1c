//! A worker that is stopped, and one that may open too few files.

use std::process::Command;

use rustix::process::Signal;

use crate::cli::host::Host;
use crate::cli::server::Server;
use crate::cli::support::{Said, journeyman};

#[test]
fn a_stopped_worker_is_reported_with_its_process_and_a_hint() {
    let host = Host::with_queue();
    let mut server = Server::start(&mut host.worker());
    server.logs("source: ");
    let socket_line =
        |said: &Said| said.out.lines().find(|line| line.contains("control socket")).expect("it is checked").to_owned();
    let line = socket_line(&host.run(&["doctor"]));
    assert!(
        line.starts_with("ok ") && line.contains(&format!("worker with pid {} responds at ", server.pid())),
        "{line}"
    );
    server.signal(Signal::STOP);
    let no_response = format!("no response from process {}", server.pid());
    std::thread::scope(|scope| {
        let doctor = scope.spawn(|| host.run(&["doctor"]));
        let status = host.run(&["status"]);
        assert!(status.code == 32 && status.err.contains(&no_response), "{}", status.err);
        let doctor = doctor.join().expect("it ran");
        let line = socket_line(&doctor);
        assert!(doctor.code == 1 && line.starts_with("failed ") && line.contains(&no_response), "{}", doctor.out);
        assert!(line.contains(&format!("kill -CONT {}", server.pid())), "{line}");
    });
    server.signal(Signal::CONT);
    host.status();
    server.quit();
}

#[test]
fn a_low_limit_of_open_files_is_reported_at_start() {
    let host = Host::with_queue();
    let limited = |files: u64| {
        let mut inner = host.worker();
        inner.args(["--capacity", "64"]);
        let mut shell = Command::new("sh");
        shell.args(["-c", &format!("ulimit -n {files}; exec \"$0\" \"$@\"")]);
        shell.arg(inner.get_program()).args(inner.get_args()).current_dir(host.path()).env_clear();
        shell.envs(inner.get_envs().filter_map(|(name, value)| Some((name, value?))));
        Server::start(&mut shell)
    };
    let said = limited(24).ends_with(21);
    assert!(said.err.contains("open files is 24") && said.err.contains("ulimit -n"), "{}", said.err);
    for (files, warns) in [(150, true), (4096, false)] {
        let mut server = limited(files);
        server.logs("source: ");
        server.signal(Signal::QUIT);
        let said = server.ends().err;
        assert_eq!(said.contains(&format!("open files is {files}, capacity 64 may need ")), warns, "{said}");
        assert_eq!(said.contains("ulimit -n"), warns, "{said}");
    }
}

/// `journeyman dev` with 24 MB for its queue and its worker; `None` where no tmpfs can be mounted.
fn dev_on_small_disk(host: &Host) -> Option<Server> {
    let root = rustix::process::geteuid().is_root();
    let namespace: &[&str] = if root { &["--mount"] } else { &["--user", "--map-root-user", "--mount"] };
    let mount = "mount -t tmpfs -o size=24m none \"$TMPDIR\"";
    let trial = Command::new("unshare").args(namespace).args(["sh", "-c", mount]).env("TMPDIR", "/tmp").output();
    if !trial.as_ref().is_ok_and(|trial| trial.status.success()) {
        eprintln!("SKIPPED: no tmpfs can be mounted here: {trial:?}");
        return None;
    }
    std::fs::create_dir(host.join("small")).expect("created");
    let mut dev = Command::new("unshare");
    dev.args(namespace).args(["sh", "-c", &format!("{mount} && exec \"$@\""), "sh"]);
    dev.arg(env!("CARGO_BIN_EXE_journeyman")).arg("dev");
    let like = journeyman(host.path());
    dev.env_clear().current_dir(host.path()).envs(like.get_envs().filter_map(|(name, value)| Some((name, value?))));
    dev.env("TMPDIR", host.join("small")).env("NO_COLOR", "1").env("JOURNEYMAN__HOST__MIN_FREE_DISK", "1KiB");
    let mut server = Server::start(&mut dev);
    server.prints("Ctrl-C");
    Some(server)
}

#[test]
fn a1_a_payload_that_fills_the_disk_of_queue_and_worker_is_reported_at_once() {
    let host = Host::new();
    let Some(server) = dev_on_small_disk(&host) else { return };
    let hog = host.create_script("echo started; dd if=/dev/zero of=big bs=1M count=100");
    let said = host.task(&["wait", &hog]);
    assert!(said.out.contains("failed"), "{said:?}");
    let log = host.task(&["log", &hog]).out;
    assert!(log.contains("started") && log.contains("bytes of `host.task_disk`"), "{log}");
    let next = host.create(&["--", "/bin/true"]);
    assert_eq!(host.task(&["wait", &next]).code, 0);
    server.quit();
}

#[test]
fn a1_the_worker_says_that_the_disk_is_too_full_to_store_a_log() {
    let host = Host::new();
    let Some(mut server) = dev_on_small_disk(&host) else { return };
    // There is room for the log itself, and none for the queue's copy, which compression makes no smaller.
    host.create_script("head -c 9000000 /dev/urandom | base64");
    let line = server.logs("cannot store artifacts");
    assert!(line.contains("storage responded with 507: disk full"), "{line}");
    server.quit();
}

#[test]
fn e7_errors_name_what_is_wrong() {
    let host = Host::with_queue();
    let mut command = host.worker();
    let worker = Server::start(command.args(["--set", "worker.work_dir=/proc/not-there"])).ends_with(21);
    assert!(worker.err.contains("cannot create the directory /proc/not-there"), "{}", worker.err);
    assert!(!worker.err.contains("control socket"), "{}", worker.err);

    let plain = host.root().replace("http:", "https:");
    let list = host.run(&["task", "list", "--queue", "build/linux", "--root-url", &plain]);
    assert!(list.err.contains("this port does not speak TLS"), "{}", list.err);

    let status = host.run(&["task", "status", "not-a-task"]);
    assert!(status.err.contains("a task id is 22 letters"), "{}", status.err);
}

#[test]
fn e7_lists_and_json_have_the_same_names_everywhere() {
    let host = Host::with_queue();
    for command in [["task", "ls"], ["claims", "ls"]] {
        let help = host.run(&[command[0], command[1], "--help"]);
        assert_eq!(help.code, 0, "{command:?}: {}", help.err);
    }
    assert_eq!(host.run(&["controller", "poison", "ls", "--help"]).code, 0);
    let mut server = Server::start(&mut host.worker());
    server.logs("source: ");
    let socket = host.join("work/control.sock").display().to_string();
    for spelling in ["-ojson", "--output=json", "--json"] {
        let status = host.run(&["status", "--socket", &socket, spelling]);
        assert!(status.out.starts_with('{'), "{spelling}: {}{}", status.out, status.err);
    }
    assert_eq!(host.run(&["guide", "--json"]).code, 2);
    server.quit();
}
