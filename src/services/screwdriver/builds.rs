//! The handler of Screwdriver's messages: starts, looks at and stops the pods of builds.
//!
//! A message is acknowledged once Screwdriver has the outcome, or once the check that follows is stored.

use std::collections::HashMap;
use std::sync::{Arc, OnceLock};

use parking_lot::Mutex;
use serde_json::{Value, json};
use tokio::task::JoinSet;
use tokio::time::interval;

use super::build_api::{BuildApi, PutResult, Update};
use super::cache;
use super::message::{Build, Message};
use super::pod::{BUILD_LABEL, BuildTemplate, build_label, pod_name, token_secret};
use super::rules::{self, Decision};
use crate::screwdriver::config::ScrewdriverSource;
use journeyman_domain::limits::{
    POD_SWEEP_INTERVAL, SCREWDRIVER_START_RETRY, SCREWDRIVER_TOMBSTONE_KEPT, SCREWDRIVER_TOMBSTONES_PAGE,
};
use journeyman_domain::staged::{FailureClass, Progress, StagedAnswer, StagedPolicy, StagedRecord, Stamp};
use journeyman_platform::host::crash_points::crash_point;
use journeyman_platform::kubernetes::{
    FailureCause, KubernetesClient, KubernetesError, PODS, Pod, PodVerdict, RUNNING, SECRETS, StartGraces, existing,
    judge, sweep_ended,
};
use journeyman_platform::tasks::supervised;
use journeyman_worker::handler::staged::{StagedEnd, StagedHandler, Work, drive_to_end};
use journeyman_worker::handler::{
    Context, ExecuteError, ExecuteFailure, HandlerConfigError, PayloadHandler, PrepareError,
};
use journeyman_worker::task::{Deferral, Results};

/// Of the Secrets that keep a build from starting after it was stopped.
const STOPPED: &str = "journeyman/stopped-build";
/// The pods of all builds.
const BUILDS: &str = "app=screwdriver,tier=builds";

/// Starts builds as pods, for [`journeyman_worker::source::amqp`] sources of Screwdriver's queues.
pub struct ScrewdriverHandler {
    pods: BuildPods,
    cache: Option<std::path::PathBuf>,
    /// One message of a build at a time.
    locks: Mutex<HashMap<u64, Arc<tokio::sync::Mutex<()>>>>,
    /// The removal of what has ended. Aborted on drop.
    tasks: OnceLock<JoinSet<()>>,
}

struct BuildPods {
    config: ScrewdriverSource,
    template: BuildTemplate,
    client: Arc<KubernetesClient>,
    api: BuildApi,
}

impl ScrewdriverHandler {
    /// # Errors
    ///
    /// Fails if the template, or the system's certificates, cannot be read.
    pub fn new(name: &str, config: ScrewdriverSource) -> Result<Self, HandlerConfigError> {
        let failed = |message: String| HandlerConfigError { handler: name.to_owned(), message };
        let template = BuildTemplate::load(config.template.as_ref().map(|file| file.0.as_path()));
        let template = template.map_err(|error| failed(error.to_string()))?;
        let api = BuildApi::new(config.api.clone()).map_err(|error| failed(error.to_string()))?;
        let kubeconfig = config.kubeconfig.as_ref().map(|file| file.0.clone());
        let client = Arc::new(KubernetesClient::new(kubeconfig, config.namespace.clone()));
        let cache = config.cache_path.as_ref().map(|path| path.0.clone());
        let pods = BuildPods { config, template, client, api };
        Ok(Self { pods, cache, locks: Mutex::default(), tasks: OnceLock::new() })
    }

    fn start_tasks(&self) {
        self.tasks.get_or_init(|| {
            let mut tasks = JoinSet::new();
            tasks.spawn(supervised("removing tombstones", sweep_tombstones(Arc::clone(&self.pods.client))));
            if let Some(kept) = self.pods.config.ended_pods_kept.0 {
                let sweeping = sweep_ended(Arc::clone(&self.pods.client), BUILDS.to_owned(), kept);
                tasks.spawn(supervised("removing pods", sweeping));
            }
            tasks
        });
    }

    fn lock(&self, build_id: u64) -> Arc<tokio::sync::Mutex<()>> {
        let mut locks = self.locks.lock();
        // Unused ones.
        locks.retain(|_, lock| Arc::strong_count(lock) > 1);
        Arc::clone(locks.entry(build_id).or_default())
    }

