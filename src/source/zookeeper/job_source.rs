//! The source itself: polls that wait for a free request and claim it.

use std::pin::Pin;
use std::sync::{Arc, OnceLock};

use futures_util::future::join_all;
use parking_lot::Mutex;
use serde_json::json;
use tokio::runtime::Handle;
use tokio::sync::{Notify, mpsc};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep_until, timeout};

use crate::domain::id::PriorityQueue;
use crate::domain::refusal::Refusal;
use crate::host::clock::Clock;
use crate::limits::{ZOOKEEPER_CLOSE_TIMEOUT, ZOOKEEPER_EVENTS_MAX, ZOOKEEPER_LONG_POLL_WAIT};
use crate::source::{
    CallError, Capabilities, Grant, InspectionTable, OpenResult, PollBatch, Source, SourceEvent, SourceFuture,
};
use crate::zookeeper::components::{self, Component, ComponentState, Registration};
use crate::zookeeper::{ConnectConfig, Session};

use super::queue_watch::QueueWatch;
use super::{Dialect, inspection, native, zuul};

const COMPONENTS: &str = "/zuul/components";

/// Which queue of which ensemble is worked for.
#[derive(Debug, Clone)]
pub struct ZooKeeperSourceConfig {
    /// The ensemble.
    pub connect: ConnectConfig,
    /// The layout of the queue.
    pub dialect: Dialect,
    /// The path of the queue.
    pub queue: String,
    /// The zone whose builds are claimed.
    pub zone: Option<String>,
    /// The worker's name, which its locks and requests carry.
    pub worker_id: String,
}

/// A queue in a ZooKeeper.
pub struct ZooKeeperSource {
    inner: Arc<SourceInner>,
    events: tokio::sync::Mutex<mpsc::Receiver<SourceEvent>>,
}

pub(super) struct SourceInner {
    pub(super) config: ZooKeeperSourceConfig,
    pub(super) clock: Clock,
    /// The queue as the current session sees it.
    watch: tokio::sync::Mutex<Option<Arc<QueueWatch>>>,
    events: mpsc::Sender<SourceEvent>,
    paused: Notify,
    /// This worker among the processes of a Zuul.
    registration: tokio::sync::Mutex<Option<Registration>>,
    /// Watching, pauses, and giving up locks of claims without a report.
    tasks: Mutex<JoinSet<()>>,
    /// Where the source is polled: a handler that pauses or drops its claim runs on threads that end earlier.
    runtime: OnceLock<Handle>,
}

impl ZooKeeperSource {
    /// A source that connects with its first poll.
    #[must_use]
    pub fn new(config: ZooKeeperSourceConfig) -> Self {
        let (events, receiver) = mpsc::channel(ZOOKEEPER_EVENTS_MAX);
        let inner = SourceInner {
            config,
            clock: Clock::boot(),
            watch: tokio::sync::Mutex::default(),
            events,
            paused: Notify::new(),
            registration: tokio::sync::Mutex::default(),
            tasks: Mutex::default(),
            runtime: OnceLock::new(),
        };
        Self { inner: Arc::new(inner), events: tokio::sync::Mutex::new(receiver) }
    }
}

