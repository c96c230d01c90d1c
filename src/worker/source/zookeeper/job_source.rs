//! The source itself: polls that wait for a free request and claim it.

use std::pin::Pin;
use std::sync::Arc;

use futures_util::future::join_all;
use serde_json::json;
use tokio::sync::{Notify, mpsc};
use tokio::time::{Instant, sleep_until, timeout};

use crate::source::{
    CallError, Capabilities, Grant, InspectionTable, OpenResult, PauseSwitch, PollBatch, Source, SourceEvent,
    SourceFuture, next_of,
};
use journeyman_domain::id::PriorityQueue;
use journeyman_domain::limits::{ZOOKEEPER_CLOSE_TIMEOUT, ZOOKEEPER_EVENTS_MAX, ZOOKEEPER_LONG_POLL_WAIT};
use journeyman_domain::refusal::Refusal;
use journeyman_platform::zookeeper::components::{self, Component, ComponentState, Registration};
use journeyman_platform::zookeeper::{ConnectConfig, Session};

use super::claim::SourceContext;
use super::queue_watch::QueueWatch;
use super::{Dialect, inspection, native, zuul};

const COMPONENTS: &str = "/zuul/components";

/// A queue, and the zone whose builds it has.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ZooKeeperQueue {
    /// Its path.
    pub path: String,
    /// The zone; `None` for builds without one, and for other requests.
    pub zone: Option<String>,
}

/// Which queues of which ensemble are worked for.
#[derive(Debug, Clone)]
pub struct ZooKeeperSourceConfig {
    /// The ensemble.
    pub connect: ConnectConfig,
    /// The layout of the queues.
    pub dialect: Dialect,
    /// The queues. The lowest precedence of them all comes first.
    pub queues: Vec<ZooKeeperQueue>,
    /// This worker cleans its queues up too.
    pub janitor: bool,
    /// The worker's name, which its locks and requests carry.
    pub worker_id: String,
}

/// Queues in a ZooKeeper.
pub struct ZooKeeperSource {
    inner: Arc<SourceInner>,
    events: tokio::sync::Mutex<mpsc::Receiver<SourceEvent>>,
}

struct SourceInner {
    config: ZooKeeperSourceConfig,
    context: Arc<SourceContext>,
    /// The queues as the current session sees them.
    watched: tokio::sync::Mutex<Option<Arc<Watched>>>,
    pause: PauseSwitch,
    /// This worker among the processes of a Zuul, once for each zone.
    registrations: tokio::sync::Mutex<Vec<Registration>>,
}

struct Watched {
    session: Arc<Session>,
    queues: Vec<Arc<QueueWatch>>,
    /// Wakes when a request of any queue may have become free.
    arrived: Arc<Notify>,
}

impl Watched {
    fn pick(&self) -> Option<(&Arc<QueueWatch>, Box<str>)> {
        let places = self.queues.iter().filter_map(|watch| Some((watch.first_place()?, watch)));
        let (_, watch) = places.min_by_key(|(place, _)| *place)?;
        Some((watch, watch.pick()?))
    }

    fn held_claims(&self) -> usize {
        self.queues.iter().map(|watch| watch.held_claims()).sum()
    }
}

impl ZooKeeperSource {
    /// A source that connects with its first poll.
    pub fn new(config: ZooKeeperSourceConfig) -> Self {
        let (events, receiver) = mpsc::channel(ZOOKEEPER_EVENTS_MAX);
        let inner = SourceInner {
            context: Arc::new(SourceContext::new(&config, events)),
            config,
            watched: tokio::sync::Mutex::default(),
            pause: PauseSwitch::new(),
            registrations: tokio::sync::Mutex::default(),
        };
        Self { inner: Arc::new(inner), events: tokio::sync::Mutex::new(receiver) }
    }
}

