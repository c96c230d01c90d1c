//! The mounts of a handler's section.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use journeyman_platform::settings::values::Url;

use super::payload::{Mount, PayloadContent, PayloadMount, is_archive_format};

/// Content that each task of a handler finds in its directory.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(debug_assertions, derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct ConfiguredMount {
    /// Address to download from. It is downloaded once and kept while its `ETag` is the same, or for ever with `sha256`.
    pub url: Url,
    /// Digest of what is downloaded, in hexadecimal digits.
    pub sha256: Option<String>,
    /// How it is packed: `tar.bz2`, `tar.gz`, `tar.lz4`, `tar.xz`, `tar.zst` or `zip` make a directory; `bz2`, `gz`, `lz4`, `xz`, `zst`, and no format, a file.
    pub format: Option<String>,
}

/// The mounts of a configuration: content by its path, then caches, whose paths are known by their names.
///
/// # Errors
///
/// The key and what is wrong with it.
pub fn configured_mounts(
    mounts: &BTreeMap<String, ConfiguredMount>,
    caches: &BTreeMap<String, String>,
) -> Result<Vec<Mount>, String> {
    let content = mounts.iter().map(|(path, ConfiguredMount { url, sha256, format })| {
        let (url, sha256) = (Some(url.as_str().to_owned()), sha256.clone());
        let is_directory = format.as_deref().is_some_and(is_archive_format);
        let mount = PayloadMount {
            file: (!is_directory).then(|| path.clone()),
            directory: is_directory.then(|| path.clone()),
            cache_name: None,
            content: Some(PayloadContent { url, sha256, ..PayloadContent::default() }),
            format: format.clone(),
        };
        Mount::parse(mount).map_err(|why| format!("mounts.{path:?}{why}"))
    });
    let caches = caches.iter().map(|(name, path)| {
        let (directory, cache_name) = (Some(path.clone()), Some(name.clone()));
        let mount = PayloadMount { file: None, directory, cache_name, content: None, format: None };
        Mount::parse(mount).map_err(|why| format!("caches.{name:?}{why}"))
    });
    let mounts: Vec<Mount> = caches.chain(content).collect::<Result<_, _>>()?;
    let mut paths = BTreeSet::new();
    match mounts.iter().find(|mount| !paths.insert(&mount.path)) {
        Some(mount) => Err(format!("two of `mounts` and `caches` have the path {}", mount.path.display())),
        None => Ok(mounts),
    }
}
