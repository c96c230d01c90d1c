//! The handler kind `http`: forwards tasks and requests to a service over HTTP, by TCP or a Unix socket.
//!
//! A request becomes a `POST` of its body to its path. The status code decides the outcome and the body is the reply; see
//! `forward`. The worker may start the service, check its health and restart it; see `supervisor`. The worker claims
//! nothing for the handler while the service is down.

mod forward;
mod supervisor;

use std::future::Future;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use reqwest::Client;
use tokio::sync::{Notify, watch};
use tokio::time::Instant;
use url::Url;

use super::environment::Variables;
use super::{
    Context, ExecuteError, ExecuteFailure, HandlerConfigError, PayloadHandler, PrepareError, PrepareFailure, Request,
    SidecarContext, use_absolute_program,
};
use crate::limits::SERVICE_CONNECT_TIMEOUT;
use forward::ForwardResult;

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Target {
    Tcp(Url),
    Unix(PathBuf),
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ServiceProgram {
    pub exec: Vec<String>,
    pub env: Variables,
    pub termination_grace: Duration,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HttpConfig {
    pub name: String,
    pub target: Target,
    /// Answers with 2xx if the service is healthy; without a path, accepting a connection is healthy.
    pub health_path: Option<String>,
    pub health_interval: Duration,
    /// Also how long a task waits for a service that is down.
    pub startup_timeout: Duration,
    pub max_run_time: Duration,
    /// `None` if the worker does not start the service.
    pub service: Option<ServiceProgram>,
}

/// `epoch` counts how often the service came up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum HttpAvailability {
    Up { epoch: u64 },
    Down,
}

/// Clones share the service.
#[derive(Debug, Clone)]
pub struct Http {
    inner: Arc<HttpInner>,
}

#[derive(Debug)]
struct HttpInner {
    config: HttpConfig,
    client: Client,
    base: Url,
    availability: watch::Sender<HttpAvailability>,
    unreachable: Notify,
    /// Each request in flight holds a clone.
    in_flight: Arc<()>,
}

impl Http {
    /// Creates the HTTP client; neither starts nor contacts the service.
    pub fn new(mut config: HttpConfig) -> Result<Self, HandlerConfigError> {
        if let Some(service) = &mut config.service {
            use_absolute_program(&config.name, "exec", &mut service.exec)?;
        }
        // The program starts in another directory.
        if let Target::Unix(socket) = &mut config.target
            && let Ok(path) = std::path::absolute(&*socket)
        {
            *socket = path;
        }
        let invalid = |message: String| HandlerConfigError { handler: config.name.clone(), message };
        crate::host::crypto_provider::install_crypto_provider();
        let mut builder = Client::builder()
            .http1_only()
            .connect_timeout(SERVICE_CONNECT_TIMEOUT)
            .redirect(reqwest::redirect::Policy::none())
            .retry(reqwest::retry::never())
            // A request that fails to connect was not seen by the service; on a pooled connection that is unknown.
            .pool_max_idle_per_host(0)
            .no_proxy();
        let base = match &config.target {
            Target::Tcp(url) => url.clone(),
            Target::Unix(socket) => {
                builder = builder.unix_socket(socket.clone());
                Url::parse("http://localhost").map_err(|error| invalid(error.to_string()))?
            }
        };
        if base.cannot_be_a_base() || base.query().is_some() || base.fragment().is_some() {
            return Err(invalid("its URL must not have a query or a fragment".to_owned()));
        }
        let client = builder.build().map_err(|error| invalid(error.without_url().to_string()))?;
        let inner = HttpInner {
            config,
            client,
            base,
            availability: watch::channel(HttpAvailability::Down).0,
            unreachable: Notify::new(),
            in_flight: Arc::new(()),
        };
        Ok(Self { inner: Arc::new(inner) })
    }

    /// `None` if the worker does not start the service.
    #[must_use]
    pub fn termination_grace(&self) -> Option<Duration> {
        self.inner.config.service.as_ref().map(|service| service.termination_grace)
    }
}

impl HttpInner {
    fn display_address(&self) -> String {
        match &self.config.target {
            Target::Tcp(url) => url.origin().ascii_serialization(),
            Target::Unix(socket) => socket.display().to_string(),
        }
    }

    /// Waits until the service is up in an epoch after `after`; `None` on timeout.
    async fn wait_until_up(&self, after: Option<u64>, until: Instant) -> Option<u64> {
        let mut up = self.availability.subscribe();
        let later = |up: &HttpAvailability| match up {
            HttpAvailability::Up { epoch } => after.is_none_or(|after| *epoch > after),
            HttpAvailability::Down => false,
        };
        let up = tokio::time::timeout_at(until, up.wait_for(later)).await;
        match up.map(|up| up.map(|up| *up)) {
            Ok(Ok(HttpAvailability::Up { epoch })) => Some(epoch),
            Ok(Ok(HttpAvailability::Down) | Err(_)) | Err(_) => None,
        }
    }

    /// Retries while no connection to the service can be made.
    async fn forward_until_sent(&self, request: &AddressedRequest, context: &Context) -> Result<(), ExecuteError> {
        let HttpConfig { name, startup_timeout, max_run_time, .. } = &self.config;
        let up_deadline = Instant::now() + *startup_timeout;
        let mut epoch = None;
        loop {
            epoch = self.wait_until_up(epoch, up_deadline).await;
            if epoch.is_none() {
                return Err(ExecuteError::new(ExecuteFailure::ServiceDown, self.unavailable_message()));
            }
            if request.is_expired() {
                let message = format!("the request expired before the service {name} could take it");
                return Err(ExecuteError::failed(message));
            }
            match tokio::time::timeout(*max_run_time, self.forward(request, context)).await {
                Ok(Ok(ForwardResult::Done(result))) => return result,
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

    fn unavailable_message(&self) -> String {
        let HttpConfig { name, startup_timeout, .. } = &self.config;
        format!("the service {name} was not available within {} s", startup_timeout.as_secs_f64())
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
        format!("{} (http, {})", self.inner.config.name, self.inner.display_address())
    }

    async fn prepare(&self, request: Request, context: &Context) -> Result<AddressedRequest, PrepareError> {
        let remaining = request.seconds_left.and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
        let deadline = remaining.and_then(|remaining| Instant::now().checked_add(remaining));
        let url = self.inner.resolve_url(request.path.as_deref().unwrap_or_default()).ok_or_else(|| {
            let message = "payload/path: contains `.`, `..`, `\\` or control characters";
            PrepareError::malformed(vec![message.to_owned()])
        })?;
        if request.body_base64.is_some() && request.body.is_none() && request.decoded_body().is_none() {
            return Err(PrepareError::malformed(vec!["payload/bodyBase64: not base64".to_owned()]));
        }
        // A request that waits here has not started, so releasing it does not count as an attempt.
        let up_deadline = Instant::now() + self.inner.config.startup_timeout;
        if *self.inner.availability.borrow() == HttpAvailability::Down {
            context.set_progress("waiting for the service");
        }
        match self.inner.wait_until_up(None, up_deadline).await {
            Some(_) => Ok(AddressedRequest { url, request, deadline }),
            None => Err(PrepareError::new(PrepareFailure::ServiceDown, self.inner.unavailable_message())),
        }
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

    fn sidecar_name(&self) -> Option<String> {
        Some(self.inner.config.name.clone())
    }

    fn run_sidecar(&self, sidecar: SidecarContext) -> impl Future<Output = ()> + Send {
        supervisor::supervise(Arc::clone(&self.inner), sidecar)
    }
}
