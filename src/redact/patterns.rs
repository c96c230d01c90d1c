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

/// The first bytes of all patterns that match at the start of a word.
const FIRST_BYTES: &[u8] = b"ABabdeghnprstxy";

const PARAMETERS: [(&str, ParameterStart); 4] = [
    ("sig", ParameterStart::Parameter),
    ("bewit", ParameterStart::Parameter),
    ("signature", ParameterStart::DashToo),
    ("security-token", ParameterStart::DashToo),
];

#[derive(Clone, Copy, PartialEq)]
enum ParameterStart {
    Parameter,
    DashToo,
}

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

#[derive(Debug)]
pub(super) enum MatchTail {
    While(ByteClass),
    Bytes(usize),
    Key(KeyBlock),
    Authorization(AuthorizationValue),
}

impl MatchTail {
    /// How many of these bytes are covered before the match ends; `None` if the match continues after them.
    pub(super) fn covered_bytes(&mut self, bytes: &[u8]) -> Option<usize> {
        match self {
            Self::While(class) => bytes.iter().position(|byte| !class.contains(*byte)),
            Self::Bytes(left) if *left <= bytes.len() => Some(*left),
            Self::Bytes(left) => {
                *left -= bytes.len();
                None
            }
            Self::Key(block) => bytes.iter().position(|byte| block.ends_before(*byte)),
            Self::Authorization(value) => bytes.iter().position(|byte| value.ends_before(*byte)),
        }
    }
}

pub(super) fn match_at(bytes: &[u8], at: usize, last: StreamEnd) -> PatternMatch {
    let rest = bytes.get(at..).unwrap_or_default();
    let before = bytes.get(at.saturating_sub(LOOKBEHIND_BYTES)..at).unwrap_or_default();
    let mut found = user_info(rest, last).or_else(|| url_parameter(before, rest));
    let starts_word = !before.last().is_some_and(u8::is_ascii_alphanumeric);
    if starts_word && rest.first().is_some_and(|first| FIRST_BYTES.contains(first)) {
        found = found
            .or_else(|| private_key_block(before, rest))
            .or_else(|| authorization(rest))
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
            run if run == *bytes_min => return PatternMatch::Found { from: 0, tail: MatchTail::While(*class) },
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
            CLAIMS_BYTES_MIN.. => PatternMatch::Found { from: 0, tail: MatchTail::While(ByteClass::Dotted) },
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
        PatternMatch::Found { from: 4, tail: MatchTail::Bytes(bytes) }
    } else {
        PatternMatch::NoMatch
    }
}

