//! Redacts secrets in logs and in artifacts named `*.log`.
//!
//! The worker's secrets ([`hide`]: its credentials, those of each claim, values of variables named like secrets) are replaced
//! in every log of this process while their [`HiddenSecrets`] lives. A task's secrets are replaced in that task's log. Each
//! secret is searched for in all its encodings. Text in the form of a secret is replaced too, see `patterns`.
//!
//! Redaction protects against accidents only: a program that wants to print a secret can.

mod encodings;
mod filter;
mod pattern_list;
mod patterns;
mod secret_set;

use std::borrow::Cow;
use std::sync::LazyLock;

use parking_lot::RwLock;

pub use filter::RedactFilter;
pub use secret_set::{SecretId, SecretSet};

pub const REPLACEMENT: &str = "[redacted]";

/// The default of `log.redact_env`.
pub const SECRET_NAME_PATTERNS: [&str; 4] = ["*_TOKEN", "*_SECRET", "*_PASSWORD", "*_KEY"];

static PROCESS_SECRETS: LazyLock<RwLock<SecretSet>> = LazyLock::new(|| RwLock::new(SecretSet::default()));

/// Secrets that are redacted while this lives.
pub struct HiddenSecrets(Box<[SecretId]>);

impl HiddenSecrets {
    /// Redacts them until the process exits.
    pub fn until_exit(mut self) {
        self.0 = Box::default();
    }
}

impl Drop for HiddenSecrets {
    fn drop(&mut self) {
        if !self.0.is_empty() {
            PROCESS_SECRETS.write().remove(&self.0);
        }
    }
}

/// Redacts secrets in every log of this process from now on.
pub fn hide<'a>(secrets: impl IntoIterator<Item = &'a str>) -> HiddenSecrets {
    let mut hidden = PROCESS_SECRETS.write();
    HiddenSecrets(secrets.into_iter().map(|secret| hidden.add(secret)).collect())
}

/// Filters bytes of a stream; `own` are the secrets of this stream only.
pub fn stream(filter: &mut RedactFilter, own: Option<&SecretSet>, bytes: &[u8], out: &mut Vec<u8>) {
    with_sets(own, |sets| filter.push(sets, bytes, out));
}

/// Ends a stream and appends the bytes held back.
pub fn end_stream(filter: &mut RedactFilter, own: Option<&SecretSet>, out: &mut Vec<u8>) {
    with_sets(own, |sets| filter.finish(sets, out));
}

/// Redacts a complete text, such as a line or an error.
pub fn bytes<'a>(bytes: &'a [u8], own: Option<&SecretSet>) -> Cow<'a, [u8]> {
    with_sets(own, |sets| {
        let (mut filter, mut out) = (RedactFilter::default(), Vec::with_capacity(bytes.len()));
        filter.push(sets, bytes, &mut out);
        filter.finish(sets, &mut out);
        if filter.redaction_count() == 0 { Cow::Borrowed(bytes) } else { Cow::Owned(out) }
    })
}

pub fn text(text: &str) -> Cow<'_, str> {
    match bytes(text.as_bytes(), None) {
        Cow::Borrowed(_) => Cow::Borrowed(text),
        // Secrets are whole characters and patterns end at ASCII, so the result is valid UTF-8.
        Cow::Owned(bytes) => Cow::Owned(String::from_utf8_lossy(&bytes).into_owned()),
    }
}

/// Matches `*_KEY` but is part of a queue's name. Only a pattern without `*` redacts it.
const NOT_A_SECRET_NAME: &str = "WORKER_KEY";

/// Returns whether a variable is named like a secret. `*` in a pattern matches any text; case is ignored.
pub fn is_secret_name(name: &str, patterns: &[String]) -> bool {
    let is_exempt = name == NOT_A_SECRET_NAME;
    let applies = |pattern: &&String| !is_exempt || !pattern.contains('*');
    patterns.iter().filter(applies).any(|pattern| matches_pattern(name.as_bytes(), pattern.as_bytes()))
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
    let process = PROCESS_SECRETS.read();
    match own {
        Some(own) => work(&[&process, own]),
        None => work(&[&process]),
    }
}

#[cfg(test)]
mod tests;
