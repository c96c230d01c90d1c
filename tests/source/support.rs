//! Shared helpers: sources connected to a gremlin, and responses of a queue.

use std::sync::Arc;
use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use journeyman::source::taskcluster::{
    ApiConfig, ArtifactStorage, Config, Credentials, Dialect, Taskcluster, Timeouts,
};
use journeyman::source::{CallError, Claim, Grant, PollBatch, Source as _};
use journeyman_domain::id::{PriorityQueue, Run, TaskId};
use journeyman_domain::refusal::Refusal;
use serde_json::{Value, json};

use crate::support::gremlin::{self, Act, Gremlin};

/// Part of every secret in these tests; must appear in no message.
pub(crate) const CANARY: &str = "CANARY";

pub(crate) const RETRY: Refusal = Refusal::Retry { retry_after: None };

pub(crate) fn settings(root_url: &str, dialect: Dialect) -> Config {
    let token = format!("{CANARY}-own-token");
    Config {
        api: ApiConfig::new(root_url, Credentials::new("worker/own", token.into(), None).ok()),
        dialect,
        task_queue: "prov/wt".into(),
        worker_group: "wg".into(),
        worker_id: "w1".into(),
        artifact_storage: ArtifactStorage::S3,
    }
}

pub(crate) fn source(root_url: &str, dialect: Dialect) -> Taskcluster {
    Taskcluster::new(settings(root_url, dialect)).expect("the settings are good")
}

/// Makes what [`source`] makes, with short timeouts, for endless responses.
pub(crate) fn with_short_timeouts(root_url: &str, dialect: Dialect) -> Taskcluster {
    let mut settings = settings(root_url, dialect);
    let soon = Duration::from_millis(200);
    settings.api.timeouts = Timeouts { call: soon, long_poll: soon, ..Timeouts::default() };
    Taskcluster::new(settings).expect("the settings are good")
}

pub(crate) fn run(task: &str, run: u32) -> Run {
    Run { task: TaskId::parse(task).expect("a good id"), run }
}

fn in_seconds(seconds: i64) -> String {
    (Timestamp::now() + SignedDuration::from_secs(seconds)).to_string()
}

/// A claim for 20 minutes from now.
pub(crate) fn claim(task: &str, run: u32) -> Value {
    let mut claim = reclaim(task, run, "first");
    claim["task"] = json!({ "payload": {}, "expires": "2030-01-01T00:00:00.000Z" });
    claim
}

/// A reclaim for 20 minutes from now, with credentials of this name.
pub(crate) fn reclaim(task: &str, run: u32, credentials: &str) -> Value {
    json!({
        "status": { "taskId": task, "runs": [] },
        "runId": run,
        "workerGroup": "wg",
        "workerId": "w1",
        "takenUntil": in_seconds(1200),
        "credentials": {
            "clientId": format!("task-client/{credentials}"),
            "accessToken": format!("{CANARY}-{credentials}"),
            "certificate": format!("{{\"version\":1,\"signature\":\"{CANARY}\",\"start\":0,\"expiry\":1200000}}"),
        },
    })
}

/// An error response of a Taskcluster service.
pub(crate) fn error(status: u16, code: &str) -> Act {
    let message = format!("It is so.\n\n---\n\n* statusCode: {status}");
    let info = json!({ "payload": { "secret": CANARY } });
    gremlin::json(status, &json!({ "code": code, "message": message, "requestInfo": info }))
}

/// Claims run `T/0` from a gremlin that continues with the script `then`.
pub(crate) async fn claimed(then: impl FnOnce(&str) -> Vec<Act>) -> (Gremlin, Arc<dyn Claim>) {
    claimed_by(then, |_| {}).await
}

/// Makes what [`claimed`] makes, with changed settings.
pub(crate) async fn claimed_by(
    then: impl FnOnce(&str) -> Vec<Act>,
    change: impl FnOnce(&mut Config),
) -> (Gremlin, Arc<dyn Claim>) {
    let gremlin = Gremlin::start(|url| {
        let mut script = vec![gremlin::json(200, &json!({ "tasks": [claim("T", 0)] }))];
        script.extend(then(url));
        script
    })
    .await;
    let mut settings = settings(&gremlin.url(), Dialect::ClaimWork);
    change(&mut settings);
    let source = Taskcluster::new(settings).expect("the settings are good");
    let grant = only(poll(&source).await.expect("the poll is answered"));
    (gremlin, grant.claim)
}

pub(crate) fn only(mut batch: PollBatch) -> Grant {
    assert_eq!((batch.grants.len(), batch.messages.len()), (1, 0), "{batch:?}");
    batch.grants.remove(0)
}

pub(crate) async fn poll(source: &Taskcluster) -> Result<PollBatch, CallError> {
    source.poll(PriorityQueue(0), 4).await
}

/// Polls by claimWork a gremlin that replies with `act`.
pub(crate) async fn polled(act: Act) -> Result<PollBatch, CallError> {
    let gremlin = Gremlin::start(|_| vec![act]).await;
    poll(&source(&gremlin.url(), Dialect::ClaimWork)).await
}

/// Checks that an error reveals no secret, and returns it.
pub(crate) fn discreet<T>(answer: Result<T, CallError>) -> CallError {
    let refused = answer.err().expect("the call is refused");
    let shown = format!("{refused} {refused:?}");
    for secret in [CANARY, "sig=", "requestInfo"] {
        assert!(!shown.contains(secret), "{shown}");
    }
    assert!(!refused.message.contains(['\n', '\r', '\u{1b}']), "{shown}");
    refused
}
