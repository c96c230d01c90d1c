//! Keeps secrets out of logs.
//!
//! Whatever the worker itself knows to be secret ([`hide`]: its credentials, those of each claim, variables that are named
//! like secrets) is replaced in every log of this process for as long as its [`Hidden`] lives; what a task declares, in
//! that task's log. Each secret is looked for in all the ways it may have been encoded, and what looks like a secret is
//! replaced without being told.
//!
//! This is a seat belt: it saves a task's author from a slip. It cannot keep a program from telling what it wants told;
//! to spell a secret letter by letter is enough. Of artifacts those are looked at that are called `*.log`.

mod filter;
mod lines;
mod needles;
mod shapes;
#[cfg(test)]
mod tests;
mod variants;
#[cfg(test)]
mod wrapped;

use std::borrow::Cow;
use std::sync::{LazyLock, PoisonError, RwLock};

pub use filter::Filter;
pub use needles::{Needles, SecretId, Shapes};

/// What stands in the place of a secret.
pub const REPLACEMENT: &str = "[redacted]";

/// How variables are named that hold secrets, unless the operator says otherwise.
pub const NAMED_LIKE_SECRETS: [&str; 4] = ["*_TOKEN", "*_SECRET", "*_PASSWORD", "*_KEY"];

/// What every log of this process hides.
static HIDDEN: LazyLock<RwLock<Needles>> = LazyLock::new(|| RwLock::new(Needles::new(Shapes::Known)));

/// Secrets that are hidden as long as this lives.
#[derive(Debug)]
pub struct Hidden(Box<[SecretId]>);

impl Hidden {
    /// Hides them until this process ends.
    pub fn for_good(mut self) {
        self.0 = Box::default();
    }
}

impl Drop for Hidden {
    fn drop(&mut self) {
        if !self.0.is_empty() {
            HIDDEN.write().unwrap_or_else(PoisonError::into_inner).remove(&self.0);
        }
    }
}

/// Hides secrets in every log of this process from now on.
#[must_use]
pub fn hide<'a>(secrets: impl IntoIterator<Item = &'a str>) -> Hidden {
    let mut hidden = HIDDEN.write().unwrap_or_else(PoisonError::into_inner);
    Hidden(secrets.into_iter().map(|secret| hidden.add(secret)).collect())
}

/// Passes bytes of one stream through its filter. `own` is what only this stream hides.
pub fn stream(filter: &mut Filter, own: Option<&Needles>, bytes: &[u8], out: &mut Vec<u8>) {
    with_sets(own, |sets| filter.push(sets, bytes, out));
}

/// Ends a stream: `out` gets what was held back of it.
pub fn end_stream(filter: &mut Filter, own: Option<&Needles>, out: &mut Vec<u8>) {
    with_sets(own, |sets| filter.finish(sets, out));
}

/// A text without secrets, where it is whole by itself: a line, an error.
#[must_use]
pub fn bytes<'a>(bytes: &'a [u8], own: Option<&Needles>) -> Cow<'a, [u8]> {
    with_sets(own, |sets| {
        let (mut filter, mut out) = (Filter::default(), Vec::with_capacity(bytes.len()));
        filter.push(sets, bytes, &mut out);
        filter.finish(sets, &mut out);
        if filter.redactions() == 0 { Cow::Borrowed(bytes) } else { Cow::Owned(out) }
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
const NAMED_LIKE_A_SECRET_BY_CHANCE: &str = "WORKER_KEY";

/// Whether a variable is named like a secret: `patterns` are names, `*` standing for anything, letters of either case.
#[must_use]
pub fn is_named_like_a_secret(name: &str, patterns: &[String]) -> bool {
    let by_chance = name == NAMED_LIKE_A_SECRET_BY_CHANCE;
    let counts = |pattern: &&String| !by_chance || !pattern.contains('*');
    patterns.iter().filter(counts).any(|pattern| fits(name.as_bytes(), pattern.as_bytes()))
}

fn fits(name: &[u8], pattern: &[u8]) -> bool {
    match (name.split_first(), pattern.split_first()) {
        (_, Some((b'*', rest))) => (0..=name.len()).any(|from| fits(name.get(from..).unwrap_or_default(), rest)),
        (Some((one, name)), Some((other, pattern))) => one.eq_ignore_ascii_case(other) && fits(name, pattern),
        (None, None) => true,
        (_, _) => false,
    }
}

fn with_sets<T>(own: Option<&Needles>, work: impl FnOnce(&[&Needles]) -> T) -> T {
    let hidden = HIDDEN.read().unwrap_or_else(PoisonError::into_inner);
    match own {
        Some(own) => work(&[&hidden, own]),
        None => work(&[&hidden]),
    }
}
