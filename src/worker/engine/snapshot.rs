//! Builds the status of a worker from the rules and the engine.

use std::collections::VecDeque;
use std::sync::Arc;

use journeyman_domain::claim::ClaimEnd;
use journeyman_domain::id::{Run, SourceId};
use journeyman_domain::limits::{HISTORY_WINDOW, RECENT_RESULTS_MAX, STATUS_MEMORY_TIMEOUT};
use journeyman_domain::service_supervisor::ServiceAvailability;
use journeyman_domain::time::Instant;
use journeyman_domain::units::{format_bytes, format_duration};
use journeyman_domain::worker::{ClaimView, ClaimingBlocked, ClaimingState, ExitReason, HostResources};
use journeyman_platform::host::containment::ProcessScope;
use tokio::sync::Semaphore;

use super::alerts::duplicate_id_message;
use super::counters::OutcomeCounts;
use super::event_loop::Engine;
use super::history::EndedClaim;
use super::host_probe::blocking_probe;
use super::running_calls::UncleanedScope;
use super::status::{
    BlockedReason, ClaimHistory, ClaimStatus, HostStatus, LifecycleState, Note, NoticeStatus, PhaseStatus,
    RecentResult, RecoverySummary, SidecarSummary, SourceError, SourceStatus, WorkerStatus,
};
use super::task_view::TaskView;
use super::timeline::{PhaseTiming, Timeline, seconds_between};

/// A source that fails for longer gets a hint.
const TROUBLE_HINT_SECONDS: f64 = 5.0;
/// A clock skew of this much gets a hint.
const CLOCK_HINT_SECONDS: u64 = 30;
/// A source without tasks for this long gets a hint.
const IDLE_HINT_SECONDS: f64 = 600.0;

/// The status, with the process scopes of its claims by position.
#[derive(Debug)]
pub(super) struct StatusSnapshot {
    pub(super) status: WorkerStatus,
    scopes: Vec<Option<ProcessScope>>,
    reading: Arc<Semaphore>,
}

impl StatusSnapshot {
    /// Reads the memory usage, file by file on a blocking thread. What cannot be read in time is left out.
    pub(super) async fn with_memory(self) -> WorkerStatus {
        let Self { mut status, scopes, reading } = self;
        let reading = blocking_probe(&reading, STATUS_MEMORY_TIMEOUT, move || ProcessScope::memory_bytes_of(&scopes));
        for (claim, bytes) in status.claims.iter_mut().zip(reading.await.unwrap_or_default()) {
            claim.memory_bytes = bytes;
        }
        status
    }
}

impl Engine {
    pub(super) fn snapshot(&mut self) -> StatusSnapshot {
        let now = self.now();
        let claiming = self.rules.claiming();
        let (claims, scopes): (Vec<ClaimStatus>, Vec<Option<ProcessScope>>) =
            self.claim_statuses(now).into_iter().unzip();
        let sources = (0..self.sources.len()).map(|index| self.source_status(index, now)).collect::<Vec<_>>();
        let next = self.next_action(claiming, now);
        let last_hour = self.history.recent_outcomes.sum(now);
        let sidecars = self.sidecars.summaries();
        let cleanup_pending: Vec<String> = self.rules.cleanup_pending().map(ToString::to_string).collect();
        let (state, reason, message) = self.claiming_status(&sidecars);
        let mut hints = hints(claiming, &sources, last_hour, &sidecars);
        hints.extend(self.containment.unenforced_limits_hint());
        hints.extend(self.calls.uncleaned.values().map(uncleaned_hint));
        let status = WorkerStatus {
            state,
            blocked_message: message,
            blocked_reason: reason,
            // A pause with a limit ends by itself.
            note: self.current_note(state),
            uptime_seconds: seconds_between(self.history.started_at, now),
            capacity: self.rules.capacity(),
            launched: self.rules.launched(),
            sources,
            claims,
            cleanup_pending,
            last_hour,
            recent_results: self.recent_results(now),
            counts: self.control.counts(),
            host: self.host_status(),
            sidecars,
            activity: self.control.liveness().activity(),
            containment: self.containment.level().as_str().to_owned(),
            notice: self.history.notice.map(|notice| NoticeStatus {
                seconds_ago: seconds_between(notice.at, now),
                last_claim_ended_after_seconds: notice.last_ended_at.map(|end| seconds_between(notice.at, end)),
            }),
            watches: self.control.watch_statuses.get().map(|watches| watches.borrow().clone()).unwrap_or_default(),
            recovered: Some(self.journal.recovery).filter(|recovery| *recovery != RecoverySummary::default()),
            spans: self.config.recorder.as_ref().map(|recorder| recorder.span_counts()),
            next,
            hints,
        };
        StatusSnapshot { status, scopes, reading: Arc::clone(&self.reading_memory) }
    }

