//! Answers in the place of workers: why there is one, and what it says.

use std::future::Future;
use std::sync::Arc;

use lapin::message::Delivery;
use lapin::options::{BasicAckOptions, BasicPublishOptions};
use lapin::types::{AMQPValue, FieldTable};
use lapin::{BasicProperties, Channel, Confirmation, Connection};
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};

use super::Settings;
use super::names::Names;
use super::publish::confirming;
use super::session::{Over, ended};
use super::tally::Tally;
use super::waiting::QueueIs;
use crate::amqp::headers;
use crate::limits::{
    AMQP_CALL_TIMEOUT, CONTROLLER_ANSWER_AGAIN, CONTROLLER_ANSWER_TRIES, CONTROLLER_HOPS_MAX, CONTROLLER_ORPHAN_WAIT,
    CONTROLLER_REFUSED_MAX, CONTROLLER_ROOM_WAIT,
};

/// The queue that a dead letter died in first.
const DIED_IN: &str = "x-first-death-queue";

/// Why a request is answered by the controller.
pub(super) struct Obituary {
    /// In one word, such as `expired`.
    pub(super) reason: String,
    /// For people.
    pub(super) message: String,
    /// The queue that it died in.
    pub(super) queue: Option<String>,
}

impl Obituary {
    /// As the broker tells of a dead letter.
    pub(super) fn of(delivery: &Delivery) -> Self {
        let table = delivery.properties.headers().as_ref();
        let said = |name| table.and_then(|table| headers::text(table, name)).map(str::to_owned);
        let reason = said("x-first-death-reason").unwrap_or_else(|| "unknown".to_owned());
        let message = match reason.as_str() {
            "expired" => "no worker took the request before its time was over",
            "maxlen" => "too many requests wait for this key",
            "delivery_limit" => "every worker that took the request ended before it had answered",
            "rejected" => "a worker refused the request",
            _ => "the request was given up",
        };
        Self { message: message.to_owned(), queue: said(DIED_IN), reason }
    }

    /// A request whose queue has not taken it.
    pub(super) fn of_wait(queue: QueueIs) -> Self {
        let (reason, message) = match queue {
            QueueIs::Missing => {
                let what = "the queue of its key could not be made, or not within";
                ("no-queue", format!("{what} {CONTROLLER_ORPHAN_WAIT:?}"))
            }
            QueueIs::Full => ("maxlen", "too many requests wait for this key".to_owned()),
            QueueIs::Silent => {
                let what = "the queue of its key has confirmed nothing for";
                ("no-confirm", format!("{what} {CONTROLLER_ORPHAN_WAIT:?}"))
            }
        };
        Self { reason: reason.to_owned(), message, queue: None }
    }

    /// A request that takes the room of others while its queue does not take it.
    pub(super) fn of_crowd(queue: QueueIs) -> Self {
        let many =
            format!("more than {CONTROLLER_REFUSED_MAX} requests have waited for the queue of its key, some for");
        Self {
            message: format!("{many} {CONTROLLER_ROOM_WAIT:?}, and take the room of others"),
            ..Self::of_wait(queue)
        }
    }

    /// A request that went round in circles.
    pub(super) fn of_circle() -> Self {
        Self {
            reason: "no-queue".to_owned(),
            message: format!(
                "the request came back {CONTROLLER_HOPS_MAX} times, since its key has no queue that lasts"
            ),
            queue: None,
        }
    }

    /// Whether it may have killed who worked on it.
    pub(super) fn is_poison(&self) -> bool {
        self.reason == "delivery_limit"
    }
}

/// Answers requests in the place of workers.
pub(super) struct Answers {
    channel: Channel,
    names: Names,
    /// What its status says.
    status: Vec<u8>,
    tally: Arc<Tally>,
}

impl Answers {
    /// Over a channel of its own.
    ///
    /// # Errors
    ///
    /// What the broker says.
    pub(super) async fn open(
        connection: &Connection,
        settings: &Settings,
        tally: Arc<Tally>,
    ) -> lapin::Result<Arc<Self>> {
        let (names, status) = (settings.names.clone(), settings.dead_letter_status.as_bytes().to_vec());
        Ok(Arc::new(Self { channel: confirming(connection).await?, names, status, tally }))
    }

    /// Answers a request, and acknowledges it then.
    ///
    /// # Errors
    ///
    /// As [`Answers::reply`].
    pub(super) async fn answer(self: Arc<Self>, delivery: Delivery, obituary: Obituary) -> lapin::Result<()> {
        self.reply(&delivery, &obituary).await?;
        delivery.acker.ack(BasicAckOptions::default()).await.map(drop)
    }

