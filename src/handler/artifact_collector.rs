//! Goes through declared artifacts and opens their files, one at a time.
//!
//! Decides nothing about the task: that a required artifact is missing is told by [`CollectedArtifact::Missing`], and what follows
//! from it is up to the runtime.

use std::collections::HashSet;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::fs::{Dir, FileType};
use rustix::io::Errno;

use crate::limits::{ARTIFACT_BYTES_MAX, ARTIFACT_DEPTH_MAX, ARTIFACT_MESSAGE_BYTES_MAX, ARTIFACTS_MAX};
use crate::source::{Artifact, ArtifactBody};

use super::artifact::{self, ArtifactDeclaration, ArtifactErrorReason, ArtifactKind, Optionality};
use super::log;
use super::safe_open::{self, PathKind, PathResolver};

/// What became of one file or declaration. A sentence is for the task's log.
#[derive(Debug)]
pub enum CollectedArtifact {
    /// Ready to be uploaded, and whether the task may succeed without it.
    Found(Artifact, Optionality),
    /// Required, and not to be had: a completed task becomes a failed one.
    Missing {
        /// Tells the same to whoever asks for the artifact; `None` where not even its name is valid.
        error: Option<Artifact>,
        /// What is missing, and why.
        message: String,
    },
    /// Left out without harm.
    Skipped {
        /// What is left out, and why.
        message: String,
    },
}

/// The artifacts of a task, one after the other. Holds no file open but the one it hands out.
#[derive(Debug)]
pub struct ArtifactCollector {
    declared: std::vec::IntoIter<ArtifactDeclaration>,
    root: Option<OwnedFd>,
    /// Files and folders below the declaration at hand, the next one last.
    pending_paths: Vec<PendingPath>,
    used_names: HashSet<String>,
    resolver: PathResolver,
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
        // A declared file wins over one of the same name that a folder brings along.
        let folder = |declaration: &&ArtifactDeclaration| !matches!(declaration.kind, ArtifactKind::Directory { .. });
        let seen = list.iter().filter(folder).map(|declaration| declaration.name.clone()).collect();
        Ok(Self {
            declared: list.into_iter(),
            root,
            pending_paths: Vec::new(),
            used_names: seen,
            resolver: PathResolver::Kernel,
        })
    }

    /// Chooses how paths are walked; [`PathResolver::Kernel`] unless told.
    #[must_use]
    pub const fn resolver(mut self, walk: PathResolver) -> Self {
        self.resolver = walk;
        self
    }

    fn collect_declaration(&mut self, declaration: ArtifactDeclaration) -> Option<CollectedArtifact> {
        let ArtifactDeclaration { name, kind: what, expires, optionality: need } = declaration;
        let found = |name, expires, body| Some(CollectedArtifact::Found(Artifact { name, expires, body }, need));
        let (path, kind, content_type) = match what {
            ArtifactKind::File { path, content_type } => (path, PathKind::File, content_type),
            ArtifactKind::Directory { path } => (path, PathKind::Directory, None),
            ArtifactKind::Link { target, content_type } => {
                let body = ArtifactBody::Link { target, content_type };
                return found(name, expires, body);
            }
            ArtifactKind::Reference { url, content_type } => {
                return found(name, expires, ArtifactBody::Reference { url, content_type });
            }
            ArtifactKind::Error { reason, message } => {
                return found(name, expires, error_body(reason, message));
            }
            ArtifactKind::Inline { bytes, content_type } => {
                return Some(collect_inline(name, expires, &bytes, content_type, need));
            }
        };
        self.pending_paths.push(PendingPath { name, path, kind, depth: 0, content_type, expires, optionality: need });
        None
    }

    fn collect_path(&mut self, entry: PendingPath) -> Option<CollectedArtifact> {
        let need = entry.optionality;
        let outcome = match entry.kind {
            PathKind::File => self.open_file(&entry).map(Some),
            PathKind::Directory => self.list_directory(&entry).map(|()| None),
        };
        match outcome {
            Ok(artifact) => artifact.map(|artifact| CollectedArtifact::Found(artifact, need)),
            Err(refused) => Some(missing_artifact(entry, refused)),
        }
    }

    fn open_file(&self, entry: &PendingPath) -> Result<Artifact, PathError> {
        let file = File::from(self.open_path(entry)?);
        let about = file.metadata().map_err(|error| unreadable_path(&error))?;
        if !about.is_file() {
            return path_error(ArtifactErrorReason::Irregular, "it is not a regular file");
        }
        let bytes = about.len();
        if bytes > ARTIFACT_BYTES_MAX {
            let why = format!("it has {bytes} bytes, and {ARTIFACT_BYTES_MAX} is the most");
            return path_error(ArtifactErrorReason::TooLarge, why);
        }
        let content_type = entry.content_type.clone().unwrap_or_else(|| artifact::guess_content_type(&entry.path));
        Ok(Artifact {
            name: entry.name.clone(),
            expires: entry.expires.clone(),
            body: ArtifactBody::File { file: Arc::new(file), bytes, content_type },
        })
    }

    /// Puts what a folder holds before everything that is still to come, in the order of the names.
    fn list_directory(&mut self, entry: &PendingPath) -> Result<(), PathError> {
        if entry.depth >= ARTIFACT_DEPTH_MAX {
            let why = format!("folders nest deeper than {ARTIFACT_DEPTH_MAX}");
            return path_error(ArtifactErrorReason::Irregular, why);
        }
        let descriptor = self.open_path(entry)?;
        let listing = Dir::read_from(&descriptor).map_err(|error| unreadable_path(&error.into()))?;
        let mut inside = Vec::new();
        for item in listing {
            let item = item.map_err(|error| unreadable_path(&error.into()))?;
            let name = item.file_name().to_bytes();
            if name == b"." || name == b".." {
                continue;
            }
            if inside.len() + self.pending_paths.len() + self.used_names.len() >= ARTIFACTS_MAX {
                let why = format!("the task's folders hold more than {ARTIFACTS_MAX} files");
                return path_error(ArtifactErrorReason::Irregular, why);
            }
            inside.push(entry.child(&descriptor, &item));
        }
        inside.sort_by(|left, right| right.path.cmp(&left.path));
        self.pending_paths.append(&mut inside);
        Ok(())
    }

    fn open_path(&self, entry: &PendingPath) -> Result<OwnedFd, PathError> {
        let Some(root) = &self.root else {
            return path_error(ArtifactErrorReason::Unreadable, "the task's folder is not open");
        };
        safe_open::open(root.as_fd(), &entry.path, entry.kind, self.resolver)
            .map_err(|error| classify_open_error(&error, entry.kind))
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
            // Only a hint: what is opened is judged again by its descriptor.
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
    /// A file that a folder brought along, but whose name cannot be used.
    fn reject_name(&mut self, entry: &PendingPath) -> Option<CollectedArtifact> {
        if entry.depth == 0 || entry.kind == PathKind::Directory {
            return None;
        }
        if let Err(error) = artifact::validate_name(&entry.name) {
            let sentence = format!("{error}; the file is not uploaded");
            return Some(match entry.optionality {
                Optionality::Required => CollectedArtifact::Missing { error: None, message: sentence },
                Optionality::Optional => CollectedArtifact::Skipped { message: sentence },
            });
        }
        (!self.used_names.insert(entry.name.clone())).then(|| CollectedArtifact::Skipped {
            message: format!(
                "artifact {}: another one has the same name; {} is left out",
                entry.name,
                entry.path.display()
            ),
        })
    }
}

