//! Polls how many requests workers hold, as the management interface counts them.

use std::collections::BTreeMap;

use tokio::sync::mpsc;
use tokio::time::sleep;

use super::queue_names::QueueNames;
use crate::amqp::management::{self, Management};
use crate::domain::group::Key;
use crate::domain::group::load::LoadCounts;
use crate::domain::time::Instant;
use crate::limits::{CONTROLLER_COUNTS_INTERVAL, CONTROLLER_COUNTS_TTL};

pub(super) type CountResult = Result<Vec<(Key, management::QueueCounts)>, String>;

#[derive(Default)]
pub(super) struct BrokerCounts {
    last: Option<(Instant, BTreeMap<Key, LoadCounts>)>,
    error: Option<String>,
}

impl BrokerCounts {
    pub(super) fn fresh(&self, key: &Key, now: Instant) -> Option<LoadCounts> {
        let (at, counts) = self.last.as_ref()?;
        if now.since(*at) < CONTROLLER_COUNTS_TTL { counts.get(key).copied() } else { None }
    }

    pub(super) const fn is_empty(&self) -> bool {
        self.last.is_none()
    }

    pub(super) fn update(&mut self, result: &CountResult, now: Instant) {
        match result {
            Ok(counted) => {
                if self.error.take().is_some() {
                    tracing::info!("queue counts of the management interface are available again");
                }
                let counts = counted.iter().map(|(key, counted)| (key.clone(), unacknowledged(counted)));
                self.last = Some((now, counts.collect()));
            }
            Err(why) => {
                if self.error.is_none() {
                    tracing::warn!("no queue counts from the management interface, using worker reports: {why}");
                }
                self.error = Some(why.clone());
            }
        }
    }
}

const fn unacknowledged(counted: &management::QueueCounts) -> LoadCounts {
    LoadCounts {
        unacknowledged: counted.unacknowledged,
        published: counted.published_per_1000s,
        acknowledged: counted.acknowledged_per_1000s,
    }
}

pub(super) async fn poll_broker_counts(
    management: &Management,
    names: &QueueNames,
    results: mpsc::Sender<CountResult>,
) {
    loop {
        let counted = management.queue_counts(&names.request_queue_prefix()).await;
        let counted = counted
            .map(|counted| {
                counted.into_iter().filter_map(|one| Some((names.parse_queue_name(&one.name)?, one))).collect()
            })
            .map_err(|why| why.to_string());
        if results.send(counted).await.is_err() {
            return;
        }
        sleep(CONTROLLER_COUNTS_INTERVAL).await;
    }
}
