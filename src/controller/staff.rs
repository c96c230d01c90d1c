//! The workers of a pool: who is there, what each is known to do, and who is started and told to go.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::sync::Arc;

use secrecy::ExposeSecret as _;

use super::names::Names;
use super::subprocess::{Assignment, Gone, Subprocesses};
use super::tally::Tally;
use super::{Ended, Settings};
use crate::domain::group::restart::{End, Restarts};
use crate::domain::group::scale::{Budget, Decision, Doing, Group, Limits, Load, Scale, Worker};
use crate::domain::group::tracker::Tracker;
use crate::domain::group::{Key, Phase};
use crate::domain::time::Instant;
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

/// The workers that this controller starts; none where somebody else does.
pub(super) struct Staff {
    driver: Option<Subprocesses>,
    members: BTreeMap<String, Member>,
    restarts: BTreeMap<Key, Restarts>,
    scale: Scale,
    limits: Limits,
    budget: Option<Budget>,
    names: Names,
    variables: Vec<(&'static str, String)>,
    /// The keys that were written down last.
    written: BTreeSet<Key>,
    /// What was decided last of each group.
    decisions: BTreeMap<Key, Decision>,
    /// How the last worker of each group ended that was not told to.
    ends: BTreeMap<Key, Ended>,
    tally: Arc<Tally>,
}

/// What those who look see of a group.
#[derive(Default)]
pub(super) struct Seen<'a> {
    /// What each of its workers does.
    pub(super) doing: Vec<Doing>,
    pub(super) decision: Option<&'a Decision>,
    pub(super) restarts: Option<&'a Restarts>,
    pub(super) last_end: Option<&'a Ended>,
}

impl Staff {
    /// Finds those that an earlier controller has started.
    ///
    /// # Errors
    ///
    /// Where their folder cannot be used.
    pub(super) fn find(settings: &Settings, tally: Arc<Tally>, now: Instant) -> io::Result<Self> {
        let driver = settings.program.clone().map(Subprocesses::find).transpose()?;
        let mut members = BTreeMap::new();
        for (id, key) in driver.iter().flat_map(Subprocesses::there) {
            let Some(key) = settings.names.key(key) else { continue };
            // It was ready for somebody else, or will say so.
            let member = Member { key, since: now, ready: Some(now), busy: Some(now), going: false };
            members.insert(id.to_owned(), member);
        }
        if !members.is_empty() {
            tracing::info!(pool = settings.pool, workers = members.len(), "workers of an earlier controller go on");
        }
        let variables = vec![
            ("WORKER_POOL", settings.pool.clone()),
            ("WORKER_ACTIVITY_EXCHANGE", settings.names.activity()),
            ("WORKER_AMQP_URI", settings.uri.expose_secret().to_owned()),
        ];
        Ok(Self {
            driver,
            members,
            restarts: BTreeMap::new(),
            scale: Scale::default(),
            limits: settings.tuning.limits,
            budget: settings.tuning.budget,
            names: settings.names.clone(),
            variables,
            written: BTreeSet::new(),
            decisions: BTreeMap::new(),
            ends: BTreeMap::new(),
            tally,
        })
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
        self.driver.iter().flat_map(Subprocesses::remembered).filter_map(|key| Key::new(&key)).collect()
    }

