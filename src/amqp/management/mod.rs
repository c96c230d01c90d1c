//! A broker's management interface: consumer timeouts of queues, counts and policies.
//!
//! RabbitMQ does not show its global `consumer_timeout`, only those of queues, which it enforces from 3.12 on.
//! [`crate::domain::consumer_timeout`] decides what follows.

mod policies;
mod queue_counts;

use std::path::Path;
use std::time::Duration;

use secrecy::{ExposeSecret as _, SecretString};
use serde::Deserialize;

use super::{Broker, InvalidBrokerConfig};
use crate::domain::consumer_timeout::{BrokerVersion, QueueKind, TimeoutFacts};
use crate::http::client::{BodyError, client_builder, read_body, root_cause};
use crate::limits::{AMQP_MANAGEMENT_BYTES_MAX, AMQP_MANAGEMENT_TIMEOUT};
pub use policies::BrokerPolicy;
pub use queue_counts::{QueueCounts, escape_regex};

#[derive(Clone)]
pub struct Management {
    http: reqwest::Client,
    base: String,
    vhost: String,
    user: String,
    password: SecretString,
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

#[derive(Deserialize)]
struct Overview {
    rabbitmq_version: String,
}

#[derive(Deserialize)]
struct QueueInfo {
    #[serde(rename = "type", default)]
    kind: Option<String>,
    /// RabbitMQ writes an empty table as an empty list.
    #[serde(default)]
    arguments: serde_json::Value,
    #[serde(default)]
    effective_policy_definition: serde_json::Value,
}

impl Management {
    /// The interface at `base`, such as `http://127.0.0.1:15672`, with the user and password of the broker. `ca` (PEM) replaces
    /// the system's CAs.
    ///
    /// # Errors
    ///
    /// If the file cannot be used.
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
        let login = &broker.uri.authority.userinfo;
        Ok(Self {
            http,
            base: base.trim_end_matches('/').to_owned(),
            vhost: broker.uri.vhost.clone(),
            user: login.username.clone(),
            password: SecretString::from(login.password.as_str()),
        })
    }

    /// Facts about the consumer timeout of a queue.
    ///
    /// # Errors
    ///
    /// [`ManagementError`], without user and password.
    pub async fn describe_queue(&self, queue: &str) -> Result<TimeoutFacts, ManagementError> {
        let overview: Overview = self.get("overview").await?;
        let version = BrokerVersion::parse(&overview.rabbitmq_version)
            .ok_or_else(|| ManagementError::Failed(format!("unknown version {:?}", overview.rabbitmq_version)))?;
        let path = format!("queues/{}/{}", urlencoding::encode(&self.vhost), urlencoding::encode(queue));
        let queue: QueueInfo = self.get(&path).await?;
        Ok(parse_queue(version, &queue))
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
        let request = asked.basic_auth(&self.user, Some(self.password.expose_secret()));
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

fn parse_queue(version: BrokerVersion, queue: &QueueInfo) -> TimeoutFacts {
    let milliseconds = |table: &serde_json::Value, key| table.get(key)?.as_u64().map(Duration::from_millis);
    TimeoutFacts {
        version,
        kind: if queue.kind.as_deref() == Some("classic") { QueueKind::Classic } else { QueueKind::Other },
        argument: milliseconds(&queue.arguments, "x-consumer-timeout"),
        policy: milliseconds(&queue.effective_policy_definition, "consumer-timeout"),
        dead_letters: queue.arguments.get("x-dead-letter-exchange").is_some()
            || queue.effective_policy_definition.get("dead-letter-exchange").is_some(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(json: &str) -> TimeoutFacts {
        parse_queue(BrokerVersion { major: 3, minor: 12 }, &serde_json::from_str(json).unwrap())
    }

    #[test]
    fn arguments_and_policies_of_a_queue_are_read() {
        let both = parse(
            r#"{"type": "quorum", "arguments": {"x-queue-type": "quorum", "x-consumer-timeout": 3600000},
                "effective_policy_definition": {"consumer-timeout": 60000}}"#,
        );
        assert_eq!((both.argument, both.policy), (Some(Duration::from_secs(3600)), Some(Duration::from_secs(60))));
        assert_eq!(both.kind, QueueKind::Other);
        // As RabbitMQ 3.10 has it.
        let none = parse(r#"{"type": "classic", "arguments": {}, "effective_policy_definition": []}"#);
        assert_eq!((none.argument, none.policy, none.kind), (None, None, QueueKind::Classic));
        assert!(!none.dead_letters);
        assert!(parse(r#"{"arguments": {"x-dead-letter-exchange": ""}}"#).dead_letters, "the default exchange is one");
        assert!(parse(r#"{"effective_policy_definition": {"dead-letter-exchange": "dead"}}"#).dead_letters);
        let odd = parse(r#"{"arguments": {"x-consumer-timeout": "soon"}, "policy": null}"#);
        assert_eq!((odd.argument, odd.policy), (None, None));
    }
}
