use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use journeyman::config::Environment;
use journeyman::config::schema::ProgramHandler;
use journeyman::config::values::{File, Span};
use journeyman::handler::artifact_collector::CollectedArtifact;
use journeyman::handler::program::Program;
use journeyman::handler::{PrepareError, PrepareFailure};
use journeyman::task::{Artifact, ArtifactBody, PartialReplySink, Reply, ReplyFuture, Results};
use serde_json::{Value, json};
use tokio::sync::Notify;

use crate::handler::bench::{Bench, RunResult, number_in};
use crate::handler::services::{Parts, REPLY_LIMITS};

/// A shell script as a handler; the document is on its standard input.
fn script(script: &str) -> ProgramHandler {
    ProgramHandler::new(["sh", "-c", script].map(str::to_owned).to_vec())
}

fn program(config: ProgramHandler) -> Program {
    Program::new("test", config, &Environment::default()).unwrap()
}

async fn run_with(bench: &Bench, config: ProgramHandler, payload: Value) -> RunResult {
    bench.run(&program(config), payload).await
}

async fn run(bench: &Bench, text: &str) -> RunResult {
    run_with(bench, script(text), json!({"a": 1})).await
}

fn example(name: &str) -> String {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/handlers").join(name).to_str().unwrap().to_owned()
}

fn artifacts(bench: &Bench) -> Vec<Artifact> {
    let collected = bench.context.artifacts().collect(bench.workdir()).unwrap();
    collected
        .map(|item| match item {
            CollectedArtifact::Found(artifact, _) => artifact,
            other => panic!("{other:?}"),
        })
        .collect()
}

