//! Runs the tasks of a handler as users of the host, one task at a time for each user.
//!
//! A task has its user until its files are removed. A user is cleaned before a task gets it: that ends what a worker that was killed
//! has left, and keeps a user whose processes cannot be killed from every later task.

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio::task::spawn_blocking;
use tokio::time::timeout;

use journeyman_domain::limits::USER_WAIT_MAX;
use journeyman_platform::host::task_user::TaskUser;

use super::layer::{Inner, Layer, layered};
use super::{Context, DynHandler, PrepareError, PrepareFailure, PreparedPayload, Preparing};

/// The users that no task has. Clones share them.
#[derive(Debug, Clone)]
pub struct UserPool(Arc<FreeUsers>);

#[derive(Debug)]
struct FreeUsers {
    /// That which is free for the longest time comes first.
    users: Mutex<VecDeque<TaskUser>>,
    freed: Notify,
}

/// A user of one task; dropping it gives it to the next.
struct UserLease {
    user: TaskUser,
    pool: UserPool,
}

impl Drop for UserLease {
    fn drop(&mut self) {
        self.pool.0.users.lock().push_back(self.user.clone());
        self.pool.0.freed.notify_one();
    }
}

impl UserPool {
    pub fn new(users: Vec<TaskUser>) -> Self {
        Self(Arc::new(FreeUsers { users: Mutex::new(users.into()), freed: Notify::new() }))
    }

    /// The files of the task before may still be being removed.
    async fn take(&self) -> Result<UserLease, PrepareError> {
        loop {
            let Some(user) = self.0.users.lock().pop_front() else {
                if timeout(USER_WAIT_MAX, self.0.freed.notified()).await.is_ok() {
                    continue;
                }
                let text = "no user of `host.task_users` is free; are there processes that cannot be killed?";
                return Err(PrepareError::new(PrepareFailure::HostFault, text));
            };
            match user.clean().await {
                Ok(()) => return Ok(UserLease { user, pool: self.clone() }),
                Err(error) => {
                    tracing::error!(user = user.name(), %error, "a user cannot be cleaned; no task gets it until the worker starts again");
                }
            }
        }
    }
}

/// Runs the payloads of a handler as users of a pool.
pub fn with_users(handler: Arc<dyn DynHandler>, users: UserPool) -> Arc<dyn DynHandler> {
    layered(handler, users)
}

/// Ends what the payload has left behind.
fn run_as(prepared: PreparedPayload, user: TaskUser) -> PreparedPayload {
    Box::new(move |context| {
        Box::pin(async move {
            let context = context.clone().with_user(user.clone());
            let ended = prepared(&context).await;
            if let Err(error) = user.clean().await {
                // It is tried again before the next task gets the user.
                tracing::warn!(user = user.name(), %error, "what a task left behind cannot be removed");
            }
            ended
        })
    })
}

impl Layer for UserPool {
    fn prepare<'a>(&'a self, inner: Inner<'a>, context: &'a Context) -> Preparing<'a> {
        Box::pin(async move {
            let lease = self.take().await?;
            let (user, workdir) = (lease.user.clone(), context.workdir().to_owned());
            context.hold_until_removed(lease);
            let own = user.clone();
            let given = spawn_blocking(move || own.give_task_dir(&workdir)).await.map_err(io::Error::other).flatten();
            given.map_err(|error| PrepareError::from_io("the task's directory cannot be given to its user", &error))?;
            context.log().write_note(&format!("the task runs as user {}", user.name()));
            let context = context.clone().with_user(user.clone());
            Ok(run_as(inner.prepare(&context).await?, user))
        })
    }
}
