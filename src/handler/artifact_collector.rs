//! Iterates over declared artifacts and opens their files, one at a time.
//!
//! The worker decides what a missing artifact means for the task.

use std::collections::HashSet;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::fs::{Dir, FileType};

use crate::limits::{ARTIFACT_BYTES_MAX, ARTIFACT_DEPTH_MAX, ARTIFACT_MESSAGE_BYTES_MAX, ARTIFACTS_MAX};
use crate::task::{Artifact, ArtifactBody, ArtifactErrorReason};

use super::artifact::{self, ArtifactDeclaration, ArtifactKind, Optionality};
use super::log;
use super::safe_open::{self, PathKind};

#[derive(Debug)]
pub enum CollectedArtifact {
    /// Ready to be uploaded.
    Found(Artifact, Optionality),
    /// A required artifact is missing. `error` is the artifact to upload in its place; `None` if its name is invalid.
    Missing {
        error: Option<Artifact>,
        message: String,
    },
    Skipped {
        message: String,
    },
}

/// Holds at most one file open: the one it returned last.
#[derive(Debug)]
pub struct ArtifactCollector {
    declared: std::vec::IntoIter<ArtifactDeclaration>,
    root: Option<OwnedFd>,
    /// Files and directories of the current declaration, the next one last.
    pending_paths: Vec<PendingPath>,
    used_names: HashSet<String>,
}

#[derive(Debug, Clone)]
struct PendingPath {
    name: String,
    path: PathBuf,
    kind: PathKind,
    depth: usize,
    content_type: Option<String>,
    expires: Option<String>,
    optionality: Optionality,
}

#[derive(Debug)]
struct PathError {
    reason: ArtifactErrorReason,
    message: String,
}

impl ArtifactCollector {
    pub(super) fn new(list: Vec<ArtifactDeclaration>, workdir: &Path) -> io::Result<Self> {
        let on_disk = |declaration: &ArtifactDeclaration| {
            matches!(declaration.kind, ArtifactKind::File { .. } | ArtifactKind::Directory { .. })
        };
        let root = list.iter().any(on_disk).then(|| safe_open::open_root(workdir)).transpose()?;
        // A declared file takes precedence over a file of the same name in a declared directory.
        let is_named = |declaration: &&ArtifactDeclaration| !matches!(declaration.kind, ArtifactKind::Directory { .. });
        let used_names = list.iter().filter(is_named).map(|declaration| declaration.name.clone()).collect();
        Ok(Self { declared: list.into_iter(), root, pending_paths: Vec::new(), used_names })
    }

    fn collect_declaration(&mut self, declaration: ArtifactDeclaration) -> Option<CollectedArtifact> {
        let ArtifactDeclaration { name, kind, expires, optionality } = declaration;
        let found = |name, expires, body| Some(CollectedArtifact::Found(Artifact { name, expires, body }, optionality));
        let (path, kind, content_type) = match kind {
            ArtifactKind::File { path, content_type } => (path, PathKind::File, content_type),
            ArtifactKind::Directory { path } => (path, PathKind::Directory, None),
            ArtifactKind::Body(ArtifactBody::Error { reason, message }) => {
                return found(name, expires, error_body(reason, message));
            }
            ArtifactKind::Body(body) => return found(name, expires, body),
            ArtifactKind::Inline { bytes, content_type } => {
                return Some(collect_inline(name, expires, &bytes, content_type, optionality));
            }
        };
        self.pending_paths.push(PendingPath { name, path, kind, depth: 0, content_type, expires, optionality });
        None
    }

    fn collect_path(&mut self, entry: PendingPath) -> Option<CollectedArtifact> {
        let optionality = entry.optionality;
        let outcome = match entry.kind {
            PathKind::File => self.open_file(&entry).map(Some),
            PathKind::Directory => self.list_directory(&entry).map(|()| None),
        };
        match outcome {
            Ok(artifact) => artifact.map(|artifact| CollectedArtifact::Found(artifact, optionality)),
            Err(error) => Some(missing_artifact(entry, error)),
        }
    }

    fn open_file(&self, entry: &PendingPath) -> Result<Artifact, PathError> {
        let file = File::from(self.open_path(entry)?);
        let metadata = file.metadata().map_err(|error| unreadable_path(&error))?;
        if !metadata.is_file() {
            return path_error(ArtifactErrorReason::Irregular, "not a regular file");
        }
        let bytes = metadata.len();
        if bytes > ARTIFACT_BYTES_MAX {
            let message = format!("{bytes} bytes exceed the limit of {ARTIFACT_BYTES_MAX}");
            return path_error(ArtifactErrorReason::TooLarge, message);
        }
        let content_type = entry.content_type.clone().unwrap_or_else(|| artifact::guess_content_type(&entry.path));
        Ok(Artifact {
            name: entry.name.clone(),
            expires: entry.expires.clone(),
            body: ArtifactBody::File { file: Arc::new(file), bytes, content_type },
        })
    }

