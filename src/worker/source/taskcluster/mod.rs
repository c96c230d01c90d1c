//! Taskcluster queues as a source, in two dialects: Azure (signed poll URLs, claimTask) and claimWork.
//!
//! Each method makes one call and classifies the response; the worker decides when to call.

mod address_policy;
mod artifact;
mod azure;
mod claim_calls;
mod client_calls;
#[doc(hidden)]
pub mod config;
mod credentials;
mod deployment;
mod error_response;
mod probe;
mod transport;
mod wire;
mod worker_pool;

pub use client_calls::{Download, ListPage, TaskSearch};
pub use config::ClientCredentials;
pub use credentials::{Credentials, InvalidCredentials};
pub use probe::CredentialCheck;
use probe::QuarantineCheck;
pub use transport::{Api, ApiConfig, InvalidConfig, RereadCredentials, Timeouts};
pub use worker_pool::WorkerPool;

use jiff::Timestamp;
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use crate::source::{
    Capabilities, Grant, Message, MessageQueue, OpenResult, PauseSwitch, PollBatch, Recovery, RecoveryBatch, Source,
    SourceFuture,
};
use azure::SignedQueues;
use credentials::Swap;
use journeyman_domain::id::{PriorityQueue, Run, TaskId};
use wire::WorkerIdentity;

/// The variable with the location of the host, in the JSON of its provider.
pub const LOCATION_VARIABLE: &str = "TASKCLUSTER_WORKER_LOCATION";
/// The type of the host, in the words of its provider.
pub const INSTANCE_TYPE_VARIABLE: &str = "TASKCLUSTER_INSTANCE_TYPE";

/// The limit of the queue before `claimWork`, in bytes.
const IDENTIFIER_BYTES_MAX_AZURE: usize = 22;
const IDENTIFIER_BYTES_MAX: usize = 38;

/// How the source claims tasks.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[cfg_attr(debug_assertions, derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum Dialect {
    /// Signed URLs of Azure-style queues, and `claimTask` for each message
    Azure,
    /// `claimWork`, a long poll that claims
    #[default]
    ClaimWork,
}

/// The service that stores the content of artifacts.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(debug_assertions, derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum ArtifactStorage {
    /// The queue's own bucket.
    #[default]
    S3,
    /// The object service. Not known to Azure-style queues.
    Object,
}

/// Settings of a Taskcluster source.
#[derive(Clone)]
pub struct Config {
    /// The deployment and the worker's credentials.
    pub api: ApiConfig,
    /// Which calls claim tasks.
    pub dialect: Dialect,
    /// The task queue: `provisionerId/workerType`.
    pub task_queue: String,
    /// The worker group, such as a region.
    pub worker_group: String,
    /// The worker id, unique within its group.
    pub worker_id: String,
    /// Which storage keeps artifact content.
    pub artifact_storage: ArtifactStorage,
}

/// A Taskcluster queue as a source of claims.
pub struct Taskcluster {
    service: Arc<Service>,
    signed_queues: Swap<SignedQueues>,
    quarantine: Mutex<QuarantineCheck>,
    /// A listing of this worker's claims has succeeded.
    lists_claims: AtomicBool,
    pause: PauseSwitch,
}

/// What the source shares with its claims.
struct Service {
    api: Api,
    task_queue: String,
    dialect: Dialect,
    worker_identity: WorkerIdentity,
    artifact_storage: ArtifactStorage,
    /// Without the scope for it.
    cannot_read_status: AtomicBool,
    /// Runs of the claims that exist, and how many each has.
    held: Mutex<BTreeMap<Run, usize>>,
}

impl Taskcluster {
    /// Creates a source; sends nothing.
    ///
    /// # Errors
    ///
    /// A setting exceeds a limit of the protocol.
    pub fn new(config: Config) -> Result<Self, InvalidConfig> {
        let bytes_max = match config.dialect {
            Dialect::Azure => IDENTIFIER_BYTES_MAX_AZURE,
            Dialect::ClaimWork => IDENTIFIER_BYTES_MAX,
        };
        let (provisioner, worker_type) = config.task_queue.split_once('/').ok_or_else(|| {
            let reason = "not of the form provisionerId/workerType";
            InvalidConfig::new("task_queue", reason)
        })?;
        check_identifier("task_queue", provisioner, bytes_max)?;
        check_identifier("task_queue", worker_type, bytes_max)?;
        check_identifier("worker_group", &config.worker_group, bytes_max)?;
        check_identifier("worker_id", &config.worker_id, bytes_max)?;
        if config.dialect == Dialect::Azure && config.artifact_storage == ArtifactStorage::Object {
            let reason = "a queue of the azure dialect has no \"object\" artifacts; use \"s3\"";
            return Err(InvalidConfig::new("artifact_storage", reason));
        }
        Ok(Self {
            service: Arc::new(Service {
                api: Api::new(config.api)?,
                task_queue: config.task_queue,
                dialect: config.dialect,
                worker_identity: WorkerIdentity { group: config.worker_group, id: config.worker_id },
                artifact_storage: config.artifact_storage,
                cannot_read_status: AtomicBool::new(false),
                held: Mutex::default(),
            }),
            signed_queues: Swap::new(SignedQueues::default()),
            quarantine: Mutex::default(),
            lists_claims: AtomicBool::new(false),
            pause: PauseSwitch::new(),
        })
    }

