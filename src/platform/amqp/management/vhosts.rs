//! The vhost, its users, and the names of its queues.

use serde::Deserialize;
use serde_json::json;

use super::{Management, ManagementError};
use journeyman_domain::limits::{AMQP_MANAGEMENT_PAGE_QUEUES, AMQP_MANAGEMENT_QUEUES_MAX};

#[derive(Deserialize)]
struct NamesPage {
    items: Vec<Named>,
    page_count: u32,
}

#[derive(Deserialize)]
struct Named {
    name: String,
}

#[derive(Deserialize)]
struct Typed {
    r#type: String,
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
        let mut names = Vec::new();
        for page in 1..=AMQP_MANAGEMENT_QUEUES_MAX / AMQP_MANAGEMENT_PAGE_QUEUES {
            let path = format!(
                "queues/{}?page={page}&page_size={AMQP_MANAGEMENT_PAGE_QUEUES}&columns=name&disable_stats=true",
                urlencoding::encode(&self.vhost)
            );
            let NamesPage { items, page_count } = self.get(&path).await?;
            names.extend(items.into_iter().map(|queue| queue.name));
            if page >= page_count {
                break;
            }
        }
        Ok(names)
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
