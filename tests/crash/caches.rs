//! Kills a worker whose tasks share a cache: no task is lost, no cache is half written, and no task reads another's files.

use std::os::unix::fs::PermissionsExt as _;
use std::time::Duration;

use journeyman::task::formats::new_task_id;
use serde_json::json;

use crate::crash::process::Process;
use crate::crash::{TASK_QUEUE, check, points, status};
use crate::support::Repeats;
use crate::support::task_queue::{TaskQueue, definition, shell};

/// Writes both files of the cache, one after the other: a directory in which they differ was left by a task that was killed.
const SCRIPT: &str = r#"
set -e
echo $TASK_ID >secret
if [ "$(id -u)" != 0 ] && cat ../*/secret 2>/dev/null | grep -v $TASK_ID; then exit 8; fi
if [ -e d/a ] && [ "$(cat d/a)" != "$(cat d/b)" ]; then echo torn; exit 9; fi
if [ -e d/a ]; then echo $TASK_ID >>"$KEPT"; fi
echo $TASK_ID >d/a; sleep 0.2; echo $TASK_ID >d/b
"#;

#[tokio::test(flavor = "multi_thread")]
async fn caches_of_a_killed_worker_are_never_torn_and_no_task_reads_anothers_files() {
    let folder = tempfile::tempdir().expect("a folder");
    std::fs::set_permissions(folder.path(), std::fs::Permissions::from_mode(0o711)).expect("it is ours");
    let kept = folder.path().join("kept");
    std::fs::write(&kept, "").expect("written");
    std::fs::set_permissions(&kept, std::fs::Permissions::from_mode(0o666)).expect("it is ours");
    let TaskQueue { service: queue, api } = points::queue_in(folder.path(), Duration::from_secs(3600)).await;
    let count = Repeats::new("JOURNEYMAN_PAYLOAD_TASKS", Duration::ZERO).count.unwrap_or(60);
    let mut payload = shell(SCRIPT);
    payload["mounts"] = json!([{ "cacheName": "c", "directory": "d" }]);
    payload["env"] = json!({ "KEPT": kept.display().to_string() });
    let mut tasks = Vec::new();
    for _ in 0..count {
        let mut definition = definition(TASK_QUEUE, &payload);
        definition["scopes"] = json!(["generic-worker:cache:c"]);
        let task = new_task_id();
        api.create_task(&task, definition).await.expect("created");
        tasks.push(task);
    }
    let users = r#"["bin", "daemon", "sync", "sys"]"#;
    let is_root = rustix::process::geteuid().is_root();
    let more: &[_] = if is_root { &[("JOURNEYMAN__HOST__TASK_USERS", users)] } else { &[] };
    let start = || Process::worker_with(folder.path(), queue.root_url(), "claim-work", more);
    let mut kills = 0;
    for _ in 0..count / 10 {
        let mut worker = start();
        for _ in 0..6 {
            worker.until_a_claim_ends();
        }
        worker.kill();
        kills += 1;
    }
    let mut worker = start();
    for task in &tasks {
        while matches!(status(&api, task).await["state"].as_str(), Some("pending" | "running")) {
            worker.until_a_claim_ends();
        }
    }
    worker.leave();
    let runs = check(&api, &tasks).await;
    let reused = std::fs::read_to_string(&kept).expect("it is there").lines().count();
    println!("{count} tasks in {runs} runs, {kills} kills, 0 lost; {reused} runs found a cache, none of them torn");
    assert!(reused > count / 4, "{reused}");
    queue.stop().await;
}
