//! The calls of people and their tools: creating, watching, canceling and listing tasks, and reading artifacts.

use std::fmt;
use std::time::Duration;

use reqwest::{Method, Response};
use serde::Deserialize;
use serde_json::Value;

use super::error_response::{call_error, classify_status, retryable, transport_error};
use super::transport::{Api, ApiRequest, TimeoutClass, encode_segment, read_error_response};
use crate::domain::id::{Run, TaskId};
use crate::domain::refusal::Refusal;
use crate::limits::{ARTIFACT_HOPS_MAX, ARTIFACT_TRANSFER_TIMEOUT_MAX};
use crate::source::CallError;

/// A page of a listing.
#[derive(Debug, Clone, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ListPage {
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
    chunk_timeout: Duration,
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
    pub async fn next_chunk(&mut self) -> Result<Option<Vec<u8>>, CallError> {
        match tokio::time::timeout(self.chunk_timeout, self.response.chunk()).await {
            Ok(Ok(piece)) => Ok(piece.map(Vec::from)),
            Ok(Err(error)) => Err(transport_error(&self.operation, error)),
            Err(_) => Err(retryable(format!("{}: its content stopped coming", self.operation))),
        }
    }
}

impl Api {
    /// createTask: answers with the task's status.
    ///
    /// # Errors
    ///
    /// `Gone` where another task of this id exists, `Rejected` where the definition is not accepted.
    pub async fn create_task(&self, task: &TaskId, definition: Value) -> Result<Value, CallError> {
        let call =
            ApiRequest::to_queue(format!("createTask {task}"), Method::PUT, task_path(task, "")).body(definition);
        self.call_for_status(call).await
    }

    /// status: answers with the task's status.
    ///
    /// # Errors
    ///
    /// `Gone` where there is no such task.
    pub async fn task_status(&self, task: &TaskId) -> Result<Value, CallError> {
        self.call_for_status(ApiRequest::to_queue(format!("status of {task}"), Method::GET, task_path(task, "/status")))
            .await
    }

    /// cancelTask: answers with the task's status.
    ///
    /// # Errors
    ///
    /// `Gone` where there is no such task, or where its deadline is over.
    pub async fn cancel_task(&self, task: &TaskId) -> Result<Value, CallError> {
        self.call_for_status(ApiRequest::to_queue(
            format!("cancelTask {task}"),
            Method::POST,
            task_path(task, "/cancel"),
        ))
        .await
    }

    /// rerunTask: answers with the task's status.
    ///
    /// # Errors
    ///
    /// `Gone` where there is no such task, or where its deadline is over.
    pub async fn rerun_task(&self, task: &TaskId) -> Result<Value, CallError> {
        self.call_for_status(ApiRequest::to_queue(format!("rerunTask {task}"), Method::POST, task_path(task, "/rerun")))
            .await
    }

    /// task: answers with the definition.
    ///
    /// # Errors
    ///
    /// `Gone` where there is no such task.
    pub async fn task_definition(&self, task: &TaskId) -> Result<Value, CallError> {
        let call = ApiRequest::to_queue(format!("definition of {task}"), Method::GET, task_path(task, ""));
        self.call(call).await?.json()
    }

    /// listPendingTasks: one page of the tasks that wait in a queue.
    ///
    /// # Errors
    ///
    /// `Denied` where the scope `queue:pending-list:<task queue>` is missing.
    pub async fn pending_tasks(&self, task_queue: &str, token: Option<&str>) -> Result<ListPage, CallError> {
        let path = format!("/task-queues/{}/pending", encode_segment(task_queue));
        self.list_page(format!("listPendingTasks of {task_queue}"), path, token).await
    }

    /// listClaimedTasks: one page of the tasks of a queue that workers have claimed.
    ///
    /// # Errors
    ///
    /// `Denied` where the scope `queue:claimed-list:<task queue>` is missing.
    pub async fn claimed_tasks(&self, task_queue: &str, token: Option<&str>) -> Result<ListPage, CallError> {
        let path = format!("/task-queues/{}/claimed", encode_segment(task_queue));
        self.list_page(format!("listClaimedTasks of {task_queue}"), path, token).await
    }

