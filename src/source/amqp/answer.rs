//! Answers as they are on the wire, and the way of those that others follow.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use lapin::BasicProperties;
use lapin::types::{AMQPValue, ShortString};
use serde_json::json;

use crate::amqp::{self, table};
use crate::domain::refusal::Refusal;
use crate::source::{Answer, Partial, Refused, Reply, Status};

use super::clients::is_direct;
use super::outlet::Published;
use super::part::Around;
use super::session::Session;

/// How it went.
const STATUS: &str = "x-status";
/// Whether more answers follow.
const PARTIAL: &str = "x-non-terminating-response";

/// Sends partial answers.
pub(super) struct Sender {
    pub(super) session: Arc<Session>,
    pub(super) shelved: Arc<AtomicBool>,
    pub(super) to: Option<ShortString>,
    pub(super) correlation_id: Option<ShortString>,
    pub(super) around: Around,
}

impl Partial for Sender {
    fn send(&self, reply: Reply) -> Answer<'_, ()> {
        Box::pin(async move {
            let refused = |refusal, what: &str| Refused { refusal, what: format!("a partial answer: {what}") };
            let Some(to) = self.to.clone() else {
                return Err(refused(Refusal::Gone, "nobody waits for an answer"));
            };
            let shelved = self.shelved.load(Ordering::Acquire);
            if let Some(lost) = self.session.lost().filter(|_| !shelved) {
                return Err(refused(Refusal::Gone, &lost));
            }
            let properties = answered(&reply, self.correlation_id.clone(), More::Yes);
            let published = if shelved {
                Arc::clone(&self.around.link).publish(to.clone(), properties, reply.body).await
            } else {
                Arc::clone(&self.session.outlet).publish(to.clone(), properties, reply.body).await
            };
            match published {
                Ok(Published::Taken)
                    if !shelved && is_direct(&to) && matches!(self.session.clients.is_there(&to).await, Ok(false)) =>
                {
                    self.around.tally.clients_gone.add();
                    Err(refused(Refusal::Gone, "nobody waits for it any more"))
                }
                Ok(Published::Taken) => {
                    self.around.tally.partial_answers.add();
                    Ok(())
                }
                Ok(Published::Returned) => Err(refused(Refusal::Gone, "nobody waits for it any more")),
                Ok(Published::Refused) => Err(refused(Refusal::Retry { after: None }, "the broker refused it")),
                Err(error) => Err(refused(Refusal::Retry { after: None }, &amqp::shown(&error))),
            }
        })
    }
}

/// Whether an answer is followed by others.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum More {
    Yes,
    No,
}

fn answered(reply: &Reply, correlation_id: Option<ShortString>, more: More) -> BasicProperties {
    let status = AMQPValue::ByteArray(reply.status.as_str().as_bytes().to_vec().into());
    let mut headers = table([(STATUS, status)]);
    if more == More::Yes {
        headers.insert(PARTIAL.into(), AMQPValue::Boolean(true));
    }
    let mut properties = BasicProperties::default().with_headers(headers);
    if let Some(id) = correlation_id {
        properties = properties.with_correlation_id(id);
    }
    // It fits: what does not is refused where a handler says it.
    if let Some(kind) = reply.content_type.as_deref().and_then(amqp::short_or_none) {
        properties = properties.with_content_type(kind);
    }
    properties
}

/// The properties of the last answer to a request. It lives as long as its request: it may wait in a queue, too.
pub(super) fn last(reply: &Reply, request: &BasicProperties) -> BasicProperties {
    let properties = answered(reply, request.correlation_id().clone(), More::No);
    match *request.delivery_mode() {
        Some(mode) => properties.with_delivery_mode(mode),
        None => properties,
    }
}

/// An answer that a client reads as an error.
pub(super) fn error(kind: &str, message: &str, attempts: Option<u32>) -> Reply {
    let context = attempts.map_or_else(|| json!({}), |attempts| json!({ "attempts": attempts }));
    let body = json!({ "type": format!("journeyman:{kind}"), "message": message, "context": context, "cause": null });
    Reply {
        status: Status::CORE_ERROR,
        body: body.to_string().into_bytes().into(),
        content_type: Some("application/json".to_owned()),
    }
}
