//! Runs hostile payloads at every level of containment of this host: nothing outlives its claim.
//!
//! A binary with its own `main`, because it has to call `journeyman::shim()` first. `JOURNEYMAN_CONTAINMENT_RUNS` is the total number
//! of runs; without it, each payload runs once and then again for 40 seconds in all. An argument runs only the cases whose name contains it. With `CI=true` a level that this host
//! lacks is a failure.
#![allow(missing_docs, reason = "cases are named by what they show")]
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::print_stdout,
    clippy::disallowed_methods,
    reason = "a test that cannot go on fails, and this one prints for itself"
)]

#[path = "../handler/bench.rs"]
#[allow(dead_code, reason = "this room needs a part of it")]
mod bench;

mod hostile;
mod payload_scan;
mod recorded_processes;
mod scopes;

use std::process::ExitCode;

use journeyman_platform::host::containment::{Containment, ContainmentConfig, ContainmentLevel, Requirement};

const LEVELS: [ContainmentLevel; 2] = ContainmentLevel::ALL;

#[derive(Debug, Default)]
struct Report {
    failed: Vec<String>,
    /// Levels and features that this host lacks.
    missing: Vec<String>,
}

impl Report {
    fn add(&mut self, other: Self) {
        self.failed.extend(other.failed);
        self.missing.extend(other.missing);
    }

    fn check(&mut self, what: &str, outcome: Result<(), String>) {
        match outcome {
            Ok(()) => println!("ok      {what}"),
            Err(why) => {
                println!("FAILED  {what}: {why}");
                self.failed.push(what.to_owned());
            }
        }
    }
}

fn required(level: ContainmentLevel) -> Requirement {
    match level {
        ContainmentLevel::ProcessGroup => Requirement::Group,
        ContainmentLevel::CgroupKill => Requirement::Auto,
    }
}

/// Containment at a level, or why the host lacks it.
fn at(level: ContainmentLevel, name: &str) -> Result<Containment, String> {
    let name = format!("{name}-{}-{}", level.as_str(), std::process::id());
    let wanted = ContainmentConfig { requirement: required(level), ..ContainmentConfig::default() };
    let containment = Containment::probe(&name, wanted).map_err(|error| error.to_string())?;
    if containment.level() == level {
        Ok(containment)
    } else {
        Err(format!("level {} is not available: {}", level.as_str(), containment.shortcomings().join("; ")))
    }
}

fn main() -> ExitCode {
    journeyman::shim();
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().expect("a runtime can be started");
    let ci = std::env::var("CI").is_ok_and(|ci| ci == "true");
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let report = runtime.block_on(async {
        match words[..] {
            ["--victim", level, name] => recorded_processes::victim(level, name).await,
            ["--first-process"] => hostile::as_first_process().await,
            _ => {
                let filter = words.iter().find(|word| !word.starts_with('-')).copied().unwrap_or_default();
                let mut report = scopes::run(filter).await;
                report.add(recorded_processes::run(filter));
                report.add(hostile::run(filter).await);
                report
            }
        }
    });
    for missing in &report.missing {
        println!("MISSING: {missing}");
    }
    if report.failed.is_empty() && !(ci && report.missing.iter().any(|missing| missing.starts_with("level"))) {
        ExitCode::SUCCESS
    } else {
        println!("FAILED: {}", report.failed.join(", "));
        ExitCode::FAILURE
    }
}
