//! Mounts and caches.

use std::os::unix::fs::PermissionsExt as _;
use std::sync::Arc;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use parking_lot::Mutex;
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};

use crate::payloads::deployment::{Deployment, Ended, tar};
use crate::payloads::files::{Files, Served, router};

fn digest(content: &[u8]) -> String {
    hex::encode(Sha256::digest(content))
}

fn scoped(scopes: &[&str]) -> impl FnOnce(&mut Value) {
    let scopes = json!(scopes);
    move |definition| definition["scopes"] = scopes
}

fn nothing(_: &mut Value) {}

/// A deployment, and a server of one file.
async fn with_files(content: &[u8], etag: Option<&'static str>) -> (Deployment, Served, String) {
    let mut deployment = Deployment::start().await;
    let files = Arc::new(Mutex::new(Files { content: content.to_vec(), etag, ..Files::default() }));
    let address = deployment.serve(router(&files)).await;
    (deployment, files, format!("{address}/file"))
}

#[tokio::test]
async fn files_are_placed_from_text_base64_and_urls() {
    let (deployment, _, url) = with_files(b"from the web", None).await;
    let mounts = json!([
        { "file": "a/raw.txt", "content": { "raw": "as it is" } },
        { "file": "./binary", "content": { "base64": STANDARD.encode([0, 159, 146, 150]) } },
        { "file": "web", "content": { "url": url, "sha256": digest(b"from the web") } },
        { "file": "plain", "content": { "base64": STANDARD.encode(gzip(b"unpacked")) }, "format": "gz" },
    ]);
    let script = "cat a/raw.txt web plain; od -An -tx1 binary";
    let log = deployment.run_one(script, json!({ "mounts": mounts }), nothing).await.completed();
    assert!(log.contains("as it isfrom the webunpacked") && log.contains(" 00 9f 92 96"), "{log}");
}

fn gzip(content: &[u8]) -> Vec<u8> {
    let mut child = std::process::Command::new("gzip")
        .stdin(std::process::Stdio::piped())
        .stdout(std::process::Stdio::piped())
        .spawn()
        .expect("gzip runs");
    std::io::Write::write_all(&mut child.stdin.take().expect("piped"), content).expect("written");
    child.wait_with_output().expect("it ends").stdout
}

#[tokio::test]
async fn a_directory_is_unpacked_from_each_compression_and_its_programs_run() {
    for (options, format) in [("-cz", "tar.gz"), ("-cj", "tar.bz2"), ("-cJ", "tar.xz")] {
        let (deployment, _, url) = with_files(&tar(options, &[("tool/run", "#!/bin/sh\necho it runs")]), None).await;
        let mounts = json!([{ "directory": "in", "content": { "url": url }, "format": format }]);
        let log = deployment.run_one("sh in/tool/run", json!({ "mounts": mounts }), nothing).await.completed();
        assert!(log.contains("\nit runs\n"), "{format}: {log}");
    }
}

