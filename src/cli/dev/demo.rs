//! `journeyman dev --demo`: creates the tasks, shows them until they are resolved, and holds each against how it has to
//! end.

use std::fs;
use std::future::Future;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::pin::pin;
use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use serde_json::json;
use tokio::time::Instant;

use super::super::exit::{Ended, Exit, Failure};
use super::super::place;
use super::super::signals::Signals;
use super::super::task::{self, status};
use super::super::{assemble, output, worker};
use super::screen::{Judged, Row, Screen};
use super::tasks::{self, DemoTask, GREET, GREET_PROGRAM, Proof};
use super::{CLIENT_ID, Dev};
use crate::config::Environment;
use crate::config::schema::{Config, Handler, HandlerKind};
use crate::config::values::Span;
use crate::domain::id::{Run, TaskId};
use crate::limits::{DEMO_LOG_BYTES_MAX, DEMO_REDRAW, DEMO_TIME_MAX, TASK_LIST_PAGES_MAX};
use crate::source::Refused;
use crate::source::taskcluster::Api;
use crate::source::taskcluster::words::{fresh_id, stamp};
use status::{State, Status};

/// How long a claim lasts in the demo: short enough that one is seen being reclaimed, which is at half of so short a claim,
/// and long enough that a machine may stand still for a quarter of it before a claim is lost.
pub(super) const CLAIM_TIMEOUT: Duration = Duration::from_secs(20);
/// The file in the demo's room that the long task waits for. It is made when its claim is seen extended.
const RECLAIMED: &str = "reclaimed";
/// How much of a task's log is kept in the demo: little enough that one is seen being cut.
const LOG_MAX: &str = "1MiB";

/// What of a log is worth the table that it is written into.
pub(super) const QUIET: &str = "error";

/// Fits the configuration to the demo, where nobody said otherwise, and brings the handler in shell.
pub(super) fn configure(config: &mut Config, room: &Path, set: impl Fn(&str) -> bool) -> Result<(), Failure> {
    let built_in = |what: String| Failure::new(Exit::Internal, what);
    if !set("worker.cancel_grace") {
        config.worker.cancel_grace = Span(Duration::from_secs(2));
    }
    if !set("log.task_max") {
        config.log.task_max = LOG_MAX.parse().map_err(built_in)?;
    }
    if !set("log.level") {
        // The table is drawn over what a log would write between.
        config.log.level = QUIET.parse().map_err(built_in)?;
    }
    // The demo is the same everywhere.
    config.handler.clear();
    let path = room.join("greet.sh");
    fs::write(&path, GREET_PROGRAM)
        .and_then(|()| fs::set_permissions(&path, fs::Permissions::from_mode(0o700)))
        .map_err(|error| Failure::new(Exit::Unfit, format!("cannot write {}: {error}", path.display())))?;
    let exec = vec![path.display().to_string()];
    config.handler.insert(GREET.to_owned(), Handler { kind: HandlerKind::Program, exec, ..Handler::default() });
    Ok(())
}

/// Runs the demo to its end.
pub(super) async fn run(dev: Dev, room: &Path, mut signals: Signals, environment: &Environment) -> Ended {
    let api = place::api(dev.queue.root_url(), Some(place::credentials(CLIENT_ID, &dev.token, None)?))?;
    let mut demo = Demo::new(api, room.join(RECLAIMED), environment);
    output::line(&format!(
        "queue {}, {} tasks at once, claims of {} s",
        dev.queue.root_url(),
        dev.config.worker.capacity,
        CLAIM_TIMEOUT.as_secs()
    ))?;
    // All of them wait before the first is claimed, so that the priorities decide.
    tokio::select! {
        created = demo.create() => created?,
        () = signals.next() => {
            dev.queue.stop().await;
            return Err(Failure::new(Exit::No, "ended before the first task was run"));
        }
    }
    let worker = assemble::worker(&dev.config, environment)?;
    let control = worker.control();
    let mut worker = pin!(worker::until_gone(worker, signals.obey(control.clone())));
    let ended = tokio::select! {
        gone = &mut worker => gone.map(|_| Exit::No),
        shown = demo.show() => shown,
        () = dev.wake(control.clone()) => Err(Failure::new(Exit::Internal, "the queue has ended by itself")),
    };
    control.drain().await;
    let ended = finish(ended, worker).await;
    dev.queue.stop().await;
    demo.screen.conclude(&demo.rows, demo.took)?;
    ended
}

