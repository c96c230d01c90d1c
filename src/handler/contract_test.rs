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
use crate::limits::{AMQP_MESSAGE_BYTES_MAX, PROCESS_KILL_TIMEOUT};
use crate::source::{PartialReplySink, Reply, Results, SourceFuture};

use super::artifact::Artifacts;
use super::artifact_collector::CollectedArtifact;
use super::http::Http;
use super::log::{LogLimits, TaskLog};
use super::process::{EndCause, RunLimits, StopEffort, format_seconds};
use super::program::{PhaseResult, Program, execute_result};
use super::sidecar::{ServiceAvailability, SidecarContext, SidecarStatus};
use super::{
    CancelCause, Cancellation, Context, DynHandler, ExecuteError, PayloadHandler as _, PrepareError, TaskInfo, erase,
};

/// How long a program is left alone before it is told to end unless somebody says.
pub const CANCEL_AFTER: Duration = Duration::from_millis(500);

/// What a program is checked with.
#[derive(Debug)]
pub struct ProgramTest {
    /// The program.
    pub program: Program,
    /// A payload that it completes.
    pub payload: Option<Value>,
    /// A payload that it refuses.
    pub bad_payload: Option<Value>,
    /// How long a run may take.
    pub timeout: Duration,
    /// How long it is left alone before it is told to end, unless it writes something earlier.
    pub cancel_after: Duration,
}

/// One rule of the contract, and how it went.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RuleResult {
    /// The rule.
    pub rule: &'static str,
    /// How it went.
    pub outcome: RuleOutcome,
}

/// How a rule was kept.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RuleOutcome {
    /// It was.
    Passed,
    /// It was not, and this was seen.
    Failed(String),
    /// It could not be seen, and this is why.
    NotTested(String),
}

/// All rules.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ContractReport {
    /// In the order they were tried.
    pub rules: Vec<RuleResult>,
    /// Where the logs of the runs are.
    pub log_paths: Vec<PathBuf>,
}

impl ContractReport {
    /// Whether no rule is broken.
    #[must_use]
    pub fn passed(&self) -> bool {
        !self.rules.iter().any(|case| matches!(case.outcome, RuleOutcome::Failed(_)))
    }
}

