//! Answered calls survive SIGKILL: the queue runs in a child process, is killed with calls in flight, and restarts on the
//! same database.

use std::io::{BufRead as _, BufReader};
use std::path::Path;
use std::process::{Child, Stdio};

use journeyman_services::queue::{Config, Db, QueueClock, start};
use serde_json::json;
use tokio::task::JoinSet;

use super::client::{Api, iso, slugid};
use super::test_queue::{TestQueue, root_api, root_client};

const DB: &str = "JOURNEYMAN_TEST_QUEUE_DB";

/// Not a test: `Killed::start` starts this binary again with this name as the queue process.
#[test]
#[ignore = "it is started by the others, as a process of its own"]
fn the_queue_that_is_killed() {
    #[expect(clippy::disallowed_methods, reason = "the one way to tell a child its file")]
    let Ok(db) = std::env::var(DB) else { return };
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    runtime.block_on(async {
        let artifacts = Path::new(&db).with_extension("artifacts");
        let mut settings = Config::new(Db::File(db.into()), artifacts);
        settings.clients = vec![root_client()];
        let running = start(settings).await.expect("the queue starts");
        println!("\nLISTENS {}", running.root_url());
        std::future::pending::<()>().await;
    });
}

struct Killed {
    child: Child,
    api: Api,
}

impl Killed {
    fn start(db: &Path) -> Self {
        let own = std::env::current_exe().expect("the test's own program");
        #[expect(clippy::disallowed_methods, reason = "a test may wait for its child")]
        let mut child = std::process::Command::new(own)
            .args(["--exact", "queue::durable::the_queue_that_is_killed", "--ignored", "--nocapture"])
            .env(DB, db)
            .stdout(Stdio::piped())
            .spawn()
            .expect("the queue's process starts");
        let lines = BufReader::new(child.stdout.take().expect("its output")).lines();
        let root = lines
            .map_while(Result::ok)
            .find_map(|line| line.strip_prefix("LISTENS ").map(str::to_owned))
            .expect("it says where it listens");
        Self { child, api: root_api(&root, QueueClock::wall()) }
    }

