//! Taskcluster queues as a source, in both dialects: the Azure-style one (signed poll URLs, claimTask) and today's
//! claimWork. It makes one call for each method and classifies the answer; when to call is decided elsewhere.

mod address_policy;
mod artifact;
mod azure;
mod claim_calls;
mod credentials;
mod error_response;
pub mod formats;
#[doc(hidden)]
pub mod fuzz_targets;
mod probe;
mod task_calls;
mod transport;
mod wire;

pub use credentials::{Credentials, InvalidCredentials};
pub use probe::{CredentialCheck, PendingCount, PingResponse};
pub use task_calls::{Download, ListPage};
pub use transport::{Api, ApiConfig, InvalidConfig, Timeouts};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::domain::id::{PriorityQueue, Run};
use crate::domain::outcome::Outcome;
use crate::source::{
    Artifact, Capabilities, Claim, ClaimWindow, Grant, Message, OpenResult, PollBatch, RecoveryBatch, Source,
    SourceFuture,
};
use azure::SignedQueues;
use credentials::Swap;
use wire::WorkerIdentity;

/// The longest provisioner, worker type, worker group or worker id, in bytes: that of the Azure-style queue.
const IDENTIFIER_BYTES_MAX_AZURE: usize = 22;
/// The same for today's queue.
const IDENTIFIER_BYTES_MAX: usize = 38;

/// How the source claims tasks.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema, clap::ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum Dialect {
    /// Signed URLs of Azure-style queues, and `claimTask` for each message
    Azure,
    /// `claimWork`, a long poll that claims
    #[default]
    ClaimWork,
}

/// Where the content of artifacts is stored.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum ArtifactStorage {
    /// The queue's own bucket.
    #[default]
    S3,
    /// The object service. Not known to Azure-style queues.
    Object,
}

/// What a Taskcluster source is made of.
#[derive(Clone)]
pub struct Config {
    /// The deployment and the worker's credentials.
    pub api: ApiConfig,
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
    /// Hosts, besides the deployment's own, that signed queue URLs may lead to; [`Config::azure_queue_hosts`] is a
    /// good start. A leading dot stands for every name below it.
    pub queue_hosts: Vec<String>,
}

impl Config {
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
    worker_identity: WorkerIdentity,
    artifact_storage: ArtifactStorage,
    queue_hosts: Vec<String>,
    signed_queues: Swap<SignedQueues>,
}

impl Taskcluster {
    /// Makes a source. Nothing is sent yet.
    ///
    /// # Errors
    ///
    /// Where a setting breaks a limit of the protocol.
    pub fn new(settings: Config) -> Result<Self, InvalidConfig> {
        let bytes_max = match settings.dialect {
            Dialect::Azure => IDENTIFIER_BYTES_MAX_AZURE,
            Dialect::ClaimWork => IDENTIFIER_BYTES_MAX,
        };
        let (provisioner, worker_type) = settings.task_queue.split_once('/').ok_or_else(|| {
            let what = "not of the form provisionerId/workerType";
            InvalidConfig::new("task_queue", what)
        })?;
        check_identifier("task_queue", provisioner, bytes_max)?;
        check_identifier("task_queue", worker_type, bytes_max)?;
        check_identifier("worker_group", &settings.worker_group, bytes_max)?;
        check_identifier("worker_id", &settings.worker_id, bytes_max)?;
        if settings.dialect == Dialect::Azure && settings.artifact_storage == ArtifactStorage::Object {
            let what = "an Azure-style queue knows no \"object\" artifacts; use \"s3\"";
            return Err(InvalidConfig::new("artifact_storage", what));
        }
        let mut api = settings.api;
        // Azure's own hosts are named by us; those that the operator names may be private.
        let named = settings.queue_hosts.iter().filter(|host| !azure::QUEUE_HOSTS.contains(&host.as_str()));
        api.allow_hosts.extend(named.cloned());
        Ok(Self {
            api: Api::new(api)?,
            dialect: settings.dialect,
            task_queue: settings.task_queue,
            worker_identity: WorkerIdentity { group: settings.worker_group, id: settings.worker_id },
            artifact_storage: settings.artifact_storage,
            queue_hosts: settings.queue_hosts,
            signed_queues: Swap::new(SignedQueues::default()),
        })
    }

