//! The section of the notifier.

use std::collections::BTreeMap;

use serde::de::Error;
use serde::{Deserialize, Deserializer, Serialize};

use super::Format;
use crate::notifier::content_filter::ContentFilter;
use journeyman_domain::lane::retry::OnExhausted;
use journeyman_domain::limits::{
    NOTIFIER_ATTEMPTS_PER_ENDPOINT, NOTIFIER_ATTEMPTS_PER_ORIGIN_MAX, NOTIFIER_SHARDS_MAX, WEBHOOK_TIMEOUT_MAX,
};
use journeyman_platform::settings::rules::Rules;
use journeyman_platform::settings::values::{
    AttemptRate, File, Listen, OptionalSpan, SecretFile, Span, WebhookUrl, built_in, whole_number,
};
use journeyman_worker::notify::every_event;

/// Delivers events as webhooks.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(debug_assertions, derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields, default)]
pub struct Notifier {
    /// Database file.
    pub db: File,
    /// A PostgreSQL that several notifiers share, in place of the file.
    pub postgres: Option<NotifierPostgres>,
    /// Address where events are taken. With port 0 the system chooses a port.
    pub listen: Listen,
    /// File with the bearer token that callers need.
    pub token_file: Option<SecretFile>,
    /// File with a bearer token for callers that only read.
    pub read_token_file: Option<SecretFile>,
    /// File with a bearer token for callers that only send events.
    pub publish_token_file: Option<SecretFile>,
    /// How long a message and its attempts are kept after it has ended. An event that its source sends again later is a new one.
    pub retention: Span<1_000>,
    /// Takes events from RabbitMQ too [built-in: no].
    pub amqp: Option<NotifierAmqp>,
    /// Takes the notifications of a Mistral too [built-in: no].
    pub mistral: Option<NotifierMistral>,
    /// Takes events from a table of an application too [built-in: no].
    pub outbox: Option<NotifierOutbox>,
    /// Networks that webhooks may reach although they are not public, such as `10.0.0.0/8`.
    pub allowed_networks: Vec<String>,
    /// Refuses endpoints without TLS.
    pub https_only: bool,
    /// File with the URL of the proxy that webhooks go through, such as `http://user:password@proxy.example.com:3128`; `https` and `socks5` work too. The proxy resolves names, so it has to judge their addresses.
    pub proxy_file: Option<SecretFile>,
    /// File with CA certificates (PEM) that verify receivers, beside the system's.
    pub ca_file: Option<File>,
    /// File with the certificate chain (PEM) for receivers that ask for one.
    pub client_certificate_file: Option<File>,
    /// File with the private key of that certificate (PEM).
    pub client_key_file: Option<SecretFile>,
    /// Files with the keys that encrypt secrets in the database, each the base64 of 32 bytes. The first one encrypts, and all of them decrypt, so that keys can be replaced.
    pub seal_key_files: Vec<SecretFile>,
    /// Where events are delivered, by name.
    pub endpoint: BTreeMap<String, NotifierEndpoint>,
}

impl Default for Notifier {
    fn default() -> Self {
        Self {
            db: built_in("/var/lib/journeyman/notifier.db"),
            postgres: None,
            listen: built_in("127.0.0.1:7090"),
            token_file: None,
            read_token_file: None,
            publish_token_file: None,
            retention: built_in("720h"),
            amqp: None,
            mistral: None,
            outbox: None,
            allowed_networks: Vec::new(),
            https_only: false,
            proxy_file: None,
            ca_file: None,
            client_certificate_file: None,
            client_key_file: None,
            seal_key_files: Vec::new(),
            endpoint: BTreeMap::new(),
        }
    }
}

/// The database of several notifiers.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(debug_assertions, derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct NotifierPostgres {
    /// File with the URL of the database, such as `postgres://user:password@db.example.com/notifier?sslmode=require`.
    pub url_file: SecretFile,
    /// Certificate of the CA of the server (PEM), in place of the system's.
    pub ca_file: Option<File>,
}

/// A table in PostgreSQL that an application writes events to, in its own transactions. `journeyman notifier setup` makes it.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(debug_assertions, derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct NotifierOutbox {
    /// File with the URL of the database.
    pub url_file: SecretFile,
    /// Certificate of the CA of the server (PEM), in place of the system's.
    pub ca_file: Option<File>,
    /// Name of the table, perhaps with its schema.
    #[serde(default = "outbox_table")]
    pub table: String,
}

fn outbox_table() -> String {
    "journeyman_outbox".to_owned()
}

