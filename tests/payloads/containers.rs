//! Payloads that name an image, with the daemon and the clients that tests/run starts.

use std::collections::BTreeSet;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use journeyman::config::Environment;
use journeyman::handler::DynHandler;
use journeyman::handler::containers::config::{ContainersConfig, Permission};
use journeyman::handler::containers::{Containers, with_containers};
use journeyman_domain::id::TaskId;
use journeyman_platform::host::clock::Clock;
use rustix::process::Signal;
use serde_json::{Value, json};

use crate::payloads::chain_of_trust::signing_key;
use crate::payloads::deployment::{Deployment, Ended, TASK_QUEUE};
use crate::support::process::{Process, command};
use crate::support::task_queue::{CLIENT_ID, TOKEN};
use crate::support::{named, needs, pass, until, within};

pub(super) const IMAGE: &str = "localhost/jm:1";

/// A client with its arguments.
#[derive(Clone)]
pub(super) struct Tool(Vec<String>);

/// The clients of this machine.
pub(super) fn tools() -> Vec<Tool> {
    ["JOURNEYMAN_TEST_DOCKER", "JOURNEYMAN_TEST_PODMAN"].into_iter().filter_map(Tool::of).collect()
}

fn docker() -> Option<Tool> {
    Tool::of("JOURNEYMAN_TEST_DOCKER")
}

impl Tool {
    fn of(variable: &str) -> Option<Self> {
        Some(Self(needs(variable)?.split(' ').map(str::to_owned).collect()))
    }

    fn variables() -> Vec<(&'static str, String)> {
        let own = [("PATH", "PATH"), ("CONTAINERS_CONF", "JOURNEYMAN_TEST_CONTAINERS_CONF")];
        own.into_iter().filter_map(|(name, from)| Some((name, named(from)?))).collect()
    }

    async fn call(&self, arguments: &[&str]) -> String {
        let mut command = tokio::process::Command::new(&self.0[0]);
        let output = command.args(&self.0[1..]).args(arguments).envs(Self::variables()).output();
        let output = within("the client ends", output).await.expect("it runs");
        assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).expect("text").trim().to_owned()
    }

    /// The ids of a worker's containers.
    async fn containers(&self, work_dir: &Path) -> String {
        self.call(&["ps", "-aq", "--filter", &format!("label=journeyman.work-dir={}", work_dir.display())]).await
    }

    pub(super) fn config(&self) -> ContainersConfig {
        ContainersConfig {
            program: self.0[0].clone(),
            options: self.0[1..].to_vec(),
            network: "host".into(),
            allow: Vec::new(),
            limits: Default::default(),
        }
    }

    fn handler(&self, deployment: &Deployment) -> Arc<dyn DynHandler> {
        handler(deployment, self.config())
    }

    /// A client that does something else for some calls: a shell script, which has the client as `client`.
    fn but(&self, folder: &Path, script: &str) -> ContainersConfig {
        let path = folder.join("client");
        let text = format!("#!/bin/sh\nclient() {{ {} \"$@\"; }}\n{script}\n", self.0.join(" "));
        std::fs::write(&path, text).expect("written");
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).expect("changed");
        ContainersConfig { program: path.display().to_string(), options: Vec::new(), ..self.config() }
    }
}

pub(super) fn handler(deployment: &Deployment, config: ContainersConfig) -> Arc<dyn DynHandler> {
    let variables = Tool::variables();
    let variables: Vec<(&str, &str)> = variables.iter().map(|(name, value)| (*name, value.as_str())).collect();
    let environment = Environment::from_pairs(&variables);
    let containers = Containers::new(config, &environment, deployment.settings(Some(signing_key())));
    let containers = containers.expect("the client is there");
    with_containers(deployment.handler(), Some(containers), "command")
}

fn payload(script: &str, keys: &Value) -> Value {
    let mut payload = json!({ "image": IMAGE, "command": ["/bin/sh", "-c", script], "maxRunTime": 600 });
    payload.as_object_mut().expect("an object").extend(keys.as_object().expect("an object").clone());
    payload
}

async fn create(deployment: &Deployment, script: &str, keys: Value, scopes: &[&str]) -> TaskId {
    let change = |definition: &mut Value| {
        definition["payload"] = payload(script, &keys);
        definition["scopes"] = json!(scopes);
    };
    deployment.create("", json!({}), change).await
}

