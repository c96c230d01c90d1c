//! Forwards orphan requests to the requests exchange and acknowledges them once the broker confirms.

use lapin::message::Delivery;
use lapin::options::{BasicAckOptions, BasicPublishOptions};
use lapin::{BasicProperties, Channel, Confirmation};

use super::Controller;
use super::held_orphans::HeldOrphan;
use super::message_headers::{HOPS, hops, integer, without_user_id};
use super::queue_names::QueueNames;
use super::session_error::SessionError;
use journeyman_domain::group::Key;

pub(super) struct ForwardResult {
    key: Key,
    request: HeldOrphan,
    confirmation: lapin::Result<Confirmation>,
}

pub(super) async fn forward(channel: &Channel, names: &QueueNames, key: Key, request: HeldOrphan) -> ForwardResult {
    let publish = async {
        let delivery = &request.delivery;
        let options = BasicPublishOptions { mandatory: true, ..BasicPublishOptions::default() };
        let (exchange, routing_key) = (names.requests_exchange().into(), delivery.routing_key.clone());
        let properties = forward_properties(delivery);
        channel.basic_publish(exchange, routing_key, options, &delivery.data, properties).await?.await
    };
    let confirmation = publish.await;
    ForwardResult { key, request, confirmation }
}

impl Controller {
    /// `results` are all that are ready. An unroutable request goes to the orphan queue, so one is returned only if the orphan
    /// exchange was deleted. lapin attaches a return to the next confirm of the channel, which may be that of another
    /// request, and is never later than that of the returned one: so nothing of the batch is acknowledged.
    pub(super) async fn on_forwarded(&mut self, results: Vec<ForwardResult>) -> Result<(), SessionError> {
        let returned = |result: &ForwardResult| {
            matches!(result.confirmation, Ok(Confirmation::Ack(Some(_)) | Confirmation::Nack(Some(_))))
        };
        if results.iter().any(returned) {
            let exchange = self.config.names.orphan_exchange();
            return Err(SessionError { reason: format!("a request was returned: exchange {exchange} was deleted") });
        }
        for ForwardResult { key, request, confirmation } in results {
            self.session.held.on_confirmed(&key);
            match confirmation? {
                Confirmation::Ack(_) | Confirmation::NotRequested => {
                    request.delivery.acker.ack(BasicAckOptions::default()).await?;
                    self.counters.on_orphan_released();
                    self.counters.lock().values.orphans_forwarded += 1;
                }
                Confirmation::Nack(_) => self.session.held.hold_refused(key, request, self.clock.now()),
            }
        }
        Ok(())
    }
}

fn forward_properties(delivery: &Delivery) -> BasicProperties {
    let mut table = delivery.properties.headers().clone().unwrap_or_default();
    table.insert(HOPS.into(), integer(hops(delivery) + 1));
    // The broker requires user-id to match the publisher.
    without_user_id(&delivery.properties).with_headers(table)
}
