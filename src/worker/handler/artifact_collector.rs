//! Iterates over declared artifacts and opens their files, one at a time.
//!
//! The worker decides what a missing artifact means for the task. An entry of a directory that cannot be stored is skipped: a
//! build often leaves a link, a socket or a file of another user there.

use std::collections::HashSet;
use std::ffi::OsStr;
use std::fs::File;
use std::io;
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};

use rustix::fs::{Dir, FileType};
use rustix::io::Errno;

use crate::task::{Artifact, ArtifactBody, ArtifactErrorReason, ContentEncoding};
use journeyman_domain::limits::{ARTIFACT_BYTES_MAX, ARTIFACT_DEPTH_MAX, ARTIFACT_MESSAGE_BYTES_MAX, ARTIFACTS_MAX};

use super::artifact::{self, ArtifactDeclaration, ArtifactKind, Optionality};
use super::log;
use super::safe_open::{self, Root};

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
    /// `None` if the task has removed its directory, and without declarations.
    root: Option<Root>,
    /// Files and directories of the current declaration, the next one last.
    pending_paths: Vec<PendingPath>,
    used_names: HashSet<String>,
    /// Directories that were read: links may lead to one again and again.
    directories: usize,
}

#[derive(Debug, Clone)]
struct PendingPath {
    name: String,
    path: PathBuf,
    kind: PathKind,
    /// The devices and inodes of the directories that it was found in.
    ancestors: Vec<(u64, u64)>,
    content_type: Option<String>,
    expires: Option<String>,
    optionality: Optionality,
    encoding: Option<ContentEncoding>,
}

impl From<ArtifactDeclaration> for PendingPath {
    fn from(ArtifactDeclaration { name, kind, expires, optionality, encoding }: ArtifactDeclaration) -> Self {
        let (path, kind, content_type) = match kind {
            ArtifactKind::File { path, content_type } => (path, PathKind::File, content_type),
            ArtifactKind::Directory { path, content_type } => (path, PathKind::Directory, content_type),
        };
        Self { name, path, kind, ancestors: Vec::new(), content_type, expires, optionality, encoding }
    }
}

/// What a path must be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum PathKind {
    File,
    Directory,
    /// The file or directory is in a declared directory.
    FileOrDirectory,
}

type PathError = (ArtifactErrorReason, String);

impl ArtifactCollector {
    pub(super) fn new(list: Vec<ArtifactDeclaration>, workdir: &Path) -> io::Result<Self> {
        let root = match (!list.is_empty()).then(|| Root::open(workdir)).transpose() {
            // The task may do with its directory what it wants; its artifacts are missing then.
            Err(error) if safe_open::is_of_path(&error) => None,
            opened => opened?,
        };
        // A declared file takes precedence over a file of the same name in a declared directory.
        let is_file = |declaration: &&ArtifactDeclaration| matches!(declaration.kind, ArtifactKind::File { .. });
        let used_names = list.iter().filter(is_file).map(|declaration| declaration.name.clone()).collect();
        Ok(Self { declared: list.into_iter(), root, pending_paths: Vec::new(), used_names, directories: 0 })
    }

    fn collect_path(&mut self, entry: PendingPath) -> Option<CollectedArtifact> {
        match self.open_path(&entry) {
            Ok((file, FileType::Directory)) if entry.kind != PathKind::File => {
                let error = self.list_directory(&entry, &file).err()?;
                // A declared directory of which only a part could be stored is not complete.
                let kind = if error.0 == ArtifactErrorReason::TooLarge { PathKind::Directory } else { entry.kind };
                Some(missing_path(PendingPath { kind, ..entry }, error))
            }
            Ok((file, FileType::RegularFile)) if entry.kind != PathKind::Directory => {
                Some(self.collect_file(entry, file))
            }
            Ok(_) => {
                let what = if entry.kind == PathKind::Directory { "not a directory" } else { "not a regular file" };
                Some(missing_path(entry, irregular(what)))
            }
            Err(error) => Some(missing_path(entry, safe_open::classify_error(&error))),
        }
    }

    fn open_path(&self, entry: &PendingPath) -> io::Result<(File, FileType)> {
        let root = self.root.as_ref().ok_or(Errno::NOENT)?;
        let file = File::from(root.open_below(&entry.path)?);
        let kind = FileType::from_raw_mode(rustix::fs::fstat(&file)?.st_mode);
        Ok((file, kind))
    }

