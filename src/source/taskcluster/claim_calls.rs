//! The calls around a claim: getting it, extending it, resolving it, and finding one whose reply was lost.

use std::time::Duration;

use jiff::Timestamp;
use reqwest::Method;
use serde_json::value::RawValue;
use serde_json::{Value, json};

use super::credentials::{Credentials, Swap};
use super::error_response::{call_error, retryable, sanitize};
use super::transport::{ApiRequest, FailedCall, TimeoutClass, encode_segment};
use super::wire::{
    CheckedClaim, CheckedGrant, TaskDefinition, WireClaim, WireClaimed, WireClaimedPage, WireClaims, WireReclaim,
    WireStatusReply,
};
use super::{Dialect, Taskcluster};
use crate::domain::id::{PriorityQueue, Run, TaskId};
use crate::domain::outcome::Outcome;
use crate::domain::refusal::Refusal;
use crate::host::clock::Clock;
use crate::limits::{CLAIMED_PAGE_ENTRIES, LISTING_PAGES_MAX, POLL_MESSAGES_MAX};
use crate::source::{CallError, Claim, ClaimWindow, Grant, PollBatch, RecoveryBatch, UnreadableMessage};

/// What the adapter keeps of a claim it granted.
pub(super) struct TaskclusterClaim {
    pub(super) credentials: Swap<Credentials>,
    /// When the task, and with it everything it leaves behind, may be thrown away.
    pub(super) task_expires: Option<String>,
}

/// What goes by this worker's name, and is not held.
#[derive(Default)]
struct UnheldClaims {
    /// Claimed by a poll of ours, for all that is known.
    claimed_by_lost_poll: Vec<(Run, Option<TaskDefinition>)>,
    foreign_claims: usize,
}

struct ClaimedPage {
    page: WireClaimedPage,
    /// When it was, by the service's clock.
    date: Timestamp,
}

impl Taskcluster {
    /// claimWork: a long poll that claims by itself.
    pub(super) async fn claim_work(&self, max: u8) -> Result<PollBatch, CallError> {
        let operation = format!("claimWork of {}", self.task_queue);
        let path = format!("/claim-work/{}", encode_segment(&self.task_queue));
        let mut call = ApiRequest::to_queue(operation.clone(), Method::POST, path).body(json!({
            "workerGroup": self.worker_identity.group,
            "workerId": self.worker_identity.id,
            "tasks": max,
        }));
        call.timeout_class = TimeoutClass::LongPoll;
        let reply = self.api.call(call).await?;
        let date = reply.date_or_now();
        let claims: WireClaims = reply.json()?;
        // More than was asked for is claimed all the same: dropped here, it would be nobody's until its claim is over.
        if claims.tasks.len() > usize::from(POLL_MESSAGES_MAX) {
            let found = claims.tasks.len();
            return Err(retryable(format!("{operation}: {found} claims came, but only {max} were asked for")));
        }
        let mut batch = PollBatch::default();
        for entry in claims.tasks {
            let checked = serde_json::from_str::<WireClaim>(entry.get())
                .map_err(|_| "it is not of the shape of a claim".to_owned())
                .and_then(|claim| claim.check(&self.worker_identity, date));
            match checked {
                Ok(claim) => batch.grants.push(grant(claim)),
                Err(what) => batch.unreadable.push(UnreadableMessage {
                    queue: PriorityQueue(0),
                    id: describe_entry(&entry).into(),
                    receipt: "".into(),
                    dequeue_count: 1,
                    reason: format!("{operation}: {what}"),
                }),
            }
        }
        Ok(batch)
    }

