use std::io;
use std::time::Duration;

use journeyman::handler::environment;
use journeyman::handler::log::LogLimits;
use journeyman::handler::process::{EndCause, Launch, ProcessEnd, ProcessStatus, RunLimits, RunningProcess};

use crate::handler::bench::{Bench, number_in, read, runs};

const LONG: RunLimits =
    RunLimits { run_time: Some(Duration::from_secs(60)), termination_grace: Duration::from_secs(30) };

async fn start(bench: &Bench, argv: &[&str]) -> io::Result<RunningProcess> {
    let argv: Vec<String> = argv.iter().map(|&argument| argument.to_owned()).collect();
    let env = environment::for_task(&environment::Variables::new(), &bench.context);
    RunningProcess::start(Launch::new(&argv, &env, &bench.context)).await
}

async fn run(bench: &Bench, script: &str, bounds: RunLimits) -> ProcessEnd {
    let running = start(bench, &["sh", "-c", script]).await.unwrap();
    running.finish(bounds, &bench.context).await.unwrap()
}

/// Cancels a script once it has logged `ready`.
async fn run_canceled(bench: &Bench, script: &str, limits: RunLimits) -> ProcessEnd {
    let running = start(bench, &["sh", "-c", script]).await.unwrap();
    let (ended, ()) = tokio::join!(running.finish(limits, &bench.context), async {
        bench.logged("ready").await;
        bench.cancel(Duration::from_secs(20));
    });
    ended.unwrap()
}

#[tokio::test]
async fn both_outputs_are_logged_in_the_order_of_the_writes() {
    let bench = Bench::new();
    let ended = run(&bench, "for i in 1 2 3 4; do echo out $i; echo err $i >&2; done", LONG).await;
    assert_eq!((ended.status, ended.cause), (ProcessStatus::Code(0), EndCause::Exited));
    let expected: String = (1..5).map(|i| format!("out {i}\nerr {i}\n")).collect();
    assert_eq!(bench.log(), expected);
}

#[tokio::test]
async fn output_that_may_begin_a_secret_is_logged_when_the_payload_pauses() {
    let bench = Bench::new();
    bench.context.log().add_secret("ready-to-burst").unwrap();
    // The word is held back until the pause.
    let ended = run_canceled(&bench, "printf ready-to; exec sleep 600", LONG).await;
    assert!(matches!(ended.cause, EndCause::Canceled(_)));
}

#[tokio::test]
async fn a_process_leads_its_own_group_and_has_no_input() {
    let bench = Bench::new();
    let running = start(&bench, &["sh", "-c", "cat; ps -o pgid= -p $$ || cut -d' ' -f5 /proc/$$/stat"]).await.unwrap();
    let group = running.group();
    running.finish(LONG, &bench.context).await.unwrap();
    assert_eq!(bench.log().trim(), group.to_string());
}

#[tokio::test]
async fn a_background_process_is_killed_and_its_output_is_logged() {
    let bench = Bench::new();
    let script = "(echo from behind; : >told; exec sleep 600) & echo $! >pid; \
                  while [ ! -e told ]; do sleep 0.05; done; echo done";
    let ended = run(&bench, script, LONG).await;
    assert_eq!(ended.status, ProcessStatus::Code(0));
    assert!(ended.notes.iter().any(|remark| remark.contains("held the output open")), "{ended:?}");
    assert!(!runs(number_in(&bench.workdir().join("pid"))));
    let log = bench.log();
    assert!(log.contains("from behind") && log.contains("done"), "{log}");
}

#[tokio::test]
async fn a_process_that_ignores_sigterm_is_killed_after_the_grace() {
    let bench = Bench::new();
    let script = "trap '' TERM; echo ready; while :; do sleep 0.05; done";
    let bounds = RunLimits { termination_grace: Duration::from_millis(300), ..LONG };
    let ended = run_canceled(&bench, script, bounds).await;
    assert_eq!(ended.status, ProcessStatus::Signal(9));
    assert!(matches!(ended.cause, EndCause::Canceled(_)));
    assert!(ended.notes.iter().any(|remark| remark.contains("killed")), "{ended:?}");
}

#[tokio::test]
async fn an_earlier_deadline_shortens_the_grace() {
    let bench = Bench::new();
    let script = "trap 'echo told' TERM; echo ready; while :; do sleep 0.05; done";
    let bounds = RunLimits { termination_grace: Duration::from_secs(3600), ..LONG };
    let running = start(&bench, &["sh", "-c", script]).await.unwrap();
    let orders = async {
        bench.logged("ready").await;
        bench.cancel(Duration::from_secs(3600));
        bench.logged("told").await;
        bench.cancel(Duration::ZERO);
    };
    let both = async { tokio::join!(running.finish(bounds, &bench.context), orders) };
    let (ended, ()) = tokio::time::timeout(Duration::from_secs(30), both).await.expect("it does not wait for an hour");
    assert_eq!(ended.unwrap().status, ProcessStatus::Signal(9));
}

#[tokio::test]
async fn a_process_that_exits_on_sigterm_ends_at_once() {
    let bench = Bench::new();
    let script = "trap 'echo cleaned up; exit 7' TERM; echo ready; while :; do sleep 0.05; done";
    let ended = run_canceled(&bench, script, LONG).await;
    assert_eq!((ended.status, ended.notes), (ProcessStatus::Code(7), Vec::new()));
    assert!(bench.log().contains("cleaned up"));
}

#[tokio::test]
async fn a_stopped_process_receives_sigterm() {
    let bench = Bench::new();
    let script = "trap 'exit 7' TERM; echo ready; kill -STOP $$; while :; do sleep 0.05; done";
    let ended = run_canceled(&bench, script, LONG).await;
    assert_eq!((ended.status, ended.was_killed), (ProcessStatus::Code(7), false), "{:?}", ended.notes);
}

#[tokio::test]
async fn the_rest_of_a_group_has_the_grace_after_its_leader_exited() {
    let bench = Bench::new();
    // The leader exits on SIGTERM at once; its child takes longer, without holding the output.
    let script = "sh -c 'trap \"sleep 0.3; echo saved >saved; exit\" TERM; echo ready; exec >/dev/null 2>&1; while :; do sleep 0.05; done' & wait";
    let ended = run_canceled(&bench, script, LONG).await;
    assert_eq!(ended.status, ProcessStatus::Signal(15));
    assert_eq!(std::fs::read_to_string(bench.workdir().join("saved")).unwrap(), "saved\n");
}

#[tokio::test]
async fn dropping_a_running_payload_kills_its_whole_group() {
    let bench = Bench::new();
    let alive = bench.alive();
    let script = "exec 9>alive; (trap '' TERM HUP INT; sleep 600) & echo ready; wait";
    let running = start(&bench, &["sh", "-c", script]).await.unwrap();
    tokio::select! {
        _ = running.finish(LONG, &bench.context) => panic!("it does not end by itself"),
        () = bench.logged("ready") => {}
    }
    alive.gone().await;
}

#[tokio::test]
async fn a_line_of_any_length_is_logged() {
    let limits = LogLimits { head_bytes: 1 << 20, tail_bytes: 1 << 20 };
    let bench = Bench::with_limits(limits);
    let bytes = 64 << 20;
    let ended = run(&bench, &format!("head -c {bytes} /dev/zero | tr '\\0' x"), LONG).await;
    assert_eq!(ended.status, ProcessStatus::Code(0));
    assert_eq!(bench.context.log().finish().unwrap().unwrap().omitted, bytes - (2 << 20));
    assert!(read(&bench.context).len() < (2 << 20) + 100);
    assert_eq!(bench.context.log().bytes(), bytes);
}
