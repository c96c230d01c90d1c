//! A handler that does what a task's payload says, and tells the test what happens.

use std::path::Path;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use journeyman::handler::artifact::{ArtifactDeclaration, ArtifactKind, Optionality};
use journeyman::handler::process::{Launch, RunningProcess};
use journeyman::handler::{self, CancelCause, Context, ExecuteError, ExecuteFailure, PayloadHandler, PrepareError};
use journeyman::source::Source;
use journeyman::worker::{ExitReason, SourceBinding, Worker, WorkerConfig};
use journeyman_domain::id::TaskId;
use journeyman_domain::outcome::{ExceptionReason, Outcome};
use journeyman_platform::host::clock::Clock;
use schemars::JsonSchema;
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::sync::mpsc;

use crate::memory_queue::{Config, MemoryQueue, PollStyle, RunEnd, RunState};

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
    /// Writes files, and declares one of them and a folder.
    Litter,
    /// Writes files and links to them and to the outside, and declares one of them; a folder as `public`.
    Link {
        declare: String,
    },
    /// Leaves a line in the log behind.
    Say,
    /// Declares a file and does not write it.
    Forget,
    /// Declares a file, and removes the directory with it.
    Vanish,
    /// Runs until it is told to end.
    Wait,
    /// Blocks its thread, as a writer does whose reader is slow, until this named pipe is opened.
    Block {
        pipe: String,
    },
    /// The same, after it has started a process that has the named pipe `alive` open and ignores TERM.
    BlockWithProcess {
        pipe: String,
        alive: String,
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

/// The kinds of a queue.
pub const STYLES: [PollStyle; 2] = [
    PollStyle::Claims { long_poll_wait: Duration::from_secs(20) },
    PollStyle::Messages { visibility_timeout: Duration::from_secs(300) },
];
pub const COMPLETED: RunState = RunState::Resolved(RunEnd::Reported(Outcome::Completed));
pub const HANDED_BACK: RunState =
    RunState::Resolved(RunEnd::Reported(Outcome::Exception(ExceptionReason::WorkerShutdown)));

/// A queue in memory, and its clock, which is tokio's.
pub fn memory_queue(style: PollStyle) -> (MemoryQueue, Clock) {
    queue_with(Config { style, ..Config::default() })
}

/// The same with these leases.
pub fn queue_with(config: Config) -> (MemoryQueue, Clock) {
    let clock = Clock::tokio();
    (MemoryQueue::new(config, Arc::new(move || clock.now())), clock)
}

/// Creates a task with this payload.
pub fn create(queue: &MemoryQueue, name: &str, payload: Value) -> TaskId {
    let task = TaskId::parse(name).expect("a task id");
    queue.create(task.clone(), json!({ "payload": payload })).expect("created");
    task
}

/// Runs the worker to its end, which is this one, while the test goes on.
pub async fn runs<T>(worker: Worker, to: ExitReason, meanwhile: impl Future<Output = T>) -> T {
    let (exit, seen) = tokio::join!(worker.run(), meanwhile);
    assert_eq!(exit.expect("it ran"), to);
    seen
}

/// Runs the worker while the test goes on, and drains it.
pub fn drained<T>(worker: Worker, meanwhile: impl Future<Output = T>) -> Pin<Box<impl Future<Output = T>>> {
    let control = worker.control();
    let watch = async move {
        let seen = meanwhile.await;
        control.drain().await;
        seen
    };
    Box::pin(runs(worker, ExitReason::Drained, watch))
}

pub struct Scripted(pub mpsc::Sender<Told>);

/// The tasks of this source, executed as they say.
pub fn binding(source: impl Source, told: mpsc::Sender<Told>) -> SourceBinding {
    let handler = handler::erase(Scripted(told));
    SourceBinding { name: "memory".into(), source: Arc::new(source), handler, env: Arc::default() }
}

/// Without a limit on drains.
pub fn settings(folder: &Path, clock: Clock) -> WorkerConfig {
    WorkerConfig { work_dir: folder.into(), clock, drain_deadline: None, ..WorkerConfig::default() }
}

impl PayloadHandler for Scripted {
    type Payload = Script;
    type Prepared = Script;

    fn payload_schema(&self) -> Value {
        schemars::schema_for!(Script).into()
    }

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
                    let mut declared = ArtifactDeclaration::new("public/out.txt", what);
                    if optional {
                        declared.optionality = Optionality::Optional;
                    }
                    context.artifacts().declare(declared).expect("declared");
                    Ok(())
                }
                Script::Litter => {
                    let place = context.workdir();
                    std::fs::create_dir_all(place.join("kept/folder")).expect("created");
                    std::fs::create_dir_all(place.join("other/folder")).expect("created");
                    for file in ["big", "kept/big", "kept/file", "kept/folder/a", "other/folder/b"] {
                        std::fs::write(place.join(file), file).expect("written");
                    }
                    context.artifacts().file("public/file", "kept/./file").expect("declared");
                    context.artifacts().directory("public/folder", "kept/folder").expect("declared");
                    context.log().write_line("hello from the task");
                    Ok(())
                }
                Script::Link { declare } => {
                    let at = |name: &str| context.workdir().join(name);
                    std::fs::create_dir_all(at("folder/deep")).expect("created");
                    std::fs::create_dir_all(at("folder/logs")).expect("created");
                    std::fs::write(at("file"), "made by the task").expect("written");
                    std::fs::write(at("folder/logs/live.log"), "").expect("written");
                    let links = [
                        ("file", "link"),
                        ("/etc/passwd", "outside"),
                        ("../../file", "folder/deep/link"),
                        ("/etc", "folder/outside"),
                        ("folder", "linked-folder"),
                    ];
                    for (target, link) in links {
                        std::os::unix::fs::symlink(target, at(link)).expect("linked");
                    }
                    if declare.ends_with("folder") {
                        context.artifacts().directory("public", &declare).expect("declared");
                    } else {
                        context.artifacts().file("public/deep/link", &declare).expect("declared");
                    }
                    Ok(())
                }
                Script::Say => {
                    context.log().write_line("hello from the task");
                    Ok(())
                }
                Script::Forget => {
                    context.artifacts().file("public/out.txt", "out.txt").expect("declared");
                    Ok(())
                }
                Script::Vanish => {
                    context.artifacts().file("public/out.txt", "out.txt").expect("declared");
                    std::fs::write(context.workdir().join("out.txt"), "made by the task").expect("written");
                    std::fs::remove_dir_all(context.workdir()).expect("removed");
                    Ok(())
                }
                Script::Block { pipe } => {
                    std::fs::OpenOptions::new().write(true).open(pipe).expect("the pipe is there");
                    Ok(())
                }
                Script::BlockWithProcess { pipe, alive } => {
                    let script = format!("trap '' TERM; exec sleep 600 > {alive}");
                    let argv = ["/bin/sh".to_owned(), "-c".to_owned(), script];
                    let env = std::env::var("PATH").into_iter().map(|path| ("PATH".to_owned(), path)).collect();
                    let running = RunningProcess::start(Launch::new(&argv, &env, context)).await.expect("started");
                    std::fs::OpenOptions::new().write(true).open(pipe).expect("the pipe is there");
                    drop(running);
                    Ok(())
                }
                Script::Wait => std::future::pending().await,
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
