//! Client of the control socket.

use std::fs::File;
use std::path::{Path, PathBuf};

use reqwest::StatusCode;
use serde::de::DeserializeOwned;
use thiserror::Error;

use super::poison_api::{Inventories, PoisonActionRequest};
use super::{CommandReply, WorkerCommandRequest, WorkerStatusReply, controller_api, short_socket_path};
use crate::controller::poison_queue::PoisonOutcome;
use crate::limits::{CONTROL_ANSWER_BYTES_MAX, CONTROL_TIMEOUT, CONTROLLER_POISON_TIMEOUT};
use crate::worker::status::ClaimDetail;

#[derive(Debug)]
pub struct ControlClient {
    http: reqwest::Client,
    socket: PathBuf,
    pid: Option<i32>,
    /// Keeps the short path valid.
    _folder: File,
}

fn no_response_message(pid: Option<i32>) -> String {
    let waited = (CONTROL_TIMEOUT * 2).as_secs();
    let Some(pid) = pid else { return format!("no response from the listening process within {waited} s") };
    format!(
        "no response from process {pid} within {waited} s. If `ps -o stat= -p {pid}` shows T it is stopped: `kill -CONT {pid}` continues \
         it. Otherwise it hangs: `kill -KILL {pid}`; the next start releases its claims"
    )
}

