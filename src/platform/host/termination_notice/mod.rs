//! Watches for notices that this host terminates: from the metadata service of its cloud, and from a file.
//!
//! [`journeyman_domain::termination_notice`] schedules the requests, and [`journeyman_domain::worker`] decides what happens to tasks.

mod aws;
mod azure;
mod gcp;
mod metadata_service;
mod notice_file;

use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio::sync::{mpsc, watch};

use crate::host::clock::Clock;
use journeyman_domain::limits::{NOTICE_POLL_INTERVAL, NOTICE_POLL_INTERVAL_AWS};
use journeyman_domain::termination_notice::{NoticeEvent, NoticeReading, NoticeTracker, PollSchedule, Termination};
use journeyman_domain::time::Instant;
use metadata_service::MetadataClient;

pub use journeyman_domain::termination_notice::NoticeOrigin;

/// For the search for a metadata service at the start, and between two attempts: the network may not be up at first.
const SEARCH_TIMEOUT: Duration = Duration::from_secs(5);
const SEARCH_RETRY: Duration = Duration::from_secs(1);
/// The error of a watch until the first answer.
pub const NO_ANSWER_YET: &str = "no answer yet";
/// How many notices may wait to be handled.
pub const NOTICES_MAX: usize = 16;

/// Metadata service that is watched.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(debug_assertions, derive(schemars::JsonSchema))]
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

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Notice {
    pub origin: NoticeOrigin,
    pub termination: Termination,
}

/// A watch for termination notices.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct WatchStatus {
    /// `aws`, `gcp`, `azure` or `file`.
    pub provider: String,
    /// Why a notice may be missed; absent while the watch works.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

/// Reads whether the host terminates, from one origin.
trait NoticeReader {
    async fn read(&mut self, sent_at: Instant) -> Result<NoticeReading, String>;
}

/// The watch over this host.
#[derive(Debug)]
pub struct NoticeWatch {
    config: NoticeConfig,
    client: MetadataClient,
    statuses: watch::Sender<Vec<WatchStatus>>,
}

impl NoticeWatch {
    /// # Errors
    ///
    /// The endpoint is not an `http://` address.
    pub fn new(config: NoticeConfig) -> Result<Self, String> {
        let client = MetadataClient::new(config.endpoint.as_deref(), config.clock)?;
        Ok(Self { config, client, statuses: watch::Sender::default() })
    }

    pub fn subscribe_statuses(&self) -> watch::Receiver<Vec<WatchStatus>> {
        self.statuses.subscribe()
    }

    /// Sends each notice once. Returns if there is nothing to watch, or the receiver was dropped.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe: a later watch reads the same notices again.
    pub async fn run(self, notices: mpsc::Sender<Notice>) {
        let watch_file = async {
            if let Some(path) = &self.config.file {
                self.poll(NoticeOrigin::File, notice_file::Reader::new(path), &notices).await;
            }
        };
        tokio::join!(self.watch_cloud(&notices), watch_file);
    }

    async fn watch_cloud(&self, notices: &mpsc::Sender<Notice>) {
        let auto = self.config.cloud == MetadataProvider::Auto;
        let provider = if auto { self.find_provider().await } else { self.config.cloud.origin() };
        let (client, Some(origin)) = (&self.client, provider) else { return };
        match origin {
            NoticeOrigin::Aws => self.poll(origin, aws::Reader { client }, notices).await,
            NoticeOrigin::Azure => self.poll(origin, azure::Reader::new(client), notices).await,
            NoticeOrigin::Gcp => {
                tokio::join!(
                    self.poll(origin, gcp::Reader::new(client, gcp::PREEMPTION), notices),
                    self.poll(origin, gcp::Reader::new(client, gcp::MAINTENANCE), notices),
                );
            }
            NoticeOrigin::File => {}
        }
    }