async fn run(deployment: &Deployment, handler: &Arc<dyn DynHandler>, script: &str, keys: Value) -> Ended {
    run_scoped(deployment, handler, script, keys, &[]).await
}

async fn run_scoped(
    deployment: &Deployment,
    handler: &Arc<dyn DynHandler>,
    script: &str,
    keys: Value,
    scopes: &[&str],
) -> Ended {
    let task = create(deployment, script, keys, scopes).await;
    deployment.run_with(Arc::clone(handler), 1, &[&task]).await.remove(0)
}

/// Runs a worker until `watch` is done, which may look at its tasks.
async fn beside<T>(deployment: &Deployment, handler: Arc<dyn DynHandler>, watch: impl Future<Output = T>) -> T {
    let worker = Box::new(deployment.worker(handler, 1));
    let control = worker.control();
    let watched = async {
        let seen = watch.await;
        control.drain().await;
        seen
    };
    let (exit, seen) = within("the worker ends", Box::pin(async { tokio::join!(worker.run(), watched) })).await;
    exit.expect("it ran");
    seen
}

/// Canceled tasks are noticed soon.
async fn with_status_polls() -> Deployment {
    let mut deployment = Deployment::start().await;
    deployment.status_poll_interval = Some(Duration::from_millis(50));
    deployment
}

async fn until_running(deployment: &Deployment, tool: &Tool) {
    until("a container runs", async || !tool.call(&["ps", "-q", "--filter", &label(deployment)]).await.is_empty())
        .await;
}

fn label(deployment: &Deployment) -> String {
    format!("label=journeyman.work-dir={}", deployment.work_dir().display())
}

#[tokio::test]
async fn an_image_runs_with_its_variables_and_its_log_is_redacted() {
    for tool in tools() {
        let deployment = Deployment::start().await;
        let env = json!({
            "A": "  b \"c\" # d", "PATH": "/bin:/none", "MY_TOKEN": "hidden-in-the-log",
            "RUN_ID": "none of its own",
        });
        let script = "echo out; echo err >&2; echo \"A=$A;\"; echo $PATH; echo $MY_TOKEN; echo run $RUN_ID task $TASK_ID; \
                      echo root $TASKCLUSTER_ROOT_URL; env | grep -c HOST_SECRET";
        let ended = run(&deployment, &tool.handler(&deployment), script, json!({ "env": env })).await;
        let log = ended.log;
        for said in ["\nout\n", "\nerr\n", "\nA=  b \"c\" # d;\n", "\n/bin:/none\n", "\nrun 0 task ", "\nroot http"] {
            assert!(log.contains(said), "{said}: {log}");
        }
        assert!(!log.contains("hidden-in-the-log") && log.contains("[redacted]"), "{log}");
        // The last command of the script finds nothing.
        assert_eq!(ended.states, ["failed"], "{log}");
        assert!(log.contains("container: exit status 1"), "{log}");
        assert_eq!(tool.containers(&deployment.work_dir()).await, "");
    }
}

#[tokio::test]
async fn exit_statuses_have_their_meaning_and_a_command_that_is_not_there_fails() {
    for tool in tools() {
        let deployment = Deployment::start().await;
        let handler = tool.handler(&deployment);
        run(&deployment, &handler, "exit 0", json!({})).await.completed();
        let ended = run(&deployment, &handler, "exit 125", json!({})).await;
        assert_eq!(ended.states, ["failed"], "{}", ended.log);
        assert!(!ended.log.contains("could not be started"), "{}", ended.log);
        let ended = run(&deployment, &handler, "", json!({ "command": ["/no/such"] })).await;
        assert_eq!(ended.states, ["failed"], "{}", ended.log);
        assert!(ended.log.contains("could not be started"), "{}", ended.log);
        let keys = json!({ "onExitStatus": { "retry": [7] } });
        let ended = run(&deployment, &handler, "test $RUN_ID = 1 || exit 7", keys).await;
        assert_eq!(ended.states[0], "exception/intermittent-task", "{}", ended.log);
        assert_eq!(tool.containers(&deployment.work_dir()).await, "");
    }
}

