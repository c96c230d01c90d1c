//! The workers of a pool: who is there, what each is known to do, and who is started and told to go.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::sync::Arc;

use secrecy::ExposeSecret as _;
use tokio::task::JoinSet;

use super::driver::{self, Assignment, Change, End as Death, Line, News, Trouble};
use super::memory::Memory;
use super::names::Names;
use super::poison::LastWorker;
use super::tally::Tally;
use super::{Ended, Settings};
use crate::domain::group::load::Load;
use crate::domain::group::orders::Orders;
use crate::domain::group::restart::{End, Restarts};
use crate::domain::group::scale::{Budget, Decision, Doing, Group, Limits, Rest, Scale, Worker};
use crate::domain::group::tracker::Tracker;
use crate::domain::group::{Key, Phase};
use crate::domain::time::Instant;
use crate::host::clock::Clock;
use crate::limits::{CONTROLLER_BUSY_FOR, CONTROLLER_STEADY};

/// What is known of a worker.
struct Member {
    key: Key,
    since: Instant,
    ready: Option<Instant>,
    /// When it last reported a request.
    busy: Option<Instant>,
    going: bool,
}

/// The workers of a pool; none where somebody else starts them.
pub(super) struct Staff {
    pool: String,
    /// Who starts and stops them; `None` where nobody here does.
    driver: Option<Line>,
    /// The look that has to be answered before anything is decided: until then it is not known who is there.
    waits_for: u64,
    listed: bool,
    /// Whether this controller has the pool. Where it has not, workers come and go by somebody else's will.
    in_charge: bool,
    /// Why it is not known who is there.
    blind: Option<String>,
    members: BTreeMap<String, Member>,
    restarts: BTreeMap<Key, Restarts>,
    scale: Scale,
    limits: Limits,
    budget: Option<Budget>,
    names: Names,
    variables: BTreeMap<String, String>,
    memory: Memory,
    /// What was decided last of each group.
    decisions: BTreeMap<Key, Decision>,
    /// How the last worker of each group ended that was not told to.
    ends: BTreeMap<Key, Last>,
    tally: Arc<Tally>,
}

/// The last worker of a group that ended without being told to, or could not be started.
struct Last {
    ended: Ended,
    worker: Option<LastWorker>,
}

/// What those who look see of a group.
#[derive(Default)]
pub(super) struct Seen<'a> {
    pub(super) workers: Vec<Worker>,
    pub(super) decision: Option<&'a Decision>,
    pub(super) restarts: Option<&'a Restarts>,
    pub(super) last_end: Option<&'a Ended>,
}

impl Staff {
    /// Has its driver begin, which finds those that an earlier controller has started.
    ///
    /// # Errors
    ///
    /// Where what the driver needs on this host cannot be had.
    pub(super) fn engage(
        settings: &Settings,
        tally: Arc<Tally>,
        clock: Clock,
        tasks: &mut JoinSet<()>,
    ) -> io::Result<Self> {
        let driver = driver::engage(&settings.posting, clock, tasks)?;
        let mut variables = settings.posting.env.clone();
        variables.extend([
            ("WORKER_POOL".to_owned(), settings.posting.pool.clone()),
            ("WORKER_ACTIVITY_EXCHANGE".to_owned(), settings.names.activity()),
            ("WORKER_AMQP_URI".to_owned(), settings.uri.expose_secret().to_owned()),
        ]);
        Ok(Self {
            pool: settings.posting.pool.clone(),
            waits_for: 0,
            listed: driver.is_none(),
            in_charge: false,
            blind: None,
            memory: Memory::new(driver.is_some().then(|| settings.posting.folder.clone())),
            driver,
            members: BTreeMap::new(),
            restarts: BTreeMap::new(),
            scale: Scale::default(),
            limits: settings.tuning.limits,
            budget: settings.tuning.budget,
            names: settings.names.clone(),
            variables,
            decisions: BTreeMap::new(),
            ends: BTreeMap::new(),
            tally,
        })
    }

    /// This controller has the pool from now on. What another one did a moment ago has to be seen before anything is done.
    pub(super) fn takes_charge(&mut self) {
        self.in_charge = true;
        if let Some(driver) = &mut self.driver {
            driver.is_in_charge(true);
            self.waits_for = driver.look();
            self.listed = false;
        }
    }

    /// Another one has the pool.
    pub(super) fn stands_by(&mut self) {
        self.in_charge = false;
        self.tells_nobody();
    }

    /// Another one may have the pool, and may tell somebody else.
    pub(super) fn tells_nobody(&self) {
        if let Some(driver) = &self.driver {
            driver.is_in_charge(false);
        }
    }

