//! Screwdriver's own executor for Kubernetes against the stand-in of its API server.

use std::process::Stdio;
use std::time::Duration;

use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader, Lines};
use tokio::process::{Child, ChildStdin, ChildStdout, Command};
use tokio::time::timeout;

use crate::support::cluster::{Cluster, NAMESPACE, TOKEN};
use crate::support::gremlin::{self, Gremlin};
use crate::support::needs;

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
        let folder = needs("JOURNEYMAN_TEST_SCREWDRIVER_EXECUTOR")?;
        let mut command = Command::new("node");
        command.arg(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/support/screwdriver_executor.js")).arg(folder);
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
