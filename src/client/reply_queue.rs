//! Receives replies in a durable queue, so that a client that is restarted does not send again what is pending or answered.
//!
//! The queue also holds a note of each request that was sent. Note and reply are acknowledged when the call has ended, the note
//! first: a note alone stands for a request that is pending. Notes are transient, as requests are: a restart of the broker drops both.

use std::collections::HashMap;

use lapin::message::Delivery;
use lapin::options::{BasicAckOptions, BasicConsumeOptions, BasicPublishOptions, QueueDeclareOptions};
use lapin::types::{AMQPValue, DeliveryTag, ShortString};
use lapin::{BasicProperties, Channel, Consumer, PublisherConfirm};
use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio::time::Instant;

use super::session::{PendingCalls, deliver, parse_reply};
use super::{ReplyPosition, RpcReply};
use crate::amqp;
use crate::limits::REPLY_QUEUE_RETENTION;

/// The `type` of a note.
const NOTE: &str = "journeyman-sent";

pub(super) struct ReplyQueue {
    pub(super) name: ShortString,
    channel: Channel,
    kept: Mutex<HashMap<String, Kept>>,
    note_received: Notify,
}

/// What the queue holds of a call.
struct Kept {
    note: Note,
    /// Kept until the call has ended: the caller may make it again before it has read the reply.
    reply: Option<(DeliveryTag, RpcReply)>,
    is_ended: bool,
    since: Instant,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Note {
    None,
    Published,
    Received(DeliveryTag),
}

impl ReplyQueue {
    pub(super) async fn open(channel: &Channel, name: &ShortString) -> lapin::Result<(Self, Consumer)> {
        let retention = AMQPValue::LongLongInt(REPLY_QUEUE_RETENTION.as_millis().try_into().unwrap_or(i64::MAX));
        let arguments = amqp::header_table([("x-expires", retention.clone()), ("x-message-ttl", retention)]);
        let durable = QueueDeclareOptions { durable: true, ..QueueDeclareOptions::default() };
        channel.queue_declare(name.clone(), durable, arguments).await?;
        // Two clients would take each other's replies.
        let options = BasicConsumeOptions { exclusive: true, ..BasicConsumeOptions::default() };
        let consumer = amqp::consume(channel, name.clone(), "".into(), options).await?;
        Ok((
            Self { name: name.clone(), channel: channel.clone(), kept: Mutex::default(), note_received: Notify::new() },
            consumer,
        ))
    }

    /// Waits until what an earlier client has left in the queue is received.
    pub(super) async fn read(&self) -> lapin::Result<()> {
        let id = uuid::Uuid::new_v4().to_string();
        self.publish_note(&id).await?.await?;
        while !matches!(self.kept.lock().get(&id), Some(Kept { note: Note::Received(_), .. })) {
            self.note_received.notified().await;
        }
        self.on_call_ended(&id);
        Ok(())
    }

    pub(super) async fn publish_note(&self, id: &str) -> lapin::Result<PublisherConfirm> {
        let earlier = self.kept.lock().insert(id.to_owned(), Kept { note: Note::Published, ..Kept::new() });
        if let Some((tag, _)) = earlier.and_then(|earlier| earlier.reply) {
            self.acknowledge(tag);
        }
        let properties = BasicProperties::default().with_type(NOTE.into()).with_correlation_id(id.into());
        let options = BasicPublishOptions::default();
        self.channel.basic_publish("".into(), self.name.clone(), options, &[], properties).await
    }

    pub(super) fn is_sent(&self, id: &str) -> bool {
        self.kept.lock().get(id).is_some_and(|entry| !entry.is_ended)
    }

    pub(super) fn reply(&self, id: &str) -> Option<RpcReply> {
        let kept = self.kept.lock();
        kept.get(id).filter(|entry| !entry.is_ended)?.reply.as_ref().map(|(_, reply)| reply.clone())
    }

    pub(super) fn on_delivery(&self, calls: &PendingCalls, delivery: Delivery) {
        let tag = delivery.delivery_tag;
        let Some(id) = delivery.properties.correlation_id().as_ref().map(ToString::to_string) else {
            return self.acknowledge(tag);
        };
        let mut kept = self.kept.lock();
        let is_note = delivery.properties.kind().as_ref().is_some_and(|kind| kind.as_str() == NOTE);
        let is_called = calls.lock().contains_key(&id);
        if is_note {
            let entry = kept.entry(id.clone()).or_insert_with(Kept::new);
            if let Note::Received(earlier) = std::mem::replace(&mut entry.note, Note::Received(tag)) {
                self.acknowledge(earlier);
            }
            self.note_received.notify_one();
        } else {
            let reply = parse_reply(delivery);
            if reply.position == ReplyPosition::Partial {
                self.acknowledge(tag);
            } else {
                let entry = kept.entry(id.clone()).or_insert_with(Kept::new);
                // One of a request that ran twice.
                if let Some((earlier, _)) = entry.reply.replace((tag, reply.clone())) {
                    self.acknowledge(earlier);
                }
            }
            if is_called {
                deliver(calls, &id, Ok(reply));
            }
        }
        self.acknowledge_ended(&mut kept, &id);
        if !is_called {
            let old = |entry: &Kept| entry.since.elapsed() > REPLY_QUEUE_RETENTION;
            let dropped: Vec<String> = kept.iter().filter(|(_, entry)| old(entry)).map(|(id, _)| id.clone()).collect();
            dropped.iter().for_each(|id| self.end(&mut kept, id));
        }
    }

    /// The call has its reply, or will get none.
    pub(super) fn on_call_ended(&self, id: &str) {
        self.end(&mut self.kept.lock(), id);
    }

    fn end(&self, kept: &mut HashMap<String, Kept>, id: &str) {
        if let Some(entry) = kept.get_mut(id) {
            entry.is_ended = true;
            self.acknowledge_ended(kept, id);
        }
    }

    fn acknowledge_ended(&self, kept: &mut HashMap<String, Kept>, id: &str) {
        if let Some(Kept { note, reply, .. }) =
            kept.get(id).filter(|entry| entry.is_ended && entry.note != Note::Published)
        {
            if let Note::Received(tag) = note {
                self.acknowledge(*tag);
            }
            if let Some((tag, _)) = reply {
                self.acknowledge(*tag);
            }
            kept.remove(id);
        }
    }

    fn acknowledge(&self, tag: DeliveryTag) {
        amqp::poll_once(self.channel.basic_ack(tag, BasicAckOptions::default()));
    }
}

impl Kept {
    fn new() -> Self {
        Self { note: Note::None, reply: None, is_ended: false, since: Instant::now() }
    }
}
