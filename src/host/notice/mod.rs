//! Watches for the end of this host: the metadata service of its cloud, and a file.
//!
//! The calls are made here; what the answers mean and when to ask again is decided in [`crate::domain::notice`], and what
//! becomes of tasks in [`crate::domain::worker`].

mod aws;
mod azure;
mod file;
mod gcp;
mod service;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{mpsc, watch};

use crate::domain::notice::{Goes, News, Next, Pace, Probed, Provider, Search};
use crate::domain::time::Instant;
use crate::host::clock::Clock;
use crate::limits::{NOTICE_FILE_PACE, NOTICE_PACE_AWS, NOTICE_PACE_AZURE, NOTICE_PACE_GCP};
use service::Service;

pub use service::Unusable;

/// How many notices may wait to be heeded.
pub const NOTICES_MAX: usize = 16;

/// Whose metadata service is watched.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cloud {
    /// None.
    Off,
    /// The one that is found.
    Auto,
    /// This one, whether it answers or not.
    Named(Provider),
}

/// How often each kind of source is looked at.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Paces {
    /// EC2. 5 s, as AWS recommends.
    pub aws: Pace,
    /// Google. 1 s, where a wait for a change comes back without one.
    pub gcp: Pace,
    /// Azure. 1 s, as Azure recommends.
    pub azure: Pace,
    /// The file. 1 s.
    pub file: Pace,
}

impl Default for Paces {
    fn default() -> Self {
        Self {
            aws: Pace::every(NOTICE_PACE_AWS),
            gcp: Pace::every(NOTICE_PACE_GCP),
            azure: Pace::every(NOTICE_PACE_AZURE),
            file: Pace::every(NOTICE_FILE_PACE),
        }
    }
}

/// What is watched.
#[derive(Debug, Clone)]
pub struct Settings {
    /// Whose metadata service.
    pub cloud: Cloud,
    /// Where it is, if not at the address that all clouds share.
    pub endpoint: Option<String>,
    /// A file that says when the host goes; an empty one is an order to go at once.
    pub file: Option<PathBuf>,
    /// How often.
    pub paces: Paces,
    /// The clock on which deadlines are told.
    pub clock: Clock,
}

/// Where a notice comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Origin {
    /// A metadata service.
    Cloud(Provider),
    /// The file.
    File,
}

impl Origin {
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
pub enum Said {
    /// It goes.
    Goes(Goes),
    /// It may have to go before long.
    AtRisk,
}

/// Something that a worker should heed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Notice {
    /// Where it comes from.
    pub origin: Origin,
    /// What it says.
    pub said: Said,
}

/// How a metadata service, or the file, is heard.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sight {
    /// Which.
    pub origin: Origin,
    /// Whether a notice of it would be heard.
    pub hearing: Hearing,
    /// Since when.
    pub since: Instant,
}

/// Whether notices are heard.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Hearing {
    /// That is not known: it has not said yet whether there is one.
    Unknown,
    /// They are.
    Heard,
    /// They may be missed; why.
    Missed(String),
}

/// The watch over this host.
#[derive(Debug)]
pub struct Watch {
    settings: Settings,
    service: Service,
    seed: u64,
    sights: Arc<watch::Sender<Vec<Sight>>>,
}

impl Watch {
    /// A watch that has not begun.
    ///
    /// # Errors
    ///
    /// An endpoint that is no `http://` address.
    pub fn new(settings: Settings) -> Result<Self, Unusable> {
        let service = Service::new(settings.endpoint.as_deref(), settings.clock)?;
        let seed = uuid::Uuid::new_v4().as_u64_pair().0;
        Ok(Self { settings, service, seed, sights: Arc::default() })
    }

    /// How everything is heard that is watched.
    #[must_use]
    pub fn sights(&self) -> watch::Receiver<Vec<Sight>> {
        self.sights.subscribe()
    }