    fn kill(mut self) {
        self.child.kill().expect("it can be killed");
        self.child.wait().expect("it ends");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn answered_calls_survive_a_kill() {
    let folder = tempfile::tempdir().expect("a folder");
    let db = folder.path().join("queue.db");
    let queue = Killed::start(&db);
    let api = queue.api.clone();
    // Eight callers create, claim and report until the queue is killed; each records the responses.
    let mut callers = JoinSet::new();
    for caller in 0..8 {
        callers.spawn(busy(api.clone(), caller));
    }
    // One caller has created 40 tasks: the queue is busy.
    while api.get("task-queues/p%2Fw0/claimed?limit=1000").await.expect(200)["tasks"].as_array().map_or(0, Vec::len)
        < 20
    {}
    queue.kill();
    let mut reported = Vec::new();
    while let Some(notes) = callers.join_next().await {
        reported.extend(notes.expect("a caller does not panic"));
    }
    assert!(reported.len() > 40, "only {} answers came before the kill", reported.len());
    let again = Killed::start(&db);
    for Reported { task, state } in reported {
        let now = again.api.status(&task).await["state"].as_str().unwrap_or_default().to_owned();
        // The call in flight at the kill may have been committed too.
        let may = match state {
            "pending" => ["pending", "running", "running"],
            "running" => ["running", "completed", "completed"],
            _ => ["completed"; 3],
        };
        assert!(may.contains(&now.as_str()), "{task} was reported as {state} and is {now}");
    }
    // Pending tasks can still be claimed.
    again.api.create("p/other", json!({})).await;
    assert_eq!(again.api.claim_work("p/other", "w1", 1).await.len(), 1);
    again.kill();
}

struct Reported {
    task: String,
    state: &'static str,
}

/// Creates, claims and reports until a call fails. Every second claim stays running.
async fn busy(api: Api, caller: usize) -> Vec<Reported> {
    let queue = format!("p/w{caller}");
    let mut reported: Vec<Reported> = Vec::new();
    for round in 0.. {
        let task = slugid();
        let body = api.definition(&queue, json!({}));
        if !answered(&api, "PUT", &format!("task/{task}"), Some(body)).await {
            break;
        }
        reported.push(Reported { task: task.clone(), state: "pending" });
        let claim = json!({"workerGroup": "wg", "workerId": "w1"});
        if !answered(&api, "POST", &format!("task/{task}/runs/0/claim"), Some(claim)).await {
            break;
        }
        let last = reported.last_mut().expect("it was just pushed");
        last.state = "running";
        if round % 2 == 0 {
            if !answered(&api, "POST", &format!("task/{task}/runs/0/completed"), None).await {
                break;
            }
            last.state = "completed";
        }
    }
    reported
}

async fn answered(api: &Api, method: &str, path: &str, body: Option<serde_json::Value>) -> bool {
    let path = format!("/api/queue/v1/{path}");
    let header = api.header(method, &path, None);
    let sent = api.request(method, &path, body.as_ref()).header("authorization", header).send().await;
    match sent {
        Ok(answer) => {
            assert_eq!(answer.status(), 200);
            answer.bytes().await.is_ok()
        }
        Err(_) => false,
    }
}

#[tokio::test]
async fn d7_a_second_queue_on_the_same_database_fails_at_once() {
    let folder = tempfile::tempdir().expect("a folder");
    let db = Db::File(folder.path().join("queue.db"));
    let first = TestQueue::with(|settings| settings.db = db.clone()).await;
    let began = tokio::time::Instant::now();
    let second = start(Config::new(db, folder.path().join("artifacts"))).await;
    let reported = second.expect_err("the file is in use").to_string();
    assert!(reported.contains("another process uses database"), "{reported}");
    // SQLite waits for 5 s, unless it is told not to.
    assert!(began.elapsed() < std::time::Duration::from_secs(4), "{:?}", began.elapsed());
    first.running.stop().await;
}

async fn refused(db: &Path) -> String {
    let before = std::fs::read(db).expect("it is there");
    let refused = start(Config::new(Db::File(db.to_owned()), db.with_extension("artifacts"))).await;
    assert!(std::fs::read(db).expect("it is there") == before, "the file was changed");
    refused.expect_err("it is no database of a queue").to_string()
}

#[tokio::test]
async fn d7_a_file_that_is_no_database_of_a_queue_stays_as_it_is() {
    let folder = tempfile::tempdir().expect("a folder");
    let db = folder.path().join("notes.db");
    let other = rusqlite::Connection::open(&db).expect("a database");
    other.execute_batch("CREATE TABLE notes (text TEXT); INSERT INTO notes VALUES ('mine')").expect("it is written");
    drop(other);
    let reported = refused(&db).await;
    assert!(reported.contains("not written by a queue") && reported.contains("queue.db"), "{reported}");

    let text = folder.path().join("notes.txt");
    std::fs::write(&text, "not a database\n".repeat(100)).expect("written");
    let reported = refused(&text).await;
    assert!(reported.contains("corrupt, or no SQLite database") && reported.contains("backup"), "{reported}");
}

#[tokio::test]
async fn d7_a_corrupt_database_is_named_with_what_to_do() {
    let folder = tempfile::tempdir().expect("a folder");
    let db = folder.path().join("queue.db");
    let server = TestQueue::with(|settings| settings.db = Db::File(db.clone())).await;
    server.api.create("p/w", json!({})).await;
    server.running.stop().await;
    let intact = std::fs::read(&db).expect("the database");
    // The table of the queue's own secret, and the tables of tasks.
    for page in [1, 2] {
        let mut bytes = intact.clone();
        bytes[page * 4096..(page + 1) * 4096].fill(0x5a);
        std::fs::write(&db, bytes).expect("written");
        let settings = Config::new(Db::File(db.clone()), folder.path().join("artifacts"));
        let reported = match start(settings).await {
            Ok(running) => {
                let failed = running.failed();
                running.tick().await;
                failed.await
            }
            Err(error) => error.to_string(),
        };
        assert!(reported.contains("corrupt") && reported.contains("restore it from a backup"), "{page}: {reported}");
    }
}

const SMALL_DISK: &str = "JOURNEYMAN_TEST_SMALL_DISK";

/// Runs itself again with a file system of its own.
#[test]
fn a1_outcomes_are_stored_while_the_disk_is_full() {
    #[expect(clippy::disallowed_methods, reason = "the one way to tell a child its folder")]
    if let Ok(folder) = std::env::var(SMALL_DISK) {
        let runtime = tokio::runtime::Runtime::new().expect("a runtime");
        return runtime.block_on(fill_disk(Path::new(&folder)));
    }
    let folder = tempfile::tempdir().expect("a folder");
    let root = rustix::process::geteuid().is_root();
    let namespace: &[&str] = if root { &["--mount"] } else { &["--user", "--map-root-user", "--mount"] };
    #[expect(clippy::disallowed_methods, reason = "a test may wait for its child")]
    let unshared = |script: &str| {
        std::process::Command::new("unshare")
            .args(namespace)
            .args(["sh", "-c", &format!("mount -t tmpfs -o size=12m none \"$0\" && {script}")])
            .arg(folder.path())
            .args([std::env::current_exe().expect("the test's own program").as_os_str()])
            .args(["--exact", "queue::durable::a1_outcomes_are_stored_while_the_disk_is_full", "--nocapture"])
            .env(SMALL_DISK, folder.path())
            .output()
            .expect("unshare runs")
    };
    let trial = unshared("true");
    if !trial.status.success() {
        eprintln!("SKIPPED: no tmpfs can be mounted here: {trial:?}");
        return;
    }
    let ended = unshared("exec \"$@\"");
    assert!(ended.status.success(), "{}", String::from_utf8_lossy(&ended.stderr));
}

async fn fill_disk(folder: &Path) {
    let server = TestQueue::with(|settings| {
        settings.db = Db::File(folder.join("queue.db"));
        settings.artifacts = folder.join("artifacts");
    })
    .await;
    let api = &server.api;
    for _ in 0..40 {
        api.create("p/w", json!({})).await;
    }
    let claims = [api.claim_work("p/w", "w1", 32).await, api.claim_work("p/w", "w1", 8).await].concat();
    let filled = std::fs::write(folder.join("big"), vec![0; 13 << 20]).expect_err("the disk is small");
    assert_eq!(filled.kind(), std::io::ErrorKind::StorageFull);
    for claim in &claims {
        let run = format!("task/{}/runs/0", claim["status"]["taskId"].as_str().expect("an id"));
        let worker = api.with(&claim["credentials"]);
        if std::ptr::eq(claim, &claims[0]) {
            refuse_artifact(&worker, &run).await;
        }
        worker.bare_post(&format!("{run}/reclaim")).await.expect(200);
        worker.bare_post(&format!("{run}/completed")).await.expect(200);
    }
    // More than the reserve holds.
    let large = api.definition("p/w", json!({"payload": {"x": "y".repeat(6 << 20)}}));
    let path = format!("task/{}", slugid());
    let (code, line) = api.queue("PUT", &path, Some(&large)).await.refusal(507);
    assert_eq!(
        (code.as_str(), line.as_str()),
        ("InsufficientStorage", "disk full: the queue cannot write its database")
    );
    std::fs::remove_file(folder.join("big")).expect("removed");
    api.queue("PUT", &path, Some(&large)).await.expect(200);
}

/// The client reads the reason, although its request is long.
async fn refuse_artifact(worker: &Api, run: &str) {
    let name =
        json!({"storageType": "s3", "contentType": "text/plain", "expires": iso(worker.clock.unix_millis() + 600_000)});
    let made = worker.post(&format!("{run}/artifacts/public%2Fx"), name).await.expect(200);
    let url = made["putUrl"].as_str().expect("a URL");
    let request = worker.http.put(url).header("content-type", "text/plain").body(vec![0; 32 << 20]);
    let refused = worker.send(request).await;
    assert_eq!((refused.status, refused.text.as_str()), (507, "disk full: the queue cannot store the artifact\n"));
}

#[tokio::test]
async fn tasks_claims_and_credentials_survive_a_restart() {
    let folder = tempfile::tempdir().expect("a folder");
    let db = Db::File(folder.path().join("queue.db"));
    let first = TestQueue::with(|settings| settings.db = db.clone()).await;
    first.api.get("poll-task-url/p/w").await.expect(200);
    let pending = first.api.create("p/w", json!({"priority": "low"})).await;
    let running = first.api.create("p/w", json!({"priority": "high"})).await;
    let claims = first.api.claim_work("p/w", "w1", 1).await;
    first.running.stop().await;

    let second = TestQueue::with(|settings| settings.db = db.clone()).await;
    let worker = second.api.with(&claims[0]["credentials"]);
    worker.bare_post(&format!("task/{running}/runs/0/reclaim")).await.expect(200);
    assert_eq!(second.api.get("pending/p%2Fw").await.expect(200)["pendingTasks"], 1);
    assert_eq!(second.api.claim_work("p/w", "w2", 1).await[0]["status"]["taskId"], pending.as_str());
    second.advance(1_206).await;
    for task in [&running, &pending] {
        assert_eq!(second.api.status(task).await["runs"][0]["reasonResolved"], "claim-expired");
    }
    second.running.stop().await;
}

#[tokio::test]
async fn files_of_the_queue_are_readable_by_their_owner_only() {
    use std::os::unix::fs::PermissionsExt as _;
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("queue.db");
    let artifacts = folder.path().join("a/b");
    let server = TestQueue::with(|settings| {
        settings.db = Db::File(file.clone());
        settings.artifacts = artifacts.clone();
    })
    .await;
    server.api.create("p/w", json!({})).await;
    let journal = folder.path().join("queue.db-wal");
    for path in [&file, &journal, &artifacts] {
        let mode = std::fs::metadata(path).expect("it is there").permissions().mode();
        assert_eq!(mode & 0o077, 0, "{path:?} has {mode:o}");
    }
    server.running.stop().await;
}
