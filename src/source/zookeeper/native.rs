//! One node a task: `requests/ID` holds `{"payload", "precedence", "attempts", "waits"}`, and `locks/ID` is the ephemeral node of
//! the worker that runs it.
//!
//! A claim creates the lock and counts the attempt, and an end removes lock and task and leaves `results/ID` if a submitter waits:
//! each in one transaction. A task is canceled by removing its node.

use std::sync::Arc;

use serde_json::{Value, json};

use super::claim::{Held, JobClaim};
use super::job_source::SourceInner;
use super::queue_watch::QueueWatch;
use crate::source::{CallError, Grant, Granted, RunTerms, SourceFuture};
use crate::task::Results;
use journeyman_domain::id::{Run, TaskId};
use journeyman_domain::limits::{ZOOKEEPER_ATTEMPTS_MAX, ZOOKEEPER_NODE_BYTES_MAX};
use journeyman_domain::outcome::{ExceptionReason, Outcome};
use journeyman_domain::refusal::Refusal;
use journeyman_platform::host::crash_points::crash_point;
use journeyman_platform::zookeeper::json_object::JsonObject;
use journeyman_platform::zookeeper::{CreateMode, Error, Write, client as zk};

struct HeldTask {
    task_path: String,
    lock_path: String,
    result_path: String,
    json: JsonObject,
    version: i32,
    attempts: u32,
}

pub(super) async fn claim(
    source: &Arc<SourceInner>,
    watch: &Arc<QueueWatch>,
    id: &str,
) -> Result<Option<Grant>, CallError> {
    let [task_path, lock_path, result_path] =
        ["requests", "locks", "results"].map(|folder| watch.queue.path(folder, id));
    let sent_at = source.clock.now();
    let session = &watch.session;
    let Some((data, stat)) = session.get(&task_path).await? else { return Ok(None) };
    let (Some(task), Ok(mut json)) = (TaskId::parse(id), JsonObject::parse(&data)) else {
        tracing::warn!(request = id, "this is no task: its name or its content is not one's; leaving it alone");
        return Ok(None);
    };
    let attempts = json.get::<u32>("attempts").unwrap_or_default().saturating_add(1);
    let run = Run { task, run: attempts - 1 };
    let Some(hold) = watch.hold(&run) else { return Ok(None) };
    let invalid =
        |error: serde_json::Error| CallError { refusal: Refusal::Rejected, message: format!("{task_path}: {error}") };
    json.set("attempts", &attempts).map_err(invalid)?;
    let data = json.to_bytes().map_err(invalid)?;
    let worker = json!({ "worker": source.config.worker_id }).to_string();
    let lock = Write::Create { path: &lock_path, data: worker.as_bytes(), mode: CreateMode::Ephemeral };
    let count = Write::Set { path: &task_path, data: &data, version: Some(stat.version) };
    match session.multi(&[lock, count]).await {
        Ok(_) => {}
        Err(failed) if failed.index.is_some() => return Ok(None),
        // The lock tells whether the transaction was performed.
        Err(failed) if failed.error.is_unanswered() => {
            let stat = session.retry(|| session.stat(&lock_path)).await?;
            if stat.is_none_or(|stat| stat.ephemeral_owner != session.id()) {
                return Err(failed.error.into());
            }
        }
        Err(failed) => return Err(failed.error.into()),
    }
    crash_point("zookeeper-claimed");
    let payload = json.get::<Value>("payload").unwrap_or_default();
    let version = stat.version + 1;
    let held = HeldTask { task_path, lock_path, result_path, json, version, attempts };
    let claim = JobClaim::new(run.clone(), source, watch, hold, Box::new(held));
    Ok(Some(Grant {
        run,
        lease: Granted { sent_at, length: watch.session.timeout() },
        terms: RunTerms { deadline: None, retries_left: Some(ZOOKEEPER_ATTEMPTS_MAX.saturating_sub(attempts)) },
        queued_for: None,
        task: json!({ "payload": payload }).into(),
        payload_error: None,
        results: Some(claim.results()),
        claim,
    }))
}

