//! A worker's status as OpenMetrics, read from the snapshot that `journeyman status` shows.
//!
//! All series of a source exist from the start, at zero, so that rates are right from the first event. Labels hold names from
//! the configuration and words of a fixed list, never text from a task.

use std::fmt;

use super::openmetrics::{self, MetricFamily, MetricKind, Sample, count, flag, float, labeled, unlabeled};
use crate::control::WorkerStatusReply;
use crate::worker::status::{BlockedReason, LifecycleState, SidecarSummary, SourceStatus};
use crate::worker::trace_recorder::SpanCounts;

type ReadSamples = fn(&WorkerStatusReply) -> Vec<Sample>;

const fn gauge(name: &'static str, help: &'static str, read: ReadSamples) -> MetricFamily<WorkerStatusReply> {
    MetricFamily::new(MetricKind::Gauge, name, help, read)
}

const fn counter(name: &'static str, help: &'static str, read: ReadSamples) -> MetricFamily<WorkerStatusReply> {
    MetricFamily::new(MetricKind::Counter, name, help, read)
}

const fn info(name: &'static str, help: &'static str, read: ReadSamples) -> MetricFamily<WorkerStatusReply> {
    MetricFamily::new(MetricKind::Info, name, help, read)
}

const SOURCE: &[&str] = &["source"];
const HANDLER: &[&str] = &["handler"];
const PROVIDER: &[&str] = &["provider"];

