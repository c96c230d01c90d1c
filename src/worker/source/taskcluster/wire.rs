//! Responses of the queue service that the worker reads, and the lease they grant.

use std::collections::BTreeMap;
use std::time::Duration;

use jiff::Timestamp;
use secrecy::SecretString;
use serde::Deserialize;
use serde_json::Value;
use serde_json::value::RawValue;

use super::credentials::Credentials;
use crate::source::RunTerms;
use journeyman_domain::id::{Run, TaskId};
use journeyman_domain::limits::LEASE_MAX;
use journeyman_platform::host::clock::Clock;

const DATE_RESOLUTION: Duration = Duration::from_secs(1);

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct WireCredentials {
    client_id: String,
    access_token: SecretString,
    certificate: Option<SecretString>,
}

impl WireCredentials {
    pub(super) fn parse(self) -> Result<Credentials, String> {
        Credentials::new(&self.client_id, self.access_token, self.certificate.as_ref())
            .map_err(|error| format!("invalid credentials: {error}"))
    }

    /// The lifetime by the certificate, by the service's clock alone.
    fn lifetime(&self) -> Option<Duration> {
        #[derive(Deserialize)]
        struct Certificate {
            start: i64,
            expiry: i64,
        }
        let text = secrecy::ExposeSecret::expose_secret(self.certificate.as_ref()?);
        let Certificate { start, expiry } = serde_json::from_slice(text.as_bytes()).ok()?;
        let lifetime = u64::try_from(expiry.checked_sub(start)?).ok()?;
        bounded_lease(Duration::from_millis(lifetime))
    }
}

/// A claim, or the renewal of one.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct WireClaim {
    pub(super) status: WireStatus,
    pub(super) run_id: u32,
    worker_group: String,
    worker_id: String,
    taken_until: Timestamp,
    /// A renewal has none.
    task: Option<TaskDefinition>,
    credentials: WireCredentials,
}

/// A task definition as far as it can be parsed: JSON may contain lone surrogates, 1e999 or unlimited nesting.
pub(super) struct TaskDefinition {
    pub(super) task: Value,
    pub(super) unreadable: Option<String>,
}

impl TaskDefinition {
    /// The claims need no task.
    pub(super) const EMPTY: Self = Self { task: Value::Null, unreadable: None };

    fn parse(raw: &RawValue) -> Self {
        let whole = serde_json::from_slice(raw.get().as_bytes());
        if let Ok(task) = whole {
            return Self { task, unreadable: None };
        }
        let fields: BTreeMap<String, Box<RawValue>> = serde_json::from_slice(raw.get().as_bytes()).unwrap_or_default();
        let (mut task, mut unreadable) = (serde_json::Map::new(), None);
        for (name, raw) in fields {
            match serde_json::from_slice::<Value>(raw.get().as_bytes()) {
                Ok(value) => drop(task.insert(name, value)),
                // serde_json quotes nothing of JSON that it cannot parse.
                Err(error) if name == "payload" => unreadable = Some(error.to_string()),
                Err(_) => {}
            }
        }
        Self { task: task.into(), unreadable }
    }
}

impl<'de> Deserialize<'de> for TaskDefinition {
    fn deserialize<D: serde::Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        Ok(Self::parse(&Box::<RawValue>::deserialize(from)?))
    }
}

/// Entries are parsed one by one, so that an invalid one does not affect the others.
#[derive(Deserialize)]
pub(super) struct WireClaims {
    pub(super) tasks: Vec<Box<RawValue>>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct WireStatus {
    pub(super) task_id: String,
    retries_left: Option<u32>,
    deadline: Option<Timestamp>,
    #[serde(default)]
    pub(super) runs: Vec<WireRun>,
}

impl WireStatus {
    pub(super) fn reported_runs(&self) -> u32 {
        self.runs.iter().rfind(|one| one.is_final()).map_or(0, |one| one.run_id.saturating_add(1))
    }
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct WireRun {
    pub(super) run_id: u32,
    pub(super) state: String,
    pub(super) reason_resolved: Option<String>,
    pub(super) worker_group: Option<String>,
    pub(super) worker_id: Option<String>,
    scheduled: Option<String>,
    started: Option<String>,
}

impl WireRun {
    pub(super) fn is_resolved(&self) -> bool {
        matches!(self.state.as_str(), "completed" | "failed" | "exception")
    }

