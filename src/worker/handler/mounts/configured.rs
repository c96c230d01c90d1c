//! Places the mounts of a handler's configuration in the directory of each task.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::timeout;

use super::super::layer::{Inner, Layer, layered};
use super::super::{Context, DynHandler, PrepareError, PrepareFailure, Preparing};
use super::Mounter;
use super::payload::Mount;

struct ConfiguredMounts {
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
    layered(handler, ConfiguredMounts { mounter: mounter.clone(), mounts, time_max })
}

impl Layer for ConfiguredMounts {
    fn prepare<'a>(&'a self, inner: Inner<'a>, context: &'a Context) -> Preparing<'a> {
        Box::pin(async move {
            self.place(context).await?;
            inner.prepare(context).await
        })
    }
}

impl ConfiguredMounts {
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
