//! One function for each effect that takes time. Each one always comes back with exactly one [`Back`].

use std::sync::Arc;
use std::time::Duration;

use crate::domain::claim::Settled;
use crate::domain::id::{Lane, Run, SourceId, Token};
use crate::domain::outcome::{Outcome, Unprepared, Verdict};
use crate::domain::refusal::Refusal;
use crate::domain::time::Instant;
use crate::handler::{Context, Handler, NotCompleted, NotPrepared, Prepared};
use crate::limits::KILL_SLACK;
use crate::source::{Answer, Batch, Claim, Grant, Opened, Refused, Source};

use super::guard::{Panicked, guarded};
use super::live::{Entry, Job};
use super::settle::Store;
use crate::host::clock::Clock;

/// What a call brings back.
pub(super) enum Back {
    Opened { source: SourceId, sent_at: Instant, answer: Result<Opened, Refused> },
    Polled { source: SourceId, lane: Lane, sent_at: Instant, answer: Result<Batch, Refused> },
    Recovered { source: SourceId, sent_at: Instant, answer: Result<Vec<Grant>, Refused> },
    Claimed { claim: Token, sent_at: Instant, answer: Result<Grant, Refused> },
    Deleted { message: Token, answer: Result<(), Refused> },
    Prepared { claim: Token, answer: Result<Box<dyn Prepared>, Unprepared> },
    Ended { claim: Token, verdict: Verdict },
    Settled { claim: Token, settled: Settled },
    Reported { claim: Token, answer: Result<(), Refused> },
    Reclaimed { claim: Token, sent_at: Instant, answer: Result<Duration, Refused> },
    Checked { claim: Token, answer: Result<bool, Refused> },
}

pub(super) async fn open(source: Arc<dyn Source>, id: SourceId, clock: Clock) -> Back {
    let sent_at = clock.now();
    Back::Opened { source: id, sent_at, answer: call("open", source.open()).await }
}

pub(super) async fn poll(source: Arc<dyn Source>, id: SourceId, lane: Lane, max: u8, clock: Clock) -> Back {
    let sent_at = clock.now();
    Back::Polled { source: id, lane, sent_at, answer: call("poll", source.poll(lane, max)).await }
}

pub(super) async fn recover(source: Arc<dyn Source>, id: SourceId, held: Vec<Run>, clock: Clock) -> Back {
    let sent_at = clock.now();
    Back::Recovered { source: id, sent_at, answer: call("recover", source.recover(&held)).await }
}

pub(super) async fn claim(
    source: Arc<dyn Source>,
    claim: Token,
    message: Arc<crate::source::Message>,
    clock: Clock,
) -> Back {
    let sent_at = clock.now();
    Back::Claimed { claim, sent_at, answer: call("claim", source.claim(&message)).await }
}

pub(super) async fn delete(source: Arc<dyn Source>, message: Token, entry: Arc<Entry>) -> Back {
    let answer = call("delete", source.delete(entry.lane, &entry.id, &entry.receipt)).await;
    Back::Deleted { message, answer }
}

pub(super) async fn report(
    source: Arc<dyn Source>,
    token: Token,
    claim: Claim,
    outcome: Outcome,
    timeout: Duration,
) -> Back {
    let answer = within(timeout, "report", source.report(&claim, outcome)).await;
    Back::Reported { claim: token, answer }
}

pub(super) async fn reclaim(
    source: Arc<dyn Source>,
    token: Token,
    claim: Claim,
    timeout: Duration,
    clock: Clock,
) -> Back {
    let sent_at = clock.now();
    Back::Reclaimed { claim: token, sent_at, answer: within(timeout, "reclaim", source.reclaim(&claim)).await }
}

pub(super) async fn check(source: Arc<dyn Source>, token: Token, claim: Claim) -> Back {
    Back::Checked { claim: token, answer: call("status", source.canceled(&claim)).await }
}

pub(super) async fn settle(store: Store, claim: Token, job: Job) -> Back {
    let settled = match guarded(store.settle(job)).await {
        Ok(settled) => settled,
        Err(Panicked(text)) => {
            tracing::error!(panic = text, "storing a task's log and artifacts panicked");
            Settled::Unstored
        }
    };
    Back::Settled { claim, settled }
}

