//! Payloads that name an image, in the format of docker-worker: each runs as a container of docker or podman.
//!
//! The client runs in the claim's scope and copies the container's output to the task's log. A container outlives its client, so the
//! scope has it removed as well, and the next start removes what has the label of this worker.

mod client;
pub mod config;
mod environment;
mod image;
mod options;
pub mod payload;
mod run;

use std::collections::BTreeMap;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;

use serde_json::{Value, json};
use tokio::time::timeout;

use journeyman_platform::committed_schema;
use journeyman_platform::settings::Environment;

use super::environment::{PROXY_VARIABLE, identity};
use super::mounts::payload::{Mount, MountKind};
use super::payload_parts::{
    LogNames, PROXY, PayloadArtifact, PayloadArtifactType, PayloadSettings, RequestedParts, StartedPayload,
    hide_secrets, is_declined, is_wanted,
};
use super::{Context, DynHandler, HandlerFuture, PayloadHandler, PrepareError, Preparing, erase};
use client::Client;
use config::ContainersConfig;
use environment::ContainerEnvironment;
use image::{ImageSource, Images};
use payload::{ContainerArtifactType, ContainerPayload, path_error};

/// Runs payloads as containers.
#[derive(Debug)]
pub struct Containers {
    client: Arc<Client>,
    images: Images,
    config: ContainersConfig,
    settings: PayloadSettings,
}

#[derive(Debug)]
pub struct PreparedContainer {
    /// Empty if there was no time left to bring it.
    image: String,
    /// They are those of the client's `run`.
    options: Vec<String>,
    command: Vec<String>,
    environment: ContainerEnvironment,
    copies: Vec<CopiedArtifact>,
    begun: StartedPayload,
}

/// What is copied out of a container.
#[derive(Debug)]
struct CopiedArtifact {
    artifact: String,
    from: String,
    /// Below the task directory.
    to: String,
}

/// The directories of this host that a container has.
#[derive(Debug, Default)]
struct Directories {
    caches: Vec<Mount>,
    /// Below the task directory, and in the container.
    mounted: Vec<(String, String)>,
    volumes: Vec<String>,
}

impl Containers {
    /// # Errors
    ///
    /// The client is not there.
    pub fn new(config: ContainersConfig, worker: &Environment, settings: PayloadSettings) -> io::Result<Self> {
        let mounter = settings.mounter.with_prefix("containers/");
        let client = Arc::new(Client::new(&config, worker, mounter.work_dir())?);
        let images = Images::new(Arc::clone(&client), mounter.clone());
        Ok(Self { client, images, config, settings: PayloadSettings { mounter, ..settings } })
    }

    async fn prepare_image(
        &self,
        image: &ImageSource,
        directories: &Directories,
        context: &Context,
    ) -> Result<String, PrepareError> {
        self.settings.mounter.place(&directories.caches, context).await?;
        let (root, own) = (context.workdir().to_owned(), directories.volumes.clone());
        let mounted: Vec<PathBuf> = directories.mounted.iter().map(|(dir, _)| root.join(dir)).collect();
        let made = tokio::task::spawn_blocking(move || {
            own.iter().try_for_each(|dir| std::fs::create_dir(root.join(dir)))?;
            // Users of the image write there; those of the host do not get through the task directory.
            rustix::fs::chmod(&root, rustix::fs::Mode::RWXU)?;
            let everyone = rustix::fs::Mode::from_raw_mode(0o777);
            mounted.iter().try_for_each(|dir| rustix::fs::chmod(dir, everyone).map_err(io::Error::from))
        });
        let made = made.await.map_err(io::Error::other).flatten();
        made.map_err(|error| PrepareError::from_io("the directories of the container", &error))?;
        let id = self.images.bring(image, context).await?;
        context.set_progress("");
        Ok(id)
    }
}

impl PayloadHandler for Containers {
    type Payload = ContainerPayload;
    type Prepared = PreparedContainer;

