//! A poll whose requests come when the worker does not want them any more.

use std::collections::BTreeMap;
use std::num::NonZeroU32;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use journeyman::domain::id::{Lane, Run};
use journeyman::domain::outcome::Outcome;
use journeyman::source::amqp::Amqp;
use journeyman::source::{
    Answer, Artifact, Batch, Claim, Grant, Manner, Message, News, Opened, Recovered, Source, Window,
};
use journeyman::worker::{Command, Note};
use tokio::sync::{Semaphore, mpsc};

use crate::claims::publish;
use crate::support::{Client, Kind, Running, echo, queue, shared, within};

/// Tells of each request that comes, and passes it on when it may.
struct Late {
    source: Amqp,
    came: mpsc::Sender<()>,
    may: Arc<Semaphore>,
}

impl Source for Late {
    fn describe(&self) -> String {
        self.source.describe()
    }
    fn deployment(&self) -> String {
        self.source.deployment()
    }
    fn claimant(&self) -> String {
        self.source.claimant()
    }
    fn manner(&self) -> Manner {
        self.source.manner()
    }
    fn open(&self) -> Answer<'_, Opened> {
        self.source.open()
    }
    fn poll(&self, lane: Lane, max: u8) -> Answer<'_, Batch> {
        Box::pin(async move {
            let batch = self.source.poll(lane, max).await?;
            for _ in &batch.grants {
                self.came.send(()).await.expect("the test listens");
                self.may.acquire().await.expect("the test lets it").forget();
            }
            Ok(batch)
        })
    }
    fn claim<'a>(&'a self, message: &'a Message) -> Answer<'a, Grant> {
        self.source.claim(message)
    }
    fn delete<'a>(&'a self, lane: Lane, id: &'a str, receipt: &'a str) -> Answer<'a, ()> {
        self.source.delete(lane, id, receipt)
    }
    fn recover<'a>(&'a self, held: &'a [Run], asked: &'a [Window]) -> Answer<'a, Recovered> {
        self.source.recover(held, asked)
    }
    fn take_over<'a>(&'a self, run: &'a Run) -> Answer<'a, Grant> {
        self.source.take_over(run)
    }
    fn reclaim<'a>(&'a self, claim: &'a Claim) -> Answer<'a, Duration> {
        self.source.reclaim(claim)
    }
    fn report<'a>(&'a self, claim: &'a Claim, outcome: Outcome) -> Answer<'a, ()> {
        self.source.report(claim, outcome)
    }
    fn upload<'a>(&'a self, claim: &'a Claim, artifact: &'a Artifact) -> Answer<'a, ()> {
        self.source.upload(claim, artifact)
    }
    fn canceled<'a>(&'a self, claim: &'a Claim) -> Answer<'a, bool> {
        self.source.canceled(claim)
    }
    fn news(&self) -> Pin<Box<dyn Future<Output = News> + Send + '_>> {
        self.source.news()
    }
    fn resized(&self, capacity: u32) {
        self.source.resized(capacity);
    }
    fn tallies(&self) -> BTreeMap<&'static str, u64> {
        self.source.tallies()
    }
    fn unwanted(&self) {
        self.source.unwanted();
    }
    fn close(&self) -> Pin<Box<dyn Future<Output = ()> + Send + '_>> {
        self.source.close()
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_comes_when_a_worker_is_paused_goes_back_without_counting_as_a_try() {
    let Some(broker) = shared() else { return };
    for kind in [Kind::Durable, Kind::Quorum] {
        let client = Client::new(&broker, kind).await;
        let mut settings = queue(&client);
        settings.max_attempts = NonZeroU32::new(1);
        let (came, mut comes) = mpsc::channel(16);
        let may = Arc::new(Semaphore::new(0));
        let source = Late { source: Amqp::new(settings), came, may: Arc::clone(&may) };
        let worker = Running::of(Arc::new(source), |settings| settings, echo());
        publish(&client, &["1"]).await;
        within("a poll has it", comes.recv()).await.expect("the worker lives");
        worker.control.command(Command::Pause { span: None }, Note::of("the test")).await;
        may.add_permits(2);
        worker.counts("handed_back", 1).await;
        client.until_depth(1, 0).await;
        worker.control.command(Command::Resume, Note::of("the test")).await;
        assert_eq!(client.answer("1").await.body, b"{\"echo\":1}", "{kind:?}");
        worker.drained().await;
        client.until_depth(0, 0).await;
        client.delete_queue().await;
    }
}
