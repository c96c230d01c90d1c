//! Notifications to systemd, through a socket of the test, and the units under `examples/systemd`.

use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use journeyman::cli::exit::Exit;
use rustix::process::Signal;

use crate::cli::host::Host;
use crate::cli::server::Server;

/// The socket of a service manager, and its messages.
struct Manager {
    socket: UnixDatagram,
    messages: Vec<String>,
}

impl Manager {
    fn listen(path: &Path) -> Self {
        let socket = UnixDatagram::bind(path).expect("a socket");
        socket.set_read_timeout(Some(Duration::from_secs(60))).expect("a bound for each message");
        Self { socket, messages: Vec::new() }
    }

    /// Reads on to the assignment that begins like this. Each message is read once.
    fn wait_for(&mut self, begins: &str) -> String {
        loop {
            let mut buffer = [0; 4096];
            let taken = self.socket.recv(&mut buffer);
            assert!(taken.is_ok(), "{begins} never came: {taken:?}; {:#?}", self.messages);
            let taken = taken.unwrap_or_default();
            let message = std::str::from_utf8(&buffer[..taken]).expect("UTF-8").to_owned();
            self.messages.push(message.clone());
            if let Some(line) = message.lines().find(|line| line.starts_with(begins)) {
                return line.to_owned();
            }
        }
    }

    /// The last message.
    fn last(&self) -> &str {
        self.messages.last().expect("something was messages")
    }
}

