//! The loop around the rules: what happened is brought to them, and what they want done is carried out (`effects.rs`); what comes
//! of that is what happens next (`returns.rs`).

mod effects;
mod returns;

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{Notify, Semaphore, mpsc, watch};
use tokio::task::JoinSet;

use crate::domain::id::{Deployment, Run, SourceId, Token};
use crate::domain::journal::PollLeft;
use crate::domain::refusal::Refusal;
use crate::domain::service::Serving;
use crate::domain::time::Instant as Moment;
use crate::domain::worker::{self as rules, Event, Exit, LeftOver, Place, Room};
use crate::handler::beside::Word;
use crate::host::clock::Clock;
use crate::host::containment::Containment;
use crate::host::crash::crash_point;
use crate::host::folder::{Hold, WorkFolder};
use crate::host::journal::Journal;
use crate::host::presence::Presence;
use crate::host::room;
use crate::host::spare::Spares;
use crate::limits::HANDLERS_DROP_WAIT;
use crate::source::{News, Refused};

use super::besides::Besides;
use super::calls::{self, Back, Started};
use super::counters::Counters;
use super::earlier::{self, Earlier};
use super::examine::Examination;
use super::hour::Hour;
use super::leave;
use super::live::{Entry, Live};
use super::look::{Noticed, Track};
use super::recovery::Stamped;
use super::threads::Threads;
use super::view::Note;
use super::{Claiming, Command, Control, Feed, Order, Settings, Worker};

/// How many claims are remembered that were said to be lost and are not known.
const LOST_EARLY_MAX: usize = 1024;
/// How many payloads may have been started without the rules' having heard of it.
const STARTS_MAX: usize = 256;

pub(super) struct Engine {
    pub(super) rules: rules::Worker,
    pub(super) settings: Settings,
    folder: WorkFolder,
    hold: Hold,
    /// How the work folder was found to be no longer this worker's.
    pub(super) said_lost: Option<String>,
    /// How much of what earlier tasks have left could not be removed.
    pub(super) aside: usize,
    spares: Spares,
    examination: Examination,
    pub(super) clock: Clock,
    pub(super) feeds: Vec<Feed>,
    containment: Containment,
    orders: mpsc::Receiver<Order>,
    pub(super) control: Control,
    pub(super) calls: JoinSet<Back>,
    threads: Threads,
    pub(super) besides: Besides,
    /// Payloads that were started by what prepared them.
    starts: mpsc::Receiver<Started>,
    starting: mpsc::Sender<Started>,
    entries: HashMap<Token, Arc<Entry>>,
    pub(super) live: HashMap<Token, Live>,
    /// Claims whose payload may still be there, with what they were about.
    pub(super) kept: BTreeMap<Token, Run>,
    /// What each source last said when it refused something.
    pub(super) said: HashMap<SourceId, String>,
    /// Sources whose missing scopes for recoveries were told of.
    pub(super) unrecovered: HashSet<SourceId>,
    /// The polls of each source as the journal has them.
    pub(super) stamped: Vec<Stamped>,
    /// Claims that a source said were lost before the poll that brought them was taken in.
    lost_early: HashSet<Run>,
    pub(super) tracks: Vec<Track>,
    pub(super) hour: Hour,
    pub(super) began: Moment,
    pub(super) room: Room,
    /// One look at the room at a time.
    measuring: Arc<Semaphore>,
    /// Who gave the last order.
    pub(super) note: Option<Note>,
    pub(super) noticed: Option<Noticed>,
    tokens: u64,
    seed: u64,
    /// Whether claims of each source are wanted, as far as the rules go.
    wanting: Vec<bool>,
    exit: Option<Exit>,
    pub(super) journal: Journal,
    /// How each source's claims are called in the journal.
    pub(super) claimants: Vec<Box<str>>,
    /// Held for as long as it lives.
    _names: Vec<Presence>,
    pub(super) earlier: Earlier,
    /// What an earlier life has left to be reported, and to be asked for; told to the rules first of all.
    left_over: Vec<LeftOver>,
    polls_left: Vec<PollLeft>,
}

