//! The section of the embedded queue.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::Auth;
use journeyman_domain::limits::CLAIM_TIMEOUT_MIN_MS;
use journeyman_platform::settings::values::{File, Listen, SecretFile, Span, Url, built_in};

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
