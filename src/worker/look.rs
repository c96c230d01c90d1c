//! The view of a worker, put together from what the rules say and what the engine remembers.

use crate::domain::claim::{End, Loss};
use crate::domain::id::SourceId;
use crate::domain::outcome::{Outcome, Reason};
use crate::domain::poll::Ready;
use crate::domain::service::Serving;
use crate::domain::time::Instant;
use crate::domain::worker::{ClaimView, Claiming, Exit, Hold, Room};
use crate::host::containment::Enclosure;
use crate::host::notice::{Hearing, Sight};

use super::alerts::namesake;
use super::counters::SourceCounts;
use super::engine::Engine;
use super::view::{Blocked, Host, Next, Note, Notice, Outcomes, Service, Source, SourceError, Spot, State, Task, View};

/// How long a source may be in trouble before a hint says so.
const TROUBLE_HINT_SECONDS: f64 = 5.0;
/// A clock that is so far from a service's is worth a hint.
const CLOCK_HINT_SECONDS: u64 = 30;
/// A source in which nothing was found for so long is worth a hint.
const DRY_HINT_SECONDS: f64 = 600.0;

/// What is remembered of a source for those who look.
#[derive(Debug, Default)]
pub(super) struct Track {
    polled: Option<Instant>,
    brought: Option<Instant>,
    refused: Option<Refused>,
    pub(super) counts: SourceCounts,
}

/// The first notice that the host goes, and the latest end of a claim since.
#[derive(Debug, Clone, Copy)]
pub(super) struct Noticed {
    pub(super) at: Instant,
    pub(super) last_end: Option<Instant>,
}

#[derive(Debug)]
struct Refused {
    at: Instant,
    text: String,
    in_a_row: u32,
}

impl Track {
    /// A poll was answered, with so many entries.
    pub(super) fn polled(&mut self, now: Instant, entries: usize) {
        self.counts.polls += 1;
        self.polled = Some(now);
        self.refused = None;
        if entries > 0 {
            self.brought = Some(now);
        }
    }

    /// Something was refused.
    pub(super) fn refused(&mut self, now: Instant, text: &str) {
        self.counts.refusals += 1;
        let in_a_row = self.refused.as_ref().map_or(0, |refused| refused.in_a_row) + 1;
        self.refused = Some(Refused { at: now, text: text.to_owned(), in_a_row });
    }
}

/// How a worker looks, and what the processes of its tasks are in, by their place in the list.
#[derive(Debug)]
pub(super) struct Looked {
    pub(super) view: View,
    enclosures: Vec<Option<Enclosure>>,
}

impl Looked {
    /// With what the tasks take up. That is read file by file, and nothing else waits for it meanwhile.
    pub(super) async fn weighed(self) -> View {
        let Self { mut view, enclosures } = self;
        let bare = view.clone();
        let weighing = tokio::task::spawn_blocking(move || {
            for (task, bytes) in view.tasks.iter_mut().zip(Enclosure::memories(&enclosures)) {
                task.memory_bytes = bytes;
            }
            view
        });
        weighing.await.unwrap_or(bare)
    }
}

impl Engine {
    /// How it looks now.
    pub(super) fn look(&mut self) -> Looked {
        let now = self.clock.now();
        let claiming = self.rules.claiming();
        let (tasks, enclosures): (Vec<Task>, Vec<Option<Enclosure>>) = self.tasks(now).into_iter().unzip();
        let sources = self.sources(now);
        let next = self.next(claiming, now);
        let last_hour = self.hour.sum(now);
        let services = self.besides.view();
        let watches = self.spot(now);
        let kept = self.kept();
        let mut hints = hints(claiming, &sources, last_hour, &services);
        hints.extend(watches.iter().filter_map(Spot::hint));
        hints.extend(kept_hint(&kept));
        hints.extend(self.containment().hint());
        hints.extend(aside_hint(self.aside));
        let view = View {
            state: state(claiming),
            not_claiming: not_claiming(claiming, tasks.len(), kept.len(), now, &services),
            blocked: blocked(claiming),
            // What was paused for a while goes on by itself.
            note: self.note_for(claiming),
            uptime_seconds: seconds(self.began, now),
            capacity: self.rules.capacity(),
            asked: self.rules.sources().map(|source| u32::try_from(source.asked).unwrap_or(u32::MAX)).sum(),
            sources,
            tasks,
            kept,
            last_hour,
            counts: self.control.counts(),
            host: self.host(),
            services,
            activity: self.control.pulse().told(),
            containment: self.containment().level().as_str().to_owned(),
            notice: self.noticed.map(|noticed| Notice {
                seconds_ago: seconds(noticed.at, now),
                to_last_end_seconds: noticed.last_end.map(|end| seconds(noticed.at, end)),
            }),
            watches,
            recovered: self.earlier.view(),
            spans: self.settings.recorder.as_ref().map(|recorder| recorder.counts()),
            next,
            hints,
        };
        Looked { view, enclosures }
    }

