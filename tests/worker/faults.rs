//! A worker whose queue misbehaves for minutes, in virtual time.

use std::os::unix::fs::FileExt as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::memory_queue::{Config, MemoryQueue, MemorySource, PollStyle, RunEnd, RunState};
use crate::worker::scripted::{
    COMPLETED, STYLES, Told, binding, create, drained, memory_queue, queue_with, runs, settings,
};
use journeyman::source::{
    Artifact, ArtifactBody, CallError, Capabilities, Claim, Grant, LossReason, Message, MessageQueue, OpenResult,
    PollBatch, Recovery, RecoveryBatch, Source, SourceFuture,
};
use journeyman::worker::trace_recorder::{FinishedClaim, SpanCounts, TraceRecorder};
use journeyman::worker::{ExitReason, Worker, WorkerConfig};
use journeyman_domain::id::{PriorityQueue, Run, TaskId};
use journeyman_domain::lease::Granted;
use journeyman_domain::outcome::{ExceptionReason, Outcome};
use journeyman_domain::refusal::Refusal;
use journeyman_platform::host::clock::Clock;
use parking_lot::Mutex;
use serde_json::{Value, json};
use tokio::sync::{mpsc, watch};

/// How a queue misbehaves at present.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mood {
    Well,
    /// Every call gets this.
    Refuses(Refusal),
    /// Every call panics.
    Breaks,
    /// Polls fail, and to look for lost claims is not allowed.
    FailsAndForbids,
    /// No artifact and no log is taken; everything else is well.
    StoresNothing,
    /// It stores nothing, because the disk is full.
    Full,
    /// It stores nothing, and no lease is extended.
    OnlyReports,
    /// No artifact and no log is taken, and that is definite.
    RefusesFiles,
    /// No message can be deleted.
    DeletesNothing,
    /// What a poll has claimed never arrives.
    LosesReplies,
}

pub struct Moody {
    pub inner: MemorySource,
    pub mood: watch::Receiver<Mood>,
    pub polls: Arc<AtomicU64>,
    /// Tells hosts apart, which know nothing of each other's workers.
    pub elsewhere: &'static str,
}

impl Moody {
    fn moody_grant(&self, grant: Grant) -> Grant {
        Grant { claim: Arc::new(MoodyClaim { inner: grant.claim, mood: self.mood.clone() }), ..grant }
    }
}

fn unless_moody<'a, T: Send + 'a>(mood: &watch::Receiver<Mood>, answer: SourceFuture<'a, T>) -> SourceFuture<'a, T> {
    let mood = *mood.borrow();
    Box::pin(async move {
        match mood {
            Mood::Refuses(refusal) => Err(CallError { refusal, message: "out of sorts".into() }),
            Mood::Breaks => panic!("out of its mind"),
            Mood::FailsAndForbids => Err(CallError {
                refusal: Refusal::Retry { retry_after: None },
                message: "a portal wants a login".into(),
            }),
            Mood::Well
            | Mood::StoresNothing
            | Mood::Full
            | Mood::RefusesFiles
            | Mood::DeletesNothing
            | Mood::OnlyReports
            | Mood::LosesReplies => answer.await,
        }
    })
}

impl Source for Moody {
    fn describe(&self) -> String {
        "moody".into()
    }
    fn service_id(&self) -> String {
        self.inner.service_id()
    }
    fn claimant(&self) -> String {
        format!("{}{}", self.inner.claimant(), self.elsewhere)
    }
    fn capabilities(&self) -> Capabilities {
        self.inner.capabilities()
    }
    fn open(&self) -> SourceFuture<'_, OpenResult> {
        if *self.mood.borrow() == Mood::FailsAndForbids {
            return self.inner.open();
        }
        unless_moody(&self.mood, self.inner.open())
    }
    fn poll(&self, lane: PriorityQueue, max: u8) -> SourceFuture<'_, PollBatch> {
        self.polls.fetch_add(1, Ordering::Relaxed);
        if *self.mood.borrow() == Mood::LosesReplies {
            return Box::pin(async move {
                drop(self.inner.poll(lane, max).await);
                // The connection breaks at last.
                drop(self.mood.clone().wait_for(|mood| *mood != Mood::LosesReplies).await);
                Err(CallError { refusal: Refusal::Retry { retry_after: None }, message: "cut off".into() })
            });
        }
        let polled = async move {
            let mut batch = self.inner.poll(lane, max).await?;
            if *self.mood.borrow() == Mood::LosesReplies {
                return Err(CallError { refusal: Refusal::Retry { retry_after: None }, message: "cut off".into() });
            }
            batch.grants = batch.grants.into_iter().map(|grant| self.moody_grant(grant)).collect();
            Ok(batch)
        };
        unless_moody(&self.mood, Box::pin(polled))
    }
    fn message_queue(&self) -> Option<&dyn MessageQueue> {
        self.inner.message_queue().is_some().then_some(self)
    }
    fn recovery(&self) -> Option<&dyn Recovery> {
        Some(self)
    }
}

