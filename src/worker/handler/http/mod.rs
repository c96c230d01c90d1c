//! The handler kind `http`: forwards tasks and requests to a service over HTTP, by TCP or a Unix socket.
//!
//! A request becomes a `POST` of its body to its path. The status code decides the outcome and the body is the reply; see
//! `forward`. The worker may start the service, check its health and restart it; see `supervisor`. The worker claims
//! nothing for the handler while the service is down.

pub mod config;
mod forward;
mod supervisor;

use std::sync::Arc;
use std::time::Duration;

use reqwest::Client;
use tokio::sync::{Notify, watch};
use tokio::time::Instant;
use url::Url;

use super::environment::{self, Variables};
use super::{
    Context, ExecuteError, ExecuteFailure, HandlerConfigError, PayloadHandler, PrepareError, PrepareFailure, Request,
    Sidecar, use_absolute_program,
};
use crate::handler::http::config::HttpHandler;
use forward::ForwardResult;
use journeyman_domain::limits::SERVICE_CONNECT_TIMEOUT;
use journeyman_platform::http::client::client_builder;
use journeyman_platform::settings::Environment;
use journeyman_platform::settings::values::ServiceAddress;

/// Clones share the service.
#[derive(Debug, Clone)]
pub struct Http {
    inner: Arc<HttpInner>,
}

#[derive(Debug)]
struct HttpInner {
    name: String,
    config: HttpHandler,
    /// Variables of the worker that the service sees.
    env: Variables,
    client: Client,
    base: Url,
    /// While the service is up, how often it came up.
    up: watch::Sender<Option<u64>>,
    unreachable: Notify,
    /// Each request in flight holds a clone.
    in_flight: Arc<()>,
}

impl Http {
    /// Creates the HTTP client; neither starts nor contacts the service.
    pub fn new(name: &str, mut config: HttpHandler, worker: &Environment) -> Result<Self, HandlerConfigError> {
        use_absolute_program(&mut config.exec);
        let invalid = |message: &str| HandlerConfigError { handler: name.to_owned(), message: message.to_owned() };
        let mut builder = client_builder()
            .http1_only()
            .connect_timeout(SERVICE_CONNECT_TIMEOUT)
            // A request that fails to connect was not seen by the service; on a pooled connection that is unknown.
            .pool_max_idle_per_host(0);
        let base = match &mut config.url {
            ServiceAddress::Url(url) => url.parts().clone(),
            ServiceAddress::Socket(socket) => {
                // The program starts in another directory.
                *socket = std::path::absolute(&*socket).map_err(|error| invalid(&error.to_string()))?;
                builder = builder.unix_socket(socket.clone());
                Url::parse("http://localhost").map_err(|error| invalid(&error.to_string()))?
            }
        };
        let client = builder.build().map_err(|error| invalid(&error.without_url().to_string()))?;
        let env = environment::select(&config.env_allow, worker.pairs());
        let (up, unreachable, in_flight) = (watch::channel(None).0, Notify::new(), Arc::new(()));
        let name = name.to_owned();
        Ok(Self { inner: Arc::new(HttpInner { name, config, env, client, base, up, unreachable, in_flight }) })
    }
}

impl HttpInner {
    fn display_address(&self) -> String {
        match self.config.url.socket() {
            Some(socket) => socket.display().to_string(),
            None => self.base.origin().ascii_serialization(),
        }
    }

    /// Waits until the service is up again after it came up for the time `after`; an error message on timeout.
    async fn wait_until_up(&self, after: Option<u64>, until: Instant) -> Result<Option<u64>, String> {
        let mut up = self.up.subscribe();
        if let Ok(Ok(up)) = tokio::time::timeout_at(until, up.wait_for(|up| *up > after)).await {
            return Ok(*up);
        }
        let seconds = self.config.startup_timeout.0.as_secs_f64();
        Err(format!("the service {} was not available within {seconds} s", self.name))
    }

