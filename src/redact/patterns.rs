//! Patterns of undeclared secrets: tokens with well-known prefixes, JSON Web Tokens, private keys, `Authorization` values,
//! and passwords and signatures in URLs.
//!
//! A pattern is recognized from a bounded number of bytes. A [`MatchTail`] then follows the match of any length byte by byte,
//! without holding bytes back.

use crate::limits::{REDACT_KEY_BLOCK_BYTES_MAX, REDACT_PATTERN_BYTES_MAX};

/// How many bytes before a position are needed to match there.
pub(super) const LOOKBEHIND_BYTES: usize = 8;

/// Prefixes, and how many bytes of which class follow at least.
const TOKENS: [(&[&str], ByteClass, usize); 13] = [
    (&["ghp_", "gho_", "ghu_", "ghs_", "ghr_"], ByteClass::Word, 30),
    (&["github_pat_", "bkua_"], ByteClass::Word, 40),
    (&["glpat-", "glrt-", "gldt-", "glcbt-", "glptt-", "dckr_pat_", "tskey-"], ByteClass::Token, 20),
    (&["xoxb-", "xoxp-", "xoxa-", "xoxr-", "xoxs-", "xapp-"], ByteClass::Token, 20),
    (&["sk_live_", "rk_live_", "sk_test_"], ByteClass::Word, 20),
    (&["sk-ant-", "sk-proj-"], ByteClass::Token, 30),
    (&["npm_"], ByteClass::Word, 36),
    (&["pypi-", "AGE-SECRET-KEY-1"], ByteClass::Token, 50),
    (&["dop_v1_"], ByteClass::Word, 60),
    (&["hvs.", "hvb."], ByteClass::Dotted, 24),
    (&["ya29."], ByteClass::Dotted, 20),
    (&["AIza"], ByteClass::Token, 35),
    (&["shpat_"], ByteClass::Word, 32),
];

/// Parameters of URLs; the last two also behind a dash, as in `X-Amz-Signature`.
const PARAMETERS: [&str; 4] = ["sig", "bewit", "signature", "security-token"];

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ByteClass {
    Word,
    Token,
    Dotted,
    Value,
}

impl ByteClass {
    fn contains(self, byte: u8) -> bool {
        byte.is_ascii_alphanumeric()
            || match self {
                Self::Word => byte == b'_',
                Self::Token => matches!(byte, b'_' | b'-'),
                Self::Dotted => matches!(byte, b'_' | b'-' | b'.'),
                Self::Value => b"%+/=_.~:$*!-".contains(&byte),
            }
    }

    fn run_length(self, bytes: &[u8]) -> usize {
        bytes.iter().position(|byte| !self.contains(*byte)).unwrap_or(bytes.len())
    }
}

#[derive(Debug)]
pub(super) enum PatternMatch {
    NoMatch,
    /// More bytes are needed.
    Undecided,
    /// A match that covers the bytes from `from` on, as far as `tail` reaches.
    Found {
        from: usize,
        tail: MatchTail,
    },
}

impl PatternMatch {
    fn or_else(self, other: impl FnOnce() -> Self) -> Self {
        if matches!(self, Self::NoMatch) { other() } else { self }
    }
}

/// The covered bytes of a match: `bytes`, then those before `end`.
#[derive(Debug)]
pub(super) struct MatchTail {
    bytes: usize,
    end: TailEnd,
}

#[derive(Debug)]
enum TailEnd {
    Here,
    NotIn(ByteClass),
    AnyOf(&'static [u8]),
    /// The closing quote, or the backslash before it.
    Quote {
        close: u8,
        escaped: bool,
    },
    /// The second run of dashes in a PEM block; an unterminated one ends after [`REDACT_KEY_BLOCK_BYTES_MAX`].
    KeyBlock {
        bytes: usize,
        dashes: usize,
        runs: usize,
    },
}

impl MatchTail {
    const fn new(bytes: usize, end: TailEnd) -> Self {
        Self { bytes, end }
    }

