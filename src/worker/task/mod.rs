//! The parts of a task that sources and handlers share: its definition, its request, its results and its artifacts.

pub mod artifact;
pub mod definition;
pub mod deployment;
pub mod file;
pub mod formats;
pub mod request;
pub mod results;

pub use artifact::{Artifact, ArtifactBody, ArtifactErrorReason, ContentEncoding};
pub use definition::Definition;
pub use deployment::{Deployment, DeploymentFuture, PurgeRequest, RunCredentials};
pub use file::TaskFile;
pub use request::{IdempotencyKey, Request, RequestMessage};
pub(crate) use results::cannot_pause;
pub use results::{
    Deferral, NextCheck, PartialReplySink, Reply, ReplyError, ReplyFuture, ReplyLimits, ReplyStatus, Results,
};

/// The handler that exists without a section.
pub const COMMAND: &str = "command";

pub(crate) fn command_name() -> String {
    COMMAND.to_owned()
}
