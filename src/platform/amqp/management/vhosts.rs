//! The vhost, its users, and the names of its queues.

use serde::Deserialize;
use serde_json::json;

use super::{Management, ManagementError, Typed};

#[derive(Deserialize)]
struct Named {
    name: String,
}

impl Management {
    /// Creates the vhost, if there is none.
    ///
    /// # Errors
    ///
    /// [`ManagementError`], without user and password.
    pub async fn create_vhost(&self) -> Result<(), ManagementError> {
        self.put(&format!("vhosts/{}", urlencoding::encode(&self.vhost)), &json!({})).await
    }

    /// Gives a user all rights in the vhost.
    ///
    /// # Errors
    ///
    /// [`ManagementError`], without user and password.
    pub async fn grant_all(&self, user: &str) -> Result<(), ManagementError> {
        let path = format!("permissions/{}/{}", urlencoding::encode(&self.vhost), urlencoding::encode(user));
        self.put(&path, &json!({ "configure": ".*", "write": ".*", "read": ".*" })).await
    }

    /// The names of all queues, without what costs the broker more.
    ///
    /// # Errors
    ///
    /// [`ManagementError`], without user and password.
    pub async fn queue_names(&self) -> Result<Vec<String>, ManagementError> {
        let queues = self.list_queues::<Named>("columns=name&disable_stats=true").await?;
        Ok(queues.into_iter().map(|queue| queue.name).collect())
    }

    /// True for a classic queue.
    ///
    /// # Errors
    ///
    /// [`ManagementError`], without user and password.
    pub async fn is_classic(&self, queue: &str) -> Result<bool, ManagementError> {
        let (vhost, queue) = (urlencoding::encode(&self.vhost), urlencoding::encode(queue));
        let Typed { r#type } = self.get(&format!("queues/{vhost}/{queue}?columns=type&disable_stats=true")).await?;
        Ok(r#type == "classic")
    }
}