    /// The providers whose metadata services answer. Google and Azure identify themselves; other clouds imitate EC2's interface, so
    /// it comes last.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe.
    pub async fn responding_providers(&self) -> Vec<NoticeOrigin> {
        let client = &self.client;
        let (gcp, azure, aws) = tokio::join!(gcp::responds(client), azure::responds(client), aws::responds(client));
        let found = [(NoticeOrigin::Gcp, gcp), (NoticeOrigin::Azure, azure), (NoticeOrigin::Aws, aws)];
        found.into_iter().filter_map(|(origin, responds)| responds.then_some(origin)).collect()
    }

    async fn find_provider(&self) -> Option<NoticeOrigin> {
        let searching = async {
            loop {
                if let Some(found) = self.responding_providers().await.first() {
                    return *found;
                }
                tokio::time::sleep(SEARCH_RETRY).await;
            }
        };
        if let Ok(found) = tokio::time::timeout(SEARCH_TIMEOUT, searching).await {
            return Some(found);
        }
        tracing::info!(
            "no metadata service answered; not watching for termination notices (set `host.metadata_service` to name one, or \
             \"off\" to skip the search)"
        );
        None
    }

    async fn poll(&self, origin: NoticeOrigin, mut reader: impl NoticeReader, notices: &mpsc::Sender<Notice>) {
        let (clock, provider) = (self.config.clock, origin.as_str());
        let interval = if origin == NoticeOrigin::Aws { NOTICE_POLL_INTERVAL_AWS } else { NOTICE_POLL_INTERVAL };
        let schedule = self.config.schedule.unwrap_or_else(|| PollSchedule::with_interval(interval));
        let mut tracker = NoticeTracker::new(schedule, uuid::Uuid::new_v4().as_u64_pair().0);
        tracing::info!(provider, "watching for termination notices");
        self.set_status(origin, Some(NO_ANSWER_YET.to_owned()));
        let mut answered = false;
        loop {
            clock.sleep_until(tracker.next_at()).await;
            let sent_at = clock.now();
            let reading = reader.read(sent_at).await;
            match &reading {
                Ok(_) if answered => {}
                Ok(_) => {
                    answered = true;
                    self.set_status(origin, None);
                }
                Err(error) => tracing::debug!(provider, "request for termination notices failed: {error}"),
            }
            match tracker.on_reading(reading.as_ref().ok().copied(), sent_at, clock.now()) {
                None => {}
                Some(NoticeEvent::Terminating(termination)) => {
                    let Ok(()) = notices.send(Notice { origin, termination }).await else { return };
                }
                Some(NoticeEvent::WatchFailing) => {
                    let error = reading.err().unwrap_or_default();
                    tracing::warn!(provider, "termination watch failing, a notice may be missed: {error}");
                    self.set_status(origin, Some(error));
                }
                Some(NoticeEvent::WatchRecovered) => {
                    tracing::info!(provider, "termination watch recovered");
                    self.set_status(origin, None);
                }
            }
        }
    }

    fn set_status(&self, origin: NoticeOrigin, error: Option<String>) {
        let status = WatchStatus { provider: origin.as_str().to_owned(), error };
        self.statuses.send_modify(|statuses| {
            statuses.retain(|other| other.provider != status.provider);
            statuses.push(status);
        });
    }
}

/// The time from `now` until `until`, both on the clock of the service if it states its time: ours may be wrong.
fn time_left(until: jiff::Timestamp, now: jiff::Timestamp) -> Duration {
    Duration::try_from(until.duration_since(now)).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn e8_a_metadata_service_that_says_nothing_is_searched_for_5_s() {
        let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let endpoint = Some(format!("http://{}", silent.local_addr().unwrap()));
        let (cloud, clock) = (MetadataProvider::Auto, Clock::tokio());
        let watch = NoticeWatch::new(NoticeConfig { cloud, endpoint, file: None, schedule: None, clock }).unwrap();
        let (began, (sender, _receiver)) = (tokio::time::Instant::now(), mpsc::channel(1));
        watch.run(sender).await;
        assert_eq!(began.elapsed(), Duration::from_secs(5));
    }
}