    /// Why nothing is claimed, in words; empty where claims are asked for.
    pub(super) fn why_not_claiming(&self) -> String {
        let (claiming, now) = (self.rules.claiming(), self.clock.now());
        not_claiming(claiming, self.live.len(), self.kept().len(), now, &self.besides.view()).unwrap_or_default()
    }

    /// Runs that are over, and whose slots wait.
    fn kept(&self) -> Vec<String> {
        let over = self.kept.iter().filter(|(claim, _)| !self.live.contains_key(claim));
        over.map(|(_, run)| run.to_string()).collect()
    }

    fn spot(&self, now: Instant) -> Vec<Spot> {
        let Some(sights) = self.control.sights.get() else { return Vec::new() };
        let seen = |Sight { origin, hearing, since }: &Sight| {
            let provider = origin.as_str().to_owned();
            let (heard, trouble) = match hearing {
                Hearing::Unknown => (false, None),
                Hearing::Heard => (true, None),
                Hearing::Missed(trouble) => (false, Some(trouble.clone())),
            };
            Spot { provider, heard, trouble, seconds: seconds(*since, now) }
        };
        sights.borrow().iter().map(seen).collect()
    }

    /// Who ordered what it does, or what made it do so.
    fn note_for(&self, claiming: Claiming) -> Option<Note> {
        let ordered = self.note.clone().filter(|_| state(claiming) != State::Running);
        let lost = || Some(Note { by: "the worker itself".to_owned(), text: self.said_lost.clone()? });
        ordered.or_else(lost)
    }

    fn host(&self) -> Host {
        let Room { disk, memory } = self.room;
        let least = self.settings.least;
        Host { disk_free: disk, disk_least: least.disk, memory_free: memory, memory_least: least.memory }
    }