impl fmt::Display for ContractReport {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        for case in &self.rules {
            let (word, why) = match &case.outcome {
                RuleOutcome::Passed => ("ok", ""),
                RuleOutcome::Failed(why) => ("BROKEN", why.as_str()),
                RuleOutcome::NotTested(why) => ("not seen", why.as_str()),
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
pub async fn check_program(plan: &ProgramTest, folder: &Path) -> io::Result<ContractReport> {
    let mut report = ContractReport { rules: Vec::new(), log_paths: Vec::new() };
    check_refusal(plan, folder, &mut report).await?;
    let Some(payload) = &plan.payload else {
        let why = "give a payload that the program completes".to_owned();
        report.add("accepts a good payload", RuleOutcome::NotTested(why));
        return Ok(report);
    };
    if check_completion(plan, payload, folder, &mut report).await? {
        check_cancellation(plan, payload, folder, &mut report).await?;
    }
    Ok(report)
}

/// What a service is checked with.
#[derive(Debug)]
pub struct ServiceTest {
    /// The service.
    pub service: Http,
    /// A payload that it answers well.
    pub payload: Option<Value>,
    /// A payload that it answers with an error.
    pub bad_payload: Option<Value>,
    /// How long it may take to be well, and each request.
    pub timeout: Duration,
}

/// Starts a service where that is this worker's part, and forwards to it. `folder` is an empty one for its tasks and logs, and
/// is left to the caller.
///
/// # Errors
///
/// Where a folder for a run cannot be made.
pub async fn check_service(plan: &ServiceTest, folder: &Path) -> io::Result<ContractReport> {
    let mut report = ContractReport { rules: Vec::new(), log_paths: Vec::new() };
    let (beside, mut lent) = SidecarContext::channel(folder.join("service"), Clock::boot(), Containment::disabled());
    let service = plan.service.clone();
    let mut kept = JoinSet::new();
    kept.spawn(async move { service.run_sidecar(beside).await });
    let there = timeout(plan.timeout, lent.status.wait_for(|word| word.availability == ServiceAvailability::Up)).await;
    let there = there.is_ok_and(|heard| heard.is_ok());
    let SidecarStatus { message: what, log_path: log, .. } = lent.status.borrow().clone();
    report.log_paths.extend(log.clone());
    report.add("is there and well", failed_if((!there).then_some(what)));
    if there {
        check_good_payload(plan, folder, &mut report).await?;
        check_bad_payload(plan, folder, &mut report).await?;
    }
    lent.stop.send_replace(true);
    let grace = plan.service.termination_grace();
    const RULE: &str = "ends within its grace when it is told to";
    let began = tokio::time::Instant::now();
    let ended = timeout(grace.unwrap_or_default().saturating_add(PROCESS_KILL_TIMEOUT * 4), kept.join_next()).await;
    report.add(
        RULE,
        match (grace, ended) {
            (None, _) => RuleOutcome::NotTested("somebody else starts it".to_owned()),
            (Some(_), Err(_)) => RuleOutcome::Failed("it does not end although it was killed".to_owned()),
            (Some(grace), Ok(_)) if began.elapsed() >= grace => RuleOutcome::Failed(format!(
                "it was still there {} after SIGTERM, and killed; end on SIGTERM, and pass it on to what you started",
                format_seconds(grace)
            )),
            (Some(_), Ok(_)) => RuleOutcome::Passed,
        },
    );
    Ok(report)
}

async fn check_good_payload(plan: &ServiceTest, folder: &Path, report: &mut ContractReport) -> io::Result<()> {
    const RULE: &str = "answers a good payload with 2xx";
    let Some(payload) = &plan.payload else {
        let why = "give a payload that it answers well".to_owned();
        report.add(RULE, RuleOutcome::NotTested(why));
        return Ok(());
    };
    let stage = TestTask::new(folder, "payload", payload)?;
    report.log_paths.push(stage.log_path());
    let why = forward_payload(plan, payload, &stage).await.err();
    report.add(RULE, failed_if(why));
    Ok(())
}

async fn check_bad_payload(plan: &ServiceTest, folder: &Path, report: &mut ContractReport) -> io::Result<()> {
    const RULE: &str = "answers a bad payload with an error";
    let Some(payload) = &plan.bad_payload else {
        let why = "give a payload that it answers with an error".to_owned();
        report.add(RULE, RuleOutcome::NotTested(why));
        return Ok(());
    };
    let stage = TestTask::new(folder, "bad-payload", payload)?;
    report.log_paths.push(stage.log_path());
    let accepted = forward_payload(plan, payload, &stage).await.is_ok();
    report.add(RULE, failed_if(accepted.then(|| "it is answered with 2xx".to_owned())));
    Ok(())
}

/// How it went, where that is not well.
async fn forward_payload(plan: &ServiceTest, payload: &Value, stage: &TestTask) -> Result<(), String> {
    let forward = async {
        let handler = erase(plan.service.clone());
        let ready =
            handler.prepare(payload, &stage.context).await.map_err(|refused| prepare_error_message(&refused))?;
        ready.execute(&stage.context).await.map_err(|error| execute_error_message(&error))
    };
    timeout(plan.timeout, forward)
        .await
        .unwrap_or_else(|_| Err(format!("not done after {}", format_seconds(plan.timeout))))
}

/// A bad payload is refused before it is started.
async fn check_refusal(plan: &ProgramTest, folder: &Path, report: &mut ContractReport) -> io::Result<()> {
    const RULE: &str = "refuses a bad payload before it is started";
    let Some(payload) = &plan.bad_payload else {
        report.add(RULE, RuleOutcome::NotTested("give a payload that the program refuses".to_owned()));
        return Ok(());
    };
    let stage = TestTask::new(folder, "bad-payload", payload)?;
    let result = match prepare(plan, payload, &stage).await {
        Err(PrepareError::Malformed(_)) => RuleOutcome::Passed,
        Err(other) => RuleOutcome::Failed(prepare_error_message(&other)),
        Ok(()) => RuleOutcome::Failed(
            "it is accepted; say in a schema or a check what a payload must be, and tasks with another one end as \
             malformed-payload with the reason in their log"
                .to_owned(),
        ),
    };
    report.add(RULE, result);
    report.log_paths.push(stage.log_path());
    Ok(())
}

/// A good payload is accepted and completed, and nothing is left but what was declared. Answers whether it was accepted.
async fn check_completion(
    plan: &ProgramTest,
    payload: &Value,
    folder: &Path,
    report: &mut ContractReport,
) -> io::Result<bool> {
    let stage = TestTask::new(folder, "payload", payload)?.with_results();
    report.log_paths.push(stage.log_path());
    let accepted = prepare(plan, payload, &stage).await;
    report.add("accepts a good payload", failed_if(accepted.as_ref().err().map(prepare_error_message)));
    if accepted.is_err() {
        return Ok(false);
    }
    let settings = plan.program.config();
    let run_time = Some(settings.max_run_time.map_or(plan.timeout, |most| most.min(plan.timeout)));
    let bounds = RunLimits { run_time, termination_grace: settings.termination_grace };
    let spoken = match plan.program.run_for_test(payload, bounds, &stage.context).await {
        Ok(spoken) => spoken,
        Err(error) => {
            report.add("completes a good payload", RuleOutcome::Failed(execute_error_message(&error)));
            return Ok(false);
        }
    };
    let verdict = match (spoken.end.cause, run_time) {
        (EndCause::RunTime, Some(most)) => Some(format!("not done after {}", format_seconds(most))),
        _ => execute_result(&spoken.end, settings)
            .and_then(|()| spoken.report.check_reply(&settings.name))
            .err()
            .as_ref()
            .map(execute_error_message),
    };
    report.add("completes a good payload", failed_if(verdict));
    report.add("leaves no process behind", failed_if(leftover_message(&spoken)));
    let ignored = spoken.report.ignored_count;
    let unclear = (ignored > 0).then(|| format!("{ignored} lines were ignored; its log names them"));
    report.add("says on descriptor 3 what can be understood", failed_if(unclear));
    report.add("leaves every artifact it declares", failed_if(stage.missing_artifacts()?));
    let dropped = stage.context.log().bytes_dropped();
    let cut = (dropped > 0).then(|| format!("{dropped} bytes of it are left out"));
    report.add("keeps its log within the limits", failed_if(cut));
    Ok(true)
}

/// A program that is told to end does so.
async fn check_cancellation(
    plan: &ProgramTest,
    payload: &Value,
    folder: &Path,
    report: &mut ContractReport,
) -> io::Result<()> {
    const RULE: &str = "ends within its grace when it is told to";
    let stage = TestTask::new(folder, "cancel", payload)?.with_results();
    report.log_paths.push(stage.log_path());
    let grace = plan.program.config().termination_grace;
    let bounds = RunLimits { run_time: Some(plan.timeout), termination_grace: grace };
    if let Err(refused) = prepare(plan, payload, &stage).await {
        report.add(RULE, RuleOutcome::NotTested(prepare_error_message(&refused)));
        return Ok(());
    }
    let log = stage.context.log();
    let written = log.bytes();
    let order = async {
        if timeout(plan.cancel_after, log.wait_for_growth(written)).await.is_err() {
            tracing::debug!("the program says nothing; it is told to end all the same");
        }
        stage.request_stop(grace);
        std::future::pending::<()>().await;
    };
    let result = tokio::select! {
        run = plan.program.run_for_test(payload, bounds, &stage.context) => match run {
            Err(error) => RuleOutcome::NotTested(execute_error_message(&error)),
            Ok(spoken) => cancellation_outcome(&spoken, grace, plan.cancel_after),
        },
        () = order => RuleOutcome::NotTested("it was never told".to_owned()),
    };
    report.add(RULE, result);
    Ok(())
}

fn cancellation_outcome(spoken: &PhaseResult, grace: Duration, told_after: Duration) -> RuleOutcome {
    match (spoken.end.cause, spoken.end.effort) {
        (EndCause::Exited, _) => RuleOutcome::NotTested(format!(
            "it was done sooner; give a payload that takes longer than {}",
            format_seconds(told_after)
        )),
        (EndCause::RunTime | EndCause::Exceeded(_) | EndCause::Canceled(_), StopEffort::Graceful) => {
            RuleOutcome::Passed
        }
        (EndCause::RunTime | EndCause::Exceeded(_) | EndCause::Canceled(_), StopEffort::Killed) => {
            RuleOutcome::Failed(format!(
                "it was still there {} after SIGTERM, and killed; end on SIGTERM, and pass it on to what you started",
                format_seconds(grace)
            ))
        }
    }
}

fn leftover_message(spoken: &PhaseResult) -> Option<String> {
    let remarks = &spoken.end.notes;
    (!remarks.is_empty()).then(|| remarks.join("\n"))
}

fn failed_if(why: Option<String>) -> RuleOutcome {
    why.map_or(RuleOutcome::Passed, RuleOutcome::Failed)
}

fn prepare_error_message(refused: &PrepareError) -> String {
    match refused {
        PrepareError::Malformed(sentences) => sentences.join("\n"),
        PrepareError::Unavailable(sentence)
        | PrepareError::Internal(sentence)
        | PrepareError::Host(sentence)
        | PrepareError::ServiceDown(sentence) => sentence.clone(),
    }
}

fn execute_error_message(error: &ExecuteError) -> String {
    match error {
        ExecuteError::Failed(sentence)
        | ExecuteError::Intermittent(sentence)
        | ExecuteError::Unavailable(sentence)
        | ExecuteError::Internal(sentence)
        | ExecuteError::Host(sentence)
        | ExecuteError::ServiceDown(sentence) => sentence.clone(),
    }
}

async fn prepare(plan: &ProgramTest, payload: &Value, stage: &TestTask) -> Result<(), PrepareError> {
    plan.program.prepare(payload, &stage.context).await.map(drop)
}

impl ContractReport {
    fn add(&mut self, rule: &'static str, result: RuleOutcome) {
        self.rules.push(RuleResult { rule, outcome: result });
    }
}

/// Somebody who waits for answers, and takes each.
struct DiscardReplies;

impl PartialReplySink for DiscardReplies {
    fn send(&self, _: Reply) -> SourceFuture<'_, ()> {
        Box::pin(std::future::ready(Ok(())))
    }
}

/// A task of its own for one run.
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
        let task = TaskId::parse("handler-test").ok_or_else(|| io::Error::other("the task has no valid name"))?;
        let task = TaskInfo {
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
    fn with_results(self) -> Self {
        let most = usize::try_from(AMQP_MESSAGE_BYTES_MAX).unwrap_or(usize::MAX);
        Self { context: self.context.with_results(Some(Results::new(DiscardReplies, most))), ..self }
    }

    fn log_path(&self) -> PathBuf {
        self.context.log().path().to_owned()
    }

    fn request_stop(&self, grace: Duration) {
        // The order leaves more than the grace, so that it is the grace that is seen.
        let room = grace.saturating_mul(2).saturating_add(Duration::from_secs(10));
        let (cause, deadline) = (CancelCause::Shutdown, self.clock.now().plus(room));
        self.cancel.send_replace(Some(Cancellation { cause, deadline, termination_grace: room }));
    }

    fn missing_artifacts(&self) -> io::Result<Option<String>> {
        let mut missing = Vec::new();
        for item in self.context.artifacts().collect(self.context.workdir())? {
            if let CollectedArtifact::Missing { message: sentence, .. } = item {
                missing.push(sentence);
            }
        }
        Ok((!missing.is_empty()).then(|| missing.join("\n")))
    }
}
