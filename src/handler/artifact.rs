//! What a task leaves behind: handlers declare it while they run, and it is opened when they have ended.
//!
//! A declaration names a path below the task's folder, not a file: whether it is there, is a regular file, and is small
//! enough comes out when [`Artifacts::collect`] goes through them, one at a time. By then the payload's processes are gone,
//! but what they left may be arranged to lead elsewhere, so files are opened by [`super::safe_open`]. This file uploads
//! nothing.

use std::cmp::Ordering;
use std::collections::HashSet;
use std::fs::File;
use std::io;
use std::path::{Component, Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use crate::limits::{
    ARTIFACT_CONTENT_TYPE_BYTES_MAX, ARTIFACT_NAME_BYTES_MAX, ARTIFACT_PATH_BYTES_MAX, ARTIFACTS_IN_MEMORY_BYTES_MAX,
    ARTIFACTS_MAX,
};

use super::{artifact_collector::ArtifactCollector, log};

/// Why a declared artifact is not there, in the words of the Taskcluster queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ArtifactErrorReason {
    /// There is no such file.
    Missing,
    /// It is no regular file, or the path to it goes through a symbolic link.
    Irregular,
    /// It is larger than [`crate::limits::ARTIFACT_BYTES_MAX`].
    TooLarge,
    /// The worker may not or cannot read it.
    Unreadable,
}

impl ArtifactErrorReason {
    /// The reason as the queue spells it.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Missing => "file-missing-on-worker",
            Self::Irregular => "invalid-resource-on-worker",
            Self::TooLarge => "too-large-file-on-worker",
            Self::Unreadable => "file-not-readable-on-worker",
        }
    }
}

/// What a declaration stands for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ArtifactKind {
    /// A regular file.
    File {
        /// Below the task's folder.
        path: PathBuf,
        /// Its media type; guessed from the path's extension if not given.
        content_type: Option<String>,
    },
    /// Every regular file in a folder and the folders in it, each under the declared name, `/`, and its path there.
    Directory {
        /// Below the task's folder.
        path: PathBuf,
    },
    /// Bytes the handler has in memory.
    Inline {
        /// The content.
        bytes: Vec<u8>,
        /// Its media type.
        content_type: String,
    },
    /// Another artifact of the same run.
    Link {
        /// That artifact's name.
        target: String,
        /// Its media type.
        content_type: String,
    },
    /// A place elsewhere.
    Reference {
        /// The place.
        url: String,
        /// Its media type.
        content_type: String,
    },
    /// Something that could not be made.
    Error {
        /// Why.
        reason: ArtifactErrorReason,
        /// A sentence for the task's author.
        message: String,
    },
}

/// Whether a task may succeed without an artifact.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Optionality {
    /// A completed task is failed if it is missing.
    #[default]
    Required,
    /// It is left out where it is not there or the queue refuses it, with a line in the log.
    Optional,
}

/// One thing that a task wants to leave behind.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ArtifactDeclaration {
    /// Printable ASCII, such as `public/build/target.tar.gz`.
    pub name: String,
    /// What it is.
    pub kind: ArtifactKind,
    /// When it may be thrown away (RFC 3339), not later than the task; `None` is when the task expires.
    pub expires: Option<String>,
    /// Whether it must be there.
    pub optionality: Optionality,
}

impl ArtifactDeclaration {
    /// Declares `what` under `name`: required, and kept as long as the task.
    pub fn new(name: impl Into<String>, kind: ArtifactKind) -> Self {
        let mut name = name.into();
        if matches!(kind, ArtifactKind::Directory { .. }) {
            // The names of its files go on with a slash of their own.
            name.truncate(name.trim_end_matches('/').len());
        }
        Self { name, kind, expires: None, optionality: Optionality::default() }
    }

    /// Sets when it may be thrown away.
    #[must_use]
    pub fn expires(mut self, expires: impl Into<String>) -> Self {
        self.expires = Some(expires.into());
        self
    }

    /// Lets the task succeed without it: where it is not there, or the queue refuses it.
    #[must_use]
    pub const fn optional(mut self) -> Self {
        self.optionality = Optionality::Optional;
        self
    }
}

