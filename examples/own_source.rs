//! A worker with a source of its own: `cargo run --example own_source`. The queue is in memory.

#[allow(dead_code, reason = "tests use what the example does not")]
pub(crate) mod memory_queue;

use std::sync::Arc;
use std::time::Duration;

use journeyman::clock::Clock;
use journeyman::handler::{Context, ExecuteError, PayloadHandler, PrepareError, erase};
use journeyman::id::TaskId;
use journeyman::worker::{SourceBinding, Worker, WorkerConfig};
use schemars::JsonSchema;
use serde::Deserialize;
use tokio::sync::Notify;

use memory_queue::{Config as QueueSettings, MemoryQueue, PollStyle, RunState};

/// The payload of a task.
#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct Greeting {
    /// The name of the person to greet.
    name: String,
}

struct Greet {
    greeted: Arc<Notify>,
}

impl PayloadHandler for Greet {
    type Payload = Greeting;
    type Prepared = Greeting;

    fn payload_schema(&self) -> serde_json::Value {
        schemars::schema_for!(Greeting).into()
    }

    async fn prepare(&self, greeting: Greeting, _: &Context) -> Result<Greeting, PrepareError> {
        if greeting.name.is_empty() {
            return Err(PrepareError::malformed(vec!["payload/name: must not be empty".to_owned()]));
        }
        Ok(greeting)
    }

    async fn execute(&self, greeting: Greeting, context: &Context) -> Result<(), ExecuteError> {
        let failed = |error: &dyn std::error::Error| ExecuteError::failed(error.to_string());
        context.log().write_line(&format!("hello, {}", greeting.name));
        std::fs::write(context.workdir().join("card.txt"), greeting.name).map_err(|error| failed(&error))?;
        context.artifacts().file("public/card.txt", "card.txt").map_err(|error| failed(&error))?;
        self.greeted.notify_one();
        Ok(())
    }
}

/// Runs one task and returns the states of its runs.
pub(crate) async fn greet(
    name: &str,
    work_dir: std::path::PathBuf,
) -> Result<(MemoryQueue, Vec<RunState>), Box<dyn std::error::Error>> {
    let clock = Clock::boot();
    // A draining worker waits for its poll, so keep long polls short.
    let style = PollStyle::Claims { long_poll_wait: Duration::from_millis(200) };
    let queue = MemoryQueue::new(QueueSettings { style, ..Default::default() }, Arc::new(move || clock.now()));
    let task = TaskId::parse("greeting-1").ok_or("not a task id")?;
    queue.create(task.clone(), serde_json::json!({"payload": {"name": name}}))?;

    let greeted = Arc::new(Notify::new());
    let source = SourceBinding {
        name: "memory".to_owned(),
        source: Arc::new(queue.source("greeter")),
        handler: erase(Greet { greeted: Arc::clone(&greeted) }),
        env: Default::default(),
    };
    let worker = Worker::new(WorkerConfig { work_dir, ..WorkerConfig::default() }, vec![source]);
    let control = worker.control();
    let drain = async {
        greeted.notified().await;
        control.drain().await;
    };
    let (exit, ()) = tokio::join!(worker.run(), drain);
    tracing::info!(exit = ?exit?, "the worker has exited");
    let states = queue.states(&task);
    Ok((queue, states))
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    // Call this before any thread starts: the worker uses its own binary to start payloads in their control group.
    journeyman::shim();
    tokio::runtime::Runtime::new()?.block_on(run())
}

async fn run() -> Result<(), Box<dyn std::error::Error>> {
    tracing_subscriber::fmt().init();
    let work_dir = std::env::temp_dir().join(format!("own-source-{}", std::process::id()));
    let (_, states) = greet("you", work_dir.clone()).await?;
    tracing::info!(?states, "the task has ended");
    std::fs::remove_dir_all(work_dir)?;
    Ok(())
}