    /// Answers a request; somebody else acknowledges it. An answer that its queue refuses again and again is given up, as that of a
    /// worker is, and so is one that is not confirmed. Both take their time: others are answered beside it.
    ///
    /// # Errors
    ///
    /// Where the channel fails.
    pub(super) async fn reply(&self, delivery: &Delivery, obituary: &Obituary) -> lapin::Result<()> {
        if let Some(reply_to) = delivery.properties.reply_to().clone() {
            let (body, properties) = self.said(delivery, obituary);
            let mut tries = 1;
            loop {
                let (options, properties) = (BasicPublishOptions::default(), properties.clone());
                let publishing = self.channel.basic_publish("".into(), reply_to.clone(), options, &body, properties);
                match timeout(AMQP_CALL_TIMEOUT, publishing.await?).await {
                    Ok(Ok(Confirmation::Nack(_))) if tries == CONTROLLER_ANSWER_TRIES => {
                        tracing::warn!(tries, "an answer in a worker's place is given up: its queue refuses it");
                        break;
                    }
                    Ok(Ok(Confirmation::Nack(_))) => {
                        tries += 1;
                        sleep(CONTROLLER_ANSWER_AGAIN).await;
                    }
                    Ok(Ok(Confirmation::Ack(_) | Confirmation::NotRequested)) => break,
                    Ok(Err(error)) => return Err(error),
                    Err(_) => {
                        tracing::warn!(
                            "an answer in a worker's place is given up: it is not confirmed in {AMQP_CALL_TIMEOUT:?}"
                        );
                        break;
                    }
                }
            }
        }
        self.tally.dead_letters.add();
        Ok(())
    }

    /// What its client is answered.
    fn said(&self, delivery: &Delivery, obituary: &Obituary) -> (Vec<u8>, BasicProperties) {
        let body = serde_json::json!({
            "type": format!("journeyman:dead_letter:{}", obituary.reason),
            "message": obituary.message,
            "context": { "reason": obituary.reason, "queue": obituary.queue, "key": came_under(&self.names, delivery) },
            "cause": null,
        });
        let mut table = FieldTable::default();
        table.insert("x-status".into(), AMQPValue::ByteArray(self.status.clone().into()));
        table.insert("x-dead-letter-reason".into(), AMQPValue::LongString(obituary.reason.as_str().into()));
        let mut properties =
            BasicProperties::default().with_headers(table).with_content_type("application/json".into());
        if let Some(id) = delivery.properties.correlation_id().clone() {
            properties = properties.with_correlation_id(id);
        }
        (body.to_string().into_bytes(), properties)
    }
}

/// Answers requests that will have no queue, until nobody brings any more.
pub(super) async fn bury(answers: Arc<Answers>, mut condemned: mpsc::Receiver<(Delivery, Obituary)>) -> Over {
    let mut going = Going::default();
    loop {
        tokio::select! {
            Some(over) = going.over() => return over,
            next = condemned.recv() => {
                let Some((delivery, obituary)) = next else { return ended("burials") };
                let answers = Arc::clone(&answers);
                going.begin(async move {
                    let tally = Arc::clone(&answers.tally);
                    answers.answer(delivery, obituary).await?;
                    tally.orphans.take();
                    Ok(())
                });
            }
        }
    }
}

/// What is done beside each other, as much of it as the broker hands out at once. It ends with this.
#[derive(Default)]
pub(super) struct Going(JoinSet<Result<(), Over>>);

impl Going {
    pub(super) fn begin(&mut self, work: impl Future<Output = Result<(), Over>> + Send + 'static) {
        self.0.spawn(work);
    }

    /// The first that fails, if there is anything; `None` where nothing goes on.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe.
    pub(super) async fn over(&mut self) -> Option<Over> {
        while let Some(done) = self.0.join_next().await {
            match done {
                Ok(Ok(())) => {}
                Ok(Err(over)) => return Some(over),
                Err(error) => return Some(Over { why: error.to_string() }),
            }
        }
        None
    }
}

/// What a request came under, as its client may have written it.
pub(super) fn came_under(names: &Names, delivery: &Delivery) -> String {
    let table = delivery.properties.headers().as_ref();
    let died_in = table.and_then(|table| headers::text(table, DIED_IN));
    names.came_under(delivery.routing_key.as_str(), died_in)
}