impl Engine {
    pub(super) fn start(worker: Worker) -> std::io::Result<Self> {
        let Worker { settings, feeds, orders, control } = worker;
        let unusable = |error: std::io::Error| {
            std::io::Error::new(error.kind(), format!("the work folder cannot be used: {error}"))
        };
        let folder = WorkFolder::take(&settings.work_dir).map_err(unusable)?;
        let claimants: Vec<Box<str>> = feeds.iter().map(|feed| feed.source.claimant().into()).collect();
        let names = earlier::take_names(&claimants)?;
        tracing::info!(folder = %folder.path().display(), "the work folder");
        let past = earlier::look_back(folder.path(), &claimants, settings.containment.unproven)?;
        // The folder is this worker's alone, and its own again at the next start: so is what is named after it.
        let hold = folder.hold()?;
        let containment = Containment::establish(&hold.identity(), settings.containment)?;
        // Only now, for what an earlier life left running may have written to it until it was killed.
        crash_point("start-killed");
        let aside = folder.clear().map_err(unusable)?;
        crash_point("start-cleared");
        let earlier::Begun { journal, earlier, left_over, polls_left } = past.begin(hold.clone(), &claimants);
        // Nobody else sets it.
        drop(control.containment.set(containment.clone()));
        let seed = settings.seed.unwrap_or_else(|| uuid::Uuid::new_v4().as_u64_pair().0);
        let mut rules = rules::Worker::new(settings.policy(), &places(&feeds), seed);
        let (starting, starts) = mpsc::channel(STARTS_MAX);
        let own = !settings.clock.is_of_runtime();
        let threads = if own { Threads::own(settings.handler_threads)? } else { Threads::shared() };
        let services = folder.path().join(earlier::SERVICES);
        let besides = Besides::start(&feeds, &services, settings.clock, &containment, &threads);
        for (beside, _) in besides.words() {
            besides.feeds(beside).iter().for_each(|feed| rules.serve(source_id(*feed), Serving::Down));
        }
        Ok(Self {
            rules,
            wanting: vec![true; feeds.len()],
            besides,
            tracks: feeds.iter().map(|_| Track::default()).collect(),
            hour: Hour::default(),
            began: settings.clock.now(),
            room: room::measure(folder.tasks()),
            measuring: Arc::new(Semaphore::new(1)),
            note: None,
            noticed: None,
            clock: settings.clock,
            spares: Spares::new(folder.tasks(), hold.clone(), settings.capacity),
            settings,
            examination: Examination::of(folder.tasks()),
            folder,
            hold,
            said_lost: None,
            aside,
            containment,
            feeds,
            orders,
            control,
            calls: JoinSet::new(),
            threads,
            starts,
            starting,
            entries: HashMap::new(),
            live: HashMap::new(),
            kept: BTreeMap::new(),
            said: HashMap::new(),
            unrecovered: HashSet::new(),
            stamped: claimants.iter().map(|_| Stamped::new()).collect(),
            lost_early: HashSet::new(),
            tokens: left_over.len() as u64,
            seed,
            exit: None,
            journal,
            claimants,
            _names: names,
            earlier,
            left_over,
            polls_left,
        })
    }

    pub(super) fn measure(&mut self) {
        let (tasks, hold) = (self.folder.tasks().to_owned(), self.hold.clone());
        self.calls.spawn(calls::measure(tasks, hold, Arc::clone(&self.measuring)));
    }

    pub(super) fn containment(&self) -> Containment {
        self.containment.clone()
    }

