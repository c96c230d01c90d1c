//! Goes through declared artifacts and opens their files, one at a time.
//!
//! Decides nothing about the task: that a required artifact is missing is told by [`Item::Missing`], and what follows
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

use super::artifact::{self, Absent, Declaration, Need, What};
use super::beneath::{self, Kind, Walk};
use super::log;

/// What became of one file or declaration. A sentence is for the task's log.
#[derive(Debug)]
pub enum Item {
    /// Ready to be uploaded, and whether the task may succeed without it.
    Found(Artifact, Need),
    /// Required, and not to be had: a completed task becomes a failed one.
    Missing {
        /// Tells the same to whoever asks for the artifact; `None` where not even its name is valid.
        error: Option<Artifact>,
        /// What is missing, and why.
        sentence: String,
    },
    /// Left out without harm.
    Skipped {
        /// What is left out, and why.
        sentence: String,
    },
}

/// The artifacts of a task, one after the other. Holds no file open but the one it hands out.
#[derive(Debug)]
pub struct Collected {
    declared: std::vec::IntoIter<Declaration>,
    root: Option<OwnedFd>,
    /// Files and folders below the declaration at hand, the next one last.
    open: Vec<Entry>,
    seen: HashSet<String>,
    walk: Walk,
}

#[derive(Debug, Clone)]
struct Entry {
    name: String,
    path: PathBuf,
    kind: Kind,
    depth: usize,
    content_type: Option<String>,
    expires: Option<String>,
    need: Need,
}

#[derive(Debug)]
struct Refused {
    absent: Absent,
    why: String,
}

impl Collected {
    pub(super) fn new(list: Vec<Declaration>, workdir: &Path) -> io::Result<Self> {
        let on_disk =
            |declaration: &Declaration| matches!(declaration.what, What::File { .. } | What::Directory { .. });
        let root = list.iter().any(on_disk).then(|| beneath::root(workdir)).transpose()?;
        // A declared file wins over one of the same name that a folder brings along.
        let folder = |declaration: &&Declaration| !matches!(declaration.what, What::Directory { .. });
        let seen = list.iter().filter(folder).map(|declaration| declaration.name.clone()).collect();
        Ok(Self { declared: list.into_iter(), root, open: Vec::new(), seen, walk: Walk::Kernel })
    }

    /// Chooses how paths are walked; [`Walk::Kernel`] unless told.
    #[must_use]
    pub const fn walk(mut self, walk: Walk) -> Self {
        self.walk = walk;
        self
    }

    fn declared(&mut self, declaration: Declaration) -> Option<Item> {
        let Declaration { name, what, expires, need } = declaration;
        let found = |name, expires, body| Some(Item::Found(Artifact { name, expires, body }, need));
        let (path, kind, content_type) = match what {
            What::File { path, content_type } => (path, Kind::File, content_type),
            What::Directory { path } => (path, Kind::Folder, None),
            What::Link { target, content_type } => {
                let body = ArtifactBody::Link { target, content_type };
                return found(name, expires, body);
            }
            What::Reference { url, content_type } => {
                return found(name, expires, ArtifactBody::Reference { url, content_type });
            }
            What::Error { reason, message } => {
                return found(name, expires, told(reason, message));
            }
            What::Inline { bytes, content_type } => return Some(inline(name, expires, &bytes, content_type, need)),
        };
        self.open.push(Entry { name, path, kind, depth: 0, content_type, expires, need });
        None
    }

    fn entry(&mut self, entry: Entry) -> Option<Item> {
        let need = entry.need;
        let outcome = match entry.kind {
            Kind::File => self.file(&entry).map(Some),
            Kind::Folder => self.folder(&entry).map(|()| None),
        };
        match outcome {
            Ok(artifact) => artifact.map(|artifact| Item::Found(artifact, need)),
            Err(refused) => Some(absent(entry, refused)),
        }
    }

    fn file(&self, entry: &Entry) -> Result<Artifact, Refused> {
        let file = File::from(self.descriptor(entry)?);
        let about = file.metadata().map_err(|error| unreadable(&error))?;
        if !about.is_file() {
            return refuse(Absent::Irregular, "it is not a regular file");
        }
        let bytes = about.len();
        if bytes > ARTIFACT_BYTES_MAX {
            let why = format!("it has {bytes} bytes, and {ARTIFACT_BYTES_MAX} is the most");
            return refuse(Absent::TooLarge, why);
        }
        let content_type = entry.content_type.clone().unwrap_or_else(|| artifact::content_type(&entry.path));
        Ok(Artifact {
            name: entry.name.clone(),
            expires: entry.expires.clone(),
            body: ArtifactBody::File { file: Arc::new(file), bytes, content_type },
        })
    }

    /// Puts what a folder holds before everything that is still to come, in the order of the names.
    fn folder(&mut self, entry: &Entry) -> Result<(), Refused> {
        if entry.depth >= ARTIFACT_DEPTH_MAX {
            let why = format!("folders nest deeper than {ARTIFACT_DEPTH_MAX}");
            return refuse(Absent::Irregular, why);
        }
        let descriptor = self.descriptor(entry)?;
        let listing = Dir::read_from(&descriptor).map_err(|error| unreadable(&error.into()))?;
        let mut inside = Vec::new();
        for item in listing {
            let item = item.map_err(|error| unreadable(&error.into()))?;
            let name = item.file_name().to_bytes();
            if name == b"." || name == b".." {
                continue;
            }
            if inside.len() + self.open.len() + self.seen.len() >= ARTIFACTS_MAX {
                let why = format!("the task's folders hold more than {ARTIFACTS_MAX} files");
                return refuse(Absent::Irregular, why);
            }
            inside.push(entry.below(&descriptor, &item));
        }
        inside.sort_by(|left, right| right.path.cmp(&left.path));
        self.open.append(&mut inside);
        Ok(())
    }

