//! Claim calls: claim, reclaim, report, and recovery of claims after a lost response.

use std::collections::btree_map::Entry;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use jiff::Timestamp;
use reqwest::Method;
use serde_json::value::RawValue;
use serde_json::{Value, json};

use super::credentials::{Credentials, Swap};
use super::deployment::task_scopes;
use super::error_response::sanitize;
use super::transport::{ApiRequest, ApiResponse, FailedCall, TimeoutClass};
use super::wire::{
    CheckedGrant, TaskDefinition, WireClaim, WireClaimed, WireClaimedPage, WireClaims, WireRun, WireStatus,
    WireStatusReply,
};
use super::{ArtifactStorage, Dialect, Service, Taskcluster};
use crate::source::{
    Artifact, CallError, Claim, Grant, Granted, LossReason, Message, PollBatch, RecoveryBatch, SourceFuture,
    cannot_defer,
};
use crate::task::Deployment;
use journeyman_domain::id::{PriorityQueue, Run, TaskId};
use journeyman_domain::limits::{CLAIMED_PAGE_ENTRIES, CLOSED_POLL_SETTLE, LISTING_PAGES_MAX, POLL_MESSAGES_MAX};
use journeyman_domain::outcome::Outcome;
use journeyman_domain::poll::CLOCK_SKEW_MAX;
use journeyman_domain::refusal::Refusal;
use journeyman_domain::time::Instant;
use journeyman_platform::host::clock::Clock;

pub(super) struct TaskclusterClaim {
    pub(super) run: Run,
    pub(super) service: Arc<Service>,
    pub(super) credentials: Swap<Credentials>,
    /// Expiry of the task and its artifacts.
    pub(super) task_expires: Option<String>,
    /// What requests of the task may use: its own scopes, and that for its artifacts, which no task can name.
    pub(super) task_scopes: Arc<[String]>,
    pub(super) reported_runs: u32,
}

#[derive(Default)]
struct UnheldClaims {
    /// Claimed by an unanswered poll of this worker, as far as the queue shows.
    claimed_by_lost_poll: Vec<(Run, Option<TaskDefinition>)>,
    foreign_claims: usize,
}

impl Taskcluster {
    pub(super) async fn claim_work(&self, max: u8) -> Result<PollBatch, CallError> {
        if self.pause.is_paused() {
            return Ok(PollBatch::default());
        }
        let operation = format!("claimWork of {}", self.service.task_queue);
        let path = format!("/claim-work/{}", urlencoding::encode(&self.service.task_queue));
        let mut call = ApiRequest::to_queue(operation.clone(), Method::POST, path).body(json!({
            "workerGroup": self.service.worker_identity.group,
            "workerId": self.service.worker_identity.id,
            "tasks": max,
        }));
        call.timeout_class = TimeoutClass::LongPoll;
        let sent_at = Clock::boot().now();
        let reply = tokio::select! {
            biased;
            reply = self.service.api.call(call) => reply?,
            () = self.pause.paused(), if self.lists_claims.load(Ordering::Relaxed) => {
                return self.recover_closed_poll(operation, sent_at).await;
            }
        };
        let date = reply.date_or_now();
        let claims: WireClaims = reply.json()?;
        if claims.tasks.is_empty() {
            self.check_quarantine().await;
        }
        // Surplus claims up to the limit are kept: dropping them would leave their tasks unclaimable until they
        // expire.
        if claims.tasks.len() > usize::from(POLL_MESSAGES_MAX) {
            let found = claims.tasks.len();
            return Err(CallError::retry(format!("{operation}: received {found} claims but asked for {max}")));
        }
        let mut batch = PollBatch::default();
        for entry in claims.tasks {
            let checked = serde_json::from_slice::<WireClaim>(entry.get().as_bytes())
                .map_err(|_| "invalid claim".to_owned())
                .and_then(|claim| claim.check(&self.service.worker_identity, date))
                .and_then(|granted| self.service.grant(granted, sent_at));
            match checked {
                Ok(grant) => batch.grants.push(grant),
                Err(what) => {
                    batch.messages.push(unreadable_claim(&describe_entry(&entry), format!("{operation}: {what}")))
                }
            }
        }
        Ok(batch)
    }