    /// Writes them down where they have changed.
    pub(super) fn remember<'a>(&mut self, keys: impl Iterator<Item = &'a Key>) {
        let Some(driver) = &self.driver else { return };
        let keys: BTreeSet<&Key> = keys.collect();
        if !keys.iter().copied().eq(&self.written) {
            driver.remember(&keys.iter().map(|key| key.as_str()).collect::<Vec<_>>());
            self.written = keys.into_iter().cloned().collect();
        }
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
            seen.entry(&member.key).or_default().doing.push(member.shown(id, now).doing);
        }
        for (key, group) in &mut seen {
            (group.restarts, group.last_end) = (self.restarts.get(*key), self.ends.get(*key));
        }
        seen
    }

    /// What a worker has reported.
    pub(super) fn heard(&mut self, id: &str, event: &str, now: Instant) {
        let Some(member) = self.members.get_mut(id) else { return };
        match event {
            "started" => {}
            "ready" => {
                member.ready.get_or_insert(now);
            }
            _ => {
                member.ready.get_or_insert(now);
                member.busy = Some(now);
            }
        }
    }

    /// Sees who has ended.
    pub(super) fn look(&mut self, now: Instant) {
        let Some(driver) = &mut self.driver else { return };
        for Gone { id, how, told } in driver.look(now) {
            let Some(member) = self.members.remove(&id) else { continue };
            let end = match member.ready {
                _ if told => End::Expected,
                Some(ready) => End::After(now.since(ready)),
                None => End::NeverReady,
            };
            let restarts = restarts_of(&mut self.restarts, &member.key);
            let failing = restarts.fails();
            restarts.ended(end, now);
            if told {
                tracing::info!(worker = id, key = %member.key, "a worker has gone as it was told: {how}");
            } else {
                self.tally.failed.add();
                self.ends.insert(member.key.clone(), Ended { at: now, what: format!("{how}; its log is {id}.log") });
                tracing::warn!(worker = id, key = %member.key, short_lives = restarts.short_lives(), "a worker has ended: {how}");
            }
            if restarts.fails() && !failing {
                tracing::error!(
                    alert = "group-fails", key = %member.key,
                    "[alert operator] the workers of this key do not last; the log of the last one is {id}.log"
                );
            }
        }
    }

    /// Brings the workers to what is wanted of their groups.
    pub(super) fn plan(&mut self, tracker: &Tracker, loads: &BTreeMap<Key, Load>, now: Instant) {
        if self.driver.is_none() {
            return;
        }
        let mut keys: BTreeSet<Key> = tracker.groups().map(|(key, _)| key.clone()).collect();
        keys.extend(self.members.values().map(|member| member.key.clone()));
        self.restarts.retain(|key, restarts| keys.contains(key) || restarts.short_lives() > 0);
        self.ends.retain(|key, _| keys.contains(key));
        let groups: Vec<Group> = keys
            .into_iter()
            .map(|key| {
                let phase: Option<Phase> = tracker.wanted(&key).map(|wanted| wanted.phase);
                let of_key = self.members.iter().filter(|(_, member)| member.key == key);
                Group {
                    phase,
                    limits: self.limits,
                    load: loads.get(&key).copied().unwrap_or_default(),
                    workers: of_key.map(|(id, member)| member.shown(id, now)).collect(),
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
        let Some(driver) = &mut self.driver else { return };
        let why = decision.reasons.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
        for id in &decision.drain {
            if let Some(member) = self.members.get_mut(&**id) {
                tracing::info!(worker = &**id, key = %decision.key, "a worker is told to go: {why}");
                member.going = true;
                driver.stop(id, now);
            }
        }
        for _ in 0..decision.start {
            let id = uuid::Uuid::new_v4().to_string();
            let key = self.names.worker_key(&decision.key);
            let Some(queue) = self.names.request_queue(&decision.key) else { return };
            let mut variables = self.variables.clone();
            variables.extend([
                ("WORKER_ID", id.clone()),
                ("WORKER_KEY", key.clone()),
                ("WORKER_REQUESTS_QUEUE", queue),
            ]);
            match driver.start(Assignment { id: id.clone(), key, variables }) {
                Ok(()) => {
                    self.tally.started.add();
                    tracing::info!(worker = id, key = %decision.key, "a worker is started, of {}: {why}", decision.wanted);
                    let key = decision.key.clone();
                    self.members.insert(id, Member { key, since: now, ready: None, busy: None, going: false });
                }
                Err(error) => {
                    tracing::error!(key = %decision.key, "a worker cannot be started: {error}");
                    self.tally.failed.add();
                    let what = format!("it cannot be started: {error}");
                    self.ends.insert(decision.key.clone(), Ended { at: now, what });
                    restarts_of(&mut self.restarts, &decision.key).ended(End::NeverReady, now);
                    return;
                }
            }
        }
    }
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
