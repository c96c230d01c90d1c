//! Takes events from their sources. Each source hands them to [`Intake::accept`], and acknowledges them once it returns.

pub(super) mod amqp;
pub(super) mod outbox;
pub(super) mod topology;

use std::sync::Arc;

use super::counters::Counters;
use super::registry::{Current, EndpointSettings, Entry, InvalidEndpoint, Registered, Registry};
use super::store::{Added, NewEvents, Store, StoreFailure};
use journeyman_domain::limits::{NOTIFIER_BATCH_MAX, NOTIFIER_CHOICES_MAX};
use journeyman_platform::host::clock::stamp;
use journeyman_platform::host::crash_points::crash_point;
use journeyman_worker::notify::Event;

pub(super) struct Intake {
    pub(super) store: Store,
    registry: Arc<Registry>,
    pub(super) counters: Counters,
}

impl Intake {
    pub(super) fn new(store: Store, registry: Arc<Registry>) -> Self {
        Self { store, registry, counters: Counters::default() }
    }

    /// Stores events that were checked, all or none. They are on disk when it returns.
    async fn accept(&self, events: Vec<Arc<Event>>) -> Result<Vec<Added>, StoreFailure> {
        let choose = |endpoints: &Registered| {
            let events = events.iter().map(|event| {
                let is_told =
                    |name: &str, entry: &Entry| entry.wants(&event.r#type, &event.data) && !event.is_about(name);
                let wanting = endpoints.iter().filter(|(name, entry)| is_told(name, entry));
                (Arc::clone(event), wanting.map(|(name, _)| Arc::clone(name)).collect())
            });
            Ok(events.collect())
        };
        self.store(choose).await
    }

    /// As [`Intake::accept`], and counts them. Returns how many are new, and how many are not.
    pub(super) async fn take(&self, source: &'static str, events: Vec<Event>) -> Result<(usize, usize), StoreFailure> {
        let added = self.accept(events.into_iter().map(Arc::new).collect()).await?;
        let duplicates = added.iter().filter(|one| **one == Added::Duplicate).count();
        let accepted = added.len() - duplicates;
        self.counters.on_taken(source, accepted, duplicates);
        Ok((accepted, duplicates))
    }

    /// Stores events of the notifier itself. If it cannot, the log has them only.
    pub(super) async fn accept_own(&self, events: Vec<Arc<Event>>) {
        if events.is_empty() {
            return;
        }
        if let Err(error) = self.accept(events).await {
            tracing::error!("cannot store what operators are told by webhook: {error}");
        }
    }

    /// Stores events that were checked, each for one endpoint, whatever types it wants: all or none.
    pub(super) async fn accept_each(&self, events: Vec<(Event, Arc<str>)>) -> Result<Vec<Added>, StoreFailure> {
        let events: Vec<_> = events.into_iter().map(|(event, endpoint)| (Arc::new(event), endpoint)).collect();
        let choose = |endpoints: &Registered| {
            if let Some((_, gone)) = events.iter().find(|(_, endpoint)| !endpoints.contains_key(endpoint)) {
                return Err(StoreFailure::Changed(gone.to_string()));
            }
            Ok(events.iter().map(|(event, endpoint)| (Arc::clone(event), vec![Arc::clone(endpoint)])).collect())
        };
        self.store(choose).await
    }

    /// The endpoints are chosen again if the store has others: an endpoint gets each event that comes after it was made.
    async fn store(
        &self,
        choose: impl Fn(&Registered) -> Result<Vec<(Arc<Event>, Vec<Arc<str>>)>, StoreFailure>,
    ) -> Result<Vec<Added>, StoreFailure> {
        for _ in 0..NOTIFIER_CHOICES_MAX {
            let Current { endpoints, generation } = self.registry.with_generation();
            let events = choose(&endpoints)?;
            if events.is_empty() {
                return Ok(Vec::new());
            }
            if let Some(added) = self.store.add(NewEvents { events, generation }, stamp()).await? {
                crash_point("notifier-stored");
                return Ok(added);
            }
            self.refresh().await?;
        }
        Err(StoreFailure::Changed("of an event".to_owned()))
    }

    /// Reads the endpoints of the store.
    async fn refresh(&self) -> Result<(), StoreFailure> {
        self.registry.refresh(&self.store.endpoints().await?);
        Ok(())
    }

    pub(super) fn endpoints(&self) -> Arc<Registered> {
        self.registry.current()
    }

    /// Keeps an endpoint in the store.
    pub(super) async fn put_endpoint(&self, name: &str, settings: &EndpointSettings) -> Result<(), EndpointError> {
        let sealed = self.registry.seal(name, settings)?;
        self.set_endpoint(name, Some(sealed)).await
    }

    /// Its lanes stay.
    pub(super) async fn remove_endpoint(&self, name: &str) -> Result<(), EndpointError> {
        self.registry.may_store(name)?;
        self.set_endpoint(name, None).await
    }

    /// This node knows of it when it returns.
    async fn set_endpoint(&self, name: &str, sealed: Option<Vec<u8>>) -> Result<(), EndpointError> {
        self.store.set_settings(name, sealed).await?;
        Ok(self.refresh().await?)
    }
}

#[derive(Debug, thiserror::Error)]
pub(super) enum EndpointError {
    #[error(transparent)]
    Invalid(#[from] InvalidEndpoint),
    #[error(transparent)]
    Store(#[from] StoreFailure),
}

/// One event, or an array of them.
pub(super) fn parse_events(body: &[u8]) -> Result<Vec<Event>, String> {
    // An untagged enum would lose the bytes of the data.
    let is_array = body.iter().find(|byte| !byte.is_ascii_whitespace()) == Some(&b'[');
    let place = |error: serde_json::Error| {
        let text = error.to_string();
        // Its other words may quote the event.
        let what = text.split_once(" at ").map(|(what, _)| what).filter(|what| what.starts_with("missing field"));
        let what = what.map_or_else(String::new, |what| format!(": {what}"));
        format!("invalid event at line {}, column {}{what}", error.line(), error.column())
    };
    let events: Vec<Event> = if is_array {
        serde_json::from_slice(body).map_err(place)?
    } else {
        vec![serde_json::from_slice(body).map_err(place)?]
    };
    if events.is_empty() || events.len() > NOTIFIER_BATCH_MAX {
        return Err(format!("{} events: a call or a message has 1 to {NOTIFIER_BATCH_MAX}", events.len()));
    }
    for (index, event) in events.iter().enumerate() {
        event.check().map_err(|error| format!("event {index}: {error}"))?;
    }
    Ok(events)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn f9_data_that_receivers_cannot_parse_is_refused_with_its_place() {
        let parse = |data: &str| {
            let event = format!(r#"{{"source":"a","id":"1","type":"t","key":"k","data":{data}}}"#);
            parse_events(format!("[{event}]").as_bytes())
        };
        assert!(parse(r#"{"a":1e308}"#).is_ok());
        for (data, place) in [
            (r#"{"a":1e999999}"#.to_owned(), "line 1 column 13"),
            (r#"{"a":"\ud800"}"#.to_owned(), "line 1 column 13"),
            (format!("{}{}", "[".repeat(100_000), "]".repeat(100_000)), "line 1 column 128"),
        ] {
            let error = parse(&data).unwrap_err();
            assert!(error.starts_with("event 0: data is refused ") && error.contains(place), "{error}");
        }
    }
}
