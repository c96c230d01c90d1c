//! The handler `kubernetes`: runs each task as a pod.
//!
//! A pod is named by its task, attempt and launch, so a start that is repeated finds the pod of the first one. One watch tells of
//! changes of all pods, and each pod is looked at now and then without it. What a pod says is judged in
//! `kubernetes::judge`.

pub mod config;
mod held_pods;
mod pod_log;
mod pod_manifest;

use std::collections::BTreeMap;
use std::future::pending;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use tokio::task::JoinSet;
use tokio::time::timeout;

use crate::handler::kubernetes::config::KubernetesHandler;
use crate::task::Results;
use journeyman_domain::limits::{POD_KEPT, POD_LOG_TIMEOUT, POD_WARNINGS_MAX};
use journeyman_domain::staged::{FailureClass, PhaseLimit, Progress, StagedAnswer, StagedPolicy, Stamp};
use journeyman_platform::committed_schema;
use journeyman_platform::kubernetes::{
    EVENTS, Event, KubernetesClient, KubernetesError, PODS, PULLING, Pod, PodTemplate, PodVerdict, RUNNING, SECRETS,
    StartGraces, UNSCHEDULED, existing, failed_init_container, has_started, judge, sweep_ended, waits_for, watch_pods,
};
use journeyman_platform::tasks::supervised;

use super::artifact::{ArtifactDeclaration, Artifacts};
use super::payload_parts::{PayloadArtifact, validate_artifacts};
use super::staged::{StagedHandler, Work};
use super::{Context, EndedWork, HandlerConfigError, HandlerFuture, PrepareError, environment};
use held_pods::HeldPods;
use pod_manifest::{HANDLER, PodName, TASK};

/// Before a pod is created again for which there is no quota.
const QUOTA_RETRY: Duration = Duration::from_secs(30);
/// The interval of looks until a pod that was deleted is gone.
const DELETE_CHECK: Duration = Duration::from_secs(2);
/// Beyond the limits of the phases: the cluster ends a pod that no worker looks after.
const ORPHAN_GRACE: Duration = Duration::from_secs(600);

/// The payload of the `kubernetes` handler.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[cfg_attr(debug_assertions, derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct PodPayload {
    /// Image of the container; by default that of the worker's template.
    pub image: Option<String>,
    /// Program and arguments; by default those of the image.
    #[serde(default)]
    pub command: Vec<String>,
    /// Variables of the container.
    #[serde(default)]
    pub env: BTreeMap<String, String>,
    /// Variables that are kept in a Secret, and redacted from the log.
    #[serde(default, skip_serializing)]
    pub secret_env: BTreeMap<String, String>,
    /// What the container needs at least, and what it may use at most.
    pub resources: Option<PodResources>,
    /// Time limit once the container runs, in seconds.
    #[cfg_attr(debug_assertions, schemars(range(min = 1, max = 4_294_967_295_u64)))]
    pub max_run_time: Option<u32>,
    /// Files to upload as artifacts, if the worker has a volume for the task's files.
    #[serde(default, skip_serializing)]
    pub artifacts: Vec<PayloadArtifact>,
    /// Values for the worker's template.
    #[serde(default)]
    pub parameters: Map<String, Value>,
}

/// Quantities of Kubernetes, such as `cpu = "500m"` and `memory = "1Gi"`.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[cfg_attr(debug_assertions, derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields, default)]
pub struct PodResources {
    /// What the node must have free.
    pub requests: BTreeMap<String, String>,
    /// What the container may use.
    pub limits: BTreeMap<String, String>,
}

/// Runs tasks as pods.
pub struct Kubernetes {
    name: String,
    config: KubernetesHandler,
    template: Option<PodTemplate>,
    client: Arc<KubernetesClient>,
    held: Arc<HeldPods>,
    /// The watch, and the removal of pods that no worker holds. Aborted on drop.
    tasks: OnceLock<JoinSet<()>>,
}

