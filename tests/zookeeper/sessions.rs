//! Lost connections and lost sessions.

use std::time::Duration;

use journeyman::source::zookeeper::Dialect;
use journeyman::zookeeper::Session;
use journeyman::zookeeper::submit::Submission;
use serde_json::json;

use crate::support::{Running, Tree, never_ends, returns, until, within};
use crate::wire::{Way, Wire};

fn task() -> Submission {
    Submission {
        dialect: Dialect::Native,
        payload: json!({ "number": 1 }),
        precedence: 200,
        fields: serde_json::Map::new(),
        waits: true,
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_task_that_is_submitted_while_the_connection_is_lost_is_found_after_it() {
    let Some(tree) = Tree::new().await else { return };
    let wire = Wire::to(&tree.connect.servers).await;
    let mut source = tree.source(Dialect::Native);
    source.connect.servers = wire.address();
    let worker = Running::start(source, returns(|payload| payload.clone()));
    let queue = tree.queue(Dialect::Native);
    for _ in 0..3 {
        let id = queue.add(&tree.session, &task()).await.expect("it is added");
        let result = queue.wait_for_result(&tree.session, Dialect::Native, &id);
        assert_eq!(within("the result", result).await.expect("it is read")["result"], json!({ "number": 1 }));
        wire.cut();
    }
    worker.drained().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_session_that_expires_ends_the_payload_and_another_worker_runs_the_task() {
    let Some(tree) = Tree::new().await else { return };
    let wire = Wire::to(&tree.connect.servers).await;
    let mut source = tree.source(Dialect::Native);
    source.connect.servers = wire.address();
    source.connect.session_timeout = Duration::from_secs(2);
    let (act, mut started) = never_ends();
    let first = Running::start(source, act);
    let queue = tree.queue(Dialect::Native);
    let id = queue.add(&tree.session, &task()).await.expect("it is added");
    started.recv().await.expect("it runs");
    wire.set(Way::Stall);
    let second = Running::start(tree.source(Dialect::Native), returns(|payload| payload.clone()));
    let result = queue.wait_for_result(&tree.session, Dialect::Native, &id);
    assert_eq!(within("the result", result).await.expect("it is read")["outcome"], "completed");
    until("the loss is counted", async || first.control.counts().sources.outcomes.lost == 1).await;
    wire.set(Way::Carry);
    second.drained().await;
    first.drained().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn tls_with_a_client_certificate() {
    let (Ok(servers), Ok(folder)) =
        (std::env::var("JOURNEYMAN_TEST_ZOOKEEPER_TLS"), std::env::var("JOURNEYMAN_TEST_ZOOKEEPER_TLS_DIR"))
    else {
        return;
    };
    let file = |name: &str| std::path::Path::new(&folder).join(name);
    let tls = journeyman::zookeeper::TlsFiles {
        ca: file("ca.pem"),
        certificate: file("client.pem"),
        key: file("client.key"),
    };
    let connect = journeyman::zookeeper::ConnectConfig {
        servers,
        chroot: Some("/tls".to_owned()),
        tls: Some(tls),
        session_timeout: Duration::from_secs(5),
    };
    let session = Session::connect(&connect).await.expect("it is connected");
    assert!(session.children("/").await.expect("it is answered").is_some());
}
