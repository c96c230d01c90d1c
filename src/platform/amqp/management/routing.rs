//! Where an exchange and a queue send messages, as the management interface shows it.

use std::time::Duration;

use serde::Deserialize;
use serde_json::Value;

use super::{Management, ManagementError, QueueInfo, Typed};

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExchangeRouting {
    /// `topic`, `direct`, …
    pub kind: String,
    /// The bindings that lead to queues.
    pub bindings: Vec<Binding>,
}

#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct Binding {
    #[serde(rename = "destination")]
    pub queue: String,
    pub routing_key: String,
    destination_type: String,
}

/// What becomes of the messages of a queue that no consumer acknowledges, by its arguments and its policy.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct QueueRouting {
    pub is_durable: bool,
    pub message_ttl: Option<Duration>,
    /// The exchange of dead letters; an empty name is the default exchange.
    pub dead_letter_exchange: Option<String>,
    /// `None` keeps the key of each message.
    pub dead_letter_key: Option<String>,
    /// Classic queue mirroring, which RabbitMQ 4 does not have.
    pub is_mirrored: bool,
}

impl Management {
    /// # Errors
    ///
    /// [`ManagementError`], without user and password.
    pub async fn exchange_routing(&self, exchange: &str) -> Result<ExchangeRouting, ManagementError> {
        let path = format!("exchanges/{}/{}", urlencoding::encode(&self.vhost), urlencoding::encode(exchange));
        let Typed { r#type: kind } = self.get(&path).await?;
        let mut bindings: Vec<Binding> = self.get(&format!("{path}/bindings/source")).await?;
        bindings.retain(|binding| binding.destination_type == "queue");
        Ok(ExchangeRouting { kind, bindings })
    }

    /// # Errors
    ///
    /// [`ManagementError`], without user and password.
    pub async fn queue_routing(&self, queue: &str) -> Result<QueueRouting, ManagementError> {
        self.queue_info(queue).await.map(|info| info.routing())
    }
}

impl QueueInfo {
    fn routing(&self) -> QueueRouting {
        let Self { durable, arguments, effective_policy_definition: policy, .. } = self;
        let text = |name: &str| {
            let value = arguments.get(format!("x-{name}")).or_else(|| policy.get(name));
            value.and_then(Value::as_str).map(str::to_owned)
        };
        let ttls = [arguments.get("x-message-ttl"), policy.get("message-ttl")];
        QueueRouting {
            is_durable: *durable,
            // RabbitMQ applies the shorter of the two.
            message_ttl: ttls.into_iter().filter_map(|ttl| ttl?.as_u64()).min().map(Duration::from_millis),
            dead_letter_exchange: text("dead-letter-exchange"),
            dead_letter_key: text("dead-letter-routing-key"),
            is_mirrored: policy.get("ha-mode").is_some(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arguments_precede_a_policy_and_the_shorter_time_to_live_counts() {
        let info: QueueInfo = serde_json::from_str(
            r#"{"durable": true, "arguments": {"x-message-ttl": 5000, "x-dead-letter-exchange": "build"},
                "effective_policy_definition": {"message-ttl": 60000, "dead-letter-exchange": "other",
                "dead-letter-routing-key": "key", "ha-mode": "exactly"}}"#,
        )
        .unwrap();
        let expected = QueueRouting {
            is_durable: true,
            message_ttl: Some(Duration::from_secs(5)),
            dead_letter_exchange: Some("build".to_owned()),
            dead_letter_key: Some("key".to_owned()),
            is_mirrored: true,
        };
        assert_eq!(info.routing(), expected);
        let none: QueueInfo =
            serde_json::from_str(r#"{"durable": false, "arguments": {}, "effective_policy_definition": []}"#).unwrap();
        assert_eq!(none.routing(), QueueRouting::default());
    }
}
