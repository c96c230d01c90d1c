//! One suite for every source: what the port promises, checked against whatever serves it.
//!
//! The adapters are a queue in memory, the embedded queue in both dialects, the poll-and-delete half against Azurite
//! (`JOURNEYMAN_TEST_AZURITE`), requests of RabbitMQ (`JOURNEYMAN_TEST_AMQP`), requests of
//! a ZooKeeper (`JOURNEYMAN_TEST_ZOOKEEPER`), and any real service (`JOURNEYMAN_TEST_ROOT_URL`, `…_CLIENT_ID`, `…_ACCESS_TOKEN`,
//! `…_PROTOCOL` as `azure` or `claim-work`, and, if wanted, `…_CERTIFICATE` and `…_TASK_QUEUE`). There, leases of 20 minutes are
//! waited for: together, or one after the other where a task queue is named.

mod azurite;
mod bench;
mod cases;
mod embedded;
mod in_memory;
mod requests;
mod service;
mod zookeeper;

use std::sync::Arc;
use std::time::Duration;

use bench::{Adapter, Bench, Need, Waits};
use cases::CASES;
use journeyman::source::taskcluster::Dialect;

const CASE_TIMEOUT: Duration = Duration::from_secs(120);
/// The limit of cases that wait for a lease of the service to end.
const WAITING_CASE_TIMEOUT: Duration = Duration::from_secs(3600);

macro_rules! adapters {
    ($($name:ident: $adapter:expr,)*) => { $(
        #[tokio::test(flavor = "multi_thread")]
        async fn $name() {
            keeps_the_port($adapter).await;
        }
    )* };
}

adapters! {
    a_queue_in_memory: in_memory::adapter(),
    the_embedded_queue_by_messages: embedded::adapter(Dialect::Azure),
    the_embedded_queue_by_claim_work: embedded::adapter(Dialect::ClaimWork),
    azurite: azurite::adapter(),
    requests_of_rabbitmq: requests::adapter(),
    requests_in_zookeeper: zookeeper::adapter(),
    a_real_service: service::adapter(),
}

/// Runs each case of which the adapter is capable, and fails with all that failed.
async fn keeps_the_port(adapter: Adapter) {
    let rigs = match adapter {
        Adapter::Present { rigs } => rigs,
        Adapter::Absent { name, why, needed } => {
            let required = needed && std::env::var("CI").is_ok_and(|value| value == "true");
            assert!(!required, "{name} is needed where CI=true: {why}");
            eprintln!("NOT RUN with {name}: {why}");
            return;
        }
    };
    let (mut passed, mut failed) = (0, Vec::new());
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
            if !case.needs.iter().all(|need| rig.can(*need)) {
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
        while let Some(case) = waiting.join_next().await {
            let (title, result) = case.expect("a case's panic is its result");
            ended(title, result);
        }
    }
    assert!(failed.is_empty(), "{passed} cases passed, {} failed:\n{}", failed.len(), failed.join("\n"));
    assert!(passed > 0, "no case ran");
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