    fn heard(&self, origin: Origin) -> Heard {
        let heard = Heard { origin, clock: self.settings.clock, sights: Arc::clone(&self.sights) };
        heard.say(Hearing::Unknown);
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
        let found = match self.settings.cloud {
            Cloud::Off => None,
            Cloud::Named(provider) => Some(provider),
            Cloud::Auto => self.search().await,
        };
        let Some(provider) = found else { return };
        let teller = Teller { notices: notices.clone(), heard: self.heard(Origin::Cloud(provider)) };
        tracing::info!(provider = teller.heard.origin.as_str(), "watching for notices that this host goes");
        let (service, paces) = (&self.service, self.settings.paces);
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
    pub async fn there(&self) -> Vec<Provider> {
        let service = &self.service;
        let (aws, gcp, azure) = tokio::join!(aws::there(service), gcp::there(service), azure::there(service));
        [aws, gcp, azure].into_iter().flatten().collect()
    }

    async fn search(&self) -> Option<Provider> {
        let mut search = Search::default();
        loop {
            match search.probed(&self.there().await) {
                Probed::Found(provider) => return Some(provider),
                Probed::Again(wait) => tokio::time::sleep(wait).await,
                Probed::NoCloud => {
                    tracing::info!(
                        "no cloud's metadata service answers, so no notices are watched for; where there is one, name it in \
                         `host.spot`, and `off` spares the search"
                    );
                    return None;
                }
            }
        }
    }

    async fn watch_file(&self, notices: &mpsc::Sender<Notice>) {
        let Some(path) = &self.settings.file else { return };
        let teller = Teller { notices: notices.clone(), heard: self.heard(Origin::File) };
        file::watch(path, self.settings.clock, self.settings.paces.file, self.seed, teller).await;
    }
}

/// A call that is to be made now.
struct Due<C> {
    call: C,
    sent_at: Instant,
}

/// Rests until the rules want a call.
async fn due<C>(clock: Clock, mut next: impl FnMut(Instant) -> Next<C>) -> Due<C> {
    loop {
        let sent_at = clock.now();
        match next(sent_at) {
            Next::Rest(until) => clock.sleep_until(until).await,
            Next::Call(call) => return Due { call, sent_at },
        }
    }
}

/// Nobody is there to be told any more.
#[derive(Debug)]
struct NobodyListens;

/// Keeps for those who look whether one of those is heard.
#[derive(Debug, Clone)]
struct Heard {
    origin: Origin,
    clock: Clock,
    sights: Arc<watch::Sender<Vec<Sight>>>,
}

impl Heard {
    fn say(&self, hearing: Hearing) {
        let sight = Sight { origin: self.origin, hearing, since: self.clock.now() };
        self.sights.send_modify(|sights| {
            sights.retain(|sight| sight.origin != self.origin);
            sights.push(sight);
        });
    }

    fn answered(&self) {
        let unknown = |sight: &Sight| sight.origin == self.origin && sight.hearing == Hearing::Unknown;
        if self.sights.borrow().iter().any(unknown) {
            self.say(Hearing::Heard);
        }
    }
}

/// Passes on what a watch learns.
#[derive(Debug, Clone)]
struct Teller {
    notices: mpsc::Sender<Notice>,
    heard: Heard,
}

impl Teller {
    /// The service has said whether there is a notice.
    fn answered(&self) {
        self.heard.answered();
    }

    /// Says what is new. `trouble` is what the last call met, if it met any.
    async fn tell(&self, news: Option<News>, trouble: Option<&str>) -> Result<(), NobodyListens> {
        let provider = self.heard.origin.as_str();
        if let Some(trouble) = trouble {
            tracing::debug!(provider, "looking for notices: {trouble}");
        }
        let said = match news {
            Some(News::Goes(goes)) => Said::Goes(goes),
            Some(News::AtRisk) => Said::AtRisk,
            Some(News::Withdrawn) => {
                tracing::warn!(provider, "the notice is withdrawn; the worker goes all the same");
                return Ok(());
            }
            Some(News::Unwell) => {
                let trouble = trouble.unwrap_or("it does not answer");
                tracing::warn!(provider, "a notice that this host goes may be missed: {trouble}");
                self.heard.say(Hearing::Missed(trouble.to_owned()));
                return Ok(());
            }
            Some(News::Well) => {
                tracing::info!(provider, "notices are heard again");
                self.heard.say(Hearing::Heard);
                return Ok(());
            }
            None => return Ok(()),
        };
        self.notices.send(Notice { origin: self.heard.origin, said }).await.map_err(|_| NobodyListens)
    }
}

/// What is left until a time that whoever answered named. Their own clock counts, if they tell it: ours may be off.
fn left(until: jiff::Timestamp, now: jiff::Timestamp) -> Duration {
    Duration::try_from(until.duration_since(now)).unwrap_or_default()
}
