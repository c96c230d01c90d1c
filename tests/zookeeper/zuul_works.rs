//! Our submitter submits, Zuul's workers work; and each cleans up after the other's dead worker.

use journeyman::source::zookeeper::Dialect;
use journeyman_platform::zookeeper::event_queue::EventQueue;
use journeyman_platform::zookeeper::janitor::Janitor;
use journeyman_platform::zookeeper::submit::Submission;
use serde_json::{Value, json};

use crate::zookeeper::support::{Tree, read_events, within};

const WORKER: &str = "zuul_worker.py";

fn submission(dialect: Dialect) -> Submission {
    let fields = [("tenant_name", "t"), ("pipeline_name", "p"), ("build_set_uuid", "b"), ("event_id", "e")];
    Submission {
        dialect,
        payload: json!({ "items": [], "zuul": { "job": "j" }, "zuul_event_id": "e" }),
        precedence: 200,
        fields: fields.map(|(key, value)| (key.to_owned(), Value::from(value))).into_iter().collect(),
        waits: true,
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn zuuls_merger_answers_our_submitter() {
    let Some(tree) = Tree::with_pipeline().await else { return };
    let queue = tree.queue(Dialect::ZuulMerger);
    let id = queue.add(&tree.session, &submission(Dialect::ZuulMerger)).await.expect("it is added");
    let Some(worker) = tree.zuul(WORKER, &["merger", "--count", "1", "--bytes", "3000000"]) else { return };
    let waiting = queue.wait_for_result(&tree.session, Dialect::ZuulMerger, &id);
    let result = within("the result", waiting).await.expect("it can be read");
    assert!(result.is_object(), "{result}");
    assert_eq!(worker.ends().await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn zuuls_executor_answers_our_submitter_by_events() {
    let Some(tree) = Tree::with_pipeline().await else { return };
    let queue = tree.queue(Dialect::ZuulExecutor);
    let id = queue.add(&tree.session, &submission(Dialect::ZuulExecutor)).await.expect("it is added");
    let Some(worker) = tree.zuul(WORKER, &["executor", "--count", "1"]) else { return };
    assert_eq!(worker.ends().await, 0);
    let events = read_events(&EventQueue::of_pipeline("t", "p"), &tree.session).await;
    let last = events.last().expect("there are events");
    assert_eq!(last.fields["event_type"], "BuildCompletedEvent");
    assert_eq!(
        (&last.fields["event_data"]["build_uuid"], &last.fields["event_data"]["data"]["result"]),
        (&json!(id), &json!("SUCCESS"))
    );
}

/// Zuul's own clean-up writes a second result in the second case, and leaves the third.
#[tokio::test(flavor = "multi_thread")]
async fn our_clean_up_ends_what_a_dead_worker_of_zuul_held() {
    for point in ["running", "result", "completed"] {
        let Some(tree) = Tree::with_pipeline().await else { return };
        let queue = tree.queue(Dialect::ZuulMerger);
        let id = queue.add(&tree.session, &submission(Dialect::ZuulMerger)).await.expect("it is added");
        let arguments = ["--session-timeout", "2", "merger", "--die-after", point];
        let Some(worker) = tree.zuul(WORKER, &arguments) else { return };
        assert_eq!(worker.ends().await, 9, "{point}");
        let mut janitor = Janitor::new(queue.clone(), Dialect::ZuulMerger);
        let cleaning = async {
            loop {
                let cleaned =
                    janitor.clean(&tree.session).await.expect("it is answered").expect("no other process cleans");
                if !cleaned.lost.is_empty() {
                    return cleaned.lost;
                }
                tokio::task::yield_now().await;
            }
        };
        assert_eq!(within("the session ends", cleaning).await, [id.as_str()], "{point}");
        let waiting = queue.wait_for_result(&tree.session, Dialect::ZuulMerger, &id);
        let result = within("a result", waiting).await.expect("it can be read");
        assert_eq!(result == json!({}), point == "running", "{point}: {result}");
        assert!(queue.read(&tree.session, &id).await.expect("it is answered").is_none(), "{point}");
    }
}
