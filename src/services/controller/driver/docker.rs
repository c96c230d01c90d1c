//! Driver: workers as containers of a Docker-compatible daemon, found by their labels.

use std::collections::HashMap;

use reqwest::{Method, Response, StatusCode};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use tokio::sync::OnceCell;

use super::object_name::object_name;
use super::{Driver, DriverError, ListedWorker, StartError, StopMode, WorkerExit, WorkerSpec, WorkerState};
use crate::controller::config::DockerDriverConfig;
use journeyman_domain::group::Key;
use journeyman_domain::limits::{
    CONTAINER_NAME_BYTES_MAX, DRIVER_CALL_TIMEOUT, DRIVER_LOG_TAIL_BYTES_MAX, DRIVER_OUTPUT_BYTES_MAX,
};
use journeyman_platform::http::client::{BodyError, client_builder, error_chain, read_body};

pub(super) struct DockerDriver {
    config: DockerDriverConfig,
    command: Vec<String>,
    pool: String,
    client: OnceCell<DockerClient>,
}

/// The version of the Engine API that this follows, as major and minor.
const API_VERSION: (u32, u32) = (1, 44);
/// Before each piece of a log: its stream, three zeros and its length.
const LOG_FRAME_HEAD_BYTES: usize = 8;
const POOL: &str = "journeyman.pool";
const KEY: &str = "journeyman.key";
const WORKER: &str = "journeyman.worker";
const ID_DIGITS: usize = 12;

impl DockerDriver {
    pub(super) const fn new(config: DockerDriverConfig, command: Vec<String>, pool: String) -> Self {
        Self { config, command, pool, client: OnceCell::const_new() }
    }

    async fn client(&self) -> Result<&DockerClient, DriverError> {
        let client = self.client.get_or_try_init(|| DockerClient::connect(&self.config.host)).await;
        client.map_err(|error| self.error(error))
    }

    fn error(&self, error: DockerError) -> DriverError {
        DriverError(format!("the Docker daemon at {}: {}", self.config.host, error.message))
    }

    fn start_error(&self, error: DockerError) -> StartError {
        // Bad parameters, no such image, a program that cannot be executed.
        if matches!(error.status.map(|status| status.as_u16()), Some(400 | 404 | 500)) {
            return StartError::Worker(error.message);
        }
        StartError::Driver(self.error(error))
    }

    async fn list_containers(&self, labels: &[(&str, &str)]) -> Result<Vec<Container>, DriverError> {
        let labels: Vec<String> = labels.iter().map(|(name, value)| format!("{name}={value}")).collect();
        let filters = json!({ "label": labels }).to_string();
        let (client, query) = (self.client().await?, [("all", "true"), ("filters", filters.as_str())]);
        client.get("containers/json", &query).await.map_err(|error| self.error(error))
    }

    fn container_name(&self, id: &str, key: &Key) -> String {
        let digits: String = id.chars().filter(char::is_ascii_alphanumeric).take(ID_DIGITS).collect();
        object_name(&[&self.pool, key.as_str(), &digits], CONTAINER_NAME_BYTES_MAX)
    }

    async fn exit_of(&self, client: &DockerClient, id: &str) -> Result<Option<WorkerExit>, DriverError> {
        let inspected: Inspected = match client.get(&format!("containers/{id}/json"), &[]).await {
            Err(DockerError { status: Some(StatusCode::NOT_FOUND), .. }) => return Ok(None),
            inspected => inspected.map_err(|error| self.error(error))?,
        };
        let state = inspected.state;
        let mut how = format!("exit status: {}", state.exit_code);
        if state.oom_killed {
            how.push_str("; out of memory");
        }
        if !state.error.is_empty() {
            how = format!("{how}; {}", state.error);
        }
        // Removing the container removes its log.
        Ok(Some(WorkerExit { reason: how, log: None, log_tail: client.log_tail(id).await }))
    }

