//! What runs in the processes that are measured: a queue, a worker, or both in one. Each says on standard output what
//! the measuring process waits for, answers its questions there, and ends when its standard input does.

use std::io::Write as _;
use std::os::fd::AsFd as _;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use journeyman::activity;
use journeyman::config::schema::Log;
use journeyman::handler::Request;
use journeyman::handler::command::{Command, CommandConfig as CommandSettings};
use journeyman::handler::{Context, DynHandler, ExecuteError, PayloadHandler, PrepareError, erase};
use journeyman::observe::log::{self, Color};
use journeyman::queue::{self, Db, RegisteredClient};
use journeyman::source::Source;
use journeyman::source::amqp::{AmqpSource, AmqpSourceConfig as RequestSettings};
use journeyman::source::taskcluster::{
    ApiConfig, ArtifactStorage, Config as SourceSettings, Credentials, Dialect, Taskcluster, Timeouts,
};
use journeyman::worker::{Control, SourceBinding, Worker, WorkerConfig};
use rustix::time::{ClockId, clock_gettime};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncBufReadExt as _, BufReader};
use tokio::net::unix::pipe;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::Done;
use crate::fleet::resident;
use crate::raw::{self, Pace, warm};
use crate::watch::Watched;

/// Who calls the queue. Its token is no secret: the queue lives as long as the run.
pub(crate) const CLIENT_ID: &str = "bench";
pub(crate) const ACCESS_TOKEN: &str = "bench-token";

/// A process that is measured, as it finds itself on its own command line.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub(crate) struct Role {
    pub(crate) queue: Option<QueueRole>,
    pub(crate) worker: Option<WorkerRole>,
    pub(crate) raw: Option<raw::Loop>,
    pub(crate) caller: Option<raw::Caller>,
    pub(crate) threads: usize,
}

/// An embedded queue in `folder`.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct QueueRole {
    pub(crate) folder: PathBuf,
    pub(crate) claim_timeout: Duration,
}

/// A worker with as many sources as `queues` names.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct WorkerRole {
    /// Empty where the queue is in the same process.
    pub(crate) root_url: String,
    /// Instead of task queues.
    pub(crate) requests: Option<RequestsRole>,
    pub(crate) azure: bool,
    pub(crate) queues: Vec<String>,
    pub(crate) capacity: u32,
    pub(crate) work_dir: PathBuf,
    pub(crate) payload: Payload,
    /// After how many completed tasks it says `done`.
    pub(crate) expected: u64,
}

/// A queue of requests.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct RequestsRole {
    pub(crate) uri: String,
    pub(crate) queue: String,
    /// Where activity is reported.
    pub(crate) exchange: Option<String>,
}

/// What is done with a task.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Payload {
    Nothing,
    /// Says when it was started.
    Stamp,
    /// Waits until it is told to end.
    Wait,
    /// The commands that the task names.
    Command,
}

/// The time on a clock that all processes share.
pub(crate) fn now() -> Duration {
    span(ClockId::Monotonic)
}

/// The CPU time that this process has used, all threads together.
pub(crate) fn cpu() -> Duration {
    span(ClockId::ProcessCPUTime)
}

fn span(clock: ClockId) -> Duration {
    let time = clock_gettime(clock);
    Duration::new(u64::try_from(time.tv_sec).unwrap_or_default(), u32::try_from(time.tv_nsec).unwrap_or_default())
}

/// A line for the measuring process. One that has gone is noticed at the end of standard input.
pub(crate) fn say(line: &str) {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{line}").and_then(|()| out.flush()).ok();
}

/// Lives as this role until standard input ends.
pub(crate) async fn live(role: Role) -> Done<()> {
    let queue = match &role.queue {
        Some(settings) => Some(start_queue(settings).await?),
        None => None,
    };
    // Standard input is a pipe, so it can be waited for without a thread.
    let stdin = pipe::Receiver::from_owned_fd(std::io::stdin().as_fd().try_clone_to_owned()?)?;
    let mut lines = BufReader::new(stdin).lines();
    if let Some(mut settings) = role.worker {
        if let Some(queue) = &queue {
            queue.root_url().clone_into(&mut settings.root_url);
        }
        let pending = queue.as_ref().map(queue::RunningQueue::pending);
        work(settings, pending, &mut lines).await?;
    } else {
        let over = CancellationToken::new();
        let mut beside = std::pin::pin!(beside(role.raw, role.caller, &over));
        let mut done = false;
        loop {
            tokio::select! {
                ended = &mut beside, if !done => {
                    ended?;
                    done = true;
                }
                line = lines.next_line() => match line? {
                    Some(line) => answer(&line),
                    None => break,
                }
            }
        }
        over.cancel();
        if !done {
            beside.await?;
        }
    }
    if let Some(queue) = queue {
        queue.stop().await;
    }
    Ok(())
}

