//! What a worker tells of a claim that is over to whoever records traces.

use std::fmt;

use crate::domain::claim::ClaimEnd;
use crate::domain::id::Run;
use crate::domain::time::Instant;
use crate::domain::trace_context::TraceParent;

use super::timeline::Timeline;

/// Takes in claims that are over.
pub trait TraceRecorder: fmt::Debug + Send + Sync + 'static {
    /// One is. Called on the thread that keeps leases: it must not wait.
    fn record(&self, record: FinishedClaim);

    /// How many spans were exported and how many were dropped.
    fn span_counts(&self) -> SpanCounts;
}

/// What became of spans since the start.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct SpanCounts {
    /// A collector took them.
    pub exported: u64,
    /// No collector did, or there was no room for them until one would.
    pub dropped: u64,
}

/// A claim that is over.
#[derive(Debug, Clone)]
pub struct FinishedClaim {
    /// The run.
    pub run: Run,
    /// Its source's name.
    pub source: String,
    /// Where its spans belong.
    pub span_context: SpanContext,
    /// What it went through.
    pub timeline: Timeline,
    /// How it ended.
    pub end: ClaimEnd,
    /// The time on the worker's clock, to tell how long ago everything else was.
    pub now: Instant,
}

/// Where the spans of a claim belong.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SpanContext {
    /// The claim's own span, in its trace.
    pub claim_span: TraceParent,
    /// The span of its creator's, where it gave one.
    pub parent: Option<u64>,
    /// The span that its payload runs in, which its handler finds as `TRACEPARENT`.
    pub run_span: u64,
}
