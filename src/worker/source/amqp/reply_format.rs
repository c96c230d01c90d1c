//! Replies on the wire, and the sender of partial ones.

use std::sync::Arc;

use lapin::BasicProperties;
use lapin::types::{AMQPValue, FieldTable, ShortString};
use serde_json::json;

use crate::source::CallError;
use crate::task::{PartialReplySink, Reply, ReplyFuture, ReplyStatus};
use journeyman_domain::refusal::Refusal;
use journeyman_platform::amqp::{self, header_table, headers};

use super::delivery::ReceivedRequest;
use super::publisher::PublishError;
use super::session::Session;

pub(super) struct PartialReplySender {
    pub(super) session: Arc<Session>,
    pub(super) message: Arc<ReceivedRequest>,
}

impl PartialReplySink for PartialReplySender {
    fn send(&self, reply: Reply) -> ReplyFuture<'_> {
        Box::pin(async move {
            let refused = |refusal, what: &str| CallError { refusal, message: format!("partial reply: {what}") };
            let request = &self.message.delivery.properties;
            let Some(to) = request.reply_to().clone() else {
                return Err(refused(Refusal::Gone, "the request has no reply_to"));
            };
            let mut headers = status_header(&reply);
            headers.insert(headers::PARTIAL.into(), AMQPValue::Boolean(true));
            let properties = reply_properties(&reply, request.correlation_id().clone()).with_headers(headers);
            let publish = self.session.reply_publisher.publish_reply(to, properties, reply.body);
            match self.session.while_open(publish).await {
                Some(Ok(())) => Ok(()),
                Some(Err(PublishError::Unroutable)) => Err(refused(Refusal::Gone, "the reply queue does not exist")),
                Some(Err(error)) => Err(refused(Refusal::Retry { retry_after: None }, &error.to_string())),
                None => Err(refused(Refusal::Gone, &self.session.lost_reason())),
            }
        })
    }

    fn work_key(&self) -> Option<String> {
        Some(self.message.work_key().to_owned())
    }
}

fn status_header(reply: &Reply) -> FieldTable {
    let status = AMQPValue::ByteArray(reply.status.as_str().as_bytes().to_vec().into());
    header_table([(headers::STATUS, status)])
}

fn reply_properties(reply: &Reply, correlation_id: Option<ShortString>) -> BasicProperties {
    let mut properties = BasicProperties::default().with_headers(status_header(reply));
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
    let properties = reply_properties(reply, request.correlation_id().clone());
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