    /// Empty while claiming.
    pub(super) fn blocked_message(&self) -> String {
        self.claiming_status(&self.sidecars.summaries()).2.unwrap_or_default()
    }

    /// The operator who gave the current command, or the worker's own reason.
    fn current_note(&self, state: LifecycleState) -> Option<Note> {
        let of_operator = self.history.note.clone().filter(|_| state != LifecycleState::Running);
        let of_worker = || Some(Note { by: "worker".to_owned(), text: self.history.work_dir_lost_reason.clone()? });
        of_operator.or_else(of_worker)
    }

    fn host_status(&self) -> HostStatus {
        let HostResources { disk, memory } = self.resources;
        let min = self.config.min_resources;
        HostStatus { disk_free: disk, disk_min: min.disk, memory_free: memory, memory_min: min.memory }
    }

    fn source_status(&self, index: usize, now: Instant) -> SourceStatus {
        let (view, binding) = (&self.rules.sources()[index], &self.sources[index]);
        let activity = &self.history.sources[index];
        SourceStatus {
            name: binding.name.clone(),
            description: binding.source.describe(),
            state: match view.availability {
                ServiceAvailability::Down if !view.poller.is_polling() => "waiting-for-sidecar",
                ServiceAvailability::Up | ServiceAvailability::Down => view.poller.state_name(now),
            }
            .to_owned(),
            failing: view.poller.is_failing(),
            polled_seconds_ago: activity.polled_at.map(|at| seconds_between(at, now)),
            last_received_seconds_ago: activity.received_at.map(|at| seconds_between(at, now)),
            next_poll_in_seconds: view.next_poll_at(now).map(|at| seconds_between(now, at)),
            blocked_message: self.awaited_polls_message(SourceId::from_index(index), now),
            error: activity.last_refusal.as_ref().map(|refusal| SourceError {
                message: refusal.message.clone(),
                seconds_ago: seconds_between(refusal.at, now),
                consecutive: refusal.consecutive,
            }),
            storage_error: activity.storage.error(now),
            counts: activity.counts,
            durations: activity.durations.clone(),
            foreign_claims: view.foreign_claims,
            quarantined_until: binding.source.quarantined_until().map(|until| until.to_string()),
            clock_skew_seconds: binding.source.clock_skew_seconds(),
            metrics: binding.source.metrics().into_iter().map(|(name, count)| (name.to_owned(), count)).collect(),
        }
    }

    fn claim_statuses(&self, now: Instant) -> Vec<(ClaimStatus, Option<ProcessScope>)> {
        let granted = self.rules.claims().filter(|claim| claim.state.is_granted());
        let mut claims: Vec<(ClaimStatus, Option<ProcessScope>)> = granted
            .map(|claim| {
                let task = self.calls.claims[&claim.claim].task.as_ref();
                (self.claim_status(&claim, now), task.map(|task| task.scope().clone()))
            })
            .collect();
        claims.sort_by(|(one, _), (other, _)| {
            one.lease_left_seconds.partial_cmp(&other.lease_left_seconds).unwrap_or(std::cmp::Ordering::Equal)
        });
        claims
    }

    pub(super) fn claim_status(&self, claim: &ClaimView<'_>, now: Instant) -> ClaimStatus {
        let live = &self.calls.claims[&claim.claim];
        let task = live.task.as_ref();
        ClaimStatus {
            task: claim.run.task.to_string(),
            run: claim.run.run,
            name: live.task_name().map(str::to_owned),
            source: self.source_name(claim.source).to_owned(),
            state: claim.state.state_name().to_owned(),
            progress: task.and_then(TaskView::progress),
            held_seconds: live.granted_at.map_or(0.0, |since| seconds_between(since, now)),
            lease_seconds: claim.state.lease().map(|lease| lease.length().as_secs_f64()),
            lease_left_seconds: claim.state.lease().map(|lease| seconds_between(now, lease.expires_at())),
            reclaimed_seconds_ago: live.reclaimed_at.back().map(|at| seconds_between(*at, now)),
            log_bytes: task.map_or(0, TaskView::log_bytes),
            memory_bytes: None,
            trace_id: live.trace.map(|trace| trace.trace_id().to_string()),
        }
    }

