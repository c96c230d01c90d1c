//! The page of `journeyman dev`: its tasks, their logs and artifacts, the queue and the worker.
//!
//! It is served to this machine only. The printed address holds a key, which the browser keeps as a cookie, so that other
//! users of the machine see nothing; forms repeat it, so that no other site can send them.

mod render;

use std::convert::Infallible;
use std::sync::Arc;

use axum::Router;
use axum::body::Body;
use axum::extract::{Form, Path, Query, Request, State};
use axum::http::header::{CONTENT_TYPE, COOKIE, LOCATION, SET_COOKIE};
use axum::http::{HeaderMap, StatusCode};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Redirect, Response};
use axum::routing::{get, post};
use serde::Deserialize;
use serde_json::Value;

use crate::cli::task::open_log;
use crate::cli::task::task_status::{FoundTask, TaskStatus};
use crate::console::page::HtmlPage;
use crate::control::WorkerStatusReply;
use journeyman_domain::id::{Run, TaskId};
use journeyman_domain::limits::{DEV_PAGE_ARTIFACTS_MAX, DEV_PAGE_TASKS};
use journeyman_domain::refusal::Refusal;
use journeyman_platform::http::HttpListener;

use crate::source::CallError;
use crate::source::taskcluster::{Api, Download, TaskSearch};
use crate::worker::Control;

pub(super) struct DevPage {
    pub(super) api: Api,
    pub(super) control: Control,
    pub(super) worker_id: String,
    pub(super) worker_group: String,
    pub(super) task_queues: Vec<String>,
    pub(super) key: String,
    /// Differs between two `dev` on one machine, whose cookies browsers do not separate by port.
    pub(super) cookie: String,
}

type Page = State<Arc<DevPage>>;

/// Serves until dropped.
pub(super) async fn serve(listener: HttpListener, page: DevPage) -> Infallible {
    let page = Arc::new(page);
    let router = Router::new()
        .route("/", get(list))
        .route("/worker", get(worker))
        .route("/tasks/{task}", get(task))
        .route("/tasks/{task}/cancel", post(cancel))
        .route("/tasks/{task}/rerun", post(rerun))
        .route("/tasks/{task}/{run}/log", get(log))
        .route("/tasks/{task}/{run}/artifacts/{*name}", get(artifact))
        .fallback(async || PageError(StatusCode::NOT_FOUND, "there is no such page".to_owned()))
        .layer(middleware::from_fn_with_state(Arc::clone(&page), require_key))
        .with_state(page);
    listener.serve_streams(router).await
}

struct PageError(StatusCode, String);

impl IntoResponse for PageError {
    fn into_response(self) -> Response {
        (self.0, format!("{}\n", self.1)).into_response()
    }
}

impl From<CallError> for PageError {
    fn from(refused: CallError) -> Self {
        let status = match refused.refusal {
            Refusal::Gone => StatusCode::NOT_FOUND,
            Refusal::Rejected => StatusCode::BAD_REQUEST,
            Refusal::Retry { .. } | Refusal::Throttled { .. } | Refusal::Full | Refusal::Denied | Refusal::Stale => {
                StatusCode::BAD_GATEWAY
            }
        };
        Self(status, refused.message)
    }
}

#[derive(Deserialize)]
struct KeyQuery {
    key: Option<String>,
}

