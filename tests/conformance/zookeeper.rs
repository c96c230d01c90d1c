//! Requests of a real ZooKeeper, in each dialect. It keeps no history of runs, so that what needs one is shown in `tests/zookeeper`.

use std::sync::Arc;

use journeyman::source::Source;
use journeyman::source::zookeeper::{Dialect, ZooKeeperSource, ZooKeeperSourceConfig};
use journeyman_domain::id::TaskId;
use journeyman_platform::zookeeper::submit::Submission;
use serde_json::Value;

use crate::conformance::bench::{Adapter, Bench, Fut, Need, Rig, Spec};
use crate::zookeeper::support::Tree;

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
        let (servers, dialect) = (self.servers.clone(), self.dialect);
        Box::pin(async move {
            let tree = Tree::at(&servers).await;
            tree.session.ensure(EVENTS).await.expect("the pipeline exists");
            Arc::new(QueueBench { tree, dialect }) as Arc<dyn Bench>
        })
    }
}

struct QueueBench {
    tree: Tree,
    dialect: Dialect,
}

impl QueueBench {
    async fn end_of(&self, task: &TaskId) -> Option<String> {
        let (queue, session) = (self.tree.queue(self.dialect), &self.tree.session);
        let result = session.get(&queue.path("results", task.as_str())).await.expect("it is answered");
        let result: Option<Value> = result.map(|(data, _)| serde_json::from_slice(&data).expect("it is JSON"));
        match self.dialect {
            Dialect::Native => result.map(|result| result["outcome"].as_str().expect("a word").to_owned()),
            Dialect::ZuulMerger => result.map(|_| "completed".to_owned()),
            Dialect::ZuulExecutor => {
                for name in session.children(EVENTS).await.expect("it is answered").unwrap_or_default() {
                    let event = session.get(&format!("{EVENTS}/{name}")).await.expect("it is answered");
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
        let config = ZooKeeperSourceConfig { worker_id: worker.to_owned(), ..self.tree.source(self.dialect) };
        Arc::new(ZooKeeperSource::new(config))
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
            let id = self.tree.queue(self.dialect).add(&self.tree.session, &submission).await.expect("it is added");
            TaskId::parse(&id).expect("a good id")
        })
    }

    fn states<'a>(&'a self, task: &'a TaskId) -> Fut<'a, Vec<String>> {
        Box::pin(async move { vec![self.end_of(task).await.unwrap_or_else(|| "running".to_owned())] })
    }
}