impl MessageQueue for Moody {
    fn claim<'a>(&'a self, run: &'a Run) -> SourceFuture<'a, Grant> {
        let granted = async { MessageQueue::claim(&self.inner, run).await.map(|grant| self.moody_grant(grant)) };
        unless_moody(&self.mood, Box::pin(granted))
    }
    fn delete<'a>(&'a self, message: &'a Message) -> SourceFuture<'a, ()> {
        if *self.mood.borrow() == Mood::DeletesNothing {
            let refused = CallError { refusal: Refusal::Retry { retry_after: None }, message: "delete: stuck".into() };
            return Box::pin(async { Err(refused) });
        }
        unless_moody(&self.mood, self.inner.delete(message))
    }
}

impl Recovery for Moody {
    fn recover<'a>(&'a self, held: &'a [Run], newer_than: Option<Duration>) -> SourceFuture<'a, RecoveryBatch> {
        if *self.mood.borrow() == Mood::FailsAndForbids {
            return Box::pin(async {
                Err(CallError { refusal: Refusal::Denied, message: "scopes are missing".into() })
            });
        }
        unless_moody(
            &self.mood,
            Box::pin(async move {
                let mut found = self.inner.recover(held, newer_than).await?;
                found.grants = found.grants.into_iter().map(|grant| self.moody_grant(grant)).collect();
                Ok(found)
            }),
        )
    }
    fn take_over<'a>(&'a self, run: &'a Run) -> SourceFuture<'a, Grant> {
        let granted = async { self.inner.take_over(run).await.map(|grant| self.moody_grant(grant)) };
        unless_moody(&self.mood, Box::pin(granted))
    }
}

fn no_room() -> CallError {
    CallError { refusal: Refusal::Retry { retry_after: None }, message: "500: disk full".into() }
}

/// Its calls fail as those of its source do.
struct MoodyClaim {
    inner: Arc<dyn Claim>,
    mood: watch::Receiver<Mood>,
}

impl Claim for MoodyClaim {
    fn run(&self) -> &Run {
        self.inner.run()
    }
    fn renew(&self) -> SourceFuture<'_, Granted> {
        if *self.mood.borrow() == Mood::OnlyReports {
            return Box::pin(async { Err(no_room()) });
        }
        unless_moody(&self.mood, self.inner.renew())
    }
    fn report(&self, outcome: Outcome) -> SourceFuture<'_, ()> {
        unless_moody(&self.mood, self.inner.report(outcome))
    }
    fn upload<'a>(&'a self, artifact: &'a Artifact) -> SourceFuture<'a, ()> {
        if matches!(*self.mood.borrow(), Mood::StoresNothing | Mood::OnlyReports) {
            return Box::pin(async { Err(no_room()) });
        }
        if *self.mood.borrow() == Mood::Full {
            return Box::pin(async { Err(CallError { refusal: Refusal::Full, message: "507: disk full".into() }) });
        }
        if *self.mood.borrow() == Mood::RefusesFiles {
            return Box::pin(async { Err(CallError { refusal: Refusal::Rejected, message: "too late".into() }) });
        }
        unless_moody(&self.mood, self.inner.upload(artifact))
    }
    fn lost_reason(&self) -> SourceFuture<'_, Option<LossReason>> {
        unless_moody(&self.mood, self.inner.lost_reason())
    }
}

pub struct Scene {
    pub queue: MemoryQueue,
    pub mood: watch::Sender<Mood>,
    pub polls: Arc<AtomicU64>,
    pub told: mpsc::Receiver<Told>,
    pub worker: Worker,
    pub folder: tempfile::TempDir,
}

impl Scene {
    pub fn new(mood: Mood) -> Self {
        Self::with(mood, STYLES[0], 1)
    }

    pub fn with(mood: Mood, style: PollStyle, capacity: u32) -> Self {
        Self::of(memory_queue(style), mood, capacity)
    }

