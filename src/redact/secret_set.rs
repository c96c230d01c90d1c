//! A changing set of secrets that finds candidate matches at memory speed.
//!
//! Windows of four bytes are looked up in a bitmap of the beginnings of all encodings and patterns. The bitmap has false
//! positives, which a map resolves, and no false negatives. Adding a secret is cheap, because the credentials of each claim
//! come and go.

use std::collections::HashMap;
use std::collections::hash_map::Entry;

use super::encodings::{self, EncodedSecret, LineBreaks};
use super::patterns;
use crate::limits::REDACT_BITMAP_BITS_MAX;

pub(super) const WINDOW: usize = 4;

const BITMAP_BITS_MIN: usize = 1 << 12;
/// At most one bit in this many is set while the bitmap may grow.
const BITS_A_WINDOW: usize = 128;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct SecretId(u64);

#[derive(Clone)]
struct Needle {
    secret: SecretId,
    variant: EncodedSecret,
}

#[derive(Clone)]
pub struct SecretSet {
    bits: Bits,
    by_window: HashMap<u32, Vec<Needle>>,
    windows: HashMap<SecretId, Box<[u32]>>,
    shapes: Patterns,
    last: u64,
    count: usize,
    broken: usize,
    bytes: usize,
    stale: usize,
}

/// Whether a set also finds patterns of undeclared secrets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Patterns {
    Included,
    Excluded,
}

impl std::fmt::Debug for SecretSet {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(out, "SecretSet({})", self.count)
    }
}

impl SecretSet {
    #[must_use]
    pub fn new(shapes: Patterns) -> Self {
        let mut set = Self {
            bits: Bits::new(0),
            by_window: HashMap::new(),
            windows: HashMap::new(),
            shapes,
            last: 0,
            count: 0,
            broken: 0,
            bytes: 0,
            stale: 0,
        };
        set.rebuild();
        set
    }

    pub fn add(&mut self, secret: &str) -> SecretId {
        self.last += 1;
        let id = SecretId(self.last);
        let mut windows = Vec::new();
        for variant in encodings::of(secret) {
            let Some(window) = window(&variant.text, 0) else { continue };
            windows.push(window);
            self.bits.learn(&variant.text, variant.breaks);
            self.count += 1;
            self.broken += usize::from(variant.breaks == LineBreaks::Anywhere);
            self.bytes += variant.text.len();
            self.by_window.entry(window).or_default().push(Needle { secret: id, variant });
        }
        self.windows.insert(id, windows.into());
        if self.bits.is_crowded(self.count) {
            self.rebuild();
        }
        id
    }

    pub fn remove(&mut self, secrets: &[SecretId]) {
        for id in secrets {
            for window in self.windows.remove(id).unwrap_or_default() {
                let Entry::Occupied(mut needles) = self.by_window.entry(window) else { continue };
                needles.get_mut().retain(|needle| {
                    let kept = needle.secret != *id;
                    if !kept {
                        self.count -= 1;
                        self.stale += 1;
                        self.broken -= usize::from(needle.variant.breaks == LineBreaks::Anywhere);
                        self.bytes -= needle.variant.text.len();
                    }
                    kept
                });
                if needles.get().is_empty() {
                    needles.remove();
                }
            }
        }
        if self.stale > self.count.max(BITMAP_BITS_MIN / BITS_A_WINDOW) {
            self.rebuild();
        }
    }

    #[must_use]
    pub const fn bytes(&self) -> usize {
        self.bytes
    }

    #[inline]
    pub(super) fn may_start(&self, window: u32) -> bool {
        self.bits.has(window)
    }

    pub(super) fn may_start_short(&self, bytes: &[u8]) -> bool {
        self.bits.has_short(bytes)
    }

    pub(super) fn may_start_broken(&self, bytes: &[u8]) -> bool {
        self.bits.has_broken(bytes)
    }

    pub(super) const fn may_be_broken(&self) -> bool {
        self.broken > 0
    }

    pub(super) fn at(&self, window: u32) -> impl Iterator<Item = &EncodedSecret> {
        self.by_window.get(&window).into_iter().flatten().map(|needle| &needle.variant)
    }

    fn rebuild(&mut self) {
        let shapes = match self.shapes {
            Patterns::Included => patterns::prefixes(),
            Patterns::Excluded => Vec::new(),
        };
        self.bits = Bits::new(self.count + shapes.len());
        self.stale = 0;
        shapes.iter().for_each(|beginning| self.bits.learn(beginning, LineBreaks::Nowhere));
        for needle in self.by_window.values().flatten() {
            self.bits.learn(&needle.variant.text, needle.variant.breaks);
        }
    }
}

