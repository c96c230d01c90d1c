//! Messages that arrive later, on a RabbitMQ without plugins.
//!
//! A queue whose messages have one time to live, and whose dead letters go on, delays each by that time. Fixed delays have such a
//! queue each. Any other delay up to 36 hours is the sum of queues of 1, 2, 4, … seconds: the routing key names the ones that a
//! message goes through before its destination.
//!
//! Never times of single messages in one queue: a long one in front keeps the others waiting.

use std::time::Duration;

use jiff::Timestamp;
use lapin::options::{BasicPublishOptions, ExchangeBindOptions};
use lapin::types::{AMQPValue, FieldTable};
use lapin::{BasicProperties, Confirmation, Connection, ExchangeKind};
use tokio::time::timeout;

use super::{
    PRECONDITION_FAILED, bind_queue, confirm_channel, declare_exchange, declare_queue, error_text, header_table,
    headers, reply_code, text_value, to_short_string,
};
use journeyman_domain::limits::AMQP_CALL_TIMEOUT;
use journeyman_domain::refusal::{CallError, Refusal};

/// Queues of 2^0 to 2^16 seconds: 36 hours.
const LEVELS: u32 = 17;
/// The longest delay.
pub const DELAY_MAX: Duration = Duration::from_secs((1 << LEVELS) - 1);
/// A delay is rounded up to so many binary digits, so that a message passes at most as many queues.
const DIGITS: u32 = 3;
/// The header with the time at which a message may arrive, in milliseconds since 1970.
pub const NOT_BEFORE: &str = "jm-not-before";

/// What the delays of a broker promise.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DelayGuarantee {
    /// Quorum queues that keep a message until the next queue has it.
    AtLeastOnce,
    /// Classic queues, of a broker before 3.10: a message that moves on while the broker dies is lost.
    AtMostOnce,
}

impl std::fmt::Display for DelayGuarantee {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.write_str(match self {
            Self::AtLeastOnce => "delayed messages survive the death of the broker (quorum queues, at least once)",
            Self::AtMostOnce => {
                "the broker may lose delayed messages when it dies (classic queues, at most once): RabbitMQ 3.10 and later do not"
            }
        })
    }
}

/// Where delayed messages wait: exchanges and queues whose names begin with `PREFIX.delay.`.
#[derive(Debug, Clone)]
pub struct DelayQueues {
    prefix: String,
    fixed: Vec<Duration>,
}

impl DelayQueues {
    /// Queues of this prefix, with one queue for each of these delays.
    pub fn new(prefix: &str, fixed: &[Duration]) -> Self {
        Self { prefix: prefix.to_owned(), fixed: fixed.to_vec() }
    }

    /// Declares them.
    ///
    /// # Errors
    ///
    /// If they exist with other arguments, the names are too long, or the broker refuses.
    pub async fn declare(&self, connection: &Connection) -> Result<DelayGuarantee, CallError> {
        match self.declare_as(connection, DelayGuarantee::AtLeastOnce).await {
            Err(error) if reply_code(&error) == Some(PRECONDITION_FAILED) => {
                let declared = self.declare_as(connection, DelayGuarantee::AtMostOnce).await;
                declared.map(|()| DelayGuarantee::AtMostOnce)
            }
            declared => declared.map(|()| DelayGuarantee::AtLeastOnce),
        }
        .map_err(|error| CallError::retry(format!("cannot declare delays {}: {}", self.prefix, error_text(&error))))
    }

    async fn declare_as(&self, connection: &Connection, guarantee: DelayGuarantee) -> lapin::Result<()> {
        let channel = connection.create_channel().await?;
        let none = FieldTable::default;
        for delay in &self.fixed {
            let name = self.fixed_name(*delay);
            declare_queue(&channel, &name, arguments(*delay, "", guarantee)).await?;
            declare_exchange(&channel, &name, ExchangeKind::Fanout, none()).await?;
            bind_queue(&channel, &name, &name, "").await?;
        }
        let delivery = self.delivery_name();
        declare_exchange(&channel, &delivery, ExchangeKind::Topic, none()).await?;
        let mut next = delivery;
        for level in 0..LEVELS {
            let name = self.level_name(level);
            let arguments = arguments(Duration::from_secs(1 << level), &next, guarantee);
            declare_queue(&channel, &name, arguments).await?;
            declare_exchange(&channel, &name, ExchangeKind::Topic, none()).await?;
            let bit = |set: u8| format!("{}{set}.#", "*.".repeat((LEVELS - 1 - level) as usize));
            bind_queue(&channel, &name, &name, &bit(1)).await?;
            let (to, from) = (next.as_str().into(), name.as_str().into());
            channel.exchange_bind(to, from, bit(0).into(), ExchangeBindOptions::default(), none()).await?;
            next = name;
        }
        channel.close(lapin::protocol::constants::REPLY_SUCCESS, "OK".into()).await
    }