    /// The client behind the source, for calls that are not a worker's.
    #[must_use]
    pub const fn api(&self) -> &Api {
        &self.api
    }
}

fn check_identifier(setting: &'static str, text: &str, bytes_max: usize) -> Result<(), InvalidConfig> {
    let allowed = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'_';
    let fits = (1..=bytes_max).contains(&text.len()) && text.bytes().all(allowed);
    if fits {
        return Ok(());
    }
    let text = error_response::sanitize(text);
    let what = format!(
        "\"{text}\" should be 1 to {bytes_max} letters, digits, dashes or underscores: the queue accepts nothing else"
    );
    Err(InvalidConfig::new(setting, what))
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

    fn service_id(&self) -> String {
        self.api.queue_base_url().to_owned()
    }

    fn claimant(&self) -> String {
        format!(
            "{} {} {}/{}",
            self.api.queue_base_url(),
            self.task_queue,
            self.worker_identity.group,
            self.worker_identity.id
        )
    }

    fn clock_skew_seconds(&self) -> Option<i64> {
        self.api.clock_ahead()
    }

    fn capabilities(&self) -> Capabilities {
        let long_poll = self.dialect == Dialect::ClaimWork;
        Capabilities { long_poll, supports_recovery: long_poll, reports_cancellation: true, connection_scoped: false }
    }

    fn open(&self) -> SourceFuture<'_, OpenResult> {
        match self.dialect {
            Dialect::Azure => Box::pin(self.poll_task_urls()),
            Dialect::ClaimWork => Box::pin(async { Ok(OpenResult { priority_queues: 1, usable_for: None }) }),
        }
    }

    fn poll(&self, lane: PriorityQueue, max: u8) -> SourceFuture<'_, PollBatch> {
        match self.dialect {
            Dialect::Azure => Box::pin(self.receive_messages(lane, max)),
            Dialect::ClaimWork => Box::pin(self.claim_work(max)),
        }
    }

    fn claim<'a>(&'a self, message: &'a Message) -> SourceFuture<'a, Grant> {
        Box::pin(self.claim_task(&message.run))
    }

    fn delete<'a>(&'a self, lane: PriorityQueue, id: &'a str, receipt: &'a str) -> SourceFuture<'a, ()> {
        match self.dialect {
            Dialect::Azure => Box::pin(self.delete_message(lane, id, receipt)),
            // What claimWork hands out is a claim already; there is no entry that stays behind.
            Dialect::ClaimWork => Box::pin(async { Ok(()) }),
        }
    }

    fn recover<'a>(&'a self, held: &'a [Run], asked: &'a [ClaimWindow]) -> SourceFuture<'a, RecoveryBatch> {
        Box::pin(self.recover_lost_claims(held, asked))
    }

    fn take_over<'a>(&'a self, run: &'a Run) -> SourceFuture<'a, Grant> {
        Box::pin(self.take_over_run(run))
    }

    fn reclaim<'a>(&'a self, claim: &'a Claim) -> SourceFuture<'a, std::time::Duration> {
        Box::pin(self.reclaim_task(claim))
    }

    fn report<'a>(&'a self, claim: &'a Claim, outcome: Outcome) -> SourceFuture<'a, ()> {
        Box::pin(self.report_outcome(claim, outcome))
    }

    fn upload<'a>(&'a self, claim: &'a Claim, artifact: &'a Artifact) -> SourceFuture<'a, ()> {
        Box::pin(self.upload_artifact(claim, artifact))
    }

    fn is_canceled<'a>(&'a self, claim: &'a Claim) -> SourceFuture<'a, bool> {
        Box::pin(self.is_resolved(claim))
    }
}

#[cfg(test)]
#[allow(unreachable_pub, reason = "shared with the test binaries")]
#[path = "../../../tests/support/exchange.rs"]
mod exchange;
#[cfg(test)]
mod recorded_tests;
