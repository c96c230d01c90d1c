//! What a connection brought and is still in hand: orphans whose queue is not there yet, dead letters that are to be put aside,
//! and what is known of queues.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use lapin::message::Delivery;
use tokio::sync::mpsc;

use super::answers::Obituary;
use super::counts::Counts;
use super::names::Names;
use super::publish::{self, Orphan};
use crate::amqp::headers;
use crate::domain::group::Key;
use crate::domain::group::load::Load;
use crate::domain::group::pool::{Event, Pool};
use crate::domain::group::reports::Reports;
use crate::domain::time::Instant;
use crate::limits::{
    CONTROLLER_BIND_TRIES, CONTROLLER_GROUPS_MAX, CONTROLLER_HEADERS_BYTES_MAX, CONTROLLER_LOOK_EVERY,
    CONTROLLER_ORPHAN_WAIT, CONTROLLER_REFUSED_MAX, CONTROLLER_ROOM_WAIT,
};

/// Whether there is no room for a group of this key.
pub(super) fn full(pool: &Pool, key: &Key) -> bool {
    pool.tracker().wanted(key).is_none() && pool.tracker().groups().count() >= CONTROLLER_GROUPS_MAX
}

/// What is known of the queue that a request is to reach.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum QueueIs {
    /// It was not there.
    Missing,
    /// It has refused it.
    Full,
    /// It does not confirm what was sent before.
    Silent,
}

/// One that waits, and since when.
pub(super) struct Waiting {
    pub(super) since: Instant,
    /// Nothing is done with it before.
    pub(super) not_before: Instant,
    pub(super) queue: QueueIs,
    pub(super) delivery: Delivery,
}

/// What was found in a queue.
#[derive(Debug, Clone, Copy)]
pub(super) struct Depth {
    pub(super) ready: u32,
    pub(super) at: Instant,
}

/// What this connection brought.
#[derive(Default)]
pub(super) struct Here {
    /// Orphans whose queue is not there yet.
    waiting: BTreeMap<Key, Vec<Waiting>>,
    /// What waits in each queue, as far as it was looked into.
    pub(super) depths: BTreeMap<Key, Depth>,
    /// Queues that are being looked into.
    pub(super) looking: BTreeSet<Key>,
    /// Queues into which could not be looked, and until when that is not tried again.
    pub(super) unheard: BTreeMap<Key, Instant>,
    /// What each group had to do when it was last decided about.
    pub(super) loads: BTreeMap<Key, Load>,
    pub(super) counts: Counts,
    pub(super) reports: Reports,
    /// Dead letters that are answered and still to be put aside.
    pub(super) aside: Vec<Waiting>,
}

impl Here {
    /// Takes an orphan in. Answers with one that will have no queue.
    pub(super) fn take_in(
        &mut self,
        names: &Names,
        pool: &mut Pool,
        delivery: Delivery,
        now: Instant,
    ) -> Option<Box<(Delivery, Obituary)>> {
        let key = names.key(delivery.routing_key.as_str()).filter(|key| names.request_queue(key).is_some());
        let Some(key) = key else {
            let message = "the key is too long for the name of a queue, or holds what no such name can".to_owned();
            return Some(Box::new((delivery, Obituary { reason: "key".to_owned(), message, queue: None })));
        };
        if delivery
            .properties
            .headers()
            .as_ref()
            .is_some_and(|table| headers::bytes(table) > CONTROLLER_HEADERS_BYTES_MAX)
        {
            let message = format!("its headers are larger than {CONTROLLER_HEADERS_BYTES_MAX} bytes");
            return Some(Box::new((delivery, Obituary { reason: "headers".to_owned(), message, queue: None })));
        }
        if publish::goes_round(&delivery) {
            return Some(Box::new((delivery, Obituary::of_circle())));
        }
        if full(pool, &key) {
            let message = format!("there are {CONTROLLER_GROUPS_MAX} groups already");
            return Some(Box::new((delivery, Obituary { reason: "groups".to_owned(), message, queue: None })));
        }
        if publish::hops(&delivery) > 0 {
            pool.handle(Event::Strayed(key.clone()), now);
        }
        pool.handle(Event::Demand { key: key.clone(), extra: Duration::ZERO }, now);
        self.waiting.entry(key).or_default().push(Waiting {
            since: now,
            not_before: now,
            queue: QueueIs::Missing,
            delivery,
        });
        None
    }

