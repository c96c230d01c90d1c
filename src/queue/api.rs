//! The calls of the queue's API that concern tasks, claims and workers: each checks its body, asks the store, and
//! shows the answer.

use std::sync::Arc;

use axum::http::StatusCode;
use serde_json::{Map, Value, json};
use tokio::time::timeout;

use super::App;
use super::artifacts;
use super::auth::Caller;
use super::body::Held;
use super::check::{self, Field, Kind, may, must};
use super::clock::Millis;
use super::definition;
use super::fault::{Code, Fault};
use super::route::{Call, Route, query_param};
use super::rules::{Did, Ending, No, Task, Via, Worker};
use super::scopes::{Asks, Era};
use super::store::room::{Page, Room};
use super::store::{Found, Trouble};
use super::view;
use crate::limits::{QUEUE_CROWDED_POLL, QUEUE_PAGE_MAX, QUEUE_RUNS_MAX};

/// A request whose caller is known and whose body is read.
pub(crate) struct Input {
    pub(crate) route: Route,
    pub(crate) query: String,
    pub(crate) caller: Caller,
    pub(crate) body: Arc<Held>,
}

/// What a call answers with.
pub(crate) struct Reply {
    pub(crate) status: StatusCode,
    pub(crate) body: String,
    pub(crate) headers: Vec<Header>,
}

/// A header of an answer.
pub(crate) struct Header {
    pub(crate) name: &'static str,
    pub(crate) value: String,
}

impl Reply {
    pub(crate) const fn ok(body: String) -> Self {
        Self { status: StatusCode::OK, body, headers: Vec::new() }
    }

    pub(crate) const fn empty() -> Self {
        Self { status: StatusCode::NO_CONTENT, body: String::new(), headers: Vec::new() }
    }
}

pub(crate) type Answer = Result<Reply, Fault>;

const WORKER: [Field; 2] = [must("workerGroup", Kind::Name(38)), must("workerId", Kind::Name(38))];
const CLAIM_WORK: &[Field] = &[WORKER[0], WORKER[1], may("tasks", Kind::Whole(1, 32))];
const EXCEPTION: &[Field] = &[must(
    "reason",
    Kind::Choice(&[
        "worker-shutdown",
        "malformed-payload",
        "resource-unavailable",
        "internal-error",
        "superseded",
        "intermittent-task",
    ]),
)];
const QUARANTINE: &[Field] = &[must("quarantineUntil", Kind::Time), may("quarantineInfo", Kind::Text(4_000))];

impl Input {
    fn object(&self) -> Map<String, Value> {
        match view::body_value(&self.body) {
            Value::Object(fields) => fields,
            Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) | Value::Array(_) => Map::new(),
        }
    }

    /// The body, if it has the form that the schema of this name asks for.
    pub(crate) fn checked(
        &self,
        app: &App,
        schema: &str,
        fields: &[Field],
        era: Era,
    ) -> Result<Map<String, Value>, Fault> {
        let body = self.object();
        let found = check::findings(&body, fields, era);
        if found.is_empty() {
            return Ok(body);
        }
        let told = check::told(&app.root, schema, &found);
        Err(Fault::new(Code::InputValidationError, told))
    }

    fn task(&self) -> String {
        self.route.param("taskId").to_owned()
    }

    fn queue(&self) -> String {
        match self.route.param("taskQueueId") {
            "" => format!("{}/{}", self.route.param("provisionerId"), self.route.param("workerType")),
            queue => queue.to_owned(),
        }
    }

    /// The size of a page of a listing.
    pub(crate) fn page_size(&self) -> Result<usize, Fault> {
        let Some(text) = query_param(&self.query, "limit") else { return Ok(QUEUE_PAGE_MAX) };
        let limit: usize = text.parse().map_err(|_| {
            Fault::new(
                Code::InvalidRequestArguments,
                format!("Query-string parameter: limit=\"{text}\" is not valid, error: must be a number"),
            )
        })?;
        Ok(limit.clamp(1, QUEUE_PAGE_MAX))
    }

    /// Where a page of a listing starts.
    pub(crate) fn page_start(&self) -> Option<String> {
        query_param(&self.query, "continuationToken")
    }
}

fn text(body: &Map<String, Value>, name: &str) -> String {
    body.get(name).and_then(Value::as_str).unwrap_or_default().to_owned()
}

fn worker_of(body: &Map<String, Value>) -> Worker {
    Worker { group: text(body, "workerGroup"), id: text(body, "workerId") }
}