    /// How many of these bytes are covered before the match ends; `None` if the match continues after them.
    pub(super) fn covered_bytes(&mut self, bytes: &[u8]) -> Option<usize> {
        let skipped = self.bytes.min(bytes.len());
        self.bytes -= skipped;
        if self.bytes == 0 && matches!(self.end, TailEnd::Here) {
            return Some(skipped);
        }
        let end = bytes.iter().skip(skipped).position(|byte| self.end.is_before(*byte));
        end.map(|end| skipped + end)
    }
}

impl TailEnd {
    fn is_before(&mut self, byte: u8) -> bool {
        match self {
            Self::Here => true,
            Self::NotIn(class) => !class.contains(byte),
            Self::AnyOf(bytes) => bytes.contains(&byte),
            Self::Quote { close, escaped } => {
                let closed = byte == *close && !*escaped;
                *escaped = byte == b'\\' && !*escaped;
                closed || matches!(byte, b'\n' | b'\r')
            }
            Self::KeyBlock { bytes, dashes, runs } => {
                if *runs == 2 || *bytes == REDACT_KEY_BLOCK_BYTES_MAX {
                    return true;
                }
                *bytes += 1;
                *dashes = if byte == b'-' { *dashes + 1 } else { 0 };
                *runs += usize::from(*dashes == 5);
                false
            }
        }
    }
}

/// Whether a pattern may start at this place. It is asked for every byte of a log, and nearly always false.
#[inline]
fn may_start(bytes: &[u8], at: usize) -> bool {
    let before = at.checked_sub(1).and_then(|before| bytes.get(before));
    let starts_word = !before.is_some_and(u8::is_ascii_alphanumeric);
    let first = bytes.get(at).copied().unwrap_or_default();
    matches!(bytes.get(at + 1), None | Some(b':'))
        || matches!(before, Some(b'?' | b'&' | b';' | b'-' | b'6' | b'F' | b'f'))
        || starts_word
            && matches!(first, b'A' | b'B' | b'a' | b'b' | b'd' | b'e' | b'g' | b'h' | b'n' | b'p'..=b't' | b'x' | b'y')
}

#[inline]
pub(super) fn match_at(bytes: &[u8], at: usize, last: StreamEnd) -> PatternMatch {
    if !may_start(bytes, at) {
        return PatternMatch::NoMatch;
    }
    let (before, rest) = bytes.split_at_checked(at).unwrap_or_default();
    let mut found = user_info(rest, last).or_else(|| url_parameter(before, rest));
    if matches!(found, PatternMatch::NoMatch) && !before.last().is_some_and(u8::is_ascii_alphanumeric) {
        found = private_key_block(before, rest)
            .or_else(|| authorization(rest, last))
            .or_else(|| web_token(before, rest))
            .or_else(|| known_token(rest));
    }
    match (found, last) {
        (PatternMatch::Undecided, StreamEnd::Yes) => PatternMatch::NoMatch,
        (found, _) => found,
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum StreamEnd {
    Yes,
    No,
}

/// Whether `rest`, or as much of it as there is, starts with `text`.
fn starts_with(rest: &[u8], text: &[u8]) -> bool {
    rest.iter().zip(text).all(|(one, other)| one == other)
}

/// As [`starts_with`], in any case.
fn starts_with_ignore_case(rest: &[u8], text: &[u8]) -> bool {
    rest.iter().zip(text).all(|(one, other)| one.eq_ignore_ascii_case(other))
}

fn known_token(rest: &[u8]) -> PatternMatch {
    let starts = |prefix: &[u8]| prefix.first() == rest.first() && starts_with(rest, prefix);
    for (prefixes, class, bytes_min) in &TOKENS {
        let Some(prefix) = prefixes.iter().find(|prefix| starts(prefix.as_bytes())) else { continue };
        let value = rest.get(prefix.len()..).unwrap_or_default();
        let value = value.get(..*bytes_min).unwrap_or(value);
        match class.run_length(value) {
            run if run == *bytes_min => {
                return PatternMatch::Found { from: 0, tail: MatchTail::new(0, TailEnd::NotIn(*class)) };
            }
            run if run == value.len() => return PatternMatch::Undecided,
            _ => {}
        }
    }
    PatternMatch::NoMatch
}

/// `header.claims.signature`; the header and the claims are JSON in base64.
fn web_token(before: &[u8], rest: &[u8]) -> PatternMatch {
    const HEADER_BYTES_MIN: usize = 12;
    const CLAIMS_BYTES_MIN: usize = 4;
    if before.last().is_some_and(|byte| ByteClass::Dotted.contains(*byte)) || !starts_with(rest, b"eyJ") {
        return PatternMatch::NoMatch;
    }
    let header = ByteClass::Token.run_length(rest.get(..REDACT_PATTERN_BYTES_MAX).unwrap_or(rest));
    let claims = rest.get(header + 1..).unwrap_or_default();
    let claims = claims.get(..CLAIMS_BYTES_MIN).unwrap_or(claims);
    match rest.get(header) {
        None if header < REDACT_PATTERN_BYTES_MAX => PatternMatch::Undecided,
        Some(b'.') if header >= HEADER_BYTES_MIN => match ByteClass::Token.run_length(claims) {
            CLAIMS_BYTES_MIN.. => {
                PatternMatch::Found { from: 0, tail: MatchTail::new(0, TailEnd::NotIn(ByteClass::Dotted)) }
            }
            run if run == claims.len() => PatternMatch::Undecided,
            _ => PatternMatch::NoMatch,
        },
        Some(_) | None => PatternMatch::NoMatch,
    }
}

/// `https://user:password@host`: the user info before the last `@` of the authority.
fn user_info(rest: &[u8], last: StreamEnd) -> PatternMatch {
    const NAMELESS_BYTES_MIN: usize = 16;
    let Some((scheme, rest)) = rest.split_first() else { return PatternMatch::NoMatch };
    if !starts_with(rest, b"://") || !ByteClass::Token.contains(*scheme) {
        return PatternMatch::NoMatch;
    }
    let Some(authority) = rest.get(3..) else { return PatternMatch::Undecided };
    let authority = authority.get(..REDACT_PATTERN_BYTES_MAX).unwrap_or(authority);
    let ends = |byte: &u8| byte.is_ascii_whitespace() || byte.is_ascii_control() || b"/?#\"<>\\^`{|}".contains(byte);
    let end = authority.iter().position(ends);
    if end.is_none() && authority.len() < REDACT_PATTERN_BYTES_MAX && last == StreamEnd::No {
        return PatternMatch::Undecided;
    }
    let authority = authority.get(..end.unwrap_or(authority.len())).unwrap_or_default();
    let Some(bytes) = authority.iter().rposition(|byte| *byte == b'@') else { return PatternMatch::NoMatch };
    let user_info = authority.get(..bytes).unwrap_or_default();
    let password = user_info.iter().position(|byte| *byte == b':').is_some_and(|colon| colon + 1 < bytes);
    // `git@host` is not a secret; a long name without a password is a token.
    if password || bytes >= NAMELESS_BYTES_MIN {
        PatternMatch::Found { from: 4, tail: MatchTail::new(bytes, TailEnd::Here) }
    } else {
        PatternMatch::NoMatch
    }
}

/// `sig=…` and the like in a URL, or in a URL that is a parameter of another URL.
fn url_parameter(before: &[u8], rest: &[u8]) -> PatternMatch {
    let first = match before.last() {
        Some(b'?' | b'&' | b';') => 0,
        Some(b'6' | b'F' | b'f')
            if [b"u0026".as_slice(), b"%26", b"%3F", b"%3f"].iter().any(|sign| before.ends_with(sign)) =>
        {
            0
        }
        Some(b'-') => 2,
        Some(_) | None => return PatternMatch::NoMatch,
    };
    let mut open = false;
    for name in PARAMETERS.iter().skip(first) {
        if !starts_with_ignore_case(rest, name.as_bytes()) {
            continue;
        }
        match rest.get(name.len()..).unwrap_or_default() {
            [b'=', ..] => {
                return PatternMatch::Found {
                    from: name.len() + 1,
                    tail: MatchTail::new(0, TailEnd::NotIn(ByteClass::Value)),
                };
            }
            [b'%', b'3', b'D' | b'd', ..] => {
                return PatternMatch::Found {
                    from: name.len() + 3,
                    tail: MatchTail::new(0, TailEnd::NotIn(ByteClass::Value)),
                };
            }
            [] | [b'%'] | [b'%', b'3'] => open = true,
            _ => {}
        }
    }
    if open { PatternMatch::Undecided } else { PatternMatch::NoMatch }
}

/// `-----BEGIN … PRIVATE KEY-----` up to the end of the block.
fn private_key_block(before: &[u8], rest: &[u8]) -> PatternMatch {
    const LABEL_BYTES_MAX: usize = 48;
    if !before.ends_with(b"-----") || !starts_with_ignore_case(rest, b"BEGIN ") {
        return PatternMatch::NoMatch;
    }
    let head = rest.get(..LABEL_BYTES_MAX).unwrap_or(rest);
    let label = head.iter().position(|byte| !byte.is_ascii_uppercase() && *byte != b' ').unwrap_or(head.len());
    if label == LABEL_BYTES_MAX {
        return PatternMatch::NoMatch;
    }
    let secret = head.get(..label).unwrap_or_default().windows(11).any(|part| part == b"PRIVATE KEY");
    match head.get(label..).unwrap_or_default() {
        [b'-', b'-', b'-', b'-', b'-', ..] if secret => PatternMatch::Found {
            from: label + 5,
            tail: MatchTail::new(0, TailEnd::KeyBlock { bytes: 0, dashes: 0, runs: 0 }),
        },
        [] | [b'-'] | [b'-', b'-'] | [b'-', b'-', b'-'] | [b'-', b'-', b'-', b'-'] if rest.len() == head.len() => {
            PatternMatch::Undecided
        }
        _ => PatternMatch::NoMatch,
    }
}

/// An `Authorization` header in HTTP, in JSON, or on a command line.
fn authorization(rest: &[u8], last: StreamEnd) -> PatternMatch {
    const NAME: &[u8] = b"authorization";
    const QUOTES_MAX: usize = 6;
    if !starts_with_ignore_case(rest, NAME) {
        return PatternMatch::NoMatch;
    }
    let Some(behind) = rest.get(NAME.len()..) else { return PatternMatch::Undecided };
    let filler = |bytes: &[u8]| {
        let filler = |byte: &u8| matches!(byte, b'"' | b'\'' | b'\\' | b' ' | b'\t');
        bytes.iter().take(QUOTES_MAX).take_while(|byte| filler(byte)).count()
    };
    let colon = filler(behind);
    match behind.get(colon) {
        None => return PatternMatch::Undecided,
        Some(b':' | b'=') => {}
        Some(_) => return PatternMatch::NoMatch,
    }
    let value = behind.get(colon + 1..).unwrap_or_default();
    let quotes = filler(value);
    if quotes == value.len() && quotes < QUOTES_MAX {
        return PatternMatch::Undecided;
    }
    let opened = value.get(..quotes).unwrap_or_default();
    let close = opened.iter().find(|byte| matches!(byte, b'"' | b'\'' | b'\\')).copied();
    let from = NAME.len() + colon + 1 + quotes;
    let value = value.get(quotes..).unwrap_or_default();
    let tail = match close {
        Some(close) => MatchTail::new(0, TailEnd::Quote { close, escaped: false }),
        None => match unquoted_credentials(value) {
            Some(tail) => tail,
            None if last == StreamEnd::Yes => MatchTail::new(value.len(), TailEnd::Here),
            None => return PatternMatch::Undecided,
        },
    };
    PatternMatch::Found { from, tail }
}

/// Ends after the word that follows a known scheme, after a word too long for a scheme, or at the end of the line.
fn unquoted_credentials(value: &[u8]) -> Option<MatchTail> {
    const SCHEME_BYTES_MAX: usize = 20;
    const SCHEMES: [&[u8]; 5] = [b"bearer", b"basic", b"token", b"negotiate", b"apikey"];
    const WORD_ENDS: &[u8] = b" \t\"',\\\r\n";
    let start = value.get(..=SCHEME_BYTES_MAX).unwrap_or(value);
    let Some(scheme) = start.iter().position(|byte| WORD_ENDS.contains(byte)) else {
        return (value.len() > SCHEME_BYTES_MAX).then(|| MatchTail::new(0, TailEnd::AnyOf(WORD_ENDS)));
    };
    let is_space = |byte: &u8| matches!(byte, b' ' | b'\t');
    let word = start.iter().skip(scheme).position(|byte| !is_space(byte)).map(|spaces| scheme + spaces);
    let is_known = |scheme: &[u8]| SCHEMES.iter().any(|known| scheme.eq_ignore_ascii_case(known));
    match word {
        None if value.len() <= SCHEME_BYTES_MAX => None,
        Some(word) if word == scheme => Some(MatchTail::new(scheme, TailEnd::Here)),
        Some(word) if is_known(start.get(..scheme).unwrap_or_default()) => {
            Some(MatchTail::new(word, TailEnd::AnyOf(WORD_ENDS)))
        }
        Some(_) | None => Some(MatchTail::new(0, TailEnd::AnyOf(b"\r\n"))),
    }
}
