//! A deployment with a worker: the embedded queue, and before it the services that journeyman has no own of.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::extract::{Path as UrlPath, Request, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse as _, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use journeyman::config::Environment;
use journeyman::config::schema::CommandHandler;
use journeyman::handler::chain_of_trust::SigningKey;
use journeyman::handler::command::Command;
use journeyman::handler::mounts::Mounter;
use journeyman::handler::payload_parts::PayloadSettings;
use journeyman::handler::{DynHandler, erase};
use journeyman::source::taskcluster::{Api, ArtifactStorage, Config as SourceConfig, Dialect, Taskcluster};
use journeyman::task::formats::new_task_id;
use journeyman::worker::{SourceBinding, Worker, WorkerConfig};
use journeyman_domain::id::TaskId;
use journeyman_platform::host::caches::{CacheLimits, CacheStore};
use journeyman_platform::host::clock::Clock;
use parking_lot::Mutex;
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::task::JoinSet;

use crate::support::task_queue::{TaskQueue, api_config, definition, shell, states};
use crate::support::within;

pub(crate) const TASK_QUEUE: &str = "test/worker";

/// What the services beside the queue answer.
#[derive(Default)]
pub(crate) struct Answers {
    /// Tasks by their namespace.
    pub(crate) index: BTreeMap<String, String>,
    /// What each role adds to scopes.
    pub(crate) roles: BTreeMap<String, Vec<String>>,
    /// Names of caches, and before when they were created.
    pub(crate) purge: Vec<(String, String)>,
}

pub(crate) struct Deployment {
    pub(crate) queue: TaskQueue,
    pub(crate) folder: tempfile::TempDir,
    pub(crate) answers: Arc<Mutex<Answers>>,
    root_url: String,
    pub(crate) api: Api,
    pub(crate) limits: CacheLimits,
    pub(crate) status_poll_interval: Option<Duration>,
    pub(crate) clock: Clock,
    tasks: JoinSet<()>,
}

/// How a task ended.
#[derive(Debug)]
pub(crate) struct Ended {
    pub(crate) states: Vec<String>,
    pub(crate) log: String,
}

#[derive(Clone)]
struct Front {
    answers: Arc<Mutex<Answers>>,
    queue: String,
    client: reqwest::Client,
}

impl Deployment {
    pub(crate) async fn start() -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let queue = TaskQueue::start(folder.path(), |_| {}).await;
        let answers = Arc::default();
        let mut deployment = Self {
            root_url: String::new(),
            api: queue.api.clone(),
            limits: CacheLimits { downloads_bytes_max: 1 << 30, free_bytes_min: 0 },
            status_poll_interval: None,
            clock: Clock::boot(),
            tasks: JoinSet::new(),
            queue,
            folder,
            answers,
        };
        let client = reqwest::Client::builder().redirect(reqwest::redirect::Policy::none()).no_proxy().build();
        let queue = deployment.queue.service.root_url().to_owned();
        let front = Front { answers: Arc::clone(&deployment.answers), queue, client: client.expect("a client") };
        let router = Router::new()
            .route("/api/index/v1/task/{namespace}", get(find_task))
            .route("/api/purge-cache/v1/purge-cache/{queue}", get(purge_requests))
            .route("/api/auth/v1/scopes/expand", post(expand_scopes))
            .fallback(forward)
            .with_state(front);
        deployment.root_url = deployment.serve(router).await;
        deployment
    }

    /// Serves a router while the deployment lives, and returns its address.
    pub(crate) async fn serve(&mut self, router: Router) -> String {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = listener.local_addr().expect("an address");
        self.tasks.spawn(async move { axum::serve(listener, router).await.expect("it serves") });
        format!("http://{address}")
    }

    /// The command handler with the caches of the worker's directory.
    pub(crate) fn handler(&self) -> Arc<dyn DynHandler> {
        self.command(None)
    }

    /// The same with a key for chains of trust.
    pub(crate) fn signing_handler(&self, key: SigningKey) -> Arc<dyn DynHandler> {
        self.command(Some(key))
    }

    fn command(&self, key: Option<SigningKey>) -> Arc<dyn DynHandler> {
        let environment = Environment::from_pairs(&[("PATH", &std::env::var("PATH").expect("a path"))]);
        erase(Command::new(&CommandHandler::default().env_allow, &environment, self.settings(key)))
    }

    pub(crate) fn settings(&self, signing_key: Option<SigningKey>) -> PayloadSettings {
        PayloadSettings {
            max_run_time: CommandHandler::default().max_run_time,
            termination_grace: Duration::from_secs(2),
            redact_env: vec!["*TOKEN*".to_owned()],
            mounter: self.mounter(),
            signing_key,
        }
    }

    pub(crate) fn mounter(&self) -> Mounter {
        Mounter::new(CacheStore::new(self.work_dir().join("caches"), self.limits)).expect("a client")
    }

    pub(crate) fn work_dir(&self) -> std::path::PathBuf {
        self.folder.path().join("worker")
    }

    pub(crate) fn worker(&self, handler: Arc<dyn DynHandler>, capacity: u32) -> Worker {
        let source = Taskcluster::new(SourceConfig {
            api: api_config(&self.root_url),
            dialect: Dialect::ClaimWork,
            task_queue: TASK_QUEUE.into(),
            worker_group: "group".into(),
            worker_id: "worker".into(),
            artifact_storage: ArtifactStorage::S3,
        });
        let settings = WorkerConfig {
            capacity,
            work_dir: self.work_dir(),
            termination_grace: Duration::from_secs(2),
            poll_interval: Duration::from_millis(50),
            status_poll_interval: self.status_poll_interval,
            clock: self.clock,
            ..WorkerConfig::default()
        };
        let env = BTreeMap::from([("TASKCLUSTER_ROOT_URL".to_owned(), self.root_url.clone())]);
        let source = Arc::new(source.expect("usable settings"));
        Worker::new(settings, vec![SourceBinding { name: "ci".into(), source, handler, env: Arc::new(env) }])
    }

    /// Creates a task that runs a script, with these keys in its payload, and the rest of its definition changed.
    pub(crate) async fn create(&self, script: &str, keys: Value, change: impl FnOnce(&mut Value)) -> TaskId {
        let mut payload = shell(script);
        payload.as_object_mut().expect("an object").extend(keys.as_object().expect("an object").clone());
        let mut definition = definition(TASK_QUEUE, &payload);
        change(&mut definition);
        let task = new_task_id();
        self.api.create_task(&task, definition).await.expect("created");
        task
    }

    /// Runs the tasks, one after the other in one worker.
    pub(crate) async fn run(&self, tasks: &[&TaskId]) -> Vec<Ended> {
        self.run_with(self.handler(), 1, tasks).await
    }

    /// Runs the tasks in one worker.
    pub(crate) async fn run_with(&self, handler: Arc<dyn DynHandler>, capacity: u32, tasks: &[&TaskId]) -> Vec<Ended> {
        let worker = Box::new(self.worker(handler, capacity));
        let control = worker.control();
        let watched = async {
            let mut ended = Vec::new();
            for task in tasks {
                ended.push(self.ended(task).await);
            }
            control.drain().await;
            ended
        };
        let running = Box::pin(async { tokio::join!(worker.run(), watched) });
        let (exit, ended) = within("the tasks end", running).await;
        exit.expect("it ran");
        ended
    }

    /// Creates a task and runs it.
    pub(crate) async fn run_one(&self, script: &str, keys: Value, change: impl FnOnce(&mut Value)) -> Ended {
        let task = self.create(script, keys, change).await;
        self.run(&[&task]).await.remove(0)
    }

    pub(crate) async fn ended(&self, task: &TaskId) -> Ended {
        let status = self.queue.resolved(task).await;
        let states = states(&status);
        let run = u32::try_from(states.len()).expect("few runs") - 1;
        let log = self.queue.content(task, run, "public/logs/live_backing.log").await;
        Ended { states, log: String::from_utf8_lossy(&log).into_owned() }
    }
}