    async fn run(&self, build: &Build, context: &Context) -> Result<(), ExecuteError> {
        let (class, reason) = match drive_to_end(&self.pods, build, context).await? {
            StagedEnd::Failed { class, reason } => (class, reason),
            // It was stopped, or another message stands for this one.
            StagedEnd::Done | StagedEnd::Canceled | StagedEnd::Superseded => return Ok(()),
        };
        let is_reported = match class {
            FailureClass::Task | FailureClass::Config => true,
            // The retries of the start are spent.
            FailureClass::Capacity | FailureClass::Infrastructure | FailureClass::Access => {
                self.pods.report_failure(build, &reason).await
            }
        };
        if !is_reported && let Some(deferral) = context.results().and_then(Results::deferral) {
            let record = deferral.record().cloned().unwrap_or_default();
            deferral.defer(record, self.pods.config.limits.delay.0);
            return Err(ExecuteError::new(ExecuteFailure::Deferred, "Screwdriver has not taken the failure"));
        }
        Err(ExecuteError::failed(reason))
    }

    async fn stop(&self, build_id: u64, context: &Context) -> Result<(), ExecuteError> {
        let error = match self.pods.stop(build_id).await {
            Ok(()) => return Ok(()),
            Err(error) => error,
        };
        let deferral = context.results().and_then(Results::deferral);
        let mut record = deferral.and_then(Deferral::record).cloned().unwrap_or_default();
        let retries = record.infrastructure_failures;
        // Without an answer it is tried for as long as it takes.
        let is_tried_again = matches!(error, KubernetesError::Retry(_) | KubernetesError::Unauthorized(_))
            || self.pods.config.limits.may_reprocess(retries);
        if let Some(deferral) = deferral
            && is_tried_again
        {
            tracing::warn!(build.id = build_id, "build {build_id} is stopped again later: {error}");
            (record.seq, record.infrastructure_failures) = (record.seq + 1, retries.saturating_add(1));
            deferral.defer(record, SCREWDRIVER_START_RETRY);
            return Err(ExecuteError::new(ExecuteFailure::Deferred, format!("build {build_id}: {error}")));
        }
        tracing::error!(
            alert = "build-not-stopped",
            build.id = build_id,
            "[alert operator] build {build_id} was not stopped, with {retries} retries: {error}; delete its pods by the label \
             {BUILD_LABEL}"
        );
        Err(ExecuteError::failed(error.to_string()))
    }
}

impl PayloadHandler for ScrewdriverHandler {
    type Payload = Value;
    type Prepared = Message;

    fn describe(&self) -> String {
        format!("Screwdriver's builds (namespace {})", self.pods.config.namespace)
    }

    async fn prepare(&self, payload: Value, _context: &Context) -> Result<Message, PrepareError> {
        Message::from_json(payload).map_err(|error| {
            tracing::error!("a message is dropped: {error}");
            PrepareError::malformed(vec![error.to_string()])
        })
    }

    async fn execute(&self, message: Message, context: &Context) -> Result<(), ExecuteError> {
        self.start_tasks();
        match message {
            Message::Start(build) | Message::Verify(build) => {
                context.set_progress(&format!("build {}", build.id()));
                let lock = self.lock(build.id());
                let _one = lock.lock().await;
                self.run(&build, context).await
            }
            Message::Stop { build_id } => {
                context.set_progress(&format!("stops build {build_id}"));
                let lock = self.lock(build_id);
                let _one = lock.lock().await;
                self.stop(build_id, context).await
            }
            Message::Clear(request) => {
                let Some(root) = self.cache.clone() else {
                    tracing::warn!("a cache is not cleared: the source has no `cache_path`");
                    return Ok(());
                };
                let clearing = tokio::task::spawn_blocking(move || cache::clear(&root, &request)).await;
                let cleared = clearing.map_err(|error| ExecuteError::internal(error.to_string()))?;
                cleared.map_err(|error| {
                    tracing::warn!("a cache is not cleared: {error}");
                    ExecuteError::failed(error.to_string())
                })
            }
        }
    }
}

impl BuildPods {
    fn label(&self, build_id: u64) -> String {
        build_label(&self.config.prefix, build_id)
    }

