//! Runs under Taskcluster's worker-runner, which starts a worker, renews its credentials and requests its shutdown.
//!
//! Source of the rules: the worker-runner protocol of Taskcluster's tools (`workerproto`). Messages are lines `~{json}` on
//! the worker's standard input and output; every other line is log text. The runner sends `welcome` with its capabilities, the
//! worker answers `hello` with the ones it uses, and then both may send other messages.

mod protocol;
mod runner_config;

pub use protocol::{RunnerProtocol, RunnerRequest};
pub use runner_config::{RunnerConfig, SOURCE_NAME};
