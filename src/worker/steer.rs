//! What a worker is asked and told about one of its claims.

use crate::domain::claim::{Obeyed, Order};
use crate::domain::id::Token;
use crate::domain::time::Instant;
use crate::domain::worker::Event;
use crate::handler::log::TaskLog;
use crate::host::containment::Enclosure;

use super::engine::Engine;
use super::look::seconds;
use super::named::{self, Candidate, NotOne};
use super::timeline::Lap;
use super::view::{Detail, Note, Ordered, Phase};

/// A claim, and what its processes are in.
#[derive(Debug)]
pub struct Shown {
    /// All but its processes.
    pub detail: Detail,
    /// Where they are; looking takes time.
    pub enclosure: Option<Enclosure>,
}

/// What came of an order about a claim.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Told {
    /// The run, as `TASK/RUN`.
    pub run: String,
    /// What came of it.
    pub obeyed: Obeyed,
}

/// The last order about a claim.
#[derive(Debug, Clone)]
pub(super) struct Said {
    order: Order,
    note: Note,
    at: Instant,
}

impl Said {
    /// For the task's log.
    pub(super) fn sentence(&self) -> String {
        let what = match self.order {
            Order::HandBack => "handed back",
            Order::Cancel => "canceled",
        };
        let Note { by, text } = &self.note;
        let why = if text.is_empty() { String::new() } else { format!(": {text}") };
        // It may be anybody's text, and a log has lines.
        format!("{what} by {by}, who runs this worker{why}").replace(char::is_control, " ")
    }
}

const fn word(order: Order) -> &'static str {
    match order {
        Order::HandBack => "hand-back",
        Order::Cancel => "cancel",
    }
}

impl Engine {
    fn named(&self, name: &str) -> Result<Token, NotOne> {
        let candidate = |claim: crate::domain::worker::ClaimView<'_>| Candidate {
            claim: claim.claim,
            run: claim.run.clone(),
            source: self.source_name(claim.source).to_owned(),
        };
        named::find(name, self.rules.claims().map(candidate).collect())
    }

    /// The log of the task of that name.
    pub(super) fn log_of(&self, name: &str) -> Result<TaskLog, NotOne> {
        let claim = self.named(name)?;
        let job = self.live.get(&claim).and_then(|live| live.job.as_ref());
        // One that is being asked for has no log yet, and nobody holds it yet either.
        job.map(|job| job.context.log().clone()).ok_or_else(|| NotOne::None { name: name.to_owned(), held: Vec::new() })
    }

    /// All that is known of the task of that name.
    pub(super) fn show(&self, name: &str) -> Result<Shown, NotOne> {
        let claim = self.named(name)?;
        let gone = || NotOne::None { name: name.to_owned(), held: Vec::new() };
        let view = self.rules.claims().find(|view| view.claim == claim).ok_or_else(gone)?;
        let live = self.live.get(&claim).ok_or_else(gone)?;
        let now = self.clock.now();
        let feed = self.feeds.get(live.feed).ok_or_else(gone)?;
        let context = live.job.as_ref().map(|job| &job.context);
        let definition = context.map(|context| &context.task().definition);
        let text = |path: &str| definition.and_then(|task| task.pointer(path)?.as_str()).map(str::to_owned);
        let enclosure = context.map(|context| context.enclosure().clone());
        let detail = Detail {
            task: self.task(&view, now),
            name: text("/metadata/name"),
            group: text("/taskGroupId"),
            place: feed.source.describe(),
            handler: feed.handler.describe(),
            dequeue_count: live.message.as_ref().map(|message| message.dequeue_count),
            reclaims: live.reclaims,
            reclaim_in_seconds: view.machine.next_reclaim().map(|at| seconds(now, at)),
            containment: self.containment().level().as_str().to_owned(),
            cgroup: enclosure.as_ref().and_then(|enclosure| enclosure.name().cgroup.clone()),
            processes: Vec::new(),
            folder: live.job.as_ref().filter(|job| job.context.folder_made().is_some()).map(|job| job.folder.clone()),
            phases: live.timeline.laps().iter().map(|lap| phase(lap, now)).collect(),
            ordered: live.ordered.as_ref().map(|said| Ordered {
                order: word(said.order).to_owned(),
                note: said.note.clone(),
                seconds_ago: seconds(said.at, now),
            }),
        };
        Ok(Shown { detail, enclosure })
    }

    /// Ends the task of that name, and no other (I34).
    pub(super) fn end(&mut self, name: &str, order: Order, note: Note) -> Result<Told, NotOne> {
        let claim = self.named(name)?;
        let gone = || NotOne::None { name: name.to_owned(), held: Vec::new() };
        let view = self.rules.claims().find(|view| view.claim == claim).ok_or_else(gone)?;
        let (run, obeyed) = (view.run.to_string(), view.machine.obeys(order));
        tracing::info!(
            claim.run = run,
            order = word(order),
            by = note.by,
            note = note.text,
            ?obeyed,
            "an order about a task"
        );
        let heard = !matches!(obeyed, Obeyed::TooLate(_) | Obeyed::Lost(_));
        if let Some(live) = self.live.get_mut(&claim).filter(|_| heard) {
            let said = Said { order, note, at: self.clock.now() };
            if let Some(job) = &live.job {
                job.context.log().note(&said.sentence());
            }
            live.ordered = Some(said);
        }
        self.happened(Event::Ordered { claim, order });
        Ok(Told { run, obeyed })
    }
}

fn phase(lap: &Lap, now: Instant) -> Phase {
    Phase {
        phase: lap.phase.as_str().to_owned(),
        seconds_ago: seconds(lap.began, now),
        seconds: lap.ended.map(|ended| seconds(lap.began, ended)),
    }
}