/// What lapin does without us, until it is over.
async fn beside(server: Option<raw::Loop>, caller: Option<raw::Caller>, over: &CancellationToken) -> Done<()> {
    match (server, caller) {
        (Some(server), _) => server.run(over).await,
        (None, Some(caller)) => caller.run().await,
        (None, None) => {
            over.cancelled().await;
            Ok(())
        }
    }
}

type Lines = tokio::io::Lines<BufReader<pipe::Receiver>>;

fn answer(line: &str) {
    if line == "usage" {
        say(&format!("usage {} {}", cpu().as_nanos(), resident("self").unwrap_or_default()));
    }
}

async fn start_queue(settings: &QueueRole) -> Done<queue::RunningQueue> {
    let db = Db::File(settings.folder.join("queue.db"));
    let client = RegisteredClient {
        client_id: CLIENT_ID.to_owned(),
        access_token: ACCESS_TOKEN.to_owned().into(),
        scopes: vec!["*".to_owned()],
    };
    let running = queue::start(queue::Config {
        clients: vec![client],
        // The measuring process counts without a signature.
        anonymous_scopes: vec!["queue:journeyman-list-tasks".to_owned()],
        claim_timeout: settings.claim_timeout,
        ..queue::Config::new(db, settings.folder.join("artifacts"))
    })
    .await?;
    say(&format!("listening {}", running.root_url()));
    Ok(running)
}

/// A source of the worker under measurement.
pub(crate) fn api(root_url: &str) -> Done<ApiConfig> {
    Ok(ApiConfig {
        root_url: root_url.to_owned(),
        queue_url: None,
        credentials: Some(Credentials::new(CLIENT_ID, ACCESS_TOKEN.to_owned().into(), None)?),
        proxy: None,
        allow_hosts: Vec::new(),
        timeouts: Timeouts::default(),
    })
}

async fn work(settings: WorkerRole, pending: Option<watch::Receiver<u64>>, lines: &mut Lines) -> Done<()> {
    // A worker writes its log; what it says of every task is part of what a task costs.
    log::start(&Log::default(), Color::Never);
    let (release, released) = watch::channel(Held::Yes);
    let handler_state = InProcess { payload: settings.payload, released: released.clone() };
    let handler = handler(settings.payload, released);
    let watched = Arc::new(Watched::default());
    let mut feeds = Vec::new();
    for queue in &settings.queues {
        let source: Arc<dyn Source> = Arc::new(Taskcluster::new(SourceSettings {
            api: api(&settings.root_url)?,
            dialect: if settings.azure { Dialect::Azure } else { Dialect::ClaimWork },
            task_queue: queue.clone(),
            worker_group: "bench".to_owned(),
            worker_id: "worker".to_owned(),
            artifact_storage: ArtifactStorage::S3,
            queue_hosts: Vec::new(),
        })?);
        // Only where reclaims are measured: elsewhere nothing stands between worker and source.
        let source = if settings.payload == Payload::Wait { watched.watch(source) } else { source };
        feeds.push(SourceBinding {
            name: queue.clone(),
            source,
            handler: Arc::clone(&handler),
            env: Default::default(),
        });
    }
    if let Some(RequestsRole { uri, queue, .. }) = &settings.requests {
        let source = Arc::new(AmqpSource::new(RequestSettings::new(raw::broker(uri)?, queue, "bench")));
        let handler = erase(NoOp(handler_state));
        feeds.push(SourceBinding { name: "requests".to_owned(), source, handler, env: Default::default() });
    }
    let worker = Worker::new(
        WorkerConfig { capacity: settings.capacity, work_dir: settings.work_dir.clone(), ..WorkerConfig::default() },
        feeds,
    );
    let control = worker.control();
    let mut side = tokio::task::JoinSet::new();
    if let Some(pending) = pending {
        side.spawn(pass_on(pending, control.clone()));
    }
    side.spawn(tell_when_done(control.clone(), settings.expected));
    if let Some(RequestsRole { uri, exchange, .. }) = &settings.requests {
        side.spawn(tell_pace(control.clone(), settings.expected));
        if let Some(exchange) = exchange {
            let settings = activity::Config {
                broker: raw::broker(uri)?,
                exchange: exchange.clone(),
                key: "bench".to_owned(),
                worker_id: "bench".to_owned(),
                repeat: Duration::from_secs(60),
            };
            side.spawn(activity::report(settings, control.liveness()));
        }
    }
    let mut run = std::pin::pin!(worker.run());
    say("working");
    loop {
        tokio::select! {
            ended = &mut run => {
                let exit = ended?;
                return Err(format!("the worker ended by itself: {exit:?}").into());
            }
            line = lines.next_line() => match line?.as_deref() {
                Some("counts") => say(&format!("counts {}", serde_json::to_string(&control.counts())?)),
                Some("reclaims") => say(&format!("reclaims {}", watched.told())),
                Some("release") => { release.send_replace(Held::No); }
                Some(line) => answer(line),
                None => break,
            }
        }
    }
    control.release(Some(Duration::from_secs(5))).await;
    run.await?;
    Ok(())
}

