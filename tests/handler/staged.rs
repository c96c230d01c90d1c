//! Work that is launched elsewhere, by programs and in Rust.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use journeyman::config::Environment;
use journeyman::config::schema::{ProgramHandler, StagedProgram};
use journeyman::config::values::Span;
use journeyman::handler::contract_test::{TestPlan, check_program};
use journeyman::handler::program::Program;
use journeyman::handler::staged::{
    FailureClass, Progress, Staged, StagedAnswer, StagedHandler, StagedPolicy, StagedRecord, Stamp, Work,
};
use journeyman::handler::{CancelCause, CancelCommand, ExecuteError, ExecuteFailure, erase};
use journeyman::task::{Deferral, NextCheck, PartialReplySink, Reply, ReplyFuture, ReplyLimits, Results};
use journeyman_domain::claim::LossReason;
use journeyman_domain::jitter::Jitter;
use journeyman_domain::staged::{StagedAction, StagedEvent, StagedState};
use journeyman_domain::time::Instant;
use parking_lot::Mutex;
use serde_json::{Value, json};
use tokio::sync::Notify;

use crate::handler::bench::{Bench, RunResult};

/// A program whose phases append to `calls` and keep their work in the file `work`.
fn program(script: &str, phases: &[(&str, u64)]) -> Program {
    let head = r#"document=$(cat); echo "$JOURNEYMAN_PHASE" >>calls
        says() { printf '{"type":"work","handle":"h7","checkIn":0.1,"phase":"%s"}\n' "$1" >&3; }
        "#;
    let phases = phases.iter().map(|(phase, seconds)| ((*phase).to_owned(), Span(Duration::from_secs(*seconds))));
    let staged = StagedProgram { check_interval: Span(Duration::from_secs(1)), phases: phases.collect(), retries: 1 };
    let argv = ["sh", "-c", &format!("{head}\n{script}")].map(str::to_owned).to_vec();
    let config = ProgramHandler { staged: Some(staged), ..ProgramHandler::new(argv) };
    Program::new("test", config, &Environment::default()).expect("a handler")
}

async fn run(bench: &Bench, script: &str) -> RunResult {
    bench.run(&program(script, &[]), json!({"a": 1})).await
}

fn calls(bench: &Bench) -> Vec<String> {
    let calls = std::fs::read_to_string(bench.workdir().join("calls")).expect("it was called");
    calls.lines().map(str::to_owned).collect()
}

#[tokio::test]
async fn a_program_starts_work_looks_at_it_and_is_done() {
    let bench = Bench::new();
    let script = r#"case $JOURNEYMAN_PHASE in
        start) says queued ;;
        verify) echo "$document" >document; echo '{"type":"step","name":"look"}' >&3; [ -e second ] && [ -e third ] || says running; [ -e second ] && : >third; : >second ;;
        esac"#;
    run(&bench, script).await.completed();
    assert_eq!(calls(&bench), ["start", "verify", "verify", "verify", "cancel"]);
    let document = std::fs::read(bench.workdir().join("document")).expect("it was kept");
    let document: Value = serde_json::from_slice(&document).expect("it is JSON");
    assert_eq!(
        document["work"],
        json!({ "key": "fN1SbArXTPSVFNUvaOlinQ.3", "launch": 0, "handle": "h7", "phase": "running" })
    );
    assert_eq!((&document["phase"], &document["payload"]), (&json!("verify"), &json!({"a": 1})));
    for phase in ["it is queued", "it is running"] {
        assert_eq!(bench.log().matches(phase).count(), 1, "{}", bench.log());
    }
}

#[tokio::test]
async fn the_exit_status_of_a_verify_decides_between_a_failure_another_launch_and_another_look() {
    for (verify, expected, ended) in [
        ("exit 3", vec!["start", "verify", "cancel"], "verify: exit status 3"),
        (
            "exit $JOURNEYMAN_EXIT_UNAVAILABLE",
            vec!["start", "verify", "start", "verify"],
            "the program says that it is gone",
        ),
        (
            "[ -e looked ] && exit 4; : >looked; exit $JOURNEYMAN_EXIT_RETRY",
            vec!["start", "verify", "verify", "cancel"],
            "exit status 4",
        ),
        (
            "[ -e looked ] && exit 4; : >looked; kill -KILL $$",
            vec!["start", "verify", "verify", "cancel"],
            "exit status 4",
        ),
    ] {
        let bench = Bench::new();
        let script = format!("case $JOURNEYMAN_PHASE in start) says running ;; verify) {verify} ;; esac");
        let failure = format!("{:?}", run(&bench, &script).await);
        assert!(failure.starts_with("Ran(Err(") && failure.contains(ended), "{verify}: {failure}");
        assert_eq!(calls(&bench)[..expected.len()], expected, "{verify}");
    }
}

