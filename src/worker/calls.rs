//! One function for each effect that takes time. Each one always comes back with exactly one [`Back`].

use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{Semaphore, mpsc, watch};

use crate::domain::claim::Settled;
use crate::domain::fitness::Condition;
use crate::domain::id::{Lane, Run, SourceId, Token};
use crate::domain::outcome::{Emptiness, Outcome, Unprepared, Verdict};
use crate::domain::refusal::Refusal;
use crate::domain::time::Instant;
use crate::domain::unread::Window;
use crate::domain::worker::Room;
use crate::handler::beside::Word;
use crate::handler::{Context, Handler, NotCompleted, NotPrepared, Prepared};
use crate::host::room;
use crate::limits::{KILL_SLACK, PROCESS_KILLED_WAIT, ROOM_EVERY};
use crate::source::{Answer, Batch, Claim, Grant, News, Opened, Recovered, Refused, Source};

use super::examine::Examination;
use super::guard::{Panicked, guarded};
use super::live::{Entry, Job};
use super::prompt::{Begun, Prompt};
use super::settle::Store;
use super::timeline::Phase;
use crate::host::clock::Clock;
use crate::host::containment::Enclosure;
use crate::host::crash::crash_point;
use crate::host::folder::Hold;
use crate::host::journal::{Noted, Recorded};

/// What a call brings back.
pub(super) enum Back {
    Measured {
        room: Room,
        /// Whether the work folder is still this worker's; why not.
        held: io::Result<()>,
    },
    Opened {
        source: SourceId,
        sent_at: Instant,
        answer: Result<Opened, Refused>,
    },
    Polled {
        source: SourceId,
        lane: Lane,
        sent_at: Instant,
        answer: Result<Batch, Refused>,
    },
    Recovered {
        source: SourceId,
        sent_at: Instant,
        answer: Result<Recovered, Refused>,
    },
    Claimed {
        claim: Token,
        sent_at: Instant,
        answer: Result<Grant, Refused>,
    },
    TakenOver {
        claim: Token,
        sent_at: Instant,
        answer: Result<Grant, Refused>,
    },
    Deleted {
        message: Token,
        answer: Result<(), Refused>,
    },
    Prepared {
        claim: Token,
        answer: Result<Box<dyn Prepared>, Unprepared>,
    },
    /// It was started then, if it was started by what prepared it.
    Ended {
        claim: Token,
        verdict: Verdict,
        emptiness: Emptiness,
        started: Option<Instant>,
        /// Its report, where that was begun.
        report: Option<Begun>,
    },
    Vacated {
        claim: Token,
    },
    Settled {
        claim: Token,
        settled: Settled,
    },
    Reported {
        claim: Token,
        answer: Result<(), Refused>,
    },
    Reclaimed {
        claim: Token,
        sent_at: Instant,
        answer: Result<Duration, Refused>,
    },
    Checked {
        claim: Token,
        answer: Result<bool, Refused>,
    },
    Looked(Condition),
    Told {
        source: SourceId,
        news: News,
    },
    /// What is said of what a handler keeps there; `None` where nothing is said any more.
    Heard {
        beside: usize,
        word: Option<watch::Receiver<Word>>,
    },
}

impl Back {
    /// The parts of a claim's life that are over with it.
    pub(super) const fn ends(&self) -> &'static [Phase] {
        match self {
            Self::Claimed { .. } | Self::TakenOver { .. } => &[Phase::Claim],
            Self::Prepared { .. } => &[Phase::Prepare],
            Self::Ended { .. } => &[Phase::Prepare, Phase::Run, Phase::End],
            Self::Settled { .. } => &[Phase::Upload],
            Self::Reported { .. } => &[Phase::Report],
            Self::Measured { .. }
            | Self::Opened { .. }
            | Self::Polled { .. }
            | Self::Recovered { .. }
            | Self::Deleted { .. }
            | Self::Vacated { .. }
            | Self::Reclaimed { .. }
            | Self::Checked { .. }
            | Self::Looked(_)
            | Self::Told { .. }
            | Self::Heard { .. } => &[],
        }
    }

    /// The claim that the call was about.
    pub(super) const fn claim(&self) -> Option<Token> {
        match self {
            Self::Claimed { claim, .. }
            | Self::TakenOver { claim, .. }
            | Self::Prepared { claim, .. }
            | Self::Ended { claim, .. }
            | Self::Vacated { claim }
            | Self::Settled { claim, .. }
            | Self::Reported { claim, .. }
            | Self::Reclaimed { claim, .. }
            | Self::Checked { claim, .. } => Some(*claim),
            Self::Measured { .. }
            | Self::Opened { .. }
            | Self::Polled { .. }
            | Self::Recovered { .. }
            | Self::Deleted { .. }
            | Self::Looked(_)
            | Self::Told { .. }
            | Self::Heard { .. } => None,
        }
    }
}

