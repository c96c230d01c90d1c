//! Takes events from their sources. Each source hands them to [`Intake::accept`], and acknowledges them once it returns.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::counters::Counters;
use super::event::Event;
use super::pattern::TypePattern;
use super::stamp;
use super::store::{Added, Store, StoreFailure};
use crate::host::crash_points::crash_point;

pub(super) struct Intake {
    store: Store,
    /// The types of events that each endpoint wants.
    wanted: BTreeMap<Arc<str>, Vec<TypePattern>>,
    pub(super) counters: Counters,
}

impl Intake {
    pub(super) fn new(store: Store, wanted: BTreeMap<Arc<str>, Vec<TypePattern>>) -> Self {
        Self { store, wanted, counters: Counters::default() }
    }

    /// Stores events that were checked, all or none. They are on disk when it returns.
    pub(super) async fn accept(&self, events: Vec<Event>) -> Result<Vec<Added>, StoreFailure> {
        let events = events.into_iter().map(|event| {
            let endpoints = self.endpoints_for(&event);
            (event, endpoints)
        });
        self.store(events.collect()).await
    }

    /// Stores events of the notifier itself. If it cannot, the log has them only.
    pub(super) async fn accept_own(&self, events: Vec<Event>) {
        if events.is_empty() {
            return;
        }
        if let Err(error) = self.accept(events).await {
            tracing::error!("cannot store what operators are told by webhook: {error}");
        }
    }

    /// Stores an event for one endpoint, whatever types it wants.
    pub(super) async fn accept_for(&self, endpoint: &Arc<str>, event: Event) -> Result<(), StoreFailure> {
        self.store(vec![(event, vec![Arc::clone(endpoint)])]).await.map(drop)
    }

    async fn store(&self, events: Vec<(Event, Vec<Arc<str>>)>) -> Result<Vec<Added>, StoreFailure> {
        let added = self.store.add(events, stamp()).await?;
        crash_point("notifier-stored");
        Ok(added)
    }

    pub(super) fn endpoints(&self) -> impl Iterator<Item = &Arc<str>> {
        self.wanted.keys()
    }

    fn endpoints_for(&self, event: &Event) -> Vec<Arc<str>> {
        let wants = |patterns: &[TypePattern]| patterns.iter().any(|pattern| pattern.matches(&event.r#type));
        let is_told = |name: &str, patterns: &[TypePattern]| wants(patterns) && !event.is_about(name);
        self.wanted
            .iter()
            .filter(|(name, patterns)| is_told(name, patterns))
            .map(|(name, _)| Arc::clone(name))
            .collect()
    }
}
