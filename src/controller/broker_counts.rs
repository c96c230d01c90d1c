//! What workers hold, as the broker's management interface counts it.

use std::collections::{BTreeMap, BTreeSet};

use tokio::sync::mpsc;
use tokio::time::sleep;

use super::queue_names::QueueNames;
use crate::amqp::management::{self, Management};
use crate::domain::group::Key;
use crate::domain::group::load::LoadCounts;
use crate::domain::time::Instant;
use crate::limits::{CONTROLLER_COUNTS_INTERVAL, CONTROLLER_COUNTS_TTL};

/// What was counted at one moment, or why nothing was.
pub(super) type CountResult = Result<Vec<(Key, management::QueueCounts)>, String>;

/// What is known of it.
#[derive(Default)]
pub(super) struct BrokerCounts {
    last: Option<(Instant, BTreeMap<Key, LoadCounts>)>,
    /// Why nothing is counted.
    error: Option<String>,
    /// Queues that go by somebody else's policy, as far as that was said.
    foreign_policies: BTreeSet<Key>,
}

impl BrokerCounts {
    /// What is held of a key, where it was counted not long ago.
    pub(super) fn fresh(&self, key: &Key, now: Instant) -> Option<LoadCounts> {
        let (at, counts) = self.last.as_ref()?;
        if now.since(*at) < CONTROLLER_COUNTS_TTL { counts.get(key).copied() } else { None }
    }

    /// Whether anything was counted at all.
    pub(super) const fn is_empty(&self) -> bool {
        self.last.is_none()
    }

    /// Takes in what was counted, and says what has changed about that. `policy` is what its queues should go by.
    pub(super) fn update(&mut self, told: &CountResult, policy: Option<&str>, now: Instant) {
        match told {
            Ok(counted) => {
                if self.error.take().is_some() {
                    tracing::info!("what workers hold is counted by the broker again");
                }
                self.check_policies(counted, policy);
                let counts = counted.iter().map(|(key, counted)| (key.clone(), unacknowledged(counted)));
                self.last = Some((now, counts.collect()));
            }
            Err(why) => {
                if self.error.is_none() {
                    tracing::warn!("what workers hold is not counted by the broker, and goes by their reports: {why}");
                }
                self.error = Some(why.clone());
            }
        }
    }

    fn check_policies(&mut self, counted: &[(Key, management::QueueCounts)], policy: Option<&str>) {
        let Some(ours) = policy else { return };
        for (key, counted) in counted {
            if counted.policy.as_deref() == Some(ours) {
                self.foreign_policies.remove(key);
            } else if counted.policy.is_some() && self.foreign_policies.insert(key.clone()) {
                tracing::warn!(
                    %key, policy = counted.policy,
                    "its queue goes by this policy of somebody else's and not by {ours}: time, length and limits may be others"
                );
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

/// Asks again and again, for as long as somebody wants to know.
pub(super) async fn poll_broker_counts(management: &Management, names: &QueueNames, told: mpsc::Sender<CountResult>) {
    loop {
        let counted = management.queue_counts(&names.request_queue_prefix()).await;
        let counted = counted
            .map(|counted| {
                counted.into_iter().filter_map(|one| Some((names.parse_queue_name(&one.name)?, one))).collect()
            })
            .map_err(|why| why.to_string());
        if told.send(counted).await.is_err() {
            return;
        }
        sleep(CONTROLLER_COUNTS_INTERVAL).await;
    }
}
