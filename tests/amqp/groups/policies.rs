//! Policies and counts of the management interface.

use std::collections::BTreeMap;

use journeyman::client::{RpcClient, RpcRequest};
use journeyman_platform::amqp::lapin::options::BasicGetOptions;
use serde_json::{Value, json};

use super::{Pool, READY, assert_includes};
use crate::amqp::support::{Kind, TEST_TIMEOUT, shared_uri, within};
use crate::support::broker::{api, in_vhost, management};

/// The part of a configuration that names the interface.
fn by_management() -> String {
    format!("[amqp]\nmanagement_url = \"{}\"\n", management())
}

async fn get(path: &str) -> Value {
    api(reqwest::Method::GET, path, None).await
}

impl Pool {
    /// Takes its policies away.
    async fn without_policies(&self) {
        for name in ["queues", "xchg"] {
            api(reqwest::Method::DELETE, &format!("policies/%2F/{}-req-{name}", self.name), None).await;
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn policies_apply_to_existing_queues_of_their_pool() {
    let Some(pool) = Pool::new().await else { return };
    let queue = format!("{}-req-xchg", pool.name);
    let first = pool.active(&by_management()).await;
    let policy = get(&format!("policies/%2F/{}-req-queues", pool.name)).await;
    assert_includes(&policy, &json!({ "apply-to": "queues", "pattern": format!("^{}\\-req\\-", pool.name) }));
    let exchange = get(&format!("policies/%2F/{queue}")).await;
    let pattern = format!("^{}\\-req\\-xchg$", pool.name);
    assert_includes(&exchange, &json!({ "apply-to": "exchanges", "pattern": pattern }));
    // One whose key makes its queue's name that of the exchange goes by the policy of queues.
    pool.ask("xchg", "1").await;
    pool.until(&queue, Some((1, 0))).await;
    first.drained().await;
    // Another time holds for a queue that is there, though not for what waits in it.
    let second = pool.active(&format!("message_ttl = \"200ms\"\n{}", by_management())).await;
    assert!(pool.client.get(&queue).await.is_some(), "the first one waits without end");
    pool.ask("xchg", "2").await;
    assert_eq!(pool.rejected("2").await, "expired");
    // The interface tells of it once the queue was counted anew.
    let dead = format!("{}-deadletter-xchg", pool.name);
    let whole = json!({"message-ttl": 200, "dead-letter-exchange": dead});
    let told = async { while get(&format!("queues/%2F/{queue}")).await["effective_policy_definition"] != whole {} };
    within("the whole policy", told).await;
    second.drained().await;
    pool.without_policies().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_queue_of_another_controller_is_adopted_and_gets_the_policy() {
    let Some(pool) = Pool::new().await else { return };
    // The known controller has it so: no arguments.
    let queue = format!("{}-req-k", pool.name);
    pool.client.declare(Kind::Transient, &queue).await;
    let controller = pool.active(&format!("message_ttl = \"200ms\"\n{}", by_management())).await;
    pool.ask("k", "1").await;
    assert_eq!(pool.rejected("1").await, "expired");
    controller.drained().await;
    pool.without_policies().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn c3_every_queue_says_that_it_is_a_classic_one() {
    let Some(shared) = shared_uri() else { return };
    let vhost = format!("quorum-{}", uuid::Uuid::new_v4().simple());
    let path = format!("vhosts/{vhost}");
    // An older broker has no such default.
    api(reqwest::Method::PUT, &path, Some(json!({ "default_queue_type": "quorum" }))).await;
    let pool = Pool::at(in_vhost(&shared, &vhost)).await;
    let controller = pool.active("").await;
    // As a bridge calls. Its reply queue is there as long as the call.
    let client = RpcClient::new(pool.client.broker.clone(), "a caller");
    let (exchange, routing_key) = (format!("{}-req-xchg", pool.name), "a".to_owned());
    let call = RpcRequest { exchange, routing_key, timeout: TEST_TIMEOUT, ..RpcRequest::default() };
    let calling = tokio::spawn(async move { client.call_once(&call, "journeyman-bridge-a").await });
    pool.until(&format!("{}-req-a", pool.name), Some((1, 0))).await;
    let queues = get(&format!("queues/{vhost}?disable_stats=true")).await;
    let types = queues.as_array().expect("a list").iter().map(|one| {
        let name = one["name"].as_str().expect("a name").to_owned();
        (name, json!([one["type"], one["arguments"]["x-queue-type"]]))
    });
    let types: BTreeMap<String, Value> = types.collect();
    assert!(types.len() >= 7 && types.contains_key("journeyman-bridge-a"), "{types:?}");
    assert!(types.values().all(|one| *one == json!(["classic", "classic"])), "{types:?}");
    calling.abort();
    controller.drained().await;
    api(reqwest::Method::DELETE, &path, None).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_management_interface_without_a_reply_delays_no_request() {
    let Some(pool) = Pool::new().await else { return };
    // The connection is never accepted.
    let silent = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let silent = silent.local_addr().expect("its address").to_string();
    for (id, address, error) in [
        ("1", "127.0.0.1:1", "cannot apply policies, so TTL, length and limits hold for new queues only"),
        ("2", silent.as_str(), "no reply from the management interface within 2s"),
    ] {
        let management = format!("message_ttl = \"200ms\"\n[amqp]\nmanagement_url = \"http://{address}\"\n");
        let mut controller = pool.controller(&management);
        controller.says(error).await;
        controller.says(READY).await;
        pool.ask("k", id).await;
        assert_eq!(pool.rejected(id).await, "expired");
        controller.drained().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn deleted_policies_are_applied_again() {
    let Some(pool) = Pool::new().await else { return };
    let controller = pool.active(&by_management()).await;
    pool.without_policies().await;
    within("both exist again", async {
        let exists = |policies: &Value, name| {
            let wanted = format!("{}-req-{name}", pool.name);
            policies.as_array().is_some_and(|list| list.iter().any(|policy| policy["name"] == wanted.as_str()))
        };
        loop {
            let policies = get("policies/%2F").await;
            if ["queues", "xchg"].iter().all(|name| exists(&policies, name)) {
                return;
            }
        }
    })
    .await;
    controller.drained().await;
    pool.without_policies().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn b11_requests_that_workers_hold_keep_their_group() {
    let Some(pool) = Pool::new().await else { return };
    let delays = "unbind_delay = \"14s\"\nstop_delay = \"1s\"\nqueue_type = \"quorum\"\n";
    let controller = pool.active(&format!("{delays}{}", by_management())).await;
    pool.ask("k", "1").await;
    // A foreign worker that reports nothing and is slow.
    let queue = format!("{}-req-k", pool.name);
    pool.until(&queue, Some((1, 0))).await;
    let connection = pool.client.broker.connect("worker").await.expect("the broker lets us in");
    let channel = connection.create_channel().await.expect("a channel");
    let options = BasicGetOptions { no_ack: false };
    let held = channel.basic_get(queue.as_str().into(), options).await.expect("it can be taken").expect("a request");
    let seen = pool.sees("it is counted", |seen| seen["groups"][0]["unacknowledged"] == 1).await;
    let since = seen["seconds_in_role"].as_f64().expect("a time");
    // For longer than it would be there if nothing were held; late is no matter.
    let later = |seen: &Value| seen["seconds_in_role"].as_f64().is_some_and(|seconds| seconds > since + 17.0);
    let seen = pool.sees("time has passed", later).await;
    assert_eq!((&seen["groups"][0]["unacknowledged"], &seen["groups"][0]["ready"]), (&1.into(), &0.into()), "{seen}");
    assert!(pool.depth(&queue).await.is_some(), "its queue is there");
    held.delivery.acker.ack(Default::default()).await.expect("it is acknowledged");
    pool.until(&queue, None).await;
    assert_eq!(pool.sees("it is over", |_| true).await["counters"]["broker_disconnects"], 0);
    controller.drained().await;
    pool.without_policies().await;
}
