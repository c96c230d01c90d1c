//! Tests the example of a worker with a source of its own.

#[path = "../../examples/own_source.rs"]
#[expect(dead_code, reason = "its main is run by `cargo run --example own_source`")]
pub(crate) mod example;

use std::os::unix::fs::FileExt as _;

use journeyman::source::ArtifactBody;
use journeyman_domain::id::{Run, TaskId};
use journeyman_domain::outcome::Outcome;

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
