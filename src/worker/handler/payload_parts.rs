//! What payloads of several kinds have in common: artifacts, log names, exit statuses, features and the chain of trust.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::time::Duration;

use serde::Deserialize;
use serde_json::{Map, Value};
use tokio::time::Instant;

use super::artifact::{
    ArtifactDeclaration, ArtifactKind, Artifacts, Optionality, expiry_error, time_of, validate_name,
};
use super::chain_of_trust::{self, SigningKey};
use super::config::RunTime;
use super::context::PublishedLogs;
use super::environment::Variables;
use super::log::{self, AddSecretError};
use super::mounts::Mounter;
use super::process::format_seconds;
use super::task_proxy::{Credentials, TaskProxy};
use super::{Context, ExecuteError, ExecuteFailure, PrepareError};
use crate::task::ContentEncoding;
use journeyman_platform::redact;

/// The feature that signs artifacts.
pub(super) const CHAIN_OF_TRUST: &str = "chainOfTrust";

/// The feature that lets a task call the services of its deployment.
pub(super) const PROXY: &str = "taskclusterProxy";

/// What a handler needs to run payloads of Taskcluster, whatever runs them.
#[derive(Debug, Clone)]
pub struct PayloadSettings {
    pub max_run_time: RunTime,
    pub termination_grace: Duration,
    /// Names variables whose values are redacted; see [`redact::is_secret_name`].
    pub redact_env: Vec<String>,
    pub mounter: Mounter,
    /// Signs the artifacts of tasks that ask for a chain of trust.
    pub signing_key: Option<SigningKey>,
}

/// What a payload asks for, whatever runs it.
pub(super) struct RequestedParts<'a> {
    pub(super) features: &'a Map<String, Value>,
    pub(super) max_run_seconds: Option<u32>,
    pub(super) artifacts: Vec<PayloadArtifact>,
    pub(super) logs: LogNames,
    pub(super) on_exit_status: OnExitStatus,
    /// Why the task could read the key that signs its artifacts. Who can read it can sign anything.
    pub(super) key_exposure: Option<&'static str>,
}

/// A payload whose time runs.
#[derive(Debug)]
pub(super) struct StartedPayload {
    pub(super) on_exit_status: OnExitStatus,
    pub(super) run_time: Duration,
    /// Mounts and images count against the run time.
    started: Instant,
    artifacts: Vec<ArtifactDeclaration>,
    /// Ends with the payload.
    proxy: Option<TaskProxy>,
}

impl PayloadSettings {
    /// Checks what a payload asks for, and gives it what it needs of that. `violations` are those found before.
    ///
    /// # Errors
    ///
    /// Malformed if there are violations; or the proxy cannot be started.
    pub(super) async fn begin(
        &self,
        asked: RequestedParts<'_>,
        mut violations: Vec<String>,
        context: &Context,
    ) -> Result<StartedPayload, PrepareError> {
        let RequestedParts { features, on_exit_status, key_exposure, .. } = asked;
        let run_time = resolve_run_time(self.max_run_time.0, asked.max_run_seconds, &mut violations);
        let artifacts = validate_artifacts(asked.artifacts, context, &mut violations);
        violations.extend(asked.logs.publish(&artifacts, context));
        if is_wanted(features, CHAIN_OF_TRUST) {
            match self.key_for(&artifacts, key_exposure, context) {
                Ok(key) if violations.is_empty() => context.set_signing_key(key.clone()),
                Ok(_) => {}
                Err(why) => violations.push(format!("payload/features/{CHAIN_OF_TRUST}: {why}")),
            }
        }
        if !violations.is_empty() {
            return Err(PrepareError::malformed(violations));
        }
        let mut proxy = None;
        if is_wanted(features, PROXY) {
            proxy = Some(TaskProxy::start(self.mounter.client(), Credentials::Hidden, context).await?);
        }
        Ok(StartedPayload { on_exit_status, run_time, started: Instant::now(), artifacts, proxy })
    }

    /// The key that signs artifacts, or why they cannot be signed.
    fn key_for(
        &self,
        artifacts: &[ArtifactDeclaration],
        exposure: Option<&str>,
        context: &Context,
    ) -> Result<&SigningKey, String> {
        let names = chain_of_trust::NAMES;
        match (&self.signing_key, exposure) {
            (None, _) => Err("this worker has no key for it; see `chain_of_trust_key` of the handler".to_owned()),
            (Some(_), _) if context.deployment().is_none() => {
                Err("the task's queue belongs to no deployment".to_owned())
            }
            (Some(_), Some(why)) => Err(why.to_owned()),
            (Some(_), None) if artifacts.iter().any(|artifact| names.contains(&artifact.name.as_str())) => {
                Err(format!("it makes artifacts of the names {}", names.join(", ")))
            }
            (Some(key), None) => Ok(key),
        }
    }
}

impl StartedPayload {
    /// The address of the proxy of the task.
    pub(super) fn proxy_url(&self) -> Option<&str> {
        self.proxy.as_ref().map(TaskProxy::url)
    }

