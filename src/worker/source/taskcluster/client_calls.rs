//! Calls for users and tools: create, watch, cancel and list tasks, and download artifacts.

use std::io::Write as _;
use std::time::Duration;

use bytes::Bytes;
use flate2::write::MultiGzDecoder;
use reqwest::header::CONTENT_ENCODING;
use reqwest::{Method, Response};
use serde::Deserialize;
use serde_json::Value;

use super::error_response::{classify_status, transport_error};
use super::transport::{Api, ApiRequest, ApiResponse, FailedCall, TimeoutClass, read_error_response};
use crate::source::CallError;
use journeyman_domain::id::{Run, TaskId};
use journeyman_domain::limits::{ARTIFACT_HOPS_MAX, ARTIFACT_TRANSFER_TIMEOUT_MAX};

/// A page of a listing.
#[derive(Debug, Clone, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ListPage {
    /// The entries, as the service lists them.
    #[serde(alias = "tasks", alias = "artifacts", alias = "workers", alias = "taskQueues")]
    pub entries: Vec<Value>,
    /// Token of the next page; `None` on the last one.
    pub continuation_token: Option<String>,
}

/// What [`Api::find_tasks`] finds; an empty text matches every task.
#[derive(Debug, Clone, Default, serde::Serialize)]
pub struct TaskSearch {
    /// A task queue.
    pub queue: String,
    /// A state, as in a task's status.
    pub state: String,
    /// A part of the name.
    pub name: String,
    /// RFC 3339.
    pub since: String,
    /// Entries of a page; empty for the most that the queue allows.
    pub limit: String,
}

/// The content of an artifact, in chunks.
pub struct Download {
    operation: String,
    response: Response,
    /// Time limit for one chunk.
    chunk_timeout: Duration,
    /// Decompresses content that is stored compressed; gone at its end.
    decoder: Option<MultiGzDecoder<Vec<u8>>>,
    /// What the decoder has not had yet.
    compressed: Bytes,
}

/// Compressed bytes that are decoded without a pause.
const COMPRESSED_BYTES: usize = 256;

impl Download {
    /// The next chunk, or `None` at the end.
    ///
    /// # Errors
    ///
    /// `Retry` if the connection breaks or a chunk takes longer than an ordinary call may.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe: no chunk is lost.
    pub async fn next_chunk(&mut self) -> Result<Option<Vec<u8>>, CallError> {
        let damaged = |operation: &str| CallError::retry(format!("{operation}: its gzip compression is damaged"));
        loop {
            // A few compressed bytes may become a thousand times as many, so they are decoded a few at a time.
            if let Some(decoder) = self.decoder.as_mut().filter(|_| !self.compressed.is_empty()) {
                let part = self.compressed.split_to(self.compressed.len().min(COMPRESSED_BYTES));
                decoder.write_all(&part).map_err(|_| damaged(&self.operation))?;
                tokio::task::yield_now().await;
                let plain = std::mem::take(decoder.get_mut());
                if !plain.is_empty() {
                    return Ok(Some(plain));
                }
                continue;
            }
            let chunk = match tokio::time::timeout(self.chunk_timeout, self.response.chunk()).await {
                Ok(Ok(chunk)) => chunk,
                Ok(Err(error)) => return Err(transport_error(&self.operation, error)),
                Err(_) => return Err(CallError::retry(format!("{}: download stalled", self.operation))),
            };
            let Some(decoder) = &mut self.decoder else { return Ok(chunk.map(Vec::from)) };
            let Some(chunk) = chunk else {
                decoder.try_finish().map_err(|_| damaged(&self.operation))?;
                let plain = std::mem::take(decoder.get_mut());
                self.decoder = None;
                return Ok((!plain.is_empty()).then_some(plain));
            };
            self.compressed = chunk;
        }
    }
}

impl Api {
    /// createTask: returns the task's status.
    ///
    /// # Errors
    ///
    /// `Gone` if another task has this id, `Rejected` if the definition is invalid.
    pub async fn create_task(&self, task: &TaskId, definition: Value) -> Result<Value, CallError> {
        let call = ApiRequest::to_queue(format!("createTask {task}"), Method::PUT, task_path(task, ""));
        self.call_for_status(call.body(definition)).await
    }

    /// status: returns the task's status.
    ///
    /// # Errors
    ///
    /// `Gone` if the task does not exist.
    pub async fn task_status(&self, task: &TaskId) -> Result<Value, CallError> {
        let call = ApiRequest::to_queue(format!("status of {task}"), Method::GET, task_path(task, "/status"));
        self.call_for_status(call).await
    }

    /// task: returns the task's definition.
    ///
    /// # Errors
    ///
    /// `Gone` if the task does not exist, `Denied` without the scope `queue:get-task:<task>`.
    pub async fn task_definition(&self, task: &TaskId) -> Result<Value, CallError> {
        let call = ApiRequest::to_queue(format!("definition of {task}"), Method::GET, task_path(task, ""));
        self.call(call).await?.json()
    }

