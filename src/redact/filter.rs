//! The streaming filter: replaces secrets in a stream, independent of how the stream is split into writes.
//!
//! A byte is covered if it belongs to an encoding of a secret or to a pattern. Each run of covered bytes becomes one
//! [`REPLACEMENT`]. Bytes are held back only while they may be the beginning of a match, so ordinary lines pass at once.

use super::REPLACEMENT;
use super::base64_lines::{self, MatchExtent, Prefix};
use super::encodings::{EncodedSecret, LineBreaks};
use super::patterns::{self, LOOKBEHIND_BYTES, MatchTail, PatternMatch, StreamEnd};
use super::secret_set::{SecretSet, WINDOW, window};

#[derive(Debug, Default)]
pub struct RedactFilter {
    /// Bytes to look behind at, then undecided bytes.
    bytes: Vec<u8>,
    /// The first undecided place in `bytes`.
    position: usize,
    emitted: usize,
    /// Where the furthest match of a secret ends.
    covered_to: usize,
    tail: Option<MatchTail>,
    /// The part of the last pattern's match that was followed so far.
    tail_from: usize,
    tail_to: usize,
    output: OutputState,
    redaction_count: u64,
}

#[derive(Debug, Default, PartialEq, Clone, Copy)]
enum OutputState {
    #[default]
    Outside,
    Inside,
}

enum FilterDecision {
    Decided,
    Undecided,
}

impl RedactFilter {
    /// Filters the next bytes and appends the decided ones to `out`. The sets may change between calls.
    pub fn push(&mut self, sets: &[&SecretSet], bytes: &[u8], out: &mut Vec<u8>) {
        self.bytes.extend_from_slice(bytes);
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
        let redactions = self.redaction_count;
        *self = Self { redaction_count: redactions, ..Self::default() };
    }

    pub const fn held_back(&self) -> usize {
        self.bytes.len() - self.emitted
    }

    pub const fn redaction_count(&self) -> u64 {
        self.redaction_count
    }

    fn run(&mut self, sets: &[&SecretSet], last: StreamEnd, out: &mut Vec<u8>) {
        self.follow_tail();
        // No place from here on is decided: across line ends, a later place may be known before an earlier one.
        let end = match last {
            StreamEnd::Yes => self.bytes.len(),
            StreamEnd::No => short_candidate(sets, &self.bytes, self.position),
        };
        loop {
            let Some(place) = candidate(sets, &self.bytes, self.position).filter(|place| *place < end) else {
                self.position = end;
                break;
            };
            self.position = place;
            match self.decide(sets, last, out) {
                FilterDecision::Decided => self.position = place + 1,
                FilterDecision::Undecided => break,
            }
        }
        self.emit(self.position, out);
    }

    fn decide(&mut self, sets: &[&SecretSet], last: StreamEnd, out: &mut Vec<u8>) -> FilterDecision {
        let rest = self.bytes.get(self.position..).unwrap_or_default();
        let (mut longest, mut known) = (0, FilterDecision::Decided);
        let mut see = |reach: MatchExtent| match reach {
            MatchExtent::Whole(bytes) => longest = longest.max(bytes),
            MatchExtent::Undecided if last == StreamEnd::No => known = FilterDecision::Undecided,
            MatchExtent::Undecided | MatchExtent::NoMatch => {}
        };
        for needle in sets.iter().filter_map(|set| Some(set.at(window(rest, 0)?))).flatten() {
            see(match_extent(needle, rest));
        }
        for beginning in
            [base64_lines::across(&self.bytes, self.position), base64_lines::behind(&self.bytes, self.position)]
        {
            let Prefix::Window { window, behind } = beginning else { continue };
            let needles = sets.iter().flat_map(|set| set.at(window));
            for needle in needles.filter(|needle| needle.breaks == LineBreaks::Anywhere) {
                see(base64_lines::match_extent(needle.text.get(behind..).unwrap_or_default(), rest));
            }
        }
        // A longer match may still be possible; then the place stays undecided and is checked again.
        if matches!(known, FilterDecision::Decided) && longest > 0 {
            self.emit(self.position, out);
            self.covered_to = self.covered_to.max(self.position + longest);
        }
        if self.tail.is_some() || self.position < self.tail_to {
            return known;
        }
        match patterns::match_at(&self.bytes, self.position, last) {
            PatternMatch::NoMatch => known,
            PatternMatch::Undecided => FilterDecision::Undecided,
            PatternMatch::Found { from, tail } => {
                if matches!(known, FilterDecision::Decided) {
                    self.emit(self.position, out);
                    self.tail = Some(tail);
                    (self.tail_from, self.tail_to) = (self.position + from, self.position + from);
                    self.follow_tail();
                }
                known
            }
        }
    }

