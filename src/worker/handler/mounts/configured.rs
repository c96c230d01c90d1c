//! Places the mounts of a handler's configuration in the directory of each task.

use std::sync::Arc;
use std::time::Duration;

use serde_json::Value;
use tokio::time::timeout;

use super::super::{Context, DynHandler, EndedWork, HandlerFuture, PrepareError, PrepareFailure, Preparing, Sidecar};
use super::Mounter;
use super::payload::Mount;

/// A handler whose tasks find mounts in their directories.
struct MountingHandler {
    handler: Arc<dyn DynHandler>,
    mounter: Mounter,
    mounts: Vec<Mount>,
    time_max: Duration,
}

/// Places mounts before the payloads of a handler are prepared, for `time_max` at most.
pub fn with_mounts(
    handler: Arc<dyn DynHandler>,
    mounter: &Mounter,
    mounts: Vec<Mount>,
    time_max: Duration,
) -> Arc<dyn DynHandler> {
    if mounts.is_empty() {
        return handler;
    }
    Arc::new(MountingHandler { handler, mounter: mounter.clone(), mounts, time_max })
}

impl DynHandler for MountingHandler {
    fn describe(&self) -> String {
        self.handler.describe()
    }

    fn schema(&self) -> Value {
        self.handler.schema()
    }

    fn prepare<'a>(&'a self, payload: &'a Value, context: &'a Context) -> Preparing<'a> {
        Box::pin(async move {
            self.place(context).await?;
            self.handler.prepare(payload, context).await
        })
    }

    fn prepare_task<'a>(&'a self, context: &'a Context) -> Preparing<'a> {
        Box::pin(async move {
            self.place(context).await?;
            self.handler.prepare_task(context).await
        })
    }

    fn discard<'a>(&'a self, work: &'a EndedWork) -> Option<HandlerFuture<'a, Result<(), String>>> {
        self.handler.discard(work)
    }

    fn sidecar(&self) -> Option<Sidecar> {
        self.handler.sidecar()
    }

    fn end_leftovers(&self) -> Option<HandlerFuture<'_, Result<usize, String>>> {
        self.handler.end_leftovers()
    }
}

impl MountingHandler {
    /// Content that the operator has configured is not the payload's fault.
    async fn place(&self, context: &Context) -> Result<(), PrepareError> {
        let too_slow = || {
            let text = format!("the handler's mounts were not placed within {} s", self.time_max.as_secs());
            Err(PrepareError::new(PrepareFailure::Unavailable, text))
        };
        let placed =
            timeout(self.time_max, self.mounter.place(&self.mounts, context)).await.unwrap_or_else(|_| too_slow());
        placed.map_err(|mut error| {
            if error.reason == PrepareFailure::Malformed {
                error.reason = PrepareFailure::Unavailable;
            }
            error
        })
    }
}
