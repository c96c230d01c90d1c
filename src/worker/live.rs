//! What the runtime keeps of one claim: everything that the rules have no use for.

use std::hash::{BuildHasher as _, RandomState};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use tokio::sync::watch;
use tokio::task::AbortHandle;

use crate::domain::claim::{self, KillCause};
use crate::domain::id::{Lane, Run, Token};
use crate::domain::time::Instant;
use crate::domain::trace::TraceParent;
use crate::handler::artifact::Artifacts;
use crate::handler::log::{LogLimits, TaskLog};
use crate::handler::{Cancel, CancelCause, Context, Prepared, Task};
use crate::source::{Claim, Grant, Message, Replies};

use super::Feed;
use super::prompt::Begun;
use super::record::Trace;
use super::steer::Said;
use super::timeline::{Phase, Timeline};
use crate::host::clock::Clock;
use crate::host::containment::Enclosure;
use crate::host::spare::Spares;

/// What claiming or deleting a message takes.
pub(super) struct Entry {
    pub(super) lane: Lane,
    pub(super) id: Arc<str>,
    pub(super) receipt: Arc<str>,
    pub(super) source: usize,
    pub(super) message: Option<Arc<Message>>,
}

/// A claim from the request on.
pub(super) struct Live {
    pub(super) feed: usize,
    pub(super) message: Option<Arc<Message>>,
    pub(super) claim: Option<Claim>,
    pub(super) prepared: Option<Box<dyn Prepared>>,
    pub(super) job: Option<Job>,
    /// A report that was begun, and that the rules have not asked for yet.
    pub(super) report: Option<Begun>,
    /// Whether the rules know that what prepared it has started it.
    pub(super) started: bool,
    pub(super) calls: Vec<AbortHandle>,
    /// When it was granted, and when last extended.
    pub(super) since: Option<Instant>,
    pub(super) reclaimed: Option<Instant>,
    /// When the request was sent that the lease is counted from, and how often it was extended.
    pub(super) leased: Option<Instant>,
    pub(super) reclaims: u32,
    pub(super) timeline: Timeline,
    pub(super) ordered: Option<Said>,
    /// What its handler is told to trace under.
    pub(super) trace: Option<TraceParent>,
    /// Where its spans belong, if any are recorded.
    pub(super) recorded: Option<Trace>,
    definition: serde_json::Value,
    unreadable: Option<String>,
    replies: Option<Replies>,
    cancel: watch::Sender<Option<Cancel>>,
    lease_ends: watch::Sender<Instant>,
}

/// What exists from the moment a handler is involved.
#[derive(Debug, Clone)]
pub(super) struct Job {
    pub(super) context: Context,
    /// The task's folder, which is there if the context says that it was made.
    pub(super) folder: PathBuf,
}

/// Where a task is run.
pub(super) struct Surroundings<'a> {
    /// Its folder goes below this one.
    pub(super) base: &'a Path,
    pub(super) spares: Spares,
    pub(super) log: LogLimits,
    pub(super) clock: Clock,
    pub(super) enclosure: Enclosure,
}

impl Live {
    pub(super) fn new(feed: usize) -> Self {
        Self {
            feed,
            message: None,
            claim: None,
            prepared: None,
            job: None,
            report: None,
            started: false,
            calls: Vec::new(),
            since: None,
            reclaimed: None,
            leased: None,
            reclaims: 0,
            timeline: Timeline::default(),
            ordered: None,
            trace: None,
            recorded: None,
            definition: serde_json::Value::Null,
            unreadable: None,
            replies: None,
            cancel: watch::Sender::new(None),
            lease_ends: watch::Sender::new(Instant::ORIGIN),
        }
    }

    pub(super) fn granted(&mut self, grant: Grant, sent_at: Instant, recording: Recording, now: Instant) {
        self.since = Some(now);
        self.leased = Some(sent_at);
        self.timeline.begin(Phase::Claim, now);
        self.timeline.end(&[Phase::Claim], now);
        self.definition = grant.task;
        self.unreadable = grant.unreadable;
        let trace = trace_of(&self.definition);
        (self.trace, self.recorded) = (Some(trace.passed_on(recording)), trace.recorded(recording));
        self.replies = grant.replies;
        self.claim = Some(grant.claim);
    }

