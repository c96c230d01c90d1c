//! Zuul's requests: merge jobs, whose result is stored for a submitter that waits or sent as an event, and builds, whose end is
//! an event in one transaction with their state.

use std::mem::discriminant;
use std::sync::Arc;

use serde_json::{Map, Value, json};
use tokio::time::sleep;

use super::Dialect;
use super::claim::{self, Held, JobClaim, QueueSession, SourceContext, UNLIMITED};
use super::queue_watch::QueueWatch;
use crate::source::{CallError, Grant, Granted, RunTerms, SourceFuture};
use crate::task::{Reply, Results, cannot_pause};
use journeyman_domain::id::{Run, TaskId};
use journeyman_domain::limits::{ZOOKEEPER_RESULT_BYTES_MAX, ZOOKEEPER_RETRY_DELAY, ZOOKEEPER_SEMAPHORE_RETRY};
use journeyman_domain::outcome::{ExceptionReason, Outcome};
use journeyman_domain::refusal::Refusal;
use journeyman_domain::time::Instant;
use journeyman_platform::host::clock::Clock;
use journeyman_platform::host::crash_points::crash_point;
use journeyman_platform::zookeeper::event_queue::{EventQueue, event};
use journeyman_platform::zookeeper::job_queue::{
    ClaimAttempt, ClaimedRequest, JobError, JobRequest, MERGE_COMPLETED, RequestState, merge_event_kind,
};
use journeyman_platform::zookeeper::submit::unix_seconds;

/// What a handler gets of a request beside its parameters.
const FIELDS: [&str; 7] =
    ["job_type", "tenant_name", "pipeline_name", "event_id", "build_set_uuid", "precedence", "zone"];

struct HeldJob {
    dialect: Dialect,
    claimed: ClaimedRequest,
    started_at: f64,
    /// The end of the time that its job has; a build that pauses has none any more.
    deadline: Option<Instant>,
    /// The end of the request need not be repeated.
    is_completed: bool,
}

pub(super) async fn claim(
    source: &Arc<SourceContext>,
    watch: &Arc<QueueWatch>,
    id: &str,
) -> Result<Option<Grant>, CallError> {
    let Some(task) = TaskId::parse(id) else { return Ok(None) };
    let sent_at = source.clock.now();
    let dialect = source.dialect;
    let run = Run { task, run: 0 };
    let Some(hold) = watch.hold(&run) else { return Ok(None) };
    let info = json!({ "hostname": source.worker_id, "log_port": null, "zone": watch.zone });
    let info = (dialect == Dialect::ZuulExecutor).then_some(&info);
    let claimed = match watch.at.queue.claim(&watch.at.session, id, info).await? {
        ClaimAttempt::Claimed(claimed) => *claimed,
        ClaimAttempt::Settled => return Ok(None),
        attempt @ (ClaimAttempt::Locked | ClaimAttempt::Waits) => {
            if matches!(attempt, ClaimAttempt::Waits) {
                let why = "a semaphore that this build needs has no free place; trying again from time to time";
                tracing::info!(request = id, "{why}");
            }
            let (watch, id) = (Arc::clone(watch), id.to_owned());
            watch.defer(&id);
            source.spawn(async move {
                sleep(ZOOKEEPER_SEMAPHORE_RETRY).await;
                watch.end_deferral(&id);
            });
            return Ok(None);
        }
    };
    let parsed = claimed.params.as_ref().map_err(Clone::clone).and_then(|params| {
        serde_json::from_slice::<Value>(params).map_err(|error| format!("its parameters are no JSON: {error}"))
    });
    let (payload, payload_error) = match parsed {
        Ok(payload) => (payload, None),
        Err(error) => (Value::Null, Some(error)),
    };
    let mut task: Map<String, Value> =
        FIELDS.iter().filter_map(|key| Some(((*key).to_owned(), claimed.request.json.get(key)?))).collect();
    task.insert("payload".to_owned(), payload);
    task.extend(claimed.job.as_ref().map(|job| ("job".to_owned(), job.json.clone().into())));
    let run_time = claimed.job.as_ref().and_then(|job| job.run_time_max());
    let deadline = run_time.map(|length| source.clock.now().plus(length));
    let held = HeldJob { dialect, claimed, started_at: unix_seconds(), deadline, is_completed: false };
    // A scheduler sets the flag while any worker, also one that comes too late, has entered the lock.
    let flag = watch.at.queue.cancel_flag(id);
    if dialect == Dialect::ZuulExecutor && watch.at.session.retry(|| watch.at.session.stat(&flag)).await?.is_some() {
        Box::new(held).abandon(watch.at.clone()).await?;
        return Ok(None);
    }
    // The end of the build says all that the scheduler needs.
    if let Err(error) = held.send_started(&watch.at).await {
        tracing::warn!(request = id, "{error}");
    }
    let claim = JobClaim::new(run.clone(), source, watch, hold, Box::new(held));
    Ok(Some(Grant {
        run,
        lease: Granted { sent_at, length: watch.at.session.timeout() },
        terms: RunTerms { deadline, ..UNLIMITED },
        queued_for: None,
        task: Value::Object(task).into(),
        payload_error,
        results: Some(claim.results()),
        claim,
    }))
}

