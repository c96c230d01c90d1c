//! A changing set of secrets that finds candidate matches at memory speed.
//!
//! Windows of four bytes are looked up in a bitmap of the beginnings of all encodings and patterns. The bitmap has false
//! positives, which a map resolves, and no false negatives. Adding a secret is cheap, because the credentials of each claim
//! come and go.

use std::collections::{BTreeMap, BTreeSet};

use super::encodings::{self, EncodedSecret, LineBreaks};
use super::patterns;

pub(super) const WINDOW: usize = 4;

/// 8 KiB, which stay in the cache: the credentials of 32 claims set one bit in fifty.
const BITMAP_BITS_LOG2: u32 = 16;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SecretId(u64);

#[derive(Clone)]
struct Needle {
    secret: SecretId,
    variant: EncodedSecret,
}

#[derive(Clone)]
pub struct SecretSet {
    bitmap: Box<[u64]>,
    by_window: BTreeMap<u32, Vec<Needle>>,
    pattern_windows: BTreeSet<u32>,
    last_id: u64,
    bytes: usize,
}

/// Whether a set also finds patterns of undeclared secrets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Patterns {
    Included,
    Excluded,
}

impl std::fmt::Debug for SecretSet {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(out, "SecretSet({} bytes)", self.bytes)
    }
}

impl SecretSet {
    pub fn new(patterns: Patterns) -> Self {
        let prefixes = match patterns {
            Patterns::Included => patterns::prefixes(),
            Patterns::Excluded => Vec::new(),
        };
        let mut set = Self {
            bitmap: Box::default(),
            by_window: BTreeMap::new(),
            pattern_windows: prefixes.iter().filter_map(|prefix| window(prefix, 0)).collect(),
            last_id: 0,
            bytes: 0,
        };
        set.rebuild_bitmap();
        set
    }

    pub fn add(&mut self, secret: &str) -> SecretId {
        self.last_id += 1;
        let id = SecretId(self.last_id);
        for variant in encodings::of(secret) {
            let Some(window) = window(&variant.text, 0) else { continue };
            set_bit(&mut self.bitmap, window);
            self.bytes += variant.text.len();
            self.by_window.entry(window).or_default().push(Needle { secret: id, variant });
        }
        id
    }

    pub fn remove(&mut self, secrets: &[SecretId]) {
        self.by_window.retain(|_, needles| {
            needles.retain(|needle| !secrets.contains(&needle.secret));
            !needles.is_empty()
        });
        self.bytes = self.by_window.values().flatten().map(|needle| needle.variant.text.len()).sum();
        self.rebuild_bitmap();
    }

    pub const fn bytes(&self) -> usize {
        self.bytes
    }

    #[inline]
    pub(super) fn may_start(&self, window: u32) -> bool {
        let bit = bit(window);
        self.bitmap.get(bit >> 6).is_some_and(|word| word >> (bit & 63) & 1 == 1)
    }

    /// Whether any encoding or pattern begins with `bytes`, which are fewer than [`WINDOW`].
    pub(super) fn may_start_short(&self, bytes: &[u8]) -> bool {
        let windows = windows_of(bytes);
        self.pattern_windows.range(windows.clone()).next().is_some() || self.by_window.range(windows).next().is_some()
    }

    /// As [`SecretSet::may_start_short`], for encodings that line ends may interrupt.
    pub(super) fn may_start_broken(&self, bytes: &[u8]) -> bool {
        let mut needles = self.by_window.range(windows_of(bytes)).flat_map(|(_, needles)| needles);
        needles.any(|needle| needle.variant.breaks == LineBreaks::Anywhere)
    }

    pub(super) fn at(&self, window: u32) -> impl Iterator<Item = &EncodedSecret> {
        self.by_window.get(&window).into_iter().flatten().map(|needle| &needle.variant)
    }

    fn rebuild_bitmap(&mut self) {
        self.bitmap = vec![0; 1 << (BITMAP_BITS_LOG2 - 6)].into();
        for window in self.pattern_windows.iter().chain(self.by_window.keys()) {
            set_bit(&mut self.bitmap, *window);
        }
    }
}

/// Big-endian, so that windows with the same beginning are neighbours.
#[inline]
pub(super) fn window(bytes: &[u8], at: usize) -> Option<u32> {
    let bytes = bytes.get(at..at.checked_add(WINDOW)?)?;
    Some(u32::from_be_bytes(bytes.try_into().ok()?))
}

/// The windows that begin with `bytes`.
fn windows_of(bytes: &[u8]) -> std::ops::RangeInclusive<u32> {
    let with = |fill: u8| {
        let mut window = [fill; WINDOW];
        window.iter_mut().zip(bytes).for_each(|(place, byte)| *place = *byte);
        u32::from_be_bytes(window)
    };
    with(0)..=with(u8::MAX)
}

#[inline]
const fn bit(window: u32) -> usize {
    (window.wrapping_mul(0x9E37_79B1) >> (32 - BITMAP_BITS_LOG2)) as usize
}

fn set_bit(bitmap: &mut [u64], window: u32) {
    let bit = bit(window);
    if let Some(word) = bitmap.get_mut(bit >> 6) {
        *word |= 1 << (bit & 63);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn removing_secrets_leaves_the_others_and_nothing_else() {
        let mut set = SecretSet::new(Patterns::Excluded);
        let ids: Vec<_> = (0..300).map(|number| set.add(&format!("{number:06}-secret"))).collect();
        let known = |set: &SecretSet, text: &str| {
            let window = window(text.as_bytes(), 0).unwrap();
            set.may_start(window) && set.at(window).any(|variant| **variant.text == *text.as_bytes())
        };
        set.remove(&ids[1..]);
        assert!(known(&set, "000000-secret") && !known(&set, "000299-secret"));
        assert!((1..WINDOW).all(|bytes| set.may_start_short(&b"000000"[..bytes])) && !set.may_start_short(b"001"));
        set.remove(&ids[..1]);
        assert!(set.by_window.is_empty() && set.bytes == 0 && !set.may_start_short(b"0"));
    }
}
