//! Mounts as payloads and configurations declare them, in the format of generic-worker.

use std::path::{Component, Path, PathBuf};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde::de::value::{Error, StrDeserializer};
use serde::{Deserialize, Serialize};
use url::Url;

use journeyman_domain::id::TaskId;
use journeyman_platform::unpack::{ArchiveFormat, Compression};

/// A file or directory to place before the commands run.
#[derive(Debug, Clone, Deserialize)]
#[cfg_attr(debug_assertions, derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct PayloadMount {
    /// Path of a file to place, below the task directory.
    pub file: Option<String>,
    /// Path of a directory to place, below the task directory.
    pub directory: Option<String>,
    /// Name of the cache that the directory is, kept from task to task.
    pub cache_name: Option<String>,
    /// What the file contains, the directory, or a new cache.
    pub content: Option<PayloadContent>,
    /// How the content is packed: `tar.bz2`, `tar.gz`, `tar.lz4`, `tar.xz`, `tar.zst` or `zip` for a directory; `bz2`, `gz`, `lz4`, `xz` or `zst` for a file.
    pub format: Option<String>,
}

/// Content to place.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(debug_assertions, derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct PayloadContent {
    /// Name of an artifact, of the task with `taskId` or the one that the index has under `namespace`.
    pub artifact: Option<String>,
    /// The task of the artifact, which must be one of the task's dependencies.
    pub task_id: Option<String>,
    /// The namespace in the index.
    pub namespace: Option<String>,
    /// An address to download from.
    pub url: Option<String>,
    /// The content itself, as text.
    pub raw: Option<String>,
    /// The content itself, in base64.
    pub base64: Option<String>,
    /// Digest of what is downloaded, in hexadecimal digits.
    pub sha256: Option<String>,
}

/// A mount that can be placed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mount {
    /// Relative to the task directory, and below it.
    pub path: PathBuf,
    pub kind: MountKind,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum MountKind {
    File { content: Content, compression: Option<Compression> },
    Directory { content: Content, format: ArchiveFormat },
    Cache { name: String, preload: Option<(Content, ArchiveFormat)> },
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Content {
    Inline(Vec<u8>),
    Remote { origin: Origin, sha256: Option<String> },
}

/// The place content is downloaded from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Origin {
    Artifact { task: TaskId, name: String },
    Indexed { namespace: String, name: String },
    Url(Url),
}

impl MountKind {
    pub(super) const fn content(&self) -> Option<&Content> {
        match self {
            Self::File { content, .. } | Self::Directory { content, .. } => Some(content),
            Self::Cache { preload: Some((content, _)), .. } => Some(content),
            Self::Cache { preload: None, .. } => None,
        }
    }
}

impl Mount {
    /// # Errors
    ///
    /// The place in the mount and what is wrong there.
    pub fn parse(mount: PayloadMount) -> Result<Self, String> {
        let PayloadMount { file, directory, cache_name, content, format } = mount;
        let content = content.map(Content::parse).transpose()?;
        let (path, kind) = match (file, directory, cache_name) {
            (Some(file), None, None) => {
                let content = content.ok_or("/content: missing")?;
                let compression = format.as_deref().map(parse_compression).transpose()?;
                (parse_path("file", &file)?, MountKind::File { content, compression })
            }
            (None, Some(directory), None) => {
                let (content, format) =
                    content.zip(format).ok_or(": a directory needs `content` and `format`, or `cacheName`")?;
                (parse_path("directory", &directory)?, MountKind::Directory { content, format: parse_format(&format)? })
            }
            (None, Some(directory), Some(name)) => {
                if name.is_empty() {
                    return Err("/cacheName: empty".to_owned());
                }
                let preload = match (content, format) {
                    (Some(content), Some(format)) => Some((content, parse_format(&format)?)),
                    (None, None) => None,
                    _ => return Err(": `content` and `format` go together".to_owned()),
                };
                (parse_path("directory", &directory)?, MountKind::Cache { name, preload })
            }
            _ => return Err(": use `file`, or `directory` with or without `cacheName`".to_owned()),
        };
        if path.as_os_str().is_empty() && !matches!(kind, MountKind::Directory { .. }) {
            return Err(": the task directory itself is no place for it".to_owned());
        }
        Ok(Self { path, kind })
    }
}