#[tokio::test]
async fn a_start_without_room_is_tried_again_later() {
    let bench = Bench::new();
    let script = r#"case $JOURNEYMAN_PHASE in
        start) [ -e tried ] || { : >tried; says queued; exit $JOURNEYMAN_EXIT_RETRY; } ;;
        esac"#;
    run(&bench, script).await.completed();
    assert_eq!(calls(&bench), ["start", "start"]);
}

#[tokio::test]
async fn e5_a_start_that_names_work_and_fails_is_canceled_and_the_next_start_is_told_of_it() {
    let script = r#"echo "$JOURNEYMAN_PHASE $JOURNEYMAN_LAUNCH $JOURNEYMAN_HANDLE" >>told
        case $JOURNEYMAN_PHASE in
        start) says queued; [ -e tried ] && exit 3; : >tried; EXIT ;;
        esac"#;
    for (exit, deferral) in [("exit $JOURNEYMAN_EXIT_INTERNAL", false), ("kill -KILL $$", false), ("exit 3", true)] {
        let bench = if deferral { deferring(None).0 } else { Bench::new() };
        let failure = run(&bench, &script.replace("EXIT", exit)).await.failed();
        assert_eq!(failure, "start: exit status 3", "{exit}");
        let told = std::fs::read_to_string(bench.workdir().join("told")).expect("it was called");
        let expected = if deferral { "start 0 \ncancel 0 h7\n" } else { "start 0 \nstart 0 h7\ncancel 0 h7\n" };
        assert_eq!(told, expected, "{exit}");
    }
}

#[tokio::test]
async fn e5_the_contract_test_fails_a_start_that_names_work_and_fails() {
    let folder = tempfile::tempdir().expect("a folder");
    let failing = program("case $JOURNEYMAN_PHASE in start) says queued; exit 3 ;; esac", &[]);
    let plan = TestPlan {
        payload: Some(json!({})),
        bad_payload: None,
        timeout: Duration::from_secs(30),
        cancel_after: Duration::from_secs(30),
    };
    let report = check_program(&failing, &plan, folder.path()).await.expect("it is checked").to_string();
    assert!(report.contains("FAIL     names only work that it has started"), "{report}");
}

#[tokio::test]
async fn work_that_is_canceled_is_ended_by_the_program() {
    let bench = Bench::new();
    let script = r#"case $JOURNEYMAN_PHASE in
        start | verify) says running ;;
        esac"#;
    let canceling = async {
        bench.logged("it is running").await;
        bench.cancel(Duration::from_secs(30));
    };
    let (ended, ()) = tokio::join!(run(&bench, script), canceling);
    ended.failed();
    assert_eq!(calls(&bench).iter().filter(|call| *call == "cancel").count(), 1);
}

#[tokio::test]
async fn a_phase_that_lasts_too_long_fails_the_task_by_the_times_of_the_external_system() {
    let bench = Bench::new();
    let script = r#"case $JOURNEYMAN_PHASE in
        start) says queued ;;
        verify) printf '{"type":"work","phase":"queued","since":"2026-01-01T00:00:00Z","now":"2026-01-01T00:01:01Z"}\n' >&3 ;;
        esac"#;
    let failure = bench.run(&program(script, &[("queued", 60)]), json!({})).await.failed();
    assert!(failure.contains("it was queued for 61 s; the limit is 60 s"), "{failure}");
    assert_eq!(calls(&bench), ["start", "verify", "cancel"]);
}

