//! Patterns of undeclared secrets: tokens with well-known prefixes, JSON Web Tokens, private keys, `Authorization` values,
//! and passwords and signatures in URLs.
//!
//! All patterns are one automaton. Each begins with the byte before the text that it recognizes. A match of any length is
//! followed byte by byte; only bytes that may or may not belong to it are held back.

use std::sync::LazyLock;

use regex_automata::Anchored;
use regex_automata::dfa::{Automaton as _, dense};
use regex_automata::util::{primitives::StateID, start};

use super::pattern_list::{Covers, PATTERNS};
use super::secret_set::StreamEnd;
use journeyman_domain::limits::{REDACT_KEY_BLOCK_BYTES_MAX, REDACT_PATTERN_BYTES_MAX};

/// Compiled by the build script: at start it would take 3 MB and 6 ms.
struct Automaton {
    dfa: dense::DFA<&'static [u32]>,
    start: StateID,
}

#[repr(C, align(4))]
struct Aligned<Bytes: ?Sized>(Bytes);

static COMPILED: &Aligned<[u8]> = &Aligned(*include_bytes!(concat!(env!("OUT_DIR"), "/secret_patterns.dfa")));

#[expect(clippy::expect_used, reason = "the patterns are constant")]
static AUTOMATON: LazyLock<Automaton> = LazyLock::new(|| {
    let (dfa, _) = dense::DFA::from_bytes(&COMPILED.0).expect("the build script made it");
    let start = dfa.start_state(&start::Config::new().anchored(Anchored::Yes)).expect("it is anchored");
    Automaton { dfa, start }
});

impl Automaton {
    /// The pattern of which a match ends here.
    fn matched(&self, state: StateID) -> Option<usize> {
        let end = self.dfa.next_eoi_state(state);
        self.dfa.is_match_state(end).then(|| self.dfa.match_pattern(end, 0).as_usize())
    }
}

#[derive(Debug)]
pub(super) enum PatternMatch {
    NoMatch,
    /// More bytes are needed.
    Undecided,
    /// The shortest match ends at `to`; `tail` follows it from there.
    Found {
        from: usize,
        to: usize,
        tail: MatchTail,
    },
}

/// A match that may go on.
#[derive(Debug)]
pub(super) struct MatchTail {
    state: StateID,
    /// How many bytes at the end of the match are not covered.
    pub(super) uncovered: usize,
    /// How many bytes the match may still have.
    bytes_left: usize,
    pub(super) is_open: bool,
}

impl MatchTail {
    /// How many of these bytes belong to the match. It stays open unless a byte ends it.
    pub(super) fn follow(&mut self, bytes: &[u8]) -> usize {
        let (mut state, mut matched) = (self.state, 0);
        for (at, byte) in bytes.iter().enumerate() {
            state = AUTOMATON.dfa.next_state(state, *byte);
            let is_long = at == self.bytes_left || at - matched == REDACT_PATTERN_BYTES_MAX;
            if is_long || AUTOMATON.dfa.is_dead_state(state) {
                self.is_open = false;
                break;
            }
            if AUTOMATON.matched(state).is_some() {
                (self.state, matched) = (state, at + 1);
            }
        }
        self.bytes_left -= matched;
        matched
    }
}

/// Whether a pattern matches at this place, which may be the first of a stream.
pub(super) fn match_at(bytes: &[u8], at: usize, last: StreamEnd) -> PatternMatch {
    let before = at.checked_sub(1).and_then(|before| bytes.get(before)).copied().unwrap_or(b'\n');
    let mut state = AUTOMATON.dfa.next_state(AUTOMATON.start, before);
    let rest = bytes.get(at..).unwrap_or_default();
    for (index, byte) in rest.iter().take(REDACT_PATTERN_BYTES_MAX).enumerate() {
        state = AUTOMATON.dfa.next_state(state, *byte);
        if AUTOMATON.dfa.is_dead_state(state) {
            return PatternMatch::NoMatch;
        }
        let Some((covers, _)) = AUTOMATON.matched(state).and_then(|pattern| PATTERNS.get(pattern)) else { continue };
        let from = match covers {
            Covers::Token => 0,
            Covers::Value | Covers::PrivateKey => index,
            Covers::UserInfo => "://".len(),
        };
        let bytes_left = if *covers == Covers::PrivateKey { REDACT_KEY_BLOCK_BYTES_MAX - 1 } else { usize::MAX };
        let uncovered = usize::from(*covers == Covers::UserInfo);
        let tail = MatchTail { state, uncovered, bytes_left, is_open: true };
        return PatternMatch::Found { from, to: index + 1, tail };
    }
    let is_undecided = last == StreamEnd::No && rest.len() < REDACT_PATTERN_BYTES_MAX;
    if is_undecided { PatternMatch::Undecided } else { PatternMatch::NoMatch }
}
