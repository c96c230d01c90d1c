//! The streaming filter: bytes in, the same bytes out with every secret replaced, however they were cut.
//!
//! What is hidden is a matter of the whole text alone: a byte is covered where it belongs to a needle or a shape,
//! wherever that starts, and each unbroken stretch of covered bytes becomes one [`REPLACEMENT`]. Bytes are held back
//! only while they may be the beginning of something, so ordinary lines pass at once.

use super::REPLACEMENT;
use super::lines::{self, Beginning, Reach};
use super::needles::{Needles, WINDOW, window};
use super::shapes::{self, LOOK_BEHIND, Last, Shape, Tail};
use super::variants::{Breaks, Variant};

/// Replaces secrets in one stream of bytes.
#[derive(Debug, Default)]
pub struct Filter {
    /// What is needed to look back at, then what is not decided.
    bytes: Vec<u8>,
    /// The first place of `bytes` that is not decided.
    at: usize,
    /// How many of `bytes` were handed out.
    told: usize,
    /// Where the furthest needle found ends.
    covered: usize,
    tail: Option<Tail>,
    /// What the last shape covers, as far as it was followed.
    tail_from: usize,
    tail_to: usize,
    place: Place,
    redactions: u64,
}

/// What was handed out last.
#[derive(Debug, Default, PartialEq, Clone, Copy)]
enum Place {
    #[default]
    Outside,
    Inside,
}

/// What is known of a place.
enum Known {
    Decided,
    Open,
}

impl Filter {
    /// Takes the next bytes, and appends to `out` what can be told of them. The sets may be others at each call.
    pub fn push(&mut self, sets: &[&Needles], bytes: &[u8], out: &mut Vec<u8>) {
        self.bytes.extend_from_slice(bytes);
        self.run(sets, Last::No, out);
        self.forget();
    }

    /// Hands out what is held back, since nothing may come for a while. Where it turns out to be the beginning of a secret,
    /// the rest of that is still replaced.
    pub fn flush(&mut self, out: &mut Vec<u8>) {
        self.hand_out(self.bytes.len(), out);
        self.forget();
    }

    /// Hands out what is left. What comes next is another stream.
    pub fn finish(&mut self, sets: &[&Needles], out: &mut Vec<u8>) {
        self.run(sets, Last::Yes, out);
        let redactions = self.redactions;
        *self = Self { redactions, ..Self::default() };
    }

    /// How many bytes are held back.
    #[must_use]
    pub const fn held(&self) -> usize {
        self.bytes.len() - self.told
    }

    /// How often something was replaced.
    #[must_use]
    pub const fn redactions(&self) -> u64 {
        self.redactions
    }

    fn run(&mut self, sets: &[&Needles], last: Last, out: &mut Vec<u8>) {
        self.follow_tail();
        // Nothing is told from there on: where line ends are left out, what lies behind it may be known before it is.
        let end = match last {
            Last::Yes => self.bytes.len(),
            Last::No => short_candidate(sets, &self.bytes, self.at),
        };
        loop {
            let Some(place) = candidate(sets, &self.bytes, self.at).filter(|place| *place < end) else {
                self.at = end;
                break;
            };
            self.at = place;
            match self.decide(sets, last, out) {
                Known::Decided => self.at = place + 1,
                Known::Open => break,
            }
        }
        self.hand_out(self.at, out);
    }

    /// Looks at the place `at`, where something may start.
    fn decide(&mut self, sets: &[&Needles], last: Last, out: &mut Vec<u8>) -> Known {
        let rest = self.bytes.get(self.at..).unwrap_or_default();
        let (mut longest, mut known) = (0, Known::Decided);
        let mut see = |reach: Reach| match reach {
            Reach::Whole(bytes) => longest = longest.max(bytes),
            Reach::Open if last == Last::No => known = Known::Open,
            Reach::Open | Reach::No => {}
        };
        for needle in sets.iter().filter_map(|set| Some(set.at(window(rest, 0)?))).flatten() {
            see(reach(needle, rest));
        }
        for beginning in [lines::across(&self.bytes, self.at), lines::behind(&self.bytes, self.at)] {
            let Beginning::Window { window, behind } = beginning else { continue };
            let needles = sets.iter().flat_map(|set| set.at(window));
            for needle in needles.filter(|needle| needle.breaks == Breaks::Anywhere) {
                see(lines::reach(needle.text.get(behind..).unwrap_or_default(), rest));
            }
        }
        // A longer one may still come; until then the place stays open, and is looked at again.
        if matches!(known, Known::Decided) && longest > 0 {
            self.hand_out(self.at, out);
            self.covered = self.covered.max(self.at + longest);
        }
        if self.tail.is_some() || self.at < self.tail_to {
            return known;
        }
        match shapes::at(&self.bytes, self.at, last) {
            Shape::No => known,
            Shape::Open => Known::Open,
            Shape::Found { from, tail } => {
                if matches!(known, Known::Decided) {
                    self.hand_out(self.at, out);
                    self.tail = Some(tail);
                    (self.tail_from, self.tail_to) = (self.at + from, self.at + from);
                    self.follow_tail();
                }
                known
            }
        }
    }

