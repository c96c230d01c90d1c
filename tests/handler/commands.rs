use std::time::Duration;

use journeyman::config::Environment;
use journeyman::config::schema::CommandHandler;
use journeyman::config::values::Span;
use journeyman::handler::artifact_collector::CollectedArtifact;
use journeyman::handler::command::Command;
use journeyman::handler::mounts::Mounter;
use journeyman::handler::payload_parts::PayloadSettings;
use journeyman::handler::{DynHandler, ExecuteFailure, erase};
use journeyman::task::{ArtifactBody, Results};
use journeyman_platform::host::caches::{CacheLimits, CacheStore};
use serde_json::{Value, json};

use crate::handler::bench::{Bench, RunResult};
use crate::handler::services::{Parts, REPLY_LIMITS};
use crate::support::pass;

pub(crate) fn handler() -> std::sync::Arc<dyn DynHandler> {
    let worker = Environment::from_pairs(&[("PATH", "/usr/bin:/bin"), ("CANARY", "leaked"), ("LANG", "C.UTF-8")]);
    // No task of this file has mounts.
    let limits = CacheLimits { downloads_bytes_max: 0, free_bytes_min: 0 };
    let settings = PayloadSettings {
        max_run_time: Span(Duration::from_secs(3600)),
        termination_grace: Duration::from_millis(200),
        redact_env: vec!["*_TOKEN".to_owned()],
        mounter: Mounter::new(CacheStore::new("/nonexistent".into(), limits)).expect("a client"),
        signing_key: None,
    };
    erase(Command::new(&CommandHandler::default().env_allow, &worker, settings))
}

fn sh(scripts: &[&str]) -> Value {
    let command: Vec<Value> = scripts.iter().map(|script| json!(["sh", "-c", script])).collect();
    json!({"command": command, "maxRunTime": 60})
}

async fn refused(payload: Value) -> Vec<String> {
    let bench = Bench::new();
    let sentences = bench.run(&*handler(), payload).await.malformed();
    assert_eq!(bench.log(), "", "something ran");
    sentences
}

#[tokio::test]
async fn commands_run_in_order_and_the_log_names_each() {
    let bench = Bench::new();
    bench.run(&*handler(), sh(&["echo one >file", "cat file; echo two"])).await.completed();
    let log = bench.log();
    let lines: Vec<&str> = log.lines().map(|line| line.split_once("Z] ").map_or(line, |(_, rest)| rest)).collect();
    assert_eq!(lines[0], "task fN1SbArXTPSVFNUvaOlinQ/3");
    assert_eq!(lines[1], "executing command 0: sh -c 'echo one >file'");
    assert!(lines[2].starts_with("command 0: exit status 0, after "), "{log}");
    assert_eq!(lines[4..6], ["one", "two"]);
    assert!(lines[7].starts_with("result: completed after "), "{log}");
}

#[tokio::test]
async fn the_value_of_a_variable_named_like_a_secret_is_redacted() {
    let bench = Bench::new();
    let mut payload = sh(&["echo $API_TOKEN of $NAME"]);
    payload["env"] = json!({"API_TOKEN": "env-canary-91", "NAME": "not-a-secret"});
    payload["command"][0] = json!(["sh", "-c", "echo $API_TOKEN of $NAME", "env-canary-91"]);
    bench.run(&*handler(), payload).await.completed();
    let log = bench.log();
    assert!(log.contains("\n[redacted] of not-a-secret\n") && !log.contains("env-canary-91"), "{log}");
}

#[tokio::test]
async fn the_first_command_that_fails_ends_the_task() {
    for (script, reason, message) in [
        ("exit 3", ExecuteFailure::Failed, "command 0: exit status 3"),
        ("kill -SEGV $$", ExecuteFailure::Failed, "command 0: SIGSEGV"),
        ("exit 75", ExecuteFailure::Intermittent, "command 0: exit status 75, listed in onExitStatus.retry"),
    ] {
        let bench = Bench::new();
        let mut payload = sh(&[script, "echo never"]);
        payload["onExitStatus"] = json!({"retry": [75]});
        let RunResult::Ran(Err(error)) = bench.run(&*handler(), payload).await else { panic!("{script} succeeds") };
        assert_eq!((error.reason, error.message.as_str()), (reason, message));
        assert!(!bench.log().contains("never\n"));
    }
}

#[tokio::test]
async fn a_task_past_max_run_time_fails_even_with_exit_status_0() {
    let bench = Bench::new();
    let mut payload = sh(&["trap 'exit 0' TERM; while :; do sleep 0.05; done"]);
    payload["maxRunTime"] = json!(1);
    let sentence = bench.run(&*handler(), payload).await.failed();
    assert_eq!(sentence, "command 0: stopped after maxRunTime, 1 s");
}

