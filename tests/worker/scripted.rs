//! A handler that does what a task's payload says, and tells the test what happens.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use journeyman::handler::artifact::{ArtifactDeclaration, ArtifactKind};
use journeyman::handler::{self, CancelCause, Context, ExecuteError, ExecuteFailure, PayloadHandler, PrepareError};
use journeyman::source::memory::MemoryQueue;
use journeyman::worker::SourceBinding;
use schemars::JsonSchema;
use serde::Deserialize;
use tokio::sync::mpsc;

/// What a task is told to do.
#[derive(Debug, Clone, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case", tag = "do", deny_unknown_fields)]
pub enum Script {
    Complete,
    Fail,
    Panic,
    RetryLater,
    /// Leaves a file and a line in the log behind.
    Leave {
        #[serde(default)]
        optional: bool,
    },
    /// Declares a file and does not write it.
    Forget,
    /// Runs until it is told to end.
    Wait,
    /// Blocks its thread, as a writer does whose reader is slow, until this named pipe is opened.
    Block {
        pipe: String,
    },
    /// Runs until its lease was extended so many times.
    Extensions {
        times: u32,
    },
    /// Runs for so long, on tokio's clock.
    Sleep {
        seconds: u64,
    },
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Told {
    Started(String),
    Canceled(String, CancelCause),
}

pub struct Scripted(pub mpsc::Sender<Told>);

/// The tasks of this queue, done as they say.
pub fn feed(queue: &MemoryQueue, told: mpsc::Sender<Told>) -> SourceBinding {
    SourceBinding {
        name: "memory".into(),
        source: Arc::new(queue.source("worker")),
        handler: handler::erase(Scripted(told)),
        env: BTreeMap::new(),
    }
}

impl PayloadHandler for Scripted {
    type Payload = Script;
    type Prepared = Script;

    async fn prepare(&self, payload: Script, _: &Context) -> Result<Script, PrepareError> {
        Ok(payload)
    }

    async fn execute(&self, script: Script, context: &Context) -> Result<(), ExecuteError> {
        let run = context.task().run.to_string();
        self.0.send(Told::Started(run.clone())).await.expect("the test listens");
        let work = async {
            match script {
                Script::Complete => Ok(()),
                Script::Fail => Err(ExecuteError::failed("as told")),
                Script::Panic => panic!("as told"),
                Script::RetryLater => Err(ExecuteError::new(ExecuteFailure::Intermittent, "as told")),
                Script::Leave { optional } => {
                    context.log().write_line("hello from the task");
                    std::fs::write(context.workdir().join("out.txt"), "made by the task").expect("written");
                    let what = ArtifactKind::File { path: "out.txt".into(), content_type: None };
                    let declared = ArtifactDeclaration::new("public/out.txt", what);
                    let declared = if optional { declared.optional() } else { declared };
                    context.artifacts().declare(declared).expect("declared");
                    Ok(())
                }
                Script::Forget => {
                    context.artifacts().file("public/out.txt", "out.txt").expect("declared");
                    Ok(())
                }
                Script::Block { pipe } => {
                    std::fs::OpenOptions::new().write(true).open(pipe).expect("the pipe is there");
                    Ok(())
                }
                Script::Wait => std::future::pending().await,
                Script::Extensions { times } => {
                    let mut lease = context.watch_expires_at();
                    for _ in 0..times {
                        lease.changed().await.expect("the lease is kept");
                    }
                    Ok(())
                }
                Script::Sleep { seconds } => {
                    tokio::time::sleep(Duration::from_secs(seconds)).await;
                    Ok(())
                }
            }
        };
        tokio::select! {
            result = work => result,
            order = context.canceled() => {
                self.0.send(Told::Canceled(run, order.cause)).await.expect("the test listens");
                Err(ExecuteError::failed("told to end"))
            }
        }
    }
}
