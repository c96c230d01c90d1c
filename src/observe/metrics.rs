//! A worker's state as OpenMetrics.
//!
//! Nothing is counted here: every sample is read from the same view that `journeyman status` shows. All series of a source
//! exist from the start, at zero, so that a rate is right from the first event on; labels hold names of the configuration
//! and words of a fixed list, and nothing that a task brings.

use std::fmt;

use super::family::{self, Family, Kind, Sample, count, flag, float, labeled, one};
use crate::control::Status;
use crate::worker::record::Spans;
use crate::worker::view::{Blocked, Service, Source, State};

type Read = fn(&Status) -> Vec<Sample>;

const fn gauge(name: &'static str, help: &'static str, read: Read) -> Family<Status> {
    Family::new(Kind::Gauge, name, help, read)
}

const fn counter(name: &'static str, help: &'static str, read: Read) -> Family<Status> {
    Family::new(Kind::Counter, name, help, read)
}

const fn info(name: &'static str, help: &'static str, read: Read) -> Family<Status> {
    Family::new(Kind::Info, name, help, read)
}

const SOURCE: &[&str] = &["source"];
const HANDLER: &[&str] = &["handler"];
const PROVIDER: &[&str] = &["provider"];

const FAMILIES: &[Family<Status>] = &[
    info("build", "The version that runs.", |status| vec![labeled([&status.version], 1.0)]).by(&["version"]),
    info("worker", "Which worker this is, and how it holds payloads together.", |status| {
        vec![labeled([&status.id, &status.group, &status.view.containment], 1.0)]
    })
    .by(&["worker_id", "worker_group", "containment"]),
    gauge("uptime", "Since the worker started.", |status| one(status.view.uptime_seconds)).in_unit("seconds"),
    gauge("state", "1 for the state that the worker is in.", |status| {
        State::ALL.map(|state| labeled([state.as_str()], flag(status.view.state == state))).into()
    })
    .by(&["state"]),
    gauge("guard_blocked", "1 for the reason why nothing is claimed; all 0 where claims are asked for.", |status| {
        Blocked::ALL.map(|why| labeled([why.as_str()], flag(status.view.blocked == Some(why)))).into()
    })
    .by(&["reason"]),
    gauge("capacity", "How many tasks run at once at most.", |status| one(status.view.capacity)),
    gauge("slots_asked", "Slots that wait in polls.", |status| one(status.view.asked)),
    gauge("tasks_running", "Claims that are held.", |status| {
        let held = |source: &Source| status.view.tasks.iter().filter(|task| task.source == source.name).count();
        each(status, |source| float(held(source) as u64))
    })
    .by(SOURCE),
    gauge("lease_left_min", "The shortest lease that is held, until it is given up; absent where none is.", |status| {
        let left = status.view.tasks.iter().filter_map(|task| task.lease_left_seconds);
        left.reduce(f64::min).map_or_else(Vec::new, one)
    })
    .in_unit("seconds"),
    counter(
        "tasks",
        "What became of claims: completed, failed, exception with its reason, superseded (the queue had an \
        outcome already), unconfirmed (the report was not answered), lost (given up without a report).",
        tasks,
    )
    .by(&["source", "outcome", "reason"]),
    counter("claims", "Claims granted.", |status| each(status, |source| float(source.counts.claims))).by(SOURCE),
    counter("claims_refused", "Claim requests that were refused or failed.", |status| {
        each(status, |source| float(source.counts.claims_refused))
    })
    .by(SOURCE),
    counter("reclaims", "Leases extended.", |status| each(status, |source| float(source.counts.reclaims))).by(SOURCE),
    counter("reclaim_failures", "Attempts to extend a lease that were refused or failed.", |status| {
        each(status, |source| float(source.counts.reclaims_failed))
    })
    .by(SOURCE),
    counter("polls", "Polls answered.", |status| each(status, |source| float(source.counts.polls))).by(SOURCE),
    counter("poll_failures", "Polls that were refused or failed.", |status| {
        each(status, |source| float(source.counts.polls_failed))
    })
    .by(SOURCE),
    counter("source_events", "What a source of requests has counted besides claims.", |status| {
        let of = |source: &Source| {
            let tallies = source.tallies.iter();
            tallies.map(|(event, count)| labeled([&source.name, event], float(*count))).collect::<Vec<_>>()
        };
        status.view.sources.iter().flat_map(of).collect()
    })
    .by(&["source", "event"]),
    counter(
        "activity_reports",
        "Activity reports that the broker has confirmed; absent where no controller is told.",
        |status| status.view.activity.iter().flat_map(|activity| one(float(activity.reports))).collect(),
    ),
    counter("activity_failures", "How often there was no way to report activity.", |status| {
        status.view.activity.iter().flat_map(|activity| one(float(activity.failures))).collect()
    }),
    gauge("activity_up", "1 where activity can be reported.", |status| {
        status
            .view
            .activity
            .iter()
            .flat_map(|activity| one(flag(activity.error.is_none() && activity.reports > 0)))
            .collect()
    }),
    gauge("source_up", "1 where the source has answered, and its last answers were no refusals.", |status| {
        each(status, |source| flag(source.polled_seconds_ago.is_some() && !source.in_trouble))
    })
    .by(SOURCE),
    counter("source_errors", "Refusals and failures of opening, polling, claiming and recovering.", |status| {
        each(status, |source| float(source.counts.refusals))
    })
    .by(SOURCE),
    gauge("source_poll_age", "Since the source last answered a poll; absent before the first answer.", |status| {
        let polled = status.view.sources.iter().filter_map(|source| Some((source, source.polled_seconds_ago?)));
        polled.map(|(source, age)| labeled([&source.name], age)).collect()
    })
    .by(SOURCE)
    .in_unit("seconds"),
    gauge("service_up", "1 where what a handler keeps there beside its tasks can take them; absent where none does.", |status| {
        services(status, |service| flag(service.up))
    })
    .by(HANDLER),
    counter("service_restarts", "How often what a handler keeps there beside its tasks was started again.", |status| {
        services(status, |service| float(service.restarts))
    })
    .by(HANDLER),
    counter("delete_failures", "Attempts to delete a message that failed.", |s| count(s.view.counts.deletes_failed)),
    counter("high_dequeue_counts", "Messages received more often than `worker.dequeue_alert`.", |status| {
        count(status.view.counts.dequeue_alerts)
    }),
    counter("undecodable", "Messages and claims that could not be read.", |s| count(s.view.counts.undecodable)),
    counter("overlaps", "Claims whose payload may have run beside another worker's.", |status| {
        count(status.view.counts.overlaps_possible)
    }),
    counter("occupied", "Claims whose payload could not be proven gone.", |s| count(s.view.counts.occupied)),
    counter("artifacts", "Artifacts, logs included, by what became of them: stored or failed.", |status| {
        let counts = status.view.counts;
        vec![labeled(["stored"], float(counts.artifacts)), labeled(["failed"], float(counts.artifacts_failed))]
    })
    .by(&["result"]),
    counter("log", "Bytes of the logs of tasks.", |status| {
        let running: u64 = status.view.tasks.iter().map(|task| task.log_bytes).sum();
        count(status.view.counts.log_bytes + running)
    })
    .in_unit("bytes"),
    counter("spot_notices", "Notices that the host goes, by where they came from: aws, gcp, azure, a file, or elsewhere.", |status| {
        let counts = status.view.counts;
        by_provider(
            [counts.notices_aws, counts.notices_gcp, counts.notices_azure, counts.notices_file],
            counts.notices,
        )
    })
    .by(PROVIDER),
    counter("spot_hints", "Hints that the host may have to go, by where they came from.", |status| {
        let counts = status.view.counts;
        by_provider([counts.hints_aws, counts.hints_gcp, counts.hints_azure, counts.hints_file], counts.hints)
    })
    .by(PROVIDER),
    gauge("spot_watch_up", "1 while what would say that the host goes can be asked or read, 0 while it cannot; absent where nothing is watched.", |status| {
        let up = |spot: &crate::worker::view::Spot| if spot.heard { 1.0 } else { 0.0 };
        status.view.watches.iter().map(|spot| labeled([spot.provider.as_str()], up(spot))).collect()
    })
    .by(PROVIDER),
    gauge("spot_reaction", "From the first notice to the latest end of a claim since; absent before one.", |status| {
        let end = status.view.notice.and_then(|notice| notice.to_last_end_seconds);
        end.map_or_else(Vec::new, one)
    })
    .in_unit("seconds"),
    counter("recovered", "Runs that an earlier life of this worker held, by what became of them: killed (had processes left), reported, handed-back or forgotten.", |status| {
        let left = status.view.recovered.unwrap_or_default();
        let ends = [("killed", left.killed), ("reported", left.reported), ("handed-back", left.handed_back)];
        let ends = ends.into_iter().chain([("forgotten", left.forgotten)]);
        ends.map(|(end, many)| labeled([end], float(many as u64))).collect()
    })
    .by(&["end"]),
    gauge("journal_damage", "Faults found in the journal of the worker's earlier life.", |status| {
        count(status.view.recovered.unwrap_or_default().damage as u64)
    }),
    counter("host_faults", "Times the host was found unable to run tasks.", |s| count(s.view.counts.host_faults)),
    counter("panics", "Panics of handlers and adapters.", |status| count(status.view.counts.panics)),
    counter("config_reloads", "Configurations read again, by what became of them: taken-over or refused.", |status| {
        let counts = status.view.counts;
        vec![labeled(["taken-over"], float(counts.reloads)), labeled(["refused"], float(counts.reloads_refused))]
    })
    .by(&["result"]),
    counter(
        "trace_spans",
        "Spans of ended claims, by what became of them: exported, or dropped for want of a collector.",
        |status| {
            let spans = status.view.spans;
            spans.map_or_else(Vec::new, |Spans { exported, dropped }| {
                vec![labeled(["exported"], float(exported)), labeled(["dropped"], float(dropped))]
            })
        },
    )
    .by(&["result"]),
    gauge("disk_free", "Free for the work folder; absent where the system does not say.", |status| {
        status.view.host.disk_free.map_or_else(Vec::new, |free| one(float(free)))
    })
    .in_unit("bytes"),
    gauge("disk_least", "Below this nothing is claimed.", |s| count(s.view.host.disk_least)).in_unit("bytes"),
    gauge("memory_free", "Memory that can be had; absent where the system does not say.", |status| {
        status.view.host.memory_free.map_or_else(Vec::new, |free| one(float(free)))
    })
    .in_unit("bytes"),
    gauge("memory_least", "Below this nothing is claimed.", |s| count(s.view.host.memory_least)).in_unit("bytes"),
];