impl Kubernetes {
    /// Reads the template.
    ///
    /// # Errors
    ///
    /// Fails if there is no template at its path, or it cannot be read.
    pub fn new(name: &str, config: KubernetesHandler) -> Result<Self, HandlerConfigError> {
        let read = |path: &std::path::Path| {
            let text = std::fs::read_to_string(path).map_err(|error| error.to_string());
            text.and_then(PodTemplate::new).map_err(|error| format!("cannot use {}: {error}", path.display()))
        };
        let template = config.template.as_ref().map(|path| read(&path.0)).transpose();
        let template = template.map_err(|message| HandlerConfigError { handler: name.to_owned(), message })?;
        let kubeconfig = config.kubeconfig.as_ref().map(|path| path.0.clone());
        let client = Arc::new(KubernetesClient::new(kubeconfig, config.namespace.clone()));
        let (held, tasks) = (Arc::default(), OnceLock::new());
        Ok(Self { name: name.to_owned(), config, template, client, held, tasks })
    }

    fn start_tasks(&self) {
        self.tasks.get_or_init(|| {
            let (mut tasks, held) = (JoinSet::new(), Arc::clone(&self.held));
            let selector = format!("{HANDLER}={}", pod_manifest::handler_label(&self.name));
            let watching = Arc::clone(&self.client);
            let watching = watch_pods(watching, selector.clone(), move |change| held.on_change(&change));
            tasks.spawn(supervised("a watch of pods", watching));
            tasks.spawn(supervised("removing pods", sweep_ended(Arc::clone(&self.client), selector, POD_KEPT)));
            tasks
        });
    }

    fn run_time(&self, payload: &PodPayload) -> Duration {
        let asked = payload.max_run_time.map(|seconds| Duration::from_secs(seconds.into()));
        asked.unwrap_or(self.config.max_run_time.0).min(self.config.max_run_time.0)
    }

    fn manifest(&self, name: &PodName, work: &Work<'_, PodPayload>) -> Result<Value, String> {
        let run_time = self.run_time(work.payload);
        let active = run_time + self.config.pull_timeout.0 + ORPHAN_GRACE;
        let values = json!({
            "payload": work.payload,
            "task": { "id": work.context.task().run.task.to_string(), "run": name.launch.0, "launch": name.launch.1 },
        });
        let template = self.template.as_ref().map(|template| template.render(&values)).transpose()?;
        let mut env = work.payload.env.clone();
        env.extend(environment::identity(work.context));
        let template = template.unwrap_or_default();
        pod_manifest::manifest(&self.name, &self.config, template, name, env, active.as_secs(), work)
    }

    /// Every pod of the task.
    async fn pods(&self, name: &PodName) -> Result<Vec<Pod>, KubernetesError> {
        let selector = format!("{TASK}={}", name.task);
        let list = self.client.list(&PODS, ("the pods of task", &name.task), &[("labelSelector", &selector)]).await?;
        Ok(list.items.unwrap_or_default())
    }

    /// Returns true if the pod was there.
    async fn delete(&self, pod: &str) -> Result<bool, KubernetesError> {
        self.client.delete(&PODS, pod, &json!({})).await
    }

    async fn create_secret(&self, pod: &Pod, payload: &PodPayload) -> Result<(), KubernetesError> {
        if payload.secret_env.is_empty() {
            return Ok(());
        }
        self.client.create_if_missing(&SECRETS, &pod_manifest::secret(pod, &payload.secret_env)).await
    }

    async fn create(&self, name: &PodName, work: &Work<'_, PodPayload>) -> Result<StagedAnswer, KubernetesError> {
        let invalid = |reason: String| StagedAnswer::Failed { class: FailureClass::Config, reason: reason.into() };
        let pod = match self.manifest(name, work) {
            Ok(pod) => pod,
            Err(reason) => return Ok(invalid(reason)),
        };
        let pod = match self.client.create(&PODS, &pod).await {
            Ok(pod) => pod,
            Err(KubernetesError::Conflict(_)) => {
                let Some(pod) = existing(self.client.get(&PODS, &name.pod()).await)? else {
                    return Ok(StagedAnswer::Unknown);
                };
                if !name.is_of(&pod) {
                    return Ok(invalid(format!("there is a pod {} that is not of this task", name.pod())));
                }
                pod
            }
            Err(KubernetesError::Denied(reason)) if reason.contains("exceeded quota") => {
                let (after, class) = (QUOTA_RETRY, FailureClass::Capacity);
                return Ok(StagedAnswer::Retry { after, class, reason: reason.into() });
            }
            Err(KubernetesError::Rejected(reason)) => return Ok(invalid(reason)),
            Err(error) => return Err(error),
        };
        self.with_secret(&pod, work).await
    }