    /// cancelTask: returns the task's status.
    ///
    /// # Errors
    ///
    /// `Gone` if the task does not exist or its deadline has passed.
    pub async fn cancel_task(&self, task: &TaskId) -> Result<Value, CallError> {
        let call = ApiRequest::to_queue(format!("cancelTask {task}"), Method::POST, task_path(task, "/cancel"));
        self.call_for_status(call).await
    }

    /// rerunTask: returns the task's status.
    ///
    /// # Errors
    ///
    /// `Gone` if the task does not exist, its deadline has passed, or it is not resolved.
    pub async fn rerun_task(&self, task: &TaskId) -> Result<Value, CallError> {
        let call = ApiRequest::to_queue(format!("rerunTask {task}"), Method::POST, task_path(task, "/rerun"));
        self.call_for_status(call).await
    }

    /// listWorkers: the first page of the workers that have claimed from a queue lately.
    ///
    /// # Errors
    ///
    /// `Denied` without the scope `queue:list-workers:<task queue>`.
    pub async fn workers(&self, task_queue: &str) -> Result<ListPage, CallError> {
        let path = task_queue.split('/').map(|part| urlencoding::encode(part).into_owned());
        let path = format!("/provisioners/{}/workers", path.collect::<Vec<_>>().join("/worker-types/"));
        self.list_page(format!("listWorkers of {task_queue}"), path, None).await
    }

    /// listTaskQueues: the first page of them.
    ///
    /// # Errors
    ///
    /// `Denied` without the scope `queue:list-task-queues`.
    pub async fn task_queues(&self) -> Result<ListPage, CallError> {
        self.list_page("listTaskQueues".to_owned(), "/task-queues".to_owned(), None).await
    }

    /// What each task queue of an embedded queue holds, and its tasks of the last hour by minute: the first page of them. Taskcluster
    /// has no such call.
    ///
    /// # Errors
    ///
    /// `Gone` if the queue has no such call.
    pub async fn activity(&self) -> Result<ListPage, CallError> {
        self.list_page("activity of the task queues".to_owned(), "/journeyman/task-queues".to_owned(), None).await
    }

    /// One page of the tasks of an embedded queue, the newest first. Taskcluster has no such call.
    ///
    /// # Errors
    ///
    /// `Gone` if the queue has no such call.
    pub async fn find_tasks(&self, search: &TaskSearch, token: Option<&str>) -> Result<ListPage, CallError> {
        let TaskSearch { queue, state, name, since, limit } = search;
        let query = [("queue", queue), ("state", state), ("name", name), ("since", since), ("limit", limit)];
        let query = query.iter().filter(|(_, value)| !value.is_empty());
        let query: Vec<_> = query.map(|(key, value)| format!("{key}={}", urlencoding::encode(value))).collect();
        self.list_page("list of tasks".to_owned(), format!("/journeyman/tasks?{}", query.join("&")), token).await
    }

    /// listPendingTasks: one page of the pending tasks of a queue.
    ///
    /// # Errors
    ///
    /// `Denied` without the scope `queue:pending-list:<task queue>`.
    pub async fn pending_tasks(&self, task_queue: &str, token: Option<&str>) -> Result<ListPage, CallError> {
        let path = format!("/task-queues/{}/pending", urlencoding::encode(task_queue));
        self.list_page(format!("listPendingTasks of {task_queue}"), path, token).await
    }

    /// listClaimedTasks: one page of the claimed tasks of a queue.
    ///
    /// # Errors
    ///
    /// `Denied` without the scope `queue:claimed-list:<task queue>`.
    pub async fn claimed_tasks(&self, task_queue: &str, token: Option<&str>) -> Result<ListPage, CallError> {
        let path = format!("/task-queues/{}/claimed", urlencoding::encode(task_queue));
        self.list_page(format!("listClaimedTasks of {task_queue}"), path, token).await
    }

    /// listTaskGroup: one page of the tasks of a group.
    ///
    /// # Errors
    ///
    /// `Gone` if no task has this group.
    pub async fn task_group(&self, group: &str, token: Option<&str>) -> Result<ListPage, CallError> {
        let path = format!("/task-group/{}/list", urlencoding::encode(group));
        self.list_page(format!("listTaskGroup {group}"), path, token).await
    }

    /// listArtifacts: one page of the artifacts of a run.
    ///
    /// # Errors
    ///
    /// `Gone` if the run does not exist.
    pub async fn artifacts(&self, run: &Run, token: Option<&str>) -> Result<ListPage, CallError> {
        let path = task_path(&run.task, &format!("/runs/{}/artifacts", run.run));
        self.list_page(format!("listArtifacts of {run}"), path, token).await
    }

