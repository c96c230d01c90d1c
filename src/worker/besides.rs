//! What handlers keep there beside their tasks: started with the worker, listened to while it works, ended with it.

use std::path::Path;
use std::sync::Arc;

use tokio::sync::watch;
use tokio::task::JoinSet;

use super::Feed;
use super::guard::{Panicked, guarded};
use super::threads::Threads;
use super::view::Service;
use crate::domain::service::Serving;
use crate::handler::Handler;
use crate::handler::beside::{Beside, Lent, Word};
use crate::host::clock::Clock;
use crate::host::containment::Containment;
use crate::limits::{HANDLERS_DROP_WAIT, SERVICES_END_WAIT};

/// All of it.
#[derive(Debug, Default)]
pub(super) struct Besides {
    list: Vec<One>,
    running: JoinSet<()>,
}

/// What one handler keeps there.
#[derive(Debug)]
struct One {
    name: String,
    /// The sources whose tasks need it.
    feeds: Vec<usize>,
    lent: Lent,
}

impl Besides {
    /// Starts what these sources' handlers keep there, each once.
    pub(super) fn start(
        feeds: &[Feed],
        folder: &Path,
        clock: Clock,
        containment: &Containment,
        threads: &Threads,
    ) -> Self {
        let mut besides = Self::default();
        let mut known: Vec<&Arc<dyn Handler>> = Vec::new();
        for (index, feed) in feeds.iter().enumerate() {
            let Some(name) = feed.handler.runs_beside() else { continue };
            let same = |other: &&Arc<dyn Handler>| std::ptr::addr_eq(Arc::as_ptr(other), Arc::as_ptr(&feed.handler));
            if let Some(one) = known.iter().position(same).and_then(|known| besides.list.get_mut(known)) {
                one.feeds.push(index);
                continue;
            }
            known.push(&feed.handler);
            let (beside, lent) = Beside::lend(folder.to_owned(), clock, containment.clone());
            besides.list.push(One { name: name.clone(), feeds: vec![index], lent });
            let handler = Arc::clone(&feed.handler);
            let keep = async move {
                if let Err(Panicked(text)) = guarded(handler.beside(beside)).await {
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
    pub(super) fn words(&self) -> Vec<(usize, watch::Receiver<Word>)> {
        self.list.iter().enumerate().map(|(index, one)| (index, one.lent.word.clone())).collect()
    }

    /// The sources whose tasks need this one.
    pub(super) fn feeds(&self, index: usize) -> &[usize] {
        self.list.get(index).map_or(&[], |one| &one.feeds)
    }

    /// For those who look.
    pub(super) fn view(&self) -> Vec<Service> {
        let look = |one: &One| {
            let ended = one.lent.word.has_changed().is_err();
            let Word { serving, what, restarts, log } = one.lent.word.borrow().clone();
            Service {
                name: one.name.clone(),
                up: serving == Serving::Up && !ended,
                what: if ended { "what keeps it there has ended; the log says why".to_owned() } else { what },
                restarts,
                log,
            }
        };
        self.list.iter().map(look).collect()
    }

    /// Ends all, each within its own grace.
    pub(super) async fn end(&mut self) {
        for one in &self.list {
            one.lent.over.send_replace(true);
        }
        let ended = async { while self.running.join_next().await.is_some() {} };
        if tokio::time::timeout(SERVICES_END_WAIT, ended).await.is_err() {
            tracing::error!("what a handler keeps there beside its tasks does not end; what it started may live on");
        }
    }

    /// Kills all.
    pub(super) async fn kill(&mut self) {
        if tokio::time::timeout(HANDLERS_DROP_WAIT, self.running.shutdown()).await.is_err() {
            tracing::warn!("what a handler keeps there beside its tasks does not let itself be dropped");
        }
    }
}
