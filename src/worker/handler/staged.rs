//! Handlers of work that is launched elsewhere and looked at later: a batch job, a virtual machine, a pod.
//!
//! The worker launches it and looks at it from time to time. Where the source can schedule a message, nothing is held between two
//! looks. Elsewhere the claim is kept, which costs no thread and no process, and a wake-up makes a look early.

use std::future::{Future, pending, ready};
use std::time::Duration;

use serde::de::DeserializeOwned;
use tokio::time::timeout;

use crate::task::{Deferral, Results};
use journeyman_domain::id::Run;
use journeyman_domain::jitter::Jitter;
use journeyman_domain::limits::{STAGED_CALL_TIMEOUT, STAGED_DEFER_WAIT_MIN};
use journeyman_domain::staged::{StagedAction, StagedEvent, StagedState};
use journeyman_platform::host::clock::or_pending;

use super::{
    CancelCause, CancelCommand, Context, EndedWork, ExecuteError, ExecuteFailure, HandlerFuture, PayloadHandler,
    PrepareError,
};

pub use journeyman_domain::staged::{
    FailureClass, PhaseLimit, Progress, StagedAnswer, StagedEnd, StagedPolicy, StagedRecord, Stamp,
};

/// A piece of work as its handler sees it.
#[derive(Debug)]
pub struct Work<'a, P> {
    /// What the task asks for.
    pub payload: &'a P,
    /// Which launch it is, and how it is found.
    pub record: &'a StagedRecord,
    /// The task, with its log.
    pub context: &'a Context,
}

impl<P> Work<'_, P> {
    /// A text without spaces and slashes to name launches by: the same at each delivery of one request, and for one run of a task.
    pub fn key(&self) -> String {
        let of_request = self.context.results().and_then(Results::work_key);
        let Run { task, run } = &self.context.task().run;
        of_request.unwrap_or_else(|| format!("{task}.{run}"))
    }
}