impl Ended {
    #[track_caller]
    pub(crate) fn completed(self) -> String {
        assert_eq!(self.states, ["completed"], "{}", self.log);
        self.log
    }

    #[track_caller]
    pub(crate) fn exception(self, reason: &str) -> String {
        assert_eq!(self.states, [format!("exception/{reason}")], "{}", self.log);
        self.log
    }
}

/// Packs files into an archive with the system's tar, whose options choose the compression.
pub(crate) fn tar(options: &str, files: &[(&str, &str)]) -> Vec<u8> {
    let folder = tempfile::tempdir().expect("a folder");
    for (name, content) in files {
        let path = folder.path().join(name);
        std::fs::create_dir_all(path.parent().unwrap_or_else(|| Path::new(""))).expect("created");
        std::fs::write(path, content).expect("written");
    }
    let packed =
        std::process::Command::new("tar").arg(options).arg("-C").arg(folder.path()).args(["-f", "-", "."]).output();
    let packed = packed.expect("tar runs");
    assert!(packed.status.success(), "{}", String::from_utf8_lossy(&packed.stderr));
    packed.stdout
}

async fn find_task(State(front): State<Front>, UrlPath(namespace): UrlPath<String>) -> Response {
    match front.answers.lock().index.get(&namespace) {
        Some(task) => Json(json!({ "namespace": namespace, "taskId": task, "rank": 0 })).into_response(),
        None => {
            let body = json!({ "code": "ResourceNotFound", "message": "Indexed task not found" });
            (StatusCode::NOT_FOUND, Json(body)).into_response()
        }
    }
}

async fn purge_requests(State(front): State<Front>) -> Json<Value> {
    let requests: Vec<_> = front.answers.lock().purge.iter().map(|(name, before)| {
        json!({ "provisionerId": "test", "workerType": "worker", "cacheName": name, "before": before })
    }).collect();
    Json(json!({ "requests": requests }))
}

async fn expand_scopes(State(front): State<Front>, Json(asked): Json<Value>) -> Json<Value> {
    let answers = front.answers.lock();
    let given =
        asked["scopes"].as_array().expect("scopes").iter().map(|scope| scope.as_str().expect("text").to_owned());
    let given: Vec<String> = given.collect();
    let added = given.iter().filter_map(|scope| answers.roles.get(scope)).flatten().cloned();
    Json(json!({ "scopes": given.iter().cloned().chain(added).collect::<Vec<_>>() }))
}

/// Passes a call on to the queue as it came, so that its signature stays valid.
async fn forward(State(front): State<Front>, request: Request) -> Response {
    let (parts, body) = request.into_parts();
    let target = parts.uri.path_and_query().map_or("/", |target| target.as_str());
    let body = axum::body::to_bytes(body, 64 << 20).await.expect("a body");
    let forwarded =
        front.client.request(parts.method, format!("{}{target}", front.queue)).headers(parts.headers).body(body);
    let Ok(answer) = forwarded.send().await else { return StatusCode::BAD_GATEWAY.into_response() };
    let (status, headers) = (answer.status(), answer.headers().clone());
    let mut response = Response::new(Body::from(answer.bytes().await.unwrap_or_default()));
    *response.status_mut() = status;
    *response.headers_mut() = headers;
    response
}
