//! Runs a program against the handler contract, and says what it does not keep.
//!
//! What is seen here is what a program does by itself with the payloads it is given; how the worker deals with programs
//! that misbehave is the worker's business, and tested there. Every run is bounded in time.

use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde_json::{Value, json};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::timeout;

use crate::domain::id::{Run, TaskId};
use crate::host::clock::Clock;
use crate::host::containment::Containment;
use crate::limits::{AMQP_MESSAGE_BYTES_MAX, PROCESS_KILLED_WAIT};
use crate::source::{Answer, Partial, Replies, Reply};

use super::artifact::Artifacts;
use super::beside::{Beside, Serving, Word};
use super::collect::Item;
use super::http::Http;
use super::log::{LogLimits, TaskLog};
use super::process::{Bounds, Cause, Effort, shown};
use super::program::{Program, Spoken, judge};
use super::{Cancel, CancelCause, Context, Handler, NotCompleted, NotPrepared, PayloadHandler as _, Task, erase};

/// How long a program is left alone before it is told to end unless somebody says.
pub const CANCEL_AFTER: Duration = Duration::from_millis(500);

/// What a program is checked with.
#[derive(Debug)]
pub struct Plan {
    /// The program.
    pub program: Program,
    /// A payload that it completes.
    pub payload: Option<Value>,
    /// A payload that it refuses.
    pub bad_payload: Option<Value>,
    /// How long a run may take.
    pub patience: Duration,
    /// How long it is left alone before it is told to end, unless it writes something earlier.
    pub cancel_after: Duration,
}

/// One rule of the contract, and how it went.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Case {
    /// The rule.
    pub rule: &'static str,
    /// How it went.
    pub result: CaseResult,
}

/// How a rule was kept.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CaseResult {
    /// It was.
    Kept,
    /// It was not, and this was seen.
    Broken(String),
    /// It could not be seen, and this is why.
    NotSeen(String),
}

/// All rules.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Report {
    /// In the order they were tried.
    pub cases: Vec<Case>,
    /// Where the logs of the runs are.
    pub logs: Vec<PathBuf>,
}

impl Report {
    /// Whether no rule is broken.
    #[must_use]
    pub fn passed(&self) -> bool {
        !self.cases.iter().any(|case| matches!(case.result, CaseResult::Broken(_)))
    }
}

impl fmt::Display for Report {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        for case in &self.cases {
            let (word, why) = match &case.result {
                CaseResult::Kept => ("ok", ""),
                CaseResult::Broken(why) => ("BROKEN", why.as_str()),
                CaseResult::NotSeen(why) => ("not seen", why.as_str()),
            };
            writeln!(out, "{word:<9} {}", case.rule)?;
            for line in why.lines() {
                writeln!(out, "          {line}")?;
            }
        }
        Ok(())
    }
}

/// Runs a program against the contract. `folder` is an empty one for its tasks and logs, and is left to the caller.
///
/// # Errors
///
/// Where a folder for a run cannot be made.
pub async fn check_program(plan: &Plan, folder: &Path) -> io::Result<Report> {
    let mut report = Report { cases: Vec::new(), logs: Vec::new() };
    refuse(plan, folder, &mut report).await?;
    let Some(payload) = &plan.payload else {
        let why = "give a payload that the program completes".to_owned();
        report.add("accepts a good payload", CaseResult::NotSeen(why));
        return Ok(report);
    };
    if complete(plan, payload, folder, &mut report).await? {
        cancel(plan, payload, folder, &mut report).await?;
    }
    Ok(report)
}

/// What a service is checked with.
#[derive(Debug)]
pub struct ServicePlan {
    /// The service.
    pub service: Http,
    /// A payload that it answers well.
    pub payload: Option<Value>,
    /// A payload that it answers with an error.
    pub bad_payload: Option<Value>,
    /// How long it may take to be well, and each request.
    pub patience: Duration,
}