    /// Of what no handler has seen nothing has run: where tries are counted, this is none.
    pub(super) fn leave_untouched_unless_begun(&self) {
        if let (None, Some(replies)) = (&self.job, &self.replies) {
            replies.leave_untouched();
        }
    }

    /// Remembers a call, so that it can be dropped when the claim is over.
    pub(super) fn keep(&mut self, call: AbortHandle) {
        self.calls.push(call);
    }

    /// Lets go of calls that have come back: each holds as much memory as the call itself took.
    pub(super) fn let_go(&mut self) {
        self.calls.retain(|call| !call.is_finished());
    }

    /// Makes what the handler is given, and touches no disk. The folder's name is no other claim's: two deployments may use
    /// one name for two tasks, and what an earlier claim left may still be on its way out.
    pub(super) fn begin(&mut self, claim: Token, run: &Run, feed: &Feed, around: Surroundings<'_>) -> Job {
        let Surroundings { base, spares, log, clock, enclosure } = around;
        let name = format!("{}_{}_{}", run.task, run.run, claim.0);
        let workdir = base.join(&name);
        let log = TaskLog::of_spares(base.join(format!("{name}.log")), log, spares.clone());
        let definition = std::mem::take(&mut self.definition);
        let mut env = feed.env.clone();
        env.insert("TASK_ID".to_owned(), run.task.to_string());
        env.insert("RUN_ID".to_owned(), run.run.to_string());
        env.insert("TASK_WORKDIR".to_owned(), workdir.display().to_string());
        if let Some(group) = definition.get("taskGroupId").and_then(serde_json::Value::as_str) {
            env.insert("TASK_GROUP_ID".to_owned(), group.to_owned());
        }
        env.extend(self.trace.map(|trace| ("TRACEPARENT".to_owned(), trace.to_string())));
        let task = Task { run: run.clone(), source: feed.name.clone(), definition, env };
        let folder = workdir.clone();
        let context = Context::new(
            task,
            workdir,
            log,
            Artifacts::new(),
            self.cancel.subscribe(),
            self.lease_ends.subscribe(),
            clock,
        )
        .within(enclosure)
        .of_spares(spares)
        .answering(self.replies.take())
        .unreadable(self.unreadable.take());
        let job = Job { context, folder };
        self.job = Some(job.clone());
        job
    }

    /// Passes the order to end on to the handler. Of several orders the earliest deadline counts, and a lost claim
    /// outweighs a shutdown.
    pub(super) fn kill(&self, cause: KillCause, grace: Duration, now: Instant) {
        self.cancel.send_modify(|order| {
            let deadline = now.plus(grace);
            let cause = match (order.map(|order| order.cause), cause) {
                (Some(CancelCause::ClaimLost), _) | (_, KillCause::ClaimLost(_)) => CancelCause::ClaimLost,
                (Some(CancelCause::Canceled), _) | (_, KillCause::Ordered(claim::Order::Cancel)) => {
                    CancelCause::Canceled
                }
                (Some(CancelCause::HandedBack), _) | (None, KillCause::Ordered(claim::Order::HandBack)) => {
                    CancelCause::HandedBack
                }
                (Some(CancelCause::Shutdown), KillCause::Shutdown | KillCause::Ordered(claim::Order::HandBack))
                | (None, KillCause::Shutdown) => CancelCause::Shutdown,
            };
            *order = Some(match *order {
                Some(old) if old.deadline <= deadline => Cancel { cause, ..old },
                Some(_) | None => Cancel { cause, deadline, grace },
            });
        });
    }

    pub(super) fn killed(&self) -> bool {
        self.cancel.borrow().is_some()
    }

    pub(super) fn extended(&self, lease_ends: Instant) {
        self.lease_ends.send_replace(lease_ends);
    }
}

/// Whether spans are recorded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Recording {
    On,
    Off,
}

/// The trace that a task's creator started, or one of its own, and the spans that may be recorded in it.
#[derive(Debug, Clone, Copy)]
struct Found {
    given: Option<TraceParent>,
    own: TraceParent,
    run: u64,
}

fn trace_of(definition: &serde_json::Value) -> Found {
    let given = definition.pointer("/extra/traceparent").and_then(serde_json::Value::as_str);
    let given = given.and_then(TraceParent::parse);
    let own = given.unwrap_or_else(|| {
        let (high, low) = (u128::from(number()), u128::from(number()));
        TraceParent::new(high << 64 | low, number())
    });
    Found { given, own: own.below(number()), run: number() }
}