#[tokio::test]
async fn an_artifact_of_a_dependency_is_mounted_and_one_of_another_task_is_not() {
    let deployment = Deployment::start().await;
    let artifacts = json!([{ "type": "file", "path": "out", "name": "public/out" }]);
    let made = deployment.create("echo made >out", json!({ "artifacts": artifacts }), nothing).await;
    deployment.run(&[&made]).await.remove(0).completed();
    let mount =
        |name: &str| json!({ "mounts": [{ "file": "in", "content": { "taskId": made.as_str(), "artifact": name } }] });
    let depends = |definition: &mut Value| definition["dependencies"] = json!([made.as_str()]);
    let log = deployment.run_one("cat in", mount("public/out"), depends).await.completed();
    assert!(log.contains("\nmade\n") && log.contains(&format!("artifact public/out of {made}: ")), "{log}");
    let content = json!({ "taskId": made.as_str(), "artifact": "public/out", "sha256": digest(b"made\n") });
    for is_tampered in [false, true] {
        for entry in std::fs::read_dir(deployment.work_dir().join("caches/downloads")).expect("it exists") {
            std::fs::write(entry.expect("an entry").path(), "tampered").expect("written");
        }
        let keys = json!({ "mounts": [{ "file": "in", "content": content }] });
        let log = deployment.run_one("cat in", keys, depends).await.completed();
        assert!(log.contains("\nmade\n"), "{is_tampered}: {log}");
    }
    let log = deployment.run_one("cat in", mount("public/out"), nothing).await.exception("malformed-payload");
    assert!(log.contains(&format!("payload/mounts/0: `dependencies` of the task lacks {made}")), "{log}");
    let log = deployment.run_one("cat in", mount("public/other"), depends).await.exception("malformed-payload");
    assert!(log.contains("the answer is 404") && !log.contains("executing command"), "{log}");
    let private = json!([{ "type": "file", "path": "out", "name": "private/out" }]);
    let secret = deployment.create("echo made >out", json!({ "artifacts": private }), nothing).await;
    deployment.run(&[&secret]).await.remove(0).completed();
    for (scopes, state) in [(&["queue:get-artifact:private/*"][..], "completed"), (&[], "exception/malformed-payload")]
    {
        let mounts = json!([{ "file": "in", "content": { "taskId": secret.as_str(), "artifact": "private/out" } }]);
        let change = |definition: &mut Value| {
            definition["dependencies"] = json!([secret.as_str()]);
            definition["scopes"] = json!(scopes);
        };
        let Ended { states, log } = deployment.run_one("cat in", json!({ "mounts": mounts }), change).await;
        assert_eq!(states, [state], "{log}");
        assert!(scopes.len() == 1 || log.contains("the task may not read it"), "{log}");
    }
}

#[tokio::test]
async fn what_is_cached_of_an_artifact_is_not_to_be_had_by_its_digest() {
    let deployment = Deployment::start().await;
    let private = json!([{ "type": "file", "path": "out", "name": "private/out" }]);
    let made = deployment.create("echo made >out", json!({ "artifacts": private }), nothing).await;
    deployment.run(&[&made]).await.remove(0).completed();
    let sha256 = digest(b"made\n");
    let of_task = json!({ "taskId": made.as_str(), "artifact": "private/out", "sha256": sha256 });
    let mounts = json!([{ "file": "in", "content": of_task }]);
    let change = |definition: &mut Value| {
        definition["dependencies"] = json!([made.as_str()]);
        definition["scopes"] = json!(["queue:get-artifact:private/*"]);
    };
    deployment.run_one("cat in", json!({ "mounts": mounts }), change).await.completed();
    let by_digest = json!([{ "file": "in", "content": { "url": "http://127.0.0.1:1/", "sha256": sha256 } }]);
    let keys = json!({ "mounts": by_digest, "maxRunTime": 1 });
    let ended = deployment.run_one("cat in", keys, nothing).await;
    assert!(!ended.log.contains("made") && !ended.log.contains("downloaded before"), "{}", ended.log);
}

#[tokio::test]
async fn urls_that_differ_in_their_query_have_content_of_their_own() {
    let (deployment, files, url) = with_files(b"one", Some("\"same\"")).await;
    let mount =
        |query: &str| json!({ "mounts": [{ "file": "f", "content": { "url": format!("{url}?file={query}") } }] });
    deployment.run_one("cat f", mount("one"), nothing).await.completed();
    files.lock().content = b"two".to_vec();
    let log = deployment.run_one("cat f", mount("two"), nothing).await.completed();
    assert!(log.contains("\ntwo") && !log.contains("file="), "{log}");
}

#[tokio::test]
async fn an_artifact_is_found_through_the_index() {
    let deployment = Deployment::start().await;
    let artifacts = json!([{ "type": "file", "path": "out", "name": "public/out" }]);
    let made = deployment.create("echo indexed >out", json!({ "artifacts": artifacts }), nothing).await;
    deployment.run(&[&made]).await.remove(0).completed();
    deployment.answers.lock().index.insert("project.latest".to_owned(), made.to_string());
    let mount = |namespace: &str| json!({ "mounts": [{ "file": "in", "content": { "namespace": namespace, "artifact": "public/out" } }] });
    let log = deployment.run_one("cat in", mount("project.latest"), nothing).await.completed();
    assert!(log.contains("\nindexed\n"), "{log}");
    let log = deployment.run_one("cat in", mount("project.other"), nothing).await.exception("malformed-payload");
    assert!(log.contains("findTask of \"project.other\": 404"), "{log}");
}

