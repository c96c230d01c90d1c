//! Tests the examples in Rust, and the module for tests of handlers.

#[path = "../../examples/own_source.rs"]
#[expect(dead_code, reason = "its main is run by `cargo run --example own_source`")]
pub(crate) mod example;
#[path = "../../examples/greet.rs"]
#[expect(dead_code, reason = "its main is run by `cargo run --example greet`")]
mod greet;

use std::collections::BTreeMap;
use std::os::unix::fs::FileExt as _;
use std::time::Duration;

use journeyman::handler::{CancelCause, Context, ExecuteError, PayloadHandler, PrepareError, erase};
use journeyman::id::{Run, TaskId};
use journeyman::outcome::{ExceptionReason, Outcome};
use journeyman::source::ArtifactBody;
use journeyman::task::Reply;
use journeyman::testing::{TestTask, run_one};
use serde_json::{Value, json};

use example::memory_queue::{RunEnd, RunState};

#[tokio::test]
async fn the_rust_example_uploads_a_card() {
    let folder = tempfile::tempdir().unwrap();
    let (queue, states) = example::greet("Ada", folder.path().to_owned()).await.unwrap();
    assert_eq!(states, [RunState::Resolved(RunEnd::Reported(Outcome::Completed))]);
    let run = Run { task: TaskId::parse("greeting-1").unwrap(), run: 0 };
    let body = |name: &str| match queue.artifact(&run, name).unwrap() {
        ArtifactBody::File { file, bytes, .. } => {
            let mut content = vec![0; usize::try_from(bytes).unwrap()];
            file.read_exact_at(&mut content, 0).unwrap();
            String::from_utf8(content).unwrap()
        }
        other => panic!("{other:?}"),
    };
    assert_eq!(body("public/card.txt"), "Ada");
    assert_eq!(body("public/logs/live_backing.log"), "hello, Ada\n");
}

/// Does what its payload says.
struct Obeys;

impl PayloadHandler for Obeys {
    type Payload = String;
    type Prepared = String;

    fn payload_schema(&self) -> Value {
        json!({"type": "string"})
    }

    async fn prepare(&self, word: String, _: &Context) -> Result<String, PrepareError> {
        Ok(word)
    }

    async fn execute(&self, word: String, context: &Context) -> Result<(), ExecuteError> {
        let internal = |error: &dyn std::fmt::Display| ExecuteError::internal(error.to_string());
        match word.as_str() {
            "write" => {
                std::fs::write(context.workdir().join("card"), "content").map_err(|error| internal(&error))?;
                context.artifacts().file("public/card", "card").map_err(|error| internal(&error))?;
                context.set_reply(Reply::ok(b"reply".as_slice())).map_err(|error| internal(&error))
            }
            "forget" => context.artifacts().file("public/card", "card").map_err(|error| internal(&error)),
            "wait" => {
                let asked = context.canceled().await;
                context.log().write_line(asked.cause.message());
                Err(ExecuteError::failed("it was canceled"))
            }
            _ => Err(ExecuteError::failed(word)),
        }
    }
}

#[tokio::test]
async fn a_test_of_a_handler_sees_outcome_log_artifacts_and_reply() {
    let run = async |payload: Value| run_one(Obeys, payload).await.unwrap();
    let wrote = run(json!("write")).await;
    assert!(wrote.is_completed(), "{wrote:?}");
    assert_eq!(wrote.artifacts, BTreeMap::from([("public/card".to_owned(), b"content".to_vec())]));
    assert_eq!(wrote.reply, Some(Reply::ok(b"reply".as_slice())));
    let missing = run(json!("forget")).await;
    assert!(missing.outcome == Outcome::Completed && !missing.is_completed(), "{missing:?}");
    let failed = run(json!("why")).await;
    assert_eq!((failed.outcome, failed.messages), (Outcome::Failed, vec!["why".to_owned()]));
    let malformed = run(json!(7)).await;
    assert_eq!(malformed.outcome, Outcome::Exception(ExceptionReason::MalformedPayload));
    assert!(malformed.messages[0].contains("is not of type"), "{malformed:?}");
}

#[tokio::test(start_paused = true)]
async fn a_test_of_a_handler_may_cancel_and_reclaim_on_virtual_time() {
    let (task, minute) = (TestTask::new(json!("wait")).unwrap(), Duration::from_secs(60));
    let before = task.context().expires_at();
    task.reclaim(60 * minute);
    assert!(task.context().expires_at().since(before) > 30 * minute, "the margin is a part of the lease");
    task.cancel(CancelCause::Shutdown, minute);
    let ended = task.run(&*erase(Obeys)).await.unwrap();
    assert_eq!((ended.outcome, ended.log), (Outcome::Failed, format!("{}\n", CancelCause::Shutdown.message())));
}
