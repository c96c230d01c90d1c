//! Reads every recorded exchange of `fixtures/` with the code that reads the real thing.

use std::collections::BTreeSet;

use jiff::Timestamp;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use super::artifact::{WireObject, WireS3, WireUpload};
use super::azure::{self, WireQueues};
use super::client_calls::ListPage;
use super::error_response::{ErrorResponse, classify_service_error};
use super::exchange::{Exchange, files};
use super::wire::{WireClaim, WireClaimedPage, WireClaims, WireStatus, WireStatusReply, WorkerIdentity};
use journeyman_domain::refusal::Refusal;

fn json<T: DeserializeOwned>(exchange: &Exchange) -> T {
    serde_json::from_str(&exchange.body).unwrap()
}

fn answered(exchange: &Exchange) -> ErrorResponse {
    ErrorResponse {
        status: exchange.status,
        retry_after: None,
        content_type: exchange.header("content-type").unwrap_or_default().to_owned(),
        body: exchange.body.clone().into_bytes(),
    }
}

fn date(exchange: &Exchange) -> Timestamp {
    jiff::fmt::rfc2822::parse(exchange.header("date").unwrap()).unwrap().timestamp()
}

fn worker(id: &str) -> WorkerIdentity {
    WorkerIdentity { group: "wg".into(), id: id.into() }
}

/// What a refused call of each record asks for; 424 and the like of artifacts are no matter of a worker's.
fn expected(status: u16, unknown_route: bool) -> Refusal {
    match status {
        400 | 424 => Refusal::Rejected,
        401 | 403 => Refusal::Denied,
        404 if unknown_route => Refusal::Retry { retry_after: None },
        404 | 409 => Refusal::Gone,
        500 => Refusal::Retry { retry_after: None },
        other => panic!("no record was expected to be refused with {other}"),
    }
}

/// Reads the body of a success by what was asked, and says what it was read as.
fn read(exchange: &Exchange, ids: &[&str]) -> &'static str {
    let (path, date) = (exchange.path.as_str(), date(exchange));
    let last = path.split('?').next().unwrap().rsplit('/').next().unwrap();
    let lease = |granted: Result<std::time::Duration, String>| {
        let seconds = granted.unwrap().as_secs();
        assert!((13..=1200).contains(&seconds), "{seconds}");
    };
    match (exchange.method.as_str(), last) {
        _ if path.contains("/claim-work/") => {
            for entry in json::<WireClaims>(exchange).tasks {
                let claim: WireClaim = serde_json::from_str(entry.get()).unwrap();
                lease(claim.check(&worker("w1"), date).map(|claim| claim.lease));
            }
            "claims"
        }
        ("POST", "claim") => {
            let id = ids.iter().find(|id| exchange.body.contains(&format!("\"workerId\": \"{id}\""))).unwrap();
            lease(json::<WireClaim>(exchange).check(&worker(id), date).map(|claim| claim.lease));
            "claim"
        }
        ("POST", "reclaim") => {
            lease(json::<WireClaim>(exchange).check(&worker("w1"), date).map(|granted| granted.lease));
            "reclaim"
        }
        ("POST", "completed" | "failed" | "exception" | "cancel") => {
            assert!(!json::<WireStatusReply>(exchange).status.runs.is_empty());
            "status"
        }
        ("GET", "claimed") => {
            assert!(!json::<WireClaimedPage>(exchange).tasks.is_empty());
            "claimed"
        }
        ("GET", "artifacts") => {
            assert!(!json::<ListPage>(exchange).entries.is_empty());
            "artifacts"
        }
        _ if path.contains("/poll-task-url/") => {
            let queues: WireQueues = json(exchange);
            azure::check_recorded(queues, date);
            "queues"
        }
        _ if path.contains("/api/object/v1/upload/") => {
            drop(json::<WireUpload>(exchange));
            "upload"
        }
        ("POST", _) if path.contains("/artifacts/") && exchange.body.contains("\"object\"") => {
            assert!(json::<WireObject>(exchange).credentials.parse().is_ok());
            "object"
        }
        ("POST", _) if path.contains("/artifacts/") && exchange.body.contains("putUrl") => {
            assert!(json::<WireS3>(exchange).put_url.starts_with("http"));
            "s3"
        }
        _ => {
            assert!(exchange.body.trim().is_empty() || serde_json::from_str::<Value>(&exchange.body).is_ok());
            "other"
        }
    }
}

fn every_record_of(folder: &str, ids: &[&str]) -> BTreeSet<&'static str> {
    let mut kinds = BTreeSet::new();
    for (name, text) in files(folder, ".txt") {
        let exchange = Exchange::parse(&text);
        if (200..400).contains(&exchange.status) {
            kinds.insert(read(&exchange, ids));
            continue;
        }
        let refused = classify_service_error("op", &answered(&exchange));
        let unknown_route = exchange.body.contains("\"error\": \"Not found\"");
        assert_eq!(refused.refusal, expected(exchange.status, unknown_route), "{name}");
        for kept_out in ["requestInfo", "statusCode", "---", "\n"] {
            assert!(!refused.message.contains(kept_out), "{name}: {}", refused.message);
        }
    }
    kinds
}