fn tasks(status: &Status) -> Vec<Sample> {
    let ends = |source: &Source| {
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
    status.view.sources.iter().flat_map(ends).collect()
}

/// What nobody of the list has counted came from elsewhere.
fn by_provider(known: [u64; 4], all: u64) -> Vec<Sample> {
    let elsewhere = all.saturating_sub(known.iter().sum());
    let rows = ["aws", "gcp", "azure", "file"].into_iter().zip(known).chain([("elsewhere", elsewhere)]);
    rows.map(|(provider, many)| labeled([provider], float(many))).collect()
}

fn each(status: &Status, value: impl Fn(&Source) -> f64) -> Vec<Sample> {
    status.view.sources.iter().map(|source| labeled([&source.name], value(source))).collect()
}

fn services(status: &Status, value: impl Fn(&Service) -> f64) -> Vec<Sample> {
    status.view.services.iter().map(|service| labeled([&service.name], value(service))).collect()
}

/// The text that `/metrics` answers with.
///
/// # Errors
///
/// None that a String could have.
pub fn text(status: Status) -> Result<String, fmt::Error> {
    family::text(status, FAMILIES)
}

/// The names and labels as a Markdown table, as `examples/prometheus/README.md` shows it.
#[must_use]
pub fn markdown() -> String {
    family::markdown(FAMILIES)
}
