//! A program around the library: a worker whose handler is in Rust and does nothing, as an embedding user has it.

use std::marker::PhantomData;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use journeyman::activity;
use journeyman::config::Environment;
use journeyman::config::schema::Log;
use journeyman::handler::staged::{Progress, Staged, StagedAnswer, StagedHandler, StagedPolicy, Stamp, Work};
use journeyman::handler::{Context, DynHandler, ExecuteError, PayloadHandler, PrepareError, Request, erase};
use journeyman::source::Source;
use journeyman::source::amqp::{AmqpSource, AmqpSourceConfig};
use journeyman::source::taskcluster::{ArtifactStorage, Config as TaskclusterConfig, Dialect, Taskcluster};
use journeyman::source::zookeeper::{self, ZooKeeperQueue, ZooKeeperSource, ZooKeeperSourceConfig};
use journeyman::worker::{Control, SourceBinding, Worker, WorkerConfig};
use journeyman_platform::log;
use journeyman_platform::zookeeper::ConnectConfig;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt as _, BufReader};
use tokio::sync::watch;

use crate::lapin_alone::{Pace, broker, print_line, stdin};
use crate::machine::now;
use crate::programs::{QUEUE, Role};
use crate::support::task_queue::api_config;
use crate::{Lab, Outcome};

pub(crate) const FLAG: &str = "--no-op-worker";

#[derive(Debug, Clone, Serialize, Deserialize)]
struct NoOpWorker {
    from: From,
    capacity: u32,
    work_dir: PathBuf,
    payload: Payload,
    /// After how many completed claims it prints `done`; 0 is never.
    expected: u64,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) enum From {
    Taskcluster { root_url: String },
    Amqp { uri: String, queue: String, activity_exchange: Option<String> },
    Zookeeper { servers: String, chroot: String, dialect: zookeeper::Dialect, queue: String },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Payload {
    Nothing,
    /// Prints when it starts.
    Stamp,
    /// Waits for the line `release`.
    Wait,
    /// Runs elsewhere until the line `release`, beside the capacity. The start of the last one is printed.
    Launched,
}

impl Lab {
    pub(crate) fn no_op_worker(&self, from: From, capacity: u32, payload: Payload, expected: usize) -> Outcome<Role> {
        let work_dir = self.fresh("work")?;
        let worker = NoOpWorker { from, capacity, work_dir, payload, expected: expected as u64 };
        Role::start(self, FLAG, &worker)
    }
}

/// `P` is the payload of a task, or a request; without a reply of its own a request is answered with `null`.
struct NoOp<P> {
    payload: Payload,
    released: watch::Receiver<()>,
    input: PhantomData<fn() -> P>,
}

#[derive(Debug, Deserialize)]
struct Empty {}

impl<P: DeserializeOwned + Send + 'static> PayloadHandler for NoOp<P> {
    type Payload = P;
    type Prepared = ();

    fn payload_schema(&self) -> Value {
        json!({"type": "object"})
    }

    async fn prepare(&self, _: P, _: &Context) -> Result<(), PrepareError> {
        Ok(())
    }

    async fn execute(&self, (): (), context: &Context) -> Result<(), ExecuteError> {
        match self.payload {
            Payload::Nothing | Payload::Launched => {}
            Payload::Stamp => print_line(&format!("started {} {}", now().as_nanos(), context.task().run.task)),
            Payload::Wait => drop(self.released.clone().changed().await),
        }
        Ok(())
    }
}

/// Work that is started by a word, and looked at when it is woken up.
struct Launched {
    released: watch::Receiver<()>,
    starts: AtomicU64,
    expected: u64,
}

impl Launched {
    fn progress() -> Progress {
        let observed_at = Stamp(jiff::Timestamp::now().as_millisecond());
        Progress { phase: "running".into(), since: None, observed_at, check_in: None }
    }
}

impl StagedHandler for Launched {
    type Payload = Empty;

    fn payload_schema(&self) -> Value {
        json!({"type": "object"})
    }

    fn policy(&self, _: &Empty) -> StagedPolicy {
        StagedPolicy {
            phases: Default::default(),
            infrastructure_retries: 0,
            capacity_retries: 0,
            check_interval: Duration::from_secs(3600),
        }
    }

    async fn adopt(&self, _: Work<'_, Empty>) -> StagedAnswer {
        StagedAnswer::Absent
    }

    async fn start(&self, work: Work<'_, Empty>) -> StagedAnswer {
        if self.starts.fetch_add(1, Ordering::Relaxed) + 1 == self.expected {
            print_line("launched");
        }
        StagedAnswer::Started { handle: work.key().into(), progress: Self::progress() }
    }

