//! A worker that is stopped, and one that may open too few files.

use std::process::Command;

use rustix::process::Signal;

use crate::running::{queue, worker};
use crate::server::Server;
use crate::support::{journeyman, run};

#[test]
fn a_stopped_worker_is_reported_with_its_process_and_a_hint() {
    let folder = tempfile::tempdir().expect("a folder");
    let here = folder.path();
    let (_queue, root) = queue(here);
    let mut server = Server::start(&mut worker(here, &root, "a-token-for-tests"));
    server.logs("source: ");
    // It answers, and says who it is.
    let well = run(journeyman(here).arg("doctor"), "");
    let line = well.out.lines().find(|line| line.contains("control socket")).expect("it is looked at");
    let answers = line.contains(&format!("worker with pid {} responds at ", server.pid()));
    assert!(line.starts_with("ok ") && answers, "{line}");
    server.signal(Signal::STOP);
    std::thread::scope(|scope| {
        let doctor = scope.spawn(|| run(journeyman(here).arg("doctor"), ""));
        let status = scope.spawn(|| run(journeyman(here).arg("status"), ""));
        let said = doctor.join().expect("it ran");
        let line = said.out.lines().find(|line| line.contains("control socket")).expect("it is looked at");
        assert!(said.code == 1 && line.starts_with("failed "), "{}", said.out);
        assert!(line.contains(&format!("no response from process {}", server.pid())), "{line}");
        assert!(line.contains(&format!("kill -CONT {}", server.pid())), "{line}");
        let said = status.join().expect("it ran");
        assert_eq!(said.code, 32, "{}", said.err);
        assert!(said.err.contains(&format!("no response from process {}", server.pid())), "{}", said.err);
    });
    server.signal(Signal::CONT);
    assert_eq!(run(journeyman(here).arg("status"), "").code, 0);
    server.signal(Signal::QUIT);
    assert_eq!(server.ends().code, 14);
}

#[test]
fn a_low_limit_of_open_files_is_reported_at_start() {
    let folder = tempfile::tempdir().expect("a folder");
    let here = folder.path();
    let (_queue, root) = queue(here);
    let limited = |files: u64| {
        let mut inner = worker(here, &root, "a-token-for-tests");
        inner.args(["--capacity", "64"]);
        let mut shell = Command::new("sh");
        shell.args(["-c", &format!("ulimit -n {files}; exec \"$0\" \"$@\"")]);
        shell.arg(inner.get_program()).args(inner.get_args()).current_dir(here).env_clear();
        shell.envs(inner.get_envs().filter_map(|(name, value)| Some((name, value?))));
        Server::start(&mut shell)
    };
    let said = limited(24).ends();
    assert_eq!(said.code, 21, "{}", said.err);
    assert!(said.err.contains("open files is 24") && said.err.contains("ulimit -n"), "{}", said.err);
    for (files, told) in [(150, true), (4096, false)] {
        let mut server = limited(files);
        server.logs("source: ");
        server.signal(Signal::QUIT);
        let said = server.ends().err;
        let warned = said.contains(&format!("open files is {files}, capacity 64 may need "));
        assert_eq!(warned, told, "{said}");
        assert_eq!(said.contains("ulimit -n"), told, "{said}");
    }
}
