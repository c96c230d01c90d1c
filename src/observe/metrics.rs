//! A worker's state as OpenMetrics.
//!
//! Nothing is counted here: every sample is read from the same view that `journeyman status` shows. All series of a source
//! exist from the start, at zero, so that a rate is right from the first event on; labels hold names of the configuration
//! and words of a fixed list, and nothing that a task brings.

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
    info("build", "The version that runs.", |status| vec![labeled([&status.version], 1.0)]).with_labels(&["version"]),
    info("worker", "Which worker this is, and how it holds payloads together.", |status| {
        vec![labeled([&status.id, &status.group, &status.snapshot.containment], 1.0)]
    })
    .with_labels(&["worker_id", "worker_group", "containment"]),
    gauge("uptime", "Since the worker started.", |status| unlabeled(status.snapshot.uptime_seconds)).with_unit("seconds"),
    gauge("state", "1 for the state that the worker is in.", |status| {
        LifecycleState::ALL.map(|state| labeled([state.as_str()], flag(status.snapshot.state == state))).into()
    })
    .with_labels(&["state"]),
    gauge("guard_blocked", "1 for the reason why nothing is claimed; all 0 where claims are asked for.", |status| {
        BlockedReason::ALL.map(|why| labeled([why.as_str()], flag(status.snapshot.blocked == Some(why)))).into()
    })
    .with_labels(&["reason"]),
    gauge("capacity", "How many tasks run at once at most.", |status| unlabeled(status.snapshot.capacity)),
    gauge("slots_asked", "Slots that wait in polls.", |status| unlabeled(status.snapshot.asked)),
    gauge("tasks_running", "Claims that are held.", |status| {
        let held = |source: &SourceStatus| status.snapshot.tasks.iter().filter(|task| task.source == source.name).count();
        per_source(status, |source| float(held(source) as u64))
    })
    .with_labels(SOURCE),
    gauge("lease_left_min", "The shortest lease that is held, until it is given up; absent where none is.", |status| {
        let left = status.snapshot.tasks.iter().filter_map(|task| task.lease_left_seconds);
        left.reduce(f64::min).map_or_else(Vec::new, unlabeled)
    })
    .with_unit("seconds"),
    counter(
        "tasks",
        "What became of claims: completed, failed, exception with its reason, superseded (the queue had an \
        outcome already), unconfirmed (the report was not answered), lost (given up without a report).",
        claim_ends,
    )
    .with_labels(&["source", "outcome", "reason"]),
    counter("claims", "Claims granted.", |status| per_source(status, |source| float(source.counts.claims))).with_labels(SOURCE),
    counter("claims_refused", "Claim requests that were refused or failed.", |status| {
        per_source(status, |source| float(source.counts.claims_refused))
    })
    .with_labels(SOURCE),
    counter("reclaims", "Leases extended.", |status| per_source(status, |source| float(source.counts.reclaims))).with_labels(SOURCE),
    counter("reclaim_failures", "Attempts to extend a lease that were refused or failed.", |status| {
        per_source(status, |source| float(source.counts.reclaims_failed))
    })
    .with_labels(SOURCE),
    counter("polls", "Polls answered.", |status| per_source(status, |source| float(source.counts.polls))).with_labels(SOURCE),
    counter("poll_failures", "Polls that were refused or failed.", |status| {
        per_source(status, |source| float(source.counts.polls_failed))
    })
    .with_labels(SOURCE),
    counter("source_events", "What a source of requests has counted besides claims.", |status| {
        let of = |source: &SourceStatus| {
            let tallies = source.tallies.iter();
            tallies.map(|(event, count)| labeled([&source.name, event], float(*count))).collect::<Vec<_>>()
        };
        status.snapshot.sources.iter().flat_map(of).collect()
    })
    .with_labels(&["source", "event"]),
    counter(
        "activity_reports",
        "Activity reports that the broker has confirmed; absent where no controller is told.",
        |status| status.snapshot.activity.iter().flat_map(|activity| unlabeled(float(activity.reports))).collect(),
    ),
    counter("activity_failures", "How often there was no way to report activity.", |status| {
        status.snapshot.activity.iter().flat_map(|activity| unlabeled(float(activity.failures))).collect()
    }),
    gauge("activity_up", "1 where activity can be reported.", |status| {
        status
            .snapshot
            .activity
            .iter()
            .flat_map(|activity| unlabeled(flag(activity.error.is_none() && activity.reports > 0)))
            .collect()
    }),
    gauge("source_up", "1 where the source has answered, and its last answers were no refusals.", |status| {
        per_source(status, |source| flag(source.polled_seconds_ago.is_some() && !source.in_trouble))
    })
    .with_labels(SOURCE),
    counter("source_errors", "Refusals and failures of opening, polling, claiming and recovering.", |status| {
        per_source(status, |source| float(source.counts.refusals))
    })
    .with_labels(SOURCE),
    gauge("source_poll_age", "Since the source last answered a poll; absent before the first answer.", |status| {
        let polled = status.snapshot.sources.iter().filter_map(|source| Some((source, source.polled_seconds_ago?)));
        polled.map(|(source, age)| labeled([&source.name], age)).collect()
    })
    .with_labels(SOURCE)
    .with_unit("seconds"),
    gauge("service_up", "1 where what a handler keeps there beside its tasks can take them; absent where none does.", |status| {
        per_sidecar(status, |service| flag(service.up))
    })
    .with_labels(HANDLER),
    counter("service_restarts", "How often what a handler keeps there beside its tasks was started again.", |status| {
        per_sidecar(status, |service| float(service.restarts))
    })
    .with_labels(HANDLER),
    counter("delete_failures", "Attempts to delete a message that failed.", |s| count(s.snapshot.counts.deletes_failed)),
    counter("high_dequeue_counts", "Messages received more often than `worker.dequeue_alert`.", |status| {
        count(status.snapshot.counts.dequeue_alerts)
    }),
    counter("undecodable", "Messages and claims that could not be read.", |s| count(s.snapshot.counts.undecodable)),
    counter("overlaps", "Claims whose payload may have run beside another worker's.", |status| {
        count(status.snapshot.counts.overlaps_possible)
    }),
    counter("occupied", "Claims whose payload could not be proven gone.", |s| count(s.snapshot.counts.occupied)),
    counter("artifacts", "Artifacts, logs included, by what became of them: stored or failed.", |status| {
        let counts = status.snapshot.counts;
        vec![labeled(["stored"], float(counts.artifacts)), labeled(["failed"], float(counts.artifacts_failed))]
    })
    .with_labels(&["result"]),
    counter("log", "Bytes of the logs of tasks.", |status| {
        let running: u64 = status.snapshot.tasks.iter().map(|task| task.log_bytes).sum();
        count(status.snapshot.counts.log_bytes + running)
    })
    .with_unit("bytes"),
    counter("spot_notices", "Notices that the host goes, by where they came from: aws, gcp, azure, a file, or elsewhere.", |status| {
        let counts = status.snapshot.counts;
        by_provider(
            [counts.notices_aws, counts.notices_gcp, counts.notices_azure, counts.notices_file],
            counts.notices,
        )
    })
    .with_labels(PROVIDER),
    counter("spot_hints", "Hints that the host may have to go, by where they came from.", |status| {
        let counts = status.snapshot.counts;
        by_provider([counts.hints_aws, counts.hints_gcp, counts.hints_azure, counts.hints_file], counts.hints)
    })
    .with_labels(PROVIDER),
    gauge("spot_watch_up", "1 while what would say that the host goes can be asked or read, 0 while it cannot; absent where nothing is watched.", |status| {
        let up = |spot: &crate::worker::status::NoticeWatchStatus| if spot.heard { 1.0 } else { 0.0 };
        status.snapshot.watches.iter().map(|spot| labeled([spot.provider.as_str()], up(spot))).collect()
    })
    .with_labels(PROVIDER),
    gauge("spot_reaction", "From the first notice to the latest end of a claim since; absent before one.", |status| {
        let end = status.snapshot.notice.and_then(|notice| notice.to_last_end_seconds);
        end.map_or_else(Vec::new, unlabeled)
    })
    .with_unit("seconds"),
    counter("recovered", "Runs that an earlier life of this worker held, by what became of them: killed (had processes left), reported, handed-back or forgotten.", |status| {
        let left = status.snapshot.recovered.unwrap_or_default();
        let ends = [("killed", left.killed), ("reported", left.reported), ("handed-back", left.handed_back)];
        let ends = ends.into_iter().chain([("forgotten", left.forgotten)]);
        ends.map(|(end, many)| labeled([end], float(many as u64))).collect()
    })
    .with_labels(&["end"]),
    gauge("journal_damage", "Faults found in the journal of the worker's earlier life.", |status| {
        count(status.snapshot.recovered.unwrap_or_default().damage as u64)
    }),
    counter("host_faults", "Times the host was found unable to run tasks.", |s| count(s.snapshot.counts.host_faults)),
    counter("panics", "Panics of handlers and adapters.", |status| count(status.snapshot.counts.panics)),
    counter("config_reloads", "Configurations read again, by what became of them: taken-over or refused.", |status| {
        let counts = status.snapshot.counts;
        vec![labeled(["taken-over"], float(counts.reloads)), labeled(["refused"], float(counts.reloads_refused))]
    })
    .with_labels(&["result"]),
    counter(
        "trace_spans",
        "Spans of ended claims, by what became of them: exported, or dropped for want of a collector.",
        |status| {
            let spans = status.snapshot.spans;
            spans.map_or_else(Vec::new, |SpanCounts { exported, dropped }| {
                vec![labeled(["exported"], float(exported)), labeled(["dropped"], float(dropped))]
            })
        },
    )
    .with_labels(&["result"]),
    gauge("disk_free", "Free for the work folder; absent where the system does not say.", |status| {
        status.snapshot.host.disk_free.map_or_else(Vec::new, |free| unlabeled(float(free)))
    })
    .with_unit("bytes"),
    gauge("disk_least", "Below this nothing is claimed.", |s| count(s.snapshot.host.disk_least)).with_unit("bytes"),
    gauge("memory_free", "Memory that can be had; absent where the system does not say.", |status| {
        status.snapshot.host.memory_free.map_or_else(Vec::new, |free| unlabeled(float(free)))
    })
    .with_unit("bytes"),
    gauge("memory_least", "Below this nothing is claimed.", |s| count(s.snapshot.host.memory_least)).with_unit("bytes"),
];