    fn recent_results(&self, now: Instant) -> Vec<RecentResult> {
        let result = |ended: &EndedClaim| RecentResult {
            task: ended.run.task.to_string(),
            run: ended.run.run,
            name: ended.name.clone(),
            source: self.source_name(ended.source).to_owned(),
            outcome: ended.end.to_string(),
            reason: ended.reason.clone(),
            held_seconds: seconds_between(ended.granted_at, ended.ended_at),
            seconds_ago: seconds_between(ended.ended_at, now),
        };
        self.history.ended_claims.iter().rev().take(RECENT_RESULTS_MAX).map(result).collect()
    }

    /// The claims that are held, and those that ended in the last hour.
    pub(super) fn claim_history(&self) -> Vec<ClaimHistory> {
        let now = self.now();
        let entry = |run: &Run, name, end: Option<ClaimEnd>, timeline: &Timeline, reclaimed_at: &VecDeque<Instant>| {
            ClaimHistory {
                task: run.task.to_string(),
                run: run.run,
                name,
                outcome: end.map(|end| end.to_string()),
                progress: None,
                phases: phase_statuses(timeline, now),
                reclaimed_seconds_ago: reclaimed_at.iter().map(|at| seconds_between(*at, now)).collect(),
            }
        };
        let ended = self.history.ended_claims.iter().filter(|ended| now.since(ended.ended_at) <= HISTORY_WINDOW);
        let ended = ended
            .map(|ended| entry(&ended.run, ended.name.clone(), Some(ended.end), &ended.timeline, &ended.reclaimed_at));
        let held = self.calls.claims.values().filter(|live| live.granted_at.is_some());
        let held = held.map(|live| {
            let name = live.task_name().map(str::to_owned);
            let progress = live.task.as_ref().and_then(TaskView::progress).filter(|progress| !progress.is_empty());
            ClaimHistory { progress, ..entry(&live.run, name, None, &live.timeline, &live.reclaimed_at) }
        });
        ended.chain(held).collect()
    }

    fn next_action(&self, claiming: ClaimingState, now: Instant) -> Option<String> {
        let reclaims = self.rules.claims().filter_map(|claim| {
            let at = claim.state.reclaim_due()?;
            Some((at, format!("reclaim {}", claim.run)))
        });
        let polls = self.rules.sources().iter().zip(&self.sources).filter_map(|(source, binding)| {
            let at = source.next_poll_at(now).filter(|_| claiming == ClaimingState::Polling)?;
            Some((at, format!("poll {}", binding.name)))
        });
        let (at, what) = reclaims.chain(polls).min_by_key(|(at, _)| *at)?;
        Some(format!("{what} in {}", format_duration(at.since(now))))
    }

    pub(super) fn source_name(&self, source: SourceId) -> &str {
        &self.sources[source.index()].name
    }
}

impl Engine {
    /// What a worker without tasks waits for before it exits.
    pub(super) fn open_poll_message(&self) -> Option<String> {
        let is_idle = self.rules.claims().next().is_none();
        let polls = self.rules.sources().iter().filter_map(|source| source.poller.poll_sent_at());
        let sent_at = polls.min().filter(|_| is_idle && self.rules.is_stopping())?;
        Some(format!("waiting for the open poll, {}", format_duration(self.now().since(sent_at))))
    }

    /// Why a source does not poll although not every slot has a task.
    fn awaited_polls_message(&self, source: SourceId, now: Instant) -> Option<String> {
        let held = self.rules.awaited_polls(source, now).map(|(holder, slots)| {
            let slots = if slots == 1 { "1 slot is".to_owned() } else { format!("{slots} slots are") };
            format!("{slots} held by the open poll of {}", self.source_name(holder))
        });
        Some(held.collect::<Vec<_>>().join(", ")).filter(|message| !message.is_empty())
    }

