//! Headers and properties of the requests that a controller moves.

use lapin::BasicProperties;
use lapin::message::Delivery;
use lapin::types::AMQPValue;

use journeyman_platform::amqp::headers;
use journeyman_platform::copy_properties;

pub(super) const PERSISTENT: u8 = 2;
pub(super) const HOPS: &str = "x-journeyman-hops";

pub(super) fn hops(delivery: &Delivery) -> u64 {
    delivery.properties.headers().as_ref().and_then(|table| headers::number(table, HOPS)).unwrap_or_default()
}

pub(super) fn integer(number: u64) -> AMQPValue {
    AMQPValue::LongLongInt(i64::try_from(number).unwrap_or(i64::MAX))
}

pub(super) fn without_user_id(from: &BasicProperties) -> BasicProperties {
    copy_properties!(
        from => BasicProperties::default(), headers with_headers, delivery_mode with_delivery_mode,
        priority with_priority, expiration with_expiration, cluster_id with_cluster_id
    )
}