#[inline]
pub(super) fn window(bytes: &[u8], at: usize) -> Option<u32> {
    let bytes = bytes.get(at..at.checked_add(WINDOW)?)?;
    Some(u32::from_le_bytes(bytes.try_into().ok()?))
}

#[derive(Clone)]
struct Bits {
    windows: Box<[u64]>,
    short: Box<[u64]>,
    first: [u64; 4],
    shift: u32,
}

impl Bits {
    fn new(needles: usize) -> Self {
        let bits = (needles * BITS_A_WINDOW).next_power_of_two().clamp(BITMAP_BITS_MIN, REDACT_BITMAP_BITS_MAX);
        let words = || vec![0; bits / 64].into();
        Self { windows: words(), short: words(), first: [0; 4], shift: 32 - bits.trailing_zeros() }
    }

    fn is_crowded(&self, needles: usize) -> bool {
        let bits = self.windows.len() * 64;
        bits < REDACT_BITMAP_BITS_MAX && needles * BITS_A_WINDOW > bits
    }

    fn learn(&mut self, beginning: &[u8], breaks: LineBreaks) {
        if let Some(window) = window(beginning, 0) {
            set(&mut self.windows, slot(window, self.shift));
        }
        for bytes in 2..WINDOW {
            let bytes = beginning.get(..bytes).unwrap_or_default();
            set(&mut self.short, slot(number(bytes, LineBreaks::Nowhere), self.shift));
            if breaks == LineBreaks::Anywhere {
                set(&mut self.short, slot(number(bytes, breaks), self.shift));
            }
        }
        if let Some(first) = beginning.first() {
            set(&mut self.first, usize::from(*first));
        }
    }

    #[inline]
    fn has(&self, window: u32) -> bool {
        is_set(&self.windows, slot(window, self.shift))
    }

    fn has_short(&self, bytes: &[u8]) -> bool {
        match bytes {
            [] => false,
            [first] => is_set(&self.first, usize::from(*first)),
            more => is_set(&self.short, slot(number(more, LineBreaks::Nowhere), self.shift)),
        }
    }

    fn has_broken(&self, bytes: &[u8]) -> bool {
        is_set(&self.short, slot(number(bytes, LineBreaks::Anywhere), self.shift))
    }
}

#[inline]
fn is_set(words: &[u64], slot: usize) -> bool {
    words.get(slot >> 6).is_some_and(|word| word >> (slot & 63) & 1 == 1)
}

fn set(words: &mut [u64], slot: usize) {
    if let Some(word) = words.get_mut(slot >> 6) {
        *word |= 1 << (slot & 63);
    }
}

#[inline]
const fn slot(number: u32, shift: u32) -> usize {
    (number.wrapping_mul(0x9E37_79B1) >> shift) as usize
}

fn number(bytes: &[u8], breaks: LineBreaks) -> u32 {
    let first = match breaks {
        LineBreaks::Nowhere => 1,
        LineBreaks::Anywhere => 2,
    };
    bytes.iter().fold(first, |number, byte| number << 8 | u32::from(*byte))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn removing_a_secret_keeps_the_others() {
        let mut set = SecretSet::new(Patterns::Included);
        let (one, _two) = (set.add("first secret"), set.add("second secret"));
        let known = |set: &SecretSet, text: &str| {
            set.at(window(text.as_bytes(), 0).unwrap()).any(|n| **n.text == *text.as_bytes())
        };
        assert!(known(&set, "first secret") && known(&set, "second secret"));
        set.remove(&[one]);
        assert!(!known(&set, "first secret") && known(&set, "second secret"));
    }

    #[test]
    fn removing_thousands_of_secrets_leaves_nothing_behind() {
        let mut set = SecretSet::new(Patterns::Included);
        let ids: Vec<_> = (0..3_000).map(|number| set.add(&format!("{number:06}-secret"))).collect();
        for number in [0, 1_499, 2_999] {
            let text = format!("{number:06}-secret");
            assert!(set.may_start(window(text.as_bytes(), 0).unwrap()));
            assert!((1..WINDOW).all(|bytes| set.may_start_short(&text.as_bytes()[..bytes])));
        }
        set.remove(&ids);
        assert_eq!((set.count, set.broken, set.bytes, set.by_window.len(), set.windows.len()), (0, 0, 0, 0, 0));
    }
}