fn content(artifact: &Artifact) -> String {
    use std::io::Read;
    match &artifact.body {
        ArtifactBody::File { file, .. } => {
            let mut text = String::new();
            (&**file).read_to_string(&mut text).unwrap();
            text
        }
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn a_program_reads_the_document_up_to_end_of_file() {
    let bench = Bench::new();
    run(&bench, "cat >document; wc -l <document").await.completed();
    let text = std::fs::read_to_string(bench.workdir().join("document")).unwrap();
    let mut document: Value = serde_json::from_str(&text).unwrap();
    let lease = document["lease"]["secondsLeft"].take().as_f64().unwrap();
    assert!((1190.0..=1200.0).contains(&lease), "{lease}");
    assert_eq!(
        document,
        json!({
            "protocol": "stdio-json/1", "phase": "run", "payload": {"a": 1}, "attempt": 3, "source": "local",
            "taskId": "fN1SbArXTPSVFNUvaOlinQ", "lease": {"secondsLeft": null}, "workdir": bench.workdir(),
            "task": {"deadline": "2029-12-01T00:00:00.000Z", "expires": "2030-01-01T00:00:00.000Z", "metadata": {"name": "a task"}},
        })
    );
}

#[tokio::test]
async fn named_exit_statuses_decide_the_outcome() {
    for (exit, expected) in [
        ("0", "Ran(Ok(()))"),
        ("$JOURNEYMAN_EXIT_FAILED", "Ran(Err(ExecuteError { reason: Failed,"),
        ("$JOURNEYMAN_EXIT_RETRY", "Ran(Err(ExecuteError { reason: Intermittent,"),
        ("$JOURNEYMAN_EXIT_UNAVAILABLE", "Ran(Err(ExecuteError { reason: Unavailable,"),
        ("$JOURNEYMAN_EXIT_INTERNAL", "Ran(Err(ExecuteError { reason: Internal,"),
        ("$JOURNEYMAN_EXIT_MALFORMED", "Ran(Err(ExecuteError { reason: Failed,"),
        ("42", "Ran(Err(ExecuteError { reason: Failed,"),
    ] {
        let bench = Bench::new();
        let result = format!("{:?}", run(&bench, &format!("exit {exit}")).await);
        assert!(result.starts_with(expected), "{exit}: {result}");
    }
    let result = format!("{:?}", run(&Bench::new(), "kill -KILL $$").await);
    assert!(result.starts_with("Ran(Err(ExecuteError { reason: Failed,"), "{result}");
}

#[tokio::test]
async fn lines_on_descriptor_3_become_artifacts_and_log_lines() {
    let bench = Bench::new();
    run(
        &bench,
        r#"echo data >out.csv; mkdir dir; echo x >dir/x
        echo '{"type":"artifact","name":"public/out.csv","path":"out.csv","expires":"2029-01-01T00:00:00Z"}' >&3
        echo '{"type":"directory","name":"public/dir","path":"dir","expires":"2031-01-01T00:00:00Z"}' >&3
        echo '{"type":"result","value":{"n":[1,2]}}' >&3
        printf '%s\n' '{"type":"step","name":"two\nlines","newer":"key"}' >&3
        printf '{"type":"progress","done":1,"total":2,"text":"half"}' >&3"#,
    )
    .await
    .completed();
    let artifacts = artifacts(&bench);
    let names: Vec<&str> = artifacts.iter().map(|artifact| artifact.name.as_str()).collect();
    assert_eq!(names, ["public/out.csv", "public/dir/x", "public/result.json"]);
    assert_eq!(artifacts[0].expires.as_deref(), Some("2029-01-01T00:00:00Z"));
    assert_eq!(artifacts[1].expires, None);
    assert_eq!(content(&artifacts[2]), r#"{"n":[1,2]}"#);
    let log = bench.log();
    let later = "artifact public/dir: `expires`: it is later than the task's own expires";
    for line in [r"step: two\nlines", "progress: 1 of 2: half", later] {
        assert!(log.contains(line), "{line} is not in {log}");
    }
}

#[tokio::test]
async fn the_shown_progress_is_redacted_as_the_log_is() {
    let bench = Bench::new();
    run(
        &bench,
        r#"echo '{"type":"redact","text":"MYSECRETVALUE"}' >&3
        echo '{"type":"progress","done":1,"text":"MYSECRETVALUE and https://u:pw1234@host/"}' >&3"#,
    )
    .await
    .completed();
    assert_eq!(bench.context.progress().as_deref(), Some("1: [redacted] and https://[redacted]@host/"));
}

#[tokio::test]
async fn a_result_is_not_written_through_a_link_of_the_program() {
    let bench = Bench::new();
    run(
        &bench,
        r#"for number in 0 1 2; do ln -s ../outside "result-$number.json"; done
        echo '{"type":"result","value":1}' >&3"#,
    )
    .await
    .completed();
    assert!(!bench.workdir().with_file_name("outside").exists());
    assert!(artifacts(&bench).is_empty());
    assert!(bench.log().contains("File exists"), "{}", bench.log());
}

#[tokio::test]
async fn secrets_named_by_a_program_are_redacted_in_its_output() {
    let bench = Bench::new();
    run(
        &bench,
        r#"secret=prog-canary-77; echo "{\"type\":\"redact\",\"text\":\"$secret\"}" >&3; echo '{"type":"redact","text":"tiny"}' >&3
        printf 'a prog-can'; printf 'ary-77 '; printf "$secret" | base64
        echo "{\"type\":\"step\",\"name\":\"with $secret\"}" >&3"#,
    )
    .await.completed();
    let log = bench.log();
    assert!(
        log.contains("a [redacted] ")
            && log.matches("[redacted]").count() == 3
            && log.contains("step: with [redacted]"),
        "{log}"
    );
    assert!(log.contains("line 2: ignored: secret not redacted"), "{log}");
}

#[tokio::test]
async fn b14_the_log_names_what_a_message_lacks_once() {
    let bench = Bench::new();
    run(
        &bench,
        r#"for percent in 1 2 3; do echo "{\"type\":\"progress\",\"percent\":$percent}" >&3; done
        for name in one two; do echo "{\"type\":\"step\",\"name\":\"$name\",\"newer\":1}" >&3; done"#,
    )
    .await
    .completed();
    let log = bench.log();
    for (text, count) in [
        (r#"line 1: ignored: progress needs "done"; unknown key "percent""#, 1),
        ("needs", 1),
        (r#"line 4: step: unknown key "newer""#, 1),
        ("newer", 1),
        ("step: one", 1),
        ("step: two", 1),
    ] {
        assert_eq!(log.matches(text).count(), count, "{text} in {log}");
    }
}

#[tokio::test]
async fn invalid_lines_are_logged_and_ignored() {
    let bench = Bench::new();
    run(
        &bench,
        r#"echo nonsense >&3; echo '{"type":"unheard-of"}' >&3; echo '{"type":"artifact","name":"x","path":"../x"}' >&3
        head -c 70000 /dev/zero | tr '\0' x >&3; echo >&3
        echo '{"type":"step","name":"still heard"}' >&3"#,
    )
    .await
    .completed();
    let log = bench.log();
    for number in 1..=4 {
        assert!(log.contains(&format!("descriptor 3, line {number}: ignored: ")), "{log}");
    }
    assert!(log.contains("step: still heard"), "{log}");
    assert!(bench.context.artifacts().is_empty());
}

/// A queue that can pause.
#[derive(Clone, Default)]
struct Pauses {
    paused: Arc<Notify>,
    resumed: Arc<Notify>,
}

impl PartialReplySink for Pauses {
    fn send(&self, _: Reply) -> ReplyFuture<'_> {
        Box::pin(async { panic!("no reply is sent") })
    }

    fn pause(&self) -> ReplyFuture<'_> {
        Box::pin(async {
            self.paused.notify_one();
            self.resumed.notified().await;
            Ok(())
        })
    }
}

fn request(results: impl PartialReplySink) -> Bench {
    let mut bench = Bench::new();
    bench.context = bench.context.with_results(Some(Results::new(results, REPLY_LIMITS)));
    bench
}

#[tokio::test]
async fn a_program_pauses_until_its_file_is_created() {
    let queue = Pauses::default();
    let bench = request(queue.clone());
    let program = run(
        &bench,
        r#"echo '{"type":"step","name":"before"}' >&3; echo '{"type":"pause","path":"go"}' >&3
        echo '{"type":"step","name":"after"}' >&3; until [ -e go ]; do sleep 0.02; done"#,
    );
    let test = async {
        queue.paused.notified().await;
        assert_eq!(bench.context.progress().as_deref(), Some("paused"));
        assert!(!bench.workdir().join("go").exists());
        queue.resumed.notify_one();
    };
    tokio::join!(program, test).0.completed();
    assert_eq!(bench.context.progress().as_deref(), Some("after"));
    assert!(!bench.log().contains("descriptor 3"), "{}", bench.log());
}

#[tokio::test]
async fn a_program_that_ends_while_it_is_paused_holds_nothing_open() {
    let queue = Pauses::default();
    let bench = request(queue.clone());
    let program = run(&bench, r#"echo '{"type":"pause"}' >&3; until [ -e end ]; do sleep 0.02; done"#);
    let test = async {
        queue.paused.notified().await;
        std::fs::write(bench.workdir().join("end"), "").unwrap();
    };
    tokio::join!(program, test).0.completed();
    assert!(!bench.log().contains("descriptor 3"), "{}", bench.log());
    assert!(!bench.workdir().join("resumed").exists());
}

#[tokio::test]
async fn a_pause_that_is_not_possible_is_noted_and_creates_nothing() {
    for bench in [Bench::new(), request(Parts::default())] {
        let program = run(
            &bench,
            r#"echo '{"type":"pause","path":"../x"}' >&3; echo '{"type":"pause"}' >&3
            until [ -e end ]; do sleep 0.02; done"#,
        );
        let test = async {
            bench.logged("line 1: ignored: `path` of a pause must be the name").await;
            bench.logged("line 2: ignored: this queue cannot pause a task").await;
            assert!(!bench.workdir().join("resumed").exists());
            std::fs::write(bench.workdir().join("end"), "").unwrap();
        };
        tokio::join!(program, test).0.completed();
    }
}

#[tokio::test]
async fn the_file_of_a_pause_is_not_created_through_a_link_of_the_program() {
    let queue = Pauses::default();
    queue.resumed.notify_one();
    let bench = request(queue);
    let program =
        run(&bench, r#"ln -s elsewhere resumed; echo '{"type":"pause"}' >&3; until [ -e end ]; do sleep 0.02; done"#);
    let test = async {
        bench.logged("ignored: resumed, but cannot create resumed").await;
        std::fs::write(bench.workdir().join("end"), "").unwrap();
    };
    tokio::join!(program, test).0.completed();
    assert!(!bench.workdir().join("elsewhere").exists());
}

#[tokio::test]
async fn a_program_need_not_read_its_input() {
    let bench = Bench::new();
    let payload = json!({"text": "x".repeat(4 << 20)});
    run_with(&bench, script("exit 0"), payload.clone()).await.completed();
    // A program may also fill descriptor 3 before it reads.
    let talkative =
        r#"yes '{"type":"step","name":"s"}' | head -n 9000 >&3; head -c 1000000 /dev/zero; cat >in; wc -c <in >count"#;
    let bench = Bench::new();
    run_with(&bench, script(talkative), payload).await.completed();
    assert!(number_in(&bench.workdir().join("count")) > 4 << 20);
}

#[tokio::test]
async fn a_program_past_its_time_limit_fails() {
    let bench = Bench::new();
    let settings = ProgramHandler { max_run_time: Span(Duration::from_millis(50)), ..script("exec sleep 600") };
    run_with(&bench, settings, json!({})).await.failed();
}

#[tokio::test]
async fn a_program_sees_no_variable_of_the_worker_by_default() {
    let bench = Bench::new();
    run(&bench, "env").await.completed();
    let log = bench.log();
    let mut names: Vec<&str> = log.lines().map(|line| line.split('=').next().unwrap()).collect();
    names.retain(|name| !name.starts_with("JOURNEYMAN_EXIT_"));
    names.sort_unstable();
    // The shell adds PWD.
    names.retain(|name| *name != "PWD");
    let of_worker = ["HOME", "JOURNEYMAN_HANDLER", "JOURNEYMAN_PHASE", "JOURNEYMAN_PROTOCOL"];
    let of_task = ["PATH", "RUN_ID", "TASKCLUSTER_ROOT_URL", "TASK_ID", "TASK_WORKDIR"];
    assert_eq!(names, [&of_worker[..], &of_task[..]].concat());
}

#[tokio::test]
async fn a_check_rejects_a_payload_before_it_runs() {
    let bench = Bench::new();
    let check = r#"[ "$JOURNEYMAN_PHASE" = check ] || exit 1
        grep -q '"a":1' || { echo '{"type":"reason","text":"payload/a: must be 1"}' >&3; exit $JOURNEYMAN_EXIT_MALFORMED; }"#;
    let settings = ProgramHandler { check: ["sh", "-c", check].map(str::to_owned).to_vec(), ..script("echo it ran") };
    let reasons = run_with(&bench, settings.clone(), json!({"a": 2})).await.malformed();
    assert_eq!(reasons, ["payload/a: must be 1"]);
    assert!(!bench.log().contains("it ran"));
    let bench = Bench::new();
    run_with(&bench, settings, json!({"a": 1})).await.completed();
    assert_eq!(bench.log(), "it ran\n");
}

#[tokio::test]
async fn a_failing_check_does_not_make_the_payload_malformed() {
    for (check, expected) in [
        ("exit 3", "Refused(PrepareError { reason: Internal,"),
        ("exit $JOURNEYMAN_EXIT_UNAVAILABLE", "Refused(PrepareError { reason: Unavailable,"),
    ] {
        let settings = ProgramHandler { check: ["sh", "-c", check].map(str::to_owned).to_vec(), ..script("true") };
        let result = format!("{:?}", run_with(&Bench::new(), settings, json!({})).await);
        assert!(result.starts_with(expected), "{check}: {result}");
    }
}

#[tokio::test]
async fn a_missing_program_is_a_host_error() {
    let settings = ProgramHandler::new(vec!["/no/such/handler".to_owned()]);
    let result = run_with(&Bench::new(), settings, json!({})).await;
    let RunResult::Refused(PrepareError { reason: PrepareFailure::HostFault, messages }) = result else {
        panic!("{result:?}")
    };
    assert_eq!(messages, ["handler test: /no/such/handler: no such file"]);
}

#[test]
fn an_invalid_schema_is_reported_at_start() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("schema.json");
    for (text, what) in
        [("{", "EOF"), (r#"{"type":"nonsense"}"#, "nonsense"), (r#"{"$ref":"http://127.0.0.1:1/x"}"#, "127.0.0.1")]
    {
        std::fs::write(&path, text).unwrap();
        let config = ProgramHandler { schema: Some(File(path.clone())), ..script("true") };
        let error = Program::new("test", config, &Environment::default()).unwrap_err().to_string();
        assert!(error.contains(what) && error.contains("schema.json"), "{error}");
    }
}

#[tokio::test]
async fn the_python_example_counts_words() {
    let settings =
        ProgramHandler { check: vec![example("word_count.py")], ..ProgramHandler::new(vec![example("word_count.py")]) };
    let bench = Bench::new();
    run_with(&bench, settings.clone(), json!({"text": "to be or not to be"})).await.completed();
    let artifacts = artifacts(&bench);
    assert_eq!(content(&artifacts[0]), "2\tto\n2\tbe\n1\tor\n1\tnot\n");
    let result: Value = serde_json::from_str(&content(&artifacts[1])).unwrap();
    assert_eq!(result, json!({"different": 4, "words": 6}));
    assert!(bench.log().contains("6 words, 4 different ones"));
    run_with(&Bench::new(), settings, json!({"txet": "x"})).await.malformed();
}

#[tokio::test]
async fn the_shell_example_renders_a_page() {
    let schema = Some(File(example("render.schema.json").into()));
    let settings = ProgramHandler { schema, ..ProgramHandler::new(vec![example("render.sh")]) };
    let bench = Bench::new();
    run_with(&bench, settings.clone(), json!({"title": "Hello"})).await.completed();
    assert!(content(&artifacts(&bench)[0]).contains("<h1>Hello</h1>"));
    run_with(&Bench::new(), settings, json!({"title": "<script>"})).await.malformed();
}