    pub(super) async fn run(mut self) -> std::io::Result<Exit> {
        for feed in &self.feeds {
            tracing::info!(source = feed.name, "source: {}", feed.source.describe());
        }
        let long_polls = self.feeds.iter().filter(|feed| feed.source.manner().long_poll).count();
        if let Some(told) = super::asked_in_turn(self.settings.capacity, long_polls) {
            tracing::warn!("{told}");
        }
        let wake: Arc<Notify> = Arc::clone(&self.control.wake);
        let left_over = std::mem::take(&mut self.left_over);
        left_over.iter().for_each(|left| drop(self.live.insert(left.token, Live::new(usize::from(left.source.0)))));
        self.happened(Event::LeftOver(left_over));
        let polls_left = std::mem::take(&mut self.polls_left);
        self.tell_polls_left(polls_left);
        self.say_recovered();
        self.resize();
        for index in 0..self.feeds.len() {
            self.listen(source_id(index));
        }
        for (beside, word) in self.besides.words() {
            self.calls.spawn(calls::word(beside, word));
        }
        self.happened(Event::Measured(self.room));
        self.measure();
        self.happened(Event::Tick);
        loop {
            while let Some(effect) = self.rules.next_effect() {
                self.perform(effect);
            }
            self.note_all_polls();
            if let Some(exit) = self.exit {
                tracing::info!(exit = exit.as_str(), "the worker exits: {}", self.control.counts());
                if tokio::time::timeout(HANDLERS_DROP_WAIT, self.calls.shutdown()).await.is_err() {
                    tracing::warn!("a handler does not let itself be dropped; what it started may live on");
                }
                self.journal.settled().await;
                if exit == Exit::Aborted {
                    self.besides.kill().await;
                } else {
                    let sources = self.feeds.iter().map(|feed| Arc::clone(&feed.source)).collect();
                    leave::take_leave(sources).await;
                    self.besides.end().await;
                }
                return Ok(exit);
            }
            let deadline = self.rules.next_deadline();
            let clock = self.clock;
            // Before anything else that may be ready all the time: calls that come back in a row must not hold up a reclaim.
            if deadline.is_some_and(|at| clock.now() >= at) {
                self.happened(Event::Tick);
                continue;
            }
            tokio::select! {
                biased;
                Some(order) = self.orders.recv() => self.order(order),
                Some(started) = self.starts.recv() => self.started(started),
                Some(back) = self.calls.join_next() => self.returned(back),
                () = async { match deadline {
                    Some(at) => clock.sleep_until(at).await,
                    None => std::future::pending().await,
                } } => self.happened(Event::Tick),
                () = wake.notified() => {
                    for source in 0..self.feeds.len() {
                        self.happened(Event::Wake(source_id(source)));
                    }
                }
            }
        }
    }

    pub(super) fn happened(&mut self, event: Event) {
        self.rules.handle(event, self.clock.now());
        let asking = matches!(self.rules.claiming(), Claiming::Asking | Claiming::Full);
        for ((view, feed), wanted) in self.rules.sources().zip(&self.feeds).zip(&mut self.wanting) {
            let wanting = asking && view.serving == Serving::Up;
            if std::mem::replace(wanted, wanting) && !wanting {
                feed.source.unwanted();
            }
        }
    }

    fn order(&mut self, order: Order) {
        match order {
            Order::Do(command, note) => self.command(command, note),
            Order::Reconfigure(settings) => self.reconfigure(*settings),
            // Whoever asked may have gone.
            Order::Look(sender) => drop(sender.send(self.look())),
            Order::Log(task, sender) => drop(sender.send(self.log_of(&task))),
            Order::Show(task, sender) => drop(sender.send(self.show(&task))),
            Order::End { name, order, note, sender } => drop(sender.send(self.end(&name, order, note))),
        }
    }

    fn command(&mut self, command: Command, note: Note) {
        tracing::info!(by = note.by, note = note.text, "an order: {command}");
        let in_time = |span: Option<Duration>| span.map(|span| self.clock.now().plus(span));
        let event = match command {
            Command::Pause { span } => Event::Pause { until: in_time(span) },
            Command::Resume => Event::Resume,
            Command::Drain { within: None } => Event::Drain,
            Command::Drain { within: Some(within) } => Event::DrainBy { deadline: self.clock.now().plus(within) },
            Command::HandBack { within } => Event::HandBack { deadline: in_time(within) },
            Command::Terminate { deadline } => {
                let at = self.clock.now();
                self.noticed.get_or_insert(Noticed { at, last_end: None });
                Event::Terminate { deadline }
            }
            Command::Retire => Event::Retire,
            Command::Abort => Event::Abort,
        };
        self.note = Some(note).filter(|_| command != Command::Resume);
        self.happened(event);
    }