    fn payload_schema(&self) -> Value {
        committed_schema::parse(include_str!("container.schema.json"))
    }

    async fn prepare(&self, payload: ContainerPayload, context: &Context) -> Result<PreparedContainer, PrepareError> {
        let mut violations = Vec::new();
        if payload.command.iter().any(|argument| argument.contains('\0')) {
            violations.push("payload/command: an argument contains a NUL byte".to_owned());
        }
        let mut options = options::for_payload(&payload, &self.config, context, &mut violations).await?;
        let image = ImageSource::parse(payload.image).map_err(|why| PrepareError::malformed(vec![why]));
        violations.extend(image.as_ref().err().into_iter().flat_map(|error| error.messages.clone()));
        let mut directories = directories_of(payload.cache, &mut violations);
        let features = &payload.features;
        let publishes = !is_declined(features, "artifacts");
        let wanted = if publishes { payload.artifacts } else { BTreeMap::new() };
        let (copies, artifacts) = artifacts_of(wanted, &mut directories, &mut violations);
        let mut variables = payload.env;
        variables.extend(identity(context));
        hide_secrets(&variables, &self.settings.redact_env, context);
        if is_wanted(features, PROXY) {
            variables.remove(PROXY_VARIABLE);
        }
        let mut environment = ContainerEnvironment::of(variables, &mut violations);
        let asked = RequestedParts {
            features,
            max_run_seconds: Some(payload.max_run_time),
            artifacts,
            logs: log_names(payload.log),
            on_exit_status: payload.on_exit_status,
            key_exposure: payload.capabilities.privileged.then_some("a privileged container can read the key"),
        };
        let begun = self.settings.begin(asked, violations, context).await?;
        if let Some(url) = begun.proxy_url() {
            environment.set(PROXY_VARIABLE, url);
        }
        for (dir, target) in &directories.mounted {
            options
                .extend(["--mount".to_owned(), mount_option(&context.workdir().join(dir).to_string_lossy(), target)]);
        }
        // A task whose image takes too long is a task that runs too long; no container is started.
        let brought = timeout(begun.run_time, self.prepare_image(&image?, &directories, context)).await.ok();
        let image = brought.transpose()?.unwrap_or_default();
        let has_backing = publishes && !is_declined(features, "bulkLog");
        context.decline_logs(has_backing && !is_declined(features, "localLiveLog"), has_backing);
        Ok(PreparedContainer { image, options, command: payload.command, environment, copies, begun })
    }

    async fn execute(&self, prepared: PreparedContainer, context: &Context) -> Result<(), super::ExecuteError> {
        self.execute_container(prepared, context).await
    }
}

/// The log itself is stored under the name with `_backing`.
fn log_names(name: Option<String>) -> LogNames {
    let backing = name.as_ref().map(|name| match name.rsplit_once('.') {
        Some((start, end)) if !end.contains('/') => format!("{start}_backing.{end}"),
        Some(_) | None => format!("{name}_backing"),
    });
    LogNames { live: name, backing }
}

/// A value of a comma-separated list, so that paths may have commas.
fn mount_option(source: &str, target: &str) -> String {
    let quoted = |key: &str, value: &str| format!("\"{key}={}\"", value.replace('"', "\"\""));
    format!("type=bind,{},{}", quoted("source", source), quoted("target", target))
}

fn directories_of(caches: BTreeMap<String, String>, violations: &mut Vec<String>) -> Directories {
    let mut directories = Directories::default();
    for (number, (name, path)) in caches.into_iter().enumerate() {
        if let Some(why) = path_error(&path) {
            violations.push(format!("payload/cache/{name}: {why}"));
        }
        if name.is_empty() {
            violations.push("payload/cache: a cache needs a name".to_owned());
        }
        if directories.mounted.iter().any(|(_, other)| *other == path) {
            violations.push(format!("payload/cache/{name}: another cache has its path"));
        }
        let dir = format!("cache{number}");
        directories.caches.push(Mount { path: dir.clone().into(), kind: MountKind::Cache { name, preload: None } });
        directories.mounted.push((dir, path));
    }
    directories
}

