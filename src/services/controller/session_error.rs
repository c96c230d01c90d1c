//! What ends a session, and the consumers whose streams do.

use lapin::options::{BasicConsumeOptions, BasicQosOptions};
use lapin::types::FieldTable;
use lapin::{Connection, Consumer};

use journeyman_domain::limits::AMQP_CALL_TIMEOUT;
use journeyman_platform::{amqp, zookeeper};

pub(super) struct SessionError {
    pub(super) reason: String,
}

impl From<lapin::Error> for SessionError {
    fn from(error: lapin::Error) -> Self {
        Self { reason: amqp::error_text(&error) }
    }
}

impl From<zookeeper::Error> for SessionError {
    fn from(error: zookeeper::Error) -> Self {
        Self { reason: error.to_string() }
    }
}

pub(super) fn declare_timed_out(what: &str) -> SessionError {
    SessionError { reason: format!("declaring the {what} took more than {AMQP_CALL_TIMEOUT:?}") }
}

pub(super) fn stream_ended(what: &str) -> SessionError {
    SessionError { reason: format!("the stream of {what} ended") }
}

pub(super) async fn consume(connection: &Connection, queue: &str, prefetch: u16) -> lapin::Result<Consumer> {
    let channel = connection.create_channel().await?;
    channel.basic_qos(prefetch, BasicQosOptions::default()).await?;
    channel.basic_consume(queue.into(), "".into(), BasicConsumeOptions::default(), FieldTable::default()).await
}
