//! Mounts: files, directories and named caches that are in a task's directory before its payload runs.
//!
//! Paths that tasks or caches may have written are opened without following links. Named caches move into the task's directory and
//! back; see [`journeyman_platform::host::caches`].

pub mod config;
pub mod configured;
mod fetch;
pub mod payload;

use std::fs::File;
use std::io;
use std::os::fd::{AsFd as _, AsRawFd as _, OwnedFd};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::fs::{AtFlags, Mode, OFlags};
use rustix::io::Errno;
use tokio::time::timeout;

use journeyman_domain::limits::{PURGE_CLOCK_SKEW_MAX, PURGE_REQUESTS_TIMEOUT, UNPACK_ENTRIES_MAX};
use journeyman_platform::host::beneath::{self, Missing};
use journeyman_platform::host::caches::{CacheStore, Found};
use journeyman_platform::host::resources;
use journeyman_platform::host::task_user::TaskUser;
use journeyman_platform::unpack::{self, ArchiveFormat, Compression, UnpackError, UnpackLimits};

use super::{Context, PrepareError, PrepareFailure};
use fetch::Fetcher;
pub(super) use fetch::in_mib;
use fetch::rewound;
use payload::{Content, Mount, MountKind, Origin};

/// Places mounts. Clones share the caches and the connections.
#[derive(Debug, Clone)]
pub struct Mounter {
    fetcher: Fetcher,
    /// Before the names of caches.
    prefix: &'static str,
}

/// Stops blocking work of a future that is dropped.
#[derive(Default)]
struct StopOnDrop(Arc<AtomicBool>);

impl Drop for StopOnDrop {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

impl Mounter {
    /// # Errors
    ///
    /// This host has no usable TLS configuration.
    pub fn new(store: Arc<CacheStore>) -> reqwest::Result<Self> {
        Ok(Self { fetcher: Fetcher::new(store)?, prefix: "" })
    }

    /// With caches of their own for tasks that may leave files in them that make others root, which begin with this.
    pub(super) fn with_prefix(self, prefix: &'static str) -> Self {
        Self { prefix, ..self }
    }

    /// The client that downloads, for other calls of tasks.
    pub fn client(&self) -> reqwest::Client {
        self.fetcher.client.clone()
    }

    /// The directory of the worker that uses the caches.
    pub(super) fn work_dir(&self) -> &Path {
        let caches = self.fetcher.store.path();
        caches.parent().unwrap_or(caches)
    }

    /// Brings an artifact to this host, as a file positioned at its start.
    pub(super) async fn fetch(&self, origin: &Origin, context: &Context) -> Result<File, PrepareError> {
        self.fetcher.fetch(&Content::Remote { origin: origin.clone(), sha256: None }, context).await
    }

    /// A saved image as a client loads it: decompressed, and without the names that it would have.
    pub(super) async fn image_without_names(
        &self,
        from: File,
        compression: Option<Compression>,
        subject: &str,
    ) -> Result<File, PrepareError> {
        let (store, subject) = (Arc::clone(&self.fetcher.store), subject.to_owned());
        let stop = StopOnDrop::default();
        let stopped = Arc::clone(&stop.0);
        blocking("image", move || {
            let canceled = || stopped.load(Ordering::Relaxed);
            let (plain, nameless) = (store.new_download()?, store.new_download()?);
            if let Err(error) = decompress_into(from, compression, plain.file(), &store, &subject, &canceled) {
                return Ok(Err(error));
            }
            let plain = rewound(plain.finish(None)?)?;
            match unpack::copy_without_names(plain, &mut nameless.file().try_clone()?, &canceled) {
                Ok(()) => Ok(Ok(rewound(nameless.finish(None)?)?)),
                Err(error) if error.raw_os_error().is_some() => Err(error),
                Err(error) => Ok(Err(PrepareError::malformed(vec![format!("{subject}: no saved image: {error}")]))),
            }
        })
        .await?
    }

    /// How many bytes may be stored in a directory.
    pub(super) fn room(&self, dir: &Path) -> u64 {
        limits(&self.fetcher.store, dir).bytes_max
    }

