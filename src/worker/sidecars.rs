//! Manages the handlers' sidecar processes for the lifetime of the worker.

use std::sync::Arc;

use tokio::sync::watch;
use tokio::task::JoinSet;

use super::SourceBinding;
use super::catch_panic::{Panicked, catch_panic};
use super::handler_runtime::HandlerRuntime;
use super::status::SidecarSummary;
use crate::domain::service_supervisor::ServiceAvailability;
use crate::handler::DynHandler;
use crate::handler::sidecar::{Sidecar, SidecarContext, SidecarHandle, SidecarStatus};
use crate::limits::{HANDLERS_DROP_TIMEOUT, SERVICES_STOP_TIMEOUT};

#[derive(Debug, Default)]
pub(super) struct Sidecars {
    entries: Vec<SidecarEntry>,
    running: JoinSet<()>,
}

#[derive(Debug)]
struct SidecarEntry {
    name: String,
    /// The sources whose tasks need it.
    source_indexes: Vec<usize>,
    handle: SidecarHandle,
}

impl Sidecars {
    /// Starts the sidecar of each handler once. `new_context` is called with the index of one of its sources.
    pub(super) fn start(
        feeds: &[SourceBinding],
        new_context: impl Fn(usize) -> (SidecarContext, SidecarHandle),
        threads: &HandlerRuntime,
    ) -> Self {
        let mut besides = Self::default();
        let mut known: Vec<&Arc<dyn DynHandler>> = Vec::new();
        for (index, feed) in feeds.iter().enumerate() {
            let Some(Sidecar { name, run }) = feed.handler.sidecar() else { continue };
            let same = |other: &&Arc<dyn DynHandler>| std::ptr::addr_eq(Arc::as_ptr(other), Arc::as_ptr(&feed.handler));
            if let Some(one) = known.iter().position(same).and_then(|known| besides.entries.get_mut(known)) {
                one.source_indexes.push(index);
                continue;
            }
            known.push(&feed.handler);
            let (beside, lent) = new_context(index);
            besides.entries.push(SidecarEntry { name: name.clone(), source_indexes: vec![index], handle: lent });
            let keep = async move {
                if let Err(Panicked(text)) = catch_panic(run(beside)).await {
                    tracing::error!(
                        handler = name,
                        panic = text,
                        "a sidecar panicked; the worker claims nothing for its handler"
                    );
                }
            };
            besides.running.spawn_on(keep, threads.handle());
        }
        besides
    }

    pub(super) fn status_receivers(&self) -> Vec<(usize, watch::Receiver<SidecarStatus>)> {
        self.entries.iter().enumerate().map(|(index, one)| (index, one.handle.status.clone())).collect()
    }

    pub(super) fn source_indexes(&self, index: usize) -> &[usize] {
        self.entries.get(index).map_or(&[], |one| &one.source_indexes)
    }

    pub(super) fn summaries(&self) -> Vec<SidecarSummary> {
        let look = |one: &SidecarEntry| {
            let ended = one.handle.status.has_changed().is_err();
            let SidecarStatus { availability: serving, message: what, restart_count: restarts, log_path: log } =
                one.handle.status.borrow().clone();
            SidecarSummary {
                name: one.name.clone(),
                up: serving == ServiceAvailability::Up && !ended,
                message: if ended { "its supervisor has ended; the log says why".to_owned() } else { what },
                restarts,
                log,
            }
        };
        self.entries.iter().map(look).collect()
    }

    /// Each within its own grace.
    pub(super) async fn stop(&mut self) {
        for one in &self.entries {
            one.handle.stop.send_replace(true);
        }
        let ended = async { while self.running.join_next().await.is_some() {} };
        if tokio::time::timeout(SERVICES_STOP_TIMEOUT, ended).await.is_err() {
            tracing::error!("a sidecar does not stop; its processes may remain");
        }
    }

    pub(super) async fn kill(&mut self) {
        if tokio::time::timeout(HANDLERS_DROP_TIMEOUT, self.running.shutdown()).await.is_err() {
            tracing::warn!("a sidecar does not stop when dropped");
        }
    }
}