/// Answers a call of the queue's API.
pub(crate) async fn answer(app: &App, input: Input) -> Answer {
    match input.route.call {
        Call::Ping => Ok(Reply::ok(json!({"alive": true, "uptime": app.uptime().as_secs_f64()}).to_string())),
        Call::CreateTask => create_task(app, input).await,
        Call::Task => task(app, input).await,
        Call::Status => status(app, input).await,
        Call::ScheduleTask => steer(app, input, Steer::Schedule).await,
        Call::RerunTask => steer(app, input, Steer::Rerun).await,
        Call::CancelTask => steer(app, input, Steer::Cancel).await,
        Call::PollTaskUrls => super::azure::poll_task_urls(app, input).await,
        Call::ClaimWork => claim_work(app, input).await,
        Call::ClaimTask => claim_task(app, input).await,
        Call::ReclaimTask => reclaim_task(app, input).await,
        Call::ReportCompleted => {
            // Very old workers report a failure so.
            let failed = input.object().get("success") == Some(&Value::Bool(false));
            report(app, input, if failed { Ending::Failed } else { Ending::Completed }).await
        }
        Call::ReportFailed => report(app, input, Ending::Failed).await,
        Call::ReportException => {
            let body = input.checked(app, "task-exception-request", EXCEPTION, Era::Modern)?;
            let reason = Ending::reported(&text(&body, "reason"));
            report(app, input, reason.unwrap_or(Ending::InternalError)).await
        }
        Call::PendingTasks => pending_tasks(app, input).await,
        Call::ListPendingTasks => list_pending(app, input).await,
        Call::ListClaimedTasks => list_claimed(app, input).await,
        Call::JourneymanListTasks => list_all(app, input).await,
        Call::GetWorker | Call::QuarantineWorker => worker(app, input).await,
        Call::CreateArtifact => artifacts::create(app, input).await,
        Call::FinishArtifact => artifacts::finish(app, input).await,
        Call::GetArtifact | Call::GetLatestArtifact => artifacts::get(app, input).await,
        Call::ListArtifacts | Call::ListLatestArtifacts => artifacts::list(app, input).await,
        Call::CreateUpload => artifacts::create_upload(app, input).await,
        Call::FinishUpload => artifacts::finish_upload(app, input).await,
    }
}

async fn create_task(app: &App, input: Input) -> Answer {
    let draft = definition::draft(&input.task(), &input.body, &app.root)?;
    input.caller.must(&draft.asks(), Era::Modern)?;
    let echoed = |mut fault: Fault| {
        fault.payload = Some(draft.echo());
        fault
    };
    let made = draft.finish(app.now()).map_err(echoed)?;
    let task = app.store.call(move |room| room.create(made)).await.map_err(echoed)?;
    Ok(Reply::ok(view::status_reply(&task)))
}

fn unknown(task: &str, question: &str) -> Fault {
    Fault::not_found(format!("`{task}` does not correspond to a task that exists.\n{question}"))
}

const SUBMITTED: &str = "Are you sure this task has already been submitted?";
const BEFORE: &str = "Are you sure this task has been submitted before?";

async fn task(app: &App, input: Input) -> Answer {
    let task = input.task();
    input.caller.must_have(format!("queue:get-task:{task}"))?;
    let found = app
        .store
        .call(move |room| match room.find(&task)? {
            Some(kept) => room.definition(kept.id),
            None => Err(unknown(&task, SUBMITTED).into()),
        })
        .await?;
    Ok(Reply::ok(found))
}

async fn status(app: &App, input: Input) -> Answer {
    let task = input.task();
    input.caller.must_have(format!("queue:status:{task}"))?;
    let found = app
        .store
        .call(move |room| {
            let kept = room.find(&task)?;
            kept.map(|kept| kept.task).ok_or_else(|| unknown(&task, SUBMITTED).into())
        })
        .await?;
    Ok(Reply::ok(view::status_reply(&found)))
}

/// The three ways in which a person steers a task.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Steer {
    Schedule,
    Rerun,
    Cancel,
}