    /// Lets messages arrive in a queue. To be called once for each, after [`DelayQueues::declare`].
    ///
    /// # Errors
    ///
    /// Fails if there is no such queue.
    pub async fn lead_to(&self, connection: &Connection, queue: &str) -> Result<(), CallError> {
        let binding = async {
            let channel = connection.create_channel().await?;
            let key = format!("{}{queue}", "*.".repeat(LEVELS as usize));
            bind_queue(&channel, queue, &self.delivery_name(), &key).await?;
            channel.close(lapin::protocol::constants::REPLY_SUCCESS, "OK".into()).await
        };
        let failed = |error| CallError::retry(format!("cannot lead delays to {queue}: {}", error_text(&error)));
        self.check_names(queue)?;
        binding.await.map_err(failed)
    }

    /// Publishes a message that arrives in `queue` after a delay, and returns once the broker has it on disk. The delay is
    /// rounded up by a quarter at most, and to [`DELAY_MAX`] down.
    ///
    /// # Errors
    ///
    /// If the delays are not declared, or the broker does not confirm. The message may have been published.
    ///
    /// # Cancel safety
    ///
    /// Not cancel safe: the message may have been published.
    pub async fn publish(
        &self,
        connection: &Connection,
        queue: &str,
        delay: Duration,
        properties: &BasicProperties,
        body: &[u8],
    ) -> Result<(), CallError> {
        self.check_names(queue)?;
        let (exchange, key, delay) = self.route(queue, delay);
        let publishing = async {
            let channel = confirm_channel(connection).await?;
            let properties = delayed(properties, Timestamp::now(), delay);
            let options = BasicPublishOptions { mandatory: true, ..BasicPublishOptions::default() };
            let (exchange, key) = (exchange.as_str().into(), key.as_str().into());
            let confirmation = channel.basic_publish(exchange, key, options, body, properties).await?.await?;
            channel.close(lapin::protocol::constants::REPLY_SUCCESS, "OK".into()).await?;
            lapin::Result::Ok(confirmation)
        };
        let failed = |why: &str| CallError::retry(format!("cannot delay a message for {queue} by {delay:?}: {why}"));
        match timeout(AMQP_CALL_TIMEOUT, publishing).await {
            Ok(Ok(Confirmation::Ack(None))) => Ok(()),
            Ok(Ok(Confirmation::Ack(Some(_)))) => Err(failed("it reaches no queue")),
            Ok(Ok(Confirmation::Nack(_) | Confirmation::NotRequested)) => Err(failed("the broker does not confirm it")),
            Ok(Err(error)) => Err(failed(&error_text(&error))),
            Err(_) => Err(failed("no answer")),
        }
    }

    /// Exchange and routing key of a message, and how long it takes.
    fn route(&self, queue: &str, delay: Duration) -> (String, String, Duration) {
        if self.fixed.contains(&delay) {
            return (self.fixed_name(delay), queue.to_owned(), delay);
        }
        let delay = rounded(delay);
        let seconds = delay.as_secs();
        let Some(first) = seconds.checked_ilog2() else { return (String::new(), queue.to_owned(), delay) };
        let bits = (0..LEVELS).rev().map(|level| if seconds >> level & 1 == 1 { "1." } else { "0." });
        (self.level_name(first), bits.chain([queue]).collect(), delay)
    }

    fn check_names(&self, queue: &str) -> Result<(), CallError> {
        let rejected = |error: super::NameTooLong| CallError { refusal: Refusal::Rejected, message: error.to_string() };
        to_short_string("the name of a delay queue", &format!("{}.delay.delivery", self.prefix)).map_err(rejected)?;
        let key = format!("{}{queue}", "0.".repeat(LEVELS as usize));
        to_short_string("the routing key of a delayed message", &key).map_err(rejected).map(drop)
    }

    fn fixed_name(&self, delay: Duration) -> String {
        format!("{}.delay.{}ms", self.prefix, delay.as_millis())
    }

    fn level_name(&self, level: u32) -> String {
        format!("{}.delay.l{level}", self.prefix)
    }

    fn delivery_name(&self) -> String {
        format!("{}.delay.delivery", self.prefix)
    }
}

fn arguments(ttl: Duration, next: &str, guarantee: DelayGuarantee) -> FieldTable {
    let ttl_ms = AMQPValue::LongLongInt(i64::try_from(ttl.as_millis()).unwrap_or(i64::MAX));
    let mut table = header_table([("x-message-ttl", ttl_ms), ("x-dead-letter-exchange", text_value(next))]);
    let more: &[(&str, &str)] = match guarantee {
        DelayGuarantee::AtLeastOnce => {
            &[("x-queue-type", "quorum"), ("x-dead-letter-strategy", "at-least-once"), ("x-overflow", "reject-publish")]
        }
        DelayGuarantee::AtMostOnce => &[("x-queue-type", "classic")],
    };
    for (name, value) in more {
        table.insert((*name).into(), text_value(value));
    }
    table
}

