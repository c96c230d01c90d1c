//! kill -9 of the worker at each step between the lock and the end: no request is lost, and none is completed twice.
//!
//! `JOURNEYMAN_CRASH_RUNS` is the number of kills at each step. Without it, rounds begin for 20 seconds.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use journeyman::source::zookeeper::Dialect;
use journeyman_platform::zookeeper::CreateMode;
use journeyman_platform::zookeeper::event_queue::EventQueue;
use journeyman_platform::zookeeper::janitor::Janitor;
use journeyman_platform::zookeeper::submit::Submission;
use journeyman_platform::zookeeper::watch::{TreeEvent, TreeWatch};
use rustix::process::Signal;
use serde_json::Value;

use crate::support::Repeats;
use crate::support::process::{Process, config};
use crate::zookeeper::support::{Tree, read_events, until, within};

/// A queue, and workers that die one after the other.
struct Scene {
    tree: Tree,
    dialect: Dialect,
    folder: tempfile::TempDir,
    config: PathBuf,
    submitted: Vec<String>,
}

impl Scene {
    async fn new(dialect: Dialect) -> Option<Self> {
        let tree = Tree::with_pipeline().await?;
        let folder = tempfile::tempdir().expect("a folder");
        let word = serde_json::to_value(dialect).expect("it is JSON");
        let (servers, chroot) = (&tree.connect.servers, tree.connect.chroot.as_deref().expect("a chroot"));
        let source = format!(
            "[source.requests]\nkind = \"zookeeper\"\ndialect = {word}\nconnect = \"{servers}\"\nchroot = \"{chroot}\"\n\
             session_timeout = \"1s\"\nhandler = \"echo\"\n"
        );
        let program = "#!/bin/sh\necho '{\"type\":\"result\",\"value\":{\"merged\":true}}' >&3\n";
        let config = config(folder.path(), program, &source);
        tree.queue(dialect).ensure(&tree.session).await.expect("it is answered");
        Some(Self { tree, dialect, folder, config, submitted: Vec::new() })
    }

    async fn submit(&mut self) {
        let fields = [("tenant_name", "t"), ("pipeline_name", "p")];
        let submission = Submission {
            dialect: self.dialect,
            payload: serde_json::json!({}),
            precedence: 200,
            fields: fields.map(|(key, value)| (key.to_owned(), Value::from(value))).into_iter().collect(),
            waits: true,
        };
        let added = self.tree.queue(self.dialect).add(&self.tree.session, &submission).await;
        self.submitted.push(added.expect("it is added"));
    }

    fn worker(&self, crash_at: Option<&str>) -> Process {
        // A worker that does not reach its crash point exits nevertheless.
        let mut variables = vec![
            ("JOURNEYMAN__WORKER__CAPACITY", "1"),
            ("JOURNEYMAN__WORKER__EXIT_WHEN_IDLE", "30s"),
            ("JOURNEYMAN__WORKER__ID", "worker"),
        ];
        variables.extend(crash_at.map(|at| ("JOURNEYMAN_CRASH_POINT", at)));
        Process::start(self.folder.path(), &self.config, &variables)
    }

    /// How often each request was completed.
    async fn completed(&self, results: &mut TreeWatch) -> BTreeMap<String, usize> {
        let mut completed = BTreeMap::new();
        if self.dialect == Dialect::ZuulExecutor {
            let events = read_events(&EventQueue::of_pipeline("t", "p"), &self.tree.session).await;
            for event in events.iter().filter(|event| event.fields["event_type"] == "BuildCompletedEvent") {
                let id = event.fields["event_data"]["build_uuid"].as_str().expect("an id").to_owned();
                *completed.entry(id).or_default() += 1;
            }
            return completed;
        }
        let end = self.tree.queue(self.dialect).path("results", "end");
        self.tree.session.create(&end, b"", CreateMode::Persistent).await.expect("it is created");
        loop {
            match within("the events of results", results.next()).await {
                TreeEvent::Created(path) if path == end => return completed,
                TreeEvent::Created(path) => {
                    let id = path.rsplit('/').next().expect("a name").to_owned();
                    *completed.entry(id).or_default() += 1;
                }
                TreeEvent::Changed(_) | TreeEvent::Deleted(_) => {}
                other @ (TreeEvent::EventsLost | TreeEvent::Ended) => panic!("events may be missing: {other:?}"),
            }
        }
    }
}

