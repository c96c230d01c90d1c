//! Watches for the end of this host: the metadata service of its cloud, and a file.
//!
//! The calls are made here; what the answers mean and when to ask again is decided in [`crate::domain::termination_notice`], and what
//! becomes of tasks in [`crate::domain::worker`].

mod aws;
mod azure;
mod gcp;
mod metadata_service;
mod notice_file;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{mpsc, watch};

use crate::domain::termination_notice::{
    NextRequest, NoticeEvent, PollSchedule, Provider, ProviderProbe, ProviderSearch, Termination,
};
use crate::domain::time::Instant;
use crate::host::clock::Clock;
use crate::limits::{
    NOTICE_FILE_POLL_INTERVAL, NOTICE_POLL_INTERVAL_AWS, NOTICE_POLL_INTERVAL_AZURE, NOTICE_POLL_INTERVAL_GCP,
};
use metadata_service::MetadataService;

pub use metadata_service::EndpointError;

/// How many notices may wait to be heeded.
pub const NOTICES_MAX: usize = 16;

/// Whose metadata service is watched.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MetadataProvider {
    /// None.
    Off,
    /// The one that is found.
    Auto,
    /// This one, whether it answers or not.
    Fixed(Provider),
}

/// How often each kind of source is looked at.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PollPaces {
    /// EC2. 5 s, as AWS recommends.
    pub aws: PollSchedule,
    /// Google. 1 s, where a wait for a change comes back without one.
    pub gcp: PollSchedule,
    /// Azure. 1 s, as Azure recommends.
    pub azure: PollSchedule,
    /// The file. 1 s.
    pub file: PollSchedule,
}

impl Default for PollPaces {
    fn default() -> Self {
        Self {
            aws: PollSchedule::with_interval(NOTICE_POLL_INTERVAL_AWS),
            gcp: PollSchedule::with_interval(NOTICE_POLL_INTERVAL_GCP),
            azure: PollSchedule::with_interval(NOTICE_POLL_INTERVAL_AZURE),
            file: PollSchedule::with_interval(NOTICE_FILE_POLL_INTERVAL),
        }
    }
}

/// What is watched.
#[derive(Debug, Clone)]
pub struct NoticeConfig {
    /// Whose metadata service.
    pub cloud: MetadataProvider,
    /// Where it is, if not at the address that all clouds share.
    pub endpoint: Option<String>,
    /// A file that says when the host goes; an empty one is an order to go at once.
    pub file: Option<PathBuf>,
    /// How often.
    pub paces: PollPaces,
    /// The clock on which deadlines are told.
    pub clock: Clock,
}

/// Where a notice comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NoticeOrigin {
    /// A metadata service.
    Cloud(Provider),
    /// The file.
    File,
}

impl NoticeOrigin {
    /// One word for a log.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Cloud(Provider::Aws) => "aws",
            Self::Cloud(Provider::Gcp) => "gcp",
            Self::Cloud(Provider::Azure) => "azure",
            Self::File => "file",
        }
    }
}

/// What is known of the host's end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NoticeKind {
    /// It goes.
    Termination(Termination),
    /// It may have to go before long.
    AtRisk,
}

/// Something that a worker should heed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Notice {
    /// Where it comes from.
    pub origin: NoticeOrigin,
    /// What it says.
    pub kind: NoticeKind,
}

/// How a metadata service, or the file, is heard.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WatchStatus {
    /// Which.
    pub origin: NoticeOrigin,
    /// Whether a notice of it would be heard.
    pub health: WatchHealth,
    /// Since when.
    pub since: Instant,
}

/// Whether notices are heard.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum WatchHealth {
    /// That is not known: it has not said yet whether there is one.
    Unknown,
    /// They are.
    Healthy,
    /// They may be missed; why.
    Failing(String),
}

/// The watch over this host.
#[derive(Debug)]
pub struct NoticeWatch {
    config: NoticeConfig,
    service: MetadataService,
    seed: u64,
    statuses: Arc<watch::Sender<Vec<WatchStatus>>>,
}

impl NoticeWatch {
    /// A watch that has not begun.
    ///
    /// # Errors
    ///
    /// An endpoint that is no `http://` address.
    pub fn new(settings: NoticeConfig) -> Result<Self, EndpointError> {
        let service = MetadataService::new(settings.endpoint.as_deref(), settings.clock)?;
        let seed = uuid::Uuid::new_v4().as_u64_pair().0;
        Ok(Self { config: settings, service, seed, statuses: Arc::default() })
    }

    /// How everything is heard that is watched.
    #[must_use]
    pub fn subscribe_statuses(&self) -> watch::Receiver<Vec<WatchStatus>> {
        self.statuses.subscribe()
    }

    fn health_reporter(&self, origin: NoticeOrigin) -> HealthReporter {
        let heard = HealthReporter { origin, clock: self.config.clock, statuses: Arc::clone(&self.statuses) };
        heard.set(WatchHealth::Unknown);
        heard
    }

    /// Watches, and sends each notice once. Comes back when there is nothing to watch, or nobody to tell.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe: a later watch reads the same notices again.
    pub async fn run(self, notices: mpsc::Sender<Notice>) {
        tokio::join!(self.watch_cloud(&notices), self.watch_file(&notices));
    }

