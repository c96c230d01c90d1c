//! Taskcluster's worker-runner, which starts a worker on a host, renews its credentials and tells it when to go.
//!
//! Source of the rules: the worker-runner protocol of Taskcluster's tools (`workerproto`). Messages are lines `~{json}` on
//! the worker's standard input and output; every other line is text. The runner says `welcome` with what it can do, the
//! worker answers `hello` with what of it is used, and only then may either say more.

mod protocol;
mod runner_config;

pub use protocol::{RunnerCredentials, RunnerProtocol, RunnerRequest};
pub use runner_config::{RunnerConfig, RunnerConfigError, SOURCE_NAME};
