//! A broker's management interface: consumer timeouts of queues, counts, policies and routes.
//!
//! RabbitMQ does not show its global `consumer_timeout`, only those of queues, which it enforces from 3.12 on.

mod policies;
mod queue_counts;
mod routing;
mod vhosts;

use std::path::Path;
use std::time::Duration;

use serde::Deserialize;

use super::{Broker, InvalidBrokerConfig};
use crate::http::client::{BodyError, client_builder, read_body, root_cause};
use journeyman_domain::limits::{
    AMQP_MANAGEMENT_BYTES_MAX, AMQP_MANAGEMENT_PAGE_QUEUES, AMQP_MANAGEMENT_QUEUES_MAX, AMQP_MANAGEMENT_TIMEOUT,
};
pub use policies::BrokerPolicy;
pub use queue_counts::{QueueCounts, escape_regex};
pub use routing::{Binding, ExchangeRouting, QueueRouting};

#[derive(Clone)]
pub struct Management {
    http: reqwest::Client,
    base: String,
    vhost: String,
    broker: Broker,
}

impl std::fmt::Debug for Management {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(out, "Management({})", self.base)
    }
}

#[derive(Debug, thiserror::Error)]
pub enum ManagementError {
    #[error("there is no such queue")]
    NotFound,
    /// No response, or an unexpected one.
    #[error("{0}")]
    Failed(String),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QueueSettings {
    /// Of the queue's argument and policy; `None` where the broker's own setting applies.
    pub consumer_timeout: Option<Duration>,
    pub dead_letters: bool,
    /// How often the broker of a quorum queue redelivers a message.
    pub delivery_limit: Option<u32>,
}

#[derive(Deserialize)]
struct QueueInfo {
    #[serde(default)]
    durable: bool,
    /// RabbitMQ writes an empty table as an empty list.
    #[serde(default)]
    arguments: serde_json::Value,
    #[serde(default)]
    effective_policy_definition: serde_json::Value,
    /// Of RabbitMQ 4, which has a default; a text where there is no limit.
    #[serde(default)]
    delivery_limit: serde_json::Value,
}

#[derive(Deserialize)]
struct Typed {
    r#type: String,
}

#[derive(Deserialize)]
struct Page<T> {
    items: Vec<T>,
    page_count: u32,
}

impl Management {
    /// The interface at `base`, such as `http://127.0.0.1:15672`, with the user and password of the broker. `ca` (PEM) replaces
    /// the system's CAs.
    ///
    /// # Errors
    ///
    /// Fails if the file cannot be used.
    pub fn new(broker: &Broker, base: &str, ca: Option<&Path>) -> Result<Self, InvalidBrokerConfig> {
        let mut builder = client_builder().timeout(AMQP_MANAGEMENT_TIMEOUT);
        if let Some(path) = ca {
            let wrong = |error: &dyn std::fmt::Display| InvalidBrokerConfig(format!("{}: {error}", path.display()));
            let pem = std::fs::read(path).map_err(|error| wrong(&error))?;
            let certificates = reqwest::Certificate::from_pem_bundle(&pem).map_err(|error| wrong(&error))?;
            builder = builder.tls_certs_only(certificates);
        }
        let http = builder
            .build()
            .map_err(|error| InvalidBrokerConfig(format!("cannot build an HTTP client for {base}: {error}")))?;
        Ok(Self {
            http,
            base: base.trim_end_matches('/').to_owned(),
            vhost: broker.uri.vhost.clone(),
            broker: broker.clone(),
        })
    }

    /// The arguments and policies of a queue.
    ///
    /// # Errors
    ///
    /// [`ManagementError`], without user and password.
    pub async fn queue_settings(&self, queue: &str) -> Result<QueueSettings, ManagementError> {
        self.queue_info(queue).await.map(|queue| queue.settings())
    }

    async fn queue_info(&self, queue: &str) -> Result<QueueInfo, ManagementError> {
        self.get(&format!("queues/{}/{}", urlencoding::encode(&self.vhost), urlencoding::encode(queue))).await
    }

    async fn list_queues<T: serde::de::DeserializeOwned>(&self, query: &str) -> Result<Vec<T>, ManagementError> {
        let path =
            format!("queues/{}?page_size={AMQP_MANAGEMENT_PAGE_QUEUES}&{query}", urlencoding::encode(&self.vhost));
        let mut queues = Vec::new();
        for page in 1..=AMQP_MANAGEMENT_QUEUES_MAX / AMQP_MANAGEMENT_PAGE_QUEUES {
            let Page::<T> { items, page_count } = self.get(&format!("{path}&page={page}")).await?;
            queues.extend(items);
            if page >= page_count {
                break;
            }
        }
        Ok(queues)
    }