    pub(super) fn time_limit(&self) -> String {
        format!("maxRunTime, {} s", self.run_time.as_secs())
    }

    /// The time that is left, or why nothing more of the payload is started.
    pub(super) fn remaining(&self, what: &str, context: &Context) -> Result<Duration, ExecuteError> {
        if let Some(cancellation) = context.cancellation() {
            return Err(ExecuteError::failed(format!("{what}: {}", cancellation.cause.message())));
        }
        match self.run_time.saturating_sub(self.started.elapsed()) {
            Duration::ZERO => Err(ExecuteError::failed(format!("{what}: stopped after {}", self.time_limit()))),
            remaining => Ok(remaining),
        }
    }

    /// Has the artifacts uploaded, of a failed task too, and says in the log how the payload has ended.
    pub(super) fn end(self, outcome: &Result<(), ExecuteError>, context: &Context) {
        let log = context.log();
        for artifact in self.artifacts {
            if let Err(error) = context.artifacts().declare(artifact) {
                log.write_note(&error.to_string());
            }
        }
        let result = if outcome.is_ok() { "completed" } else { "not completed" };
        log.write_note(&format!("result: {result} after {}", format_seconds(self.started.elapsed())));
    }
}

/// The names of the log's artifacts.
#[derive(Debug, Clone, Default, Deserialize)]
#[cfg_attr(debug_assertions, derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct LogNames {
    /// The artifact that leads to the log; by default `public/logs/live.log`.
    pub live: Option<String>,
    /// The artifact that holds it; by default `public/logs/live_backing.log`.
    pub backing: Option<String>,
}

/// A file or directory to upload.
#[derive(Debug, Clone, Deserialize)]
#[cfg_attr(debug_assertions, derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct PayloadArtifact {
    /// The kind of artifact.
    #[serde(rename = "type")]
    pub kind: PayloadArtifactType,
    /// Path below the task directory.
    #[cfg_attr(debug_assertions, schemars(length(min = 1)))]
    pub path: String,
    /// Name of the artifact; by default the path.
    pub name: Option<String>,
    /// When the artifact expires (RFC 3339): not before the task's deadline, and not later than the task; by default with the task.
    pub expires: Option<String>,
    /// Media type of a file, or of all files of a directory; by default guessed from the extension.
    pub content_type: Option<String>,
    /// How the file is compressed where it is stored, if the queue stores compressed content; by default with gzip, unless its extension is that of compressed content.
    pub content_encoding: Option<PayloadEncoding>,
    /// Whether the task may succeed if the artifact is missing or the queue rejects it.
    #[serde(default)]
    pub optional: bool,
}

/// The kind of artifact.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[cfg_attr(debug_assertions, derive(schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
pub enum PayloadArtifactType {
    /// One regular file.
    File,
    /// All regular files in a directory and its subdirectories.
    Directory,
}

/// How a file is compressed where it is stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[cfg_attr(debug_assertions, derive(schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
pub enum PayloadEncoding {
    /// Not at all.
    Identity,
    /// The content is compressed with gzip.
    Gzip,
}

/// Exit statuses with a special meaning.
#[derive(Debug, Clone, Default, Deserialize)]
#[cfg_attr(debug_assertions, derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct OnExitStatus {
    /// Exit statuses that retry the task.
    #[serde(default)]
    #[cfg_attr(debug_assertions, schemars(inner(range(min = 1))))]
    pub retry: BTreeSet<i64>,
    /// Exit statuses after which the task's caches are not kept.
    #[serde(default)]
    pub purge_caches: BTreeSet<i64>,
}

impl OnExitStatus {
    /// What the last exit status means. After one that purges them, the task's caches are not kept.
    pub(super) fn result(&self, code: i32, message: String, context: &Context) -> Result<(), ExecuteError> {
        if self.purge_caches.contains(&code.into()) {
            context.abandon_caches();
            let text = format!("caches are not kept: exit status {code} is in onExitStatus.purgeCaches");
            context.log().write_note(&text);
        }
        if self.retry.contains(&code.into()) && code != 0 {
            let text = format!("{message}, listed in onExitStatus.retry");
            return Err(ExecuteError::new(ExecuteFailure::Intermittent, text));
        }
        if code == 0 { Ok(()) } else { Err(ExecuteError::failed(message)) }
    }
}

impl LogNames {
    /// Has the logs published under these names, unless they are not to be had.
    fn publish(self, artifacts: &[ArtifactDeclaration], context: &Context) -> Vec<String> {
        let mut violations = Vec::new();
        let (live, backing) = (self.live.as_deref(), self.backing.as_deref());
        for (key, name) in [("live", live), ("backing", backing)] {
            let Some(name) = name else { continue };
            let is_default = name == log::LIVE_NAME || name == log::BACKING_NAME;
            if let Some(error) = validate_name(name).err().filter(|_| !is_default) {
                violations.push(format!("payload/logs/{key}: {error}"));
            } else if artifacts.iter().any(|artifact| artifact.name == name) {
                violations.push(format!("payload/logs/{key}: an artifact has this name too"));
            }
        }
        if live.unwrap_or(log::LIVE_NAME) == backing.unwrap_or(log::BACKING_NAME) {
            violations.push("payload/logs: both artifacts have one name".to_owned());
        }
        if violations.is_empty() {
            let PublishedLogs { live, backing, .. } = PublishedLogs::default();
            context.set_published_logs(PublishedLogs {
                live: self.live.or(live),
                backing: self.backing.or(backing),
                encoding: ContentEncoding::Gzip,
            });
        }
        violations
    }
}

