//! Matches base64 across line ends, which encoders insert at different columns.
//!
//! A first character at the end of a line is not redacted: nearly every line ends with a character that may begin a match,
//! and would be held back until the next line. That character reveals six bits.

use memchr::memchr2_iter;

use super::secret_set::{WINDOW, window};

/// The longest line end between two characters: `\r\n`, or an empty line.
pub(super) const GAP_BYTES_MAX: usize = 2;

/// How many bytes may hold fewer than [`WINDOW`] characters: `ab\r\nc\r\n`.
pub(super) const SHORT_BYTES_MAX: usize = WINDOW - 1 + 2 * GAP_BYTES_MAX;

const fn is_break(byte: u8) -> bool {
    matches!(byte, b'\n' | b'\r')
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Prefix {
    NoBreak,
    Short { characters: [u8; WINDOW], count: usize },
    Window { window: u32, behind: usize },
}

/// The beginning at this place, if a line end interrupts its first characters.
pub(super) fn across(bytes: &[u8], at: usize) -> Prefix {
    let rest = bytes.get(at..).unwrap_or_default();
    match rest {
        [first, second, ..] if !is_break(*first) && !is_break(*second) => {}
        _ => return Prefix::NoBreak,
    }
    if rest.iter().take(WINDOW).any(|byte| is_break(*byte)) { joined(None, rest) } else { Prefix::NoBreak }
}

/// The beginning that started with the last character of the line before, if this place starts a line.
pub(super) fn behind(bytes: &[u8], at: usize) -> Prefix {
    let (before, rest) = bytes.split_at_checked(at).unwrap_or_default();
    let before = before.get(before.len().saturating_sub(1 + GAP_BYTES_MAX)..).unwrap_or_default();
    let line = before.iter().rposition(|byte| !is_break(*byte));
    match (line.and_then(|line| before.get(line..)), rest.first()) {
        (Some([character, gap @ ..]), Some(first)) if (1..=GAP_BYTES_MAX).contains(&gap.len()) && !is_break(*first) => {
            joined(Some(*character), rest)
        }
        _ => Prefix::NoBreak,
    }
}

fn joined(before: Option<u8>, rest: &[u8]) -> Prefix {
    let (mut characters, mut count, mut gap) = ([0; WINDOW], 0, 0);
    for byte in before.into_iter().chain(rest.iter().copied()) {
        if is_break(byte) {
            gap += 1;
            if gap > GAP_BYTES_MAX {
                return Prefix::NoBreak;
            }
            continue;
        }
        gap = 0;
        characters.get_mut(count).into_iter().for_each(|place| *place = byte);
        count += 1;
        if count == WINDOW {
            let window = window(&characters, 0).unwrap_or_default();
            return Prefix::Window { window, behind: usize::from(before.is_some()) };
        }
    }
    Prefix::Short { characters, count }
}

/// The first place in `at..until` near a line end at which a match may start.
pub(super) fn candidate(bytes: &[u8], at: usize, until: usize, may_start: impl Fn(u32) -> bool) -> Option<usize> {
    let is_one = |beginning| matches!(beginning, Prefix::Window { window, .. } if may_start(window));
    let from = at.saturating_sub(1);
    let near = bytes.get(from..(until + WINDOW - 1).min(bytes.len()))?;
    memchr2_iter(b'\n', b'\r', near).find_map(|place| {
        let end = from + place;
        // Three or two characters before the line end, or one, which counts as the start of the next line.
        let before = (2..WINDOW).rev().filter_map(|characters| end.checked_sub(characters));
        let before = before.map(|place| (place, across(bytes, place)));
        let mut places = before.chain([(end + 1, behind(bytes, end + 1))]);
        let found = places.find(|(place, beginning)| (at..until).contains(place) && is_one(*beginning));
        found.map(|(place, _)| place)
    })
}

#[derive(Debug, PartialEq, Eq)]
pub(super) enum MatchExtent {
    NoMatch,
    Undecided,
    /// The matched bytes, line ends included.
    Whole(usize),
}

/// How far `text` matches at the start of `bytes`.
pub(super) fn match_extent(text: &[u8], bytes: &[u8]) -> MatchExtent {
    let (mut text, mut read) = (text, 0);
    loop {
        let rest = bytes.get(read..).unwrap_or_default();
        if rest.starts_with(text) {
            return MatchExtent::Whole(read + text.len());
        }
        let Some(same) = text.iter().zip(rest).position(|(one, other)| one != other) else {
            return MatchExtent::Undecided;
        };
        let gap = rest.iter().skip(same).take(GAP_BYTES_MAX + 1).take_while(|byte| is_break(**byte)).count();
        if gap == 0 || gap > GAP_BYTES_MAX {
            return MatchExtent::NoMatch;
        }
        text = text.get(same..).unwrap_or_default();
        read += same + gap;
    }
}
