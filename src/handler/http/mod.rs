//! A service that is warm: tasks and requests are forwarded to it over HTTP, on a port or a Unix socket of this host.
//!
//! A request becomes a `POST` of its body to its path. The answer's code decides the verdict, its body is the answer; see
//! `forward`. The service may be a program that the worker starts, asks after and starts again; see `keeper`. Nothing is
//! claimed while it is not there.

mod forward;
mod keeper;

use std::future::Future;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use reqwest::Client;
use tokio::sync::{Notify, watch};
use tokio::time::Instant;
use url::Url;

use super::command::ordered;
use super::environment::Variables;
use super::{Beside, Context, NotCompleted, NotPrepared, PayloadHandler, Request};
use crate::limits::{SERVICE_CONNECT_TIMEOUT, SERVICE_DOUBT_MAX};
use forward::Tried;

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
pub struct Service {
    /// The program and its arguments.
    pub exec: Vec<String>,
    /// Variables of the worker's environment that it sees.
    pub env: Variables,
    /// From the order to end until it is killed.
    pub grace: Duration,
}

/// What the operator says of a service.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Settings {
    /// The handler's name in the configuration.
    pub name: String,
    /// Where it listens.
    pub target: Target,
    /// The path that answers with 2xx where the service is well; without one it is well where it can be connected to.
    pub health: Option<String>,
    /// How often it is asked after while it is well.
    pub health_every: Duration,
    /// How long it may take to say so.
    pub health_timeout: Duration,
    /// How long a start may take until it is well, and how long a task waits for a service that is not there.
    pub start_within: Duration,
    /// How long a request may take.
    pub max_run_time: Duration,
    /// Which headers of a request are passed on; `*` at the end stands for anything.
    pub forward_headers: Vec<String>,
    /// The program, where the worker starts it. Otherwise somebody else does.
    pub service: Option<Service>,
}

/// Why a service cannot be forwarded to.
#[derive(Debug, thiserror::Error)]
#[error("handler {name}: {what}")]
pub struct Misconfigured {
    /// The handler.
    pub name: String,
    /// What is wrong.
    pub what: String,
}

/// Whether requests may be forwarded, and to which appearance of the service.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Up {
    Yes { epoch: u64 },
    No,
}

/// A service as a handler. Clones share it.
#[derive(Debug, Clone)]
pub struct Http {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    settings: Settings,
    client: Client,
    base: Url,
    up: watch::Sender<Up>,
    /// Somebody was refused a connection.
    refused: Notify,
    /// It broke off, and does not look well.
    doubted: Notify,
    /// How many requests the service is at work at.
    at_work: AtomicU32,
}

