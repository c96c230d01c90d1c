//! The other end of the control socket, as the commands use it.

use std::fs::File;
use std::path::{Path, PathBuf};

use reqwest::StatusCode;
use serde::de::DeserializeOwned;
use thiserror::Error;

use super::poison::{Inventories, Settle};
use super::{Answer, Ordered, Status, controller, through};
use crate::controller::inventory::Settled;
use crate::limits::{CONTROL_ANSWER_BYTES_MAX, CONTROL_TIMEOUT, CONTROLLER_POISON_TIME};
use crate::worker::view::Detail;

/// A worker, reached by its control socket.
#[derive(Debug)]
pub struct Client {
    http: reqwest::Client,
    socket: PathBuf,
    /// Who listens.
    pid: Option<i32>,
    /// What the short path leads through.
    _folder: File,
}

fn silent(pid: Option<i32>) -> String {
    let waited = (CONTROL_TIMEOUT * 2).as_secs();
    let Some(pid) = pid else { return format!("somebody listens there, and has not answered within {waited} s") };
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
    NobodyThere(PathBuf),
    /// The socket may not be written to.
    #[error("{} may not be used by this user: it is for the worker's own user and group", .0.display())]
    Forbidden(PathBuf),
    /// Somebody listens, and does not answer.
    #[error("{}: {}", .socket.display(), silent(*.pid))]
    Silent {
        /// Where.
        socket: PathBuf,
        /// Its process, where the system tells.
        pid: Option<i32>,
    },
    /// The worker said no.
    #[error("{0}")]
    Refused(String),
    /// It holds nothing of that name, or has exited.
    #[error("{0}")]
    Gone(String),
    /// It answers at its socket, and had no time to look.
    #[error("{0}")]
    Slow(String),
    /// What came back is not what a worker says.
    #[error("{path}: {what}", path = .0.display(), what = .1)]
    Broken(PathBuf, String),
}

impl Client {
    /// The worker that listens at `socket`. Nothing is sent yet.
    ///
    /// # Errors
    ///
    /// Where there is no such socket, or it may not be used.
    pub fn new(socket: &Path) -> Result<Self, Error> {
        let nobody = || Error::NobodyThere(socket.to_owned());
        let (Some(folder), Some(name)) = (socket.parent(), socket.file_name()) else { return Err(nobody()) };
        let folder = if folder.as_os_str().is_empty() { Path::new(".") } else { folder };
        let told = |error: std::io::Error| {
            let forbidden = error.kind() == std::io::ErrorKind::PermissionDenied;
            if forbidden { Error::Forbidden(socket.to_owned()) } else { nobody() }
        };
        let folder = File::open(folder).map_err(told)?;
        let short = through(&folder, Path::new(name));
        // Asked once more by hand: the HTTP client would hide why it cannot connect.
        let stream = std::os::unix::net::UnixStream::connect(&short).map_err(told)?;
        let pid = rustix::net::sockopt::socket_peercred(&stream).ok().map(|peer| peer.pid.as_raw_nonzero().get());
        crate::host::tls::choose();
        let http = reqwest::Client::builder()
            .unix_socket(short)
            .no_proxy()
            .redirect(reqwest::redirect::Policy::none())
            .build()
            .map_err(|error| Error::Broken(socket.to_owned(), error.to_string()))?;
        Ok(Self { http, socket: socket.to_owned(), pid, _folder: folder })
    }

    /// How it looks.
    ///
    /// # Errors
    ///
    /// Where it does not answer as it should.
    pub async fn status(&self) -> Result<Status, Error> {
        let sent = self.http.get("http://worker/v1/status").timeout(CONTROL_TIMEOUT * 2).send().await;
        self.answer(sent).await
    }

    /// How it looks, where it is a controller.
    ///
    /// # Errors
    ///
    /// Where it does not answer as it should.
    pub async fn controller(&self) -> Result<controller::Status, Error> {
        let sent = self.http.get("http://controller/v1/controller").timeout(CONTROL_TIMEOUT * 2).send().await;
        self.answer(sent).await
    }

    /// What was put aside in a pool, or in all of them, where it is a controller.
    ///
    /// # Errors
    ///
    /// Where it does not have the pool, or does not answer as it should.
    pub async fn poison(&self, pool: Option<&str>) -> Result<Inventories, Error> {
        let asked = self.http.get(self.poisoned("", pool, None)?).timeout(CONTROLLER_POISON_TIME * 3);
        self.answer(asked.send().await).await
    }

    /// The body of a request that was put aside, piece by piece.
    ///
    /// # Errors
    ///
    /// As [`Client::poison`], and where there is no such request.
    pub async fn poison_body(&self, pool: Option<&str>, id: &str) -> Result<reqwest::Response, Error> {
        let asked = self.http.get(self.poisoned("/body", pool, Some(id))?).timeout(CONTROLLER_POISON_TIME * 3);
        let answer = asked.send().await.map_err(|error| self.broken(&error))?;
        if answer.status().is_success() { Ok(answer) } else { Err(self.refused(answer).await) }
    }

