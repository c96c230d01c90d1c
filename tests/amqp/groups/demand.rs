//! Workers of a pool for the tasks of a Taskcluster queue, or of a ZooKeeper, by what is counted there.

use std::path::Path;
use std::process::Stdio;

use journeyman::source::zookeeper::Dialect;
use journeyman_platform::zookeeper::job_queue::JobQueue;
use journeyman_platform::zookeeper::submit::Submission;
use serde_json::{Value, json};

use super::seen::{status, until};
use super::{Pool, assert_includes};
use crate::amqp::support::within;
use crate::support::process::Process;
use crate::support::task_queue::{TaskQueue, client};
use crate::support::wire::{Way, Wire};
use crate::zookeeper::support::Tree;

async fn start(folder: &Path) -> TaskQueue {
    std::fs::write(folder.join("token"), "secret-token").expect("it is written");
    // Who counts for the pool may not list what is claimed in the other queue.
    let counts = ["queue:pending-count:far/side", "queue:claimed-list:far/side", "queue:pending-count:far/other"];
    TaskQueue::start(folder, |config| config.clients.push(client("counter", &counts))).await
}

/// The payload of a task that ends when this file is there.
fn waits_for(file: &Path) -> Value {
    json!({ "command": [["/bin/sh", "-c", until_there(file)]], "maxRunTime": 600 })
}

fn until_there(file: &Path) -> String {
    format!("until [ -e {} ]; do sleep 0.05; done", file.display())
}

