//! The proxy of a task, and credentials for programs.

use std::os::unix::fs::PermissionsExt as _;

use journeyman::config::Environment;
use journeyman::config::schema::ProgramHandler;
use journeyman::handler::program::Program;
use journeyman::handler::task_proxy::with_task_credentials;
use serde_json::{Value, json};

use crate::payloads::deployment::{Deployment, TASK_QUEUE};
use crate::support::{until, within};

/// A Python program that has a function `call`.
fn python(script: &str) -> Value {
    let call = r#"
import json, os, sys, urllib.request, urllib.error
proxy = os.environ["TASKCLUSTER_PROXY_URL"]
class Stay(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *arguments): return None
opener = urllib.request.build_opener(Stay)
def call(method, path, body=None, **headers):
    request = urllib.request.Request(proxy + path, method=method, data=body, headers=headers)
    try:
        with opener.open(request) as answer: return answer.status, answer.read(), answer.headers
    except urllib.error.HTTPError as error: return error.code, error.read(), error.headers
"#;
    json!({ "command": [["python3", "-c", format!("{call}{script}")]], "features": { "taskclusterProxy": true } })
}

fn with_scopes(scopes: &[&str]) -> impl FnOnce(&mut Value) {
    let scopes = json!(scopes);
    move |definition| definition["scopes"] = scopes
}

#[tokio::test]
async fn calls_are_signed_with_the_scopes_of_the_task_and_no_others() {
    let deployment = Deployment::start().await;
    let script = format!(
        r#"
task = os.environ["TASK_ID"]
print("status", call("GET", f"/api/queue/v1/task/{{task}}/status")[0])
print("old path", call("GET", f"/queue/v1/task/{{task}}/status")[0])
print("pending", call("GET", "/api/queue/v1/pending/{queue}")[0])
print("claimed", call("GET", "/api/queue/v1/task-queues/{queue}/claimed")[0])
run = os.environ["RUN_ID"]
body = json.dumps({{"storageType": "reference", "expires": "2099-01-01T00:00:00Z", "url": "https://example.com", "contentType": "text/plain"}})
artifact = f"/api/queue/v1/task/{{task}}/runs/{{run}}/artifacts/public%2Fmine"
answer = call("POST", artifact, body.encode(), **{{"Content-Type": "application/json"}})
print("artifact", answer[0], answer[2].get("X-Taskcluster-Endpoint", "").endswith("public%2Fmine"))
print("report", call("POST", f"/api/queue/v1/task/{{task}}/runs/{{run}}/completed", b"")[0])
print("elsewhere", call("GET", "/../x")[0], call("GET", "/credentials")[0])
"#,
        queue = TASK_QUEUE.replace('/', "%2F")
    );
    let change = |definition: &mut Value| {
        definition["scopes"] = json!([format!("queue:pending-count:{TASK_QUEUE}"), "queue:status:*"]);
        definition["expires"] = json!("2099-06-01T00:00:00Z");
    };
    let log = deployment.run_one("", python(&script), change).await.completed();
    for said in ["status 200", "old path 200", "pending 200", "claimed 403", "artifact 200 True", "report 403"] {
        assert!(log.contains(&format!("\n{said}\n")), "{said}: {log}");
    }
    assert!(log.contains("\nelsewhere 40"), "{log}");
}

#[tokio::test]
async fn a_signed_url_is_read_without_a_signature_of_its_own() {
    let deployment = Deployment::start().await;
    let script = r#"
task = os.environ["TASK_ID"]
root = os.environ["TASKCLUSTER_ROOT_URL"]
queue = "test%2Fworker"
status, body, headers = call("POST", "/bewit", f"{root}/api/queue/v1/pending/{queue}".encode())
print("bewit", status, body.decode() == headers["Location"])
with urllib.request.urlopen(body.decode()) as answer: print("read", answer.status)
print("foreign", call("POST", "/bewit", b"https://example.com/api/x")[0])
"#;
    let scope = format!("queue:pending-count:{TASK_QUEUE}");
    let log = deployment.run_one("", python(script), with_scopes(&[&scope])).await.completed();
    assert!(log.contains("\nbewit 303 True\nread 200\nforeign 400\n"), "{log}");
    assert!(!log.contains("bewit="), "{log}");
}

