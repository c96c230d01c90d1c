//! Closes the sources of a worker that exits.

use std::sync::Arc;

use tokio::task::JoinSet;
use tokio::time::timeout;

use crate::limits::SOURCES_CLOSE_TIMEOUT;
use crate::source::Source;

use super::catch_panic::{Panicked, catch_panic};

/// All at once, so that none delays another.
pub(super) async fn close_all(sources: Vec<Arc<dyn Source>>) {
    let mut leaving = JoinSet::new();
    for source in sources {
        leaving.spawn(async move {
            if let Err(Panicked(panic)) = catch_panic(source.close()).await {
                tracing::error!(panic, "a source panicked when it was left");
            }
        });
    }
    let left = async { while leaving.join_next().await.is_some() {} };
    if timeout(SOURCES_CLOSE_TIMEOUT, left).await.is_err() {
        tracing::warn!(waited = ?SOURCES_CLOSE_TIMEOUT, "a source was not left in order; what was reported last may come again");
    }
}
