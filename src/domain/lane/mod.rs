//! Ordered delivery of messages to endpoints.
//!
//! A lane holds the messages of one ordering key for one endpoint. Its head is delivered until its outcome is final, and only
//! then the next message becomes the head: the lane waits, never a message. [`retry`] decides what an attempt means for the head,
//! [`endpoint`] what it means for the endpoint, [`breaker`] what for the origin of its URL, [`dispatcher`] which lane is next,
//! [`partitions`] which lanes a node has, and [`wall_clock`] whether the time of a wait still holds.

pub mod breaker;
pub mod dispatcher;
pub mod endpoint;
pub mod partitions;
pub mod retry;
pub mod wall_clock;

use core::time::Duration;

use crate::named_enum;

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

named_enum! {
    /// Why an attempt has no answer.
    #[derive(PartialOrd, Ord, Hash)]
    pub enum ErrorClass {
        Dns = "dns",
        Connect = "connect",
        Tls = "tls",
        Timeout = "timeout",
        /// The address is one that the notifier may not connect to.
        Policy = "policy",
        /// The answer is no HTTP.
        Protocol = "protocol",
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