    /// listArtifacts: one page of what a run left behind.
    ///
    /// # Errors
    ///
    /// `Gone` where there is no such run.
    pub async fn artifacts(&self, run: &Run, token: Option<&str>) -> Result<ListPage, CallError> {
        let path = task_path(&run.task, &format!("/runs/{}/artifacts", run.run));
        self.list_page(format!("listArtifacts of {run}"), path, token).await
    }

    /// getArtifact, followed to where its content is.
    ///
    /// # Errors
    ///
    /// `Gone` where there is no such artifact.
    pub async fn artifact(&self, run: &Run, name: &str) -> Result<Download, CallError> {
        let operation = format!("artifact {} of {run}", super::error_response::sanitize(name));
        let path = task_path(&run.task, &format!("/runs/{}/artifacts/{}", run.run, encode_segment(name)));
        let mut response = self.send(transfer_request(&operation, path)).await?;
        for _ in 0..ARTIFACT_HOPS_MAX {
            if response.status().as_u16() != 303 {
                let patience = self.timeouts().call;
                return Ok(Download { operation, response, chunk_timeout: patience });
            }
            response = self.follow_redirect(&operation, &response).await?;
        }
        Err(retryable(format!("{operation}: after {ARTIFACT_HOPS_MAX} hops it still leads elsewhere")))
    }

    /// Goes where an artifact's answer leads: signed within the queue service, unsigned everywhere else.
    async fn follow_redirect(&self, operation: &str, from: &Response) -> Result<Response, CallError> {
        let url = from
            .headers()
            .get(reqwest::header::LOCATION)
            .and_then(|value| value.to_str().ok())
            .and_then(|text| from.url().join(text).ok())
            .ok_or_else(|| retryable(format!("{operation}: it leads nowhere that may be followed")))?;
        self.address_policy().check_url(&url).map_err(|what| retryable(format!("{operation}: its place {what}")))?;
        if let Some(path) = url.as_str().strip_prefix(self.queue_base_url())
            && path.starts_with("/task/")
        {
            return Ok(self.send(transfer_request(operation, path.to_owned())).await?);
        }
        let request = self.http().get(url).timeout(ARTIFACT_TRANSFER_TIMEOUT_MAX);
        let response = self.send_for_head(operation, request).await?;
        if response.status().is_success() || response.status().as_u16() == 303 {
            return Ok(response);
        }
        let answered = read_error_response(response).await;
        let what = format!("{operation}: its storage answered {}", answered.status);
        Err(call_error(classify_status(answered.status, answered.retry_after), what))
    }

    async fn call_for_status(&self, call: ApiRequest<'_>) -> Result<Value, CallError> {
        let operation = call.operation.clone();
        let mut reply: Value = self.call(call).await?.json()?;
        match reply.get_mut("status").map(Value::take) {
            Some(status) => Ok(status),
            None => Err(call_error(
                Refusal::Retry { retry_after: None },
                format!("{operation}: the answer holds no status"),
            )),
        }
    }

    async fn list_page(&self, operation: String, mut path: String, token: Option<&str>) -> Result<ListPage, CallError> {
        if let Some(token) = token {
            path.push_str("?continuationToken=");
            path.push_str(&urlencoding::encode(token));
        }
        let call = ApiRequest::to_queue(operation, Method::GET, path);
        self.call(call).await?.json()
    }

    /// pendingTasks: how many tasks wait in a queue, as the service estimates it.
    ///
    /// # Errors
    ///
    /// `Denied` where the scope is missing.
    pub async fn pending_count(&self, task_queue: &str) -> Result<u64, CallError> {
        let path = format!("/pending/{}", encode_segment(task_queue));
        let call = ApiRequest::to_queue(format!("pendingTasks of {task_queue}"), Method::GET, path);
        let reply: Value = self.call(call).await?.json()?;
        Ok(reply.get("pendingTasks").and_then(Value::as_u64).unwrap_or(0))
    }
}

fn transfer_request(operation: &str, path: String) -> ApiRequest<'static> {
    ApiRequest {
        timeout_class: TimeoutClass::Transfer,
        ..ApiRequest::to_queue(operation.to_owned(), Method::GET, path)
    }
}

fn task_path(task: &TaskId, rest: &str) -> String {
    format!("/task/{}{rest}", encode_segment(task.as_str()))
}