    /// The connection of a poll was closed because its claims are not wanted. One that the queue granted in that moment
    /// is listed and taken over, so that none is lost.
    async fn recover_closed_poll(&self, operation: String, sent_at: Instant) -> Result<PollBatch, CallError> {
        tokio::time::sleep(CLOSED_POLL_SETTLE).await;
        let age = Clock::boot().now().since(sent_at).saturating_add(CLOCK_SKEW_MAX);
        let held: Vec<Run> = self.service.held.lock().keys().cloned().collect();
        let RecoveryBatch { grants, error, .. } = self.recover_lost_claims(&held, Some(age)).await?;
        for grant in &grants {
            tracing::info!(claim.run = %grant.run, "recovered a claim that the queue granted while its poll was closed");
        }
        let unreadable = error.map(|error| unreadable_claim("closed poll", format!("{operation}: {error}")));
        Ok(PollBatch { messages: unreadable.into_iter().collect(), grants })
    }

    pub(super) async fn claim_task(&self, run: &Run) -> Result<Grant, CallError> {
        let operation = format!("claimTask {run}");
        let call = ApiRequest::to_queue(operation.clone(), Method::POST, run_path(run, "claim")).body(json!({
            "workerGroup": self.service.worker_identity.group,
            "workerId": self.service.worker_identity.id,
        }));
        let sent_at = Clock::boot().now();
        let reply = match self.service.api.call(call).await {
            Ok(reply) => reply,
            Err(failed) => {
                // The queue of 2019 answers so while the worker is in quarantine.
                if failed.status == Some(500) {
                    self.check_quarantine().await;
                }
                return Err(claim_task_error(failed));
            }
        };
        let granted = self.service.check_grant(&operation, run, &reply)?;
        self.service.grant(granted, sent_at).map_err(|what| CallError::retry(format!("{operation}: {what}")))
    }

    pub(super) async fn recover_lost_claims(
        &self,
        held: &[Run],
        newer_than: Option<Duration>,
    ) -> Result<RecoveryBatch, CallError> {
        // `claimTask` is idempotent and the message reappears, so no claim can be lost.
        if self.service.dialect == Dialect::Azure {
            return Ok(RecoveryBatch::default());
        }
        let UnheldClaims { claimed_by_lost_poll, foreign_claims } = self.list_unheld_claims(held, newer_than).await?;
        let mut grants = Vec::new();
        let mut failed = None;
        for (run, task) in claimed_by_lost_poll {
            match self.take_over_lost_run(run, task).await {
                Ok(grant) => grants.push(grant),
                Err(error) if error.refusal == Refusal::Gone => {}
                Err(error) => failed = Some(error),
            }
        }
        // A failed takeover is found again by the next call; successful ones must not be dropped with it.
        match failed {
            Some(error) if grants.is_empty() => Err(error),
            failed => Ok(RecoveryBatch { grants, error: failed, foreign_claims }),
        }
    }

    /// Takes over a run that a previous process claimed. The grant has all that a report needs, so no credentials
    /// are stored on disk.
    pub(super) async fn take_over_run(&self, run: &Run) -> Result<Grant, CallError> {
        match self.service.dialect {
            // `claimTask` grants the same claim again to the same worker for the rest of its lease; its own
            // credentials then extend it. No further scope is needed.
            Dialect::Azure => {
                let mut grant = self.claim_task(run).await?;
                grant.lease = grant.claim.renew().await?;
                Ok(grant)
            }
            Dialect::ClaimWork => self.reclaim_as_worker(run, TaskDefinition::EMPTY).await,
        }
    }

    pub(super) async fn is_task_resolved(&self, task: &TaskId) -> Result<bool, CallError> {
        match self.service.status(task).await {
            Ok(status) => Ok(status.runs.last().is_some_and(WireRun::is_resolved)),
            // It has expired.
            Err(error) if error.refusal == Refusal::Gone => Ok(true),
            Err(error) => Err(error),
        }
    }

