//! The control socket of a worker or a controller: what those who run it ask it, and what they tell it.
//!
//! HTTP over a Unix socket in a folder of its own. Who may write to the socket may give orders; nobody else can reach it.
//! [`worker_api`] answers beside the worker, [`controller_api`] beside a controller; they decide nothing. [`client`] is what the
//! commands use.

pub mod client;
pub mod controller_api;
pub mod poison_api;
mod socket;
pub mod worker_api;

use std::fs::File;
use std::os::fd::AsRawFd as _;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::worker::{Note, WorkerStatus};

/// The socket's name in the work folder, where no other path is set.
pub const SOCKET_NAME: &str = "control.sock";

/// The socket of the worker with this work folder.
#[must_use]
pub fn socket_in(work_dir: &Path) -> PathBuf {
    work_dir.join(SOCKET_NAME)
}

/// A path of any length, short enough for a socket's address: by way of its open folder.
pub(crate) fn short_socket_path(folder: &File, name: &Path) -> PathBuf {
    PathBuf::from(format!("/proc/self/fd/{}", folder.as_raw_fd())).join(name)
}

/// Which worker answers, and how it looks. The answer to `GET /v1/status`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct WorkerStatusReply {
    /// Its version.
    pub version: String,
    /// Its name.
    pub id: String,
    /// Its group.
    pub group: String,
    /// Its process.
    pub pid: u32,
    /// How it looks.
    #[serde(flatten)]
    pub snapshot: WorkerStatus,
}

impl WorkerStatusReply {
    /// Of this process.
    #[must_use]
    pub fn new(id: String, group: String, snapshot: WorkerStatus) -> Self {
        Self { version: env!("CARGO_PKG_VERSION").to_owned(), id, group, pid: std::process::id(), snapshot }
    }
}

/// Body of `POST /v1/commands`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WorkerCommandRequest {
    /// The command.
    pub command: WorkerCommand,
    /// Author and reason.
    pub note: Note,
}

/// What a worker can be told.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub enum WorkerCommand {
    /// Claim nothing, for so many seconds or until told otherwise.
    Pause {
        /// For how long.
        seconds: Option<f64>,
    },
    /// Claim again.
    Resume,
    /// Finish what is held and leave, within so many seconds or as configured.
    Drain {
        /// For how long.
        seconds: Option<f64>,
    },
    /// Hand back what is held and leave.
    Stop,
    /// Read the configuration again.
    Reload,
    /// Stop a task and release its claim.
    Release {
        /// `TASK`, `TASK/RUN` or a prefix of either, with `SOURCE:` before it if the name is ambiguous.
        task: String,
    },
    /// Stop a task and fail it.
    Cancel {
        /// As for [`WorkerCommand::Release`].
        task: String,
    },
}

/// Reply to a command, and body of every error.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct CommandReply {
    /// What happened, for a person.
    pub message: String,
}

/// The longest span that an order may name.
pub const SPAN_MAX_SECONDS: f64 = 366.0 * 24.0 * 3600.0;
