//! Matches base64 across line ends, which encoders insert at different columns.
//!
//! A first character at the end of a line is not redacted: nearly every line ends with a character that may begin a match,
//! and would be held back until the next line. That character reveals six bits.

use super::filter::StreamEnd;
use super::secret_set::PREFIX_BYTES;

/// The longest line end between two characters: `\r\n`, or an empty line.
pub(super) const GAP_BYTES_MAX: usize = 2;

const fn is_break(byte: u8) -> bool {
    matches!(byte, b'\n' | b'\r')
}

/// The last character of the line before, if this place starts a line.
pub(super) fn last_of_line_before(bytes: &[u8], at: usize) -> Option<u8> {
    let before = bytes.get(..at)?;
    let gap = before.iter().rev().take(GAP_BYTES_MAX + 1).take_while(|byte| is_break(**byte)).count();
    if gap == 0 || gap > GAP_BYTES_MAX || bytes.get(at).is_none_or(|byte| is_break(*byte)) {
        return None;
    }
    before.get(..at - gap)?.last().copied()
}

/// The first characters, if a line end interrupts them behind the second, without that line end.
pub(super) fn across(rest: &[u8]) -> Option<Vec<u8>> {
    let place = rest.iter().take(PREFIX_BYTES).position(|byte| is_break(*byte))?;
    if place < 2 { None } else { joined(None, rest) }
}

/// The first characters without the line ends between them.
pub(super) fn joined(before: Option<u8>, rest: &[u8]) -> Option<Vec<u8>> {
    let (mut characters, mut gap) = (Vec::with_capacity(PREFIX_BYTES), 0);
    for byte in before.into_iter().chain(rest.iter().copied()) {
        if is_break(byte) {
            gap += 1;
            if gap > GAP_BYTES_MAX {
                return None;
            }
            continue;
        }
        gap = 0;
        characters.push(byte);
        if characters.len() == PREFIX_BYTES {
            break;
        }
    }
    Some(characters)
}

#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum MatchExtent {
    NoMatch,
    /// The matched bytes, line ends included.
    Whole(usize),
    /// More bytes are needed; a longer match may still be possible.
    Undecided,
}

/// How far `text` matches at the start of `bytes`.
pub(super) fn match_extent(text: &[u8], bytes: &[u8], last: StreamEnd) -> MatchExtent {
    let (mut text, mut read) = (text, 0);
    loop {
        let rest = bytes.get(read..).unwrap_or_default();
        if rest.starts_with(text) {
            return MatchExtent::Whole(read + text.len());
        }
        let Some(same) = text.iter().zip(rest).position(|(one, other)| one != other) else {
            return if last == StreamEnd::No { MatchExtent::Undecided } else { MatchExtent::NoMatch };
        };
        let gap = rest.iter().skip(same).take(GAP_BYTES_MAX + 1).take_while(|byte| is_break(**byte)).count();
        if gap == 0 || gap > GAP_BYTES_MAX {
            return MatchExtent::NoMatch;
        }
        text = text.get(same..).unwrap_or_default();
        read += same + gap;
    }
}