#[tokio::test]
async fn a_canceled_task_leaves_no_container_and_no_value_is_on_an_argument_list() {
    for tool in tools() {
        let deployment = with_status_polls().await;
        let env = json!({ "SECRET": "not-on-an-argument-list" });
        let task = create(&deployment, "trap '' TERM; while :; do :; done", json!({ "env": env }), &[]).await;
        let watch = async {
            until_running(&deployment, &tool).await;
            let lists = std::fs::read_dir("/proc").expect("it is there").flatten();
            let lists: Vec<String> = lists
                .filter_map(|entry| std::fs::read(entry.path().join("cmdline")).ok())
                .map(|list| String::from_utf8_lossy(&list).into_owned())
                .collect();
            let of_clients = lists.iter().filter(|list| list.contains(&*deployment.work_dir().to_string_lossy()));
            assert!(of_clients.count() > 0, "{lists:?}");
            assert!(!lists.iter().any(|list| list.contains("not-on-an-argument-list")), "{lists:?}");
            deployment.api.cancel_task(&task).await.expect("canceled");
            until("it is gone", async || tool.containers(&deployment.work_dir()).await.is_empty()).await;
        };
        beside(&deployment, tool.handler(&deployment), watch).await;
        assert_eq!(tool.containers(&deployment.work_dir()).await, "");
    }
}

#[tokio::test]
async fn a_task_that_runs_too_long_is_killed_and_its_artifacts_are_uploaded() {
    for tool in tools() {
        let mut deployment = Deployment::start().await;
        deployment.clock = Clock::tokio();
        let artifacts = json!({ "public/a": { "type": "file", "path": "/tmp/a" } });
        let keys = json!({ "maxRunTime": 30, "artifacts": artifacts });
        let script = "trap '' TERM; echo made >/tmp/a; while :; do :; done";
        let task = create(&deployment, script, keys, &[]).await;
        let watch = async {
            until_running(&deployment, &tool).await;
            let container = tool.containers(&deployment.work_dir()).await;
            let look = ["exec", &container, "sh", "-c", "cat /tmp/a || true"];
            until("the artifact is made", async || tool.call(&look).await == "made").await;
            pass(Duration::from_secs(30)).await;
            deployment.ended(&task).await
        };
        let ended = beside(&deployment, tool.handler(&deployment), watch).await;
        assert_eq!(ended.states, ["failed"], "{}", ended.log);
        assert!(ended.log.contains("stopped after maxRunTime, 30 s"), "{}", ended.log);
        assert_eq!(deployment.queue.content(&task, 0, "public/a").await, b"made\n", "{}", ended.log);
        assert_eq!(tool.containers(&deployment.work_dir()).await, "");
    }
}

/// What hangs keeps the handler from ending in time, so that the worker drops it.
#[tokio::test]
async fn a_handler_that_is_dropped_leaves_no_container() {
    let Some(tool) = docker() else { return };
    let deployment = with_status_polls().await;
    let script = "case $* in *.State.*) exec sleep 1000;; kill*) exit 1;; esac; client \"$@\"";
    let config = tool.but(deployment.folder.path(), script);
    let task = create(&deployment, "trap '' TERM; while :; do :; done", json!({}), &[]).await;
    let watch = async {
        until_running(&deployment, &tool).await;
        deployment.api.cancel_task(&task).await.expect("canceled");
        until("it is gone", async || tool.containers(&deployment.work_dir()).await.is_empty()).await;
    };
    beside(&deployment, handler(&deployment, config), watch).await;
    assert_eq!(tool.containers(&deployment.work_dir()).await, "");
}

#[tokio::test]
async fn a_container_that_cannot_be_removed_keeps_its_slot() {
    let Some(tool) = docker() else { return };
    let deployment = Deployment::start().await;
    let gate = deployment.folder.path().join("gate");
    let script = format!(
        "case $* in rm*) test -e {} || {{ echo daemon is stuck >&2; exit 1; }};; esac; client \"$@\"",
        gate.display()
    );
    let config = tool.but(deployment.folder.path(), &script);
    let (first, second) =
        (create(&deployment, "true", json!({}), &[]).await, create(&deployment, "true", json!({}), &[]).await);
    let watch = async {
        let log = deployment.ended(&first).await.exception("internal-error");
        assert!(log.contains("the container may still run") && log.contains("daemon is stuck"), "{log}");
        assert_eq!(deployment.queue.status(&second).await["state"], "pending");
        std::fs::write(&gate, "").expect("written");
        deployment.ended(&second).await.completed();
    };
    beside(&deployment, handler(&deployment, config), watch).await;
    assert_eq!(tool.containers(&deployment.work_dir()).await, "");
}

