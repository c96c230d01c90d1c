//! Artifacts: handlers declare them while a payload runs; [`Artifacts::collect`] opens them after it has ended.
//!
//! A declaration names a path below the task directory. Whether the path is a regular file of an acceptable size is checked
//! when it is collected. A payload may leave symbolic links that lead elsewhere, so files are opened by
//! [`super::safe_open`], which follows those that stay in the task directory.

use std::collections::HashSet;
use std::io;
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;

use parking_lot::Mutex;

use journeyman_domain::limits::{ARTIFACT_CONTENT_TYPE_BYTES_MAX, ARTIFACT_NAME_BYTES_MAX, ARTIFACTS_MAX};

use super::{artifact_collector::ArtifactCollector, log};
use crate::task::ContentEncoding;

/// The content of a declared artifact.
#[derive(Debug, Clone)]
pub enum ArtifactKind {
    /// A regular file.
    File {
        /// The path below the task directory.
        path: PathBuf,
        /// Its media type; by default guessed from the path's extension.
        content_type: Option<String>,
    },
    /// All regular files in a directory and its subdirectories, named NAME/PATH.
    Directory {
        /// The path below the task directory.
        path: PathBuf,
        /// The media type of all of them; by default guessed from their extensions.
        content_type: Option<String>,
    },
}

/// A task may succeed without an optional artifact.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Optionality {
    /// The task fails if it is missing.
    #[default]
    Required,
    /// If it is missing or the queue rejects it, the log has a line and the task may succeed.
    Optional,
}

/// A declared artifact.
#[derive(Debug, Clone)]
pub struct ArtifactDeclaration {
    /// Printable ASCII, such as `public/build/target.tar.gz`.
    pub name: String,
    /// The content.
    pub kind: ArtifactKind,
    /// When it expires (RFC 3339), not later than the task; `None` is with the task.
    pub expires: Option<String>,
    /// The task may or may not succeed without it.
    pub optionality: Optionality,
    /// How its files are stored; `None` leaves it to the extension of each.
    pub encoding: Option<ContentEncoding>,
}

impl ArtifactDeclaration {
    /// Declares a required artifact that expires with the task.
    pub fn new(name: impl Into<String>, kind: ArtifactKind) -> Self {
        let mut name = name.into();
        if matches!(kind, ArtifactKind::Directory { .. }) {
            // The names of its files add a slash.
            name.truncate(name.trim_end_matches('/').len());
        }
        Self {
            name,
            kind,
            expires: None,
            optionality: Optionality::default(),
            encoding: Some(ContentEncoding::Identity),
        }
    }
}

/// Says what is wrong with a declaration.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("artifact {0}")]
pub struct DeclarationError(String);

/// The declared artifacts of a task. Clones share them.
#[derive(Debug, Clone, Default)]
pub struct Artifacts {
    declared: Arc<Mutex<DeclarationList>>,
}

#[derive(Debug, Default)]
struct DeclarationList {
    list: Vec<ArtifactDeclaration>,
    names: HashSet<String>,
}

impl Artifacts {
    /// Creates an empty set.
    pub fn new() -> Self {
        Self::default()
    }

    /// Declares a regular file; `path` is relative to the task directory.
    ///
    /// # Errors
    ///
    /// Fails as [`Artifacts::declare`] does.
    pub fn file(&self, name: impl Into<String>, path: impl Into<PathBuf>) -> Result<(), DeclarationError> {
        let (path, content_type) = (path.into(), None);
        self.declare(ArtifactDeclaration::new(name, ArtifactKind::File { path, content_type }))
    }

    /// Declares all regular files of a directory; `path` is relative to the task directory.
    ///
    /// # Errors
    ///
    /// Fails as [`Artifacts::declare`] does.
    pub fn directory(&self, name: impl Into<String>, path: impl Into<PathBuf>) -> Result<(), DeclarationError> {
        let (path, content_type) = (path.into(), None);
        self.declare(ArtifactDeclaration::new(name, ArtifactKind::Directory { path, content_type }))
    }

    /// Declares an artifact.
    ///
    /// # Errors
    ///
    /// If a field is invalid, the name is taken (directories may share one), or there are too many artifacts.
    pub fn declare(&self, declaration: ArtifactDeclaration) -> Result<(), DeclarationError> {
        validate(&declaration)?;
        let mut declared = self.declared.lock();
        if declared.list.len() >= ARTIFACTS_MAX {
            return invalid(format!("limit reached: more than {ARTIFACTS_MAX} are declared"));
        }
        let folder = matches!(declaration.kind, ArtifactKind::Directory { .. });
        if !folder && !declared.names.insert(declaration.name.clone()) {
            return invalid(format!("name {:?} is declared twice", declaration.name));
        }
        declared.list.push(declaration);
        Ok(())
    }

    /// Returns whether nothing is declared.
    pub fn is_empty(&self) -> bool {
        self.declared.lock().list.is_empty()
    }

    /// The files and directories declared so far, below the task directory.
    pub(super) fn paths(&self) -> Vec<PathBuf> {
        let path = |declaration: &ArtifactDeclaration| match &declaration.kind {
            ArtifactKind::File { path, .. } | ArtifactKind::Directory { path, .. } => path.clone(),
        };
        self.declared.lock().list.iter().map(path).collect()
    }

