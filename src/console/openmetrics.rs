//! Writes the metrics of a role as OpenMetrics, and as the table of its guide.

use std::fmt::Write as _;

use journeyman_platform::histogram::Histogram;

pub(crate) const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

const PREFIX: &str = "journeyman";

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Gauge,
    Counter,
    Info,
    /// The last label is `le`.
    Histogram,
}

/// A metric with its samples.
#[derive(Debug)]
pub struct Metric {
    pub(crate) kind: Kind,
    name: &'static str,
    pub(crate) labels: Vec<&'static str>,
    pub(crate) help: &'static str,
    pub(crate) samples: Vec<Sample>,
}

/// Labels are in the order of the metric's name; an empty one is left out.
#[derive(Debug)]
pub(crate) struct Sample {
    /// The end of a sample's name in a histogram.
    pub(crate) suffix: &'static str,
    pub(crate) labels: Vec<String>,
    pub(crate) value: f64,
}

/// What may be the value of a sample.
pub(crate) trait Number {
    fn float(self) -> f64;
}

macro_rules! number {
    ($($type:ty, $number:ident => $float:expr;)+) => {
        $(impl Number for $type {
            fn float(self) -> f64 {
                let $number = self;
                $float
            }
        })+
    };
}

number! {
    f64, number => number;
    bool, flag => u8::from(flag).into();
    u32, count => count.into();
    u64, count => exact(count);
    usize, count => exact(count as u64);
}

/// Exact up to 2^53.
#[expect(clippy::cast_precision_loss, reason = "samples are floating point numbers")]
const fn exact(count: u64) -> f64 {
    count as f64
}

/// The samples of a metric: a number without labels, none where it is unknown, or several.
pub(crate) trait Samples {
    fn samples(self) -> Vec<Sample>;
}

impl<N: Number> Samples for N {
    fn samples(self) -> Vec<Sample> {
        vec![sample::<0>([], self)]
    }
}

impl<N: Number> Samples for Option<N> {
    fn samples(self) -> Vec<Sample> {
        self.into_iter().flat_map(Samples::samples).collect()
    }
}

impl Samples for Sample {
    fn samples(self) -> Vec<Sample> {
        vec![self]
    }
}

impl Samples for Vec<Sample> {
    fn samples(self) -> Self {
        self
    }
}

pub(crate) fn sample<const N: usize>(labels: [&str; N], value: impl Number) -> Sample {
    Sample { suffix: "", labels: labels.map(str::to_owned).into(), value: value.float() }
}

/// One sample for each item.
pub(crate) fn each<T>(items: impl IntoIterator<Item = T>, read: impl FnMut(T) -> Sample) -> Vec<Sample> {
    items.into_iter().map(read).collect()
}

/// Samples with one label.
pub(crate) fn by_label<'a>(counts: impl IntoIterator<Item = (&'a str, impl Number)>) -> Vec<Sample> {
    each(counts, |(label, count)| sample([label], count))
}

pub(crate) fn histogram<const B: usize>(labels: &[&str], bounds: &[f64], histogram: &Histogram<B>) -> Vec<Sample> {
    let sample = |suffix, bound: String, value| {
        let labels = labels.iter().map(ToString::to_string).chain([bound]).collect();
        Sample { suffix, labels, value }
    };
    let bounds = bounds.iter().map(|bound| format!("{bound:?}")).chain(["+Inf".to_owned()]);
    let mut count = 0;
    let mut samples: Vec<Sample> = bounds
        .zip(histogram.buckets)
        .map(|(bound, bucket)| {
            count += bucket;
            sample("_bucket", bound, count.float())
        })
        .collect();
    let sum = histogram.sum_seconds;
    samples.extend([sample("_count", String::new(), count.float()), sample("_sum", String::new(), sum)]);
    samples
}

/// A list of metrics: kind, name with its labels, help, and its samples.
macro_rules! metrics {
    ($($kind:ident $name:literal $help:literal = $samples:expr;)+) => {
        vec![$($crate::console::openmetrics::Metric::new(
            $crate::console::openmetrics::Kind::$kind, $name, $help, $samples,
        )),+]
    };
}
pub(crate) use metrics;

impl Metric {
    /// The name lists the labels, such as `tasks{source,outcome}`.
    pub(crate) fn new(kind: Kind, name: &'static str, help: &'static str, samples: impl Samples) -> Self {
        let (name, labels) = name.split_once('{').unwrap_or((name, ""));
        let labels = labels.trim_end_matches('}').split(',').filter(|label| !label.is_empty()).collect();
        Self { kind, name, labels, help, samples: samples.samples() }
    }

    pub(crate) fn name(&self) -> String {
        format!("{PREFIX}_{}", self.name)
    }

    pub(crate) fn unit(&self) -> Option<&'static str> {
        ["seconds", "bytes"].into_iter().find(|unit| self.name.ends_with(unit))
    }

    fn sample_name(&self) -> String {
        match self.kind {
            Kind::Gauge | Kind::Histogram => self.name(),
            Kind::Counter => format!("{}_total", self.name()),
            Kind::Info => format!("{}_info", self.name()),
        }
    }
}

// Writing to a String cannot fail.
pub fn text(metrics: &[Metric]) -> String {
    let mut out = String::new();
    for metric in metrics {
        let name = metric.name();
        let kind = match metric.kind {
            Kind::Gauge => "gauge",
            Kind::Counter => "counter",
            Kind::Info => "info",
            Kind::Histogram => "histogram",
        };
        _ = writeln!(out, "# HELP {name} {}\n# TYPE {name} {kind}", metric.help);
        if let Some(unit) = metric.unit() {
            _ = writeln!(out, "# UNIT {name} {unit}");
        }
        for sample in &metric.samples {
            let pairs = metric.labels.iter().zip(&sample.labels).filter(|(_, value)| !value.is_empty());
            let labels: Vec<String> = pairs.map(|(label, value)| format!("{label}=\"{}\"", escape(value))).collect();
            let labels = if labels.is_empty() { String::new() } else { format!("{{{}}}", labels.join(",")) };
            _ = writeln!(out, "{}{}{labels} {:?}", metric.sample_name(), sample.suffix, sample.value);
        }
    }
    out + "# EOF\n"
}

fn escape(text: &str) -> String {
    text.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

/// A row for each metric.
pub fn markdown(metrics: &[Metric]) -> String {
    let mut out = String::from("| metric | labels | meaning |\n| --- | --- | --- |\n");
    for metric in metrics {
        let labels: Vec<String> = metric.labels.iter().map(|label| format!("`{label}`")).collect();
        _ = writeln!(out, "| `{}` | {} | {} |", metric.sample_name(), labels.join(", "), metric.help);
    }
    out
}
