//! Requests of a real ZooKeeper, in each dialect. It keeps no history of runs, so that what needs one is shown in `tests/zookeeper`.

use std::sync::Arc;
use std::time::Duration;

use journeyman::source::Source;
use journeyman::source::zookeeper::{Dialect, ZooKeeperQueue, ZooKeeperSource, ZooKeeperSourceConfig};
use journeyman_domain::id::{Run, TaskId};
use journeyman_platform::zookeeper::job_queue::JobQueue;
use journeyman_platform::zookeeper::submit::Submission;
use journeyman_platform::zookeeper::{ConnectConfig, Session};
use serde_json::Value;

use crate::conformance::bench::{Adapter, Bench, Fut, Need, Rig, Span, Spec};

const EVENTS: &str = "/zuul/events/tenant/t/pipelines/p/result/queue";

pub(crate) fn adapter() -> Adapter {
    let Some(servers) = std::env::var("JOURNEYMAN_TEST_ZOOKEEPER").ok().filter(|servers| !servers.is_empty()) else {
        let why = "JOURNEYMAN_TEST_ZOOKEEPER names no server; tests/run starts one".into();
        return Adapter::Absent { name: "zookeeper", why, needed: true };
    };
    let dialects = [Dialect::Native, Dialect::ZuulMerger, Dialect::ZuulExecutor];
    let rig = |dialect| Box::new(Ensemble { servers: servers.clone(), dialect }) as Box<dyn Rig>;
    Adapter::Present { rigs: dialects.map(rig).into() }
}

struct Ensemble {
    servers: String,
    dialect: Dialect,
}

impl Rig for Ensemble {
    fn name(&self) -> String {
        format!("zookeeper {:?}", self.dialect)
    }

    fn can(&self, need: Need) -> bool {
        matches!(need, Need::Claims | Need::Waits)
    }

    fn bench(&self) -> Fut<'static, Arc<dyn Bench>> {
        let connect = ConnectConfig {
            servers: self.servers.clone(),
            chroot: Some(format!("/jm-test-{}", uuid::Uuid::new_v4().simple())),
            tls: None,
            session_timeout: Duration::from_secs(20),
        };
        let dialect = self.dialect;
        Box::pin(async move {
            let session = Session::connect(&connect).await.expect("it is connected to");
            session.ensure(EVENTS).await.expect("the pipeline exists");
            let queue = dialect.usual_queue(None);
            Arc::new(QueueBench { connect, session, dialect, queue }) as Arc<dyn Bench>
        })
    }
}

struct QueueBench {
    connect: ConnectConfig,
    session: Session,
    dialect: Dialect,
    queue: String,
}

impl QueueBench {
    async fn end_of(&self, task: &TaskId) -> Option<String> {
        let queue = JobQueue::new(&self.queue);
        let result = self.session.get(&queue.path("results", task.as_str())).await.expect("it is answered");
        let result: Option<Value> = result.map(|(data, _)| serde_json::from_slice(&data).expect("it is JSON"));
        match self.dialect {
            Dialect::Native => result.map(|result| result["outcome"].as_str().expect("a word").to_owned()),
            Dialect::ZuulMerger => result.map(|_| "completed".to_owned()),
            Dialect::ZuulExecutor => {
                for name in self.session.children(EVENTS).await.expect("it is answered").unwrap_or_default() {
                    let event = self.session.get(&format!("{EVENTS}/{name}")).await.expect("it is answered");
                    let event: Value = serde_json::from_slice(&event.expect("it is there").0).expect("it is JSON");
                    let data = &event["event_data"];
                    if event["event_type"] == "BuildCompletedEvent" && data["build_uuid"] == task.as_str() {
                        return Some(
                            if data["data"]["result"] == "SUCCESS" { "completed" } else { "failed" }.to_owned(),
                        );
                    }
                }
                None
            }
        }
    }
}

impl Bench for QueueBench {
    fn source(&self, worker: &str) -> Arc<dyn Source> {
        Arc::new(ZooKeeperSource::new(ZooKeeperSourceConfig {
            connect: self.connect.clone(),
            dialect: self.dialect,
            queues: vec![ZooKeeperQueue { path: self.queue.clone(), zone: None }],
            janitor: false,
            worker_id: worker.to_owned(),
        }))
    }

    fn create(&self, spec: Spec) -> Fut<'_, TaskId> {
        Box::pin(async move {
            let fields = [("tenant_name", "t"), ("pipeline_name", "p")];
            let submission = Submission {
                dialect: self.dialect,
                payload: spec.payload,
                precedence: 200,
                fields: fields.map(|(key, value)| (key.to_owned(), Value::from(value))).into_iter().collect(),
                waits: true,
            };
            let id = JobQueue::new(&self.queue).add(&self.session, &submission).await.expect("it is added");
            TaskId::parse(&id).expect("a good id")
        })
    }

    fn states<'a>(&'a self, task: &'a TaskId) -> Fut<'a, Vec<String>> {
        Box::pin(async move { vec![self.end_of(task).await.unwrap_or_else(|| "running".to_owned())] })
    }

    fn cancel<'a>(&'a self, _task: &'a TaskId) -> Fut<'a, ()> {
        panic!("only asked of what keeps a history");
    }

    fn artifact<'a>(&'a self, _run: &'a Run, _name: &'a str) -> Fut<'a, Vec<u8>> {
        panic!("a request has no artifacts");
    }

    fn garbage(&self) -> Fut<'_, ()> {
        panic!("there are no messages");
    }

    fn pass(&self, span: Span) -> Fut<'_, ()> {
        panic!("{span:?} cannot be made to pass at a server");
    }
}