    fn of((queue, clock): (MemoryQueue, Clock), mood: Mood, capacity: u32) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let (mood, moods) = watch::channel(mood);
        let (sender, told) = mpsc::channel(8);
        let polls = Arc::<AtomicU64>::default();
        let source = Moody { inner: queue.source("worker"), mood: moods, polls: Arc::clone(&polls), elsewhere: "" };
        let settings = WorkerConfig { capacity, ..settings(folder.path(), clock) };
        let worker = Worker::new(settings, vec![binding(source, sender)]);
        Self { queue, mood, polls, told, worker, folder }
    }

    fn create(&self, seconds: u64) -> TaskId {
        self.create_that(json!({"do": "sleep", "seconds": seconds}))
    }

    fn create_that(&self, payload: Value) -> TaskId {
        create(&self.queue, "task", payload)
    }
}

async fn trouble_for(mood: Mood, trouble: Duration) {
    let mut scene = Scene::new(Mood::Well);
    let task = scene.create(3600);
    let watch = async {
        assert!(matches!(scene.told.recv().await, Some(Told::Started(_))));
        // Over the first reclaim, at about 13 minutes.
        tokio::time::sleep(Duration::from_secs(12 * 60)).await;
        scene.mood.send_replace(mood);
        tokio::time::sleep(trouble).await;
        scene.mood.send_replace(Mood::Well);
    };
    drained(scene.worker, watch).await;
    assert_eq!(scene.queue.states(&task), [COMPLETED], "{mood:?}");
}

#[tokio::test(start_paused = true)]
async fn a_task_of_ten_hours_keeps_its_claim() {
    for style in STYLES {
        let mut scene = Scene::with(Mood::Well, style, 1);
        let task = scene.create(36_000);
        let control = scene.worker.control();
        let watch = async {
            assert!(matches!(scene.told.recv().await, Some(Told::Started(_))));
        };
        drained(scene.worker, watch).await;
        assert_eq!(scene.queue.states(&task), [COMPLETED], "{style:?}");
        let reclaims = control.counts().sources.reclaims;
        assert!((45..=50).contains(&reclaims), "at two thirds of 20 minutes, up to a twentieth earlier: {reclaims}");
    }
}

#[tokio::test(start_paused = true)]
async fn b1_a_task_claimed_late_in_a_long_poll_runs_where_a_poll_may_outlast_a_claim() {
    let leases = Config { lease: Duration::from_secs(15), ..Config::default() };
    let mut scene = Scene::of(queue_with(leases), Mood::Well, 1);
    let watch = async {
        // The first poll was sent at 0 s and is held for up to 20 s.
        tokio::time::sleep(Duration::from_secs(18)).await;
        let task = create(&scene.queue, "late", json!({"do": "complete"}));
        assert_eq!(scene.told.recv().await, Some(Told::Started("late/0".to_owned())));
        task
    };
    let task = drained(scene.worker, watch).await;
    assert_eq!(scene.queue.states(&task), [COMPLETED], "no run was lost");
}

#[tokio::test(start_paused = true)]
async fn minutes_of_any_trouble_cost_a_running_task_nothing() {
    let trouble = [
        Mood::Refuses(Refusal::Retry { retry_after: None }),
        Mood::Refuses(Refusal::Retry { retry_after: Some(Duration::from_secs(3600)) }),
        Mood::Refuses(Refusal::Throttled { retry_after: None }),
        Mood::Refuses(Refusal::Denied),
        Mood::Refuses(Refusal::Rejected),
        Mood::Breaks,
    ];
    for mood in trouble {
        trouble_for(mood, Duration::from_secs(5 * 60)).await;
    }
}

#[tokio::test(start_paused = true)]
async fn what_a_task_leaves_is_sent_until_it_is_taken_and_only_then_is_the_task_over() {
    let mut scene = Scene::new(Mood::StoresNothing);
    let task = scene.create_that(json!({"do": "leave"}));
    let queue = scene.queue.clone();
    let watch = async {
        assert!(matches!(scene.told.recv().await, Some(Told::Started(_))));
        tokio::time::sleep(Duration::from_secs(4 * 60)).await;
        assert_eq!(queue.states(&task), [RunState::Running]);
        scene.mood.send_replace(Mood::Well);
    };
    drained(scene.worker, watch).await;
    assert_eq!(queue.states(&task), [COMPLETED]);
    let run = Run { task, run: 0 };
    for name in ["public/out.txt", "public/logs/live_backing.log", "public/logs/live.log"] {
        assert!(queue.artifact(&run, name).is_some(), "{name}");
    }
}

