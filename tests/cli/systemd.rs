//! What systemd hears of a worker, and the units under `examples/systemd`. No systemd runs here: the test holds the socket
//! that systemd would.

use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use journeyman::cli::exit::Exit;
use rustix::process::Signal;

use crate::running::{queue, worker};
use crate::server::{Server, create_at};

/// The socket of a service manager, and what it has heard.
struct Manager {
    socket: UnixDatagram,
    heard: Vec<String>,
}

impl Manager {
    fn listen(path: &Path) -> Self {
        let socket = UnixDatagram::bind(path).expect("a socket");
        socket.set_read_timeout(Some(Duration::from_secs(60))).expect("a bound for each message");
        Self { socket, heard: Vec::new() }
    }

    /// Reads on to the assignment that begins like this. Each message is read once.
    fn hears(&mut self, begins: &str) -> String {
        loop {
            let mut buffer = [0; 4096];
            let taken = self.socket.recv(&mut buffer);
            assert!(taken.is_ok(), "{begins} never came: {taken:?}; {:#?}", self.heard);
            let taken = taken.unwrap_or_default();
            let message = std::str::from_utf8(&buffer[..taken]).expect("UTF-8").to_owned();
            self.heard.push(message.clone());
            if let Some(line) = message.lines().find(|line| line.starts_with(begins)) {
                return line.to_owned();
            }
        }
    }

    /// The last message.
    fn last(&self) -> &str {
        self.heard.last().expect("something was heard")
    }
}

#[test]
fn systemd_is_notified_of_start_reload_drain_and_exit() {
    let folder = tempfile::tempdir().expect("a folder");
    let here = folder.path();
    let mut manager = Manager::listen(&here.join("notify"));
    let (_queue, root) = queue(here);
    let mut command = worker(here, &root, "a-token-for-tests");
    // A drain of this dialect waits for no long poll.
    command.args(["--set", "source.ci.dialect=azure", "--id", "w", "--group", "g"]);
    command.env("NOTIFY_SOCKET", here.join("notify")).env("WATCHDOG_USEC", "2000000");
    let worker = Server::start(&mut command);

    manager.hears("READY=1");
    assert_eq!(manager.heard.len(), 1, "the first word is that it is ready: {:?}", manager.heard);
    assert!(manager.last().contains("STATUS=RUNNING   0/1 busy") && manager.last().contains("WATCHDOG=1"));
    manager.hears("WATCHDOG=1");

    let file = std::fs::read_to_string(here.join("journeyman.toml")).expect("it is there");
    std::fs::write(here.join("journeyman.toml"), file.replace("[worker]\n", "[worker]\ncapacity = 3\n"))
        .expect("written");
    worker.signal(Signal::HUP);
    manager.hears("RELOADING=1");
    let at = manager.last().lines().find_map(|line| line.strip_prefix("MONOTONIC_USEC=")).expect("when it began");
    assert!(at.parse::<u64>().is_ok_and(|at| at > 0), "{at}");
    manager.hears("READY=1");
    manager.hears("STATUS=RUNNING   0/3 busy");

    std::fs::write(here.join("journeyman.toml"), "[worker]\ncapacty = 3\n").expect("written");
    worker.signal(Signal::HUP);
    manager.hears("RELOADING=1");
    manager.hears("READY=1");
    assert!(manager.last().contains("STATUS=configuration rejected, keeping the current one"), "{}", manager.last());

    // A payload does not see the manager's socket.
    create_at(here, &root, "! env | grep -e NOTIFY_SOCKET -e WATCHDOG && sleep 600");
    manager.hears("STATUS=RUNNING   1/3 busy");

    worker.signal(Signal::TERM);
    manager.hears("STOPPING=1");
    let drain = manager.last().to_owned();
    assert!(drain.contains("EXTEND_TIMEOUT_USEC=60000000\n"), "{drain}");
    assert!(
        drain.contains("STATUS=DRAINING   1/3 busy   1 task left, released in ") && drain.contains("SIGTERM"),
        "{drain}"
    );
    manager.hears("WATCHDOG=1");

    worker.signal(Signal::QUIT);
    let end =
        "STATUS=released: stopped by `stop`, QUIT, a second signal or the drain deadline; running tasks were released";
    manager.hears(end);
    let said = worker.ends();
    assert_eq!(said.code, 14, "{}", said.err);
    manager.socket.set_nonblocking(true).expect("it can be");
    assert!(manager.socket.recv(&mut [0; 8]).is_err(), "nothing comes after the last word");
    let all = manager.heard.concat();
    assert_eq!(all.matches("READY=1").count(), 3, "{all}");
    assert!(!all.contains("a-token-for-tests"), "{all}");
}

