//! One node a task: `requests/ID` holds `{"payload", "precedence", "attempts", "losses", "waits"}`, and `locks/ID` is the ephemeral
//! node of the worker that runs it.
//!
//! A claim creates the lock and counts the attempt, also as a loss until its worker says how it ended; an end removes lock and task
//! and leaves `results/ID` if a submitter waits: each in one transaction. A task is canceled by removing its node.

use std::sync::Arc;

use serde_json::{Value, json};

use super::claim::{self, Held, JobClaim, QueueSession, SourceContext};
use super::queue_watch::QueueWatch;
use crate::source::{CallError, Grant, Granted, RunTerms, SourceFuture};
use crate::task::Results;
use journeyman_domain::id::{Run, TaskId};
use journeyman_domain::limits::{ZOOKEEPER_ATTEMPTS_MAX, ZOOKEEPER_NODE_BYTES_MAX};
use journeyman_domain::outcome::{ExceptionReason, Outcome};
use journeyman_domain::refusal::Refusal;
use journeyman_platform::host::crash_points::crash_point;
use journeyman_platform::zookeeper::json_object::JsonObject;
use journeyman_platform::zookeeper::{CreateMode, Write, client as zk};

struct HeldTask {
    task_path: String,
    lock_path: String,
    result_path: String,
    json: JsonObject,
    version: i32,
    attempts: u32,
    /// The session that reports it has the lock.
    is_locked: bool,
    /// Its end may have been performed without an answer.
    is_end_sent: bool,
}

