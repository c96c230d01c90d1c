//! What handlers keep there beside their tasks: started with the worker, listened to while it works, ended with it.

use std::path::Path;
use std::sync::Arc;

use tokio::sync::watch;
use tokio::task::JoinSet;

use super::SourceBinding;
use super::catch_panic::{Panicked, catch_panic};
use super::handler_runtime::HandlerRuntime;
use super::status::SidecarSummary;
use crate::domain::service_supervisor::ServiceAvailability;
use crate::handler::DynHandler;
use crate::handler::sidecar::{SidecarContext, SidecarHandle, SidecarStatus};
use crate::host::clock::Clock;
use crate::host::containment::Containment;
use crate::limits::{HANDLERS_DROP_TIMEOUT, SERVICES_STOP_TIMEOUT};

/// All of it.
#[derive(Debug, Default)]
pub(super) struct Sidecars {
    entries: Vec<SidecarEntry>,
    running: JoinSet<()>,
}

/// What one handler keeps there.
#[derive(Debug)]
struct SidecarEntry {
    name: String,
    /// The sources whose tasks need it.
    source_indexes: Vec<usize>,
    handle: SidecarHandle,
}

impl Sidecars {
    /// Starts what these sources' handlers keep there, each once.
    pub(super) fn start(
        feeds: &[SourceBinding],
        folder: &Path,
        clock: Clock,
        containment: &Containment,
        threads: &HandlerRuntime,
    ) -> Self {
        let mut besides = Self::default();
        let mut known: Vec<&Arc<dyn DynHandler>> = Vec::new();
        for (index, feed) in feeds.iter().enumerate() {
            let Some(name) = feed.handler.sidecar_name() else { continue };
            let same = |other: &&Arc<dyn DynHandler>| std::ptr::addr_eq(Arc::as_ptr(other), Arc::as_ptr(&feed.handler));
            if let Some(one) = known.iter().position(same).and_then(|known| besides.entries.get_mut(known)) {
                one.source_indexes.push(index);
                continue;
            }
            known.push(&feed.handler);
            let (beside, lent) = SidecarContext::channel(folder.to_owned(), clock, containment.clone());
            besides.entries.push(SidecarEntry { name: name.clone(), source_indexes: vec![index], handle: lent });
            let handler = Arc::clone(&feed.handler);
            let keep = async move {
                if let Err(Panicked(text)) = catch_panic(handler.run_sidecar(beside)).await {
                    tracing::error!(
                        handler = name,
                        panic = text,
                        "a handler panicked beside its tasks; nothing is claimed for it"
                    );
                }
            };
            besides.running.spawn_on(keep, threads.handle());
        }
        besides
    }

    /// The places of all, with what is said of them.
    pub(super) fn status_receivers(&self) -> Vec<(usize, watch::Receiver<SidecarStatus>)> {
        self.entries.iter().enumerate().map(|(index, one)| (index, one.handle.status.clone())).collect()
    }

    /// The sources whose tasks need this one.
    pub(super) fn source_indexes(&self, index: usize) -> &[usize] {
        self.entries.get(index).map_or(&[], |one| &one.source_indexes)
    }

    /// For those who look.
    pub(super) fn summaries(&self) -> Vec<SidecarSummary> {
        let look = |one: &SidecarEntry| {
            let ended = one.handle.status.has_changed().is_err();
            let SidecarStatus { availability: serving, message: what, restart_count: restarts, log_path: log } =
                one.handle.status.borrow().clone();
            SidecarSummary {
                name: one.name.clone(),
                up: serving == ServiceAvailability::Up && !ended,
                message: if ended { "what keeps it there has ended; the log says why".to_owned() } else { what },
                restarts,
                log,
            }
        };
        self.entries.iter().map(look).collect()
    }

    /// Ends all, each within its own grace.
    pub(super) async fn stop(&mut self) {
        for one in &self.entries {
            one.handle.stop.send_replace(true);
        }
        let ended = async { while self.running.join_next().await.is_some() {} };
        if tokio::time::timeout(SERVICES_STOP_TIMEOUT, ended).await.is_err() {
            tracing::error!("what a handler keeps there beside its tasks does not end; what it started may live on");
        }
    }

    /// Kills all.
    pub(super) async fn kill(&mut self) {
        if tokio::time::timeout(HANDLERS_DROP_TIMEOUT, self.running.shutdown()).await.is_err() {
            tracing::warn!("what a handler keeps there beside its tasks does not let itself be dropped");
        }
    }
}
