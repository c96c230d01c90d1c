//! What secrets look like that nobody told us of: tokens with well-known beginnings, JSON Web Tokens, private keys,
//! `Authorization` values, passwords in URLs, and the signatures of signed URLs.
//!
//! A shape is recognised from a bounded number of bytes. What it covers from there on may be endless: a [`Tail`] follows
//! it byte by byte, and nothing has to be held back for it.

use crate::limits::{REDACT_KEY_BLOCK_BYTES_MAX, REDACT_SHAPE_BYTES_MAX};

/// How many bytes before a place are needed to judge it.
pub(super) const LOOK_BEHIND: usize = 8;

/// A token that is known by its beginning.
struct Token {
    prefix: &'static str,
    class: Class,
    /// How many bytes must follow the prefix at least.
    least: usize,
}

const fn token(prefix: &'static str, class: Class, least: usize) -> Token {
    Token { prefix, class, least }
}

const TOKENS: [Token; 34] = [
    token("ghp_", Class::Word, 30),
    token("gho_", Class::Word, 30),
    token("ghu_", Class::Word, 30),
    token("ghs_", Class::Word, 30),
    token("ghr_", Class::Word, 30),
    token("github_pat_", Class::Word, 40),
    token("glpat-", Class::Token, 20),
    token("glrt-", Class::Token, 20),
    token("gldt-", Class::Token, 20),
    token("glcbt-", Class::Token, 20),
    token("glptt-", Class::Token, 20),
    token("xoxb-", Class::Token, 20),
    token("xoxp-", Class::Token, 20),
    token("xoxa-", Class::Token, 20),
    token("xoxr-", Class::Token, 20),
    token("xoxs-", Class::Token, 20),
    token("xapp-", Class::Token, 20),
    token("sk_live_", Class::Word, 20),
    token("rk_live_", Class::Word, 20),
    token("sk_test_", Class::Word, 20),
    token("sk-ant-", Class::Token, 30),
    token("sk-proj-", Class::Token, 30),
    token("npm_", Class::Word, 36),
    token("pypi-", Class::Token, 50),
    token("dop_v1_", Class::Word, 60),
    token("dckr_pat_", Class::Token, 20),
    token("hvs.", Class::Dotted, 24),
    token("hvb.", Class::Dotted, 24),
    token("ya29.", Class::Dotted, 20),
    token("AIza", Class::Token, 35),
    token("bkua_", Class::Word, 40),
    token("shpat_", Class::Word, 32),
    token("tskey-", Class::Token, 20),
    token("AGE-SECRET-KEY-1", Class::Token, 50),
];

/// What starts a parameter of a signed URL, in small letters, and with what before it.
const PARAMETERS: [(&str, Before); 4] = [
    ("sig", Before::Parameter),
    ("bewit", Before::Parameter),
    ("signature", Before::ParameterOrDash),
    ("security-token", Before::ParameterOrDash),
];

#[derive(Clone, Copy, PartialEq)]
enum Before {
    /// The start of a parameter.
    Parameter,
    /// That, or a dash: `X-Amz-Signature`.
    ParameterOrDash,
}

/// Bytes that a shape goes on with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Class {
    /// Letters, digits and `_`.
    Word,
    /// These and `-`.
    Token,
    /// These and `.`.
    Dotted,
    /// What may stand in the value of a URL's parameter.
    Value,
}

impl Class {
    fn has(self, byte: u8) -> bool {
        byte.is_ascii_alphanumeric()
            || match self {
                Self::Word => byte == b'_',
                Self::Token => matches!(byte, b'_' | b'-'),
                Self::Dotted => matches!(byte, b'_' | b'-' | b'.'),
                Self::Value => b"%+/=_.~:$*!-".contains(&byte),
            }
    }

    fn run(self, bytes: &[u8]) -> usize {
        bytes.iter().position(|byte| !self.has(*byte)).unwrap_or(bytes.len())
    }
}

/// What there is at a place.
#[derive(Debug)]
pub(super) enum Shape {
    /// None.
    No,
    /// That depends on bytes that have not come yet.
    Open,
    /// One, which covers what follows `from` bytes after the place for as long as `tail` says.
    Found { from: usize, tail: Tail },
}

impl Shape {
    fn or_else(self, other: impl FnOnce() -> Self) -> Self {
        if matches!(self, Self::No) { other() } else { self }
    }
}

