//! The handler port: runs payloads, in Rust or as a program or service in any language.
//!
//! A handler in Rust implements [`PayloadHandler`]. The handler kind `program` runs a program in any language, `http`
//! forwards to a service, and `command` runs the argument vectors in a task's payload. The worker owns the lease, the log
//! and the report; the handler decides whether a payload can run and how it ended.

pub mod artifact;
#[doc(hidden)]
pub mod artifact_collector;
#[doc(hidden)]
pub mod chain_of_trust;
#[doc(hidden)]
pub mod command;
#[doc(hidden)]
pub mod config;
#[doc(hidden)]
pub mod containers;
pub mod context;
#[doc(hidden)]
pub mod contract_test;
#[doc(hidden)]
pub mod environment;
mod exit_watcher;
#[doc(hidden)]
pub mod hooks;
#[doc(hidden)]
pub mod http;
#[doc(hidden)]
pub mod kubernetes;
mod layer;
pub mod log;
mod log_file;
#[doc(hidden)]
pub mod mounts;
#[doc(hidden)]
pub mod payload_parts;
#[doc(hidden)]
pub mod payload_schema;
pub mod process;
#[doc(hidden)]
pub mod program;
#[doc(hidden)]
pub mod program_messages;
#[doc(hidden)]
pub mod safe_open;
pub mod sidecar;
pub mod staged;
mod staged_program;
#[doc(hidden)]
pub mod task_proxy;
#[doc(hidden)]
pub mod task_users;

use std::any::{Any, TypeId};
use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::Arc;

use serde::Deserialize as _;
use serde::de::DeserializeOwned;

use payload_schema::PayloadSchema;

use journeyman_domain::id::Run;
use journeyman_platform::host::host_errors;

pub use crate::task::Request;
pub use config::RunTime;
pub use context::{Cancellation, Context, TaskInfo};
pub use journeyman_domain::claim::{CancelCause, CancelCommand};
pub use journeyman_domain::lease::{Granted, Lease};
pub use journeyman_domain::outcome::{ExecuteFailure, PrepareFailure};
pub use sidecar::{Sidecar, SidecarContext};

/// Why a payload is not started.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{}", messages.join("; "))]
pub struct PrepareError {
    /// Decides how the task is reported.
    pub reason: PrepareFailure,
    /// Goes into the task's log. For a malformed payload, each message names a place and what is wrong there.
    pub messages: Vec<String>,
}

impl PrepareError {
    /// An error with one message.
    pub fn new(reason: PrepareFailure, message: impl Into<String>) -> Self {
        Self { reason, messages: vec![message.into()] }
    }

    /// The payload can never run.
    pub const fn malformed(messages: Vec<String>) -> Self {
        Self { reason: PrepareFailure::Malformed, messages }
    }

    /// An error of the operating system: a fault of the host if its resources are exhausted, else of the handler.
    pub fn from_io(subject: &str, error: &io::Error) -> Self {
        let host = host_errors::is_host_error(error);
        let reason = if host { PrepareFailure::HostFault } else { PrepareFailure::Internal };
        Self::new(reason, format!("{subject}: {error}"))
    }
}

/// Why a started payload did not succeed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct ExecuteError {
    /// Decides how the task is reported.
    pub reason: ExecuteFailure,
    /// Goes into the task's log.
    pub message: String,
}

impl ExecuteError {
    /// Creates an error.
    pub fn new(reason: ExecuteFailure, message: impl Into<String>) -> Self {
        Self { reason, message: message.into() }
    }

    /// The task's own code failed.
    pub fn failed(message: impl Into<String>) -> Self {
        Self::new(ExecuteFailure::Failed, message)
    }

    /// The handler failed.
    pub fn internal(message: impl Into<String>) -> Self {
        Self::new(ExecuteFailure::Internal, message)
    }

    /// The same as [`PrepareError::from_io`].
    pub fn from_io(subject: &str, error: &io::Error) -> Self {
        let host = host_errors::is_host_error(error);
        let reason = if host { ExecuteFailure::HostFault } else { ExecuteFailure::Internal };
        Self::new(reason, format!("{subject}: {error}"))
    }
}

/// A configuration that no handler can be made of.
#[doc(hidden)]
#[derive(Debug, thiserror::Error)]
#[error("handler {handler}: {message}")]
pub struct HandlerConfigError {
    pub handler: String,
    pub message: String,
}

/// Makes the path of the program absolute, because it starts in another directory.
fn use_absolute_program(argv: &mut [String]) {
    if let Some(program) = argv.first_mut().filter(|program| program.contains('/'))
        && let Ok(path) = std::path::absolute(&*program)
    {
        *program = path.to_string_lossy().into_owned();
    }
}

/// Names the work of a run whose claim is over.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EndedWork {
    /// The name of the source in the configuration.
    pub source: String,
    /// The task and its run.
    pub run: Run,
    /// The key of the work of a request.
    pub request: Option<String>,
}

