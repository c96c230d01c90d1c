//! Durations by bucket.

use std::time::Duration;

#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Histogram<const BUCKETS: usize> {
    /// Not cumulative; the last one has no upper bound.
    pub buckets: [u64; BUCKETS],
    pub sum_seconds: f64,
}

impl<const BUCKETS: usize> Default for Histogram<BUCKETS> {
    fn default() -> Self {
        Self { buckets: [0; BUCKETS], sum_seconds: 0.0 }
    }
}

impl<const BUCKETS: usize> Histogram<BUCKETS> {
    /// `bounds` are the upper bounds of all buckets but the last.
    pub fn observe(&mut self, bounds: &[f64], took: Duration) {
        let seconds = took.as_secs_f64();
        let bucket = bounds.iter().position(|bound| seconds <= *bound).unwrap_or(bounds.len());
        if let Some(count) = self.buckets.get_mut(bucket) {
            *count += 1;
        }
        self.sum_seconds += seconds;
    }
}
