//! The calls of people and their tools: creating, watching, canceling and listing tasks, and reading artifacts.

use std::fmt;
use std::time::Duration;

use reqwest::{Method, Response};
use serde::Deserialize;
use serde_json::Value;

use super::api::{Api, Call, Patience, answered, segment};
use super::refuse::{by_status, refused, retry, transport};
use crate::domain::id::{Run, TaskId};
use crate::domain::refusal::Refusal;
use crate::limits::{ARTIFACT_HOPS_MAX, ARTIFACT_TRANSFER_TIMEOUT_MAX};
use crate::source::Refused;

/// A page of a listing.
#[derive(Debug, Clone, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Page {
    /// The entries, as the service lists them.
    #[serde(alias = "tasks", alias = "artifacts")]
    pub entries: Vec<Value>,
    /// What to ask the next page with; `None` on the last one.
    pub continuation_token: Option<String>,
}

/// The content of an artifact, read piece by piece.
pub struct Download {
    operation: String,
    response: Response,
    /// How long the next piece may take.
    patience: Duration,
}

impl fmt::Debug for Download {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "Download({})", self.operation)
    }
}

impl Download {
    /// The next piece, or `None` at the end.
    ///
    /// # Errors
    ///
    /// `Retry` where the connection breaks off, or where the next piece takes longer than an ordinary call may.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe: no piece is lost.
    pub async fn piece(&mut self) -> Result<Option<Vec<u8>>, Refused> {
        match tokio::time::timeout(self.patience, self.response.chunk()).await {
            Ok(Ok(piece)) => Ok(piece.map(Vec::from)),
            Ok(Err(error)) => Err(transport(&self.operation, error)),
            Err(_) => Err(retry(format!("{}: its content stopped coming", self.operation))),
        }
    }
}

impl Api {
    /// createTask: answers with the task's status.
    ///
    /// # Errors
    ///
    /// `Gone` where another task of this id exists, `Rejected` where the definition is not accepted.
    pub async fn create_task(&self, task: &TaskId, definition: Value) -> Result<Value, Refused> {
        let call = Call::queue(format!("createTask {task}"), Method::PUT, of(task, "")).body(definition);
        self.status_of(call).await
    }

    /// status: answers with the task's status.
    ///
    /// # Errors
    ///
    /// `Gone` where there is no such task.
    pub async fn task_status(&self, task: &TaskId) -> Result<Value, Refused> {
        self.status_of(Call::queue(format!("status of {task}"), Method::GET, of(task, "/status"))).await
    }

    /// cancelTask: answers with the task's status.
    ///
    /// # Errors
    ///
    /// `Gone` where there is no such task, or where its deadline is over.
    pub async fn cancel_task(&self, task: &TaskId) -> Result<Value, Refused> {
        self.status_of(Call::queue(format!("cancelTask {task}"), Method::POST, of(task, "/cancel"))).await
    }

    /// rerunTask: answers with the task's status.
    ///
    /// # Errors
    ///
    /// `Gone` where there is no such task, or where its deadline is over.
    pub async fn rerun_task(&self, task: &TaskId) -> Result<Value, Refused> {
        self.status_of(Call::queue(format!("rerunTask {task}"), Method::POST, of(task, "/rerun"))).await
    }

    /// task: answers with the definition.
    ///
    /// # Errors
    ///
    /// `Gone` where there is no such task.
    pub async fn task_definition(&self, task: &TaskId) -> Result<Value, Refused> {
        let call = Call::queue(format!("definition of {task}"), Method::GET, of(task, ""));
        self.call(call).await?.json()
    }

    /// listPendingTasks: one page of the tasks that wait in a queue.
    ///
    /// # Errors
    ///
    /// `Denied` where the scope `queue:pending-list:<task queue>` is missing.
    pub async fn pending_tasks(&self, task_queue: &str, token: Option<&str>) -> Result<Page, Refused> {
        let path = format!("/task-queues/{}/pending", segment(task_queue));
        self.page(format!("listPendingTasks of {task_queue}"), path, token).await
    }

