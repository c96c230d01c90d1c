//! The submitter's side of every dialect: adds a request, waits for its result, cancels it.

use std::sync::Arc;

use serde::Serialize;
use serde_json::{Value, json};

use super::client::CreateMode;
use super::event_queue::{EventQueue, event};
use super::job_queue::{JobError, JobQueue, JobRequest, RequestState};
use super::json_object::JsonObject;
use super::lock::{HeldLock, LockMode};
use super::{Dialect, Session};
use journeyman_domain::job_requests::task_name;

/// A request to be added.
#[derive(Debug, Clone)]
pub struct Submission {
    /// The system whose layout the queue has.
    pub dialect: Dialect,
    /// What the handler gets.
    pub payload: Value,
    /// The lowest is first.
    pub precedence: i64,
    /// Further keys of the request, such as `tenant_name`; they replace those that are set here.
    pub fields: serde_json::Map<String, Value>,
    /// Whether the result is waited for. Builds have none: their result is an event.
    pub waits: bool,
}

/// What a cancel did.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum CancelResult {
    /// The request has ended: no worker will run it, or its worker sees that it is gone.
    Canceled,
    /// The worker of a build was asked to stop it, and will end it.
    Requested,
    /// There was nothing to cancel.
    Gone,
}

impl JobQueue {
    /// Adds a request and returns its id.
    ///
    /// # Errors
    ///
    /// See [`JobError`].
    ///
    /// # Cancel safety
    ///
    /// Not cancel safe: the request may be there.
    pub async fn add(&self, session: &Session, submission: &Submission) -> Result<String, JobError> {
        self.ensure(session).await?;
        let id = match submission.dialect {
            Dialect::Native => task_name(submission.precedence, &uuid::Uuid::now_v7().simple().to_string()),
            Dialect::ZuulMerger | Dialect::ZuulExecutor => uuid::Uuid::new_v4().simple().to_string(),
        };
        let waits = submission.waits && submission.dialect != Dialect::ZuulExecutor;
        let payload = &submission.payload;
        if waits {
            // First: a result without a waiter is removed.
            session.create(&self.path("waiters", &id), b"", CreateMode::Ephemeral).await?;
        }
        if submission.dialect == Dialect::Native {
            let task =
                json!({ "attempts": 0, "payload": payload, "precedence": submission.precedence, "waits": waits });
            let path = self.path("requests", &id);
            session.create(&path, task.to_string().as_bytes(), CreateMode::Persistent).await?;
            return Ok(id);
        }
        let mut request = json!({
            "build_set_uuid": null, "event_id": null, "pipeline_name": null, "precedence": submission.precedence,
            "result_path": waits.then(|| self.path("results", &id)), "span_context": null, "state": "requested",
            "tenant_name": null, "uuid": id,
        });
        let own = match submission.dialect {
            Dialect::ZuulExecutor => json!({ "job_uuid": null, "worker_info": null, "zone": null }),
            Dialect::ZuulMerger | Dialect::Native => json!({ "job_type": "merge", "span_info": null }),
        };
        if let (Value::Object(request), Value::Object(own)) = (&mut request, own) {
            request.extend(own);
            request.extend(submission.fields.clone());
        }
        let unreadable =
            |error: serde_json::Error| JobError::Unreadable { path: id.clone(), message: error.to_string() };
        let request: JsonObject = serde_json::from_value(request).map_err(unreadable)?;
        self.submit(session, &id, &request, payload.to_string().as_bytes()).await?;
        Ok(id)
    }

