//! Orphan requests that the controller holds until their queue is bound, or until they expire.

use std::collections::BTreeMap;

use lapin::message::Delivery;

use super::dead_letters::RejectedOrphan;
use super::error_replies::DeadLetterReason;
use super::message_headers;
use super::queue_names::QueueNames;
use journeyman_domain::group::Key;
use journeyman_domain::group::pool::{Event, Pool};
use journeyman_domain::limits::{
    CONTROLLER_BIND_ATTEMPTS_MAX, CONTROLLER_FORWARDS_MAX, CONTROLLER_GROUPS_MAX, CONTROLLER_HEADERS_BYTES_MAX,
    CONTROLLER_HOPS_MAX, CONTROLLER_ORPHAN_TIMEOUT, CONTROLLER_QUEUE_DECLARE_SLOW, CONTROLLER_QUEUE_FULL_WAITING_MAX,
    CONTROLLER_RECONCILE_INTERVAL,
};
use journeyman_domain::time::Instant;
use journeyman_platform::amqp::headers;

pub(super) fn is_group_limit_reached(pool: &Pool, key: &Key) -> bool {
    pool.tracker().desired(key).is_none() && pool.tracker().groups().count() >= CONTROLLER_GROUPS_MAX
}

pub(super) struct HeldOrphan {
    pub(super) since: Instant,
    pub(super) not_before: Instant,
    /// Its queue is full.
    pub(super) is_refused: bool,
    pub(super) delivery: Delivery,
}

#[derive(Default)]
pub(super) struct HeldOrphans {
    held: BTreeMap<Key, Vec<HeldOrphan>>,
    /// Why the broker refuses the queue of a key.
    refusals: BTreeMap<Key, String>,
    /// Forwarded requests that the broker has not confirmed.
    unconfirmed: BTreeMap<Key, usize>,
    pub(super) rejects: Vec<RejectedOrphan>,
}

impl HeldOrphans {
    pub(super) fn add(&mut self, names: &QueueNames, pool: &mut Pool, delivery: Delivery, now: Instant) {
        let key = names.parse_routing_key(delivery.routing_key.as_str());
        let key = key.filter(|key| names.request_queue(key).is_some());
        let Some(key) = key else {
            let message = "the key is not UTF-8, or too long for the name of a queue".to_owned();
            return self.reject(delivery, DeadLetterReason::new("invalid-key", message));
        };
        let table = delivery.properties.headers().as_ref();
        if table.is_some_and(|table| headers::wire_bytes(table) > CONTROLLER_HEADERS_BYTES_MAX) {
            let message = format!("the headers are larger than {CONTROLLER_HEADERS_BYTES_MAX} bytes");
            return self.reject(delivery, DeadLetterReason::new("headers-too-large", message));
        }
        if message_headers::hops(&delivery) >= CONTROLLER_HOPS_MAX {
            return self.reject(delivery, DeadLetterReason::for_loop());
        }
        if is_group_limit_reached(pool, &key) {
            let message = format!("the pool has {CONTROLLER_GROUPS_MAX} groups already");
            return self.reject(delivery, DeadLetterReason::new("too-many-groups", message));
        }
        if message_headers::hops(&delivery) > 0 {
            pool.handle(Event::Unroutable(key.clone()), now);
        }
        pool.handle(Event::demand(key.clone()), now);
        if let Some(why) = self.refusals.get(&key) {
            let reason = DeadLetterReason::for_refused_queue(why);
            return self.reject(delivery, reason);
        }
        let orphan = HeldOrphan { since: now, not_before: now, is_refused: false, delivery };
        self.held.entry(key).or_default().push(orphan);
    }

    pub(super) fn refusal(&self, key: &Key) -> Option<&str> {
        self.refusals.get(key).map(String::as_str)
    }

    /// Answers the requests of a key whose queue the broker refuses.
    pub(super) fn set_refusal(&mut self, key: &Key, refusal: Option<String>) {
        let Some(why) = refusal else { return drop(self.refusals.remove(key)) };
        for request in self.held.remove(key).into_iter().flatten() {
            self.reject(request.delivery, DeadLetterReason::for_refused_queue(&why));
        }
        self.refusals.insert(key.clone(), why);
    }

    fn reject(&mut self, delivery: Delivery, reason: DeadLetterReason) {
        self.rejects.push(RejectedOrphan(delivery, reason));
    }

    pub(super) fn expire(&mut self, pool: &Pool, has_room: bool, now: Instant) {
        let mut expired = Vec::new();
        self.held.retain(|key, waiting| {
            let is_failing = pool.consecutive_failures(key) >= CONTROLLER_BIND_ATTEMPTS_MAX;
            expired
                .extend(waiting.extract_if(.., |one| is_failing || now.since(one.since) >= CONTROLLER_ORPHAN_TIMEOUT));
            let is_slow = waiting.iter().any(|one| now.since(one.since) >= CONTROLLER_QUEUE_DECLARE_SLOW);
            if !has_room && is_slow && waiting.len() > CONTROLLER_QUEUE_FULL_WAITING_MAX {
                waiting.sort_by_key(|one| one.since);
                expired.extend(waiting.drain(CONTROLLER_QUEUE_FULL_WAITING_MAX..));
            }
            !waiting.is_empty()
        });
        for HeldOrphan { delivery, is_refused, .. } in expired {
            let reason = if is_refused { DeadLetterReason::full_queue() } else { DeadLetterReason::no_queue() };
            self.reject(delivery, reason);
        }
    }

    /// The queue of the key is full.
    pub(super) fn hold_refused(&mut self, key: Key, request: HeldOrphan, now: Instant) {
        let waiting = self.held.entry(key).or_default();
        let refused = waiting.iter().filter(|one| one.is_refused).count();
        if refused >= CONTROLLER_QUEUE_FULL_WAITING_MAX {
            return self.reject(request.delivery, DeadLetterReason::full_queue());
        }
        let not_before = now.plus(CONTROLLER_RECONCILE_INTERVAL);
        waiting.push(HeldOrphan { not_before, is_refused: true, ..request });
    }

    pub(super) fn keys(&self) -> impl Iterator<Item = &Key> {
        self.held.keys()
    }

    pub(super) fn contains(&self, key: &Key) -> bool {
        self.held.contains_key(key)
    }

    /// Requests whose queue is bound. The rest of a queue that does not confirm stays held and expires, so that it delays no
    /// other key.
    pub(super) fn next_forwards(&mut self, pool: &Pool, now: Instant) -> Vec<(Key, HeldOrphan)> {
        let mut due = Vec::new();
        for (key, waiting) in self.held.iter_mut().filter(|(key, _)| pool.is_bound(key)) {
            let free = CONTROLLER_FORWARDS_MAX - self.unconfirmed.get(key).copied().unwrap_or_default();
            let before = due.len();
            let released = waiting.extract_if(.., |one| one.not_before <= now).take(free);
            due.extend(released.map(|request| (key.clone(), request)));
            if due.len() > before {
                *self.unconfirmed.entry(key.clone()).or_default() += due.len() - before;
            }
        }
        self.held.retain(|_, waiting| !waiting.is_empty());
        due
    }

    pub(super) fn on_confirmed(&mut self, key: &Key) {
        if let Some(count) = self.unconfirmed.get_mut(key) {
            *count -= 1;
            if *count == 0 {
                self.unconfirmed.remove(key);
            }
        }
    }
}
