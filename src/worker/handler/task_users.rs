//! Runs the tasks of a handler as users of the host, one task at a time for each user.
//!
//! A task has its user until its files are removed. A user is cleaned before a task gets it: that ends what a worker that was killed
//! has left, and keeps a user whose processes cannot be killed from every later task.

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::task::spawn_blocking;
use tokio::time::timeout;

use journeyman_domain::limits::USER_WAIT_MAX;
use journeyman_platform::host::task_user::TaskUser;

use super::layer::{Inner, Layer, layered};
use super::{Context, DynHandler, PrepareError, PrepareFailure, PreparedPayload, Preparing};

/// The users that no task has. Clones share them.
#[derive(Debug, Clone)]
pub struct UserPool {
    free: Arc<Semaphore>,
    /// The one that is free for the longest time comes first.
    users: Arc<Mutex<VecDeque<TaskUser>>>,
}

/// A user of one task; dropping it gives it to the next.
struct UserLease {
    user: TaskUser,
    pool: UserPool,
    _permit: OwnedSemaphorePermit,
}

impl Drop for UserLease {
    fn drop(&mut self) {
        self.pool.users.lock().push_back(self.user.clone());
    }
}

impl UserPool {
    pub fn new(users: Vec<TaskUser>) -> Self {
        Self { free: Arc::new(Semaphore::new(users.len())), users: Arc::new(Mutex::new(users.into())) }
    }

    async fn next(&self) -> Option<UserLease> {
        let permit = Arc::clone(&self.free).acquire_owned().await.ok()?;
        let user = self.users.lock().pop_front()?;
        Some(UserLease { user, pool: self.clone(), _permit: permit })
    }

    /// The files of the task before may still be being removed.
    async fn take(&self) -> Result<UserLease, PrepareError> {
        // Given back at the end, so that each is tried once.
        let mut unclean = Vec::new();
        while let Ok(Some(lease)) = timeout(USER_WAIT_MAX, self.next()).await {
            match lease.user.clean().await {
                Ok(()) => return Ok(lease),
                Err(error) => {
                    tracing::error!(user = lease.user.name(), %error, "a user cannot be cleaned, so this task does not get it");
                    unclean.push(lease);
                }
            }
        }
        let text = "no user of `host.task_users` is free; are there processes that cannot be killed?";
        Err(PrepareError::new(PrepareFailure::HostFault, text))
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
