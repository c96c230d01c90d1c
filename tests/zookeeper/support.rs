//! A chroot of a test's own, Zuul's programs in it, and a worker with a handler of the test's.

use std::sync::Arc;
use std::time::Duration;

use journeyman::handler::{DynHandler, ExecuteError, erase};
use journeyman::source::zookeeper::{Dialect, ZooKeeperQueue, ZooKeeperSource, ZooKeeperSourceConfig};
use journeyman_platform::zookeeper::event_queue::EventQueue;
use journeyman_platform::zookeeper::job_queue::JobQueue;
use journeyman_platform::zookeeper::{ConnectConfig, Session};
use serde_json::Value;
use tokio::io::AsyncBufReadExt as _;
use tokio::process::{Child, Command};

use crate::support::scripted::{self, Scripted, replies};

pub(crate) use crate::support::scripted::{Running, handler};
pub(crate) use crate::support::{needs, until, within};

/// A chroot of the server that all tests share.
pub(crate) struct Tree {
    pub(crate) connect: ConnectConfig,
    pub(crate) session: Arc<Session>,
}

impl Tree {
    pub(crate) async fn new() -> Option<Self> {
        Some(Self::at(&needs("JOURNEYMAN_TEST_ZOOKEEPER")?).await)
    }

    pub(crate) async fn at(servers: &str) -> Self {
        let connect = ConnectConfig {
            servers: servers.to_owned(),
            chroot: Some(format!("/jm-test-{}", uuid::Uuid::new_v4().simple())),
            tls: None,
            session_timeout: Duration::from_secs(20),
        };
        let session = Arc::new(Session::connect(&connect).await.expect("the server answers"));
        Self { connect, session }
    }

    /// The queue of a pipeline, which a scheduler makes.
    pub(crate) async fn with_pipeline() -> Option<Self> {
        let tree = Self::new().await?;
        tree.session.ensure("/zuul/events/tenant/t/pipelines/p/result/queue").await.expect("the pipeline exists");
        Some(tree)
    }

    pub(crate) fn source(&self, dialect: Dialect) -> ZooKeeperSourceConfig {
        ZooKeeperSourceConfig {
            connect: self.connect.clone(),
            dialect,
            queues: vec![ZooKeeperQueue { path: dialect.usual_queue(None), zone: None }],
            janitor: false,
            worker_id: "test-worker".to_owned(),
        }
    }

    pub(crate) fn queue(&self, dialect: Dialect) -> JobQueue {
        JobQueue::new(&dialect.usual_queue(None))
    }

    /// One of Zuul's programs in this chroot; `None` without Zuul.
    pub(crate) fn zuul(&self, program: &str, arguments: &[&str]) -> Option<Program> {
        let python = needs("JOURNEYMAN_TEST_ZUUL_PYTHON")?;
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/zookeeper");
        let mut command = Command::new(python);
        command.arg(format!("{folder}/{program}")).args(["--hosts", &self.connect.servers]);
        command.args(["--chroot", self.connect.chroot.as_deref().expect("a chroot")]).args(arguments);
        command.stdin(std::process::Stdio::piped()).stdout(std::process::Stdio::piped()).kill_on_drop(true);
        let mut child = command.spawn().expect("python starts");
        let lines = tokio::io::BufReader::new(child.stdout.take().expect("it is piped")).lines();
        Some(Program { child, lines })
    }
}

type Lines = tokio::io::Lines<tokio::io::BufReader<tokio::process::ChildStdout>>;

/// A program that prints a line of JSON a result.
pub(crate) struct Program {
    child: Child,
    lines: Lines,
}

impl Program {
    /// The next line about this event.
    pub(crate) async fn says(&mut self, event: &str) -> Value {
        let reading = async {
            loop {
                let line = self.lines.next_line().await.expect("it is text");
                let line = line.unwrap_or_else(|| panic!("it ended without saying {event}"));
                let said: Value = serde_json::from_str(&line).unwrap_or_else(|_| panic!("no JSON: {line}"));
                if said["event"] == event {
                    return said;
                }
            }
        };
        within(event, reading).await
    }

    /// Ends its standard input, until which it holds what it has.
    pub(crate) fn lets_go(&mut self) {
        drop(self.child.stdin.take());
    }

    pub(crate) async fn ends(mut self) -> i32 {
        self.lets_go();
        while within("its output", self.lines.next_line()).await.expect("it is text").is_some() {}
        within("its end", self.child.wait()).await.expect("it is waited for").code().unwrap_or(-1)
    }
}

type Act = scripted::Act<Value>;

/// A handler whose result is made of the payload.
pub(crate) fn returns(result: impl Fn(&Value) -> Value + Send + Sync + 'static) -> Act {
    replies(move |payload, _| result(payload).to_string().into_bytes())
}

/// A handler that runs until it is canceled.
pub(crate) fn never_ends() -> (Act, tokio::sync::mpsc::Receiver<()>) {
    let (started, receiver) = tokio::sync::mpsc::channel(16);
    let act = handler(move |_, context| {
        let started = started.clone();
        async move {
            started.send(()).await.expect("the test listens");
            context.canceled().await;
            Err(ExecuteError::failed("canceled".to_owned()))
        }
    });
    (act, receiver)
}

/// A handler that runs until the test lets it go on.
pub(crate) fn waits() -> (Act, tokio::sync::mpsc::Receiver<()>, tokio::sync::watch::Sender<bool>) {
    let (started, receiver) = tokio::sync::mpsc::channel(16);
    let (go_on, may_go_on) = tokio::sync::watch::channel(false);
    let act = handler(move |_, _| {
        let (started, mut may_go_on) = (started.clone(), may_go_on.clone());
        async move {
            started.send(()).await.expect("the test listens");
            may_go_on.wait_for(|may| *may).await.expect("the test lets it go on");
            Ok(())
        }
    });
    (act, receiver, go_on)
}

/// A worker with a handler of the test's.
pub(crate) fn start(source: ZooKeeperSourceConfig, act: Act) -> Running {
    serve(source, erase(Scripted { prepare: Ok, act }))
}

pub(crate) fn serve(source: ZooKeeperSourceConfig, handler: Arc<dyn DynHandler>) -> Running {
    Running::serving(Arc::new(ZooKeeperSource::new(source)), |settings| settings, handler)
}

/// An event of a Zuul's event queue.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct QueuedEvent {
    pub(crate) path: String,
    /// Its keys, `event_data` among them.
    pub(crate) fields: serde_json::Map<String, Value>,
}

/// Reads the events of a queue in their order, as a scheduler does.
pub(crate) async fn read_events(queue: &EventQueue, session: &Session) -> Vec<QueuedEvent> {
    let prefix = queue.event_prefix();
    let folder = prefix.strip_suffix("/q").expect("the prefix of an event");
    let mut names = session.children(folder).await.expect("it is answered").unwrap_or_default();
    names.sort_unstable();
    let mut events = Vec::new();
    for name in names {
        let path = format!("{folder}/{name}");
        let Some((data, _)) = session.get(&path).await.expect("it is answered") else { continue };
        let mut fields: serde_json::Map<String, Value> = serde_json::from_slice(&data).expect("an event is JSON");
        if let Some(side) = fields.remove("event_data_path") {
            let side = session.read_shards(side.as_str().expect("a path")).await.expect("they are read");
            let side = serde_json::from_slice(&side.expect("its data are there")).expect("data are JSON");
            fields.insert("event_data".to_owned(), side);
        }
        events.push(QueuedEvent { path, fields });
    }
    events
}
