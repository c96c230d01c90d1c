//! Client of the control socket.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::time::Duration;

use reqwest::StatusCode;
use serde::Serialize;
use serde::de::DeserializeOwned;
use thiserror::Error;

use super::controller_api::{Inventories, PoisonActionRequest};
use super::{CommandReply, WorkerStatusReply, controller_api, short_socket_path};
use journeyman_domain::limits::{CONTROL_ANSWER_BYTES_MAX, CONTROL_TIMEOUT, CONTROLLER_POISON_TIMEOUT};
use journeyman_platform::http::client::{BodyError, client_builder, read_body, root_cause};
use journeyman_services::controller::poison_queue::PoisonOutcome;
use journeyman_worker::engine::status::ClaimDetail;

#[derive(Debug)]
pub struct ControlClient {
    http: reqwest::Client,
    socket: PathBuf,
    pid: i32,
    /// Keeps the short path valid.
    _folder: File,
}

#[derive(Debug, Error)]
pub enum Error {
    #[error("nothing is listening at {}; is the worker or controller running? `--socket` sets another socket, `--config` another configuration", .0.display())]
    NotRunning(PathBuf),
    #[error("permission denied for {}: only the user and group that own the socket may use it", .0.display())]
    Forbidden(PathBuf),
    #[error("{}: no response from process {pid} in time; it is stopped (`kill -CONT {pid}` continues it) or hangs", .socket.display())]
    NoResponse { socket: PathBuf, pid: i32 },
    #[error("{0}")]
    Rejected(String),
    /// No such claim, or the worker has exited.
    #[error("{0}")]
    NotFound(String),
    /// The socket responds, but the worker's loop did not.
    #[error("{0}")]
    Timeout(String),
    #[error("{path}: {what}", path = .0.display(), what = .1)]
    InvalidResponse(PathBuf, String),
}

impl ControlClient {
    /// Connects once, to find out whether the socket can be used; sends nothing.
    pub fn new(socket: &Path) -> Result<Self, Error> {
        let not_running = || Error::NotRunning(socket.to_owned());
        let (Some(folder), Some(name)) = (socket.parent(), socket.file_name()) else { return Err(not_running()) };
        let folder = if folder.as_os_str().is_empty() { Path::new(".") } else { folder };
        let classify = |error: std::io::Error| {
            let forbidden = error.kind() == std::io::ErrorKind::PermissionDenied;
            if forbidden { Error::Forbidden(socket.to_owned()) } else { not_running() }
        };
        let folder = File::open(folder).map_err(classify)?;
        let short = short_socket_path(&folder, Path::new(name));
        // The HTTP client hides why it cannot connect.
        let stream = std::os::unix::net::UnixStream::connect(&short).map_err(classify)?;
        let pid = rustix::net::sockopt::socket_peercred(&stream).map_or(0, |peer| peer.pid.as_raw_nonzero().get());
        let http = client_builder()
            .unix_socket(short)
            // The host may have no CA certificates.
            .tls_certs_only([])
            // The server closes an idle connection just when `status --watch 2s` would use it again.
            .pool_max_idle_per_host(0)
            .build()
            .map_err(|error| Error::InvalidResponse(socket.to_owned(), error.to_string()))?;
        Ok(Self { http, socket: socket.to_owned(), pid, _folder: folder })
    }

    pub async fn status(&self) -> Result<WorkerStatusReply, Error> {
        self.get("status", &[], CONTROL_TIMEOUT * 2).await
    }

    pub async fn controller_status(&self) -> Result<controller_api::ControllerStatusReply, Error> {
        self.get("controller", &[], CONTROL_TIMEOUT * 2).await
    }

    pub async fn claim_details(&self, task: &str) -> Result<ClaimDetail, Error> {
        self.get("claim", &[("task", Some(task))], CONTROL_TIMEOUT * 3).await
    }

