//! The W3C `traceparent`: the trace that a task belongs to.
//!
//! Without a recorded span the creator's value is passed on unchanged; with one, the handler receives that span.

use core::fmt;

/// Version 00.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TraceParent {
    trace_id: u128,
    span_id: u64,
    flags: u8,
}

/// 32 hexadecimal digits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TraceId(u128);

const SAMPLED: u8 = 1;

impl TraceParent {
    /// A new, sampled trace. Zero ids are invalid and become ones.
    pub fn new(trace: u128, parent: u64) -> Self {
        Self { trace_id: trace.max(1), span_id: parent.max(1), flags: SAMPLED }
    }

    /// Reads version 00, and of later versions what version 00 defines.
    pub fn parse(text: &str) -> Option<Self> {
        let mut parts = text.split('-');
        let version = u8::from_str_radix(hex(parts.next()?, 2)?, 16).ok()?;
        let trace = u128::from_str_radix(hex(parts.next()?, 32)?, 16).ok()?;
        let parent = u64::from_str_radix(hex(parts.next()?, 16)?, 16).ok()?;
        let flags = u8::from_str_radix(hex(parts.next()?, 2)?, 16).ok()?;
        let over = version == u8::MAX || (version == 0 && parts.next().is_some());
        (!over && trace != 0 && parent != 0).then_some(Self {
            trace_id: trace,
            span_id: parent,
            flags: flags & SAMPLED,
        })
    }

    /// The same trace with another parent span.
    pub const fn child(self, span: u64) -> Self {
        Self { span_id: if span == 0 { 1 } else { span }, ..self }
    }

    pub const fn is_sampled(&self) -> bool {
        self.flags & SAMPLED == SAMPLED
    }

    pub const fn trace_number(&self) -> u128 {
        self.trace_id
    }

    pub const fn span_id(&self) -> u64 {
        self.span_id
    }

    pub const fn trace_id(&self) -> TraceId {
        TraceId(self.trace_id)
    }
}

impl fmt::Display for TraceParent {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "00-{:032x}-{:016x}-{:02x}", self.trace_id, self.span_id, self.flags)
    }
}

impl fmt::Display for TraceId {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{:032x}", self.0)
    }
}

/// Returns the text if it consists of exactly `digits` lower-case hexadecimal digits.
fn hex(text: &str, digits: usize) -> Option<&str> {
    let fits = text.len() == digits && text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'));
    fits.then_some(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_traceparent_is_read_as_the_recommendation_says() {
        let good = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
        assert_eq!(TraceParent::parse(good).map(|read| read.to_string()).as_deref(), Some(good));
        let later = "01-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-03-more";
        assert_eq!(TraceParent::parse(later).map(|read| read.to_string()).as_deref(), Some(good));
        for bad in [
            "",
            "00",
            "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331",
            "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01-more",
            "ff-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
            "00-0AF7651916CD43DD8448EB211C80319C-b7ad6b7169203331-01",
            "00-00000000000000000000000000000000-b7ad6b7169203331-01",
            "00-0af7651916cd43dd8448eb211c80319c-0000000000000000-01",
            "00-0af7651916cd43dd8448eb211c80319c-b7ad6b716920333-01",
            "00-+af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
        ] {
            assert_eq!(TraceParent::parse(bad), None, "{bad}");
        }
    }

    #[test]
    fn a_new_trace_can_be_read_back_whatever_it_was_made_of() {
        for (trace, parent) in [(0, 0), (7, 9), (u128::MAX, u64::MAX)] {
            let new = TraceParent::new(trace, parent);
            assert_eq!(TraceParent::parse(&new.to_string()), Some(new));
        }
    }
}
