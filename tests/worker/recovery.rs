//! A worker that died, and the next one in its folder: what was held is reported once, or forgotten, and never run again.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use journeyman::worker::status::{RecoverySummary, WorkerStatus};
use journeyman::worker::{Control, ExitReason, Worker, WorkerConfig};
use journeyman_domain::id::TaskId;
use journeyman_domain::refusal::Refusal;
use journeyman_platform::host::clock::Clock;
use serde_json::json;
use tokio::sync::{mpsc, watch};

use crate::memory_queue::{MemoryQueue, PollStyle, RunEnd, RunState};
use crate::worker::faults::{Mood, Moody};
use crate::worker::scripted::{COMPLETED, HANDED_BACK, STYLES, Told, binding, create, memory_queue, settings};

/// A queue and a work folder, which outlive workers.
pub struct Scene {
    pub queue: MemoryQueue,
    clock: Clock,
    pub folder: tempfile::TempDir,
    pub mood: watch::Sender<Mood>,
    pub capacity: u32,
}

/// One life of the worker.
pub struct Life {
    pub control: Control,
    pub told: mpsc::Receiver<Told>,
    running: tokio::task::JoinSet<std::io::Result<ExitReason>>,
}

impl Scene {
    pub fn new(style: PollStyle) -> Self {
        let (queue, clock) = memory_queue(style);
        Self {
            queue,
            clock,
            folder: tempfile::tempdir().expect("a folder"),
            mood: watch::channel(Mood::Well).0,
            capacity: 1,
        }
    }

    /// The queue has a task that ran when its worker died.
    pub async fn orphaned(style: PollStyle) -> (Self, TaskId) {
        let scene = Self::new(style);
        let task = scene.create(json!({"do": "wait"}));
        let mut first = scene.live();
        first.started().await;
        first.dies().await;
        (scene, task)
    }

    fn create(&self, payload: serde_json::Value) -> TaskId {
        self.create_as("task", payload)
    }

    pub fn create_as(&self, name: &str, payload: serde_json::Value) -> TaskId {
        create(&self.queue, name, payload)
    }

    pub fn live(&self) -> Life {
        self.live_as("worker")
    }

    fn live_as(&self, name: &str) -> Life {
        self.live_in(self.folder.path(), name)
    }

    fn live_in(&self, folder: &Path, name: &str) -> Life {
        self.live_on("", folder, name)
    }

    /// On another host, where nothing is known of this one's workers.
    pub fn live_on(&self, elsewhere: &'static str, folder: &Path, name: &str) -> Life {
        let (sender, told) = mpsc::channel(8);
        let source = Moody {
            inner: self.queue.source(name),
            mood: self.mood.subscribe(),
            polls: Arc::<AtomicU64>::default(),
            elsewhere,
        };
        let settings = WorkerConfig { capacity: self.capacity, ..settings(folder, self.clock) };
        let worker = Worker::new(settings, vec![binding(source, sender)]);
        let control = worker.control();
        let mut running = tokio::task::JoinSet::new();
        running.spawn(worker.run());
        Life { control, told, running }
    }

    fn journal(&self) -> std::path::PathBuf {
        self.folder.path().join("journal")
    }
}

impl Life {
    pub async fn started(&mut self) {
        assert!(matches!(self.told.recv().await, Some(Told::Started(_))));
    }

    /// The process is killed: it sends nothing more.
    pub async fn dies(mut self) {
        self.running.abort_all();
        while self.running.join_next().await.is_some() {}
        while self.control.status().await.is_some() {
            tokio::task::yield_now().await;
        }
    }

    /// Waits until the recovery of the previous process is complete.
    async fn recovered(&self) -> RecoverySummary {
        loop {
            let view: Option<WorkerStatus> = self.control.status().await;
            match view.and_then(|view| view.recovered).filter(|recovered| recovered.pending == 0) {
                Some(recovered) => return recovered,
                None => tokio::time::sleep(Duration::from_millis(100)).await,
            }
        }
    }
}