/// Looks after a while what the host has left. A disk that does not answer is one that cannot be told, and is not asked
/// again before it does: each question keeps a thread.
pub(super) async fn measure(tasks: PathBuf, hold: Hold, one: Arc<Semaphore>) -> Back {
    tokio::time::sleep(ROOM_EVERY).await;
    let unknown = Back::Measured { room: Room { disk: None, memory: None }, held: Ok(()) };
    let Ok(permit) = Arc::clone(&one).try_acquire_owned() else { return unknown };
    // A host that has no thread left for it is measured at the next look.
    let measured = guarded(async move {
        let measuring = tokio::task::spawn_blocking(move || {
            let _permit = permit;
            (room::measure(&tasks), hold.check())
        });
        measuring.await
    });
    match tokio::time::timeout(ROOM_EVERY, measured).await {
        Ok(Ok(Ok((room, held)))) => Back::Measured { room, held },
        Ok(Ok(Err(_)) | Err(_)) | Err(_) => unknown,
    }
}

/// Waits for what a source has to tell. One that panics tells nothing more.
pub(super) async fn news(source: Arc<dyn Source>, id: SourceId) -> Back {
    match guarded(source.news()).await {
        Ok(news) => Back::Told { source: id, news },
        Err(Panicked(text)) => {
            tracing::error!(panic = text, "a source panicked; it will have no more news");
            std::future::pending().await
        }
    }
}

/// Waits for what is said of what a handler keeps there.
pub(super) async fn word(beside: usize, mut word: watch::Receiver<Word>) -> Back {
    match word.changed().await {
        Ok(()) => Back::Heard { beside, word: Some(word) },
        Err(_) => Back::Heard { beside, word: None },
    }
}

pub(super) async fn open(source: Arc<dyn Source>, id: SourceId, clock: Clock) -> Back {
    let sent_at = clock.now();
    Back::Opened { source: id, sent_at, answer: call("open", source.open()).await }
}

/// A poll that claims is on record before it is sent, where that can be had.
pub(super) async fn poll(
    source: Arc<dyn Source>,
    id: SourceId,
    lane: Lane,
    max: u8,
    noted: Option<Noted>,
    clock: Clock,
) -> Back {
    if let Some(noted) = noted {
        noted.outlives().await;
    }
    let sent_at = clock.now();
    Back::Polled { source: id, lane, sent_at, answer: call("poll", source.poll(lane, max)).await }
}

