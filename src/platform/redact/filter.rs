//! The streaming filter: replaces secrets in a stream, independent of how the stream is split into writes.
//!
//! A byte is covered if it belongs to an encoding of a secret or to a pattern. Each run of covered bytes becomes one
//! [`REPLACEMENT`]. Bytes are held back only while they may be the beginning of a match, so ordinary lines pass at once.

use super::REPLACEMENT;
use super::patterns::{self, MatchTail, PatternMatch};
use super::secret_set::{MatchExtent, SecretSet, StreamEnd};

/// How many bytes before a position are needed to match there.
const LOOKBEHIND_BYTES: usize = 8;

#[derive(Debug, Default)]
pub struct RedactFilter {
    /// Bytes to look behind at, then undecided bytes.
    bytes: Vec<u8>,
    /// Tells for each of `bytes` if it is covered.
    covered: Vec<bool>,
    /// The first undecided place in `bytes`.
    position: usize,
    emitted: usize,
    tail: Option<MatchTail>,
    /// The end of the last pattern's match, as far as it is known.
    tail_to: usize,
    /// The last byte that was emitted was covered.
    in_redaction: bool,
    redaction_count: u64,
}

impl RedactFilter {
    /// Filters the next bytes and appends the decided ones to `out`. The sets may change between calls.
    pub fn push(&mut self, sets: &[&SecretSet], bytes: &[u8], out: &mut Vec<u8>) {
        self.bytes.extend_from_slice(bytes);
        self.covered.resize(self.bytes.len(), false);
        self.run(sets, StreamEnd::No, out);
        self.discard_emitted();
    }

    /// Emits the bytes held back. If they turn out to begin a secret, the rest of the secret is still replaced.
    pub fn flush(&mut self, out: &mut Vec<u8>) {
        self.emit(self.bytes.len(), out);
        self.discard_emitted();
    }

    /// Emits the rest and starts a new stream.
    pub fn finish(&mut self, sets: &[&SecretSet], out: &mut Vec<u8>) {
        self.run(sets, StreamEnd::Yes, out);
        *self = Self { redaction_count: self.redaction_count, ..Self::default() };
    }

    pub const fn held_back(&self) -> usize {
        self.bytes.len() - self.emitted
    }

    pub const fn redaction_count(&self) -> u64 {
        self.redaction_count
    }

    fn run(&mut self, sets: &[&SecretSet], last: StreamEnd, out: &mut Vec<u8>) {
        self.follow_tail(last);
        while self.position < self.bytes.len() {
            let at = self.position;
            if self.tail.as_ref().is_some_and(|tail| at >= self.tail_to - tail.uncovered) {
                break;
            }
            let rest = self.bytes.get(at..).unwrap_or_default();
            let secret = sets.iter().map(|set| set.match_at(rest, last)).max();
            let secret = secret.unwrap_or(MatchExtent::NoMatch);
            let pattern =
                if at < self.tail_to { PatternMatch::NoMatch } else { patterns::match_at(&self.bytes, at, last) };
            if secret == MatchExtent::Undecided || matches!(pattern, PatternMatch::Undecided) {
                break;
            }
            if let MatchExtent::Whole(bytes) = secret {
                self.cover(at, at + bytes);
            }
            if let PatternMatch::Found { from, to, tail } = pattern {
                self.cover(at + from, at + to - tail.uncovered);
                (self.tail, self.tail_to) = (Some(tail), at + to);
                self.follow_tail(last);
            }
            self.position += 1;
        }
        self.emit(self.position, out);
    }

    fn cover(&mut self, from: usize, to: usize) {
        self.covered.get_mut(from..to).into_iter().for_each(|covered| covered.fill(true));
    }

    fn follow_tail(&mut self, last: StreamEnd) {
        let Some(mut tail) = self.tail.take() else { return };
        let from = self.tail_to - tail.uncovered;
        self.tail_to += tail.follow(self.bytes.get(self.tail_to..).unwrap_or_default());
        self.cover(from, self.tail_to - tail.uncovered);
        self.tail = Some(tail).filter(|tail| tail.is_open && last == StreamEnd::No);
    }

    fn emit(&mut self, end: usize, out: &mut Vec<u8>) {
        while let Some(covered) = self.covered.get(self.emitted..end).filter(|covered| !covered.is_empty()) {
            let inside = covered.first() == Some(&true);
            let run = covered.iter().position(|covered| *covered != inside).unwrap_or(covered.len());
            if !inside {
                out.extend_from_slice(self.bytes.get(self.emitted..self.emitted + run).unwrap_or_default());
            } else if !self.in_redaction {
                out.extend_from_slice(REPLACEMENT.as_bytes());
                self.redaction_count += 1;
            }
            self.in_redaction = inside;
            self.emitted += run;
        }
    }

    fn discard_emitted(&mut self) {
        let gone = self.position.min(self.emitted).saturating_sub(LOOKBEHIND_BYTES);
        self.bytes.drain(..gone);
        self.covered.drain(..gone);
        for place in [&mut self.position, &mut self.emitted, &mut self.tail_to] {
            *place = place.saturating_sub(gone);
        }
    }
}
