//! Removes pods that have ended, or have never got a node, and that no worker looks after any more.

use std::sync::Arc;
use std::time::Duration;

use jiff::SignedDuration;
use serde_json::json;
use tokio::time::interval;

use super::object::{PODS, Pod};
use super::work::ended_at;
use super::{KubernetesClient, KubernetesError};
use journeyman_domain::limits::POD_SWEEP_INTERVAL;

/// Removes the pods of a label selector that have ended so long ago, until it is dropped.
pub async fn sweep_ended(client: Arc<KubernetesClient>, selector: String, kept: Duration) {
    let mut turns = interval(POD_SWEEP_INTERVAL);
    loop {
        turns.tick().await;
        if let Err(error) = remove_ended(&client, &selector, kept).await {
            tracing::debug!("cannot remove pods that have ended: {error}");
        }
    }
}

async fn remove_ended(client: &KubernetesClient, selector: &str, kept: Duration) -> Result<(), KubernetesError> {
    let query = [("labelSelector", selector), ("fieldSelector", "status.phase!=Running")];
    let pods = client.list::<Pod>(&PODS, ("the pods of", selector), &query).await?;
    let ended_before = client.now() - SignedDuration::try_from(kept).unwrap_or_default();
    // The cluster ends a pod that is not wanted any more once it has a node.
    let has_ended = |pod: &&Pod| {
        let phase = pod.status.as_ref().and_then(|status| status.phase.as_deref());
        let has_node = pod.spec.as_ref().is_some_and(|spec| spec.node_name.is_some());
        (phase != Some("Pending") || !has_node) && ended_at(pod).is_some_and(|ended| ended < ended_before)
    };
    for pod in pods.items.iter().flatten().filter(has_ended) {
        client.delete(&PODS, &pod.metadata.name, &json!({})).await?;
    }
    Ok(())
}