    async fn take_over_lost_run(&self, run: Run, task: Option<TaskDefinition>) -> Result<Grant, CallError> {
        // Fetched before the lease is renewed: a claim that cannot run should expire soon.
        let task = match task {
            Some(task) => task,
            None => self.fetch_definition(&run.task).await?,
        };
        self.reclaim_as_worker(&run, task).await
    }

    /// Renews a claim with the worker's own credentials, since those of the claim are unknown.
    async fn reclaim_as_worker(&self, run: &Run, task: TaskDefinition) -> Result<Grant, CallError> {
        let (sent_at, renewed) =
            self.service.reclaim(run, None).await.map_err(|error| self.explain_missing_scopes(error))?;
        self.service.grant(CheckedGrant { task: Some(task), ..renewed }, sent_at).map_err(CallError::retry)
    }

    async fn fetch_definition(&self, task: &TaskId) -> Result<TaskDefinition, CallError> {
        let path = format!("/task/{}", urlencoding::encode(task.as_str()));
        let call = ApiRequest::to_queue(format!("definition of {task}"), Method::GET, path);
        self.service.api.call(call).await?.json()
    }

    async fn list_unheld_claims(&self, held: &[Run], newer_than: Option<Duration>) -> Result<UnheldClaims, CallError> {
        let began = Clock::boot().now();
        let mut unheld = UnheldClaims::default();
        let mut token = None;
        for _ in 0..LISTING_PAGES_MAX {
            let reply = self.claimed_page(token.as_deref()).await?;
            let (page, date): (WireClaimedPage, _) = (reply.json()?, reply.date_or_now());
            let elapsed = Clock::boot().now().since(began);
            // Compares times of the service's clock only. A claim without a time counts as another worker's.
            let is_newer = |claimed: Timestamp| {
                let age = Duration::try_from(date.duration_since(claimed)).unwrap_or_default();
                newer_than.is_some_and(|limit| age <= limit.saturating_add(elapsed))
            };
            let own_claims = page
                .tasks
                .into_iter()
                .filter(|found| self.service.worker_identity.matches(&found.worker_group, &found.worker_id));
            for WireClaimed { task_id, run_id, task, claimed, .. } in own_claims {
                let Some(task_id) = TaskId::parse(&task_id) else {
                    continue;
                };
                let run = Run { task: task_id, run: run_id };
                match claimed.is_some_and(is_newer) {
                    _ if held.contains(&run) => {}
                    true => unheld.claimed_by_lost_poll.push((run, task)),
                    false => unheld.foreign_claims += 1,
                }
            }
            token = page.continuation_token;
            if token.is_none() {
                break;
            }
        }
        self.lists_claims.store(true, Ordering::Relaxed);
        Ok(unheld)
    }

    async fn claimed_page(&self, token: Option<&str>) -> Result<ApiResponse, CallError> {
        let queue = urlencoding::encode(&self.service.task_queue);
        let mut path = format!("/task-queues/{queue}/claimed?limit={CLAIMED_PAGE_ENTRIES}");
        if let Some(token) = token {
            path.push_str("&continuationToken=");
            path.push_str(&urlencoding::encode(token));
        }
        let operation = format!("listClaimedTasks of {}", self.service.task_queue);
        // A 401 is about the credentials as such, not about their scopes.
        self.service.api.call(ApiRequest::to_queue(operation, Method::GET, path)).await.map_err(|failed| {
            match failed.status {
                Some(401) => failed.error,
                Some(_) | None => self.explain_missing_scopes(failed.error),
            }
        })
    }

    fn explain_missing_scopes(&self, mut error: CallError) -> CallError {
        if error.refusal == Refusal::Denied {
            error.message = format!(
                "cannot recover claims whose response was lost: missing scopes queue:claimed-list:{} and \
                 queue:reclaim-task:* of the worker's client or its role ({})",
                self.service.task_queue, error.message
            );
        }
        error
    }
}