    /// Lists the poison queue of one pool or of all.
    pub async fn list_poison(&self, pool: Option<&str>) -> Result<Inventories, Error> {
        self.get("poison", &[("pool", pool)], CONTROLLER_POISON_TIMEOUT * 3).await
    }

    /// Streams the log of a claim.
    pub async fn log(&self, task: &str, follow: Follow) -> Result<reqwest::Response, Error> {
        let follow = if follow == Follow::Yes { "true" } else { "false" };
        self.send(self.http.get(self.url("log", &[("task", Some(task)), ("follow", Some(follow))])?)).await
    }

    /// Sends a [`super::WorkerCommandRequest`] or a [`controller_api::PoolCommandRequest`]; returns the message of the reply.
    pub async fn send_command(&self, request: &impl Serialize) -> Result<String, Error> {
        Ok(self.post::<CommandReply>("commands", request, CONTROL_TIMEOUT * 2).await?.message)
    }

    pub async fn apply_poison_action(&self, request: &PoisonActionRequest) -> Result<PoisonOutcome, Error> {
        self.post("poison", request, CONTROLLER_POISON_TIMEOUT * 3).await
    }

    fn url(&self, path: &str, query: &[(&str, Option<&str>)]) -> Result<url::Url, Error> {
        let query = query.iter().filter_map(|(name, value)| Some((name, (*value)?)));
        url::Url::parse_with_params(&format!("http://socket/v1/{path}"), query).map_err(|error| self.invalid(error))
    }

    async fn get<T: DeserializeOwned>(
        &self,
        path: &str,
        query: &[(&str, Option<&str>)],
        timeout: Duration,
    ) -> Result<T, Error> {
        self.read_reply(self.http.get(self.url(path, query)?).timeout(timeout)).await
    }

    async fn post<T: DeserializeOwned>(
        &self,
        path: &str,
        body: &impl Serialize,
        timeout: Duration,
    ) -> Result<T, Error> {
        self.read_reply(self.http.post(self.url(path, &[])?).json(body).timeout(timeout)).await
    }

    async fn send(&self, request: reqwest::RequestBuilder) -> Result<reqwest::Response, Error> {
        let response = request.send().await.map_err(|error| self.request_error(&error))?;
        if response.status().is_success() { Ok(response) } else { Err(self.error_reply(response).await) }
    }

    async fn read_reply<T: DeserializeOwned>(&self, request: reqwest::RequestBuilder) -> Result<T, Error> {
        let response = self.send(request).await?;
        let body = self.read_body(response).await?;
        serde_json::from_slice(&body).map_err(|error| self.invalid(error))
    }

    async fn error_reply(&self, response: reqwest::Response) -> Error {
        let status = response.status();
        let body = self.read_body(response).await.unwrap_or_default();
        let Ok(CommandReply { message }) = serde_json::from_slice(&body) else {
            return self.invalid(format!("unexpected status {status}"));
        };
        match status {
            StatusCode::NOT_FOUND | StatusCode::SERVICE_UNAVAILABLE => Error::NotFound(message),
            StatusCode::GATEWAY_TIMEOUT => Error::Timeout(message),
            _ => Error::Rejected(message),
        }
    }

    async fn read_body(&self, mut answer: reqwest::Response) -> Result<Vec<u8>, Error> {
        read_body(&mut answer, CONTROL_ANSWER_BYTES_MAX).await.map_err(|error| match error {
            BodyError::Connection(error) => self.request_error(&error),
            BodyError::TooLong => self.invalid("response too large"),
        })
    }

    fn request_error(&self, error: &reqwest::Error) -> Error {
        if error.is_timeout() {
            return Error::NoResponse { socket: self.socket.clone(), pid: self.pid };
        }
        self.invalid(root_cause(error))
    }

    fn invalid(&self, what: impl ToString) -> Error {
        Error::InvalidResponse(self.socket.clone(), what.to_string())
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Follow {
    Yes,
    No,
}