#[tokio::test]
async fn the_example_for_slurm_starts_a_job_once_and_follows_it() {
    let slurm = tempfile::tempdir().expect("a folder");
    let path = |name: &str| slurm.path().join(name).display().to_string();
    // Accounting knows of the job after its first start, whose answer is lost, and then of each of its states.
    let states = path("states");
    std::fs::write(&states, "RUNNING\nNODE_FAIL\n\nCOMPLETED\n").expect("it is written");
    let (jobs, canceled) = (path("jobs"), path("canceled"));
    for (name, script) in [
        (
            "sbatch",
            format!(
                "echo \"$*\" >>{jobs}; [ -e {jobs}.lost ] || {{ : >{jobs}.lost; kill -KILL $PPID; }}; wc -l <{jobs}"
            ),
        ),
        (
            "sacct",
            format!(
                "case $* in *--name=*) grep -n -e \"${{5#--name=}} \" {jobs} | cut -d: -f1 ;; *) sed -n 1p {states}; sed -i 1d {states} ;; esac"
            ),
        ),
        ("scancel", format!("echo \"$*\" >>{canceled}")),
    ] {
        use std::os::unix::fs::PermissionsExt as _;
        std::fs::write(path(name), format!("#!/bin/sh\n{script}\n")).expect("it is written");
        std::fs::set_permissions(path(name), std::fs::Permissions::from_mode(0o755)).expect("it is set");
    }
    std::fs::write(&jobs, "").expect("it is written");
    let example = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/handlers/slurm.sh");
    let staged = StagedProgram { check_interval: Span(Duration::from_secs(1)), phases: BTreeMap::new(), retries: 1 };
    let config = ProgramHandler { staged: Some(staged), ..ProgramHandler::new(vec![example.to_owned()]) };
    let environment = Environment::from_pairs(&[("PATH", &format!("{}:/usr/bin:/bin", slurm.path().display()))]);
    let bench = Bench::new();
    let handler = Program::new("slurm", config, &environment).expect("a handler");
    bench.run(&handler, json!({ "script": "/shared/render.sh" })).await.completed();
    let started = std::fs::read_to_string(&jobs).expect("it is read");
    let names: Vec<_> = started.lines().map(|line| line.split_whitespace().nth(1).unwrap_or_default()).collect();
    assert_eq!(names.len(), 2, "a job for each launch: {started}");
    assert!(names[0].ends_with("-0") && names[1].ends_with("-1"), "{started}");
    let canceled = std::fs::read_to_string(canceled).expect("it is read");
    assert!(canceled.lines().last().is_some_and(|line| line.ends_with("-1")), "{canceled}");
}

/// Work in memory that answers as it is told.
#[derive(Default)]
struct Scripted {
    looks: Mutex<Vec<StagedAnswer>>,
    calls: Mutex<Vec<&'static str>>,
    changed: Notify,
    launches: AtomicU32,
}

fn running() -> Progress {
    Progress { phase: "running".into(), since: None, observed_at: Stamp(0), check_in: Some(Duration::from_secs(3600)) }
}

impl StagedHandler for Scripted {
    type Payload = Value;

    fn policy(&self, _payload: &Value) -> StagedPolicy {
        StagedPolicy {
            phases: BTreeMap::new(),
            infrastructure_retries: 2,
            capacity_retries: 2,
            check_interval: Duration::from_secs(30),
        }
    }

    async fn adopt(&self, _work: Work<'_, Value>) -> StagedAnswer {
        self.calls.lock().push("adopt");
        StagedAnswer::Absent
    }

    async fn start(&self, work: Work<'_, Value>) -> StagedAnswer {
        self.calls.lock().push("start");
        self.launches.store(work.record.launch, Ordering::Relaxed);
        StagedAnswer::Started { handle: "w".into(), progress: running() }
    }

    async fn verify(&self, _work: Work<'_, Value>) -> StagedAnswer {
        self.calls.lock().push("verify");
        self.looks.lock().pop().unwrap_or(StagedAnswer::Done)
    }

    async fn cancel(&self, _work: Work<'_, Value>) -> StagedAnswer {
        self.calls.lock().push("cancel");
        StagedAnswer::Canceled
    }

    async fn wakeup(&self, _work: Work<'_, Value>) {
        self.changed.notified().await;
    }
}

#[tokio::test]
async fn a_wake_up_looks_at_once_and_lost_work_is_launched_again() {
    let began = tokio::time::Instant::now();
    let lost = StagedAnswer::Failed { class: FailureClass::Infrastructure, reason: "evicted".into() };
    let looks = Mutex::new(vec![StagedAnswer::Done, StagedAnswer::Unknown, lost]);
    let handler = Arc::new(Scripted { looks, ..Scripted::default() });
    let bench = Bench::new();
    handler.changed.notify_one();
    let erased = erase(Staged(Shared(Arc::clone(&handler))));
    let running = bench.run(&*erased, json!({}));
    let waking = async {
        while handler.launches.load(Ordering::Relaxed) == 0 {
            tokio::task::yield_now().await;
        }
        handler.changed.notify_one();
        std::future::pending::<()>().await;
    };
    tokio::select! {
        ended = running => ended.completed(),
        () = waking => unreachable!("it never ends"),
    }
    let calls = handler.calls.lock().clone();
    let expected = ["adopt", "start", "verify", "cancel", "adopt", "start", "verify", "verify", "cancel"];
    assert_eq!(calls, expected);
    assert!(began.elapsed() < Duration::from_secs(60), "a wake-up was waited for: {:?}", began.elapsed());
}