/// Waits for the worker, where it is still there, and keeps the first thing that went wrong.
async fn finish(ended: Ended, worker: impl Future<Output = Ended>) -> Ended {
    let ended = ended?;
    if ended != Exit::Done {
        return Ok(ended);
    }
    match tokio::time::timeout(DEMO_TIME_MAX, worker).await {
        Ok(drained) => drained,
        Err(_) => Err(Failure::new(Exit::No, "every task ended, and the worker could not be drained")),
    }
}

struct Demo {
    api: Api,
    /// See [`RECLAIMED`].
    reclaimed: PathBuf,
    tasks: Vec<(TaskId, DemoTask)>,
    rows: Vec<Row>,
    screen: Screen,
    began: Instant,
    /// How long the tasks took, as last seen.
    took: Duration,
}

impl Demo {
    fn new(api: Api, reclaimed: PathBuf, environment: &Environment) -> Self {
        let tasks: Vec<_> = tasks::tasks(&reclaimed).into_iter().map(|task| (fresh_id(), task)).collect();
        let row = |(_, task): &(TaskId, DemoTask)| Row {
            name: task.name,
            shows: task.shows,
            status: None,
            judged: Judged::NotYet,
        };
        let rows: Vec<_> = tasks.iter().map(row).collect();
        let screen = Screen::new(environment, rows.len());
        Self { api, reclaimed, tasks, rows, screen, began: Instant::now(), took: Duration::ZERO }
    }

    async fn create(&self) -> Result<(), Failure> {
        let now = Timestamp::now();
        let deadline = now + SignedDuration::from_mins(10);
        for (id, task) in &self.tasks {
            let definition = json!({
                "provisionerId": "dev",
                "workerType": task.handler,
                "created": stamp(now),
                "deadline": stamp(deadline),
                "priority": task.priority,
                "payload": task.payload,
                "metadata": {
                    "name": task.name,
                    "description": task.shows,
                    "owner": "nobody@example.com",
                    "source": "https://example.com/journeyman",
                },
            });
            self.api.create_task(id, definition).await.map_err(refused)?;
        }
        Ok(())
    }

    /// Shows the tasks until all of them are resolved.
    async fn show(&mut self) -> Ended {
        let mut canceled = false;
        while self.began.elapsed() < DEMO_TIME_MAX {
            for at in 0..self.tasks.len() {
                if self.rows[at].judged == Judged::NotYet {
                    self.look(at, &mut canceled).await?;
                }
            }
            self.took = self.began.elapsed();
            self.screen.show(&self.rows, self.took)?;
            if self.rows.iter().all(|row| row.judged != Judged::NotYet) {
                let right = self.rows.iter().all(|row| row.judged == Judged::Right);
                return Ok(if right { Exit::Done } else { Exit::No });
            }
            tokio::time::sleep(DEMO_REDRAW).await;
        }
        for row in self.rows.iter_mut().filter(|row| row.judged == Judged::NotYet) {
            row.judged = Judged::Wrong(format!("was not resolved within {} s", DEMO_TIME_MAX.as_secs()));
        }
        Ok(Exit::No)
    }

