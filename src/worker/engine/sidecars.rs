//! Manages the handlers' sidecar processes for the lifetime of the worker.

use std::sync::Arc;

use tokio::sync::watch;
use tokio::task::JoinSet;

use super::SourceBinding;
use super::catch_panic::{Panicked, catch_panic};
use super::handler_runtime::HandlerRuntime;
use super::status::SidecarSummary;
use crate::handler::DynHandler;
use crate::handler::sidecar::{Sidecar, SidecarContext, SidecarHandle, SidecarStatus};
use journeyman_domain::id::SourceId;
use journeyman_domain::limits::{HANDLERS_DROP_TIMEOUT, SERVICES_STOP_TIMEOUT};
use journeyman_domain::service_supervisor::ServiceAvailability;

#[derive(Debug, Default)]
pub(super) struct Sidecars {
    entries: Vec<SidecarEntry>,
    running: JoinSet<()>,
}

#[derive(Debug)]
struct SidecarEntry {
    name: String,
    /// The sources that need it.
    sources: Vec<SourceId>,
    handle: SidecarHandle,
}

impl Sidecars {
    /// Starts the sidecar of each handler once. `new_context` is called with the index of one of its sources.
    pub(super) fn start(
        bindings: &[SourceBinding],
        new_context: impl Fn(usize) -> (SidecarContext, SidecarHandle),
        handlers: &HandlerRuntime,
    ) -> Self {
        let mut sidecars = Self::default();
        let mut known: Vec<&Arc<dyn DynHandler>> = Vec::new();
        for (index, binding) in bindings.iter().enumerate() {
            let Some(Sidecar { name, run }) = binding.handler.sidecar() else { continue };
            let source = SourceId::from_index(index);
            let same =
                |other: &&Arc<dyn DynHandler>| std::ptr::addr_eq(Arc::as_ptr(other), Arc::as_ptr(&binding.handler));
            if let Some(known) = known.iter().position(same) {
                sidecars.entries[known].sources.push(source);
                continue;
            }
            known.push(&binding.handler);
            let (context, handle) = new_context(index);
            sidecars.entries.push(SidecarEntry { name: name.clone(), sources: vec![source], handle });
            let supervise = async move {
                if let Err(Panicked(text)) = catch_panic(run(context)).await {
                    tracing::error!(
                        handler = name,
                        panic = text,
                        "a sidecar panicked; the worker claims nothing for its handler"
                    );
                }
            };
            sidecars.running.spawn_on(supervise, &handlers.handle);
        }
        sidecars
    }

    pub(super) fn status_receivers(&self) -> Vec<(usize, watch::Receiver<SidecarStatus>)> {
        self.entries.iter().enumerate().map(|(index, sidecar)| (index, sidecar.handle.status.clone())).collect()
    }

    /// The sources that need a sidecar.
    pub(super) fn sources(&self, sidecar: usize) -> &[SourceId] {
        &self.entries[sidecar].sources
    }

    pub(super) fn summaries(&self) -> Vec<SidecarSummary> {
        let summary = |sidecar: &SidecarEntry| {
            let ended = sidecar.handle.status.has_changed().is_err();
            let SidecarStatus { availability, message, restart_count: restarts, log_path: log } =
                sidecar.handle.status.borrow().clone();
            SidecarSummary {
                name: sidecar.name.clone(),
                up: availability == ServiceAvailability::Up && !ended,
                message: if ended { "its supervisor has ended; the log says why".to_owned() } else { message },
                restarts,
                log,
            }
        };
        self.entries.iter().map(summary).collect()
    }

    /// Each within its own grace.
    pub(super) async fn stop(&mut self) {
        for sidecar in &self.entries {
            sidecar.handle.stop.send_replace(true);
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