impl SourceInner {
    async fn watch(self: &Arc<Self>) -> Result<Arc<Watched>, CallError> {
        let mut current = self.watched.lock().await;
        if let Some(watched) = current.as_ref().filter(|watched| !watched.session.is_ended()) {
            return Ok(Arc::clone(watched));
        }
        // I6: what the lost session held is free, and must not run beside its old payload.
        if let Some(lost) = current.as_ref()
            && lost.held_claims() > 0
        {
            let message = format!("{} requests of a lost session are still being ended", lost.held_claims());
            return Err(CallError::retry(message));
        }
        let session = Arc::new(Session::connect(&self.config.connect).await?);
        let (mut registrations, arrived) = (Vec::new(), Arc::new(Notify::new()));
        let mut queues = Vec::new();
        for queue in &self.config.queues {
            registrations.extend(self.register(&session, queue.zone.as_deref()).await?);
            queues.push(QueueWatch::start(self.config.dialect, queue, &session, &arrived).await?);
        }
        *self.registrations.lock().await = registrations;
        for watch in &queues {
            let (watching, events) = (Arc::clone(watch), self.context.events.clone());
            self.context.spawn(async move { watching.run(events).await });
            if self.config.janitor {
                let cleaning = Arc::clone(watch);
                self.context.spawn(async move { cleaning.clean_up().await });
            }
        }
        Ok(Arc::clone(current.insert(Arc::new(Watched { session, queues, arrived }))))
    }

    /// A Zuul lists its processes, sends builds of a zone to where it finds one, and writes the data formats of the oldest.
    async fn register(&self, session: &Arc<Session>, zone: Option<&str>) -> Result<Option<Registration>, CallError> {
        let (kind, own) = match self.config.dialect {
            Dialect::Native => return Ok(None),
            Dialect::ZuulMerger => ("merger", json!({})),
            Dialect::ZuulExecutor => {
                let own = json!({
                    "accepting_work": false, "allow_unzoned": zone.is_none(), "process_merge_jobs": false, "zone": zone,
                });
                ("executor", own)
            }
        };
        let component = Component {
            state: ComponentState::Running,
            hostname: self.config.worker_id.clone(),
            kind: kind.to_owned(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            model_api: components::cluster_model_api(session, COMPONENTS).await?,
            own: serde_json::from_value(own).unwrap_or_default(),
        };
        Ok(Some(Registration::create(session, COMPONENTS, component).await?))
    }

    /// Whatever the order of such calls, the last one says what is so.
    async fn publish_accepting(&self) {
        let mut registrations = self.registrations.lock().await;
        let accepts = !self.pause.is_paused();
        for registration in &mut *registrations {
            let changed = registration.update(|component| match component.own.get_mut("accepting_work") {
                Some(flag) => *flag = accepts.into(),
                None => component.state = if accepts { ComponentState::Running } else { ComponentState::Paused },
            });
            if let Err(error) = changed.await {
                tracing::debug!("{error}; the next change says it anew");
            }
        }
    }

    async fn poll(self: &Arc<Self>, max: u8) -> Result<PollBatch, CallError> {
        let ends_at = Instant::now() + ZOOKEEPER_LONG_POLL_WAIT;
        let watched = self.watch().await?;
        self.publish_accepting().await;
        while !self.pause.is_paused() {
            let mut changed = std::pin::pin!(watched.arrived.notified());
            changed.as_mut().enable();
            let picked: Vec<_> = (0..max).map_while(|_| watched.pick()).collect();
            if !picked.is_empty() {
                let claimed = join_all(picked.iter().map(|(watch, id)| self.claim(watch, id))).await;
                let (mut grants, mut failed) = (Vec::new(), None);
                for claim in claimed {
                    match claim {
                        Ok(grant) => grants.extend(grant),
                        Err(error) => failed = Some(error),
                    }
                }
                match failed {
                    // The worker waits before it tries again.
                    Some(error) if grants.is_empty() => return Err(error),
                    Some(error) => tracing::warn!("{error}"),
                    None if grants.is_empty() => continue,
                    None => {}
                }
                return Ok(PollBatch { grants, ..PollBatch::default() });
            }
            tokio::select! {
                () = changed => {}
                () = watched.session.ended() => {
                    let servers = &self.config.connect.servers;
                    return Err(CallError::retry(format!("the session with {servers} has expired")));
                }
                // Nothing can be lost: a request is claimed in the branch above.
                () = self.pause.paused() => {}
                () = sleep_until(ends_at) => break,
            }
        }
        Ok(PollBatch::default())
    }

    async fn claim(self: &Arc<Self>, watch: &Arc<QueueWatch>, id: &str) -> Result<Option<Grant>, CallError> {
        let claimed = match self.config.dialect {
            Dialect::ZuulMerger | Dialect::ZuulExecutor => zuul::claim(&self.context, watch, id).await,
            Dialect::Native => native::claim(&self.context, watch, id).await,
        };
        if let Ok(claimed) = &claimed {
            watch.on_claim(id, claimed.as_ref());
        }
        match claimed {
            // It is tried again when something about it changes, and costs the others nothing. So does a node with other rights.
            Err(CallError { refusal: Refusal::Rejected | Refusal::Gone | Refusal::Denied, message }) => {
                tracing::warn!(request = id, "{message}");
                watch.set_aside(id);
                Ok(None)
            }
            Err(error) => {
                watch.put_back(id);
                Err(error)
            }
            claimed => claimed,
        }
    }

    fn queue_paths(&self) -> String {
        self.config.queues.iter().map(|queue| queue.path.as_str()).collect::<Vec<_>>().join(", ")
    }
}

impl Drop for ZooKeeperSource {
    fn drop(&mut self) {
        self.inner.context.tasks.lock().abort_all();
    }
}

impl Source for ZooKeeperSource {
    fn describe(&self) -> String {
        let ZooKeeperSourceConfig { connect, dialect, .. } = &self.inner.config;
        let chroot = connect.chroot.as_deref().unwrap_or_default();
        let layout = match dialect {
            Dialect::ZuulMerger => "Zuul's merge jobs",
            Dialect::ZuulExecutor => "Zuul's builds",
            Dialect::Native => "tasks",
        };
        format!("{layout} of {} in the ZooKeeper at {}{chroot}", self.inner.queue_paths(), connect.servers)
    }