impl SourceInner {
    pub(super) fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        let mut tasks = self.tasks.lock();
        while let Some(ended) = tasks.try_join_next() {
            if let Err(error) = ended {
                tracing::error!(%error, "a task of a ZooKeeper source panicked; its locks end with the session");
            }
        }
        tasks.spawn_on(task, self.runtime.get_or_init(Handle::current));
    }

    async fn watch(self: &Arc<Self>) -> Result<Arc<QueueWatch>, CallError> {
        let mut current = self.watch.lock().await;
        if let Some(watch) = current.as_ref().filter(|watch| !watch.session.is_ended()) {
            return Ok(Arc::clone(watch));
        }
        // I6: what the lost session held is free, and must not run beside its old payload.
        if let Some(lost) = current.as_ref()
            && lost.held_claims() > 0
        {
            let message = format!("{} requests of a lost session are still being ended", lost.held_claims());
            return Err(CallError { refusal: Refusal::Retry { retry_after: None }, message });
        }
        let session = Arc::new(Session::connect(&self.config.connect).await?);
        *self.registration.lock().await = self.register(&session).await?;
        let watch = QueueWatch::start(&self.config, session).await?;
        tracing::debug!(queue = self.config.queue, session = watch.session.id(), "watching");
        let (watching, events) = (Arc::clone(&watch), self.events.clone());
        self.spawn(async move { watching.run(events).await });
        Ok(Arc::clone(current.insert(watch)))
    }

    /// A Zuul lists its processes, and writes the data formats of the oldest one.
    async fn register(&self, session: &Arc<Session>) -> Result<Option<Registration>, CallError> {
        let zone = &self.config.zone;
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

    async fn set_accepting(&self, accepts: bool) {
        let mut registration = self.registration.lock().await;
        let Some(registration) = registration.as_mut() else { return };
        let changed = registration.update(|component| match component.own.get_mut("accepting_work") {
            Some(flag) => *flag = accepts.into(),
            None => component.state = if accepts { ComponentState::Running } else { ComponentState::Paused },
        });
        if let Err(error) = changed.await {
            tracing::debug!("{error}; the next change says it anew");
        }
    }

    async fn poll(self: &Arc<Self>, max: u8) -> Result<PollBatch, CallError> {
        let ends_at = Instant::now() + ZOOKEEPER_LONG_POLL_WAIT;
        let watch = self.watch().await?;
        self.set_accepting(true).await;
        loop {
            let changed = watch.changed();
            let picked: Vec<Box<str>> = (0..max).map_while(|_| watch.pick()).collect();
            if !picked.is_empty() {
                let claimed = join_all(picked.iter().map(|id| self.claim(&watch, id))).await;
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
                () = watch.session.ended() => {
                    let message = format!("the session with {} has expired", self.config.connect.servers);
                    return Err(CallError { refusal: Refusal::Retry { retry_after: None }, message });
                }
                // Nothing can be lost: a request is claimed in the branch above.
                () = self.paused.notified() => {
                    self.set_accepting(false).await;
                    return Ok(PollBatch::default());
                }
                () = sleep_until(ends_at) => return Ok(PollBatch::default()),
            }
        }
    }

    async fn claim(self: &Arc<Self>, watch: &Arc<QueueWatch>, id: &str) -> Result<Option<Grant>, CallError> {
        let claimed = match self.config.dialect {
            Dialect::ZuulMerger | Dialect::ZuulExecutor => zuul::claim(self, watch, id).await,
            Dialect::Native => native::claim(self, watch, id).await,
        };
        match claimed {
            // It is tried again when something about it changes, and costs the others nothing.
            Err(CallError { refusal: Refusal::Rejected | Refusal::Gone, message }) => {
                tracing::warn!(request = id, "{message}");
                Ok(None)
            }
            Err(error) => {
                watch.put_back(id);
                Err(error)
            }
            claimed => claimed,
        }
    }

    /// How long a claim is safe that was seen to stand by an answer to a request of this time.
    pub(super) fn expires_at(
        watch: &QueueWatch,
        sent_at: crate::domain::time::Instant,
    ) -> crate::domain::time::Instant {
        sent_at.plus(watch.session.timeout())
    }
}

impl Drop for ZooKeeperSource {
    fn drop(&mut self) {
        self.inner.tasks.lock().abort_all();
    }
}

impl Source for ZooKeeperSource {
    fn describe(&self) -> String {
        let ZooKeeperSourceConfig { connect, queue, dialect, .. } = &self.inner.config;
        let chroot = connect.chroot.as_deref().unwrap_or_default();
        let layout = match dialect {
            Dialect::ZuulMerger => "Zuul's merge jobs",
            Dialect::ZuulExecutor => "Zuul's builds",
            Dialect::Native => "tasks",
        };
        format!("{layout} of {chroot}{queue} in the ZooKeeper at {}", connect.servers)
    }

    fn service_id(&self) -> String {
        let ZooKeeperSourceConfig { connect, queue, .. } = &self.inner.config;
        format!("zookeeper {} {}{queue}", connect.servers, connect.chroot.as_deref().unwrap_or_default())
    }

    fn claimant(&self) -> String {
        format!("{} {}", self.service_id(), self.inner.config.worker_id)
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities { long_poll: true, supports_recovery: false, reports_cancellation: false, connection_scoped: true }
    }

    fn open(&self) -> SourceFuture<'_, OpenResult> {
        Box::pin(std::future::ready(Ok(OpenResult { priority_queues: 1, usable_for: None })))
    }

    fn poll(&self, _queue: PriorityQueue, max: u8) -> SourceFuture<'_, PollBatch> {
        Box::pin(self.inner.poll(max))
    }

    fn next_event(&self) -> Pin<Box<dyn Future<Output = SourceEvent> + Send + '_>> {
        Box::pin(async {
            match self.events.lock().await.recv().await {
                Some(event) => event,
                None => std::future::pending().await,
            }
        })
    }

    fn inspect(&self) -> Option<SourceFuture<'_, Vec<InspectionTable>>> {
        Some(Box::pin(async {
            let watch = self.inner.watch.lock().await.clone();
            let watch = watch.filter(|watch| !watch.session.is_ended()).ok_or_else(|| {
                let message = format!("there is no session with {}", self.inner.config.connect.servers);
                CallError { refusal: Refusal::Retry { retry_after: None }, message }
            })?;
            Ok(inspection::tables(&watch.session, watch.queue.root()).await?)
        }))
    }

    fn pause(&self) {
        self.inner.paused.notify_waiters();
    }

    fn close(&self) -> Pin<Box<dyn Future<Output = ()> + Send + '_>> {
        Box::pin(async {
            let Some(watch) = self.inner.watch.lock().await.take() else { return };
            watch.stop();
            let mut tasks = std::mem::take(&mut *self.inner.tasks.lock());
            let ending = async { while tasks.join_next().await.is_some() {} };
            if timeout(ZOOKEEPER_CLOSE_TIMEOUT, ending).await.is_err() {
                tracing::warn!("locks are left until the session with ZooKeeper expires");
            }
        })
    }
}
