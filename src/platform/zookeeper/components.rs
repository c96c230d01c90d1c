//! The component registry: an ephemeral node for each process of a cluster, so that a process that dies is seen to be gone.

use std::sync::Arc;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::client::CreateMode;
use super::{Error, Session};

/// The newest data formats of a Zuul that this program knows.
pub const MODEL_API_MAX: i64 = 38;

/// What a process says of itself.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Component {
    /// Its state: it works, is paused, or is about to leave.
    pub state: ComponentState,
    /// The name of its host.
    pub hostname: String,
    /// Its kind, such as `executor`.
    pub kind: String,
    /// The version of its program.
    pub version: String,
    /// The data formats that it understands. A cluster writes those of its oldest member, and none of a member without the key.
    pub model_api: i64,
    /// What its kind adds.
    #[serde(flatten)]
    pub own: Map<String, Value>,
}

/// The state of a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ComponentState {
    /// Not ready yet.
    Initializing,
    /// Working.
    Running,
    /// Taking no work.
    Paused,
    /// Leaving, or not started.
    #[default]
    Stopped,
}

/// The node of this process.
#[derive(Debug)]
pub struct Registration {
    session: Arc<Session>,
    path: String,
    written: Component,
}

/// Lists the processes of one kind below a registry, such as `/zuul/components`.
///
/// # Errors
///
/// See [`Error`].
pub async fn list(session: &Session, registry: &str, kind: &str) -> Result<Vec<(String, Component)>, Error> {
    let folder = format!("{registry}/{kind}");
    let mut found = Vec::new();
    for name in session.children(&folder).await?.unwrap_or_default() {
        let path = format!("{folder}/{name}");
        let Some((data, _)) = session.get(&path).await? else { continue };
        // One that cannot be read is another program's.
        if let Ok(component) = serde_json::from_slice(&data) {
            found.push((path, component));
        }
    }
    found.sort_by(|(one, _), (other, _)| one.cmp(other));
    Ok(found)
}

/// The data formats that every process of a cluster understands; those of this program for an empty cluster.
///
/// # Errors
///
/// See [`Error`].
pub async fn cluster_model_api(session: &Session, registry: &str) -> Result<i64, Error> {
    let mut least = MODEL_API_MAX;
    for kind in session.children(registry).await?.unwrap_or_default() {
        for (_, component) in list(session, registry, &kind).await? {
            least = least.min(component.model_api);
        }
    }
    Ok(least)
}

impl Registration {
    /// Registers this process until its session ends.
    ///
    /// # Errors
    ///
    /// See [`Error`].
    pub async fn create(session: &Arc<Session>, registry: &str, component: Component) -> Result<Self, Error> {
        let folder = format!("{registry}/{}", component.kind);
        session.ensure(&folder).await?;
        let prefix = format!("{folder}/{}", component.hostname);
        let path = session.create(&prefix, &to_json(&component), CreateMode::EphemeralSequential).await?;
        Ok(Self { session: Arc::clone(session), path, written: component })
    }

    /// Says anew what the process does, if that has changed.
    ///
    /// # Errors
    ///
    /// See [`Error`].
    pub async fn update(&mut self, change: impl FnOnce(&mut Component)) -> Result<(), Error> {
        let mut component = self.written.clone();
        change(&mut component);
        if component != self.written {
            self.session.set(&self.path, &to_json(&component), None).await?;
            self.written = component;
        }
        Ok(())
    }
}

fn to_json(component: &Component) -> Vec<u8> {
    serde_json::to_vec(component).unwrap_or_default()
}
