//! The port for recording the traces of finished claims.

use std::fmt;

use journeyman_domain::claim::ClaimEnd;
use journeyman_domain::id::Run;
use journeyman_domain::time::Instant;
use journeyman_domain::trace_context::TraceParent;

use super::timeline::Timeline;

/// Receives finished claims.
pub trait TraceRecorder: fmt::Debug + Send + Sync + 'static {
    /// Records a claim. Called on a thread that renews leases: must not block.
    fn record(&self, record: FinishedClaim);

    /// Exported and dropped spans.
    fn span_counts(&self) -> SpanCounts;
}

/// Counts of spans since the start.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct SpanCounts {
    /// Accepted by a collector.
    pub exported: u64,
    /// Not accepted, or dropped for want of space.
    pub dropped: u64,
}

/// A finished claim.
#[derive(Debug, Clone)]
pub struct FinishedClaim {
    /// The run.
    pub run: Run,
    /// The source's name.
    pub source: String,
    /// Its place in the trace.
    pub span_context: SpanContext,
    /// Its phases.
    pub timeline: Timeline,
    /// How it ended.
    pub end: ClaimEnd,
    /// The time on the worker's clock, to compute ages.
    pub now: Instant,
}

/// The spans of a claim.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SpanContext {
    /// The claim's own span.
    pub claim_span: TraceParent,
    /// The creator's span, if given.
    pub parent: Option<u64>,
    /// The payload's span, passed to the handler as `TRACEPARENT`.
    pub run_span: u64,
}