    fn collect_file(&mut self, entry: PendingPath, file: File) -> CollectedArtifact {
        if entry.kind == PathKind::FileOrDirectory
            && let Some(rejected) = self.reject_name(&entry)
        {
            return rejected;
        }
        let bytes = match file.metadata() {
            Ok(metadata) => metadata.len(),
            Err(error) => return missing_path(entry, unreadable(&error)),
        };
        if bytes > ARTIFACT_BYTES_MAX {
            let message = format!("{bytes} bytes exceed the limit of {ARTIFACT_BYTES_MAX}");
            return missing_path(entry, (ArtifactErrorReason::TooLarge, message));
        }
        let PendingPath { name, path, content_type, expires, optionality, encoding, .. } = entry;
        let content_type = content_type.unwrap_or_else(|| artifact::guess_content_type(&path));
        let encoding = encoding.unwrap_or_else(|| artifact::default_encoding(&path));
        let body = ArtifactBody::File { file: file.into(), bytes, content_type, encoding };
        CollectedArtifact::Found(Artifact { name, expires, body }, optionality)
    }

    fn list_directory(&mut self, entry: &PendingPath, directory: &File) -> Result<(), PathError> {
        let folder = rustix::fs::fstat(directory).map_err(|error| unreadable(&error.into()))?;
        let mut ancestors = entry.ancestors.clone();
        if ancestors.contains(&(folder.st_dev, folder.st_ino)) {
            return Err(irregular("a link to a directory that contains it"));
        }
        if ancestors.len() >= ARTIFACT_DEPTH_MAX {
            return Err(irregular(&format!("directories nest deeper than {ARTIFACT_DEPTH_MAX} levels")));
        }
        ancestors.push((folder.st_dev, folder.st_ino));
        self.directories += 1;
        let mut entries = Vec::new();
        for item in Dir::read_from(directory).map_err(|error| unreadable(&error.into()))? {
            let item = item.map_err(|error| unreadable(&error.into()))?;
            let name = OsStr::from_bytes(item.file_name().to_bytes());
            if name == "." || name == ".." {
                continue;
            }
            let others = self.pending_paths.len() + self.used_names.len() + self.directories;
            if entries.len() + others > ARTIFACTS_MAX {
                let message = format!("the task's directories contain more than {ARTIFACTS_MAX} files");
                return Err((ArtifactErrorReason::TooLarge, message));
            }
            entries.push(PendingPath {
                name: format!("{}/{}", entry.name, name.to_string_lossy()),
                path: entry.path.join(name),
                kind: PathKind::FileOrDirectory,
                ancestors: ancestors.clone(),
                ..entry.clone()
            });
        }
        entries.sort_by(|left, right| right.path.cmp(&left.path));
        self.pending_paths.append(&mut entries);
        Ok(())
    }

    /// Rejects a file of a declared directory whose name is invalid or taken.
    fn reject_name(&mut self, entry: &PendingPath) -> Option<CollectedArtifact> {
        if let Err(error) = artifact::validate_name(&entry.name) {
            let message = format!("{error}; the file is not uploaded");
            return Some(CollectedArtifact::Skipped { message });
        }
        (!self.used_names.insert(entry.name.clone())).then(|| CollectedArtifact::Skipped {
            message: format!("artifact {}: the name is taken; {} is not uploaded", entry.name, entry.path.display()),
        })
    }
}

impl Iterator for ArtifactCollector {
    type Item = CollectedArtifact;

    fn next(&mut self) -> Option<CollectedArtifact> {
        loop {
            let entry = self.pending_paths.pop().or_else(|| self.declared.next().map(PendingPath::from))?;
            let item = self.collect_path(entry);
            if item.is_some() {
                return item;
            }
        }
    }
}

fn irregular(message: &str) -> PathError {
    (ArtifactErrorReason::Irregular, message.to_owned())
}

fn unreadable(error: &io::Error) -> PathError {
    (ArtifactErrorReason::Unreadable, error.to_string())
}

fn missing_path(entry: PendingPath, (reason, message): PathError) -> CollectedArtifact {
    let PendingPath { name, path, kind, expires, optionality, .. } = entry;
    let message = format!("artifact {name}: {}: {message}", path.display());
    if optionality == Optionality::Optional || kind == PathKind::FileOrDirectory {
        return CollectedArtifact::Skipped { message };
    }
    let mut shown = message.clone();
    log::truncate_at_char(&mut shown, ARTIFACT_MESSAGE_BYTES_MAX);
    let body = ArtifactBody::Error { reason, message: shown };
    let error = artifact::validate_name(&name).is_ok().then_some(Artifact { name, expires, body });
    CollectedArtifact::Missing { error, message }
}