    /// getArtifact, following redirects to the content.
    ///
    /// # Errors
    ///
    /// `Gone` if the artifact does not exist.
    pub async fn artifact(&self, run: &Run, name: &str) -> Result<Download, CallError> {
        let operation = format!("artifact {} of {run}", super::error_response::sanitize(name));
        let path = task_path(&run.task, &format!("/runs/{}/artifacts/{}", run.run, urlencoding::encode(name)));
        let mut response = self.send(transfer_request(&operation, path)).await?;
        for _ in 0..ARTIFACT_HOPS_MAX {
            if response.status().as_u16() != 303 {
                let chunk_timeout = self.0.timeouts.call;
                let is_gzip = response.headers().get(CONTENT_ENCODING).is_some_and(|value| value == "gzip");
                let decoder = is_gzip.then(|| MultiGzDecoder::new(Vec::new()));
                return Ok(Download { operation, response, chunk_timeout, decoder, compressed: Bytes::new() });
            }
            response = self.follow_redirect(&operation, &response).await?;
        }
        Err(CallError::retry(format!("{operation}: more than {ARTIFACT_HOPS_MAX} redirects")))
    }

    /// Signs requests to the queue service, and no others.
    async fn follow_redirect(&self, operation: &str, from: &Response) -> Result<Response, CallError> {
        let url = from
            .headers()
            .get(reqwest::header::LOCATION)
            .and_then(|value| value.to_str().ok())
            .and_then(|text| from.url().join(text).ok())
            .ok_or_else(|| CallError::retry(format!("{operation}: redirect without a valid URL")))?;
        self.0
            .address_policy
            .check_url(&url)
            .map_err(|what| CallError::retry(format!("{operation}: the redirect {what}")))?;
        if let Some(path) = url.as_str().strip_prefix(&self.0.queue_url)
            && path.starts_with("/task/")
        {
            return Ok(self.send(transfer_request(operation, path.to_owned())).await?);
        }
        let request = self.0.http.get(url).timeout(ARTIFACT_TRANSFER_TIMEOUT_MAX);
        let response = self.send_for_head(operation, request).await?;
        if response.status().is_success() || response.status().as_u16() == 303 {
            return Ok(response);
        }
        let error = read_error_response(response).await;
        let what = format!("{operation}: storage responded with {}", error.status);
        Err(CallError::new(classify_status(error.status, error.retry_after), what))
    }

    async fn call_for_status(&self, call: ApiRequest<'_>) -> Result<Value, CallError> {
        let operation = call.operation.clone();
        let mut reply: Value = self.call(call).await?.json()?;
        let status = reply.get_mut("status").map(Value::take);
        status.ok_or_else(|| CallError::retry(format!("{operation}: the response has no status")))
    }

    async fn list_page(&self, operation: String, mut path: String, token: Option<&str>) -> Result<ListPage, CallError> {
        if let Some(token) = token {
            path.push_str(if path.contains('?') { "&continuationToken=" } else { "?continuationToken=" });
            path.push_str(&urlencoding::encode(token));
        }
        let call = ApiRequest::to_queue(operation, Method::GET, path);
        self.call(call).await?.json()
    }

    /// taskQueueCounts or pendingTasks: the number of pending tasks, as the service estimates it.
    ///
    /// # Errors
    ///
    /// `Denied` without the scope `queue:pending-count:<task queue>`, which workers do not need.
    pub async fn pending_count(&self, task_queue: &str) -> Result<u64, CallError> {
        let reply: Value = self.pending_tasks_reply(task_queue).await?.json()?;
        Ok(reply.get("pendingTasks").and_then(Value::as_u64).unwrap_or(0))
    }

    /// Asks for the counts; older services, and clients without `queue:claimed-count:<task queue>`, have only the call before it.
    pub(super) async fn pending_tasks_reply(&self, task_queue: &str) -> Result<ApiResponse, FailedCall> {
        let call = async |path: String| {
            self.call(ApiRequest::to_queue(format!("pendingTasks of {task_queue}"), Method::GET, path)).await
        };
        let encoded = urlencoding::encode(task_queue);
        match call(format!("/task-queues/{encoded}/counts")).await {
            Err(failed) if matches!(failed.status, Some(403 | 404)) => {}
            reply => return reply,
        }
        match call(format!("/pending/{encoded}")).await {
            // The queue of 2019 has provisioner and worker type as two segments.
            Err(failed) if failed.status == Some(404) => call(format!("/pending/{task_queue}")).await,
            reply => reply,
        }
    }
}

fn transfer_request(operation: &str, path: String) -> ApiRequest<'static> {
    ApiRequest {
        timeout_class: TimeoutClass::Transfer,
        ..ApiRequest::to_queue(operation.to_owned(), Method::GET, path)
    }
}

fn task_path(task: &TaskId, rest: &str) -> String {
    format!("/task/{}{rest}", urlencoding::encode(task.as_str()))
}