/// Starts a service where that is this worker's part, and forwards to it. `folder` is an empty one for its tasks and logs, and
/// is left to the caller.
///
/// # Errors
///
/// Where a folder for a run cannot be made.
pub async fn check_service(plan: &ServicePlan, folder: &Path) -> io::Result<Report> {
    let mut report = Report { cases: Vec::new(), logs: Vec::new() };
    let (beside, mut lent) = Beside::lend(folder.join("service"), Clock::boot(), Containment::none());
    let service = plan.service.clone();
    let mut kept = JoinSet::new();
    kept.spawn(async move { service.beside(beside).await });
    let there = timeout(plan.patience, lent.word.wait_for(|word| word.serving == Serving::Up)).await;
    let there = there.is_ok_and(|heard| heard.is_ok());
    let Word { what, log, .. } = lent.word.borrow().clone();
    report.logs.extend(log.clone());
    report.add("is there and well", broken_if((!there).then_some(what)));
    if there {
        answer_well(plan, folder, &mut report).await?;
        answer_ill(plan, folder, &mut report).await?;
    }
    lent.over.send_replace(true);
    let grace = plan.service.grace();
    const RULE: &str = "ends within its grace when it is told to";
    let began = tokio::time::Instant::now();
    let ended = timeout(grace.unwrap_or_default().saturating_add(PROCESS_KILLED_WAIT * 4), kept.join_next()).await;
    report.add(
        RULE,
        match (grace, ended) {
            (None, _) => CaseResult::NotSeen("somebody else starts it".to_owned()),
            (Some(_), Err(_)) => CaseResult::Broken("it does not end although it was killed".to_owned()),
            (Some(grace), Ok(_)) if began.elapsed() >= grace => CaseResult::Broken(format!(
                "it was still there {} after SIGTERM, and killed; end on SIGTERM, and pass it on to what you started",
                shown(grace)
            )),
            (Some(_), Ok(_)) => CaseResult::Kept,
        },
    );
    Ok(report)
}

async fn answer_well(plan: &ServicePlan, folder: &Path, report: &mut Report) -> io::Result<()> {
    const RULE: &str = "answers a good payload with 2xx";
    let Some(payload) = &plan.payload else {
        let why = "give a payload that it answers well".to_owned();
        report.add(RULE, CaseResult::NotSeen(why));
        return Ok(());
    };
    let stage = Stage::new(folder, "payload", payload)?;
    report.logs.push(stage.log());
    let why = forwarded(plan, payload, &stage).await.err();
    report.add(RULE, broken_if(why));
    Ok(())
}

async fn answer_ill(plan: &ServicePlan, folder: &Path, report: &mut Report) -> io::Result<()> {
    const RULE: &str = "answers a bad payload with an error";
    let Some(payload) = &plan.bad_payload else {
        let why = "give a payload that it answers with an error".to_owned();
        report.add(RULE, CaseResult::NotSeen(why));
        return Ok(());
    };
    let stage = Stage::new(folder, "bad-payload", payload)?;
    report.logs.push(stage.log());
    let accepted = forwarded(plan, payload, &stage).await.is_ok();
    report.add(RULE, broken_if(accepted.then(|| "it is answered with 2xx".to_owned())));
    Ok(())
}

/// How it went, where that is not well.
async fn forwarded(plan: &ServicePlan, payload: &Value, stage: &Stage) -> Result<(), String> {
    let forward = async {
        let handler = erase(plan.service.clone());
        let ready = handler.prepare(payload, &stage.context).await.map_err(|refused| told(&refused))?;
        ready.execute(&stage.context).await.map_err(|error| ended(&error))
    };
    timeout(plan.patience, forward).await.unwrap_or_else(|_| Err(format!("not done after {}", shown(plan.patience))))
}

/// A bad payload is refused before it is started.
async fn refuse(plan: &Plan, folder: &Path, report: &mut Report) -> io::Result<()> {
    const RULE: &str = "refuses a bad payload before it is started";
    let Some(payload) = &plan.bad_payload else {
        report.add(RULE, CaseResult::NotSeen("give a payload that the program refuses".to_owned()));
        return Ok(());
    };
    let stage = Stage::new(folder, "bad-payload", payload)?;
    let result = match prepare(plan, payload, &stage).await {
        Err(NotPrepared::Malformed(_)) => CaseResult::Kept,
        Err(other) => CaseResult::Broken(told(&other)),
        Ok(()) => CaseResult::Broken(
            "it is accepted; say in a schema or a check what a payload must be, and tasks with another one end as \
             malformed-payload with the reason in their log"
                .to_owned(),
        ),
    };
    report.add(RULE, result);
    report.logs.push(stage.log());
    Ok(())
}

