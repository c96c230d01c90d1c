//! The metrics of a role for an OpenTelemetry collector.

use std::collections::BTreeMap;

use opentelemetry_proto::tonic::collector::metrics::v1::ExportMetricsServiceRequest;
use opentelemetry_proto::tonic::common::v1::KeyValue;
use opentelemetry_proto::tonic::metrics::v1::{
    AggregationTemporality, Gauge, Histogram, HistogramDataPoint, Metric as OtlpMetric, NumberDataPoint,
    ResourceMetrics, ScopeMetrics, Sum, metric::Data, number_data_point::Value,
};
use tokio::time::{MissedTickBehavior, interval};

use super::openmetrics::{Kind, Metric, Sample};
use journeyman_platform::host::clock::stamp;
use journeyman_platform::otlp::{self, Exporter, Signal, attribute, metric_interval, resource};
use journeyman_platform::settings::Environment;

/// Exports the metrics of a role from time to time; does not end.
pub(crate) async fn export<S>(
    environment: &Environment,
    role: &str,
    instance: &str,
    snapshot: impl AsyncFn() -> Option<S>,
    metrics: impl Fn(&S) -> Vec<Metric>,
) {
    let exporter = Exporter::from_environment(Signal::Metrics, environment).unwrap_or_else(|failure| {
        tracing::error!("{failure}");
        None
    });
    if let Some(mut exporter) = exporter {
        let (started, mut ticks) = (nanos(), interval(metric_interval(environment)));
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            ticks.tick().await;
            let Some(status) = snapshot().await else { continue };
            let scope_metrics = vec![scope(&metrics(&status), started, nanos())];
            let resource = Some(resource(environment, role, instance));
            let resource_metrics = vec![ResourceMetrics { resource, scope_metrics, ..ResourceMetrics::default() }];
            exporter.send(&ExportMetricsServiceRequest { resource_metrics }).await;
        }
    }
    std::future::pending::<()>().await;
}

fn nanos() -> u64 {
    u64::try_from(stamp().0).unwrap_or_default() * 1_000_000
}

fn scope(metrics: &[Metric], started: u64, now: u64) -> ScopeMetrics {
    ScopeMetrics {
        scope: Some(otlp::scope()),
        metrics: metrics.iter().map(|metric| convert(metric, started, now)).collect(),
        ..ScopeMetrics::default()
    }
}

fn convert(metric: &Metric, started: u64, now: u64) -> OtlpMetric {
    let attributes = |sample: &Sample, but: usize| -> Vec<KeyValue> {
        let labels = metric.labels.iter().take(metric.labels.len() - but).zip(&sample.labels);
        labels.filter(|(_, value)| !value.is_empty()).map(|(label, value)| attribute(label, value)).collect()
    };
    let points = || {
        let point = |sample: &Sample| NumberDataPoint {
            attributes: attributes(sample, 0),
            start_time_unix_nano: started,
            time_unix_nano: now,
            value: Some(Value::AsDouble(sample.value)),
            ..NumberDataPoint::default()
        };
        metric.samples.iter().map(point).collect()
    };
    let cumulative = AggregationTemporality::Cumulative.into();
    let data = match metric.kind {
        Kind::Gauge | Kind::Info => Data::Gauge(Gauge { data_points: points() }),
        Kind::Counter => {
            Data::Sum(Sum { data_points: points(), aggregation_temporality: cumulative, is_monotonic: true })
        }
        Kind::Histogram => {
            let mut by_labels: BTreeMap<&[String], HistogramDataPoint> = BTreeMap::new();
            for sample in &metric.samples {
                let labels = &sample.labels[..sample.labels.len() - 1];
                let point = by_labels.entry(labels).or_insert_with(|| HistogramDataPoint {
                    attributes: attributes(sample, 1),
                    start_time_unix_nano: started,
                    time_unix_nano: now,
                    ..HistogramDataPoint::default()
                });
                match sample.suffix {
                    "_sum" => point.sum = Some(sample.value),
                    "_count" => point.count = whole(sample.value),
                    // Buckets of the text are cumulative, those of OTLP are not.
                    _ => {
                        point.explicit_bounds.extend(
                            sample
                                .labels
                                .last()
                                .and_then(|bound| bound.parse::<f64>().ok())
                                .filter(|bound| bound.is_finite()),
                        );
                        let before: u64 = point.bucket_counts.iter().sum();
                        point.bucket_counts.push(whole(sample.value).saturating_sub(before));
                    }
                }
            }
            Data::Histogram(Histogram {
                data_points: by_labels.into_values().collect(),
                aggregation_temporality: cumulative,
            })
        }
    };
    let unit = match metric.unit() {
        Some("seconds") => "s",
        Some("bytes") => "By",
        _ => "",
    };
    OtlpMetric {
        name: metric.name(),
        description: metric.help.to_owned(),
        unit: unit.to_owned(),
        data: Some(data),
        ..OtlpMetric::default()
    }
}

#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "counts are whole")]
fn whole(count: f64) -> u64 {
    count as u64
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::console::openmetrics::{histogram, metrics, sample};
    use journeyman_platform::histogram::Histogram as Counted;

    #[test]
    fn each_kind_of_metric_has_its_form() {
        let counted = Counted { buckets: [1, 2, 0], sum_seconds: 3.5 };
        let list = metrics! {
            Gauge "slots{state}" "Slots." = sample(["busy"], 3_u32);
            Counter "claims" "Claims." = 7_u32;
            Histogram "wait_seconds{source,le}" "Waits." = histogram(&["ci"], &[0.1, 1.0], &counted);
        };
        let converted = scope(&list, 1, 2).metrics;
        let names: Vec<_> = converted.iter().map(|metric| (metric.name.as_str(), metric.unit.as_str())).collect();
        assert_eq!(names, [("journeyman_slots", ""), ("journeyman_claims", ""), ("journeyman_wait_seconds", "s")]);
        let Some(Data::Sum(sum)) = &converted[1].data else { panic!("a sum") };
        assert!(sum.is_monotonic && sum.data_points[0].value == Some(Value::AsDouble(7.0)));
        let Some(Data::Histogram(found)) = &converted[2].data else { panic!("a histogram") };
        let point = &found.data_points[0];
        assert_eq!((point.count, point.sum, point.bucket_counts.as_slice()), (3, Some(3.5), &[1, 2, 0][..]));
        assert_eq!(
            (point.explicit_bounds.as_slice(), point.attributes.as_slice()),
            (&[0.1, 1.0][..], &[attribute("source", "ci")][..])
        );
    }
}