#[tokio::test]
async fn wrong_digests_paths_formats_and_shapes_are_malformed_and_named() {
    let (deployment, _, url) = with_files(b"something else", None).await;
    for (mount, said) in [
        (json!({ "file": "f", "content": { "url": url, "sha256": digest(b"x") } }), "and the payload requires"),
        (json!({ "file": "../f", "content": { "raw": "x" } }), "payload/mounts/0/file: use a relative path"),
        (json!({ "file": "/f", "content": { "raw": "x" } }), "payload/mounts/0/file: use a relative path"),
        (json!({ "directory": "d", "content": { "raw": "x" }, "format": "rar" }), "\"rar\" is not supported"),
        (json!({ "directory": "d", "content": { "raw": "x" }, "format": "tar.gz" }), "mount at d: "),
        (json!({ "directory": "d", "content": { "raw": "x" } }), "needs `content` and `format`"),
        (json!({ "file": "f", "directory": "d", "content": { "raw": "x" } }), "use `file`, or `directory`"),
        (json!({ "file": "f", "content": { "raw": "x", "url": url } }), "payload/mounts/0/content: use `artifact`"),
        (json!({ "file": "f", "content": { "url": "ftp://example.com/" } }), "not an http or https URL"),
        (json!({ "file": "f", "content": { "url": "http://169.254.169.254/x" } }), "metadata service"),
    ] {
        let log =
            deployment.run_one("true", json!({ "mounts": [mount] }), nothing).await.exception("malformed-payload");
        assert!(log.contains(said), "{said}: {log}");
    }
}

#[tokio::test]
async fn a_download_is_resumed_where_it_was_cut_and_retried_after_errors() {
    let content: Vec<u8> = (0..300_000_u32).flat_map(u32::to_le_bytes).collect();
    let (deployment, files, url) = with_files(&content, Some("\"one\"")).await;
    {
        let mut files = files.lock();
        files.failures = vec![503];
        files.cut_at = Some(500_000);
    }
    let mounts = json!([{ "file": "f", "content": { "url": url, "sha256": digest(&content) } }]);
    let log = deployment.run_one("wc -c <f", json!({ "mounts": mounts }), nothing).await.completed();
    let ranges = std::mem::take(&mut files.lock().ranges);
    let [first, second, third] = &ranges[..] else { panic!("{ranges:?}") };
    assert!(first.is_empty() && second.is_empty() && third.starts_with("bytes="), "{ranges:?}");
    assert!(log.contains("\n1200000\n") && log.contains("503") && log.contains("trying again"), "{log}");
}

#[tokio::test]
async fn content_is_downloaded_once_while_it_is_the_same() {
    let (deployment, files, url) = with_files(b"version 1", Some("\"one\"")).await;
    let mounts = json!({ "mounts": [{ "file": "f", "content": { "url": url } }] });
    deployment.run_one("cat f", mounts.clone(), nothing).await.completed();
    let log = deployment.run_one("cat f", mounts.clone(), nothing).await.completed();
    assert!(log.contains("downloaded before") && log.contains("version 1"), "{log}");
    {
        let mut files = files.lock();
        files.content = b"version 2".to_vec();
        files.etag = Some("\"two\"");
    }
    let log = deployment.run_one("cat f", mounts, nothing).await.completed();
    assert!(log.contains("version 2"), "{log}");
    // The worker finds it by its digest, without a request.
    let by_digest = json!({ "mounts": [{ "file": "f", "content": { "url": url, "sha256": digest(b"version 2") } }] });
    deployment.run_one("cat f", by_digest.clone(), nothing).await.completed();
    files.lock().ranges.clear();
    deployment.run_one("cat f", by_digest.clone(), nothing).await.completed();
    assert_eq!(files.lock().ranges.len(), 0);
    // Content that was changed on the disk is downloaded again.
    for entry in std::fs::read_dir(deployment.work_dir().join("caches/downloads")).expect("it exists") {
        std::fs::write(entry.expect("an entry").path(), "tampered").expect("written");
    }
    let log = deployment.run_one("cat f", by_digest, nothing).await.completed();
    assert!(log.contains("version 2") && files.lock().ranges.len() == 1, "{log}");
}