    fn follow_tail(&mut self) {
        let Some(tail) = &mut self.tail else { return };
        let rest = self.bytes.get(self.tail_to..).unwrap_or_default();
        match tail.covered_bytes(rest) {
            Some(bytes) => {
                self.tail_to += bytes;
                self.tail = None;
            }
            None => self.tail_to += rest.len(),
        }
    }

    fn emit(&mut self, end: usize, out: &mut Vec<u8>) {
        while self.emitted < end {
            let inside = if self.emitted < self.covered_to {
                Some(self.covered_to)
            } else if (self.tail_from..self.tail_to).contains(&self.emitted) {
                Some(self.tail_to)
            } else {
                None
            };
            if let Some(until) = inside {
                if self.output == OutputState::Outside {
                    out.extend_from_slice(REPLACEMENT.as_bytes());
                    self.redaction_count += 1;
                }
                self.output = OutputState::Inside;
                self.emitted = until.min(end);
            } else {
                let until =
                    if self.tail_from > self.emitted && self.tail_to > self.tail_from { self.tail_from } else { end };
                let until = until.min(end);
                out.extend_from_slice(self.bytes.get(self.emitted..until).unwrap_or_default());
                self.output = OutputState::Outside;
                self.emitted = until;
            }
        }
    }

    fn discard_emitted(&mut self) {
        let gone = self.position.min(self.emitted).saturating_sub(LOOKBEHIND_BYTES);
        self.bytes = self.bytes.get(gone..).unwrap_or_default().to_vec();
        for place in
            [&mut self.position, &mut self.emitted, &mut self.covered_to, &mut self.tail_from, &mut self.tail_to]
        {
            *place = place.saturating_sub(gone);
        }
    }
}

fn match_extent(needle: &EncodedSecret, rest: &[u8]) -> MatchExtent {
    match needle.breaks {
        LineBreaks::Anywhere => base64_lines::match_extent(&needle.text, rest),
        LineBreaks::Nowhere if rest.starts_with(&needle.text) => MatchExtent::Whole(needle.text.len()),
        LineBreaks::Nowhere if needle.text.starts_with(rest) => MatchExtent::Undecided,
        LineBreaks::Nowhere => MatchExtent::NoMatch,
    }
}

/// The next place at which a match may start and enough bytes follow to decide.
fn candidate(sets: &[&SecretSet], bytes: &[u8], at: usize) -> Option<usize> {
    let unbroken = unbroken_candidate(sets, bytes, at);
    let until = unbroken.unwrap_or(bytes.len());
    base64_lines::candidate(bytes, at, until, |window| sets.iter().any(|set| set.may_start(window))).or(unbroken)
}

fn unbroken_candidate(sets: &[&SecretSet], bytes: &[u8], at: usize) -> Option<usize> {
    let rest = bytes.get(at..)?;
    let mut windows = rest.windows(WINDOW);
    let number = |window: &[u8]| u32::from_be_bytes(window.try_into().unwrap_or_default());
    let found = match sets {
        [] => None,
        [set] => windows.position(|window| set.may_start(number(window))),
        [one, other] => windows.position(|window| {
            let window = number(window);
            one.may_start(window) || other.may_start(window)
        }),
        sets => windows.position(|window| sets.iter().any(|set| set.may_start(number(window)))),
    };
    found.map(|place| at + place)
}

/// The first place at which a match may start but too few bytes follow to decide; or the end.
fn short_candidate(sets: &[&SecretSet], bytes: &[u8], at: usize) -> usize {
    let start = bytes.len().saturating_sub(base64_lines::SHORT_BYTES_MAX).max(at);
    let may_go_on = |beginning| match beginning {
        Prefix::Short { characters, count } => {
            let characters = characters.get(..count).unwrap_or_default();
            sets.iter().any(|set| set.may_start_broken(characters))
        }
        Prefix::NoBreak | Prefix::Window { .. } => false,
    };
    let may_start = |place: &usize| {
        let rest = bytes.get(*place..).unwrap_or_default();
        rest.len() < WINDOW && sets.iter().any(|set| set.may_start_short(rest))
            || may_go_on(base64_lines::across(bytes, *place))
            || may_go_on(base64_lines::behind(bytes, *place))
    };
    (start..bytes.len()).find(may_start).unwrap_or(bytes.len())
}
