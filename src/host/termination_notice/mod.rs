//! Watches for notices that this host terminates: from the metadata service of its cloud, and from a file.
//!
//! The requests are sent here. [`crate::domain::termination_notice`] interprets the replies and schedules the next request, and
//! [`crate::domain::worker`] decides what happens to tasks.

mod aws;
mod azure;
mod gcp;
mod metadata_service;
mod notice_file;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use tokio::sync::{mpsc, watch};

use crate::domain::termination_notice::{
    NextRequest, NoticeEvent, PollSchedule, ProviderProbe, ProviderSearch, Termination,
};
use crate::domain::time::Instant;
use crate::host::clock::Clock;
use crate::limits::{
    NOTICE_FILE_POLL_INTERVAL, NOTICE_POLL_INTERVAL_AWS, NOTICE_POLL_INTERVAL_AZURE, NOTICE_POLL_INTERVAL_GCP,
};
use metadata_service::MetadataClient;

pub use crate::domain::termination_notice::NoticeOrigin;
pub use metadata_service::EndpointError;

/// How many notices may wait to be handled.
pub const NOTICES_MAX: usize = 16;

/// Metadata service that is watched.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum MetadataProvider {
    /// The first that answers.
    Auto,
    /// EC2.
    Aws,
    /// Compute Engine.
    Gcp,
    /// Azure.
    Azure,
    /// None.
    Off,
}

impl MetadataProvider {
    /// `None` if none is named.
    pub const fn origin(self) -> Option<NoticeOrigin> {
        match self {
            Self::Aws => Some(NoticeOrigin::Aws),
            Self::Gcp => Some(NoticeOrigin::Gcp),
            Self::Azure => Some(NoticeOrigin::Azure),
            Self::Auto | Self::Off => None,
        }
    }
}

#[derive(Debug, Clone)]
pub struct NoticeConfig {
    pub cloud: MetadataProvider,
    /// Instead of the link-local address that all clouds share.
    pub endpoint: Option<String>,
    /// A file whose existence is a notice.
    pub file: Option<PathBuf>,
    /// Instead of the schedule of each provider, for tests.
    pub schedule: Option<PollSchedule>,
    /// The clock of the deadlines.
    pub clock: Clock,
}