#[tokio::test]
async fn the_least_recently_used_downloads_go_first() {
    let (mut deployment, files, url) = with_files(&[b'x'; 600_000], Some("\"one\"")).await;
    deployment.limits.downloads_bytes_max = 1_000_000;
    for number in 0..3 {
        let mounts = json!({ "mounts": [{ "file": "f", "content": { "url": format!("{url}{number}") } }] });
        deployment.run_one("wc -c <f", mounts, nothing).await.completed();
    }
    let kept = std::fs::read_dir(deployment.work_dir().join("caches/downloads")).expect("it exists").count();
    assert_eq!((kept, files.lock().ranges.len()), (1, 3));
}

fn cache(name: &str, directory: &str) -> Value {
    json!({ "cacheName": name, "directory": directory })
}

#[tokio::test]
async fn a_cache_is_kept_from_task_to_task_and_over_restarts() {
    let deployment = Deployment::start().await;
    let keys = json!({ "mounts": [cache("build", "obj")] });
    let with_scope = || scoped(&["generic-worker:cache:build"]);
    let script = "echo x >>obj/count; wc -l <obj/count";
    let tasks = [
        deployment.create(script, keys.clone(), with_scope()).await,
        deployment.create(script, keys.clone(), with_scope()).await,
    ];
    let logs: Vec<_> = deployment.run(&[&tasks[0], &tasks[1]]).await.into_iter().map(Ended::completed).collect();
    assert!(logs[0].contains("cache build at obj: new") && logs[0].contains("\n1\n"), "{}", logs[0]);
    assert!(logs[1].contains("cache build at obj: kept") && logs[1].contains("\n2\n"), "{}", logs[1]);
    // Another worker in the same directory; a task that fails keeps its cache too.
    let failing = deployment.create("echo x >>obj/count; exit 1", keys.clone(), with_scope()).await;
    assert_eq!(deployment.run(&[&failing]).await[0].states, ["failed"]);
    let log = deployment.run_one(script, keys, with_scope()).await.completed();
    assert!(log.contains("\n4\n"), "{log}");
}

#[tokio::test]
async fn a_cache_needs_its_scope_literally_or_through_a_role() {
    let deployment = Deployment::start().await;
    let keys = json!({ "mounts": [cache("build", "obj")] });
    let log = deployment.run_one("true", keys.clone(), nothing).await.exception("malformed-payload");
    assert!(log.contains("payload/mounts/0: the task lacks the scope generic-worker:cache:build"), "{log}");
    let with_role = || scoped(&["assume:project:admin"]);
    deployment.run_one("true", keys.clone(), with_role()).await.exception("malformed-payload");
    let role = ("assume:project:admin".to_owned(), vec!["generic-worker:cache:*".to_owned()]);
    deployment.answers.lock().roles.extend([role]);
    deployment.run_one("true", keys.clone(), with_role()).await.completed();
    deployment.run_one("true", keys, scoped(&["generic-worker:cache:bu*"])).await.completed();
}

#[tokio::test]
async fn a_new_cache_is_filled_from_its_content_once() {
    let (deployment, _, url) = with_files(&tar("-cz", &[("seed", "from the archive\n")]), None).await;
    let mount = json!({ "cacheName": "c", "directory": "d", "content": { "url": url }, "format": "tar.gz" });
    let keys = json!({ "mounts": [mount] });
    let with_scope = || scoped(&["generic-worker:cache:c"]);
    deployment.run_one("cat d/seed; echo changed >d/seed", keys.clone(), with_scope()).await.completed();
    let log = deployment.run_one("cat d/seed", keys, with_scope()).await.completed();
    assert!(log.contains("\nchanged\n") && !log.contains("downloaded"), "{log}");
}