    /// A pod waits for its Secret. If there cannot be one, there is no pod either.
    async fn with_secret(&self, pod: &Pod, work: &Work<'_, PodPayload>) -> Result<StagedAnswer, KubernetesError> {
        match self.create_secret(pod, work.payload).await {
            Ok(()) => Ok(self.started(pod, work.context)),
            Err(error @ (KubernetesError::Denied(_) | KubernetesError::Rejected(_))) => {
                self.delete(&pod.metadata.name).await?;
                let KubernetesError::Rejected(reason) = error else { return Err(error) };
                Ok(StagedAnswer::Failed { class: FailureClass::Config, reason: reason.into() })
            }
            Err(error) => Err(error),
        }
    }

    async fn find(&self, name: &PodName, work: &Work<'_, PodPayload>) -> Result<StagedAnswer, KubernetesError> {
        let mut pods = self.pods(name).await?;
        pods.sort_by_key(PodName::launch_of);
        let is_deferred = work.context.results().and_then(Results::deferral).is_some();
        if is_deferred && pods.last().and_then(PodName::launch_of) > Some(name.launch) {
            return Ok(StagedAnswer::Superseded);
        }
        let reported_runs = work.context.task().reported_runs;
        // The worker that made it is gone, and the pod goes on, or has ended without a report.
        let is_adopted = |pod: &Pod| {
            let is_reported = PodName::launch_of(pod).is_none_or(|(attempt, _)| attempt < reported_runs);
            let is_usable =
                pod.metadata.deletion_timestamp.is_none() && !is_reported && self.is_handed_over(work.payload);
            name.is_of(pod) || (work.record.launch == 0 && is_usable)
        };
        let own = pods.pop_if(|pod| is_adopted(pod));
        let mut is_earlier_there = false;
        for earlier in &pods {
            // It must not run beside this one.
            is_earlier_there |= self.delete(&earlier.metadata.name).await?;
        }
        match own {
            _ if is_earlier_there => {
                work.context.set_progress("waits for the end of an earlier pod of the task");
                Ok(StagedAnswer::Unknown)
            }
            None => Ok(StagedAnswer::Absent),
            Some(pod) => self.with_secret(&pod, work).await,
        }
    }

    async fn look(&self, name: &PodName, work: &Work<'_, PodPayload>) -> Result<StagedAnswer, KubernetesError> {
        let pod = handle(name, work);
        match existing(self.client.get(&PODS, &pod).await)? {
            Some(pod) if name.is_task_of(&pod) => Ok(self.observe(&pod, work).await),
            Some(_) | None => {
                self.held.forget(&pod);
                Ok(StagedAnswer::Lost { reason: format!("pod {pod} is gone").into() })
            }
        }
    }

    fn judge(&self, pod: &Pod) -> (PodVerdict, Stamp) {
        let now = Stamp(self.client.now().as_millisecond());
        let graces = StartGraces { pull: self.config.pull_grace.0, create: self.config.create_grace.0 };
        (judge(pod, &self.config.container, graces, now), now)
    }

    /// It is looked at next: one that has ended has to be removed by its name, and a change may have come before the worker
    /// waits for changes.
    fn started(&self, pod: &Pod, context: &Context) -> StagedAnswer {
        let (verdict, observed_at) = self.judge(pod);
        let is_deferred = context.results().and_then(Results::deferral).is_some();
        let (phase, since, check_in) = match verdict {
            PodVerdict::Phase { name, since } if is_deferred => (name, since, None),
            PodVerdict::Phase { name, since } => (name, since, Some(Duration::ZERO)),
            PodVerdict::Done | PodVerdict::Failed { .. } | PodVerdict::Unknown => (RUNNING, None, Some(Duration::ZERO)),
        };
        let progress = Progress { phase: phase.into(), since, observed_at, check_in };
        StagedAnswer::Started { handle: pod.metadata.name.as_str().into(), progress }
    }

    /// Judges a pod, and keeps what is to be known of one that has ended.
    async fn observe(&self, pod: &Pod, work: &Work<'_, PodPayload>) -> StagedAnswer {
        let (verdict, now) = self.judge(pod);
        let is_held = work.context.results().and_then(Results::deferral).is_none();
        if is_held {
            *self.held.of(&pod.metadata.name).version.lock() =
                pod.metadata.resource_version.clone().unwrap_or_default();
        }
        match &verdict {
            PodVerdict::Phase { name, .. } => {
                work.context.set_progress(waits_for(pod).as_deref().unwrap_or(name));
            }
            PodVerdict::Done => self.read_rest_of_log(pod, work.context).await,
            PodVerdict::Failed { .. } => {
                self.read_rest_of_log(pod, work.context).await;
                self.log_warnings(pod, work.context).await;
            }
            PodVerdict::Unknown => work.context.set_progress("its node does not answer"),
        }
        verdict.into_answer(now)
    }

