//! Tests a program or a service against the handler contract, for `journeyman handler test`.

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
use crate::limits::{AMQP_MESSAGE_BYTES_MAX, AMQP_NAME_BYTES_MAX, PROCESS_KILL_TIMEOUT};
use crate::task::{PartialReplySink, Reply, ReplyFuture, ReplyLimits, Results};

use super::artifact::Artifacts;
use super::artifact_collector::CollectedArtifact;
use super::http::Http;
use super::log::{LogLimits, TaskLog};
use super::process::{EndCause, RunLimits, StopEffort, format_seconds};
use super::program::Program;
use super::program_messages::ProgramRun;
use super::sidecar::{ServiceAvailability, SidecarContext, SidecarStatus};
use super::{
    CancelCause, Cancellation, Context, DynHandler, PayloadHandler as _, PrepareError, PrepareFailure, TaskInfo, erase,
};

const TERMINATION_RULE: &str = "exits within its termination grace after SIGTERM";

/// How long a program runs before the cancellation test sends SIGTERM.
pub const CANCEL_AFTER: Duration = Duration::from_millis(500);

#[derive(Debug)]
pub struct ProgramTest {
    pub program: Program,
    pub payload: Option<Value>,
    pub bad_payload: Option<Value>,
    pub timeout: Duration,
    /// SIGTERM is sent earlier if the program writes output.
    pub cancel_after: Duration,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RuleResult {
    pub rule: &'static str,
    pub outcome: RuleOutcome,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RuleOutcome {
    Passed,
    Failed(String),
    NotTested(String),
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ContractReport {
    pub rules: Vec<RuleResult>,
    pub log_paths: Vec<PathBuf>,
}

impl ContractReport {
    #[must_use]
    pub fn passed(&self) -> bool {
        !self.rules.iter().any(|case| matches!(case.outcome, RuleOutcome::Failed(_)))
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
pub async fn check_program(plan: &ProgramTest, folder: &Path) -> io::Result<ContractReport> {
    let mut report = ContractReport { rules: Vec::new(), log_paths: Vec::new() };
    check_refusal(plan, folder, &mut report).await?;
    let Some(payload) = &plan.payload else {
        let why = "needs a payload that the program completes".to_owned();
        report.add("accepts a good payload", RuleOutcome::NotTested(why));
        return Ok(report);
    };
    if check_completion(plan, payload, folder, &mut report).await? {
        check_cancellation(plan, payload, folder, &mut report).await?;
    }
    Ok(report)
}

#[derive(Debug)]
pub struct ServiceTest {
    pub service: Http,
    pub payload: Option<Value>,
    pub bad_payload: Option<Value>,
    pub timeout: Duration,
}

/// Runs a service against the contract in the empty directory `folder`, which the caller removes.
pub async fn check_service(plan: &ServiceTest, folder: &Path) -> io::Result<ContractReport> {
    let mut report = ContractReport { rules: Vec::new(), log_paths: Vec::new() };
    let (context, mut handle) = SidecarContext::channel(folder.join("service"), Clock::boot(), Containment::disabled());
    let service = plan.service.clone();
    let mut sidecar = JoinSet::new();
    sidecar.spawn(async move { service.run_sidecar(context).await });
    let up = handle.status.wait_for(|status| status.availability == ServiceAvailability::Up);
    let up = timeout(plan.timeout, up).await.is_ok_and(|status| status.is_ok());
    let SidecarStatus { message, log_path, .. } = handle.status.borrow().clone();
    report.log_paths.extend(log_path);
    report.add("starts and becomes healthy", failed_if((!up).then_some(message)));
    if up {
        let good = try_payload(plan, plan.payload.as_ref(), "payload", folder, &mut report).await?;
        let result = match good {
            None => RuleOutcome::NotTested("needs a payload that the service answers with 2xx".to_owned()),
            Some(result) => failed_if(result.err()),
        };
        report.add("answers a good payload with 2xx", result);
        let bad = try_payload(plan, plan.bad_payload.as_ref(), "bad-payload", folder, &mut report).await?;
        let result = match bad {
            None => RuleOutcome::NotTested("needs a payload that the service answers with an error".to_owned()),
            Some(result) => failed_if(result.is_ok().then(|| "the service answered with 2xx".to_owned())),
        };
        report.add("answers a bad payload with an error", result);
    }
    handle.stop.send_replace(true);
    let grace = plan.service.termination_grace();
    let stopped_at = tokio::time::Instant::now();
    let end = timeout(grace.unwrap_or_default().saturating_add(PROCESS_KILL_TIMEOUT * 4), sidecar.join_next()).await;
    report.add(
        TERMINATION_RULE,
        match (grace, end) {
            (None, _) => RuleOutcome::NotTested("the worker does not start this service".to_owned()),
            (Some(_), Err(_)) => RuleOutcome::Failed("it survived SIGKILL".to_owned()),
            (Some(grace), Ok(_)) if stopped_at.elapsed() >= grace => killed_after(grace),
            (Some(_), Ok(_)) => RuleOutcome::Passed,
        },
    );
    Ok(report)
}

/// `None` without a payload.
async fn try_payload(
    plan: &ServiceTest,
    payload: Option<&Value>,
    name: &str,
    folder: &Path,
    report: &mut ContractReport,
) -> io::Result<Option<Result<(), String>>> {
    let Some(payload) = payload else { return Ok(None) };
    let stage = TestTask::new(folder, name, payload)?;
    report.log_paths.push(stage.log_path());
    let forward = async {
        let handler = erase(plan.service.clone());
        let prepared = handler.prepare(payload, &stage.context).await.map_err(|error| error.to_string())?;
        prepared.execute(&stage.context).await.map_err(|error| error.to_string())
    };
    let result = timeout(plan.timeout, forward).await;
    Ok(Some(result.unwrap_or_else(|_| Err(format!("timed out after {}", format_seconds(plan.timeout))))))
}

async fn check_refusal(plan: &ProgramTest, folder: &Path, report: &mut ContractReport) -> io::Result<()> {
    const RULE: &str = "rejects a bad payload before it starts";
    let Some(payload) = &plan.bad_payload else {
        report.add(RULE, RuleOutcome::NotTested("needs a payload that the program rejects".to_owned()));
        return Ok(());
    };
    let stage = TestTask::new(folder, "bad-payload", payload)?;
    let result = match prepare(plan, payload, &stage).await {
        Err(PrepareError { reason: PrepareFailure::Malformed, .. }) => RuleOutcome::Passed,
        Err(other) => RuleOutcome::Failed(other.to_string()),
        Ok(()) => RuleOutcome::Failed(
            "the payload was accepted; validate payloads by a schema or a check, so that tasks with a bad one end as \
             malformed-payload with the reason in their log"
                .to_owned(),
        ),
    };
    report.add(RULE, result);
    report.log_paths.push(stage.log_path());
    Ok(())
}

/// Returns whether the program accepted the payload.
async fn check_completion(
    plan: &ProgramTest,
    payload: &Value,
    folder: &Path,
    report: &mut ContractReport,
) -> io::Result<bool> {
    let stage = TestTask::new(folder, "payload", payload)?.with_results();
    report.log_paths.push(stage.log_path());
    let accepted = prepare(plan, payload, &stage).await;
    report.add("accepts a good payload", failed_if(accepted.as_ref().err().map(ToString::to_string)));
    if accepted.is_err() {
        return Ok(false);
    }
    let config = plan.program.config();
    let run_time = config.max_run_time.0.min(plan.timeout);
    let limits = RunLimits { run_time: Some(run_time), termination_grace: config.termination_grace.0 };
    let result = match plan.program.run_for_test(payload, limits, &stage.context).await {
        Ok(result) => result,
        Err(error) => {
            report.add("completes a good payload", RuleOutcome::Failed(error.to_string()));
            return Ok(false);
        }
    };
    let failure = match result.end.cause {
        EndCause::RunTime => Some(format!("timed out after {}", format_seconds(run_time))),
        _ => plan.program.outcome(&result).err().map(|error| error.to_string()),
    };
    report.add("completes a good payload", failed_if(failure));
    report.add("leaves no process behind", failed_if(leftover_message(&result)));
    let ignored = result.report.ignored_count;
    let invalid = (ignored > 0).then(|| format!("{ignored} lines were ignored; see its log"));
    report.add("writes only valid messages to descriptor 3", failed_if(invalid));
    report.add("produces every declared artifact", failed_if(stage.missing_artifacts()?));
    let omitted = stage.context.log().finish()?.map_or(0, |log| log.omitted);
    let omitted = (omitted > 0).then(|| format!("{omitted} bytes omitted"));
    report.add("stays within the log limit", failed_if(omitted));
    Ok(true)
}

async fn check_cancellation(
    plan: &ProgramTest,
    payload: &Value,
    folder: &Path,
    report: &mut ContractReport,
) -> io::Result<()> {
    let stage = TestTask::new(folder, "cancel", payload)?.with_results();
    report.log_paths.push(stage.log_path());
    let grace = plan.program.config().termination_grace.0;
    let limits = RunLimits { run_time: Some(plan.timeout), termination_grace: grace };
    if let Err(error) = prepare(plan, payload, &stage).await {
        report.add(TERMINATION_RULE, RuleOutcome::NotTested(error.to_string()));
        return Ok(());
    }
    let log = stage.context.log();
    let written = log.bytes();
    let cancel = async {
        if timeout(plan.cancel_after, log.wait_for_growth(written)).await.is_err() {
            tracing::debug!("the program wrote no output; canceling it anyway");
        }
        stage.request_stop(grace);
        std::future::pending::<()>().await;
    };
    let result = tokio::select! {
        run = plan.program.run_for_test(payload, limits, &stage.context) => match run {
            Err(error) => RuleOutcome::NotTested(error.to_string()),
            Ok(result) => cancellation_outcome(&result, grace, plan.cancel_after),
        },
        () = cancel => RuleOutcome::NotTested("it was never canceled".to_owned()),
    };
    report.add(TERMINATION_RULE, result);
    Ok(())
}

fn cancellation_outcome(result: &ProgramRun, grace: Duration, cancel_after: Duration) -> RuleOutcome {
    match (result.end.cause, result.end.effort) {
        (EndCause::Exited, _) => RuleOutcome::NotTested(format!(
            "it ended earlier; use a payload that takes longer than {}",
            format_seconds(cancel_after)
        )),
        (EndCause::RunTime | EndCause::Exceeded(_) | EndCause::Canceled(_), StopEffort::Graceful) => {
            RuleOutcome::Passed
        }
        (EndCause::RunTime | EndCause::Exceeded(_) | EndCause::Canceled(_), StopEffort::Killed) => killed_after(grace),
    }
}

fn killed_after(grace: Duration) -> RuleOutcome {
    RuleOutcome::Failed(format!(
        "killed {} after SIGTERM; exit on SIGTERM, and forward it to child processes",
        format_seconds(grace)
    ))
}

fn leftover_message(result: &ProgramRun) -> Option<String> {
    let notes = &result.end.notes;
    (!notes.is_empty()).then(|| notes.join("\n"))
}

fn failed_if(why: Option<String>) -> RuleOutcome {
    why.map_or(RuleOutcome::Passed, RuleOutcome::Failed)
}

async fn prepare(plan: &ProgramTest, payload: &Value, stage: &TestTask) -> Result<(), PrepareError> {
    plan.program.prepare(payload, &stage.context).await.map(drop)
}

impl ContractReport {
    fn add(&mut self, rule: &'static str, result: RuleOutcome) {
        self.rules.push(RuleResult { rule, outcome: result });
    }
}

struct DiscardReplies;

impl PartialReplySink for DiscardReplies {
    fn send(&self, _: Reply) -> ReplyFuture<'_> {
        Box::pin(std::future::ready(Ok(())))
    }
}

struct TestTask {
    context: Context,
    cancel: watch::Sender<Option<Cancellation>>,
    clock: Clock,
}

impl TestTask {
    fn new(folder: &Path, name: &str, payload: &Value) -> io::Result<Self> {
        let workdir = folder.join(name).join("task");
        std::fs::create_dir_all(&workdir)?;
        let log = TaskLog::new(folder.join(name).join("log"), LogLimits::default());
        let clock = Clock::boot();
        let task = TaskId::parse("handler-test").ok_or_else(|| io::Error::other("invalid task id"))?;
        let task = TaskInfo {
            run: Run { task, run: 0 },
            source: "handler-test".to_owned(),
            definition: json!({"metadata": {"name": format!("handler test: {name}")}, "payload": payload}),
            env: BTreeMap::new(),
        };
        let (cancel, canceled) = watch::channel(None);
        // The lease of a test never changes, so its sender is dropped.
        let (_, expires_at) = watch::channel(clock.now().plus(Duration::from_secs(20 * 60)));
        let context = Context::new(task, workdir, log, Artifacts::new(), canceled, expires_at, clock);
        Ok(Self { context, cancel, clock })
    }

    /// Makes the task a request, so that the program may send replies.
    fn with_results(self) -> Self {
        let limits = ReplyLimits {
            body_bytes: usize::try_from(AMQP_MESSAGE_BYTES_MAX).unwrap_or(usize::MAX),
            content_type_bytes: AMQP_NAME_BYTES_MAX,
        };
        Self { context: self.context.with_results(Some(Results::new(DiscardReplies, limits))), ..self }
    }

    fn log_path(&self) -> PathBuf {
        self.context.log().path().to_owned()
    }

    fn request_stop(&self, grace: Duration) {
        // Longer than the program's grace, so that the test measures the program's.
        let termination_grace = grace.saturating_mul(2).saturating_add(Duration::from_secs(10));
        let (cause, deadline) = (CancelCause::Shutdown, self.clock.now().plus(termination_grace));
        self.cancel.send_replace(Some(Cancellation { cause, deadline, termination_grace }));
    }

    fn missing_artifacts(&self) -> io::Result<Option<String>> {
        let mut missing = Vec::new();
        for item in self.context.artifacts().collect(self.context.workdir())? {
            if let CollectedArtifact::Missing { message, .. } = item {
                missing.push(message);
            }
        }
        Ok((!missing.is_empty()).then(|| missing.join("\n")))
    }
}
