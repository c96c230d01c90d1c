//! A worker's status as OpenMetrics, read from the snapshot that `journeyman status` shows.
//!
//! All series of a source exist from the start, at zero, so that rates are right from the first event. Labels hold names from
//! the configuration and words of a fixed list, never text from a task.

use super::openmetrics::{self, MetricFamily, MetricKind, Sample, by_label, flag, float, labeled, optional, unlabeled};
use crate::control::WorkerStatusReply;
use crate::worker::counters::{SourceCounts, WorkerCounts};
use crate::worker::durations::{BOUNDS_SECONDS, EndKind, Histogram, TaskPhase};
use crate::worker::status::{BlockedReason, LifecycleState, SourceStatus, WorkerStatus};
use crate::worker::trace_recorder::SpanCounts;

type Family = MetricFamily<WorkerStatusReply>;

fn gauge(name: &'static str, help: &'static str, read: fn(&WorkerStatus) -> Vec<Sample>) -> Family {
    MetricFamily::new(MetricKind::Gauge, name, help, move |status: &WorkerStatusReply| read(&status.snapshot))
}

fn counter(name: &'static str, help: &'static str, read: fn(&WorkerStatus) -> Vec<Sample>) -> Family {
    MetricFamily::new(MetricKind::Counter, name, help, move |status: &WorkerStatusReply| read(&status.snapshot))
}

fn count(name: &'static str, help: &'static str, read: fn(&WorkerCounts) -> u64) -> Family {
    let samples = move |status: &WorkerStatusReply| unlabeled(float(read(&status.snapshot.counts)));
    MetricFamily::new(MetricKind::Counter, name, help, samples)
}

fn source_count(name: &'static str, help: &'static str, read: fn(&SourceCounts) -> u64) -> Family {
    let samples = move |status: &WorkerStatusReply| {
        let sources = status.snapshot.sources.iter();
        sources.map(|source| labeled([&source.name], float(read(&source.counts)))).collect()
    };
    MetricFamily::new(MetricKind::Counter, name, help, samples)
}