#[derive(Debug, Error)]
pub enum Error {
    #[error("no worker is listening at {}; is it running? `--socket` sets another socket, `--config` another configuration", .0.display())]
    NotRunning(PathBuf),
    #[error("permission denied for {}: only the user and group of the worker may use it", .0.display())]
    Forbidden(PathBuf),
    #[error("{}: {}", .socket.display(), no_response_message(*.pid))]
    NoResponse { socket: PathBuf, pid: Option<i32> },
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
        let pid = rustix::net::sockopt::socket_peercred(&stream).ok().map(|peer| peer.pid.as_raw_nonzero().get());
        crate::host::crypto_provider::install_crypto_provider();
        let http = reqwest::Client::builder()
            .unix_socket(short)
            .no_proxy()
            .redirect(reqwest::redirect::Policy::none())
            .build()
            .map_err(|error| Error::InvalidResponse(socket.to_owned(), error.to_string()))?;
        Ok(Self { http, socket: socket.to_owned(), pid, _folder: folder })
    }

    pub async fn status(&self) -> Result<WorkerStatusReply, Error> {
        let sent = self.http.get("http://worker/v1/status").timeout(CONTROL_TIMEOUT * 2).send().await;
        self.read_reply(sent).await
    }

    pub async fn controller_status(&self) -> Result<controller_api::ControllerStatusReply, Error> {
        let sent = self.http.get("http://controller/v1/controller").timeout(CONTROL_TIMEOUT * 2).send().await;
        self.read_reply(sent).await
    }

    /// Lists the poison queue of one pool or of all.
    pub async fn list_poison(&self, pool: Option<&str>) -> Result<Inventories, Error> {
        let asked = self.http.get(self.poison_url("", pool, None)?).timeout(CONTROLLER_POISON_TIMEOUT * 3);
        self.read_reply(asked.send().await).await
    }

    /// Streams the body of a poisoned request.
    pub async fn poison_body(&self, pool: Option<&str>, id: &str) -> Result<reqwest::Response, Error> {
        let asked = self.http.get(self.poison_url("/body", pool, Some(id))?).timeout(CONTROLLER_POISON_TIMEOUT * 3);
        let answer = asked.send().await.map_err(|error| self.request_error(&error))?;
        if answer.status().is_success() { Ok(answer) } else { Err(self.error_reply(answer).await) }
    }

    pub async fn apply_poison_action(&self, settle: &PoisonActionRequest) -> Result<PoisonOutcome, Error> {
        let asked = self.http.post("http://controller/v1/poison").timeout(CONTROLLER_POISON_TIMEOUT * 3);
        self.read_reply(asked.json(settle).send().await).await
    }

    fn poison_url(&self, path: &str, pool: Option<&str>, id: Option<&str>) -> Result<url::Url, Error> {
        let query = [("pool", pool), ("id", id)].into_iter().filter_map(|(name, value)| Some((name, value?)));
        url::Url::parse_with_params(&format!("http://controller/v1/poison{path}"), query)
            .map_err(|error| Error::InvalidResponse(self.socket.clone(), error.to_string()))
    }

    /// Returns the message of the worker.
    pub async fn send_command(&self, ordered: &WorkerCommandRequest) -> Result<String, Error> {
        let sent = self.http.post("http://worker/v1/commands").timeout(CONTROL_TIMEOUT * 2).json(ordered).send().await;
        Ok(self.read_reply::<CommandReply>(sent).await?.message)
    }

    /// Returns the message of the controller.
    pub async fn send_pool_command(&self, ordered: &controller_api::PoolCommandRequest) -> Result<String, Error> {
        let sent =
            self.http.post("http://controller/v1/commands").timeout(CONTROL_TIMEOUT * 2).json(ordered).send().await;
        Ok(self.read_reply::<CommandReply>(sent).await?.message)
    }

    pub async fn claim_details(&self, task: &str) -> Result<ClaimDetail, Error> {
        let address = url::Url::parse_with_params("http://worker/v1/claim", [("task", task)])
            .map_err(|error| Error::InvalidResponse(self.socket.clone(), error.to_string()))?;
        self.read_reply(self.http.get(address).timeout(CONTROL_TIMEOUT * 3).send().await).await
    }

    /// Streams the log of a claim.
    pub async fn log(&self, task: &str, follow: Follow) -> Result<reqwest::Response, Error> {
        let query = [("task", task), ("follow", if follow == Follow::Yes { "true" } else { "false" })];
        let address = url::Url::parse_with_params("http://worker/v1/log", query)
            .map_err(|error| Error::InvalidResponse(self.socket.clone(), error.to_string()))?;
        let sent = self.http.get(address).send().await;
        let answer = sent.map_err(|error| self.request_error(&error))?;
        if answer.status().is_success() { Ok(answer) } else { Err(self.error_reply(answer).await) }
    }

    async fn read_reply<T: DeserializeOwned>(&self, sent: reqwest::Result<reqwest::Response>) -> Result<T, Error> {
        let answer = sent.map_err(|error| self.request_error(&error))?;
        if !answer.status().is_success() {
            return Err(self.error_reply(answer).await);
        }
        let body = self.read_body(answer).await?;
        serde_json::from_slice(&body).map_err(|error| Error::InvalidResponse(self.socket.clone(), error.to_string()))
    }

    async fn error_reply(&self, answer: reqwest::Response) -> Error {
        let status = answer.status();
        let said =
            self.read_body(answer).await.ok().and_then(|body| serde_json::from_slice::<CommandReply>(&body).ok());
        said.map_or_else(
            || Error::InvalidResponse(self.socket.clone(), format!("unexpected status {status}")),
            |CommandReply { message }| match status {
                StatusCode::NOT_FOUND | StatusCode::SERVICE_UNAVAILABLE => Error::NotFound(message),
                StatusCode::GATEWAY_TIMEOUT => Error::Timeout(message),
                _ => Error::Rejected(message),
            },
        )
    }

    async fn read_body(&self, mut answer: reqwest::Response) -> Result<Vec<u8>, Error> {
        let mut body = Vec::new();
        while let Some(piece) = answer.chunk().await.map_err(|error| self.request_error(&error))? {
            body.extend_from_slice(&piece);
            if body.len() > CONTROL_ANSWER_BYTES_MAX {
                return Err(Error::InvalidResponse(self.socket.clone(), "response too large".to_owned()));
            }
        }
        Ok(body)
    }

    fn request_error(&self, error: &reqwest::Error) -> Error {
        if error.is_timeout() {
            return Error::NoResponse { socket: self.socket.clone(), pid: self.pid };
        }
        let mut text = error.to_string();
        let mut cause = std::error::Error::source(error);
        while let Some(error) = cause {
            text = error.to_string();
            cause = error.source();
        }
        Error::InvalidResponse(self.socket.clone(), text)
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Follow {
    Yes,
    No,
}
