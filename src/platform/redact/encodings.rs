//! The encodings of a secret that the filter searches for.

use base64::engine::general_purpose::{STANDARD_NO_PAD, URL_SAFE_NO_PAD};
use base64::engine::{Engine, GeneralPurpose};
use secrecy::zeroize::Zeroizing;

use journeyman_domain::limits::{REDACT_PIECE_BYTES_MAX, REDACT_SECRET_CHARS_MIN};

/// Zeroized when dropped.
pub(super) type EncodedSecret = Zeroizing<Vec<u8>>;

/// The line lengths of `base64` and MIME, and of PEM.
const BASE64_COLUMNS: [usize; 2] = [76, 64];

/// The encodings of `secret` and of each of its lines, without duplicates; none if it is too short.
pub(super) fn of(secret: &str) -> Vec<EncodedSecret> {
    let mut found = Vec::new();
    let whole = secret.trim();
    add_encodings(whole, &mut found);
    if whole.contains('\n') {
        for line in whole.lines().map(str::trim) {
            // The first and the last line of a PEM block are not secret.
            if !line.starts_with("-----") {
                add_encodings(line, &mut found);
            }
        }
    }
    found.sort_by(|one, other| one.as_slice().cmp(other.as_slice()));
    found.dedup();
    found
}

fn add_encodings(secret: &str, found: &mut Vec<EncodedSecret>) {
    if secret.chars().count() < REDACT_SECRET_CHARS_MIN {
        return;
    }
    let mut add = |text: Vec<u8>| add_pieces(Zeroizing::new(text), found);
    add(secret.as_bytes().to_vec());
    percent(secret, &mut add);
    json(secret, &mut add);
    shell(secret, &mut add);
    for engine in [&STANDARD_NO_PAD, &URL_SAFE_NO_PAD] {
        base64(secret.as_bytes(), engine, found);
    }
}

/// Splits a long encoding, so that the filter needs a bounded buffer.
fn add_pieces(text: EncodedSecret, found: &mut Vec<EncodedSecret>) {
    if text.len() <= REDACT_PIECE_BYTES_MAX {
        if text.len() >= REDACT_SECRET_CHARS_MIN {
            found.push(text);
        }
        return;
    }
    let last = text.len() - REDACT_PIECE_BYTES_MAX;
    let starts = (0..last).step_by(REDACT_PIECE_BYTES_MAX).chain([last]);
    let piece = |start: usize| text.get(start..start + REDACT_PIECE_BYTES_MAX).unwrap_or_default().to_vec();
    found.extend(starts.map(|start| Zeroizing::new(piece(start))));
}

/// For each of the three offsets of the secret within encoded data, the characters that depend on the secret alone; and the
/// whole encoding of the secret by itself.
fn base64(secret: &[u8], engine: &GeneralPurpose, found: &mut Vec<EncodedSecret>) {
    let mut add = |text: &[u8]| add_pieces(Zeroizing::new(text.to_vec()), found);
    for offset in 0..3 {
        let mut shifted = Zeroizing::new(vec![0; offset]);
        shifted.extend_from_slice(secret);
        let mut text = Zeroizing::new(engine.encode(&*shifted).into_bytes());
        // The characters at either end also encode bits of the neighbouring bytes.
        let start = [0, 2, 3].get(offset).copied().unwrap_or_default();
        let end = text.len() - usize::from(!shifted.len().is_multiple_of(3));
        add(text.get(start..end).unwrap_or_default());
        if offset > 0 {
            continue;
        }
        // As a program prints it that wraps lines, each of them by itself, because they may be indented.
        for columns in BASE64_COLUMNS.into_iter().filter(|columns| text.len() > *columns) {
            text.chunks(columns).for_each(&mut add);
        }
        add(&text);
        let padded = text.len().next_multiple_of(4);
        text.resize(padded, b'=');
        add(&text);
    }
}

/// Percent-encoding, by encoders that keep different characters.
fn percent(secret: &str, add: &mut impl FnMut(Vec<u8>)) {
    const UNRESERVED: &[u8] = b"-_.~";
    const PYTHON: &[u8] = b"-_.~/";
    const COMPONENT: &[u8] = b"-_.~!*'()";
    const WHOLE_URL: &[u8] = b"-_.~!*'();/?:@&=+$,#";
    for unescaped in [UNRESERVED, PYTHON, COMPONENT, WHOLE_URL] {
        for digits in [b"0123456789ABCDEF", b"0123456789abcdef"] {
            for space in [b"%20".as_slice(), b"+"] {
                let encode = |out: &mut Vec<u8>, byte: u8| match byte {
                    b' ' => out.extend_from_slice(space),
                    byte if byte.is_ascii_alphanumeric() || unescaped.contains(&byte) => out.push(byte),
                    byte => {
                        let digit = |nibble: u8| digits.get(usize::from(nibble)).copied().unwrap_or_default();
                        out.extend([b'%', digit(byte >> 4), digit(byte & 15)]);
                    }
                };
                let mut out = Vec::with_capacity(secret.len() * 3);
                secret.bytes().for_each(|byte| encode(&mut out, byte));
                add(out);
                if !secret.contains(' ') {
                    break;
                }
            }
        }
    }
}

