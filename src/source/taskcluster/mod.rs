//! Taskcluster queues as a source, in both dialects: the Azure-style one (signed poll URLs, claimTask) and today's
//! claimWork. It makes one call for each method and classifies the answer; when to call is decided elsewhere.

mod api;
mod artifact;
mod azure;
mod claims;
mod client;
mod credentials;
#[doc(hidden)]
pub mod hostile;
mod probe;
mod reach;
mod refuse;
mod wire;
pub mod words;

#[cfg(test)]
#[allow(unreachable_pub, reason = "shared with the test binaries")]
#[path = "../../../tests/support/exchange.rs"]
mod exchange;
#[cfg(test)]
mod recorded;

pub use api::{Api, ApiSettings, Timeouts, Unusable};
pub use client::{Download, Page};
pub use credentials::{BadCredentials, Credentials};
pub use probe::{Known, Pending, Pong};

use crate::domain::id::{Lane, Run};
use crate::domain::outcome::Outcome;
use crate::source::{Answer, Artifact, Batch, Claim, Grant, Manner, Message, Opened, Recovered, Source, Window};
use azure::Lanes;
use credentials::Swap;
use wire::Worker;

/// The longest provisioner, worker type, worker group or worker id, in bytes: that of the Azure-style queue.
const IDENTIFIER_BYTES_MAX_AZURE: usize = 22;
/// The same for today's queue.
const IDENTIFIER_BYTES_MAX: usize = 38;

/// How claims are asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Dialect {
    /// `pollTaskUrls`, Azure queues and `claimTask`.
    Azure,
    /// `claimWork`, held open by the service until there is something to claim.
    ClaimWork,
}

/// Where the content of artifacts is kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum ArtifactStorage {
    /// The queue's own bucket.
    #[default]
    S3,
    /// The object service. Not known to Azure-style queues.
    Object,
}

/// What a Taskcluster source is made of.
#[derive(Clone)]
pub struct Settings {
    /// The deployment and the worker's credentials.
    pub api: ApiSettings,
    /// How claims are asked for.
    pub dialect: Dialect,
    /// Whose tasks are claimed: `provisionerId/workerType`.
    pub task_queue: String,
    /// The worker's group, such as a region.
    pub worker_group: String,
    /// The worker's name within its group.
    pub worker_id: String,
    /// Where the content of artifacts is kept.
    pub artifact_storage: ArtifactStorage,
    /// Hosts, besides the deployment's own, that signed queue URLs may lead to; [`Settings::azure_queue_hosts`] is a
    /// good start. A leading dot stands for every name below it.
    pub queue_hosts: Vec<String>,
}

impl Settings {
    /// Where Azure Queue Storage is.
    #[must_use]
    pub fn azure_queue_hosts() -> Vec<String> {
        azure::QUEUE_HOSTS.map(str::to_owned).to_vec()
    }
}

/// A Taskcluster queue as a source of claims.
pub struct Taskcluster {
    api: Api,
    dialect: Dialect,
    task_queue: String,
    worker: Worker,
    artifact_storage: ArtifactStorage,
    queue_hosts: Vec<String>,
    lanes: Swap<Lanes>,
}

impl Taskcluster {
    /// Makes a source. Nothing is sent yet.
    ///
    /// # Errors
    ///
    /// Where a setting breaks a limit of the protocol.
    pub fn new(settings: Settings) -> Result<Self, Unusable> {
        let bytes_max = match settings.dialect {
            Dialect::Azure => IDENTIFIER_BYTES_MAX_AZURE,
            Dialect::ClaimWork => IDENTIFIER_BYTES_MAX,
        };
        let (provisioner, worker_type) = settings.task_queue.split_once('/').ok_or_else(|| {
            let what = "not of the form provisionerId/workerType";
            Unusable::new("task_queue", what)
        })?;
        identifier("task_queue", provisioner, bytes_max)?;
        identifier("task_queue", worker_type, bytes_max)?;
        identifier("worker_group", &settings.worker_group, bytes_max)?;
        identifier("worker_id", &settings.worker_id, bytes_max)?;
        if settings.dialect == Dialect::Azure && settings.artifact_storage == ArtifactStorage::Object {
            let what = "an Azure-style queue knows no \"object\" artifacts; use \"s3\"";
            return Err(Unusable::new("artifact_storage", what));
        }
        let mut api = settings.api;
        // Azure's own hosts are named by us; those that the operator names may be private.
        let named = settings.queue_hosts.iter().filter(|host| !azure::QUEUE_HOSTS.contains(&host.as_str()));
        api.allow_hosts.extend(named.cloned());
        Ok(Self {
            api: Api::new(api)?,
            dialect: settings.dialect,
            task_queue: settings.task_queue,
            worker: Worker { group: settings.worker_group, id: settings.worker_id },
            artifact_storage: settings.artifact_storage,
            queue_hosts: settings.queue_hosts,
            lanes: Swap::new(Lanes::default()),
        })
    }