/// The queues from which the notifier takes events, at the broker of `[amqp]`. `journeyman notifier setup` makes them.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(debug_assertions, derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields, default)]
pub struct NotifierAmqp {
    /// Exchange that events are published to, with their key as the routing key. The names of its queues begin with it.
    pub queue: String,
    /// Number of queues over which the exchange spreads the keys. It cannot be changed later. More than one needs RabbitMQ 4.3, or its plugin `rabbitmq_sharding`.
    #[cfg_attr(debug_assertions, schemars(range(min = 1, max = 256)))]
    #[serde(deserialize_with = "whole_number::<_, _, 1, { NOTIFIER_SHARDS_MAX as i64 }>")]
    pub shards: u16,
}

impl Default for NotifierAmqp {
    fn default() -> Self {
        Self { queue: "journeyman.notify".to_owned(), shards: 16 }
    }
}

/// A vhost with a queue for each workflow execution and URL, at the broker of `[amqp]`. Needs `amqp.management_url` and `notifier.seal_key_files`.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(debug_assertions, derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct NotifierMistral {
    /// Vhost of the queues, made if it is missing.
    #[serde(default = "mistral_vhost")]
    pub vhost: String,
    /// File with the key of the hashes of URLs in the names of queues, the same as that of the publishers.
    pub url_key_file: SecretFile,
    /// How long nothing has to come after the end of an execution before its queues are deleted, less than the broker's consumer timeout. With `0s` none is, as publishers need that do not look whether the queue is still there after a message was confirmed.
    #[serde(default = "mistral_delete_after")]
    pub delete_after: OptionalSpan,
}

fn mistral_vhost() -> String {
    "mistral_guaranteed_notifies".to_owned()
}

fn mistral_delete_after() -> OptionalSpan {
    built_in("10m")
}

/// A receiver of webhooks.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(debug_assertions, derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct NotifierEndpoint {
    /// Where its webhooks are sent. Messages and `config show` have no more of it than its origin.
    pub url: Option<WebhookUrl>,
    /// File with the URL, instead of `url`.
    pub url_file: Option<SecretFile>,
    /// Types of the events that it gets. A `*` at the end stands for the rest.
    #[serde(default = "every_event")]
    pub events: Vec<String>,
    /// What the data of its events has: JSON pointers, each with a value or a list of values, such as `"/outcome" = "failed"`.
    #[serde(default)]
    pub filter: ContentFilter,
    /// Files with the keys that sign its webhooks, each `whsec_…` or `whsk_…`. All of them sign, so that a receiver can change its key at any time.
    #[serde(default)]
    pub key_files: Vec<SecretFile>,
    /// File with headers that its webhooks have, one `Name: value` in each line.
    pub headers_file: Option<SecretFile>,
    /// What it gets of an event.
    #[serde(default)]
    pub format: Format,
    /// What happens to an event that was tried for 5 days.
    #[serde(default)]
    #[cfg_attr(debug_assertions, schemars(with = "String", extend("enum" = ["block", "skip", "park"])))]
    pub on_exhausted: OnExhausted,
    /// How many attempts may be under way at once.
    #[cfg_attr(debug_assertions, schemars(range(min = 1, max = 64)))]
    #[serde(
        default = "webhook_attempts_max",
        deserialize_with = "whole_number::<_, _, 1, { NOTIFIER_ATTEMPTS_PER_ORIGIN_MAX as i64 }>"
    )]
    pub attempts_max: u16,
    /// How many attempts may begin within a second, a minute or an hour, such as `10/s` [built-in: no limit].
    pub rate: Option<AttemptRate>,
    /// How long one attempt may take, up to 60s.
    #[serde(default = "webhook_timeout", deserialize_with = "timeout_within_limit")]
    pub timeout: Span<1_000>,
}

const fn webhook_attempts_max() -> u16 {
    NOTIFIER_ATTEMPTS_PER_ENDPOINT
}

fn webhook_timeout() -> Span<1_000> {
    built_in("20s")
}

fn timeout_within_limit<'de, D: Deserializer<'de>>(from: D) -> Result<Span<1_000>, D::Error> {
    let timeout = Span::deserialize(from)?;
    let longest = Span::<1_000>(WEBHOOK_TIMEOUT_MAX);
    if timeout.0 <= longest.0 { Ok(timeout) } else { Err(D::Error::custom(format!("\"{longest}\" or less"))) }
}

impl Notifier {
    pub fn check(&self, rules: &mut Rules<'_>) {
        for (name, endpoint) in &self.endpoint {
            if endpoint.url.is_some() == endpoint.url_file.is_some() {
                let key = format!("notifier.endpoint.{name}");
                rules.error(&key, "url", format!("[{key}] needs either `url` or `url_file`"), "");
            }
        }
    }
}
