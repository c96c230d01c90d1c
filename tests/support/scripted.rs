//! A worker in this process with a handler of the test's.

use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use journeyman::handler::{Context, DynHandler, ExecuteError, PayloadHandler, PrepareError};
use journeyman::source::Source;
use journeyman::task::Reply;
use journeyman::worker::{Control, ExitReason, SourceBinding, Worker, WorkerConfig};
use serde::de::DeserializeOwned;
use tokio::task::JoinHandle;

use crate::support::{until, within};

/// What the handler of a test does.
pub(crate) type Act<P> =
    Arc<dyn Fn(P, Context) -> Pin<Box<dyn Future<Output = Result<(), ExecuteError>> + Send>> + Send + Sync>;

pub(crate) struct Scripted<P> {
    pub(crate) prepare: fn(P) -> Result<P, PrepareError>,
    pub(crate) act: Act<P>,
}

impl<P: DeserializeOwned + Send + 'static> PayloadHandler for Scripted<P> {
    type Payload = P;
    type Prepared = P;

    async fn prepare(&self, payload: P, _: &Context) -> Result<P, PrepareError> {
        (self.prepare)(payload)
    }

    async fn execute(&self, payload: P, context: &Context) -> Result<(), ExecuteError> {
        (self.act)(payload, context.clone()).await
    }
}

pub(crate) fn handler<P, F>(run: impl Fn(P, Context) -> F + Send + Sync + 'static) -> Act<P>
where
    F: Future<Output = Result<(), ExecuteError>> + Send + 'static,
{
    Arc::new(move |payload, context| Box::pin(run(payload, context)))
}

/// A handler that replies at once.
pub(crate) fn replies<P>(body: impl Fn(&P, &Context) -> Vec<u8> + Send + Sync + 'static) -> Act<P> {
    handler(move |payload, context| {
        let reply = Reply::ok(body(&payload, &context));
        async move {
            context.set_reply(reply).expect("the worker accepts it");
            Ok(())
        }
    })
}

pub(crate) struct Running {
    pub(crate) control: Control,
    /// Those with a status page.
    pub(crate) sources: Vec<(String, Arc<dyn Source>)>,
    worker: JoinHandle<std::io::Result<ExitReason>>,
    _folder: tempfile::TempDir,
}

impl Running {
    pub(crate) fn serving(
        source: Arc<dyn Source>,
        change: impl FnOnce(WorkerConfig) -> WorkerConfig,
        handler: Arc<dyn DynHandler>,
    ) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let settings = change(WorkerConfig {
            work_dir: folder.path().join("work"),
            termination_grace: Duration::from_secs(1),
            ..WorkerConfig::default()
        });
        let feed = SourceBinding { name: "requests".to_owned(), source, handler, env: Arc::default() };
        let worker = Worker::new(settings, vec![feed]);
        let (control, sources) = (worker.control(), worker.inspected_sources());
        Self { control, sources, worker: tokio::spawn(worker.run()), _folder: folder }
    }

    /// A counter of its source.
    pub(crate) async fn counter(&self, name: &str) -> u64 {
        let view = self.control.status().await.expect("it works");
        view.sources[0].metrics[name]
    }

    /// Waits until the status shows an error of its source.
    pub(crate) async fn reports_error(&self, words: &str) {
        until(words, async || {
            let view = self.control.status().await.expect("it works");
            view.sources[0].error.as_ref().is_some_and(|error| error.message.contains(words))
        })
        .await;
    }

    /// Waits until a counter of its source reaches this.
    pub(crate) async fn counts(&self, name: &str, least: u64) {
        until(&format!("{least} {name}"), async || self.counter(name).await >= least).await;
    }

    /// Waits until this many requests are completed: clients get the reply before the worker counts it.
    pub(crate) async fn completed(&self, count: u64) {
        let completed = || self.control.counts().sources.outcomes.completed;
        until(&format!("{count} completed"), async || completed() >= count).await;
    }

    pub(crate) async fn ended(self) -> ExitReason {
        within("the end of the worker", self.worker).await.expect("it did not panic").expect("it could work")
    }

    /// Drains it and waits for its end.
    pub(crate) async fn drained(self) {
        self.control.drain().await;
        assert_eq!(self.ended().await, ExitReason::Drained);
    }
}
