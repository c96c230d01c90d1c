//! The queue in memory, in both of its styles, on a clock that is moved by hand.

use std::os::unix::fs::FileExt as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use journeyman::source::{ArtifactBody, Source};
use journeyman_domain::id::{PriorityQueue, Run, TaskId};
use journeyman_domain::time::Instant;
use serde_json::json;

use crate::conformance::bench::{Adapter, Bench, Fut, Need, Rig, Span, Spec};
use crate::memory_queue::{Config, MemoryQueue, PollStyle, RunEnd, RunState};

const LEASE: Duration = Duration::from_secs(60);
const HIDDEN: Duration = Duration::from_secs(30);

pub(crate) fn adapter() -> Adapter {
    let messages = InMemory { style: PollStyle::Messages { visibility_timeout: HIDDEN } };
    let claims = InMemory { style: PollStyle::Claims { long_poll_wait: Duration::from_secs(20) } };
    Adapter::Present { rigs: vec![Box::new(messages), Box::new(claims)] }
}

struct InMemory {
    style: PollStyle,
}

impl Rig for InMemory {
    fn name(&self) -> String {
        match self.style {
            PollStyle::Messages { .. } => "memory, messages".into(),
            PollStyle::Claims { .. } => "memory, claims".into(),
        }
    }

    fn can(&self, need: Need) -> bool {
        let messages = matches!(self.style, PollStyle::Messages { .. });
        match need {
            Need::Messages | Need::Redelivery | Need::Garbage => messages,
            Need::Waits | Need::Recovery => !messages,
            _ => true,
        }
    }

    fn bench(&self) -> Fut<'static, Arc<dyn Bench>> {
        let style = self.style;
        Box::pin(async move {
            let seconds = Arc::new(AtomicU64::new(1000));
            let clock = Arc::clone(&seconds);
            let settings = Config { style, lease: LEASE, ..Config::default() };
            let now = move || Instant::at(Duration::from_secs(clock.load(Ordering::SeqCst)));
            let bench = InMemoryBench { queue: MemoryQueue::new(settings, Arc::new(now)), seconds };
            Arc::new(bench) as Arc<dyn Bench>
        })
    }
}

struct InMemoryBench {
    queue: MemoryQueue,
    seconds: Arc<AtomicU64>,
}

fn shown(state: RunState) -> String {
    match state {
        RunState::Pending => "pending".into(),
        RunState::Running => "running".into(),
        RunState::Resolved(RunEnd::ClaimExpired) => "exception/claim-expired".into(),
        RunState::Resolved(RunEnd::Canceled) => "exception/canceled".into(),
        RunState::Resolved(RunEnd::Reported(outcome)) => outcome.to_string().replace(" (", "/").replace(')', ""),
    }
}

impl Bench for InMemoryBench {
    fn source(&self, worker: &str) -> Arc<dyn Source> {
        Arc::new(self.queue.source(worker))
    }

    fn create(&self, spec: Spec) -> Fut<'_, TaskId> {
        Box::pin(async move {
            let task = TaskId::parse(&uuid::Uuid::new_v4().simple().to_string()).expect("a good id");
            let definition = json!({ "priority": spec.priority, "retries": spec.retries, "payload": spec.payload });
            self.queue.create(task.clone(), definition).expect("the id is fresh");
            task
        })
    }

    fn cancel<'a>(&'a self, task: &'a TaskId) -> Fut<'a, ()> {
        Box::pin(async { self.queue.cancel(task) })
    }

    fn states<'a>(&'a self, task: &'a TaskId) -> Fut<'a, Vec<String>> {
        Box::pin(async { self.queue.states(task).into_iter().map(shown).collect() })
    }

    fn artifact<'a>(&'a self, run: &'a Run, name: &'a str) -> Fut<'a, Vec<u8>> {
        Box::pin(async move {
            let mut name = name.to_owned();
            loop {
                match self.queue.artifact(run, &name).expect("it was stored") {
                    ArtifactBody::File { file, bytes, .. } => {
                        let mut content = vec![0; usize::try_from(bytes).expect("small")];
                        file.read_exact_at(&mut content, 0).expect("it is read");
                        return content;
                    }
                    ArtifactBody::Link { target, .. } => name = target,
                    other @ (ArtifactBody::Reference { .. } | ArtifactBody::Error { .. }) => {
                        panic!("{name} is {other:?}")
                    }
                }
            }
        })
    }

    fn garbage(&self) -> Fut<'_, ()> {
        Box::pin(async { self.queue.put_unreadable(PriorityQueue(6)) })
    }

    fn pass(&self, span: Span) -> Fut<'_, ()> {
        let span = match span {
            Span::MostOfALease => LEASE * 2 / 3,
            Span::ALease => LEASE,
            Span::AHiding => HIDDEN,
        };
        self.seconds.fetch_add(span.as_secs(), Ordering::SeqCst);
        Box::pin(async {})
    }
}
