//! The section of a source in a ZooKeeper.

use serde::{Deserialize, Serialize};

use super::{Dialect, ZooKeeperQueue};
use crate::task::command_name;
use journeyman_platform::settings::rules::Rules;
use journeyman_platform::settings::values::{File, Span};
use journeyman_platform::zookeeper::{ConnectConfig, TlsFiles};

/// Requests or tasks that are nodes of a ZooKeeper.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(debug_assertions, derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct ZooKeeperSource {
    /// Whose layout the queue has: the merge jobs or the builds of a Zuul, or one node a task.
    pub dialect: Dialect,
    /// The servers: hosts with ports, separated by commas.
    pub connect: String,
    /// Node below which all paths lie [built-in: none]. It is created if it does not exist.
    pub chroot: Option<String>,
    /// Path of the queue [built-in: that of a Zuul; `/journeyman` with `dialect = "native"`].
    pub queue: Option<String>,
    /// Zones whose builds are claimed, for `dialect = "zuul-executor"`.
    #[serde(default)]
    pub zones: Vec<String>,
    /// Also claim builds without a zone [built-in: true without `zones`].
    pub allow_unzoned: Option<bool>,
    /// File with the CA certificates (PEM) that verify the servers, whose certificates need subject alternative names. With it the connection uses TLS.
    pub ca_file: Option<File>,
    /// File with the client certificate chain (PEM).
    pub certificate_file: Option<File>,
    /// File with the private key of the client certificate (PEM).
    pub key_file: Option<File>,
    /// How long claims survive a lost connection. The server may shorten or extend it.
    #[serde(default = "session_timeout")]
    pub session_timeout: Span,
    /// Also end requests whose worker is gone and remove leftovers, as `journeyman zk janitor` does. One worker at a time does it.
    #[serde(default)]
    pub janitor: bool,
    /// Name of the handler that runs the requests.
    #[serde(default = "command_name")]
    pub handler: String,
}

impl ZooKeeperSource {
    /// How its servers are reached.
    pub(crate) fn connect_config(&self) -> ConnectConfig {
        let files = self.ca_file.as_ref().zip(self.certificate_file.as_ref()).zip(self.key_file.as_ref());
        ConnectConfig {
            servers: self.connect.clone(),
            chroot: self.chroot.clone(),
            tls: files.map(|((ca, certificate), key)| TlsFiles {
                ca: ca.0.clone(),
                certificate: certificate.0.clone(),
                key: key.0.clone(),
            }),
            session_timeout: self.session_timeout.0,
        }
    }

    /// The queues that it claims from.
    pub(crate) fn queues(&self) -> Vec<ZooKeeperQueue> {
        let unzoned = self.allow_unzoned.unwrap_or(self.zones.is_empty());
        let zones = self.zones.iter().cloned().map(Some).chain(unzoned.then_some(None));
        let path = |zone: Option<&str>| self.queue.clone().unwrap_or_else(|| self.dialect.usual_queue(zone));
        zones.map(|zone| ZooKeeperQueue { path: path(zone.as_deref()), zone }).collect()
    }

    pub(crate) fn check(&self, key: &str, rules: &mut Rules<'_>) {
        let has_zones = !self.zones.is_empty();
        if has_zones && (self.queue.is_some() || self.dialect != Dialect::ZuulExecutor) {
            let message = format!("[{key}] has `zones`, and a `queue` or another dialect than `zuul-executor`");
            rules.error(key, "zones", message, "zones choose among the queues of a Zuul's builds");
        }
        if let Some(zone) = self.zones.iter().find(|zone| zone.is_empty() || zone.contains('/')) {
            rules.error(key, "zones", format!("\"{zone}\" is no zone"), "it is the name of a node");
        }
        if self.allow_unzoned == Some(false) && !has_zones {
            rules.error(key, "allow_unzoned", format!("[{key}] would claim nothing"), "name the `zones` to claim for");
        }
        let paths = [("queue", &self.queue), ("chroot", &self.chroot)];
        for (name, path) in paths.into_iter().filter_map(|(name, path)| Some((name, path.as_ref()?))) {
            let parts = || path.split('/').skip(1);
            if !path.starts_with('/') || parts().any(|part| part.is_empty() || part == "." || part == "..") {
                rules.error(
                    key,
                    name,
                    format!("\"{path}\" is no path of a node"),
                    "it begins with a slash and does not end with one",
                );
            }
        }
        let files = [&self.ca_file, &self.certificate_file, &self.key_file];
        if files.iter().any(|file| file.is_some()) && files.iter().any(|file| file.is_none()) {
            let message = format!("[{key}] has only some of `ca_file`, `certificate_file` and `key_file`");
            rules.error(key, "ca_file", message, "TLS with ZooKeeper needs all three");
        }
    }
}

const fn session_timeout() -> Span {
    Span(std::time::Duration::from_secs(40))
}
