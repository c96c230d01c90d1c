//! Records which workers were asked to stop. A second TERM makes a worker release what it runs, so the next controller must not
//! send one.

use std::collections::BTreeSet;
use std::io;
use std::path::{Path, PathBuf};

use super::{ListedWorker, WorkerChange, WorkerState};
use crate::controller::name_encoding;

const EXTENSION: &str = "told";

fn path(folder: &Path, id: &str) -> PathBuf {
    folder.join(format!("{}.{EXTENSION}", name_encoding::QUEUE_NAME.encode(id)))
}

pub(super) fn is_stop_requested(folder: &Path, id: &str) -> io::Result<bool> {
    path(folder, id).try_exists()
}

pub(super) struct StopRequests {
    folder: PathBuf,
    ids: BTreeSet<String>,
}

impl StopRequests {
    pub(super) fn new(folder: &Path) -> Self {
        Self { folder: folder.to_owned(), ids: BTreeSet::new() }
    }

    pub(super) fn reload(&mut self) {
        match self.read_folder() {
            Ok(ids) => self.ids = ids,
            Err(error) => tracing::debug!(%error, "cannot read the stop requests"),
        }
    }

    fn read_folder(&self) -> io::Result<BTreeSet<String>> {
        let mut ids = BTreeSet::new();
        for entry in std::fs::read_dir(&self.folder)? {
            let path = entry?.path();
            let name = path.file_stem().and_then(std::ffi::OsStr::to_str);
            if path.extension().is_some_and(|ending| ending == EXTENSION)
                && let Some(id) = name.and_then(|name| String::from_utf8(name_encoding::QUEUE_NAME.decode(name)?).ok())
            {
                ids.insert(id);
            }
        }
        Ok(ids)
    }

    pub(super) fn add(&mut self, id: &str) {
        if self.ids.insert(id.to_owned())
            && let Err(error) = std::fs::write(self.path(id), "")
        {
            tracing::warn!(%error, worker = id, "cannot record the stop request");
        }
    }

    pub(super) fn retain(&mut self, is_there: impl Fn(&str) -> bool) {
        let gone: Vec<String> = self.ids.iter().filter(|id| !is_there(id)).cloned().collect();
        for id in gone {
            self.ids.remove(&id);
            if let Err(error) = std::fs::remove_file(self.path(&id)) {
                tracing::debug!(%error, worker = id, "cannot remove the stop request");
            }
        }
    }

    pub(super) fn mark_stopping(&self, found: &mut [ListedWorker]) {
        for found in found.iter_mut().filter(|found| found.state == WorkerState::Running) {
            if self.ids.contains(&found.id) {
                found.state = WorkerState::Stopping;
            }
        }
    }

    pub(super) fn mark_requested(&self, changes: &mut [WorkerChange]) {
        for change in changes {
            if let WorkerChange::Exited { id, requested: told, .. } = change {
                *told |= self.ids.contains(id);
            }
        }
    }

    fn path(&self, id: &str) -> PathBuf {
        path(&self.folder, id)
    }
}
