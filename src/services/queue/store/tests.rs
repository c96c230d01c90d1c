use std::sync::Arc;

use serde_json::json;
use tokio::runtime::Handle;

use super::super::clock::{QueueClock, UnixMillis};
use super::super::task_definition;
use super::super::{Config, Db};
use super::artifacts::Artifact;
use super::tx::{PageRequest, TaskFilter, Tx};
use super::*;
use journeyman_domain::limits::QUEUE_WORKER_TASKS_MAX;
use journeyman_platform::sqlite::{Done, Job, RunningStore, StoreStatus, erase, job, restore};

fn config(clock: QueueClock) -> Arc<Config> {
    Arc::new(Config { clock, ..Config::new(Db::Memory, "/nonexistent".into()) })
}

fn started() -> RunningStore<QueueStore> {
    let owner = QueueStore::new(config(QueueClock::manual(NOW)));
    Database::open(&Db::Memory, &SCHEMA).unwrap().start(owner, Handle::current()).unwrap()
}

fn store() -> Store {
    started().store
}

const NOW: i64 = 1_795_256_444_549;

async fn create(store: &Store, task: &str) {
    let task = task.to_owned();
    store.execute(move |tx| create_in(tx, &task)).await.unwrap();
}

fn create_in(tx: &mut Tx<'_>, task: &str) -> Result<(), StoreError> {
    let body = json!({
        "taskQueueId": "p/w", "created": "2026-11-21T10:20:44.549Z", "deadline": "2026-11-21T11:20:44.549Z",
        "payload": {}, "metadata": {"name": "n", "description": "d", "owner": "o", "source": "s"},
    });
    let made = task_definition::parse_create_task(task, body.to_string().as_bytes())?;
    tx.create_task(made).map(drop)
}

fn writer(clock: &QueueClock) -> Writer {
    Database::open(&Db::Memory, &SCHEMA).unwrap().into_writer(QueueStore::new(config(clock.clone())))
}

type Reply = oneshot::Receiver<Result<Done, QueueError>>;

fn request<T: Send + 'static>(
    work: impl Send + 'static + FnOnce(&mut Tx<'_>) -> Result<T, StoreError>,
) -> (Job<QueueStore>, Reply) {
    let (reply, answer) = oneshot::channel();
    (job(erase::<QueueStore, T>(work), reply), answer)
}

/// A batch of one job, on the test's own thread.
fn run<T: Send + 'static>(
    writer: &mut Writer,
    work: impl Send + 'static + FnOnce(&mut Tx<'_>) -> Result<T, StoreError>,
) -> Result<T, QueueError> {
    let (job, mut answer) = request(work);
    writer.run_batch(vec![job]).unwrap();
    answer.try_recv().unwrap().map(restore)
}

fn worker() -> WorkerIdentity {
    WorkerIdentity { group: "wg".to_owned(), id: "w1".to_owned() }
}

async fn found(store: &Store) -> Vec<ClaimedRun> {
    let answer = wait_for_work(store, "p/w".to_owned(), worker(), 8, CancellationToken::new()).await.unwrap();
    answer.await.unwrap()
}

async fn pending(store: &Store) -> u32 {
    store.execute(|tx| tx.count_pending("p/w")).await.unwrap()
}

#[tokio::test]
async fn closed_and_canceled_waiters_get_no_claims() {
    let store = store();
    let cancel = CancellationToken::new();
    let wait = |cancel| wait_for_work(&store, "p/w".to_owned(), worker(), 8, cancel);
    let closed = wait(CancellationToken::new()).await.unwrap();
    let mut canceled = wait(cancel.clone()).await.unwrap();
    tick(&store).await;
    drop(closed);
    cancel.cancel();
    let next = wait(CancellationToken::new()).await.unwrap();
    create(&store, "XJOIQcqPRgykTZR_00-b1w").await;
    assert_eq!(next.await.unwrap().len(), 1);
    assert!(canceled.try_recv().is_err());
}

#[tokio::test]
async fn a_failed_job_is_rolled_back_alone() {
    let store = store();
    let fails = store.execute(|tx| {
        create_in(tx, "D3Ff2-QbREOJq4OwRPbddA")?;
        Err::<(), _>(QueueError::conflict("no").into())
    });
    let works = create(&store, "XJOIQcqPRgykTZR_00-b1w");
    let (failed, ()) = tokio::join!(fails, works);
    assert_eq!(failed.unwrap_err().message, "no");
    assert_eq!(found(&store).await.len(), 1);
}

#[tokio::test]
async fn a_failed_statement_fails_one_call() {
    let store = store();
    let broken = store.execute(|tx| {
        tx.conn.execute("INSERT INTO tasks (task_id) VALUES ('half a row')", [])?;
        Ok(())
    });
    let works = create(&store, "XJOIQcqPRgykTZR_00-b1w");
    let (broken, ()) = tokio::join!(broken, works);
    assert!(broken.unwrap_err().message.contains("incidentId"));
    assert_eq!(pending(&store).await, 1);
}

