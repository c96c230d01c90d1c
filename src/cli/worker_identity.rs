//! The names of the worker in its queues.

use crate::config::schema::{Config, Source};
use journeyman_platform::settings::values::{WORKER_NAME_CHARS_MAX, WORKER_NAME_CHARS_MAX_AZURE, WorkerName};
use journeyman_worker::source::taskcluster::Dialect;

/// The worker's names in its queues.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct WorkerIdentity {
    pub group: String,
    /// Its id within the group.
    pub id: String,
}

impl WorkerIdentity {
    /// The name with the host's name and the process id filled in, within the limit of the narrowest protocol in use.
    pub(super) fn from_config(config: &Config) -> Self {
        let mut sources = config.source.values().filter_map(Source::as_taskcluster);
        let azure = sources.any(|source| source.dialect == Dialect::Azure);
        let chars_max = if azure { WORKER_NAME_CHARS_MAX_AZURE } else { WORKER_NAME_CHARS_MAX };
        let system = rustix::system::uname();
        let hostname = system.nodename().to_string_lossy();
        let fill = |name: &WorkerName| name.fill(&hostname, std::process::id(), chars_max);
        Self { group: fill(&config.worker.group), id: fill(&config.worker.id) }
    }
}
