//! Who was told to go, written down for the next controller: a worker that is told a second time hands back what it runs.

use std::collections::BTreeSet;
use std::io;
use std::path::{Path, PathBuf};

use super::{Found, Standing};

const TOLD: &str = "told";
const TOLD_FRESH: &str = "told.new";

pub(super) struct Told {
    folder: PathBuf,
    ids: BTreeSet<String>,
}

impl Told {
    pub(super) fn new(folder: &Path) -> Self {
        Self { folder: folder.to_owned(), ids: BTreeSet::new() }
    }

    /// Takes over what another controller has written.
    pub(super) fn read(&mut self) {
        let bytes = std::fs::read(self.folder.join(TOLD)).unwrap_or_default();
        self.ids = serde_json::from_slice(&bytes).unwrap_or_default();
    }

    /// One was told.
    pub(super) fn add(&mut self, id: &str) {
        if self.ids.insert(id.to_owned()) {
            self.write();
        }
    }

    /// Forgets all but these.
    pub(super) fn keep(&mut self, is_there: impl Fn(&str) -> bool) {
        let before = self.ids.len();
        self.ids.retain(|id| is_there(id));
        if self.ids.len() < before {
            self.write();
        }
    }

    /// Says so of those that are there.
    pub(super) fn mark(&self, found: &mut [Found]) {
        for found in found.iter_mut().filter(|found| found.standing == Standing::There) {
            if self.ids.contains(&found.id) {
                found.standing = Standing::Going;
            }
        }
    }

    fn write(&self) {
        let (path, fresh) = (self.folder.join(TOLD), self.folder.join(TOLD_FRESH));
        if self.ids.is_empty() {
            // It may never have been there.
            return drop(std::fs::remove_file(path));
        }
        let written = serde_json::to_vec(&self.ids)
            .map_err(io::Error::other)
            .and_then(|bytes| std::fs::write(&fresh, bytes))
            .and_then(|()| std::fs::rename(&fresh, &path));
        if let Err(error) = written {
            tracing::warn!(%error, path = %path.display(), "which workers were told to go cannot be written down");
        }
    }
}
