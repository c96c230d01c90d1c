//! The page of a source, as a worker serves it.

use std::sync::Arc;

use journeyman::console::app::Console;
use journeyman::console::http::SnapshotFn;
use journeyman::console::http::worker::serve;
use journeyman::control::WorkerStatusReply;
use journeyman::source::Source;
use journeyman::source::zookeeper::{Dialect, ZooKeeperSource};
use journeyman_platform::http::{Exposure, HttpListener};
use journeyman_platform::zookeeper::CreateMode;
use journeyman_platform::zookeeper::semaphore::{Holder, Places, Semaphore};
use journeyman_platform::zookeeper::submit::Submission;
use serde_json::{Value, json};

use crate::support::http::get;
use crate::zookeeper::support::{Tree, never_ends, start};

fn table<'a>(found: &'a Value, source: &str, name: &str) -> &'a Value {
    let tables = found[source]["tables"].as_array().unwrap_or_else(|| panic!("no tables: {found}"));
    &tables.iter().find(|table| table["name"] == name).unwrap_or_else(|| panic!("no {name}: {found}"))["rows"]
}

#[tokio::test(flavor = "multi_thread")]
async fn a_source_shows_components_queues_locks_and_semaphores() {
    for dialect in [Dialect::ZuulExecutor, Dialect::Native] {
        let Some(tree) = Tree::with_pipeline().await else { return };
        let (session, queue) = (&tree.session, tree.queue(dialect));
        let (act, mut started) = never_ends();
        let mut worker = start(tree.source(dialect), act);
        let submission =
            Submission { dialect, payload: json!({}), precedence: 200, fields: serde_json::Map::new(), waits: false };
        let id = queue.add(session, &submission).await.expect("it is added");
        started.recv().await.expect("it runs");
        // The worker has one slot.
        queue.add(session, &submission).await.expect("it is added");
        let semaphore = Semaphore { name: "db".to_owned(), path: "/zuul/semaphores/t/db".to_owned(), max: 1 };
        let holder = Holder { buildset_path: "/zuul/tenant/t/x".to_owned(), job_name: "<deploy>".to_owned() };
        let places = Places { semaphores: vec![semaphore], holder };
        assert!(session.acquire_semaphores(&places).await.expect("it is answered"));
        if dialect == Dialect::ZuulExecutor {
            let contender = queue.path("locks", &format!("{id}/waits__lock__"));
            session.create(&contender, b"", CreateMode::EphemeralSequential).await.expect("it waits");
        }
        let idle: Arc<dyn Source> = Arc::new(ZooKeeperSource::new(tree.source(dialect)));
        worker.sources.push(("idle".to_owned(), idle));
        let listener = HttpListener::listen("127.0.0.1:0".parse().expect("an address"), Exposure::Loopback).await;
        let listener = listener.expect("a port");
        let address = listener.address().expect("an address");
        let snapshot: Arc<SnapshotFn<WorkerStatusReply>> = Arc::new(|| Box::pin(std::future::ready(None)));
        let serving = tokio::spawn(serve(listener, snapshot, worker.sources.clone(), Console::default()));

        let json = get(address, "/sources.json").await;
        let found: Value = serde_json::from_str(&json.body).expect("JSON");
        let (queues, locks) = (table(&found, "requests", "queues"), table(&found, "requests", "locks"));
        assert_eq!(queues[0]["queue"], queue.root(), "{found}");
        assert_eq!((&queues[0]["requests"], &queues[0]["running"]), (&json!(2), &json!(1)), "{found}");
        assert!(queues[0]["oldest_waiting_seconds_ago"].is_number(), "{found}");
        assert_eq!((&locks[0]["request"], &locks[0]["holder"]), (&json!(id), &json!("test-worker")), "{found}");
        assert_eq!(locks[0]["waiting"], i32::from(dialect == Dialect::ZuulExecutor), "{found}");
        assert_eq!(table(&found, "requests", "semaphores")[0]["holders"][0]["job_name"], "<deploy>", "{found}");
        if dialect == Dialect::ZuulExecutor {
            assert_eq!(table(&found, "requests", "components")[0]["accepting_work"], true, "{found}");
        }
        assert!(found["idle"]["error"].as_str().expect("text").contains("no session"), "{found}");

        let shown = get(address, "/sources/requests").await;
        assert_eq!((json.status, shown.status), (200, 200));
        let page = shown.body;
        for text in [&id, queue.root(), "test-worker", "semaphores/t/db", "&lt;deploy&gt;"] {
            assert!(page.contains(text), "no {text}: {page}");
        }
        assert!(get(address, "/sources/idle").await.body.contains("no session"));
        assert_eq!(get(address, "/sources/none").await.status, 404);
        serving.abort();
        worker.control.abort().await;
    }
}