/// How far a shape reaches, told byte by byte.
#[derive(Debug)]
pub(super) enum Tail {
    /// As long as bytes are of a class.
    While(Class),
    /// So many bytes more.
    Bytes(usize),
    /// To the end of a private key.
    Key(KeyBlock),
    /// To the end of the value of an `Authorization` header.
    Authorization(Authorization),
}

impl Tail {
    /// How many of these bytes it covers before it ends; `None` where it covers them all and goes on.
    pub(super) fn covers(&mut self, bytes: &[u8]) -> Option<usize> {
        match self {
            Self::While(class) => bytes.iter().position(|byte| !class.has(*byte)),
            Self::Bytes(left) if *left <= bytes.len() => Some(*left),
            Self::Bytes(left) => {
                *left -= bytes.len();
                None
            }
            Self::Key(block) => bytes.iter().position(|byte| block.ended_by(*byte)),
            Self::Authorization(value) => bytes.iter().position(|byte| value.ended_by(*byte)),
        }
    }
}

/// Four bytes, or fewer, that a shape may start with.
pub(super) fn beginnings() -> Vec<Vec<u8>> {
    let mut found: Vec<Vec<u8>> = TOKENS.iter().map(|token| token.prefix.as_bytes().to_vec()).collect();
    for word in ["BEGIN", "Authorization", "authorization", "AUTHORIZATION"] {
        found.push(word.as_bytes().to_vec());
    }
    for (name, _) in PARAMETERS {
        let mut capital = name.to_owned();
        capital.get_mut(..1).into_iter().for_each(str::make_ascii_uppercase);
        for name in [name.to_owned(), capital, name.to_ascii_uppercase()] {
            found.extend(["=", "%"].map(|end| format!("{name}{end}").into_bytes()));
        }
    }
    for byte in (0..=u8::MAX).filter(|byte| Class::Token.has(*byte)) {
        found.push(vec![b'e', b'y', b'J', byte]);
        found.push(vec![byte, b':', b'/', b'/']);
    }
    found
}

/// Looks at the place `at`. `last` says whether no more bytes will come.
pub(super) fn at(bytes: &[u8], at: usize, last: Last) -> Shape {
    let rest = bytes.get(at..).unwrap_or_default();
    let before = bytes.get(at.saturating_sub(LOOK_BEHIND)..at).unwrap_or_default();
    let found = match rest {
        [b'B', b'E', ..] => key_block(before, rest),
        [b'A' | b'a', b'u' | b'U', ..] => authorization(before, rest),
        [_, b':', b'/', ..] => user_info(rest, last),
        [b'e', b'y', b'J', ..] => web_token(before, rest),
        _ => Shape::No,
    };
    let found = found.or_else(|| parameter(before, rest)).or_else(|| known_token(before, rest));
    match (found, last) {
        (Shape::Open, Last::Yes) => Shape::No,
        (found, _) => found,
    }
}

/// Whether more bytes may come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Last {
    /// None will.
    Yes,
    /// Some may.
    No,
}

fn in_a_word(before: &[u8]) -> bool {
    before.last().is_some_and(u8::is_ascii_alphanumeric)
}

/// Whether `rest` starts with `text`, as far as it goes, whatever the case of its letters.
fn starts(rest: &[u8], text: &[u8]) -> bool {
    let both = rest.len().min(text.len());
    rest.get(..both).unwrap_or_default().eq_ignore_ascii_case(text.get(..both).unwrap_or_default())
}

fn known_token(before: &[u8], rest: &[u8]) -> Shape {
    if in_a_word(before) {
        return Shape::No;
    }
    for Token { prefix, class, least } in &TOKENS {
        let both = rest.len().min(prefix.len());
        if rest.get(..both) != prefix.as_bytes().get(..both) {
            continue;
        }
        let value = rest.get(prefix.len()..).unwrap_or_default();
        let value = value.get(..*least).unwrap_or(value);
        match class.run(value) {
            run if run == *least => return Shape::Found { from: 0, tail: Tail::While(*class) },
            run if run == value.len() => return Shape::Open,
            _ => {}
        }
    }
    Shape::No
}

