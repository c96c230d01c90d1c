//! Kills the worker and the queue with SIGKILL, repeatedly, at lines of their logs and at crash points: no task is lost, each ends
//! with one accepted outcome, and nothing outlives its run.

mod caches;
mod checker;
mod points;
mod process;

use std::path::Path;
use std::time::Duration;

use crate::support::task_queue::{TaskQueue, api, definition, shell};
use journeyman::source::taskcluster::Api;
use journeyman::task::formats::new_task_id;
use journeyman_domain::id::TaskId;
use process::Process;
use serde_json::Value;
use tokio::io::AsyncReadExt as _;
use tokio::net::unix::pipe;

const TASK_QUEUE: &str = "crash/test";
/// Limit for everything that a test waits for.
const STEP_TIMEOUT: Duration = Duration::from_secs(180);

/// A short task that records its start in a file.
fn payload(folder: &Path) -> Value {
    shell(&format!("echo $TASK_ID/$RUN_ID >> {}; echo done", folder.join("started").display()))
}

async fn create_task(api: &Api, payload: &Value) -> TaskId {
    let task = new_task_id();
    api.create_task(&task, definition(TASK_QUEUE, payload)).await.expect("created");
    task
}

async fn create(api: &Api, folder: &Path, count: usize, tasks: &mut Vec<TaskId>) {
    for _ in 0..count {
        tasks.push(create_task(api, &payload(folder)).await);
    }
}

/// Retries once: a connection to a killed queue breaks at its next use.
async fn status(api: &Api, task: &TaskId) -> Value {
    match api.task_status(task).await {
        Ok(status) => status,
        Err(_) => api.task_status(task).await.expect("a status"),
    }
}

/// Each task has one accepted outcome, of its last run; earlier runs were released or expired.
async fn check(api: &Api, tasks: &[TaskId]) -> usize {
    let mut runs = 0;
    for task in tasks {
        let status = status(api, task).await;
        let list = status["runs"].as_array().expect("runs");
        let (last, before) = list.split_last().expect("a run");
        assert_eq!(last["state"], "completed", "{task}: {status}");
        for run in before {
            let reason = run["reasonResolved"].as_str().unwrap_or_default();
            assert!(matches!(reason, "claim-expired" | "worker-shutdown"), "{task}: {status}");
        }
        runs += list.len();
    }
    runs
}

/// Runs a worker until every task is resolved.
async fn finish(folder: &Path, root_url: &str, protocol: &str, api: &Api, tasks: &[TaskId]) {
    let mut worker = Process::worker(folder, root_url, protocol);
    loop {
        let mut open = 0;
        for task in tasks {
            let status = status(api, task).await;
            open += usize::from(matches!(status["state"].as_str(), Some("pending" | "running")));
        }
        if open == 0 {
            worker.leave();
            return;
        }
        worker.until_a_claim_ends();
    }
}

fn root_url(queue: &mut Process) -> String {
    let line = queue.until("queue listening").expect("the queue starts");
    let line: Value = serde_json::from_str(&line).expect("a line of JSON");
    let found = line.pointer("/fields/root_url").or_else(|| line.get("root_url")).and_then(Value::as_str);
    found.expect("an address").to_owned()
}

/// The claim lasts for an hour, so it has not expired.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_claim_of_a_worker_killed_at_the_poll_reply_is_released_by_the_next_one() {
    let folder = tempfile::tempdir().expect("a folder");
    let TaskQueue { service: queue, api } = points::queue_in(folder.path(), Duration::from_secs(3600)).await;
    let task = create_task(&api, &payload(folder.path())).await;
    let at = [("JOURNEYMAN_CRASH_POINT", "claim-granted")];
    let mut worker = Process::worker_with(folder.path(), queue.root_url(), "claim-work", &at);
    assert_eq!(worker.died_of(), Some(rustix::process::Signal::KILL.as_raw()), "{:?}", worker.log);
    assert_eq!(status(&api, &task).await["state"], "running");
    finish(folder.path(), queue.root_url(), "claim-work", &api, std::slice::from_ref(&task)).await;
    let status = status(&api, &task).await;
    assert_eq!(status["runs"][0]["reasonResolved"], "worker-shutdown", "{status}");
    assert_eq!(status["runs"].as_array().map(Vec::len), Some(2), "{status}");
    queue.stop().await;
}

