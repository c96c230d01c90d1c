//! Builds ZooKeeper sources, and demands by them, from the configuration.

use std::sync::Arc;

use super::exit::Failure;
use super::worker_setup::WorkerIdentity;
use crate::config::schema::ZooKeeperSource;
use crate::controller::DemandQueue;
use crate::handler::DynHandler;
use crate::worker::SourceBinding;

pub(super) fn source_binding(
    source_name: &str,
    config: &ZooKeeperSource,
    worker: &WorkerIdentity,
    handler: Arc<dyn DynHandler>,
) -> Result<SourceBinding, Failure> {
    use crate::source::zookeeper as zk;
    let settings = zk::ZooKeeperSourceConfig {
        connect: connect_config(config),
        dialect: config.dialect,
        queues: queues(config),
        janitor: config.janitor,
        worker_id: worker.id.clone(),
    };
    let source = Arc::new(zk::ZooKeeperSource::new(settings));
    Ok(SourceBinding { name: source_name.to_owned(), source, handler, env: Arc::default() })
}

pub(super) fn demand_queue(_source_name: &str, config: &ZooKeeperSource) -> Result<DemandQueue, Failure> {
    let queues = queues(config).iter().map(|queue| crate::zookeeper::job_queue::JobQueue::new(&queue.path)).collect();
    Ok(DemandQueue::Zookeeper { connect: connect_config(config), queues, dialect: config.dialect })
}

pub(super) fn connect_config(config: &ZooKeeperSource) -> crate::zookeeper::ConnectConfig {
    let files = config.ca_file.as_ref().zip(config.certificate_file.as_ref()).zip(config.key_file.as_ref());
    crate::zookeeper::ConnectConfig {
        servers: config.connect.clone(),
        chroot: config.chroot.clone(),
        tls: files.map(|((ca, certificate), key)| crate::zookeeper::TlsFiles {
            ca: ca.0.clone(),
            certificate: certificate.0.clone(),
            key: key.0.clone(),
        }),
        session_timeout: config.session_timeout.0,
    }
}

/// The queues that a source claims from.
pub(super) fn queues(config: &ZooKeeperSource) -> Vec<crate::source::zookeeper::ZooKeeperQueue> {
    let unzoned = config.allow_unzoned.unwrap_or(config.zones.is_empty());
    let zones = config.zones.iter().cloned().map(Some).chain(unzoned.then_some(None));
    let path = |zone: Option<&str>| config.queue.clone().unwrap_or_else(|| config.dialect.usual_queue(zone));
    zones.map(|zone| crate::source::zookeeper::ZooKeeperQueue { path: path(zone.as_deref()), zone }).collect()
}