    /// The state, and why the worker does not claim, in a word and a sentence.
    fn claiming_status(&self, services: &[SidecarSummary]) -> (LifecycleState, Option<BlockedReason>, Option<String>) {
        let now = self.now();
        let held = || self.rules.claims().filter(|claim| claim.state.is_granted()).count();
        let open_poll = self.open_poll_message();
        let (state, reason, message) = match self.rules.claiming() {
            ClaimingState::Polling => return (LifecycleState::Running, None, None),
            ClaimingState::AtCapacity => {
                let message = match self.rules.cleanup_pending().count() {
                    0 => "every slot is taken".to_owned(),
                    kept => {
                        format!("every slot is taken, {kept} of them by processes that may remain of ended payloads")
                    }
                };
                (LifecycleState::Running, BlockedReason::Full, message)
            }
            ClaimingState::Blocked(blocked) => {
                let (reason, message) = blocked_reason(blocked, now, services);
                let paused = reason == BlockedReason::Paused;
                (if paused { LifecycleState::Paused } else { LifecycleState::Running }, reason, message)
            }
            ClaimingState::Exiting(exit) => {
                let why = if exit == ExitReason::Idle {
                    "idle for `worker.exit_when_idle`"
                } else if exit == ExitReason::WorkDirLost {
                    "the work directory was removed or replaced"
                } else {
                    "reached `worker.max_tasks` or `worker.max_uptime`"
                };
                (LifecycleState::Exiting, BlockedReason::Stopping, format!("{why}; the worker exits"))
            }
            ClaimingState::Draining { deadline, .. } => {
                let message = open_poll.unwrap_or_else(|| tasks_remaining(held(), "released in", deadline, now));
                (LifecycleState::Draining, BlockedReason::Stopping, message)
            }
            ClaimingState::Releasing { deadline } => {
                let message =
                    open_poll.unwrap_or_else(|| tasks_remaining(held(), "the host terminates in", deadline, now));
                (LifecycleState::Releasing, BlockedReason::Stopping, message)
            }
            ClaimingState::Exited => (LifecycleState::Exited, BlockedReason::Stopping, "exited".to_owned()),
        };
        (state, Some(reason), Some(message))
    }
}

pub(super) fn phase_statuses(timeline: &Timeline, now: Instant) -> Vec<PhaseStatus> {
    let status = |lap: &PhaseTiming| PhaseStatus {
        phase: lap.phase.as_str().to_owned(),
        seconds_ago: seconds_between(lap.started_at, now),
        duration_seconds: lap.ended_at.map(|ended| seconds_between(lap.started_at, ended)),
    };
    timeline.phases().iter().map(status).collect()
}

fn blocked_reason(blocked: ClaimingBlocked, now: Instant, services: &[SidecarSummary]) -> (BlockedReason, String) {
    match blocked {
        ClaimingBlocked::Paused { until } => {
            let message = until.map_or_else(
                || "paused until `journeyman resume`".to_owned(),
                |until| format!("paused for {}", format_duration(until.since(now))),
            );
            (BlockedReason::Paused, message)
        }
        ClaimingBlocked::LowDisk { free, min } => {
            (BlockedReason::Disk, below_minimum("disk", free, min, "host.min_free_disk"))
        }
        ClaimingBlocked::LowMemory { free, min } => {
            (BlockedReason::Memory, below_minimum("memory", free, min, "host.min_free_memory"))
        }
        ClaimingBlocked::HostUnhealthy { until } => {
            let probe = until.map_or_else(
                || "is being probed".to_owned(),
                |until| format!("is probed again in {}", format_duration(until.since(now))),
            );
            (BlockedReason::HostUnhealthy, format!("this host could not run a task and {probe}; the log says why"))
        }
        ClaimingBlocked::ServiceDown => {
            (BlockedReason::SidecarDown, unavailable_sidecars(services).collect::<Vec<_>>().join("; "))
        }
    }
}

fn uncleaned_hint(UncleanedScope { run, processes, .. }: &UncleanedScope) -> String {
    let processes = processes.get().map_or("not listed yet", |processes| processes);
    format!(
        "processes of {run} may remain (they survived SIGKILL, or may belong to another task): {processes}; its slot stays \
         taken until they are gone"
    )
}

fn unavailable_sidecars(services: &[SidecarSummary]) -> impl Iterator<Item = String> {
    let absent = services.iter().filter(|service| !service.up);
    absent.map(|service| format!("the sidecar of handler {} is down: {}", service.name, service.message))
}