/// A good payload is accepted and completed, and nothing is left but what was declared. Answers whether it was accepted.
async fn complete(plan: &Plan, payload: &Value, folder: &Path, report: &mut Report) -> io::Result<bool> {
    let stage = Stage::new(folder, "payload", payload)?.asked();
    report.logs.push(stage.log());
    let accepted = prepare(plan, payload, &stage).await;
    report.add("accepts a good payload", broken_if(accepted.as_ref().err().map(told)));
    if accepted.is_err() {
        return Ok(false);
    }
    let settings = plan.program.settings();
    let run_time = Some(settings.max_run_time.map_or(plan.patience, |most| most.min(plan.patience)));
    let bounds = Bounds { run_time, grace: settings.grace };
    let spoken = match plan.program.rehearse(payload, bounds, &stage.context).await {
        Ok(spoken) => spoken,
        Err(error) => {
            report.add("completes a good payload", CaseResult::Broken(ended(&error)));
            return Ok(false);
        }
    };
    let verdict = match (spoken.ended.cause, run_time) {
        (Cause::RunTime, Some(most)) => Some(format!("not done after {}", shown(most))),
        _ => judge(&spoken.ended, settings).and_then(|()| spoken.told.judge(&settings.name)).err().as_ref().map(ended),
    };
    report.add("completes a good payload", broken_if(verdict));
    report.add("leaves no process behind", broken_if(left_behind(&spoken)));
    let ignored = spoken.told.ignored;
    let unclear = (ignored > 0).then(|| format!("{ignored} lines were ignored; its log names them"));
    report.add("says on descriptor 3 what can be understood", broken_if(unclear));
    report.add("leaves every artifact it declares", broken_if(stage.missing()?));
    let dropped = stage.context.log().dropped();
    let cut = (dropped > 0).then(|| format!("{dropped} bytes of it are left out"));
    report.add("keeps its log within the limits", broken_if(cut));
    Ok(true)
}

/// A program that is told to end does so.
async fn cancel(plan: &Plan, payload: &Value, folder: &Path, report: &mut Report) -> io::Result<()> {
    const RULE: &str = "ends within its grace when it is told to";
    let stage = Stage::new(folder, "cancel", payload)?.asked();
    report.logs.push(stage.log());
    let grace = plan.program.settings().grace;
    let bounds = Bounds { run_time: Some(plan.patience), grace };
    if let Err(refused) = prepare(plan, payload, &stage).await {
        report.add(RULE, CaseResult::NotSeen(told(&refused)));
        return Ok(());
    }
    let log = stage.context.log();
    let written = log.bytes();
    let order = async {
        if timeout(plan.cancel_after, log.grown(written)).await.is_err() {
            tracing::debug!("the program says nothing; it is told to end all the same");
        }
        stage.tell_to_end(grace);
        std::future::pending::<()>().await;
    };
    let result = tokio::select! {
        run = plan.program.rehearse(payload, bounds, &stage.context) => match run {
            Err(error) => CaseResult::NotSeen(ended(&error)),
            Ok(spoken) => obeyed(&spoken, grace, plan.cancel_after),
        },
        () = order => CaseResult::NotSeen("it was never told".to_owned()),
    };
    report.add(RULE, result);
    Ok(())
}

fn obeyed(spoken: &Spoken, grace: Duration, told_after: Duration) -> CaseResult {
    match (spoken.ended.cause, spoken.ended.effort) {
        (Cause::Itself, _) => CaseResult::NotSeen(format!(
            "it was done sooner; give a payload that takes longer than {}",
            shown(told_after)
        )),
        (Cause::RunTime | Cause::Exceeded(_) | Cause::Canceled(_), Effort::None) => CaseResult::Kept,
        (Cause::RunTime | Cause::Exceeded(_) | Cause::Canceled(_), Effort::Killed) => CaseResult::Broken(format!(
            "it was still there {} after SIGTERM, and killed; end on SIGTERM, and pass it on to what you started",
            shown(grace)
        )),
    }
}