/// A flood of messages, of output, and of both.
#[tokio::test]
async fn a_command_that_writes_without_pause_is_stopped_in_time() {
    for script in ["exec yes >&3", "exec yes", "yes >&3 & exec yes"] {
        let mut bench = Bench::new();
        bench.context = bench.context.with_results(Some(Results::new(Parts::default(), REPLY_LIMITS)));
        let mut payload = sh(&[script]);
        payload["maxRunTime"] = json!(1);
        let result = bench.run(&*handler(), payload).await;
        assert_eq!(result.failed(), "command 0: stopped after maxRunTime, 1 s", "{script}");
        let ignored = bench.log().matches("ignored: ").count();
        assert!(ignored <= 20, "{script}: {ignored} notes");
    }
}

#[tokio::test]
async fn cancellation_ends_the_command_and_starts_no_further_one() {
    let bench = Bench::new();
    let handler = handler();
    let payload = sh(&["echo ready; exec sleep 600", "echo never"]);
    let (result, ()) = tokio::join!(bench.run(&*handler, payload), async {
        bench.logged("ready").await;
        bench.cancel(Duration::from_secs(20));
    });
    result.failed();
    assert!(!bench.log().contains("never\n"));
}

#[tokio::test]
async fn the_environment_contains_only_allowed_variables_of_the_worker() {
    let bench = Bench::new();
    let mut payload = json!({"command": [["env"]], "maxRunTime": 60});
    payload["env"] = json!({"GREETING": "a=b c", "LANG": "xx"});
    bench.run(&*handler(), payload).await.completed();
    let log = bench.log();
    let mut names: Vec<&str> = log
        .lines()
        .filter(|line| !line.starts_with("[journeyman "))
        .map(|line| line.split('=').next().unwrap())
        .collect();
    names.sort_unstable();
    assert_eq!(
        names,
        ["GREETING", "HOME", "LANG", "PATH", "RUN_ID", "TASKCLUSTER_ROOT_URL", "TASK_ID", "TASK_WORKDIR"]
    );
    let workdir = bench.workdir().display();
    for line in
        ["GREETING=a=b c", "LANG=xx", "RUN_ID=3", &format!("TASK_WORKDIR={workdir}"), &format!("HOME={workdir}")]
    {
        assert!(log.contains(line), "{line} is not in {log}");
    }
}

#[tokio::test]
async fn a_payload_cannot_override_the_variables_of_the_worker() {
    let bench = Bench::new();
    let mut payload = json!({"command": [["env"]], "maxRunTime": 60});
    payload["env"] =
        json!({"TASK_ID": "x", "RUN_ID": "x", "TASK_WORKDIR": "x", "TASKCLUSTER_ROOT_URL": "x", "HOME": "x"});
    bench.run(&*handler(), payload).await.completed();
    let log = bench.log();
    let taken: Vec<&str> = log.lines().filter(|line| line.ends_with("=x")).collect();
    assert_eq!(taken, ["HOME=x"]);
}

#[tokio::test]
async fn unknown_keys_are_violations() {
    let mut payload = sh(&["true"]);
    payload["image"] = json!("debian");
    payload["onExitStatus"] = json!({"ignore": [1]});
    let sentences = refused(payload).await;
    assert!(sentences.iter().any(|line| line.contains("image")), "{sentences:?}");
    assert!(
        sentences.iter().any(|line| line.contains("ignore") && line.starts_with("payload/onExitStatus")),
        "{sentences:?}"
    );
}

#[tokio::test]
async fn empty_commands_are_violations() {
    assert!(refused(json!({"command": [], "maxRunTime": 1})).await[0].starts_with("payload/command: "));
    assert!(refused(json!({"command": [["true"], []], "maxRunTime": 1})).await[0].starts_with("payload/command/1: "));
}

#[tokio::test]
async fn a_too_long_max_run_time_is_rejected() {
    let sentences = refused(json!({"command": [["true"]], "maxRunTime": 3601})).await;
    assert_eq!(sentences, ["payload/maxRunTime: 3601 s is more than the 3600 s this worker allows"]);
}

#[tokio::test]
async fn a_missing_first_program_is_rejected_and_a_missing_later_one_fails() {
    let sentences = refused(json!({"command": [["no-such-program"]], "maxRunTime": 9})).await;
    assert_eq!(sentences, ["payload/command/0: no-such-program: not found in PATH"]);
    let bench = Bench::new();
    let sentence =
        bench.run(&*handler(), json!({"command": [["true"], ["./missing"]], "maxRunTime": 9})).await.failed();
    assert_eq!(sentence, "cannot start command 1: ./missing: no such file");
}

#[tokio::test]
async fn invalid_artifacts_are_rejected() {
    let mut payload = sh(&["true"]);
    payload["artifacts"] = json!([
        {"type": "file", "path": "../escape"},
        {"type": "file", "path": "/etc/passwd"},
        {"type": "file", "path": "a", "name": "public/naïve"},
        {"type": "file", "path": "a", "name": "public/a", "expires": "2031-01-01T00:00:00.000Z"},
        {"type": "file", "path": "a", "name": "public/b", "expires": "tomorrow"},
        {"type": "file", "path": "b", "name": "public/a"},
        {"type": "directory", "path": "b", "name": "public/logs/live.log"},
    ]);
    let sentences = refused(payload).await;
    assert_eq!(sentences.len(), 7, "{sentences:#?}");
    for (number, sentence) in sentences.iter().enumerate() {
        assert!(sentence.starts_with(&format!("payload/artifacts/{number}")), "{sentence}");
    }
}