    /// Says what a task lacks to mount these: scopes, and dependencies.
    ///
    /// # Errors
    ///
    /// The services that know the task's scopes cannot be reached.
    pub async fn missing_rights(&self, mounts: &[Mount], context: &Context) -> Result<Vec<String>, PrepareError> {
        let mut missing = Vec::new();
        let dependencies = context.task().definition.json()["dependencies"].as_array();
        let mut scopes = Vec::new();
        for (number, mount) in mounts.iter().enumerate() {
            if let Some(Content::Remote { origin: Origin::Artifact { task, .. }, .. }) = mount.kind.content()
                && !dependencies.is_some_and(|list| list.iter().any(|id| id == task.as_str()))
            {
                missing.push(format!(
                    "payload/mounts/{number}: `dependencies` of the task lacks {task}, whose artifact it mounts"
                ));
            }
            if let MountKind::Cache { name, .. } = &mount.kind {
                scopes.push((format!("payload/mounts/{number}"), format!("generic-worker:cache:{name}")));
            }
        }
        missing.extend(lacking_scopes(scopes, context).await?);
        Ok(missing)
    }

    /// Places the mounts in their order.
    ///
    /// # Errors
    ///
    /// Malformed for content that is missing or not what is declared, unavailable for a server that cannot be reached.
    ///
    /// # Cancel safety
    ///
    /// What was placed stays in the task's directory; caches are given back or go with it.
    pub async fn place(&self, mounts: &[Mount], context: &Context) -> Result<(), PrepareError> {
        if mounts.iter().any(|mount| matches!(mount.kind, MountKind::Cache { .. })) {
            self.purge_caches(mounts, context).await?;
        }
        for mount in mounts {
            match &mount.kind {
                MountKind::File { content, compression } => {
                    self.place_file(&mount.path, content, *compression, context).await?
                }
                MountKind::Directory { content, format } => {
                    self.place_directory(&mount.path, content, *format, context).await?;
                }
                MountKind::Cache { name, preload } => {
                    self.place_cache(&mount.path, name, preload.as_ref(), context).await?
                }
            }
        }
        context.set_progress("");
        Ok(())
    }

    async fn place_file(
        &self,
        path: &Path,
        content: &Content,
        compression: Option<Compression>,
        context: &Context,
    ) -> Result<(), PrepareError> {
        let from = self.fetcher.fetch(content, context).await?;
        let (root, path) = (context.workdir().to_owned(), path.to_owned());
        let (store, stop) = (Arc::clone(&self.fetcher.store), StopOnDrop::default());
        let (stopped, user) = (Arc::clone(&stop.0), context.user().cloned());
        blocking_placed(&path.clone(), move || {
            let mut to = create_file(&root, &path, user.as_deref())?;
            let (limits, canceled) = (limits(&store, &root), || stopped.load(Ordering::Relaxed));
            unpack_result(&path, unpack::decompress(from, compression, &mut to, &limits, &canceled).map(drop))
        })
        .await
    }

    async fn place_directory(
        &self,
        path: &Path,
        content: &Content,
        format: ArchiveFormat,
        context: &Context,
    ) -> Result<(), PrepareError> {
        let archive = self.fetcher.fetch(content, context).await?;
        let (root, path) = (context.workdir().to_owned(), path.to_owned());
        let (store, stop) = (Arc::clone(&self.fetcher.store), StopOnDrop::default());
        let (stopped, user) = (Arc::clone(&stop.0), context.user().cloned());
        blocking_placed(&path.clone(), move || {
            let dir = beneath::open_dir(&root, &path, Missing::Create(user.as_deref()))?;
            // The descriptor leads there without following a link.
            let into = format!("/proc/self/fd/{}/.", dir.as_raw_fd());
            let (limits, canceled) = (limits(&store, &root), || stopped.load(Ordering::Relaxed));
            let unpacked = unpack::unpack(archive, format, Path::new(&into), user.as_deref(), &limits, &canceled);
            unpack_result(&path, unpacked)
        })
        .await
    }