    /// The API client, for calls outside the worker's role.
    pub fn api(&self) -> &Api {
        &self.service.api
    }
}

fn check_identifier(setting: &'static str, text: &str, bytes_max: usize) -> Result<(), InvalidConfig> {
    let allowed = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'_';
    let fits = (1..=bytes_max).contains(&text.len()) && text.bytes().all(allowed);
    if fits {
        return Ok(());
    }
    let text = error_response::sanitize(text);
    let reason = format!("\"{text}\" must be 1 to {bytes_max} letters, digits, dashes or underscores");
    Err(InvalidConfig::new(setting, reason))
}

impl Source for Taskcluster {
    fn describe(&self) -> String {
        let dialect = match self.service.dialect {
            Dialect::Azure => "Azure",
            Dialect::ClaimWork => "claimWork",
        };
        let root = self.service.api.root_url();
        format!("Taskcluster ({dialect}) at {root}, queue {}", self.service.task_queue)
    }

    fn service_id(&self) -> String {
        self.service.api.0.queue_url.clone()
    }

    fn claimant(&self) -> String {
        format!(
            "{} {} {}/{}",
            self.service.api.0.queue_url,
            self.service.task_queue,
            self.service.worker_identity.group,
            self.service.worker_identity.id
        )
    }

    fn clock_skew_seconds(&self) -> Option<i64> {
        self.service.api.clock_ahead()
    }

    fn quarantined_until(&self) -> Option<Timestamp> {
        self.quarantine.lock().until
    }

    fn capabilities(&self) -> Capabilities {
        let long_poll = self.service.dialect == Dialect::ClaimWork;
        Capabilities {
            long_poll,
            supports_recovery: long_poll,
            reports_cancellation: true,
            connection_scoped: false,
            fenced_reports: false,
        }
    }

    fn open(&self) -> SourceFuture<'_, OpenResult> {
        match self.service.dialect {
            Dialect::Azure => Box::pin(self.poll_task_urls()),
            Dialect::ClaimWork => Box::pin(async { Ok(OpenResult { priority_queues: 1, usable_for: None }) }),
        }
    }

    fn poll(&self, queue: PriorityQueue, max: u8) -> SourceFuture<'_, PollBatch> {
        match self.service.dialect {
            Dialect::Azure => Box::pin(self.receive_messages(queue, max)),
            Dialect::ClaimWork => Box::pin(self.claim_work(max)),
        }
    }

    fn message_queue(&self) -> Option<&dyn MessageQueue> {
        (self.service.dialect == Dialect::Azure).then_some(self)
    }

    fn recovery(&self) -> Option<&dyn Recovery> {
        Some(self)
    }

    fn pause(&self) {
        self.pause.set(true);
    }

    fn resume(&self) {
        self.pause.set(false);
    }
}

impl MessageQueue for Taskcluster {
    fn claim<'a>(&'a self, run: &'a Run) -> SourceFuture<'a, Grant> {
        Box::pin(self.claim_task(run))
    }

    fn delete<'a>(&'a self, message: &'a Message) -> SourceFuture<'a, ()> {
        Box::pin(self.delete_message(message))
    }
}

impl Recovery for Taskcluster {
    fn recover<'a>(&'a self, held: &'a [Run], newer_than: Option<Duration>) -> SourceFuture<'a, RecoveryBatch> {
        Box::pin(self.recover_lost_claims(held, newer_than))
    }

    fn take_over<'a>(&'a self, run: &'a Run) -> SourceFuture<'a, Grant> {
        Box::pin(self.take_over_run(run))
    }

    fn is_resolved<'a>(&'a self, task: &'a TaskId) -> SourceFuture<'a, bool> {
        Box::pin(self.is_task_resolved(task))
    }
}

#[cfg(test)]
#[allow(unreachable_pub, reason = "shared with the test binaries")]
#[path = "../../../../tests/support/exchange.rs"]
mod exchange;
#[cfg(any(test, fuzzing))]
#[doc(hidden)]
pub mod fuzz_tests;
#[cfg(test)]
mod recorded_tests;