    /// Iterates over the artifacts declared so far and opens one file at a time. Call it and the iterator on a blocking
    /// thread.
    ///
    /// # Errors
    ///
    /// Fails if an artifact is declared and `workdir` cannot be opened.
    pub fn collect(&self, workdir: &Path) -> io::Result<ArtifactCollector> {
        let list = self.declared.lock().list.clone();
        ArtifactCollector::new(list, workdir)
    }
}

fn invalid<T>(what: String) -> Result<T, DeclarationError> {
    Err(DeclarationError(what))
}

/// Checks a declaration without its file.
fn validate(declaration: &ArtifactDeclaration) -> Result<(), DeclarationError> {
    validate_name(&declaration.name)?;
    let (ArtifactKind::File { path, content_type } | ArtifactKind::Directory { path, content_type }) =
        &declaration.kind;
    validate_path(path)?;
    if let Some(content_type) = content_type.as_ref().filter(|content_type| !is_valid_content_type(content_type)) {
        let start: String = content_type.chars().take(ARTIFACT_CONTENT_TYPE_BYTES_MAX).collect();
        return invalid(format!(
            "content type {start:?}: use 1 to {ARTIFACT_CONTENT_TYPE_BYTES_MAX} printable ASCII characters, such as \
             text/plain"
        ));
    }
    match &declaration.expires {
        Some(text) if text.parse::<jiff::Timestamp>().is_err() => {
            invalid(format!("expires {text:?}: use a time such as 2030-01-31T12:00:00Z"))
        }
        Some(_) | None => Ok(()),
    }
}

/// Proxies trim surrounding spaces, which would invalidate a signature.
pub(super) fn is_valid_content_type(kind: &str) -> bool {
    let fits = (1..=ARTIFACT_CONTENT_TYPE_BYTES_MAX).contains(&kind.len());
    fits && kind == kind.trim() && kind.bytes().all(|byte| (b' '..=b'~').contains(&byte))
}

/// Checks an artifact's name.
///
/// # Errors
///
/// If the queue accepts no such name, or it is the name of the task's own log.
pub fn validate_name(name: &str) -> Result<(), DeclarationError> {
    let fits = (1..=ARTIFACT_NAME_BYTES_MAX).contains(&name.len());
    // HTTP clients normalize such segments, so the URL would lead elsewhere.
    let plain = name.split('/').all(|segment| !matches!(segment, "" | "." | ".."));
    if !fits || !plain || !name.bytes().all(|byte| (b' '..=b'~').contains(&byte)) {
        return invalid(format!(
            "name {name:?}: use 1 to {ARTIFACT_NAME_BYTES_MAX} printable ASCII characters, without empty, '.' or '..' \
             segments"
        ));
    }
    if name == log::BACKING_NAME || name == log::LIVE_NAME {
        return invalid(format!("name {name:?} is reserved for the task's log; choose another"));
    }
    Ok(())
}

fn validate_path(path: &Path) -> Result<(), DeclarationError> {
    let inside = path.components().all(|component| matches!(component, Component::Normal(_) | Component::CurDir));
    if inside && !path.as_os_str().is_empty() && !path.as_os_str().as_encoded_bytes().contains(&0) {
        Ok(())
    } else {
        invalid(format!("path {path:?}: use a relative path below the task directory, without '..'"))
    }
}

/// Guesses the media type from a path's extension; `application/octet-stream` for an unknown one.
pub(super) fn guess_content_type(path: &Path) -> String {
    let extension = path.extension().and_then(|extension| extension.to_str());
    if extension.is_some_and(|extension| extension.eq_ignore_ascii_case("log")) {
        return log::CONTENT_TYPE.to_owned();
    }
    let guess = mime_guess::from_path(path).first_or_octet_stream();
    // Browsers decode text without a charset as Latin-1.
    if guess.type_() == mime_guess::mime::TEXT && guess.get_param("charset").is_none() {
        return format!("{guess}; charset=utf-8");
    }
    guess.to_string()
}

/// Content that is compressed already is stored as it is, as with generic-worker.
pub(super) fn default_encoding(path: &Path) -> ContentEncoding {
    const COMPRESSED: &str = " 7z bz2 deb dmg flv gif gz jpeg jpg npz png swf tbz tgz webp whl woff woff2 xz zip zst ";
    let extension = path.extension().and_then(|extension| extension.to_str()).unwrap_or_default();
    let is_compressed = !extension.is_empty() && COMPRESSED.contains(&format!(" {extension} "));
    if is_compressed { ContentEncoding::Identity } else { ContentEncoding::Gzip }
}

/// Times of payloads are rounded differently, and generic-worker allows the same.
const EXPIRY_TOLERANCE: jiff::SignedDuration = jiff::SignedDuration::from_secs(1);

/// Says why an artifact that is stored by this time cannot have this `expires`.
pub(crate) fn expiry_error(
    expires: &str,
    definition: &serde_json::Value,
    stored_by: jiff::Timestamp,
) -> Option<String> {
    let expires = expires.parse::<jiff::Timestamp>().ok()?;
    if time_of(definition, "expires").is_some_and(|task| expires.duration_since(task) > EXPIRY_TOLERANCE) {
        Some("it is later than the task's own expires".to_owned())
    } else if stored_by.duration_since(expires) > EXPIRY_TOLERANCE {
        Some(format!("it is before {stored_by}, until when the artifact may be stored"))
    } else {
        None
    }
}

/// A time of a task's definition.
pub(super) fn time_of(definition: &serde_json::Value, key: &str) -> Option<jiff::Timestamp> {
    definition.get(key)?.as_str()?.parse().ok()
}