/// `sig=…` and the like in a URL, or in a URL that is a parameter of another URL.
fn url_parameter(before: &[u8], rest: &[u8]) -> PatternMatch {
    let dash = before.last() == Some(&b'-');
    let starts_one = match before.last() {
        Some(b'?' | b'&' | b';') => true,
        Some(b'6' | b'F' | b'f') => {
            [b"u0026".as_slice(), b"%26", b"%3F", b"%3f"].iter().any(|sign| before.ends_with(sign))
        }
        Some(_) | None => false,
    };
    if !starts_one && !dash {
        return PatternMatch::NoMatch;
    }
    let mut open = false;
    for (name, place) in PARAMETERS {
        if !(starts_one || dash && place == ParameterStart::DashToo) || !starts_with_ignore_case(rest, name.as_bytes())
        {
            continue;
        }
        match rest.get(name.len()..).unwrap_or_default() {
            [b'=', ..] => {
                return PatternMatch::Found { from: name.len() + 1, tail: MatchTail::While(ByteClass::Value) };
            }
            [b'%', b'3', b'D' | b'd', ..] => {
                return PatternMatch::Found { from: name.len() + 3, tail: MatchTail::While(ByteClass::Value) };
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
        [b'-', b'-', b'-', b'-', b'-', ..] if secret => {
            PatternMatch::Found { from: label + 5, tail: MatchTail::Key(KeyBlock::default()) }
        }
        [] | [b'-'] | [b'-', b'-'] | [b'-', b'-', b'-'] | [b'-', b'-', b'-', b'-'] if rest.len() == head.len() => {
            PatternMatch::Undecided
        }
        _ => PatternMatch::NoMatch,
    }
}

/// The inside of a PEM block; an unterminated one ends after [`REDACT_KEY_BLOCK_BYTES_MAX`].
#[derive(Debug, Default)]
pub(super) struct KeyBlock {
    bytes: usize,
    dashes: usize,
    state: KeyBlockState,
}

#[derive(Debug, Default, PartialEq)]
enum KeyBlockState {
    #[default]
    Content,
    LastLine,
    Ended,
}

impl KeyBlock {
    fn ends_before(&mut self, byte: u8) -> bool {
        if self.state == KeyBlockState::Ended || self.bytes == REDACT_KEY_BLOCK_BYTES_MAX {
            return true;
        }
        self.bytes += 1;
        match (byte, self.dashes, &self.state) {
            (b'-', 4, KeyBlockState::LastLine) => self.state = KeyBlockState::Ended,
            (b'-', _, _) => self.dashes += 1,
            (b'E', 5.., KeyBlockState::Content) => (self.state, self.dashes) = (KeyBlockState::LastLine, 0),
            (_, _, _) => self.dashes = 0,
        }
        false
    }
}

/// An `Authorization` header in HTTP, in JSON, or on a command line.
fn authorization(rest: &[u8]) -> PatternMatch {
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
    PatternMatch::Found {
        from,
        tail: MatchTail::Authorization(AuthorizationValue { close, ..AuthorizationValue::default() }),
    }
}

/// Ends at the closing quote; otherwise after the word that follows a known scheme; otherwise at the end of the line.
#[derive(Debug, Default)]
pub(super) struct AuthorizationValue {
    /// The closing quote, or the backslash before it.
    close: Option<u8>,
    escaped: bool,
    scheme: [u8; 9],
    bytes: usize,
    part: AuthorizationPart,
}

#[derive(Debug, Default, PartialEq, Clone, Copy)]
enum AuthorizationPart {
    #[default]
    Scheme,
    Spaces,
    Word,
    Line,
}

impl AuthorizationValue {
    fn ends_before(&mut self, byte: u8) -> bool {
        if matches!(byte, b'\n' | b'\r') {
            return true;
        }
        if let Some(close) = self.close {
            let closed = byte == close && !self.escaped;
            self.escaped = byte == b'\\' && !self.escaped;
            return closed;
        }
        let ends_word = matches!(byte, b' ' | b'\t' | b'"' | b'\'' | b',' | b'\\');
        match self.part {
            AuthorizationPart::Scheme if matches!(byte, b' ' | b'\t') => {
                self.part = self.after_scheme();
                self.part == AuthorizationPart::Word
            }
            AuthorizationPart::Scheme if ends_word => true,
            AuthorizationPart::Scheme => {
                if let Some(place) = self.scheme.get_mut(self.bytes) {
                    *place = byte.to_ascii_lowercase();
                }
                self.bytes += 1;
                false
            }
            AuthorizationPart::Spaces if matches!(byte, b' ' | b'\t') => false,
            AuthorizationPart::Spaces => {
                self.part = AuthorizationPart::Word;
                false
            }
            AuthorizationPart::Word => ends_word,
            AuthorizationPart::Line => false,
        }
    }

    fn after_scheme(&self) -> AuthorizationPart {
        let word = self.scheme.get(..self.bytes).unwrap_or_default();
        match word {
            b"bearer" | b"basic" | b"token" | b"negotiate" | b"apikey" => AuthorizationPart::Spaces,
            _ if self.bytes > 20 => AuthorizationPart::Word,
            _ => AuthorizationPart::Line,
        }
    }
}