/// `header.claims.signature`, the first two being JSON in base64.
fn web_token(before: &[u8], rest: &[u8]) -> Shape {
    const HEADER_BYTES_MIN: usize = 12;
    const CLAIMS_BYTES_MIN: usize = 4;
    // A word is looked at once, from its start.
    if before.last().is_some_and(|byte| Class::Dotted.has(*byte)) {
        return Shape::No;
    }
    let header = Class::Token.run(rest.get(..REDACT_SHAPE_BYTES_MAX).unwrap_or(rest));
    let claims = rest.get(header + 1..).unwrap_or_default();
    let claims = claims.get(..CLAIMS_BYTES_MIN).unwrap_or(claims);
    match rest.get(header) {
        None if header < REDACT_SHAPE_BYTES_MAX => Shape::Open,
        Some(b'.') if header >= HEADER_BYTES_MIN => match Class::Token.run(claims) {
            CLAIMS_BYTES_MIN.. => Shape::Found { from: 0, tail: Tail::While(Class::Dotted) },
            run if run == claims.len() => Shape::Open,
            _ => Shape::No,
        },
        Some(_) | None => Shape::No,
    }
}

/// `https://user:password@host`: what stands before the last `@` of the authority.
fn user_info(rest: &[u8], last: Last) -> Shape {
    const NAMELESS_BYTES_MIN: usize = 16;
    let Some(authority) = rest.get(4..).filter(|_| rest.get(1..4) == Some(b"://")) else {
        return if rest.len() < 4 && starts(rest.get(1..).unwrap_or_default(), b"://") {
            Shape::Open
        } else {
            Shape::No
        };
    };
    let authority = authority.get(..REDACT_SHAPE_BYTES_MAX).unwrap_or(authority);
    let ends = |byte: &u8| byte.is_ascii_whitespace() || byte.is_ascii_control() || b"/?#\"<>\\^`{|}".contains(byte);
    let end = authority.iter().position(ends);
    if end.is_none() && authority.len() < REDACT_SHAPE_BYTES_MAX && last == Last::No {
        return Shape::Open;
    }
    let authority = authority.get(..end.unwrap_or(authority.len())).unwrap_or_default();
    let Some(bytes) = authority.iter().rposition(|byte| *byte == b'@') else { return Shape::No };
    let user_info = authority.get(..bytes).unwrap_or_default();
    let password = user_info.iter().position(|byte| *byte == b':').is_some_and(|colon| colon + 1 < bytes);
    // `git@host` is nobody's secret; a long name without a password is a token.
    if password || bytes >= NAMELESS_BYTES_MIN { Shape::Found { from: 4, tail: Tail::Bytes(bytes) } } else { Shape::No }
}

/// `sig=…` and the like in a URL, also where that URL is the parameter of another.
fn parameter(before: &[u8], rest: &[u8]) -> Shape {
    let starts_one = matches!(before.last(), Some(b'?' | b'&' | b';'))
        || [b"u0026".as_slice(), b"%26", b"%3F", b"%3f"].iter().any(|sign| before.ends_with(sign));
    let dash = before.last() == Some(&b'-');
    let mut open = false;
    for (name, place) in PARAMETERS {
        if !(starts_one || dash && place == Before::ParameterOrDash) || !starts(rest, name.as_bytes()) {
            continue;
        }
        match rest.get(name.len()..).unwrap_or_default() {
            [b'=', ..] => return Shape::Found { from: name.len() + 1, tail: Tail::While(Class::Value) },
            [b'%', b'3', b'D' | b'd', ..] => {
                return Shape::Found { from: name.len() + 3, tail: Tail::While(Class::Value) };
            }
            [] | [b'%'] | [b'%', b'3'] => open = true,
            _ => {}
        }
    }
    if open { Shape::Open } else { Shape::No }
}

/// What stands between `-----BEGIN … PRIVATE KEY-----` and the end of the block.
fn key_block(before: &[u8], rest: &[u8]) -> Shape {
    const LABEL_BYTES_MAX: usize = 48;
    if !before.ends_with(b"-----") || !starts(rest, b"BEGIN ") {
        return Shape::No;
    }
    let head = rest.get(..LABEL_BYTES_MAX).unwrap_or(rest);
    let label = head.iter().position(|byte| !byte.is_ascii_uppercase() && *byte != b' ').unwrap_or(head.len());
    if label == LABEL_BYTES_MAX {
        return Shape::No;
    }
    let secret = head.get(..label).unwrap_or_default().windows(11).any(|part| part == b"PRIVATE KEY");
    match head.get(label..).unwrap_or_default() {
        [b'-', b'-', b'-', b'-', b'-', ..] if secret => {
            Shape::Found { from: label + 5, tail: Tail::Key(KeyBlock::default()) }
        }
        [] | [b'-'] | [b'-', b'-'] | [b'-', b'-', b'-'] | [b'-', b'-', b'-', b'-'] if rest.len() == head.len() => {
            Shape::Open
        }
        _ => Shape::No,
    }
}