/// What the units do after an exit.
#[derive(PartialEq, Clone, Copy)]
enum RestartPolicy {
    /// Counts as success; not restarted.
    Stop,
    /// Would fail again until an operator has acted; not restarted.
    NeedsOperator,
    Restart,
}

fn restart_policy(exit: Exit) -> RestartPolicy {
    match exit {
        Exit::Success | Exit::Idle | Exit::HostTerminating | Exit::LimitReached | Exit::Released => RestartPolicy::Stop,
        Exit::Usage | Exit::Config | Exit::Denied | Exit::Aborted => RestartPolicy::NeedsOperator,
        Exit::Failed | Exit::Internal | Exit::HostUnusable | Exit::Unreachable | Exit::ProcessesLeft => {
            RestartPolicy::Restart
        }
    }
}

fn units() -> Vec<(PathBuf, String)> {
    ["journeyman.service", "journeyman@.service"].map(unit).to_vec()
}

fn unit(name: &str) -> (PathBuf, String) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/systemd").join(name);
    (path.clone(), std::fs::read_to_string(path).expect("the unit is there"))
}

fn setting<'a>(unit: &'a str, key: &str) -> &'a str {
    let line = unit.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix('='));
    line.expect(key)
}

#[test]
fn the_units_restart_by_exit_code() {
    for (path, unit) in units() {
        let codes =
            |key| setting(&unit, key).split(' ').map(|code| code.parse().expect("a number")).collect::<Vec<u8>>();
        let of = |after| {
            let codes =
                Exit::ALL.iter().filter(|(exit, _)| restart_policy(*exit) == after).map(|(exit, _)| exit.code());
            codes.filter(|code| *code != 0).collect::<Vec<_>>()
        };
        assert_eq!(codes("SuccessExitStatus"), of(RestartPolicy::Stop), "{}", path.display());
        assert_eq!(codes("RestartPreventExitStatus"), of(RestartPolicy::NeedsOperator), "{}", path.display());
        assert_eq!(setting(&unit, "Restart"), "on-failure", "{}", path.display());
    }
}

#[test]
fn the_units_stop_a_worker_gracefully() {
    for (path, unit) in units() {
        for (key, value) in [
            ("Type", "notify-reload"),
            ("KillMode", "mixed"),
            ("TimeoutStopSec", "infinity"),
            ("Delegate", "yes"),
            ("OOMPolicy", "continue"),
            ("User", "journeyman"),
        ] {
            assert_eq!(setting(&unit, key), value, "{}", path.display());
        }
        // What would keep payloads from what they need, or the worker from its control groups.
        for key in
            ["NoNewPrivileges=", "ProtectControlGroups=", "PrivateDevices=", "ProtectKernelTunables=", "ProtectClock="]
        {
            assert!(!unit.lines().any(|line| line.starts_with(key)), "{key} in {}", path.display());
        }
    }
}

#[test]
fn the_unit_of_the_controller_keeps_its_workers() {
    let (_, unit) = unit("journeyman-controller.service");
    for (key, value) in
        [("KillMode", "process"), ("Delegate", "yes"), ("Restart", "on-failure"), ("User", "journeyman")]
    {
        assert_eq!(setting(&unit, key), value);
    }
    let codes = setting(&unit, "RestartPreventExitStatus").split(' ').map(|code| code.parse().expect("a number"));
    let persons = Exit::ALL
        .map(|(exit, _)| exit)
        .into_iter()
        .filter(|exit| restart_policy(*exit) == RestartPolicy::NeedsOperator);
    assert_eq!(codes.collect::<Vec<u8>>(), persons.map(Exit::code).collect::<Vec<_>>());
}