    /// A new cache is given back only once it is whole.
    async fn place_cache(
        &self,
        path: &Path,
        name: &str,
        preload: Option<&(Content, ArchiveFormat)>,
        context: &Context,
    ) -> Result<(), PrepareError> {
        let (store, root) = (Arc::clone(&self.fetcher.store), context.workdir().to_owned());
        let (wanted, target, user) = (format!("{}{name}", self.prefix), path.to_owned(), context.user().cloned());
        let taking = move || match store.take_named(&wanted, &root, &target, user.as_deref()) {
            Err(error) if matches!(Errno::from_io_error(&error), Some(Errno::EXIST | Errno::NOTEMPTY)) => {
                let text = format!("mount at {}: there is something already", target.display());
                Ok(Err(PrepareError::malformed(vec![text])))
            }
            taken => taken.map(Ok),
        };
        let (held, found) = blocking_placed(path, taking).await?;
        if let (Found::New, Some((content, format))) = (found, preload) {
            self.place_directory(path, content, *format, context).await?;
        }
        context.hold_cache(held);
        let how = if found == Found::New { "new" } else { "kept from an earlier task" };
        context.log().write_note(&format!("cache {name} at {}: {how}", path.display()));
        Ok(())
    }

    /// Without an answer the caches are used: a service that is down must not make every task slow.
    async fn purge_caches(&self, mounts: &[Mount], context: &Context) -> Result<(), PrepareError> {
        let Some(deployment) = context.deployment() else { return Ok(()) };
        let requests = match timeout(PURGE_REQUESTS_TIMEOUT, deployment.purge_requests()).await {
            Ok(Ok(requests)) => requests,
            Ok(Err(error)) => {
                context.log().write_note(&format!("caches are used unpurged: {}", error.message));
                return Ok(());
            }
            Err(_) => {
                context.log().write_note("caches are used unpurged: no answer about requests to purge them");
                return Ok(());
            }
        };
        for mount in mounts {
            let MountKind::Cache { name, .. } = &mount.kind else { continue };
            let of_name = requests.iter().filter(|request| request.cache_name == *name);
            let Some(before) = of_name.filter_map(|request| request.before.checked_add(PURGE_CLOCK_SKEW_MAX)).max()
            else {
                continue;
            };
            let (store, wanted) = (Arc::clone(&self.fetcher.store), format!("{}{name}", self.prefix));
            let purged = blocking("cache", move || store.purge_named(&wanted, before)).await?;
            if purged > 0 {
                context.log().write_note(&format!("cache {name}: purged, as requested"));
            }
        }
        Ok(())
    }
}

/// Says which of the scopes the task does not have, each after the place that needs it.
pub(super) async fn lacking_scopes(
    wanted: Vec<(String, String)>,
    context: &Context,
) -> Result<Vec<String>, PrepareError> {
    lacking_any_scope(wanted.into_iter().map(|(place, scope)| (place, vec![scope])).collect(), context).await
}

/// Says where the task has none of the scopes. Roles are expanded only if they are needed.
pub(super) async fn lacking_any_scope(
    wanted: Vec<(String, Vec<String>)>,
    context: &Context,
) -> Result<Vec<String>, PrepareError> {
    // Tasks without a deployment have no scopes; their queue says who may create them.
    let Some(deployment) = context.deployment() else { return Ok(Vec::new()) };
    let own = deployment.task_scopes();
    let has_none = |held: &[String], scopes: &[String]| !scopes.iter().any(|scope| satisfies(held, scope));
    let mut lacking: Vec<_> = wanted.into_iter().filter(|(_, scopes)| has_none(own, scopes)).collect();
    if !lacking.is_empty() && own.iter().any(|scope| scope.starts_with("assume:")) {
        let expanded = deployment.expand_scopes().await.map_err(|error| {
            let text = format!("the task's scopes cannot be expanded: {}", error.message);
            PrepareError::new(PrepareFailure::Unavailable, text)
        })?;
        lacking.retain(|(_, scopes)| has_none(&expanded, scopes));
    }
    let message =
        |(place, scopes): (String, Vec<String>)| format!("{place}: the task lacks the scope {}", scopes.join(" or "));
    Ok(lacking.into_iter().map(message).collect())
}

/// A scope is held literally or by one that ends in `*`.
fn satisfies(held: &[String], wanted: &str) -> bool {
    held.iter().any(|scope| scope == wanted || scope.strip_suffix('*').is_some_and(|start| wanted.starts_with(start)))
}

fn create_file(root: &Path, path: &Path, user: Option<&TaskUser>) -> io::Result<File> {
    let (parent, name): (OwnedFd, _) = beneath::open_parent(root, path, Missing::Create(user))?;
    // What an earlier task has put there, such as a pipe without a reader, is not opened.
    match rustix::fs::unlinkat(&parent, name, AtFlags::empty()) {
        Ok(()) | Err(Errno::NOENT) => {}
        Err(error) => return Err(error.into()),
    }
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
    let mode = Mode::RUSR | Mode::WUSR | Mode::RGRP | Mode::ROTH;
    let file = rustix::fs::openat(parent.as_fd(), name, flags, mode)?;
    user.map_or(Ok(()), |user| user.give(&file))?;
    Ok(file.into())
}

/// What unpacking may write: what keeps the disk's free space above its minimum.
fn limits(store: &CacheStore, dir: &Path) -> UnpackLimits {
    let free = resources::measure(dir).disk.unwrap_or(u64::MAX);
    UnpackLimits { bytes_max: free.saturating_sub(store.limits().free_bytes_min), entries_max: UNPACK_ENTRIES_MAX }
}

fn unpack_result(path: &Path, unpacked: Result<(), UnpackError>) -> io::Result<Result<(), PrepareError>> {
    match unpacked {
        Ok(()) => Ok(Ok(())),
        Err(UnpackError::Host { source, .. }) => Err(source),
        Err(error @ (UnpackError::Entry { .. } | UnpackError::Archive(_) | UnpackError::Canceled)) => {
            Ok(Err(PrepareError::malformed(vec![format!("mount at {}: {error}", path.display())])))
        }
    }
}

/// Copies downloaded content, decompressed if it is compressed. Blocks.
fn decompress_into(
    from: File,
    compression: Option<Compression>,
    to: &File,
    store: &CacheStore,
    subject: &str,
    canceled: &dyn Fn() -> bool,
) -> Result<(), PrepareError> {
    let mut limits = limits(store, store.path());
    limits.bytes_max = limits.bytes_max.min(store.limits().downloads_bytes_max);
    let mut to = to.try_clone().map_err(|error| PrepareError::from_io(subject, &error))?;
    match unpack::decompress(from, compression, &mut to, &limits, canceled) {
        Ok(_) => Ok(()),
        Err(UnpackError::Host { source, .. }) => Err(PrepareError::from_io(subject, &source)),
        Err(error) => Err(PrepareError::malformed(vec![format!("{subject}: {error}")])),
    }
}

async fn blocking<T: Send + 'static>(
    subject: &str,
    work: impl FnOnce() -> io::Result<T> + Send + 'static,
) -> Result<T, PrepareError> {
    let done = tokio::task::spawn_blocking(work).await.map_err(io::Error::other).flatten();
    done.map_err(|error| PrepareError::from_io(subject, &error))
}

/// A path that leads through a file or a link, or that names a directory as a file, is the payload's fault.
async fn blocking_placed<T: Send + 'static>(
    path: &Path,
    work: impl FnOnce() -> io::Result<Result<T, PrepareError>> + Send + 'static,
) -> Result<T, PrepareError> {
    let done = tokio::task::spawn_blocking(work).await.map_err(io::Error::other).flatten();
    done.map_err(|error| {
        let subject = format!("mount at {}", path.display());
        match Errno::from_io_error(&error) {
            Some(Errno::NOTDIR | Errno::LOOP | Errno::ISDIR | Errno::NAMETOOLONG) => {
                PrepareError::malformed(vec![format!("{subject}: {error}; is there a file or a link in its place?")])
            }
            Some(_) | None => PrepareError::from_io(&subject, &error),
        }
    })
    .flatten()
}
