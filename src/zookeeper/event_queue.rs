//! Zuul's event queues: numbered nodes in `queue`, and the data of large events in shards below `data`.

use serde_json::{Map, Value};
use zookeeper_client::CreateMode;

use super::job_queue::JobError;
use super::{Error, Session};
use crate::limits::{ZOOKEEPER_EVENT_BYTES_MAX, ZOOKEEPER_EVENTS_QUEUED_MAX};

/// A queue of events, such as the results of a pipeline.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EventQueue {
    root: String,
}

/// An event that was read.
#[derive(Debug, Clone, PartialEq)]
pub struct QueuedEvent {
    /// Its node.
    pub path: String,
    /// The version of the node.
    pub version: i32,
    /// Its keys, `event_data` among them.
    pub fields: Map<String, Value>,
    side_data: Option<String>,
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
    #[must_use]
    pub fn new(root: &str) -> Self {
        Self { root: root.to_owned() }
    }

    /// The results of a pipeline.
    #[must_use]
    pub fn of_pipeline(tenant: &str, pipeline: &str) -> Self {
        Self::new(&format!("/zuul/events/tenant/{tenant}/pipelines/{pipeline}/result"))
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

    /// Reads the events in their order.
    ///
    /// # Errors
    ///
    /// See [`JobError`].
    pub async fn read(&self, session: &Session) -> Result<Vec<QueuedEvent>, JobError> {
        let folder = format!("{}/queue", self.root);
        let mut names = session.children(&folder).await?.unwrap_or_default();
        names.sort_unstable();
        let mut events = Vec::new();
        for name in names {
            let path = format!("{folder}/{name}");
            let Some((data, stat)) = session.get(&path).await? else { continue };
            let unreadable = |message: String| JobError::Unreadable { path: path.clone(), message };
            let mut fields: Map<String, Value> =
                serde_json::from_slice(&data).map_err(|error| unreadable(error.to_string()))?;
            let side_data = fields.remove("event_data_path").and_then(|path| path.as_str().map(str::to_owned));
            if let Some(side) = &side_data {
                let data =
                    session.read_shards(side).await?.ok_or_else(|| unreadable("its data are gone".to_owned()))?;
                let data = serde_json::from_slice(&data).map_err(|error| unreadable(error.to_string()))?;
                fields.insert("event_data".to_owned(), data);
            }
            events.push(QueuedEvent { path, version: stat.version, fields, side_data });
        }
        Ok(events)
    }

    /// Removes an event that was acted upon.
    ///
    /// # Errors
    ///
    /// See [`Error`].
    pub async fn acknowledge(&self, session: &Session, event: &QueuedEvent) -> Result<(), Error> {
        if let Some(side) = &event.side_data {
            session.delete_tree(side).await?;
        }
        session.delete(&event.path).await
    }
}