impl Content {
    fn parse(content: PayloadContent) -> Result<Self, String> {
        let PayloadContent { artifact, task_id, namespace, url, raw, base64, sha256 } = content;
        if sha256.as_ref().is_some_and(|text| text.len() != 64 || !text.bytes().all(|byte| byte.is_ascii_hexdigit())) {
            return Err("/content/sha256: not 64 hexadecimal digits".to_owned());
        }
        let origin = match (artifact, task_id, namespace, url, raw, base64) {
            (Some(name), Some(task), None, None, None, None) => {
                let task = TaskId::parse(&task).ok_or("/content/taskId: not the id of a task")?;
                Origin::Artifact { task, name }
            }
            (Some(name), None, Some(namespace), None, None, None) => Origin::Indexed { namespace, name },
            (None, None, None, Some(url), None, None) => {
                let url =
                    Url::parse(&url).ok().filter(|url| matches!(url.scheme(), "http" | "https") && url.has_host());
                Origin::Url(url.ok_or("/content/url: not an http or https URL")?)
            }
            (None, None, None, None, Some(raw), None) if sha256.is_none() => return Ok(Self::Inline(raw.into_bytes())),
            (None, None, None, None, None, Some(text)) if sha256.is_none() => {
                return Ok(Self::Inline(STANDARD.decode(text).map_err(|_| "/content/base64: not base64")?));
            }
            _ => {
                let what = "use `artifact` with `taskId` or `namespace`, `url`, `raw` or `base64`";
                return Err(format!("/content: {what}, and `sha256` for what is downloaded"));
            }
        };
        Ok(Self::Remote { origin, sha256: sha256.map(|text| text.to_ascii_lowercase()) })
    }
}

fn parse_path(key: &str, text: &str) -> Result<PathBuf, String> {
    let path = Path::new(text);
    let is_below = path.components().all(|component| matches!(component, Component::Normal(_) | Component::CurDir));
    if text.is_empty() || text.contains('\0') || !is_below {
        return Err(format!("/{key}: use a relative path below the task directory, without '..'"));
    }
    Ok(path.components().filter(|component| *component != Component::CurDir).collect())
}

pub(super) fn is_archive_format(text: &str) -> bool {
    parse_format(text).is_ok()
}

fn parse_format(text: &str) -> Result<ArchiveFormat, String> {
    let unknown = || {
        format!(
            "/format: {text:?} is not supported for a directory; use tar.bz2, tar.gz, tar.lz4, tar.xz, tar.zst or zip"
        )
    };
    ArchiveFormat::deserialize(StrDeserializer::<Error>::new(text)).map_err(|_| unknown())
}

fn parse_compression(text: &str) -> Result<Compression, String> {
    let unknown = || format!("/format: {text:?} is not supported for a file; use bz2, gz, lz4, xz or zst");
    Compression::deserialize(StrDeserializer::<Error>::new(text)).map_err(|_| unknown())
}

impl Origin {
    /// The whole address, which may be secret.
    pub(super) fn identity(&self) -> String {
        if let Self::Url(url) = self { url.to_string() } else { self.to_string() }
    }
}

/// Says where content comes from, without what may be secret in its address.
impl std::fmt::Display for Origin {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Artifact { task, name } => write!(out, "artifact {name} of {task}"),
            Self::Indexed { namespace, name } => write!(out, "artifact {name} of {namespace}"),
            Self::Url(url) => {
                let port = url.port().map_or_else(String::new, |port| format!(":{port}"));
                write!(out, "{}://{}{port}{}", url.scheme(), url.host_str().unwrap_or_default(), url.path())
            }
        }
    }
}