impl Steer {
    const fn verb(self) -> &'static str {
        match self {
            Self::Schedule => "schedule",
            Self::Rerun => "rerun",
            Self::Cancel => "cancel",
        }
    }

    /// What a caller must hold.
    fn asks(self, task: &Task) -> Asks {
        let (verb, scheduler, group) = (self.verb(), &task.scheduler, &task.group);
        Asks::Any(vec![
            Asks::scope(format!("queue:{verb}-task:{scheduler}/{group}/{}", task.task_id)),
            Asks::scope(format!("queue:{verb}-task-in-project:{}", task.project)),
            Asks::All(vec![
                Asks::scope(format!("queue:{verb}-task")),
                Asks::scope(format!("assume:scheduler-id:{scheduler}/{group}")),
            ]),
        ])
    }

    fn no_task(self, name: &str) -> Fault {
        match self {
            Self::Schedule => Fault::not_found(format!("taskId `{name}` not found. Are you sure it exists?")),
            Self::Rerun => unknown(name, BEFORE),
            Self::Cancel => Fault::no_task(name),
        }
    }

    fn apply(self, task: &mut Task, now: Millis) -> Result<Did, No> {
        match self {
            Self::Schedule if task.deadline < now => Err(No::Deadline),
            Self::Schedule => Ok(task.schedule(now)),
            Self::Rerun => task.rerun(now),
            Self::Cancel => task.cancel(now),
        }
    }

    /// The refusal of a task that is past its deadline.
    fn too_late(self, task: &Task) -> Fault {
        let done = match self {
            Self::Schedule => "scheduled past its deadline at",
            Self::Rerun => "rescheduled past its deadline of",
            Self::Cancel => "canceled past its deadline of",
        };
        Fault::conflict(format!("Task `{}` can't be {done} {}.", task.task_id, task.deadline.iso()))
    }
}

async fn steer(app: &App, input: Input, how: Steer) -> Answer {
    let (name, caller) = (input.task(), input.caller);
    let change = move |room: &mut Room<'_>| -> Result<Task, Trouble> {
        let mut kept = room.find(&name)?.ok_or_else(|| how.no_task(&name))?;
        caller.must(&how.asks(&kept.task), Era::Modern)?;
        match how.apply(&mut kept.task, room.now) {
            Ok(Did::Nothing) => Ok(kept.task),
            Ok(Did::Change) => room.keep(kept),
            Err(No::TooManyRuns) => {
                let told = format!("Maximum number of runs reached ({QUEUE_RUNS_MAX}).");
                Err(Fault::conflict(told).into())
            }
            Err(No::Unknown | No::Taken | No::Deadline | No::NotRunning | No::OtherEnd) => {
                Err(how.too_late(&kept.task).into())
            }
        }
    };
    let task = app.store.call(change).await?;
    Ok(Reply::ok(view::status_reply(&task)))
}