async fn die_at_each_step(dialect: Dialect, steps: &[&str]) {
    let Some(mut scene) = Scene::new(dialect).await else { return };
    let queue = scene.tree.queue(dialect);
    let session = scene.tree.session.clone();
    let mut results = TreeWatch::start(&session, &format!("{}/results", queue.root())).await.expect("it is answered");
    let repeats = Repeats::new("JOURNEYMAN_CRASH_RUNS", Duration::from_secs(20));
    for _ in (0..).take_while(|round| repeats.again(*round)) {
        for step in steps {
            scene.submit().await;
            let ended = scene.worker(Some(step)).ends().await;
            assert_eq!(ended.signal(), Some(Signal::KILL.as_raw()), "at {step}: {}", ended.log);
        }
    }
    let last = scene.worker(None);
    let mut janitor = Janitor::new(queue.clone(), dialect);
    let finishing = async {
        loop {
            janitor.clean(&session).await.expect("it is answered").expect("no other process cleans");
            let mut open = 0;
            for id in &scene.submitted {
                let request = session.get(&queue.path("requests", id)).await.expect("it is answered");
                // A scheduler removes what is completed; here is none.
                open += usize::from(
                    request.is_some_and(|(data, _)| !String::from_utf8_lossy(&data).contains("\"completed\"")),
                );
            }
            if open == 0 {
                return;
            }
        }
    };
    within("the end of every request", finishing).await;
    last.drained().await;
    let completed = scene.completed(&mut results).await;
    let lost: Vec<_> = scene.submitted.iter().filter(|id| !completed.contains_key(*id)).collect();
    let twice: Vec<_> = completed.iter().filter(|(_, times)| **times > 1).collect();
    println!("{dialect:?}: {} deaths: lost {}, completed twice {}", scene.submitted.len(), lost.len(), twice.len());
    assert!(lost.is_empty() && twice.is_empty(), "lost {lost:?}, twice {twice:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn kills_at_each_step_of_a_merge() {
    let steps =
        ["zookeeper-locked", "zookeeper-running", "spawned", "before-report", "zookeeper-completed", "after-report"];
    die_at_each_step(Dialect::ZuulMerger, &steps).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn kills_at_each_step_of_a_build() {
    let steps =
        ["zookeeper-locked", "zookeeper-running", "spawned", "before-report", "zookeeper-completed", "after-report"];
    die_at_each_step(Dialect::ZuulExecutor, &steps).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn kills_at_each_step_of_a_task() {
    let steps = ["zookeeper-claimed", "spawned", "exited", "before-report", "after-report"];
    die_at_each_step(Dialect::Native, &steps).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_clean_up_of_zuul_ends_what_our_dead_worker_held() {
    for (dialect, part) in [(Dialect::ZuulMerger, "merger"), (Dialect::ZuulExecutor, "executor")] {
        let Some(mut scene) = Scene::new(dialect).await else { return };
        let (queue, session) = (scene.tree.queue(dialect), scene.tree.session.clone());
        scene.submit().await;
        let ended = scene.worker(Some("zookeeper-running")).ends().await;
        assert_eq!(ended.signal(), Some(Signal::KILL.as_raw()), "{}", ended.log);
        let lock = queue.path("locks", &scene.submitted[0]);
        until("its session ends", async || {
            session.children(&lock).await.expect("it is answered").is_none_or(|names| names.is_empty())
        })
        .await;
        let Some(mut clean_up) = scene.tree.zuul("zuul_cleanup.py", &[part]) else { return };
        assert_eq!(clean_up.says("lost").await["path"], queue.path("requests", &scene.submitted[0]));
        assert_eq!(clean_up.ends().await, 0);
        if dialect == Dialect::ZuulMerger {
            let waiting = queue.wait_for_result(&session, dialect, &scene.submitted[0]);
            assert_eq!(within("a result", waiting).await.expect("it can be read"), serde_json::json!({}));
        } else {
            let events = read_events(&EventQueue::of_pipeline("t", "p"), &session).await;
            let results = events.iter().map(|event| &event.fields["event_data"]["data"]["result"]);
            assert_eq!(results.filter(|result| !result.is_null()).collect::<Vec<_>>(), ["ABORTED"]);
        }
    }
}
