//! Replies on the wire, and the sender of partial ones.

use std::sync::Arc;

use lapin::BasicProperties;
use lapin::types::{AMQPValue, ShortString};
use serde_json::json;

use crate::amqp::{self, header_table};
use crate::domain::refusal::Refusal;
use crate::source::CallError;
use crate::task::{PartialReplySink, Reply, ReplyFuture, ReplyStatus};

use super::claim::SourceContext;
use super::publisher::PublishResult;
use super::reply_clients::is_direct_reply_to;
use super::session::Session;

const STATUS_HEADER: &str = "x-status";
const PARTIAL_HEADER: &str = "x-non-terminating-response";

pub(super) struct PartialReplySender {
    pub(super) session: Arc<Session>,
    pub(super) reply_to: Option<ShortString>,
    pub(super) correlation_id: Option<ShortString>,
    pub(super) context: SourceContext,
}

impl PartialReplySink for PartialReplySender {
    fn send(&self, reply: Reply) -> ReplyFuture<'_> {
        Box::pin(async move {
            let refused = |refusal, what: &str| CallError { refusal, message: format!("partial reply: {what}") };
            let Some(to) = self.reply_to.clone() else {
                return Err(refused(Refusal::Gone, "the request has no reply_to"));
            };
            if let Some(lost) = self.session.lost_reason() {
                return Err(refused(Refusal::Gone, &lost));
            }
            let properties = reply_properties(&reply, self.correlation_id.clone(), ReplyPosition::Partial);
            match Arc::clone(&self.session.publisher).publish_reply(to.clone(), properties, reply.body).await {
                Ok(PublishResult::Confirmed)
                    if is_direct_reply_to(&to)
                        && matches!(self.session.reply_clients.is_present(&to).await, Ok(false)) =>
                {
                    self.context.counters.clients_absent.increment();
                    Err(refused(Refusal::Gone, "the client is gone"))
                }
                Ok(PublishResult::Confirmed) => {
                    self.context.counters.partial_replies.increment();
                    Ok(())
                }
                Ok(PublishResult::Returned) => Err(refused(Refusal::Gone, "the reply queue does not exist")),
                Ok(PublishResult::Nacked) => {
                    Err(refused(Refusal::Retry { retry_after: None }, "the broker refused it"))
                }
                Err(error) => Err(refused(Refusal::Retry { retry_after: None }, &amqp::error_text(&error))),
            }
        })
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ReplyPosition {
    Partial,
    Last,
}

fn reply_properties(reply: &Reply, correlation_id: Option<ShortString>, more: ReplyPosition) -> BasicProperties {
    let status = AMQPValue::ByteArray(reply.status.as_str().as_bytes().to_vec().into());
    let mut headers = header_table([(STATUS_HEADER, status)]);
    if more == ReplyPosition::Partial {
        headers.insert(PARTIAL_HEADER.into(), AMQPValue::Boolean(true));
    }
    let mut properties = BasicProperties::default().with_headers(headers);
    if let Some(id) = correlation_id {
        properties = properties.with_correlation_id(id);
    }
    // Results rejects a content type that is too long.
    if let Some(kind) = reply.content_type.as_deref().and_then(amqp::to_short_string_or_none) {
        properties = properties.with_content_type(kind);
    }
    properties
}

/// The properties of the last reply. It is as persistent as its request.
pub(super) fn last_reply_properties(reply: &Reply, request: &BasicProperties) -> BasicProperties {
    let properties = reply_properties(reply, request.correlation_id().clone(), ReplyPosition::Last);
    match *request.delivery_mode() {
        Some(mode) => properties.with_delivery_mode(mode),
        None => properties,
    }
}

/// A reply that reports an error.
pub(super) fn error_reply(kind: &str, message: &str, attempts: Option<u32>) -> Reply {
    let context = attempts.map_or_else(|| json!({}), |attempts| json!({ "attempts": attempts }));
    let body = json!({ "type": format!("journeyman:{kind}"), "message": message, "context": context, "cause": null });
    Reply {
        status: ReplyStatus::CORE_ERROR,
        body: body.to_string().into_bytes().into(),
        content_type: Some("application/json".to_owned()),
    }
}