    /// Waits for the result of a request and removes it.
    ///
    /// # Errors
    ///
    /// If the session ends, the request was canceled, or the result cannot be read.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe: the result stays until it is read, or the session ends.
    pub async fn wait_for_result(&self, session: &Session, dialect: Dialect, id: &str) -> Result<Value, JobError> {
        let (path, waiter) = (self.path("results", id), self.path("waiters", id));
        tokio::select! {
            biased;
            created = session.wait_until_created(&path) => created?,
            gone = session.wait_until_deleted(&waiter) => gone?,
        }
        let found = session.retry(|| session.get(&path)).await?;
        let unreadable = |message: String| JobError::Unreadable { path: path.clone(), message };
        let (data, _) = found.ok_or_else(|| unreadable("the request was canceled".to_owned()))?;
        let pointer: Value = serde_json::from_slice(&data).map_err(|error| unreadable(error.to_string()))?;
        let result = if dialect == Dialect::Native {
            pointer
        } else {
            let data_path = pointer["result_data_path"].as_str().unwrap_or_default().to_owned();
            let data = session.read_shards(&data_path).await?;
            session.retry(|| session.delete_tree(&data_path)).await?;
            let data = data.ok_or_else(|| unreadable("its data are gone".to_owned()))?;
            serde_json::from_slice(&data).map_err(|error| unreadable(error.to_string()))?
        };
        let leftovers = ["results", "waiters"].map(|folder| self.path(folder, id));
        for path in &leftovers {
            session.retry(|| session.delete(path)).await?;
        }
        Ok(result)
    }

    /// Ends a request. A merge or a task is removed, which its worker sees. A build that no worker holds is completed as `CANCELED`,
    /// as a scheduler does it; of another one the worker is asked to stop it.
    ///
    /// # Errors
    ///
    /// See [`JobError`].
    ///
    /// # Cancel safety
    ///
    /// Not cancel safe: the request may stay locked until the session ends.
    pub async fn cancel(&self, session: &Arc<Session>, dialect: Dialect, id: &str) -> Result<CancelResult, JobError> {
        if dialect != Dialect::ZuulExecutor {
            let is_gone = session.stat(&self.path("requests", id)).await?.is_none();
            for folder in ["requests", "params", "waiters"] {
                session.delete_tree(&self.path(folder, id)).await?;
            }
            return Ok(if is_gone { CancelResult::Gone } else { CancelResult::Canceled });
        }
        if session.stat(&self.path("requests", id)).await?.is_none() {
            return Ok(CancelResult::Gone);
        }
        let Some(lock) = HeldLock::try_take(session, &self.path("locks", id), LockMode::Exclusive).await? else {
            return match session.create(&self.cancel_flag(id), b"", CreateMode::Persistent).await {
                Err(error) if error.is_no_node() => Ok(CancelResult::Gone),
                Err(error) if error.cause != super::client::Error::NodeExists => Err(error.into()),
                Ok(_) | Err(_) => Ok(CancelResult::Requested),
            };
        };
        // The request as it is now that no worker can take it.
        let completed = match self.read(session, id).await {
            Ok(Some(request)) if request.state() != Some(RequestState::Completed) => {
                self.complete_unlocked_build(session, request, "CANCELED").await
            }
            other => other.map(|_| false),
        };
        lock.release().await?;
        Ok(if completed? { CancelResult::Canceled } else { CancelResult::Gone })
    }

    /// Completes a build whose worker is gone or never was. `false` if another process has completed or removed it.
    pub(super) async fn complete_unlocked_build(
        &self,
        session: &Session,
        mut request: JobRequest,
        result: &str,
    ) -> Result<bool, JobError> {
        let id = request.id.clone();
        let text = |key: &str| request.json.get::<String>(key);
        let data = json!({
            "build_uuid": id, "build_set_uuid": text("build_set_uuid"), "job_uuid": text("job_uuid"),
            "build_request_ref": self.path("requests", &id), "zuul_event_id": text("event_id"),
            "data": { "result": result, "end_time": unix_seconds() },
        });
        let Some((tenant, pipeline)) = text("tenant_name").zip(text("pipeline_name")) else {
            return self.set_state(session, &mut request, RequestState::Completed).await;
        };
        let events = EventQueue::of_pipeline(&tenant, &pipeline);
        self.complete_with_event(session, &mut request, &events, event("BuildCompletedEvent", data)).await
    }
}

/// Seconds since 1970, as Zuul writes times.
pub fn unix_seconds() -> f64 {
    jiff::Timestamp::now().as_duration().as_secs_f64()
}