/// A declaration that can never become an artifact.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DeclarationError {
    /// The name does not fit the queue.
    #[error(
        "artifact name {0:?}: use 1 to {ARTIFACT_NAME_BYTES_MAX} printable ASCII characters, and no empty, '.' or '..' part between slashes"
    )]
    Name(String),
    /// The name belongs to the worker.
    #[error("artifact name {0:?} is the task's own log; choose another")]
    Reserved(String),
    /// The path leads out of the task's folder, or is empty or too long.
    #[error("artifact path {0:?}: use a path below the task's folder, relative and without '..'")]
    Path(PathBuf),
    /// The time is not one.
    #[error("artifact expires {0:?}: use a time such as 2030-01-31T12:00:00Z")]
    Expires(String),
    /// The media type is none that a header can hold.
    #[error(
        "artifact content type {0:?}: use 1 to {ARTIFACT_CONTENT_TYPE_BYTES_MAX} printable ASCII characters, such as text/plain"
    )]
    ContentType(String),
    /// The place elsewhere is none.
    #[error("artifact url {0:?}: use an address that begins with http:// or https://")]
    Url(String),
    /// Another declaration has the name.
    #[error("artifact name {0:?} is declared twice")]
    DuplicateName(String),
    /// There are too many.
    #[error("more than {ARTIFACTS_MAX} artifacts are declared")]
    TooMany,
    /// There is too much in memory.
    #[error(
        "artifacts handed over in memory exceed {ARTIFACTS_IN_MEMORY_BYTES_MAX} bytes in all; write a file and declare that"
    )]
    TooLargeInMemory,
}

/// The artifacts a task has declared. Clones share them.
#[derive(Debug, Clone, Default)]
pub struct Artifacts {
    declared: Arc<Mutex<DeclarationList>>,
}

#[derive(Debug, Default)]
struct DeclarationList {
    list: Vec<ArtifactDeclaration>,
    names: HashSet<String>,
    inline_bytes: usize,
}

impl Artifacts {
    /// None yet.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Declares a regular file, `path` relative to the task's folder.
    ///
    /// # Errors
    ///
    /// As [`Artifacts::declare`].
    pub fn file(&self, name: impl Into<String>, path: impl Into<PathBuf>) -> Result<(), DeclarationError> {
        let (path, content_type) = (path.into(), None);
        self.declare(ArtifactDeclaration::new(name, ArtifactKind::File { path, content_type }))
    }

    /// Declares all regular files of a folder, `path` relative to the task's folder.
    ///
    /// # Errors
    ///
    /// As [`Artifacts::declare`].
    pub fn directory(&self, name: impl Into<String>, path: impl Into<PathBuf>) -> Result<(), DeclarationError> {
        let path = path.into();
        self.declare(ArtifactDeclaration::new(name, ArtifactKind::Directory { path }))
    }

    /// Declares anything.
    ///
    /// # Errors
    ///
    /// Where it can never become an artifact: the name or the path is not valid, a name comes twice (folders may share
    /// one), or there are too many.
    pub fn declare(&self, declaration: ArtifactDeclaration) -> Result<(), DeclarationError> {
        validate(&declaration)?;
        let mut declared = self.lock();
        if declared.list.len() >= ARTIFACTS_MAX {
            return Err(DeclarationError::TooMany);
        }
        if let ArtifactKind::Inline { bytes, .. } = &declaration.kind {
            let sum = declared.inline_bytes + bytes.len();
            if sum > ARTIFACTS_IN_MEMORY_BYTES_MAX {
                return Err(DeclarationError::TooLargeInMemory);
            }
            declared.inline_bytes = sum;
        }
        let folder = matches!(declaration.kind, ArtifactKind::Directory { .. });
        if !folder && !declared.names.insert(declaration.name.clone()) {
            return Err(DeclarationError::DuplicateName(declaration.name));
        }
        declared.list.push(declaration);
        Ok(())
    }