fn claim_ends(status: &WorkerStatusReply) -> Vec<Sample> {
    let ends = |source: &SourceStatus| {
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
        .map(|(outcome, reason, many)| labeled([source.name.as_str(), outcome, reason], float(many)))
    };
    status.snapshot.sources.iter().flat_map(ends).collect()
}

/// What nobody of the list has counted came from elsewhere.
fn by_provider(known: [u64; 4], all: u64) -> Vec<Sample> {
    let elsewhere = all.saturating_sub(known.iter().sum());
    let rows = ["aws", "gcp", "azure", "file"].into_iter().zip(known).chain([("elsewhere", elsewhere)]);
    rows.map(|(provider, many)| labeled([provider], float(many))).collect()
}

fn per_source(status: &WorkerStatusReply, value: impl Fn(&SourceStatus) -> f64) -> Vec<Sample> {
    status.snapshot.sources.iter().map(|source| labeled([&source.name], value(source))).collect()
}

fn per_sidecar(status: &WorkerStatusReply, value: impl Fn(&SidecarSummary) -> f64) -> Vec<Sample> {
    status.snapshot.services.iter().map(|service| labeled([&service.name], value(service))).collect()
}

/// The text that `/metrics` answers with.
///
/// # Errors
///
/// None that a String could have.
pub fn text(status: WorkerStatusReply) -> Result<String, fmt::Error> {
    openmetrics::text(status, FAMILIES)
}

/// The names and labels as a Markdown table, as `examples/prometheus/README.md` shows it.
#[must_use]
pub fn markdown() -> String {
    openmetrics::markdown(FAMILIES)
}
