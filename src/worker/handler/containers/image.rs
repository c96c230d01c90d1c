//! Brings the image of a container to this host.
//!
//! A saved image comes with names of its choice, which tasks after it would take for what the registry has. So it is loaded without them, and
//! kept by its digest.

use std::fs::File;
use std::io;
use std::sync::Arc;

use tokio::task::spawn_blocking;
use tokio::time::{Instant, timeout};

use journeyman_domain::id::TaskId;
use journeyman_domain::limits::{CONTAINER_COPY_TIMEOUT, IMAGE_NAME_BYTES_MAX};
use journeyman_platform::host::run_program;
use journeyman_platform::unpack::Compression;

use super::client::{Client, succeeded};
use super::payload::{Image, TypedImage};
use crate::handler::mounts::Mounter;
use crate::handler::mounts::payload::Origin;
use crate::handler::process::format_seconds;
use crate::handler::{Context, PrepareError, PrepareFailure};
use crate::task::file::digest;

/// The names of images that were loaded, before their digests. Both clients take it for one of this host.
const LOADED: &str = "localhost/journeyman-image:";

/// What registries and clients say of an image that is not to be had however often it is asked for.
const MISSING: &str = "not found|not known|manifest unknown|name unknown|does not exist|access to the resource is denied|unauthorized|\
    authentication required|no matching manifest|invalid reference";

/// What clients say if the file is not the reason that it cannot be loaded.
const OF_HOST: &str = "no space left|cannot connect|connection refused|permission denied|timeout|no answer";

fn says_any(said: &str, reasons: &str) -> bool {
    let said = said.to_ascii_lowercase();
    reasons.split('|').any(|reason| said.contains(reason))
}

#[derive(Debug)]
pub(super) struct Images {
    client: Arc<Client>,
    mounter: Mounter,
}

/// The place an image comes from.
#[derive(Debug)]
pub(super) enum ImageSource {
    Registry(String),
    Saved { origin: Origin, compression: Option<Compression> },
}

impl ImageSource {
    pub(super) fn parse(image: Image) -> Result<Self, String> {
        match image {
            Image::Name(name) | Image::Typed(TypedImage::DockerImage { name }) => {
                Ok(Self::Registry(registry_name(name).ok_or("payload/image: not the name of an image at a registry")?))
            }
            Image::Typed(TypedImage::TaskImage { task_id, path }) => {
                let task = TaskId::parse(&task_id).ok_or("payload/image/taskId: not the id of a task")?;
                Ok(Self::saved(Origin::Artifact { task, name: path.clone() }, &path))
            }
            Image::Typed(TypedImage::IndexedImage { namespace, path }) => {
                Ok(Self::saved(Origin::Indexed { namespace, name: path.clone() }, &path))
            }
        }
    }

    fn saved(origin: Origin, path: &str) -> Self {
        let compression = match path.rsplit('.').next() {
            Some("bz2") => Some(Compression::Bz2),
            Some("gz" | "tgz") => Some(Compression::Gz),
            Some("lz4") => Some(Compression::Lz4),
            Some("xz") => Some(Compression::Xz),
            Some("zst") => Some(Compression::Zst),
            Some(_) | None => None,
        };
        Self::Saved { origin, compression }
    }
}

/// With its tag: without one, clients take digits for the id of any image. `None` for what is not at a registry, as the files that podman
/// names by a transport.
fn registry_name(name: String) -> Option<String> {
    const TRANSPORTS: [&str; 9] = [
        "containers-storage",
        "dir",
        "docker-archive",
        "docker-daemon",
        "oci",
        "oci-archive",
        "ostree",
        "sif",
        "sha256",
    ];
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"._-:/@+".contains(&byte);
    let is_name = name.len() <= IMAGE_NAME_BYTES_MAX
        && name.starts_with(|first: char| first.is_ascii_alphanumeric())
        && name.bytes().all(is_plain)
        && !name.contains(":/")
        && !name.starts_with(LOADED.trim_end_matches(':'))
        && !name.split_once(':').is_some_and(|(start, _)| TRANSPORTS.contains(&start));
    let has_tag = name.contains('@') || name.rsplit('/').next().is_some_and(|last| last.contains(':'));
    is_name.then(|| if has_tag { name } else { format!("{name}:latest") })
}

