//! `dev.json`: where a running `journeyman dev` is reached.

use std::fs;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use tempfile::NamedTempFile;

use crate::cli::exit::{Exit, Failure};
use crate::cli::queue_client::build_api;
use crate::cli::taskcluster_setup::build_credentials;
use journeyman_platform::host::file_lock::FileLock;
use journeyman_platform::settings::Environment;
use journeyman_platform::settings::environment::STATE_VARIABLE;
use journeyman_platform::settings::values::Secret;
use journeyman_worker::source::taskcluster::{Api, ClientCredentials};

/// What a running `journeyman dev` writes to `dev.json`, readable for its owner only.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(in crate::cli) struct DevState {
    pub(in crate::cli) root_url: String,
    pub(in crate::cli) client_id: String,
    pub(in crate::cli) access_token: String,
    /// The first is the default.
    pub(in crate::cli) task_queues: Vec<String>,
    pub(in crate::cli) pid: u32,
    pub(in crate::cli) socket: Option<PathBuf>,
}

pub(in crate::cli) fn state_dir(environment: &Environment) -> PathBuf {
    let below = |name: &str, rest: &str| environment.get(name).map(|folder| Path::new(folder).join(rest));
    environment
        .get(STATE_VARIABLE)
        .map(PathBuf::from)
        .or_else(|| below("XDG_STATE_HOME", "journeyman"))
        .or_else(|| below("HOME", ".local/state/journeyman"))
        .unwrap_or_else(|| PathBuf::from("/var/tmp/journeyman"))
}

impl DevState {
    const FILE: &str = "dev.json";

    pub(in crate::cli) fn read(folder: &Path) -> Option<Self> {
        serde_json::from_slice(fs::read_to_string(folder.join(Self::FILE)).ok()?.as_bytes()).ok()
    }

    pub(in crate::cli) fn client(&self) -> Result<Api, Failure> {
        let access_token = Secret::new(&self.access_token);
        let credentials = ClientCredentials { client_id: self.client_id.clone(), access_token, certificate: None };
        build_api(&self.root_url, Some(build_credentials(&credentials)?))
    }
}

/// `dev.json`, which one process at a time can write. Removed on drop.
#[derive(Debug)]
pub(in crate::cli) struct DevStateFile {
    folder: PathBuf,
    _lock: FileLock,
}

impl DevStateFile {
    /// Never removed, so that two processes cannot lock two files of this name.
    const LOCK: &str = "dev.lock";

    pub(in crate::cli) fn lock(folder: &Path) -> Result<Self, Failure> {
        let failed = |error| Failure::new(Exit::HostUnusable, format!("cannot write to {}: {error}", folder.display()));
        fs::create_dir_all(folder).map_err(failed)?;
        match FileLock::acquire(&folder.join(Self::LOCK)).map_err(failed)? {
            Some(lock) => Ok(Self { folder: folder.to_owned(), _lock: lock }),
            None => {
                let running = DevState::read(folder)
                    .map_or_else(String::new, |state| format!(" (process id {}, {})", state.pid, state.root_url));
                Err(Failure::new(
                    Exit::HostUnusable,
                    format!(
                        "another `journeyman dev` is running{running}; stop it, or set {STATE_VARIABLE} to another directory"
                    ),
                ))
            }
        }
    }

    /// Atomic; for the owner only.
    pub(in crate::cli) fn write(&self, state: &DevState) -> Result<(), Failure> {
        let write = || {
            let mut file = NamedTempFile::new_in(&self.folder)?;
            serde_json::to_writer_pretty(&mut file, state)?;
            file.persist(self.folder.join(DevState::FILE)).map_err(|error| error.error)
        };
        let failed =
            |error| Failure::new(Exit::HostUnusable, format!("cannot write to {}: {error}", self.folder.display()));
        write().map(drop).map_err(failed)
    }
}

impl Drop for DevStateFile {
    fn drop(&mut self) {
        drop(fs::remove_file(self.folder.join(DevState::FILE)));
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    #[test]
    fn the_state_file_of_dev_is_private_and_has_one_writer() {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path().join("deep");
        let state = DevState {
            root_url: "http://127.0.0.1:1".into(),
            client_id: "dev".into(),
            access_token: "t".into(),
            task_queues: vec!["dev/command".into()],
            pid: 1,
            socket: None,
        };
        let file = DevStateFile::lock(&folder).unwrap();
        file.write(&state).unwrap();
        let mode = fs::metadata(folder.join(DevState::FILE)).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        let second = DevStateFile::lock(&folder).unwrap_err();
        assert!(second.message.contains("process id 1, http://127.0.0.1:1"), "{}", second.message);
        assert_eq!(DevState::read(&folder).map(|state| state.pid), Some(1));
        drop(file);
        assert!(DevState::read(&folder).is_none());
        DevStateFile::lock(&folder).unwrap();
    }
}
