//! A service that is warm: tasks and requests are forwarded to it over HTTP, on a port or a Unix socket of this host.
//!
//! A request becomes a `POST` of its body to its path. The answer's code decides the verdict, its body is the answer; see
//! `forward`. The service may be a program that the worker starts, asks after and starts again; see `keeper`. Nothing is
//! claimed while it is not there.

mod forward;
mod supervisor;

use std::future::Future;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use reqwest::Client;
use tokio::sync::{Notify, watch};
use tokio::time::Instant;
use url::Url;

use super::command::cancel_message;
use super::environment::Variables;
use super::{Context, ExecuteError, PayloadHandler, PrepareError, Request, SidecarContext};
use crate::limits::{SERVICE_CONNECT_TIMEOUT, SERVICE_DISCONNECT_WAIT};
use forward::ForwardResult;

/// Where the service listens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Target {
    /// `http://HOST:PORT/BASE`, on this host or another one.
    Tcp(Url),
    /// A Unix socket.
    Unix(PathBuf),
}

/// A program that the worker starts and keeps there.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ServiceProgram {
    /// The program and its arguments.
    pub exec: Vec<String>,
    /// Variables of the worker's environment that it sees.
    pub env: Variables,
    /// From the order to end until it is killed.
    pub termination_grace: Duration,
}

/// What the operator says of a service.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HttpConfig {
    /// The handler's name in the configuration.
    pub name: String,
    /// Where it listens.
    pub target: Target,
    /// The path that answers with 2xx where the service is well; without one it is well where it can be connected to.
    pub health_path: Option<String>,
    /// How often it is asked after while it is well.
    pub health_interval: Duration,
    /// How long it may take to say so.
    pub health_timeout: Duration,
    /// How long a start may take until it is well, and how long a task waits for a service that is not there.
    pub startup_timeout: Duration,
    /// How long a request may take.
    pub max_run_time: Duration,
    /// Which headers of a request are passed on; `*` at the end stands for anything.
    pub forward_headers: Vec<String>,
    /// The program, where the worker starts it. Otherwise somebody else does.
    pub service: Option<ServiceProgram>,
}

/// Why a service cannot be forwarded to.
#[derive(Debug, thiserror::Error)]
#[error("handler {name}: {message}")]
pub struct HttpConfigError {
    /// The handler.
    pub name: String,
    /// What is wrong.
    pub message: String,
}

/// Whether requests may be forwarded, and to which appearance of the service.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum HttpAvailability {
    Up { epoch: u64 },
    Down,
}

/// A service as a handler. Clones share it.
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
    /// Somebody was refused a connection.
    connection_refused: Notify,
    /// It broke off, and does not look well.
    disconnected: Notify,
    /// How many requests the service is at work at.
    in_flight: AtomicU32,
}

impl Http {
    /// Makes the client. Nothing is started or asked yet.
    ///
    /// # Errors
    ///
    /// A target that cannot be asked, a program without a name.
    pub fn new(mut settings: HttpConfig) -> Result<Self, HttpConfigError> {
        let name = settings.name.clone();
        if let Some(service) = &mut settings.service {
            let program = service.exec.first_mut().filter(|program| !program.is_empty());
            let Some(program) = program else {
                return Err(HttpConfigError { name, message: "`exec` is empty; name a program".to_owned() });
            };
            if program.contains('/')
                && let Ok(path) = std::path::absolute(&*program)
            {
                *program = path.to_string_lossy().into_owned();
            }
        }
        // The program starts in another folder.
        if let Target::Unix(socket) = &mut settings.target
            && let Ok(path) = std::path::absolute(&*socket)
        {
            *socket = path;
        }
        let wrong = |what: String| HttpConfigError { name: settings.name.clone(), message: what };
        crate::host::crypto_provider::install_crypto_provider();
        let mut builder = Client::builder()
            .http1_only()
            .connect_timeout(SERVICE_CONNECT_TIMEOUT)
            .redirect(reqwest::redirect::Policy::none())
            .retry(reqwest::retry::never())
            // What fails on a fresh connection before it stands was seen by nobody; of an old one that cannot be told.
            .pool_max_idle_per_host(0)
            .no_proxy();
        let base = match &settings.target {
            Target::Tcp(url) => url.clone(),
            Target::Unix(socket) => {
                builder = builder.unix_socket(socket.clone());
                Url::parse("http://localhost").map_err(|error| wrong(error.to_string()))?
            }
        };
        if base.cannot_be_a_base() || base.query().is_some() || base.fragment().is_some() {
            return Err(wrong("no path can be put behind its address".to_owned()));
        }
        let client = builder.build().map_err(|error| wrong(error.without_url().to_string()))?;
        let inner = HttpInner {
            config: settings,
            client,
            base,
            availability: watch::channel(HttpAvailability::Down).0,
            connection_refused: Notify::new(),
            disconnected: Notify::new(),
            in_flight: AtomicU32::new(0),
        };
        Ok(Self { inner: Arc::new(inner) })
    }

    /// How long its program has to end; `None` where somebody else starts it.
    #[must_use]
    pub fn termination_grace(&self) -> Option<Duration> {
        self.inner.config.service.as_ref().map(|service| service.termination_grace)
    }
}