    /// Tries requests once more that were put aside, or drops them.
    ///
    /// # Errors
    ///
    /// As [`Client::poison`].
    pub async fn settle_poison(&self, settle: &Settle) -> Result<Settled, Error> {
        let asked = self.http.post("http://controller/v1/poison").timeout(CONTROLLER_POISON_TIME * 3);
        self.answer(asked.json(settle).send().await).await
    }

    fn poisoned(&self, path: &str, pool: Option<&str>, id: Option<&str>) -> Result<url::Url, Error> {
        let query = [("pool", pool), ("id", id)].into_iter().filter_map(|(name, value)| Some((name, value?)));
        url::Url::parse_with_params(&format!("http://controller/v1/poison{path}"), query)
            .map_err(|error| Error::Broken(self.socket.clone(), error.to_string()))
    }

    /// Gives an order, and answers with what the worker says to it.
    ///
    /// # Errors
    ///
    /// Where the worker refuses, with its reason.
    pub async fn order(&self, ordered: &Ordered) -> Result<String, Error> {
        let sent = self.http.post("http://worker/v1/orders").timeout(CONTROL_TIMEOUT * 2).json(ordered).send().await;
        Ok(self.answer::<Answer>(sent).await?.said)
    }

    /// Gives an order to a controller, and answers with what it says to it.
    ///
    /// # Errors
    ///
    /// Where it refuses, with its reason.
    pub async fn tell(&self, ordered: &controller::Ordered) -> Result<String, Error> {
        let sent =
            self.http.post("http://controller/v1/orders").timeout(CONTROL_TIMEOUT * 2).json(ordered).send().await;
        Ok(self.answer::<Answer>(sent).await?.said)
    }

    /// All that is known of a task that the worker holds.
    ///
    /// # Errors
    ///
    /// Where the worker does not hold it, or holds several of that name.
    pub async fn show(&self, task: &str) -> Result<Detail, Error> {
        let address = url::Url::parse_with_params("http://worker/v1/task", [("task", task)])
            .map_err(|error| Error::Broken(self.socket.clone(), error.to_string()))?;
        self.answer(self.http.get(address).timeout(CONTROL_TIMEOUT * 3).send().await).await
    }

    /// The log of a task that the worker holds, piece by piece.
    ///
    /// # Errors
    ///
    /// Where the worker does not hold it.
    pub async fn log(&self, task: &str, follow: Follow) -> Result<reqwest::Response, Error> {
        let query = [("task", task), ("follow", if follow == Follow::Yes { "true" } else { "false" })];
        let address = url::Url::parse_with_params("http://worker/v1/log", query)
            .map_err(|error| Error::Broken(self.socket.clone(), error.to_string()))?;
        let sent = self.http.get(address).send().await;
        let answer = sent.map_err(|error| self.broken(&error))?;
        if answer.status().is_success() { Ok(answer) } else { Err(self.refused(answer).await) }
    }

    async fn answer<T: DeserializeOwned>(&self, sent: reqwest::Result<reqwest::Response>) -> Result<T, Error> {
        let answer = sent.map_err(|error| self.broken(&error))?;
        if !answer.status().is_success() {
            return Err(self.refused(answer).await);
        }
        let body = self.body(answer).await?;
        serde_json::from_slice(&body).map_err(|error| Error::Broken(self.socket.clone(), error.to_string()))
    }

    async fn refused(&self, answer: reqwest::Response) -> Error {
        let status = answer.status();
        let said = self.body(answer).await.ok().and_then(|body| serde_json::from_slice::<Answer>(&body).ok());
        said.map_or_else(
            || Error::Broken(self.socket.clone(), format!("answered with {status}")),
            |Answer { said }| match status {
                StatusCode::NOT_FOUND | StatusCode::SERVICE_UNAVAILABLE => Error::Gone(said),
                StatusCode::GATEWAY_TIMEOUT => Error::Slow(said),
                _ => Error::Refused(said),
            },
        )
    }

    async fn body(&self, mut answer: reqwest::Response) -> Result<Vec<u8>, Error> {
        let mut body = Vec::new();
        while let Some(piece) = answer.chunk().await.map_err(|error| self.broken(&error))? {
            body.extend_from_slice(&piece);
            if body.len() > CONTROL_ANSWER_BYTES_MAX {
                return Err(Error::Broken(self.socket.clone(), "its answer does not end".to_owned()));
            }
        }
        Ok(body)
    }

    fn broken(&self, error: &reqwest::Error) -> Error {
        if error.is_timeout() {
            return Error::Silent { socket: self.socket.clone(), pid: self.pid };
        }
        let mut text = error.to_string();
        let mut cause = std::error::Error::source(error);
        while let Some(error) = cause {
            text = error.to_string();
            cause = error.source();
        }
        Error::Broken(self.socket.clone(), text)
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