    fn selector(&self, build_id: u64) -> String {
        format!("{BUILD_LABEL}={}", self.label(build_id))
    }

    fn tombstone(&self, build_id: u64) -> String {
        format!("stopped-build-{}", self.label(build_id)).to_lowercase()
    }

    /// Whether Screwdriver has it, or refuses it for good. The build is looked at again otherwise.
    async fn report_failure(&self, build: &Build, text: &str) -> bool {
        match self.api.put(build, &Update::Failure(text.to_owned())).await {
            PutResult::Accepted => {
                tracing::info!(build.id = build.id(), "build {} has failed: {text}", build.id());
                crash_point("build-failure-reported");
                true
            }
            PutResult::Refused(why) => {
                tracing::warn!(build.id = build.id(), "Screwdriver refuses the failure of a build: {why}");
                true
            }
            PutResult::Later(why) => {
                tracing::warn!(build.id = build.id(), "the failure of a build is reported again later: {why}");
                false
            }
        }
    }

    /// A pod that has not ended is removed once the failure is reported.
    async fn failed(&self, build: &Build, class: FailureClass, text: String) -> StagedAnswer {
        if self.report_failure(build, &text).await {
            StagedAnswer::Failed { class, reason: text.into() }
        } else {
            StagedAnswer::Unknown
        }
    }

    /// The pods of a build that is stopped end too.
    async fn failed_unless_stopped(
        &self,
        build: &Build,
        class: FailureClass,
        text: String,
    ) -> Result<StagedAnswer, KubernetesError> {
        if self.is_stopped(build.id()).await? {
            return Ok(StagedAnswer::Canceled);
        }
        Ok(self.failed(build, class, text).await)
    }

    fn now(&self) -> Stamp {
        Stamp(self.client.now().as_millisecond())
    }

    async fn is_stopped(&self, build_id: u64) -> Result<bool, KubernetesError> {
        let found = self.client.get_metadata(&SECRETS, &self.tombstone(build_id)).await;
        existing(found).map(|found| found.is_some())
    }

    /// A start that comes later finds the build stopped, on any host.
    async fn stop(&self, build_id: u64) -> Result<(), KubernetesError> {
        let metadata = json!({ "name": self.tombstone(build_id), "labels": { STOPPED: self.label(build_id) } });
        let tombstone = json!({ "apiVersion": "v1", "kind": "Secret", "metadata": metadata });
        self.client.create_if_missing(&SECRETS, &tombstone).await?;
        let subject = ("the pods of build", &*self.label(build_id));
        self.client.delete_all(&PODS, subject, &self.selector(build_id)).await
    }

    async fn pods(&self, build_id: u64) -> Result<Vec<Pod>, KubernetesError> {
        let subject = ("the pods of build", &*self.label(build_id));
        let list = self.client.list(&PODS, subject, &[("labelSelector", &self.selector(build_id))]).await?;
        Ok(list.items.unwrap_or_default())
    }

    async fn find(&self, build: &Build) -> Result<StagedAnswer, KubernetesError> {
        if self.is_stopped(build.id()).await? {
            // A start that was interrupted may have made its pod after the stop.
            self.stop(build.id()).await?;
            return Ok(StagedAnswer::Canceled);
        }
        let pods = self.pods(build.id()).await?;
        if let Some(own) = pods.iter().find(|pod| pod.metadata.name == pod_name(&self.config.prefix, build.id(), 0)) {
            self.client.create_if_missing(&SECRETS, &token_secret(own, build)).await?;
        }
        match self.most_advanced(&pods) {
            None => Ok(StagedAnswer::Absent),
            Some((pod, _)) => self.started(build, pod).await,
        }
    }