#[tokio::test]
async fn a_failed_commit_fails_its_calls_and_changes_nothing() {
    let store = store();
    create(&store, "XJOIQcqPRgykTZR_00-b1w").await;
    // A deferred constraint is found broken by the commit alone.
    let poison = |tx: &mut Tx<'_>| {
        tx.conn.execute_batch(
            "PRAGMA defer_foreign_keys = 1;
             CREATE TABLE a (id INTEGER PRIMARY KEY);
             CREATE TABLE b (a INTEGER REFERENCES a (id) DEFERRABLE INITIALLY DEFERRED);
             INSERT INTO b VALUES (7);",
        )?;
        let queue = tx.claim_work("p/w", &worker(), 1)?;
        assert_eq!(queue.len(), 1);
        Ok(())
    };
    let enforced =
        store.execute(|tx| Ok(tx.conn.pragma_query_value(None, "foreign_keys", |row| row.get::<_, bool>(0))?));
    assert!(enforced.await.unwrap(), "the constraint below would not be looked at");
    let refused = store.execute(poison).await;
    assert!(refused.unwrap_err().message.contains("incidentId"));
    assert_eq!(pending(&store).await, 1);
    assert_eq!(found(&store).await.len(), 1);
}

#[tokio::test]
async fn a_panic_of_the_thread_drops_the_status() {
    let RunningStore { store, mut status } = started();
    let refused = store.execute(|_| -> Result<(), StoreError> { panic!("a error of ours, for this test") }).await;
    assert!(refused.unwrap_err().message.contains("incidentId"));
    assert!(
        status.wait_for(|status| *status != StoreStatus::Running).await.is_err(),
        "the sender went without a last word"
    );
}

#[test]
fn a_fatal_error_ends_the_thread_and_fails_its_whole_batch() {
    let mut writer = writer(&QueueClock::manual(NOW));
    let corrupt = || rusqlite::Error::SqliteFailure(rusqlite::ffi::Error::new(rusqlite::ffi::SQLITE_CORRUPT), None);
    let (works, mut answer) = request(|tx| create_in(tx, "XJOIQcqPRgykTZR_00-b1w"));
    let (fails, mut refusal) = request(move |_| Err::<(), _>(corrupt().into()));
    assert_eq!(writer.run_batch(vec![works, fails]).unwrap_err(), corrupt());
    assert!(refusal.try_recv().unwrap().is_err());
    assert!(answer.try_recv().unwrap().is_err(), "it was not committed");
    assert_eq!(run(&mut writer, |tx| tx.count_pending("p/w")).unwrap(), 0);
}

#[tokio::test]
async fn a_full_disk_fails_writes_until_there_is_space() {
    let store = store();
    create(&store, "XJOIQcqPRgykTZR_00-b1w").await;
    let limit = |pages: &'static str| {
        store.execute(move |tx| Ok(tx.conn.execute_batch(&format!("PRAGMA max_page_count = {pages}"))?))
    };
    limit("1").await.unwrap();
    // The artifacts table is empty: a long name makes it grow beyond its first page.
    let artifact = Artifact {
        name: "x".repeat(9_000),
        storage: "s3".to_owned(),
        content_type: "text/plain".to_owned(),
        expires: UnixMillis(NOW),
        details: json!({}),
    };
    let write = move |tx: &mut Tx<'_>| tx.put_artifact("XJOIQcqPRgykTZR_00-b1w", 0, artifact.clone()).map(drop);
    assert!(store.execute(write.clone()).await.unwrap_err().message.contains("disk full"));
    assert_eq!(pending(&store).await, 1);
    limit("1073741823").await.unwrap();
    store.execute(write).await.unwrap();
    assert_eq!(found(&store).await.len(), 1);
}

#[tokio::test]
async fn a_worker_with_a_claim_is_seen_behind_a_backlog_and_queues_have_the_times_of_their_latest_task() {
    let store = store();
    create(&store, new_task_id().as_str()).await;
    assert_eq!(found(&store).await.len(), 1);
    let all = store.execute(|tx| {
        for _ in 0..QUEUE_WORKER_TASKS_MAX {
            create_in(tx, new_task_id().as_str())?;
        }
        let page = PageRequest { limit: 10, offset: 0 };
        Ok((tx.list_workers("p/w", page)?.items, tx.list_task_queues(page)?.items))
    });
    let (workers, queues) = all.await.unwrap();
    assert_eq!(workers.iter().map(|seen| seen.worker.id.as_str()).collect::<Vec<_>>(), ["w1"]);
    let [queue] = queues.as_slice() else { panic!("one queue") };
    assert_eq!(
        (queue.name.as_str(), queue.last_created.0 > 0, queue.expires > queue.last_created),
        ("p/w", true, true)
    );
}

#[test]
fn no_search_by_a_rare_state_goes_over_all_tasks() {
    const STATES: [&str; 4] = ["pending", "running", "failed", "exception"];
    let database = Database::open(&Db::Memory, &SCHEMA).unwrap();
    for (queue, state) in ["", "p/w"].into_iter().flat_map(|queue| STATES.map(|state| (queue, state))) {
        let [queue, state] = [queue, state].map(str::to_owned);
        let condition = TaskFilter { queue, state, name: String::new(), since: UnixMillis(0) }.condition();
        let explain = format!("EXPLAIN QUERY PLAN SELECT * FROM tasks WHERE {condition} LIMIT ?1 OFFSET ?2");
        let steps: Vec<String> = database
            .run(|conn| {
                let mut steps = conn.prepare(&explain)?;
                let nothing = [const { rusqlite::types::Null }; 6];
                steps.query_map(nothing, |row| row.get("detail"))?.collect()
            })
            .unwrap();
        assert!(!steps.iter().any(|step| step == "SCAN tasks"), "{condition}: {steps:?}");
    }
}