#[test]
fn every_recorded_exchange_of_todays_queue_is_understood() {
    let kinds = every_record_of("taskcluster", &["w1", "m1", "m2"]);
    let understood =
        ["artifacts", "claim", "claimed", "claims", "object", "other", "reclaim", "s3", "status", "upload"];
    assert_eq!(kinds, BTreeSet::from(understood));
}

#[test]
fn every_recorded_exchange_of_the_azure_style_queue_is_understood() {
    let kinds = every_record_of("taskcluster-legacy", &["w1", "w2"]);
    assert_eq!(kinds, BTreeSet::from(["claim", "other", "queues", "reclaim", "status"]));
}

#[test]
fn the_lease_of_a_recorded_claim_is_twenty_minutes_by_the_services_own_clock() {
    let records = files("taskcluster", "03-claimWork.txt");
    let exchange = Exchange::parse(&records[0].1);
    let leases: Vec<u64> = json::<WireClaims>(&exchange)
        .tasks
        .into_iter()
        .map(|entry| serde_json::from_str::<WireClaim>(entry.get()).unwrap())
        .map(|claim| claim.check(&worker("w1"), date(&exchange)).unwrap().lease.as_secs())
        .collect();
    assert_eq!(leases, [1199, 1199]);
}

#[test]
fn a_date_of_another_clock_shortens_no_lease_beyond_use_and_lengthens_none() {
    let records = files("taskcluster", "04-reclaimTask.txt");
    let exchange = Exchange::parse(&records[0].1);
    let hours = |hours: i64| jiff::SignedDuration::from_hours(hours);
    let lease = |apart| {
        let reclaim: WireClaim = json(&exchange);
        reclaim.check(&worker("w1"), date(&exchange) + apart).unwrap().lease.as_secs()
    };
    assert_eq!(lease(hours(3)), 1199);
    assert_eq!(lease(hours(-3)), 1199);
    assert_eq!(lease(hours(-48)), 1199);
}

#[test]
fn a_grant_for_another_worker_is_refused() {
    let records = files("taskcluster", "04-reclaimTask.txt");
    let exchange = Exchange::parse(&records[0].1);
    let what = json::<WireClaim>(&exchange).check(&worker("w2"), date(&exchange)).err().unwrap();
    assert!(what.contains("another worker"), "{what}");
}

#[test]
fn every_recorded_answer_of_a_storage_queue_is_understood() {
    let mut told = BTreeSet::new();
    for (name, text) in files("azure-queue", ".http.txt") {
        let exchange = Exchange::parse(&text);
        let understood = azure::read_recorded(&exchange.method, &exchange.body, &answered(&exchange));
        told.insert(format!("{} {} {understood}", &name[..2], exchange.status));
    }
    let expected = [
        "01 200 0 messages",
        "02 200 1 messages",
        "03 400 Rejected",
        "04 204 deleted",
        "05 404 deleted",
        "06 204 deleted",
        "06 400 Rejected",
        "07 200 32 messages",
        "08 400 Rejected",
        "09 400 Rejected",
        "10 200 1 messages",
        "11 400 Rejected",
        "12 403 Stale",
        "13 403 Stale",
        "14 403 Stale",
        "15 403 Stale",
        "16 404 Stale",
        "17 400 Rejected",
        "18 200 1 messages",
        "19 200 1 messages",
    ];
    assert_eq!(told, expected.map(str::to_owned).into());
}

#[test]
fn every_recorded_list_of_messages_is_read_with_its_byte_order_mark_and_spaces() {
    let lists = files("azure-queue", ".xml").into_iter().chain(files("taskcluster-legacy", ".xml"));
    let read: Vec<_> = lists
        .filter(|(_, text)| text.contains("QueueMessagesList"))
        .map(|(name, text)| (name, azure::count_recorded(&text)))
        .collect();
    assert!(read.len() >= 9, "{read:?}");
    for (name, count) in read {
        let expected = match &name[..2] {
            "01" | "21" => 0,
            "07" => 32,
            _ => 1,
        };
        assert_eq!(count, expected, "{name}");
    }
}

#[test]
fn e1_runs_with_a_final_outcome_are_counted_and_released_or_expired_ones_are_not() {
    let run = |id: u32, state: &str, reason: &str| json!({ "runId": id, "state": state, "reasonResolved": reason });
    let reported = |runs: &[Value]| {
        let status: WireStatus = serde_json::from_value(json!({ "taskId": "a", "runs": runs })).unwrap();
        status.reported_runs()
    };
    let (released, expired) = (run(1, "exception", "worker-shutdown"), run(2, "exception", "claim-expired"));
    let running = json!({ "runId": 3, "state": "running" });
    assert_eq!(reported(&[]), 0);
    assert_eq!(reported(&[released.clone(), expired.clone(), running.clone()]), 0);
    for state in [("completed", "completed"), ("failed", "failed"), ("exception", "canceled")] {
        assert_eq!(reported(&[run(0, state.0, state.1), released.clone(), expired.clone(), running.clone()]), 1);
    }
}
