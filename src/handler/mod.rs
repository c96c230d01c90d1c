//! What runs a payload: the port that users implement.
//!
//! In Rust a handler is a [`PayloadHandler`]; a program in any language is one through `program`, and `command` runs
//! the argument vectors that a task brings. The runtime owns the lease, the log and the report; a handler only says
//! whether the payload can work, and how it ended.

pub mod artifact;
pub mod artifact_collector;
pub mod command;
pub mod context;
pub mod contract_test;
pub mod environment;
mod exit_watcher;
pub mod host_errors;
pub mod http;
pub mod log;
pub mod payload_schema;
pub mod process;
pub mod program;
pub mod program_messages;
pub mod request;
pub mod safe_open;
pub mod sidecar;

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;

use serde::Deserialize as _;
use serde::de::DeserializeOwned;

use payload_schema::PayloadSchema;

pub use context::{CancelCause, Cancellation, Context, TaskInfo};
pub use request::Request;
pub use sidecar::SidecarContext;

/// Why a payload is not started. Each sentence goes into the task's log.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PrepareError {
    /// The payload can never work; the sentences say what is wrong and where. Reported as `malformed-payload`.
    Malformed(Vec<String>),
    /// Something it declares cannot be had at present. Reported as `resource-unavailable`.
    Unavailable(String),
    /// The handler is at fault. Reported as `internal-error`.
    Internal(String),
    /// The host is at fault: no disk, no memory, no more processes or files. The task is handed back, as `worker-shutdown`,
    /// which the queue retries, and the worker claims nothing until its host was found fit.
    Host(String),
    /// What runs it is not there at present. The task is handed back, as `worker-shutdown`, which the queue retries.
    ServiceDown(String),
}

/// Why a payload that was started did not succeed. The sentence goes into the task's log.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ExecuteError {
    /// The task's own code failed. Reported as `failed`.
    Failed(String),
    /// It failed in a way that the task declared worth another run. Reported as `intermittent-task`.
    Intermittent(String),
    /// Something it declares could not be had. Reported as `resource-unavailable`.
    Unavailable(String),
    /// The handler broke. Reported as `internal-error`.
    Internal(String),
    /// The host could not run it: no disk, no memory, no more processes or files. As [`PrepareError::Host`].
    Host(String),
    /// What runs it was not there, and nothing of it ran. As [`PrepareError::ServiceDown`].
    ServiceDown(String),
}

/// Where a handler runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RunsOn {
    /// On threads that only handlers use: it may compute, and block, and costs no other task its claim.
    OwnThreads,
    /// On the threads that keep leases, which saves a word to another thread and one back: a tenth of a millisecond that a short
    /// request notices. Each step of it has to be over within a millisecond; one that blocks holds up every lease of the worker.
    LeaseThreads,
}

/// A kind of payload and how to run it.
///
/// A panic in either method becomes `internal-error` and costs no other task anything.
pub trait PayloadHandler: Send + Sync + 'static {
    /// The payload's shape. Its JSON Schema is checked before `prepare`, and shown by `journeyman handler schema`.
    type Payload: DeserializeOwned + schemars::JsonSchema + Send + 'static;
    /// What `prepare` hands to `execute`; often the payload itself.
    type Prepared: Send + 'static;

    /// One line for those who look at the worker: what it is.
    fn describe(&self) -> String {
        std::any::type_name::<Self>().to_owned()
    }

    /// Checks and fetches what the payload declares, before any task code runs.
    ///
    /// Dropped when the task has to end early, so it must leave nothing behind that its drop does not clean up.
    fn prepare(
        &self,
        payload: Self::Payload,
        context: &Context,
    ) -> impl Future<Output = Result<Self::Prepared, PrepareError>> + Send;

    /// Runs the payload to its end.
    ///
    /// When [`Context::canceled`] resolves, it has until [`Cancellation::deadline`] to end what it started; then it is
    /// dropped, and its drop must end what is left.
    ///
    /// Processes are best started by [`process::RunningProcess`] within [`Context::scope`]: they end with the claim, and so does
    /// what they leave behind. Those that it starts by other means are its own to wait for and to end, and what they leave
    /// running may be killed with any claim.
    fn execute(
        &self,
        prepared: Self::Prepared,
        context: &Context,
    ) -> impl Future<Output = Result<(), ExecuteError>> + Send;

    /// Where it runs.
    fn runs_on(&self) -> RunsOn {
        RunsOn::OwnThreads
    }

    /// What it keeps there beside its tasks, by a name that can be a file's; `None` is nothing.
    fn sidecar_name(&self) -> Option<String> {
        None
    }

    /// Keeps there what its tasks need, such as a service that they are forwarded to, until `SidecarContext::stop` resolves. Called
    /// once, before the first task, where [`PayloadHandler::sidecar_name`] says so: nothing is claimed for this handler until
    /// [`SidecarContext::set_status`] was told that tasks can come, and while it says that they cannot.
    fn run_sidecar(&self, lent: SidecarContext) -> impl Future<Output = ()> + Send {
        drop(lent);
        std::future::ready(())
    }
}