const fn poll_interval(origin: NoticeOrigin) -> Duration {
    match origin {
        NoticeOrigin::Aws => NOTICE_POLL_INTERVAL_AWS,
        NoticeOrigin::Gcp => NOTICE_POLL_INTERVAL_GCP,
        NoticeOrigin::Azure => NOTICE_POLL_INTERVAL_AZURE,
        NoticeOrigin::File => NOTICE_FILE_POLL_INTERVAL,
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Notice {
    pub origin: NoticeOrigin,
    pub termination: Termination,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WatchStatus {
    pub origin: NoticeOrigin,
    pub health: WatchHealth,
    pub since: Instant,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum WatchHealth {
    /// There was no answer yet.
    Unknown,
    Healthy,
    /// Notices may be missed, with the reason.
    Failing(String),
}

/// The watch over this host.
#[derive(Debug)]
pub struct NoticeWatch {
    config: NoticeConfig,
    client: MetadataClient,
    seed: u64,
    statuses: Arc<watch::Sender<Vec<WatchStatus>>>,
}

impl NoticeWatch {
    /// # Errors
    ///
    /// The endpoint is not an `http://` address.
    pub fn new(config: NoticeConfig) -> Result<Self, EndpointError> {
        let client = MetadataClient::new(config.endpoint.as_deref(), config.clock)?;
        let seed = uuid::Uuid::new_v4().as_u64_pair().0;
        Ok(Self { config, client, seed, statuses: Arc::default() })
    }

    pub fn subscribe_statuses(&self) -> watch::Receiver<Vec<WatchStatus>> {
        self.statuses.subscribe()
    }

    fn sink(&self, origin: NoticeOrigin, notices: &mpsc::Sender<Notice>) -> NoticeSink {
        let (notices, clock) = (notices.clone(), self.config.clock);
        let sink = NoticeSink { origin, clock, notices, statuses: Arc::clone(&self.statuses) };
        sink.set_health(WatchHealth::Unknown);
        sink
    }

    fn schedule(&self, origin: NoticeOrigin) -> PollSchedule {
        self.config.schedule.unwrap_or_else(|| PollSchedule::with_interval(poll_interval(origin)))
    }

    /// Sends each notice once. Returns if there is nothing to watch, or the receiver was dropped.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe: a later watch reads the same notices again.
    pub async fn run(self, notices: mpsc::Sender<Notice>) {
        let cloud = async {
            let origin = match self.config.cloud {
                MetadataProvider::Auto => self.find_provider().await,
                fixed @ (MetadataProvider::Aws
                | MetadataProvider::Gcp
                | MetadataProvider::Azure
                | MetadataProvider::Off) => fixed.origin(),
            };
            if let Some(origin) = origin {
                self.watch(origin, &notices).await;
            }
        };
        tokio::join!(cloud, self.watch(NoticeOrigin::File, &notices));
    }

    async fn watch(&self, origin: NoticeOrigin, notices: &mpsc::Sender<Notice>) {
        if origin == NoticeOrigin::File && self.config.file.is_none() {
            return;
        }
        tracing::info!(provider = origin.as_str(), "watching for termination notices");
        let (client, schedule, sink) = (&self.client, self.schedule(origin), self.sink(origin, notices));
        match (origin, &self.config.file) {
            (NoticeOrigin::Aws, _) => aws::watch(client, schedule, self.seed, sink).await,
            (NoticeOrigin::Gcp, _) => gcp::watch(client, schedule, self.seed, sink).await,
            (NoticeOrigin::Azure, _) => azure::watch(client, schedule, self.seed, sink).await,
            (NoticeOrigin::File, Some(path)) => {
                notice_file::watch(path, self.config.clock, schedule, self.seed, sink).await;
            }
            (NoticeOrigin::File, None) => {}
        }
    }

    /// The providers whose metadata services answer.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe.
    pub async fn responding_providers(&self) -> Vec<NoticeOrigin> {
        let client = &self.client;
        let (aws, gcp, azure) = tokio::join!(aws::responds(client), gcp::responds(client), azure::responds(client));
        [aws, gcp, azure].into_iter().flatten().collect()
    }

    async fn find_provider(&self) -> Option<NoticeOrigin> {
        let mut search = ProviderSearch::default();
        loop {
            match search.on_probed(&self.responding_providers().await) {
                ProviderProbe::Found(provider) => return Some(provider),
                ProviderProbe::RetryAfter(wait) => tokio::time::sleep(wait).await,
                ProviderProbe::NotFound => {
                    tracing::info!(
                        "no metadata service answered; not watching for termination notices (set \
                         `host.metadata_service` to name one, or \"off\" to skip the search)"
                    );
                    return None;
                }
            }
        }
    }
}

/// A request that is due.
struct DueCall<C> {
    call: C,
    sent_at: Instant,
}

/// Waits until a request is due.
async fn next_call<C>(clock: Clock, mut next: impl FnMut(Instant) -> NextRequest<C>) -> DueCall<C> {
    loop {
        let sent_at = clock.now();
        match next(sent_at) {
            NextRequest::WaitUntil(until) => clock.sleep_until(until).await,
            NextRequest::Call(call) => return DueCall { call, sent_at },
        }
    }
}

/// The receiver of notices was dropped.
#[derive(Debug)]
struct SinkClosed;

/// Sends the notices of one origin, and publishes the health of its watch.
#[derive(Debug, Clone)]
struct NoticeSink {
    origin: NoticeOrigin,
    clock: Clock,
    notices: mpsc::Sender<Notice>,
    statuses: Arc<watch::Sender<Vec<WatchStatus>>>,
}

impl NoticeSink {
    fn set_health(&self, health: WatchHealth) {
        let status = WatchStatus { origin: self.origin, health, since: self.clock.now() };
        self.statuses.send_modify(|statuses| {
            statuses.retain(|status| status.origin != self.origin);
            statuses.push(status);
        });
    }

    /// The service has said whether there is a notice.
    fn record_answer(&self) {
        let is_unknown = |status: &WatchStatus| status.origin == self.origin && status.health == WatchHealth::Unknown;
        if self.statuses.borrow().iter().any(is_unknown) {
            self.set_health(WatchHealth::Healthy);
        }
    }

    /// `error` is that of the last request, if it failed.
    async fn report(&self, event: Option<NoticeEvent>, error: Option<&str>) -> Result<(), SinkClosed> {
        let provider = self.origin.as_str();
        if let Some(error) = error {
            tracing::debug!(provider, "request for termination notices failed: {error}");
        }
        match event {
            None => {}
            Some(NoticeEvent::Terminating(termination)) => {
                let notice = Notice { origin: self.origin, termination };
                return self.notices.send(notice).await.map_err(|_| SinkClosed);
            }
            Some(NoticeEvent::Withdrawn) => {
                tracing::warn!(provider, "termination notice withdrawn; the worker still shuts down");
            }
            Some(NoticeEvent::WatchFailing) => {
                let error = error.unwrap_or("no answer");
                tracing::warn!(provider, "termination watch failing, a notice may be missed: {error}");
                self.set_health(WatchHealth::Failing(error.to_owned()));
            }
            Some(NoticeEvent::WatchRecovered) => {
                tracing::info!(provider, "termination watch recovered");
                self.set_health(WatchHealth::Healthy);
            }
        }
        Ok(())
    }
}

/// The time from `now` until `until`, both on the clock of the service if it states its time: ours may be wrong.
fn time_left(until: jiff::Timestamp, now: jiff::Timestamp) -> Duration {
    Duration::try_from(until.duration_since(now)).unwrap_or_default()
}
