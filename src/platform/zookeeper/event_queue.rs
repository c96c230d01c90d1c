//! Zuul's event queues: numbered nodes in `queue`, and the data of large events in shards below `data`.

use std::collections::BTreeSet;

use serde_json::{Map, Value};

use super::client::CreateMode;
use super::job_error::JobError;
use super::{Error, Session, is_leftover};
use journeyman_domain::limits::{ZOOKEEPER_EVENT_BYTES_MAX, ZOOKEEPER_EVENTS_QUEUED_MAX};

const TENANTS: &str = "/zuul/events/tenant";

/// A queue of events, such as the results of a pipeline.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EventQueue {
    root: String,
}

/// An event of a kind with its data.
pub fn event(kind: &str, data: Value) -> Map<String, Value> {
    [("event_type", kind.into()), ("event_data", data)]
        .map(|(key, value)| (key.to_owned(), value))
        .into_iter()
        .collect()
}

impl EventQueue {
    /// The queue below this path.
    pub fn new(root: &str) -> Self {
        Self { root: root.to_owned() }
    }

    /// The results of a pipeline.
    pub fn of_pipeline(tenant: &str, pipeline: &str) -> Self {
        Self::new(&format!("{TENANTS}/{tenant}/pipelines/{pipeline}/result"))
    }

    /// What the number of a new event is added to.
    pub fn event_prefix(&self) -> String {
        format!("{}/queue/q", self.root)
    }

    /// Writes the node of an event. Data that do not fit are stored beside it first.
    ///
    /// # Errors
    ///
    /// See [`JobError`].
    pub async fn to_node(&self, session: &Session, mut fields: Map<String, Value>) -> Result<Vec<u8>, JobError> {
        let node = Value::Object(fields.clone()).to_string();
        if node.len() <= ZOOKEEPER_EVENT_BYTES_MAX {
            return Ok(node.into_bytes());
        }
        let data = fields.remove("event_data").unwrap_or_default();
        let path = format!("{}/data/{}", self.root, uuid::Uuid::new_v4());
        session.write_shards(&path, data.to_string().as_bytes()).await?;
        fields.insert("event_data_path".to_owned(), path.into());
        Ok(Value::Object(fields).to_string().into_bytes())
    }

    /// Adds an event. `false` if the queue does not exist, so that it has no reader.
    ///
    /// # Errors
    ///
    /// See [`JobError`]. After a lost answer the event may be there; a reader ignores the second.
    pub async fn put(&self, session: &Session, kind: &str, data: Value) -> Result<bool, JobError> {
        let folder = format!("{}/queue", self.root);
        let Some(stat) = session.stat(&folder).await? else { return Ok(false) };
        if usize::try_from(stat.num_children).unwrap_or(0) > ZOOKEEPER_EVENTS_QUEUED_MAX {
            let message = format!("it holds {} unread events; Zuul drops more", stat.num_children);
            return Err(JobError::Unreadable { path: folder, message });
        }
        let node = self.to_node(session, event(kind, data)).await?;
        match session.create(&self.event_prefix(), &node, CreateMode::PersistentSequential).await {
            Err(error) if error.is_no_node() => Ok(false),
            created => Ok(created.map(|_| true)?),
        }
    }

    /// Removes data that no event names any more and that are old by the server's clock, and returns their paths.
    ///
    /// # Errors
    ///
    /// See [`Error`].
    pub async fn remove_lost_data(&self, session: &Session, now_ms: i64) -> Result<Vec<String>, Error> {
        let (data, queue) = (format!("{}/data", self.root), format!("{}/queue", self.root));
        let mut lost = BTreeSet::new();
        for name in session.children(&data).await?.unwrap_or_default() {
            let path = format!("{data}/{name}");
            if session.stat(&path).await?.is_some_and(|stat| is_leftover(&stat, now_ms)) {
                lost.insert(path);
            }
        }
        // Data are written before their event, so the events are read last.
        let events = if lost.is_empty() { Vec::new() } else { session.children(&queue).await?.unwrap_or_default() };
        for name in events {
            let node = session.get(&format!("{queue}/{name}")).await?;
            let event = node.and_then(|(node, _)| serde_json::from_slice::<Map<String, Value>>(&node).ok());
            if let Some(path) = event.as_ref().and_then(|event| event.get("event_data_path")?.as_str()) {
                lost.remove(path);
            }
        }
        for path in &lost {
            session.delete_tree(path).await?;
        }
        Ok(lost.into_iter().collect())
    }
}

/// Removes the data of lost events from the results of every pipeline.
pub(super) async fn clean_results(session: &Session, now_ms: i64) -> Result<Vec<String>, Error> {
    let mut removed = Vec::new();
    for tenant in session.children(TENANTS).await?.unwrap_or_default() {
        for pipeline in session.children(&format!("{TENANTS}/{tenant}/pipelines")).await?.unwrap_or_default() {
            removed.extend(EventQueue::of_pipeline(&tenant, &pipeline).remove_lost_data(session, now_ms).await?);
        }
    }
    Ok(removed)
}
