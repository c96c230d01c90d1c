//! Workers of a pool for the tasks of a Taskcluster queue, by what that counts.

use serde_json::{Value, json};

use super::seen::{status, until};
use super::{Pool, assert_includes};
use crate::support::within;
use crate::task_queue::{TaskQueue, client};

async fn start(folder: &std::path::Path) -> TaskQueue {
    std::fs::write(folder.join("token"), "secret-token").expect("it is written");
    // Who counts for the pool may not list what is claimed in the other queue.
    let counts = ["queue:pending-count:far/side", "queue:claimed-list:far/side", "queue:pending-count:far/other"];
    TaskQueue::start(folder, |config| config.clients.push(client("counter", &counts))).await
}

/// The payload of a task that ends when this file is there.
fn waits_for(file: &std::path::Path) -> Value {
    let waits = format!("until [ -e {} ]; do sleep 0.05; done", file.display());
    json!({ "command": [["/bin/sh", "-c", waits]], "maxRunTime": 600 })
}

impl TaskQueue {
    /// The section of a demand.
    fn demand(&self, name: &str, pool: &Pool, task_queue: &str) -> String {
        format!(
            "[demand.{name}]\nsource = \"{name}\"\npool = \"{}\"\nkey = \"builds\"\n\
             [source.{name}]\nkind = \"taskcluster\"\nroot_url = \"{}\"\ntask_queue = \"{task_queue}\"\n\
             client_id = \"counter\"\naccess_token_file = \"{}/token\"\n",
            pool.name,
            self.service.root_url(),
            pool.folder.path().display()
        )
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn workers_are_started_for_the_tasks_of_a_queue_and_stopped_afterwards() {
    let Some(pool) = Pool::new().await else { return };
    let here = pool.folder.path();
    let tasks = start(here).await;
    let worker = format!(
        "[worker]\nid = \"w-{{pid}}\"\n[host]\nmetadata_service = \"off\"\n[source.builds]\nkind = \"taskcluster\"\nroot_url = \"{}\"\n\
         task_queue = \"far/side\"\nclient_id = \"tester\"\naccess_token_file = \"{}\"\n",
        tasks.service.root_url(),
        here.join("token").display()
    );
    std::fs::write(here.join("worker.toml"), worker).expect("it is written");
    let command = format!(
        "command = [\"/bin/sh\", \"-c\", 'exec {} worker --config {here}/worker.toml --work-dir {here}/$WORKER_ID']\n",
        env!("CARGO_BIN_EXE_journeyman"),
        here = here.display()
    );
    let demand = tasks.demand("ci", &pool, "far/side");
    let go = here.join("go");
    let ids = [tasks.create("far/side", waits_for(&go)).await, tasks.create("far/side", waits_for(&go)).await];
    let _controller =
        pool.active(&format!("unbind_delay = \"8s\"\nstop_delay = \"4s\"\nmin = 0\nmax = 4\n{command}{demand}")).await;
    let socket = pool.socket();
    let both = |seen: &Value| seen["external_demands"][0]["claimed"] == 2 && seen["counters"]["workers_started"] == 2;
    let seen = until(&socket, "two workers hold the two tasks", both).await;
    let (demand, group) = (json!({ "name": "ci", "pending": 0 }), json!({ "key": "builds", "phase": "active" }));
    assert_includes(&seen, &json!({ "external_demands": [demand], "groups": [group] }));
    // Nothing waits any more, and no worker is stopped: they hold what was claimed.
    let seen = until(&socket, "they are at work", |seen| seen["groups"][0]["workers"]["starting"] == 0).await;
    assert_includes(&seen, &json!({ "workers": { "stopping": 0 }, "groups": [{ "wanted": 2 }] }));
    let table = status(&socket, &[]).await;
    assert!(table.contains("ci for builds   0 pending   2 claimed"), "{table}");

    std::fs::write(&go, "").expect("it is written");
    for id in &ids {
        within("the task is done", async {
            while tasks.api.task_status(id).await.expect("a status")["state"] != "completed" {}
        })
        .await;
    }
    until(&socket, "its group is removed", |seen| seen["groups"] == json!([])).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn without_the_claimed_list_only_pending_tasks_count_and_an_unreachable_queue_keeps_its_count() {
    let Some(pool) = Pool::new().await else { return };
    let here = pool.folder.path();
    let tasks = start(here).await;
    let demand = tasks.demand("other", &pool, "far/other");
    tasks.create("far/other", waits_for(&here.join("never"))).await;
    let mut controller = pool.controller(&format!("command = [\"/bin/sleep\", \"600\"]\n{demand}"));
    controller.says("not allowed to list claimed tasks").await;
    let socket = pool.socket();
    let counted = |seen: &Value| seen["external_demands"][0]["pending"] == 1 && seen["groups"][0]["wanted"] == 1;
    let seen = until(&socket, "what waits is counted", counted).await;
    assert_eq!(seen["external_demands"][0].get("claimed"), None, "{seen}");
    tasks.service.stop().await;
    let seen = until(&socket, "it is not told any more", |seen| seen["external_demands"][0]["error"].is_string()).await;
    assert_includes(&seen, &json!({ "external_demands": [{ "pending": 1 }], "groups": [{ "wanted": 1 }] }));
}
