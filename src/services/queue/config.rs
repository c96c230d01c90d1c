//! What the embedded queue runs on, and its section of the configuration.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use secrecy::SecretString;
use serde::{Deserialize, Serialize};

use super::clock::QueueClock;
use journeyman_domain::limits::{
    CLAIM_TIMEOUT_MIN_MS, QUEUE_ARTIFACT_BYTES_MAX, QUEUE_CLAIM_DELAY, QUEUE_CLAIM_TIMEOUT, QUEUE_LONG_POLL_WAIT,
    QUEUE_VISIBILITY_TIMEOUT,
};
use journeyman_platform::settings::values::{File, Listen, SecretFile, Span, Url, built_in};
use journeyman_platform::sqlite::Db;

/// Start from [`Config::new`] and change what differs.
#[derive(Debug, Clone)]
pub struct Config {
    pub db: Db,
    /// Directory of artifact content; created if missing.
    pub artifacts: PathBuf,
    /// Port 0 picks a free port.
    pub listen: SocketAddr,
    pub auth: Auth,
    pub clients: Vec<RegisteredClient>,
    /// Origins of web pages that may call the queue, such as `https://tc.example.com`.
    pub allowed_origins: Vec<String>,
    pub claim_timeout: Duration,
    /// Types of the events of resolved tasks that are kept for a notifier. A `*` at the end stands for the rest.
    pub outbox_events: Vec<String>,
    /// Delay after `takenUntil` before a claim is resolved as `claim-expired`. A late reclaim is accepted until
    /// then.
    pub claim_delay: Duration,
    /// How long `claimWork` waits for a pending task; capped at a tenth of `claim_timeout`.
    pub long_poll: Duration,
    /// How long a received message stays hidden.
    pub visibility_timeout: Duration,
    pub artifact_bytes_max: u64,
    pub clock: QueueClock,
}

impl Config {
    /// A queue on a free loopback port with authentication on and no clients.
    pub fn new(db: Db, artifacts: PathBuf) -> Self {
        Self {
            db,
            artifacts,
            listen: SocketAddr::from(([127, 0, 0, 1], 0)),
            auth: Auth::Checked,
            clients: Vec::new(),
            allowed_origins: Vec::new(),
            claim_timeout: QUEUE_CLAIM_TIMEOUT,
            outbox_events: Vec::new(),
            claim_delay: QUEUE_CLAIM_DELAY,
            long_poll: QUEUE_LONG_POLL_WAIT,
            visibility_timeout: QUEUE_VISIBILITY_TIMEOUT,
            artifact_bytes_max: QUEUE_ARTIFACT_BYTES_MAX,
            clock: QueueClock::wall(),
        }
    }
}

/// Whether callers of the embedded queue have to sign their calls.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(debug_assertions, derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum Auth {
    /// A client signs every call.
    Checked,
    /// Every caller has all scopes. For loopback addresses and trusted users only.
    Open,
    /// Every caller that can reach the address has all scopes.
    OpenToNetwork,
}

#[derive(Debug, Clone)]
pub struct RegisteredClient {
    /// Such as `worker` or `project/ci/fleet`.
    pub client_id: String,
    pub access_token: SecretString,
    /// A scope that ends in `*` covers all scopes with that prefix.
    pub scopes: Vec<String>,
}

/// The embedded queue.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(debug_assertions, derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields, default)]
pub struct Queue {
    /// Database file. The content of artifacts is in the directory of the same name with `-artifacts` appended.
    pub db: File,
    /// Address to listen on. With port 0 the system chooses a port.
    pub listen: Listen,
    /// Length of a claim's lease.
    pub claim_timeout: Span<CLAIM_TIMEOUT_MIN_MS>,
    /// Whether callers have to sign their calls.
    pub auth: Auth,
    /// Origins of web pages that may call the queue, such as `https://tc.example.com`.
    pub allowed_origins: Vec<Url>,
    /// Clients that may call the queue, by client id.
    pub clients: BTreeMap<String, Client>,
}

impl Default for Queue {
    fn default() -> Self {
        Self {
            db: built_in("/var/lib/journeyman/queue.db"),
            listen: built_in("127.0.0.1:7070"),
            claim_timeout: built_in("20m"),
            auth: Auth::Checked,
            allowed_origins: Vec::new(),
            clients: BTreeMap::new(),
        }
    }
}

/// A client of the embedded queue.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(debug_assertions, derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct Client {
    /// File with the client's access token, readable by its owner only.
    pub access_token_file: SecretFile,
    /// Scopes of the client. A trailing `*` matches any suffix.
    #[serde(default = "every_scope")]
    pub scopes: Vec<String>,
}

fn every_scope() -> Vec<String> {
    vec!["*".to_owned()]
}
