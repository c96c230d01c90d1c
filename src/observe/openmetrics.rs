//! Encodes a status snapshot as OpenMetrics.

use std::fmt::{self, Write as _};

use prometheus_client::collector::Collector;
use prometheus_client::encoding::DescriptorEncoder;
use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::MetricType;
use prometheus_client::registry::{Registry, Unit};

pub(super) const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

const PREFIX: &str = "journeyman";

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum MetricKind {
    Gauge,
    Counter,
    Info,
}

/// Labels are in the order of [`MetricFamily::labels`].
pub(super) struct Sample {
    labels: Vec<String>,
    value: f64,
}

pub(super) struct MetricFamily<S> {
    name: &'static str,
    kind: MetricKind,
    unit: Option<&'static str>,
    labels: &'static [&'static str],
    help: &'static str,
    read: fn(&S) -> Vec<Sample>,
}

impl<S> MetricFamily<S> {
    pub(super) const fn new(
        kind: MetricKind,
        name: &'static str,
        help: &'static str,
        read: fn(&S) -> Vec<Sample>,
    ) -> Self {
        Self { name, kind, unit: None, labels: &[], help, read }
    }

    fn full_name(&self) -> String {
        let unit = self.unit.map(|unit| format!("_{unit}")).unwrap_or_default();
        let suffix = match self.kind {
            MetricKind::Gauge => "",
            MetricKind::Counter => "_total",
            MetricKind::Info => "_info",
        };
        format!("{PREFIX}_{}{unit}{suffix}", self.name)
    }

    pub(super) const fn with_labels(self, labels: &'static [&'static str]) -> Self {
        Self { labels, ..self }
    }

    pub(super) const fn with_unit(self, unit: &'static str) -> Self {
        Self { unit: Some(unit), ..self }
    }
}

pub(super) fn labeled<const N: usize>(labels: [impl ToString; N], value: f64) -> Sample {
    Sample { labels: labels.iter().map(ToString::to_string).collect(), value }
}

pub(super) fn unlabeled(value: impl Into<f64>) -> Vec<Sample> {
    vec![Sample { labels: Vec::new(), value: value.into() }]
}

pub(super) fn count(value: u64) -> Vec<Sample> {
    unlabeled(float(value))
}

/// Exact up to 2^53.
#[expect(clippy::cast_precision_loss, reason = "samples are floating point numbers")]
pub(super) const fn float(value: u64) -> f64 {
    value as f64
}

pub(super) const fn flag(value: bool) -> f64 {
    if value { 1.0 } else { 0.0 }
}

pub(super) fn text<S: Send + Sync + 'static>(
    status: S,
    families: &'static [MetricFamily<S>],
) -> Result<String, fmt::Error> {
    let mut registry = Registry::with_prefix(PREFIX);
    registry.register_collector(Box::new(StatusCollector { status, families }));
    let mut text = String::new();
    encode(&mut text, &registry)?;
    Ok(text)
}

pub(super) fn markdown<S>(families: &[MetricFamily<S>]) -> String {
    let mut out = String::from("| metric | labels | meaning |\n| --- | --- | --- |\n");
    for family in families {
        let labels: Vec<String> = family.labels.iter().map(|label| format!("`{label}`")).collect();
        // Writing to a String cannot fail.
        _ = writeln!(out, "| `{}` | {} | {} |", family.full_name(), labels.join(", "), family.help);
    }
    out
}

type Labels = Vec<(String, String)>;

struct StatusCollector<S: 'static> {
    status: S,
    families: &'static [MetricFamily<S>],
}

impl<S> fmt::Debug for StatusCollector<S> {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str("StatusCollector")
    }
}

impl<S: Send + Sync> Collector for StatusCollector<S> {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        for family in self.families {
            let unit = family.unit.map(|unit| Unit::Other(unit.to_owned()));
            let kind = match family.kind {
                MetricKind::Gauge => MetricType::Gauge,
                MetricKind::Counter => MetricType::Counter,
                MetricKind::Info => MetricType::Info,
            };
            let mut metric = encoder.encode_descriptor(family.name, family.help, unit.as_ref(), kind)?;
            for sample in (family.read)(&self.status) {
                let pairs = family.labels.iter().map(ToString::to_string).zip(sample.labels);
                let labels: Labels = pairs.filter(|(_, value)| !value.is_empty()).collect();
                match family.kind {
                    MetricKind::Info => metric.encode_info(&labels)?,
                    // An empty set of labels would be encoded as `{}`.
                    MetricKind::Gauge if labels.is_empty() => metric.encode_gauge(&sample.value)?,
                    MetricKind::Gauge => metric.encode_family(&labels)?.encode_gauge(&sample.value)?,
                    MetricKind::Counter if labels.is_empty() => {
                        metric.encode_counter::<Labels, _, f64>(&sample.value, None)?
                    }
                    MetricKind::Counter => {
                        metric.encode_family(&labels)?.encode_counter::<Labels, _, f64>(&sample.value, None)?;
                    }
                }
            }
        }
        Ok(())
    }
}
