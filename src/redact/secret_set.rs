//! A changing set of secrets.
//!
//! Adding and removing a secret is cheap, because the credentials of each claim come and go: an Aho-Corasick automaton of the
//! credentials of 32 claims takes 40 ms to build, for each claim that begins or ends.

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
    /// Sorted by their text.
    needles: Vec<Needle>,
    /// For each pair of bytes, whether a needle starts with it.
    pairs: Box<[bool]>,
    last_id: u64,
    bytes: usize,
}

impl Default for SecretSet {
    fn default() -> Self {
        Self { needles: Vec::new(), pairs: vec![false; 1 << 16].into(), last_id: 0, bytes: 0 }
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
        self.needles.extend(encodings::of(secret).into_iter().map(|variant| Needle { secret: id, variant }));
        self.index();
        id
    }

    pub fn remove(&mut self, secrets: &[SecretId]) {
        self.needles.retain(|needle| !secrets.contains(&needle.secret));
        self.index();
    }

    fn index(&mut self) {
        self.needles.sort_by(|one, other| one.variant.text.as_slice().cmp(&other.variant.text));
        self.bytes = self.needles.iter().map(|needle| needle.variant.text.len()).sum();
        self.pairs.fill(false);
        for needle in &self.needles {
            if let Some(starts) = pair(&needle.variant.text).and_then(|pair| self.pairs.get_mut(pair)) {
                *starts = true;
            }
        }
    }

    pub const fn bytes(&self) -> usize {
        self.bytes
    }

    /// How far an encoding matches at this place.
    pub(super) fn match_at(&self, bytes: &[u8], at: usize, last: StreamEnd) -> MatchExtent {
        let rest = bytes.get(at..).unwrap_or_default();
        let mut longest = MatchExtent::NoMatch;
        if pair(rest).is_none_or(|pair| self.pairs.get(pair).is_some_and(|starts| *starts)) {
            let prefix = rest.get(..PREFIX_BYTES).unwrap_or(rest);
            for variant in self.starting_with(prefix) {
                longest = longest.max(variant.extent(rest, last));
            }
            for variant in base64_lines::across(rest).iter().flat_map(|prefix| self.starting_with(prefix)) {
                longest = longest.max(variant.extent(rest, last));
            }
        }
        let first = base64_lines::last_of_line_before(bytes, at);
        let joined = first.and_then(|first| base64_lines::joined(Some(first), rest));
        for variant in joined.iter().flat_map(|prefix| self.starting_with(prefix)) {
            if variant.breaks == LineBreaks::Anywhere {
                longest = longest.max(base64_lines::match_extent(&variant.text[1..], rest, last));
            }
        }
        longest
    }

    fn starting_with(&self, prefix: &[u8]) -> impl Iterator<Item = &EncodedSecret> {
        let from = self.needles.partition_point(|needle| needle.variant.text.as_slice() < prefix);
        let needles = self.needles.get(from..).unwrap_or_default();
        let count = needles.partition_point(|needle| needle.variant.text.starts_with(prefix));
        needles.iter().take(count).map(|needle| &needle.variant)
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

fn pair(text: &[u8]) -> Option<usize> {
    text.first_chunk::<2>().map(|pair| usize::from(u16::from_be_bytes(*pair)))
}
