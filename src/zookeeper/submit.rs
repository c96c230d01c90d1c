//! The submitter's side of every dialect: adds a request, waits for its result, cancels it.

use serde_json::{Value, json};
use zookeeper_client::CreateMode;

use super::job_queue::{JobError, JobQueue};
use super::json_object::JsonObject;
use super::{Error, Session};
use crate::source::zookeeper::Dialect;

/// A request to be added.
#[derive(Debug, Clone)]
pub struct Submission {
    /// Whose layout the queue has.
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
        let id = uuid::Uuid::new_v4().simple().to_string();
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
    /// If the session ends, or the result cannot be read.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe: the result stays until it is read, or the session ends.
    pub async fn wait_for_result(&self, session: &Session, dialect: Dialect, id: &str) -> Result<Value, JobError> {
        let path = self.path("results", id);
        session.wait_until_created(&path).await?;
        let found = session.retry(|| session.get(&path)).await?;
        let unreadable = |message: String| JobError::Unreadable { path: path.clone(), message };
        let (data, _) = found.ok_or_else(|| unreadable("another process has removed it".to_owned()))?;
        let pointer: Value = serde_json::from_slice(&data).map_err(|error| unreadable(error.to_string()))?;
        let result = if dialect == Dialect::Native {
            pointer
        } else {
            let data_path = pointer["result_data_path"].as_str().unwrap_or_default().to_owned();
            let data = session.read_shards(&data_path).await?;
            session.delete_tree(&data_path).await?;
            let data = data.ok_or_else(|| unreadable("its data are gone".to_owned()))?;
            serde_json::from_slice(&data).map_err(|error| unreadable(error.to_string()))?
        };
        for folder in ["results", "waiters"] {
            session.delete(&self.path(folder, id)).await?;
        }
        Ok(result)
    }

    /// Asks for the end of a request: it is removed where no worker holds it, and its worker is told otherwise.
    ///
    /// # Errors
    ///
    /// See [`Error`].
    pub async fn cancel(&self, session: &Session, dialect: Dialect, id: &str) -> Result<(), Error> {
        let request = self.path("requests", id);
        if dialect != Dialect::ZuulExecutor {
            return session.delete_tree(&request).await;
        }
        match session.create(&format!("{request}/cancel"), b"", CreateMode::Persistent).await {
            Err(error) if error.cause == zookeeper_client::Error::NodeExists || error.is_no_node() => Ok(()),
            created => created.map(drop),
        }
    }
}

/// Seconds since 1970, as Zuul writes times.
pub(crate) fn unix_seconds() -> f64 {
    jiff::Timestamp::now().as_duration().as_secs_f64()
}
