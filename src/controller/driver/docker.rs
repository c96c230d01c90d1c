//! Driver: workers as containers of a Docker-compatible daemon, found by their labels.

use std::collections::HashMap;
use std::pin::pin;

use bollard::errors::Error;
use bollard::models::{ContainerCreateBody, ContainerSummary, ContainerSummaryStateEnum as State, HostConfig};
use bollard::query_parameters::{
    CreateContainerOptionsBuilder, KillContainerOptionsBuilder, ListContainersOptionsBuilder, LogsOptionsBuilder,
    RemoveContainerOptionsBuilder,
};
use bollard::{API_DEFAULT_VERSION, Docker};
use futures_util::StreamExt as _;
use tokio::sync::OnceCell;

use super::object_name::object_name;
use super::{Driver, DriverError, ListedWorker, StartError, StopMode, WorkerExit, WorkerSpec, WorkerState};
use crate::config::pool::DockerDriverConfig;
use crate::http::client::error_chain;
use journeyman_domain::group::Key;
use journeyman_domain::limits::{CONTAINER_NAME_BYTES_MAX, DRIVER_CALL_TIMEOUT, DRIVER_LOG_TAIL_BYTES_MAX};

pub(super) struct DockerDriver {
    config: DockerDriverConfig,
    command: Vec<String>,
    pool: String,
    client: OnceCell<Docker>,
}

const POOL: &str = "journeyman.pool";
const KEY: &str = "journeyman.key";
const WORKER: &str = "journeyman.worker";
const ID_DIGITS: usize = 12;

impl DockerDriver {
    pub(super) const fn new(config: DockerDriverConfig, command: Vec<String>, pool: String) -> Self {
        Self { config, command, pool, client: OnceCell::const_new() }
    }

    async fn client(&self) -> Result<&Docker, DriverError> {
        let connect = async || {
            let (host, seconds) = (self.config.host.as_str(), DRIVER_CALL_TIMEOUT.as_secs());
            let client = if host.starts_with("unix://") || host.starts_with('/') {
                Docker::connect_with_unix(host, seconds, API_DEFAULT_VERSION)
            } else {
                Docker::connect_with_http(host, seconds, API_DEFAULT_VERSION)
            };
            client?.negotiate_version().await
        };
        let client = self.client.get_or_try_init(connect).await;
        client.map_err(|error| self.error(&error))
    }

    fn error(&self, error: &Error) -> DriverError {
        DriverError(format!("the Docker daemon at {}: {}", self.config.host, error_chain(error)))
    }

    fn start_error(&self, error: &Error) -> StartError {
        // Bad parameters, no such image, a program that cannot be executed.
        if matches!(error, Error::DockerResponseServerError { status_code: 400 | 404 | 500, .. }) {
            return StartError::Worker(error_chain(error));
        }
        StartError::Driver(self.error(error))
    }

    async fn list_containers(&self, labels: &[(&str, &str)]) -> Result<Vec<ContainerSummary>, DriverError> {
        let labels = labels.iter().map(|(name, value)| format!("{name}={value}")).collect();
        let filters = HashMap::from([("label", labels)]);
        let options = ListContainersOptionsBuilder::new().all(true).filters(&filters).build();
        self.client().await?.list_containers(Some(options)).await.map_err(|error| self.error(&error))
    }

    fn container_name(&self, id: &str, key: &Key) -> String {
        let digits: String = id.chars().filter(char::is_ascii_alphanumeric).take(ID_DIGITS).collect();
        object_name(&[&self.pool, key.as_str(), &digits], CONTAINER_NAME_BYTES_MAX)
    }

    async fn exit_of(&self, client: &Docker, id: &str) -> Result<Option<WorkerExit>, DriverError> {
        let state = match client.inspect_container(id, None).await {
            Err(Error::DockerResponseServerError { status_code: 404, .. }) => return Ok(None),
            inspected => inspected.map_err(|error| self.error(&error))?.state.unwrap_or_default(),
        };
        let mut how = format!("exit status: {}", state.exit_code.unwrap_or_default());
        if state.oom_killed == Some(true) {
            how.push_str("; out of memory");
        }
        if let Some(error) = state.error.filter(|error| !error.is_empty()) {
            how = format!("{how}; {error}");
        }
        // Removing the container removes its log.
        Ok(Some(WorkerExit { reason: how, log: None, log_tail: log_tail(client, id).await }))
    }