#[test]
fn systemd_is_notified_of_start_reload_drain_and_exit() {
    let host = Host::with_queue();
    let mut manager = Manager::listen(&host.join("notify"));
    let mut command = host.worker();
    // A drain of this dialect waits for no long poll.
    command.args(["--set", "source.ci.dialect=azure", "--id", "w", "--group", "g"]);
    command.env("NOTIFY_SOCKET", host.join("notify")).env("WATCHDOG_USEC", "2000000");
    let worker = Server::start(&mut command);

    manager.wait_for("READY=1");
    assert_eq!(manager.messages.len(), 1, "it is ready: {:?}", manager.messages);
    assert!(manager.last().contains("STATUS=RUNNING  0/1 busy") && manager.last().contains("WATCHDOG=1"));
    manager.wait_for("WATCHDOG=1");

    let file = host.read("journeyman.toml");
    host.write("journeyman.toml", &file.replace("[worker]\n", "[worker]\ncapacity = 3\n"));
    worker.signal(Signal::HUP);
    manager.wait_for("RELOADING=1");
    let at = manager.last().lines().find_map(|line| line.strip_prefix("MONOTONIC_USEC=")).expect("when it began");
    assert!(at.parse::<u64>().is_ok_and(|at| at > 0), "{at}");
    manager.wait_for("READY=1");
    manager.wait_for("STATUS=RUNNING  0/3 busy");

    host.write("journeyman.toml", "[worker]\ncapacty = 3\n");
    worker.signal(Signal::HUP);
    manager.wait_for("RELOADING=1");
    manager.wait_for("READY=1");
    assert!(manager.last().contains("STATUS=configuration rejected, keeping the current one"), "{}", manager.last());

    // A payload does not see the manager's socket.
    host.create_script("! env | grep -e NOTIFY_SOCKET -e WATCHDOG && sleep 600");
    manager.wait_for("STATUS=RUNNING  1/3 busy");

    worker.signal(Signal::TERM);
    manager.wait_for("STOPPING=1");
    let drain = manager.last().to_owned();
    assert!(drain.contains("EXTEND_TIMEOUT_USEC=60000000\n"), "{drain}");
    assert!(
        drain.contains("STATUS=DRAINING  1/3 busy · not claiming: 1 task left") && drain.contains("SIGTERM"),
        "{drain}"
    );
    manager.wait_for("WATCHDOG=1");

    worker.signal(Signal::QUIT);
    manager.wait_for("STATUS=released: ");
    worker.ends_with(14);
    manager.socket.set_nonblocking(true).expect("it can be");
    assert!(manager.socket.recv(&mut [0; 8]).is_err(), "nothing comes after the last word");
    let all = manager.messages.concat();
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
        Exit::Success | Exit::Idle | Exit::HostTerminating | Exit::LimitReached | Exit::Released | Exit::NotNeeded => {
            RestartPolicy::Stop
        }
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

/// Runs the package's scripts with a stand-in for each command of the system.
#[test]
fn an_old_systemd_gets_a_unit_type_and_a_reload_that_it_supports() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let host = Host::new();
    let bin = host.join("bin");
    std::fs::create_dir(&bin).expect("made");
    let stand_in = |name: &str, script: &str| {
        // By another process, because a program that is open for writing in one of a parallel test cannot be executed.
        let written = Command::new("sh")
            .args(["-c", "printf '#!/bin/sh\\n%s\\n' \"$2\" > \"$1\" && chmod 755 \"$1\"", "sh"])
            .args([bin.join(name).as_os_str(), script.as_ref()])
            .status();
        assert!(written.expect("it runs").success());
    };
    stand_in("getent", "exit 0");
    let share = host.join("usr/share/journeyman");
    std::fs::create_dir_all(&share).expect("made");
    std::fs::copy(root.join("examples/systemd/before-253.conf"), share.join("before-253.conf")).expect("copied");
    let run_script = |script: &str, argument: &str| {
        let mut command = Command::new("sh");
        let path = format!("{}:{}", bin.display(), std::env::var("PATH").unwrap_or_default());
        command.arg(root.join("examples/packaging/debian").join(script)).args([argument, ""]);
        let ran = command.env("PATH", path).env("DPKG_ROOT", host.path()).output().expect("it runs");
        assert!(ran.status.success(), "{script}: {}", String::from_utf8_lossy(&ran.stderr));
    };
    let dirs =
        ["journeyman.service.d", "journeyman@.service.d"].map(|name| host.join("usr/lib/systemd/system").join(name));
    for (version, needed) in [("252 (252.38-1~deb12u1)", true), ("253 (253.5-1)", false), ("252 (252.1)", true)] {
        stand_in("systemctl", &format!("echo 'systemd {version}'"));
        run_script("postinst", "configure");
        for dir in &dirs {
            assert_eq!(dir.join("before-253.conf").exists(), needed, "{version}");
            assert_eq!(dir.exists(), needed, "{version}: an empty folder is left");
        }
    }
    let dropin = host.read("usr/lib/systemd/system/journeyman.service.d/before-253.conf");
    assert_eq!(setting(&dropin, "Type"), "notify");
    assert_eq!(setting(&dropin, "ExecReload"), "/bin/kill -HUP $MAINPID");
    run_script("postrm", "remove");
    assert!(dirs.iter().all(|dir| !dir.exists()), "a removal leaves something");
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
    let host = Host::new();
    for (path, unit) in units().into_iter().chain([unit("journeyman-controller.service")]) {
        // The binary is checked to be there.
        let is_new = setting(&unit, "Type") == "notify-reload";
        let unit = unit.replace("/usr/bin/journeyman", env!("CARGO_BIN_EXE_journeyman"));
        let name = path.file_name().and_then(|name| name.to_str()).expect("a name").replace('@', "@x");
        host.write(&name, &unit);
        let checked = Command::new("systemd-analyze")
            .args(["verify", "--man=no"])
            .arg(host.join(&name))
            .output()
            .expect("it runs");
        let said = String::from_utf8(checked.stderr).expect("UTF-8");
        let known =
            |line: &&str| version < 253 && line.contains("Failed to parse service type, ignoring: notify-reload");
        let own = host.path().to_str().expect("UTF-8");
        let wrong: Vec<&str> = said.lines().filter(|line| line.contains(own)).filter(|line| !known(line)).collect();
        assert!(checked.status.success() && wrong.is_empty(), "{said}");
        if version < 253 && is_new {
            assert!(said.contains("notify-reload"), "the test recognizes errors: {said}");
        }
    }
}