#[tokio::test]
async fn a_worker_does_not_start_where_it_cannot_remove_containers() {
    let Some(tool) = docker() else { return };
    let deployment = Deployment::start().await;
    let config = tool.but(deployment.folder.path(), "echo cannot connect >&2; exit 1");
    let why = deployment.worker(handler(&deployment, config), 1).run().await.expect_err("it does not start");
    let why = why.to_string();
    assert!(why.contains("[handler.command.containers]") && why.contains("cannot connect"), "{why}");
}

fn start_worker(deployment: &Deployment, tool: &Tool, root_url: &str) -> Process {
    let folder = deployment.folder.path();
    let list = |words: &[String]| json!(words).to_string();
    // Only root can run commands as other users.
    let users = if rustix::process::geteuid().is_root() { "[\"man\"]" } else { "[]" };
    let text = format!(
        "[host]\ntask_users = {users}\n[source.ci]\nkind = \"taskcluster\"\nroot_url = \"{root_url}\"\ntask_queue = \"{TASK_QUEUE}\"\ndialect = \"claim-work\"\n\
         client_id = \"{CLIENT_ID}\"\naccess_token_file = \"token\"\nhandler = \"d\"\n\
         [handler.d]\nkind = \"command\"\n[handler.d.containers]\nprogram = \"{}\"\noptions = {}\n",
        tool.0[0],
        list(&tool.0[1..]),
    );
    let (config, token) = (folder.join("journeyman.toml"), folder.join("token"));
    std::fs::write(&config, text).expect("written");
    std::fs::write(&token, TOKEN).expect("written");
    std::fs::set_permissions(&token, std::fs::Permissions::from_mode(0o600)).expect("changed");
    let variables = Tool::variables();
    let variables = variables.iter().map(|(name, value)| (*name, value.as_str()));
    let variables: Vec<_> = variables.chain([("JOURNEYMAN__WORKER__CAPACITY", "1")]).collect();
    Process::of(command("worker", folder, &config, &variables))
}

#[tokio::test]
async fn the_next_start_removes_what_a_killed_worker_left() {
    for tool in tools() {
        let deployment = Deployment::start().await;
        let root_url = deployment.queue.service.root_url().to_owned();
        // Without its variables, nothing but the label says whose it is.
        let script = "exec env -i /bin/sh -c 'trap \"\" TERM; while :; do :; done'";
        let task = create(&deployment, script, json!({}), &[]).await;
        let work_dir = deployment.folder.path().join("work");
        let worker = start_worker(&deployment, &tool, &root_url);
        until("a container runs", async || !tool.containers(&work_dir).await.is_empty()).await;
        until("the task runs", async || deployment.queue.status(&task).await["state"] == "running").await;
        worker.signal(Signal::KILL);
        worker.ends().await;
        let left: BTreeSet<String> = tool.containers(&work_dir).await.lines().map(str::to_owned).collect();
        assert_eq!(left.len(), 1);
        deployment.api.cancel_task(&task).await.expect("canceled");
        let mut next = start_worker(&deployment, &tool, &root_url);
        next.says("removed containers that a previous worker process has left").await;
        assert_eq!(tool.containers(&work_dir).await, "");
        // The worker process contains it.
        let artifacts = json!({ "public/a": { "type": "file", "path": "/tmp/a" } });
        let task = create(&deployment, "echo made | tee /tmp/a", json!({ "artifacts": artifacts }), &[]).await;
        let log = deployment.ended(&task).await.completed();
        assert!(log.contains("\nmade\n"), "{log}");
        assert_eq!(deployment.queue.content(&task, 0, "public/a").await, b"made\n", "{log}");
        assert_eq!(tool.containers(&work_dir).await, "");
        next.drained().await;
    }
}

