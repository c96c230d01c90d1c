//! Polls whose requests arrive when the worker takes none any more, and sources that share slots.

use std::collections::BTreeMap;
use std::num::NonZeroU32;
use std::pin::Pin;
use std::sync::Arc;

use journeyman::domain::id::PriorityQueue;
use journeyman::source::amqp::AmqpSource;
use journeyman::source::{Capabilities, OpenResult, PollBatch, Source, SourceEvent, SourceFuture};
use journeyman::worker::{Command, Note};
use tokio::sync::{Semaphore, mpsc};

use crate::claims::publish;
use crate::process::{Process, config};
use crate::support::{Client, Kind, Running, broker, echo, queue, shared, shared_uri, within};
use rustix::process::Signal;

/// Reports each request of a poll, and returns it on permission.
struct Late {
    source: AmqpSource,
    came: mpsc::Sender<()>,
    may: Arc<Semaphore>,
}

impl Source for Late {
    fn describe(&self) -> String {
        self.source.describe()
    }
    fn service_id(&self) -> String {
        self.source.service_id()
    }
    fn claimant(&self) -> String {
        self.source.claimant()
    }
    fn capabilities(&self) -> Capabilities {
        self.source.capabilities()
    }
    fn open(&self) -> SourceFuture<'_, OpenResult> {
        self.source.open()
    }
    fn poll(&self, lane: PriorityQueue, max: u8) -> SourceFuture<'_, PollBatch> {
        Box::pin(async move {
            let batch = self.source.poll(lane, max).await?;
            for _ in &batch.grants {
                self.came.send(()).await.expect("the test listens");
                self.may.acquire().await.expect("the test lets it").forget();
            }
            Ok(batch)
        })
    }
    fn next_event(&self) -> Pin<Box<dyn Future<Output = SourceEvent> + Send + '_>> {
        self.source.next_event()
    }
    fn set_capacity(&self, capacity: u32) {
        self.source.set_capacity(capacity);
    }
    fn metrics(&self) -> BTreeMap<&'static str, u64> {
        self.source.metrics()
    }
    fn pause(&self) {
        self.source.pause();
    }
    fn close(&self) -> Pin<Box<dyn Future<Output = ()> + Send + '_>> {
        self.source.close()
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_that_arrives_during_a_pause_is_requeued_without_an_attempt() {
    let Some(broker) = shared() else { return };
    for kind in [Kind::Durable, Kind::Quorum] {
        let client = Client::new(&broker, kind).await;
        let mut settings = queue(&client);
        settings.max_attempts = NonZeroU32::new(1);
        let (came, mut comes) = mpsc::channel(16);
        let may = Arc::new(Semaphore::new(0));
        let source = Late { source: AmqpSource::new(settings), came, may: Arc::clone(&may) };
        let worker = Running::of(Arc::new(source), |settings| settings, echo());
        publish(&client, &["1"]).await;
        within("a poll has it", comes.recv()).await.expect("the worker lives");
        worker.control.command(Command::Pause { span: None }, Note::of("the test")).await;
        may.add_permits(2);
        worker.counts("requeued", 1).await;
        client.until_depth(1, 0).await;
        worker.control.command(Command::Resume, Note::of("the test")).await;
        assert_eq!(client.answer("1").await.body, b"{\"echo\":1}", "{kind:?}");
        client.finish(worker).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn sources_that_share_one_slot_take_turns() {
    let Some(uri) = shared_uri() else { return };
    let clients = [Client::new(&broker(&uri), Kind::Durable).await, Client::new(&broker(&uri), Kind::Durable).await];
    let folder = tempfile::tempdir().expect("a folder");
    let source = |number: usize| {
        let queue = &clients[number].queue;
        format!("[source.s{number}]\nkind = \"amqp\"\nhandler = \"echo\"\nrequests_queue = \"{queue}\"\n")
    };
    let answers = "#!/bin/sh\ncat >/dev/null\nprintf '{\"type\":\"answer\",\"text\":\"here\"}\\n' >&3\n";
    let config = config(folder.path(), answers, &format!("[worker]\ncapacity = 1\n{}{}", source(0), source(1)));
    let worker =
        Process::start(folder.path(), &config, &[("JOURNEYMAN_AMQP_URI", &uri), ("WORKER_ACTIVITY_EXCHANGE", "")]);
    // Whichever source has the slot, while the other one is idle.
    for client in [&clients[1], &clients[0], &clients[1]] {
        assert_eq!(client.call("/here", b"1").await.body, b"here", "{}", worker.log());
    }
    worker.signal(Signal::TERM);
    assert_eq!(worker.ends().await.code(), Some(0));
    for client in &clients {
        client.delete_queue().await;
    }
}
