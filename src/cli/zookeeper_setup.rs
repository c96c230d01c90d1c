//! Builds ZooKeeper sources, and demands by them, from the configuration.

use std::sync::Arc;

use super::worker_identity::WorkerIdentity;
use journeyman_platform::zookeeper::job_queue::JobQueue;
use journeyman_services::controller::DemandQueue;
use journeyman_worker::engine::SourceBinding;
use journeyman_worker::handler::DynHandler;
use journeyman_worker::source::zookeeper::config::ZooKeeperSource;

pub(super) fn source_binding(
    source_name: &str,
    config: &ZooKeeperSource,
    worker: &WorkerIdentity,
    handler: Arc<dyn DynHandler>,
) -> SourceBinding {
    use journeyman_worker::source::zookeeper as zk;
    let settings = zk::ZooKeeperSourceConfig {
        connect: config.connect_config(),
        dialect: config.dialect,
        queues: config.queues(),
        janitor: config.janitor,
        worker_id: worker.id.clone(),
    };
    let source = Arc::new(zk::ZooKeeperSource::new(settings));
    SourceBinding { name: source_name.to_owned(), source, handler, env: Arc::default() }
}

pub(super) fn demand_queue(config: &ZooKeeperSource) -> DemandQueue {
    let queues = config.queues().iter().map(|queue| JobQueue::new(&queue.path)).collect();
    DemandQueue::Zookeeper { connect: config.connect_config(), queues, dialect: config.dialect }
}