/// The word for an outcome that Zuul's scheduler acts on; `None` is another attempt.
const fn build_result(outcome: Outcome) -> Option<&'static str> {
    match outcome {
        Outcome::Completed => Some("SUCCESS"),
        Outcome::Failed => Some("FAILURE"),
        Outcome::Exception(ExceptionReason::WorkerShutdown) => Some("ABORTED"),
        Outcome::Exception(ExceptionReason::MalformedPayload | ExceptionReason::InternalError) => Some("ERROR"),
        Outcome::Exception(ExceptionReason::ResourceUnavailable) => Some("NODE_FAILURE"),
        Outcome::Exception(ExceptionReason::IntermittentTask) | Outcome::Deferred => None,
    }
}

impl HeldJob {
    fn request(&self) -> &JobRequest {
        &self.claimed.request
    }

    fn text(&self, key: &str) -> Option<String> {
        self.request().json.get(key)
    }

    /// The results of the request's pipeline.
    fn event_queue(&self) -> Option<EventQueue> {
        Some(EventQueue::of_pipeline(&self.text("tenant_name")?, &self.text("pipeline_name")?))
    }

    fn build_event(&self, at: &QueueSession, data: &Value) -> Value {
        let id = &self.request().id;
        json!({
            "build_uuid": id,
            "build_set_uuid": self.text("build_set_uuid"),
            "job_uuid": self.text("job_uuid"),
            "build_request_ref": at.queue.path("requests", id),
            "data": data,
            "zuul_event_id": self.text("event_id"),
        })
    }

    async fn send_started(&self, at: &QueueSession) -> Result<(), CallError> {
        let (Dialect::ZuulExecutor, Some(queue)) = (self.dialect, self.event_queue()) else { return Ok(()) };
        let event = self.build_event(at, &json!({ "start_time": self.started_at }));
        queue.put(&at.session, "BuildStartedEvent", event).await?;
        Ok(())
    }

    /// Adds an event, repeated until it is answered. If only the answer was lost, the scheduler ignores the second. Every
    /// error is `Gone`, since the build can go on without: its end says all that the scheduler needs.
    async fn put_event(&self, at: &QueueSession, kind: &str, data: &Value) -> Result<(), CallError> {
        let event = self.build_event(at, data);
        let queue = self.event_queue().ok_or_else(|| claim::gone("the build names no pipeline"))?;
        loop {
            match queue.put(&at.session, kind, event.clone()).await {
                Ok(true) => return Ok(()),
                Ok(false) => return Err(claim::gone("the pipeline of the build is gone")),
                Err(JobError::Call(error)) if error.is_unanswered() && !at.session.is_ended() => {
                    sleep(ZOOKEEPER_RETRY_DELAY).await;
                }
                Err(error) => return Err(claim::gone(&format!("{kind} is not sent: {error}"))),
            }
        }
    }

    async fn write_state(&mut self, at: &QueueSession, state: RequestState) -> Result<(), CallError> {
        let is_ours = at.queue.set_state(&at.session, &mut self.claimed.request, state).await?;
        if is_ours { Ok(()) } else { Err(self.settled_elsewhere()) }
    }

    /// What the handler set as its result, if it is an object.
    fn handler_result(results: &Results) -> Map<String, Value> {
        let reply = results.final_reply().and_then(|reply| serde_json::from_slice::<Value>(&reply.body).ok());
        match reply {
            Some(Value::Object(fields)) => fields,
            Some(_) | None => Map::new(),
        }
    }