/// JSON strings, by encoders that escape only what they must, slashes, HTML's special characters, or all but ASCII; and a
/// JSON string within a JSON string.
fn json(secret: &str, add: &mut impl FnMut(Vec<u8>)) {
    let plain = json_escaped(secret);
    add(json_escaped(&plain).into_bytes());
    add(plain.replace('/', "\\/").into_bytes());
    add(by_number(&plain, |character| matches!(character, '<' | '>' | '&' | '\u{2028}' | '\u{2029}')));
    add(by_number(&plain, |character| matches!(character, '<' | '>' | '&' | '\'')));
    add(by_number(&plain, |character| !character.is_ascii()));
    add(plain.into_bytes());
}

/// The text in a JSON string, without the quotes.
fn json_escaped(text: &str) -> String {
    let quoted = serde_json::Value::from(text).to_string();
    quoted.get(1..quoted.len() - 1).unwrap_or_default().to_owned()
}

fn by_number(text: &str, escapes: impl Fn(char) -> bool) -> Vec<u8> {
    let mut out = String::with_capacity(text.len());
    for character in text.chars() {
        if escapes(character) {
            for unit in character.encode_utf16(&mut [0; 2]) {
                out.push_str(&format!("\\u{unit:04x}"));
            }
        } else {
            out.push(character);
        }
    }
    out.into_bytes()
}

/// Shell quoting, by shells (`set -x`, `printf %q`) and by other programs.
fn shell(secret: &str, add: &mut impl FnMut(Vec<u8>)) {
    add(secret.replace('\'', r"'\''").into_bytes());
    add(secret.replace('\'', r#"'"'"'"#).into_bytes());
    let behind_backslash = |special: &str| {
        let mut out = String::with_capacity(secret.len());
        for character in secret.chars() {
            if special.contains(character) {
                out.push('\\');
            }
            out.push(character);
        }
        out.into_bytes()
    };
    add(behind_backslash("\"$`\\"));
    add(behind_backslash(" \t!\"#$&'()*,;<>?[\\]^`{|}~"));
    // bash and zsh fall back to $'…'.
    add(json_escaped(secret).replace("\\\"", "\"").replace('\'', "\\'").into_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;
    use base64::engine::general_purpose::STANDARD;

    fn texts(secret: &str) -> Vec<String> {
        of(secret).iter().map(|variant| String::from_utf8(variant.to_vec()).unwrap()).collect()
    }

    #[test]
    fn every_encoding_of_a_secret_is_listed() {
        let secret = "p@ss w/\"ö'$";
        let known = texts(secret);
        for text in [
            secret,
            "p%40ss%20w%2F%22%C3%B6%27%24",
            "p%40ss%20w%2f%22%c3%b6%27%24",
            "p%40ss+w%2F%22%C3%B6%27%24",
            "p%40ss%20w/%22%C3%B6%27%24",
            r#"p@ss w/\"ö'$"#,
            r#"p@ss w\/\"ö'$"#,
            r#"p@ss w/\"\u00f6'$"#,
            r#"p@ss w/\\\"ö'$"#,
            r#"p@ss w/"ö'\''$"#,
            r#"p@ss w/\"ö'\$"#,
            r#"p@ss\ w/\"ö\'\$"#,
            "cEBzcyB3LyLDtick",
        ] {
            assert!(known.iter().any(|variant| variant == text), "{text}");
        }
    }

    #[test]
    fn base64_is_listed_for_every_offset_and_both_alphabets() {
        let secret = "?>~secret?>~";
        let known = texts(secret);
        for before in ["", "a", "ab", "abc", "user:"] {
            for engine in [&STANDARD_NO_PAD, &URL_SAFE_NO_PAD] {
                let text = engine.encode(format!("{before}{secret} and more"));
                let hidden = known.iter().filter(|variant| text.contains(variant.as_str())).map(String::len).max();
                assert!(hidden.is_some_and(|bytes| bytes >= secret.len() * 4 / 3 - 2), "{text}");
            }
        }
        assert!(known.contains(&STANDARD.encode(secret)));
    }

    #[test]
    fn each_long_enough_line_is_a_secret_and_the_frame_of_a_pem_block_is_not() {
        let known = texts("-----BEGIN X-----\nline number one\nshort\r\n  indented line\n-----END X-----");
        for line in ["line number one", "indented line"] {
            assert!(known.contains(&line.to_owned()));
        }
        assert!(!known.iter().any(|variant| variant == "short" || variant == "-----BEGIN X-----"));
    }

    #[test]
    fn a_short_text_is_not_a_secret_and_a_long_one_is_split_into_pieces() {
        assert!(texts("12345").is_empty() && texts(" 1234 \n").is_empty());
        assert!(!texts("123456").is_empty());
        let long: String = (0..2_000).map(|number| format!("{number:05}")).collect();
        let known = of(&long);
        assert!(known.iter().all(|variant| variant.len() <= REDACT_PIECE_BYTES_MAX));
        let mut covered = vec![false; long.len()];
        for variant in &known {
            let variant = std::str::from_utf8(variant).unwrap();
            for (at, _) in long.match_indices(variant) {
                covered[at..at + variant.len()].fill(true);
            }
        }
        assert!(covered.iter().all(|covered| *covered));
    }
}