    fn follow_tail(&mut self) {
        let Some(tail) = &mut self.tail else { return };
        let rest = self.bytes.get(self.tail_to..).unwrap_or_default();
        match tail.covers(rest) {
            Some(bytes) => {
                self.tail_to += bytes;
                self.tail = None;
            }
            None => self.tail_to += rest.len(),
        }
    }

    /// Hands out everything before `end`, covered or not.
    fn hand_out(&mut self, end: usize, out: &mut Vec<u8>) {
        while self.told < end {
            let inside = if self.told < self.covered {
                Some(self.covered)
            } else if (self.tail_from..self.tail_to).contains(&self.told) {
                Some(self.tail_to)
            } else {
                None
            };
            if let Some(until) = inside {
                if self.place == Place::Outside {
                    out.extend_from_slice(REPLACEMENT.as_bytes());
                    self.redactions += 1;
                }
                self.place = Place::Inside;
                self.told = until.min(end);
            } else {
                let until =
                    if self.tail_from > self.told && self.tail_to > self.tail_from { self.tail_from } else { end };
                let until = until.min(end);
                out.extend_from_slice(self.bytes.get(self.told..until).unwrap_or_default());
                self.place = Place::Outside;
                self.told = until;
            }
        }
    }

    /// Drops what is not needed any more.
    fn forget(&mut self) {
        let gone = self.at.min(self.told).saturating_sub(LOOK_BEHIND);
        self.bytes = self.bytes.get(gone..).unwrap_or_default().to_vec();
        for place in [&mut self.at, &mut self.told, &mut self.covered, &mut self.tail_from, &mut self.tail_to] {
            *place = place.saturating_sub(gone);
        }
    }
}

/// How far a text reaches in what starts at its place.
fn reach(needle: &Variant, rest: &[u8]) -> Reach {
    match needle.breaks {
        Breaks::Anywhere => lines::reach(&needle.text, rest),
        Breaks::Nowhere if rest.starts_with(&needle.text) => Reach::Whole(needle.text.len()),
        Breaks::Nowhere if needle.text.starts_with(rest) => Reach::Open,
        Breaks::Nowhere => Reach::No,
    }
}

/// The next place, from `at` on, where something may start, of those that have enough bytes behind them to tell.
fn candidate(sets: &[&Needles], bytes: &[u8], at: usize) -> Option<usize> {
    let unbroken = unbroken_candidate(sets, bytes, at);
    if !sets.iter().any(|set| set.may_be_broken()) {
        return unbroken;
    }
    let until = unbroken.unwrap_or(bytes.len());
    lines::candidate(bytes, at, until, |window| sets.iter().any(|set| set.may_start(window))).or(unbroken)
}

/// That where the first bytes stand together.
fn unbroken_candidate(sets: &[&Needles], bytes: &[u8], at: usize) -> Option<usize> {
    let rest = bytes.get(at..)?;
    let mut windows = rest.windows(WINDOW);
    let number = |window: &[u8]| u32::from_le_bytes(window.try_into().unwrap_or_default());
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

/// The first place, from `at` on, where something may start of which too few bytes are there; or the end.
fn short_candidate(sets: &[&Needles], bytes: &[u8], at: usize) -> usize {
    let start = bytes.len().saturating_sub(lines::SHORT_BYTES_MAX).max(at);
    let may_go_on = |beginning| match beginning {
        Beginning::Short { characters, count } => {
            let characters = characters.get(..count).unwrap_or_default();
            sets.iter().any(|set| set.may_start_broken(characters))
        }
        Beginning::No | Beginning::Window { .. } => false,
    };
    let may_start = |place: &usize| {
        let rest = bytes.get(*place..).unwrap_or_default();
        rest.len() < WINDOW && sets.iter().any(|set| set.may_start_short(rest))
            || may_go_on(lines::across(bytes, *place))
            || may_go_on(lines::behind(bytes, *place))
    };
    (start..bytes.len()).find(may_start).unwrap_or(bytes.len())
}