impl HttpInner {
    /// Where it listens, without anything else of its address.
    fn display_address(&self) -> String {
        match &self.config.target {
            Target::Tcp(url) => url.origin().ascii_serialization(),
            Target::Unix(socket) => socket.display().to_string(),
        }
    }

    /// Waits until the service is there, in a later appearance than `after`; `None` where it is not there in time.
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

    /// Forwards it, as often as nobody was there to see it.
    async fn forward_until_sent(&self, ready: &AddressedRequest, context: &Context) -> Result<(), ExecuteError> {
        let HttpConfig { name, startup_timeout: start_within, max_run_time, .. } = &self.config;
        let patience = Instant::now() + *start_within;
        let mut after = None;
        loop {
            after = self.wait_until_up(after, patience).await;
            if after.is_none() {
                return Err(ExecuteError::ServiceDown(self.unavailable_message()));
            }
            if ready.is_expired() {
                let what = format!("its time was over before the service {name} could take it");
                return Err(ExecuteError::Failed(what));
            }
            match tokio::time::timeout(*max_run_time, self.forward(ready, context)).await {
                Ok(Ok(ForwardResult::Done(result))) => return result,
                // Not its own time: however long it rests, it has answered.
                Ok(Ok(ForwardResult::Busy { message: what, retry_after: rest })) => {
                    forward::wait_before_retry(rest, ready.deadline, context).await;
                    return Err(ExecuteError::Intermittent(what));
                }
                Ok(Ok(ForwardResult::NotConnected)) => self.connection_refused.notify_one(),
                Ok(Err(error)) => {
                    if let ExecuteError::Intermittent(_) = &error {
                        self.check_after_disconnect(after).await;
                    }
                    return Err(error);
                }
                Err(_) => {
                    let most = max_run_time.as_secs_f64();
                    let what =
                        format!("the service {name} did not answer within {most} s, the most this worker allows");
                    return Err(ExecuteError::Failed(what));
                }
            }
        }
    }

    /// It broke off. Where it is on its way out that is known before the request goes back, which would meet it once more: that
    /// would be a try.
    async fn check_after_disconnect(&self, epoch: Option<u64>) {
        if supervisor::holds_connection(self).await {
            return;
        }
        self.disconnected.notify_one();
        let mut up = self.availability.subscribe();
        let other = |up: &HttpAvailability| !matches!(up, HttpAvailability::Up { epoch: now } if Some(*now) == epoch);
        // Its keeper is this worker's, and hears of it at once.
        tokio::time::timeout(SERVICE_DISCONNECT_WAIT, up.wait_for(other)).await.ok();
    }

    fn unavailable_message(&self) -> String {
        let HttpConfig { name, startup_timeout: start_within, .. } = &self.config;
        format!("the service {name} was not there within {} s", start_within.as_secs_f64())
    }

    fn track_request(&self) -> InFlightGuard<'_> {
        self.in_flight.fetch_add(1, Ordering::Relaxed);
        InFlightGuard { service: self }
    }
}

/// The service is at work at a request.
struct InFlightGuard<'a> {
    service: &'a HttpInner,
}

impl Drop for InFlightGuard<'_> {
    fn drop(&mut self) {
        self.service.in_flight.fetch_sub(1, Ordering::Relaxed);
    }
}

/// A request with the address that it goes to.
#[derive(Debug)]
pub struct AddressedRequest {
    url: Url,
    request: Request,
    /// When its author waits no more, where they said.
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
        format!("{}, a service at {}", self.inner.config.name, self.inner.display_address())
    }

    async fn prepare(&self, request: Request, context: &Context) -> Result<AddressedRequest, PrepareError> {
        let left = request.seconds_left.and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
        let until = left.and_then(|left| Instant::now().checked_add(left));
        let url = self.inner.resolve_url(request.path.as_deref().unwrap_or_default()).ok_or_else(|| {
            let what = "payload/path: it holds `.`, `..`, `\\` or control characters, and would lead elsewhere";
            PrepareError::Malformed(vec![what.to_owned()])
        })?;
        if request.body_base64.is_some() && request.body.is_none() && request.decoded_body().is_none() {
            return Err(PrepareError::Malformed(vec!["payload/bodyBase64: it is no base64".to_owned()]));
        }
        // Waited for here, it has not been started: nothing counts against it.
        let patience = Instant::now() + self.inner.config.startup_timeout;
        if *self.inner.availability.borrow() == HttpAvailability::Down {
            context.set_progress("waits for its service");
        }
        match self.inner.wait_until_up(None, patience).await {
            Some(_) => Ok(AddressedRequest { url, request, deadline: until }),
            None => Err(PrepareError::ServiceDown(self.inner.unavailable_message())),
        }
    }

    async fn execute(&self, ready: AddressedRequest, context: &Context) -> Result<(), ExecuteError> {
        tokio::select! {
            biased;
            // The connection is dropped, which is how a service hears of it.
            order = context.canceled() => Err(ExecuteError::Failed(cancel_message(order.cause).to_owned())),
            result = self.inner.forward_until_sent(&ready, context) => result,
        }
    }

    fn sidecar_name(&self) -> Option<String> {
        Some(self.inner.config.name.clone())
    }

    fn run_sidecar(&self, lent: SidecarContext) -> impl Future<Output = ()> + Send {
        supervisor::supervise(Arc::clone(&self.inner), lent)
    }
}