/// A kind of work that is launched elsewhere.
///
/// Each method answers with what the external system says. [`StagedAnswer::Unknown`] is no verdict: the method is called again.
/// A call that takes longer than [`STAGED_CALL_TIMEOUT`] is dropped and counts as unknown.
pub trait StagedHandler: Send + Sync + 'static {
    /// The same as [`PayloadHandler::Payload`].
    type Payload: DeserializeOwned + Send + Sync + 'static;

    /// The same as [`PayloadHandler::describe`].
    fn describe(&self) -> String {
        std::any::type_name::<Self>().to_owned()
    }

    /// The same as [`PayloadHandler::payload_schema`].
    fn payload_schema(&self) -> serde_json::Value {
        true.into()
    }

    /// How long phases may last, and how often the work is launched again.
    fn policy(&self, payload: &Self::Payload) -> StagedPolicy;

    /// Checks what the payload declares before anything is launched.
    ///
    /// # Errors
    ///
    /// The same as [`PayloadHandler::prepare`].
    fn prepare(
        &self,
        payload: &Self::Payload,
        context: &Context,
    ) -> impl Future<Output = Result<(), PrepareError>> + Send {
        _ = (payload, context);
        ready(Ok(()))
    }

    /// Looks for work of this task that was started before, by a worker that is gone or by a call whose answer was lost. Removes
    /// that of an earlier launch, and answers [`StagedAnswer::Unknown`] until it is gone.
    fn adopt(&self, work: Work<'_, Self::Payload>) -> impl Future<Output = StagedAnswer> + Send;

    /// Launches the work. Called again after an answer that was lost, so the name of the work must be the same each time.
    fn start(&self, work: Work<'_, Self::Payload>) -> impl Future<Output = StagedAnswer> + Send;

    /// Looks at work that has started.
    fn verify(&self, work: Work<'_, Self::Payload>) -> impl Future<Output = StagedAnswer> + Send;

    /// Ends the work, if it runs, and removes it. Also called once it has ended, unless there is a [`discard`](Self::discard), or the
    /// source schedules messages: one that comes twice has to find how it ended, or it would launch the work again. A sweep has to
    /// remove it later.
    fn cancel(&self, work: Work<'_, Self::Payload>) -> impl Future<Output = StagedAnswer> + Send;

    /// Whether [`adopt`](Self::adopt) of another worker finds the work of an earlier attempt and goes on with it. A worker that stops
    /// leaves it then, also when it drains, and ends it otherwise.
    fn is_handed_over(&self, payload: &Self::Payload) -> bool {
        _ = payload;
        false
    }

    /// The same as [`PayloadHandler::discard`].
    fn discard<'a>(&'a self, work: &'a EndedWork) -> Option<HandlerFuture<'a, Result<(), String>>> {
        _ = work;
        None
    }

    /// Resolves when something about the work may have changed. A hint: the work is looked at without it too.
    ///
    /// # Cancel safety
    ///
    /// Dropped and called anew for each wait; a change in between must resolve the next call.
    fn wakeup(&self, work: Work<'_, Self::Payload>) -> impl Future<Output = ()> + Send {
        _ = work;
        pending()
    }
}

/// Runs a [`StagedHandler`] for any source: `erase(Staged(handler))`.
#[derive(Debug, Clone)]
pub struct Staged<H>(pub H);

impl<H: StagedHandler> PayloadHandler for Staged<H> {
    type Payload = H::Payload;
    type Prepared = H::Payload;

    fn describe(&self) -> String {
        self.0.describe()
    }

    fn payload_schema(&self) -> serde_json::Value {
        self.0.payload_schema()
    }

    async fn prepare(&self, payload: H::Payload, context: &Context) -> Result<H::Payload, PrepareError> {
        self.0.prepare(&payload, context).await?;
        Ok(payload)
    }

    async fn execute(&self, payload: H::Payload, context: &Context) -> Result<(), ExecuteError> {
        drive(&self.0, &payload, context).await
    }

    fn discard<'a>(&'a self, work: &'a EndedWork) -> Option<HandlerFuture<'a, Result<(), String>>> {
        self.0.discard(work)
    }
}

/// Launches the work and looks at it until it has ended.
pub(super) async fn drive<H: StagedHandler>(
    handler: &H,
    payload: &H::Payload,
    context: &Context,
) -> Result<(), ExecuteError> {
    end_of(drive_to_end(handler, payload, context).await?, context)
}

/// Drives as `drive` does; an error is a deferral.
pub async fn drive_to_end<H: StagedHandler>(
    handler: &H,
    payload: &H::Payload,
    context: &Context,
) -> Result<StagedEnd, ExecuteError> {
    let mut actions = Vec::new();
    let jitter = Jitter::seeded(uuid::Uuid::new_v4().as_u64_pair().0);
    let deferral = context.results().and_then(Results::deferral);
    let record = deferral.and_then(Deferral::record).cloned().unwrap_or_default();
    let policy = handler.policy(payload);
    let check_interval = policy.check_interval;
    let mut state = StagedState::new(policy, record, jitter, &mut actions);
    let (clock, mut is_cancel_told, mut is_launch_told) = (context.clock(), false, false);
    let (mut shown_phase, mut is_unknown) = ("".into(), false);
    let is_handed_over = handler.is_handed_over(payload);
    let is_discarded_later = deferral.is_none() && handler.discard(&context.work_name()).is_some();
    if is_discarded_later {
        context.mark_leaves_work();
    }
    if is_handed_over {
        context.mark_handed_over();
    }
    loop {
        let work = Work { payload, record: state.record(), context };
        let event = match actions.pop() {
            Some(StagedAction::Adopt) => answer(handler.adopt(work)).await,
            Some(StagedAction::Start) => answer(handler.start(work)).await,
            Some(StagedAction::Verify) => answer(handler.verify(work)).await,
            Some(StagedAction::Cancel) => answer(handler.cancel(work)).await,
            Some(StagedAction::Rest(wait)) => {
                show(&state.record().phase, &mut shown_phase, context);
                let is_worth_it = state.record().handle.is_some() || wait >= STAGED_DEFER_WAIT_MIN;
                if let Some(deferral) = deferral.filter(|_| is_worth_it && context.cancellation().is_none()) {
                    // The next message does not know how often there was no answer.
                    let wait = if is_unknown { wait.max(check_interval) } else { wait };
                    deferral.defer(state.record().clone(), wait);
                    return Err(deferred());
                }
                if !is_launch_told && state.record().handle.is_some() {
                    is_launch_told = true;
                    context.launched().await;
                }
                continue;
            }
            Some(StagedAction::End(end)) => {
                match end {
                    StagedEnd::Superseded if deferral.is_some() => return Err(deferred()),
                    // It has ended by itself. A check that comes twice would launch again what is gone.
                    StagedEnd::Done | StagedEnd::Failed { class: FailureClass::Task, .. }
                        if deferral.is_some() && work.record.announced.is_none() => {}
                    StagedEnd::Done | StagedEnd::Failed { .. } if is_discarded_later => {}
                    StagedEnd::Done | StagedEnd::Failed { .. } => clean_up(handler, work).await,
                    // It is gone, or another worker's.
                    StagedEnd::Canceled | StagedEnd::Superseded => {}
                }
                return Ok(end);
            }
            None => tokio::select! {
                // It is told below.
                _ = context.canceled(), if !is_cancel_told => StagedEvent::Due,
                () = handler.wakeup(work) => StagedEvent::WokenUp,
                () = or_pending(state.next_deadline().map(|at| clock.sleep_until(at))) => StagedEvent::Due,
            },
        };
        is_unknown = event == StagedEvent::Answered(StagedAnswer::Unknown);
        let canceled = context.cancellation().map(|cancellation| cancellation.cause);
        let is_left = match canceled {
            // The work is still wanted, and the next worker goes on with it.
            Some(CancelCause::Shutdown | CancelCause::Command(CancelCommand::Release)) => {
                deferral.is_some() || is_handed_over
            }
            Some(CancelCause::ClaimLost(_)) => deferral.is_some(),
            Some(CancelCause::Command(CancelCommand::Cancel)) | None => false,
        };
        if is_left {
            state.handle(event, clock.now(), &mut actions);
            if matches!(actions.last(), Some(StagedAction::End(_))) {
                continue;
            }
            let Some(deferral) = deferral else { return Ok(StagedEnd::Superseded) };
            deferral.defer(state.record().clone(), Duration::ZERO);
            return Err(deferred());
        }
        // What was launched meanwhile is canceled, and not looked at again first.
        if canceled.is_some() && !is_cancel_told {
            is_cancel_told = true;
            state.handle(StagedEvent::CancelRequested, clock.now(), &mut actions);
        }
        state.handle(event, clock.now(), &mut actions);
    }
}

fn deferred() -> ExecuteError {
    ExecuteError::new(ExecuteFailure::Deferred, "it runs elsewhere, and a message is scheduled to look at it")
}

/// Boxed, so that work that is held costs no memory for its calls.
fn answer<'a>(call: impl Future<Output = StagedAnswer> + Send + 'a) -> HandlerFuture<'a, StagedEvent> {
    Box::pin(
        async move { StagedEvent::Answered(timeout(STAGED_CALL_TIMEOUT, call).await.unwrap_or(StagedAnswer::Unknown)) },
    )
}

/// Tells the log and the status of each new phase.
fn show(phase: &str, shown: &mut Box<str>, context: &Context) {
    if !phase.is_empty() && phase != &**shown {
        context.log().write_note(&format!("it is {phase}"));
        context.set_progress(phase);
        *shown = phase.into();
    }
}

async fn clean_up<H: StagedHandler>(handler: &H, work: Work<'_, H::Payload>) {
    let log = work.context.log().clone();
    let gone = StagedEvent::Answered(StagedAnswer::Canceled);
    if (work.record.handle.is_some() || work.record.announced.is_some()) && answer(handler.cancel(work)).await != gone {
        log.write_note("the work was not removed");
    }
}

/// A payload that was started is not malformed (I21).
fn end_of(end: StagedEnd, context: &Context) -> Result<(), ExecuteError> {
    match end {
        StagedEnd::Done => Ok(()),
        StagedEnd::Failed { class, reason } => {
            let failure = match class {
                FailureClass::Task | FailureClass::Config => ExecuteFailure::Failed,
                FailureClass::Capacity | FailureClass::Infrastructure => ExecuteFailure::Unavailable,
                FailureClass::Access => ExecuteFailure::AccessDenied,
            };
            Err(ExecuteError::new(failure, reason))
        }
        StagedEnd::Canceled => Err(ExecuteError::failed(match context.cancellation() {
            Some(cancellation) => cancellation.cause.message(),
            None => "the work was ended elsewhere",
        })),
        StagedEnd::Superseded => Err(ExecuteError::internal("another worker goes on with the work")),
    }
}