struct NoReplies;

impl PartialReplySink for NoReplies {
    fn send(&self, _: Reply) -> ReplyFuture<'_> {
        Box::pin(async { panic!("no reply is sent") })
    }

    fn work_key(&self) -> Option<String> {
        Some("a-key".to_owned())
    }
}

/// A bench whose message carries this record, and the results of its request.
fn deferring(record: Option<StagedRecord>) -> (Bench, Results) {
    let mut bench = Bench::new();
    let limits = ReplyLimits { body_bytes: 1000, content_type_bytes: 255 };
    let results = Results::with_deferral(NoReplies, limits, Some(Deferral::new(record)));
    bench.context = bench.context.with_results(Some(results.clone()));
    (bench, results)
}

#[track_caller]
fn deferred(ended: &RunResult, results: &Results) -> NextCheck {
    assert!(
        matches!(ended, RunResult::Ran(Err(ExecuteError { reason: ExecuteFailure::Deferred, .. }))),
        "it is deferred: {ended:?}"
    );
    results.deferral().and_then(Deferral::next_check).expect("a check is scheduled")
}

#[tokio::test]
async fn work_that_has_started_is_deferred_with_its_record_and_is_not_removed_at_its_end() {
    let handler = Arc::new(Scripted::default());
    let erased = erase(Staged(Shared(Arc::clone(&handler))));
    let (bench, results) = deferring(None);
    let NextCheck { record, wait } = deferred(&bench.run(&*erased, json!({})).await, &results);
    assert_eq!((record.handle.as_deref(), &*record.phase, record.seq), (Some("w"), "running", 1));
    assert_eq!(wait, Duration::from_secs(3600));
    let (bench, results) = deferring(Some(record.clone()));
    handler.looks.lock().push(StagedAnswer::Progress(running()));
    let next = deferred(&bench.run(&*erased, json!({})).await, &results).record;
    assert_eq!(next, StagedRecord { seq: 2, ..record });
    let (bench, results) = deferring(Some(next.clone()));
    bench.run(&*erased, json!({})).await.completed();
    assert_eq!(results.deferral().and_then(Deferral::next_check), None);
    assert_eq!(*handler.calls.lock(), ["adopt", "start", "verify", "verify"]);
    // A check that another one has overtaken ends without a reply.
    let (bench, results) = deferring(Some(next));
    handler.looks.lock().push(StagedAnswer::Superseded);
    let ended = bench.run(&*erased, json!({})).await;
    assert!(matches!(ended, RunResult::Ran(Err(ExecuteError { reason: ExecuteFailure::Deferred, .. }))), "{ended:?}");
    assert_eq!(results.deferral().and_then(Deferral::next_check), None);
}

#[tokio::test]
async fn deferred_work_is_removed_if_it_goes_on_after_the_task_has_failed() {
    for (verify, removed) in [("exit 3", 0), ("says queued", 1)] {
        let record = StagedRecord {
            handle: Some("h7".into()),
            phase: "queued".into(),
            phase_since: Some(Stamp(0)),
            ..StagedRecord::default()
        };
        let (bench, _) = deferring(Some(record));
        let script = format!("case $JOURNEYMAN_PHASE in verify) {verify} ;; esac");
        bench.run(&program(&script, &[("queued", 60)]), json!({})).await.failed();
        assert_eq!(calls(&bench).iter().filter(|call| *call == "cancel").count(), removed, "{verify}");
    }
}

