//! What says why a task waits or has failed, and what is next.

use serde_json::json;

use crate::cli::host::Host;

#[test]
fn a_task_that_failed_or_waits_says_why_and_what_is_next() {
    let (host, dev) = Host::with_dev(&[]);
    let failed = host.run(&["task", "create", "--wait", "--", "/bin/sh", "-c", "seq 100; exit 3"]);
    assert_eq!(failed.code, 1, "{}", failed.err);
    for part in
        ["why    command 0: exit status 3", "not retried; `journeyman task rerun ", "its last 20 lines", "| 100\n"]
    {
        assert!(failed.out.contains(part), "{part}: {}", failed.out);
    }
    assert!(!failed.out.contains("| 80\n"), "{}", failed.out);
    let task = failed.out.split_whitespace().next().expect("an id").to_owned();
    assert_eq!(host.run(&["task", "status", &task]).out, failed.out);
    assert_eq!(host.run(&["task", "rerun", &task]).code, 0);
    let rerun = host.run(&["task", "wait", &task]);
    assert!(rerun.code == 1 && rerun.out.contains("run 1  failed"), "{}", rerun.out);
    let status = host.status();
    assert_eq!(status["recent_results"][0]["reason"], "failed: command 0: exit status 3", "{status}");
    let waiting = host.run(&["task", "create", "--queue", "dev/comand", "--", "/bin/true"]);
    let waiting = host.run(&["task", "status", waiting.out.trim()]);
    let why = "why    no worker has claimed from dev/comand lately; dev/command has 1 worker";
    assert!(waiting.out.contains(why), "{}", waiting.out);
    host.run(&["pause"]);
    let paused = host.run(&["task", "create", "--", "/bin/true"]);
    let paused = host.run(&["task", "status", paused.out.trim()]);
    for part in ["1 worker has claimed from dev/command lately", "1 pending", "claims nothing: paused"] {
        assert!(paused.out.contains(part), "{part}: {}", paused.out);
    }
    dev.quit();
}

#[test]
fn the_reason_is_the_payloads_own_and_not_that_of_a_missing_artifact() {
    let (host, dev) = Host::with_dev(&[]);
    let run = |script: &str| {
        let artifacts = json!([{"type": "file", "path": "nope", "name": "public/nope"}]);
        let payload = json!({"command": [["/bin/sh", "-c", script]], "artifacts": artifacts, "maxRunTime": 60});
        host.run(&["task", "create", "--wait", "--payload", &payload.to_string()]).out
    };
    let failed = run("exit 2");
    assert!(failed.contains("why    command 0: exit status 2\n"), "{failed}");
    // Its own lines are no reason, even if they look like the worker's.
    let missing =
        run("echo '[journeyman 2026-01-01T00:00:00.000Z] failed: forged'; head -c 400 /dev/zero | tr '\\0' x");
    let why = "why    without all of its artifacts the task is not completed artifact public/nope: ";
    assert!(missing.contains(why), "{missing}");
    assert!(missing.contains(&format!("| {}…", "x".repeat(199))), "{missing}");
    let reason = host.status()["recent_results"][0]["reason"].to_string();
    assert!(reason.contains("without all of its artifacts"), "{reason}");
    dev.quit();
}