/// Each artifact lies in a directory of its own below that of the task.
fn artifacts_of(
    wanted: BTreeMap<String, payload::ContainerArtifact>,
    directories: &mut Directories,
    violations: &mut Vec<String>,
) -> (Vec<CopiedArtifact>, Vec<PayloadArtifact>) {
    let (mut copies, mut artifacts) = (Vec::new(), Vec::new());
    for (number, (name, artifact)) in wanted.into_iter().enumerate() {
        let from = artifact.path.trim_end_matches('/').to_owned();
        if let Some(why) = path_error(&from) {
            violations.push(format!("payload/artifacts/{name}/path: {why}"));
        }
        let base = from.rsplit('/').next().unwrap_or_default();
        let (kind, path) = match artifact.kind {
            ContainerArtifactType::File => (PayloadArtifactType::File, format!("artifact{number}/{base}")),
            ContainerArtifactType::Directory => (PayloadArtifactType::Directory, format!("artifact{number}/{base}")),
            ContainerArtifactType::Volume => (PayloadArtifactType::Directory, format!("volume{number}")),
        };
        if artifact.kind == ContainerArtifactType::Volume {
            directories.volumes.push(path.clone());
            directories.mounted.push((path.clone(), from));
        } else {
            copies.push(CopiedArtifact { artifact: name.clone(), from, to: format!("artifact{number}") });
        }
        artifacts.push(PayloadArtifact {
            kind,
            path,
            name: Some(name),
            expires: artifact.expires,
            content_type: None,
            content_encoding: None,
            // A task succeeds without its artifacts, as with docker-worker.
            optional: true,
        });
    }
    (copies, artifacts)
}

/// Runs payloads that name an image as containers, and others by the commands.
struct ByImage {
    commands: Arc<dyn DynHandler>,
    containers: Option<(Arc<dyn DynHandler>, Arc<Client>)>,
    section: String,
}

/// Adds containers to the commands of the handler `name`. Without them, a payload that names an image is told what is missing.
pub fn with_containers(
    commands: Arc<dyn DynHandler>,
    containers: Option<Containers>,
    name: &str,
) -> Arc<dyn DynHandler> {
    let containers = containers.map(|containers| {
        let client = Arc::clone(&containers.client);
        (erase(containers), client)
    });
    Arc::new(ByImage { commands, containers, section: format!("[handler.{name}.containers]") })
}

impl DynHandler for ByImage {
    fn describe(&self) -> String {
        let containers = self.containers.as_ref().map_or("", |_| ", and containers");
        format!("{}{containers}", self.commands.describe())
    }

    fn schema(&self) -> Value {
        let commands = self.commands.schema();
        let Some((containers, _)) = &self.containers else { return commands };
        // References in a schema with an address stay within it.
        let of = |name: &str, mut schema: Value| {
            schema["$id"] = format!("https://journeyman.invalid/{name}.json").into();
            schema
        };
        json!({
            "if": { "required": ["image"] },
            "then": of("container", containers.schema()),
            "else": of("command", commands),
        })
    }

    fn prepare<'a>(&'a self, payload: &'a Value, context: &'a Context) -> Preparing<'a> {
        if payload.get("image").is_none() {
            return self.commands.prepare(payload, context);
        }
        match &self.containers {
            Some((containers, _)) => containers.prepare(payload, context),
            None => Box::pin(async {
                let text =
                    format!("payload/image: this worker runs no containers, for which it needs {}", self.section);
                Err(PrepareError::malformed(vec![text]))
            }),
        }
    }

    fn end_leftovers(&self) -> Option<HandlerFuture<'_, Result<usize, String>>> {
        let (_, client) = self.containers.as_ref()?;
        Some(Box::pin(async { client.remove_all().await.map_err(|why| format!("{}: {why}", self.section)) }))
    }
}
