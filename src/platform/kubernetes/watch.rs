//! Says when pods have changed. A change may be missed while the watch is interrupted, so callers look at the pods now and then
//! all the same.

use std::collections::HashMap;
use std::sync::Arc;

use reqwest::Response;
use serde::Deserialize;
use tokio::sync::Notify;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout};

use super::object::{PODS, PartialObject};
use super::{KubernetesClient, KubernetesError};
use crate::retry::Retry;
use crate::tasks::supervised;
use journeyman_domain::backoff::Policy;
use journeyman_domain::limits::{
    KUBERNETES_WATCH_LINE_BYTES_MAX, KUBERNETES_WATCH_RETRY, KUBERNETES_WATCH_SILENCE_MAX,
};

/// The server ends a watch after this time.
const WATCH_SECONDS: &str = "290";

pub enum PodChange {
    /// The pod of this name.
    One(String),
    /// Changes before this list may have been missed: the versions of the pods by their names.
    Listed(HashMap<String, String>),
    /// The watch was interrupted.
    Interrupted,
}

pub struct PodWatch {
    changed: Arc<Notify>,
    /// Aborted on drop.
    _task: JoinSet<()>,
}

impl PodWatch {
    /// Watches the pods of a label selector until it is dropped.
    pub fn start(client: Arc<KubernetesClient>, selector: String) -> Self {
        let changed = Arc::new(Notify::new());
        let (mut task, notify) = (JoinSet::new(), Arc::clone(&changed));
        let watching = watch_pods(client, selector, move |_| notify.notify_one());
        task.spawn(supervised("a watch of pods", watching));
        Self { changed, _task: task }
    }

    /// Cancel safe.
    pub async fn changed(&self) {
        self.changed.notified().await;
    }
}

/// Watches the pods of a label selector until it is dropped.
pub async fn watch_pods(client: Arc<KubernetesClient>, selector: String, on_change: impl Fn(PodChange) + Sync) {
    let mut retry = Retry::new(Policy { first: KUBERNETES_WATCH_RETRY, max: KUBERNETES_WATCH_RETRY });
    loop {
        if let Err(error) = list_and_watch(&client, &selector, &on_change).await {
            tracing::debug!("a watch is interrupted: {error}");
        }
        on_change(PodChange::Interrupted);
        sleep(retry.next_wait(None)).await;
    }
}

async fn list_and_watch(
    client: &KubernetesClient,
    selector: &str,
    on_change: &(dyn Fn(PodChange) + Sync),
) -> Result<(), KubernetesError> {
    let subject = ("the pods of", selector);
    let list = client.list_metadata(&PODS, subject, &[("labelSelector", selector)]).await?;
    let versions = list
        .items
        .into_iter()
        .flatten()
        .map(|PartialObject { metadata }| (metadata.name, metadata.resource_version.unwrap_or_default()));
    on_change(PodChange::Listed(versions.collect()));
    let mut version = list.metadata.resource_version.unwrap_or_default();
    loop {
        let query = [
            ("labelSelector", selector),
            ("resourceVersion", version.as_str()),
            ("watch", "true"),
            ("allowWatchBookmarks", "true"),
            ("timeoutSeconds", WATCH_SECONDS),
        ];
        let started = Instant::now();
        let opening = timeout(KUBERNETES_WATCH_SILENCE_MAX, client.watch_metadata(&PODS, subject, &query));
        let Ok(opened) = opening.await else { return Ok(()) };
        match follow(opened?, version, on_change).await {
            // The server has ended it in order. One that always does so at once is not asked without end.
            Some(seen) if started.elapsed() >= KUBERNETES_WATCH_RETRY => version = seen,
            Some(_) | None => return Ok(()),
        }
    }
}

/// Reads changes. Returns the version to go on from, or `None` if there may be a gap after it.
async fn follow(mut response: Response, mut version: String, on_change: &(dyn Fn(PodChange) + Sync)) -> Option<String> {
    let mut unread = Vec::new();
    loop {
        // The server ends a watch, and sends bookmarks, long before: one that says nothing is dead.
        let Ok(Ok(piece)) = timeout(KUBERNETES_WATCH_SILENCE_MAX, response.chunk()).await else { return None };
        let Some(piece) = piece else { return Some(version).filter(|_| unread.is_empty()) };
        unread.extend_from_slice(&piece);
        while let Some(end) = unread.iter().position(|byte| *byte == b'\n') {
            let line: Vec<u8> = unread.drain(..=end).collect();
            let WatchEvent { kind, object: PartialObject { metadata } } = serde_json::from_slice(&line).ok()?;
            match kind.as_str() {
                "ADDED" | "MODIFIED" | "DELETED" => on_change(PodChange::One(metadata.name)),
                "BOOKMARK" => {}
                // Such as 410: the version is too old.
                _ => return None,
            }
            version = metadata.resource_version?;
        }
        if unread.len() > KUBERNETES_WATCH_LINE_BYTES_MAX {
            return None;
        }
    }
}

#[derive(Deserialize)]
struct WatchEvent {
    #[serde(rename = "type")]
    kind: String,
    #[serde(default)]
    object: PartialObject,
}

#[cfg(test)]
mod tests {
    use parking_lot::Mutex;
    use serde_json::json;

    use super::*;

    /// The version to go on from, and the pods that have changed.
    async fn followed(events: &[serde_json::Value], rest: &str) -> (Option<String>, Vec<String>) {
        let body: String = events.iter().map(|event| format!("{event}\n")).collect();
        let response = hyper::Response::new(body + rest);
        let changed = Mutex::<Vec<String>>::default();
        let on_change = |change| match change {
            PodChange::One(name) => changed.lock().push(name),
            PodChange::Listed(_) | PodChange::Interrupted => panic!("no list, and no end of the watch"),
        };
        let version = follow(response.into(), "1".to_owned(), &on_change).await;
        (version, changed.into_inner())
    }

    #[tokio::test]
    async fn a_watch_goes_on_after_its_last_version_unless_changes_may_be_missing() {
        let object = |name: &str, version: &str| json!({ "metadata": { "name": name, "resourceVersion": version } });
        let added = json!({ "type": "ADDED", "object": object("a", "2") });
        let deleted = json!({ "type": "DELETED", "object": object("b", "3") });
        let bookmark = json!({ "type": "BOOKMARK", "object": object("", "9") });
        let expired = json!({ "type": "ERROR", "object": { "kind": "Status", "code": 410, "reason": "Expired" } });
        let names = |names: &[&str]| names.iter().map(ToString::to_string).collect::<Vec<_>>();
        let version = |version: &str| Some(version.to_owned());
        assert_eq!(followed(&[], "").await, (version("1"), names(&[])));
        assert_eq!(followed(&[added.clone(), deleted], "").await, (version("3"), names(&["a", "b"])));
        assert_eq!(followed(&[added.clone(), bookmark], "").await, (version("9"), names(&["a"])));
        assert_eq!(followed(&[added.clone(), expired], "").await, (None, names(&["a"])));
        assert_eq!(followed(std::slice::from_ref(&added), "{\"type\"").await, (None, names(&["a"])));
        assert_eq!(followed(&[added], "{}\n").await, (None, names(&["a"])));
    }
}