    async fn create(&self, build: &Build) -> Result<StagedAnswer, KubernetesError> {
        let refused = async |why: String| Ok(self.failed(build, FailureClass::Config, rules::refusal_text(&why)).await);
        let pod = match self.template.pod(build, &self.config, 0) {
            Ok(pod) => pod,
            Err(error) => return refused(error.to_string()).await,
        };
        let pod = match self.client.create(&PODS, &pod).await {
            Ok(pod) => pod,
            Err(KubernetesError::Conflict(_)) => {
                let name = pod_name(&self.config.prefix, build.id(), 0);
                let pod: Pod = self.client.get(&PODS, &name).await?;
                if pod.metadata.label(BUILD_LABEL) != Some(self.label(build.id()).as_str()) {
                    return refused(format!("there is a pod {name} that is not of this build")).await;
                }
                pod
            }
            Err(KubernetesError::Denied(why)) if why.contains("exceeded quota") => {
                tracing::warn!(build.id = build.id(), "build {} waits for quota: {why}", build.id());
                let (after, class) = (SCREWDRIVER_START_RETRY, FailureClass::Capacity);
                return Ok(StagedAnswer::Retry { after, class, reason: rules::refusal_text(&why).into() });
            }
            Err(KubernetesError::Denied(why) | KubernetesError::Rejected(why) | KubernetesError::Gone(why)) => {
                return refused(why).await;
            }
            Err(error @ (KubernetesError::Retry(_) | KubernetesError::Unauthorized(_))) => return Err(error),
        };
        crash_point("build-pod-created");
        self.client.create_if_missing(&SECRETS, &token_secret(&pod, build)).await?;
        crash_point("build-secret-created");
        // A stop on another host has not seen the pod.
        if self.is_stopped(build.id()).await? {
            self.stop(build.id()).await?;
            return Ok(StagedAnswer::Canceled);
        }
        self.started(build, &pod).await
    }

    /// What Screwdriver is told first is of use to its users, and no outcome.
    async fn started(&self, build: &Build, pod: &Pod) -> Result<StagedAnswer, KubernetesError> {
        if let PutResult::Refused(why) | PutResult::Later(why) = self.api.put(build, &Update::of_pod(pod)).await {
            tracing::debug!(build.id = build.id(), "{why}");
        }
        let (phase, since) = match self.judge(pod) {
            PodVerdict::Phase { name, since } => (name, since),
            // The check says what is to be done.
            PodVerdict::Done | PodVerdict::Failed { .. } | PodVerdict::Unknown => (RUNNING, None),
        };
        let check_in = Some(self.config.limits.delay.0);
        let progress = Progress { phase: phase.into(), since, observed_at: self.now(), check_in };
        Ok(StagedAnswer::Started { handle: pod.metadata.name.as_str().into(), progress })
    }

    fn judge(&self, pod: &Pod) -> PodVerdict {
        let limits = &self.config.limits;
        let graces = StartGraces { pull: limits.pull_grace.0, create: limits.create_grace.0 };
        // The container of the build has the value of the label as its name.
        let container = pod.metadata.label(BUILD_LABEL).unwrap_or_default();
        judge(pod, container, graces, self.now())
    }

    /// Of several pods, which only the existing worker makes, the one that has come furthest.
    fn most_advanced<'a>(&self, pods: &'a [Pod]) -> Option<(&'a Pod, PodVerdict)> {
        let rank = |verdict: &PodVerdict| match verdict {
            PodVerdict::Failed { .. } => 0,
            PodVerdict::Unknown => 1,
            PodVerdict::Phase { name, .. } if *name != RUNNING => 2,
            PodVerdict::Phase { .. } | PodVerdict::Done => 3,
        };
        pods.iter().map(|pod| (pod, self.judge(pod))).max_by_key(|(_, verdict)| rank(verdict))
    }

    async fn look(&self, build: &Build, record: &StagedRecord) -> Result<StagedAnswer, KubernetesError> {
        let pods = self.pods(build.id()).await?;
        let Some((pod, verdict)) = self.most_advanced(&pods) else {
            let text = rules::failure_text(FailureCause::Disruption, "its pod is gone");
            return self.failed_unless_stopped(build, FailureClass::Task, text).await;
        };
        let limits = &self.config.limits;
        match limits.decide(&verdict, record.phase_since, self.now()) {
            Decision::Started => match self.api.put(build, &Update::of_pod(pod)).await {
                PutResult::Accepted => Ok(StagedAnswer::Done),
                PutResult::Refused(why) => {
                    tracing::warn!(build.id = build.id(), "Screwdriver refuses where a build runs: {why}");
                    Ok(StagedAnswer::Done)
                }
                PutResult::Later(why) => {
                    tracing::warn!(build.id = build.id(), "where a build runs is reported again later: {why}");
                    Ok(StagedAnswer::Unknown)
                }
            },
            Decision::Failed(text) => {
                let has_ended =
                    matches!(&verdict, PodVerdict::Failed { cause: FailureCause::Exit | FailureCause::Disruption, .. });
                let class = if has_ended { FailureClass::Task } else { FailureClass::Config };
                self.failed_unless_stopped(build, class, text).await
            }
            Decision::CheckAgain { after, .. } => {
                // The existing worker has counted.
                let is_foreign = record.phase.is_empty();
                let spent =
                    u32::try_from(record.seq).ok().filter(|_| is_foreign).and_then(|seq| limits.checks_spent(seq));
                if let Some(text) = spent {
                    return self.failed_unless_stopped(build, FailureClass::Config, text.to_owned()).await;
                }
                let PodVerdict::Phase { name, since } = verdict else { return Ok(StagedAnswer::Unknown) };
                let (phase, observed_at, check_in) = (name.into(), self.now(), Some(after));
                Ok(StagedAnswer::Progress(Progress { phase, since, observed_at, check_in }))
            }
        }
    }

    /// Before a pod is known, an error of the API has the message come again.
    fn start_answer(&self, work: &Work<'_, Build>, called: Result<StagedAnswer, KubernetesError>) -> StagedAnswer {
        let (id, failures) = (work.payload.id(), work.record.infrastructure_failures);
        called.unwrap_or_else(|error| {
            tracing::warn!(build.id = id, "build {id} is started again later: {error}");
            let after = SCREWDRIVER_START_RETRY.saturating_mul(2_u32.saturating_pow(failures));
            let class = FailureClass::Infrastructure;
            StagedAnswer::Retry { after, class, reason: rules::refusal_text(&error.to_string()).into() }
        })
    }
}

