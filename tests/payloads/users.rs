//! Tasks that run as users of their own. They need root.

use std::sync::Arc;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use journeyman::handler::DynHandler;
use journeyman::handler::task_users::{UserPool, with_users};
use journeyman_platform::host::containment::install_shim;
use journeyman_platform::host::task_user::TaskUser;
use serde_json::{Value, json};

use crate::payloads::deployment::{Deployment, TASK_QUEUE, tar};
use crate::support::until;

/// Users that every Debian has and that own nothing; a handler whose tasks run as them.
pub(super) fn as_users(
    deployment: &Deployment,
    handler: Arc<dyn DynHandler>,
    names: &[&str],
) -> Option<Arc<dyn DynHandler>> {
    if !rustix::process::geteuid().is_root() {
        eprintln!("NOT TESTED: only root can run tasks as other users");
        return None;
    }
    // Their directories are below this one.
    let open = std::os::unix::fs::PermissionsExt::from_mode(0o711);
    std::fs::set_permissions(deployment.folder.path(), open).expect("it is ours");
    let shim = install_shim(deployment.folder.path()).expect("it is ours");
    let users = names.iter().map(|name| TaskUser::find(name, &shim).expect("it is there"));
    Some(with_users(handler, UserPool::new(users.collect())))
}

fn scoped(scopes: &[&str]) -> impl FnOnce(&mut Value) + use<> {
    let scopes = json!(scopes);
    move |definition| definition["scopes"] = scopes
}

#[tokio::test]
async fn a_task_runs_as_its_user_in_a_directory_that_nobody_else_can_read() {
    let deployment = Deployment::start().await;
    let Some(handler) = as_users(&deployment, deployment.handler(), &["games"]) else { return };
    let keys = json!({ "mounts": [
        { "file": "in/f", "content": { "raw": "mine" } },
        { "cacheName": "c", "directory": "d" },
    ] });
    let script = "id -un; id -Gn; echo $USER $HOME; stat -c '%U %a' . in in/f d; echo more >>in/f; touch d/x in/y; cat in/f; pwd >&2; ls /root";
    let task = deployment.create(script, keys, scoped(&["generic-worker:cache:c"])).await;
    let ended = deployment.run_with(handler, 1, &[&task]).await.remove(0);
    let log = ended.log;
    assert!(log.contains("the task runs as user games"), "{log}");
    assert!(log.contains("\ngames\ngames\ngames /"), "{log}");
    assert!(log.contains("\ngames 700\ngames 755\ngames 644\ngames 700\nminemore\n"), "{log}");
    assert!(log.contains("Permission denied"), "{log}");
}

/// What becomes the user runs as root, where a library that a payload names would be loaded.
#[tokio::test]
async fn variables_of_a_payload_reach_nothing_that_runs_as_root() {
    let deployment = Deployment::start().await;
    let Some(handler) = as_users(&deployment, deployment.handler(), &["www-data"]) else { return };
    let keys = json!({ "env": { "LD_DEBUG": "files", "OF_TASK": "here" } });
    let task = deployment.create("echo $OF_TASK; readlink /proc/self/exe", keys, scoped(&[])).await;
    let log = deployment.run_with(handler, 1, &[&task]).await.remove(0).completed();
    assert!(log.contains("\nhere\n") && log.contains("calling init:") && !log.contains("setpriv"), "{log}");
}

#[tokio::test]
async fn processes_and_files_of_a_task_are_gone_before_the_next() {
    let deployment = Deployment::start().await;
    let Some(handler) = as_users(&deployment, deployment.handler(), &["lp"]) else { return };
    let leave = "touch /tmp/journeyman-left-$TASK_ID; mkdir -p /dev/shm/journeyman-left/x; setsid -f sleep 600; pgrep -u lp -c .";
    let look = "ls -d /tmp/journeyman-left-* /dev/shm/journeyman-left; pgrep -r R,S,D -u lp -x sleep; echo looked";
    let tasks = [deployment.create(leave, json!({}), |_| {}).await, deployment.create(look, json!({}), |_| {}).await];
    let mut ended = deployment.run_with(handler, 1, &[&tasks[0], &tasks[1]]).await;
    ended.remove(0).completed();
    let log = ended.remove(0).completed();
    assert!(
        !log.contains("\n/tmp/journeyman-left") && !log.contains("\n/dev/shm") && log.contains("\nlooked\n"),
        "{log}"
    );
    assert!(!log.lines().any(|line| line.parse::<u32>().is_ok()), "{log}");
}

