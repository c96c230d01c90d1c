//! Tests the Rust example of a handler.

#[path = "../../examples/greet.rs"]
#[expect(dead_code, reason = "its main is run by `cargo run --example greet`")]
mod example;

use journeyman::domain::id::{Run, TaskId};
use journeyman::domain::outcome::Outcome;
use journeyman::source::memory::{RunEnd, RunState, StoredBody};

#[tokio::test]
async fn the_rust_example_uploads_a_card() {
    let folder = tempfile::tempdir().unwrap();
    let (queue, states) = example::greet("Ada", folder.path().to_owned()).await.unwrap();
    assert_eq!(states, [RunState::Resolved(RunEnd::Reported(Outcome::Completed))]);
    let run = Run { task: TaskId::parse("greeting-1").unwrap(), run: 0 };
    let body = |name: &str| match queue.artifact(&run, name).unwrap().body {
        StoredBody::Content(bytes) => String::from_utf8(bytes).unwrap(),
        other => panic!("{other:?}"),
    };
    assert_eq!(body("public/card.txt"), "Ada");
    assert_eq!(body("public/logs/live_backing.log"), "hello, Ada\n");
}