    /// The client behind the source, for calls that are not a worker's.
    #[must_use]
    pub const fn api(&self) -> &Api {
        &self.api
    }
}

fn identifier(setting: &'static str, text: &str, bytes_max: usize) -> Result<(), Unusable> {
    let allowed = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'_';
    let fits = (1..=bytes_max).contains(&text.len()) && text.bytes().all(allowed);
    if fits {
        return Ok(());
    }
    let text = refuse::clean(text);
    let what = format!(
        "\"{text}\" should be 1 to {bytes_max} letters, digits, dashes or underscores: the queue accepts nothing else"
    );
    Err(Unusable::new(setting, what))
}

impl Source for Taskcluster {
    fn describe(&self) -> String {
        let dialect = match self.dialect {
            Dialect::Azure => "azure",
            Dialect::ClaimWork => "claim-work",
        };
        let root = self.api.root_url();
        format!("Taskcluster ({dialect}) at {root}, queue {}", self.task_queue)
    }

    fn deployment(&self) -> String {
        self.api.queue_base().to_owned()
    }

    fn claimant(&self) -> String {
        format!("{} {} {}/{}", self.api.queue_base(), self.task_queue, self.worker.group, self.worker.id)
    }

    fn clock_ahead(&self) -> Option<i64> {
        self.api.clock_ahead()
    }

    fn manner(&self) -> Manner {
        let long_poll = self.dialect == Dialect::ClaimWork;
        Manner { long_poll, recovers: long_poll, tells_canceled: true, ends_with_worker: false }
    }

    fn open(&self) -> Answer<'_, Opened> {
        match self.dialect {
            Dialect::Azure => Box::pin(self.poll_task_urls()),
            Dialect::ClaimWork => Box::pin(async { Ok(Opened { lanes: 1, usable_for: None }) }),
        }
    }

    fn poll(&self, lane: Lane, max: u8) -> Answer<'_, Batch> {
        match self.dialect {
            Dialect::Azure => Box::pin(self.receive(lane, max)),
            Dialect::ClaimWork => Box::pin(self.claim_work(max)),
        }
    }

    fn claim<'a>(&'a self, message: &'a Message) -> Answer<'a, Grant> {
        Box::pin(self.claim_task(&message.run))
    }

    fn delete<'a>(&'a self, lane: Lane, id: &'a str, receipt: &'a str) -> Answer<'a, ()> {
        match self.dialect {
            Dialect::Azure => Box::pin(self.delete_message(lane, id, receipt)),
            // What claimWork hands out is a claim already; there is no entry that stays behind.
            Dialect::ClaimWork => Box::pin(async { Ok(()) }),
        }
    }

    fn recover<'a>(&'a self, held: &'a [Run], asked: &'a [Window]) -> Answer<'a, Recovered> {
        Box::pin(self.find_lost(held, asked))
    }

    fn take_over<'a>(&'a self, run: &'a Run) -> Answer<'a, Grant> {
        Box::pin(self.take_back(run))
    }

    fn reclaim<'a>(&'a self, claim: &'a Claim) -> Answer<'a, std::time::Duration> {
        Box::pin(self.reclaim_task(claim))
    }

    fn report<'a>(&'a self, claim: &'a Claim, outcome: Outcome) -> Answer<'a, ()> {
        Box::pin(self.resolve(claim, outcome))
    }

    fn upload<'a>(&'a self, claim: &'a Claim, artifact: &'a Artifact) -> Answer<'a, ()> {
        Box::pin(self.store(claim, artifact))
    }

    fn canceled<'a>(&'a self, claim: &'a Claim) -> Answer<'a, bool> {
        Box::pin(self.is_resolved(claim))
    }
}