    fn service_id(&self) -> String {
        let ZooKeeperSourceConfig { connect, .. } = &self.inner.config;
        let chroot = connect.chroot.as_deref().unwrap_or_default();
        format!("zookeeper {}{chroot} {}", connect.servers, self.inner.queue_paths())
    }

    fn claimant(&self) -> String {
        format!("{} {}", self.service_id(), self.inner.config.worker_id)
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            long_poll: true,
            supports_recovery: false,
            reports_cancellation: false,
            connection_scoped: true,
            fenced_reports: true,
        }
    }

    fn open(&self) -> SourceFuture<'_, OpenResult> {
        Box::pin(std::future::ready(Ok(OpenResult { priority_queues: 1, usable_for: None })))
    }

    fn poll(&self, _queue: PriorityQueue, max: u8) -> SourceFuture<'_, PollBatch> {
        Box::pin(self.inner.poll(max))
    }

    fn next_event(&self) -> Pin<Box<dyn Future<Output = SourceEvent> + Send + '_>> {
        Box::pin(next_of(&self.events))
    }

    fn inspect(&self) -> Option<SourceFuture<'_, Vec<InspectionTable>>> {
        Some(Box::pin(async {
            let watched = self.inner.watched.lock().await.clone();
            let none = || CallError::retry(format!("there is no session with {}", self.inner.config.connect.servers));
            let watched = watched.filter(|watched| !watched.session.is_ended()).ok_or_else(none)?;
            Ok(inspection::tables(&watched.session, &self.inner.config.queues).await?)
        }))
    }

    fn pause(&self) {
        self.inner.pause.set(true);
        let inner = Arc::clone(&self.inner);
        self.inner.context.spawn(async move { inner.publish_accepting().await });
    }

    fn resume(&self) {
        self.inner.pause.set(false);
    }

    fn close(&self) -> Pin<Box<dyn Future<Output = ()> + Send + '_>> {
        Box::pin(async {
            let Some(watched) = self.inner.watched.lock().await.take() else { return };
            watched.queues.iter().for_each(|watch| watch.stop());
            let mut tasks = std::mem::take(&mut *self.inner.context.tasks.lock());
            let ending = async { while tasks.join_next().await.is_some() {} };
            if timeout(ZOOKEEPER_CLOSE_TIMEOUT, ending).await.is_err() {
                tracing::warn!("locks are left until the session with ZooKeeper expires");
            }
        })
    }
}
