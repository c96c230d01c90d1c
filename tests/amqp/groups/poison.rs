//! Requests that kill their workers: moved to the poison queue, listed, requeued, discarded.

use std::collections::BTreeSet;

use journeyman_platform::amqp;
use journeyman_platform::amqp::lapin::BasicProperties;
use journeyman_platform::amqp::lapin::types::AMQPValue;
use rustix::process::Signal;
use serde_json::{Value, json};

use super::{Pool, assert_includes, fails, run, succeeds};
use crate::amqp::support::{Client, within};
use crate::support::gremlin::{Gremlin, answer};

impl Pool {
    fn poison(&self) -> String {
        format!("{}-poison", self.name)
    }

    /// What was put aside, once there is so much of it.
    async fn put_aside(&self, count: usize) -> Vec<Value> {
        within(&format!("{count} are put aside"), async {
            loop {
                let seen: Value =
                    serde_json::from_str(&succeeds(&self.socket(), &["poison", "list", "-o", "json"]).await)
                        .expect("JSON");
                let requests = seen[&self.name]["requests"].as_array().expect("a list").clone();
                if requests.len() == count {
                    return requests;
                }
            }
        })
        .await
    }

    /// Puts requests into the inventory, by their correlation ids.
    async fn fill(&self, key: &str, ids: &BTreeSet<String>) {
        for id in ids {
            let table = amqp::header_table([
                ("x-journeyman-poison-id", AMQPValue::LongString(id.as_str().into())),
                ("x-journeyman-key", AMQPValue::LongString(key.into())),
                ("x-journeyman-attempts", AMQPValue::LongInt(7)),
                ("x-rpc-path", AMQPValue::LongString("/echo".into())),
            ]);
            let properties = BasicProperties::default().with_correlation_id(id.as_str().into()).with_headers(table);
            assert!(self.client.publish_to(&self.poison(), properties, b"1").await);
        }
    }