const FAMILIES: &[MetricFamily<WorkerStatusReply>] = &[
    info("build", "Version of the running binary.", |status| vec![labeled([&status.version], 1.0)])
        .with_labels(&["version"]),
    info("worker", "Worker id and group, and how payload processes are contained.", |status| {
        vec![labeled([&status.id, &status.group, &status.snapshot.containment], 1.0)]
    })
    .with_labels(&["worker_id", "worker_group", "containment"]),
    gauge("uptime", "Time since the worker started.", |status| unlabeled(status.snapshot.uptime_seconds))
        .with_unit("seconds"),
    gauge("state", "1 for the current state of the worker, 0 for the others.", |status| {
        LifecycleState::ALL.map(|state| labeled([state.as_str()], flag(status.snapshot.state == state))).into()
    })
    .with_labels(&["state"]),
    gauge("claiming_blocked", "1 for the reason why the worker claims nothing; all 0 while it claims.", |status| {
        BlockedReason::ALL.map(|why| labeled([why.as_str()], flag(status.snapshot.blocked_reason == Some(why)))).into()
    })
    .with_labels(&["reason"]),
    gauge("capacity", "Maximum number of concurrent tasks.", |status| unlabeled(status.snapshot.capacity)),
    gauge("slots_polling", "Free slots that are waiting in a poll.", |status| unlabeled(status.snapshot.slots_polling)),
    gauge("tasks_running", "Claims held now.", |status| {
        let held =
            |source: &SourceStatus| status.snapshot.claims.iter().filter(|task| task.source == source.name).count();
        per_source(status, |source| float(held(source) as u64))
    })
    .with_labels(SOURCE),
    gauge("lease_remaining_min", "Shortest remaining lease of all claims; absent without claims.", |status| {
        let left = status.snapshot.claims.iter().filter_map(|task| task.lease_left_seconds);
        left.reduce(f64::min).map_or_else(Vec::new, unlabeled)
    })
    .with_unit("seconds"),
    counter(
        "tasks",
        "Ended claims by outcome: completed, failed, exception with its reason, superseded (the queue had an outcome \
        already), unconfirmed (the report was not answered), lost (ended without a report).",
        outcomes,
    )
    .with_labels(&["source", "outcome", "reason"]),
    counter("claims", "Claims granted.", |status| per_source(status, |source| float(source.counts.claims)))
        .with_labels(SOURCE),
    counter("claims_refused", "Claim requests that the queue rejected or that failed.", |status| {
        per_source(status, |source| float(source.counts.claims_refused))
    })
    .with_labels(SOURCE),
    counter("reclaims", "Leases extended.", |status| per_source(status, |source| float(source.counts.reclaims)))
        .with_labels(SOURCE),
    counter("reclaim_failures", "Reclaim requests that the queue rejected or that failed.", |status| {
        per_source(status, |source| float(source.counts.reclaims_failed))
    })
    .with_labels(SOURCE),
    counter("polls", "Polls answered.", |status| per_source(status, |source| float(source.counts.polls)))
        .with_labels(SOURCE),
    counter("poll_failures", "Polls that the queue rejected or that failed.", |status| {
        per_source(status, |source| float(source.counts.polls_failed))
    })
    .with_labels(SOURCE),
    counter(
        "source_counters",
        "Counters of the source's own, such as replies and requeues of an AMQP source.",
        |status| {
            let of_source = |source: &SourceStatus| {
                let counters = source.metrics.iter();
                counters.map(|(counter, count)| labeled([&source.name, counter], float(*count))).collect::<Vec<_>>()
            };
            status.snapshot.sources.iter().flat_map(of_source).collect()
        },
    )
    .with_labels(&["source", "counter"]),
    counter("activity_reports", "Activity reports that the broker confirmed; absent where none are sent.", |status| {
        status.snapshot.activity.iter().flat_map(|activity| unlabeled(float(activity.reports))).collect()
    }),
    counter("activity_failures", "Activity reports that could not be sent.", |status| {
        status.snapshot.activity.iter().flat_map(|activity| unlabeled(float(activity.failures))).collect()
    }),
    gauge("activity_up", "1 if the last activity report was confirmed.", |status| {
        status
            .snapshot
            .activity
            .iter()
            .flat_map(|activity| unlabeled(flag(activity.error.is_none() && activity.reports > 0)))
            .collect()
    }),
    gauge(
        "source_up",
        "1 if the source answers polls, 0 before its first answer and after repeated errors.",
        |status| per_source(status, |source| flag(source.polled_seconds_ago.is_some() && !source.failing)),
    )
    .with_labels(SOURCE),
    counter("source_errors", "Errors while opening, polling, claiming and recovering.", |status| {
        per_source(status, |source| float(source.counts.refusals))
    })
    .with_labels(SOURCE),
    gauge("source_poll_age", "Time since the source last answered a poll; absent before the first answer.", |status| {
        let polled = status.snapshot.sources.iter().filter_map(|source| Some((source, source.polled_seconds_ago?)));
        polled.map(|(source, age)| labeled([&source.name], age)).collect()
    })
    .with_labels(SOURCE)
    .with_unit("seconds"),
    gauge("sidecar_up", "1 if the handler's sidecar is ready for tasks; absent for handlers without one.", |status| {
        per_sidecar(status, |sidecar| flag(sidecar.up))
    })
    .with_labels(HANDLER),
    counter("sidecar_restarts", "Restarts of the handler's sidecar.", |status| {
        per_sidecar(status, |sidecar| float(sidecar.restarts))
    })
    .with_labels(HANDLER),
    counter("delete_failures", "Failed attempts to delete a message.", |s| count(s.snapshot.counts.deletes_failed)),
    counter("high_dequeue_counts", "Messages that the queue has delivered more than 10 times.", |status| {
        count(status.snapshot.counts.dequeue_alerts)
    }),
    counter("unreadable_messages", "Messages and claims that could not be parsed.", |s| {
        count(s.snapshot.counts.unreadable_messages)
    }),
    counter("possible_overlaps", "Claims whose payload may have run at the same time on another worker.", |status| {
        count(status.snapshot.counts.overlaps_possible)
    }),
    counter("cleanup_pending", "Claims whose payload may have left processes behind.", |s| {
        count(s.snapshot.counts.cleanup_pending)
    }),
    counter("artifacts", "Uploads of artifacts, including logs, by result: stored or failed.", |status| {
        let counts = status.snapshot.counts;
        vec![labeled(["stored"], float(counts.artifacts)), labeled(["failed"], float(counts.artifacts_failed))]
    })
    .with_labels(&["result"]),
    counter("log", "Size of all task logs.", |status| {
        let running: u64 = status.snapshot.claims.iter().map(|task| task.log_bytes).sum();
        count(status.snapshot.counts.log_bytes + running)
    })
    .with_unit("bytes"),
    counter(
        "termination_notices",
        "Notices that the host terminates, by origin: aws, gcp, azure, file or other.",
        |status| {
            let counts = status.snapshot.counts;
            by_provider(
                [counts.notices_aws, counts.notices_gcp, counts.notices_azure, counts.notices_file],
                counts.notices,
            )
        },
    )
    .with_labels(PROVIDER),
    gauge(
        "termination_watch_up",
        "1 if the metadata service answers or the file can be read, else 0; absent where notices are not watched.",
        |status| status.snapshot.watches.iter().map(|watch| labeled([&watch.provider], flag(watch.up))).collect(),
    )
    .with_labels(PROVIDER),
    gauge(
        "termination_reaction",
        "Time from the first termination notice to the end of the last claim; absent before a notice.",
        |status| {
            let end = status.snapshot.notice.and_then(|notice| notice.last_claim_ended_after_seconds);
            end.map_or_else(Vec::new, unlabeled)
        },
    )
    .with_unit("seconds"),
    counter(
        "recovered",
        "Claims of the previous process, by result: killed (processes were left), reported, released or expired.",
        |status| {
            let recovered = status.snapshot.recovered.unwrap_or_default();
            [
                ("killed", recovered.killed),
                ("reported", recovered.reported),
                ("released", recovered.released),
                ("expired", recovered.expired),
            ]
            .map(|(result, count)| labeled([result], float(count as u64)))
            .into()
        },
    )
    .with_labels(&["result"]),
    gauge("journal_errors", "Errors found in the journal of the previous process.", |status| {
        count(status.snapshot.recovered.unwrap_or_default().journal_errors as u64)
    }),
    counter("host_faults", "Times that a host probe failed.", |s| count(s.snapshot.counts.host_faults)),
    counter("panics", "Panics of handlers and adapters.", |status| count(status.snapshot.counts.panics)),
    counter("config_reloads", "Configuration reloads by result: applied or rejected.", |status| {
        let counts = status.snapshot.counts;
        vec![
            labeled(["applied"], float(counts.config_reloads)),
            labeled(["rejected"], float(counts.config_reloads_rejected)),
        ]
    })
    .with_labels(&["result"]),
    counter("trace_spans", "Spans of ended claims by result: exported or dropped.", |status| {
        let spans = status.snapshot.spans;
        spans.map_or_else(Vec::new, |SpanCounts { exported, dropped }| {
            vec![labeled(["exported"], float(exported)), labeled(["dropped"], float(dropped))]
        })
    })
    .with_labels(&["result"]),
    gauge("disk_free", "Free space of the work directory; absent where it is unknown.", |status| {
        status.snapshot.host.disk_free.map_or_else(Vec::new, |free| unlabeled(float(free)))
    })
    .with_unit("bytes"),
    gauge("disk_min", "Below this the worker claims nothing.", |s| count(s.snapshot.host.disk_min)).with_unit("bytes"),
    gauge("memory_free", "Available memory; absent where it is unknown.", |status| {
        status.snapshot.host.memory_free.map_or_else(Vec::new, |free| unlabeled(float(free)))
    })
    .with_unit("bytes"),
    gauge("memory_min", "Below this the worker claims nothing.", |s| count(s.snapshot.host.memory_min))
        .with_unit("bytes"),
];