    fn reconfigure(&mut self, settings: Settings) {
        let Settings { work_dir, seed, clock, recorder, .. } = self.settings.clone();
        self.settings = Settings { work_dir, seed, clock, recorder, ..settings };
        self.resize();
        self.happened(Event::Reconfigured(Box::new(self.settings.policy())));
        self.happened(Event::Measured(self.room));
    }

    fn token(&mut self) -> Token {
        self.tokens += 1;
        Token(self.tokens)
    }

    // --- what happened

    fn resize(&self) {
        self.feeds.iter().for_each(|feed| feed.source.resized(self.settings.capacity));
    }

    fn listen(&mut self, id: SourceId) {
        if let Some(feed) = self.feeds.get(usize::from(id.0)) {
            self.calls.spawn(calls::news(Arc::clone(&feed.source), id));
        }
    }

    /// Something is said of what a handler keeps there.
    fn heard(&mut self, beside: usize, word: Option<watch::Receiver<Word>>) {
        let serving = word.map_or(Serving::Down, |mut word| {
            let serving = word.borrow_and_update().serving;
            self.calls.spawn(calls::word(beside, word));
            serving
        });
        for feed in self.besides.feeds(beside).to_vec() {
            self.happened(Event::Serving { source: source_id(feed), serving });
        }
    }

    /// What a source found out by itself.
    fn told(&mut self, source: SourceId, news: News) {
        match news {
            News::Lost(runs) => {
                let index = usize::from(source.0);
                for run in runs {
                    let held = |(_, live): &(&Token, &Live)| {
                        live.feed == index && live.claim.as_ref().is_some_and(|claim| *claim.run() == run)
                    };
                    match self.live.iter().find(held).map(|(claim, _)| *claim) {
                        Some(claim) => self.happened(Event::Lost { claim }),
                        None => {
                            if self.lost_early.len() >= LOST_EARLY_MAX {
                                self.lost_early.clear();
                            }
                            self.lost_early.insert(run);
                        }
                    }
                }
            }
            News::Over { what } if self.feeds.len() == 1 => {
                tracing::info!(
                    source = self.source_name(source),
                    "{what}: what is held is finished, and then the worker ends"
                );
                self.happened(Event::Drain);
            }
            News::Over { what } => {
                tracing::warn!(source = self.source_name(source), "{what}: it is looked for now and then");
            }
        }
    }

    fn unless_refused<T>(&mut self, source: SourceId, answer: Result<T, Refused>) -> Result<T, Refusal> {
        answer.map_err(|refused| self.refusal(source, refused))
    }

    pub(super) fn refusal(&mut self, source: SourceId, refused: Refused) -> Refusal {
        if let Some(track) = self.tracks.get_mut(usize::from(source.0)) {
            track.refused(self.clock.now(), &refused.what);
        }
        tracing::warn!(source = self.source_name(source), next = %refused.refusal, "{}", refused.what);
        self.remember(source, refused)
    }

    /// Keeps the sentence for an alert that may come of it.
    fn remember(&mut self, source: SourceId, refused: Refused) -> Refusal {
        self.said.insert(source, refused.what);
        refused.refusal
    }

    pub(super) fn note(&self, operation: &str, refused: Refused) -> Refusal {
        tracing::warn!(operation, next = %refused.refusal, "{}", refused.what);
        refused.refusal
    }

    pub(super) fn counters(&self) -> &Counters {
        &self.control.counters
    }
}

/// The sources as the rules know them: equal names are one deployment.
fn places(feeds: &[Feed]) -> Vec<Place> {
    let names: Vec<String> = feeds.iter().map(|feed| feed.source.deployment()).collect();
    let first = |name: &String| names.iter().position(|other| other == name).unwrap_or_default();
    let number = |name: &String| Deployment(u16::try_from(first(name)).unwrap_or(u16::MAX));
    feeds
        .iter()
        .zip(&names)
        .map(|(feed, name)| Place { manner: feed.source.manner(), deployment: number(name) })
        .collect()
}

fn source_id(index: usize) -> SourceId {
    SourceId(u16::try_from(index).unwrap_or(u16::MAX))
}
