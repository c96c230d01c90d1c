//! A changing set of secrets.
//!
//! Adding and removing a secret is cheap, because the credentials of each claim come and go: an Aho-Corasick automaton of the
//! credentials of 32 claims takes 40 ms to build, for each claim that begins or ends.

use std::collections::BTreeMap;

use super::base64_lines::{self, MatchExtent};
use super::encodings::{self, EncodedSecret, LineBreaks};
use super::patterns::StreamEnd;

/// How many characters of an encoding are looked up.
pub(super) const PREFIX_BYTES: usize = 4;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SecretId(u64);

#[derive(Clone)]
struct Needle {
    secret: SecretId,
    variant: EncodedSecret,
}

#[derive(Clone)]
pub struct SecretSet {
    by_prefix: BTreeMap<[u8; PREFIX_BYTES], Vec<Needle>>,
    /// For each pair of bytes, whether an encoding starts with it.
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
        let id = SecretId(self.last_id);
        for variant in encodings::of(secret) {
            let Some(prefix) = variant.text.first_chunk().copied() else { continue };
            mark(&mut self.pairs, prefix);
            self.bytes += variant.text.len();
            self.by_prefix.entry(prefix).or_default().push(Needle { secret: id, variant });
        }
        id
    }

    pub fn remove(&mut self, secrets: &[SecretId]) {
        self.pairs.fill(false);
        self.bytes = 0;
        self.by_prefix.retain(|prefix, needles| {
            needles.retain(|needle| !secrets.contains(&needle.secret));
            if !needles.is_empty() {
                mark(&mut self.pairs, *prefix);
            }
            self.bytes += needles.iter().map(|needle| needle.variant.text.len()).sum::<usize>();
            !needles.is_empty()
        });
    }

    pub const fn bytes(&self) -> usize {
        self.bytes
    }

    /// How far an encoding matches at this place.
    pub(super) fn match_at(&self, bytes: &[u8], at: usize, last: StreamEnd) -> MatchExtent {
        let rest = bytes.get(at..).unwrap_or_default();
        let mut longest = MatchExtent::NoMatch;
        let starts = pair(rest).is_none_or(|pair| self.pairs.get(pair).is_some_and(|starts| *starts));
        let first = base64_lines::last_of_line_before(bytes, at);
        if !starts && first.is_none() {
            return longest;
        }
        if starts {
            let prefix = rest.get(..PREFIX_BYTES).unwrap_or(rest);
            for variant in self.starting_with(prefix) {
                longest = longest.max(variant.extent(rest, last));
            }
            for variant in base64_lines::across(rest).iter().flat_map(|prefix| self.starting_with(prefix)) {
                longest = longest.max(variant.extent(rest, last));
            }
        }
        let joined = first.and_then(|first| base64_lines::joined(Some(first), rest));
        for variant in joined.iter().flat_map(|prefix| self.starting_with(prefix)) {
            if variant.breaks == LineBreaks::Anywhere {
                longest = longest.max(base64_lines::match_extent(&variant.text[1..], rest, last));
            }
        }
        longest
    }

    fn starting_with(&self, prefix: &[u8]) -> impl Iterator<Item = &EncodedSecret> {
        let bound = |fill: u8| {
            let mut bound = [fill; PREFIX_BYTES];
            bound.iter_mut().zip(prefix).for_each(|(place, byte)| *place = *byte);
            bound
        };
        let needles = self.by_prefix.range(bound(0)..=bound(u8::MAX)).flat_map(|(_, needles)| needles);
        needles.map(|needle| &needle.variant)
    }
}

impl EncodedSecret {
    fn extent(&self, rest: &[u8], last: StreamEnd) -> MatchExtent {
        match self.breaks {
            LineBreaks::Anywhere => base64_lines::match_extent(&self.text, rest, last),
            LineBreaks::Nowhere if rest.starts_with(&self.text) => MatchExtent::Whole(self.text.len()),
            LineBreaks::Nowhere if last == StreamEnd::No && self.text.starts_with(rest) => MatchExtent::Undecided,
            LineBreaks::Nowhere => MatchExtent::NoMatch,
        }
    }
}

fn mark(pairs: &mut [bool], prefix: [u8; PREFIX_BYTES]) {
    if let Some(starts) = pair(&prefix).and_then(|pair| pairs.get_mut(pair)) {
        *starts = true;
    }
}

fn pair(text: &[u8]) -> Option<usize> {
    text.first_chunk::<2>().map(|pair| usize::from(u16::from_be_bytes(*pair)))
}
