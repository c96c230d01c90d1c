//! The built binary: a worker that is watched over HTTP while it runs a task.

use std::io::BufReader;
use std::net::SocketAddr;
use std::path::Path;
use std::process::{Child, ChildStderr, Command, Stdio};

use crate::answers::get;
use crate::numbers::documented;

/// `journeyman dev` with a status page; it is killed with the test.
pub(crate) struct Dev {
    child: Child,
    log: BufReader<ChildStderr>,
    address: SocketAddr,
}

impl Drop for Dev {
    fn drop(&mut self) {
        drop(self.child.kill());
        drop(self.child.wait());
    }
}

pub(crate) fn journeyman(folder: &Path) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_journeyman"));
    command.env_clear().current_dir(folder).stdin(Stdio::null());
    command.env("PATH", std::env::var_os("PATH").unwrap_or_default()).env("HOME", folder).env("TMPDIR", folder);
    command
}

pub(crate) fn ran(folder: &Path, arguments: &[&str]) -> String {
    let output = journeyman(folder).args(arguments).output().expect("it runs");
    assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).expect("UTF-8")
}

impl Dev {
    pub(crate) fn start(folder: &Path) -> Self {
        let mut command = journeyman(folder);
        command
            .args(["dev", "--set", "http.listen=127.0.0.1:0", "--set", "host.min_free_disk=1MiB"])
            .env("NO_COLOR", "1");
        let mut child = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().expect("it starts");
        let mut log = BufReader::new(child.stderr.take().expect("it is piped"));
        let line = until(&mut log, "http://");
        let address = line.split("http://").nth(1).and_then(|rest| rest.split('/').next()).expect("an address");
        let address = address.parse().expect("an address");
        Self { child, log, address }
    }
}

/// Reads the log to the first line that holds `words`.
pub(crate) fn until(log: &mut impl std::io::BufRead, words: &str) -> String {
    loop {
        let mut line = String::new();
        assert!(log.read_line(&mut line).expect("UTF-8") > 0, "it ended without saying {words:?}");
        if line.contains(words) {
            return line;
        }
    }
}

#[tokio::test]
async fn a_running_task_is_visible_over_http_and_its_handler_gets_the_trace() {
    let folder = tempfile::tempdir().expect("a folder");
    let here = folder.path();
    let mut dev = Dev::start(here);
    assert!(Command::new("mkfifo").arg(here.join("go")).status().expect("mkfifo").success());
    let script = format!("echo parent=$TRACEPARENT; cat {}/go", here.display());
    let created = ran(here, &["task", "create", "--", "/bin/sh", "-c", &script]);
    let id = created.split_whitespace().next().expect("the id").to_owned();
    let claimed = until(&mut dev.log, "claimed");
    let trace = claimed.split("trace_id=").nth(1).expect("the line names the trace").trim();
    assert_eq!(trace.len(), 32, "{claimed}");

    let page = get(dev.address, "/").await.body;
    assert!(page.contains(&format!("{id}/0")) && page.contains("lease left"), "{page}");
    let metrics = get(dev.address, "/metrics").await.body;
    assert!(metrics.contains("journeyman_tasks_running{source=\"command\"} 1.0"), "{metrics}");
    assert!(metrics.contains("journeyman_lease_remaining_min_seconds"), "{metrics}");
    let unknown: Vec<_> = crate::numbers::names(&metrics).difference(&documented()).cloned().collect();
    assert_eq!(unknown, Vec::<String>::new());
    assert_eq!(get(dev.address, "/readyz").await.status, 200);
    ran(here, &["pause"]);
    assert_eq!(get(dev.address, "/readyz").await.status, 503);
    assert_eq!(get(dev.address, "/livez").await.status, 200);

    std::fs::write(here.join("go"), "go\n").expect("the task reads");
    let reported = until(&mut dev.log, "reported");
    assert!(reported.contains(trace), "{reported}");
    let metrics = get(dev.address, "/metrics").await.body;
    assert!(metrics.contains("journeyman_tasks_total{source=\"command\",outcome=\"completed\"} 1.0"), "{metrics}");
    let log = ran(here, &["task", "log", &id]);
    assert!(log.contains(&format!("parent=00-{trace}-")), "{log}");
    drop(dev);
}

#[test]
fn a_remote_listen_address_is_a_configuration_error() {
    let folder = tempfile::tempdir().expect("a folder");
    let check = |text: &str| {
        let file = folder.path().join("journeyman.toml");
        std::fs::write(&file, text).expect("a file");
        journeyman(folder.path()).args(["config", "check", "journeyman.toml"]).output().expect("it runs")
    };
    let refused = check("[http]\nlisten = \"0.0.0.0:7080\"\n");
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert_eq!(refused.status.code(), Some(30), "{said}");
    assert!(said.contains("http.allow_remote = true") && said.contains("journeyman.toml:2"), "{said}");
    let meant = check("[http]\nlisten = \"0.0.0.0:7080\"\nallow_remote = true\n");
    assert_eq!(meant.status.code(), Some(0), "{}", String::from_utf8_lossy(&meant.stderr));
}