#[tokio::test]
async fn caches_are_kept_from_task_to_task_and_need_a_scope() {
    for tool in tools() {
        let deployment = Deployment::start().await;
        let handler = tool.handler(&deployment);
        let keys = || json!({ "cache": { "build": "/cache/a,b" } });
        let script = "echo x >>/cache/a,b/file; cat /cache/a,b/file";
        let log = run_scoped(&deployment, &handler, script, keys(), &["docker-worker:cache:build"]).await.completed();
        assert!(log.contains("\nx\n") && !log.contains("\nx\nx\n"), "{log}");
        let log = run_scoped(&deployment, &handler, script, keys(), &["generic-worker:cache:*"]).await.completed();
        assert!(log.contains("\nx\nx\n"), "{log}");
        let log = run(&deployment, &handler, script, keys()).await.exception("malformed-payload");
        assert!(
            log.contains("payload/cache/build: the task lacks the scope docker-worker:cache:build or generic"),
            "{log}"
        );
        let keys = json!({ "cache": { "build": "/cache" }, "onExitStatus": { "purgeCaches": [3] } });
        run_scoped(&deployment, &handler, "exit 3", keys.clone(), &["docker-worker:cache:build"]).await;
        let log =
            run_scoped(&deployment, &handler, "ls /cache", keys, &["docker-worker:cache:build"]).await.completed();
        assert!(log.contains("cache build at cache0: new"), "{log}");
    }
}

#[tokio::test]
async fn files_directories_and_volumes_are_uploaded_and_links_lead_nowhere() {
    for tool in tools() {
        let deployment = Deployment::start().await;
        std::fs::write(deployment.folder.path().join("of-the-host"), "host").expect("written");
        let artifacts = json!({
            "public/file": { "type": "file", "path": "/tmp/out/a.txt" },
            "public/dir": { "type": "directory", "path": "/tmp/out/" },
            "public/volume": { "type": "volume", "path": "/volume" },
            "public/missing": { "type": "file", "path": "/tmp/none" },
            "public/link": { "type": "file", "path": "/tmp/host" },
        });
        let script = format!(
            "mkdir -p /tmp/out/sub; echo a >/tmp/out/a.txt; echo b >/tmp/out/sub/b; ln -s {host} /tmp/out/host; ln -s {host} /tmp/host; \
             echo v >/volume/v; ln -s {host} /volume/host",
            host = deployment.folder.path().join("of-the-host").display()
        );
        let keys = json!({ "artifacts": artifacts, "log": "public/own.log" });
        let task = create(&deployment, &script, keys, &[]).await;
        let watch = async { assert_eq!(deployment.queue.resolved(&task).await["state"], "completed") };
        beside(&deployment, tool.handler(&deployment), watch).await;
        let stored = deployment.queue.content(&task, 0, "public/own_backing.log").await;
        let log = String::from_utf8_lossy(&stored).into_owned();
        for (name, content) in [("public/file", "a\n"), ("public/dir/sub/b", "b\n"), ("public/volume/v", "v\n")] {
            let found = deployment.queue.content(&task, 0, name).await;
            assert_eq!(String::from_utf8_lossy(&found), content, "{name}: {log}");
        }
        for name in ["public/dir/host", "public/volume/host", "public/link"] {
            let run = journeyman_domain::id::Run { task: task.clone(), run: 0 };
            assert!(deployment.api.artifact(&run, name).await.is_err(), "{name}: {log}");
        }
        assert!(log.contains("public/missing: /tmp/none cannot be copied"), "{log}");
    }
}

#[tokio::test]
async fn the_proxy_of_a_task_serves_its_container() {
    for tool in tools() {
        let deployment = Deployment::start().await;
        let script = "wget -q -O - $TASKCLUSTER_PROXY_URL/api/queue/v1/task/$TASK_ID/status";
        let keys = json!({ "features": { "taskclusterProxy": true } });
        let scopes = ["queue:status:*"];
        let log = run_scoped(&deployment, &tool.handler(&deployment), script, keys.clone(), &scopes).await.completed();
        assert!(log.contains("\"state\":\"running\""), "{log}");
        let config = ContainersConfig { network: "none".into(), ..tool.config() };
        let log = run(&deployment, &handler(&deployment, config), "true", keys).await.exception("malformed-payload");
        assert!(
            log.contains("payload/features/taskclusterProxy: this worker's containers are on the network \"none\""),
            "{log}"
        );
    }
}

