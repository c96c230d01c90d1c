//! Polls how many requests workers hold, as the management interface counts them.

use std::collections::BTreeMap;

use super::queue_names::QueueNames;
use journeyman_domain::group::Key;
use journeyman_domain::limits::CONTROLLER_COUNTS_TTL;
use journeyman_domain::time::Instant;
use journeyman_platform::amqp::management::Management;

/// Unacknowledged requests by key.
pub(super) type CountResult = Result<BTreeMap<Key, u32>, String>;

#[derive(Default)]
pub(super) struct UnacknowledgedCounts {
    last: Option<(Instant, BTreeMap<Key, u32>)>,
    is_failing: bool,
}

impl UnacknowledgedCounts {
    pub(super) fn fresh(&self, key: &Key, now: Instant) -> Option<u32> {
        let (at, counts) = self.last.as_ref()?;
        if now.since(*at) < CONTROLLER_COUNTS_TTL { counts.get(key).copied() } else { None }
    }

    pub(super) const fn is_empty(&self) -> bool {
        self.last.is_none()
    }

    pub(super) fn update(&mut self, result: CountResult, now: Instant) {
        match result {
            Ok(counts) => {
                if std::mem::take(&mut self.is_failing) {
                    tracing::info!("queue counts of the management interface are available again");
                }
                self.last = Some((now, counts));
            }
            Err(why) => {
                if !std::mem::replace(&mut self.is_failing, true) {
                    tracing::warn!("no queue counts from the management interface, using worker reports: {why}");
                }
            }
        }
    }
}

pub(super) async fn count_queues(management: &Management, names: &QueueNames) -> CountResult {
    let counted = management.queue_counts(&names.request_queue_prefix()).await.map_err(|why| why.to_string())?;
    let keys = counted.into_iter().filter_map(|one| Some((names.parse_queue_name(&one.name)?, one.unacknowledged)));
    Ok(keys.collect())
}
