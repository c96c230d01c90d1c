//! Tests a program or a handler in Rust against the handler contract, for `journeyman handler test`.

use std::convert::Infallible;
use std::path::{Path, PathBuf};
use std::time::Duration;
use std::{fmt, io};

use serde_json::{Value, json};
use tokio::sync::watch;
use tokio::time::timeout;

use crate::testing::{TestTask, discarded_replies};
use journeyman_platform::host::clock::Clock;

use super::artifact_collector::CollectedArtifact;
use super::log::{LogLimits, TaskLog};
use super::process::{EndCause, RunLimits, format_seconds};
use super::program::Program;
use super::staged::{StagedRecord, Work};
use super::{CancelCause, Cancellation, Context, DynHandler, PrepareError, PrepareFailure};

/// How long a program runs before the cancellation test sends SIGTERM.
pub const CANCEL_AFTER: Duration = Duration::from_millis(500);

/// How long a handler in Rust may take to end after it was canceled: what a worker gives it by default.
const HANDLER_GRACE: Duration = Duration::from_secs(10);

#[derive(Debug)]
pub struct TestPlan {
    pub payload: Option<Value>,
    pub bad_payload: Option<Value>,
    pub timeout: Duration,
    /// SIGTERM is sent earlier if the program writes output.
    pub cancel_after: Duration,
}

#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct RuleResult {
    pub rule: &'static str,
    #[serde(flatten)]
    pub outcome: RuleOutcome,
}

#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
#[serde(tag = "outcome", content = "reason", rename_all = "kebab-case")]
pub enum RuleOutcome {
    Passed,
    Failed(String),
    NotTested(String),
}

impl RuleOutcome {
    fn failed_if(why: Option<impl ToString>) -> Self {
        why.map_or(Self::Passed, |why| Self::Failed(why.to_string()))
    }