/// A future that a handler made.
pub type HandlerFuture<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// A handler whose types are known only to itself, as the runtime holds it.
pub trait DynHandler: Send + Sync + 'static {
    /// One line for those who look at the worker: what it is.
    fn describe(&self) -> String;

    /// The JSON Schema of the payload.
    fn schema(&self) -> serde_json::Value;

    /// Checks the payload against the schema, then prepares it.
    fn prepare<'a>(
        &'a self,
        payload: &'a serde_json::Value,
        context: &'a Context,
    ) -> HandlerFuture<'a, Result<Box<dyn PreparedPayload>, PrepareError>>;

    /// As [`PayloadHandler::runs_on`].
    fn runs_on(&self) -> RunsOn {
        RunsOn::OwnThreads
    }

    /// As [`PayloadHandler::sidecar_name`].
    fn sidecar_name(&self) -> Option<String> {
        None
    }

    /// As [`PayloadHandler::run_sidecar`].
    fn run_sidecar(&self, lent: SidecarContext) -> HandlerFuture<'_, ()> {
        drop(lent);
        Box::pin(std::future::ready(()))
    }
}

/// A payload that is ready to be started.
pub trait PreparedPayload: Send {
    /// Runs it to its end.
    fn execute<'a>(self: Box<Self>, context: &'a Context) -> HandlerFuture<'a, Result<(), ExecuteError>>;
}

/// Makes a [`DynHandler`] of a [`PayloadHandler`].
pub fn erase<H: PayloadHandler>(handler: H) -> Arc<dyn DynHandler> {
    let schema = serde_json::Value::from(schemars::schema_for!(H::Payload));
    let checked = PayloadSchema::new(schema);
    let handler = Arc::new(handler);
    Arc::new(ErasedHandler { handler, schema: checked })
}

struct ErasedHandler<H> {
    handler: Arc<H>,
    schema: Result<PayloadSchema, payload_schema::InvalidSchema>,
}

struct ErasedPayload<H: PayloadHandler> {
    handler: Arc<H>,
    prepared: H::Prepared,
}

impl<H: PayloadHandler> DynHandler for ErasedHandler<H> {
    fn describe(&self) -> String {
        self.handler.describe()
    }

    fn schema(&self) -> serde_json::Value {
        self.schema.as_ref().map_or_else(|unusable| unusable.schema.clone(), |checked| checked.schema().clone())
    }

    fn prepare<'a>(
        &'a self,
        payload: &'a serde_json::Value,
        context: &'a Context,
    ) -> HandlerFuture<'a, Result<Box<dyn PreparedPayload>, PrepareError>> {
        Box::pin(async move {
            let checked = self.schema.as_ref().map_err(|unusable| PrepareError::Internal(unusable.to_string()))?;
            checked.validate(payload)?;
            // The message of a failure here may quote the payload, so only its place is told.
            let payload = H::Payload::deserialize(payload).map_err(|error| deserialize_error::<H>(&error))?;
            let prepared = self.handler.prepare(payload, context).await?;
            let handler = Arc::clone(&self.handler);
            let ready: Box<dyn PreparedPayload> = Box::new(ErasedPayload { handler, prepared });
            Ok(ready)
        })
    }

    fn runs_on(&self) -> RunsOn {
        self.handler.runs_on()
    }

    fn sidecar_name(&self) -> Option<String> {
        self.handler.sidecar_name()
    }

    fn run_sidecar(&self, lent: SidecarContext) -> HandlerFuture<'_, ()> {
        Box::pin(self.handler.run_sidecar(lent))
    }
}

impl<H: PayloadHandler> PreparedPayload for ErasedPayload<H> {
    fn execute<'a>(self: Box<Self>, context: &'a Context) -> HandlerFuture<'a, Result<(), ExecuteError>> {
        Box::pin(async move {
            let Self { handler, prepared } = *self;
            handler.execute(prepared, context).await
        })
    }
}

fn deserialize_error<H: PayloadHandler>(error: &serde_json::Error) -> PrepareError {
    let kind = std::any::type_name::<H::Payload>();
    tracing::debug!(kind, category = ?error.classify(), "a payload fits its schema and cannot be read");
    PrepareError::Malformed(vec![format!("payload: it fits the schema, but cannot be read as {kind}")])
}