/// The inside of a PEM block. One without an end is covered for as long as a key may be.
#[derive(Debug, Default)]
pub(super) struct KeyBlock {
    bytes: usize,
    dashes: usize,
    place: KeyPlace,
}

#[derive(Debug, Default, PartialEq)]
enum KeyPlace {
    #[default]
    Content,
    LastLine,
    Over,
}

impl KeyBlock {
    fn ended_by(&mut self, byte: u8) -> bool {
        if self.place == KeyPlace::Over || self.bytes == REDACT_KEY_BLOCK_BYTES_MAX {
            return true;
        }
        self.bytes += 1;
        match (byte, self.dashes, &self.place) {
            (b'-', 4, KeyPlace::LastLine) => self.place = KeyPlace::Over,
            (b'-', _, _) => self.dashes += 1,
            (b'E', 5.., KeyPlace::Content) => (self.place, self.dashes) = (KeyPlace::LastLine, 0),
            (_, _, _) => self.dashes = 0,
        }
        false
    }
}

/// The value of an `Authorization` header, as it is sent, in JSON, or on a command line.
fn authorization(before: &[u8], rest: &[u8]) -> Shape {
    const NAME: &[u8] = b"authorization";
    const QUOTES_MAX: usize = 6;
    if in_a_word(before) || !starts(rest, NAME) {
        return Shape::No;
    }
    let Some(behind) = rest.get(NAME.len()..) else { return Shape::Open };
    let filler = |bytes: &[u8]| {
        let filler = |byte: &u8| matches!(byte, b'"' | b'\'' | b'\\' | b' ' | b'\t');
        bytes.iter().take(QUOTES_MAX).take_while(|byte| filler(byte)).count()
    };
    let colon = filler(behind);
    match behind.get(colon) {
        None => return Shape::Open,
        Some(b':' | b'=') => {}
        Some(_) => return Shape::No,
    }
    let value = behind.get(colon + 1..).unwrap_or_default();
    let quotes = filler(value);
    if quotes == value.len() && quotes < QUOTES_MAX {
        return Shape::Open;
    }
    let opened = value.get(..quotes).unwrap_or_default();
    let close = opened.iter().find(|byte| matches!(byte, b'"' | b'\'' | b'\\')).copied();
    let from = NAME.len() + colon + 1 + quotes;
    Shape::Found { from, tail: Tail::Authorization(Authorization { close, ..Authorization::default() }) }
}

/// The value of an `Authorization` header: to its closing quote; else the one word after a scheme that has one; else to
/// the end of the line.
#[derive(Debug, Default)]
pub(super) struct Authorization {
    /// What closes the value: its quote, or the backslash before that.
    close: Option<u8>,
    escaped: bool,
    scheme: [u8; 9],
    /// How long the first word is.
    bytes: usize,
    part: Part,
}

#[derive(Debug, Default, PartialEq, Clone, Copy)]
enum Part {
    #[default]
    Scheme,
    Spaces,
    Word,
    Line,
}

impl Authorization {
    fn ended_by(&mut self, byte: u8) -> bool {
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
            Part::Scheme if matches!(byte, b' ' | b'\t') => {
                self.part = self.after_scheme();
                self.part == Part::Word
            }
            Part::Scheme if ends_word => true,
            Part::Scheme => {
                if let Some(place) = self.scheme.get_mut(self.bytes) {
                    *place = byte.to_ascii_lowercase();
                }
                self.bytes += 1;
                false
            }
            Part::Spaces if matches!(byte, b' ' | b'\t') => false,
            Part::Spaces => {
                self.part = Part::Word;
                false
            }
            Part::Word => ends_word,
            Part::Line => false,
        }
    }

    /// `Word` where the first word was the whole value.
    fn after_scheme(&self) -> Part {
        let word = self.scheme.get(..self.bytes).unwrap_or_default();
        match word {
            b"bearer" | b"basic" | b"token" | b"negotiate" | b"apikey" => Part::Spaces,
            _ if self.bytes > 20 => Part::Word,
            _ => Part::Line,
        }
    }
}
