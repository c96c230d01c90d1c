//! Artifacts: upload, download and expiry through signed URLs.

use serde_json::{Value, json};

use super::client::{Answer, Api, iso};
use super::test_queue::TestQueue;

struct Run {
    worker: Api,
    path: String,
    task: String,
}

async fn running(api: &Api) -> Run {
    let task = api.create("p/w", json!({})).await;
    let worker = api.with(&api.claim_work("p/w", "w1", 1).await[0]["credentials"]);
    Run { worker, path: format!("task/{task}/runs/0/artifacts"), task }
}

impl Run {
    async fn declare(&self, name: &str, mut body: Value) -> Answer {
        body["expires"] = iso(self.worker.clock.unix_millis() + 600_000).into();
        self.worker.post(&format!("{}/{}", self.path, urlencoding::encode(name)), body).await
    }

    /// Creates a text artifact and returns the URL to upload it to.
    async fn declare_text(&self, name: &str) -> String {
        let made = self.declare(name, json!({"storageType": "s3", "contentType": "text/plain"})).await.expect(200);
        made["putUrl"].as_str().expect("a URL").to_owned()
    }
}

async fn put(api: &Api, url: &str, kind: &str, body: Vec<u8>) -> Answer {
    api.send(api.http.put(url).header("content-type", kind).body(body)).await
}

async fn content(api: &Api, path: &str) -> Answer {
    let found = api.get(path).await;
    assert_eq!(found.status, 303, "{}", found.text);
    let url = found.json()["url"].as_str().expect("a URL").to_owned();
    assert_eq!(found.headers["location"], url.as_str());
    api.send(api.http.get(url)).await
}

#[tokio::test]
async fn uploaded_content_is_downloaded_unchanged() {
    let server = TestQueue::new().await;
    let run = running(&server.api).await;
    let name = "public/logs/odd name+%.log";
    let url = run.declare_text(name).await;
    let body: String = (0..200_000).map(|line| format!("line {line}\n")).collect();
    assert_eq!(put(&server.api, &url, "text/plain", body.clone().into()).await.status, 200);
    let got = content(&server.api, &format!("{}/{}", run.path, urlencoding::encode(name))).await;
    assert_eq!((got.status, got.headers["content-type"].to_str().ok()), (200, Some("text/plain")));
    assert!(got.text == body, "{} bytes were put and {} got", body.len(), got.text.len());
    let latest = content(&server.api, &format!("task/{}/artifacts/{}", run.task, urlencoding::encode(name))).await;
    assert_eq!(latest.text.len(), body.len());
}

#[tokio::test]
async fn signed_urls_lead_to_the_host_that_the_caller_asked() {
    let server = TestQueue::with(|config| config.listen = ([0, 0, 0, 0], 0).into()).await;
    let root = format!("http://127.0.0.1:{}", server.running.address().port());
    let api = Api { root: root.clone(), ..server.api.clone() };
    let run = running(&api).await;
    let url = run.declare_text("public/x").await;
    assert!(url.starts_with(&root), "{url}");
    let found = api.get(&format!("{}/public%2Fx", run.path)).await.json();
    assert!(found["url"].as_str().expect("a URL").starts_with(&root), "{found}");
    let polled = api.get("poll-task-url/lp/lw").await.expect(200);
    assert!(polled["queues"][0]["signedPollUrl"].as_str().expect("a URL").starts_with(&root), "{polled}");
}

#[tokio::test]
async fn modified_and_expired_urls_are_rejected() {
    let server = TestQueue::new().await;
    let run = running(&server.api).await;
    let url = run.declare_text("public/x").await;
    for wrong in [
        url.replace("public/x", "public/y"),
        url.replace("/0/", "/1/"),
        url.replace("sig=", "sig=A"),
        url.replace("end=1", "end=2"),
    ] {
        assert_eq!(put(&server.api, &wrong, "text/plain", Vec::new()).await.status, 403, "{wrong}");
    }
    assert_eq!(put(&server.api, &url, "text/html", Vec::new()).await.status, 403);
    assert_eq!(server.api.send(server.api.http.get(&url)).await.status, 403);
    server.advance(45 * 60 + 1).await;
    assert_eq!(put(&server.api, &url, "text/plain", Vec::new()).await.status, 403);
}

#[tokio::test]
async fn an_artifact_over_the_size_limit_is_rejected_and_removed() {
    let server = TestQueue::with(|settings| settings.artifact_bytes_max = 1_000).await;
    let run = running(&server.api).await;
    let url = run.declare_text("public/x").await;
    assert_eq!(put(&server.api, &url, "text/plain", vec![b'x'; 1_001]).await.status, 413);
    assert_eq!(put(&server.api, &url, "text/plain", vec![b'x'; 1_000]).await.status, 200);
    let incoming = server.folder.path().join("artifacts/incoming");
    assert_eq!(std::fs::read_dir(incoming).expect("the folder is there").count(), 0);
}

