//! Memory and descriptors of a process over time, and whether they grow.

use std::fmt::Write as _;
use std::time::Duration;

/// Growth per hour that fails the test; the allocator alone causes less.
const MEMORY_MIB_PER_HOUR_MAX: f64 = 12.0;
const DESCRIPTORS_PER_HOUR_MAX: f64 = 4.0;
/// The slope of a shorter run is noise.
const JUDGED_FROM: Duration = Duration::from_secs(15 * 60);

struct Sample {
    at: Duration,
    memory_mib: f64,
    /// `None` without permission.
    descriptors: Option<f64>,
}

#[derive(Default)]
pub struct Series(Vec<Sample>);

impl Series {
    pub fn read(&mut self, pid: u32, at: Duration) {
        let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
        let resident = status.lines().find_map(|line| line.strip_prefix("VmRSS:")?.trim().strip_suffix(" kB"));
        let kib: Option<f64> = resident.and_then(|text| text.trim().parse().ok());
        let descriptors = std::fs::read_dir(format!("/proc/{pid}/fd")).ok().map(|entries| entries.count() as f64);
        if let Some(kib) = kib {
            self.0.push(Sample { at, memory_mib: kib / 1024.0, descriptors });
        }
    }

    /// The samples after the warm-up.
    fn warm(&self) -> &[Sample] {
        &self.0[self.0.len() / 3..]
    }

    fn memory(&self) -> Option<f64> {
        slope(self.warm().iter().map(|sample| (sample.at, sample.memory_mib)))
    }

    fn descriptors(&self) -> Option<f64> {
        slope(self.warm().iter().filter_map(|sample| Some((sample.at, sample.descriptors?))))
    }

    pub fn rows(&self) -> String {
        let mut out = String::new();
        let told = |slope: Option<f64>, unit: &str| {
            slope.map_or_else(|| "not measured".to_owned(), |slope| format!("{slope:+.2} {unit} per hour"))
        };
        let of = |value: fn(&Sample) -> Option<f64>| {
            let values: Vec<f64> = self.0.iter().filter_map(value).collect();
            let (low, high) =
                values.iter().fold((f64::MAX, 0.0_f64), |(low, high), one| (low.min(*one), high.max(*one)));
            let (first, last) = (values.first().copied().unwrap_or(0.0), values.last().copied().unwrap_or(0.0));
            format!("{first:.1} at first, {last:.1} at last, {low:.1} to {high:.1} in {} samples", values.len())
        };
        let memory = of(|sample| Some(sample.memory_mib));
        let descriptors = of(|sample| sample.descriptors);
        // Writing to a String cannot fail.
        _ = writeln!(out, "| memory of the worker, MiB | {memory} |");
        _ = writeln!(out, "| slope of the last two thirds | {} |", told(self.memory(), "MiB"));
        _ = writeln!(out, "| descriptors of the worker | {descriptors} |");
        _ = write!(out, "| slope of the last two thirds | {} |", told(self.descriptors(), "descriptors"));
        out
    }

    /// Fails if memory or descriptors grow too much, after a run of sufficient length.
    pub fn judge(&self) {
        if self.0.last().is_none_or(|last| last.at < JUDGED_FROM) {
            return;
        }
        let memory = self.memory().unwrap_or(0.0);
        assert!(memory < MEMORY_MIB_PER_HOUR_MAX, "memory grows by {memory:.2} MiB an hour");
        let descriptors = self.descriptors().unwrap_or(0.0);
        assert!(descriptors < DESCRIPTORS_PER_HOUR_MAX, "{descriptors:.2} descriptors more an hour");
    }
}

/// By least squares, per hour.
fn slope(points: impl Iterator<Item = (Duration, f64)>) -> Option<f64> {
    let points: Vec<(f64, f64)> = points.map(|(at, value)| (at.as_secs_f64() / 3600.0, value)).collect();
    let count = points.len() as f64;
    let mean = |of: fn(&(f64, f64)) -> f64| points.iter().map(of).sum::<f64>() / count;
    let (x, y) = (mean(|point| point.0), mean(|point| point.1));
    let over: f64 = points.iter().map(|point| (point.0 - x) * (point.1 - y)).sum();
    let under: f64 = points.iter().map(|point| (point.0 - x).powi(2)).sum();
    (points.len() > 2 && under > 0.0).then(|| over / under)
}

#[test]
fn a_slope_is_that_of_the_line_through_the_points() {
    let line = (0..10_u32).map(|minute| (Duration::from_secs(u64::from(minute) * 60), 5.0 + f64::from(minute) * 0.1));
    assert!(slope(line).is_some_and(|slope| (slope - 6.0).abs() < 1e-9));
    assert_eq!(slope([(Duration::ZERO, 1.0)].into_iter()), None);
}
