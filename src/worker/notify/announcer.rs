//! Tells a notifier what this process has ended. Events wait in memory: a crash loses those that the notifier does not have yet.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use serde_json::Value;
use serde_json::value::to_raw_value;
use tokio::sync::mpsc;

use super::event::Event;
use super::pattern::TypePattern;
use super::publisher::{CallError, Publisher};
use journeyman_domain::limits::{
    NOTIFY_BATCH_MAX, NOTIFY_CLOSE_TIMEOUT, NOTIFY_DENIED_WAIT, NOTIFY_EVENTS_WAITING_MAX, NOTIFY_REPORT_INTERVAL,
};

/// The address that events are sent to, and which events.
pub struct NotifyConfig {
    pub publisher: Publisher,
    pub wanted: Vec<TypePattern>,
}

/// Something that has ended. The same source and id are one event, however often they are told.
#[derive(Debug)]
pub struct Announcement<'a> {
    pub event_type: &'a str,
    pub key: String,
    pub id: String,
    /// The epoch of a run, which has its last event with it.
    pub epoch: Option<u32>,
    pub data: Value,
}

/// Takes events without waiting.
#[derive(Debug, Clone)]
pub struct Announcer(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    source: String,
    wanted: Vec<TypePattern>,
    events: mpsc::Sender<Event>,
    dropped: AtomicU64,
}

/// Sends what its [`Announcer`]s take.
pub struct Announcing {
    publisher: Publisher,
    events: mpsc::Receiver<Event>,
}

impl Announcer {
    pub fn new(config: NotifyConfig, source: String) -> (Self, Announcing) {
        let (sender, events) = mpsc::channel(NOTIFY_EVENTS_WAITING_MAX);
        let shared = Shared { source, wanted: config.wanted, events: sender, dropped: AtomicU64::new(0) };
        (Self(Arc::new(shared)), Announcing { publisher: config.publisher, events })
    }

    pub fn announce(&self, announcement: Announcement<'_>) {
        let Shared { source, wanted, events, dropped } = &*self.0;
        let Announcement { event_type, key, id, epoch, data } = announcement;
        if !wanted.iter().any(|pattern| pattern.matches(event_type)) {
            return;
        }
        let Ok(data) = to_raw_value(&data) else { return };
        let time = Some(jiff::Timestamp::now());
        let (source, last) = (source.clone(), epoch.is_some());
        let event = Event { source, id, r#type: event_type.to_owned(), key, epoch, time, last, data };
        let id = event.id.clone();
        let failed = match event.check() {
            Ok(()) => events.try_send(event).err().map(|_| "too many events wait for the notifier".to_owned()),
            Err(why) => Some(why),
        };
        if let Some(why) = failed {
            let dropped = dropped.fetch_add(1, Ordering::Relaxed) + 1;
            // A worker may end thousands of requests a second.
            if dropped.is_power_of_two() {
                tracing::error!(event = id, dropped, "events for the notifier are dropped; the last one: {why}");
            }
        }
    }
}

impl Announcing {
    /// Runs until all [`Announcer`]s are gone and the notifier has their events.
    pub(crate) async fn run(mut self) {
        let mut events = Vec::new();
        while self.events.recv_many(&mut events, NOTIFY_BATCH_MAX).await > 0 {
            hand_over(&mut self.publisher, &events).await;
            events.clear();
        }
    }

    /// Runs beside `work`, and for a while after it to send its last events.
    pub async fn beside<T>(this: Option<Self>, work: impl Future<Output = T>) -> T {
        let Some(this) = this else { return work.await };
        let mut running = Box::pin(this.run());
        let mut work = Box::pin(work);
        let done = tokio::select! {
            done = &mut work => done,
            () = &mut running => return work.await,
        };
        // The announcers go with it.
        drop(work);
        if tokio::time::timeout(NOTIFY_CLOSE_TIMEOUT, running).await.is_err() {
            tracing::error!("the last events are lost: the notifier has not taken them in time");
        }
        done
    }
}

/// Returns once the notifier has the events, or refuses them.
pub async fn hand_over(publisher: &mut Publisher, events: &[Event]) {
    loop {
        match publisher.publish_within(events, NOTIFY_REPORT_INTERVAL).await {
            Ok(_) => return,
            Err(CallError::Refused(why)) => match events {
                [event] => return tracing::error!(event = event.id, "the notifier refuses an event: {why}"),
                _ => break,
            },
            Err(error @ CallError::Denied(_)) => {
                tracing::error!("{} events wait: {error}", events.len());
                tokio::time::sleep(NOTIFY_DENIED_WAIT).await;
            }
            Err(error @ CallError::Unavailable { .. }) => tracing::warn!("{} events wait: {error}", events.len()),
        }
    }
    // One of them is refused.
    for event in events {
        Box::pin(hand_over(publisher, std::slice::from_ref(event))).await;
    }
}