#[tokio::test]
async fn object_artifacts_are_rejected() {
    let server = TestQueue::new().await;
    let run = running(&server.api).await;
    let answer = run.declare("public/o", json!({"storageType": "object", "contentType": "text/plain"})).await;
    assert_eq!(answer.refusal(400).0, "InputValidationError");
}

#[tokio::test]
async fn create_artifact_is_idempotent_and_a_reference_may_become_a_link() {
    let server = TestQueue::new().await;
    let run = running(&server.api).await;
    run.declare_text("public/a").await;
    run.declare_text("public/a").await;
    server.advance(10).await;
    run.declare_text("public/a").await;
    let live = json!({"storageType": "reference", "contentType": "text/plain", "url": "http://host/live"});
    run.declare("public/live", live.clone()).await.expect(200);
    let moved = json!({"storageType": "reference", "contentType": "text/plain", "url": "http://host/other"});
    run.declare("public/live", moved).await.expect(200);
    let link = json!({"storageType": "link", "artifact": "public/a"});
    run.declare("public/live", link).await.expect(200);
    assert_eq!(run.declare("public/live", live).await.refusal(409).0, "RequestConflict");
    let found = server.api.get(&format!("{}/public%2Flive", run.path)).await;
    assert_eq!(found.headers["x-taskcluster-artifact-storage-type"], "s3");
}

#[tokio::test]
async fn link_cycles_are_rejected() {
    let server = TestQueue::new().await;
    let run = running(&server.api).await;
    run.declare("public/a", json!({"storageType": "link", "artifact": "public/b"})).await.expect(200);
    run.declare("public/b", json!({"storageType": "link", "artifact": "public/a"})).await.expect(200);
    assert_eq!(server.api.get(&format!("{}/public%2Fa", run.path)).await.refusal(400).0, "InputError");
}

#[tokio::test]
async fn artifacts_are_accepted_for_25_minutes_after_an_exception() {
    let server = TestQueue::new().await;
    let run = running(&server.api).await;
    let gone = json!({"reason": "internal-error"});
    server.api.post(&format!("task/{}/runs/0/exception", run.task), gone).await.expect(200);
    server.advance(24 * 60).await;
    run.declare_text("public/a").await;
    server.advance(61).await;
    let late = Run { worker: server.api.clone(), ..run };
    let log = json!({"storageType": "s3", "contentType": "text/plain"});
    assert_eq!(late.declare("public/b", log).await.refusal(409).0, "RequestConflict");
}

#[tokio::test]
async fn an_expired_artifact_is_removed_with_its_content() {
    let server = TestQueue::new().await;
    let run = running(&server.api).await;
    let url = run.declare_text("public/x").await;
    assert_eq!(put(&server.api, &url, "text/plain", b"x".to_vec()).await.status, 200);
    let folder = server.folder.path().join("artifacts").join(&run.task);
    let stored = || std::fs::read_dir(&folder).map_or(0, Iterator::count);
    assert_eq!(stored(), 1);
    server.advance(601).await;
    assert!([404, 410].contains(&server.api.get(&format!("{}/public%2Fx", run.path)).await.status));
    server.advance(601).await;
    assert_eq!(stored(), 0);
}

#[tokio::test]
async fn artifacts_of_unclaimed_runs_are_rejected() {
    let server = TestQueue::new().await;
    let task = server.api.create("p/w", json!({})).await;
    let run = Run { worker: server.api.clone(), path: format!("task/{task}/runs/0/artifacts"), task };
    let answer = run.declare("public/x", json!({"storageType": "s3", "contentType": "text/plain"})).await;
    assert_eq!(answer.refusal(400).0, "InputError");
}

#[tokio::test]
async fn e3_a_live_log_leads_to_the_worker_and_then_to_the_stored_log() {
    let server = TestQueue::new().await;
    let run = running(&server.api).await;
    let live = json!({"storageType": "reference", "contentType": "text/plain", "url": "http://127.0.0.1:9/secret"});
    run.declare("public/logs/live.log", live).await.expect(200);
    let path = format!("task/{}/artifacts/public/logs/live.log", run.task);
    let found = server.api.get(&path).await;
    assert_eq!((found.status, found.headers["location"].to_str().ok()), (303, Some("http://127.0.0.1:9/secret")));
    // A link without a content type, as generic-worker sends it.
    let url = run.declare_text("public/logs/live_backing.log").await;
    assert_eq!(put(&server.api, &url, "text/plain", b"all of it".to_vec()).await.status, 200);
    let link = json!({"storageType": "link", "artifact": "public/logs/live_backing.log"});
    run.declare("public/logs/live.log", link).await.expect(200);
    run.worker.bare_post(&format!("task/{}/runs/0/completed", run.task)).await.expect(200);
    assert_eq!(content(&server.api, &path).await.text, "all of it");
}