async fn claim_work(app: &App, input: Input) -> Answer {
    let body = input.checked(app, "claim-work-request", CLAIM_WORK, Era::Modern)?;
    let (queue, worker) = (input.queue(), worker_of(&body));
    input.caller.must(
        &Asks::All(vec![
            Asks::scope(format!("queue:claim-work:{queue}")),
            Asks::scope(format!("queue:worker-id:{}/{}", worker.group, worker.id)),
        ]),
        Era::Modern,
    )?;
    let tasks = body.get("tasks").and_then(check::whole_number).unwrap_or(1);
    let most = usize::try_from(tasks).unwrap_or(1);
    let given = match wait_for_work(app, queue, worker, most).await? {
        Some(Found::Work(grants)) => grants.take(),
        Some(Found::Quarantined) => {
            // Held as long as an empty queue is, so that a barred worker does not poll in a tight loop.
            timeout(app.long_poll, app.stopped()).await.ok();
            Vec::new()
        }
        None => Vec::new(),
    };
    let now = app.now();
    let shown: Vec<_> = given.into_iter().map(|given| view::claim_reply(&app.keys, given, now)).collect();
    Ok(Reply::ok(format!(r#"{{"tasks":[{}]}}"#, shown.join(","))))
}

async fn wait_for_work(app: &App, queue: String, worker: Worker, most: usize) -> Result<Option<Found>, Fault> {
    // Where too many wait already, the answer is as if the wait were over.
    let seat = app.long_polls.try_acquire().ok();
    let mut answer = app.store.wait_for_work(queue, worker, most).await?;
    let patience = if seat.is_some() { app.long_poll } else { QUEUE_CROWDED_POLL };
    let came = tokio::select! {
        came = timeout(patience, &mut answer) => came.ok(),
        () = app.stopped() => None,
    };
    match came {
        Some(Ok(found)) => found.map(Some),
        Some(Err(_)) => Ok(None),
        None => {
            // What was handed over in this very moment is taken, not lost.
            answer.close();
            answer.try_recv().ok().transpose()
        }
    }
}

async fn claim_task(app: &App, input: Input) -> Answer {
    let body = input.checked(app, "task-claim-request", &WORKER, Era::Legacy)?;
    let (name, run, worker) = (input.task(), input.route.run(), worker_of(&body));
    let caller = input.caller;
    let given = app
        .store
        .call(move |room| {
            let kept = room.need(&name)?;
            caller.must(&claim_asks(&kept.task.queue, &worker), Era::Legacy)?;
            let deadline = kept.task.deadline;
            if deadline <= room.now {
                return Err(Fault::conflict(format!(
                    "Task `{name}` Can't be claimed past its deadline of {}.",
                    deadline.iso()
                ))
                .into());
            }
            if room.is_quarantined(&kept.task.queue, &worker)? {
                // The service answers so to a barred worker; what matters is that its message stays in the queue.
                return Err(Fault::internal(&uuid::Uuid::new_v4()).into());
            }
            room.claim(kept, run, &worker)?.map_err(|no| Fault::of_run(no, &name, run).into())
        })
        .await?;
    Ok(Reply::ok(view::claim_reply(&app.keys, given, app.now())))
}

fn claim_asks(queue: &str, worker: &Worker) -> Asks {
    let worker = format!("{}/{}", worker.group, worker.id);
    Asks::Any(vec![
        Asks::All(vec![
            Asks::scope(format!("queue:claim-task:{queue}")),
            Asks::scope(format!("queue:worker-id:{worker}")),
        ]),
        Asks::All(vec![
            Asks::scope("queue:claim-task"),
            Asks::scope(format!("assume:worker-type:{queue}")),
            Asks::scope(format!("assume:worker-id:{worker}")),
        ]),
    ])
}

/// A claim that was extended.
struct Extended {
    task: Task,
    taken_until: Millis,
    scopes: Vec<String>,
}

async fn reclaim_task(app: &App, input: Input) -> Answer {
    let (name, run, caller) = (input.task(), input.route.run(), input.caller);
    let Extended { task, taken_until, scopes } = app
        .store
        .call(move |room| {
            let mut kept = room.need(&name)?;
            kept.task.run(run).map_err(|no| Fault::of_run(no, &name, run))?;
            caller.must_have(format!("queue:reclaim-task:{name}/{run}"))?;
            let length = room.knobs.claim_timeout;
            let taken_until = kept.task.reclaim(run, room.now, length).map_err(|no| match no {
                No::Deadline => Fault::conflict(format!(
                    "Task `{name}` can't be reclaimed past its deadline of {}.",
                    kept.task.deadline.iso()
                )),
                No::Unknown | No::Taken | No::NotRunning | No::OtherEnd | No::TooManyRuns => {
                    Fault::of_run(no, &name, run)
                }
            })?;
            let scopes = room.scopes(kept.id)?;
            let task = room.keep(kept)?;
            if let Some(worker) = task.runs.get(run as usize).and_then(|run| run.worker.as_ref()) {
                room.workers.seen(&task.queue, worker, room.now);
            }
            Ok(Extended { task, taken_until, scopes })
        })
        .await?;
    Ok(Reply::ok(view::reclaim_reply(&app.keys, &task, run, scopes, taken_until, app.now())))
}

async fn report(app: &App, input: Input, ending: Ending) -> Answer {
    let exception = input.route.call == Call::ReportException;
    let (name, run, caller) = (input.task(), input.route.run(), input.caller);
    let root = app.root.clone();
    let change = move |room: &mut Room<'_>| -> Result<Task, Trouble> {
        let mut kept = room.find(&name)?.ok_or_else(|| {
            let question = if exception { "exists" } else { "was created" };
            Fault::not_found(format!("Task `{name}` not found. Are you sure it {question}?"))
        })?;
        let record = kept.task.run(run).map_err(|no| Fault::of_run(no, &name, run))?;
        // The reason went out with the older dialect, so only its claims may end with it.
        if ending == Ending::Superseded && record.via != Some(Via::ClaimTask) {
            let wrong = ["data/reason must be equal to one of the allowed values".to_owned()];
            let told = check::told(&root, "task-exception-request", &wrong);
            return Err(Fault::new(Code::InputValidationError, told).into());
        }
        caller.must_have(format!("queue:resolve-task:{name}/{run}"))?;
        let did = if exception {
            kept.task.report_exception(run, ending, room.now)
        } else {
            kept.task.report(run, ending, room.now)
        };
        match did {
            Ok(Did::Nothing) => Ok(kept.task),
            Ok(Did::Change) => room.keep(kept),
            Err(No::OtherEnd) => {
                let end = ending.as_str();
                Err(Fault::conflict(format!("Run {run} of task `{name}` is not running or {end}.")).into())
            }
            Err(no) => Err(Fault::of_run(no, &name, run).into()),
        }
    };
    let task = app.store.call(change).await?;
    Ok(Reply::ok(view::status_reply(&task)))
}

async fn pending_tasks(app: &App, input: Input) -> Answer {
    let queue = input.queue();
    input.caller.must_have(format!("queue:pending-count:{queue}"))?;
    let name = queue.clone();
    let count = app.store.call(move |room| Ok(room.count_pending(&name))).await?;
    let (provisioner, worker_type) = definition::split(&queue);
    Ok(Reply::ok(
        json!({
            "provisionerId": provisioner, "workerType": worker_type, "taskQueueId": queue, "pendingTasks": count,
        })
        .to_string(),
    ))
}

/// The place of a page among the entries, as the last page told it.
fn offset(input: &Input) -> usize {
    input.page_start().and_then(|start| start.parse().ok()).unwrap_or(0)
}

async fn list_pending(app: &App, input: Input) -> Answer {
    let (queue, most, after) = (input.queue(), input.page_size()?, offset(&input));
    input.caller.must_have(format!("queue:pending-list:{queue}"))?;
    let page: Page<_> = app.store.call(move |room| room.list_pending(&queue, after, most)).await?;
    Ok(Reply::ok(view::listing(&page, view::pending_entry)))
}

async fn list_claimed(app: &App, input: Input) -> Answer {
    let (queue, most) = (input.queue(), input.page_size()?);
    let after = input.page_start().and_then(|start| start.parse().ok()).unwrap_or(0);
    input.caller.must_have(format!("queue:claimed-list:{queue}"))?;
    let page = app.store.call(move |room| room.list_claimed(&queue, after, most)).await?;
    Ok(Reply::ok(view::listing(&page, view::claimed_entry)))
}

async fn list_all(app: &App, input: Input) -> Answer {
    let most = input.page_size()?;
    input.caller.must_have("queue:journeyman-list-tasks".to_owned())?;
    let before = input.page_start().and_then(|start| start.parse().ok()).unwrap_or(i64::MAX);
    let page = app.store.call(move |room| room.list_all(before, most)).await?;
    Ok(Reply::ok(view::listing(&page, view::task_entry)))
}

async fn worker(app: &App, input: Input) -> Answer {
    let worker =
        Worker { group: input.route.param("workerGroup").to_owned(), id: input.route.param("workerId").to_owned() };
    let queue = input.queue();
    let named = format!("{queue}/{}/{}", worker.group, worker.id);
    let bar = if input.route.call == Call::QuarantineWorker {
        input.caller.must_have(format!("queue:quarantine-worker:{named}"))?;
        let body = input.checked(app, "quarantine-worker-request", QUARANTINE, Era::Modern)?;
        Millis::parse(&text(&body, "quarantineUntil"))
    } else {
        input.caller.must_have(format!("queue:get-worker:{named}"))?;
        None
    };
    let shown = app
        .store
        .call(move |room| {
            if let Some(until) = bar {
                room.quarantine(&queue, &worker, until)?;
            }
            let until = room.quarantined(&queue, &worker)?;
            show_worker(room, &queue, &worker, until)
        })
        .await?;
    Ok(Reply::ok(shown))
}

fn show_worker(room: &Room<'_>, queue: &str, worker: &Worker, until: Option<Millis>) -> Result<String, Trouble> {
    let (provisioner, worker_type) = definition::split(queue);
    let known = room.workers.get(queue, worker);
    if known.is_none() && until.is_none() {
        return Err(Fault::not_found(format!(
            "Worker with workerId `{}`, workerGroup `{}`,worker-type `{worker_type}` and provisionerId \
             `{provisioner}` not found. Are you sure it was created?",
            worker.id, worker.group
        ))
        .into());
    }
    let recent: Vec<Value> = known
        .into_iter()
        .flat_map(|known| &known.recent)
        .map(|(task, run)| json!({"runId": run, "taskId": task}))
        .collect();
    let first = known.map_or(room.now, |known| known.first);
    let last = known.map_or(room.now, |known| known.last);
    let day = std::time::Duration::from_secs(24 * 3600);
    // Without a quarantine the service shows the time in the past that it gave the worker at first sight.
    let until = until.unwrap_or_else(|| first.minus(day));
    Ok(json!({
        "taskQueueId": queue, "workerGroup": worker.group, "workerId": worker.id,
        "quarantineUntil": until.iso(), "expires": last.plus(day).iso(), "firstClaim": first.iso(),
        "recentTasks": recent, "lastDateActive": last.iso(),
        "provisionerId": provisioner, "workerType": worker_type,
    })
    .to_string())
}
