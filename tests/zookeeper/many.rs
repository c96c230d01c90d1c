//! Queues with more free requests than a worker watches.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use futures_util::{StreamExt as _, TryStreamExt as _, stream};
use journeyman::source::zookeeper::{Dialect, ZooKeeperSource, ZooKeeperSourceConfig};
use journeyman::source::{Grant, Source as _, SourceEvent};
use journeyman_domain::id::PriorityQueue;
use journeyman_domain::outcome::{ExceptionReason, Outcome};
use journeyman_platform::zookeeper::CreateMode;
use journeyman_platform::zookeeper::submit::Submission;
use parking_lot::Mutex;
use serde_json::json;

use crate::zookeeper::errors::submission;
use crate::zookeeper::support::{Tree, handler, start, until, within};

async fn submit(tree: &Tree, dialect: Dialect, numbers: std::ops::Range<usize>) -> Vec<String> {
    let (queue, session) = (tree.queue(dialect), &tree.session);
    let submissions: Vec<_> = numbers.map(|number| submission(dialect, json!({ "number": number }))).collect();
    let adding = stream::iter(&submissions).map(|submission| queue.add(session, submission)).buffer_unordered(32);
    adding.try_collect().await.expect("they are added")
}

/// Polls until nothing is free, and holds what is granted.
async fn claim_all(source: &ZooKeeperSource, count: usize) -> Vec<Grant> {
    let mut grants: Vec<Grant> = Vec::new();
    while grants.len() < count {
        let max = (count - grants.len()).min(8).try_into().expect("it is small");
        let batch = within("a claim", source.poll(PriorityQueue(0), max)).await.expect("it is answered");
        grants.extend(batch.grants);
    }
    assert_eq!(grants.len(), count);
    grants
}