#[tokio::test]
async fn d4_the_artifact_of_a_resolved_run_cannot_be_replaced() {
    let server = TestQueue::new().await;
    let run = running(&server.api).await;
    let url = run.declare_text("public/x").await;
    for body in ["begun", "stored"] {
        assert_eq!(put(&server.api, &url, "text/plain", body.into()).await.status, 200);
    }
    let unused = run.declare_text("public/unused").await;
    run.worker.bare_post(&format!("task/{}/runs/0/completed", run.task)).await.expect(200);
    for url in [&url, &unused] {
        assert_eq!(put(&server.api, url, "text/plain", b"forged".to_vec()).await.status, 409);
    }
    assert_eq!(content(&server.api, &format!("{}/public%2Fx", run.path)).await.text, "stored");
    assert_eq!(content(&server.api, &format!("{}/public%2Funused", run.path)).await.refusal(404).0, "ResourceNotFound");

    // After an exception what is missing may still be stored.
    let run = running(&server.api).await;
    let (log, late) = (run.declare_text("public/log").await, run.declare_text("public/late").await);
    assert_eq!(put(&server.api, &log, "text/plain", b"log".to_vec()).await.status, 200);
    let gone = json!({"reason": "internal-error"});
    run.worker.post(&format!("task/{}/runs/0/exception", run.task), gone).await.expect(200);
    assert_eq!(put(&server.api, &log, "text/plain", b"forged".to_vec()).await.status, 409);
    assert_eq!(put(&server.api, &late, "text/plain", b"late".to_vec()).await.status, 200);
}

#[tokio::test]
async fn d6_artifacts_are_served_so_that_browsers_do_not_run_them() {
    let server = TestQueue::new().await;
    let run = running(&server.api).await;
    let page = json!({"storageType": "s3", "contentType": "text/html"});
    let made = run.declare("public/report.html", page).await.expect(200);
    let url = made["putUrl"].as_str().expect("a URL");
    assert_eq!(put(&server.api, url, "text/html", b"<script>alert(1)</script>".to_vec()).await.status, 200);
    let got = content(&server.api, &format!("{}/public%2Freport.html", run.path)).await;
    assert_eq!(got.headers["x-content-type-options"], "nosniff");
    let policy = got.headers["content-security-policy"].to_str().expect("text");
    assert!(policy.contains("sandbox") && policy.contains("default-src 'none'"), "{policy}");
}

#[tokio::test]
async fn d6_names_that_leave_a_folder_are_rejected() {
    let server = TestQueue::new().await;
    let run = running(&server.api).await;
    let text = json!({"storageType": "s3", "contentType": "text/plain"});
    for name in ["public/../../etc/passwd", "public/../x", "../x"] {
        assert_eq!(run.declare(name, text.clone()).await.refusal(400).0, "InvalidRequestArguments", "{name}");
    }
    for name in ["public/a..b", "public/...", "public/.x"] {
        run.declare(name, text.clone()).await.expect(200);
    }
}

#[tokio::test]
async fn d8_the_content_of_an_artifact_is_found_without_a_redirect() {
    let server = TestQueue::new().await;
    let api = &server.api;
    let run = running(api).await;
    let url = run.declare_text("public/x").await;
    assert_eq!(put(api, &url, "text/plain", b"x of it".to_vec()).await.status, 200);
    run.declare("public/link", json!({"storageType": "link", "artifact": "public/x"})).await.expect(200);
    let reference = json!({"storageType": "reference", "contentType": "text/plain", "url": "http://host/y"});
    run.declare("public/y", reference).await.expect(200);
    let error = json!({"storageType": "error", "reason": "file-missing-on-worker", "message": "no z"});
    run.declare("public/z", error).await.expect(200);

    for start in [format!("task/{}/runs/0", run.task), format!("task/{}", run.task)] {
        let content =
            async |name: &str| api.get(&format!("{start}/artifact-content/public%2F{name}")).await.expect(200);
        let found = content("link").await;
        assert_eq!(found["storageType"], "s3");
        let url = found["url"].as_str().expect("a URL");
        assert_eq!(api.send(api.http.get(url)).await.text, "x of it");
        assert_eq!(content("y").await, json!({"storageType": "reference", "url": "http://host/y"}));
        let error = json!({"storageType": "error", "reason": "file-missing-on-worker", "message": "no z"});
        assert_eq!(content("z").await, error);
        let info = api.get(&format!("{start}/artifact-info/public%2Flink")).await.expect(200);
        assert_eq!((&info["storageType"], &info["name"]), (&json!("link"), &json!("public/link")));
        let listed = api.get(&format!("{start}/artifacts")).await.expect(200);
        assert_eq!(listed["artifacts"].as_array().map(Vec::len), Some(4));
        let missing = api.get(&format!("{start}/artifact-info/public%2Fnone")).await;
        assert_eq!(missing.refusal(404).0, "ResourceNotFound");
    }
}
