//! Requests and queue facts that the controller holds for the lifetime of one connection.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use lapin::message::Delivery;
use tokio::sync::mpsc;

use super::broker_counts::BrokerCounts;
use super::error_replies::DeadLetterReason;
use super::forwarding::{self, OrphanRequest};
use super::queue_names::QueueNames;
use crate::amqp::headers;
use crate::domain::group::Key;
use crate::domain::group::load::Load;
use crate::domain::group::pool::{Event, Pool};
use crate::domain::group::report_throttle::ReportThrottle;
use crate::domain::time::Instant;
use crate::limits::{
    CONTROLLER_BIND_ATTEMPTS_MAX, CONTROLLER_GROUPS_MAX, CONTROLLER_HEADERS_BYTES_MAX, CONTROLLER_ORPHAN_TIMEOUT,
    CONTROLLER_QUEUE_DECLARE_SLOW, CONTROLLER_QUEUE_FULL_WAITING_MAX, CONTROLLER_RECONCILE_INTERVAL,
};

pub(super) fn is_group_limit_reached(pool: &Pool, key: &Key) -> bool {
    pool.tracker().desired(key).is_none() && pool.tracker().groups().count() >= CONTROLLER_GROUPS_MAX
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum QueueCondition {
    Missing,
    Full,
    Unconfirmed,
}

pub(super) struct HeldRequest {
    pub(super) since: Instant,
    pub(super) not_before: Instant,
    pub(super) queue: QueueCondition,
    pub(super) delivery: Delivery,
}

#[derive(Debug, Clone, Copy)]
pub(super) struct DepthSample {
    pub(super) ready: u32,
    pub(super) at: Instant,
}

#[derive(Default)]
pub(super) struct SessionState {
    held: BTreeMap<Key, Vec<HeldRequest>>,
    pub(super) depths: BTreeMap<Key, DepthSample>,
    pub(super) depth_checks: BTreeSet<Key>,
    pub(super) depth_backoff: BTreeMap<Key, Instant>,
    pub(super) loads: BTreeMap<Key, Load>,
    pub(super) counts: BrokerCounts,
    pub(super) reports: ReportThrottle,
    pub(super) poison_pending: Vec<HeldRequest>,
}

impl SessionState {
    pub(super) fn hold_orphan(
        &mut self,
        names: &QueueNames,
        pool: &mut Pool,
        delivery: Delivery,
        now: Instant,
    ) -> Option<Box<(Delivery, DeadLetterReason)>> {
        let key =
            names.parse_routing_key(delivery.routing_key.as_str()).filter(|key| names.request_queue(key).is_some());
        let Some(key) = key else {
            let message = "the key is not UTF-8, or too long for the name of a queue".to_owned();
            return Some(Box::new((
                delivery,
                DeadLetterReason { reason: "invalid-key".to_owned(), message, queue: None },
            )));
        };
        if delivery
            .properties
            .headers()
            .as_ref()
            .is_some_and(|table| headers::wire_bytes(table) > CONTROLLER_HEADERS_BYTES_MAX)
        {
            let message = format!("the headers are larger than {CONTROLLER_HEADERS_BYTES_MAX} bytes");
            return Some(Box::new((
                delivery,
                DeadLetterReason { reason: "headers-too-large".to_owned(), message, queue: None },
            )));
        }
        if forwarding::is_looping(&delivery) {
            return Some(Box::new((delivery, DeadLetterReason::for_loop())));
        }
        if is_group_limit_reached(pool, &key) {
            let message = format!("the pool has {CONTROLLER_GROUPS_MAX} groups already");
            return Some(Box::new((
                delivery,
                DeadLetterReason { reason: "too-many-groups".to_owned(), message, queue: None },
            )));
        }
        if forwarding::hops(&delivery) > 0 {
            pool.handle(Event::Unroutable(key.clone()), now);
        }
        pool.handle(Event::Demand { key: key.clone(), extra: Duration::ZERO }, now);
        self.held.entry(key).or_default().push(HeldRequest {
            since: now,
            not_before: now,
            queue: QueueCondition::Missing,
            delivery,
        });
        None
    }

    pub(super) fn hold_poison(&mut self, delivery: Delivery, now: Instant) {
        self.poison_pending.push(HeldRequest { since: now, not_before: now, queue: QueueCondition::Missing, delivery });
    }

    pub(super) fn expire_orphans(
        &mut self,
        pool: &Pool,
        room_is_left: bool,
        now: Instant,
    ) -> Vec<(Delivery, DeadLetterReason)> {
        let mut over = Vec::new();
        self.held.retain(|key, waiting| {
            let in_vain = pool.consecutive_failures(key) >= CONTROLLER_BIND_ATTEMPTS_MAX;
            let old = waiting.extract_if(.., |one| in_vain || now.since(one.since) >= CONTROLLER_ORPHAN_TIMEOUT);
            over.extend(old.map(|one| (one.delivery, DeadLetterReason::for_queue(one.queue))));
            let is_slow = waiting.iter().any(|one| now.since(one.since) >= CONTROLLER_QUEUE_DECLARE_SLOW);
            if !room_is_left && is_slow && waiting.len() > CONTROLLER_QUEUE_FULL_WAITING_MAX {
                waiting.sort_by_key(|one| one.since);
                let many = waiting.drain(CONTROLLER_QUEUE_FULL_WAITING_MAX..);
                over.extend(many.map(|one| (one.delivery, DeadLetterReason::for_crowded_queue(one.queue))));
            }
            !waiting.is_empty()
        });
        over
    }

    pub(super) fn hold_returned(
        &mut self,
        pool: &mut Pool,
        orphan: OrphanRequest,
        now: Instant,
    ) -> Option<Box<(Delivery, DeadLetterReason)>> {
        let OrphanRequest { key, since, queue, delivery } = orphan;
        if queue == QueueCondition::Missing {
            pool.handle(Event::Unroutable(key.clone()), now);
        }
        pool.handle(Event::Demand { key: key.clone(), extra: Duration::ZERO }, now);
        let waiting = self.held.entry(key).or_default();
        let is_full = |one: &&HeldRequest| one.queue == QueueCondition::Full;
        if queue == QueueCondition::Full && waiting.iter().filter(is_full).count() >= CONTROLLER_QUEUE_FULL_WAITING_MAX
        {
            return Some(Box::new((delivery, DeadLetterReason::for_queue(queue))));
        }
        let not_before = now.plus(CONTROLLER_RECONCILE_INTERVAL);
        waiting.push(HeldRequest { since, not_before, queue, delivery });
        None
    }

    pub(super) fn held_keys(&self) -> impl Iterator<Item = &Key> {
        self.held.keys()
    }

    pub(super) fn has_held(&self, key: &Key) -> bool {
        self.held.contains_key(key)
    }

    pub(super) fn release_bound(&mut self, pool: &Pool, ready: &mpsc::Sender<OrphanRequest>, now: Instant) {
        for (key, waiting) in self.held.iter_mut().filter(|(key, _)| pool.is_bound(key)) {
            for HeldRequest { since, queue, delivery, .. } in waiting.extract_if(.., |one| one.not_before <= now) {
                // The channel has room for the prefetch; if it is closed, the session is over and the broker redelivers.
                drop(ready.try_send(OrphanRequest { key: key.clone(), since, queue, delivery }));
            }
        }
        self.held.retain(|_, waiting| !waiting.is_empty());
    }
}
