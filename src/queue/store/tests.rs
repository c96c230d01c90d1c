use serde_json::json;
use tokio::runtime::Handle;

use super::super::clock::Clock;
use super::super::definition;
use super::super::rules::Worker;
use super::*;

fn knobs(clock: Clock) -> Knobs {
    let second = Duration::from_secs(1);
    Knobs {
        claim_timeout: 20 * second,
        claim_delay: second,
        deadline_delay: second,
        clock,
        artifacts: PathBuf::from("/nonexistent"),
    }
}

fn store() -> Store {
    let opened = open(None).unwrap();
    opened.start(knobs(Clock::manual(1_795_256_444_549)), Handle::current()).unwrap().0
}

async fn create(store: &Store, task: &str) {
    let body = json!({
        "taskQueueId": "p/w", "created": "2026-11-21T10:20:44.549Z", "deadline": "2026-11-21T11:20:44.549Z",
        "payload": {}, "metadata": {"name": "n", "description": "d", "owner": "o", "source": "s"},
    });
    let task = task.to_owned();
    let made = move |room: &mut Room<'_>| {
        let made = definition::draft(&task, body.to_string().as_bytes(), "")?.finish(room.now)?;
        room.create(made)
    };
    store.call(made).await.unwrap();
}

fn worker() -> Worker {
    Worker { group: "wg".to_owned(), id: "w1".to_owned() }
}

async fn found(store: &Store) -> Grants {
    let answer = store.wait_for_work("p/w".to_owned(), worker(), 8).await.unwrap();
    match answer.await.unwrap().unwrap() {
        Found::Work(grants) => grants,
        Found::Quarantined => panic!("nobody is quarantined"),
    }
}

async fn pending(store: &Store) -> usize {
    store.call(|room| Ok(room.count_pending("p/w"))).await.unwrap()
}

#[tokio::test]
async fn claims_that_nobody_took_go_back_to_their_queue() {
    let store = store();
    create(&store, "XJOIQcqPRgykTZR_00-b1w").await;
    let grants = found(&store).await;
    assert_eq!(pending(&store).await, 0);
    drop(grants);
    store.tick().await;
    assert_eq!(pending(&store).await, 1);
    let given = found(&store).await.take();
    assert_eq!((given.len(), given[0].task.runs.len()), (1, 1));
    store.tick().await;
    assert_eq!(pending(&store).await, 0);
}

#[tokio::test]
async fn claims_for_a_waiter_who_has_left_go_to_the_next() {
    let store = store();
    let gone = store.wait_for_work("p/w".to_owned(), worker(), 8).await.unwrap();
    store.tick().await;
    drop(gone);
    let next = store.wait_for_work("p/w".to_owned(), worker(), 8).await.unwrap();
    create(&store, "XJOIQcqPRgykTZR_00-b1w").await;
    let Found::Work(grants) = next.await.unwrap().unwrap() else { panic!("nobody is quarantined") };
    assert_eq!(grants.take().len(), 1);
}

#[tokio::test]
async fn a_job_that_fails_undoes_what_it_did_and_costs_nobody_else() {
    let store = store();
    let fails = store.call(|room| {
        room.quarantine("p/w", &worker(), room.now.plus(Duration::from_secs(60)))?;
        Err::<(), _>(Fault::conflict("no").into())
    });
    let works = create(&store, "XJOIQcqPRgykTZR_00-b1w");
    let (failed, ()) = tokio::join!(fails, works);
    assert_eq!(failed.unwrap_err().message, "no");
    assert_eq!(found(&store).await.take().len(), 1);
}

#[tokio::test]
async fn a_statement_that_the_file_refuses_is_an_incident_of_one_call() {
    let store = store();
    let broken = store.call(|room| {
        room.conn.execute("INSERT INTO tasks (task_id) VALUES ('half a row')", [])?;
        Ok(())
    });
    let works = create(&store, "XJOIQcqPRgykTZR_00-b1w");
    let (broken, ()) = tokio::join!(broken, works);
    assert!(broken.unwrap_err().message.contains("incidentId"));
    assert_eq!(pending(&store).await, 1);
}

#[tokio::test]
async fn a_commit_that_fails_refuses_its_calls_and_leaves_memory_as_the_file_is() {
    let store = store();
    create(&store, "XJOIQcqPRgykTZR_00-b1w").await;
    // A deferred constraint is found broken by the commit alone.
    let poison = |room: &mut Room<'_>| {
        room.conn.execute_batch(
            "PRAGMA defer_foreign_keys = 1;
             CREATE TABLE a (id INTEGER PRIMARY KEY);
             CREATE TABLE b (a INTEGER REFERENCES a (id) DEFERRABLE INITIALLY DEFERRED);
             INSERT INTO b VALUES (7);",
        )?;
        let queue = room.claim_work("p/w", &worker(), 1)?;
        assert_eq!(queue.len(), 1);
        Ok(())
    };
    let enforced =
        store.call(|room| Ok(room.conn.pragma_query_value(None, "foreign_keys", |row| row.get::<_, bool>(0))?));
    assert!(enforced.await.unwrap(), "the constraint below would not be looked at");
    let refused = store.call(poison).await;
    assert!(refused.unwrap_err().message.contains("incidentId"));
    assert_eq!(pending(&store).await, 1);
    assert_eq!(found(&store).await.take().len(), 1);
}