pub(super) async fn recover(
    source: Arc<dyn Source>,
    id: SourceId,
    held: Vec<Run>,
    asked: Vec<Window>,
    clock: Clock,
) -> Back {
    let sent_at = clock.now();
    Back::Recovered { source: id, sent_at, answer: call("recover", source.recover(&held, &asked)).await }
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

pub(super) async fn take_over(source: Arc<dyn Source>, claim: Token, run: Run, clock: Clock) -> Back {
    let sent_at = clock.now();
    Back::TakenOver { claim, sent_at, answer: call("take over", source.take_over(&run)).await }
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
    begun: Option<Begun>,
    timeout: Duration,
) -> Back {
    let reporting = async {
        if let Some(begun) = begun {
            let answer = begun.answer().await;
            if outcome == Begun::OUTCOME {
                return answer;
            }
        }
        source.report(&claim, outcome).await
    };
    let answer = within(timeout, "report", Box::pin(reporting)).await;
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

pub(super) async fn look(host: Examination) -> Back {
    Back::Looked(host.look().await)
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

/// A payload that was started as soon as it was prepared.
#[derive(Debug, Clone, Copy)]
pub(super) struct Started {
    pub(super) claim: Token,
    pub(super) at: Instant,
}

/// Prepares, and starts at once where the claim is ours long enough (I3): asking first would take a word to another thread and
/// back. What has not ended when it is first looked at is told by `starts`.
pub(super) async fn run(
    handler: Arc<dyn Handler>,
    recorded: Option<Recorded>,
    claim: Token,
    context: Context,
    prompt: Option<Prompt>,
    starts: mpsc::Sender<Started>,
) -> Back {
    let back = prepare(handler, recorded, claim, context.clone()).await;
    let Back::Prepared { answer: Ok(prepared), .. } = back else { return back };
    crash_point("prepared");
    let at = context.now();
    if context.cancel().is_some() || at >= context.lease_ends() {
        return Back::Prepared { claim, answer: Ok(prepared) };
    }
    let mut executing = Box::pin(execute(prepared, claim, context.clone()));
    let mut back = tokio::select! {
        biased;
        back = &mut executing => back,
        () = std::future::ready(()) => {
            // Nobody listens where the worker exits, which ends this as well.
            starts.send(Started { claim, at }).await.ok();
            executing.await
        }
    };
    if let Back::Ended { started, .. } = &mut back {
        *started = Some(at);
    }
    if let Some(prompt) = prompt {
        prompt.begin(&mut back, &context);
    }
    back
}

/// Prepares once the claim is on record, where that is waited for, unless it is told to end first: then what was being prepared
/// is dropped.
async fn prepare(handler: Arc<dyn Handler>, recorded: Option<Recorded>, claim: Token, context: Context) -> Back {
    let payload = context.task().definition.get("payload").unwrap_or(&serde_json::Value::Null);
    let prepared = async {
        if let Some(recorded) = recorded
            && let Err(why) = recorded.safe().await
        {
            return Ok(Err(NotPrepared::Host(why.to_string())));
        }
        if let Some(why) = context.why_unreadable() {
            return Ok(Err(NotPrepared::Malformed(vec![format!("payload: it is JSON that cannot be read: {why}")])));
        }
        guarded(handler.prepare(payload, &context)).await
    };
    let answer = tokio::select! {
        biased;
        _ = context.canceled() => None,
        answer = prepared => Some(answer),
    };
    // I26: what it has started is gone before anything else of the claim is done; what it has prepared may be a process.
    let emptiness = match answer {
        Some(Ok(Ok(_))) => Emptiness::Proven,
        Some(_) | None => context.enclosure().clear().await,
    };
    let Some(answer) = answer.filter(|_| emptiness == Emptiness::Proven) else {
        return Back::Ended { claim, verdict: Verdict::Internal, emptiness, started: None, report: None };
    };
    let note = |text: &str| tell(&context, text);
    if folder_missing(&context) {
        return Back::Prepared { claim, answer: Err(Unprepared::Host) };
    }
    let answer = match answer {
        Ok(Ok(prepared)) => Ok(prepared),
        Ok(Err(NotPrepared::Malformed(sentences))) => {
            context.log().note("the payload is malformed; no task code was run:");
            sentences.iter().for_each(|sentence| context.log().note(&format!("  {sentence}")));
            explain(&context, &format!("the payload is malformed: {}", sentences.join("; ")));
            Err(Unprepared::Malformed)
        }
        Ok(Err(NotPrepared::Unavailable(sentence))) => {
            note(&format!("not started, for want of something the payload declares: {sentence}"));
            Err(Unprepared::Unavailable)
        }
        Ok(Err(NotPrepared::Internal(sentence))) => {
            note(&format!("not started, the worker is at fault: {sentence}"));
            Err(Unprepared::Internal)
        }
        Ok(Err(NotPrepared::Host(sentence))) => {
            tracing::error!(claim.run = %context.task().run, "the host is at fault: {sentence}");
            note(&format!("not started and handed back, this host is at fault: {sentence}"));
            Err(Unprepared::Host)
        }
        Ok(Err(NotPrepared::Away(sentence))) => {
            tracing::warn!(claim.run = %context.task().run, "handed back: {sentence}");
            note(&format!("not started and handed back: {sentence}"));
            leave_untouched(&context);
            Err(Unprepared::Away)
        }
        Err(Panicked(text)) => {
            tracing::error!(claim.run = %context.task().run, panic = text, "the handler panicked while it prepared");
            note("not started: the handler panicked while it prepared; the worker's log says more");
            Err(Unprepared::Internal)
        }
    };
    Back::Prepared { claim, answer }
}

/// Waits until nothing is left of a payload that could not be killed in time.
pub(super) async fn vacate(claim: Token, run: Run, enclosure: Enclosure) -> Back {
    let looked = enclosure.clone();
    // A host that is short of threads, or a process that cannot be looked at, holds up nothing.
    let describing = guarded(async move { tokio::task::spawn_blocking(move || looked.described()).await });
    let saying = async {
        if let Ok(Ok(Ok(left))) = tokio::time::timeout(PROCESS_KILLED_WAIT, describing).await {
            tracing::warn!(claim.run = %run, group = ?enclosure.name().cgroup, "processes that are left: {left}");
        }
    };
    tokio::join!(enclosure.vacated(), saying);
    Back::Vacated { claim }
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
    // I26: also of a handler that was dropped, or that did not wait for what it started.
    let emptiness = context.enclosure().clear().await;
    Back::Ended { claim, verdict: verdict(ended, &context), emptiness, started: None, report: None }
}

async fn overdue(context: &Context) {
    context.kill_due().await;
    tokio::time::sleep(KILL_SLACK).await;
}

/// Whether the handler asked for a folder that could not be made: then nothing it says is about the task.
fn folder_missing(context: &Context) -> bool {
    let Some(Err(error)) = context.folder_made() else { return false };
    let run = &context.task().run;
    tracing::error!(claim.run = %run, %error, "the task's folder cannot be made; check `work_dir`, its disk and its owner");
    true
}

fn verdict(ended: Result<Result<(), NotCompleted>, Panicked>, context: &Context) -> Verdict {
    let note = |text: &str| tell(context, text);
    if folder_missing(context) {
        return Verdict::Host;
    }
    match ended {
        Ok(Ok(())) => Verdict::Completed,
        Ok(Err(NotCompleted::Failed(sentence))) => {
            // What was told to end has not failed for that.
            let how = if context.cancel().is_some() { "not completed" } else { "failed" };
            note(&format!("{how}: {sentence}"));
            Verdict::Failed
        }
        Ok(Err(NotCompleted::Intermittent(sentence))) => {
            note(&format!("failed, and asks to be run again: {sentence}"));
            Verdict::Intermittent
        }
        Ok(Err(NotCompleted::Unavailable(sentence))) => {
            note(&format!("not completed, for want of something: {sentence}"));
            Verdict::Unavailable
        }
        Ok(Err(NotCompleted::Internal(sentence))) => {
            note(&format!("not completed, the worker is at fault: {sentence}"));
            Verdict::Internal
        }
        Ok(Err(NotCompleted::Host(sentence))) => {
            tracing::error!(claim.run = %context.task().run, "the host is at fault: {sentence}");
            note(&format!("not completed and handed back, this host is at fault: {sentence}"));
            Verdict::Host
        }
        Ok(Err(NotCompleted::Away(sentence))) => {
            tracing::warn!(claim.run = %context.task().run, "handed back: {sentence}");
            note(&format!("handed back: {sentence}"));
            leave_untouched(context);
            Verdict::Away
        }
        Err(Panicked(text)) => {
            tracing::error!(claim.run = %context.task().run, panic = text, "the handler panicked");
            note("the handler panicked; the worker's log says more");
            Verdict::Internal
        }
    }
}

/// Says in the task's log, and to whoever waits for an answer, how it went.
fn tell(context: &Context, text: &str) {
    context.log().note(text);
    explain(context, text);
}

/// Nothing of it has run: where tries are counted, this is none.
fn leave_untouched(context: &Context) {
    if let Some(replies) = context.replies() {
        replies.leave_untouched();
    }
}

fn explain(context: &Context, text: &str) {
    if let Some(replies) = context.replies() {
        replies.explain(text);
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

pub(super) async fn call<T>(operation: &str, answer: Answer<'_, T>) -> Result<T, Refused> {
    guarded(answer).await.unwrap_or_else(|Panicked(text)| {
        tracing::error!(operation, panic = text, "a source panicked");
        let what = format!("{operation}: the source panicked");
        Err(Refused { refusal: Refusal::Retry { after: None }, what })
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::domain::id::TaskId;
    use crate::handler::artifact::Artifacts;
    use crate::handler::log::{LogLimits, TaskLog};
    use crate::handler::{PayloadHandler, Task, erase};
    use std::path::Path;
    use tokio::sync::watch;

    /// Says that all is well, and uses its folder or not.
    struct Content {
        uses: Uses,
    }

    #[derive(PartialEq)]
    enum Uses {
        InPrepare,
        InExecute,
        Never,
    }

    impl PayloadHandler for Content {
        type Payload = serde_json::Value;
        type Prepared = ();

        async fn prepare(&self, _: serde_json::Value, context: &Context) -> Result<(), NotPrepared> {
            if self.uses == Uses::InPrepare {
                assert!(context.workdir().is_absolute());
            }
            Ok(())
        }

        async fn execute(&self, (): (), context: &Context) -> Result<(), NotCompleted> {
            if self.uses == Uses::InExecute {
                assert!(context.workdir().is_absolute());
            }
            Ok(())
        }
    }

    fn context(workdir: &Path) -> Context {
        held_until(workdir, Instant::ORIGIN)
    }

    fn held_until(workdir: &Path, lease_ends: Instant) -> Context {
        let run = Run { task: TaskId::parse("fN1SbArXTPSVFNUvaOlinQ").unwrap(), run: 0 };
        let task = Task { run, source: "s".into(), definition: serde_json::Value::Null, env: Default::default() };
        let log = TaskLog::new(workdir.with_extension("log"), LogLimits::default());
        let (cancel, lease_ends) = (watch::channel(None).1, watch::channel(lease_ends).1);
        Context::new(task, workdir.to_owned(), log, Artifacts::new(), cancel, lease_ends, Clock::boot())
    }

    async fn prepared(uses: Uses, context: &Context) -> Result<Box<dyn Prepared>, Unprepared> {
        let handler = erase(Content { uses });
        let back = prepare(handler, Some(Recorded::already()), Token(1), context.clone()).await;
        let Back::Prepared { answer, .. } = back else { panic!("it answers whether it is prepared") };
        answer
    }

    async fn ended(uses: Uses, context: &Context) -> Verdict {
        let Ok(prepared) = prepared(uses, context).await else { panic!("it is prepared") };
        let back = execute(prepared, Token(1), context.clone()).await;
        let Back::Ended { verdict, .. } = back else { panic!("it answers how it ended") };
        verdict
    }

    #[tokio::test]
    async fn a_task_whose_folder_cannot_be_made_is_the_hosts_fault() {
        let base = tempfile::tempdir().unwrap();
        let blocked = base.path().join("a file");
        std::fs::write(&blocked, "").unwrap();
        let workdir = blocked.join("work");
        assert_eq!(prepared(Uses::InPrepare, &context(&workdir)).await.err(), Some(Unprepared::Host));
        assert_eq!(ended(Uses::InExecute, &context(&workdir)).await, Verdict::Host);
        assert_eq!(ended(Uses::Never, &context(&workdir)).await, Verdict::Completed);
    }

    #[tokio::test]
    async fn i03_a_payload_is_started_as_soon_as_it_is_prepared_while_its_claim_is_ours_and_not_after() {
        let base = tempfile::tempdir().unwrap();
        let ran = async |lease_ends| {
            let context = held_until(base.path(), lease_ends);
            let handler = erase(Content { uses: Uses::Never });
            run(handler, None, Token(1), context, None, mpsc::channel(1).0).await
        };
        let now = Clock::boot().now();
        let back = ran(now.plus(Duration::from_secs(3600))).await;
        assert!(matches!(back, Back::Ended { verdict: Verdict::Completed, started: Some(_), .. }));
        let back = ran(now).await;
        assert!(matches!(back, Back::Prepared { answer: Ok(_), .. }));
    }

    #[tokio::test]
    async fn a_folder_is_made_when_it_is_asked_for_and_not_before() {
        let base = tempfile::tempdir().unwrap();
        let workdir = base.path().join("task").join("work");
        assert_eq!(ended(Uses::Never, &context(&workdir)).await, Verdict::Completed);
        assert!(!base.path().join("task").exists());
        assert_eq!(ended(Uses::InExecute, &context(&workdir)).await, Verdict::Completed);
        assert!(workdir.is_dir());
    }
}
