//! The control socket of a worker or a controller: HTTP over a Unix socket, for the users that may write to it.
//!
//! [`worker_api`] and [`controller_api`] serve it, [`client`] is what the commands use.

pub mod client;
pub mod controller_api;
mod socket;
pub mod worker_api;

use std::fs::File;
use std::os::fd::AsRawFd as _;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use journeyman_worker::engine::{Note, WorkerStatus};

pub const SOCKET_NAME: &str = "control.sock";

pub fn socket_in(work_dir: &Path) -> PathBuf {
    work_dir.join(SOCKET_NAME)
}

/// The address of a socket has at most 107 bytes, so a longer path is reached through its open directory.
pub(crate) fn short_socket_path(folder: &File, name: &Path) -> PathBuf {
    PathBuf::from(format!("/proc/self/fd/{}", folder.as_raw_fd())).join(name)
}

/// Reply to `GET /v1/status`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct WorkerStatusReply {
    pub version: String,
    pub id: String,
    pub group: String,
    pub pid: u32,
    #[serde(flatten)]
    pub snapshot: WorkerStatus,
}

impl WorkerStatusReply {
    pub fn new(id: String, group: String, snapshot: WorkerStatus) -> Self {
        Self { version: env!("CARGO_PKG_VERSION").to_owned(), id, group, pid: std::process::id(), snapshot }
    }
}

/// Body of `POST /v1/commands`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WorkerCommandRequest {
    pub command: WorkerCommand,
    /// Author and reason.
    pub note: Note,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub enum WorkerCommand {
    Pause {
        /// Resume after this time.
        seconds: Option<f64>,
    },
    Resume,
    Drain {
        /// Overrides the configured deadline.
        seconds: Option<f64>,
    },
    /// Release all claims and exit.
    Stop,
    Reload,
    /// Stop a task and release its claim.
    Release {
        /// `TASK`, `TASK/RUN` or a unique prefix of either.
        task: String,
    },
    /// Stop a task and fail it.
    Cancel {
        /// The task's id, or its beginning, as for [`WorkerCommand::Release`].
        task: String,
    },
}

/// Reply to a command, and body of every error.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CommandReply {
    /// What happened, for a person.
    pub message: String,
}

pub const SPAN_MAX_SECONDS: f64 = 366.0 * 24.0 * 3600.0;
