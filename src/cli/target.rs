//! Which queue a client command talks to, and as whom: flags, the variables that Taskcluster's own tools use, or the
//! queue that `journeyman dev` has left a note about.

use std::fs;
use std::io::Write as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

use clap::{Args, ValueHint};
use serde::{Deserialize, Serialize};

use super::exit::{Exit, Failure};
use crate::config::environment::STATE_VARIABLE;
use crate::config::values::{Secret, Url};
use crate::config::{Environment, secrets};
use crate::domain::refusal::Refusal;
use crate::host::file_lock::FileLock;
use crate::source::CallError;
use crate::source::taskcluster::{Api, ApiConfig, Credentials, Timeouts};

/// Which queue, and as whom.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Which queue")]
pub struct QueueTargetArgs {
    /// Root of the Taskcluster deployment [env: TASKCLUSTER_ROOT_URL] [default: the queue of `journeyman dev`]
    #[arg(long, value_name = "URL", global = true, value_hint = ValueHint::Url)]
    root_url: Option<Url>,
    /// Who we are [env: TASKCLUSTER_CLIENT_ID]
    #[arg(long, value_name = "ID", global = true)]
    client_id: Option<String>,
    /// File that holds the access token [env: TASKCLUSTER_ACCESS_TOKEN holds the token itself, and
    /// TASKCLUSTER_CERTIFICATE the certificate of temporary credentials]
    #[arg(long, value_name = "FILE", global = true, value_hint = ValueHint::FilePath)]
    access_token_file: Option<PathBuf>,
}

/// What `journeyman dev` leaves behind for as long as it runs. The file is readable for its owner only.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct DevState {
    /// Root of the queue.
    pub root_url: String,
    /// Who may call.
    pub client_id: String,
    /// The access token, generated for this one process.
    pub access_token: String,
    /// The task queues that are served, the first being the default.
    pub task_queues: Vec<String>,
    /// The process that wrote it.
    pub pid: u32,
    /// The worker's control socket.
    #[serde(default)]
    pub socket: Option<PathBuf>,
}

/// The folder for what is kept between commands.
#[must_use]
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

    /// The note, where there is one.
    #[must_use]
    pub fn read(folder: &Path) -> Option<Self> {
        serde_json::from_str(&fs::read_to_string(folder.join(Self::FILE)).ok()?).ok()
    }
}

/// The place for the note, which one process has at a time. Dropping it takes the note away.
#[derive(Debug)]
pub struct DevStateFile {
    folder: PathBuf,
    /// Locked for as long as the process lives, however it ends.
    _lock: FileLock,
}

impl DevStateFile {
    /// The file that is locked. It is never removed, so that two processes cannot lock two files of its name.
    const LOCK: &str = "dev.lock";

    /// Takes the place.
    ///
    /// # Errors
    ///
    /// [`Exit::HostUnusable`] where the folder cannot be used, or where another process has the place.
    pub fn lock(folder: &Path) -> Result<Self, Failure> {
        let failed = |error| Failure::new(Exit::HostUnusable, format!("cannot write to {}: {error}", folder.display()));
        fs::create_dir_all(folder).map_err(failed)?;
        match FileLock::acquire(&folder.join(Self::LOCK)).map_err(failed)? {
            Some(lock) => Ok(Self { folder: folder.to_owned(), _lock: lock }),
            None => Err(already_running(folder)),
        }
    }

    /// Writes the note, in one step, for its owner only.
    ///
    /// # Errors
    ///
    /// [`Exit::HostUnusable`] where it cannot be written.
    pub fn write(&self, note: &DevState) -> Result<(), Failure> {
        let fresh = self.folder.join(format!("{}.fresh", DevState::FILE));
        let text = serde_json::to_string_pretty(note).map_err(std::io::Error::other);
        let mut options = fs::OpenOptions::new();
        options.write(true).create(true).truncate(true).mode(0o600);
        text.and_then(|text| options.open(&fresh)?.write_all(text.as_bytes()))
            .and_then(|()| fs::rename(&fresh, self.folder.join(DevState::FILE)))
            .map_err(|error| {
                Failure::new(Exit::HostUnusable, format!("cannot write to {}: {error}", self.folder.display()))
            })
    }
}

impl Drop for DevStateFile {
    fn drop(&mut self) {
        drop(fs::remove_file(self.folder.join(DevState::FILE)));
    }
}

fn already_running(folder: &Path) -> Failure {
    let which = DevState::read(folder)
        .map_or_else(String::new, |note| format!(" (process id {}, {})", note.pid, note.root_url));
    let what = format!(
        "another `journeyman dev` is running{which}, and `journeyman task` finds one at a time; end that one, or set \
         {STATE_VARIABLE} to another folder for this one and for the `journeyman task` commands that mean it"
    );
    Failure::new(Exit::HostUnusable, what)
}

/// A queue to talk to.
pub struct QueueClient {
    /// The calls.
    pub api: Api,
    /// The task queue that is meant where none is named.
    pub task_queue: Option<String>,
    /// Whether it is the queue of `journeyman dev`.
    dev_state: Option<DevState>,
}