impl Service {
    async fn status(&self, task: &TaskId) -> Result<WireStatus, CallError> {
        let path = format!("/task/{}/status", urlencoding::encode(task.as_str()));
        let call = ApiRequest::to_queue(format!("status of {task}"), Method::GET, path);
        Ok(self.api.call(call).await?.json::<WireStatusReply>()?.status)
    }

    /// Returns the time at which the request was sent, and what was granted.
    async fn reclaim(&self, run: &Run, signer: Option<&Credentials>) -> Result<(Instant, CheckedGrant), CallError> {
        let operation = format!("reclaimTask {run}");
        let mut call = ApiRequest::to_queue(operation.clone(), Method::POST, run_path(run, "reclaim"));
        if let Some(credentials) = signer {
            call = call.signed_by(credentials);
        }
        let sent_at = Clock::boot().now();
        let reply = self.api.call(call).await.map_err(reclaim_error)?;
        Ok((sent_at, self.check_grant(&operation, run, &reply)?))
    }

    fn check_grant(&self, operation: &str, run: &Run, reply: &ApiResponse) -> Result<CheckedGrant, CallError> {
        let granted = reply.json::<WireClaim>()?.check(&self.worker_identity, reply.date_or_now());
        let granted = granted.map_err(|what| CallError::retry(format!("{operation}: {what}")))?;
        if granted.run != *run {
            return Err(CallError::retry(format!("{operation}: response is for {}", granted.run)));
        }
        Ok(granted)
    }

    fn grant(self: &Arc<Self>, granted: CheckedGrant, sent_at: Instant) -> Result<Grant, String> {
        let TaskDefinition { task, unreadable } = granted.task.ok_or("a claim without a task definition")?;
        *self.held.lock().entry(granted.run.clone()).or_default() += 1;
        let claim = TaskclusterClaim {
            run: granted.run.clone(),
            service: Arc::clone(self),
            credentials: Swap::new(granted.credentials),
            task_expires: task.get("expires").and_then(Value::as_str).map(str::to_owned),
            task_scopes: task_scopes(&task, &granted.run),
            reported_runs: granted.reported_runs,
        };
        Ok(Grant {
            run: granted.run,
            lease: Granted { sent_at, length: granted.lease },
            terms: granted.terms,
            queued_for: granted.queued_for,
            task: task.into(),
            payload_error: unreadable,
            claim: Arc::new(claim),
            results: None,
        })
    }
}

impl TaskclusterClaim {
    async fn reclaim(&self) -> Result<Granted, CallError> {
        let signer = self.credentials.load();
        let (sent_at, renewed) = self.service.reclaim(&self.run, Some(signer.as_ref())).await?;
        self.credentials.store(renewed.credentials);
        Ok(Granted { sent_at, length: renewed.lease })
    }

    async fn report_outcome(&self, outcome: Outcome) -> Result<(), CallError> {
        let run = &self.run;
        let credentials = self.credentials.load();
        let operation = format!("report of {run} as {outcome}");
        let call = match outcome {
            Outcome::Completed => ApiRequest::to_queue(operation, Method::POST, run_path(run, "completed")),
            Outcome::Failed => ApiRequest::to_queue(operation, Method::POST, run_path(run, "failed")),
            Outcome::Exception(reason) => ApiRequest::to_queue(operation, Method::POST, run_path(run, "exception"))
                .body(json!({ "reason": reason.as_str() })),
            Outcome::Deferred => return Err(cannot_defer(run)),
        };
        let reply: WireStatusReply = self.service.api.call(call.signed_by(&credentials)).await?.json()?;
        // A 200 from a proxy has accepted nothing.
        if reply.status.task_id != run.task.as_str() {
            return Err(CallError::retry(format!("report of {run}: response is for {:?}", reply.status.task_id)));
        }
        Ok(())
    }