fn tasks_remaining(tasks: usize, then: &str, at: Option<Instant>, now: Instant) -> String {
    let tasks = format!("{tasks} {} left", if tasks == 1 { "task" } else { "tasks" });
    at.map_or_else(|| tasks.clone(), |at| format!("{tasks}, {then} {}", format_duration(at.since(now))))
}

fn below_minimum(what: &str, free: u64, least: u64, key: &str) -> String {
    format!("{what}: {} free, less than the {} of `{key}`", format_bytes(free), format_bytes(least))
}

fn hints(
    claiming: ClaimingState,
    sources: &[SourceStatus],
    hour: OutcomeCounts,
    services: &[SidecarSummary],
) -> Vec<String> {
    let mut hints = Vec::new();
    // The status line has it already.
    if claiming != ClaimingState::Blocked(ClaimingBlocked::ServiceDown) {
        hints.extend(unavailable_sidecars(services));
    }
    for source in sources {
        if let Some(ahead) = source.clock_skew_seconds.filter(|ahead| ahead.unsigned_abs() >= CLOCK_HINT_SECONDS) {
            let (far, way) = (ahead.unsigned_abs(), if ahead > 0 { "ahead of" } else { "behind" });
            hints.push(format!(
                "{}: this host's clock is {far} s {way} the service's; synchronise it by NTP",
                source.name
            ));
        }
        if let Some(until) = &source.quarantined_until {
            let name = &source.name;
            hints.push(format!("{name}: the queue has this worker in quarantine until {until} and gives it no tasks"));
        }
        if source.foreign_claims > 0 {
            hints.push(format!("{}: {}", source.name, duplicate_id_message(source.foreign_claims)));
        }
        if let Some(error) =
            source.error.as_ref().filter(|error| error.consecutive > 1 || error.seconds_ago > TROUBLE_HINT_SECONDS)
        {
            hints.push(format!("{}: {} consecutive refusals: {}", source.name, error.consecutive, error.message));
        }
        if let Some(error) = &source.storage_error {
            let (name, failures, message) = (&source.name, error.consecutive, &error.message);
            let since = format_duration(std::time::Duration::from_secs_f64(error.seconds_ago));
            hints.push(format!("{name}: cannot store artifacts since {since}, {failures} failed uploads: {message}"));
        }
        let dry = source.last_received_seconds_ago.unwrap_or(f64::MAX) > IDLE_HINT_SECONDS;
        if claiming == ClaimingState::Polling && !source.failing && source.polled_seconds_ago.is_some() && dry {
            hints.push(format!("{}: polls return no tasks; none may be pending for this worker", source.name));
        }
    }
    let dropped = journeyman_platform::log::dropped_lines();
    if dropped > 0 {
        hints.push(format!("{dropped} lines of this worker's log were dropped: its reader is too slow"));
    }
    if hour.lost > 0 {
        hints.push(format!("{} claims were lost in the last hour; the log says why", hour.lost));
    }
    hints
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::handler::Context;
    use crate::handler::log::{LogLimits, TaskLog};
    use crate::handler::process::{Launch, RunningProcess};
    use journeyman_platform::host::clock::Clock;

    #[tokio::test]
    async fn b7_a_hint_lists_the_processes_that_may_remain() {
        let folder = tempfile::tempdir().unwrap();
        let log = TaskLog::new(folder.path().join("log"), LogLimits::default());
        let (definition, workdir) = (crate::task::Definition::default(), folder.path().join("task"));
        let (context, _cancel) = Context::without_claim("task", definition, workdir, log, Clock::boot()).unwrap();
        let argv = ["/bin/sleep", "600"].map(str::to_owned);
        let running = RunningProcess::start(Launch::new(&argv, &std::iter::empty().collect(), &context)).await.unwrap();
        // The kernel gives the process its name just after it has told the caller that the program runs.
        let name = format!("/proc/{}/comm", running.group());
        while std::fs::read_to_string(&name).unwrap().trim() != "sleep" {}
        let uncleaned = UncleanedScope::new(context.task().run.clone(), context.scope().clone());
        assert!(uncleaned_hint(&uncleaned).contains("not listed yet"));
        uncleaned.processes.set(uncleaned.scope.describe_processes()).unwrap();
        let hint = uncleaned_hint(&uncleaned);
        assert!(hint.contains(&format!("another task): {} \"sleep\"; its slot", running.group())), "{hint}");
    }
}
