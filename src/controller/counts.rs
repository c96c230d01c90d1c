//! What workers hold, as the broker's management interface counts it.

use std::collections::{BTreeMap, BTreeSet};

use tokio::sync::mpsc;
use tokio::time::sleep;

use super::names::Names;
use crate::amqp::management::{self, Management};
use crate::domain::group::Key;
use crate::domain::group::load::Counted;
use crate::domain::time::Instant;
use crate::limits::{CONTROLLER_COUNT_EVERY, CONTROLLER_COUNTS_FRESH};

/// What was counted at one moment, or why nothing was.
pub(super) type Told = Result<Vec<(Key, management::Counted)>, String>;

/// What is known of it.
#[derive(Default)]
pub(super) struct Counts {
    last: Option<(Instant, BTreeMap<Key, Counted>)>,
    /// Why nothing is counted.
    trouble: Option<String>,
    /// Queues that go by somebody else's policy, as far as that was said.
    strange: BTreeSet<Key>,
}

impl Counts {
    /// What is held of a key, where it was counted not long ago.
    pub(super) fn of(&self, key: &Key, now: Instant) -> Option<Counted> {
        let (at, counts) = self.last.as_ref()?;
        if now.since(*at) < CONTROLLER_COUNTS_FRESH { counts.get(key).copied() } else { None }
    }

    /// Whether anything was counted at all.
    pub(super) const fn is_first(&self) -> bool {
        self.last.is_none()
    }

    /// Takes in what was counted, and says what has changed about that. `policy` is what its queues should go by.
    pub(super) fn take(&mut self, told: &Told, policy: Option<&str>, now: Instant) {
        match told {
            Ok(counted) => {
                if self.trouble.take().is_some() {
                    tracing::info!("what workers hold is counted by the broker again");
                }
                self.compare(counted, policy);
                let counts = counted.iter().map(|(key, counted)| (key.clone(), held(counted)));
                self.last = Some((now, counts.collect()));
            }
            Err(why) => {
                if self.trouble.is_none() {
                    tracing::warn!("what workers hold is not counted by the broker, and goes by their reports: {why}");
                }
                self.trouble = Some(why.clone());
            }
        }
    }

    fn compare(&mut self, counted: &[(Key, management::Counted)], policy: Option<&str>) {
        let Some(ours) = policy else { return };
        for (key, counted) in counted {
            if counted.policy.as_deref() == Some(ours) {
                self.strange.remove(key);
            } else if counted.policy.is_some() && self.strange.insert(key.clone()) {
                tracing::warn!(
                    %key, policy = counted.policy,
                    "its queue goes by this policy of somebody else's and not by {ours}: time, length and limits may be others"
                );
            }
        }
    }
}

const fn held(counted: &management::Counted) -> Counted {
    Counted { unacknowledged: counted.unacknowledged, published: counted.published, acknowledged: counted.acknowledged }
}

/// Asks again and again, for as long as somebody wants to know.
pub(super) async fn count(management: &Management, names: &Names, told: mpsc::Sender<Told>) {
    loop {
        let counted = management.counts(&names.request_queue_start()).await;
        let counted = counted
            .map(|counted| counted.into_iter().filter_map(|one| Some((names.key_of(&one.name)?, one))).collect())
            .map_err(|why| why.to_string());
        if told.send(counted).await.is_err() {
            return;
        }
        sleep(CONTROLLER_COUNT_EVERY).await;
    }
}