impl QueueTargetArgs {
    /// Finds the queue and the credentials. Nothing is sent yet.
    ///
    /// # Errors
    ///
    /// [`Exit::Usage`] where no queue is named and none is found, [`Exit::Config`] where credentials cannot be used.
    pub fn client(&self, environment: &Environment) -> Result<QueueClient, Failure> {
        let from_environment = environment.get("TASKCLUSTER_ROOT_URL").map(str::parse::<Url>).transpose();
        let from_environment = from_environment
            .map_err(|expected| Failure::new(Exit::Config, format!("TASKCLUSTER_ROOT_URL: expected {expected}")))?;
        let Some(root_url) = self.root_url.clone().or(from_environment) else {
            return dev_client(environment);
        };
        let credentials = self.credentials(environment)?;
        Ok(QueueClient { api: build_api(root_url.as_str(), credentials)?, task_queue: None, dev_state: None })
    }

    fn credentials(&self, environment: &Environment) -> Result<Option<Credentials>, Failure> {
        let client_id = self.client_id.as_deref().or_else(|| environment.get("TASKCLUSTER_CLIENT_ID"));
        let token = match &self.access_token_file {
            Some(path) => Some(secrets::read(path, "an access token")?),
            None => environment.get("TASKCLUSTER_ACCESS_TOKEN").map(Secret::new),
        };
        let certificate = environment.get("TASKCLUSTER_CERTIFICATE").map(Secret::new);
        match (client_id, token) {
            (Some(client_id), Some(token)) => build_credentials(client_id, &token, certificate.as_ref()).map(Some),
            (None, None) => Ok(None),
            (Some(_), None) => Err(Failure::new(
                Exit::Config,
                "there is a client id and no access token; use --access-token-file or TASKCLUSTER_ACCESS_TOKEN",
            )),
            (None, Some(_)) => Err(Failure::new(
                Exit::Config,
                "there is an access token and no client id; use --client-id or TASKCLUSTER_CLIENT_ID",
            )),
        }
    }
}

fn dev_client(environment: &Environment) -> Result<QueueClient, Failure> {
    let Some(note) = DevState::read(&state_dir(environment)) else {
        return Err(Failure::new(
            Exit::Usage,
            "which queue? `journeyman dev` is not running here; start it in another terminal, or name a deployment with \
             --root-url or TASKCLUSTER_ROOT_URL",
        ));
    };
    let credentials = build_credentials(&note.client_id, &Secret::new(&note.access_token), None)?;
    let api = build_api(&note.root_url, Some(credentials))?;
    Ok(QueueClient { api, task_queue: note.task_queues.first().cloned(), dev_state: Some(note) })
}

/// Makes a client for a queue.
///
/// # Errors
///
/// [`Exit::Config`] where no client can be made of it.
pub fn build_api(root_url: &str, credentials: Option<Credentials>) -> Result<Api, Failure> {
    let settings = ApiConfig {
        root_url: root_url.to_owned(),
        queue_url: None,
        credentials,
        proxy: None,
        // The operator of a worker says where it may be sent; a person's own commands may go where that person can.
        allow_hosts: vec!["*".to_owned()],
        timeouts: Timeouts::default(),
    };
    Api::new(settings).map_err(|error| Failure::from_error(Exit::Config, &error))
}

/// Makes credentials.
///
/// # Errors
///
/// [`Exit::Config`] where no request can be signed with them.
pub fn build_credentials(
    client_id: &str,
    token: &Secret,
    certificate: Option<&Secret>,
) -> Result<Credentials, Failure> {
    let token = token.reveal().to_owned().into();
    let certificate = certificate.map(|certificate| certificate.reveal().to_owned().into());
    Credentials::new(client_id, token, certificate.as_ref()).map_err(|error| Failure::from_error(Exit::Config, &error))
}

impl QueueClient {
    /// What a refusal means for the user.
    #[must_use]
    pub fn call_failure(&self, refused: CallError) -> Failure {
        let exit = match refused.refusal {
            Refusal::Retry { .. } | Refusal::Throttled { .. } => Exit::Unreachable,
            Refusal::Denied | Refusal::Stale => Exit::Denied,
            Refusal::Gone | Refusal::Rejected => Exit::Failed,
        };
        let mut message = refused.message;
        if exit == Exit::Unreachable {
            let hint = match &self.dev_state {
                Some(note) => format!("; is the `journeyman dev` with process id {} still running?", note.pid),
                None => format!("; is {} the right address, and can it be reached from here?", self.api.root_url()),
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
    fn the_note_of_dev_is_for_its_owner_only_and_one_process_has_its_place() {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path().join("deep");
        let note = DevState {
            root_url: "http://127.0.0.1:1".into(),
            client_id: "dev".into(),
            access_token: "t".into(),
            task_queues: vec!["dev/command".into()],
            pid: 1,
            socket: None,
        };
        let place = DevStateFile::lock(&folder).unwrap();
        place.write(&note).unwrap();
        let mode = fs::metadata(folder.join(DevState::FILE)).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        let second = DevStateFile::lock(&folder).unwrap_err();
        assert!(second.message.contains("process id 1, http://127.0.0.1:1"), "{}", second.message);
        assert_eq!(DevState::read(&folder).map(|note| note.pid), Some(1));
        drop(place);
        assert!(DevState::read(&folder).is_none());
        DevStateFile::lock(&folder).unwrap();
    }
}
