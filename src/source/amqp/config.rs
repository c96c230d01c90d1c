//! What a source of requests is told, and what is said of it at the start.

use std::num::NonZeroU32;
use std::time::Duration;

use crate::amqp::Broker;
use crate::amqp::management::Management;
use crate::domain::consumer_timeout;
use crate::limits::{AMQP_ANSWER_RETRY_MAX, AMQP_ATTEMPTS_MAX, AMQP_MESSAGE_BYTES_MAX};

use super::delivery::PayloadForm;

/// What a request source is made of.
#[derive(Debug, Clone)]
pub struct AmqpSourceConfig {
    /// Where the queue is.
    pub broker: Broker,
    /// The queue. It is consumed from, and never declared.
    pub queue: String,
    /// What the broker shows this worker as.
    pub connection_name: String,
    /// What handlers are given of a request.
    pub payload_form: PayloadForm,
    /// How often a request is tried; `None` is without end.
    pub max_attempts: Option<NonZeroU32>,
    /// What becomes of a request that was tried so often.
    pub on_attempts_exhausted: OnAttemptsExhausted,
    /// How long the broker lets a delivery be unacknowledged, where it does not tell itself; `None` is without end.
    pub consumer_timeout: Option<Duration>,
    /// Where the broker may tell; `None` where it is not asked.
    pub management: Option<Management>,
    /// How long a handler lets a request run; for a warning.
    pub max_run_time: MaxRunTime,
    /// The largest message that is taken or sent, in bytes.
    pub message_bytes_max: u64,
    /// How long an answer is sent again that its queue refuses; then its request is acknowledged without one.
    pub reply_retry_max: Duration,
}

impl AmqpSourceConfig {
    /// A queue of this broker, with built-in rules.
    #[must_use]
    pub fn new(broker: Broker, queue: &str, name: &str) -> Self {
        Self {
            broker,
            queue: queue.to_owned(),
            connection_name: name.to_owned(),
            payload_form: PayloadForm::Whole,
            max_attempts: NonZeroU32::new(AMQP_ATTEMPTS_MAX),
            on_attempts_exhausted: OnAttemptsExhausted::Reply,
            consumer_timeout: Some(consumer_timeout::DEFAULT_TIMEOUT),
            management: None,
            max_run_time: MaxRunTime::Unknown,
            message_bytes_max: AMQP_MESSAGE_BYTES_MAX,
            reply_retry_max: AMQP_ANSWER_RETRY_MAX,
        }
    }
}

/// How long a handler lets a request run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MaxRunTime {
    /// Nobody knows.
    Unknown,
    /// So long, and neither that nor how long the broker waits was set by anybody: only the broker's own word is held against it.
    Default(Duration),
    /// So long.
    Configured(Duration),
}

/// Who says how long a broker waits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum TimeoutOrigin {
    Broker,
    Config,
}

/// What becomes of a request that was tried too often.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum OnAttemptsExhausted {
    /// Its author is told.
    Reply,
    /// It is dead-lettered, as the broker's policy says.
    DeadLetter,
    /// A copy is kept in this queue, and its author is told.
    PoisonQueue(String),
}

impl AmqpSourceConfig {
    /// Says so where requests may run longer than the broker waits.
    pub(super) fn warn_if_too_short(&self, patience: Option<Duration>, word: TimeoutOrigin) {
        let longest = match (self.max_run_time, word) {
            (MaxRunTime::Configured(longest), _) | (MaxRunTime::Default(longest), TimeoutOrigin::Broker) => longest,
            (MaxRunTime::Unknown, _) | (MaxRunTime::Default(_), TimeoutOrigin::Config) => return,
        };
        let Some(patience) = patience else { return };
        if patience < longest {
            tracing::warn!(
                queue = self.queue,
                "requests may run for {longest:?} and the broker takes them back after {patience:?}: raise its \
                 consumer_timeout and `amqp.consumer_timeout`, or lower `max_run_time` of the handler"
            );
        }
    }
}