/// What makes a controller start workers with this configuration.
fn workers(folder: &Path, config: &str) -> String {
    let config = format!("[worker]\nid = \"w-{{pid}}\"\n[host]\nmetadata_service = \"off\"\n{config}");
    std::fs::write(folder.join("worker.toml"), config).expect("it is written");
    format!(
        "command = [\"/bin/sh\", \"-c\", 'exec {} worker --config {here}/worker.toml --work-dir {here}/$WORKER_ID']\n",
        env!("CARGO_BIN_EXE_journeyman"),
        here = folder.display()
    )
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
    let source = format!(
        "[source.builds]\nkind = \"taskcluster\"\nroot_url = \"{}\"\ntask_queue = \"far/side\"\nclient_id = \"tester\"\n\
         access_token_file = \"{}\"\n",
        tasks.service.root_url(),
        here.join("token").display()
    );
    let command = workers(here, &source);
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
    assert!(table.contains("0 pending, 2 claimed"), "{table}");

    std::fs::write(&go, "").expect("it is written");
    for id in &ids {
        within("the task is done", async { while tasks.status(id).await["state"] != "completed" {} }).await;
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

/// A queue of tasks in a ZooKeeper.
struct Tasks {
    tree: Tree,
    queue: JobQueue,
}

impl Tasks {
    async fn start() -> Option<(Self, String)> {
        let tree = Tree::new().await?;
        let servers = tree.connect.servers.clone();
        Some((Self { tree, queue: JobQueue::new("/builds") }, servers))
    }

    async fn submit(&self) {
        let submission = Submission {
            dialect: Dialect::Native,
            payload: json!({}),
            precedence: 200,
            fields: serde_json::Map::new(),
            waits: false,
        };
        self.queue.add(&self.tree.session, &submission).await.expect("it is added");
    }

    fn source(&self, servers: &str) -> String {
        format!(
            "[source.builds]\nkind = \"zookeeper\"\ndialect = \"native\"\nconnect = \"{servers}\"\nchroot = \"{}\"\n\
             queue = \"/builds\"\nsession_timeout = \"4s\"\n",
            self.tree.connect.chroot.as_deref().unwrap_or_default()
        )
    }

    fn demand(&self, pool: &Pool, servers: &str) -> String {
        let name = &pool.name;
        format!("[demand.zk]\nsource = \"builds\"\npool = \"{name}\"\nkey = \"builds\"\n{}", self.source(servers))
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn workers_are_started_for_the_tasks_of_a_zookeeper_and_stopped_afterwards() {
    let Some(pool) = Pool::new().await else { return };
    let Some((tasks, servers)) = Tasks::start().await else { return };
    let here = pool.folder.path();
    let go = here.join("go");
    let handler = format!(
        "handler = \"wait\"\n[handler.wait]\nkind = \"program\"\nexec = [\"/bin/sh\", \"-c\", \"{}\"]\n",
        until_there(&go)
    );
    let command = workers(here, &format!("{}{handler}", tasks.source(&servers)));
    tasks.submit().await;
    tasks.submit().await;
    let delays = "unbind_delay = \"8s\"\nstop_delay = \"4s\"\nmin = 0\nmax = 4\n";
    let _controller = pool.active(&format!("{delays}{command}{}", tasks.demand(&pool, &servers))).await;
    let socket = pool.socket();
    let both = |seen: &Value| seen["external_demands"][0]["claimed"] == 2 && seen["counters"]["workers_started"] == 2;
    let seen = until(&socket, "two workers hold the two tasks", both).await;
    let (demand, group) = (json!({ "name": "zk", "pending": 0 }), json!({ "key": "builds", "phase": "active" }));
    assert_includes(&seen, &json!({ "external_demands": [demand], "groups": [group] }));
    std::fs::write(&go, "").expect("it is written");
    until(&socket, "its group is removed", |seen| seen["groups"] == json!([])).await;
    let left = tasks.tree.session.children("/builds/requests").await.expect("it is answered");
    assert_eq!(left, Some(Vec::new()));
}

/// The broker of its configuration does not exist.
#[tokio::test(flavor = "multi_thread")]
async fn d4_a_pool_that_follows_a_zookeeper_alone_needs_no_broker() {
    let Some((tasks, servers)) = Tasks::start().await else { return };
    let folder = tempfile::tempdir().expect("a folder");
    let (here, socket) = (folder.path(), folder.path().join("control"));
    let go = here.join("go");
    let handler = format!(
        "handler = \"wait\"\n[handler.wait]\nkind = \"program\"\nexec = [\"/bin/sh\", \"-c\", \"{}\"]\n",
        until_there(&go)
    );
    let command = workers(here, &format!("{}{handler}", tasks.source(&servers)));
    let config = format!(
        "[control]\nsocket = \"{}\"\n[pool.zk]\nqueue_type = \"none\"\nstate_dir = \"{}\"\n\
         unbind_delay = \"8s\"\nstop_delay = \"4s\"\nmin = 0\nmax = 4\n{command}\
         [demand.zk]\nsource = \"builds\"\npool = \"zk\"\nkey = \"builds\"\n{}",
        socket.display(),
        here.join("workers").display(),
        tasks.source(&servers)
    );
    std::fs::write(here.join("controller.toml"), config).expect("it is written");
    let controller = || {
        let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_journeyman"));
        command.args(["controller", "--config"]).arg(here.join("controller.toml")).env_clear();
        command.env("PATH", std::env::var_os("PATH").unwrap_or_default()).stdin(Stdio::null());
        command.env("WORKER_AMQP_URI", "amqp://127.0.0.1:1");
        command.stdout(Stdio::null()).stderr(Stdio::piped());
        Process::of(command)
    };
    tasks.submit().await;
    tasks.submit().await;
    let mut active = controller();
    active.says("this controller is active").await;
    let mut standby = controller();
    standby.says("standing by").await;
    let both = |seen: &Value| seen["external_demands"][0]["claimed"] == 2 && seen["counters"]["workers_started"] == 2;
    until(&socket, "two workers hold the two tasks", both).await;
    std::fs::write(&go, "").expect("it is written");
    until(&socket, "its group is removed", |seen| seen["groups"] == json!([])).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_zookeeper_that_does_not_answer_keeps_its_count_and_is_counted_again_by_a_new_session() {
    let Some(pool) = Pool::new().await else { return };
    let Some((tasks, servers)) = Tasks::start().await else { return };
    let wire = Wire::to(&servers).await;
    tasks.submit().await;
    let demand = tasks.demand(&pool, &wire.address());
    let _controller = pool.active(&format!("command = [\"/bin/sleep\", \"600\"]\n{demand}")).await;
    let socket = pool.socket();
    until(&socket, "the task is counted", |seen| seen["groups"][0]["wanted"] == 1).await;
    wire.set(Way::Stall);
    let seen = until(&socket, "it does not answer", |seen| seen["external_demands"][0]["error"].is_string()).await;
    assert_includes(&seen, &json!({ "external_demands": [{ "pending": 1 }], "groups": [{ "wanted": 1 }] }));
    tasks.submit().await;
    wire.set(Way::Carry);
    let both = |seen: &Value| seen["external_demands"][0]["pending"] == 2;
    let seen = until(&socket, "both tasks are counted", both).await;
    assert!(seen["external_demands"][0]["error"].is_null(), "{seen}");
}