impl StagedHandler for BuildPods {
    type Payload = Build;

    /// The limits of the phases are in [`rules`].
    fn policy(&self, _build: &Build) -> StagedPolicy {
        let limits = &self.config.limits;
        StagedPolicy {
            phases: [].into(),
            infrastructure_retries: limits.reprocess,
            capacity_retries: limits.quota_retries,
            check_interval: limits.delay.0,
        }
    }

    async fn adopt(&self, work: Work<'_, Build>) -> StagedAnswer {
        self.start_answer(&work, self.find(work.payload).await)
    }

    async fn start(&self, work: Work<'_, Build>) -> StagedAnswer {
        self.start_answer(&work, self.create(work.payload).await)
    }

    async fn verify(&self, work: Work<'_, Build>) -> StagedAnswer {
        let looked = self.look(work.payload, work.record).await;
        looked.unwrap_or_else(|error| {
            let id = work.payload.id();
            tracing::warn!(build.id = id, "build {id} is looked at again later: {error}");
            work.context.set_progress(&error.to_string());
            StagedAnswer::Unknown
        })
    }

    async fn cancel(&self, work: Work<'_, Build>) -> StagedAnswer {
        let stopped = self.stop(work.payload.id()).await;
        stopped.map_or(StagedAnswer::Unknown, |()| StagedAnswer::Canceled)
    }
}

/// Removes the tombstones that no message can follow any more. Each build that ends is stopped, and leaves one.
async fn sweep_tombstones(client: Arc<KubernetesClient>) {
    let mut turns = interval(POD_SWEEP_INTERVAL);
    loop {
        turns.tick().await;
        if let Err(error) = remove_tombstones(&client).await {
            tracing::debug!("cannot remove the tombstones of builds: {error}");
        }
    }
}

async fn remove_tombstones(client: &KubernetesClient) -> Result<(), KubernetesError> {
    let (limit, mut next_page) = (SCREWDRIVER_TOMBSTONES_PAGE.to_string(), String::new());
    loop {
        let query = [("labelSelector", STOPPED), ("limit", limit.as_str()), ("continue", next_page.as_str())];
        let page = client.list_metadata(&SECRETS, ("the Secrets of", "stopped builds"), &query).await?;
        let before = client.now() - jiff::SignedDuration::try_from(SCREWDRIVER_TOMBSTONE_KEPT).unwrap_or_default();
        for old in page.items.iter().flatten().map(|one| &one.metadata) {
            if old.creation_timestamp.is_some_and(|at| at < before) {
                client.delete(&SECRETS, &old.name, &json!({})).await?;
            }
        }
        next_page = page.metadata.next_page.unwrap_or_default();
        if next_page.is_empty() {
            return Ok(());
        }
    }
}
