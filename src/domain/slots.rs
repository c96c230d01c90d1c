//! Capacity as values that move. Requesting a claim takes a slot, so there are never more claims, requested or held,
//! than slots (I8).

use alloc::vec::Vec;

/// One unit of capacity. Cannot be constructed elsewhere, copied, or used twice.
#[derive(Debug)]
#[must_use = "a slot that is dropped is capacity lost"]
pub struct Slot(());

#[derive(Debug)]
pub struct Slots {
    free: u32,
    capacity: u32,
    /// Slots in use that are dropped on release, since the capacity was reduced.
    excess: u32,
}

impl Slots {
    pub const fn new(capacity: u32) -> Self {
        Self { free: capacity, capacity, excess: 0 }
    }

    pub const fn free(&self) -> u32 {
        self.free
    }

    pub const fn capacity(&self) -> u32 {
        self.capacity
    }

    /// Changes the capacity. Surplus slots in use are dropped as they are released.
    pub fn resize(&mut self, capacity: u32) {
        let used = (self.capacity + self.excess).saturating_sub(self.free);
        self.capacity = capacity;
        self.free = capacity.saturating_sub(used);
        self.excess = used.saturating_sub(capacity);
    }

    pub fn reserve(&mut self, max: u32) -> Vec<Slot> {
        let taken = max.min(self.free);
        self.free -= taken;
        (0..taken).map(|_| Slot(())).collect()
    }

    pub fn release(&mut self, slots: impl IntoIterator<Item = Slot>) {
        for Slot(()) in slots {
            if self.excess > 0 {
                self.excess -= 1;
            } else {
                self.free += 1;
            }
        }
        debug_assert!(self.free <= self.capacity, "a slot was given back twice");
    }
}