/// A number that nobody else has. Not worth a call to the system: it is no secret.
fn number() -> u64 {
    static KEYS: LazyLock<RandomState> = LazyLock::new(RandomState::new);
    static COUNT: AtomicU64 = AtomicU64::new(0);
    KEYS.hash_one(COUNT.fetch_add(1, Ordering::Relaxed))
}

impl Found {
    /// A creator who says that nothing is to be recorded is heard.
    fn recorded(self, recording: Recording) -> Option<Trace> {
        let parent = self.given.map(|given| given.span());
        let trace = Trace { own: self.own, parent, run: self.own.below(self.run).span() };
        Some(trace).filter(|_| recording == Recording::On && self.own.sampled())
    }

    fn passed_on(self, recording: Recording) -> TraceParent {
        let unrecorded = self.given.unwrap_or(self.own);
        self.recorded(recording).map_or(unrecorded, |trace| trace.own.below(trace.run))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::task::JoinSet;

    #[test]
    fn of_several_orders_a_lost_claim_and_the_earliest_deadline_count() {
        let at = |secs| Instant::at(Duration::from_secs(secs));
        let (lost, shutdown) = (KillCause::ClaimLost(claim::Loss::Refused), KillCause::Shutdown);
        for (orders, deadline, grace) in [
            ([(shutdown, 0, 30), (lost, 1, 10)], at(11), 10),
            ([(shutdown, 0, 5), (lost, 1, 10)], at(5), 5),
            ([(lost, 0, 10), (shutdown, 1, 30)], at(10), 10),
            ([(lost, 0, 10), (shutdown, 1, 0)], at(1), 0),
        ] {
            let live = Live::new(0);
            for (cause, now, grace) in orders {
                live.kill(cause, Duration::from_secs(grace), at(now));
            }
            let grace = Duration::from_secs(grace);
            let order = Some(Cancel { cause: CancelCause::ClaimLost, deadline, grace });
            assert_eq!(*live.cancel.borrow(), order, "{orders:?}");
        }
    }

    #[test]
    fn a_tasks_trace_is_its_creators_where_that_can_be_read_and_its_own_otherwise() {
        let given = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
        let of = |extra| trace_of(&serde_json::json!({ "extra": extra })).passed_on(Recording::Off).to_string();
        assert_eq!(of(serde_json::json!({ "traceparent": given })), given);
        for odd in [serde_json::json!({}), serde_json::json!({ "traceparent": 7 }), serde_json::json!("00-")] {
            let own = of(odd);
            assert!(TraceParent::parse(&own).is_some_and(|read| read.to_string() == own), "{own}");
            assert_ne!(own, of(serde_json::json!({})));
        }
    }

    #[test]
    fn a_handler_is_told_of_the_span_that_is_recorded_and_a_creator_who_wants_none_is_heard() {
        let of = |flags: &str| {
            let given = format!("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-{flags}");
            trace_of(&serde_json::json!({ "extra": { "traceparent": given } }))
        };
        let found = of("01");
        let trace = found.recorded(Recording::On).unwrap();
        assert_eq!(trace.own.trace_id().to_string(), "0af7651916cd43dd8448eb211c80319c");
        assert_eq!(trace.parent, Some(0xb7ad_6b71_6920_3331));
        let told = found.passed_on(Recording::On);
        assert_eq!((told.trace(), told.span()), (trace.own.trace(), trace.run));
        assert!(trace.own.span() != trace.run && Some(trace.run) != trace.parent && told.sampled());
        assert_eq!(found.recorded(Recording::Off), None);
        let unwanted = of("00");
        assert_eq!(unwanted.recorded(Recording::On), None);
        let passed = unwanted.passed_on(Recording::On).to_string();
        assert_eq!(passed, "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00");
        let own = trace_of(&serde_json::Value::Null).recorded(Recording::On).unwrap();
        assert_eq!(own.parent, None);
    }

    #[tokio::test]
    async fn only_calls_under_way_are_held() {
        let (mut live, mut calls) = (Live::new(0), JoinSet::new());
        live.keep(calls.spawn(async {}));
        calls.join_next().await.unwrap().unwrap();
        live.keep(calls.spawn(std::future::pending()));
        live.let_go();
        assert_eq!(live.calls.len(), 1);
        assert!(!live.calls[0].is_finished());
    }
}
