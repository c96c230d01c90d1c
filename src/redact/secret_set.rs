//! A set of texts to be looked for, that can change at any time, and finds where one might start at memory speed.
//!
//! Four bytes at a time are looked up in a bitmap that knows how every needle and every shape begins. It has false alarms,
//! which a map settles; it never misses. Adding a needle costs no more than reading it, so that the credentials of each
//! claim can come and go.

use std::collections::HashMap;
use std::collections::hash_map::Entry;

use super::encodings::{self, EncodedSecret, LineBreaks};
use super::patterns;
use crate::limits::REDACT_BITMAP_BITS_MAX;

/// How many bytes of a needle the bitmap knows.
pub(super) const WINDOW: usize = 4;

const BITMAP_BITS_MIN: usize = 1 << 12;
/// One bit in so many is set, at most, while the bitmap may grow.
const BITS_A_WINDOW: usize = 128;

/// The name of a secret within its set.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct SecretId(u64);

#[derive(Clone)]
struct Needle {
    secret: SecretId,
    variant: EncodedSecret,
}

/// Texts to be looked for, with all their variants.
#[derive(Clone)]
pub struct SecretSet {
    bits: Bits,
    by_window: HashMap<u32, Vec<Needle>>,
    /// What the variants of a secret start with, to find them again.
    windows: HashMap<SecretId, Box<[u32]>>,
    shapes: Patterns,
    last: u64,
    count: usize,
    /// How many of them may have line ends within.
    broken: usize,
    bytes: usize,
    /// How many windows the bitmap still knows though nothing starts with them any more.
    stale: usize,
}

/// Whether a set knows what secrets look like, besides the secrets that it was told.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Patterns {
    /// It does.
    Included,
    /// It does not; another set beside it will.
    Excluded,
}

impl std::fmt::Debug for SecretSet {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(out, "Needles({})", self.count)
    }
}

impl SecretSet {
    /// A set without secrets.
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

    /// Adds a secret. What has fewer than [`REDACT_SECRET_CHARS_MIN`](crate::limits::REDACT_SECRET_CHARS_MIN)
    /// characters is not looked for: it could not be told from ordinary text.
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

    /// Forgets secrets.
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

    /// How many bytes all variants have.
    #[must_use]
    pub const fn bytes(&self) -> usize {
        self.bytes
    }

    /// Whether something to be looked for may start with these bytes.
    #[inline]
    pub(super) fn may_start(&self, window: u32) -> bool {
        self.bits.has(window)
    }

    /// Whether something to be looked for may start with these bytes, which are all there are: fewer than [`WINDOW`].
    pub(super) fn may_start_short(&self, bytes: &[u8]) -> bool {
        self.bits.has_short(bytes)
    }

    /// Whether something may start with these bytes, two or three, and go on behind a line end.
    pub(super) fn may_start_broken(&self, bytes: &[u8]) -> bool {
        self.bits.has_broken(bytes)
    }

    /// Whether anything here may have line ends within.
    pub(super) const fn may_be_broken(&self) -> bool {
        self.broken > 0
    }

    /// What starts with these bytes.
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

/// The bytes from `at` on as a number, where there are enough.
#[inline]
pub(super) fn window(bytes: &[u8], at: usize) -> Option<u32> {
    let bytes = bytes.get(at..at.checked_add(WINDOW)?)?;
    Some(u32::from_le_bytes(bytes.try_into().ok()?))
}

/// Which windows something starts with, and which shorter beginnings those have.
#[derive(Clone)]
struct Bits {
    windows: Box<[u64]>,
    /// Of two and of three bytes; those that may go on behind a line end once more.
    short: Box<[u64]>,
    /// Of one byte, without false alarms: most writes end with a line end, and nothing starts with one.
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

/// A short beginning as a number that tells its length too, and what may follow it.
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
    fn what_was_removed_is_no_longer_known_and_the_rest_is() {
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
    fn thousands_of_secrets_come_and_go_without_a_trace() {
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