/// The image under another name, as a file.
pub(super) async fn saved(tool: &Tool, folder: &Path, name: &str) -> PathBuf {
    let path = folder.join("image.tar");
    tool.call(&["tag", IMAGE, name]).await;
    tool.call(&["save", "-o", path.to_str().expect("text"), name]).await;
    tool.call(&["rmi", name]).await;
    path
}

#[tokio::test]
async fn saved_images_are_loaded_once_and_leave_no_name_behind() {
    for tool in tools() {
        let deployment = Deployment::start().await;
        let own = format!("localhost/own-{}", uuid::Uuid::new_v4().simple());
        let path = saved(&tool, deployment.folder.path(), &own).await;
        let artifacts = json!([
            { "type": "file", "path": "image.tar", "name": "public/image.tar" },
            { "type": "file", "path": "image.tar.gz", "name": "public/image.tar.gz" },
        ]);
        let script = format!("cp {} image.tar && gzip -k image.tar", path.display());
        let made = deployment.create(&script, json!({ "artifacts": artifacts }), |_| {}).await;
        deployment.run(&[&made]).await.remove(0).completed();
        deployment.answers.lock().index.insert("project.image".to_owned(), made.to_string());
        let handler = tool.handler(&deployment);
        let gz = json!({ "image": { "type": "task-image", "taskId": made.as_str(), "path": "public/image.tar.gz" } });
        let log = run(&deployment, &handler, "echo it runs", gz.clone()).await.completed();
        assert!(log.contains("\nit runs\n") && log.contains(", loaded in "), "{log}");
        let log = run(&deployment, &handler, "echo it runs", gz).await.completed();
        assert!(log.contains("\nit runs\n") && log.contains(", loaded before"), "{log}");
        let plain =
            json!({ "image": { "type": "indexed-image", "namespace": "project.image", "path": "public/image.tar" } });
        let log = run(&deployment, &handler, "echo it runs", plain).await.completed();
        assert!(log.contains("\nit runs\n"), "{log}");
        let id = tool.call(&["image", "inspect", "-f", "{{.Id}}", IMAGE]).await;
        let id = id.trim_start_matches("sha256:");
        let by_id = run(&deployment, &handler, "true", json!({ "image": &id[..12] })).await;
        assert_ne!(by_id.states, ["completed"], "an image is not to be had by its id: {}", by_id.log);
        let images = tool.call(&["images"]).await;
        assert!(!images.contains(&own["localhost/".len()..]), "{images}");
        let none = json!({ "image": { "type": "task-image", "taskId": made.as_str(), "path": "public/none" } });
        run(&deployment, &handler, "true", none).await.exception("malformed-payload");
    }
}

#[tokio::test]
async fn a_file_that_is_no_image_is_malformed() {
    for tool in tools() {
        let deployment = Deployment::start().await;
        let artifacts = json!([{ "type": "file", "path": "image.tar", "name": "public/image.tar" }]);
        let made = deployment.create("echo no image >image.tar", json!({ "artifacts": artifacts }), |_| {}).await;
        deployment.run(&[&made]).await.remove(0).completed();
        let image = json!({ "image": { "type": "task-image", "taskId": made.as_str(), "path": "public/image.tar" } });
        let log = run(&deployment, &tool.handler(&deployment), "true", image).await.exception("malformed-payload");
        assert!(log.contains("payload/image: artifact public/image.tar of"), "{log}");
    }
}

#[tokio::test]
async fn an_image_that_is_nowhere_is_malformed_and_a_registry_that_is_down_is_not() {
    let Some(tool) = docker() else { return };
    let mut deployment = Deployment::start().await;
    let unknown = async || {
        let body =
            json!({ "errors": [{ "code": "NAME_UNKNOWN", "message": "repository name not known to registry" }] });
        (axum::http::StatusCode::NOT_FOUND, axum::Json(body))
    };
    let registry = axum::Router::new().route("/v2/", axum::routing::get(|| async { "{}" })).fallback(unknown);
    let address = deployment.serve(registry).await;
    let handler = tool.handler(&deployment);
    let image = json!({ "image": format!("{}/none:1", &address["http://".len()..]) });
    let log = run(&deployment, &handler, "true", image).await.exception("malformed-payload");
    assert!(log.contains("payload/image: cannot pull"), "{log}");
    let log = run(&deployment, &handler, "true", json!({ "image": "127.0.0.1:1/none" })).await;
    assert_eq!(log.states, ["exception/resource-unavailable"], "{}", log.log);
}

