//! Builds ZooKeeper sources, and demands by them, from the configuration.

use std::sync::Arc;

use super::exit::Failure;
use super::worker_identity::WorkerIdentity;
use journeyman_services::controller::DemandQueue;
use journeyman_worker::engine::SourceBinding;
use journeyman_worker::handler::DynHandler;
use journeyman_worker::source::zookeeper::config::ZooKeeperSource;

pub(super) fn source_binding(
    source_name: &str,
    config: &ZooKeeperSource,
    worker: &WorkerIdentity,
    handler: Arc<dyn DynHandler>,
) -> Result<SourceBinding, Failure> {
    use journeyman_worker::source::zookeeper as zk;
    let settings = zk::ZooKeeperSourceConfig {
        connect: config.connect_config(),
        dialect: config.dialect,
        queues: config.queues(),
        janitor: config.janitor,
        worker_id: worker.id.clone(),
    };
    let source = Arc::new(zk::ZooKeeperSource::new(settings));
    Ok(SourceBinding { name: source_name.to_owned(), source, handler, env: Arc::default() })
}

pub(super) fn demand_queue(_source_name: &str, config: &ZooKeeperSource) -> Result<DemandQueue, Failure> {
    let queues = config
        .queues()
        .iter()
        .map(|queue| journeyman_platform::zookeeper::job_queue::JobQueue::new(&queue.path))
        .collect();
    Ok(DemandQueue::Zookeeper { connect: config.connect_config(), queues, dialect: config.dialect })
}
