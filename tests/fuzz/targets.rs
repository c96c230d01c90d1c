//! The fuzz targets: functions of bytes that check invariants.

use std::path::Path;

use base64::engine::Engine as _;
use base64::engine::general_purpose::{STANDARD, URL_SAFE};
use journeyman::config::{self, Document, Environment, show};
use journeyman_domain::limits::{REDACT_PIECE_BYTES_MAX, REDACT_SECRET_CHARS_MIN};
use journeyman_platform::redact::{RedactFilter, SecretSet};

/// The name of a target, which is that of its corpus, and its function.
pub(crate) type Target = (&'static str, fn(&[u8]));

pub(crate) const TARGETS: [Target; 2] = [("configuration", configuration), ("secrets", secrets)];

/// A configuration file is accepted and printed, or rejected with messages.
pub(crate) fn configuration(bytes: &[u8]) {
    let document = Document::new(Path::new("fuzz.toml"), &String::from_utf8_lossy(bytes));
    match config::load(Some(document), &Environment::from_pairs(&[]), &[]) {
        Ok(loaded) => {
            let shown = show::to_toml(&loaded, show::ShowOrigins::No);
            let again = Document::new(Path::new("again.toml"), &shown);
            assert!(config::load(Some(again), &Environment::from_pairs(&[]), &[]).is_ok(), "{shown}");
        }
        Err(problems) => assert!(!problems.to_string().is_empty()),
    }
}

/// A log with a secret, verbatim and in base64. The first bytes choose the length of the secret, the alphabet and the cuts; then
/// follow the secret and its surroundings. The filter must remove the secret, independent of the
/// cuts.
pub(crate) fn secrets(bytes: &[u8]) {
    let [length, manner, cut, rest @ ..] = bytes else { return };
    let (secret, around) = rest.split_at((usize::from(*length) * 8).min(rest.len()));
    let secret = String::from_utf8_lossy(secret);
    let secret = secret.trim();
    let (before, after) = around.split_at(around.len() / 2);
    let engine = if manner & 1 == 0 { &STANDARD } else { &URL_SAFE };
    let characters = engine.encode([before, secret.as_bytes(), after].concat());
    // The characters that encode only the secret; a short one may have none.
    let own = (before.len() * 8).div_ceil(6)..(before.len() + secret.len()) * 8 / 6;
    let encoded = characters.get(own).unwrap_or_default();
    let log = [before, secret.as_bytes(), after, characters.as_bytes(), b"|"].concat();

    let mut set = SecretSet::default();
    set.add(secret);
    let filtered = |piece: usize| {
        let (mut filter, mut out) = (RedactFilter::default(), Vec::new());
        for piece in log.chunks(piece.max(1)) {
            filter.push(&[&set], piece, &mut out);
            assert!(filter.held_back() < REDACT_PIECE_BYTES_MAX, "{} bytes are held back", filter.held_back());
        }
        filter.finish(&[&set], &mut out);
        out
    };
    let out = filtered(log.len());
    assert_eq!(out, filtered(usize::from(*cut)), "the cuts make a difference");
    if secret.chars().count() >= REDACT_SECRET_CHARS_MIN {
        for text in [secret, encoded] {
            let shown = out.windows(text.len()).any(|part| part == text.as_bytes());
            assert!(!shown || "[redacted]".contains(text), "{text} is shown");
        }
    }
}