/// A kind of payload and how to run it.
///
/// A panic in any method is reported as `internal-error` and affects no other task.
pub trait PayloadHandler: Send + Sync + 'static {
    /// The shape of the payload.
    type Payload: DeserializeOwned + Send + 'static;
    /// What `prepare` passes to `execute`; often the payload itself.
    type Prepared: Send + 'static;

    /// Describes the handler on one line, for `journeyman status`.
    fn describe(&self) -> String {
        std::any::type_name::<Self>().to_owned()
    }

    /// Returns the JSON Schema of the payload, such as one that is derived from its type; by default any payload is valid.
    ///
    /// The worker validates a payload against it before it calls `prepare`, and reports each violation with its place.
    fn payload_schema(&self) -> serde_json::Value {
        true.into()
    }

    /// Checks and fetches what the payload declares, before any task code runs.
    ///
    /// # Errors
    ///
    /// [`PrepareError`] decides how the task is reported.
    ///
    /// # Cancel safety
    ///
    /// The worker drops the future when the task has to end early. Dropping it must clean up what it made.
    fn prepare(
        &self,
        payload: Self::Payload,
        context: &Context,
    ) -> impl Future<Output = Result<Self::Prepared, PrepareError>> + Send;

    /// Runs the payload to its end.
    ///
    /// Start processes by [`process::RunningProcess`] within [`Context::scope`]: the worker then kills them, and every
    /// process that they started, when the claim ends. A handler that starts processes by other means has to wait for
    /// them and end them itself; what they leave running may be killed with any claim.
    ///
    /// # Errors
    ///
    /// [`ExecuteError`] decides how the task is reported.
    ///
    /// # Cancel safety
    ///
    /// After [`Context::canceled`] resolves, the handler has until [`Cancellation::deadline`] to end the payload. The
    /// worker then drops the future, which must end the rest.
    fn execute(
        &self,
        prepared: Self::Prepared,
        context: &Context,
    ) -> impl Future<Output = Result<(), ExecuteError>> + Send;

    /// Removes what runs of a task have left elsewhere, up to this one, such as a pod; `None` if this handler leaves nothing.
    ///
    /// The worker calls it once the outcome is reported, and again after an error. After a restart the work may be that of a
    /// previous process.
    fn discard<'a>(&'a self, work: &'a EndedWork) -> Option<HandlerFuture<'a, Result<(), String>>> {
        _ = work;
        None
    }

    /// Returns the sidecar of this handler, such as the service that tasks are forwarded to; `None` if it has none.
    ///
    /// The worker runs it before the first task, and claims nothing for this handler while the status set by
    /// [`SidecarContext::set_status`] is not up.
    fn sidecar(&self) -> Option<Sidecar> {
        None
    }
}

/// A future returned by a handler.
pub type HandlerFuture<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// What [`DynHandler::prepare`] returns.
pub type Preparing<'a> = HandlerFuture<'a, Result<PreparedPayload, PrepareError>>;

/// A handler with its payload types erased, as the worker holds it.
pub trait DynHandler: Send + Sync + 'static {
    /// The same as [`PayloadHandler::describe`].
    fn describe(&self) -> String;

    /// Returns the JSON Schema of the payload.
    fn schema(&self) -> serde_json::Value;

    /// Validates the payload against the schema, then prepares it.
    fn prepare<'a>(&'a self, payload: &'a serde_json::Value, context: &'a Context) -> Preparing<'a>;

    /// Prepares the payload of the context's task.
    fn prepare_task<'a>(&'a self, context: &'a Context) -> Preparing<'a> {
        self.prepare(context.task().definition.payload(), context)
    }

    /// The same as [`PayloadHandler::discard`].
    fn discard<'a>(&'a self, work: &'a EndedWork) -> Option<HandlerFuture<'a, Result<(), String>>> {
        _ = work;
        None
    }

    /// The same as [`PayloadHandler::sidecar`].
    fn sidecar(&self) -> Option<Sidecar> {
        None
    }

    /// Ends what a previous process of this worker has left running outside of its processes, such as containers, and says how
    /// many; `None` if this handler leaves nothing. An error ends the worker's start.
    fn end_leftovers(&self) -> Option<HandlerFuture<'_, Result<usize, String>>> {
        None
    }
}

/// Runs a prepared payload to its end.
pub type PreparedPayload = Box<dyn for<'a> FnOnce(&'a Context) -> HandlerFuture<'a, Result<(), ExecuteError>> + Send>;

/// Erases the payload types of a [`PayloadHandler`].
pub fn erase<H: PayloadHandler>(handler: H) -> Arc<dyn DynHandler> {
    let schema = PayloadSchema::new(handler.payload_schema());
    Arc::new(ErasedHandler { handler: Arc::new(handler), schema })
}

struct ErasedHandler<H> {
    handler: Arc<H>,
    schema: PayloadSchema,
}