    /// The queue makes another run by itself of one that was released or has expired.
    fn is_final(&self) -> bool {
        self.is_resolved() && !matches!(self.reason_resolved.as_deref(), Some("worker-shutdown" | "claim-expired"))
    }

    fn queued_for(&self) -> Option<Duration> {
        let [scheduled, started] =
            [&self.scheduled, &self.started].map(|time| time.as_ref()?.parse::<Timestamp>().ok());
        Duration::try_from(started?.duration_since(scheduled?)).ok()
    }
}

#[derive(Deserialize)]
pub(super) struct WireStatusReply {
    pub(super) status: WireStatus,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct WireClaimedPage {
    pub(super) tasks: Vec<WireClaimed>,
    pub(super) continuation_token: Option<String>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct WireClaimed {
    pub(super) task_id: String,
    pub(super) run_id: u32,
    pub(super) worker_group: String,
    pub(super) worker_id: String,
    /// The time of the claim by the service's clock.
    pub(super) claimed: Option<Timestamp>,
    pub(super) task: Option<TaskDefinition>,
}

#[derive(Debug, Clone)]
pub(super) struct WorkerIdentity {
    pub(super) group: String,
    pub(super) id: String,
}

impl WorkerIdentity {
    pub(super) fn matches(&self, group: &str, id: &str) -> bool {
        self.group == group && self.id == id
    }
}

/// A claim that is consistent and granted to this worker.
pub(super) struct CheckedGrant {
    pub(super) run: Run,
    pub(super) lease: Duration,
    pub(super) terms: RunTerms,
    pub(super) queued_for: Option<Duration>,
    pub(super) reported_runs: u32,
    pub(super) credentials: Credentials,
    pub(super) task: Option<TaskDefinition>,
}

impl WireClaim {
    pub(super) fn check(self, worker: &WorkerIdentity, date: Timestamp) -> Result<CheckedGrant, String> {
        let task = TaskId::parse(&self.status.task_id).ok_or("invalid task id")?;
        let run = Run { task, run: self.run_id };
        if !worker.matches(&self.worker_group, &self.worker_id) {
            return Err(format!("{run} was granted to another worker"));
        }
        let lease = lease_length(self.taken_until, date, &self.credentials)
            .ok_or_else(|| format!("{run} was granted with an invalid lease"))?;
        let left = self.status.deadline.map(|deadline| deadline.duration_since(date));
        // Never before the service's clock has reached it: counted from when the response is read.
        let deadline = left.map(|left| Clock::boot().now().plus(Duration::try_from(left).unwrap_or_default()));
        let terms = RunTerms { deadline, retries_left: self.status.retries_left };
        let queued_for = self.status.runs.iter().find(|of| of.run_id == run.run).and_then(WireRun::queued_for);
        let reported_runs = self.status.reported_runs();
        let credentials = self.credentials.parse()?;
        Ok(CheckedGrant { run, lease, terms, queued_for, reported_runs, credentials, task: self.task })
    }
}

/// `takenUntil` minus the response's `Date`, independent of the local clock. If the certificate has a shorter
/// lifetime, a proxy has written the `Date`, and the shorter lifetime counts.
fn lease_length(taken_until: Timestamp, date: Timestamp, by: &WireCredentials) -> Option<Duration> {
    let by_date = Duration::try_from(taken_until.duration_since(date)).ok().and_then(bounded_lease).map(|lease| {
        // A `Date` is truncated to whole seconds.
        lease.saturating_sub(DATE_RESOLUTION).max(lease / 2)
    });
    match (by_date, by.lifetime()) {
        (Some(by_date), Some(by_certificate)) => Some(by_date.min(by_certificate)),
        (by_date, by_certificate) => by_date.or(by_certificate),
    }
}

fn bounded_lease(lease: Duration) -> Option<Duration> {
    // A longer lease is cut; rejecting it would strand the claim.
    (!lease.is_zero()).then(|| lease.min(LEASE_MAX))
}