    async fn read_rest_of_log(&self, pod: &Pod, context: &Context) {
        let (name, log) = (pod.metadata.name.clone(), context.log());
        let reading = async {
            if let Some(container) = failed_init_container(pod) {
                pod_log::read(&self.client, &name, container, &held_pods::HeldPod::default(), log, false).await?;
            }
            if has_started(pod, &self.config.container) {
                pod_log::read(&self.client, &name, &self.config.container, &self.held.of(&name), log, false).await?;
            }
            Ok(())
        };
        let read = timeout(POD_LOG_TIMEOUT, reading).await;
        self.held.forget(&name);
        match read {
            Ok(Ok(())) => {}
            Ok(Err::<(), String>(error)) => log.write_note(&format!("the log is not whole: {error}")),
            Err(_) => log.write_note(&format!("the log is not whole: it took more than {POD_LOG_TIMEOUT:?}")),
        }
    }

    /// The last warnings of the cluster about a pod. They are no part of the verdict, so nothing fails for want of them.
    async fn log_warnings(&self, pod: &Pod, context: &Context) {
        let uid = pod.metadata.uid.as_deref().unwrap_or_default();
        let selector = format!("involvedObject.uid={uid},type=Warning");
        let subject = ("the events of pod", pod.metadata.name.as_str());
        match self.client.list::<Event>(&EVENTS, subject, &[("fieldSelector", &selector)]).await {
            Ok(events) => {
                let events = events.items.unwrap_or_default();
                let skipped = events.len().saturating_sub(POD_WARNINGS_MAX);
                for event in events.iter().skip(skipped) {
                    let text = |text: &Option<String>| text.clone().unwrap_or_default();
                    context.log().write_note(&format!("{}: {}", text(&event.reason), text(&event.message).trim()));
                }
            }
            Err(error) => tracing::debug!("{error}"),
        }
    }

    /// Deletes the pods of the task up to this launch. Returns whether one of them may still run.
    async fn delete_all(&self, name: &PodName) -> Result<bool, KubernetesError> {
        let mut is_running = false;
        for pod in self.pods(name).await? {
            if PodName::launch_of(&pod).is_some_and(|launch| launch > name.launch) {
                continue;
            }
            let has_ended =
                matches!(pod.status.as_ref().and_then(|status| status.phase.as_deref()), Some("Succeeded" | "Failed"));
            is_running |= self.delete(&pod.metadata.name).await? && !has_ended;
        }
        Ok(is_running)
    }

    async fn remove(&self, name: &PodName, work: &Work<'_, PodPayload>) -> Result<StagedAnswer, KubernetesError> {
        if !self.delete_all(name).await? {
            self.held.forget(&handle(name, work));
            return Ok(StagedAnswer::Canceled);
        }
        let now = Stamp(self.client.now().as_millisecond());
        let progress = Progress { phase: "ending".into(), since: None, observed_at: now, check_in: Some(DELETE_CHECK) };
        Ok(StagedAnswer::Progress(progress))
    }
}

/// The name of the pod, which may be that of an earlier attempt.
fn handle(name: &PodName, work: &Work<'_, PodPayload>) -> String {
    work.record.handle.as_deref().map_or_else(|| name.pod(), str::to_owned)
}

/// An error of the API is no verdict about a pod.
fn answer(called: Result<StagedAnswer, KubernetesError>, context: &Context) -> StagedAnswer {
    called.unwrap_or_else(|error| {
        context.set_progress(&error.to_string());
        StagedAnswer::Unknown
    })
}

/// A cluster that refuses this worker, or has no such namespace, refuses every task.
fn start_answer(called: Result<StagedAnswer, KubernetesError>, context: &Context) -> StagedAnswer {
    match called {
        Err(KubernetesError::Denied(reason) | KubernetesError::Gone(reason)) => {
            StagedAnswer::Failed { class: FailureClass::Access, reason: reason.into() }
        }
        called => answer(called, context),
    }
}

impl StagedHandler for Kubernetes {
    type Payload = PodPayload;