fn families() -> Vec<Family> {
    vec![
        MetricFamily::new(
            MetricKind::Info,
            "build{version}",
            "Version of the running binary.",
            |status: &WorkerStatusReply| vec![labeled([&status.version], 1.0)],
        ),
        MetricFamily::new(
            MetricKind::Info,
            "worker{worker_id,worker_group,containment}",
            "Worker id and group, and how payload processes are contained.",
            |status: &WorkerStatusReply| vec![labeled([&status.id, &status.group, &status.snapshot.containment], 1.0)],
        ),
        gauge("uptime_seconds", "Time since the worker started.", |status| unlabeled(status.uptime_seconds)),
        gauge("state{state}", "1 for the current state of the worker, 0 for the others.", |status| {
            LifecycleState::ALL.map(|state| labeled([state.as_str()], flag(status.state == state))).into()
        }),
        gauge(
            "claiming_blocked{reason}",
            "1 for the reason why the worker claims nothing; all 0 while it claims.",
            |status| {
                BlockedReason::ALL.map(|why| labeled([why.as_str()], flag(status.blocked_reason == Some(why)))).into()
            },
        ),
        gauge("capacity", "Maximum number of concurrent tasks.", |status| unlabeled(status.capacity)),
        gauge("tasks_running{source}", "Claims held now.", |status| {
            let held = |source: &SourceStatus| status.claims.iter().filter(|task| task.source == source.name).count();
            status.sources.iter().map(|source| labeled([&source.name], float(held(source) as u64))).collect()
        }),
        gauge(
            "lease_remaining_min_seconds",
            "Shortest remaining lease of all claims; absent without claims.",
            |status| optional(status.claims.iter().filter_map(|task| task.lease_left_seconds).reduce(f64::min)),
        ),
        counter(
            "tasks{source,outcome,reason}",
            "Ended claims by outcome: completed, failed, exception with its reason, deferred (the work goes on elsewhere), canceled, deadline-exceeded \
            (stopped at the task's deadline), superseded (the queue had another outcome already), unconfirmed (the report was not answered), lost (ended without a report).",
            |status| status.sources.iter().flat_map(outcomes).collect(),
        ),
        MetricFamily::new(
            MetricKind::Histogram,
            "task_phase_seconds{source,phase,outcome,le}",
            "Time that ended claims took by phase: queue (pending, by the queue's clock; not with AMQP), start (from the claim to the \
            start of the payload), run, store (artifacts and log), report; by outcome: completed, failed, exception, lost.",
            |status: &WorkerStatusReply| status.snapshot.sources.iter().flat_map(durations).collect(),
        ),
        source_count("claims{source}", "Claims granted.", |counts| counts.claims),
        source_count("claims_refused{source}", "Claim requests that the queue rejected or that failed.", |counts| {
            counts.claims_refused
        }),
        source_count("reclaims{source}", "Leases extended.", |counts| counts.reclaims),
        source_count(
            "reclaim_failures{source}",
            "Reclaim requests that the queue rejected or that failed.",
            |counts| counts.reclaims_failed,
        ),
        source_count("polls{source}", "Polls answered.", |counts| counts.polls),
        source_count("poll_failures{source}", "Polls that the queue rejected or that failed.", |counts| {
            counts.polls_failed
        }),
        counter(
            "source_counters{source,counter}",
            "Counters of the source's own, such as replies and requeues of an AMQP source.",
            |status| {
                let of_source = |source: &SourceStatus| {
                    let counters = source.metrics.iter();
                    counters.map(|(counter, count)| labeled([&source.name, counter], float(*count))).collect::<Vec<_>>()
                };
                status.sources.iter().flat_map(of_source).collect()
            },
        ),
        counter(
            "activity_reports",
            "Activity reports that the broker confirmed; absent where none are sent.",
            |status| optional(status.activity.as_ref().map(|activity| float(activity.reports))),
        ),
        counter("activity_failures", "Activity reports that could not be sent.", |status| {
            optional(status.activity.as_ref().map(|activity| float(activity.failures)))
        }),
        gauge("activity_up", "1 if the last activity report was confirmed.", |status| {
            let activity = status.activity.as_ref();
            optional(activity.map(|activity| flag(activity.error.is_none() && activity.reports > 0)))
        }),
        gauge(
            "source_up{source}",
            "1 if the source answers polls, 0 before its first answer and after repeated errors.",
            |status| status.sources.iter().map(|source| labeled([&source.name], flag(source.is_up()))).collect(),
        ),
        source_count("source_errors{source}", "Errors while opening, polling, claiming and recovering.", |counts| {
            counts.refusals
        }),
        gauge(
            "source_poll_age_seconds{source}",
            "Time since the source last answered a poll; absent before the first answer.",
            |status| {
                let polled = status.sources.iter().filter_map(|source| Some((source, source.polled_seconds_ago?)));
                polled.map(|(source, age)| labeled([&source.name], age)).collect()
            },
        ),
        gauge(
            "sidecar_up{handler}",
            "1 if the handler's sidecar is ready for tasks; absent for handlers without one.",
            |status| status.sidecars.iter().map(|sidecar| labeled([&sidecar.name], flag(sidecar.up))).collect(),
        ),
        counter("sidecar_restarts{handler}", "Restarts of the handler's sidecar.", |status| {
            status.sidecars.iter().map(|sidecar| labeled([&sidecar.name], float(sidecar.restarts))).collect()
        }),
        count("delete_failures", "Failed attempts to delete a message.", |counts| counts.deletes_failed),
        count("high_dequeue_counts", "Messages that the queue has delivered more than 10 times.", |counts| {
            counts.dequeue_alerts
        }),
        count("unreadable_messages", "Messages and claims that could not be parsed.", |counts| {
            counts.unreadable_messages
        }),
        count("possible_overlaps", "Claims whose payload may have run at the same time on another worker.", |counts| {
            counts.overlaps_possible
        }),
        count("cleanup_pending", "Claims whose payload may have left processes behind.", |counts| {
            counts.cleanup_pending
        }),
        counter("artifacts{result}", "Uploads of artifacts, including logs, by result: stored or failed.", |status| {
            let counts = status.counts;
            by_label([("stored", counts.artifacts), ("failed", counts.artifacts_failed)])
        }),
        counter("log_bytes", "Size of all task logs.", |status| {
            let running: u64 = status.claims.iter().map(|task| task.log_bytes).sum();
            unlabeled(float(status.counts.log_bytes + running))
        }),
        counter(
            "termination_notices{provider}",
            "Notices that the host terminates, by origin: aws, gcp, azure, file or other.",
            |status| {
                let counts = status.counts;
                let known = [counts.notices_aws, counts.notices_gcp, counts.notices_azure, counts.notices_file];
                let other = counts.notices.saturating_sub(known.iter().sum());
                let [aws, gcp, azure, file] = known;
                by_label([("aws", aws), ("gcp", gcp), ("azure", azure), ("file", file), ("other", other)])
            },
        ),
        gauge(
            "termination_watch_up{provider}",
            "1 if the metadata service answers or the file can be read, else 0; absent where notices are not watched.",
            |status| {
                status.watches.iter().map(|watch| labeled([&watch.provider], flag(watch.error.is_none()))).collect()
            },
        ),
        gauge(
            "termination_reaction_seconds",
            "Time from the first termination notice to the end of the last claim; absent before a notice.",
            |status| optional(status.notice.and_then(|notice| notice.last_claim_ended_after_seconds)),
        ),
        counter(
            "recovered{result}",
            "Claims of the previous process, by result: killed (processes were left), reported, released or expired.",
            |status| {
                let recovered = status.recovered.unwrap_or_default();
                by_label([
                    ("killed", recovered.killed as u64),
                    ("reported", recovered.reported as u64),
                    ("released", recovered.released as u64),
                    ("expired", recovered.expired as u64),
                ])
            },
        ),
        gauge("journal_errors", "Errors found in the journal of the previous process.", |status| {
            unlabeled(float(status.recovered.unwrap_or_default().journal_errors as u64))
        }),
        count("host_faults", "Times that a host probe failed.", |counts| counts.host_faults),
        count("panics", "Panics of handlers and adapters.", |counts| counts.panics),
        counter("config_reloads{result}", "Configuration reloads by result: applied or rejected.", |status| {
            let WorkerCounts { config_reloads, config_reloads_rejected, .. } = status.counts;
            by_label([("applied", config_reloads), ("rejected", config_reloads_rejected)])
        }),
        counter("trace_spans{result}", "Spans of ended claims by result: exported or dropped.", |status| {
            status.spans.map_or_else(Vec::new, |SpanCounts { exported, dropped }| {
                by_label([("exported", exported), ("dropped", dropped)])
            })
        }),
        gauge("disk_free_bytes", "Free space of the work directory; absent where it is unknown.", |status| {
            optional(status.host.disk_free.map(float))
        }),
        gauge("disk_min_bytes", "Below this the worker claims nothing.", |status| {
            unlabeled(float(status.host.disk_min))
        }),
        gauge("memory_free_bytes", "Available memory; absent where it is unknown.", |status| {
            optional(status.host.memory_free.map(float))
        }),
        gauge("memory_min_bytes", "Below this the worker claims nothing.", |status| {
            unlabeled(float(status.host.memory_min))
        }),
    ]
}