    async fn end_build(&mut self, at: &QueueSession, word: Option<&str>, results: &Results) -> Result<(), CallError> {
        let own = Self::handler_result(results);
        let data = json!({
            "result": own.get("result").and_then(Value::as_str).or(word),
            "end_time": unix_seconds(),
            "error_detail": results.failure_reason(),
            "warnings": own.get("warnings").filter(|warnings| warnings.is_array()).cloned().unwrap_or_else(|| json!([])),
            "unreachable": false,
            "data": object(&own, "data"),
            "secret_data": object(&own, "secret_data"),
            "held": false,
        });
        let event = event("BuildCompletedEvent", self.build_event(at, &data));
        let session = &at.session;
        let is_ours = match self.event_queue() {
            Some(queue) => {
                let request = &mut self.claimed.request;
                at.queue.complete_with_event(session, request, &queue, event).await?
            }
            None => at.queue.set_state(session, &mut self.claimed.request, RequestState::Completed).await?,
        };
        self.on_completed(is_ours)
    }

    fn on_completed(&mut self, is_ours: bool) -> Result<(), CallError> {
        crash_point("zookeeper-completed");
        self.is_completed = is_ours;
        if is_ours { Ok(()) } else { Err(self.settled_elsewhere()) }
    }

    fn settled_elsewhere(&self) -> CallError {
        claim::gone(&format!("request {}: another process has removed or completed it", self.request().id))
    }

    async fn end_merge(&mut self, at: &QueueSession, results: &Results) -> Result<(), CallError> {
        let own = Self::handler_result(results);
        let (session, merge_event, queue) = (&at.session, self.merge_event(&own), self.event_queue());
        let (has_waiter, request) = (self.text("result_path").is_some(), &mut self.claimed.request);
        let is_ours = if has_waiter {
            at.queue.complete_with_result(session, request, &Value::from(own).to_string().into_bytes()).await?
        } else if let Some(queue) = queue {
            at.queue.complete_with_event(session, request, &queue, event(merge_event.0, merge_event.1)).await?
        } else {
            at.queue.set_state(session, request, RequestState::Completed).await?
        };
        self.on_completed(is_ours)
    }

    fn merge_event(&self, own: &Map<String, Value>) -> (&'static str, Value) {
        let kind = merge_event_kind(self.request());
        let defaults = if kind == MERGE_COMPLETED {
            json!({
                "merged": false, "updated": false, "commit": null, "files": [], "repo_state": {}, "item_in_branches": [], "errors": [],
            })
        } else {
            json!({ "files": [] })
        };
        let Value::Object(mut data) = defaults else { unreachable!("it is an object") };
        // A value of another kind would stop the scheduler at this event, again and again.
        for (key, value) in &mut data {
            let new = own.get(key).filter(|new| value.is_null() || discriminant(*new) == discriminant(value));
            if let Some(new) = new.or_else(|| own.get(key).filter(|new| key == "files" && new.is_object())) {
                *value = new.clone();
            }
        }
        data.insert("request_uuid".to_owned(), self.request().id.clone().into());
        data.insert("build_set_uuid".to_owned(), self.text("build_set_uuid").into());
        data.insert("elapsed_time".to_owned(), (unix_seconds() - self.started_at).into());
        data.insert("span_info".to_owned(), self.request().json.get::<Value>("span_info").unwrap_or_default());
        data.insert("zuul_event_id".to_owned(), self.text("event_id").into());
        (kind, data.into())
    }

    /// A merge that was not run goes back; of a build the scheduler makes another.
    async fn put_back(&mut self, at: &QueueSession) -> Result<(), CallError> {
        Ok(at.queue.put_back(&at.session, &mut self.claimed).await?)
    }

    /// The scheduler looks for builds that waited for the places.
    async fn release_semaphores(&mut self, at: &QueueSession) -> Result<(), CallError> {
        let Some(places) = &self.claimed.places else { return Ok(()) };
        at.session.release_semaphores(places).await?;
        if let Some(tenant) = self.text("tenant_name") {
            let queue = EventQueue::new(&format!("/zuul/events/tenant/{tenant}/management"));
            for semaphore in &places.semaphores {
                queue.put(&at.session, "SemaphoreReleaseEvent", json!({ "semaphore_name": semaphore.name })).await?;
            }
        }
        self.claimed.places = None;
        Ok(())
    }