    /// claimTask: claims the run that a message is about.
    pub(super) async fn claim_task(&self, run: &Run) -> Result<Grant, CallError> {
        let operation = format!("claimTask {run}");
        let call = ApiRequest::to_queue(operation.clone(), Method::POST, run_path(run, "claim")).body(json!({
            "workerGroup": self.worker_identity.group,
            "workerId": self.worker_identity.id,
        }));
        let reply = self.api.call(call).await.map_err(claim_task_error)?;
        let date = reply.date_or_now();
        let claim = reply.json::<WireClaim>()?;
        let claim =
            claim.check(&self.worker_identity, date).map_err(|what| retryable(format!("{operation}: {what}")))?;
        if claim.granted.run != *run {
            let other = &claim.granted.run;
            return Err(retryable(format!("{operation}: the answer is about {other}")));
        }
        Ok(grant(claim))
    }

    /// reclaimTask with the claim's own credentials, which the answer replaces.
    pub(super) async fn reclaim_task(&self, claim: &Claim) -> Result<Duration, CallError> {
        let run = claim.run();
        let part = taskcluster_claim(claim)?;
        let credentials = part.credentials.load();
        let granted = self.reclaim_run(run, Some(credentials.as_ref())).await?;
        part.credentials.store(granted.credentials);
        Ok(granted.lease)
    }

    async fn reclaim_run(&self, run: &Run, signer: Option<&Credentials>) -> Result<CheckedGrant, CallError> {
        let operation = format!("reclaimTask {run}");
        let mut call = ApiRequest::to_queue(operation.clone(), Method::POST, run_path(run, "reclaim"));
        if let Some(credentials) = signer {
            call = call.signed_by(credentials);
        }
        let reply = self.api.call(call).await.map_err(reclaim_error)?;
        let date = reply.date_or_now();
        let granted = reply
            .json::<WireReclaim>()?
            .check(&self.worker_identity, date)
            .map_err(|what| retryable(format!("{operation}: {what}")))?;
        if granted.run != *run {
            let other = &granted.run;
            return Err(retryable(format!("{operation}: the answer is about {other}")));
        }
        Ok(granted)
    }

    /// reportCompleted, reportFailed or reportException.
    pub(super) async fn report_outcome(&self, claim: &Claim, outcome: Outcome) -> Result<(), CallError> {
        let run = claim.run();
        let credentials = taskcluster_claim(claim)?.credentials.load();
        let operation = format!("report of {run} as {outcome}");
        let call = match outcome {
            Outcome::Completed => ApiRequest::to_queue(operation, Method::POST, run_path(run, "completed")),
            Outcome::Failed => ApiRequest::to_queue(operation, Method::POST, run_path(run, "failed")),
            Outcome::Exception(reason) => ApiRequest::to_queue(operation, Method::POST, run_path(run, "exception"))
                .body(json!({ "reason": reason.as_str() })),
        };
        let reply: WireStatusReply = self.api.call(call.signed_by(&credentials)).await?.json()?;
        // Whatever else says 200 on the way has accepted nothing.
        if reply.status.task_id != run.task.as_str() {
            return Err(retryable(format!("report of {run}: the answer is about {:?}", reply.status.task_id)));
        }
        Ok(())
    }

    /// Whether the run is no longer running, or no longer ours.
    pub(super) async fn is_resolved(&self, claim: &Claim) -> Result<bool, CallError> {
        let run = claim.run();
        let path = format!("/task/{}/status", encode_segment(run.task.as_str()));
        let call = ApiRequest::to_queue(format!("status of {run}"), Method::GET, path);
        let reply: WireStatusReply = self.api.call(call).await?.json()?;
        let Some(found) = reply.status.runs.iter().find(|found| found.run_id == run.run) else {
            return Err(retryable(format!("status of {run}: the answer does not tell of this run")));
        };
        let group = found.worker_group.as_deref().unwrap_or_default();
        let id = found.worker_id.as_deref().unwrap_or_default();
        match found.state.as_str() {
            "running" => Ok(!self.worker_identity.matches(group, id)),
            "completed" | "failed" | "exception" => Ok(true),
            // Ours by its grant, so an answer that says otherwise is older than that.
            state => Err(retryable(format!("status of {run}: the answer says {state:?}"))),
        }
    }

