//! Runs the tasks of a handler as users of the host, one task at a time for each user.
//!
//! A user is cleaned before a task gets it: that ends what a worker that was killed has left, and keeps a user whose processes
//! cannot be killed from every later task.

use std::sync::Arc;

use parking_lot::Mutex;
use serde_json::Value;
use tokio::task::spawn_blocking;

use journeyman_platform::host::task_user::TaskUser;

use super::{
    Context, DynHandler, EndedWork, HandlerFuture, PrepareError, PrepareFailure, PreparedPayload, Preparing, Sidecar,
};

/// The users that no task has. Clones share them.
#[derive(Debug, Clone)]
pub struct UserPool(Arc<Mutex<Vec<TaskUser>>>);

/// A user of one task; dropping it gives it to the next.
struct UserLease {
    user: TaskUser,
    pool: UserPool,
}

impl Drop for UserLease {
    fn drop(&mut self) {
        self.pool.0.lock().push(self.user.clone());
    }
}

impl UserPool {
    pub fn new(users: Vec<TaskUser>) -> Self {
        Self(Arc::new(Mutex::new(users)))
    }

    async fn take(&self) -> Result<UserLease, PrepareError> {
        loop {
            let Some(user) = self.0.lock().pop() else {
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

struct UserHandler {
    handler: Arc<dyn DynHandler>,
    users: UserPool,
}

/// Runs the payloads of a handler as users of a pool.
pub fn with_users(handler: Arc<dyn DynHandler>, users: UserPool) -> Arc<dyn DynHandler> {
    Arc::new(UserHandler { handler, users })
}

impl UserHandler {
    async fn take_user(&self, context: &Context) -> Result<(UserLease, Context), PrepareError> {
        let lease = self.users.take().await?;
        let (user, workdir) = (lease.user.clone(), context.workdir().to_owned());
        let given = spawn_blocking(move || user.give_task_dir(&workdir)).await.map_err(std::io::Error::other).flatten();
        given.map_err(|error| PrepareError::from_io("the task's directory cannot be given to its user", &error))?;
        context.log().write_note(&format!("the task runs as user {}", lease.user.name()));
        let context = context.clone().with_user(lease.user.clone());
        Ok((lease, context))
    }
}

/// Keeps the user until the payload has ended, and ends what it has left behind.
fn keep_user(prepared: PreparedPayload, lease: UserLease) -> PreparedPayload {
    Box::new(move |context| {
        Box::pin(async move {
            let context = context.clone().with_user(lease.user.clone());
            let ended = prepared(&context).await;
            if let Err(error) = lease.user.clean().await {
                // It is tried again before the next task gets the user.
                tracing::warn!(user = lease.user.name(), %error, "what a task left behind cannot be removed");
            }
            ended
        })
    })
}

impl DynHandler for UserHandler {
    fn describe(&self) -> String {
        self.handler.describe()
    }

    fn schema(&self) -> Value {
        self.handler.schema()
    }

    fn prepare<'a>(&'a self, payload: &'a Value, context: &'a Context) -> Preparing<'a> {
        Box::pin(async move {
            let (lease, context) = self.take_user(context).await?;
            Ok(keep_user(self.handler.prepare(payload, &context).await?, lease))
        })
    }

    fn prepare_task<'a>(&'a self, context: &'a Context) -> Preparing<'a> {
        Box::pin(async move {
            let (lease, context) = self.take_user(context).await?;
            Ok(keep_user(self.handler.prepare_task(&context).await?, lease))
        })
    }

    fn discard<'a>(&'a self, work: &'a EndedWork) -> Option<HandlerFuture<'a, Result<(), String>>> {
        self.handler.discard(work)
    }

    fn sidecar(&self) -> Option<Sidecar> {
        self.handler.sidecar()
    }
}