    async fn parse_container(
        &self,
        client: &Docker,
        container: ContainerSummary,
    ) -> Result<Option<ListedWorker>, DriverError> {
        let labels = container.labels.unwrap_or_default();
        let of = |name| labels.get(name).map(String::as_str);
        let (Some(id), Some(key)) = (of(WORKER), of(KEY).and_then(Key::new)) else { return Ok(None) };
        let Some(container_id) = container.id.filter(|_| of(POOL) == Some(&self.pool)) else { return Ok(None) };
        let standing = match container.state.unwrap_or(State::EMPTY) {
            // The controller stopped between create and start.
            State::CREATED => {
                WorkerState::Exited(WorkerExit { reason: "created, never started".to_owned(), ..WorkerExit::default() })
            }
            State::EXITED | State::DEAD => match self.exit_of(client, &container_id).await? {
                Some(end) => WorkerState::Exited(end),
                None => return Ok(None),
            },
            State::REMOVING => return Ok(None),
            State::STOPPING => WorkerState::Stopping,
            State::RUNNING | State::PAUSED | State::RESTARTING | State::EMPTY => WorkerState::Running,
        };
        Ok(Some(ListedWorker { id: id.to_owned(), key, state: standing, detail: None }))
    }
}

impl Driver for DockerDriver {
    async fn list(&self) -> Result<Vec<ListedWorker>, DriverError> {
        let client = self.client().await?;
        let mut found = Vec::new();
        for container in self.list_containers(&[(POOL, &self.pool)]).await? {
            found.extend(self.parse_container(client, container).await?);
        }
        Ok(found)
    }

    async fn start(&self, assignment: WorkerSpec) -> Result<(), StartError> {
        let client = self.client().await?;
        let WorkerSpec { id, key, variables } = assignment;
        let name = self.container_name(&id, &key);
        let labels = [(POOL, self.pool.as_str()), (KEY, key.as_str()), (WORKER, id.as_str())];
        let (DockerDriverConfig { image, network, .. }, command) = (self.config.clone(), self.command.clone());
        let container = ContainerCreateBody {
            image: Some(image),
            cmd: (!command.is_empty()).then_some(command),
            env: Some(variables.iter().map(|(name, value)| format!("{name}={value}")).collect()),
            labels: Some(labels.map(|(name, value)| (name.to_owned(), value.to_owned())).into()),
            host_config: network.map(|network| HostConfig { network_mode: Some(network), ..HostConfig::default() }),
            ..ContainerCreateBody::default()
        };
        let options = CreateContainerOptionsBuilder::new().name(&name).build();
        let created = client.create_container(Some(options), container).await;
        let container = created.map_err(|error| self.start_error(&error))?.id;
        if let Err(error) = client.start_container(&container, None).await {
            // The next list finds it if this fails.
            self.stop(id, key, StopMode::Remove).await.ok();
            return Err(self.start_error(&error));
        }
        Ok(())
    }

    async fn stop(&self, id: String, _key: Key, stop: StopMode) -> Result<(), DriverError> {
        let client = self.client().await?;
        let kill = |signal| KillContainerOptionsBuilder::new().signal(signal).build();
        // By its labels: a name can be changed, and given to another container.
        for container in self.list_containers(&[(POOL, &self.pool), (WORKER, &id)]).await? {
            let container = container.id.unwrap_or_default();
            let stopped = match stop {
                StopMode::Terminate => client.kill_container(&container, Some(kill("SIGTERM"))).await,
                StopMode::Kill => client.kill_container(&container, Some(kill("SIGKILL"))).await,
                StopMode::Remove => {
                    let options = RemoveContainerOptionsBuilder::new().force(true).v(true).build();
                    client.remove_container(&container, Some(options)).await
                }
            };
            match stopped {
                // Not found, not running, or being removed.
                Ok(()) | Err(Error::DockerResponseServerError { status_code: 404 | 409, .. }) => {}
                Err(error) => return Err(self.error(&error)),
            }
        }
        Ok(())
    }
}

async fn log_tail(client: &Docker, name: &str) -> String {
    let options = LogsOptionsBuilder::new().stdout(true).stderr(true).tail("20").build();
    let mut lines = pin!(client.logs(name, Some(options)));
    let mut said = String::new();
    let room = usize::try_from(DRIVER_LOG_TAIL_BYTES_MAX).unwrap_or(usize::MAX);
    while said.len() < room
        && let Some(Ok(line)) = lines.next().await
    {
        said.push_str(&line.to_string());
    }
    said
}
