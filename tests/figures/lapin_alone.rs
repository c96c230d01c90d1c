//! What lapin does with the same requests without a worker around it: the limit that a worker is measured against.

use std::io::Write as _;
use std::os::fd::AsFd as _;
use std::pin::Pin;
use std::time::Duration;

use futures_core::Stream as _;
use journeyman_platform::amqp::lapin::message::Delivery;
use journeyman_platform::amqp::lapin::options::{
    BasicAckOptions, BasicCancelOptions, BasicConsumeOptions, BasicPublishOptions, BasicQosOptions,
    ConfirmSelectOptions,
};
use journeyman_platform::amqp::lapin::protocol::constants::REPLY_SUCCESS;
use journeyman_platform::amqp::lapin::types::{AMQPValue, FieldTable};
use journeyman_platform::amqp::lapin::{
    BasicProperties, Channel, Confirmation, Connection, ConnectionProperties, Consumer,
};
use journeyman_platform::amqp::{Broker, BrokerConfig, header_table};
use serde::{Deserialize, Serialize};
use tokio::io::AsyncReadExt as _;
use tokio::net::unix::pipe;
use tokio::task::JoinSet;

use crate::Outcome;
use crate::machine::{cpu, now};

pub(crate) const FLAG: &str = "--lapin-alone";
/// The address at which replies go straight to a client's channel.
pub(crate) const REPLY_TO: &str = "amq.rabbitmq.reply-to";

/// A loop that consumes, replies, waits for the confirm and acknowledges.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct LapinLoop {
    pub(crate) uri: String,
    pub(crate) queue: String,
    pub(crate) prefetch: u16,
    /// After how many requests it prints `done`; 0 is never.
    pub(crate) expected: u64,
}

/// Elapsed and CPU time from a tenth of the work on, so that no start is counted.
pub(crate) struct Pace {
    began: Duration,
    cpu: Duration,
    from: u64,
}

impl Pace {
    pub(crate) const fn warm_up(expected: u64) -> u64 {
        expected / 10
    }

    pub(crate) fn start(from: u64) -> Self {
        Self { began: now(), cpu: cpu(), from }
    }

    pub(crate) fn print(&self, count: u64) {
        let (elapsed, used) = ((now() - self.began).as_nanos(), (cpu() - self.cpu).as_nanos());
        print_line(&format!("done {elapsed} {used} {}", count - self.from));
    }
}

pub(crate) fn print_line(line: &str) {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{line}").and_then(|()| out.flush()).ok();
}

/// Standard input is a pipe, so that it is read without a thread.
pub(crate) fn stdin() -> Outcome<pipe::Receiver> {
    Ok(pipe::Receiver::from_owned_fd(std::io::stdin().as_fd().try_clone_to_owned()?)?)
}

pub(crate) fn broker(uri: &str) -> Outcome<Broker> {
    Ok(Broker::new(&BrokerConfig::new(uri))?)
}

pub(crate) async fn next(consumer: &mut Consumer) -> Outcome<Delivery> {
    let item = std::future::poll_fn(|context| Pin::new(&mut *consumer).poll_next(context)).await;
    Ok(item.ok_or("a consumer ended")??)
}

async fn serve(channel: Channel, request: Delivery) -> Outcome<()> {
    let key = request.properties.reply_to().clone().ok_or("a request without reply_to")?;
    let id = request.properties.correlation_id().clone().ok_or("a request without an id")?;
    let status = AMQPValue::ByteArray(b"ok".to_vec().into());
    let properties =
        BasicProperties::default().with_headers(header_table([("x-status", status)])).with_correlation_id(id);
    // RabbitMQ returns each mandatory message to a direct reply address, delivered or not.
    let mandatory = !key.as_str().starts_with(REPLY_TO);
    let options = BasicPublishOptions { mandatory, ..BasicPublishOptions::default() };
    let confirmed = channel.basic_publish("".into(), key, options, b"null", properties).await?.await?;
    if confirmed != Confirmation::Ack(None) {
        return Err(format!("a reply was not accepted: {confirmed:?}").into());
    }
    if request.acker.ack(BasicAckOptions::default()).await? { Ok(()) } else { Err("a channel is closed".into()) }
}

/// Runs until standard input ends, then closes step by step, since what was acknowledged last would be redelivered otherwise.
pub(crate) async fn run(role: &str) -> Outcome<()> {
    let LapinLoop { uri, queue, prefetch, expected } = serde_json::from_str(role)?;
    let connection = Connection::connect(&uri, ConnectionProperties::default()).await?;
    let intake = connection.create_channel().await?;
    intake.basic_qos(prefetch, BasicQosOptions::default()).await?;
    let replies = connection.create_channel().await?;
    replies.confirm_select(ConfirmSelectOptions::default()).await?;
    let options = BasicConsumeOptions::default();
    let mut requests =
        intake.basic_consume(queue.as_str().into(), "lapin".into(), options, FieldTable::default()).await?;
    let mut stdin = stdin()?;
    let mut byte = [0];
    print_line("working");
    let (mut served, mut pace, mut in_flight) = (0, Pace::start(0), JoinSet::new());
    loop {
        tokio::select! {
            biased;
            Some(ended) = in_flight.join_next() => ended??,
            request = next(&mut requests) => {
                let serving = serve(replies.clone(), request?);
                if prefetch > 1 {
                    in_flight.spawn(serving);
                    continue;
                }
                serving.await?;
            }
            _ = stdin.read(&mut byte) => break,
        }
        served += 1;
        if expected > 0 && served == Pace::warm_up(expected) {
            pace = Pace::start(served);
        } else if served == expected {
            pace.print(served);
        }
    }
    while let Some(ended) = in_flight.join_next().await {
        ended??;
    }
    intake.basic_cancel(requests.tag(), BasicCancelOptions::default()).await?;
    intake.close(REPLY_SUCCESS, "OK".into()).await?;
    Ok(connection.close(REPLY_SUCCESS, "OK".into()).await?)
}

/// The body of a request: JSON of 512 bytes.
pub(crate) fn body() -> Vec<u8> {
    format!("{{\"of\":\"{:x<503}\"}}", "").into_bytes()
}

/// The properties of a request, as known clients set them.
pub(crate) fn request(id: &str, reply_to: &str) -> BasicProperties {
    let path = AMQPValue::ByteArray(b"/nothing".to_vec().into());
    BasicProperties::default()
        .with_headers(header_table([("x-rpc-path", path)]))
        .with_correlation_id(id.into())
        .with_reply_to(reply_to.into())
}