#[tokio::test]
async fn a_worker_that_stops_leaves_work_to_the_next_one_where_the_source_can_schedule_a_message() {
    let record = StagedRecord { handle: Some("w".into()), seq: 4, ..StagedRecord::default() };
    let canceled = CancelCause::Command(CancelCommand::Cancel);
    let lost = CancelCause::ClaimLost(LossReason::Revoked);
    for cause in [CancelCause::Shutdown, CancelCause::Command(CancelCommand::Release), lost, canceled] {
        let handler = Arc::new(Scripted::default());
        let erased = erase(Staged(Shared(Arc::clone(&handler))));
        let (bench, results) = deferring(Some(record.clone()));
        handler.looks.lock().push(StagedAnswer::Progress(running()));
        bench.cancel_for(cause, Duration::from_secs(30));
        let ended = bench.run(&*erased, json!({})).await;
        let calls = handler.calls.lock().clone();
        if cause == canceled {
            ended.failed();
            assert_eq!(calls, ["verify", "cancel"]);
        } else {
            let next = deferred(&ended, &results);
            assert_eq!((next.wait, &next.record.handle, calls), (Duration::ZERO, &record.handle, vec!["verify"]));
        }
    }
}

#[test]
fn starts_without_an_answer_wait_longer_each_time() {
    let policy = StagedPolicy {
        phases: BTreeMap::new(),
        infrastructure_retries: 0,
        capacity_retries: 0,
        check_interval: Duration::from_secs(1),
    };
    let (mut actions, mut now) = (Vec::new(), Instant::ORIGIN);
    let mut state = StagedState::new(policy, StagedRecord::default(), Jitter::seeded(1), &mut actions);
    for seconds in [1, 2, 4, 8] {
        // It is looked for in vain, and started.
        for answer in [StagedAnswer::Absent, StagedAnswer::Unknown] {
            actions.clear();
            state.handle(StagedEvent::Answered(answer), now, &mut actions);
        }
        let [StagedAction::Rest(wait)] = actions[..] else { panic!("{actions:?}") };
        assert!((seconds * 500..=seconds * 1000).contains(&wait.as_millis()), "{wait:?}");
        now = now.plus(wait);
        state.handle(StagedEvent::Due, now, &mut actions);
    }
}

#[tokio::test]
async fn a_short_wait_before_the_launch_is_not_deferred() {
    let (bench, _) = deferring(None);
    let script = r#"case $JOURNEYMAN_PHASE in
        start) echo "$JOURNEYMAN_WORK" >>names; [ -e tried ] || { : >tried; says queued; exit $JOURNEYMAN_EXIT_RETRY; } ;;
        esac"#;
    run(&bench, script).await.completed();
    assert_eq!(calls(&bench), ["start", "start"]);
    assert_eq!(std::fs::read_to_string(bench.workdir().join("names")).expect("it is kept"), "a-key\na-key\n");
}

/// A handler that the test sees too.
struct Shared(Arc<Scripted>);

impl StagedHandler for Shared {
    type Payload = Value;

    fn policy(&self, payload: &Value) -> StagedPolicy {
        self.0.policy(payload)
    }

    async fn adopt(&self, work: Work<'_, Value>) -> StagedAnswer {
        self.0.adopt(work).await
    }

    async fn start(&self, work: Work<'_, Value>) -> StagedAnswer {
        self.0.start(work).await
    }

    async fn verify(&self, work: Work<'_, Value>) -> StagedAnswer {
        self.0.verify(work).await
    }

    async fn cancel(&self, work: Work<'_, Value>) -> StagedAnswer {
        self.0.cancel(work).await
    }

    async fn wakeup(&self, work: Work<'_, Value>) {
        self.0.wakeup(work).await;
    }
}

#[tokio::test]
async fn the_contract_test_starts_work_twice_and_wants_it_to_be_one() {
    let body = r#"case $JOURNEYMAN_PHASE in
        start) HANDLE; says queued ;;
        verify) [ -e ended ] || says running; : >ended ;;
        esac"#;
    for (handle, is_one) in [("", true), ("says() { printf '{\"type\":\"work\",\"handle\":\"'$$'\"}\\n' >&3; }", false)]
    {
        let program = program(&body.replace("HANDLE", if handle.is_empty() { ":" } else { handle }), &[]);
        let folder = tempfile::tempdir().expect("a folder");
        let plan = TestPlan {
            payload: Some(json!({})),
            bad_payload: None,
            timeout: Duration::from_secs(30),
            cancel_after: Duration::from_secs(1),
        };
        let report = check_program(&program, &plan, folder.path()).await.expect("it is tested");
        assert_eq!(report.passed(), is_one, "{report}");
        let lines = report.to_string();
        assert_eq!(lines.contains("find the work by JOURNEYMAN_WORK"), !is_one, "{lines}");
        assert!(lines.contains("pass     completes a good payload"), "{lines}");
    }
}