    async fn verify(&self, _: Work<'_, Empty>) -> StagedAnswer {
        let is_released = self.released.has_changed().unwrap_or(true);
        if is_released { StagedAnswer::Done } else { StagedAnswer::Progress(Self::progress()) }
    }

    async fn cancel(&self, _: Work<'_, Empty>) -> StagedAnswer {
        StagedAnswer::Canceled
    }

    async fn wakeup(&self, _: Work<'_, Empty>) {
        self.released.clone().changed().await.ok();
    }
}

/// Runs until standard input ends.
pub(crate) async fn run(role: &str) -> Outcome<()> {
    let NoOpWorker { from, capacity, work_dir, payload, expected } = serde_json::from_str(role)?;
    // The log is part of what a task costs.
    log::start(&Log::default(), &Environment::default());
    let (release, released) = watch::channel(());
    let mut reports = None;
    let (source, handler): (Arc<dyn Source>, Arc<dyn DynHandler>) = match from {
        From::Taskcluster { root_url } => {
            let source = Taskcluster::new(TaskclusterConfig {
                api: api_config(&root_url),
                dialect: Dialect::ClaimWork,
                task_queue: QUEUE.to_owned(),
                worker_group: "bench".to_owned(),
                worker_id: "worker".to_owned(),
                artifact_storage: ArtifactStorage::S3,
            })?;
            let handler = match payload {
                Payload::Launched => erase(Staged(Launched { released, starts: AtomicU64::new(0), expected })),
                Payload::Nothing | Payload::Stamp | Payload::Wait => {
                    erase(NoOp::<Empty> { payload, released, input: PhantomData })
                }
            };
            (Arc::new(source), handler)
        }
        From::Amqp { uri, queue, activity_exchange } => {
            reports = activity_exchange.map(|exchange| (broker(&uri), exchange));
            (
                Arc::new(AmqpSource::new(AmqpSourceConfig::new(broker(&uri)?, queue.as_str().into(), "bench"))),
                erase(NoOp::<Request> { payload, released, input: PhantomData }),
            )
        }
        From::Zookeeper { servers, chroot, dialect, queue } => {
            let session_timeout = Duration::from_secs(30);
            let queues = vec![ZooKeeperQueue { path: queue, zone: None }];
            let connect = ConnectConfig { servers, chroot: Some(chroot), tls: None, session_timeout };
            // Several run at once, and no two may have one name.
            let worker_id = format!("bench-{}", std::process::id());
            let source =
                ZooKeeperSource::new(ZooKeeperSourceConfig { connect, dialect, queues, janitor: false, worker_id });
            (Arc::new(source), erase(NoOp::<Empty> { payload, released, input: PhantomData }))
        }
    };
    let binding = SourceBinding { name: "bench".to_owned(), source, handler, env: Default::default() };
    let config = WorkerConfig { capacity, launched_max: u32::try_from(expected)?, work_dir, ..WorkerConfig::default() };
    let worker = Worker::new(config, vec![binding]);
    let control = worker.control();
    let mut background = tokio::task::JoinSet::new();
    background.spawn(print_done(control.clone(), expected));
    if let Some((broker, exchange)) = reports {
        let (key, worker_id) = ("bench".to_owned(), "bench".to_owned());
        let config = activity::Config { broker: broker?, exchange, key, worker_id };
        background.spawn(activity::report(config, control.liveness()));
    }
    let mut lines = BufReader::new(stdin()?).lines();
    let mut run = std::pin::pin!(worker.run());
    print_line("working");
    loop {
        tokio::select! {
            exit = &mut run => return Err(format!("the worker exited by itself: {:?}", exit?).into()),
            line = lines.next_line() => match line?.as_deref() {
                Some("counts") => print_line(&format!("counts {}", serde_json::to_string(&control.counts())?)),
                Some(_) => release.send_replace(()),
                None => break,
            }
        }
    }
    control.release(Some(Duration::from_secs(5))).await;
    run.await?;
    Ok(())
}

async fn print_done(control: Control, expected: u64) {
    let mut interval = tokio::time::interval(Duration::from_millis(5));
    let mut pace = None;
    if expected == 0 {
        return;
    }
    loop {
        interval.tick().await;
        let completed = control.counts().sources.outcomes.completed;
        match &pace {
            None if completed >= Pace::warm_up(expected) => pace = Some(Pace::start(completed)),
            Some(pace) if completed >= expected => return Pace::print(pace, completed),
            None | Some(_) => {}
        }
    }
}
