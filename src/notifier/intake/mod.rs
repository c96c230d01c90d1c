//! Takes events from their sources. Each source hands them to [`Intake::accept`], and acknowledges them once it returns.

pub(super) mod http;

use std::collections::BTreeMap;
use std::sync::Arc;

use tokio::sync::Notify;

use super::event::Event;
use super::pattern::TypePattern;
use super::stamp;
use super::store::{Added, Store, StoreFailure};
use crate::host::crash_points::crash_point;

pub(super) struct Intake {
    store: Store,
    /// The types of events that each endpoint wants.
    wanted: BTreeMap<Arc<str>, Vec<TypePattern>>,
    stored: Arc<Notify>,
}

impl Intake {
    pub(super) fn new(store: Store, wanted: BTreeMap<Arc<str>, Vec<TypePattern>>, stored: Arc<Notify>) -> Self {
        Self { store, wanted, stored }
    }

    /// Stores events that were checked, all or none. They are on disk when it returns.
    pub(super) async fn accept(&self, events: Vec<Event>) -> Result<Vec<Added>, StoreFailure> {
        let events = events.into_iter().map(|event| {
            let endpoints = self.endpoints_for(&event);
            (event, endpoints)
        });
        let added = self.store.add(events.collect(), stamp()).await?;
        crash_point("notifier-stored");
        self.stored.notify_one();
        Ok(added)
    }

    fn endpoints_for(&self, event: &Event) -> Vec<Arc<str>> {
        let wants = |patterns: &[TypePattern]| patterns.iter().any(|pattern| pattern.matches(&event.r#type));
        self.wanted.iter().filter(|(_, patterns)| wants(patterns)).map(|(name, _)| Arc::clone(name)).collect()
    }
}
