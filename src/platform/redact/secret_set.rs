//! A changing set of secrets.
//!
//! Adding and removing a secret is cheap, because the credentials of each claim come and go: an Aho-Corasick automaton of the
//! credentials of 32 claims takes 40 ms to build, for each claim that begins or ends.

use std::collections::BTreeMap;

use super::encodings::{self, EncodedSecret};

/// How many characters of an encoding are looked up.
const PREFIX_BYTES: usize = 4;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum StreamEnd {
    Yes,
    No,
}

/// Identifies an added secret, and where its encodings are.
pub struct SecretId {
    number: u64,
    prefixes: Box<[[u8; PREFIX_BYTES]]>,
}

#[derive(Clone)]
struct Entry {
    secret: u64,
    variant: EncodedSecret,
}

#[derive(Clone)]
pub struct SecretSet {
    by_prefix: BTreeMap<[u8; PREFIX_BYTES], Vec<Entry>>,
    /// Tells for each pair of bytes if an encoding starts with it.
    pairs: Box<[bool]>,
    last_id: u64,
    bytes: usize,
}

impl Default for SecretSet {
    fn default() -> Self {
        Self { by_prefix: BTreeMap::new(), pairs: vec![false; 1 << 16].into(), last_id: 0, bytes: 0 }
    }
}

impl std::fmt::Debug for SecretSet {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(out, "SecretSet({} bytes)", self.bytes)
    }
}

impl SecretSet {
    pub fn add(&mut self, secret: &str) -> SecretId {
        self.last_id += 1;
        let number = self.last_id;
        let mut prefixes = Vec::new();
        for variant in encodings::of(secret) {
            let Some(prefix) = variant.first_chunk().copied() else { continue };
            mark(&mut self.pairs, prefix, true);
            self.bytes += variant.len();
            self.by_prefix.entry(prefix).or_default().push(Entry { secret: number, variant });
            prefixes.push(prefix);
        }
        SecretId { number, prefixes: prefixes.into() }
    }

    pub fn remove(&mut self, secrets: &[SecretId]) {
        for secret in secrets {
            for prefix in &secret.prefixes {
                self.remove_encodings(secret.number, *prefix);
            }
        }
    }

    fn remove_encodings(&mut self, secret: u64, prefix: [u8; PREFIX_BYTES]) {
        let Some(entries) = self.by_prefix.get_mut(&prefix) else { return };
        for removed in entries.extract_if(.., |entry| entry.secret == secret) {
            self.bytes -= removed.variant.len();
        }
        if entries.is_empty() {
            self.by_prefix.remove(&prefix);
            let [first, second, ..] = prefix;
            if self.starting_with(&[first, second]).next().is_none() {
                mark(&mut self.pairs, prefix, false);
            }
        }
    }

    pub const fn bytes(&self) -> usize {
        self.bytes
    }

    /// How far an encoding matches at the start of `bytes`.
    pub(super) fn match_at(&self, bytes: &[u8], last: StreamEnd) -> MatchExtent {
        if pair(bytes).is_some_and(|pair| !self.pairs.get(pair).is_some_and(|starts| *starts)) {
            return MatchExtent::NoMatch;
        }
        let prefix = bytes.get(..PREFIX_BYTES).unwrap_or(bytes);
        self.starting_with(prefix).map(|text| match_extent(text, bytes, last)).max().unwrap_or(MatchExtent::NoMatch)
    }

    fn starting_with(&self, prefix: &[u8]) -> impl Iterator<Item = &EncodedSecret> {
        let bound = |fill: u8| {
            let mut bound = [fill; PREFIX_BYTES];
            bound.iter_mut().zip(prefix).for_each(|(place, byte)| *place = *byte);
            bound
        };
        let entries = self.by_prefix.range(bound(0)..=bound(u8::MAX)).flat_map(|(_, entries)| entries);
        entries.map(|entry| &entry.variant)
    }
}

#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum MatchExtent {
    NoMatch,
    /// The matched bytes.
    Whole(usize),
    /// More bytes are needed; a longer match may still be possible.
    Undecided,
}

fn match_extent(text: &[u8], bytes: &[u8], last: StreamEnd) -> MatchExtent {
    if bytes.starts_with(text) {
        MatchExtent::Whole(text.len())
    } else if last == StreamEnd::No && text.starts_with(bytes) {
        MatchExtent::Undecided
    } else {
        MatchExtent::NoMatch
    }
}

fn mark(pairs: &mut [bool], prefix: [u8; PREFIX_BYTES], starts: bool) {
    if let Some(place) = pair(&prefix).and_then(|pair| pairs.get_mut(pair)) {
        *place = starts;
    }
}

fn pair(text: &[u8]) -> Option<usize> {
    text.first_chunk::<2>().map(|pair| usize::from(u16::from_be_bytes(*pair)))
}

#[cfg(test)]
impl SecretSet {
    pub(super) fn content(&self) -> (usize, usize, usize) {
        (self.bytes, self.by_prefix.len(), self.pairs.iter().filter(|starts| **starts).count())
    }
}