    async fn parse_container(
        &self,
        client: &DockerClient,
        container: Container,
    ) -> Result<Option<ListedWorker>, DriverError> {
        let labels = container.labels.unwrap_or_default();
        let of = |name| labels.get(name).map(String::as_str);
        let (Some(id), Some(key)) = (of(WORKER), of(KEY).and_then(Key::new)) else { return Ok(None) };
        if of(POOL) != Some(&self.pool) {
            return Ok(None);
        }
        let standing = match container.state.as_str() {
            // The controller stopped between create and start.
            "created" => {
                WorkerState::Exited(WorkerExit { reason: "created, never started".to_owned(), ..WorkerExit::default() })
            }
            "exited" | "dead" => match self.exit_of(client, &container.id).await? {
                Some(end) => WorkerState::Exited(end),
                None => return Ok(None),
            },
            "removing" => return Ok(None),
            "stopping" => WorkerState::Stopping,
            // `running`, `paused`, `restarting`, or a state that a later daemon has.
            _ => WorkerState::Running,
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
        let mut container = json!({
            "Image": self.config.image,
            "Env": variables.iter().map(|(name, value)| format!("{name}={value}")).collect::<Vec<_>>(),
            "Labels": HashMap::from(labels),
        });
        if !self.command.is_empty() {
            container["Cmd"] = json!(self.command);
        }
        if let Some(network) = &self.config.network {
            container["HostConfig"] = json!({ "NetworkMode": network });
        }
        let created = client.create(&name, &container).await.map_err(|error| self.start_error(error))?;
        if let Err(error) = client.act(Method::POST, &format!("containers/{}/start", created.id), &[]).await {
            // The next list finds it if this fails.
            self.stop(id, key, StopMode::Remove).await.ok();
            return Err(self.start_error(error));
        }
        Ok(())
    }

    async fn stop(&self, id: String, _key: Key, stop: StopMode) -> Result<(), DriverError> {
        let client = self.client().await?;
        // By its labels: a name can be changed, and given to another container.
        for Container { id, .. } in self.list_containers(&[(POOL, &self.pool), (WORKER, &id)]).await? {
            let (method, tail, query): (_, _, &[_]) = match stop {
                StopMode::Terminate => (Method::POST, "/kill", &[("signal", "SIGTERM")]),
                StopMode::Kill => (Method::POST, "/kill", &[("signal", "SIGKILL")]),
                StopMode::Remove => (Method::DELETE, "", &[("force", "true"), ("v", "true")]),
            };
            let stopped = client.act(method, &format!("containers/{id}{tail}"), query).await;
            match stopped {
                // Not found, not running, or being removed.
                Ok(()) | Err(DockerError { status: Some(StatusCode::NOT_FOUND | StatusCode::CONFLICT), .. }) => {}
                Err(error) => return Err(self.error(error)),
            }
        }
        Ok(())
    }
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Version {
    api_version: String,
    #[serde(rename = "MinAPIVersion", default)]
    api_version_min: String,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Container {
    id: String,
    labels: Option<HashMap<String, String>>,
    #[serde(default)]
    state: String,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Created {
    id: String,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Inspected {
    state: InspectedState,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
struct InspectedState {
    exit_code: i64,
    #[serde(rename = "OOMKilled")]
    oom_killed: bool,
    error: String,
}

/// An answer that is an error, or has no status.
#[derive(Debug)]
struct DockerError {
    status: Option<StatusCode>,
    message: String,
}

struct DockerClient {
    http: reqwest::Client,
    /// Ends in a slash.
    base: String,
}

impl DockerClient {
    async fn connect(host: &str) -> Result<Self, DockerError> {
        let failed = |message: String| DockerError { status: None, message };
        let builder = client_builder().timeout(DRIVER_CALL_TIMEOUT);
        let socket = host.strip_prefix("unix://").or_else(|| host.starts_with('/').then_some(host));
        let (scheme, address) = host.split_once("://").unwrap_or(("http", host));
        let (builder, base) = match (socket, scheme) {
            (Some(socket), _) => (builder.unix_socket(socket), "http://docker/".to_owned()),
            (None, "http" | "tcp") => (builder, format!("http://{}/", address.trim_end_matches('/'))),
            (None, _) => return Err(failed(format!("{scheme}:// is not supported; use unix:// or http://"))),
        };
        let http = builder.build().map_err(|error| failed(error_chain(&error)))?;
        let mut client = Self { http, base };
        let version: Version = client.get("version", &[]).await?;
        let [newest, oldest] = [&version.api_version, &version.api_version_min].map(|text| parse_version(text));
        let newest = newest.ok_or_else(|| failed(format!("API version {:?}", version.api_version)))?;
        let (major, minor) = API_VERSION.min(newest).max(oldest.unwrap_or_default());
        client.base += &format!("v{major}.{minor}/");
        Ok(client)
    }

    async fn get<T: DeserializeOwned>(&self, path: &str, query: &[(&str, &str)]) -> Result<T, DockerError> {
        parse(path, &self.call(Method::GET, path, query, None).await?)
    }

    async fn create(&self, name: &str, container: &Value) -> Result<Created, DockerError> {
        let path = "containers/create";
        parse(path, &self.call(Method::POST, path, &[("name", name)], Some(container)).await?)
    }

    async fn act(&self, method: Method, path: &str, query: &[(&str, &str)]) -> Result<(), DockerError> {
        self.call(method, path, query, None).await.map(drop)
    }

    async fn call(
        &self,
        method: Method,
        path: &str,
        query: &[(&str, &str)],
        body: Option<&Value>,
    ) -> Result<Vec<u8>, DockerError> {
        let mut response = self.send(method, path, query, body).await?;
        read_body(&mut response, DRIVER_OUTPUT_BYTES_MAX).await.map_err(|error| body_error(path, error))
    }

    async fn send(
        &self,
        method: Method,
        path: &str,
        query: &[(&str, &str)],
        body: Option<&Value>,
    ) -> Result<Response, DockerError> {
        let failed = |status, what: String| DockerError { status, message: format!("{path}: {what}") };
        let url = url::Url::parse_with_params(&format!("{}{path}", self.base), query);
        let mut request = self.http.request(method, url.map_err(|error| failed(None, error.to_string()))?);
        if let Some(body) = body {
            request = request.json(body);
        }
        let sent = request.send().await.map_err(|error| failed(None, error_chain(&error.without_url())));
        let mut response = sent?;
        let status = response.status();
        if status.is_success() || status == StatusCode::NOT_MODIFIED {
            return Ok(response);
        }
        let body = read_body(&mut response, DRIVER_OUTPUT_BYTES_MAX).await.map_err(|error| body_error(path, error))?;
        let message =
            serde_json::from_slice::<Value>(&body).ok().and_then(|body| body["message"].as_str().map(str::to_owned));
        let message = message.unwrap_or_else(|| String::from_utf8_lossy(&body).trim().to_owned());
        Err(failed(Some(status), format!("{status}: {message}")))
    }

    /// The last lines of a container, or what can be read of them.
    async fn log_tail(&self, id: &str) -> String {
        let query = [("stdout", "true"), ("stderr", "true"), ("tail", "20")];
        let Ok(mut response) = self.send(Method::GET, &format!("containers/{id}/logs"), &query, None).await else {
            return String::new();
        };
        let bytes_max = usize::try_from(DRIVER_LOG_TAIL_BYTES_MAX).unwrap_or(usize::MAX);
        let mut framed = Vec::new();
        while framed.len() < 2 * bytes_max
            && let Ok(Some(piece)) = response.chunk().await
        {
            framed.extend_from_slice(&piece);
        }
        let mut log = unframed(&framed);
        log.truncate(bytes_max);
        String::from_utf8_lossy(&log).into_owned()
    }
}

/// The log of a container without a terminal.
fn unframed(mut framed: &[u8]) -> Vec<u8> {
    let mut log = Vec::new();
    while let Some((&[_, _, _, _, length @ ..], rest)) = framed.split_first_chunk::<LOG_FRAME_HEAD_BYTES>() {
        let length = usize::try_from(u32::from_be_bytes(length)).unwrap_or(usize::MAX);
        let (piece, rest) = rest.split_at(length.min(rest.len()));
        log.extend_from_slice(piece);
        framed = rest;
    }
    log
}

fn parse_version(text: &str) -> Option<(u32, u32)> {
    let (major, minor) = text.split_once('.')?;
    Some((major.parse().ok()?, minor.parse().ok()?))
}

fn parse<T: DeserializeOwned>(path: &str, body: &[u8]) -> Result<T, DockerError> {
    let failed = |error| DockerError { status: None, message: format!("{path}: the answer is not valid: {error}") };
    serde_json::from_slice(body).map_err(failed)
}

fn body_error(path: &str, error: BodyError) -> DockerError {
    let what = match error {
        BodyError::TooLong => format!("the answer has more than {DRIVER_OUTPUT_BYTES_MAX} bytes"),
        BodyError::Connection(error) => error_chain(&error.without_url()),
    };
    DockerError { status: None, message: format!("{path}: {what}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_pieces_of_a_log_are_put_together_and_an_unfinished_one_is_kept() {
        let framed = b"\x01\0\0\0\0\0\0\x02a\n\x02\0\0\0\0\0\0\x05b\n";
        assert_eq!(unframed(framed), b"a\nb\n");
        assert_eq!(unframed(&framed[..12]), b"a\n");
        assert_eq!(unframed(b"\x01\0\0\0\xff\xff\xff\xffa"), b"a");
    }

    #[tokio::test]
    async fn an_address_that_cannot_be_used_is_refused_by_its_scheme() {
        for host in ["https://docker.example:2376", "ssh://docker.example", "npipe:////./pipe/docker_engine"] {
            let Err(error) = DockerClient::connect(host).await else { panic!("{host}") };
            let scheme = host.split_once(':').unwrap().0;
            assert_eq!(error.message, format!("{scheme}:// is not supported; use unix:// or http://"));
        }
    }
}
