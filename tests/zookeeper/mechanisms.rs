//! Each mechanism beside Zuul's own class.

use std::time::Duration;

use journeyman::source::Source as _;
use journeyman::source::zookeeper::{Dialect, ZooKeeperSource};
use journeyman_domain::id::PriorityQueue;
use journeyman_platform::zookeeper::CreateMode;
use journeyman_platform::zookeeper::components::{self, Component, ComponentState, Registration};
use journeyman_platform::zookeeper::event_queue::EventQueue;
use journeyman_platform::zookeeper::inspect::Walk;
use journeyman_platform::zookeeper::lock::{HeldLock, LockMode};
use journeyman_platform::zookeeper::queue_counts::QueueCounts;
use journeyman_platform::zookeeper::semaphore::{Holder, Places, Semaphore};
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};
use tokio::time::timeout;

use crate::zookeeper::support::{Tree, read_events, until, within};

#[tokio::test(flavor = "multi_thread")]
async fn a_lock_is_held_by_one_and_read_by_many() {
    let Some(tree) = Tree::new().await else { return };
    let take = async |mode| HeldLock::try_take(&tree.session, "/zuul/locks/x", mode).await.expect("it is answered");
    let held = take(LockMode::Exclusive).await.expect("it is free");
    assert!(take(LockMode::Exclusive).await.is_none() && take(LockMode::Read).await.is_none());
    held.release().await.expect("it is given up");
    let (one, two) =
        (take(LockMode::Read).await.expect("it is free"), take(LockMode::Read).await.expect("it is shared"));
    assert!(take(LockMode::Write).await.is_none());
    one.release().await.expect("it is given up");
    assert!(take(LockMode::Write).await.is_none());
    two.release().await.expect("it is given up");
    take(LockMode::Write).await.expect("it is free");
    assert_eq!(tree.session.children("/zuul/locks/x").await.expect("it is answered").expect("it is there").len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn semaphores_are_taken_all_or_none() {
    let Some(tree) = Tree::new().await else { return };
    let places = |names: &[&str], build_set: &str| Places {
        semaphores: names
            .iter()
            .map(|name| Semaphore { name: (*name).to_owned(), path: format!("/zuul/semaphores/t/{name}"), max: 1 })
            .collect(),
        holder: Holder { buildset_path: format!("/zuul/tenant/t/{build_set}"), job_name: "j".to_owned() },
    };
    let (one, two) = (places(&["b"], "one"), places(&["a", "b"], "two"));
    let session = &tree.session;
    assert!(session.acquire_semaphores(&one).await.expect("it is answered"));
    assert!(!session.acquire_semaphores(&two).await.expect("it is answered"));
    assert_eq!(session.semaphore_holders("/zuul/semaphores/t/a").await.expect("it is answered"), []);
    session.release_semaphores(&one).await.expect("it is answered");
    assert!(session.acquire_semaphores(&two).await.expect("it is answered"));
    session.ensure("/zuul/tenant/t/two").await.expect("it is answered");
    assert_eq!(session.release_leaked_semaphores().await.expect("it is answered"), Vec::<String>::new());
    session.delete_tree("/zuul/tenant/t/two").await.expect("it is answered");
    assert_eq!(session.release_leaked_semaphores().await.expect("it is answered").len(), 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_over_the_limit_is_refused_before_it_is_sent() {
    let Some(tree) = Tree::new().await else { return };
    let large = vec![b'x'; 1_000_001];
    let refused = tree.session.create("/large", &large, CreateMode::Persistent).await.expect_err("it is too large");
    assert!(refused.to_string().contains("/large") && refused.to_string().contains("1,000,000"), "{refused}");
    tree.session.write_shards("/large", &large).await.expect("shards are not");
    assert_eq!(tree.session.read_shards("/large").await.expect("they are read").expect("they are there"), large);
}

fn digest(data: &[u8]) -> String {
    Sha256::digest(data).iter().map(|byte| format!("{byte:02x}")).collect()
}

/// A program of Zuul's for each kind of object, which it handles with its own class.
const TOOLS: &str = "zuul_tools.py";

#[tokio::test(flavor = "multi_thread")]
async fn shards_are_read_by_either_side() {
    let Some(tree) = Tree::new().await else { return };
    let data: Vec<u8> =
        (0..3_000_000_u32).flat_map(|number| number.wrapping_mul(2_654_435_761).to_be_bytes()).collect();
    tree.session.write_shards("/zuul/ours", &data).await.expect("they are written");
    let Some(mut reader) = tree.zuul(TOOLS, &["shards", "read", "/zuul/ours"]) else { return };
    assert_eq!(reader.says("shards").await["sha256"], digest(&data));
    for old in [&[][..], &["--model-api", "30"]] {
        let written = [old, &["shards", "write", "/zuul/theirs", "--bytes", "3000000"]].concat();
        let Some(mut writer) = tree.zuul(TOOLS, &written) else { return };
        let said = writer.says("shards").await;
        assert_eq!(writer.ends().await, 0);
        let read = tree.session.read_shards("/zuul/theirs").await.expect("they are read").expect("they are there");
        assert!(said["nodes"].as_array().expect("a list").len() > 2, "{said}");
        assert_eq!(said["sha256"], digest(&read), "{old:?}");
        tree.session.delete_tree("/zuul/theirs").await.expect("they are removed");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn locks_of_either_side_keep_the_other_out() {
    let Some(tree) = Tree::new().await else { return };
    let path = "/zuul/locks/tenant/t";
    let take = async |mode| HeldLock::try_take(&tree.session, path, mode).await.expect("it is answered");
    for (kind, ours, may_share) in [
        ("lock", LockMode::Exclusive, false),
        ("session", LockMode::Exclusive, false),
        ("write", LockMode::Read, false),
        ("read", LockMode::Write, false),
        ("read", LockMode::Read, true),
        ("session-read", LockMode::Read, true),
    ] {
        let Some(mut theirs) = tree.zuul(TOOLS, &["lock", kind, path]) else { return };
        theirs.says("acquired").await;
        let second = take(ours).await;
        assert_eq!(second.is_some(), may_share, "{kind} {ours:?}");
        theirs.lets_go();
        theirs.says("released").await;
        if let Some(second) = second {
            second.release().await.expect("it is given up");
        }
        assert_eq!(theirs.ends().await, 0);

        let held = take(ours).await.expect("it is free");
        let Some(mut theirs) = tree.zuul(TOOLS, &["lock", kind, path, "--now"]) else { return };
        theirs.says(if may_share { "acquired" } else { "refused" }).await;
        assert_eq!(theirs.ends().await, i32::from(!may_share), "{kind} {ours:?}");
        held.release().await.expect("it is given up");
    }
}

/// Kazoo's election is a lock at its path, and so is ours.
#[tokio::test(flavor = "multi_thread")]
async fn elections_have_one_winner_of_either_side() {
    let Some(tree) = Tree::new().await else { return };
    let path = "/zuul/scheduler/timer-election";
    let ours = HeldLock::try_take(&tree.session, path, LockMode::Exclusive).await.expect("it is answered");
    let Some(mut theirs) = tree.zuul(TOOLS, &["election", path]) else { return };
    until("they stand for election", async || {
        tree.session.children(path).await.expect("it is answered").is_some_and(|names| names.len() == 2)
    })
    .await;
    ours.expect("it is free").release().await.expect("it is given up");
    theirs.says("elected").await;
    let next = HeldLock::try_take(&tree.session, path, LockMode::Exclusive).await.expect("it is answered");
    assert!(next.is_none(), "two lead");
    theirs.lets_go();
    theirs.says("resigned").await;
    until("our turn", async || {
        HeldLock::try_take(&tree.session, path, LockMode::Exclusive).await.expect("it is answered").is_some()
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn semaphores_are_counted_by_either_side() {
    let Some(tree) = Tree::new().await else { return };
    let semaphore = Semaphore { name: "s".to_owned(), path: "/zuul/semaphores/t/s".to_owned(), max: 1 };
    let holder = Holder { buildset_path: "/zuul/tenant/t/ours".to_owned(), job_name: "j".to_owned() };
    let ours = Places { semaphores: vec![semaphore], holder };
    assert!(tree.session.acquire_semaphores(&ours).await.expect("it is answered"));
    let Some(mut theirs) = tree.zuul(TOOLS, &["semaphore", "acquire", "s"]) else { return };
    let said = theirs.says("semaphore").await;
    assert_eq!(said["holders"][0]["buildset_path"], "/zuul/tenant/t/ours", "{said}");
    assert_eq!(theirs.ends().await, 1, "both have it");
    tree.session.release_semaphores(&ours).await.expect("it is answered");
    let Some(theirs) = tree.zuul(TOOLS, &["semaphore", "acquire", "s"]) else { return };
    assert_eq!(theirs.ends().await, 0);
    assert!(!tree.session.acquire_semaphores(&ours).await.expect("it is answered"));
    let Some(theirs) = tree.zuul(TOOLS, &["semaphore", "release", "s"]) else { return };
    assert_eq!(theirs.ends().await, 0);
    assert!(tree.session.acquire_semaphores(&ours).await.expect("it is answered"));
}

#[tokio::test(flavor = "multi_thread")]
async fn events_with_side_data_are_read_and_acknowledged_by_zuul() {
    let Some(tree) = Tree::with_pipeline().await else { return };
    let (session, queue) = (&tree.session, EventQueue::of_pipeline("t", "p"));
    let data_of = |padding: &str| {
        json!({
            "build_uuid": "b", "build_set_uuid": "bs", "job_uuid": "j", "zuul_event_id": "e",
            "build_request_ref": "/zuul/executor/unzoned/requests/b", "data": { "result": "SUCCESS", "padding": padding },
        })
    };
    let left = async |folder: &str| {
        let path = format!("/zuul/events/tenant/t/pipelines/p/result/{folder}");
        session.children(&path).await.expect("it is answered").expect("it is there").len()
    };
    for padding in ["small".to_owned(), "x".repeat(600_000)] {
        assert!(queue.put(session, "BuildCompletedEvent", data_of(&padding)).await.expect("it is added"));
    }
    assert_eq!((left("queue").await, left("data").await), (2, 1));
    let Some(mut theirs) = tree.zuul(TOOLS, &["events", "ack", "result"]) else { return };
    let first = theirs.says("BuildCompletedEvent").await;
    let second = theirs.says("BuildCompletedEvent").await;
    assert_eq!(first["data"]["data"]["padding"], "small", "{first}");
    assert_eq!(second["data"]["data"]["padding"].as_str().expect("text").len(), 600_000);
    assert_eq!(theirs.ends().await, 0);
    assert_eq!((left("queue").await, left("data").await), (0, 0));
}

#[tokio::test(flavor = "multi_thread")]
async fn side_data_of_lost_events_are_removed_when_they_are_old() {
    let Some(tree) = Tree::with_pipeline().await else { return };
    let (session, queue) = (&tree.session, EventQueue::of_pipeline("t", "p"));
    let large = json!({ "padding": "x".repeat(600_000) });
    assert!(queue.put(session, "BuildCompletedEvent", large).await.expect("it is added"));
    let lost = "/zuul/events/tenant/t/pipelines/p/result/data/lost";
    session.write_shards(lost, b"{}").await.expect("it is written");
    let now_ms = session.stat(lost).await.expect("it is answered").expect("it is there").ctime;
    let removed = async |now_ms| queue.remove_lost_data(session, now_ms).await.expect("it is answered");
    assert_eq!(removed(now_ms + 299_000).await, [""; 0]);
    assert_eq!(removed(now_ms + 301_000).await, [lost]);
    assert_eq!(read_events(&queue, session).await.len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn components_of_either_side_are_listed_by_the_other() {
    let Some(tree) = Tree::new().await else { return };
    let ours = Component {
        state: ComponentState::Running,
        hostname: "ours".to_owned(),
        kind: "merger".to_owned(),
        version: "1".to_owned(),
        model_api: 37,
        own: serde_json::Map::new(),
    };
    let registry = "/zuul/components";
    let mut registration = Registration::create(&tree.session, registry, ours).await.expect("it is registered");
    registration.update(|component| component.state = ComponentState::Paused).await.expect("it is written");
    let Some(mut theirs) = tree.zuul(TOOLS, &["register", "executor", "--name", "theirs"]) else { return };
    theirs.says("registered").await;
    let Some(mut lister) = tree.zuul(TOOLS, &["components", "merger"]) else { return };
    let said = lister.says("component").await;
    assert_eq!((&said["data"]["hostname"], &said["data"]["state"]), (&json!("ours"), &json!("paused")), "{said}");
    assert_eq!(lister.says("cluster").await["model_api"], 37);
    let listed = components::list(&tree.session, registry, "executor").await.expect("it is answered");
    assert_eq!((listed[0].1.hostname.as_str(), listed[0].1.state), ("theirs", ComponentState::Running));
    assert_eq!(components::cluster_model_api(&tree.session, registry).await.expect("it is answered"), 37);
    assert_eq!(theirs.ends().await, 0);
    until("theirs is gone", async || {
        components::list(&tree.session, registry, "executor").await.expect("it is answered").is_empty()
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_are_counted_by_their_state_and_tasks_by_their_lock() {
    let Some(tree) = Tree::new().await else { return };
    let count = async |dialect| tree.queue(dialect).count(&tree.session, dialect).await.expect("it is answered");
    assert_eq!(count(Dialect::ZuulExecutor).await, QueueCounts::default(), "there is no queue");
    let builds = tree.queue(Dialect::ZuulExecutor);
    builds.ensure(&tree.session).await.expect("it is there");
    let add = async |id: &str, data: &str| {
        let path = builds.path("requests", id);
        tree.session.create(&path, data.as_bytes(), CreateMode::Persistent).await.expect("it is created");
    };
    for (number, state) in
        ["requested", "requested", "requested", "running", "paused", "completed", "hold", "odd"].iter().enumerate()
    {
        add(&number.to_string(), &format!("{{\"state\":\"{state}\"}}")).await;
    }
    add("unreadable", "[]").await;
    assert_eq!(count(Dialect::ZuulExecutor).await, QueueCounts { pending: 3, claimed: 2 });
    let tasks = tree.queue(Dialect::Native);
    tasks.ensure(&tree.session).await.expect("it is there");
    for path in [
        tasks.path("requests", "a"),
        tasks.path("requests", "b"),
        tasks.path("locks", "b"),
        tasks.path("locks", "gone"),
    ] {
        tree.session.create(&path, b"{}", CreateMode::Persistent).await.expect("it is created");
    }
    assert_eq!(count(Dialect::Native).await, QueueCounts { pending: 1, claimed: 1 });
}

#[tokio::test(flavor = "multi_thread")]
async fn a4_a_paused_source_claims_nothing_and_says_so_whatever_comes_first() {
    let Some(tree) = Tree::new().await else { return };
    let source = ZooKeeperSource::new(tree.source(Dialect::ZuulExecutor));
    let accepts = async || {
        let Some(names) = tree.session.children("/zuul/components/executor").await.expect("it is answered") else {
            return Vec::new();
        };
        let mut accepts = Vec::new();
        for name in names {
            let path = format!("/zuul/components/executor/{name}");
            let (data, _) = tree.session.get(&path).await.expect("it is answered").expect("it is there");
            let component: Value = serde_json::from_slice(&data).expect("it is JSON");
            accepts.push(component["accepting_work"] == true);
        }
        accepts
    };
    // The worker stops after it has decided to poll: while the poll connects, and afterwards says that it takes work.
    for is_connected in [false, true] {
        source.pause();
        let batch = within("the poll", source.poll(PriorityQueue(0), 1)).await.expect("nothing is wrong");
        assert_eq!(batch.grants.len(), 0);
        assert_eq!(accepts().await, [false], "{is_connected}");
        source.resume();
        let mut poll = source.poll(PriorityQueue(0), 1);
        until("it takes work", async || {
            assert!(timeout(Duration::from_millis(1), &mut poll).await.is_err(), "no request is there");
            accepts().await == [true]
        })
        .await;
        source.pause();
        within("the poll", poll).await.expect("nothing is wrong");
        until("it takes none", async || accepts().await == [false]).await;
    }
    source.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn d5_a_request_that_awaits_its_removal_waits_for_no_worker() {
    let Some(tree) = Tree::new().await else { return };
    let (session, queue) = (&tree.session, tree.queue(Dialect::ZuulExecutor));
    queue.ensure(session).await.expect("it is made");
    let oldest = async || {
        let mut walk = Walk::default();
        session.walk(&mut walk, queue.root(), 100, |_| true).await.expect("it is read");
        let queues = walk.queues();
        (queues[0].requests, session.oldest_waiting_ms(&queues[0]).await.expect("it is answered"))
    };
    let add = async |id: &str, state: &str| {
        let request = json!({ "uuid": id, "state": state, "precedence": 1 }).to_string();
        let path = queue.path("requests", id);
        session.create(&path, request.as_bytes(), CreateMode::Persistent).await.expect("it is made");
        session.stat(&path).await.expect("it is answered").expect("it is there").ctime
    };
    add("a", "completed").await;
    assert_eq!(oldest().await, (1, None));
    let created = add("b", "requested").await;
    assert_eq!(oldest().await, (2, Some(created)));
}