fn resolve_run_time(max: Duration, seconds: Option<u32>, violations: &mut Vec<String>) -> Duration {
    let run_time = seconds.map_or(max, |seconds| Duration::from_secs(seconds.into()));
    if run_time > max {
        violations.push(format!(
            "payload/maxRunTime: {} s is more than the {} s this worker allows",
            run_time.as_secs(),
            max.as_secs()
        ));
    }
    run_time
}

/// Whether a payload has set a feature to false that is wanted otherwise.
pub(super) fn is_declined(features: &Map<String, Value>, name: &str) -> bool {
    features.get(name) == Some(&Value::Bool(false))
}

pub(super) fn is_wanted(features: &Map<String, Value>, name: &str) -> bool {
    features.get(name) == Some(&Value::Bool(true))
}

/// What a payload asks for of features other than those that are here.
pub(super) fn unsupported_features(features: &Map<String, Value>, here: &[&str]) -> Vec<String> {
    let unsupported = |(name, value): (&String, &Value)| match value.as_bool() {
        Some(true) if !here.contains(&name.as_str()) => {
            Some(format!("payload/features/{name}: not supported by this worker{}", reason(name)))
        }
        Some(_) => None,
        None => Some(format!("payload/features/{name}: use true or false")),
    };
    features.iter().filter_map(unsupported).collect()
}

/// Why a feature is not to be had here.
fn reason(feature: &str) -> &'static str {
    match feature {
        "interactive" => ", which opens no shells to tasks",
        "loopbackVideo" | "loopbackAudio" => ", which lends no devices to tasks",
        "runAsAdministrator" | "hideCmdWindow" => ", because it is a feature of Windows",
        _ => "",
    }
}

/// Redacts the values of variables with names of secrets.
pub(super) fn hide_secrets(env: &Variables, redact_env: &[String], context: &Context) {
    for (_, value) in env.iter().filter(|(name, _)| redact::is_secret_name(name, redact_env)) {
        // A value too short to be redacted is too short to be a secret.
        if let Err(error @ AddSecretError::LimitReached) = context.log().add_secret(value) {
            context.log().write_note(&format!("variable named like a secret: {error}"));
        }
    }
}

pub(super) fn validate_artifacts(
    artifacts: Vec<PayloadArtifact>,
    context: &Context,
    violations: &mut Vec<String>,
) -> Vec<ArtifactDeclaration> {
    // The artifacts are declared after the commands have run; this finds duplicate names and too many artifacts before.
    let (trial, definition) = (Artifacts::new(), context.task().definition.json());
    // Generic-worker stores nothing after the deadline either.
    let stored_by = time_of(definition, "deadline").unwrap_or_else(jiff::Timestamp::now);
    let mut declarations = Vec::new();
    for (number, artifact) in artifacts.into_iter().enumerate() {
        let mut declaration = to_declaration(artifact);
        if let Err(error) = trial.declare(declaration.clone()) {
            violations.push(format!("payload/artifacts/{number}: {error}"));
        } else if let Some(why) = declaration.expires.as_ref().and_then(|at| expiry_error(at, definition, stored_by)) {
            violations.push(format!("payload/artifacts/{number}/expires: {why}"));
        }
        // The queue allows no later time than the task's.
        let task = time_of(definition, "expires");
        declaration.expires =
            declaration.expires.filter(|at| task.is_none_or(|task| at.parse().is_ok_and(|at| task >= at)));
        declarations.push(declaration);
    }
    declarations
}

fn to_declaration(artifact: PayloadArtifact) -> ArtifactDeclaration {
    let PayloadArtifact { kind, path, name, expires, content_type, content_encoding, optional } = artifact;
    let path = PathBuf::from(path);
    // Without `./` and a slash at the end.
    let plain = || path.iter().filter(|part| *part != ".").collect::<PathBuf>().to_string_lossy().into_owned();
    let name = name.unwrap_or_else(plain);
    let kind = match kind {
        PayloadArtifactType::File => ArtifactKind::File { path, content_type },
        PayloadArtifactType::Directory => ArtifactKind::Directory { path, content_type },
    };
    let encoding = content_encoding.map(|encoding| match encoding {
        PayloadEncoding::Identity => ContentEncoding::Identity,
        PayloadEncoding::Gzip => ContentEncoding::Gzip,
    });
    let optionality = if optional { Optionality::Optional } else { Optionality::Required };
    ArtifactDeclaration { expires, optionality, encoding, ..ArtifactDeclaration::new(name, kind) }
}
