//! Ordered delivery of messages to endpoints.
//!
//! A lane holds the messages of one ordering key for one endpoint. Its head is delivered until its outcome is final, and only
//! then the next message becomes the head: the lane waits, never a message. [`retry`] decides what an attempt means for the head,
//! [`endpoint`] what it means for the endpoint, [`breaker`] what for the origin of its URL, [`dispatcher`] which lane is next, and
//! [`partitions`] which lanes a node has.

pub mod breaker;
pub mod dispatcher;
pub mod endpoint;
pub mod partitions;
pub mod retry;

use core::time::Duration;

use serde::{Deserialize, Serialize};

/// What came back from one attempt.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Reply {
    Answered {
        status: u16,
        retry_after: Option<Duration>,
        control: Option<Control>,
    },
    /// There was no whole answer.
    Failed(ErrorClass),
}

/// What a receiver asks for with the header `webhook-delivery`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Control {
    DisableEndpoint,
    AbortMessage,
}

/// Why an attempt has no answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ErrorClass {
    Dns,
    Connect,
    Tls,
    Timeout,
    /// The address is one that the notifier may not connect to.
    Policy,
    /// The answer is no HTTP.
    Protocol,
}

impl ErrorClass {
    pub const fn name(self) -> &'static str {
        match self {
            Self::Dns => "dns",
            Self::Connect => "connect",
            Self::Tls => "tls",
            Self::Timeout => "timeout",
            Self::Policy => "policy",
            Self::Protocol => "protocol",
        }
    }
}

impl Reply {
    pub const fn is_success(self) -> bool {
        matches!(self, Self::Answered { status: 200..=299, .. })
    }

    /// The rest that the endpoint asks for, if it does.
    pub fn throttles(self) -> Option<Duration> {
        match self {
            Self::Answered { status: 429 | 502 | 503 | 504, retry_after, .. } => Some(retry_after.unwrap_or_default()),
            Self::Answered { .. } | Self::Failed(_) => None,
        }
    }

    /// Whether it tells that the origin of the URL does not work, whatever the message.
    pub const fn is_of_origin(self) -> bool {
        match self {
            Self::Failed(ErrorClass::Policy | ErrorClass::Protocol) => false,
            Self::Failed(ErrorClass::Dns | ErrorClass::Connect | ErrorClass::Tls | ErrorClass::Timeout) => true,
            Self::Answered { status, .. } => matches!(status, 502..=504),
        }
    }
}
