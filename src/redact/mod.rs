//! Keeps secrets out of logs.
//!
//! Whatever the worker itself knows to be secret ([`hide`]: its credentials, those of each claim, variables that are named
//! like secrets) is replaced in every log of this process for as long as its [`HiddenSecrets`] lives; what a task declares, in
//! that task's log. Each secret is looked for in all the ways it may have been encoded, and what looks like a secret is
//! replaced without being told.
//!
//! This is a seat belt: it saves a task's author from a slip. It cannot keep a program from telling what it wants told;
//! to spell a secret letter by letter is enough. Of artifacts those are looked at that are called `*.log`.

mod base64_lines;
mod encodings;
mod filter;
mod patterns;
mod secret_set;
#[cfg(test)]
mod tests;
#[cfg(test)]
mod wrapped_base64_tests;

use std::borrow::Cow;
use std::sync::{LazyLock, PoisonError, RwLock};

pub use filter::RedactFilter;
pub use secret_set::{Patterns, SecretId, SecretSet};

/// What stands in the place of a secret.
pub const REPLACEMENT: &str = "[redacted]";

/// How variables are named that hold secrets, unless the operator says otherwise.
pub const SECRET_NAME_PATTERNS: [&str; 4] = ["*_TOKEN", "*_SECRET", "*_PASSWORD", "*_KEY"];

/// What every log of this process hides.
static PROCESS_SECRETS: LazyLock<RwLock<SecretSet>> = LazyLock::new(|| RwLock::new(SecretSet::new(Patterns::Included)));

/// Secrets that are hidden as long as this lives.
#[derive(Debug)]
pub struct HiddenSecrets(Box<[SecretId]>);

impl HiddenSecrets {
    /// Hides them until this process ends.
    pub fn until_exit(mut self) {
        self.0 = Box::default();
    }
}

impl Drop for HiddenSecrets {
    fn drop(&mut self) {
        if !self.0.is_empty() {
            PROCESS_SECRETS.write().unwrap_or_else(PoisonError::into_inner).remove(&self.0);
        }
    }
}

/// Hides secrets in every log of this process from now on.
#[must_use]
pub fn hide<'a>(secrets: impl IntoIterator<Item = &'a str>) -> HiddenSecrets {
    let mut hidden = PROCESS_SECRETS.write().unwrap_or_else(PoisonError::into_inner);
    HiddenSecrets(secrets.into_iter().map(|secret| hidden.add(secret)).collect())
}

/// Passes bytes of one stream through its filter. `own` is what only this stream hides.
pub fn stream(filter: &mut RedactFilter, own: Option<&SecretSet>, bytes: &[u8], out: &mut Vec<u8>) {
    with_sets(own, |sets| filter.push(sets, bytes, out));
}

/// Ends a stream: `out` gets what was held back of it.
pub fn end_stream(filter: &mut RedactFilter, own: Option<&SecretSet>, out: &mut Vec<u8>) {
    with_sets(own, |sets| filter.finish(sets, out));
}

/// A text without secrets, where it is whole by itself: a line, an error.
#[must_use]
pub fn bytes<'a>(bytes: &'a [u8], own: Option<&SecretSet>) -> Cow<'a, [u8]> {
    with_sets(own, |sets| {
        let (mut filter, mut out) = (RedactFilter::default(), Vec::with_capacity(bytes.len()));
        filter.push(sets, bytes, &mut out);
        filter.finish(sets, &mut out);
        if filter.redaction_count() == 0 { Cow::Borrowed(bytes) } else { Cow::Owned(out) }
    })
}

/// As [`bytes`], for text.
#[must_use]
pub fn text(text: &str) -> Cow<'_, str> {
    match bytes(text.as_bytes(), None) {
        Cow::Borrowed(_) => Cow::Borrowed(text),
        // Needles are whole characters, and shapes end at ASCII.
        Cow::Owned(bytes) => Cow::Owned(String::from_utf8_lossy(&bytes).into_owned()),
    }
}

/// Named like a secret, and none: part of the name of a queue. Only who writes the whole name hides it.
const NOT_A_SECRET_NAME: &str = "WORKER_KEY";

/// Whether a variable is named like a secret: `patterns` are names, `*` standing for anything, letters of either case.
#[must_use]
pub fn is_secret_name(name: &str, patterns: &[String]) -> bool {
    let by_chance = name == NOT_A_SECRET_NAME;
    let counts = |pattern: &&String| !by_chance || !pattern.contains('*');
    patterns.iter().filter(counts).any(|pattern| matches_pattern(name.as_bytes(), pattern.as_bytes()))
}

fn matches_pattern(name: &[u8], pattern: &[u8]) -> bool {
    match (name.split_first(), pattern.split_first()) {
        (_, Some((b'*', rest))) => {
            (0..=name.len()).any(|from| matches_pattern(name.get(from..).unwrap_or_default(), rest))
        }
        (Some((one, name)), Some((other, pattern))) => {
            one.eq_ignore_ascii_case(other) && matches_pattern(name, pattern)
        }
        (None, None) => true,
        (_, _) => false,
    }
}

fn with_sets<T>(own: Option<&SecretSet>, work: impl FnOnce(&[&SecretSet]) -> T) -> T {
    let hidden = PROCESS_SECRETS.read().unwrap_or_else(PoisonError::into_inner);
    match own {
        Some(own) => work(&[&hidden, own]),
        None => work(&[&hidden]),
    }
}
