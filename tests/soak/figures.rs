//! Memory and descriptors of a process over time, and whether they grow.

use std::time::Duration;

/// Growth per hour that fails the test; the allocator alone causes less.
const MEMORY_MIB_PER_HOUR_MAX: f64 = 12.0;
const DESCRIPTORS_PER_HOUR_MAX: f64 = 4.0;
/// The slope of a shorter run is noise.
const JUDGED_FROM: Duration = Duration::from_secs(15 * 60);

/// Of one process. A sample that could not be taken is missing.
#[derive(Default)]
pub struct Series {
    memory_mib: Vec<(Duration, f64)>,
    descriptors: Vec<(Duration, f64)>,
}

impl Series {
    pub fn read(&mut self, pid: u32, at: Duration) {
        let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
        let resident = status.lines().find_map(|line| line.strip_prefix("VmRSS:")?.trim().strip_suffix(" kB"));
        let kib: Option<f64> = resident.and_then(|text| text.trim().parse().ok());
        self.memory_mib.extend(kib.map(|kib| (at, kib / 1024.0)));
        let descriptors = std::fs::read_dir(format!("/proc/{pid}/fd")).ok();
        self.descriptors.extend(descriptors.map(|entries| (at, entries.count() as f64)));
    }

    pub fn rows(&self) -> String {
        [row("memory of the worker, MiB", &self.memory_mib), row("descriptors of the worker", &self.descriptors)]
            .concat()
    }

    /// Fails if memory or descriptors grow too much, after a run of sufficient length.
    pub fn judge(&self) {
        if self.memory_mib.last().is_none_or(|(last, _)| *last < JUDGED_FROM) {
            return;
        }
        let memory = slope(&self.memory_mib).unwrap_or(0.0);
        assert!(memory < MEMORY_MIB_PER_HOUR_MAX, "memory grows by {memory:.2} MiB an hour");
        let descriptors = slope(&self.descriptors).unwrap_or(0.0);
        assert!(descriptors < DESCRIPTORS_PER_HOUR_MAX, "{descriptors:.2} descriptors more an hour");
    }
}

fn row(name: &str, samples: &[(Duration, f64)]) -> String {
    let values = || samples.iter().map(|(_, value)| *value);
    let (low, high) = (values().fold(f64::MAX, f64::min), values().fold(0.0, f64::max));
    let (first, last) = (values().next().unwrap_or(0.0), values().next_back().unwrap_or(0.0));
    let slope = slope(samples).map_or_else(|| "not measured".to_owned(), |slope| format!("{slope:+.2} per hour"));
    format!(
        "| {name} | {first:.1} at first, {last:.1} at last, {low:.1} to {high:.1} in {} samples, slope {slope} |\n",
        samples.len()
    )
}

/// Of the last two thirds, after the warm-up, by least squares, per hour.
fn slope(samples: &[(Duration, f64)]) -> Option<f64> {
    let warm = &samples[samples.len() / 3..];
    let points: Vec<(f64, f64)> = warm.iter().map(|(at, value)| (at.as_secs_f64() / 3600.0, *value)).collect();
    let count = points.len() as f64;
    let mean = |of: fn(&(f64, f64)) -> f64| points.iter().map(of).sum::<f64>() / count;
    let (x, y) = (mean(|point| point.0), mean(|point| point.1));
    let over: f64 = points.iter().map(|point| (point.0 - x) * (point.1 - y)).sum();
    let under: f64 = points.iter().map(|point| (point.0 - x).powi(2)).sum();
    (points.len() > 2 && under > 0.0).then(|| over / under)
}