/// The files below a folder, by their paths.
fn files_below(folder: &std::path::Path) -> Vec<String> {
    let (mut files, mut folders) = (Vec::new(), vec![folder.to_owned()]);
    while let Some(next) = folders.pop() {
        for entry in std::fs::read_dir(next).into_iter().flatten() {
            let path = entry.expect("an entry").path();
            if path.is_dir() {
                folders.push(path);
            } else {
                files.push(path.strip_prefix(folder).expect("below").display().to_string());
            }
        }
    }
    files.sort();
    files
}

#[tokio::test(start_paused = true)]
async fn a1_only_artifacts_and_the_log_stay_on_disk_while_they_wait_to_be_stored() {
    let mut scene = Scene::new(Mood::StoresNothing);
    let task = scene.create_that(json!({"do": "litter"}));
    let (control, tasks) = (scene.worker.control(), scene.folder.path().join("tasks"));
    let watch = async {
        assert!(matches!(scene.told.recv().await, Some(Told::Started(_))));
        tokio::time::sleep(Duration::from_secs(30)).await;
        let claim = control.status().await.expect("a status").claims.remove(0);
        let folder = tasks.join(format!("{task}_0_2"));
        let left = files_below(&folder);
        scene.mood.send_replace(Mood::Well);
        (left, folder, claim)
    };
    let (left, folder, claim) = drained(scene.worker, watch).await;
    assert_eq!(left, ["kept/file", "kept/folder/a"], "{}", folder.display());
    assert_eq!(claim.progress.as_deref(), Some("not stored yet, retrying: 500: disk full"), "{claim:?}");
    assert_eq!(scene.queue.states(&task), [COMPLETED]);
    let run = Run { task, run: 0 };
    for name in ["public/file", "public/folder/a", "public/logs/live_backing.log"] {
        assert!(scene.queue.artifact(&run, name).is_some(), "{name}");
    }
}

fn stored_text(queue: &MemoryQueue, run: &Run, name: &str) -> String {
    let Some(ArtifactBody::File { file, bytes, .. }) = queue.artifact(run, name) else {
        return String::new();
    };
    let mut content = vec![0; usize::try_from(bytes).expect("it is small")];
    file.read_exact_at(&mut content, 0).expect("it can be read");
    String::from_utf8(content).expect("UTF-8")
}

#[tokio::test(start_paused = true)]
async fn b2_what_a_link_of_an_artifact_leads_to_is_stored_although_it_waits_for_that() {
    let skipped = ["public/logs/live.log", "public/outside"];
    for (declare, outcome, stored, lines) in [
        ("link", Outcome::Completed, "made by the task", [].as_slice()),
        ("folder", Outcome::Completed, "made by the task", &skipped),
        ("linked-folder", Outcome::Completed, "made by the task", &skipped),
        ("outside", Outcome::Failed, "", &["public/deep/link"]),
    ] {
        let mut scene = Scene::new(Mood::StoresNothing);
        let task = scene.create_that(json!({"do": "link", "declare": declare}));
        let watch = async {
            assert!(matches!(scene.told.recv().await, Some(Told::Started(_))));
            tokio::time::sleep(Duration::from_secs(30)).await;
            scene.mood.send_replace(Mood::Well);
        };
        drained(scene.worker, watch).await;
        assert_eq!(scene.queue.states(&task), [RunState::Resolved(RunEnd::Reported(outcome))], "{declare}");
        let run = Run { task, run: 0 };
        assert_eq!(stored_text(&scene.queue, &run, "public/deep/link"), stored, "{declare}");
        assert!(scene.queue.artifact(&run, "public/outside").is_none(), "{declare}");
        let log = stored_text(&scene.queue, &run, "public/logs/live_backing.log");
        let named = log.lines().filter(|line| line.contains("] artifact ")).count();
        assert!(named == lines.len() && lines.iter().all(|name| log.contains(name)), "{declare}: {log}");
    }
}