    /// listClaimedTasks: one page of the tasks of a queue that workers have claimed.
    ///
    /// # Errors
    ///
    /// `Denied` where the scope `queue:claimed-list:<task queue>` is missing.
    pub async fn claimed_tasks(&self, task_queue: &str, token: Option<&str>) -> Result<Page, Refused> {
        let path = format!("/task-queues/{}/claimed", segment(task_queue));
        self.page(format!("listClaimedTasks of {task_queue}"), path, token).await
    }

    /// listArtifacts: one page of what a run left behind.
    ///
    /// # Errors
    ///
    /// `Gone` where there is no such run.
    pub async fn artifacts(&self, run: &Run, token: Option<&str>) -> Result<Page, Refused> {
        let path = of(&run.task, &format!("/runs/{}/artifacts", run.run));
        self.page(format!("listArtifacts of {run}"), path, token).await
    }

    /// getArtifact, followed to where its content is.
    ///
    /// # Errors
    ///
    /// `Gone` where there is no such artifact.
    pub async fn artifact(&self, run: &Run, name: &str) -> Result<Download, Refused> {
        let operation = format!("artifact {} of {run}", super::refuse::clean(name));
        let path = of(&run.task, &format!("/runs/{}/artifacts/{}", run.run, segment(name)));
        let mut response = self.send(transfer(&operation, path)).await?;
        for _ in 0..ARTIFACT_HOPS_MAX {
            if response.status().as_u16() != 303 {
                let patience = self.timeouts().call;
                return Ok(Download { operation, response, patience });
            }
            response = self.hop(&operation, &response).await?;
        }
        Err(retry(format!("{operation}: after {ARTIFACT_HOPS_MAX} hops it still leads elsewhere")))
    }

    /// Goes where an artifact's answer leads: signed within the queue service, unsigned everywhere else.
    async fn hop(&self, operation: &str, from: &Response) -> Result<Response, Refused> {
        let url = from
            .headers()
            .get(reqwest::header::LOCATION)
            .and_then(|value| value.to_str().ok())
            .and_then(|text| from.url().join(text).ok())
            .ok_or_else(|| retry(format!("{operation}: it leads nowhere that may be followed")))?;
        self.reach().judge(&url).map_err(|what| retry(format!("{operation}: its place {what}")))?;
        if let Some(path) = url.as_str().strip_prefix(self.queue_base())
            && path.starts_with("/task/")
        {
            return Ok(self.send(transfer(operation, path.to_owned())).await?);
        }
        let request = self.http().get(url).timeout(ARTIFACT_TRANSFER_TIMEOUT_MAX);
        let response = self.head(operation, request).await?;
        if response.status().is_success() || response.status().as_u16() == 303 {
            return Ok(response);
        }
        let answered = answered(response).await;
        let what = format!("{operation}: its storage answered {}", answered.status);
        Err(refused(by_status(answered.status, answered.after), what))
    }

    async fn status_of(&self, call: Call<'_>) -> Result<Value, Refused> {
        let operation = call.operation.clone();
        let mut reply: Value = self.call(call).await?.json()?;
        match reply.get_mut("status").map(Value::take) {
            Some(status) => Ok(status),
            None => Err(refused(Refusal::Retry { after: None }, format!("{operation}: the answer holds no status"))),
        }
    }

    async fn page(&self, operation: String, mut path: String, token: Option<&str>) -> Result<Page, Refused> {
        if let Some(token) = token {
            path.push_str("?continuationToken=");
            path.push_str(&urlencoding::encode(token));
        }
        let call = Call::queue(operation, Method::GET, path);
        self.call(call).await?.json()
    }

    /// pendingTasks: how many tasks wait in a queue, as the service estimates it.
    ///
    /// # Errors
    ///
    /// `Denied` where the scope is missing.
    pub async fn pending_count(&self, task_queue: &str) -> Result<u64, Refused> {
        let path = format!("/pending/{}", segment(task_queue));
        let call = Call::queue(format!("pendingTasks of {task_queue}"), Method::GET, path);
        let reply: Value = self.call(call).await?.json()?;
        Ok(reply.get("pendingTasks").and_then(Value::as_u64).unwrap_or(0))
    }
}

fn transfer(operation: &str, path: String) -> Call<'static> {
    Call { patience: Patience::Transfer, ..Call::queue(operation.to_owned(), Method::GET, path) }
}

fn of(task: &TaskId, rest: &str) -> String {
    format!("/task/{}{rest}", segment(task.as_str()))
}
