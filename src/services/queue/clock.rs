//! The wall clock of the queue in whole milliseconds, and the text forms of its times.
//!
//! The protocol's times are wall-clock times, so this file may read that clock. Tests pass a manual clock.

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::Duration;

use jiff::Timestamp;
use jiff::fmt::temporal::DateTimePrinter;
use serde::{Deserialize, Serialize, Serializer};

static PRINTER: DateTimePrinter = DateTimePrinter::new().precision(Some(3));

/// Milliseconds since 1970.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Deserialize)]
#[serde(try_from = "String")]
pub(crate) struct UnixMillis(pub(crate) i64);

impl TryFrom<String> for UnixMillis {
    type Error = &'static str;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        Self::parse(&text).ok_or("expected an RFC 3339 time")
    }
}

impl Serialize for UnixMillis {
    fn serialize<S: Serializer>(&self, out: S) -> Result<S::Ok, S::Error> {
        out.serialize_str(&self.iso())
    }
}

impl UnixMillis {
    /// Parses RFC 3339; finer fractions are cut to milliseconds, as JavaScript's `Date` does.
    pub(crate) fn parse(text: &str) -> Option<Self> {
        // A zone's name in brackets is an extension of RFC 9557.
        let stamp: Timestamp = Some(text).filter(|text| !text.ends_with(']'))?.parse().ok()?;
        Some(Self(stamp.as_nanosecond().div_euclid(1_000_000).try_into().ok()?))
    }

    pub(crate) fn plus(self, span: Duration) -> Self {
        Self(self.0.saturating_add(span.as_millis().try_into().unwrap_or(i64::MAX)))
    }

    pub(crate) fn minus(self, span: Duration) -> Self {
        Self(self.0.saturating_sub(span.as_millis().try_into().unwrap_or(i64::MAX)))
    }

    /// Zero if `later` has passed.
    pub(crate) fn until(self, later: Self) -> Duration {
        Duration::from_millis(later.0.saturating_sub(self.0).try_into().unwrap_or(0))
    }

    fn timestamp(self) -> Timestamp {
        Timestamp::from_millisecond(self.0).unwrap_or(Timestamp::MAX)
    }

    /// `2026-11-21T10:20:44.810Z`
    pub(crate) fn iso(self) -> String {
        PRINTER.timestamp_to_string(&self.timestamp())
    }

    /// `Sat, 21 Nov 2026 10:01:40 GMT`.
    pub(crate) fn http_date(self) -> String {
        jiff::fmt::rfc2822::DateTimePrinter::new().timestamp_to_rfc9110_string(&self.timestamp()).unwrap_or_default()
    }
}

#[derive(Debug, Clone, Default)]
pub struct QueueClock(Option<Arc<AtomicI64>>);

impl QueueClock {
    pub const fn wall() -> Self {
        Self(None)
    }

    /// A clock that only [`QueueClock::advance`] moves.
    pub fn manual(unix_millis: i64) -> Self {
        Self(Some(Arc::new(AtomicI64::new(unix_millis))))
    }

    /// Moves a manual clock forward; no effect on the wall clock.
    pub fn advance(&self, span: Duration) {
        if let Some(millis) = &self.0 {
            millis.fetch_add(span.as_millis().try_into().unwrap_or(i64::MAX), Ordering::SeqCst);
        }
    }

    pub fn unix_millis(&self) -> i64 {
        self.now().0
    }

    pub(crate) fn now(&self) -> UnixMillis {
        self.0.as_ref().map_or_else(
            || UnixMillis(Timestamp::now().as_millisecond()),
            |millis| UnixMillis(millis.load(Ordering::SeqCst)),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_shown_with_three_digits_and_read_back_whatever_their_shape() {
        let at = UnixMillis::parse("2026-11-21T10:20:44.8+00:00").unwrap();
        assert_eq!(at.iso(), "2026-11-21T10:20:44.800Z");
        assert_eq!(at.http_date(), "Sat, 21 Nov 2026 10:20:44 GMT");
        assert_eq!(UnixMillis::parse("yesterday"), None);
        assert_eq!(UnixMillis::parse("2026-11-21T10:20:44Z[UTC]"), None);
    }
}
