//! One suite for every source: what the port promises, checked against whatever serves it.
//!
//! The adapters are a queue in memory, the embedded queue in both dialects, the poll-and-delete half against Azurite
//! (`JOURNEYMAN_TEST_AZURITE`), requests of RabbitMQ (`JOURNEYMAN_TEST_AMQP`), requests of
//! a ZooKeeper (`JOURNEYMAN_TEST_ZOOKEEPER`), and any real service (`JOURNEYMAN_TEST_ROOT_URL`, `…_CLIENT_ID`, `…_ACCESS_TOKEN`,
//! `…_PROTOCOL` as `azure` or `claim-work`, and, if wanted, `…_CERTIFICATE` and `…_TASK_QUEUE`). There, leases of 20 minutes are
//! waited for: together, or one after the other where a task queue is named. An argument runs only the cases whose
//! `adapter: name` contains it.
#![allow(missing_docs, reason = "cases are named by what they show")]
#![allow(
    clippy::expect_used,
    clippy::panic,
    clippy::print_stdout,
    clippy::disallowed_methods,
    reason = "a test that cannot go on fails, and this one prints for itself"
)]

#[path = "../support/gremlin.rs"]
#[allow(dead_code, reason = "this room needs a part of it")]
mod gremlin;

mod azurite;
mod bench;
mod cases;
mod embedded;
mod in_memory;
mod requests;
mod service;
mod zookeeper;

use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use bench::{Adapter, Bench, Need, Waits};
use cases::CASES;
use journeyman::source::taskcluster::Dialect;

/// No case takes longer, unless it waits for a real lease to end.
const CASE_TIMEOUT: Duration = Duration::from_secs(120);
/// Three times most of a lease of 20 minutes, and what a service takes to notice.
const WAITING_CASE_TIMEOUT: Duration = Duration::from_secs(3600);

fn main() -> ExitCode {
    let filter = std::env::args().skip(1).find(|argument| !argument.starts_with('-')).unwrap_or_default();
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().expect("a runtime can be started");
    runtime.block_on(run(&filter))
}

async fn run(filter: &str) -> ExitCode {
    let adapters = [
        in_memory::adapter(),
        embedded::adapter(Dialect::Azure),
        embedded::adapter(Dialect::ClaimWork),
        azurite::adapter(),
        requests::adapter(),
        zookeeper::adapter(),
        service::adapter(),
    ];
    let all = adapters.len();
    let (mut ran, mut passed) = (0, 0);
    let mut failed = Vec::new();
    let mut absent = false;
    for adapter in adapters {
        match adapter {
            Adapter::Present { rigs } => {
                let before = passed + failed.len();
                for rig in rigs {
                    let mut ended = |title: String, ended: Result<(), String>| {
                        println!("{} {title}", if ended.is_ok() { "ok  " } else { "FAIL" });
                        match ended {
                            Ok(()) => passed += 1,
                            Err(why) => failed.push(format!("{title}: {why}")),
                        }
                    };
                    let mut waiting = tokio::task::JoinSet::new();
                    for case in CASES {
                        let title = format!("{}: {}", rig.name(), case.name);
                        if !title.contains(filter) || !case.needs.iter().all(|need| rig.can(*need)) {
                            continue;
                        }
                        let waits = if lets_time_pass(case) { rig.waits() } else { Waits::Never };
                        match waits {
                            Waits::Never => ended(title, one(rig.bench(), case.run, CASE_TIMEOUT).await),
                            Waits::InTurn => ended(title, one(rig.bench(), case.run, WAITING_CASE_TIMEOUT).await),
                            Waits::Together => {
                                let (bench, run) = (rig.bench(), case.run);
                                waiting.spawn(async move { (title, one(bench, run, WAITING_CASE_TIMEOUT).await) });
                            }
                        }
                    }
                    if !waiting.is_empty() {
                        println!("     {} cases wait for leases of the service to end", waiting.len());
                    }
                    while let Some(case) = waiting.join_next().await {
                        let (title, result) = case.expect("a case's panic is its result");
                        ended(title, result);
                    }
                }
                ran += usize::from(passed + failed.len() > before);
            }
            Adapter::Absent { name, why, needed } => {
                println!("ABSENT {name}: {why}");
                absent |= needed && std::env::var("CI").is_ok_and(|value| value == "true");
            }
        }
    }
    for failure in &failed {
        println!("\nFAILED {failure}");
    }
    println!("\nconformance: {passed} cases passed, {} failed", failed.len());
    println!("conformance: {ran} of {all} adapters ran");
    if absent {
        println!("conformance: with CI=true an adapter that can be had must run");
    }
    if failed.is_empty() && !absent { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn lets_time_pass(case: &cases::Case) -> bool {
    case.needs.iter().any(|need| matches!(need, Need::LeaseEnd | Need::Redelivery))
}

async fn one(bench: bench::Fut<'static, Arc<dyn Bench>>, run: cases::RunCase, most: Duration) -> Result<(), String> {
    let mut task = tokio::task::JoinSet::new();
    task.spawn(async move { run(bench.await).await });
    match tokio::time::timeout(most, task.join_next()).await {
        Ok(Some(Ok(()))) => Ok(()),
        Ok(Some(Err(error))) => Err(error.try_into_panic().map_or_else(
            |error| error.to_string(),
            |panic| {
                let said = panic.downcast_ref::<String>().cloned();
                said.or_else(|| panic.downcast_ref::<&str>().map(|text| (*text).to_owned())).unwrap_or_default()
            },
        )),
        Ok(None) => Err("it never ran".into()),
        Err(_) => Err(format!("it did not end in {} s", most.as_secs())),
    }
}