fn durations(source: &SourceStatus) -> Vec<Sample> {
    let of = |phase: TaskPhase, end: EndKind| {
        let Histogram { buckets, sum_seconds } = source.durations.of(phase, end);
        openmetrics::histogram(&[&source.name, phase.as_str(), end.as_str()], &BOUNDS_SECONDS, buckets, *sum_seconds)
    };
    TaskPhase::ALL.iter().flat_map(|phase| EndKind::ALL.iter().flat_map(|end| of(*phase, *end))).collect()
}

fn outcomes(source: &SourceStatus) -> [Sample; 13] {
    let ends = source.counts.outcomes;
    [
        ("completed", "", ends.completed),
        ("failed", "", ends.failed),
        ("exception", "worker-shutdown", ends.worker_shutdown),
        ("exception", "malformed-payload", ends.malformed_payload),
        ("exception", "resource-unavailable", ends.resource_unavailable),
        ("exception", "internal-error", ends.internal_error),
        ("exception", "intermittent-task", ends.intermittent_task),
        ("deferred", "", ends.deferred),
        ("canceled", "", ends.canceled),
        ("deadline-exceeded", "", ends.deadline_exceeded),
        ("superseded", "", ends.superseded),
        ("unconfirmed", "", ends.unconfirmed),
        ("lost", "", ends.lost),
    ]
    .map(|(outcome, reason, count)| labeled([source.name.as_str(), outcome, reason], float(count)))
}

/// The body of `/metrics`.
pub fn text(status: &WorkerStatusReply) -> String {
    openmetrics::text(status, &families())
}

/// The table of `examples/prometheus/README.md`.
pub fn markdown() -> String {
    openmetrics::markdown(&families())
}