    fn describe(&self) -> String {
        format!("kubernetes (namespace {})", self.config.namespace)
    }

    fn payload_schema(&self) -> Value {
        committed_schema::parse(include_str!("pod.schema.json"))
    }

    fn policy(&self, payload: &PodPayload) -> StagedPolicy {
        let KubernetesHandler { schedule_timeout, pull_timeout, retries, check_interval, .. } = &self.config;
        let limits = [
            (UNSCHEDULED, schedule_timeout.0, FailureClass::Capacity),
            (PULLING, pull_timeout.0, FailureClass::Infrastructure),
            (RUNNING, self.run_time(payload), FailureClass::Task),
        ];
        let quota_retries = schedule_timeout.0.as_secs() / QUOTA_RETRY.as_secs();
        StagedPolicy {
            phases: limits.map(|(name, lasts_max, class)| (name.into(), PhaseLimit { lasts_max, class })).into(),
            infrastructure_retries: *retries,
            capacity_retries: u32::try_from(quota_retries).unwrap_or(u32::MAX),
            check_interval: check_interval.0,
        }
    }

    async fn prepare(&self, payload: &PodPayload, context: &Context) -> Result<(), PrepareError> {
        let mut violations = Vec::new();
        let declarations = validate_artifacts(payload.artifacts.clone(), context, &mut violations);
        if self.config.work_volume.is_none() && !declarations.is_empty() {
            violations.push(
                "payload/artifacts: this worker has no `work_volume`, so it cannot read files of a pod".to_owned(),
            );
        }
        if payload.max_run_time.is_some_and(|seconds| u64::from(seconds) > self.config.max_run_time.0.as_secs()) {
            let most = self.config.max_run_time.0.as_secs();
            violations.push(format!("payload/maxRunTime: the worker allows at most {most} s"));
        }
        for value in payload.secret_env.values() {
            if let Err(error) = context.log().add_secret(value) {
                tracing::debug!("a variable of a pod is not redacted: {error}");
            }
        }
        let record = super::staged::StagedRecord::default();
        let work = Work { payload, record: &record, context };
        if let Err(reason) = self.manifest(&PodName::of(&work), &work) {
            violations.push(format!("payload: {reason}"));
        }
        declare(declarations, context.artifacts(), &mut violations);
        if violations.is_empty() { Ok(()) } else { Err(PrepareError::malformed(violations)) }
    }

    async fn adopt(&self, work: Work<'_, PodPayload>) -> StagedAnswer {
        self.start_tasks();
        start_answer(self.find(&PodName::of(&work), &work).await, work.context)
    }

    async fn start(&self, work: Work<'_, PodPayload>) -> StagedAnswer {
        start_answer(self.create(&PodName::of(&work), &work).await, work.context)
    }

    async fn verify(&self, work: Work<'_, PodPayload>) -> StagedAnswer {
        self.start_tasks();
        answer(self.look(&PodName::of(&work), &work).await, work.context)
    }

    async fn cancel(&self, work: Work<'_, PodPayload>) -> StagedAnswer {
        answer(self.remove(&PodName::of(&work), &work).await, work.context)
    }

    /// Files are left in the task directory of a claim, which ends with it.
    fn is_handed_over(&self, payload: &PodPayload) -> bool {
        payload.artifacts.is_empty()
    }

    fn discard<'a>(&'a self, work: &'a EndedWork) -> Option<HandlerFuture<'a, Result<(), String>>> {
        Some(Box::pin(async move {
            let deleted = self.delete_all(&PodName::new(work, u32::MAX)).await;
            deleted.map(drop).map_err(|error| error.to_string())
        }))
    }

    async fn wakeup(&self, work: Work<'_, PodPayload>) {
        let name = handle(&PodName::of(&work), &work);
        let held = self.held.of(&name);
        let following = async {
            if &*work.record.phase == RUNNING {
                pod_log::follow(&self.client, &name, &self.config.container, &held, work.context.log()).await;
            }
            pending::<()>().await;
        };
        tokio::select! {
            () = held.changed.notified() => {}
            () = following => {}
        }
    }
}

/// A failed task uploads its artifacts too.
fn declare(declarations: Vec<ArtifactDeclaration>, artifacts: &Artifacts, violations: &mut Vec<String>) {
    for declaration in declarations {
        if let Err(error) = artifacts.declare(declaration) {
            violations.push(format!("payload/artifacts: {error}"));
        }
    }
}