    async fn unlock(&self, at: &QueueSession) -> Result<(), CallError> {
        let (session, path) = (&at.session, self.lock_path());
        Ok(session.retry(|| session.delete(&path)).await?)
    }
}

/// A value of a handler's result that the scheduler merges into its variables.
fn object(own: &Map<String, Value>, key: &str) -> Value {
    own.get(key).filter(|value| value.is_object()).cloned().unwrap_or_else(|| json!({}))
}

impl Held for HeldJob {
    fn result_bytes_max(&self) -> usize {
        ZOOKEEPER_RESULT_BYTES_MAX
    }

    fn lock_path(&self) -> String {
        self.claimed.lock.path()
    }

    fn reclaim<'a>(&'a mut self, at: &'a QueueSession) -> SourceFuture<'a, ()> {
        Box::pin(async move {
            // What was completed is this worker's to remove, whatever is left of it.
            match at.queue.reclaim(&at.session, &mut self.claimed).await? {
                Some(is_completed) => self.is_completed = is_completed,
                None if self.is_completed => {}
                None => return Err(self.settled_elsewhere()),
            }
            tracing::info!(request = self.request().id, "its session has expired; reporting it in another");
            Ok(())
        })
    }

    fn settle<'a>(&'a mut self, at: &'a QueueSession, outcome: Outcome, results: &'a Results) -> SourceFuture<'a, ()> {
        Box::pin(async move {
            match (self.dialect, outcome) {
                (Dialect::ZuulExecutor, _) => {
                    self.release_semaphores(at).await?;
                    if !self.is_completed {
                        self.end_build(at, build_result(outcome), results).await?;
                    }
                }
                (_, Outcome::Exception(ExceptionReason::WorkerShutdown | ExceptionReason::IntermittentTask)) => {
                    self.put_back(at).await?;
                }
                (_, Outcome::Completed | Outcome::Failed | Outcome::Exception(_) | Outcome::Deferred) => {
                    if !self.is_completed {
                        self.end_merge(at, results).await?;
                    }
                    return Ok(at.queue.remove_held(&at.session, &self.claimed).await?);
                }
            }
            self.unlock(at).await
        })
    }

    fn abandon(mut self: Box<Self>, at: QueueSession) -> SourceFuture<'static, ()> {
        Box::pin(async move {
            self.release_semaphores(&at).await?;
            let flag = at.queue.cancel_flag(&self.request().id);
            if self.dialect == Dialect::ZuulExecutor && at.session.stat(&flag).await?.is_some() {
                // The scheduler has asked for it, and reports it as canceled.
                at.session.delete(&flag).await?;
                self.end_build(&at, Some("ABORTED"), &claim::no_results()).await?;
            } else if self.deadline.is_some_and(|at| Clock::boot().now() >= at) {
                self.end_build(&at, Some("TIMED_OUT"), &claim::no_results()).await?;
            }
            self.unlock(&at).await
        })
    }

    fn send_status<'a>(&'a mut self, at: &'a QueueSession, status: Reply) -> SourceFuture<'a, ()> {
        Box::pin(async move {
            if self.dialect != Dialect::ZuulExecutor {
                return Err(claim::no_partial_results());
            }
            let Ok(Value::Object(data)) = serde_json::from_slice(&status.body) else {
                let message =
                    "a partial reply of a build must be a JSON object, such as {\"pre_fail\": true}".to_owned();
                return Err(CallError { refusal: Refusal::Rejected, message });
            };
            self.put_event(at, "BuildStatusEvent", &data.into()).await
        })
    }

    fn pause<'a>(&'a mut self, at: &'a QueueSession, results: &'a Results) -> SourceFuture<'a, ()> {
        Box::pin(async move {
            if self.dialect != Dialect::ZuulExecutor {
                return Err(cannot_pause());
            }
            self.write_state(at, RequestState::Paused).await?;
            self.deadline = None;
            let own = Self::handler_result(results);
            let data =
                json!({ "paused": true, "data": object(&own, "data"), "secret_data": object(&own, "secret_data") });
            self.put_event(at, "BuildPausedEvent", &data).await
        })
    }

    fn resume<'a>(&'a mut self, at: &'a QueueSession) -> SourceFuture<'a, ()> {
        Box::pin(async move {
            self.write_state(at, RequestState::Running).await?;
            let (session, flag) = (&at.session, at.queue.resume_flag(&self.request().id));
            Ok(session.retry(|| session.delete(&flag)).await?)
        })
    }
}