impl<H: PayloadHandler> ErasedHandler<H> {
    async fn prepare_typed(&self, payload: H::Payload, context: &Context) -> Result<PreparedPayload, PrepareError> {
        let prepared = self.handler.prepare(payload, context).await?;
        let handler = Arc::clone(&self.handler);
        Ok(Box::new(move |context| Box::pin(async move { handler.execute(prepared, context).await })))
    }
}

impl<H: PayloadHandler> DynHandler for ErasedHandler<H> {
    fn describe(&self) -> String {
        self.handler.describe()
    }

    fn schema(&self) -> serde_json::Value {
        self.schema.schema().clone()
    }

    fn prepare<'a>(&'a self, payload: &'a serde_json::Value, context: &'a Context) -> Preparing<'a> {
        Box::pin(async move {
            self.schema.validate(payload)?;
            // serde's message may quote the payload, so it is not logged.
            let payload = H::Payload::deserialize(payload).map_err(|error| deserialize_error::<H>(&error))?;
            self.prepare_typed(payload, context).await
        })
    }

    /// A handler of requests gets the request as it came, which keeps its schema by its type.
    fn prepare_task<'a>(&'a self, context: &'a Context) -> Preparing<'a> {
        let definition = &context.task().definition;
        if TypeId::of::<H::Payload>() == TypeId::of::<Request>()
            && let Some(payload) = (&mut definition.request() as &mut dyn Any).downcast_mut::<Option<H::Payload>>()
            && let Some(payload) = payload.take()
        {
            return Box::pin(self.prepare_typed(payload, context));
        }
        self.prepare(definition.payload(), context)
    }

    fn discard<'a>(&'a self, work: &'a EndedWork) -> Option<HandlerFuture<'a, Result<(), String>>> {
        self.handler.discard(work)
    }

    fn sidecar(&self) -> Option<Sidecar> {
        self.handler.sidecar()
    }
}

fn deserialize_error<H: PayloadHandler>(error: &serde_json::Error) -> PrepareError {
    let payload_type = std::any::type_name::<H::Payload>();
    tracing::debug!(payload_type, error_category = ?error.classify(), "payload matches its schema but cannot be deserialized");
    PrepareError::malformed(vec![format!("payload: matches the schema but cannot be read as {payload_type}")])
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;
    use crate::handler::log::{LogLimits, TaskLog};
    use crate::task::{Definition, RequestMessage};
    use journeyman_platform::host::clock::Clock;

    #[derive(Default)]
    struct Message {
        request: Request,
        keys_computed: AtomicUsize,
    }

    impl RequestMessage for Message {
        fn request(&self) -> Option<Request> {
            Some(self.request.clone())
        }

        fn idempotency_key(&self) -> Option<String> {
            self.keys_computed.fetch_add(1, Ordering::Relaxed);
            Some("key".to_owned())
        }

        fn definition(&self) -> serde_json::Value {
            unreachable!("the handler did not ask for JSON")
        }

        fn traceparent(&self) -> Option<String> {
            None
        }
    }

    struct Keep(Mutex<Option<Request>>);

    impl PayloadHandler for Keep {
        type Payload = Request;
        type Prepared = ();

        async fn prepare(&self, request: Request, _: &Context) -> Result<(), PrepareError> {
            *self.0.lock().unwrap() = Some(request);
            Ok(())
        }

        async fn execute(&self, (): (), _: &Context) -> Result<(), ExecuteError> {
            Ok(())
        }
    }

    #[tokio::test]
    async fn c1_a_handler_of_requests_shares_the_body_and_no_json_is_written() {
        let request = Request { body: b"{}".to_vec().into(), ..Request::default() };
        let definition = Definition::of_request(Arc::new(Message { request: request.clone(), ..Message::default() }));
        let folder = tempfile::tempdir().unwrap();
        let (workdir, log) =
            (folder.path().join("task"), TaskLog::new(folder.path().join("log"), LogLimits::default()));
        let (context, _cancel) = Context::without_claim("t", definition, workdir, log, Clock::boot()).unwrap();
        let handler =
            ErasedHandler { handler: Arc::new(Keep(Mutex::default())), schema: PayloadSchema::new(Request::schema()) };
        assert!(handler.prepare_task(&context).await.is_ok());
        let kept = handler.handler.0.lock().unwrap().take().unwrap();
        assert_eq!(kept.body.as_ptr(), request.body.as_ptr());
    }

    #[test]
    fn c6_the_key_of_a_request_is_computed_for_who_asks_and_once() {
        let message = Arc::new(Message::default());
        let request = Definition::of_request(message.clone()).request().unwrap();
        let computed = || message.keys_computed.load(Ordering::Relaxed);
        assert_eq!((request.text(), computed()), (Some(""), 0));
        for _ in 0..2 {
            assert_eq!((request.idempotency_key.as_deref(), computed()), (Some("key"), 1));
        }
    }
}