    async fn fetch_lost_reason(&self) -> Result<Option<LossReason>, CallError> {
        let run = &self.run;
        let status = self.service.status(&run.task).await?;
        let Some(found) = status.runs.iter().find(|found| found.run_id == run.run) else {
            return Err(CallError::retry(format!("status of {run}: the response lacks this run")));
        };
        let group = found.worker_group.as_deref().unwrap_or_default();
        let id = found.worker_id.as_deref().unwrap_or_default();
        match (found.state.as_str(), found.reason_resolved.as_deref()) {
            ("running", _) if self.service.worker_identity.matches(group, id) => Ok(None),
            ("exception", Some("canceled")) => Ok(Some(LossReason::Canceled)),
            ("exception", Some("deadline-exceeded")) => Ok(Some(LossReason::DeadlineExceeded)),
            ("running" | "completed" | "failed" | "exception", _) => Ok(Some(LossReason::Revoked)),
            // This worker holds the grant, so the response is older than the claim.
            (state, _) => Err(CallError::retry(format!("status of {run}: unexpected state {state:?}"))),
        }
    }
}

impl Drop for TaskclusterClaim {
    fn drop(&mut self) {
        if let Entry::Occupied(mut held) = self.service.held.lock().entry(self.run.clone()) {
            *held.get_mut() -= 1;
            if *held.get() == 0 {
                held.remove();
            }
        }
    }
}

impl Claim for TaskclusterClaim {
    fn run(&self) -> &Run {
        &self.run
    }

    fn reported_runs(&self) -> u32 {
        self.reported_runs
    }

    fn stores_encodings(&self) -> bool {
        self.service.artifact_storage == ArtifactStorage::S3
    }

    fn deployment(self: Arc<Self>) -> Option<Arc<dyn Deployment>> {
        Some(self)
    }

    fn renew(&self) -> SourceFuture<'_, Granted> {
        Box::pin(self.reclaim())
    }

    fn report(&self, outcome: Outcome) -> SourceFuture<'_, ()> {
        Box::pin(self.report_outcome(outcome))
    }

    fn upload<'a>(&'a self, artifact: &'a Artifact) -> SourceFuture<'a, ()> {
        Box::pin(self.upload_artifact(artifact))
    }

    fn lost_reason(&self) -> SourceFuture<'_, Option<LossReason>> {
        Box::pin(async {
            if self.service.cannot_read_status.load(Ordering::Relaxed) {
                return Ok(None);
            }
            match self.fetch_lost_reason().await {
                Err(error) if error.refusal == Refusal::Denied => {
                    if !self.service.cannot_read_status.swap(true, Ordering::Relaxed) {
                        let what = &error.message;
                        tracing::warn!(
                            "a canceled task stops at the next reclaim, not within `worker.status_poll_interval`: the worker's \
                             client lacks the scope queue:status:* ({what})"
                        );
                    }
                    Ok(None)
                }
                checked => checked,
            }
        })
    }
}

fn unreadable_claim(id: &str, why: String) -> Message {
    Message { queue: PriorityQueue(0), id: id.into(), receipt: "".into(), dequeue_count: 1, run: Err(why) }
}

fn describe_entry(entry: &RawValue) -> String {
    let entry: Value = serde_json::from_slice(entry.get().as_bytes()).unwrap_or_default();
    let task = entry.pointer("/status/taskId").and_then(Value::as_str).unwrap_or("unknown task");
    let run = entry.get("runId").and_then(Value::as_u64);
    run.map_or_else(|| sanitize(task), |run| format!("{}/{run}", sanitize(task)))
}

fn run_path(run: &Run, call: &str) -> String {
    format!("/task/{}/runs/{}/{call}", urlencoding::encode(run.task.as_str()), run.run)
}

/// A 4xx other than 400, 401, 403 and 429 is about the task, not about this worker or its request.
fn claim_task_error(failed: FailedCall) -> CallError {
    let bad_request = failed.status == Some(400);
    let mut error = CallError::from(failed);
    if error.refusal == Refusal::Rejected && !bad_request {
        error.refusal = Refusal::Gone;
    }
    error
}

/// Only `Gone` and `Denied` are definite for a reclaim; any other error may pass.
fn reclaim_error(failed: FailedCall) -> CallError {
    let mut error = CallError::from(failed);
    if error.refusal == Refusal::Rejected {
        error.refusal = Refusal::Retry { retry_after: None };
    }
    error
}