#[tokio::test]
async fn b3_an_artifact_that_expires_before_it_may_be_stored_is_rejected() {
    let mut payload = sh(&["true"]);
    let artifact = |expires: &str| json!({"type": "file", "path": "a", "name": expires, "expires": expires});
    payload["artifacts"] =
        json!([artifact("2001-01-01T00:00:00Z"), artifact("2029-11-30T23:59:59Z"), artifact("2029-11-30T23:59:58Z"),]);
    let sentences = refused(payload).await;
    assert_eq!(sentences.len(), 2, "{sentences:#?}");
    for (number, sentence) in [0, 2].into_iter().zip(&sentences) {
        let start = format!("payload/artifacts/{number}/expires: it is before 2029-12-01T00:00:00Z");
        assert!(sentence.starts_with(&start), "{sentence}");
    }
}

#[tokio::test]
async fn b1_a_program_that_the_task_broke_fails_the_task() {
    let bench = Bench::new();
    let payload = json!({"command": [["sh", "-c", "head -c 800 /bin/true > t; chmod +x t"], ["./t"]], "maxRunTime": 9});
    let sentence = bench.run(&*handler(), payload).await.failed();
    assert!(sentence.starts_with("cannot start command 1: "), "{sentence}");
}

#[tokio::test]
async fn a_failed_task_uploads_its_artifacts() {
    let bench = Bench::new();
    let mut payload = sh(&["echo kept >out.txt; exit 1"]);
    payload["artifacts"] =
        json!([{"type": "file", "path": "out.txt"}, {"type": "file", "path": "gone", "name": "public/gone"}]);
    bench.run(&*handler(), payload).await.failed();
    let items: Vec<CollectedArtifact> = bench.context.artifacts().collect(bench.workdir()).unwrap().collect();
    assert!(
        matches!(&items[0], CollectedArtifact::Found(artifact, _) if artifact.name == "out.txt"
        && matches!(&artifact.body, ArtifactBody::File { bytes: 5, content_type, .. } if content_type == "text/plain; charset=utf-8")),
        "{items:?}"
    );
    assert!(
        matches!(&items[1], CollectedArtifact::Missing { error: Some(artifact), .. } if artifact.name == "public/gone")
    );
}

#[tokio::test]
async fn an_invalid_variable_is_rejected() {
    let mut payload = sh(&["true"]);
    payload["env"] = json!({"A=B": "x", "": "y", "C": "nul\u{0}"});
    assert_eq!(refused(payload).await.len(), 3);
}

#[tokio::test]
async fn max_run_time_limits_all_commands_together() {
    let bench = Bench::new();
    let mut payload = sh(&["echo first; until test -e go; do sleep 0.01; done", "echo second; sleep 600"]);
    payload["maxRunTime"] = json!(1000);
    let watch = async {
        bench.logged("\nfirst\n").await;
        pass(Duration::from_secs(600)).await;
        std::fs::write(bench.workdir().join("go"), "").unwrap();
        bench.logged("\nsecond\n").await;
        pass(Duration::from_secs(400)).await;
    };
    let handler = handler();
    let (result, ()) = tokio::join!(bench.run(&*handler, payload), watch);
    assert_eq!(result.failed(), "command 1: stopped after maxRunTime, 1000 s");
}

#[tokio::test]
async fn b15_a_payload_may_decline_what_generic_worker_offers() {
    let payload = json!({
        "command": [["/bin/sh", "-c", "echo hello > file"]],
        "maxRunTime": 60,
        "features": {"taskclusterProxy": false, "chainOfTrust": false, "liveLog": true, "backingLog": true},
        "mounts": [],
        "osGroups": [],
        "capabilities": {"privileged": false, "devices": {"loopbackVideo": false}},
        "logs": {"live": "public/logs/live.log", "backing": "public/logs/live_backing.log"},
        "onExitStatus": {"retry": [], "purgeCaches": []},
        "supersederUrl": "https://example.com",
        "artifacts": [{"type": "file", "path": "file", "contentEncoding": "gzip"}],
    });
    Bench::new().run(&*handler(), payload).await.completed();
}

#[tokio::test]
async fn b15_a_payload_that_asks_for_what_is_lacking_is_malformed_and_the_log_names_it() {
    let with = |key: &str, value: Value| {
        let mut payload = sh(&["true"]);
        payload[key] = value;
        payload
    };
    for (key, value, named) in [
        ("features", json!({"interactive": true}), "payload/features/interactive"),
        ("features", json!({"runAsAdministrator": true}), "payload/features/runAsAdministrator"),
        ("capabilities", json!({"devices": {"kvm": true}}), "payload/capabilities/devices/kvm"),
    ] {
        let messages = refused(with(key, value)).await;
        assert!(messages.len() == 1 && messages[0].starts_with(named), "{messages:?}");
        assert!(messages[0].contains("not supported by this worker"), "{messages:?}");
    }
}
