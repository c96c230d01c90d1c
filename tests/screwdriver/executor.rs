//! Screwdriver's own executor for Kubernetes against the stand-in of its API server.

use std::process::Stdio;
use std::time::Duration;

use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader, Lines};
use tokio::process::{Child, ChildStdin, ChildStdout, Command};
use tokio::time::timeout;

use crate::support::cluster::{Cluster, NAMESPACE, TOKEN};
use crate::support::gremlin::{self, Gremlin};

/// The token of the builds of tests.
pub(crate) const BUILD_TOKEN: &str = "eyJhbGciOiJIUzI1NiJ9.eyJ1c2VybmFtZSI6MTAwMSwic2NvcGUiOlsidGVtcG9yYWwiXX0.c2ln";

/// The executor with its options, in a process of its own. It ends when it is dropped.
pub(crate) struct Executor {
    options: Value,
    input: ChildStdin,
    answers: Lines<BufReader<ChildStdout>>,
    _node: Child,
}

impl Executor {
    /// The executor with these pods and this build API; `None` where npm had it not.
    pub(crate) fn start(cluster: &Cluster, api: &str) -> Option<Self> {
        let folder = std::env::var("JOURNEYMAN_TEST_SCREWDRIVER_EXECUTOR").ok().filter(|value| !value.is_empty());
        if folder.is_none() {
            let is_needed = std::env::var("CI").is_ok_and(|value| value == "true");
            assert!(!is_needed, "JOURNEYMAN_TEST_SCREWDRIVER_EXECUTOR is not set; tests/run sets it");
            eprintln!("NOT TESTED: JOURNEYMAN_TEST_SCREWDRIVER_EXECUTOR is not set; tests/run sets it");
        }
        let mut command = Command::new("node");
        command.arg(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/support/screwdriver_executor.js")).arg(folder?);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).kill_on_drop(true);
        let mut node = command.spawn().expect("node starts");
        let host = cluster.url().replace("http://", "");
        // The deployment that was recorded has it so.
        let options = json!({
            "ecosystem": { "api": api, "store": api, "ui": api, "cache": { "strategy": "s3", "path": "/" } },
            "kubernetes": {
                "host": host, "token": TOKEN, "jobsNamespace": NAMESPACE, "terminationGracePeriodSeconds": 60,
            },
            "requestretry": { "retryDelay": 1, "maxAttempts": 1 },
        });
        let answers = BufReader::new(node.stdout.take().expect("it is piped")).lines();
        Some(Self { options, input: node.stdin.take().expect("it is piped"), answers, _node: node })
    }

    /// What `start`, `verify` or `stop` of a build returns, or its error's message.
    pub(crate) async fn call(&mut self, method: &str, build_config: &Value) -> Result<Value, String> {
        let request = json!({ "do": method, "buildConfig": build_config, "options": self.options });
        self.input.write_all(format!("{request}\n").as_bytes()).await.expect("node reads");
        let answer = timeout(Duration::from_secs(60), self.answers.next_line()).await.expect("node answers in time");
        let answer = answer.expect("it is text").expect("node answers");
        let answer: Value = serde_json::from_str(&answer).expect("it is JSON");
        answer["error"].as_str().map_or_else(|| Ok(answer["result"].clone()), |error| Err(error.to_owned()))
    }
}

/// A recorded message that starts a build, with a token that is one.
pub(crate) fn start_message() -> Value {
    let text = include_str!("../../fixtures/screwdriver/start.json");
    serde_json::from_str(&text.replace("<jwt>", BUILD_TOKEN)).expect("it is JSON")
}

/// A build API that takes every update.
pub(crate) async fn build_api() -> Gremlin {
    Gremlin::start(|_| vec![gremlin::json(200, &json!({}))]).await
}

/// The pod as the executor sends it for a start message; `None` where npm had it not.
pub(crate) async fn pod_of_executor(message: &Value) -> Option<Value> {
    let (cluster, api) = (Cluster::start().await, build_api().await);
    let mut executor = Executor::start(&cluster, &api.url())?;
    executor.call("start", &message["buildConfig"]).await.expect("it starts");
    let posts: Vec<_> = cluster.calls().into_iter().filter(|call| call.verb == "create").collect();
    assert_eq!(posts.len(), 1, "{posts:?}");
    Some(posts[0].body.clone())
}

#[tokio::test]
async fn the_executor_of_screwdriver_starts_verifies_and_stops_a_build_on_the_stand_in() {
    let (cluster, api, message) = (Cluster::start().await, build_api().await, start_message());
    let Some(mut executor) = Executor::start(&cluster, &api.url()) else { return };
    let config = &message["buildConfig"];
    assert_eq!(executor.call("start", config).await, Ok(json!(false)), "the pod has no node yet");
    let pods = cluster.pods();
    let [pod] = pods.as_slice() else { panic!("no pod, or several: {pods:#?}") };
    let name = pod["metadata"]["name"].as_str().expect("a name");
    assert!(pod["metadata"]["labels"]["sdbuild"] == "1001" && name.starts_with("1001-"), "{pod:#}");
    assert_eq!(api.asked()[0].json(), json!({ "statusMessage": "Waiting for resources to be available." }));

    assert_eq!(executor.call("verify", config).await, Ok(json!("waiting")));
    cluster.schedule(name, "node-a");
    assert_eq!(executor.call("verify", config).await, Ok(json!("initializing")));
    cluster.waiting(name, "1001", "ImagePullBackOff", "no such image");
    let text = "Build failed to start. Please check if your image is valid.";
    assert_eq!(executor.call("verify", config).await, Ok(json!(text)));
    cluster.running(name);
    assert_eq!(executor.call("verify", config).await, Ok(json!("")));
    let update = api.asked().last().expect("an update").json();
    assert_eq!(update["stats"]["hostname"], "node-a");
    executor.call("stop", config).await.expect("it stops");
    assert!(cluster.pods().is_empty());
}

#[tokio::test]
async fn the_executor_of_screwdriver_makes_a_pod_of_a_recorded_message() {
    let Some(pod) = pod_of_executor(&start_message()).await else { return };
    let container = &pod["spec"]["containers"][0];
    assert!(container["name"] == "1001" && container["image"] == "scn/ok:1", "{pod:#}");
}