    fn sources(&self, now: Instant) -> Vec<Source> {
        let looked = self.rules.sources().zip(&self.feeds).zip(&self.tracks);
        let look = |((view, feed), track): ((crate::domain::worker::SourceView<'_>, &super::Feed), &Track)| Source {
            name: feed.name.clone(),
            what: feed.source.describe(),
            step: match view.serving {
                Serving::Down if !view.poller.polling() => "waiting for its service",
                Serving::Up | Serving::Down => view.poller.step(now),
            }
            .to_owned(),
            in_trouble: view.poller.in_trouble(),
            polled_seconds_ago: track.polled.map(|at| seconds(at, now)),
            brought_seconds_ago: track.brought.map(|at| seconds(at, now)),
            next_poll_in_seconds: match view.poller.ready(now) {
                Ready::At(at) if view.serving == Serving::Up => Some(seconds(now, at)),
                Ready::At(_) | Ready::Open | Ready::Recover | Ready::Poll(_) | Ready::Busy => None,
            },
            error: track.refused.as_ref().map(|refused| SourceError {
                text: refused.text.clone(),
                seconds_ago: seconds(refused.at, now),
                in_a_row: refused.in_a_row,
            }),
            counts: track.counts,
            others: view.others,
            clock_ahead_seconds: feed.source.clock_ahead(),
            tallies: feed.source.tallies().into_iter().map(|(name, count)| (name.to_owned(), count)).collect(),
        };
        looked.map(look).collect()
    }

    fn tasks(&self, now: Instant) -> Vec<(Task, Option<Enclosure>)> {
        let granted = self.rules.claims().filter(|claim| claim.machine.granted());
        let mut tasks: Vec<(Task, Option<Enclosure>)> = granted
            .map(|claim| {
                let job = self.live.get(&claim.claim).and_then(|live| live.job.as_ref());
                (self.task(&claim, now), job.map(|job| job.context.enclosure().clone()))
            })
            .collect();
        tasks.sort_by(|(one, _), (other, _)| {
            one.lease_left_seconds.partial_cmp(&other.lease_left_seconds).unwrap_or(std::cmp::Ordering::Equal)
        });
        tasks
    }

    /// What a list shows of one claim.
    pub(super) fn task(&self, claim: &ClaimView<'_>, now: Instant) -> Task {
        let live = self.live.get(&claim.claim);
        let context = live.and_then(|live| live.job.as_ref()).map(|job| &job.context);
        Task {
            task: claim.run.task.to_string(),
            run: claim.run.run,
            source: self.source_name(claim.source).to_owned(),
            step: claim.machine.step().to_owned(),
            progress: context.and_then(|context| context.progress()),
            held_seconds: live.and_then(|live| live.since).map_or(0.0, |since| seconds(since, now)),
            lease_seconds: claim.machine.lease().map(|lease| {
                let leased = live.and_then(|live| live.leased).unwrap_or(now);
                seconds(leased, lease.deadline())
            }),
            lease_left_seconds: claim.machine.lease().map(|lease| seconds(now, lease.abandon_at())),
            reclaimed_seconds_ago: live.and_then(|live| live.reclaimed).map(|at| seconds(at, now)),
            log_bytes: context.map_or(0, |context| context.log().bytes()),
            memory_bytes: None,
            trace_id: live.and_then(|live| live.trace).map(|trace| trace.trace_id().to_string()),
        }
    }

    fn next(&self, claiming: Claiming, now: Instant) -> Option<Next> {
        let reclaims = self.rules.claims().filter_map(|claim| {
            let at = claim.machine.next_reclaim()?;
            Some((at, format!("reclaim {}", claim.run)))
        });
        let polls = self.rules.sources().zip(&self.feeds).filter_map(|(source, feed)| match source.poller.ready(now) {
            Ready::At(at) if claiming == Claiming::Asking && source.serving == Serving::Up => {
                Some((at, format!("poll {}", feed.name)))
            }
            Ready::At(_) | Ready::Open | Ready::Recover | Ready::Poll(_) | Ready::Busy => None,
        });
        let own = match claiming {
            Claiming::Held(Hold::Paused { until: Some(at) }) => Some((at, "resume".to_owned())),
            Claiming::Held(Hold::Unfit { until: Some(at) }) => Some((at, "look at the host".to_owned())),
            Claiming::Draining { deadline: Some(at), .. } => Some((at, "hand back what still runs".to_owned())),
            Claiming::HandingBack { deadline: Some(at) } => Some((at, "the host goes".to_owned())),
            Claiming::Asking
            | Claiming::Full
            | Claiming::Held(_)
            | Claiming::Leaving(_)
            | Claiming::Draining { deadline: None, .. }
            | Claiming::HandingBack { deadline: None }
            | Claiming::Exited => None,
        };
        let (at, what) = reclaims.chain(polls).chain(own).min_by_key(|(at, _)| *at)?;
        Some(Next { what, in_seconds: seconds(now, at) })
    }

    pub(super) fn source_name(&self, source: SourceId) -> &str {
        self.feeds.get(usize::from(source.0)).map_or("?", |feed| feed.name.as_str())
    }

    /// Counts something of a source.
    pub(super) fn tally(&mut self, feed: usize, count: impl FnOnce(&mut SourceCounts)) {
        if let Some(track) = self.tracks.get_mut(feed) {
            count(&mut track.counts);
        }
    }

    pub(super) fn count_end(&mut self, feed: usize, end: End) {
        let now = self.clock.now();
        self.tally(feed, |counts| counts.ends.count(end));
        if let Some(noticed) = &mut self.noticed {
            noticed.last_end = Some(now);
        }
        self.hour.count(now, |outcomes: &mut Outcomes| match end {
            End::Reported(Outcome::Completed) => outcomes.completed += 1,
            End::Reported(Outcome::Failed) => outcomes.failed += 1,
            End::Reported(Outcome::Exception(Reason::WorkerShutdown)) => outcomes.handed_back += 1,
            End::Reported(Outcome::Exception(_)) => outcomes.exceptions += 1,
            End::Superseded(_) | End::Lost(Loss::Canceled) => outcomes.superseded += 1,
            End::Unreportable(_) | End::Unconfirmed { .. } | End::Lost(_) => outcomes.lost += 1,
            End::NotGranted => {}
        });
    }
}

const fn state(claiming: Claiming) -> State {
    match claiming {
        Claiming::Asking
        | Claiming::Full
        | Claiming::Held(
            Hold::Disk { .. } | Hold::Memory { .. } | Hold::Unfit { .. } | Hold::Trial { .. } | Hold::Service,
        ) => State::Running,
        Claiming::Held(Hold::Paused { .. }) => State::Paused,
        Claiming::Leaving(_) => State::Leaving,
        Claiming::Draining { .. } => State::Draining,
        Claiming::HandingBack { .. } => State::HandingBack,
        Claiming::Exited => State::Exited,
    }
}

const fn blocked(claiming: Claiming) -> Option<Blocked> {
    Some(match claiming {
        Claiming::Asking => return None,
        Claiming::Full => Blocked::Full,
        Claiming::Held(Hold::Paused { .. }) => Blocked::Paused,
        Claiming::Held(Hold::Disk { .. }) => Blocked::Disk,
        Claiming::Held(Hold::Memory { .. }) => Blocked::Memory,
        Claiming::Held(Hold::Unfit { .. } | Hold::Trial { .. }) => Blocked::Unfit,
        Claiming::Held(Hold::Service) => Blocked::Service,
        Claiming::Leaving(_) => Blocked::Leaving,
        Claiming::Draining { .. } => Blocked::Draining,
        Claiming::HandingBack { .. } => Blocked::HandingBack,
        Claiming::Exited => Blocked::Exited,
    })
}

fn not_claiming(claiming: Claiming, tasks: usize, kept: usize, now: Instant, services: &[Service]) -> Option<String> {
    Some(match claiming {
        Claiming::Asking => return None,
        Claiming::Full if kept > 0 => {
            format!("every slot is taken, {kept} of them by what may be left of payloads that are over")
        }
        Claiming::Full => "every slot is taken".to_owned(),
        Claiming::Held(Hold::Paused { until: None }) => "paused until `journeyman resume`".to_owned(),
        Claiming::Held(Hold::Paused { until: Some(until) }) => format!("paused for {}", span(until.since(now))),
        Claiming::Held(Hold::Disk { free, least }) => short("disk", free, least, "host.min_free_disk"),
        Claiming::Held(Hold::Memory { free, least }) => short("memory", free, least, "host.min_free_memory"),
        Claiming::Held(Hold::Trial { tasks }) => {
            format!(
                "a task found this host at fault; it is tried with {tasks} at a time, and one more for each that works"
            )
        }
        Claiming::Held(Hold::Unfit { until: None }) => {
            "this host could not run a task, and is being looked at; the log says why".to_owned()
        }
        Claiming::Held(Hold::Unfit { until: Some(until) }) => {
            format!("this host could not run a task; it is looked at in {}; the log says why", span(until.since(now)))
        }
        Claiming::Held(Hold::Service) => absent(services).collect::<Vec<_>>().join("; "),
        Claiming::Leaving(Exit::Idle) => "there was nothing to do for `worker.exit_when_idle`; it leaves".to_owned(),
        Claiming::Leaving(Exit::FolderLost) => "its work folder was removed or replaced; it leaves".to_owned(),
        Claiming::Leaving(_) => "`worker.max_tasks` or `worker.max_uptime` is reached; it leaves".to_owned(),
        Claiming::Draining { deadline, .. } => left(tasks, "handed back in", deadline, now),
        Claiming::HandingBack { deadline } => left(tasks, "the host goes in", deadline, now),
        Claiming::Exited => "exited".to_owned(),
    })
}

/// What to do about slots that wait.
fn kept_hint(kept: &[String]) -> Option<String> {
    let first = kept.first()?;
    let others = match kept.len() {
        1 => String::new(),
        many => format!(" and {} others", many - 1),
    };
    Some(format!(
        "processes of {first}{others} may still be there (they outlived a kill, or may be another task's): no task is run in their place until they are gone; \
         the log names what is known of them, and `host.unproven` says what is done about it"
    ))
}

/// What to do about what could not be removed.
fn aside_hint(aside: usize) -> Option<String> {
    (aside > 0).then(|| {
        format!(
            "what earlier tasks left could not be removed at the start, {aside} times, and lies in the work folder as \
             `tasks.left-N`: end what still writes there, and remove it as its owner"
        )
    })
}

/// The services that are not there, with why.
fn absent(services: &[Service]) -> impl Iterator<Item = String> {
    let absent = services.iter().filter(|service| !service.up);
    absent.map(|service| format!("the service of handler {} is not there: {}", service.name, service.what))
}

fn left(tasks: usize, then: &str, at: Option<Instant>, now: Instant) -> String {
    let tasks = format!("{tasks} {} left", if tasks == 1 { "task" } else { "tasks" });
    at.map_or_else(|| tasks.clone(), |at| format!("{tasks}, {then} {}", span(at.since(now))))
}

fn short(what: &str, free: u64, least: u64, key: &str) -> String {
    format!("{what}: {} free, less than the {} of `{key}`", bytes(free), bytes(least))
}

fn hints(claiming: Claiming, sources: &[Source], hour: Outcomes, services: &[Service]) -> Vec<String> {
    let mut hints = Vec::new();
    // Where it holds up every source, it is said already.
    if claiming != Claiming::Held(Hold::Service) {
        hints.extend(absent(services));
    }
    for source in sources {
        if let Some(ahead) = source.clock_ahead_seconds.filter(|ahead| ahead.unsigned_abs() >= CLOCK_HINT_SECONDS) {
            let (far, way) = (ahead.unsigned_abs(), if ahead > 0 { "ahead of" } else { "behind" });
            hints.push(format!(
                "{}: this host's clock is {far} s {way} the service's; let it be set by NTP",
                source.name
            ));
        }
        if source.others > 0 {
            hints.push(format!("{}: {}", source.name, namesake(source.others)));
        }
        if let Some(error) =
            source.error.as_ref().filter(|error| error.in_a_row > 1 || error.seconds_ago > TROUBLE_HINT_SECONDS)
        {
            hints.push(format!("{}: refused {} times in a row: {}", source.name, error.in_a_row, error.text));
        }
        let dry = source.brought_seconds_ago.unwrap_or(f64::MAX) > DRY_HINT_SECONDS;
        if claiming == Claiming::Asking && !source.in_trouble && source.polled_seconds_ago.is_some() && dry {
            hints.push(format!("{}: polls are answered and empty; nothing may be pending for it", source.name));
        }
    }
    let dropped = crate::observe::log::dropped();
    if dropped > 0 {
        hints.push(format!("{dropped} lines of this worker's log were dropped: whoever reads it is too slow"));
    }
    if hour.lost > 0 {
        hints.push(format!("{} claims were lost in the last hour; the log says why", hour.lost));
    }
    hints
}

pub(super) fn seconds(from: Instant, to: Instant) -> f64 {
    (to.since(from).as_secs_f64() * 1000.0).round() / 1000.0
}

/// A span for a reader.
#[must_use]
pub fn span(span: std::time::Duration) -> String {
    let secs = span.as_secs();
    match (secs / 3600, secs / 60 % 60, secs % 60) {
        (0, 0, secs) => format!("{secs}s"),
        (0, minutes, secs) => format!("{minutes}m{secs:02}s"),
        (hours, minutes, _) => format!("{hours}h{minutes:02}m"),
    }
}

/// An amount of bytes for a reader.
#[must_use]
pub fn bytes(bytes: u64) -> String {
    const UNITS: [(&str, u64); 4] = [("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)];
    for (unit, size) in UNITS {
        if bytes >= size {
            let tenths = u128::from(bytes) * 10 / u128::from(size);
            return format!("{}.{} {unit}", tenths / 10, tenths % 10);
        }
    }
    format!("{bytes} B")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spans_and_sizes_are_short() {
        let shown = |secs| span(std::time::Duration::from_secs(secs));
        assert_eq!([shown(4), shown(201), shown(11_520)], ["4s", "3m21s", "3h12m"]);
        assert_eq!([bytes(17), bytes(3 << 30), bytes((1 << 20) + (1 << 19))], ["17 B", "3.0 GiB", "1.5 MiB"]);
        assert_eq!([bytes(100 << 10), bytes(252 << 10), bytes(u64::MAX)], ["100.0 KiB", "252.0 KiB", "16777215.9 TiB"]);
    }
}
