//! Tests secrets within base64 that is wrapped at any column, independent of the filter's list of encodings.

use base64::engine::general_purpose::{STANDARD, STANDARD_NO_PAD, URL_SAFE, URL_SAFE_NO_PAD};
use base64::engine::{Engine, GeneralPurpose};
use proptest::prelude::*;

use super::tests::{filtered, set};
use super::*;
use journeyman_domain::limits::{REDACT_PATTERN_BYTES_MAX, REDACT_PIECE_BYTES_MAX};

const ENGINES: [&GeneralPurpose; 4] = [&STANDARD, &STANDARD_NO_PAD, &URL_SAFE, &URL_SAFE_NO_PAD];
const LINE_ENDS: [&str; 3] = ["\n", "\r\n", "\r"];

/// A text in base64, wrapped after `width` characters.
struct Wrapped<'a> {
    before: &'a str,
    secret: &'a str,
    after: &'a str,
    engine: &'a GeneralPurpose,
    width: usize,
    line_end: &'a str,
}

impl Wrapped<'_> {
    fn characters(&self) -> Vec<char> {
        self.engine.encode([self.before, self.secret, self.after].concat()).chars().collect()
    }

    /// The characters that encode only the secret.
    fn of_the_secret(&self) -> std::ops::Range<usize> {
        let (from, until) = (self.before.len() * 8, (self.before.len() + self.secret.len()) * 8);
        let until = if self.after.is_empty() && from.is_multiple_of(3) { self.characters().len() } else { until / 6 };
        from.div_ceil(6)..until
    }

    fn is_broken_behind(&self, character: usize) -> bool {
        (character + 1).is_multiple_of(self.width) && character + 1 < self.characters().len()
    }

    /// The text and its expected redacted form.
    fn text_and_rest(&self) -> (String, String) {
        let (characters, mut hidden) = (self.characters(), self.of_the_secret());
        // A first character at the end of a line is not redacted.
        hidden.start += usize::from(self.is_broken_behind(hidden.start));
        let (mut text, mut rest) = (String::new(), String::new());
        for (place, character) in characters.iter().enumerate() {
            text.push(*character);
            if place == hidden.start {
                rest.push_str(REPLACEMENT);
            }
            if !hidden.contains(&place) {
                rest.push(*character);
            }
            if self.is_broken_behind(place) {
                text.push_str(self.line_end);
                if !hidden.contains(&place) || place + 1 == hidden.end {
                    rest.push_str(self.line_end);
                }
            }
        }
        (text, rest)
    }
}

proptest! {
    /// The surrounding text shares no character with the secret, so that the secret occurs only once.
    #[test]
    fn a_secret_in_base64_is_replaced_at_any_offset_and_column(
        before in "[a-z0-9?\n]{0,80}",
        secret in "[A-Z>~]{6,90}",
        after in "|[a-z][a-z0-9?\n]{0,80}",
        engine in prop::sample::select(&ENGINES[..]),
        width in 1..=100_usize,
        line_end in prop::sample::select(&LINE_ENDS[..]),
        around in prop::sample::select(&["", "\n", "of base64: ", "-\r\n"][..]),
        cuts in prop_oneof![Just(vec![1; 800]), prop::collection::vec(0..60_usize, 0..20), Just(Vec::new())],
    ) {
        let (text, rest) = Wrapped { before: &before, secret: &secret, after: &after, engine, width, line_end }.text_and_rest();
        let set = set(&[&secret]);
        let out = filtered(&[&set], format!("{around}{text}{around}").as_bytes(), &cuts);
        prop_assert_eq!(String::from_utf8(out).unwrap(), format!("{around}{rest}{around}"));
    }
}

#[test]
fn a_secret_in_a_base64_environment_is_replaced() {
    // 27 bytes, so that only the first character can be shared.
    let secret = "Correct/Horse+Battery-Stack";
    let variables = (0..3).map(|number| format!("VARIABLE_{number}=some ordinary value\n")).collect::<String>();
    for before in 0..76 {
        let before = format!("{}{variables}TOKEN=", "x".repeat(before));
        for width in [60, 64, 70, 72, 76] {
            for line_end in ["\n", "\r\n"] {
                let text = Wrapped { before: &before, secret, after: "\nZ=1\n", engine: &STANDARD, width, line_end };
                let (text, rest) = text.text_and_rest();
                let out = filtered(&[&set(&[secret])], text.as_bytes(), &[]);
                assert_eq!(String::from_utf8(out).unwrap(), rest);
            }
        }
    }
}

#[test]
fn a_long_secret_is_replaced_at_any_column_within_the_bound() {
    let secret: String = (0..900).map(|number| format!("{number:05}")).collect();
    let set = set(&[&secret]);
    for (width, line_end) in [(1, "\r\n"), (1, "\n"), (2, "\n"), (76, "\r\n"), (1363, "\n"), (1365, "\n")] {
        for before in ["", "b", "be"] {
            let text = Wrapped { before, secret: &secret, after: "after", engine: &STANDARD, width, line_end };
            let (text, rest) = text.text_and_rest();
            let (mut filter, mut out) = (RedactFilter::default(), Vec::new());
            for piece in text.as_bytes().chunks(100) {
                filter.push(&[&set], piece, &mut out);
                assert!(filter.held_back() < REDACT_PIECE_BYTES_MAX.max(REDACT_PATTERN_BYTES_MAX));
            }
            filter.finish(&[&set], &mut out);
            assert_eq!(String::from_utf8(out).unwrap(), rest, "{width} {line_end:?} {before}");
        }
    }
}

#[test]
fn bytes_are_held_back_only_while_a_match_may_continue_after_a_line_end() {
    let set = set(&["hunter2-hunter2"]);
    // aHVudGVyMi1odW50ZXIy
    for (text, held) in [
        ("an aHV", 3),
        ("an aH\n", 3),
        ("an aHVu\r\n", 6),
        ("an aHVu\r\ndG\n", 9),
        ("an aHVu\r\ndX\n", 0),
        ("an a\n", 0),
        ("an a\nHV\r\n", 4),
        ("an aHV\n\n", 5),
        ("an aHV\n\n\n", 0),
        ("hunter\n", 0),
    ] {
        let (mut filter, mut out) = (RedactFilter::default(), Vec::new());
        filter.push(&[&set], text.as_bytes(), &mut out);
        assert_eq!(filter.held_back(), held, "{text:?}");
    }
}