impl Http {
    /// Makes the client. Nothing is started or asked yet.
    ///
    /// # Errors
    ///
    /// A target that cannot be asked, a program without a name.
    pub fn new(mut settings: Settings) -> Result<Self, Misconfigured> {
        let name = settings.name.clone();
        if let Some(service) = &mut settings.service {
            let program = service.exec.first_mut().filter(|program| !program.is_empty());
            let Some(program) = program else {
                return Err(Misconfigured { name, what: "`exec` is empty; name a program".to_owned() });
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
        let wrong = |what: String| Misconfigured { name: settings.name.clone(), what };
        crate::host::tls::choose();
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
        let inner = Inner {
            settings,
            client,
            base,
            up: watch::channel(Up::No).0,
            refused: Notify::new(),
            doubted: Notify::new(),
            at_work: AtomicU32::new(0),
        };
        Ok(Self { inner: Arc::new(inner) })
    }

    /// How long its program has to end; `None` where somebody else starts it.
    #[must_use]
    pub fn grace(&self) -> Option<Duration> {
        self.inner.settings.service.as_ref().map(|service| service.grace)
    }
}

impl Inner {
    /// Where it listens, without anything else of its address.
    fn place(&self) -> String {
        match &self.settings.target {
            Target::Tcp(url) => url.origin().ascii_serialization(),
            Target::Unix(socket) => socket.display().to_string(),
        }
    }

    /// Waits until the service is there, in a later appearance than `after`; `None` where it is not there in time.
    async fn there(&self, after: Option<u64>, until: Instant) -> Option<u64> {
        let mut up = self.up.subscribe();
        let later = |up: &Up| match up {
            Up::Yes { epoch } => after.is_none_or(|after| *epoch > after),
            Up::No => false,
        };
        let up = tokio::time::timeout_at(until, up.wait_for(later)).await;
        match up.map(|up| up.map(|up| *up)) {
            Ok(Ok(Up::Yes { epoch })) => Some(epoch),
            Ok(Ok(Up::No) | Err(_)) | Err(_) => None,
        }
    }

    /// Forwards it, as often as nobody was there to see it.
    async fn run(&self, ready: &Addressed, context: &Context) -> Result<(), NotCompleted> {
        let Settings { name, start_within, max_run_time, .. } = &self.settings;
        let patience = Instant::now() + *start_within;
        let mut after = None;
        loop {
            after = self.there(after, patience).await;
            if after.is_none() {
                return Err(NotCompleted::Away(self.away()));
            }
            if ready.is_late() {
                let what = format!("its time was over before the service {name} could take it");
                return Err(NotCompleted::Failed(what));
            }
            match tokio::time::timeout(*max_run_time, self.forward(ready, context)).await {
                Ok(Ok(Tried::Done(result))) => return result,
                // Not its own time: however long it rests, it has answered.
                Ok(Ok(Tried::Busy { what, rest })) => {
                    forward::wait(rest, ready.until, context).await;
                    return Err(NotCompleted::Intermittent(what));
                }
                Ok(Ok(Tried::Refused)) => self.refused.notify_one(),
                Ok(Err(error)) => {
                    if let NotCompleted::Intermittent(_) = &error {
                        self.doubt(after).await;
                    }
                    return Err(error);
                }
                Err(_) => {
                    let most = max_run_time.as_secs_f64();
                    let what =
                        format!("the service {name} did not answer within {most} s, the most this worker allows");
                    return Err(NotCompleted::Failed(what));
                }
            }
        }
    }

    /// It broke off. Where it is on its way out that is known before the request goes back, which would meet it once more: that
    /// would be a try.
    async fn doubt(&self, epoch: Option<u64>) {
        if keeper::stays(self).await {
            return;
        }
        self.doubted.notify_one();
        let mut up = self.up.subscribe();
        let other = |up: &Up| !matches!(up, Up::Yes { epoch: now } if Some(*now) == epoch);
        // Its keeper is this worker's, and hears of it at once.
        tokio::time::timeout(SERVICE_DOUBT_MAX, up.wait_for(other)).await.ok();
    }

    fn away(&self) -> String {
        let Settings { name, start_within, .. } = &self.settings;
        format!("the service {name} was not there within {} s", start_within.as_secs_f64())
    }

    fn works(&self) -> AtWork<'_> {
        self.at_work.fetch_add(1, Ordering::Relaxed);
        AtWork { of: self }
    }
}

/// The service is at work at a request.
struct AtWork<'a> {
    of: &'a Inner,
}

impl Drop for AtWork<'_> {
    fn drop(&mut self) {
        self.of.at_work.fetch_sub(1, Ordering::Relaxed);
    }
}

/// A request with the address that it goes to.
#[derive(Debug)]
pub struct Addressed {
    url: Url,
    request: Request,
    /// When its author waits no more, where they said.
    until: Option<Instant>,
}

impl Addressed {
    fn is_late(&self) -> bool {
        self.until.is_some_and(|until| Instant::now() >= until)
    }
}

impl PayloadHandler for Http {
    type Payload = Request;
    type Prepared = Addressed;

    fn describe(&self) -> String {
        format!("{}, a service at {}", self.inner.settings.name, self.inner.place())
    }

    async fn prepare(&self, request: Request, context: &Context) -> Result<Addressed, NotPrepared> {
        let left = request.seconds_left.and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
        let until = left.and_then(|left| Instant::now().checked_add(left));
        let url = self.inner.address(request.path.as_deref().unwrap_or_default()).ok_or_else(|| {
            let what = "payload/path: it holds `.`, `..`, `\\` or control characters, and would lead elsewhere";
            NotPrepared::Malformed(vec![what.to_owned()])
        })?;
        if request.body_base64.is_some() && request.body.is_none() && request.decoded().is_none() {
            return Err(NotPrepared::Malformed(vec!["payload/bodyBase64: it is no base64".to_owned()]));
        }
        // Waited for here, it has not been started: nothing counts against it.
        let patience = Instant::now() + self.inner.settings.start_within;
        if *self.inner.up.borrow() == Up::No {
            context.set_progress("waits for its service");
        }
        match self.inner.there(None, patience).await {
            Some(_) => Ok(Addressed { url, request, until }),
            None => Err(NotPrepared::Away(self.inner.away())),
        }
    }

    async fn execute(&self, ready: Addressed, context: &Context) -> Result<(), NotCompleted> {
        tokio::select! {
            biased;
            // The connection is dropped, which is how a service hears of it.
            order = context.canceled() => Err(NotCompleted::Failed(ordered(order.cause).to_owned())),
            result = self.inner.run(&ready, context) => result,
        }
    }

    fn runs_beside(&self) -> Option<String> {
        Some(self.inner.settings.name.clone())
    }

    fn beside(&self, lent: Beside) -> impl Future<Output = ()> + Send {
        keeper::keep(Arc::clone(&self.inner), lent)
    }
}
