//! The connection that the consumers of a source share, opened again after a loss.

use std::io;
use std::sync::Arc;

use lapin::Connection;
use parking_lot::Mutex;
use tokio::time::timeout;

use crate::amqp::Broker;
use crate::limits::AMQP_CHANNEL_CHECK_INTERVAL;
use crate::source::CallError;

use super::counters::AmqpSourceCounters;

pub(super) struct SharedConnection {
    broker: Broker,
    name: String,
    current: Mutex<Option<Arc<Connection>>>,
    counters: Arc<AmqpSourceCounters>,
}

impl SharedConnection {
    pub(super) fn new(broker: Broker, name: &str, counters: Arc<AmqpSourceCounters>) -> Self {
        Self { broker, name: name.to_owned(), current: Mutex::default(), counters }
    }

    pub(super) fn current(&self) -> Option<Arc<Connection>> {
        self.current.lock().clone().filter(|connection| connection.status().connected())
    }

    pub(super) async fn get_or_connect(&self) -> Result<Arc<Connection>, CallError> {
        if let Some(known) = self.current() {
            return Ok(known);
        }
        let made = Arc::new(self.broker.connect(&self.name).await?);
        self.counters.connections.increment();
        *self.current.lock() = Some(Arc::clone(&made));
        Ok(made)
    }
}

pub(super) async fn while_connected<T>(
    connection: &Connection,
    work: impl Future<Output = lapin::Result<T>>,
) -> lapin::Result<T> {
    while_open(|| connection.status().connected(), work).await
}

/// Runs `work` until the connection is lost: lapin leaves some calls unanswered that are made while a connection ends.
async fn while_open<T>(is_open: impl Fn() -> bool, work: impl Future<Output = lapin::Result<T>>) -> lapin::Result<T> {
    let mut work = std::pin::pin!(work);
    loop {
        match timeout(AMQP_CHANNEL_CHECK_INTERVAL, work.as_mut()).await {
            Ok(ended) => return ended,
            Err(_) if is_open() => {}
            Err(_) => return Err(io::Error::other("the connection was lost").into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;

    #[tokio::test(start_paused = true)]
    async fn a_call_without_an_answer_ends_soon_after_its_connection() {
        let (checks, began) = (Cell::new(0), tokio::time::Instant::now());
        let is_open = || checks.replace(checks.get() + 1) < 100;
        let ended = while_open(is_open, std::future::pending::<lapin::Result<()>>()).await;
        assert!(ended.is_err_and(|error| error.to_string().contains("the connection was lost")));
        assert_eq!(began.elapsed(), 101 * AMQP_CHANNEL_CHECK_INTERVAL);
    }
}