pub(super) async fn claim(
    source: &Arc<SourceContext>,
    watch: &Arc<QueueWatch>,
    id: &str,
) -> Result<Option<Grant>, CallError> {
    let [task_path, lock_path, result_path] =
        ["requests", "locks", "results"].map(|folder| watch.at.queue.path(folder, id));
    let sent_at = source.clock.now();
    let session = &watch.at.session;
    let Some((data, stat)) = session.get(&task_path).await? else { return Ok(None) };
    let (Some(task), Ok(mut json)) = (TaskId::parse(id), JsonObject::parse(&data)) else {
        tracing::warn!(request = id, "this is no task: its name or its content is not one's; leaving it alone");
        watch.set_aside(id);
        return Ok(None);
    };
    let attempts = json.get::<u32>("attempts").unwrap_or_default().saturating_add(1);
    let run = Run { task, run: attempts - 1 };
    let Some(hold) = watch.hold(&run) else { return Ok(None) };
    let invalid =
        |error: serde_json::Error| CallError { refusal: Refusal::Rejected, message: format!("{task_path}: {error}") };
    let losses = json.get::<u32>("losses").unwrap_or_default();
    json.set("attempts", &attempts).map_err(invalid)?;
    json.set("losses", &losses.saturating_add(1)).map_err(invalid)?;
    let data = json.to_bytes().map_err(invalid)?;
    let worker = json!({ "worker": source.worker_id }).to_string();
    let lock = Write::Create { path: &lock_path, data: worker.as_bytes(), mode: CreateMode::Ephemeral };
    let count = Write::Set { path: &task_path, data: &data, version: Some(stat.version) };
    match session.multi(&[lock, count]).await {
        Ok(_) => {}
        Err(failed)
            if matches!(failed.error.cause, zk::Error::NodeExists | zk::Error::BadVersion | zk::Error::NoNode) =>
        {
            return Ok(None);
        }
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
    let (is_locked, is_end_sent) = (true, false);
    let mut held = HeldTask { task_path, lock_path, result_path, json, version, attempts, is_locked, is_end_sent };
    if losses >= ZOOKEEPER_ATTEMPTS_MAX {
        hold.set_settling();
        tracing::error!(
            alert = "attempts-exhausted", claim.run = %run,
            "[alert operator] giving up a task: {losses} workers in a row have claimed it and died or lost their session; see their logs for the cause"
        );
        let reason = format!("it was claimed {losses} times in a row by a worker that died or lost its session");
        let given_up = HeldTask::result(Outcome::Exception(ExceptionReason::InternalError), Value::Null, Some(&reason));
        let ended = held.end(&watch.at, &given_up).await;
        if ended.is_err() {
            session.retry(|| session.delete(&held.lock_path)).await?;
        }
        return ended.map(|()| None);
    }
    let claim = JobClaim::new(run.clone(), source, watch, hold, Box::new(held));
    Ok(Some(Grant {
        run,
        lease: Granted { sent_at, length: session.timeout() },
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
    fn result(outcome: Outcome, value: Value, reason: Option<&str>) -> Vec<u8> {
        let result = json!({ "outcome": outcome.to_string(), "result": value, "reason": reason });
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

    async fn end(&mut self, at: &QueueSession, result: &[u8]) -> Result<(), CallError> {
        let session = &at.session;
        let unlock = Write::Delete { path: &self.lock_path, version: None };
        let remove = Write::Delete { path: &self.task_path, version: Some(self.version) };
        let store = Write::Create { path: &self.result_path, data: result, mode: CreateMode::Persistent };
        let waits = self.json.get::<bool>("waits").unwrap_or_default();
        let writes = [Some(remove), self.is_locked.then_some(unlock), waits.then_some(store)];
        let writes: Vec<Write<'_>> = writes.into_iter().flatten().collect();
        let Err(failed) = session.multi(&writes).await else { return Ok(()) };
        let gone = |why| Err(claim::gone(&format!("{}: {why}", self.task_path)));
        match (failed.index, failed.error.cause.clone()) {
            (Some(0), zk::Error::NoNode) => {
                // The transaction would have removed the lock too; a cancel removes the task alone.
                let is_locked = self.is_locked && session.retry(|| session.stat(&self.lock_path)).await?.is_some();
                if is_locked {
                    session.retry(|| session.delete(&self.lock_path)).await?;
                }
                if self.is_end_sent && !is_locked { Ok(()) } else { gone("its node is gone") }
            }
            (Some(_), zk::Error::NodeExists) => {
                session.delete(&self.result_path).await?;
                Err(CallError::retry(failed.error.to_string()))
            }
            (Some(_), _) => gone("another process has changed its node"),
            (None, _) => {
                self.is_end_sent |= failed.error.is_unanswered() || session.is_ended();
                Err(failed.error.into())
            }
        }
    }

    /// Gives the lock up, and says that its worker has not died.
    async fn give_back(&mut self, at: &QueueSession) -> Result<(), CallError> {
        let session = &at.session;
        let text = |error: serde_json::Error| claim::gone(&error.to_string());
        self.json.set("losses", &0).map_err(text)?;
        let data = self.json.to_bytes().map_err(text)?;
        let count = Write::Set { path: &self.task_path, data: &data, version: Some(self.version) };
        let unlock = Write::Delete { path: &self.lock_path, version: None };
        let writes = [count, unlock];
        match session.multi(if self.is_locked { &writes } else { &writes[..1] }).await {
            Ok(()) => Ok(()),
            // It was canceled, or the connection was lost: the lock matters more than the count.
            Err(_) if self.is_locked => Ok(session.retry(|| session.delete(&self.lock_path)).await?),
            Err(failed) => Err(failed.error.into()),
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

    /// A claim in between would have changed the version of the task, so that its end needs no lock.
    fn reclaim<'a>(&'a mut self, _at: &'a QueueSession) -> SourceFuture<'a, ()> {
        self.is_locked = false;
        Box::pin(std::future::ready(Ok(())))
    }

    fn settle<'a>(&'a mut self, at: &'a QueueSession, outcome: Outcome, results: &'a Results) -> SourceFuture<'a, ()> {
        Box::pin(async move {
            if self.goes_back(outcome) {
                return self.give_back(at).await;
            }
            let value = results.final_reply().map(|reply| match serde_json::from_slice::<Value>(&reply.body) {
                Ok(value) => value,
                Err(_) => String::from_utf8_lossy(&reply.body).into_owned().into(),
            });
            let result = Self::result(outcome, value.unwrap_or_default(), results.failure_reason().as_deref());
            self.end(at, &result).await
        })
    }

    fn abandon(mut self: Box<Self>, at: QueueSession) -> SourceFuture<'static, ()> {
        Box::pin(async move { self.give_back(&at).await })
    }
}
