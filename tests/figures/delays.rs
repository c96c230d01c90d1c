//! Messages that arrive later, by the queues of a RabbitMQ: how much later than promised.

use std::collections::HashMap;
use std::time::Duration;

use futures_util::{TryStreamExt as _, stream, try_join};
use jiff::Timestamp;
use journeyman::task::formats::new_task_id;
use journeyman_platform::amqp::delay::{DelayQueues, rounded};
use journeyman_platform::amqp::lapin::options::{
    BasicConsumeOptions, ExchangeDeleteOptions, QueueDeclareOptions, QueueDeleteOptions,
};
use journeyman_platform::amqp::lapin::types::FieldTable;
use journeyman_platform::amqp::lapin::{BasicProperties, Channel, Connection, ConnectionProperties, Consumer};
use tokio::time::{Instant, sleep_until, timeout};

use crate::lapin_alone::next;
use crate::machine::{Row, Spans, millis};
use crate::programs::{Broker, TIMEOUT};
use crate::requests::WINDOW;
use crate::{Lab, Outcome};

/// Delays with a queue of their own, in milliseconds.
const FIXED_MS: [u64; 3] = [1_500, 4_000, 7_500];
/// Between two messages.
const PACE: Duration = Duration::from_millis(4);
/// RabbitMQ counts whole milliseconds.
const BROKER_TICK: Duration = Duration::from_millis(1);
/// The queues of a prefix that have levels.
const LEVELS: u32 = 17;

impl Lab {
    pub(crate) async fn delays(&self) -> Outcome<Vec<Row>> {
        let Some(broker) = Broker::start(self)? else { return Ok(Vec::new()) };
        let count = self.pick(10_000, 200);
        let prefix = format!("bench-{}", new_task_id());
        let connection = Connection::connect(&broker.uri, ConnectionProperties::default()).await?;
        let channel = connection.create_channel().await?;
        let options = QueueDeclareOptions { durable: true, ..QueueDeclareOptions::default() };
        channel.queue_declare(prefix.as_str().into(), options, FieldTable::default()).await?;
        let delays = DelayQueues::new(&prefix, &FIXED_MS.map(Duration::from_millis));
        delays.declare(&connection).await?;
        delays.lead_to(&connection, &prefix).await?;
        let options = BasicConsumeOptions { no_ack: true, ..BasicConsumeOptions::default() };
        let arriving = channel.basic_consume(prefix.as_str().into(), "".into(), options, FieldTable::default()).await?;
        let began = Instant::now();
        let publish = async |number: usize| {
            sleep_until(began + PACE * u32::try_from(number)?).await;
            let (delay, body) = (delay_of(number), number.to_string());
            let sent_at = Timestamp::now();
            delays.publish(&connection, &prefix, delay, &BasicProperties::default(), body.as_bytes()).await?;
            Outcome::Ok((number, sent_at))
        };
        let publishing =
            stream::iter((0..count).map(|number| Ok(publish(number)))).try_buffer_unordered(WINDOW).try_collect();
        let (sent, mut arrived): (HashMap<_, _>, _) = try_join!(publishing, collect(arriving, count))?;
        remove_delays(&channel, &prefix, &FIXED_MS).await?;
        channel.queue_delete(prefix.as_str().into(), QueueDeleteOptions::default()).await?;
        let (mut by_levels, mut by_one_queue, mut early, mut twice) = (Vec::new(), Vec::new(), 0, 0);
        for (number, sent_at) in sent {
            let times = arrived.remove(&number).unwrap_or_default();
            let first = times.first().ok_or("a message was lost")?;
            twice += times.len() - 1;
            let (is_fixed, delay) = (is_fixed(number), delay_of(number));
            let promised = sent_at + if is_fixed { delay } else { rounded(delay) };
            early += usize::from(*first + BROKER_TICK < promised);
            let late = Duration::try_from(first.duration_since(promised)).unwrap_or_default();
            if is_fixed { by_one_queue.push(late) } else { by_levels.push(late) }
        }
        let row = |what: &str, late: Spans, limit: String| Row {
            figure: format!(
                "{} messages delayed by 1 to 8 s by {what}: late by, p50 and p99; 0 of {count} lost, {early} early, {twice} twice",
                late.len()
            ),
            reached: format!("{}, at most {}", late.pair(50, 99), millis(late.percentile(100))),
            aim: "",
            limit,
        };
        let (by_levels, by_one_queue) = (Spans::new(by_levels), Spans::new(by_one_queue));
        Ok(vec![
            row("fixed delays, one queue each", by_one_queue, String::new()),
            row("levels, up to three queues each", by_levels, String::new()),
        ])
    }
}

fn is_fixed(number: usize) -> bool {
    number % 2 == 1
}

/// The order is any, so that long ones stand before short ones.
fn delay_of(number: usize) -> Duration {
    if is_fixed(number) {
        return Duration::from_millis(FIXED_MS[number / 2 % FIXED_MS.len()]);
    }
    Duration::from_millis(1_000 + number as u64 * 7_919 % 7_001)
}

/// When each message has arrived, once all have. One that comes twice comes soon.
async fn collect(mut arriving: Consumer, count: usize) -> Outcome<HashMap<usize, Vec<Timestamp>>> {
    let mut arrived: HashMap<usize, Vec<Timestamp>> = HashMap::new();
    while arrived.len() < count {
        let delivery = timeout(TIMEOUT, next(&mut arriving)).await;
        let delivery = delivery.map_err(|_| format!("{} of {count} messages were lost", count - arrived.len()))??;
        let number = std::str::from_utf8(&delivery.data)?.parse()?;
        arrived.entry(number).or_default().push(Timestamp::now());
    }
    Ok(arrived)
}

/// Deletes the queues and exchanges of a prefix.
pub(crate) async fn remove_delays(channel: &Channel, prefix: &str, fixed_ms: &[u64]) -> Outcome<()> {
    let fixed = fixed_ms.iter().map(|ms| format!("{prefix}.delay.{ms}ms"));
    for name in (0..LEVELS).map(|level| format!("{prefix}.delay.l{level}")).chain(fixed) {
        channel.queue_delete(name.as_str().into(), QueueDeleteOptions::default()).await?;
        channel.exchange_delete(name.as_str().into(), ExchangeDeleteOptions::default()).await?;
    }
    let delivery = format!("{prefix}.delay.delivery");
    Ok(channel.exchange_delete(delivery.as_str().into(), ExchangeDeleteOptions::default()).await?)
}