async fn require_key(State(page): Page, Query(query): Query<KeyQuery>, request: Request, next: Next) -> Response {
    let DevPage { key, cookie, .. } = &*page;
    if query.key.as_ref() == Some(key) {
        let cookie = format!("{cookie}={key}; Path=/; HttpOnly; SameSite=Strict");
        return ([(SET_COOKIE, cookie)], Redirect::to(request.uri().path())).into_response();
    }
    let expected = format!("{cookie}={key}");
    let cookies = request.headers().get_all(COOKIE).iter().filter_map(|value| value.to_str().ok());
    if cookies.flat_map(|value| value.split(';')).any(|cookie| cookie.trim() == expected) {
        return next.run(request).await;
    }
    let text = "open the address that `journeyman dev` printed: it holds the key to this page";
    PageError(StatusCode::FORBIDDEN, text.to_owned()).into_response()
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
struct Filter {
    name: String,
    state: String,
    queue: String,
    /// Token of a further page.
    after: String,
}

struct TaskList {
    filter: Filter,
    tasks: Vec<FoundTask>,
    next: Option<String>,
    /// The pending tasks of each task queue.
    pending: Vec<(String, u64)>,
    worker: WorkerStatusReply,
}

impl DevPage {
    async fn worker_status(&self) -> Result<WorkerStatusReply, PageError> {
        let exited = || PageError(StatusCode::SERVICE_UNAVAILABLE, "the worker has exited".to_owned());
        let status = self.control.status().await.ok_or_else(exited)?;
        Ok(WorkerStatusReply::new(self.worker_id.clone(), self.worker_group.clone(), status))
    }

    async fn status_of(&self, task: &TaskId) -> Result<TaskStatus, CallError> {
        TaskStatus::read(&self.api.task_status(task).await?)
    }

    fn check_form(&self, form: &TokenForm) -> Result<(), PageError> {
        let refused = || PageError(StatusCode::FORBIDDEN, "the form is not from this page; reload it".to_owned());
        (form.token == self.key).then_some(()).ok_or_else(refused)
    }
}

async fn list(State(page): Page, Query(filter): Query<Filter>) -> Result<HtmlPage, PageError> {
    let search = TaskSearch {
        queue: filter.queue.clone(),
        state: filter.state.clone(),
        name: filter.name.clone(),
        since: String::new(),
        limit: DEV_PAGE_TASKS.to_string(),
    };
    let after = Some(filter.after.as_str()).filter(|after| !after.is_empty());
    let found = page.api.find_tasks(&search, after).await?;
    let tasks = found.entries.iter().map(FoundTask::read).collect::<Result<_, _>>()?;
    let mut pending = Vec::new();
    for queue in &page.task_queues {
        pending.push((queue.clone(), page.api.pending_count(queue).await?));
    }
    let worker = page.worker_status().await?;
    Ok(render::list(&TaskList { filter, tasks, next: found.continuation_token, pending, worker }))
}

async fn worker(State(page): Page) -> Result<HtmlPage, PageError> {
    Ok(render::worker(&page.worker_status().await?))
}

fn parse_task(text: &str) -> Result<TaskId, PageError> {
    TaskId::parse(text).ok_or_else(|| PageError(StatusCode::NOT_FOUND, "this is not a task id".to_owned()))
}

#[derive(Deserialize)]
struct TaskQuery {
    /// Whose log is shown; by default the last run's.
    run: Option<u32>,
}

struct TaskDetail {
    status: TaskStatus,
    definition: Value,
    /// The artifacts of each run that was claimed.
    artifacts: Vec<(u32, Vec<Value>)>,
    shown_run: Option<u32>,
    token: String,
}

async fn task(
    State(page): Page,
    Path(task): Path<String>,
    Query(query): Query<TaskQuery>,
) -> Result<HtmlPage, PageError> {
    let task = parse_task(&task)?;
    let status = page.status_of(&task).await?;
    let definition = page.api.task_definition(&task).await?;
    let mut artifacts = Vec::new();
    for run in status.runs.iter().filter(|run| run.started_at.is_some()) {
        let run = Run { task: task.clone(), run: run.number };
        let mut listed = page.api.artifacts(&run, None).await?.entries;
        listed.truncate(DEV_PAGE_ARTIFACTS_MAX);
        artifacts.push((run.run, listed));
    }
    let shown_run = query.run.or_else(|| status.runs.last().map(|run| run.number));
    Ok(render::task(&TaskDetail { status, definition, artifacts, shown_run, token: page.key.clone() }))
}

#[derive(Deserialize)]
struct TokenForm {
    token: String,
}

async fn cancel(
    State(page): Page,
    Path(task): Path<String>,
    Form(form): Form<TokenForm>,
) -> Result<Redirect, PageError> {
    page.check_form(&form)?;
    page.api.cancel_task(&parse_task(&task)?).await?;
    Ok(Redirect::to(&format!("/tasks/{task}")))
}

async fn rerun(
    State(page): Page,
    Path(task): Path<String>,
    Form(form): Form<TokenForm>,
) -> Result<Redirect, PageError> {
    page.check_form(&form)?;
    page.api.rerun_task(&parse_task(&task)?).await?;
    Ok(Redirect::to(&format!("/tasks/{task}")))
}

#[derive(Deserialize)]
struct LogQuery {
    /// The bytes that the caller has.
    #[serde(default)]
    from: usize,
}

async fn log(
    State(page): Page,
    Path((task, run)): Path<(String, u32)>,
    Query(query): Query<LogQuery>,
) -> Result<Response, PageError> {
    let run = Run { task: parse_task(&task)?, run };
    let download = match open_log(&page.api, &run).await {
        Ok(download) => download,
        Err(refused) if refused.refusal == Refusal::Gone => {
            let status = page.status_of(&run.task).await?;
            return Err(PageError(StatusCode::NOT_FOUND, status.missing_log_reason(Some(run.run))));
        }
        Err(refused) => return Err(refused.into()),
    };
    let chunks = futures_util::stream::try_unfold((download, query.from), next_after);
    Ok(([(CONTENT_TYPE, "text/plain; charset=utf-8")], Body::from_stream(chunks)).into_response())
}

type ChunkResult = std::io::Result<Option<(Vec<u8>, (Download, usize))>>;

/// The next chunk after the first `skip` bytes.
async fn next_after((mut download, skip): (Download, usize)) -> ChunkResult {
    let Ok(Some(mut chunk)) = download.next_chunk().await else { return Ok(None) };
    let skipped = skip.min(chunk.len());
    chunk.drain(..skipped);
    Ok(Some((chunk, (download, skip - skipped))))
}

/// Content is served under another origin, the queue's, so that no artifact acts as this page.
async fn artifact(
    State(page): Page,
    Path((task, run, name)): Path<(String, u32, String)>,
) -> Result<(StatusCode, HeaderMap), PageError> {
    let url = page.api.artifact_url(&Run { task: parse_task(&task)?, run }, &name).await?;
    let invalid = |_| PageError(StatusCode::BAD_GATEWAY, "the queue returned an invalid URL".to_owned());
    Ok((StatusCode::SEE_OTHER, HeaderMap::from_iter([(LOCATION, url.parse().map_err(invalid)?)])))
}