    fn descriptor(&self, entry: &Entry) -> Result<OwnedFd, Refused> {
        let Some(root) = &self.root else {
            return refuse(Absent::Unreadable, "the task's folder is not open");
        };
        beneath::open(root.as_fd(), &entry.path, entry.kind, self.walk).map_err(|error| judge(&error, entry.kind))
    }
}

impl Entry {
    fn below(&self, folder: &OwnedFd, item: &rustix::fs::DirEntry) -> Self {
        use std::os::unix::ffi::OsStrExt;
        let name = std::ffi::OsStr::from_bytes(item.file_name().to_bytes());
        let mut kind = item.file_type();
        if kind == FileType::Unknown {
            kind = kind_of(folder, item);
        }
        Self {
            name: format!("{}/{}", self.name, name.to_string_lossy()),
            path: self.path.join(name),
            // Only a hint: what is opened is judged again by its descriptor.
            kind: if kind == FileType::Directory { Kind::Folder } else { Kind::File },
            depth: self.depth + 1,
            ..self.clone()
        }
    }
}

impl Iterator for Collected {
    type Item = Item;

    fn next(&mut self) -> Option<Item> {
        loop {
            let item = if let Some(entry) = self.open.pop() {
                if let Some(item) = self.unfit(&entry) {
                    return Some(item);
                }
                self.entry(entry)
            } else {
                let declaration = self.declared.next()?;
                self.declared(declaration)
            };
            if item.is_some() {
                return item;
            }
        }
    }
}

impl Collected {
    /// A file that a folder brought along, but whose name cannot be used.
    fn unfit(&mut self, entry: &Entry) -> Option<Item> {
        if entry.depth == 0 || entry.kind == Kind::Folder {
            return None;
        }
        if let Err(error) = artifact::check_name(&entry.name) {
            let sentence = format!("{error}; the file is not uploaded");
            return Some(match entry.need {
                Need::Required => Item::Missing { error: None, sentence },
                Need::Optional => Item::Skipped { sentence },
            });
        }
        (!self.seen.insert(entry.name.clone())).then(|| Item::Skipped {
            sentence: format!(
                "artifact {}: another one has the same name; {} is left out",
                entry.name,
                entry.path.display()
            ),
        })
    }
}

fn kind_of(folder: &OwnedFd, item: &rustix::fs::DirEntry) -> FileType {
    let flags = rustix::fs::AtFlags::SYMLINK_NOFOLLOW;
    rustix::fs::statat(folder, item.file_name(), flags)
        .map_or(FileType::Unknown, |about| FileType::from_raw_mode(about.st_mode))
}

fn inline(name: String, expires: Option<String>, bytes: &[u8], content_type: String, need: Need) -> Item {
    match artifact::in_memory(bytes) {
        Ok(file) => {
            let body = ArtifactBody::File { file: Arc::new(file), bytes: bytes.len() as u64, content_type };
            Item::Found(Artifact { name, expires, body }, need)
        }
        Err(error) => {
            let sentence = format!("artifact {name}: {error}");
            let body = told(Absent::Unreadable, sentence.clone());
            Item::Missing { error: Some(Artifact { name, expires, body }), sentence }
        }
    }
}

fn absent(entry: Entry, refused: Refused) -> Item {
    let Entry { name, path, expires, need, .. } = entry;
    let sentence = format!("artifact {name}: {}: {}", path.display(), refused.why);
    if need == Need::Optional {
        return Item::Skipped { sentence };
    }
    let body = told(refused.absent, sentence.clone());
    let error = artifact::check_name(&name).is_ok().then_some(Artifact { name, expires, body });
    Item::Missing { error, sentence }
}

fn told(reason: Absent, mut message: String) -> ArtifactBody {
    log::cut(&mut message, ARTIFACT_MESSAGE_BYTES_MAX);
    ArtifactBody::Error { reason: reason.as_str(), message }
}

fn refuse<T>(absent: Absent, why: impl Into<String>) -> Result<T, Refused> {
    let why = why.into();
    Err(Refused { absent, why })
}

fn unreadable(error: &io::Error) -> Refused {
    let (absent, why) = (Absent::Unreadable, error.to_string());
    Refused { absent, why }
}

fn judge(error: &io::Error, kind: Kind) -> Refused {
    let (absent, why) = match error.raw_os_error().map(Errno::from_raw_os_error) {
        Some(Errno::NOENT) => (Absent::Missing, "there is no such file or folder"),
        Some(Errno::NOTDIR) => match kind {
            Kind::File => (Absent::Missing, "a part of the path is no folder"),
            Kind::Folder => (Absent::Irregular, "it is not a folder"),
        },
        Some(Errno::LOOP) => (Absent::Irregular, "the path goes through a symbolic link, which is not followed"),
        Some(Errno::XDEV) => (Absent::Irregular, "the path leads out of the task's folder"),
        Some(Errno::NXIO | Errno::NODEV) => (Absent::Irregular, "it is not a regular file"),
        Some(Errno::ACCESS | Errno::PERM) => (Absent::Unreadable, "permission denied"),
        Some(_) | None => return unreadable(error),
    };
    let why = why.to_owned();
    Refused { absent, why }
}