    async fn watch_cloud(&self, notices: &mpsc::Sender<Notice>) {
        let found = match self.config.cloud {
            MetadataProvider::Off => None,
            MetadataProvider::Fixed(provider) => Some(provider),
            MetadataProvider::Auto => self.find_provider().await,
        };
        let Some(provider) = found else { return };
        let teller =
            NoticeSink { notices: notices.clone(), health: self.health_reporter(NoticeOrigin::Cloud(provider)) };
        tracing::info!(provider = teller.health.origin.as_str(), "watching for notices that this host goes");
        let (service, paces) = (&self.service, self.config.paces);
        match provider {
            Provider::Aws => aws::watch(service, paces.aws, self.seed, teller).await,
            Provider::Gcp => gcp::watch(service, paces.gcp, self.seed, teller).await,
            Provider::Azure => azure::watch(service, paces.azure, self.seed, teller).await,
        }
    }

    /// Whose metadata services answer now.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe.
    pub async fn responding_providers(&self) -> Vec<Provider> {
        let service = &self.service;
        let (aws, gcp, azure) = tokio::join!(aws::responds(service), gcp::responds(service), azure::responds(service));
        [aws, gcp, azure].into_iter().flatten().collect()
    }

    async fn find_provider(&self) -> Option<Provider> {
        let mut search = ProviderSearch::default();
        loop {
            match search.on_probed(&self.responding_providers().await) {
                ProviderProbe::Found(provider) => return Some(provider),
                ProviderProbe::RetryAfter(wait) => tokio::time::sleep(wait).await,
                ProviderProbe::NotFound => {
                    tracing::info!(
                        "no cloud's metadata service answers, so no notices are watched for; where there is one, name it in \
                         `host.metadata_service`, and `off` spares the search"
                    );
                    return None;
                }
            }
        }
    }

    async fn watch_file(&self, notices: &mpsc::Sender<Notice>) {
        let Some(path) = &self.config.file else { return };
        let teller = NoticeSink { notices: notices.clone(), health: self.health_reporter(NoticeOrigin::File) };
        notice_file::watch(path, self.config.clock, self.config.paces.file, self.seed, teller).await;
    }
}

/// A call that is to be made now.
struct DueCall<C> {
    call: C,
    sent_at: Instant,
}

/// Rests until the rules want a call.
async fn next_call<C>(clock: Clock, mut next: impl FnMut(Instant) -> NextRequest<C>) -> DueCall<C> {
    loop {
        let sent_at = clock.now();
        match next(sent_at) {
            NextRequest::WaitUntil(until) => clock.sleep_until(until).await,
            NextRequest::Call(call) => return DueCall { call, sent_at },
        }
    }
}

/// Nobody is there to be told any more.
#[derive(Debug)]
struct SinkClosed;

/// Keeps for those who look whether one of those is heard.
#[derive(Debug, Clone)]
struct HealthReporter {
    origin: NoticeOrigin,
    clock: Clock,
    statuses: Arc<watch::Sender<Vec<WatchStatus>>>,
}

impl HealthReporter {
    fn set(&self, hearing: WatchHealth) {
        let sight = WatchStatus { origin: self.origin, health: hearing, since: self.clock.now() };
        self.statuses.send_modify(|sights| {
            sights.retain(|sight| sight.origin != self.origin);
            sights.push(sight);
        });
    }

    fn record_answer(&self) {
        let unknown = |sight: &WatchStatus| sight.origin == self.origin && sight.health == WatchHealth::Unknown;
        if self.statuses.borrow().iter().any(unknown) {
            self.set(WatchHealth::Healthy);
        }
    }
}

/// Passes on what a watch learns.
#[derive(Debug, Clone)]
struct NoticeSink {
    notices: mpsc::Sender<Notice>,
    health: HealthReporter,
}

impl NoticeSink {
    /// The service has said whether there is a notice.
    fn record_answer(&self) {
        self.health.record_answer();
    }

    /// Says what is new. `trouble` is what the last call met, if it met any.
    async fn report(&self, news: Option<NoticeEvent>, trouble: Option<&str>) -> Result<(), SinkClosed> {
        let provider = self.health.origin.as_str();
        if let Some(trouble) = trouble {
            tracing::debug!(provider, "looking for notices: {trouble}");
        }
        let said = match news {
            Some(NoticeEvent::Terminating(goes)) => NoticeKind::Termination(goes),
            Some(NoticeEvent::AtRisk) => NoticeKind::AtRisk,
            Some(NoticeEvent::Withdrawn) => {
                tracing::warn!(provider, "the notice is withdrawn; the worker goes all the same");
                return Ok(());
            }
            Some(NoticeEvent::WatchFailing) => {
                let trouble = trouble.unwrap_or("it does not answer");
                tracing::warn!(provider, "a notice that this host goes may be missed: {trouble}");
                self.health.set(WatchHealth::Failing(trouble.to_owned()));
                return Ok(());
            }
            Some(NoticeEvent::WatchRecovered) => {
                tracing::info!(provider, "notices are heard again");
                self.health.set(WatchHealth::Healthy);
                return Ok(());
            }
            None => return Ok(()),
        };
        self.notices.send(Notice { origin: self.health.origin, kind: said }).await.map_err(|_| SinkClosed)
    }
}

/// What is left until a time that whoever answered named. Their own clock counts, if they tell it: ours may be off.
fn time_left(until: jiff::Timestamp, now: jiff::Timestamp) -> Duration {
    Duration::try_from(until.duration_since(now)).unwrap_or_default()
}