    /// Retries while no connection to the service can be made.
    async fn forward_until_sent(&self, request: &AddressedRequest, context: &Context) -> Result<(), ExecuteError> {
        let (name, max_run_time) = (&self.name, self.config.max_run_time.0);
        let up_deadline = Instant::now() + self.config.startup_timeout.0;
        let mut epoch = None;
        loop {
            let waiting = self.wait_until_up(epoch, up_deadline).await;
            epoch = waiting.map_err(|message| ExecuteError::new(ExecuteFailure::ServiceDown, message))?;
            if request.is_expired() {
                let message = format!("the request expired before the service {name} could take it");
                return Err(ExecuteError::failed(message));
            }
            match tokio::time::timeout(max_run_time, self.forward(request, context)).await {
                Ok(Ok(ForwardResult::Done)) => return Ok(()),
                // Outside the time limit: the service has answered.
                Ok(Ok(ForwardResult::Busy { message, retry_after })) => {
                    forward::wait_before_retry(retry_after, request.deadline, context).await;
                    return Err(ExecuteError::new(ExecuteFailure::Intermittent, message));
                }
                Ok(Ok(ForwardResult::NotConnected)) => self.unreachable.notify_one(),
                Ok(Err(error)) => {
                    // The retry waits until the service is healthy again.
                    if error.reason == ExecuteFailure::Intermittent {
                        self.unreachable.notify_one();
                        if let Some(results) = context.results() {
                            results.mark_suspect();
                        }
                    }
                    return Err(error);
                }
                Err(_) => {
                    let seconds = max_run_time.as_secs_f64();
                    let message =
                        format!("the service {name} did not answer within {seconds} s, the most this worker allows");
                    return Err(ExecuteError::failed(message));
                }
            }
        }
    }
}

#[derive(Debug)]
pub struct AddressedRequest {
    url: Url,
    request: Request,
    deadline: Option<Instant>,
}

impl AddressedRequest {
    fn is_expired(&self) -> bool {
        self.deadline.is_some_and(|until| Instant::now() >= until)
    }
}

impl PayloadHandler for Http {
    type Payload = Request;
    type Prepared = AddressedRequest;

    fn describe(&self) -> String {
        format!("{} (http, {})", self.inner.name, self.inner.display_address())
    }

    fn payload_schema(&self) -> serde_json::Value {
        Request::schema()
    }

    async fn prepare(&self, request: Request, context: &Context) -> Result<AddressedRequest, PrepareError> {
        let remaining = request.seconds_left.and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
        let deadline = remaining.and_then(|remaining| Instant::now().checked_add(remaining));
        let url = self.inner.resolve_url(request.path.as_deref().unwrap_or_default()).ok_or_else(|| {
            let message = "payload/path: contains `.`, `..`, `\\` or control characters";
            PrepareError::malformed(vec![message.to_owned()])
        })?;
        // A request that waits here has not started, so releasing it does not count as an attempt.
        let up_deadline = Instant::now() + self.inner.config.startup_timeout.0;
        if self.inner.up.borrow().is_none() {
            context.set_progress("waiting for the service");
        }
        let waiting = self.inner.wait_until_up(None, up_deadline).await;
        waiting.map_err(|message| PrepareError::new(PrepareFailure::ServiceDown, message))?;
        Ok(AddressedRequest { url, request, deadline })
    }

    async fn execute(&self, request: AddressedRequest, context: &Context) -> Result<(), ExecuteError> {
        tokio::select! {
            biased;
            // Dropping the connection tells the service.
            cancellation = context.canceled() => {
                Err(ExecuteError::failed(cancellation.cause.message().to_owned()))
            }
            result = self.inner.forward_until_sent(&request, context) => result,
        }
    }

    fn sidecar(&self) -> Option<Sidecar> {
        let (name, http) = (self.inner.name.clone(), Arc::clone(&self.inner));
        Some(Sidecar { name, run: Box::new(|context| Box::pin(supervisor::supervise(http, context))) })
    }
}
