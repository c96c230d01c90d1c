//! What queues and workers tell a notifier of their own accord.

use std::process::{Command, Stdio};

use futures_util::future::ready;
use rustix::process::Signal;
use serde_json::Value;

use crate::notifier::support::within;
use crate::support::gremlin::{Act, Asked, Gremlin, answer, unused_address};
use crate::support::process::Process;

const QUEUE: &str = "[queue]\ndb = \"queue.db\"\nlisten = \"127.0.0.1:0\"\nauth = \"open\"\n";
const WORKER: &str = "[worker]\nid = \"here\"\ngroup = \"test\"\nwork_dir = \"work\"\n[host]\nmetadata_service = \"off\"\n\
     [handler.command]\nkind = \"command\"\n\
     [source.ci]\nkind = \"taskcluster\"\ntask_queue = \"build/linux\"\nhandler = \"command\"\n";

async fn accepting() -> Gremlin {
    Gremlin::responding(|_| Box::pin(ready(answer(202, "application/json", r#"{"accepted":1,"duplicates":0}"#)))).await
}

/// The events that a notifier has got.
fn events(notifier: &Gremlin) -> Vec<Value> {
    notifier.asked().iter().flat_map(|asked| asked.json().as_array().expect("a list").clone()).collect()
}

struct Host(tempfile::TempDir);

impl Host {
    fn new() -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        for (name, text) in [("queue.toml", QUEUE), ("worker.toml", WORKER), ("token", "token-of-the-test")] {
            std::fs::write(folder.path().join(name), text).expect("it is written");
        }
        Self(folder)
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_journeyman"));
        command.args(arguments).current_dir(self.0.path()).env_clear();
        command.env("PATH", std::env::var_os("PATH").unwrap_or_default()).stdin(Stdio::null());
        command
    }

    /// Starts a role that tells this notifier.
    fn start(&self, arguments: &[&str], notifier: &str) -> Process {
        let mut command = self.command(arguments);
        command.env("JOURNEYMAN__NOTIFY__URL", notifier).env("JOURNEYMAN__NOTIFY__TOKEN_FILE", "token");
        command.stdout(Stdio::null()).stderr(Stdio::piped());
        Process::of(command)
    }

    /// Returns its root URL too.
    async fn queue(&self, notifier: &str) -> (Process, String) {
        let mut queue = self.start(&["queue", "-c", "queue.toml"], notifier);
        queue.says("queue listening").await;
        let log = queue.log();
        let line = log.lines().find(|line| line.contains("queue listening")).expect("it was said");
        let line: Value = serde_json::from_str(line).expect("a line of JSON");
        (queue, line["root_url"].as_str().expect("a URL").to_owned())
    }

    async fn task(&self, root_url: &str, arguments: &[&str]) -> String {
        let mut command = self.command(&[&["task", arguments[0], "--root-url", root_url], &arguments[1..]].concat());
        let output = tokio::task::spawn_blocking(move || command.output().expect("it runs"));
        let output = within("the end of a command", output).await.expect("it was waited for");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8_lossy(&output.stdout).trim().to_owned()
    }

    async fn canceled_task(&self, root_url: &str) -> String {
        let task = self.task(root_url, &["create", "--queue", "build/linux", "--", "/bin/true"]).await;
        self.task(root_url, &["cancel", &task]).await;
        task
    }
}

#[tokio::test]
async fn p2_a_queue_that_is_killed_tells_of_its_resolved_tasks_once_there_is_a_notifier() {
    let host = Host::new();
    let (queue, root_url) = host.queue(&unused_address().await).await;
    let before = host.canceled_task(&root_url).await;
    queue.signal(Signal::KILL);
    queue.ends().await;
    let notifier = accepting().await;
    let (queue, _) = host.queue(&notifier.url()).await;
    within("an event", notifier.wait_asked(|asked| !asked.is_empty())).await;
    queue.drained().await;
    let (queue, root_url) = host.queue(&notifier.url()).await;
    let after = host.canceled_task(&root_url).await;
    let is_told = |asked: &[Asked]| asked.iter().any(|asked| asked.json()[0]["key"] == after.as_str());
    within("the second event", notifier.wait_asked(is_told)).await;
    let mut events = events(&notifier);
    assert!(events.len() <= 3, "what the notifier has is told no more: {events:?}");
    // The queue may have been stopped before it had noted that.
    events.dedup();
    assert_eq!(events.len(), 2, "{events:?}");
    for (event, task) in events.iter().zip([before, after]) {
        let status = &event["data"]["status"];
        assert_eq!((&event["id"], &event["key"]), (&Value::from(format!("{task}/0/resolved")), &Value::from(task)));
        assert_eq!((&event["type"], &event["source"]), (&Value::from("task.exception"), &Value::from("queue")));
        assert_eq!(event["last"], true, "a run is resolved once");
        assert_eq!((&status["state"], &status["runs"][0]["reasonResolved"]), (&"exception".into(), &"canceled".into()));
    }
    assert_eq!(notifier.asked()[0].header("authorization"), Some("Bearer token-of-the-test"));
    let log = queue.drained().await;
    assert!(!log.contains("token-of-the-test"), "{log}");
}

#[tokio::test]
async fn a_worker_tells_the_outcome_of_a_claim_before_it_exits() {
    let host = Host::new();
    let refusing = Gremlin::start(|_| {
        let accepted = answer(202, "application/json", r#"{"accepted":1,"duplicates":0}"#);
        vec![Act::SayAndReset(Vec::new()), accepted]
    })
    .await;
    let nobody = accepting().await;
    let (queue, root_url) = host.queue(&nobody.url()).await;
    let task = host.task(&root_url, &["create", "--queue", "build/linux", "--", "/bin/false"]).await;
    let root_url = format!("source.ci.root_url={root_url}");
    let worker = host.start(&["worker", "-c", "worker.toml", "--max-tasks", "1", "--set", &root_url], &refusing.url());
    let ended = worker.ends().await;
    assert_eq!(ended.code(), Some(13), "{}", ended.log);
    let asked = refusing.asked();
    assert_eq!((asked.len(), &asked[0].body), (2, &asked[1].body), "the lost call was repeated");
    let event = &events(&refusing)[0];
    for (name, value) in [
        ("source", "worker/test/here".to_owned()),
        ("type", "claim.failed".to_owned()),
        ("id", format!("{task}/0/claim.failed")),
        ("key", task),
    ] {
        assert_eq!(event[name], Value::from(value), "{name}");
    }
    assert_eq!(event["data"]["outcome"], "failed");
    queue.drained().await;
    assert_eq!(events(&nobody)[0]["type"], "task.failed");
}