#[tokio::test(start_paused = true)]
async fn what_ran_when_its_worker_died_is_handed_back_by_the_next_one_at_once() {
    for style in STYLES {
        let (scene, task) = Scene::orphaned(style).await;
        assert_eq!(scene.queue.states(&task), [RunState::Running], "{style:?}");
        let mut second = scene.live();
        let recovered = second.recovered().await;
        assert_eq!(recovered, RecoverySummary { released: 1, ..RecoverySummary::default() }, "{style:?}");
        // Another worker may claim the next run; here, the same one does.
        assert_eq!(second.told.recv().await, Some(Told::Started("task/1".into())), "{style:?}");
        assert_eq!(scene.queue.states(&task), [HANDED_BACK, RunState::Running], "{style:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn what_was_decided_and_not_answered_is_reported_as_it_was_decided_and_not_run_again() {
    for style in STYLES {
        let scene = Scene::new(style);
        let task = scene.create(json!({"do": "sleep", "seconds": 60}));
        let mut first = scene.live();
        first.started().await;
        scene.mood.send_replace(Mood::Refuses(Refusal::Retry { retry_after: None }));
        tokio::time::sleep(Duration::from_secs(90)).await;
        assert_eq!(scene.queue.states(&task), [RunState::Running], "{style:?}");
        first.dies().await;
        scene.mood.send_replace(Mood::Well);
        let mut second = scene.live();
        assert_eq!(
            second.recovered().await,
            RecoverySummary { reported: 1, ..RecoverySummary::default() },
            "{style:?}"
        );
        assert_eq!(scene.queue.states(&task), [COMPLETED], "{style:?}");
        // Past every message's return.
        tokio::time::sleep(Duration::from_secs(3600)).await;
        assert!(second.told.try_recv().is_err(), "{style:?}: it was started again");
    }
}

#[tokio::test(start_paused = true)]
async fn what_has_expired_by_then_is_forgotten() {
    for style in STYLES {
        let (scene, task) = Scene::orphaned(style).await;
        tokio::time::sleep(Duration::from_secs(21 * 60)).await;
        let mut second = scene.live();
        assert_eq!(second.recovered().await, RecoverySummary { expired: 1, ..RecoverySummary::default() }, "{style:?}");
        second.started().await;
        assert_eq!(
            scene.queue.states(&task),
            [RunState::Resolved(RunEnd::ClaimExpired), RunState::Running],
            "{style:?}"
        );
    }
}

#[tokio::test(start_paused = true)]
async fn what_another_name_has_claimed_is_left_to_expire() {
    let (scene, task) = Scene::orphaned(STYLES[0]).await;
    let second = scene.live_as("renamed");
    assert_eq!(second.recovered().await, RecoverySummary { expired: 1, ..RecoverySummary::default() });
    tokio::time::sleep(Duration::from_secs(10 * 60)).await;
    assert_eq!(scene.queue.states(&task), [RunState::Running], "it is unchanged");
}

#[tokio::test(start_paused = true)]
async fn what_a_worker_finished_leaves_nothing_to_the_next_one() {
    for style in STYLES {
        let scene = Scene::new(style);
        let task = scene.create(json!({"do": "complete"}));
        let mut first = scene.live();
        first.started().await;
        first.control.drain().await;
        assert!(matches!(first.running.join_next().await, Some(Ok(Ok(ExitReason::Drained)))));
        assert_eq!(scene.queue.states(&task), [COMPLETED]);
        let second = scene.live();
        assert_eq!(second.control.status().await.expect("it lives").recovered, None);
    }
}

#[tokio::test(start_paused = true)]
async fn a_damaged_journal_is_told_of_and_keeps_nobody_from_starting() {
    let (scene, task) = Scene::orphaned(STYLES[0]).await;
    let whole = std::fs::read_to_string(scene.journal()).expect("there is a journal");
    let (began, held) = whole.split_once('\n').expect("lines");
    std::fs::write(scene.journal(), format!("{began}\nrust and dust\n{held}12345678 {{\"held\":")).expect("written");
    let second = scene.live();
    assert_eq!(
        second.recovered().await,
        RecoverySummary { released: 1, journal_errors: 1, ..RecoverySummary::default() }
    );
    assert_eq!(scene.queue.states(&task)[0], HANDED_BACK);
    second.dies().await;
    std::fs::remove_file(scene.journal()).expect("removed");
    std::fs::create_dir(scene.journal()).expect("made");
    assert_eq!(scene.live().recovered().await.journal_errors, 1);
}

/// A file in the way of every journal.
fn block(folder: &Path) -> std::path::PathBuf {
    let next = folder.join("journal.next");
    std::fs::create_dir_all(next.join("in the way")).expect("made");
    next
}

#[tokio::test(start_paused = true)]
async fn no_payload_is_started_that_cannot_be_written_down() {
    let scene = Scene::new(STYLES[0]);
    let blocked = block(scene.folder.path());
    let task = scene.create(json!({"do": "complete"}));
    let mut life = scene.live();
    while scene.queue.states(&task).len() < 2 {
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
    assert_eq!(scene.queue.states(&task)[0], HANDED_BACK);
    assert_eq!(life.control.counts().host_faults, 1, "and the host is said to be unfit");
    assert!(life.told.try_recv().is_err(), "it was started");
    std::fs::remove_dir_all(blocked).expect("removed");
    life.started().await;
    while scene.queue.states(&task).last() != Some(&COMPLETED) {
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_second_worker_of_one_name_is_refused_and_takes_nothing_from_the_first() {
    let scene = Scene::new(STYLES[0]);
    let task = scene.create(json!({"do": "wait"}));
    let mut first = scene.live();
    first.started().await;
    let elsewhere = tempfile::tempdir().expect("a folder");
    let mut second = scene.live_in(elsewhere.path(), "worker");
    let refused = second.running.join_next().await.expect("it ran").expect("it ended").expect_err("it is refused");
    assert!(refused.to_string().contains("an `id` of its own"), "{refused}");
    assert_eq!(scene.queue.states(&task), [RunState::Running]);
    let third = scene.live_in(elsewhere.path(), "another");
    assert!(third.control.status().await.is_some(), "under another name it may");
    first.dies().await;
    // The name is free again.
    assert_eq!(scene.live().recovered().await.released, 1);
}