#[tokio::test]
async fn a_cache_is_purged_by_exit_status_and_on_request() {
    let deployment = Deployment::start().await;
    let keys = json!({ "mounts": [cache("c", "d")], "onExitStatus": { "purgeCaches": [7] } });
    let with_scope = || scoped(&["generic-worker:cache:c"]);
    let script = "ls d; touch d/here";
    deployment.run_one(script, keys.clone(), with_scope()).await.completed();
    assert!(deployment.run_one(script, keys.clone(), with_scope()).await.completed().contains("\nhere\n"));
    let failing = deployment.create("exit 7", keys.clone(), with_scope()).await;
    assert_eq!(deployment.run(&[&failing]).await[0].states, ["failed"]);
    assert!(!deployment.run_one(script, keys.clone(), with_scope()).await.completed().contains("\nhere\n"));
    let before = |name: &str, at: &str| (name.to_owned(), at.to_owned());
    deployment.answers.lock().purge =
        vec![before("other", "2999-01-01T00:00:00Z"), before("c", "2001-01-01T00:00:00Z")];
    assert!(deployment.run_one(script, keys.clone(), with_scope()).await.completed().contains("\nhere\n"));
    deployment.answers.lock().purge = vec![before("c", "2999-01-01T00:00:00Z")];
    let log = deployment.run_one(script, keys, with_scope()).await.completed();
    assert!(!log.contains("\nhere\n") && log.contains("cache c: purged, as requested"), "{log}");
}

#[tokio::test]
async fn a_cache_of_a_stopped_task_is_not_kept() {
    let deployment = Deployment::start().await;
    let keys = json!({ "mounts": [cache("c", "d")] });
    let mut short = keys.clone();
    short["maxRunTime"] = json!(1);
    let with_scope = || scoped(&["generic-worker:cache:c"]);
    let stopped = deployment.create("touch d/torn; sleep 600", short, with_scope()).await;
    let ended = deployment.run(&[&stopped]).await.remove(0);
    assert_eq!(ended.states, ["failed"]);
    let log = deployment.run_one("ls d", keys, with_scope()).await.completed();
    assert!(!log.contains("torn") && log.contains("cache c at d: new"), "{log}");
}

#[tokio::test]
async fn a_link_in_place_of_a_cache_is_not_kept_and_artifacts_in_a_cache_are_stored_before_it_goes_back() {
    let deployment = Deployment::start().await;
    let with_scope = || scoped(&["generic-worker:cache:c"]);
    let artifacts = json!([{ "type": "file", "path": "d/out", "name": "public/out" }]);
    let keys = json!({ "mounts": [cache("c", "d")], "artifacts": artifacts });
    let task = deployment.create("echo made >d/out", keys, with_scope()).await;
    deployment.run(&[&task]).await.remove(0).completed();
    assert_eq!(deployment.queue.content(&task, 0, "public/out").await, b"made\n");
    let keys = json!({ "mounts": [cache("c", "d")] });
    let log = deployment.run_one("cat d/out; rm -r d; ln -s /etc d", keys.clone(), with_scope()).await.completed();
    assert!(log.contains("\nmade\n"), "{log}");
    let log = deployment.run_one("ls -A d", keys, with_scope()).await.completed();
    assert!(log.contains("cache c at d: new") && !log.contains("passwd"), "{log}");
}

#[tokio::test]
async fn a_file_is_not_placed_through_a_link_that_a_cache_brings() {
    let deployment = Deployment::start().await;
    let with_scope = || scoped(&["generic-worker:cache:c"]);
    let outside = deployment.folder.path().join("outside");
    std::fs::create_dir(&outside).expect("created");
    let keys = json!({ "mounts": [cache("c", "d")] });
    let script = format!("ln -s {} d/link", outside.display());
    deployment.run_one(&script, keys, with_scope()).await.completed();
    let mounts = json!([cache("c", "d"), { "file": "d/link/f", "content": { "raw": "x" } }]);
    let log =
        deployment.run_one("true", json!({ "mounts": mounts }), with_scope()).await.exception("malformed-payload");
    assert!(log.contains("is there a file or a link in its place?"), "{log}");
    assert_eq!(std::fs::read_dir(outside).expect("it is there").count(), 0);
}