/// It fills its directory until the next worker has killed it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_payload_that_writes_after_its_worker_was_killed_does_not_prevent_a_start() {
    let folder = tempfile::tempdir().expect("a folder");
    let TaskQueue { service: queue, api } = points::queue_in(folder.path(), Duration::from_secs(3600)).await;
    let fifo = folder.path().join("fifo");
    rustix::fs::mkfifoat(rustix::fs::CWD, &fifo, rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR).expect("a pipe");
    let mut reader = pipe::OpenOptions::new().open_receiver(&fifo).expect("the pipe opens");
    let script = format!(
        "[ $RUN_ID = 0 ] || exit 0; i=0; while [ $i -lt 500000 ]; do : >$i; i=$((i+1)); \
         [ $i != 2000 ] || echo writing >{}; done",
        fifo.display()
    );
    let task = create_task(&api, &shell(&script)).await;
    let worker = Process::worker(folder.path(), queue.root_url(), "claim-work");
    let mut message = String::new();
    let read = tokio::time::timeout(STEP_TIMEOUT, reader.read_to_string(&mut message)).await;
    read.expect("the reply arrives in time").expect("the reply is readable");
    assert_eq!(message, "writing\n");
    worker.kill();
    finish(folder.path(), queue.root_url(), "claim-work", &api, std::slice::from_ref(&task)).await;
    assert_eq!(check(&api, &[task]).await, 2);
    queue.stop().await;
}

#[tokio::test]
async fn a_queue_killed_at_any_line_of_its_worker_loses_nothing() {
    let folder = tempfile::tempdir().expect("a folder");
    let mut queue = Process::queue(folder.path(), "127.0.0.1:0");
    let root_url = root_url(&mut queue);
    let listen = root_url.trim_start_matches("http://").to_owned();
    let api = api(&root_url);
    let mut tasks = Vec::new();
    create(&api, folder.path(), 80, &mut tasks).await;
    let mut worker = Process::worker(folder.path(), &root_url, "claim-work");
    let kills = 8;
    for lines in 3..3 + kills {
        worker.lines(lines);
        queue.kill();
        queue = Process::queue(folder.path(), &listen);
        queue.until("queue listening").expect("the queue starts again on its port");
    }
    drop(worker);
    finish(folder.path(), &root_url, "claim-work", &api, &tasks).await;
    let runs = check(&api, &tasks).await;
    println!("crash: queue killed {kills} times, {} tasks in {runs} runs, 0 lost", tasks.len());
}

#[tokio::test]
async fn a_queue_that_cannot_write_its_file_exits_with_20() {
    let folder = tempfile::tempdir().expect("a folder");
    let mut queue = Process::narrow_queue(folder.path());
    let api = api(&root_url(&mut queue));
    let mut created = vec![new_task_id()];
    while api.create_task(&created[0], definition(TASK_QUEUE, &payload(folder.path()))).await.is_ok() {
        created.insert(0, new_task_id());
    }
    assert_eq!(queue.end(), Some(20), "{:?}", queue.log);
    assert!(queue.log.iter().any(|line| line.contains("the database failed")), "{:?}", queue.log);
    // Acknowledged tasks exist after a restart.
    let mut queue = Process::queue(folder.path(), "127.0.0.1:0");
    let api = crate::support::task_queue::api(&root_url(&mut queue));
    assert!(created.len() > 1, "the limit is too narrow for this test");
    for task in &created[1..] {
        assert_eq!(status(&api, task).await["state"], "pending");
    }
}

#[test]
fn dev_exits_with_20_when_its_queue_does() {
    let folder = tempfile::tempdir().expect("a folder");
    let mut dev = Process::narrow_demo(folder.path());
    // The demo may see the failure first, as the answer to a call.
    assert_eq!(dev.end(), Some(20), "{:?}", dev.log);
    assert!(dev.log.iter().any(|line| line.contains("cannot write to the database")), "{:?}", dev.log);
}