fn left_behind(spoken: &Spoken) -> Option<String> {
    let remarks = &spoken.ended.remarks;
    (!remarks.is_empty()).then(|| remarks.join("\n"))
}

fn broken_if(why: Option<String>) -> CaseResult {
    why.map_or(CaseResult::Kept, CaseResult::Broken)
}

fn told(refused: &NotPrepared) -> String {
    match refused {
        NotPrepared::Malformed(sentences) => sentences.join("\n"),
        NotPrepared::Unavailable(sentence)
        | NotPrepared::Internal(sentence)
        | NotPrepared::Host(sentence)
        | NotPrepared::Away(sentence) => sentence.clone(),
    }
}

fn ended(error: &NotCompleted) -> String {
    match error {
        NotCompleted::Failed(sentence)
        | NotCompleted::Intermittent(sentence)
        | NotCompleted::Unavailable(sentence)
        | NotCompleted::Internal(sentence)
        | NotCompleted::Host(sentence)
        | NotCompleted::Away(sentence) => sentence.clone(),
    }
}

async fn prepare(plan: &Plan, payload: &Value, stage: &Stage) -> Result<(), NotPrepared> {
    plan.program.prepare(payload, &stage.context).await.map(drop)
}

impl Report {
    fn add(&mut self, rule: &'static str, result: CaseResult) {
        self.cases.push(Case { rule, result });
    }
}

/// Somebody who waits for answers, and takes each.
struct Author;

impl Partial for Author {
    fn send(&self, _: Reply) -> Answer<'_, ()> {
        Box::pin(std::future::ready(Ok(())))
    }
}

/// A task of its own for one run.
struct Stage {
    context: Context,
    cancel: watch::Sender<Option<Cancel>>,
    clock: Clock,
}

impl Stage {
    fn new(folder: &Path, name: &str, payload: &Value) -> io::Result<Self> {
        let workdir = folder.join(name).join("task");
        std::fs::create_dir_all(&workdir)?;
        let log = TaskLog::new(folder.join(name).join("log"), LogLimits::default());
        let clock = Clock::boot();
        let task = TaskId::parse("handler-test").ok_or_else(|| io::Error::other("the task has no valid name"))?;
        let task = Task {
            run: Run { task, run: 0 },
            source: "handler-test".to_owned(),
            definition: json!({"metadata": {"name": format!("handler test: {name}")}, "payload": payload}),
            env: BTreeMap::new(),
        };
        let (cancel, canceled) = watch::channel(None);
        // Its sender is not needed: the lease of a test does not change.
        let (_, lease_ends) = watch::channel(clock.now().plus(Duration::from_secs(20 * 60)));
        let context = Context::new(task, workdir, log, Artifacts::new(), canceled, lease_ends, clock);
        Ok(Self { context, cancel, clock })
    }

    /// As a request, so that the program may answer it as well.
    fn asked(self) -> Self {
        let most = usize::try_from(AMQP_MESSAGE_BYTES_MAX).unwrap_or(usize::MAX);
        Self { context: self.context.answering(Some(Replies::new(Author, most))), ..self }
    }

    fn log(&self) -> PathBuf {
        self.context.log().path().to_owned()
    }

    fn tell_to_end(&self, grace: Duration) {
        // The order leaves more than the grace, so that it is the grace that is seen.
        let room = grace.saturating_mul(2).saturating_add(Duration::from_secs(10));
        let (cause, deadline) = (CancelCause::Shutdown, self.clock.now().plus(room));
        self.cancel.send_replace(Some(Cancel { cause, deadline, grace: room }));
    }

    fn missing(&self) -> io::Result<Option<String>> {
        let mut missing = Vec::new();
        for item in self.context.artifacts().open(self.context.workdir())? {
            if let Item::Missing { sentence, .. } = item {
                missing.push(sentence);
            }
        }
        Ok((!missing.is_empty()).then(|| missing.join("\n")))
    }
}
