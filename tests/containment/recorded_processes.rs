//! The next start of a killed worker kills the processes that it left.

use std::io::{BufRead as _, BufReader};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use journeyman::handler::process::RunLimits;
use journeyman_domain::journal::ProcessRecord;
use journeyman_platform::host::containment::{
    Containment, ContainmentConfig, ContainmentLevel, kill_recorded_processes,
};

use crate::bench::Bench;
use crate::hostile::LEAVE;
use crate::payload_scan::PayloadScan;
use crate::scopes::start;
use crate::{LEVELS, Report, at, required};

/// Starts a payload that outlives it, prints its name, and waits to be killed.
pub(crate) async fn victim(level: &str, name: &str) -> Report {
    let containment = Containment::probe(name, wanted(level)).expect("probed before");
    let scope = containment.new_scope();
    let bench = Bench::new();
    let script = format!(
        "{LEAVE}setsid sleep 7654321 >/dev/null 2>&1 & \
         ( leave; exec env -i setsid sh -c 'echo >up; exec sleep {}' ) >/dev/null 2>&1 & \
         while [ ! -e up ]; do :; done; echo up; wait",
        mark(name)
    );
    let running = start(&bench, &scope, &["sh", "-c", &script]).await.expect("it starts");
    let bounds = RunLimits { run_time: None, termination_grace: Duration::ZERO };
    let mut ended = std::pin::pin!(running.finish(bounds, &bench.context));
    // A process has no environment during `exec`.
    tokio::select! {
        ended = &mut ended => panic!("{ended:?}"),
        () = bench.logged("up") => {}
    }
    println!("{}", serde_json::to_string(&scope.record()).expect("a record"));
    drop(tokio::time::timeout(Duration::from_secs(600), ended).await);
    Report::default()
}

/// The duration that the process sleeps that left its group and its environment. Its parent is in the group when the worker dies.
fn mark(name: &str) -> String {
    format!("7654{}", name.rsplit('-').next().unwrap_or_default())
}

fn wanted(level: &str) -> ContainmentConfig {
    let level = LEVELS.into_iter().find(|known| known.as_str() == level).expect("a level");
    ContainmentConfig { requirement: required(level), ..ContainmentConfig::default() }
}

pub(crate) fn run(filter: &str) -> Report {
    let mut report = Report::default();
    for level in LEVELS {
        let name = format!("{}: the next start kills the processes of a killed worker", level.as_str());
        if name.contains(filter) && at(level, "earlier").is_ok() {
            report.check(&name, next_start(level));
        }
    }
    report
}

fn next_start(level: ContainmentLevel) -> Result<(), String> {
    let name = format!("killed-{}-{}", level.as_str(), std::process::id());
    let (mut child, known) = start_victim(level, &name);
    let scan = PayloadScan { cookie: known.cookie.to_string(), mark: mark(&name), folder: "/no/folder".into() };
    child.kill().and_then(|()| child.wait().map(drop)).map_err(|error| error.to_string())?;
    if scan.running().is_empty() {
        return Err("no process was left, so the test shows nothing".to_owned());
    }
    let containment = Containment::probe(&name, wanted(level.as_str())).map_err(|error| error.to_string())?;
    if level != ContainmentLevel::ProcessGroup {
        // Found by the worker's name, without a record.
        let left = scan.running();
        if !left.is_empty() || containment.level() != level {
            return Err(format!("at {}, remaining: {left:?}", containment.level().as_str()));
        }
    }
    let found = kill_recorded_processes(&[known]).map_err(|error| error.to_string())?;
    if found != usize::from(level == ContainmentLevel::ProcessGroup) {
        return Err(format!("{found} claims are reported to have had processes"));
    }
    let left = scan.running();
    if left.is_empty() { Ok(()) } else { Err(format!("remaining: {left:?}")) }
}

fn start_victim(level: ContainmentLevel, name: &str) -> (Child, ProcessRecord) {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--victim", level.as_str(), name]).stdin(Stdio::null()).stdout(Stdio::piped());
    let mut child = command.spawn().expect("it starts");
    let mut line = String::new();
    BufReader::new(child.stdout.take().expect("it is piped")).read_line(&mut line).expect("it prints its name");
    (child, serde_json::from_str(&line).expect("a record"))
}
