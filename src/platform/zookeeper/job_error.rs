//! Why a request, an event or their data cannot be used.

use super::Error;
use super::shards::ShardError;
use journeyman_domain::refusal::{CallError, Refusal};

/// Why a request or its data cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum JobError {
    /// A call failed.
    #[error(transparent)]
    Call(#[from] Error),
    /// Sharded data cannot be read or written.
    #[error(transparent)]
    Shards(ShardError),
    /// A node does not hold what it should.
    #[error("{path} cannot be read: {message}")]
    Unreadable {
        /// The node.
        path: String,
        /// What is wrong, without its content.
        message: String,
    },
}

impl From<JobError> for CallError {
    fn from(error: JobError) -> Self {
        match error {
            JobError::Call(error) => error.into(),
            other @ (JobError::Shards(_) | JobError::Unreadable { .. }) => {
                Self { refusal: Refusal::Rejected, message: other.to_string() }
            }
        }
    }
}

impl From<ShardError> for JobError {
    fn from(error: ShardError) -> Self {
        match error {
            ShardError::Call(error) => Self::Call(error),
            other @ (ShardError::NotCompressed { .. } | ShardError::TooLarge(_)) => Self::Shards(other),
        }
    }
}
