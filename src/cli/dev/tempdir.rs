//! The temporary directory of a `dev` process, removed when the process exits.

use std::fs;
use std::io;
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};

use crate::cli::exit::{Exit, Failure};
use crate::cli::output;
use crate::host::work_dir;
use crate::worker::kill_leftovers_in;

const PREFIX: &str = "journeyman-dev-";
pub(super) const WORK_DIR: &str = "work";

pub(super) struct TempDir(PathBuf);

impl TempDir {
    /// Creates a directory, and cleans up after `dev` processes that were killed: payloads outlive SIGKILL of their worker.
    pub(super) fn create() -> Result<Self, Failure> {
        let parent = std::env::temp_dir();
        for entry in fs::read_dir(&parent).into_iter().flatten().flatten().filter(is_own) {
            remove_stale(&entry.path());
        }
        let path = parent.join(format!("{PREFIX}{}", uuid::Uuid::new_v4().simple()));
        fs::DirBuilder::new()
            .mode(0o700)
            .create(&path)
            .map_err(|error| Failure::new(Exit::HostUnusable, format!("cannot create {}: {error}", path.display())))?;
        Ok(Self(path))
    }

    pub(super) fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for TempDir {
    fn drop(&mut self) {
        if let Err(error) = work_dir::remove_tree(&self.0) {
            tracing::warn!(path = %self.0.display(), %error, "cannot remove the temporary directory");
        }
    }
}

/// Whether this user alone can have created the directory and written to it: the journal in it names processes to kill.
fn is_own(entry: &fs::DirEntry) -> bool {
    let own_user = rustix::process::geteuid().as_raw();
    entry.file_name().to_string_lossy().starts_with(PREFIX)
        && entry.metadata().is_ok_and(|meta| meta.is_dir() && meta.uid() == own_user && meta.mode() & 0o077 == 0)
}

/// Kills the payloads and removes the directory of a `dev` process, unless its worker is still running.
fn remove_stale(path: &Path) {
    let killed = match kill_leftovers_in(&path.join(WORK_DIR)) {
        Ok(None) => return,
        Ok(Some(killed)) => work_dir::remove_tree(path).map(|()| killed),
        Err(error) => Err::<_, io::Error>(error),
    };
    let path = path.display();
    output::print_stderr(&match killed {
        Ok(0) => format!("note: removed {path} of a `dev` that was killed"),
        Ok(killed) => format!("note: removed {path} of a `dev` that was killed, and killed {killed} of its tasks"),
        Err(error) => format!("note: cannot clean up {path} of a `dev` that was killed: {error}; remove it by hand"),
    });
}
