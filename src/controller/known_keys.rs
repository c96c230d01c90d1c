//! Persists the keys that have queues: the broker does not report requests that arrive in them.

use std::collections::BTreeSet;
use std::io;
use std::path::PathBuf;

use crate::domain::group::Key;

const KEYS: &str = "keys";
const KEYS_FRESH: &str = "keys.new";

pub(super) struct KnownKeys {
    folder: Option<PathBuf>,
    written: BTreeSet<Key>,
}

impl KnownKeys {
    pub(super) const fn new(folder: Option<PathBuf>) -> Self {
        Self { folder, written: BTreeSet::new() }
    }

    pub(super) fn load(&self) -> Vec<Key> {
        let Some(folder) = &self.folder else { return Vec::new() };
        let bytes = std::fs::read(folder.join(KEYS)).unwrap_or_default();
        let keys: Vec<String> = serde_json::from_slice(&bytes).unwrap_or_default();
        keys.iter().filter_map(|key| Key::new(key)).collect()
    }

    pub(super) fn store<'a>(&mut self, keys: impl Iterator<Item = &'a Key> + Clone) {
        let Some(folder) = &self.folder else { return };
        // Both are sorted.
        if keys.clone().eq(&self.written) {
            return;
        }
        let (path, fresh) = (folder.join(KEYS), folder.join(KEYS_FRESH));
        let texts: Vec<&str> = keys.clone().map(Key::as_str).collect();
        let written = serde_json::to_vec(&texts)
            .map_err(io::Error::other)
            .and_then(|bytes| std::fs::write(&fresh, bytes))
            .and_then(|()| std::fs::rename(&fresh, &path));
        if let Err(error) = written {
            tracing::warn!(%error, path = %path.display(), "cannot store the known keys");
        }
        self.written = keys.cloned().collect();
    }
}
