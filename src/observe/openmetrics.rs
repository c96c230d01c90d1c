//! Writes a status snapshot as OpenMetrics.

use std::fmt::Write as _;

pub(crate) const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

const PREFIX: &str = "journeyman";

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum MetricKind {
    Gauge,
    Counter,
    Info,
    /// The last label is `le`.
    Histogram,
}

/// Labels are in the order of the family's name; an empty one is left out.
pub(crate) struct Sample {
    /// Of a histogram's sample.
    suffix: &'static str,
    labels: Vec<String>,
    value: f64,
}

type ReadSamples<S> = Box<dyn Fn(&S) -> Vec<Sample>>;

pub(crate) struct MetricFamily<S> {
    kind: MetricKind,
    name: &'static str,
    labels: Vec<&'static str>,
    help: &'static str,
    read: ReadSamples<S>,
}

impl<S> MetricFamily<S> {
    /// The name lists the labels, such as `tasks{source,outcome}`.
    pub(crate) fn new(
        kind: MetricKind,
        name: &'static str,
        help: &'static str,
        read: impl Fn(&S) -> Vec<Sample> + 'static,
    ) -> Self {
        let (name, labels) = name.split_once('{').unwrap_or((name, ""));
        let labels = labels.trim_end_matches('}').split(',').filter(|label| !label.is_empty()).collect();
        Self { kind, name, labels, help, read: Box::new(read) }
    }

    fn name(&self) -> String {
        format!("{PREFIX}_{}", self.name)
    }

    fn unit(&self) -> Option<&'static str> {
        ["seconds", "bytes"].into_iter().find(|unit| self.name.ends_with(unit))
    }

    fn sample_name(&self) -> String {
        match self.kind {
            MetricKind::Gauge | MetricKind::Histogram => self.name(),
            MetricKind::Counter => format!("{}_total", self.name()),
            MetricKind::Info => format!("{}_info", self.name()),
        }
    }
}

pub(crate) fn labeled<const N: usize>(labels: [impl ToString; N], value: f64) -> Sample {
    Sample { suffix: "", labels: labels.iter().map(ToString::to_string).collect(), value }
}

pub(crate) fn unlabeled(value: impl Into<f64>) -> Vec<Sample> {
    vec![Sample { suffix: "", labels: Vec::new(), value: value.into() }]
}

/// The samples of a histogram with `buckets` that are not cumulative; the last one has no bound.
pub(crate) fn histogram(labels: &[&str], bounds: &[f64], buckets: &[u64], sum: f64) -> Vec<Sample> {
    let sample = |suffix, bound: String, value| {
        let labels = labels.iter().map(ToString::to_string).chain([bound]).collect();
        Sample { suffix, labels, value }
    };
    let bounds = bounds.iter().map(|bound| format!("{bound:?}")).chain(["+Inf".to_owned()]);
    let mut count = 0;
    let mut samples: Vec<Sample> = bounds
        .zip(buckets)
        .map(|(bound, bucket)| {
            count += bucket;
            sample("_bucket", bound, float(count))
        })
        .collect();
    samples.extend([sample("_count", String::new(), float(count)), sample("_sum", String::new(), sum)]);
    samples
}

/// Samples with one label.
pub(crate) fn by_label<const N: usize>(counts: [(&str, u64); N]) -> Vec<Sample> {
    counts.map(|(label, count)| labeled([label], float(count))).into()
}

/// No sample where the value is unknown.
pub(crate) fn optional(value: Option<f64>) -> Vec<Sample> {
    value.map_or_else(Vec::new, unlabeled)
}

/// Exact up to 2^53.
#[expect(clippy::cast_precision_loss, reason = "samples are floating point numbers")]
pub(crate) const fn float(value: u64) -> f64 {
    value as f64
}

pub(crate) const fn flag(value: bool) -> f64 {
    if value { 1.0 } else { 0.0 }
}

// Writing to a String cannot fail.
pub(crate) fn text<S>(status: &S, families: &[MetricFamily<S>]) -> String {
    let mut out = String::new();
    for family in families {
        let name = family.name();
        let kind = match family.kind {
            MetricKind::Gauge => "gauge",
            MetricKind::Counter => "counter",
            MetricKind::Info => "info",
            MetricKind::Histogram => "histogram",
        };
        _ = writeln!(out, "# HELP {name} {}\n# TYPE {name} {kind}", family.help);
        if let Some(unit) = family.unit() {
            _ = writeln!(out, "# UNIT {name} {unit}");
        }
        for sample in (family.read)(status) {
            let pairs = family.labels.iter().zip(&sample.labels).filter(|(_, value)| !value.is_empty());
            let labels: Vec<String> = pairs.map(|(label, value)| format!("{label}=\"{}\"", escape(value))).collect();
            let labels = if labels.is_empty() { String::new() } else { format!("{{{}}}", labels.join(",")) };
            _ = writeln!(out, "{}{}{labels} {:?}", family.sample_name(), sample.suffix, sample.value);
        }
    }
    out + "# EOF\n"
}

fn escape(text: &str) -> String {
    text.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

pub(crate) fn markdown<S>(families: &[MetricFamily<S>]) -> String {
    let mut out = String::from("| metric | labels | meaning |\n| --- | --- | --- |\n");
    for family in families {
        let labels: Vec<String> = family.labels.iter().map(|label| format!("`{label}`")).collect();
        _ = writeln!(out, "| `{}` | {} | {} |", family.sample_name(), labels.join(", "), family.help);
    }
    out
}
