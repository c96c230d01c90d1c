//! Finds the queue and the credentials of a client command: flags, Taskcluster's variables, or the queue of `journeyman dev`.

use std::fs;
use std::path::{Path, PathBuf};

use clap::{Args, ValueHint};
use secrecy::SecretString;
use serde::{Deserialize, Serialize};
use tempfile::NamedTempFile;

use super::exit::{Exit, Failure};
use crate::config::Environment;
use crate::config::environment::STATE_VARIABLE;
use crate::config::schema::TaskclusterSource;
use crate::config::secrets::{self, ClientCredentials};
use crate::config::values::{Queue, Secret, Url};
use crate::domain::refusal::Refusal;
use crate::host::file_lock::FileLock;
use crate::source::CallError;
use crate::source::taskcluster::{Api, ApiConfig, Credentials};

#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Queue")]
pub struct QueueTargetArgs {
    /// Root URL of the Taskcluster deployment [env: TASKCLUSTER_ROOT_URL] [default: the queue of `journeyman dev`]
    #[arg(long, value_name = "URL", global = true, value_hint = ValueHint::Url)]
    root_url: Option<Url>,
    /// Client id [env: TASKCLUSTER_CLIENT_ID]
    #[arg(long, value_name = "ID", global = true)]
    client_id: Option<String>,
    /// File with the access token [env: TASKCLUSTER_ACCESS_TOKEN for the token itself, TASKCLUSTER_CERTIFICATE for the
    /// certificate of temporary credentials]
    #[arg(long, value_name = "FILE", global = true, value_hint = ValueHint::FilePath)]
    access_token_file: Option<PathBuf>,
}

/// What a running `journeyman dev` writes to `dev.json`, readable for its owner only.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct DevState {
    pub root_url: String,
    pub client_id: String,
    pub access_token: String,
    /// The first is the default.
    pub task_queues: Vec<String>,
    pub pid: u32,
    #[serde(default)]
    pub socket: Option<PathBuf>,
}

pub fn state_dir(environment: &Environment) -> PathBuf {
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

    pub fn read(folder: &Path) -> Option<Self> {
        serde_json::from_str(&fs::read_to_string(folder.join(Self::FILE)).ok()?).ok()
    }

    pub fn client(&self) -> Result<Api, Failure> {
        let access_token = Secret::new(&self.access_token);
        let credentials = ClientCredentials { client_id: self.client_id.clone(), access_token, certificate: None };
        build_api(&self.root_url, Some(build_credentials(&credentials)?))
    }
}

/// `dev.json`, which one process at a time can write. Removed on drop.
#[derive(Debug)]
pub struct DevStateFile {
    folder: PathBuf,
    _lock: FileLock,
}

impl DevStateFile {
    /// Never removed, so that two processes cannot lock two files of this name.
    const LOCK: &str = "dev.lock";

    pub fn lock(folder: &Path) -> Result<Self, Failure> {
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
    pub fn write(&self, state: &DevState) -> Result<(), Failure> {
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

pub struct QueueClient {
    pub api: Api,
    dev_state: Option<DevState>,
}

impl QueueTargetArgs {
    pub fn client(&self, environment: &Environment) -> Result<QueueClient, Failure> {
        let from_environment = environment.get("TASKCLUSTER_ROOT_URL").map(str::parse::<Url>).transpose();
        let from_environment = from_environment
            .map_err(|expected| Failure::new(Exit::Config, format!("TASKCLUSTER_ROOT_URL: expected {expected}")))?;
        let Some(root_url) = self.root_url.clone().or(from_environment) else {
            return dev_client(environment);
        };
        let credentials = self.credentials(environment)?;
        Ok(QueueClient { api: build_api(root_url.as_str(), credentials)?, dev_state: None })
    }

    fn credentials(&self, environment: &Environment) -> Result<Option<Credentials>, Failure> {
        let client_id =
            self.client_id.as_deref().or_else(|| environment.get("TASKCLUSTER_CLIENT_ID")).map(str::to_owned);
        let token = match &self.access_token_file {
            Some(path) => Some(secrets::read_file(path, "an access token")?),
            None => environment.get("TASKCLUSTER_ACCESS_TOKEN").map(Secret::new),
        };
        let certificate = environment.get("TASKCLUSTER_CERTIFICATE").map(Secret::new);
        match (client_id, token) {
            (Some(client_id), Some(access_token)) => {
                build_credentials(&ClientCredentials { client_id, access_token, certificate }).map(Some)
            }
            (None, None) => Ok(None),
            (Some(_), None) | (None, Some(_)) => Err(Failure::new(
                Exit::Config,
                "client id and access token belong together; set --client-id or TASKCLUSTER_CLIENT_ID, and --access-token-file \
                 or TASKCLUSTER_ACCESS_TOKEN",
            )),
        }
    }
}

fn dev_client(environment: &Environment) -> Result<QueueClient, Failure> {
    let Some(state) = DevState::read(&state_dir(environment)) else {
        return Err(Failure::new(
            Exit::Usage,
            "no queue given and `journeyman dev` is not running; start it in another terminal, or set --root-url or \
             TASKCLUSTER_ROOT_URL",
        ));
    };
    Ok(QueueClient { api: state.client()?, dev_state: Some(state) })
}

pub fn build_api(root_url: &str, credentials: Option<Credentials>) -> Result<Api, Failure> {
    // `allow_hosts` protects workers; the commands of a person may follow any redirect.
    let config = ApiConfig { allow_hosts: vec!["*".to_owned()], ..ApiConfig::new(root_url, credentials) };
    Api::new(config).map_err(|error| Failure::from_error(Exit::Config, &error))
}

pub fn read_credentials(source: &TaskclusterSource, environment: &Environment) -> Result<Option<Credentials>, Failure> {
    source.read_credentials(environment)?.map(|credentials| build_credentials(&credentials)).transpose()
}

pub fn build_credentials(own: &ClientCredentials) -> Result<Credentials, Failure> {
    let text = |secret: &Secret| SecretString::from(secret.reveal());
    let certificate = own.certificate.as_ref().map(text);
    Credentials::new(&own.client_id, text(&own.access_token), certificate.as_ref())
        .map_err(|error| Failure::from_error(Exit::Config, &error))
}

impl QueueClient {
    /// The named queue, or the first one of `journeyman dev`.
    pub fn task_queue(&self, named: Option<Queue>) -> Result<Queue, Failure> {
        let of_dev = || self.dev_state.as_ref()?.task_queues.first()?.parse().ok();
        let missing = || Failure::new(Exit::Usage, "no task queue: set --queue PROVISIONER/WORKER-TYPE");
        named.or_else(of_dev).ok_or_else(missing)
    }

    pub fn call_failure(&self, refused: CallError) -> Failure {
        let exit = match refused.refusal {
            Refusal::Retry { .. } | Refusal::Throttled { .. } => Exit::Unreachable,
            Refusal::Denied | Refusal::Stale => Exit::Denied,
            Refusal::Gone | Refusal::Rejected => Exit::Failed,
        };
        let mut message = refused.message;
        if exit == Exit::Unreachable {
            let hint = match &self.dev_state {
                Some(state) => format!("; is the `journeyman dev` with process id {} still running?", state.pid),
                None => format!("; is {} the right address, and reachable from this host?", self.api.root_url()),
            };
            message.push_str(&hint);
        }
        Failure::new(exit, message)
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