impl Images {
    pub(super) fn new(client: Arc<Client>, mounter: Mounter) -> Self {
        Self { client, mounter }
    }

    /// Returns the id of the image.
    pub(super) async fn bring(&self, image: &ImageSource, context: &Context) -> Result<String, PrepareError> {
        match image {
            ImageSource::Registry(name) => self.pull(name, context).await,
            ImageSource::Saved { origin, compression } => self.load(origin, *compression, context).await,
        }
    }

    async fn pull(&self, name: &str, context: &Context) -> Result<String, PrepareError> {
        if let Some(id) = self.find(name, context).await {
            context.log().write_note(&format!("image {name}: {id}, pulled before"));
            return Ok(id);
        }
        context.set_progress(&format!("pulling image {name}"));
        let started = Instant::now();
        // Time is bounded by `maxRunTime`.
        let pulled = run_program::run(self.client.command(&["pull", "-q", name], Some(context.scope())), &[]).await;
        succeeded(pulled).map_err(|why| {
            let is_missing = says_any(&why, MISSING);
            let reason = if is_missing { PrepareFailure::Malformed } else { PrepareFailure::Unavailable };
            PrepareError::new(reason, format!("payload/image: cannot pull {name}: {why}"))
        })?;
        let id = self.find(name, context).await.ok_or_else(|| {
            PrepareError::new(PrepareFailure::Unavailable, format!("payload/image: {name} was pulled and is gone"))
        })?;
        context.log().write_note(&format!("image {name}: {id}, pulled in {}", format_seconds(started.elapsed())));
        Ok(id)
    }

    async fn find(&self, name: &str, context: &Context) -> Option<String> {
        self.client.ask(&["image", "inspect", "-f", "{{.Id}}", name], Some(context.scope())).await.ok()
    }

    async fn load(
        &self,
        origin: &Origin,
        compression: Option<Compression>,
        context: &Context,
    ) -> Result<String, PrepareError> {
        let saved = self.mounter.fetch(origin, context).await?;
        let hashed = spawn_blocking(move || digest(&saved, saved.metadata()?.len()).map(|digest| (saved, digest)))
            .await
            .map_err(io::Error::other)
            .flatten();
        let (saved, digest) = hashed.map_err(|error| PrepareError::from_io("image", &error))?;
        let kept = format!("{LOADED}{digest}");
        if let Some(id) = self.find(&kept, context).await {
            context.log().write_note(&format!("image {origin}: {id}, loaded before"));
            return Ok(id);
        }
        context.set_progress(&format!("loading image {origin}"));
        let started = Instant::now();
        let plain = self.mounter.image_without_names(saved, compression, &format!("payload/image: {origin}")).await?;
        let loaded = timeout(CONTAINER_COPY_TIMEOUT, self.load_as(plain, &kept, context)).await;
        let id = loaded.unwrap_or_else(|_| Err("no answer".to_owned())).map_err(|why| {
            let reason = if says_any(&why, OF_HOST) { PrepareFailure::Unavailable } else { PrepareFailure::Malformed };
            PrepareError::new(reason, format!("payload/image: cannot load {origin}: {why}"))
        })?;
        context.log().write_note(&format!("image {origin}: {id}, loaded in {}", format_seconds(started.elapsed())));
        Ok(id)
    }

    /// Loads a saved image without names, and keeps it under one. Returns its id.
    async fn load_as(&self, saved: File, kept: &str, context: &Context) -> Result<String, String> {
        let scope = Some(context.scope());
        let said = succeeded(run_program::run_on_file(self.client.command(&["load", "-q"], scope), saved).await)?;
        let of_line = |line: &str| Some(line.strip_prefix("Loaded image")?.split_once(": ")?.1.trim().to_owned());
        let first = said.lines().find_map(of_line);
        let first = first.ok_or_else(|| format!("no image in it, the client prints {said:?}"))?;
        let id = self.client.ask(&["image", "inspect", "-f", "{{.Id}}", &first], scope).await?;
        self.client.ask(&["tag", &id, kept], scope).await?;
        Ok(id)
    }
}