    /// Takes everything out of a queue, by correlation ids.
    async fn empty(&self, queue: &str) -> BTreeSet<String> {
        let mut ids = BTreeSet::new();
        while let Some(delivery) = self.client.get(queue).await {
            ids.extend(delivery.properties.correlation_id().as_ref().map(ToString::to_string));
        }
        ids
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn b04_a_poison_request_shows_the_worker_that_exited_and_can_be_requeued() {
    let Some(pool) = Pool::new().await else { return };
    let mended = pool.folder.path().join("mended");
    let program = format!(
        "#!/bin/sh\n[ -e {} ] || kill -9 $PPID\nprintf '{{\"type\":\"answer\",\"json\":\"mended\"}}\\n' >&3\n",
        mended.display()
    );
    let mut controller =
        pool.active(&format!("queue_type = \"quorum\"\ndelivery_limit = 1\n{}", pool.workers(&program))).await;
    pool.ask("a/b", "1").await;
    assert_eq!(pool.rejected("1").await, "delivery_limit");
    let seen = pool.put_aside(1).await.remove(0);
    let expected = json!({
        "key": "a/b", "reason": "delivery_limit", "attempts": 2, "worker_exit": "signal: 9 (SIGKILL)", "body_bytes": 1,
        "headers": { "x-rpc-path": "/echo" },
    });
    assert_includes(&seen, &expected);
    let worker = seen["worker"].as_str().expect("a worker");
    let log = std::fs::read_to_string(pool.records().join(format!("{worker}.log"))).expect("its log");
    let last =
        seen["worker_log"].as_array().and_then(|lines| lines.last()).and_then(Value::as_str).expect("its last words");
    assert_eq!(log.lines().last(), Some(last));
    let id = seen["id"].as_str().expect("a name");
    let shown = succeeds(&pool.socket(), &["poison", "show", id]).await;
    assert!(shown.contains(worker) && shown.contains(last) && shown.contains("1 bytes"), "{shown}");
    let table = succeeds(&pool.socket(), &["poison", "list", "--pool", &pool.name]).await;
    assert!(table.contains(id) && table.contains("a/b"), "{table}");
    // It was looked at three times, and is there as it was.
    pool.until(&pool.poison(), Some((1, 0))).await;
    std::fs::write(&mended, "").expect("it is written");
    assert_eq!(succeeds(&pool.socket(), &["poison", "requeue", id]).await, "1 requeued\n");
    let answer = pool.client.answer("1").await;
    assert_eq!((answer.status(), answer.json()), ("ok", "mended".into()));
    assert_eq!(pool.put_aside(0).await, Vec::<Value>::new());
    controller.says("poison request requeued").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_that_is_put_aside_is_told_to_a_notifier() {
    let Some(pool) = Pool::new().await else { return };
    let accepted = answer(202, "application/json", r#"{"accepted":1,"duplicates":0}"#);
    let notifier = Gremlin::start(|_| vec![accepted]).await;
    let token = pool.folder.path().join("notifier-token");
    std::fs::write(&token, "token-of-the-test").expect("it is written");
    let notify = format!("[notify]\nurl = \"{}\"\ntoken_file = \"{}\"\n", notifier.url(), token.display());
    let controller = pool.active(&format!("{}\n{notify}", pool.killed_workers())).await;
    pool.ask("a/b", "1").await;
    assert_eq!(pool.rejected("1").await, "delivery_limit");
    within("an event", notifier.wait_asked(|asked| !asked.is_empty())).await;
    let event = notifier.asked()[0].json()[0].clone();
    let id = pool.put_aside(1).await[0]["id"].as_str().expect("an id").to_owned();
    let expected = json!({
        "source": "controller", "type": "request.put-aside", "key": format!("{}/a/b", pool.name),
        "id": format!("{}/{id}", pool.name),
        "data": { "pool": pool.name, "key": "a/b", "id": id, "reason": "delivery_limit" },
    });
    assert_includes(&event, &expected);
    assert!(!controller.log().contains("token-of-the-test"));
}

#[tokio::test(flavor = "multi_thread")]
async fn single_poison_requests_are_requeued_and_discarded_and_failures_are_named() {
    let Some(pool) = Pool::new().await else { return };
    let _controller = pool.active("").await;
    let ids: BTreeSet<String> = (0..5).map(|id| format!("r{id}")).collect();
    pool.fill("k", &ids).await;
    let odd = BasicProperties::default().with_correlation_id("odd".into());
    assert!(pool.client.publish_to(&pool.poison(), odd, b"1").await);
    let seen = pool.put_aside(6).await;
    assert_eq!(seen[5]["key"], Value::Null, "its key is unknown");
    let odd = seen[5]["id"].as_str().expect("a name");
    let text = fails(&pool.socket(), &["poison", "requeue", "r1", "missing", odd]).await;
    assert!(text.starts_with("1 requeued\n") && text.contains("missing: not requeued: no such"), "{text}");
    assert!(text.contains(&format!("{odd}: not requeued: its key is unknown")), "{text}");
    assert_eq!(succeeds(&pool.socket(), &["poison", "discard", "r3"]).await, "1 discarded\n");
    let left: Vec<Value> = pool.put_aside(4).await.into_iter().map(|entry| entry["id"].clone()).collect();
    assert_eq!(left, ["r0", "r2", "r4", odd], "in their places");
    let queue = format!("{}-req-k", pool.name);
    pool.until(&queue, Some((1, 0))).await;
    let back = pool.client.get(&queue).await.expect("a request");
    let table = back.properties.headers().clone().expect("headers");
    assert_eq!(table.inner().get("x-journeyman-attempts"), None, "its count is a new one");
    assert_eq!(succeeds(&pool.socket(), &["poison", "discard", "--all"]).await, "4 discarded\n");
    assert!(succeeds(&pool.socket(), &["poison", "list"]).await.contains("is empty"));
    fails(&pool.socket(), &["poison", "show", "r3"]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_controller_killed_during_a_requeue_loses_no_poison_request() {
    const COUNT: usize = 2_000;
    let Some(pool) = Pool::new().await else { return };
    let controller = pool.active("").await;
    pool.ask("k", "first").await;
    let queue = format!("{}-req-k", pool.name);
    pool.until(&queue, Some((1, 0))).await;
    let ids: BTreeSet<String> = (0..COUNT).map(|id| format!("r{id}")).collect();
    pool.fill("k", &ids).await;
    let socket = pool.socket();
    let asked = tokio::spawn(async move { run(&socket, &["poison", "requeue", "--all"]).await });
    let begun = async { while pool.depth(&queue).await.is_none_or(|(ready, _)| ready < 2) {} };
    within("one is at its new place", begun).await;
    controller.signal(Signal::KILL);
    drop(controller);
    within("who asked is told", asked).await.expect("it ends");
    let mut seen = BTreeSet::new();
    within("all are somewhere", async {
        while !seen.is_superset(&ids) {
            // What it had in hand is back when the broker has seen that it is gone.
            seen.extend(pool.empty(&queue).await);
            seen.extend(pool.empty(&pool.poison()).await);
        }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn c5_a_requeued_request_that_expires_is_in_the_inventory_again() {
    let Some(pool) = Pool::new().await else { return };
    let _controller = pool.active("message_ttl = \"200ms\"\n").await;
    pool.fill("k", &BTreeSet::from(["r".to_owned()])).await;
    let before = pool.put_aside(1).await.remove(0);
    assert_eq!(succeeds(&pool.socket(), &["poison", "requeue", "--all"]).await, "1 requeued\n");
    let reason = async {
        loop {
            let seen = pool.put_aside(1).await.remove(0);
            if seen["id"] != before["id"] {
                return seen;
            }
        }
    };
    let seen = within("it is back", reason).await;
    assert_includes(&seen, &json!({ "key": "k", "reason": "expired", "poison_count": 2 }));
    pool.until(&format!("{}-deadletter", pool.name), Some((0, 1))).await;
}

/// Its workers restart four times, with increasing delays.
#[tokio::test(flavor = "multi_thread")]
async fn a2_of_the_requests_that_a_worker_held_together_only_the_one_that_kills_it_is_given_up() {
    let Some(pool) = Pool::new().await else { return };
    let workers = pool.workers(
        "#!/bin/sh\nif grep -q /kill; then kill -9 $PPID; fi\nsleep 0.2\nprintf '{\"type\":\"answer\",\"json\":1}\\n' >&3\n",
    );
    let capacity = "[pool.env]\nJOURNEYMAN__WORKER__CAPACITY = \"8\"\n".replace("pool", &format!("pool.{}", pool.name));
    let controller = pool.active(&format!("queue_type = \"quorum\"\nconcurrency = 8\n{workers}{capacity}")).await;
    assert!(pool.publish("a", Client::properties("poison", "/kill")).await);
    for number in 0..30 {
        pool.ask("a", &number.to_string()).await;
    }
    for number in 0..30 {
        let answer = pool.client.answer(&number.to_string()).await;
        assert_eq!(answer.status(), "ok", "{number}: {:?}\n{}", answer.json(), controller.log());
    }
    assert_eq!(pool.client.answer("poison").await.status(), "core_error");
}