    fn list_directory(&mut self, entry: &PendingPath) -> Result<(), PathError> {
        if entry.depth >= ARTIFACT_DEPTH_MAX {
            let message = format!("directories nest deeper than {ARTIFACT_DEPTH_MAX} levels");
            return path_error(ArtifactErrorReason::Irregular, message);
        }
        let descriptor = self.open_path(entry)?;
        let listing = Dir::read_from(&descriptor).map_err(|error| unreadable_path(&error.into()))?;
        let mut entries = Vec::new();
        for item in listing {
            let item = item.map_err(|error| unreadable_path(&error.into()))?;
            let name = item.file_name().to_bytes();
            if name == b"." || name == b".." {
                continue;
            }
            if entries.len() + self.pending_paths.len() + self.used_names.len() >= ARTIFACTS_MAX {
                let message = format!("the task's directories contain more than {ARTIFACTS_MAX} files");
                return path_error(ArtifactErrorReason::Irregular, message);
            }
            entries.push(entry.child(&descriptor, &item));
        }
        entries.sort_by(|left, right| right.path.cmp(&left.path));
        self.pending_paths.append(&mut entries);
        Ok(())
    }

    fn open_path(&self, entry: &PendingPath) -> Result<OwnedFd, PathError> {
        let Some(root) = &self.root else {
            return path_error(ArtifactErrorReason::Unreadable, "the task directory is not open");
        };
        safe_open::open(root.as_fd(), &entry.path, entry.kind).map_err(|error| {
            let (reason, message) = safe_open::classify_error(&error, entry.kind);
            PathError { reason, message }
        })
    }
}

impl PendingPath {
    fn child(&self, folder: &OwnedFd, item: &rustix::fs::DirEntry) -> Self {
        use std::os::unix::ffi::OsStrExt;
        let name = std::ffi::OsStr::from_bytes(item.file_name().to_bytes());
        let mut kind = item.file_type();
        if kind == FileType::Unknown {
            kind = file_type_of(folder, item);
        }
        Self {
            name: format!("{}/{}", self.name, name.to_string_lossy()),
            path: self.path.join(name),
            // Only a hint: the open descriptor is checked again.
            kind: if kind == FileType::Directory { PathKind::Directory } else { PathKind::File },
            depth: self.depth + 1,
            ..self.clone()
        }
    }
}

impl Iterator for ArtifactCollector {
    type Item = CollectedArtifact;

    fn next(&mut self) -> Option<CollectedArtifact> {
        loop {
            let item = if let Some(entry) = self.pending_paths.pop() {
                if let Some(item) = self.reject_name(&entry) {
                    return Some(item);
                }
                self.collect_path(entry)
            } else {
                let declaration = self.declared.next()?;
                self.collect_declaration(declaration)
            };
            if item.is_some() {
                return item;
            }
        }
    }
}

impl ArtifactCollector {
    /// Rejects a file of a declared directory whose name is invalid or taken.
    fn reject_name(&mut self, entry: &PendingPath) -> Option<CollectedArtifact> {
        if entry.depth == 0 || entry.kind == PathKind::Directory {
            return None;
        }
        if let Err(error) = artifact::validate_name(&entry.name) {
            let message = format!("{error}; the file is not uploaded");
            return Some(match entry.optionality {
                Optionality::Required => CollectedArtifact::Missing { error: None, message },
                Optionality::Optional => CollectedArtifact::Skipped { message },
            });
        }
        (!self.used_names.insert(entry.name.clone())).then(|| CollectedArtifact::Skipped {
            message: format!("artifact {}: the name is taken; {} is not uploaded", entry.name, entry.path.display()),
        })
    }
}

fn file_type_of(folder: &OwnedFd, item: &rustix::fs::DirEntry) -> FileType {
    let flags = rustix::fs::AtFlags::SYMLINK_NOFOLLOW;
    rustix::fs::statat(folder, item.file_name(), flags)
        .map_or(FileType::Unknown, |stat| FileType::from_raw_mode(stat.st_mode))
}

fn collect_inline(
    name: String,
    expires: Option<String>,
    bytes: &[u8],
    content_type: String,
    optionality: Optionality,
) -> CollectedArtifact {
    match artifact::memory_file(bytes) {
        Ok(file) => {
            let body = ArtifactBody::File { file: Arc::new(file), bytes: bytes.len() as u64, content_type };
            CollectedArtifact::Found(Artifact { name, expires, body }, optionality)
        }
        Err(error) => {
            let message = format!("artifact {name}: {error}");
            let body = error_body(ArtifactErrorReason::Unreadable, message.clone());
            CollectedArtifact::Missing { error: Some(Artifact { name, expires, body }), message }
        }
    }
}

fn missing_artifact(entry: PendingPath, error: PathError) -> CollectedArtifact {
    let PendingPath { name, path, expires, optionality, .. } = entry;
    let message = format!("artifact {name}: {}: {}", path.display(), error.message);
    if optionality == Optionality::Optional {
        return CollectedArtifact::Skipped { message };
    }
    let body = error_body(error.reason, message.clone());
    let error = artifact::validate_name(&name).is_ok().then_some(Artifact { name, expires, body });
    CollectedArtifact::Missing { error, message }
}

fn error_body(reason: ArtifactErrorReason, mut message: String) -> ArtifactBody {
    log::truncate_at_char(&mut message, ARTIFACT_MESSAGE_BYTES_MAX);
    ArtifactBody::Error { reason, message }
}

fn path_error<T>(reason: ArtifactErrorReason, message: impl Into<String>) -> Result<T, PathError> {
    Err(PathError { reason, message: message.into() })
}

fn unreadable_path(error: &io::Error) -> PathError {
    PathError { reason: ArtifactErrorReason::Unreadable, message: error.to_string() }
}
