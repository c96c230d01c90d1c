//! The temporary directory of a `dev` process, removed when the process exits.

use std::fs;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};

use crate::cli::exit::{Exit, Failure};
use crate::host::work_dir;

pub(super) struct TempDir(PathBuf);

impl TempDir {
    pub(super) fn create() -> Result<Self, Failure> {
        let path = std::env::temp_dir().join(format!("journeyman-dev-{}", uuid::Uuid::new_v4().simple()));
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
