//! The section of a pool of worker groups.

use std::collections::BTreeMap;
use std::time::Duration;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize, Serializer};

use super::values::{File, MASK, Span};
use crate::limits::MESSAGE_TTL_MIN;

/// A pool of worker groups.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Pool {
    /// What exchanges and queues are called.
    pub names: Names,
    /// How requests are kept.
    pub profile: Profile,
    /// How long after the last sign of demand the queue of a group is unbound. A request that comes later goes to the orphans, and makes the group active again.
    pub unbind_delay: Span,
    /// How long after that its workers are stopped and its queue is deleted.
    pub stop_delay: Span,
    /// How long a request may wait for a worker; `0s` is for ever. Then it is answered with an error.
    #[schemars(extend("x-least" = Span(MESSAGE_TTL_MIN), "x-zero" = "for ever"))]
    pub message_ttl: Span,
    /// How many requests may wait in one queue [built-in: any number].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_length: Option<u32>,
    /// How often a request is handed out again whose worker ended. For `profile = "safe"` only; what exceeds it is answered with an error, and put aside as poison [built-in: as the broker has it].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub delivery_limit: Option<u32>,
    /// A worker's program and its arguments; empty where somebody else starts the workers. Each finds `WORKER_ID`, `WORKER_KEY`, `WORKER_POOL`, `WORKER_REQUESTS_QUEUE`, `WORKER_ACTIVITY_EXCHANGE` and `WORKER_AMQP_URI` in its environment.
    pub command: Vec<String>,
    /// What workers find in their environment besides, by name.
    pub env: BTreeMap<String, Variable>,
    /// Folder for the logs of workers, and for what they are found again by: each pool has one of its own in it, of its name.
    pub folder: File,
    /// How long a worker that was told to end has before it is killed.
    pub stop_grace: Span,
    /// How many workers a group has at least, while it is there.
    pub min: u32,
    /// How many workers a group has at most.
    #[schemars(range(min = 1))]
    pub max: u32,
    /// How many workers more than the load needs.
    pub spares: u32,
    /// How many requests a worker holds at once.
    #[schemars(range(min = 1))]
    pub concurrency: u32,
    /// How long fewer workers have to be enough before fewer are kept.
    pub down_after: Span,
    /// How many workers of a group may be starting at once.
    #[schemars(range(min = 1))]
    pub starting_max: u32,
    /// How many workers all groups of the pool have together [built-in: any number].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub budget: Option<u32>,
    /// Where there are more groups than workers: how long one keeps its worker before it is another one's turn.
    pub turn: Span,
    /// The `x-status` of answers that the controller gives in a worker's place. One known client ends at any that it does not know, so that this is `core_error` unless told otherwise; the reason is in the header `x-dead-letter-reason` and in the body.
    pub dead_letter_status: String,
}

impl Default for Pool {
    fn default() -> Self {
        Self {
            names: Names::default(),
            profile: Profile::default(),
            unbind_delay: minutes(10),
            stop_delay: minutes(10),
            message_ttl: minutes(0),
            max_length: None,
            delivery_limit: None,
            command: Vec::new(),
            env: BTreeMap::new(),
            folder: File("/var/lib/journeyman/pool".into()),
            stop_grace: minutes(60),
            min: 1,
            max: 1,
            spares: 0,
            concurrency: 1,
            down_after: minutes(5),
            starting_max: 4,
            budget: None,
            turn: minutes(1),
            dead_letter_status: "core_error".to_owned(),
        }
    }
}

/// What a worker finds in its environment under this name. It is shown nowhere.
#[derive(Clone, Deserialize, JsonSchema)]
#[serde(transparent)]
pub struct Variable(pub String);

// It may be a secret whatever it is called: an address with a password in it, say.
impl std::fmt::Debug for Variable {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.write_str(MASK)
    }
}

impl Serialize for Variable {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_str(MASK)
    }
}

const fn minutes(count: u64) -> Span {
    Span(Duration::from_secs(count * 60))
}

/// Whose names the exchanges and queues of a pool have.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Names {
    /// Those of the known implementation, with every byte of a key that is no ASCII letter or digit as `%XX`.
    #[default]
    Implementation,
    /// Those of the protocol's document, with keys as they are.
    Document,
}

/// How requests are kept.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Profile {
    /// In memory, as existing workers know it. A restart of the broker loses what waits.
    #[default]
    Fast,
    /// On disk, in quorum queues.
    Safe,
}