    async fn get<T: serde::de::DeserializeOwned>(&self, path: &str) -> Result<T, ManagementError> {
        let asked = self.http.get(self.url(path));
        let bytes = self.send(path, asked).await?;
        serde_json::from_slice(&bytes).map_err(|_| self.failure(path, "unexpected response"))
    }

    async fn put(&self, path: &str, what: &impl serde::Serialize) -> Result<(), ManagementError> {
        let body = serde_json::to_vec(what).map_err(|error| self.failure(path, &error.to_string()))?;
        let asked = self.http.put(self.url(path)).header(reqwest::header::CONTENT_TYPE, "application/json").body(body);
        self.send(path, asked).await.map(drop)
    }

    fn url(&self, path: &str) -> String {
        format!("{}/api/{path}", self.base)
    }

    fn failure(&self, path: &str, what: &str) -> ManagementError {
        ManagementError::Failed(format!("`amqp.management_url`, {}: {what}", self.url(path)))
    }

    async fn send(&self, path: &str, asked: reqwest::RequestBuilder) -> Result<Vec<u8>, ManagementError> {
        let lost = |error: reqwest::Error| self.failure(path, &root_cause(&error.without_url()));
        let login = self.broker.user_info();
        let request = asked.basic_auth(login.username, Some(login.password));
        let mut answer = request.send().await.map_err(lost)?;
        match answer.status() {
            status if status.is_success() => {}
            reqwest::StatusCode::NOT_FOUND => return Err(ManagementError::NotFound),
            status @ (reqwest::StatusCode::UNAUTHORIZED | reqwest::StatusCode::FORBIDDEN) => {
                let fix = "the user of the broker's URI needs the tag `management` at the broker, or `policymaker` for policies \
                           (`rabbitmqctl set_user_tags`), or leave that key out";
                return Err(self.failure(path, &format!("{status}; {fix}")));
            }
            status => return Err(self.failure(path, &format!("{status}"))),
        }
        read_body(&mut answer, AMQP_MANAGEMENT_BYTES_MAX).await.map_err(|error| match error {
            BodyError::Connection(error) => lost(error),
            BodyError::TooLong => self.failure(path, "the response is too large"),
        })
    }
}

impl QueueInfo {
    fn settings(&self) -> QueueSettings {
        let Self { arguments, effective_policy_definition: policy, delivery_limit, .. } = self;
        let of_queue = [arguments.get("x-delivery-limit"), policy.get("delivery-limit")];
        let limits = of_queue.into_iter().filter_map(|limit| limit?.as_u64()).min();
        let timeouts = [arguments.get("x-consumer-timeout"), policy.get("consumer-timeout")];
        let timeouts = timeouts.into_iter().filter_map(|timeout| timeout?.as_u64()).filter(|timeout| *timeout > 0);
        QueueSettings {
            // RabbitMQ applies the shorter of the two.
            consumer_timeout: timeouts.min().map(Duration::from_millis),
            dead_letters: arguments.get("x-dead-letter-exchange").is_some()
                || policy.get("dead-letter-exchange").is_some(),
            delivery_limit: delivery_limit.as_u64().or(limits).and_then(|limit| u32::try_from(limit).ok()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(json: &str) -> QueueSettings {
        serde_json::from_str::<QueueInfo>(json).unwrap().settings()
    }

    #[test]
    fn arguments_and_policies_of_a_queue_are_read() {
        let both = parse(
            r#"{"arguments": {"x-queue-type": "quorum", "x-consumer-timeout": 3600000},
                "effective_policy_definition": {"consumer-timeout": 60000}}"#,
        );
        assert_eq!(both.consumer_timeout, Some(Duration::from_secs(60)), "the shorter one");
        // As RabbitMQ 3.10 has it.
        let none = parse(r#"{"type": "classic", "arguments": {}, "effective_policy_definition": []}"#);
        assert_eq!(none, QueueSettings { consumer_timeout: None, dead_letters: false, delivery_limit: None });
        // RabbitMQ 4 does so for a quorum queue for which nothing is set.
        assert_eq!(parse(r#"{"type": "quorum", "delivery_limit": 20, "arguments": {}}"#).delivery_limit, Some(20));
        assert_eq!(parse(r#"{"delivery_limit": "unlimited", "arguments": {}}"#).delivery_limit, None);
        assert_eq!(parse(r#"{"effective_policy_definition": {"delivery-limit": 3}}"#).delivery_limit, Some(3));
        assert!(parse(r#"{"arguments": {"x-dead-letter-exchange": ""}}"#).dead_letters, "the default exchange is one");
        assert!(parse(r#"{"effective_policy_definition": {"dead-letter-exchange": "dead"}}"#).dead_letters);
        for odd in [r#"{"x-consumer-timeout": "soon"}"#, r#"{"x-consumer-timeout": 0}"#] {
            assert_eq!(parse(&format!(r#"{{"arguments": {odd}, "policy": null}}"#)).consumer_timeout, None);
        }
    }
}