    /// Finds the runs that the queue counts as claimed by this worker though it does not hold them, and takes them over.
    pub(super) async fn recover_lost_claims(
        &self,
        held: &[Run],
        asked: &[ClaimWindow],
    ) -> Result<RecoveryBatch, CallError> {
        match self.dialect {
            // claimTask is idempotent, and the message comes back: there is nothing to lose.
            Dialect::Azure => return Ok(RecoveryBatch::default()),
            Dialect::ClaimWork => {}
        }
        let UnheldClaims { claimed_by_lost_poll: ours, foreign_claims: others } =
            self.list_unheld_claims(held, asked).await?;
        let mut grants = Vec::new();
        let mut missed = None;
        for (run, task) in ours {
            match self.take_over_lost_run(run, task).await {
                Ok(grant) => grants.push(grant),
                Err(refused) if refused.refusal == Refusal::Gone => {}
                Err(refused) => missed = Some(refused),
            }
        }
        // What was missed is found again by the next call; what was taken over must not be dropped for it.
        match missed {
            Some(refused) if grants.is_empty() => Err(refused),
            missed => Ok(RecoveryBatch { grants, error: missed, foreign_claims: others }),
        }
    }

    /// Takes a run of an earlier life back. What the answer brings is all that a report needs, so that no life has to keep
    /// another one's credentials.
    pub(super) async fn take_over_run(&self, run: &Run) -> Result<Grant, CallError> {
        match self.dialect {
            // What claimTask granted it grants again to the same worker, for what is left of the lease; the claim's own
            // credentials then extend it. It takes no scope that a worker does not have.
            Dialect::Azure => {
                let mut grant = self.claim_task(run).await?;
                grant.lease = self.reclaim_task(&grant.claim).await?;
                Ok(grant)
            }
            Dialect::ClaimWork => {
                let granted =
                    self.reclaim_run(run, None).await.map_err(|refused| self.explain_missing_scopes(refused))?;
                Ok(grant(CheckedClaim { granted, task: TaskDefinition::EMPTY }))
            }
        }
    }

    async fn take_over_lost_run(&self, run: Run, task: Option<TaskDefinition>) -> Result<Grant, CallError> {
        // Before the lease is renewed: an orphan that cannot be run had better expire soon.
        let task = match task {
            Some(task) => task,
            None => self.fetch_definition(&run.task).await?,
        };
        let granted = self.reclaim_run(&run, None).await.map_err(|refused| self.explain_missing_scopes(refused))?;
        Ok(grant(CheckedClaim { granted, task }))
    }

    async fn fetch_definition(&self, task: &TaskId) -> Result<TaskDefinition, CallError> {
        let path = format!("/task/{}", encode_segment(task.as_str()));
        let call = ApiRequest::to_queue(format!("definition of {task}"), Method::GET, path);
        self.api.call(call).await?.json()
    }

    async fn list_unheld_claims(&self, held: &[Run], asked: &[ClaimWindow]) -> Result<UnheldClaims, CallError> {
        let began = Clock::boot().now();
        let mut orphans = UnheldClaims::default();
        let mut token = None;
        for _ in 0..LISTING_PAGES_MAX {
            let ClaimedPage { page, date } = self.claimed_page(token.as_deref()).await?;
            let took = Clock::boot().now().since(began);
            // By the service's own clock alone. One that does not tell when is taken for another's.
            let while_asked = |claimed: Timestamp| {
                let ago = Duration::try_from(date.duration_since(claimed)).unwrap_or_default();
                asked.iter().any(|window| window.contains(ago, took))
            };
            let by_name = page
                .tasks
                .into_iter()
                .filter(|found| self.worker_identity.matches(&found.worker_group, &found.worker_id));
            for WireClaimed { task_id, run_id, task, claimed, .. } in by_name {
                let Some(task_id) = TaskId::parse(&task_id) else {
                    continue;
                };
                let run = Run { task: task_id, run: run_id };
                match claimed.is_some_and(while_asked) {
                    _ if held.contains(&run) => {}
                    true => orphans.claimed_by_lost_poll.push((run, task)),
                    false => orphans.foreign_claims += 1,
                }
            }
            token = page.continuation_token;
            if token.is_none() {
                break;
            }
        }
        Ok(orphans)
    }

