//! Work that runs elsewhere is held beside the capacity.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use journeyman::handler::erase;
use journeyman::handler::staged::{Progress, Staged, StagedAnswer, StagedHandler, StagedPolicy, Stamp, Work};
use journeyman::worker::{SourceBinding, Worker, WorkerConfig};
use journeyman_domain::id::TaskId;
use journeyman_domain::outcome::Outcome;
use journeyman_platform::host::clock::Clock;
use serde_json::{Value, json};
use tokio::sync::watch;

use crate::memory_queue::{Config, MemoryQueue, PollStyle, RunEnd, RunState};

const TASKS: usize = 200;

/// Work that is done once all of it has been launched.
struct Elsewhere {
    launched: watch::Sender<usize>,
}

impl StagedHandler for Elsewhere {
    type Payload = Value;

    fn policy(&self, _payload: &Value) -> StagedPolicy {
        StagedPolicy {
            phases: BTreeMap::new(),
            infrastructure_retries: 0,
            capacity_retries: 0,
            check_interval: Duration::from_secs(3600),
        }
    }

    async fn adopt(&self, _work: Work<'_, Value>) -> StagedAnswer {
        StagedAnswer::Absent
    }

    async fn start(&self, work: Work<'_, Value>) -> StagedAnswer {
        self.launched.send_modify(|launched| *launched += 1);
        let observed_at = Stamp(0);
        let progress = Progress { phase: "running".into(), since: None, observed_at, check_in: None };
        StagedAnswer::Started { handle: work.context.task().run.task.as_str().into(), progress }
    }

    async fn verify(&self, _work: Work<'_, Value>) -> StagedAnswer {
        StagedAnswer::Done
    }

    async fn cancel(&self, _work: Work<'_, Value>) -> StagedAnswer {
        StagedAnswer::Canceled
    }

    async fn wakeup(&self, _work: Work<'_, Value>) {
        let mut launched = self.launched.subscribe();
        launched.wait_for(|launched| *launched == TASKS).await.expect("the handler stays");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn one_slot_launches_two_hundred_tasks_that_wait_for_each_other() {
    let folder = tempfile::tempdir().expect("a folder");
    let clock = Clock::boot();
    let style = PollStyle::Claims { long_poll_wait: Duration::from_millis(200) };
    let queue = MemoryQueue::new(Config { style, ..Config::default() }, Arc::new(move || clock.now()));
    let tasks: Vec<TaskId> =
        (0..TASKS).map(|number| TaskId::parse(&format!("launched-{number}")).expect("a task id")).collect();
    for task in &tasks {
        queue.create(task.clone(), json!({ "payload": {} })).expect("it is created");
    }
    let source = SourceBinding {
        name: "memory".to_owned(),
        source: Arc::new(queue.source("launcher")),
        handler: erase(Staged(Elsewhere { launched: watch::Sender::new(0) })),
        env: Arc::default(),
    };
    let config = WorkerConfig { work_dir: folder.path().join("work"), ..WorkerConfig::default() };
    assert_eq!((config.capacity, config.launched_max), (1, 1_000));
    let worker = Worker::new(config, vec![source]);
    let control = worker.control();
    let watch = async {
        let mut look = tokio::time::interval(Duration::from_millis(20));
        while control.counts().sources.outcomes.completed < TASKS as u64 {
            look.tick().await;
        }
        control.drain().await;
    };
    let ended = tokio::time::timeout(Duration::from_secs(60), async { tokio::join!(worker.run(), watch) }).await;
    ended.expect("the tasks wait for slots").0.expect("it ran");
    for task in &tasks {
        assert_eq!(queue.states(task), [RunState::Resolved(RunEnd::Reported(Outcome::Completed))], "{task}");
    }
}