    fn needs(payload: &str) -> Self {
        Self::NotTested(format!("needs a payload that {payload}"))
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ContractReport {
    pub rules: Vec<RuleResult>,
    pub log_paths: Vec<PathBuf>,
}

impl ContractReport {
    pub fn passed(&self) -> bool {
        !self.rules.iter().any(|case| matches!(case.outcome, RuleOutcome::Failed(_)))
    }

    fn add(&mut self, rule: &'static str, outcome: RuleOutcome) {
        self.rules.push(RuleResult { rule, outcome });
    }
}

impl fmt::Display for ContractReport {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        for case in &self.rules {
            let (word, why) = match &case.outcome {
                RuleOutcome::Passed => ("pass", ""),
                RuleOutcome::Failed(why) => ("FAIL", why.as_str()),
                RuleOutcome::NotTested(why) => ("skipped", why.as_str()),
            };
            writeln!(out, "{word:<8} {}", case.rule)?;
            for line in why.lines() {
                writeln!(out, "         {line}")?;
            }
        }
        Ok(())
    }
}

/// Runs a program against the contract in the empty directory `folder`, which the caller removes.
pub async fn check_program(program: &Program, plan: &TestPlan, folder: &Path) -> io::Result<ContractReport> {
    let mut report = ContractReport::default();
    let refusal = match &plan.bad_payload {
        None => RuleOutcome::needs("the program rejects"),
        Some(payload) => {
            let task = ProgramTask::new(folder, "bad-payload", payload, &mut report)?;
            check_refusal(program.prepare(payload, &task.context).await.map(drop))
        }
    };
    report.add("rejects a bad payload before it starts", refusal);
    const ACCEPTS: &str = "accepts a good payload";
    let Some(payload) = &plan.payload else {
        report.add(ACCEPTS, RuleOutcome::needs("the program completes"));
        return Ok(report);
    };
    let task = ProgramTask::new(folder, "payload", payload, &mut report)?;
    let accepted = program.prepare(payload, &task.context).await.map(drop);
    report.add(ACCEPTS, RuleOutcome::failed_if(accepted.as_ref().err()));
    if accepted.is_ok() && program.config().staged.is_some() {
        check_staged_completion(program, plan, payload, &task, &mut report).await;
        let task = ProgramTask::new(folder, "twice", payload, &mut report)?;
        check_second_start(program, plan, payload, &task, &mut report).await?;
    } else if accepted.is_ok() && check_completion(program, plan, payload, &task, &mut report).await? {
        let task = ProgramTask::new(folder, "cancel", payload, &mut report)?;
        let outcome = check_cancellation(program, plan, payload, &task).await;
        report.add("exits within its termination grace after SIGTERM", outcome);
    }
    Ok(report)
}

/// Runs a handler in Rust against the contract.
pub async fn check_handler(handler: &dyn DynHandler, plan: &TestPlan) -> io::Result<ContractReport> {
    let mut report = ContractReport::default();
    let refusal = match &plan.bad_payload {
        None => RuleOutcome::needs("the handler rejects"),
        Some(payload) => {
            let task = TestTask::new(payload.clone())?;
            let prepared = timeout(plan.timeout, handler.prepare_task(task.context())).await;
            prepared.map_or_else(
                |_| RuleOutcome::Failed("no answer".to_owned()),
                |prepared| check_refusal(prepared.map(drop)),
            )
        }
    };
    report.add("rejects a bad payload before it starts", refusal);
    let Some(payload) = &plan.payload else {
        report.add("completes a good payload", RuleOutcome::needs("the handler completes"));
        return Ok(report);
    };
    let limit = || io::Error::other(format!("it has not ended after {}", format_seconds(plan.timeout)));
    let run = timeout(plan.timeout, TestTask::new(payload.clone())?.run(handler)).await;
    let ended = run.unwrap_or_else(|_| Err(limit()));
    let failure = ended.map_or_else(
        |error| Some(error.to_string()),
        |ended| (!ended.is_completed()).then(|| ended.messages.join("; ")),
    );
    let is_completed = failure.is_none();
    report.add("completes a good payload, with every declared artifact", RuleOutcome::failed_if(failure));
    if is_completed {
        let task = TestTask::new(payload.clone())?;
        let context = task.context().clone();
        let cancel = async {
            tokio::time::sleep(plan.cancel_after).await;
            task.cancel(CancelCause::Shutdown, HANDLER_GRACE);
            tokio::time::sleep(HANDLER_GRACE).await;
        };
        let run = async {
            let prepared = handler.prepare_task(&context).await;
            if let Ok(prepared) = prepared {
                drop(prepared(&context).await);
            }
        };
        let why = format!("it has not ended {} after Context::canceled", format_seconds(HANDLER_GRACE));
        let outcome = tokio::select! {
            () = run => if context.cancellation().is_some() { RuleOutcome::Passed } else {
                RuleOutcome::NotTested(format!(
                    "it ended earlier; use a payload that takes longer than {}", format_seconds(plan.cancel_after)
                ))
            },
            () = cancel => RuleOutcome::Failed(why),
        };
        report.add("ends within its termination grace after it was canceled", outcome);
    }
    Ok(report)
}

fn check_refusal(prepared: Result<(), PrepareError>) -> RuleOutcome {
    match prepared {
        Err(PrepareError { reason: PrepareFailure::Malformed, .. }) => RuleOutcome::Passed,
        Err(other) => RuleOutcome::Failed(other.to_string()),
        Ok(()) => RuleOutcome::Failed(
            "the payload was accepted; validate payloads by a schema or a check, so that tasks with a bad one end as \
             malformed-payload with the reason in their log"
                .to_owned(),
        ),
    }
}

async fn check_staged_completion(
    program: &Program,
    plan: &TestPlan,
    payload: &Value,
    task: &ProgramTask,
    report: &mut ContractReport,
) {
    let running = async {
        let run = program.prepare(payload, &task.context).await.map_err(|error| error.to_string())?;
        run(&task.context).await.map_err(|error| error.to_string())
    };
    let limit = || format!("it has not ended after {}", format_seconds(plan.timeout));
    let ended = timeout(plan.timeout, running).await.unwrap_or_else(|_| Err(limit()));
    report.add("completes a good payload", RuleOutcome::failed_if(ended.err()));
}

/// A start whose answer was lost is repeated.
async fn check_second_start(
    program: &Program,
    plan: &TestPlan,
    payload: &Value,
    task: &ProgramTask,
    report: &mut ContractReport,
) -> io::Result<()> {
    let limits = RunLimits { run_time: Some(plan.timeout), termination_grace: program.config().termination_grace.0 };
    let (context, mut record) = (&task.context, StagedRecord::default());
    let (mut handles, mut failure) = (Vec::new(), None);
    for _ in 0..2 {
        let run = program.run_work_phase("start", &Work { payload, record: &record, context }, limits, context).await?;
        let error = program.outcome(&run).err();
        handles.push(run.report.work.and_then(|work| work.handle));
        if let (Some(error), Some(Some(handle))) = (error, handles.last()) {
            failure.get_or_insert_with(|| {
                format!("a start named {handle:?} and failed: {error}; end what it has started, and say nothing of it")
            });
        }
    }
    report.add("names only work that it has started", RuleOutcome::failed_if(failure));
    record.handle = handles.first().cloned().flatten().map(Into::into);
    let outcome = match &record.handle {
        None => RuleOutcome::NotTested("it says no handle; use a payload that takes longer".to_owned()),
        Some(_) if handles[0] == handles[1] => RuleOutcome::Passed,
        Some(_) => RuleOutcome::Failed(format!(
            "two starts have the handles {handles:?}; find the work by JOURNEYMAN_WORK and JOURNEYMAN_LAUNCH, and start it once"
        )),
    };
    report.add("finds its work when it is started twice", outcome);
    let run = program.run_work_phase("cancel", &Work { payload, record: &record, context }, limits, context).await?;
    let failure = program.outcome(&run).err().map(|error| error.to_string());
    report.add("ends its work", RuleOutcome::failed_if(failure));
    Ok(())
}

/// Returns whether the program could be started.
async fn check_completion(
    program: &Program,
    plan: &TestPlan,
    payload: &Value,
    task: &ProgramTask,
    report: &mut ContractReport,
) -> io::Result<bool> {
    const COMPLETES: &str = "completes a good payload";
    let run_time = program.config().max_run_time.0.min(plan.timeout);
    let limits = RunLimits { run_time: Some(run_time), termination_grace: program.config().termination_grace.0 };
    let run = match program.run(payload, limits, &task.context).await {
        Ok(run) => run,
        Err(error) => {
            report.add(COMPLETES, RuleOutcome::Failed(error.to_string()));
            return Ok(false);
        }
    };
    let failure = if run.end.cause == EndCause::RunTime {
        Some(format!("timed out after {}", format_seconds(run_time)))
    } else {
        program.outcome(&run).err().map(|error| error.to_string())
    };
    report.add(COMPLETES, RuleOutcome::failed_if(failure));
    let notes = run.end.notes.join("\n");
    report.add("leaves no process behind", RuleOutcome::failed_if((!notes.is_empty()).then_some(notes)));
    let ignored = run.report.ignored_count;
    let invalid = (ignored > 0).then(|| format!("{ignored} lines were ignored; see its log"));
    report.add("writes only valid messages to descriptor 3", RuleOutcome::failed_if(invalid));
    let missing = task.context.artifacts().collect(task.context.workdir())?.find_map(|artifact| match artifact {
        CollectedArtifact::Missing { message, .. } => Some(message),
        CollectedArtifact::Found(..) | CollectedArtifact::Skipped { .. } => None,
    });
    report.add("produces every declared artifact", RuleOutcome::failed_if(missing));
    let omitted = task.context.log().finish()?.map_or(0, |log| log.omitted);
    let omitted = (omitted > 0).then(|| format!("{omitted} bytes omitted"));
    report.add("stays within the log limit", RuleOutcome::failed_if(omitted));
    Ok(true)
}

async fn check_cancellation(program: &Program, plan: &TestPlan, payload: &Value, task: &ProgramTask) -> RuleOutcome {
    let grace = program.config().termination_grace.0;
    let limits = RunLimits { run_time: Some(plan.timeout), termination_grace: grace };
    let cancel = async {
        let log = task.context.log();
        if timeout(plan.cancel_after, log.wait_for_growth(log.bytes())).await.is_err() {
            tracing::debug!("the program wrote no output; canceling it anyway");
        }
        // Longer than the program's grace, so that the test measures the program's.
        let grace = grace.saturating_mul(2).saturating_add(Duration::from_secs(10));
        task.cancel.send_replace(Some(Cancellation::shutdown(grace, Clock::boot())));
        std::future::pending::<Infallible>().await
    };
    let run = tokio::select! {
        run = program.run(payload, limits, &task.context) => run,
        never = cancel => match never {},
    };
    match run.map(|run| run.end) {
        Err(error) => RuleOutcome::NotTested(error.to_string()),
        Ok(end) if end.cause == EndCause::Exited => RuleOutcome::NotTested(format!(
            "it ended earlier; use a payload that takes longer than {}",
            format_seconds(plan.cancel_after)
        )),
        Ok(end) if end.was_killed => RuleOutcome::Failed(format!(
            "killed {} after SIGTERM; exit on SIGTERM, and forward it to child processes",
            format_seconds(grace)
        )),
        Ok(_) => RuleOutcome::Passed,
    }
}

/// A task that is also a request, so that the handler may send replies.
struct ProgramTask {
    context: Context,
    cancel: watch::Sender<Option<Cancellation>>,
}

impl ProgramTask {
    fn new(folder: &Path, name: &str, payload: &Value, report: &mut ContractReport) -> io::Result<Self> {
        let workdir = folder.join(name).join("task");
        std::fs::create_dir_all(&workdir)?;
        let log = TaskLog::new(folder.join(name).join("log"), LogLimits::default());
        report.log_paths.push(log.path().to_owned());
        let definition = json!({"metadata": {"name": format!("handler test: {name}")}, "payload": payload});
        let (context, cancel) = Context::without_claim("handler-test", definition.into(), workdir, log, Clock::boot())?;
        Ok(Self { context: context.with_results(Some(discarded_replies())), cancel })
    }
}