#[tokio::test(start_paused = true)]
async fn a1_a_full_disk_is_waited_for_a_minute_and_an_outage_for_ten() {
    let unavailable = Outcome::Exception(ExceptionReason::ResourceUnavailable);
    for (mood, what, state, seconds) in [
        (Mood::Full, "say", COMPLETED, 60..120),
        (Mood::Full, "leave", RunState::Resolved(RunEnd::Reported(unavailable)), 60..180),
        (Mood::StoresNothing, "say", COMPLETED, 600..660),
    ] {
        let mut scene = Scene::new(mood);
        let task = scene.create_that(json!({"do": what}));
        let began = tokio::time::Instant::now();
        let watch = async {
            assert!(matches!(scene.told.recv().await, Some(Told::Started(_))));
        };
        drained(scene.worker, watch).await;
        assert_eq!(scene.queue.states(&task), [state], "{mood:?} {what}");
        let took = began.elapsed().as_secs();
        assert!(seconds.contains(&took), "{mood:?} {what}: {took} s");
    }
}

#[tokio::test(start_paused = true)]
async fn a1_the_outcome_is_reported_before_the_lease_ends_although_the_log_cannot_be_stored() {
    let leases = Config { lease: Duration::from_secs(5 * 60), ..Config::default() };
    let mut scene = Scene::of(queue_with(leases), Mood::Well, 1);
    let task = scene.create_that(json!({"do": "say"}));
    scene.mood.send_replace(Mood::OnlyReports);
    let watch = async {
        assert!(matches!(scene.told.recv().await, Some(Told::Started(_))));
    };
    drained(scene.worker, watch).await;
    assert_eq!(scene.queue.states(&task), [COMPLETED]);
}

#[tokio::test(start_paused = true)]
async fn a1_a_storage_that_fails_is_logged_once_a_minute_and_b5_shows_in_the_status() {
    let (lines, _listening) = heard();
    let mut scene = Scene::with(Mood::Well, STYLES[0], 4);
    for name in ["one", "two", "three"] {
        create(&scene.queue, name, json!({"do": "leave"}));
    }
    scene.mood.send_replace(Mood::StoresNothing);
    let control = scene.worker.control();
    let watch = async {
        for _ in 0..3 {
            assert!(matches!(scene.told.recv().await, Some(Told::Started(_))));
        }
        tokio::time::sleep(Duration::from_secs(150)).await;
        let status = control.status().await.expect("a status");
        scene.mood.send_replace(Mood::Well);
        status
    };
    let status = drained(scene.worker, watch).await;
    let hint = status.hints.iter().find(|hint| hint.contains("cannot store artifacts")).expect("a hint");
    assert!(hint.starts_with("memory: ") && hint.contains("500: disk full"), "{hint}");
    assert_eq!(lines.with_both("WARN", "cannot store artifacts"), 3, "at 0 s, 60 s and 120 s");
    assert_eq!(lines.with("artifacts are stored again"), 1);
}

/// Log lines of this thread, for as long as it lives.
#[derive(Clone, Default)]
struct Lines(Arc<Mutex<Vec<u8>>>);

impl std::io::Write for Lines {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().extend(bytes);
        Ok(bytes.len())
    }
    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

impl Lines {
    fn with(&self, text: &str) -> usize {
        self.with_both(text, "")
    }

    fn with_both(&self, text: &str, other: &str) -> usize {
        let bytes = self.0.lock();
        String::from_utf8_lossy(&bytes).lines().filter(|line| line.contains(text) && line.contains(other)).count()
    }
}

/// A log of this thread, while what comes with it lives.
fn heard() -> (Lines, impl Sized) {
    let lines = Lines::default();
    let writer = lines.clone();
    let log = tracing_subscriber::fmt().with_ansi(false).with_writer(move || writer.clone()).finish();
    // While there is but one dispatcher, `tracing` asks that of the thread which comes to a line first: another test's.
    let second = tracing::Dispatch::new(tracing_subscriber::registry());
    (lines, (second, tracing::subscriber::set_default(log)))
}

#[tokio::test(start_paused = true)]
async fn i14_each_failed_delete_is_a_line_and_i15_a_message_that_comes_again_and_again_is_one_alert() {
    let (lines, _log) = heard();
    // A slot is free, so that there are polls while the task runs.
    let mut scene = Scene::with(Mood::DeletesNothing, STYLES[1], 2);
    let task = scene.create(2 * 3600);
    let counts = scene.worker.control();
    let watch = async {
        assert!(matches!(scene.told.recv().await, Some(Told::Started(_))));
        // Received every five minutes, eleven times and more.
        tokio::time::sleep(Duration::from_secs(70 * 60)).await;
    };
    drained(scene.worker, watch).await;
    assert_eq!(scene.queue.states(&task), [COMPLETED]);
    let counts = counts.counts();
    assert!(counts.deletes_failed > 11, "{counts:?}");
    let said = lines.with("cannot delete a message");
    assert_eq!(said as u64, counts.deletes_failed);
    for part in ["message.id=", "message.dequeue_count="] {
        let both = lines.with_both("cannot delete a message", part);
        assert_eq!(both, said, "{part}");
    }
    assert_eq!(lines.with("[alert operator] a message was received 11 times"), 1);
    assert_eq!((lines.with("[alert operator] a message was received"), counts.dequeue_alerts), (1, 1));
}