#[tokio::test]
async fn what_is_not_allowed_or_not_supported_is_named() {
    let Some(tool) = docker() else { return };
    let deployment = Deployment::start().await;
    let config = ContainersConfig { allow: vec![Permission::Privileged, Permission::AllowPtrace], ..tool.config() };
    let handler = handler(&deployment, config);
    for (keys, said) in [
        (json!({ "features": { "interactive": true } }), "payload/features/interactive: not supported by this worker"),
        (json!({ "features": { "dind": true } }), "payload/features/dind: not supported"),
        (
            json!({ "capabilities": { "privileged": true }, "features": { "chainOfTrust": true } }),
            "payload/features/chainOfTrust: a privileged container can read the key",
        ),
        (json!({ "capabilities": { "privileged": true } }), "lacks the scope docker-worker:capability:privileged"),
        (json!({ "features": { "allowPtrace": true } }), "lacks the scope docker-worker:feature:allowPtrace"),
        (json!({ "capabilities": { "disableSeccomp": true } }), "disableSeccomp: this worker does not allow it"),
        (
            json!({ "capabilities": { "devices": { "kvm": true } } }),
            "payload/capabilities/devices/kvm: this worker does not allow it",
        ),
        (
            json!({ "capabilities": { "devices": { "phone": true } } }),
            "payload/capabilities/devices/phone: not supported",
        ),
        (json!({ "cache": { "c": "relative" } }), "payload/cache/c: use an absolute path"),
        (json!({ "image": "--privileged" }), "payload/image: not the name of an image"),
        (json!({ "image": "docker-archive:/etc/image.tar" }), "payload/image: not the name of an image"),
        (json!({ "image": "dir:etc" }), "payload/image: not the name of an image"),
        (json!({ "image": "sha256:0a1b" }), "payload/image: not the name of an image"),
        (
            json!({ "env": { "BASH_FUNC_echo%%": "() { id\n}" } }),
            "payload/env/BASH_FUNC_echo%%: a container gets no values",
        ),
        (json!({ "cache": { "c": "/c", "d": "/c" } }), "payload/cache/d: another cache has its path"),
        (json!({ "unknown": 1 }), "payload: "),
    ] {
        let log = run(&deployment, &handler, "true", keys).await.exception("malformed-payload");
        assert!(log.contains(said), "{said}: {log}");
    }
    let keys = json!({ "features": { "allowPtrace": true, "dind": false, "chainOfTrust": true } });
    let task = create(&deployment, "true", keys, &["docker-worker:feature:*"]).await;
    deployment.run_with(handler, 1, &[&task]).await.remove(0).completed();
    let list = deployment.queue.content(&task, 0, "public/chain-of-trust.json").await;
    assert!(String::from_utf8_lossy(&list).contains("public/logs/certified.log"));
}

#[tokio::test]
async fn without_a_section_a_payload_with_an_image_says_what_is_missing() {
    let deployment = Deployment::start().await;
    let handler = with_containers(deployment.handler(), None, "build");
    let log = run(&deployment, &handler, "true", json!({})).await.exception("malformed-payload");
    assert!(
        log.contains("payload/image: this worker runs no containers, for which it needs [handler.build.containers]"),
        "{log}"
    );
    let task = deployment.create("echo a command", json!({}), |_| {}).await;
    let log = deployment.run_with(handler, 1, &[&task]).await.remove(0).completed();
    assert!(log.contains("\na command\n"), "{log}");
}

#[tokio::test]
async fn commands_run_beside_containers() {
    let Some(tool) = docker() else { return };
    let deployment = Deployment::start().await;
    let handler = tool.handler(&deployment);
    let task = deployment.create("echo a command", json!({}), |_| {}).await;
    let log = deployment.run_with(Arc::clone(&handler), 1, &[&task]).await.remove(0).completed();
    assert!(log.contains("\na command\n"), "{log}");
    let schema = handler.schema();
    assert!(schema["then"]["properties"]["image"].is_object() && schema["else"]["properties"]["mounts"].is_object());
    assert!(jsonschema::validator_for(&schema).expect("it is valid").is_valid(&payload("true", &json!({}))));
}