fn file_type_of(folder: &OwnedFd, item: &rustix::fs::DirEntry) -> FileType {
    let flags = rustix::fs::AtFlags::SYMLINK_NOFOLLOW;
    rustix::fs::statat(folder, item.file_name(), flags)
        .map_or(FileType::Unknown, |about| FileType::from_raw_mode(about.st_mode))
}

fn collect_inline(
    name: String,
    expires: Option<String>,
    bytes: &[u8],
    content_type: String,
    need: Optionality,
) -> CollectedArtifact {
    match artifact::memory_file(bytes) {
        Ok(file) => {
            let body = ArtifactBody::File { file: Arc::new(file), bytes: bytes.len() as u64, content_type };
            CollectedArtifact::Found(Artifact { name, expires, body }, need)
        }
        Err(error) => {
            let sentence = format!("artifact {name}: {error}");
            let body = error_body(ArtifactErrorReason::Unreadable, sentence.clone());
            CollectedArtifact::Missing { error: Some(Artifact { name, expires, body }), message: sentence }
        }
    }
}

fn missing_artifact(entry: PendingPath, refused: PathError) -> CollectedArtifact {
    let PendingPath { name, path, expires, optionality: need, .. } = entry;
    let sentence = format!("artifact {name}: {}: {}", path.display(), refused.message);
    if need == Optionality::Optional {
        return CollectedArtifact::Skipped { message: sentence };
    }
    let body = error_body(refused.reason, sentence.clone());
    let error = artifact::validate_name(&name).is_ok().then_some(Artifact { name, expires, body });
    CollectedArtifact::Missing { error, message: sentence }
}

fn error_body(reason: ArtifactErrorReason, mut message: String) -> ArtifactBody {
    log::truncate_at_char(&mut message, ARTIFACT_MESSAGE_BYTES_MAX);
    ArtifactBody::Error { reason: reason.as_str(), message }
}

fn path_error<T>(absent: ArtifactErrorReason, why: impl Into<String>) -> Result<T, PathError> {
    let why = why.into();
    Err(PathError { reason: absent, message: why })
}

fn unreadable_path(error: &io::Error) -> PathError {
    let (absent, why) = (ArtifactErrorReason::Unreadable, error.to_string());
    PathError { reason: absent, message: why }
}

fn classify_open_error(error: &io::Error, kind: PathKind) -> PathError {
    let (absent, why) = match error.raw_os_error().map(Errno::from_raw_os_error) {
        Some(Errno::NOENT) => (ArtifactErrorReason::Missing, "there is no such file or folder"),
        Some(Errno::NOTDIR) => match kind {
            PathKind::File => (ArtifactErrorReason::Missing, "a part of the path is no folder"),
            PathKind::Directory => (ArtifactErrorReason::Irregular, "it is not a folder"),
        },
        Some(Errno::LOOP) => {
            (ArtifactErrorReason::Irregular, "the path goes through a symbolic link, which is not followed")
        }
        Some(Errno::XDEV) => (ArtifactErrorReason::Irregular, "the path leads out of the task's folder"),
        Some(Errno::NXIO | Errno::NODEV) => (ArtifactErrorReason::Irregular, "it is not a regular file"),
        Some(Errno::ACCESS | Errno::PERM) => (ArtifactErrorReason::Unreadable, "permission denied"),
        Some(_) | None => return unreadable_path(error),
    };
    let why = why.to_owned();
    PathError { reason: absent, message: why }
}