#[tokio::test(start_paused = true)]
async fn half_an_hour_of_failed_polls_is_one_alert_and_missing_scopes_are_one_line() {
    let (lines, _log) = heard();
    let scene = Scene::new(Mood::FailsAndForbids);
    let watch = async {
        tokio::time::sleep(Duration::from_secs(30 * 60)).await;
    };
    drained(scene.worker, watch).await;
    assert!(scene.polls.load(Ordering::Relaxed) > 20, "it is tried on");
    assert_eq!(lines.with("[alert operator]"), 1);
    assert_eq!(lines.with("last error: a portal wants a login"), 1);
    assert_eq!(lines.with("scopes are missing"), 1);
}

#[tokio::test(start_paused = true)]
async fn b8_a_recovered_claim_is_logged_as_such() {
    let (lines, _log) = heard();
    let mut scene = Scene::new(Mood::Well);
    let watch = async {
        // The clocks have to tell this process from a previous one.
        tokio::time::sleep(Duration::from_secs(30)).await;
        scene.mood.send_replace(Mood::LosesReplies);
        create(&scene.queue, "task", json!({"do": "complete"}));
        assert!(matches!(scene.told.recv().await, Some(Told::Started(_))));
        scene.mood.send_replace(Mood::Well);
    };
    drained(scene.worker, watch).await;
    assert_eq!(lines.with_both("recovered a claim whose reply was lost", "task/0"), 1);
}

#[tokio::test(start_paused = true)]
async fn b13_the_log_and_the_status_say_that_an_idle_worker_waits_for_its_open_poll() {
    let (lines, _log) = heard();
    let scene = Scene::new(Mood::Well);
    let control = scene.worker.control();
    let watch = async {
        tokio::time::sleep(Duration::from_secs(12)).await;
        control.drain().await;
        control.status().await.expect("the worker runs").blocked_message
    };
    let message = runs(scene.worker, ExitReason::Drained, watch).await;
    assert_eq!(message.as_deref(), Some("waiting for the open poll, 12s"));
    assert_eq!(lines.with("no task is left; waiting for the open poll, 12s"), 1);
}

#[tokio::test(start_paused = true)]
async fn an_artifact_that_the_queue_refuses_fails_its_task_unless_it_is_optional() {
    for (optional, expected) in [(false, Outcome::Failed), (true, Outcome::Completed)] {
        let scene = Scene::new(Mood::RefusesFiles);
        let task = scene.create_that(json!({"do": "leave", "optional": optional}));
        let (control, queue) = (scene.worker.control(), scene.queue);
        let watch = async {
            while !matches!(queue.states(&task).last(), Some(RunState::Resolved(_))) {
                tokio::time::sleep(Duration::from_secs(1)).await;
            }
            control.drain().await;
        };
        let (exit, ()) = tokio::join!(scene.worker.run(), watch);
        exit.expect("it ran");
        assert_eq!(queue.states(&task), [RunState::Resolved(RunEnd::Reported(expected))], "optional: {optional}");
    }
}

/// A recorder with a bug.
#[derive(Debug)]
struct BrokenRecorder;

impl TraceRecorder for BrokenRecorder {
    fn record(&self, record: FinishedClaim) {
        panic!("cannot record {}", record.run);
    }

    fn span_counts(&self) -> SpanCounts {
        SpanCounts::default()
    }
}

#[tokio::test(start_paused = true)]
async fn a6_a_panic_of_the_worker_itself_ends_it_with_an_error() {
    let mut scene = Scene::new(Mood::Well);
    scene.create_that(json!({"do": "complete"}));
    scene.worker.config.recorder = Some(Arc::new(BrokenRecorder));
    let error = scene.worker.run().await.expect_err("it cannot go on");
    assert!(error.to_string().contains("the engine panicked: cannot record"), "{error}");
}
