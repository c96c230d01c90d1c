//! A worker that is stopped, and one that may open too few files.

use std::process::Command;

use rustix::process::Signal;

use crate::host::Host;
use crate::server::Server;
use crate::support::Said;

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
