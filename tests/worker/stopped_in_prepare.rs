//! A worker that is stopped while a handler prepares.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use journeyman::handler::{self, Context, ExecuteError, PayloadHandler, PrepareError};
use journeyman::worker::{Control, ExitReason, SourceBinding, Worker};
use serde_json::{Value, json};

use crate::worker::scripted::{HANDED_BACK, STYLES, create, memory_queue, runs, settings};

/// Its `prepare` has the worker released, and then finds that the payload is malformed.
struct ReleasesAndRejects(Arc<OnceLock<Control>>);

impl PayloadHandler for ReleasesAndRejects {
    type Payload = Value;
    type Prepared = ();

    async fn prepare(&self, _: Value, _: &Context) -> Result<(), PrepareError> {
        self.0.get().expect("the worker exists").release(None).await;
        Err(PrepareError::malformed(vec!["always".into()]))
    }

    async fn execute(&self, (): (), _: &Context) -> Result<(), ExecuteError> {
        panic!("nothing is prepared")
    }
}

#[tokio::test(start_paused = true)]
async fn a_payload_that_is_rejected_while_the_worker_is_released_is_released() {
    for style in STYLES {
        let (queue, clock) = memory_queue(style);
        let task = create(&queue, "fN1SbArXTPSVFNUvaOlinQ", json!({}));
        let folder = tempfile::tempdir().expect("a folder");
        let control = Arc::new(OnceLock::new());
        let source = SourceBinding {
            name: "memory".into(),
            source: Arc::new(queue.source("worker")),
            handler: handler::erase(ReleasesAndRejects(Arc::clone(&control))),
            env: Arc::default(),
        };
        let worker = Worker::new(settings(folder.path(), clock), vec![source]);
        assert!(control.set(worker.control()).is_ok());
        let hour = Duration::from_secs(3600);
        tokio::time::timeout(hour, runs(worker, ExitReason::Released, async {})).await.expect("it exits");
        let states = queue.states(&task);
        assert_eq!(states.first(), Some(&HANDED_BACK), "{states:?}");
    }
}