#[tokio::test]
async fn a_cache_passes_from_one_user_to_the_next_and_no_file_of_others_with_it() {
    let deployment = Deployment::start().await;
    let Some(first) = as_users(&deployment, deployment.handler(), &["news"]) else { return };
    let keys = json!({ "mounts": [{ "cacheName": "c", "directory": "d" }] });
    let with_scope = || scoped(&["generic-worker:cache:c"]);
    let task =
        deployment.create("mkdir d/a; echo one >d/a/f; ln -s /etc/shadow d/link", keys.clone(), with_scope()).await;
    deployment.run_with(first, 1, &[&task]).await.remove(0).completed();
    let shadow = || std::os::unix::fs::MetadataExt::uid(&std::fs::metadata("/etc/shadow").expect("it is there"));
    let second = as_users(&deployment, deployment.handler(), &["uucp"]).expect("root");
    let script = "echo two >>d/a/f; cat d/a/f; stat -c %U d d/a d/a/f d/link";
    let task = deployment.create(script, keys, with_scope()).await;
    let log = deployment.run_with(second, 1, &[&task]).await.remove(0).completed();
    assert!(log.contains("\none\ntwo\nuucp\nuucp\nuucp\nuucp\n"), "{log}");
    assert_eq!(shadow(), 0);
}

#[tokio::test]
async fn archives_in_one_directory_belong_to_the_user_whichever_came_first() {
    let deployment = Deployment::start().await;
    let Some(handler) = as_users(&deployment, deployment.handler(), &["list"]) else { return };
    let archive = |files: &[(&str, &str)]| {
        let content = json!({ "base64": STANDARD.encode(tar("-cz", files)) });
        json!({ "directory": "d", "format": "tar.gz", "content": content })
    };
    let keys = json!({ "mounts": [archive(&[("d/one", "1")]), archive(&[("d/sub/two", "2"), ("d/three", "3")])] });
    let script = "find d ! -user $USER; rm -r d && echo removed";
    let task = deployment.create(script, keys, scoped(&[])).await;
    let log = deployment.run_with(handler, 1, &[&task]).await.remove(0).completed();
    assert!(log.contains("\nremoved\n") && !log.contains("\nd/"), "{log}");
}

#[tokio::test]
async fn groups_and_the_workers_own_user_need_their_scopes() {
    let deployment = Deployment::start().await;
    let Some(handler) = as_users(&deployment, deployment.handler(), &["irc"]) else { return };
    let group = format!("generic-worker:os-group:{TASK_QUEUE}/video");
    let own = format!("generic-worker:run-task-as-current-user:{TASK_QUEUE}");
    let as_worker = json!({ "features": { "runTaskAsCurrentUser": true } });
    for (keys, scopes, said) in [
        (json!({ "osGroups": ["video"] }), vec![group.as_str()], "\nirc video\n"),
        (json!({ "osGroups": ["video"] }), vec![], "payload/osGroups/0: the task lacks the scope"),
        (json!({ "osGroups": ["nonesuch"] }), vec!["*"], "payload/osGroups/0: this host has no such group"),
        (as_worker.clone(), vec![own.as_str()], "\nroot"),
        (as_worker, vec![], "payload/features/runTaskAsCurrentUser: the task lacks the scope"),
    ] {
        let task = deployment.create("id -Gn", keys, scoped(&scopes)).await;
        let ended = deployment.run_with(Arc::clone(&handler), 1, &[&task]).await.remove(0);
        assert!(ended.log.contains(said), "{said}: {}", ended.log);
    }
    let log = deployment
        .run_one("true", json!({ "osGroups": ["video"] }), scoped(&["*"]))
        .await
        .exception("malformed-payload");
    assert!(log.contains("tasks have no users of their own here"), "{log}");
}

#[tokio::test]
async fn tasks_at_the_same_time_cannot_read_or_signal_each_other() {
    let deployment = Deployment::start().await;
    let Some(handler) = as_users(&deployment, deployment.handler(), &["mail", "proxy"]) else { return };
    let gate = deployment.folder.path().join("gate");
    std::fs::create_dir(&gate).expect("created");
    std::fs::set_permissions(&gate, std::os::unix::fs::PermissionsExt::from_mode(0o777)).expect("it is ours");
    let path = gate.display();
    let secret = format!(
        "echo secret >f; pwd >{path}/where; echo $$ >{path}/pid; until [ -e {path}/done ]; do sleep 0.05; done; echo survived"
    );
    let victim = deployment.create(&secret, json!({}), |_| {}).await;
    let spy = format!(
        "until [ -s {path}/pid ]; do sleep 0.05; done; cat $(cat {path}/where)/f; kill -9 $(cat {path}/pid); touch {path}/done"
    );
    let spy = deployment.create(&spy, json!({}), |_| {}).await;
    let mut ended = deployment.run_with(handler, 2, &[&victim, &spy]).await;
    assert!(ended.remove(0).completed().contains("\nsurvived\n"));
    let log = ended.remove(0).completed();
    assert!(!log.contains("\nsecret\n") && log.matches("ermi").count() >= 2, "{log}");
    until("the gate is open", async || gate.join("done").exists()).await;
}