/// Prepares, unless it is told to end first: then what was being prepared is dropped.
pub(super) async fn prepare(
    handler: Arc<dyn Handler>,
    claim: Token,
    payload: serde_json::Value,
    context: Context,
) -> Back {
    let answer = tokio::select! {
        biased;
        _ = context.canceled() => return Back::Ended { claim, verdict: Verdict::Internal },
        answer = guarded(handler.prepare(payload, &context)) => answer,
    };
    let log = context.log();
    let answer = match answer {
        Ok(Ok(prepared)) => Ok(prepared),
        Ok(Err(NotPrepared::Malformed(sentences))) => {
            log.note("the payload is malformed; no task code was run:");
            sentences.iter().for_each(|sentence| log.note(&format!("  {sentence}")));
            Err(Unprepared::Malformed)
        }
        Ok(Err(NotPrepared::Unavailable(sentence))) => {
            log.note(&format!("not started, for want of something the payload declares: {sentence}"));
            Err(Unprepared::Unavailable)
        }
        Ok(Err(NotPrepared::Internal(sentence))) => {
            log.note(&format!("not started, the worker is at fault: {sentence}"));
            Err(Unprepared::Internal)
        }
        Err(Panicked(text)) => {
            tracing::error!(claim.run = %context.task().run, panic = text, "the handler panicked while it prepared");
            log.note("not started: the handler panicked while it prepared; the worker's log says more");
            Err(Unprepared::Internal)
        }
    };
    Back::Prepared { claim, answer }
}

/// Executes. A handler that has not returned [`KILL_SLACK`] after its time to end is dropped, and its drop ends what is left.
pub(super) async fn execute(prepared: Box<dyn Prepared>, claim: Token, context: Context) -> Back {
    let ended = tokio::select! {
        biased;
        ended = guarded(prepared.execute(&context)) => ended,
        () = overdue(&context) => {
            tracing::error!(claim.run = %context.task().run, "the handler did not end in time and is dropped");
            Ok(Err(NotCompleted::Internal("it did not end when it was told to".to_owned())))
        }
    };
    Back::Ended { claim, verdict: verdict(ended, &context) }
}

async fn overdue(context: &Context) {
    context.kill_due().await;
    tokio::time::sleep(KILL_SLACK).await;
}

fn verdict(ended: Result<Result<(), NotCompleted>, Panicked>, context: &Context) -> Verdict {
    let log = context.log();
    match ended {
        Ok(Ok(())) => Verdict::Completed,
        Ok(Err(NotCompleted::Failed(sentence))) => {
            log.note(&format!("failed: {sentence}"));
            Verdict::Failed
        }
        Ok(Err(NotCompleted::Intermittent(sentence))) => {
            log.note(&format!("failed, and asks to be run again: {sentence}"));
            Verdict::Intermittent
        }
        Ok(Err(NotCompleted::Unavailable(sentence))) => {
            log.note(&format!("not completed, for want of something: {sentence}"));
            Verdict::Unavailable
        }
        Ok(Err(NotCompleted::Internal(sentence))) => {
            log.note(&format!("not completed, the worker is at fault: {sentence}"));
            Verdict::Internal
        }
        Err(Panicked(text)) => {
            tracing::error!(claim.run = %context.task().run, panic = text, "the handler panicked");
            log.note("the handler panicked; the worker's log says more");
            Verdict::Internal
        }
    }
}

async fn within<T>(timeout: Duration, operation: &str, answer: Answer<'_, T>) -> Result<T, Refused> {
    match tokio::time::timeout(timeout, call(operation, answer)).await {
        Ok(answer) => answer,
        Err(_) => {
            let what = format!("{operation}: no answer within {timeout:?}");
            Err(Refused { refusal: Refusal::Retry { after: None }, what })
        }
    }
}

async fn call<T>(operation: &str, answer: Answer<'_, T>) -> Result<T, Refused> {
    guarded(answer).await.unwrap_or_else(|Panicked(text)| {
        tracing::error!(operation, panic = text, "a source panicked");
        let what = format!("{operation}: the source panicked");
        Err(Refused { refusal: Refusal::Retry { after: None }, what })
    })
}
