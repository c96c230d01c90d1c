//! Capacity as values that move. A claim cannot be asked for without a slot in hand, so there are never more claims,
//! asked for or held, than slots (I8).

use alloc::vec::Vec;

/// One unit of capacity. Cannot be made outside this module, copied, or used twice.
#[derive(Debug)]
#[must_use = "a slot that is dropped is capacity lost"]
pub struct Slot(());

/// The slots that nobody holds.
#[derive(Debug)]
pub struct Slots {
    free: u32,
    capacity: u32,
    /// Slots in use that are over when they come back.
    excess: u32,
}

impl Slots {
    /// As many slots as `capacity`, all free.
    #[must_use]
    pub const fn new(capacity: u32) -> Self {
        Self { free: capacity, capacity, excess: 0 }
    }

    /// How many are free.
    #[must_use]
    pub const fn free(&self) -> u32 {
        self.free
    }

    /// How many there are in all.
    #[must_use]
    pub const fn capacity(&self) -> u32 {
        self.capacity
    }

    /// Changes how many there are. Where too many are in use, they are over as they come back.
    pub fn resize(&mut self, capacity: u32) {
        let used = (self.capacity + self.excess).saturating_sub(self.free);
        self.capacity = capacity;
        self.free = capacity.saturating_sub(used);
        self.excess = used.saturating_sub(capacity);
    }

    /// Takes up to `most` slots.
    pub fn reserve(&mut self, most: u32) -> Vec<Slot> {
        let taken = most.min(self.free);
        self.free -= taken;
        (0..taken).map(|_| Slot(())).collect()
    }

    /// Takes slots back.
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
