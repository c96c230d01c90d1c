//! Finds the queue and the credentials of a client command: flags, Taskcluster's variables, or the queue of `journeyman dev`.

use std::path::PathBuf;

use clap::{Args, ValueHint};

use super::dev::state_file::{DevState, state_dir};
use super::exit::{Exit, Failure};
use super::taskcluster_setup::build_credentials;
use crate::control::client::ControlClient;
use journeyman_domain::refusal::Refusal;
use journeyman_platform::settings::values::{Queue, Secret, Url};
use journeyman_platform::settings::{Environment, secrets};
use journeyman_worker::source::CallError;
use journeyman_worker::source::taskcluster::{Api, ApiConfig, ClientCredentials, Credentials};

#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Queue")]
pub struct QueueClientArgs {
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

pub struct QueueClient {
    pub api: Api,
    dev_state: Option<DevState>,
}

impl QueueClientArgs {
    /// True if a flag or a variable names a queue.
    pub fn is_given(&self, environment: &Environment) -> bool {
        self.root_url.is_some() || environment.get("TASKCLUSTER_ROOT_URL").is_some()
    }

    pub fn build(&self, environment: &Environment) -> Result<QueueClient, Failure> {
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
    // `allow_hosts` protects workers and pages; the commands of a person may follow any redirect.
    build_api_within(root_url, credentials, vec!["*".to_owned()])
}

/// Builds the client of pages, which follows an artifact to a private address at one of these hosts only.
pub fn build_api_within(
    root_url: &str,
    credentials: Option<Credentials>,
    allow_hosts: Vec<String>,
) -> Result<Api, Failure> {
    let config = ApiConfig { allow_hosts, ..ApiConfig::new(root_url, credentials) };
    Api::new(config).map_err(|error| Failure::from_error(Exit::Config, &error))
}

impl QueueClient {
    /// The named queue, or the first one of `journeyman dev`.
    pub fn task_queue(&self, named: Option<Queue>) -> Result<Queue, Failure> {
        let of_dev = || self.dev_state.as_ref()?.task_queues.first()?.parse().ok();
        let missing = || Failure::new(Exit::Usage, "no task queue: set --queue PROVISIONER/WORKER-TYPE");
        named.or_else(of_dev).ok_or_else(missing)
    }

    /// Why the worker of `journeyman dev` claims nothing; `None` if it does, and for any other queue.
    pub async fn blocked_worker(&self) -> Option<String> {
        let socket = self.dev_state.as_ref()?.socket.as_ref()?;
        let reply = ControlClient::new(socket).ok()?.status().await.ok()?;
        reply.snapshot.blocked_message.map(|why| format!("the worker of `journeyman dev` claims nothing: {why}"))
    }

    pub fn call_failure(&self, refused: CallError) -> Failure {
        let exit = match refused.refusal {
            Refusal::Retry { .. } | Refusal::Throttled { .. } | Refusal::Full => Exit::Unreachable,
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