impl HeldTask {
    /// What a waiting client reads.
    fn result(outcome: Outcome, results: &Results) -> Vec<u8> {
        let value = results.final_reply().map(|reply| match serde_json::from_slice::<Value>(&reply.body) {
            Ok(value) => value,
            Err(_) => String::from_utf8_lossy(&reply.body).into_owned().into(),
        });
        let result = json!({ "outcome": outcome.to_string(), "result": value, "reason": results.failure_reason() });
        let text = result.to_string();
        // Text may be longer as JSON.
        if text.len() <= ZOOKEEPER_NODE_BYTES_MAX {
            return text.into_bytes();
        }
        let reason = format!("its result has {} bytes; a node may have 1,000,000", text.len());
        json!({ "outcome": Outcome::Failed.to_string(), "result": null, "reason": reason }).to_string().into_bytes()
    }

    /// True if others may try again.
    fn goes_back(&self, outcome: Outcome) -> bool {
        match outcome {
            Outcome::Exception(ExceptionReason::WorkerShutdown) => true,
            Outcome::Exception(ExceptionReason::IntermittentTask) => self.attempts < ZOOKEEPER_ATTEMPTS_MAX,
            Outcome::Completed | Outcome::Failed | Outcome::Exception(_) | Outcome::Deferred => false,
        }
    }

    async fn end(&self, watch: &QueueWatch, outcome: Outcome, results: &Results) -> Result<(), CallError> {
        let session = &watch.session;
        let result = Self::result(outcome, results);
        let unlock = Write::Delete { path: &self.lock_path, version: None };
        let remove = Write::Delete { path: &self.task_path, version: Some(self.version) };
        let store = Write::Create { path: &self.result_path, data: &result, mode: CreateMode::Persistent };
        let waits = self.json.get::<bool>("waits").unwrap_or_default();
        let writes = if waits { &[remove, unlock, store][..] } else { &[remove, unlock][..] };
        let failed = match session.multi(writes).await {
            Ok(_) => return Ok(()),
            Err(failed) => failed,
        };
        let gone =
            |why| Err(CallError { refusal: Refusal::Gone, message: format!("report on {}: {why}", self.task_path) });
        match (failed.index, failed.error.cause.clone()) {
            (Some(0), zk::Error::NoNode) => {
                // Either the answer of an earlier transaction was lost, or the task was canceled.
                session.retry(|| session.delete(&self.lock_path)).await?;
                if waits && session.stat(&self.result_path).await?.is_some() {
                    Ok(())
                } else {
                    gone("its node is gone")
                }
            }
            (Some(0 | 1), _) => gone("another process has changed its node"),
            (Some(_), zk::Error::NodeExists) => {
                session.delete(&self.result_path).await?;
                Err(CallError::retry(failed.error.to_string()))
            }
            _ => Err(failed.error.into()),
        }
    }
}

impl Held for HeldTask {
    /// The result is one node, with the outcome.
    fn result_bytes_max(&self) -> usize {
        ZOOKEEPER_NODE_BYTES_MAX - (64 << 10)
    }

    fn lock_path(&self) -> String {
        self.lock_path.clone()
    }

    fn settle<'a>(&'a mut self, watch: &'a QueueWatch, outcome: Outcome, results: &'a Results) -> SourceFuture<'a, ()> {
        Box::pin(async move {
            if !self.goes_back(outcome) {
                return self.end(watch, outcome, results).await;
            }
            let session = &watch.session;
            Ok(session.retry(|| session.delete(&self.lock_path)).await?)
        })
    }

    fn abandon(self: Box<Self>, watch: Arc<QueueWatch>) -> SourceFuture<'static, ()> {
        Box::pin(async move {
            let session = &watch.session;
            let deleted: Result<(), Error> = session.retry(|| session.delete(&self.lock_path)).await;
            Ok(deleted?)
        })
    }
}
