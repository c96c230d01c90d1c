//! Why a call has failed.

/// Why a call has failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// The node, or the parent of one to be created, does not exist.
    #[error("the node does not exist")]
    NoNode,
    /// The client lacks the right.
    #[error("not authorized")]
    NoAuth,
    /// The node has another version.
    #[error("the node has another version")]
    BadVersion,
    /// The node exists.
    #[error("the node exists")]
    NodeExists,
    /// The node has children.
    #[error("the node has children")]
    NotEmpty,
    /// The server accepts no such access control list.
    #[error("invalid access control list")]
    InvalidAcl,
    /// The server accepts no such credentials. The session has ended.
    #[error("authentication failed")]
    AuthFailed,
    /// The session has expired, and with it its ephemeral nodes.
    #[error("the session has expired")]
    SessionExpired,
    /// The client was closed.
    #[error("the session is closed")]
    Closed,
    /// The subtree may have no more nodes or data.
    #[error("the quota is exceeded")]
    QuotaExceeded,
    /// The server has too much to do.
    #[error("the server is overloaded")]
    Throttled,
    /// The connection was lost after the call was sent: whether it took effect is unknown.
    #[error("lost the connection to the server")]
    ConnectionLoss,
    /// The call was not answered in time: whether it took effect is unknown.
    #[error("no answer in time")]
    Timeout,
    /// The call would not be accepted.
    #[error("{0}")]
    BadArguments(&'static str),
    /// There is no connection.
    #[error("{0}")]
    Connect(String),
    /// Another code of the server's.
    #[error("error {0} of the server")]
    Other(i32),
}

impl Error {
    pub(super) const fn from_code(code: i32) -> Self {
        match code {
            -4 => Self::ConnectionLoss,
            -7 => Self::Timeout,
            -8 => Self::BadArguments("the server rejects path or data"),
            -101 => Self::NoNode,
            -102 => Self::NoAuth,
            -103 => Self::BadVersion,
            -110 => Self::NodeExists,
            -111 => Self::NotEmpty,
            -112 => Self::SessionExpired,
            -114 => Self::InvalidAcl,
            -115 => Self::AuthFailed,
            -125 => Self::QuotaExceeded,
            -127 => Self::Throttled,
            code => Self::Other(code),
        }
    }
}
