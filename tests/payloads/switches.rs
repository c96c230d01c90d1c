//! Logs, encodings and what a payload may ask about itself.

use serde_json::{Value, json};

use crate::payloads::deployment::Deployment;

/// The content of an artifact as it is stored, and how it says it is encoded.
pub(super) async fn stored(deployment: &Deployment, task: &str, name: &str) -> (Vec<u8>, Option<String>) {
    let root = deployment.queue.service.root_url();
    let url = format!("{root}/api/queue/v1/task/{task}/artifacts/{}", urlencoding::encode(name));
    let client = reqwest::Client::builder().no_proxy().build().expect("a client");
    let answer = client.get(url).send().await.expect("an answer");
    assert!(answer.status().is_success(), "{}", answer.status());
    let encoding = answer.headers().get("content-encoding").map(|value| value.to_str().expect("text").to_owned());
    (answer.bytes().await.expect("a body").to_vec(), encoding)
}

#[tokio::test]
async fn artifacts_and_logs_are_stored_with_gzip_unless_they_are_compressed_or_the_payload_declines() {
    let deployment = Deployment::start().await;
    let artifacts = json!([
        { "type": "file", "path": "a.txt", "name": "public/a.txt" },
        { "type": "file", "path": "a.png", "name": "public/a.png" },
        { "type": "file", "path": "a.txt", "name": "public/plain.txt", "contentEncoding": "identity" },
        { "type": "directory", "path": "d", "name": "public/d" },
    ]);
    let script = "mkdir d; seq 1000 >a.txt; cp a.txt a.png; cp a.txt d/x";
    let task = deployment.create(script, json!({ "artifacts": artifacts }), |_| {}).await;
    deployment.run(&[&task]).await.remove(0).completed();
    let text: String = (1..=1000).map(|number| format!("{number}\n")).collect();
    for (name, encoding) in [
        ("public/a.txt", Some("gzip")),
        ("public/a.png", None),
        ("public/plain.txt", None),
        ("public/d/x", Some("gzip")),
        ("public/logs/live_backing.log", Some("gzip")),
    ] {
        let (content, said) = stored(&deployment, task.as_str(), name).await;
        assert_eq!(said.as_deref(), encoding, "{name}");
        assert_eq!(content.starts_with(&[0x1f, 0x8b]), encoding.is_some(), "{name}");
        // Clients of the queue decode it.
        let decoded = deployment.queue.content(&task, 0, name).await;
        assert!(name.ends_with(".log") || decoded == text.as_bytes(), "{name}");
    }
    let mount = json!({ "file": "in", "content": { "taskId": task.as_str(), "artifact": "public/a.txt" } });
    let depends = |definition: &mut Value| definition["dependencies"] = json!([task.as_str()]);
    let log = deployment.run_one("tail -n 1 in", json!({ "mounts": [mount] }), depends).await.completed();
    assert!(log.contains("\n1000\n"), "{log}");
}

#[tokio::test]
async fn logs_have_the_names_that_the_payload_gives_them() {
    let deployment = Deployment::start().await;
    let logs = json!({ "live": "public/own/live.log", "backing": "private/own.log" });
    let task = deployment.create("echo hello", json!({ "logs": logs }), |_| {}).await;
    let plain = deployment.create("echo hello", json!({ "features": { "liveLog": false } }), |_| {}).await;
    let none = deployment.create("echo hello", json!({ "features": { "backingLog": false } }), |_| {}).await;
    let worker = deployment.worker(deployment.handler(), 1);
    let control = worker.control();
    let watched = async {
        for task in [&task, &plain, &none] {
            deployment.queue.resolved(task).await;
        }
        control.drain().await;
    };
    tokio::join!(Box::pin(worker.run()), watched).0.expect("it ran");
    for name in ["public/own/live.log", "private/own.log"] {
        let log = deployment.queue.content(&task, 0, name).await;
        assert!(String::from_utf8_lossy(&log).contains("\nhello\n"), "{name}");
    }
    for (task, names) in [
        (&task, vec!["private/own.log", "public/own/live.log"]),
        (&plain, vec!["public/logs/live_backing.log"]),
        (&none, vec![]),
    ] {
        let run = journeyman_domain::id::Run { task: task.clone(), run: 0 };
        let page = deployment.api.artifacts(&run, None).await.expect("a list");
        let mut found: Vec<_> =
            page.entries.iter().map(|entry| entry["name"].as_str().expect("a name").to_owned()).collect();
        found.sort();
        assert_eq!(found, names);
    }
    for (logs, said) in [
        (json!({ "live": "public/x" }), "payload/logs/live: an artifact has this name too"),
        (json!({ "backing": "a//b" }), "payload/logs/backing: artifact name"),
        (json!({ "live": "x", "backing": "x" }), "payload/logs: both artifacts have one name"),
    ] {
        let keys = json!({ "logs": logs, "artifacts": [{ "type": "file", "path": "x", "name": "public/x" }] });
        let log = deployment.run_one("true", keys, |_| {}).await.exception("malformed-payload");
        assert!(log.contains(said), "{said}: {log}");
    }
}

#[tokio::test]
async fn the_last_lines_of_the_log_say_what_the_task_used() {
    let deployment = Deployment::start().await;
    let keys = json!({ "features": { "resourceMonitor": true } });
    let log = deployment.run_one("head -c 3000000 /dev/zero >f", keys, |_| {}).await.completed();
    let line = log.lines().find(|line| line.contains("resources: ")).expect("it is there");
    assert!(
        line.contains("peak memory ") && line.contains("CPU time ") && line.contains("files of the task 2.9 MiB"),
        "{line}"
    );
}

#[tokio::test]
async fn any_exit_status_may_ask_for_a_retry_and_false_features_are_accepted() {
    let deployment = Deployment::start().await;
    let features =
        json!({ "interactive": false, "chainOfTrust": false, "somethingNew": false, "loopbackVideo": false });
    let keys = json!({ "onExitStatus": { "retry": [7, 4_000_000_000_u32] }, "features": features });
    let task = deployment.create("exit 0", keys, |_| {}).await;
    deployment.run(&[&task]).await.remove(0).completed();
}
