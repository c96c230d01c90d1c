//! Which deliveries of a channel are acknowledged together: one acknowledgement covers every delivery up to its number, so it may
//! only be sent once all of them have ended (I19).

use alloc::collections::BTreeSet;
use alloc::vec::Vec;

/// The acknowledgements of one channel, whose deliveries are numbered from 1.
#[derive(Debug, Default)]
pub struct AckWindow {
    /// The broker knows of every delivery up to this one that it is settled.
    settled_up_to: u64,
    /// Settled at the broker, above `settled_up_to`.
    settled: BTreeSet<u64>,
    /// The deliveries to be acknowledged.
    finished: BTreeSet<u64>,
}

/// An acknowledgement.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ack {
    One(u64),
    UpTo(u64),
}

impl AckWindow {
    /// The request has ended, and its reply is confirmed.
    pub fn on_finished(&mut self, tag: u64) {
        self.finished.insert(tag);
    }

    /// The delivery was rejected, before any acknowledgement that covers it.
    pub fn on_rejected(&mut self, tag: u64) {
        self.settled.insert(tag);
    }

    /// The acknowledgements that are due.
    pub fn take(&mut self) -> Vec<Ack> {
        let (mut acks, mut last, mut covered) = (Vec::new(), self.settled_up_to, 0_u32);
        loop {
            let next = self.settled_up_to + 1;
            if self.finished.remove(&next) {
                (last, covered) = (next, covered + 1);
            } else if !self.settled.remove(&next) {
                break;
            }
            self.settled_up_to = next;
        }
        match covered {
            0 => {}
            1 => acks.push(Ack::One(last)),
            _ => acks.push(Ack::UpTo(last)),
        }
        acks.extend(self.finished.iter().copied().map(Ack::One));
        self.settled.append(&mut self.finished);
        acks
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn c1_contiguous_finished_deliveries_are_acknowledged_together() {
        let mut window = AckWindow::default();
        [1, 3, 2].into_iter().for_each(|tag| window.on_finished(tag));
        assert_eq!(window.take(), [Ack::UpTo(3)]);
        assert_eq!(window.take(), []);
        window.on_finished(4);
        assert_eq!(window.take(), [Ack::One(4)]);
    }

    #[test]
    fn c1_no_acknowledgement_covers_a_delivery_that_has_not_ended() {
        let mut window = AckWindow::default();
        [1, 2, 4, 6].into_iter().for_each(|tag| window.on_finished(tag));
        assert_eq!(window.take(), [Ack::UpTo(2), Ack::One(4), Ack::One(6)]);
        [3, 5].into_iter().for_each(|tag| window.on_finished(tag));
        assert_eq!(window.take(), [Ack::UpTo(5)]);
        window.on_finished(7);
        assert_eq!(window.take(), [Ack::One(7)]);
        assert!(window.settled.is_empty());
    }

    #[test]
    fn c1_a_rejected_delivery_is_neither_acknowledged_nor_waited_for() {
        let mut window = AckWindow::default();
        window.on_finished(1);
        window.on_rejected(2);
        window.on_finished(3);
        assert_eq!(window.take(), [Ack::UpTo(3)]);
        window.on_rejected(4);
        assert_eq!(window.take(), []);
        window.on_finished(5);
        assert_eq!(window.take(), [Ack::One(5)]);
        assert!(window.settled.is_empty());
    }
}
