//! The section `[amqp]`: the broker, and what a worker is there.

use serde::{Deserialize, Serialize};

use super::Environment;
use super::rules::Rules;
use super::secrets::SecretError;
use super::values::{File, OptionalSpan, Secret, SecretFile, Size, Url, built_in};

/// The AMQP broker and this worker's identity there.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(debug_assertions, derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields, default)]
pub struct Amqp {
    /// Where the URI of the broker is read, such as `amqps://user:password@broker.example.com/vhost` [built-in: RabbitMQ on this host, as guest]. The variables `JOURNEYMAN_AMQP_URI` and `WORKER_AMQP_URI` take precedence.
    pub uri_file: Option<SecretFile>,
    /// File with the CA certificates (PEM) that verify the broker, instead of the system's.
    pub ca_file: Option<File>,
    /// File with the client certificate chain (PEM).
    pub certificate_file: Option<File>,
    /// File with the private key of the client certificate (PEM).
    pub key_file: Option<File>,
    /// Key of the worker group, part of the name of its queue. `WORKER_KEY` sets it too.
    pub worker_key: Option<String>,
    /// Pool of this worker. `WORKER_POOL` sets it too.
    pub pool: String,
    /// Maximum size of a message that is received or published. The broker has a limit of its own. `WORKER_MAX_MSG_SIZE` sets it too, in bytes.
    pub max_message_size: Size<1>,
    /// The broker's `consumer_timeout`, if the queue does not set another. A request that takes longer is stopped and returned to the queue shortly before it. `0s` is no limit.
    pub consumer_timeout: OptionalSpan,
    /// URL of the broker's management interface, used with the user and password of the broker's URI [built-in: none]. A worker reads the queue's consumer timeout there (RabbitMQ 3.12 or later); a controller counts unacknowledged messages and sets policies.
    pub management_url: Option<Url>,
    /// What a controller assigns to this worker by environment variables.
    #[serde(skip)]
    pub assignment: Assignment,
}

impl Default for Amqp {
    fn default() -> Self {
        Self {
            uri_file: None,
            ca_file: None,
            certificate_file: None,
            key_file: None,
            worker_key: None,
            pool: "core".to_owned(),
            max_message_size: built_in("128MiB"),
            consumer_timeout: built_in("30m"),
            management_url: None,
            assignment: Assignment::default(),
        }
    }
}

impl Amqp {
    /// The exchange for activity reports. `None` without a worker group, because a controller attributes reports by its key.
    pub fn activity_exchange(&self) -> Option<String> {
        let built_in = || self.worker_key.as_ref().map(|_| format!("{}-activity-xchg", self.pool));
        self.assignment.activity_exchange.clone().or_else(built_in)
    }

    pub fn check(&self, rules: &mut Rules<'_>) {
        let (set, missing) = match (&self.certificate_file, &self.key_file) {
            (Some(_), None) => ("certificate_file", "key_file"),
            (None, Some(_)) => ("key_file", "certificate_file"),
            (Some(_), Some(_)) | (None, None) => return,
        };
        rules.error("amqp", set, format!("[amqp] has `{set}` but no `{missing}`; set both or neither"), "");
    }
}

/// What a controller assigns to a worker besides its pool and its key.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Assignment {
    /// `WORKER_ID`, or the host name with `WORKER_ID_USE_HOSTNAME`.
    pub worker_id: Option<String>,
    /// `WORKER_REQUESTS_QUEUE`
    pub requests_queue: Option<String>,
    /// `WORKER_ACTIVITY_EXCHANGE`
    pub activity_exchange: Option<String>,
}

impl Assignment {
    pub fn from_environment(environment: &Environment) -> Self {
        let text = |name: &str| environment.get(name).map(str::to_owned);
        let by_hostname = ["WORKER_ID_USE_HOSTNAME", "WORKEY_ID_USE_HOSTNAME"]
            .iter()
            .any(|name| environment.get(name).is_some_and(|value| !["0", "false", "no"].contains(&value)));
        let hostname = || rustix::system::uname().nodename().to_string_lossy().into_owned();
        Self {
            worker_id: text("WORKER_ID").map(|id| if by_hostname { hostname() } else { id }),
            requests_queue: text("WORKER_REQUESTS_QUEUE"),
            activity_exchange: text("WORKER_ACTIVITY_EXCHANGE"),
        }
    }
}

/// A RabbitMQ on this machine with its default user.
const AMQP_URI_DEFAULT: &str = "amqp://guest:guest@127.0.0.1:5672/%2f";

/// Reads the URI of the AMQP broker.
///
/// # Errors
///
/// Errors are those of [`SecretFile::load`].
pub fn amqp_uri(amqp: &Amqp, environment: &Environment) -> Result<Secret, SecretError> {
    match (environment.amqp_uri(), &amqp.uri_file) {
        (None, Some(file)) => file.load("an AMQP address", environment),
        (uri, _) => Ok(Secret::new(uri.unwrap_or(AMQP_URI_DEFAULT))),
    }
}
