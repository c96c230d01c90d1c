//! Headers and properties of the requests that a controller moves.

use lapin::BasicProperties;
use lapin::message::Delivery;
use lapin::types::AMQPValue;

use journeyman_domain::limits::CONTROLLER_HOPS_MAX;
use journeyman_platform::amqp::headers;

pub(super) const PERSISTENT: u8 = 2;
pub(super) const HOPS: &str = "x-journeyman-hops";

pub(super) fn hops(delivery: &Delivery) -> u64 {
    delivery.properties.headers().as_ref().and_then(|table| headers::number(table, HOPS)).unwrap_or_default()
}

pub(super) fn is_looping(delivery: &Delivery) -> bool {
    hops(delivery) >= CONTROLLER_HOPS_MAX
}

pub(super) fn integer(number: u64) -> AMQPValue {
    AMQPValue::LongLongInt(i64::try_from(number).unwrap_or(i64::MAX))
}

pub(super) fn without_user_id(from: &BasicProperties) -> BasicProperties {
    let mut to = BasicProperties::default();
    macro_rules! copy {
        ($($get:ident $with:ident),*) => {$(
            if let Some(value) = from.$get() {
                to = to.$with(value.clone());
            }
        )*};
    }
    copy!(
        content_type with_content_type, content_encoding with_content_encoding, headers with_headers,
        delivery_mode with_delivery_mode, priority with_priority, correlation_id with_correlation_id,
        reply_to with_reply_to, expiration with_expiration, message_id with_message_id, timestamp with_timestamp,
        kind with_type, app_id with_app_id, cluster_id with_cluster_id
    );
    to
}