    /// Takes in a dead letter that is to be put aside.
    pub(super) fn take_letter(&mut self, delivery: Delivery, now: Instant) {
        self.aside.push(Waiting { since: now, not_before: now, queue: QueueIs::Missing, delivery });
    }

    /// Those that have waited too long, or whose queue cannot be made: they would take the room of others. Where there is no room left,
    /// too many of one key have to go as well.
    pub(super) fn give_up(&mut self, pool: &Pool, room_is_left: bool, now: Instant) -> Vec<(Delivery, Obituary)> {
        let mut over = Vec::new();
        self.waiting.retain(|key, waiting| {
            let in_vain = pool.failures(key) >= CONTROLLER_BIND_TRIES;
            let old = waiting.extract_if(.., |one| in_vain || now.since(one.since) >= CONTROLLER_ORPHAN_WAIT);
            over.extend(old.map(|one| (one.delivery, Obituary::of_wait(one.queue))));
            let is_slow = waiting.iter().any(|one| now.since(one.since) >= CONTROLLER_ROOM_WAIT);
            if !room_is_left && is_slow && waiting.len() > CONTROLLER_REFUSED_MAX {
                waiting.sort_by_key(|one| one.since);
                let many = waiting.drain(CONTROLLER_REFUSED_MAX..);
                over.extend(many.map(|one| (one.delivery, Obituary::of_crowd(one.queue))));
            }
            !waiting.is_empty()
        });
        over
    }

    /// Takes one in again that could not be forwarded: its queue may be full, or gone. Answers with one for which a full queue has
    /// too many waiting here already: they would take the room of others.
    pub(super) fn take_back(
        &mut self,
        pool: &mut Pool,
        orphan: Orphan,
        now: Instant,
    ) -> Option<Box<(Delivery, Obituary)>> {
        let Orphan { key, since, queue, delivery } = orphan;
        if queue == QueueIs::Missing {
            pool.handle(Event::Strayed(key.clone()), now);
        }
        pool.handle(Event::Demand { key: key.clone(), extra: Duration::ZERO }, now);
        let waiting = self.waiting.entry(key).or_default();
        let is_full = |one: &&Waiting| one.queue == QueueIs::Full;
        if queue == QueueIs::Full && waiting.iter().filter(is_full).count() >= CONTROLLER_REFUSED_MAX {
            return Some(Box::new((delivery, Obituary::of_wait(queue))));
        }
        let not_before = now.plus(CONTROLLER_LOOK_EVERY);
        waiting.push(Waiting { since, not_before, queue, delivery });
        None
    }

    /// The keys under which something waits for a queue.
    pub(super) fn awaited(&self) -> impl Iterator<Item = &Key> {
        self.waiting.keys()
    }

    /// Whether something waits for the queue of this key.
    pub(super) fn awaits(&self, key: &Key) -> bool {
        self.waiting.contains_key(key)
    }

    /// Forwards those whose queue is there.
    pub(super) fn let_go(&mut self, pool: &Pool, ready: &mpsc::Sender<Orphan>, now: Instant) {
        for (key, waiting) in self.waiting.iter_mut().filter(|(key, _)| pool.is_bound(key)) {
            for Waiting { since, queue, delivery, .. } in waiting.extract_if(.., |one| one.not_before <= now) {
                // As many as there can be have room; otherwise the connection is over, and the broker has them.
                drop(ready.try_send(Orphan { key: key.clone(), since, queue, delivery }));
            }
        }
        self.waiting.retain(|_, waiting| !waiting.is_empty());
    }
}
