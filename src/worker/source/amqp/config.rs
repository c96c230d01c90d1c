//! The settings of a request source, and its section.

use std::num::NonZeroU32;
use std::time::Duration;

use lapin::types::ShortString;
use serde::{Deserialize, Serialize};

use journeyman_domain::consumer_timeout;
use journeyman_domain::limits::{
    AMQP_ATTEMPTS_MAX, AMQP_LONG_POLL_WAIT, AMQP_MESSAGE_BYTES_MAX, AMQP_NAME_BYTES_MAX, AMQP_REPLY_RETRY_MAX,
};
use journeyman_platform::amqp::Broker;
use journeyman_platform::amqp::management::Management;

use super::deferral::DeferralConfig;
use super::delivery::PayloadForm;
use crate::task::command_name;
use journeyman_platform::settings::broker::Amqp;
use journeyman_platform::settings::rules::Rules;

/// Settings of an [`AmqpSource`](super::AmqpSource).
#[derive(Debug, Clone)]
pub struct AmqpSourceConfig {
    /// The broker that has the queue.
    pub broker: Broker,
    /// The queue; consumed from, never declared.
    pub queue: ShortString,
    /// The name of the connection at the broker.
    pub connection_name: String,
    /// What handlers get of a request.
    pub payload_form: PayloadForm,
    /// How often a request is tried; `None` is unlimited.
    pub max_attempts: Option<NonZeroU32>,
    /// What happens to a request after its last attempt.
    pub on_attempts_exhausted: OnAttemptsExhausted,
    /// The queue for copies of such requests; their clients get an error reply then.
    pub poison_queue: Option<ShortString>,
    /// The broker's consumer_timeout, where the management interface does not report it; `None` is unlimited.
    pub consumer_timeout: Option<Duration>,
    /// The management interface; `None` where it is not queried.
    pub management: Option<Management>,
    /// The handler's run time limit, for a warning where the consumer_timeout is shorter.
    pub max_run_time: Option<Duration>,
    /// The largest message that is received or sent, in bytes.
    pub message_bytes_max: u64,
    /// How long a poll waits for requests. Its slots are no other source's meanwhile.
    pub poll_wait: Duration,
    /// How long a refused reply is retried; then its request is acknowledged without a reply.
    pub reply_retry_max: Duration,
    /// What happens to a request whose handler asks for another attempt.
    pub on_retry: OnRetry,
    /// How work that runs elsewhere is looked at later; `None` if its request is held until it ends.
    pub deferral: Option<DeferralConfig>,
}

impl AmqpSourceConfig {
    /// A queue of this broker with default settings.
    pub fn new(broker: Broker, queue: ShortString, name: &str) -> Self {
        Self {
            broker,
            queue,
            connection_name: name.to_owned(),
            payload_form: PayloadForm::Whole,
            max_attempts: NonZeroU32::new(AMQP_ATTEMPTS_MAX),
            on_attempts_exhausted: OnAttemptsExhausted::default(),
            poison_queue: None,
            consumer_timeout: Some(consumer_timeout::DEFAULT_TIMEOUT),
            management: None,
            max_run_time: None,
            message_bytes_max: AMQP_MESSAGE_BYTES_MAX,
            poll_wait: AMQP_LONG_POLL_WAIT,
            reply_retry_max: AMQP_REPLY_RETRY_MAX,
            on_retry: OnRetry::Republish,
            deferral: None,
        }
    }
}

/// What happens to a request whose handler asks for another attempt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OnRetry {
    /// A copy that counts the attempts goes to the end of the queue.
    Republish,
    /// The broker dead-letters it into queues from which it comes back, as often as the handler asks for it.
    DeadLetter,
}

/// What happens to a request after its last attempt.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(debug_assertions, derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum OnAttemptsExhausted {
    /// Its client gets an error reply.
    #[default]
    Reply,
    /// The broker dead-letters it, or drops it without a dead letter exchange.
    DeadLetter,
}

/// Requests of an AMQP queue.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(debug_assertions, derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct RequestSource {
    /// Queue to consume [built-in: `POOL-req-KEY`, or `WORKER_REQUESTS_QUEUE`]. The worker never declares it and waits until it exists.
    pub requests_queue: Option<String>,
    /// Maximum attempts of a request whose worker exits or whose handler asks for a retry; 0 is no limit.
    #[serde(default = "max_attempts")]
    pub max_attempts: u32,
    /// What happens to a request after its last attempt: the client gets an error reply, or the broker dead-letters the request.
    #[serde(default)]
    pub on_attempts_exhausted: OnAttemptsExhausted,
    /// Queue for copies of such requests with the reason; their clients get an error reply as well.
    pub poison_queue: Option<String>,
    /// Hold no request while staged work runs elsewhere: delayed messages have it looked at. The worker declares exchanges and queues for them, whose names begin with that of the queue and `.delay.`.
    #[serde(default)]
    pub deferred: bool,
    /// Name of the handler that runs the requests.
    #[serde(default = "command_name")]
    pub handler: String,
}

impl RequestSource {
    /// A source for this handler with the built-in values.
    pub fn new(handler: &str) -> Self {
        Self {
            requests_queue: None,
            max_attempts: max_attempts(),
            on_attempts_exhausted: OnAttemptsExhausted::default(),
            poison_queue: None,
            deferred: false,
            handler: handler.to_owned(),
        }
    }

    /// The queue whose requests are claimed.
    pub fn queue(&self, amqp: &Amqp) -> String {
        let named = self.requests_queue.as_ref().or(amqp.assignment.requests_queue.as_ref());
        let key = amqp.worker_key.as_deref().unwrap_or_default();
        named.cloned().unwrap_or_else(|| format!("{}-req-{key}", amqp.pool))
    }

    pub fn check(&self, key: &str, amqp: &Amqp, rules: &mut Rules<'_>) {
        let is_assigned = amqp.assignment.requests_queue.is_some() || amqp.worker_key.is_some();
        if self.requests_queue.is_none() && !is_assigned {
            let help = "set `requests_queue`, or `amqp.worker_key` (WORKER_KEY), which names the queue";
            rules.error(key, "", format!("[{key}] has no queue"), help);
        }
        let queue_key = if self.requests_queue.is_some() { (key, "requests_queue") } else { ("amqp", "worker_key") };
        let names = [
            (("amqp", "worker_key"), "key", amqp.worker_key.clone()),
            (queue_key, "request queue", Some(self.queue(amqp))),
            ((key, "poison_queue"), "poison queue", self.poison_queue.clone()),
            (("amqp", "pool"), "activity exchange", amqp.activity_exchange()),
        ];
        let is_long = |name: &Option<String>| name.as_ref().is_some_and(|name| name.len() > AMQP_NAME_BYTES_MAX);
        if let Some(((section, key), what, Some(name))) = names.into_iter().find(|(_, _, name)| is_long(name)) {
            let message = format!("the name of the {what} has {} bytes; AMQP allows {AMQP_NAME_BYTES_MAX}", name.len());
            rules.error(section, key, message, "");
        }
    }
}

const fn max_attempts() -> u32 {
    AMQP_ATTEMPTS_MAX
}