#[tokio::test(flavor = "multi_thread")]
async fn several_workers_end_each_of_many_requests_once() {
    const COUNT: usize = 600;
    for dialect in [Dialect::Native, Dialect::ZuulMerger] {
        let Some(tree) = Tree::with_pipeline().await else { return };
        let ran: Arc<Mutex<BTreeMap<u64, usize>>> = Arc::default();
        let runs = Arc::clone(&ran);
        let act = handler(move |payload: serde_json::Value, _| {
            *runs.lock().entry(payload["number"].as_u64().expect("its number")).or_default() += 1;
            async { Ok(()) }
        });
        let mut submitted: BTreeSet<String> = submit(&tree, dialect, 0..COUNT / 2).await.into_iter().collect();
        let source = |id: &str| ZooKeeperSourceConfig { worker_id: id.to_owned(), ..tree.source(dialect) };
        let workers = ["a", "b", "c"].map(|id| start(source(id), Arc::clone(&act)));
        submitted.extend(submit(&tree, dialect, COUNT / 2..COUNT).await);
        let (queue, session) = (tree.queue(dialect), &tree.session);
        let names = async |folder: &str| {
            let path = format!("{}/{folder}", queue.root());
            session.children(&path).await.expect("it is answered").unwrap_or_default()
        };
        until("the end of all", async || names("requests").await.is_empty()).await;
        let results: BTreeSet<String> = names("results").await.into_iter().collect();
        assert_eq!(results, submitted);
        for worker in workers {
            worker.drained().await;
        }
        assert!(names("locks").await.is_empty() && names("params").await.is_empty());
        let once: BTreeMap<u64, usize> = (0..COUNT as u64).map(|number| (number, 1)).collect();
        assert_eq!(*ran.lock(), once);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_that_watches_no_more_sees_a_cancel_and_what_it_has_handed_back() {
    const COUNT: usize = 200;
    for dialect in [Dialect::Native, Dialect::ZuulMerger, Dialect::ZuulExecutor] {
        let Some(tree) = Tree::with_pipeline().await else { return };
        let ids = submit(&tree, dialect, 0..COUNT).await;
        let source = ZooKeeperSource::new(tree.source(dialect));
        let mut grants = claim_all(&source, COUNT / 4).await;
        let canceled = grants.pop().expect("a grant");
        tree.queue(dialect).cancel(&tree.session, dialect, canceled.run.task.as_str()).await.expect("it is answered");
        let event = within("the cancel", source.next_event()).await;
        assert!(matches!(&event, SourceEvent::CancelRequested(run) if *run == canceled.run), "{dialect:?}: {event:?}");
        drop(canceled);
        if dialect == Dialect::ZuulExecutor {
            // Its scheduler makes another build of one that a worker hands back.
            continue;
        }
        let back = grants.pop().expect("a grant");
        let outcome = Outcome::Exception(ExceptionReason::WorkerShutdown);
        within("its report", back.claim.report(outcome)).await.expect("it is accepted");
        let again = back.run.task.clone();
        drop(back);
        grants.extend(claim_all(&source, COUNT - 1 - grants.len()).await);
        let held: BTreeSet<&str> = grants.iter().map(|grant| grant.run.task.as_str()).collect();
        assert!(held.contains(again.as_str()), "{dialect:?}");
        assert_eq!((held.len(), ids.len()), (COUNT - 1, COUNT));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_hand_back_and_a_cancel_while_the_queue_is_watched_again_are_seen() {
    const COUNT: usize = 80;
    for dialect in [Dialect::Native, Dialect::ZuulMerger, Dialect::ZuulExecutor] {
        let Some(tree) = Tree::with_pipeline().await else { return };
        submit(&tree, dialect, 0..COUNT).await;
        let source = ZooKeeperSource::new(tree.source(dialect));
        let mut grants = claim_all(&source, 10).await;
        let (canceled, back) = (grants.pop().expect("a grant"), grants.pop().expect("a grant"));
        tree.queue(dialect).cancel(&tree.session, dialect, canceled.run.task.as_str()).await.expect("it is answered");
        // Few are free then.
        grants.extend(claim_all(&source, COUNT - 10).await);
        let (event, found) = if dialect == Dialect::ZuulExecutor {
            (within("the cancel", source.next_event()).await, None)
        } else {
            let id = back.run.task.clone();
            let handing_back = async {
                let outcome = Outcome::Exception(ExceptionReason::WorkerShutdown);
                back.claim.report(outcome).await.expect("it is accepted");
                drop(back);
            };
            let both = async { tokio::join!(source.next_event(), claim_all(&source, 1), handing_back) };
            let (event, found, ()) = within("the cancel and the hand-back", both).await;
            (event, Some((id, found)))
        };
        assert!(matches!(&event, SourceEvent::CancelRequested(run) if *run == canceled.run), "{dialect:?}: {event:?}");
        if let Some((id, found)) = found {
            assert_eq!(found[0].run.task, id, "{dialect:?}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_that_watches_no_more_finds_a_task_of_any_name_and_precedence() {
    let Some(tree) = Tree::new().await else { return };
    let (queue, session) = (tree.queue(Dialect::Native), &tree.session);
    let mut ids = submit(&tree, Dialect::Native, 0..100).await;
    let source = ZooKeeperSource::new(tree.source(Dialect::Native));
    let mut grants = claim_all(&source, 8).await;
    for precedence in [-5, 0, 20_000_000_000] {
        let task = Submission { precedence, ..submission(Dialect::Native, json!({})) };
        ids.push(queue.add(session, &task).await.expect("it is added"));
    }
    let own = queue.path("requests", "of-another-program");
    session.create(&own, b"{\"payload\":{}}", CreateMode::Persistent).await.expect("it is created");
    ids.push("of-another-program".to_owned());
    grants.extend(claim_all(&source, ids.len() - grants.len()).await);
    let held: BTreeSet<&str> = grants.iter().map(|grant| grant.run.task.as_str()).collect();
    assert_eq!(held, ids.iter().map(String::as_str).collect());
}
