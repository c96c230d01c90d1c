//! Hooks around payloads.

use std::time::Duration;

use journeyman::config::schema::Hooks;
use journeyman::config::values::Span;
use journeyman::handler::hooks::with_hooks;
use journeyman::handler::{DynHandler, ExecuteFailure};
use serde_json::{Value, json};

use crate::handler::bench::{Bench, RunResult};
use crate::handler::commands::handler;

fn sh(script: &str) -> Value {
    json!({"command": [["sh", "-c", script]], "maxRunTime": 60})
}

/// Each hook is this script, with its name as `$0`.
fn hooked(script: &str, seconds: u64) -> std::sync::Arc<dyn DynHandler> {
    let hook = |name: &str| ["/bin/sh", "-c", script, name].map(ToOwned::to_owned).to_vec();
    let config = Hooks {
        pre_task: hook("pre"),
        post_task: hook("post"),
        error: hook("error"),
        timeout: Span(Duration::from_secs(seconds)),
    };
    let env = [("CI".to_owned(), "true".to_owned())].into();
    with_hooks(handler(), config, env)
}

/// The lines of the log that the hooks and the payload wrote.
fn lines(bench: &Bench) -> Vec<String> {
    bench.log().lines().filter(|line| !line.starts_with("[journeyman")).map(ToOwned::to_owned).collect()
}

#[tokio::test]
async fn e5_hooks_run_around_a_payload_with_the_environment_of_the_handler() {
    let bench = Bench::new();
    let script =
        "echo $0 $JOURNEYMAN_HOOK $JOURNEYMAN_OUTCOME $CI $TASK_ID secret=$SECRET; test $0 = post || echo $0 >file";
    let mut payload = sh("echo payload; cat file");
    payload["env"] = json!({"SECRET": "of the payload"});
    bench.run(&*hooked(script, 60), payload).await.completed();
    let expected = [
        "pre pre_task true fN1SbArXTPSVFNUvaOlinQ secret=",
        "payload",
        "pre",
        "post post_task completed true fN1SbArXTPSVFNUvaOlinQ secret=",
    ];
    assert_eq!(lines(&bench), expected);
    assert!(bench.log().contains("hook post_task: exit status 0, after "), "{}", bench.log());
}

#[tokio::test]
async fn e5_a_failed_pre_task_hook_releases_the_task_unrun() {
    let bench = Bench::new();
    let result = bench.run(&*hooked("echo $0; test $0 != pre", 60), sh("echo payload")).await;
    let RunResult::Ran(Err(error)) = result else { panic!("{result:?}") };
    assert_eq!((error.reason, &*error.message), (ExecuteFailure::HostFault, "hook pre_task: exit status 1"));
    assert_eq!(lines(&bench), ["pre", "error", "post"]);
}

#[tokio::test]
async fn e5_the_error_hook_runs_for_failed_and_for_rejected_payloads() {
    let bench = Bench::new();
    let script = "echo $0 $JOURNEYMAN_OUTCOME; test $0 = pre";
    // A hook that fails after the payload changes nothing.
    bench.run(&*hooked(script, 60), sh("exit 3")).await.failed();
    assert_eq!(lines(&bench), ["pre", "error failed", "post failed"]);
    let bench = Bench::new();
    bench.run(&*hooked(script, 60), json!({"command": []})).await.malformed();
    assert_eq!(lines(&bench), ["error malformed-payload"]);
}

#[tokio::test]
async fn e5_a_hook_is_stopped_at_its_time_limit() {
    let bench = Bench::new();
    let script = "test $0 != post || exec sleep 600";
    bench.run(&*hooked(script, 1), sh("true")).await.completed();
    assert!(bench.log().contains("hook post_task: stopped after 1.000s"), "{}", bench.log());
}

#[tokio::test]
async fn e5_a_stopped_payload_leaves_its_hooks_the_rest_of_its_grace() {
    let bench = Bench::new();
    let handler = hooked("echo $0 $JOURNEYMAN_OUTCOME", 60);
    let (result, ()) = tokio::join!(bench.run(&*handler, sh("echo ready; exec sleep 600")), async {
        bench.logged("\nready\n").await;
        bench.cancel(Duration::from_secs(20));
    });
    result.failed();
    assert_eq!(lines(&bench), ["pre", "ready", "error stopped", "post stopped"]);
}
