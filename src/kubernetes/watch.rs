//! Says when pods have changed. A change may be missed while the watch is interrupted, so callers list the pods now and
//! then all the same.

use std::pin::pin;
use std::sync::Arc;

use futures_util::TryStreamExt as _;
use k8s_openapi::api::core::v1::Pod;
use kube::core::PartialObjectMeta;
use kube::runtime::watcher::{Config, watcher};
use tokio::sync::Notify;
use tokio::task::JoinSet;
use tokio::time::sleep;

use super::KubernetesClient;
use crate::limits::KUBERNETES_WATCH_RETRY;

pub(crate) struct PodWatch {
    changed: Arc<Notify>,
    /// Aborted on drop.
    _task: JoinSet<()>,
}

impl PodWatch {
    /// Watches the pods of a label selector until it is dropped.
    pub(crate) fn start(client: Arc<KubernetesClient>, selector: String) -> Self {
        let changed = Arc::new(Notify::new());
        let mut task = JoinSet::new();
        task.spawn(watch(client, selector, Arc::clone(&changed)));
        Self { changed, _task: task }
    }

    /// Cancel safe.
    pub(crate) async fn changed(&self) {
        self.changed.notified().await;
    }
}

async fn watch(client: Arc<KubernetesClient>, selector: String, changed: Arc<Notify>) {
    loop {
        if let Ok(pods) = client.api::<PartialObjectMeta<Pod>>().await {
            let mut events = pin!(watcher(pods, Config::default().labels(&selector)));
            // Changes during a list cause one more.
            while let Ok(Some(_)) = events.try_next().await {
                changed.notify_one();
            }
        }
        // An interruption may hide changes, and a list shows why it happened.
        changed.notify_one();
        sleep(KUBERNETES_WATCH_RETRY).await;
    }
}