    /// Whether it is known who is there.
    pub(super) const fn knows(&self) -> bool {
        self.listed
    }

    /// What its driver has to say.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe.
    pub(super) async fn news(&mut self) -> News {
        match &mut self.driver {
            // The controller ends where its driver has.
            Some(driver) => match driver.news().await {
                Some(news) => news,
                None => std::future::pending().await,
            },
            None => std::future::pending().await,
        }
    }

    /// How many there are of each key; also of those that have none any more.
    pub(super) fn counts(&self, keys: &BTreeSet<Key>) -> BTreeMap<Key, u32> {
        let mut counts: BTreeMap<Key, u32> = keys.iter().map(|key| (key.clone(), 0)).collect();
        for member in self.members.values() {
            *counts.entry(member.key.clone()).or_default() += 1;
        }
        counts
    }

    /// The keys that an earlier controller had queues for, as far as that is known.
    pub(super) fn remembered(&self) -> Vec<Key> {
        self.memory.read()
    }

    /// Writes them down where they have changed.
    pub(super) fn remember<'a>(&mut self, keys: impl Iterator<Item = &'a Key> + Clone) {
        self.memory.write(keys);
    }

    /// Other numbers, from the next plan on.
    pub(super) const fn tune(&mut self, limits: Limits, budget: Option<Budget>) {
        (self.limits, self.budget) = (limits, budget);
    }

    /// Whether it starts any.
    pub(super) const fn starts_workers(&self) -> bool {
        self.driver.is_some()
    }

    /// How many there may be.
    pub(super) const fn budget(&self) -> Option<Budget> {
        self.budget
    }

    /// The keys of those who are there.
    pub(super) fn keys(&self) -> impl Iterator<Item = &Key> {
        self.members.values().map(|member| &member.key)
    }

    /// Every group, for those who look.
    pub(super) fn seen(&self, now: Instant) -> BTreeMap<&Key, Seen<'_>> {
        let mut seen: BTreeMap<&Key, Seen<'_>> = BTreeMap::new();
        for (key, decision) in &self.decisions {
            seen.entry(key).or_default().decision = Some(decision);
        }
        for (id, member) in &self.members {
            seen.entry(&member.key).or_default().workers.push(member.shown(id, now));
        }
        for (key, group) in &mut seen {
            (group.restarts, group.last_end) = (self.restarts.get(*key), self.ends.get(*key).map(|last| &last.ended));
        }
        seen
    }

    /// Tells one to go. Whether there is one that could be told.
    pub(super) fn drain(&mut self, id: &str) -> bool {
        let (Some(driver), Some(member)) = (&self.driver, self.members.get_mut(id)) else { return false };
        if !member.going {
            member.going = driver.stop(id);
        }
        member.going
    }

    /// So many of a key are at work at least, as the queue says that they claim from: who does not report is known by that.
    pub(super) fn claimed(&mut self, key: &Key, count: u32, now: Instant) {
        let of_key = || self.members.values().filter(|member| member.key == *key && !member.going);
        let ready = of_key().filter(|member| member.ready.is_some()).count();
        let least = count.div_ceil(self.limits.concurrency.max(1));
        let silent = usize::try_from(least).unwrap_or(usize::MAX).saturating_sub(ready);
        let starting = self.members.values_mut().filter(|member| member.key == *key && member.ready.is_none());
        for member in starting.take(silent) {
            (member.ready, member.busy) = (Some(now), Some(now));
        }
    }

    /// Forgets that workers of a key did not last. Whether that is so.
    pub(super) fn forgive(&mut self, key: &Key) -> bool {
        let restarts = self.restarts.get_mut(key).filter(|restarts| restarts.short_lives() > 0);
        restarts.map(Restarts::forgive).is_some()
    }

    /// What a worker has reported.
    pub(super) fn heard(&mut self, id: &str, event: &str, now: Instant) {
        let Some(member) = self.members.get_mut(id) else { return };
        match event {
            "started" => {}
            // One that holds nothing any more says so again.
            "ready" => {
                member.ready.get_or_insert(now);
                member.busy = None;
            }
            _ => {
                member.ready.get_or_insert(now);
                member.busy = Some(now);
            }
        }
    }

    /// When the last worker of a group ended that was not told to, and what is known of it.
    pub(super) fn last_end(&self, key: &Key) -> Option<(Instant, &LastWorker)> {
        let last = self.ends.get(key)?;
        Some((last.ended.at, last.worker.as_ref()?))
    }

    /// Its driver has said something. Answers with the keys of workers that were found.
    ///
    /// # Errors
    ///
    /// What is wrong with the driver, where that was not so before.
    pub(super) fn told(&mut self, news: News, now: Instant) -> Result<Vec<Key>, String> {
        match news {
            News::Started(id) => {
                if let Some(Member { key, .. }) = self.members.get(&id) {
                    self.tally.started.add();
                    let (wanted, why) = self.decisions.get(key).map_or_else(Default::default, said);
                    tracing::info!(worker = id, %key, "a worker is started, of {wanted}: {why}");
                }
            }
            News::Refused { id, why: Trouble(why) } => {
                if let Some(Member { key, .. }) = self.members.remove(&id) {
                    tracing::error!(%key, "a worker cannot be started: {why}");
                    self.failed(&key, End::NeverReady, format!("it cannot be started: {why}"), None, now);
                }
            }
            News::Looked { number, changes: Ok(changes) } => {
                self.listed |= number >= self.waits_for;
                if self.blind.take().is_some() {
                    tracing::info!(pool = self.pool, "it is known again which workers are there");
                }
                return Ok(self.change(changes, now));
            }
            News::Looked { changes: Err(Trouble(why)), .. } => {
                let what = format!("it is not known which workers are there: {why}");
                if self.blind.replace(why).is_none() {
                    tracing::warn!(pool = self.pool, "{what}; they go on, and it is asked again");
                    return Err(what);
                }
            }
        }
        Ok(Vec::new())
    }

    fn change(&mut self, changes: Vec<Change>, now: Instant) -> Vec<Key> {
        let (mut keys, mut found, mut kept) = (Vec::new(), 0_usize, 0);
        for change in changes {
            match change {
                Change::Promised { id, key } => {
                    keys.push(key.clone());
                    let member = Member { key, since: now, ready: None, busy: None, going: false };
                    self.members.insert(id, member);
                }
                Change::Kept { id } => {
                    kept += 1;
                    self.members.remove(&id);
                }
                Change::Found { id, key } => {
                    found += 1;
                    keys.push(key.clone());
                    // It was ready for somebody else, or will say so.
                    let member = Member { key, since: now, ready: Some(now), busy: Some(now), going: false };
                    self.members.insert(id, member);
                }
                Change::Going { id } => {
                    if let Some(member) = self.members.get_mut(&id) {
                        member.going = true;
                    }
                }
                Change::Ended { id, key, end, told } => self.ended(&id, key, &end, told, now),
            }
        }
        // As many as were promised are there by their own names.
        let earlier = found.saturating_sub(kept);
        if earlier > 0 {
            tracing::info!(pool = self.pool, workers = earlier, "workers of an earlier controller go on");
        }
        keys
    }

    fn ended(&mut self, id: &str, key: Key, death: &Death, told: bool, now: Instant) {
        let member = self.members.remove(id);
        let Death { how, log, last_words } = death;
        if !self.in_charge {
            return tracing::debug!(worker = id, "a worker of another controller has gone: {how}");
        }
        if told {
            return tracing::info!(worker = id, %key, "a worker has gone as it was told: {how}");
        }
        let what = log.as_ref().map_or_else(|| how.clone(), |log| format!("{how}; its log is {log}"));
        let worker = Some(LastWorker::new(id, how, last_words));
        let Some(member) = member else {
            // For how long it lasted nobody knows.
            self.tally.failed.add();
            self.ends.insert(key.clone(), Last { ended: Ended { at: now, what }, worker });
            return tracing::warn!(worker = id, %key, "a worker of an earlier controller has ended: {how}");
        };
        let end = member.ready.map_or(End::NeverReady, |ready| End::After(now.since(ready)));
        let short_lives = self.failed(&key, end, what, worker, now);
        tracing::warn!(worker = id, %key, short_lives, "a worker has ended: {how}");
    }

    /// One has come to an end that nobody wanted. Answers with how many in a row did not last.
    fn failed(&mut self, key: &Key, end: End, what: String, worker: Option<LastWorker>, now: Instant) -> u32 {
        self.tally.failed.add();
        let restarts = restarts_of(&mut self.restarts, key);
        let failing = restarts.fails();
        restarts.ended(end, now);
        if restarts.fails() && !failing {
            let text = "[alert operator] the workers of this key do not last; the last one";
            tracing::error!(alert = "group-fails", %key, "{text}: {what}");
        }
        let short_lives = restarts.short_lives();
        self.ends.insert(key.clone(), Last { ended: Ended { at: now, what }, worker });
        short_lives
    }

    /// The keys under which somebody waits for requests; `None` where nobody here starts workers, whom nobody waits for then.
    pub(super) fn attended(&self, now: Instant) -> Option<BTreeSet<&Key>> {
        self.driver.as_ref()?;
        let idle = self.members.iter().filter(|(id, member)| member.shown(id, now).doing == Doing::Idle);
        Some(idle.map(|(_, member)| &member.key).collect())
    }

    /// How many of each key hold requests, or may.
    pub(super) fn busy(&self, now: Instant) -> BTreeMap<Key, u32> {
        let mut busy = BTreeMap::new();
        for (_, member) in self.members.iter().filter(|(id, member)| member.shown(id, now).doing == Doing::Busy) {
            *busy.entry(member.key.clone()).or_default() += 1;
        }
        busy
    }

    /// Brings the workers to what is wanted of their groups.
    pub(super) fn plan(&mut self, tracker: &Tracker, loads: &BTreeMap<Key, Load>, orders: &Orders, now: Instant) {
        if !self.listed {
            return;
        }
        let mut keys: BTreeSet<Key> = tracker.groups().map(|(key, _)| key.clone()).collect();
        keys.extend(self.members.values().map(|member| member.key.clone()));
        self.restarts.retain(|key, restarts| keys.contains(key) || restarts.short_lives() > 0);
        self.ends.retain(|key, _| keys.contains(key));
        let mut workers: BTreeMap<&Key, Vec<Worker>> = BTreeMap::new();
        for (id, member) in &self.members {
            workers.entry(&member.key).or_default().push(member.shown(id, now));
        }
        let groups: Vec<Group> = keys
            .into_iter()
            .map(|key| {
                let phase: Option<Phase> = tracker.wanted(&key).map(|wanted| wanted.phase);
                Group {
                    phase,
                    limits: orders.numbers(&key).map_or(self.limits, |numbers| numbers.over(self.limits)),
                    rest: if orders.paused(&key).is_some() { Rest::Paused } else { Rest::No },
                    load: loads.get(&key).copied().unwrap_or_default(),
                    workers: workers.remove(&key).unwrap_or_default(),
                    not_before: self.restarts.get(&key).map_or(Instant::ORIGIN, Restarts::not_before),
                    key,
                }
            })
            .collect();
        let decisions = self.scale.plan(&groups, self.budget, now);
        for decision in &decisions {
            self.carry_out(decision, now);
        }
        self.decisions = decisions.into_iter().map(|decision| (decision.key.clone(), decision)).collect();
    }

    fn carry_out(&mut self, decision: &Decision, now: Instant) {
        let (wanted, why) = said(decision);
        let Some(driver) = &self.driver else {
            if self.decisions.get(&decision.key).map_or(0, |last| last.wanted) != wanted {
                tracing::info!(key = %decision.key, wanted, "workers are wanted, and none is started here: {why}");
            }
            return;
        };
        for id in &decision.drain {
            if let Some(member) = self.members.get_mut(&**id)
                && driver.stop(id)
            {
                tracing::info!(worker = &**id, key = %decision.key, "a worker is told to go: {why}");
                member.going = true;
            }
        }
        let key = &decision.key;
        let Some(queue) = self.names.request_queue(key) else { return };
        for _ in 0..decision.start {
            let id = uuid::Uuid::new_v4().to_string();
            let mut variables = self.variables.clone();
            variables.extend([
                ("WORKER_ID".to_owned(), id.clone()),
                ("WORKER_KEY".to_owned(), self.names.worker_key(key)),
                ("WORKER_REQUESTS_QUEUE".to_owned(), queue.clone()),
            ]);
            if driver.start(Assignment { id: id.clone(), key: key.clone(), variables }) {
                let member = Member { key: key.clone(), since: now, ready: None, busy: None, going: false };
                self.members.insert(id, member);
            }
        }
    }
}

/// How many, and why.
fn said(decision: &Decision) -> (u32, String) {
    (decision.wanted, decision.reasons.iter().map(ToString::to_string).collect::<Vec<_>>().join(", "))
}

impl Member {
    fn shown(&self, id: &str, now: Instant) -> Worker {
        let doing = if self.going {
            Doing::Going
        } else if self.ready.is_none() {
            Doing::Starting
        } else if self.busy.is_some_and(|at| now.since(at) < CONTROLLER_BUSY_FOR) {
            Doing::Busy
        } else {
            Doing::Idle
        };
        Worker { id: id.into(), doing, since: self.since }
    }
}

fn restarts_of<'a>(restarts: &'a mut BTreeMap<Key, Restarts>, key: &Key) -> &'a mut Restarts {
    let seed = || uuid::Uuid::new_v4().as_u64_pair().0;
    restarts.entry(key.clone()).or_insert_with(|| Restarts::new(CONTROLLER_STEADY, seed()))
}