    async fn look(&mut self, at: usize, canceled: &mut bool) -> Result<(), Failure> {
        let (id, task) = &self.tasks[at];
        let status = Status::read(&self.api.task_status(id).await.map_err(refused)?);
        if task.proof == Proof::Canceled && status.state == State::Running && !*canceled {
            self.api.cancel_task(id).await.map_err(refused)?;
            *canceled = true;
        }
        let extended = || status.runs.last().is_some_and(|run| run.was_extended(CLAIM_TIMEOUT));
        if task.proof == Proof::Reclaimed && status.state == State::Running && extended() {
            fs::write(&self.reclaimed, "").map_err(|error| Failure::of(Exit::Unfit, &error))?;
            self.rows[at].shows = tasks::EXTENDED;
        }
        if status.is_resolved() {
            // What the proof needs of other tasks may not be there yet; then it is looked at again.
            if let Some(wrong) = tasks::complaint(task.end, &status) {
                let said = self.last_line(id, &status).await;
                self.rows[at].judged = Judged::Wrong(format!("{wrong}{said}"));
            } else if let Some(judged) = self.prove(id, task, &status).await? {
                self.rows[at].judged = judged;
            }
        }
        self.rows[at].status = Some(status);
        Ok(())
    }

    async fn prove(&self, id: &TaskId, task: &DemoTask, status: &Status) -> Result<Option<Judged>, Failure> {
        let holds =
            |holds: bool, wrong: &str| Some(if holds { Judged::Right } else { Judged::Wrong(wrong.to_owned()) });
        let last = status.runs.last();
        let run = Run { task: id.clone(), run: last.map_or(0, |run| run.number) };
        Ok(match task.proof {
            Proof::None | Proof::Canceled => Some(Judged::Right),
            Proof::Reclaimed => {
                holds(last.is_some_and(|run| run.was_extended(CLAIM_TIMEOUT)), "its claim was never extended")
            }
            Proof::Artifacts(names) => {
                let found = self.artifacts(&run).await?;
                let missing = names.iter().find(|name| !found.iter().any(|found| found == *name));
                holds(missing.is_none(), &format!("the artifact {} is missing", missing.unwrap_or(&"")))
            }
            Proof::LogHolds(words) => {
                holds(self.log(&run).await?.contains(words), &format!("its log does not hold \"{words}\""))
            }
            Proof::LogCut => {
                let log = self.log(&run).await?;
                let both = log.contains("one more line") && log.contains("the end");
                holds(both && log.len() < DEMO_LOG_BYTES_MAX, "its log was not cut as it should be")
            }
            Proof::Before(other) => self.started_before(status, other),
        })
    }

    /// `None` as long as the other has not been started.
    fn started_before(&self, status: &Status, other: &str) -> Option<Judged> {
        let other = self.rows.iter().find(|row| row.name == other)?.status.as_ref()?.runs.first()?.started?;
        let own = status.runs.first()?.started?;
        Some(if own <= other { Judged::Right } else { Judged::Wrong("was started too late".to_owned()) })
    }

    async fn artifacts(&self, run: &Run) -> Result<Vec<String>, Failure> {
        let mut names = Vec::new();
        let mut token: Option<String> = None;
        for _ in 0..TASK_LIST_PAGES_MAX {
            let page = self.api.artifacts(run, token.as_deref()).await.map_err(refused)?;
            let name = |entry: &serde_json::Value| entry.get("name").and_then(|name| name.as_str()).map(str::to_owned);
            names.extend(page.entries.iter().filter_map(name));
            token = page.continuation_token;
            if token.is_none() {
                break;
            }
        }
        Ok(names)
    }

    /// The end of a task's log, for who wonders why it did not end as it should.
    async fn last_line(&self, id: &TaskId, status: &Status) -> String {
        let run = Run { task: id.clone(), run: status.runs.last().map_or(0, |run| run.number) };
        let log = self.log(&run).await.unwrap_or_default();
        let last = log.lines().rev().find(|line| !line.trim().is_empty());
        last.map_or_else(String::new, |line| format!("; its log ends: {line}"))
    }

    async fn log(&self, run: &Run) -> Result<String, Failure> {
        let mut download = self.api.artifact(run, task::LOG).await.map_err(refused)?;
        let mut log = Vec::new();
        while let Some(piece) = download.piece().await.map_err(refused)? {
            log.extend(piece);
            if log.len() >= DEMO_LOG_BYTES_MAX {
                break;
            }
        }
        Ok(String::from_utf8_lossy(&log).into_owned())
    }
}

fn refused(refused: Refused) -> Failure {
    Failure::new(Exit::Internal, refused.what)
}