#[tokio::test]
async fn bodies_are_streamed_and_the_proxy_ends_with_its_task() {
    let deployment = Deployment::start().await;
    let script = r#"
task, run = os.environ["TASK_ID"], os.environ["RUN_ID"]
print("proxy", proxy, flush=True)
body = json.dumps({"storageType": "error", "expires": "2099-01-01T00:00:00Z", "reason": "file-missing-on-worker", "message": "x" * 4000}).encode()
def pieces():
    for at in range(0, len(body), 1000): yield body[at:at + 1000]
answer = call("POST", f"/api/queue/v1/task/{task}/runs/{run}/artifacts/public%2Fe", pieces(), **{"Content-Type": "application/json"})
print("chunked", answer[0])
"#;
    let later = |definition: &mut Value| definition["expires"] = json!("2099-06-01T00:00:00Z");
    let log = deployment.run_one("", python(script), later).await.completed();
    assert!(log.contains("\nchunked 200\n"), "{log}");
    let address = log.lines().find_map(|line| line.strip_prefix("proxy http://")).expect("it says where");
    assert!(tokio::net::TcpStream::connect(address).await.is_err());
}

#[tokio::test]
async fn a_process_that_is_not_of_the_task_is_refused() {
    let deployment = Deployment::start().await;
    let gate = deployment.folder.path().join("gate");
    let script = format!(
        r#"
import subprocess, time
print("own child", subprocess.run([sys.executable, "-c", "import os, urllib.request; print(urllib.request.urlopen(os.environ['TASKCLUSTER_PROXY_URL'] + '/api/queue/v1/task/' + os.environ['TASK_ID'] + '/status').status)"], capture_output=True).stdout, flush=True)
open({gate:?}, "w").write(proxy)
while os.path.exists({gate:?}): time.sleep(0.05)
"#
    );
    let task = deployment.create("", python(&script), with_scopes(&["queue:status:*"])).await;
    let stranger = async {
        let mut url = String::new();
        until("the task runs", async || {
            url = std::fs::read_to_string(&gate).unwrap_or_default();
            !url.is_empty()
        })
        .await;
        let answer = reqwest::get(format!("{url}/api/queue/v1/task/{task}/status")).await;
        std::fs::remove_file(&gate).expect("it is there");
        answer.is_err()
    };
    let tasks = [&task];
    let (mut ended, refused) = within("both", async { tokio::join!(deployment.run(&tasks), stranger) }).await;
    let log = ended.remove(0).completed();
    assert!(refused && log.contains("own child b'200"), "{log}");
    assert!(log.contains("the task's proxy refused a process that is not of this task"), "{log}");
}

#[tokio::test]
async fn a_program_asks_for_the_credentials_of_its_run() {
    let deployment = Deployment::start().await;
    let path = deployment.folder.path().join("handler");
    let script = r#"#!/usr/bin/env python3
import json, os, urllib.request
answer = json.load(urllib.request.urlopen(os.environ["TASKCLUSTER_PROXY_URL"] + "/credentials"))
task = os.environ["TASK_ID"]
print("client", answer["clientId"].startswith("task-client/" + task), len(answer["accessToken"]) > 20)
print("secret", answer["accessToken"])
print("environment", any(answer["accessToken"] in value for value in os.environ.values()))
"#;
    std::fs::write(&path, script).expect("written");
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).expect("changed");
    let config = ProgramHandler::new(vec![path.display().to_string()]);
    let environment = Environment::from_pairs(&[("PATH", &std::env::var("PATH").expect("a path"))]);
    let program = Program::new("p", config, &environment).expect("it is valid");
    let handler = with_task_credentials(std::sync::Arc::new(program), deployment.mounter().client());
    let task = deployment.create("", json!({}), |_| {}).await;
    let log = deployment.run_with(handler, 1, &[&task]).await.remove(0).completed();
    assert!(log.contains("client True True") && log.contains("environment False"), "{log}");
    assert!(log.contains("secret [redacted]"), "{log}");
}