    /// How many declarations there are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.lock().list.len()
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Goes through what is declared, in that order, opening one file at a time; what is declared from here on is not
    /// part of it. Blocks on the file system, so call it and the iterator off the async threads.
    ///
    /// # Errors
    ///
    /// Where `workdir` itself cannot be opened and is needed.
    pub fn collect(&self, workdir: &Path) -> io::Result<ArtifactCollector> {
        let list = self.lock().list.clone();
        ArtifactCollector::new(list, workdir)
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, DeclarationList> {
        self.declared.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Checks all of a declaration that can be checked without its file.
///
/// # Errors
///
/// See [`DeclarationError`].
pub fn validate(declaration: &ArtifactDeclaration) -> Result<(), DeclarationError> {
    validate_name(&declaration.name)?;
    match &declaration.kind {
        ArtifactKind::File { path, .. } | ArtifactKind::Directory { path } => validate_path(path)?,
        ArtifactKind::Link { target, .. } if target != log::BACKING_NAME => validate_name(target)?,
        ArtifactKind::Link { .. }
        | ArtifactKind::Inline { .. }
        | ArtifactKind::Reference { .. }
        | ArtifactKind::Error { .. } => {}
    }
    match &declaration.kind {
        ArtifactKind::File { content_type: Some(kind), .. }
        | ArtifactKind::Link { content_type: kind, .. }
        | ArtifactKind::Inline { content_type: kind, .. }
        | ArtifactKind::Reference { content_type: kind, .. } => validate_content_type(kind)?,
        ArtifactKind::File { content_type: None, .. } | ArtifactKind::Directory { .. } | ArtifactKind::Error { .. } => {
        }
    }
    if let ArtifactKind::Reference { url, .. } = &declaration.kind {
        let is_web = url::Url::parse(url).is_ok_and(|url| matches!(url.scheme(), "http" | "https") && url.has_host());
        if !is_web {
            return Err(DeclarationError::Url(url.clone()));
        }
    }
    match &declaration.expires {
        Some(text) if text.parse::<jiff::Timestamp>().is_err() => Err(DeclarationError::Expires(text.clone())),
        Some(_) | None => Ok(()),
    }
}

/// A space around it would be lost on the way, and what is signed would not be what is sent.
pub(super) fn is_valid_content_type(kind: &str) -> bool {
    let fits = (1..=ARTIFACT_CONTENT_TYPE_BYTES_MAX).contains(&kind.len());
    fits && kind == kind.trim() && kind.bytes().all(|byte| (b' '..=b'~').contains(&byte))
}

fn validate_content_type(kind: &str) -> Result<(), DeclarationError> {
    if is_valid_content_type(kind) {
        Ok(())
    } else {
        Err(DeclarationError::ContentType(kind.chars().take(ARTIFACT_CONTENT_TYPE_BYTES_MAX).collect()))
    }
}

/// Checks an artifact's name.
///
/// # Errors
///
/// [`DeclarationError::Name`], or [`DeclarationError::Reserved`] for the task's own log.
pub fn validate_name(name: &str) -> Result<(), DeclarationError> {
    let fits = (1..=ARTIFACT_NAME_BYTES_MAX).contains(&name.len());
    // An address with such a segment is rewritten on its way, and would lead elsewhere.
    let plain = name.split('/').all(|segment| !matches!(segment, "" | "." | ".."));
    if !fits || !plain || !name.bytes().all(|byte| (b' '..=b'~').contains(&byte)) {
        return Err(DeclarationError::Name(name.to_owned()));
    }
    if name == log::BACKING_NAME || name == log::LIVE_NAME {
        return Err(DeclarationError::Reserved(name.to_owned()));
    }
    Ok(())
}

fn validate_path(path: &Path) -> Result<(), DeclarationError> {
    let length = path.as_os_str().len();
    let inside = path.components().all(|component| matches!(component, Component::Normal(_) | Component::CurDir));
    let clean = !path.as_os_str().as_encoded_bytes().contains(&0);
    if inside && clean && (1..=ARTIFACT_PATH_BYTES_MAX).contains(&length) {
        Ok(())
    } else {
        Err(DeclarationError::Path(path.to_owned()))
    }
}

/// The media type that a path's extension stands for; `application/octet-stream` where it stands for none.
#[must_use]
pub fn guess_content_type(path: &Path) -> String {
    let extension = path.extension().and_then(|extension| extension.to_str());
    if extension.is_some_and(|extension| extension.eq_ignore_ascii_case("log")) {
        return log::CONTENT_TYPE.to_owned();
    }
    let guess = mime_guess::from_path(path).first_or_octet_stream();
    // Browsers take text without a charset for Latin-1.
    if guess.type_() == mime_guess::mime::TEXT && guess.get_param("charset").is_none() {
        return format!("{guess}; charset=utf-8");
    }
    guess.to_string()
}

/// A file in memory that holds `bytes`.
pub(super) fn memory_file(bytes: &[u8]) -> io::Result<File> {
    use std::os::unix::fs::FileExt;
    let flags = rustix::fs::MemfdFlags::CLOEXEC;
    let file = File::from(rustix::fs::memfd_create("artifact", flags)?);
    file.write_all_at(bytes, 0)?;
    Ok(file)
}

/// Whether an artifact's `expires` is later than that of its task's definition, where both are times.
#[must_use]
pub fn expires_after_task(expires: &str, definition: &serde_json::Value) -> bool {
    compare_expiry(expires, "expires", definition).is_some_and(Ordering::is_gt)
}

/// Why no artifact of this task can have this `expires`, whenever the task runs; `None` where it can.
///
/// A task is run until its deadline, and what expires by then is refused by the queue, or not, as the clock has it.
#[must_use]
pub fn expiry_conflict(expires: &str, definition: &serde_json::Value) -> Option<&'static str> {
    if expires_after_task(expires, definition) {
        return Some("it is later than the task's own expires");
    }
    let early = compare_expiry(expires, "deadline", definition).is_some_and(Ordering::is_lt);
    early.then_some("it is earlier than the task's deadline")
}

fn compare_expiry(expires: &str, with: &str, definition: &serde_json::Value) -> Option<Ordering> {
    let time = |text: &str| text.parse::<jiff::Timestamp>().ok();
    let other = definition.get(with).and_then(serde_json::Value::as_str).and_then(time)?;
    Some(time(expires)?.cmp(&other))
}
