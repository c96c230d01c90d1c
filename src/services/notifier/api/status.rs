//! What is known of each endpoint: whether it gets anything, why not, and what waits for it.

use std::collections::BTreeMap;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use super::Api;
use crate::notifier::store::{Counts, EndpointState, LastFailure, StoreFailure};
use journeyman_domain::lane::endpoint::{DISABLE_ATTEMPTS_MIN, DisableReason, EndpointHealth};
use journeyman_domain::named_enum;
use journeyman_domain::staged::Stamp;
use journeyman_platform::host::clock::stamp;

named_enum! {
    pub enum EndpointCondition {
        Active = "active",
        /// Its last attempts have failed.
        Failing = "failing",
        /// They have for an hour.
        Degraded = "degraded",
        /// It is not tried before a time.
        Resting = "resting",
        Paused = "paused",
        Disabled = "disabled",
    }
}

#[derive(Debug, Default, Serialize, Deserialize)]
pub struct Status {
    pub(crate) version: String,
    pub endpoints: BTreeMap<String, EndpointStatus>,
}

#[derive(Debug, Serialize, Deserialize)]
pub struct EndpointStatus {
    pub state: EndpointCondition,
    /// Why it gets nothing, or not everything, and what to do.
    pub why: Option<String>,
    pub next_try: Option<Stamp>,
    pub last_failure: Option<LastFailure>,
    #[serde(flatten)]
    pub counts: Counts,
    pub health: EndpointHealth,
    pub disabled: Option<DisableReason>,
    pub(crate) paused_until: Option<Stamp>,
    pub note: Option<String>,
}

/// The time; `None` of one without end.
fn shown(at: Stamp) -> Option<String> {
    let at = Timestamp::from_millisecond(at.0).ok()?;
    Some(at.strftime("%Y-%m-%d %H:%M:%S UTC").to_string())
}

impl EndpointStatus {
    /// `probe_at` is when the server of its URL is tried again, of one that does not work.
    fn new(
        name: &str,
        known: EndpointState,
        counts: Counts,
        last_failure: Option<LastFailure>,
        probe_at: Option<Stamp>,
        now: Stamp,
    ) -> Self {
        let EndpointState { health, disabled, paused_until, note, .. } = known;
        let later = |at: Option<Stamp>| at.filter(|at| *at > now);
        let has_failed = || {
            let since = health.failing_since.and_then(shown).unwrap_or_default();
            format!("{} failed attempts since {since}", health.failures)
        };
        let (state, why) = if let Some(reason) = disabled {
            let reason = match reason {
                DisableReason::Gone => "it answered 410".to_owned(),
                DisableReason::ByReceiver => "it asked for that".to_owned(),
                DisableReason::Failing => has_failed(),
                DisableReason::ByOperator => "by an operator".to_owned(),
            };
            let why = format!("disabled: {reason}; `journeyman notifier enable {name}` enables it");
            (EndpointCondition::Disabled, Some(why))
        } else if let Some(until) = later(paused_until) {
            let until = shown(until).map_or_else(String::new, |at| format!(" until {at}"));
            let why = format!("paused{until}; `journeyman notifier resume {name}` ends that");
            (EndpointCondition::Paused, Some(why))
        } else if let Some(until) = later(health.rests_until).and_then(shown) {
            (EndpointCondition::Resting, Some(format!("it asked for a rest until {until}")))
        } else if let Some(probe_at) = probe_at {
            let at = later(Some(probe_at)).and_then(shown).map_or_else(|| "now".to_owned(), |at| format!("at {at}"));
            let why = format!("its server does not work, {}; one attempt probes it {at}", has_failed());
            (EndpointCondition::Resting, Some(why))
        } else if health.is_degraded(now) {
            (EndpointCondition::Degraded, Some(has_failed()))
        } else if health.failures >= DISABLE_ATTEMPTS_MIN {
            (EndpointCondition::Failing, Some(has_failed()))
        } else {
            (EndpointCondition::Active, (health.failures > 0).then(has_failed))
        };
        let (parked, paused) = (counts.parked, counts.paused);
        let stopped = (parked + paused > 0).then(|| {
            format!("lanes stopped: {parked} parked, {paused} paused; `journeyman notifier resume --lane` opens one")
        });
        let why = [why, stopped].into_iter().flatten().reduce(|one, other| format!("{one}; {other}"));
        let not_before = [probe_at, health.rests_until].into_iter().flatten().fold(now, Stamp::max);
        let next_try = match (disabled, later(paused_until)) {
            (Some(_), _) => None,
            (None, Some(until)) => Some(until).filter(|until| until.0 < i64::MAX),
            (None, None) => counts.next_due.map(|due| due.max(not_before)),
        };
        Self { state, why, next_try, last_failure, counts, health, disabled, paused_until, note }
    }
}

impl Api {
    pub(super) async fn status(&self) -> Result<Status, StoreFailure> {
        let mut states = self.store.endpoints().await?.states;
        let mut counts = self.store.counts().await?;
        let mut endpoints = BTreeMap::new();
        let now = stamp();
        for name in self.intake.endpoints().keys() {
            let (counts, failure) = counts.remove(&**name).unwrap_or_default();
            let known = states.remove(&**name).unwrap_or_default();
            let probe_at = self.intake.counters.probe_at(name);
            let status = EndpointStatus::new(name, known, counts, failure, probe_at, now);
            endpoints.insert(name.to_string(), status);
        }
        Ok(Status { version: env!("CARGO_PKG_VERSION").to_owned(), endpoints })
    }
}
