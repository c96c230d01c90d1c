//! Says when pods have changed. A change may be missed while the watch is interrupted, so callers look at the pods now and then
//! all the same.

use std::collections::HashMap;
use std::pin::pin;
use std::sync::Arc;

use futures_util::TryStreamExt as _;
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt as _;
use kube::core::PartialObjectMeta;
use kube::runtime::watcher::{Config, Event, watcher};
use tokio::sync::Notify;
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};

use super::KubernetesClient;
use journeyman_domain::limits::{KUBERNETES_WATCH_RETRY, KUBERNETES_WATCH_SILENCE_MAX};

pub(crate) enum PodChange {
    /// The pod of this name.
    One(String),
    /// Changes before this list may have been missed: the versions of the pods by their names.
    Listed(HashMap<String, String>),
    /// The watch was interrupted.
    Interrupted,
}

pub(crate) struct PodWatch {
    changed: Arc<Notify>,
    /// Aborted on drop.
    _task: JoinSet<()>,
}

impl PodWatch {
    /// Watches the pods of a label selector until it is dropped.
    pub(crate) fn start(client: Arc<KubernetesClient>, selector: String) -> Self {
        let changed = Arc::new(Notify::new());
        let (mut task, notify) = (JoinSet::new(), Arc::clone(&changed));
        task.spawn(watch_pods(client, selector, move |_| notify.notify_one()));
        Self { changed, _task: task }
    }

    /// Cancel safe.
    pub(crate) async fn changed(&self) {
        self.changed.notified().await;
    }
}

/// Watches the pods of a label selector until it is dropped.
pub(crate) async fn watch_pods(client: Arc<KubernetesClient>, selector: String, on_change: impl Fn(PodChange)) {
    loop {
        if let Ok(pods) = client.api::<PartialObjectMeta<Pod>>().await {
            let mut events = pin!(watcher(pods, Config::default().labels(&selector)));
            let mut listed = HashMap::new();
            // The server ends a watch, and sends bookmarks, long before: one that says nothing is dead.
            while let Ok(Ok(Some(event))) = timeout(KUBERNETES_WATCH_SILENCE_MAX, events.try_next()).await {
                match event {
                    Event::Apply(pod) | Event::Delete(pod) => on_change(PodChange::One(pod.name_any())),
                    Event::Init => listed.clear(),
                    Event::InitApply(pod) => {
                        listed.insert(pod.name_any(), pod.resource_version().unwrap_or_default());
                    }
                    Event::InitDone => on_change(PodChange::Listed(std::mem::take(&mut listed))),
                }
            }
        }
        on_change(PodChange::Interrupted);
        sleep(KUBERNETES_WATCH_RETRY).await;
    }
}