/// The delay that a message gets: at least this one, up to a quarter longer.
pub fn rounded(delay: Duration) -> Duration {
    let seconds = delay.as_secs() + u64::from(delay.subsec_nanos() > 0);
    let dropped = (u64::BITS - seconds.leading_zeros()).saturating_sub(DIGITS);
    let step = 1 << dropped;
    Duration::from_secs(seconds.div_ceil(step) * step).min(DELAY_MAX)
}

/// The properties of a message that is published again. What the broker wrote about earlier queues is omitted: one that finds it
/// again takes the message for one that goes in circles, and drops it.
fn delayed(old: &BasicProperties, now: Timestamp, delay: Duration) -> BasicProperties {
    let (none, mut table) = (FieldTable::default(), FieldTable::default());
    for (name, value) in old.headers().as_ref().unwrap_or(&none).inner() {
        if !["x-death", "x-first-death-", "x-last-death-", NOT_BEFORE].iter().any(|own| name.as_str().starts_with(own))
        {
            table.insert(name.clone(), value.clone());
        }
    }
    // Without a delay, a host whose clock is behind would make one of it.
    if !delay.is_zero() {
        let not_before = now.as_millisecond().saturating_add(i64::try_from(delay.as_millis()).unwrap_or(i64::MAX));
        table.insert(NOT_BEFORE.into(), AMQPValue::LongLongInt(not_before));
    }
    let new = BasicProperties::default().with_headers(table).with_delivery_mode(2);
    // Neither expiration nor priority: both change when a message arrives.
    crate::copy_properties!(old => new, user_id with_user_id)
}

/// How much too early a delayed message has arrived; zero for any other.
pub fn early_by(table: &FieldTable, now: Timestamp) -> Duration {
    let not_before = headers::number(table, NOT_BEFORE).and_then(|at| i64::try_from(at).ok()).unwrap_or(0);
    Duration::from_millis(u64::try_from(not_before.saturating_sub(now.as_millisecond())).unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_delay_is_rounded_up_by_a_quarter_at_most() {
        for (delay, expected) in
            [(0, 0), (1, 1), (7, 7), (9, 10), (30, 32), (80, 80), (100_000, 114_688), (999_999, 131_071)]
        {
            assert_eq!(rounded(Duration::from_secs(delay)), Duration::from_secs(expected), "{delay}");
        }
        for seconds in 1..DELAY_MAX.as_secs() {
            let got = rounded(Duration::from_secs(seconds)).as_secs();
            assert!(got >= seconds && got * 4 <= seconds * 5, "{seconds} {got}");
            assert!(got.count_ones() <= DIGITS || got == DELAY_MAX.as_secs(), "{seconds} {got}");
        }
        assert_eq!(rounded(Duration::from_millis(1)), Duration::from_secs(1));
    }

    #[test]
    fn a_message_goes_by_the_fixed_delay_or_by_the_levels_of_its_key() {
        let queues = DelayQueues::new("p", &[Duration::from_secs(30)]);
        let route = |seconds| queues.route("q.a", Duration::from_secs(seconds));
        assert_eq!(route(30), ("p.delay.30000ms".to_owned(), "q.a".to_owned(), Duration::from_secs(30)));
        assert_eq!(route(0), (String::new(), "q.a".to_owned(), Duration::ZERO));
        let (exchange, key, _) = route(5);
        assert_eq!((exchange.as_str(), key.as_str()), ("p.delay.l2", "0.0.0.0.0.0.0.0.0.0.0.0.0.0.1.0.1.q.a"));
    }

    #[test]
    fn what_is_published_again_carries_no_word_of_earlier_queues() {
        let text = |text: &str| AMQPValue::LongString(text.into());
        let table = header_table([
            ("x-death", text("a")),
            ("x-first-death-queue", text("b")),
            ("x-last-death-reason", text("c")),
            ("x-retry-count", AMQPValue::LongInt(2)),
        ]);
        let old = BasicProperties::default().with_headers(table).with_expiration("5".into()).with_priority(3);
        let now = Timestamp::from_millisecond(1_000).unwrap();
        let new = delayed(&old.with_content_type("application/json".into()), now, Duration::from_secs(2));
        let table = new.headers().clone().unwrap();
        let names: Vec<&str> = table.inner().keys().map(|name| name.as_str()).collect();
        assert_eq!(names, [NOT_BEFORE, "x-retry-count"]);
        assert!(new.expiration().is_none() && new.priority().is_none() && new.content_type().is_some());
        assert_eq!(early_by(&table, now), Duration::from_secs(2));
        assert_eq!(early_by(&table, Timestamp::from_millisecond(9_000).unwrap()), Duration::ZERO);
    }
}