    async fn claimed_page(&self, token: Option<&str>) -> Result<ClaimedPage, CallError> {
        let queue = encode_segment(&self.task_queue);
        let mut path = format!("/task-queues/{queue}/claimed?limit={CLAIMED_PAGE_ENTRIES}");
        if let Some(token) = token {
            path.push_str("&continuationToken=");
            path.push_str(&urlencoding::encode(token));
        }
        let operation = format!("listClaimedTasks of {}", self.task_queue);
        // A 401 says that our credentials are no good for anything, and nothing of their scopes.
        let reply = self.api.call(ApiRequest::to_queue(operation, Method::GET, path)).await.map_err(|failed| {
            match failed.status {
                Some(401) => failed.error,
                Some(_) | None => self.explain_missing_scopes(failed.error),
            }
        });
        let reply = reply?;
        Ok(ClaimedPage { date: reply.date_or_now(), page: reply.json()? })
    }

    fn explain_missing_scopes(&self, mut refused: CallError) -> CallError {
        if refused.refusal == Refusal::Denied {
            refused.message = format!(
                "claims whose reply was lost cannot be taken over: this needs the scopes queue:claimed-list:{} and \
                 queue:reclaim-task:*, granted to the worker's client or its role ({})",
                self.task_queue, refused.message
            );
        }
        refused
    }
}

/// The adapter's own part of a claim.
pub(super) fn taskcluster_claim(claim: &Claim) -> Result<&TaskclusterClaim, CallError> {
    claim.part::<TaskclusterClaim>().ok_or_else(|| {
        let what = format!("{}: the claim was granted by another source", claim.run());
        call_error(Refusal::Rejected, what)
    })
}

fn grant(claim: CheckedClaim) -> Grant {
    let CheckedClaim { granted, task: TaskDefinition { task, unreadable } } = claim;
    let task_expires = task.get("expires").and_then(Value::as_str).map(str::to_owned);
    let part = TaskclusterClaim { credentials: Swap::new(granted.credentials), task_expires };
    let claim = Claim::new(granted.run.clone(), part);
    Grant { claim, run: granted.run, lease: granted.lease, task, payload_error: unreadable, results: None }
}

/// What to call a claim that may not be one.
fn describe_entry(entry: &RawValue) -> String {
    let entry: Value = serde_json::from_str(entry.get()).unwrap_or_default();
    let task = entry.pointer("/status/taskId").and_then(Value::as_str).unwrap_or("a nameless task");
    let run = entry.get("runId").and_then(Value::as_u64);
    run.map_or_else(|| sanitize(task), |run| format!("{}/{run}", sanitize(task)))
}

fn run_path(run: &Run, call: &str) -> String {
    format!("/task/{}/runs/{}/{call}", encode_segment(run.task.as_str()), run.run)
}

/// A refused claim that is neither a matter of our credentials, our pace nor our request lies in the task.
fn claim_task_error(failed: FailedCall) -> CallError {
    let ours = failed.status == Some(400);
    let mut refused = CallError::from(failed);
    if refused.refusal == Refusal::Rejected && !ours {
        refused.refusal = Refusal::Gone;
    }
    refused
}

/// Only "gone" and "denied" are definite for a reclaim: everything else may succeed the next time.
fn reclaim_error(failed: FailedCall) -> CallError {
    let mut refused = CallError::from(failed);
    if refused.refusal == Refusal::Rejected {
        refused.refusal = Refusal::Retry { retry_after: None };
    }
    refused
}