#[tokio::test]
async fn a_file_takes_the_place_of_a_pipe_that_a_cache_brings() {
    let deployment = Deployment::start().await;
    let scope = || scoped(&["generic-worker:cache:c"]);
    let made = deployment.run_one("mkfifo c/f", json!({ "mounts": [cache("c", "c")] }), scope()).await;
    made.completed();
    let mounts = json!({ "mounts": [cache("c", "c"), { "file": "c/f", "content": { "raw": "content" } }] });
    let log = deployment.run_one("cat c/f", mounts, scope()).await.completed();
    assert!(log.contains("content"), "{log}");
}

#[tokio::test]
async fn a_download_that_is_larger_than_the_cache_removes_nothing_of_it() {
    let (mut deployment, files, url) = with_files(b"small", Some("\"1\"")).await;
    deployment.limits.downloads_bytes_max = 1000;
    let mount = |path: &str| json!({ "mounts": [{ "file": "f", "content": { "url": format!("{url}{path}") } }] });
    deployment.run_one("true", mount("small"), |_| {}).await.completed();
    *files.lock() = Files { content: vec![0; 2000], etag: Some("\"2\""), ..Files::default() };
    let log = deployment.run_one("true", mount("large"), |_| {}).await;
    assert_eq!(log.states, ["exception/resource-unavailable"], "{}", log.log);
    assert!(log.log.contains("`host.download_cache`"), "{}", log.log);
    *files.lock() = Files { content: b"small".to_vec(), etag: Some("\"1\""), ..Files::default() };
    let log = deployment.run_one("true", mount("small"), |_| {}).await.completed();
    assert!(log.contains("downloaded before"), "{log}");
}

#[tokio::test]
async fn mounts_count_against_the_run_time() {
    let mut deployment = Deployment::start().await;
    let router = axum::Router::new().fallback(|| async { std::future::pending::<()>().await });
    let url = deployment.serve(router).await;
    let keys = json!({ "mounts": [{ "file": "f", "content": { "url": url } }], "maxRunTime": 1 });
    let task = deployment.create("echo started", keys, nothing).await;
    let ended = deployment.run(&[&task]).await.remove(0);
    assert_eq!(ended.states, ["failed"]);
    assert!(ended.log.contains("stopped after maxRunTime, 1 s") && !ended.log.contains("\nstarted\n"), "{}", ended.log);
}

#[tokio::test]
async fn tasks_at_the_same_time_have_directories_of_their_own_of_one_cache() {
    let deployment = Deployment::start().await;
    let keys = json!({ "mounts": [cache("c", "d")] });
    let gate = deployment.folder.path().join("gate");
    let path = gate.display();
    // Each waits until both have started.
    let script = format!(
        "ls d; touch d/$TASK_ID {path}.$TASK_ID; until [ $(ls {path}.* | wc -l) = 2 ]; do sleep 0.05; done; ls d | wc -l"
    );
    let with_scope = || scoped(&["generic-worker:cache:c"]);
    let tasks = [
        deployment.create(&script, keys.clone(), with_scope()).await,
        deployment.create(&script, keys, with_scope()).await,
    ];
    for ended in deployment.run_with(deployment.handler(), 2, &[&tasks[0], &tasks[1]]).await {
        let log = ended.completed();
        assert!(log.contains("\n1\n") && log.contains(": new"), "{log}");
    }
    let mode = std::fs::metadata(deployment.work_dir().join("caches")).expect("it is there").permissions().mode();
    assert_eq!(mode & 0o777, 0o700);
    assert_eq!(std::fs::read_dir(deployment.work_dir().join("caches/named")).expect("it is there").count(), 2);
}