/// What `journeyman dev` does: the queue's news wake the worker.
async fn pass_on(mut pending: watch::Receiver<u64>, control: Control) {
    while pending.changed().await.is_ok() {
        control.wake();
    }
}

async fn tell_when_done(control: Control, expected: u64) {
    let began = now();
    if expected == 0 {
        return;
    }
    let mut look = tokio::time::interval(Duration::from_millis(10));
    loop {
        look.tick().await;
        if control.counts().completed >= expected {
            say(&format!("done {} {}", (now() - began).as_nanos(), cpu().as_nanos()));
            return;
        }
    }
}

/// As a raw loop does.
async fn tell_pace(control: Control, expected: u64) {
    let (mut look, mut pace) = (tokio::time::interval(Duration::from_millis(5)), None);
    if expected == 0 {
        return;
    }
    loop {
        look.tick().await;
        let completed = control.counts().completed;
        match &pace {
            None if completed >= warm(expected) => pace = Some(Pace::begin(completed)),
            Some(pace) if completed >= expected => return Pace::say(pace, completed),
            None | Some(_) => {}
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Held {
    Yes,
    No,
}

fn handler(payload: Payload, released: watch::Receiver<Held>) -> Arc<dyn DynHandler> {
    match payload {
        Payload::Command => {
            let env = std::env::vars().filter(|(name, _)| name == "PATH").collect();
            erase(Command::new(CommandSettings {
                env,
                default_run_time: Some(Duration::from_secs(60)),
                ..CommandSettings::default()
            }))
        }
        Payload::Nothing | Payload::Stamp | Payload::Wait => erase(InProcess { payload, released }),
    }
}

#[derive(Clone)]
struct InProcess {
    payload: Payload,
    released: watch::Receiver<Held>,
}

#[derive(Debug, Deserialize, JsonSchema)]
struct Empty {}

impl PayloadHandler for InProcess {
    type Payload = Empty;
    type Prepared = ();

    async fn prepare(&self, _: Empty, _: &Context) -> Result<(), PrepareError> {
        Ok(())
    }

    async fn execute(&self, (): (), context: &Context) -> Result<(), ExecuteError> {
        self.act(context).await;
        Ok(())
    }
}

/// The same with requests. Nobody sets an answer, so that it is `null`.
struct NoOp(InProcess);

impl PayloadHandler for NoOp {
    type Payload = Request;
    type Prepared = ();

    async fn prepare(&self, _: Request, _: &Context) -> Result<(), PrepareError> {
        Ok(())
    }

    async fn execute(&self, (): (), context: &Context) -> Result<(), ExecuteError> {
        self.0.act(context).await;
        Ok(())
    }
}

impl InProcess {
    async fn act(&self, context: &Context) {
        match self.payload {
            Payload::Nothing | Payload::Command => {}
            Payload::Stamp => say(&format!("started {} {}", now().as_nanos(), context.task().run.task)),
            Payload::Wait => {
                // Where the sender has gone, the process ends.
                self.released.clone().wait_for(|held| *held == Held::No).await.ok();
            }
        }
    }
}