/// The package's script after an installation, with what it would call of the system played by scripts of one line.
#[test]
fn an_old_systemd_gets_a_unit_type_and_a_reload_that_it_supports() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let folder = tempfile::tempdir().expect("a folder");
    let here = folder.path();
    let bin = here.join("bin");
    std::fs::create_dir(&bin).expect("made");
    let played = |name: &str, script: &str| {
        // Written elsewhere: what other tests start meanwhile must not hold it open for writing.
        let written = Command::new("sh")
            .args(["-c", "printf '#!/bin/sh\\n%s\\n' \"$2\" > \"$1\" && chmod 755 \"$1\"", "sh"])
            .args([bin.join(name).as_os_str(), script.as_ref()])
            .status();
        assert!(written.expect("it runs").success());
    };
    played("getent", "exit 0");
    let share = here.join("usr/share/journeyman");
    std::fs::create_dir_all(&share).expect("made");
    std::fs::copy(root.join("examples/systemd/before-253.conf"), share.join("before-253.conf")).expect("copied");
    let scripted = |script: &str, argument: &str| {
        let mut command = Command::new("sh");
        let path = format!("{}:{}", bin.display(), std::env::var("PATH").unwrap_or_default());
        command.arg(root.join("examples/packaging/debian").join(script)).args([argument, ""]);
        let ran = command.env("PATH", path).env("DPKG_ROOT", here).output().expect("it runs");
        assert!(ran.status.success(), "{script}: {}", String::from_utf8_lossy(&ran.stderr));
    };
    let places =
        ["journeyman.service.d", "journeyman@.service.d"].map(|name| here.join("usr/lib/systemd/system").join(name));
    for (version, needed) in [("252 (252.38-1~deb12u1)", true), ("253 (253.5-1)", false), ("252 (252.1)", true)] {
        played("systemctl", &format!("echo 'systemd {version}'"));
        scripted("postinst", "configure");
        for place in &places {
            assert_eq!(place.join("before-253.conf").exists(), needed, "{version}");
            assert_eq!(place.exists(), needed, "{version}: an empty folder is left");
        }
    }
    let dropin = std::fs::read_to_string(places[0].join("before-253.conf")).expect("it is there");
    assert_eq!(setting(&dropin, "Type"), "notify");
    assert_eq!(setting(&dropin, "ExecReload"), "/bin/kill -HUP $MAINPID");
    scripted("postrm", "remove");
    assert!(places.iter().all(|place| !place.exists()), "a removal leaves something");
}

#[test]
fn systemd_can_read_the_units() {
    let Ok(version) = Command::new("systemd-analyze").arg("--version").output() else {
        assert!(std::env::var_os("CI").is_none(), "systemd-analyze is needed to check the units");
        eprintln!("NOT TESTED: there is no systemd-analyze here");
        return;
    };
    let version = String::from_utf8(version.stdout).expect("UTF-8");
    let version: u32 = version.split_whitespace().nth(1).and_then(|text| text.parse().ok()).expect("its version");
    let folder = tempfile::tempdir().expect("a folder");
    for (path, unit) in units().into_iter().chain([unit("journeyman-controller.service")]) {
        // The binary is checked to be there.
        let is_new = setting(&unit, "Type") == "notify-reload";
        let unit = unit.replace("/usr/bin/journeyman", env!("CARGO_BIN_EXE_journeyman"));
        let name = path.file_name().and_then(|name| name.to_str()).expect("a name").replace('@', "@x");
        let place = folder.path().join(name);
        std::fs::write(&place, unit).expect("it can be written");
        let checked =
            Command::new("systemd-analyze").args(["verify", "--man=no"]).arg(&place).output().expect("it runs");
        let said = String::from_utf8(checked.stderr).expect("UTF-8");
        let known =
            |line: &&str| version < 253 && line.contains("Failed to parse service type, ignoring: notify-reload");
        let own = folder.path().to_str().expect("UTF-8");
        let wrong: Vec<&str> = said.lines().filter(|line| line.contains(own)).filter(|line| !known(line)).collect();
        assert!(checked.status.success() && wrong.is_empty(), "{said}");
        if version < 253 && is_new {
            assert!(said.contains("notify-reload"), "this test sees what is wrong: {said}");
        }
    }
}
