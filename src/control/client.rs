//! The other end of the control socket, as the commands use it.

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

/// A worker, reached by its control socket.
#[derive(Debug)]
pub struct ControlClient {
    http: reqwest::Client,
    socket: PathBuf,
    /// Who listens.
    pid: Option<i32>,
    /// What the short path leads through.
    _folder: File,
}

fn no_response_message(pid: Option<i32>) -> String {
    let waited = (CONTROL_TIMEOUT * 2).as_secs();
    let Some(pid) = pid else {
        return format!("a process listens on the socket but did not respond within {waited} s");
    };
    format!(
        "process {pid} listens there, and has not answered within {waited} s. Where `ps -o stat= -p {pid}` shows a T it is stopped, and \
         `kill -CONT {pid}` lets it go on; otherwise it hangs: `kill -KILL {pid}`, and the next start hands back what it held"
    )
}

/// Why a worker did not do, or say, what it was asked.
#[derive(Debug, Error)]
pub enum Error {
    /// Nobody listens at the socket.
    #[error("no worker answers at {}: is one running? `--socket` names another socket, `--config` another configuration", .0.display())]
    NotRunning(PathBuf),
    /// The socket may not be written to.
    #[error("{} may not be used by this user: it is for the worker's own user and group", .0.display())]
    Forbidden(PathBuf),
    /// Somebody listens, and does not answer.
    #[error("{}: {}", .socket.display(), no_response_message(*.pid))]
    NoResponse {
        /// Where.
        socket: PathBuf,
        /// Its process, where the system tells.
        pid: Option<i32>,
    },
    /// The worker said no.
    #[error("{0}")]
    Rejected(String),
    /// It holds nothing of that name, or has exited.
    #[error("{0}")]
    NotFound(String),
    /// It answers at its socket, and had no time to look.
    #[error("{0}")]
    Timeout(String),
    /// What came back is not what a worker says.
    #[error("{path}: {what}", path = .0.display(), what = .1)]
    InvalidResponse(PathBuf, String),
}

impl ControlClient {
    /// The worker that listens at `socket`. Nothing is sent yet.
    ///
    /// # Errors
    ///
    /// Where there is no such socket, or it may not be used.
    pub fn new(socket: &Path) -> Result<Self, Error> {
        let nobody = || Error::NotRunning(socket.to_owned());
        let (Some(folder), Some(name)) = (socket.parent(), socket.file_name()) else { return Err(nobody()) };
        let folder = if folder.as_os_str().is_empty() { Path::new(".") } else { folder };
        let told = |error: std::io::Error| {
            let forbidden = error.kind() == std::io::ErrorKind::PermissionDenied;
            if forbidden { Error::Forbidden(socket.to_owned()) } else { nobody() }
        };
        let folder = File::open(folder).map_err(told)?;
        let short = short_socket_path(&folder, Path::new(name));
        // Asked once more by hand: the HTTP client would hide why it cannot connect.
        let stream = std::os::unix::net::UnixStream::connect(&short).map_err(told)?;
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

    /// How it looks.
    ///
    /// # Errors
    ///
    /// Where it does not answer as it should.
    pub async fn status(&self) -> Result<WorkerStatusReply, Error> {
        let sent = self.http.get("http://worker/v1/status").timeout(CONTROL_TIMEOUT * 2).send().await;
        self.read_reply(sent).await
    }

    /// How it looks, where it is a controller.
    ///
    /// # Errors
    ///
    /// Where it does not answer as it should.
    pub async fn controller_status(&self) -> Result<controller_api::ControllerStatusReply, Error> {
        let sent = self.http.get("http://controller/v1/controller").timeout(CONTROL_TIMEOUT * 2).send().await;
        self.read_reply(sent).await
    }

    /// What was put aside in a pool, or in all of them, where it is a controller.
    ///
    /// # Errors
    ///
    /// Where it does not have the pool, or does not answer as it should.
    pub async fn list_poison(&self, pool: Option<&str>) -> Result<Inventories, Error> {
        let asked = self.http.get(self.poison_url("", pool, None)?).timeout(CONTROLLER_POISON_TIMEOUT * 3);
        self.read_reply(asked.send().await).await
    }

    /// The body of a request that was put aside, piece by piece.
    ///
    /// # Errors
    ///
    /// As [`ControlClient::list_poison`], and where there is no such request.
    pub async fn poison_body(&self, pool: Option<&str>, id: &str) -> Result<reqwest::Response, Error> {
        let asked = self.http.get(self.poison_url("/body", pool, Some(id))?).timeout(CONTROLLER_POISON_TIMEOUT * 3);
        let answer = asked.send().await.map_err(|error| self.request_error(&error))?;
        if answer.status().is_success() { Ok(answer) } else { Err(self.error_reply(answer).await) }
    }

    /// Tries requests once more that were put aside, or drops them.
    ///
    /// # Errors
    ///
    /// As [`ControlClient::list_poison`].
    pub async fn apply_poison_action(&self, settle: &PoisonActionRequest) -> Result<PoisonOutcome, Error> {
        let asked = self.http.post("http://controller/v1/poison").timeout(CONTROLLER_POISON_TIMEOUT * 3);
        self.read_reply(asked.json(settle).send().await).await
    }

    fn poison_url(&self, path: &str, pool: Option<&str>, id: Option<&str>) -> Result<url::Url, Error> {
        let query = [("pool", pool), ("id", id)].into_iter().filter_map(|(name, value)| Some((name, value?)));
        url::Url::parse_with_params(&format!("http://controller/v1/poison{path}"), query)
            .map_err(|error| Error::InvalidResponse(self.socket.clone(), error.to_string()))
    }

    /// Gives an order, and answers with what the worker says to it.
    ///
    /// # Errors
    ///
    /// Where the worker refuses, with its reason.
    pub async fn send_command(&self, ordered: &WorkerCommandRequest) -> Result<String, Error> {
        let sent = self.http.post("http://worker/v1/commands").timeout(CONTROL_TIMEOUT * 2).json(ordered).send().await;
        Ok(self.read_reply::<CommandReply>(sent).await?.message)
    }

    /// Gives an order to a controller, and answers with what it says to it.
    ///
    /// # Errors
    ///
    /// Where it refuses, with its reason.
    pub async fn send_pool_command(&self, ordered: &controller_api::PoolCommandRequest) -> Result<String, Error> {
        let sent =
            self.http.post("http://controller/v1/commands").timeout(CONTROL_TIMEOUT * 2).json(ordered).send().await;
        Ok(self.read_reply::<CommandReply>(sent).await?.message)
    }

    /// All that is known of a task that the worker holds.
    ///
    /// # Errors
    ///
    /// Where the worker does not hold it, or holds several of that name.
    pub async fn claim_details(&self, task: &str) -> Result<ClaimDetail, Error> {
        let address = url::Url::parse_with_params("http://worker/v1/claim", [("task", task)])
            .map_err(|error| Error::InvalidResponse(self.socket.clone(), error.to_string()))?;
        self.read_reply(self.http.get(address).timeout(CONTROL_TIMEOUT * 3).send().await).await
    }

    /// The log of a task that the worker holds, piece by piece.
    ///
    /// # Errors
    ///
    /// Where the worker does not hold it.
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
            || Error::InvalidResponse(self.socket.clone(), format!("answered with {status}")),
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
                return Err(Error::InvalidResponse(self.socket.clone(), "its answer does not end".to_owned()));
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

/// Whether to wait for more.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Follow {
    /// Until the task ends.
    Yes,
    /// What is there.
    No,
}