fn outcomes(status: &WorkerStatusReply) -> Vec<Sample> {
    let of_source = |source: &SourceStatus| {
        let ends = source.counts.ends;
        [
            ("completed", "", ends.completed),
            ("failed", "", ends.failed),
            ("exception", "worker-shutdown", ends.worker_shutdown),
            ("exception", "malformed-payload", ends.malformed_payload),
            ("exception", "resource-unavailable", ends.resource_unavailable),
            ("exception", "internal-error", ends.internal_error),
            ("exception", "intermittent-task", ends.intermittent_task),
            ("superseded", "", ends.superseded),
            ("unconfirmed", "", ends.unconfirmed),
            ("lost", "", ends.lost),
        ]
        .map(|(outcome, reason, count)| labeled([source.name.as_str(), outcome, reason], float(count)))
    };
    status.snapshot.sources.iter().flat_map(of_source).collect()
}

fn by_provider(known: [u64; 4], all: u64) -> Vec<Sample> {
    let other = all.saturating_sub(known.iter().sum());
    let rows = ["aws", "gcp", "azure", "file"].into_iter().zip(known).chain([("other", other)]);
    rows.map(|(provider, count)| labeled([provider], float(count))).collect()
}

fn per_source(status: &WorkerStatusReply, value: impl Fn(&SourceStatus) -> f64) -> Vec<Sample> {
    status.snapshot.sources.iter().map(|source| labeled([&source.name], value(source))).collect()
}

fn per_sidecar(status: &WorkerStatusReply, value: impl Fn(&SidecarSummary) -> f64) -> Vec<Sample> {
    status.snapshot.sidecars.iter().map(|service| labeled([&service.name], value(service))).collect()
}

/// The body of `/metrics`.
///
/// # Errors
///
/// Never; the encoder's signature asks for it.
pub fn text(status: WorkerStatusReply) -> Result<String, fmt::Error> {
    openmetrics::text(status, FAMILIES)
}

/// The table of `examples/prometheus/README.md`.
pub fn markdown() -> String {
    openmetrics::markdown(FAMILIES)
}
