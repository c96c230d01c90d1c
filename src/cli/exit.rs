//! Exit codes of every command, and the failure that carries one.

use std::process::ExitCode;
use std::sync::OnceLock;

use journeyman_platform::http::client::error_chain;
use journeyman_platform::redact;
use journeyman_worker::engine::config::ExitCodes;

/// The numbers are stable; `guide/configuration.md` has the same list, see [`Exit::description`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Exit {
    Success = 0,
    Failed = 1,
    Usage = 2,
    Idle = 10,
    HostTerminating = 12,
    LimitReached = 13,
    Released = 14,
    NotNeeded = 15,
    Internal = 20,
    HostUnusable = 21,
    Config = 30,
    Denied = 31,
    Unreachable = 32,
    Aborted = 40,
    ProcessesLeft = 41,
}

impl Exit {
    /// All codes in order of their numbers, with descriptions.
    pub const ALL: [(Self, &'static str); 15] = [
        (Self::Success, "success: done, drained or stopped as requested"),
        (Self::Failed, "failed: rejected, not found, not completed, or a handler that breaks the contract"),
        (Self::Usage, "usage: invalid command line"),
        (Self::Idle, "idle: no task for `exit_when_idle`"),
        (Self::HostTerminating, "host terminating (spot notice, preemption): tasks finished or were released"),
        (Self::LimitReached, "limit reached: `max_tasks` or `max_uptime`"),
        (
            Self::Released,
            "released: stopped by `stop`, QUIT, a second signal or the drain deadline; running tasks were released",
        ),
        (Self::NotNeeded, "not needed: the worker pool wants this worker to terminate; tasks finished"),
        (Self::Internal, "internal error"),
        (Self::HostUnusable, "host unusable: a directory, a port or a program"),
        (Self::Config, "invalid configuration"),
        (Self::Denied, "denied: the queue rejects the credentials"),
        (Self::Unreachable, "unreachable: the queue does not respond"),
        (Self::Aborted, "aborted by a third signal: tasks were not released"),
        (Self::ProcessesLeft, "processes left: processes of a task survived SIGKILL"),
    ];

    pub const fn code(self) -> u8 {
        self as u8
    }

    /// The code that generic-worker has for it. The others are those of a command line that is no worker's.
    pub const fn generic_worker_code(self) -> u8 {
        match self {
            Self::Success | Self::Released | Self::Aborted => 71,
            Self::LimitReached => 0,
            Self::Idle => 68,
            Self::NotNeeded => 70,
            Self::HostTerminating => 72,
            Self::Config => 73,
            Self::Internal | Self::HostUnusable | Self::Denied | Self::Unreachable | Self::ProcessesLeft => 69,
            Self::Failed | Self::Usage => self.code(),
        }
    }

    pub fn description(self) -> &'static str {
        Self::ALL.iter().find(|(exit, _)| *exit == self).map_or("", |(_, description)| description)
    }
}

/// Set once the configuration of a worker is known.
pub(super) static EXIT_CODES: OnceLock<ExitCodes> = OnceLock::new();

impl From<Exit> for ExitCode {
    fn from(exit: Exit) -> Self {
        let is_generic_worker = EXIT_CODES.get() == Some(&ExitCodes::GenericWorker);
        Self::from(if is_generic_worker { exit.generic_worker_code() } else { exit.code() })
    }
}

#[derive(Debug)]
pub struct Failure {
    pub exit: Exit,
    /// Printed after `error: `; empty if the command has already printed it.
    pub message: String,
}

impl Failure {
    pub fn new(exit: Exit, message: impl Into<String>) -> Self {
        Self { exit, message: redact::text(&message.into()).into_owned() }
    }

    /// Takes the message of the error and of its causes.
    pub fn from_error(exit: Exit, error: &dyn std::error::Error) -> Self {
        Self::new(exit, error_chain(error))
    }
}

pub type ExitResult = Result<Exit, Failure>;

impl From<crate::config::Problems> for Failure {
    fn from(problems: crate::config::Problems) -> Self {
        Self { exit: Exit::Config, message: problems.to_string() }
    }
}

impl From<journeyman_platform::settings::secrets::SecretError> for Failure {
    fn from(error: journeyman_platform::settings::secrets::SecretError) -> Self {
        Self::from_error(Exit::Config, &error)
    }
}

impl From<std::io::Error> for Failure {
    /// A closed pipe (`journeyman … | head`) is not a failure.
    fn from(error: std::io::Error) -> Self {
        if error.kind() == std::io::ErrorKind::BrokenPipe {
            return Self { exit: Exit::Success, message: String::new() };
        }
        Self::from_error(Exit::HostUnusable, &error)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exit_codes_are_unique_and_sorted() {
        let mut codes: Vec<u8> = Exit::ALL.iter().map(|(exit, _)| exit.code()).collect();
        codes.dedup();
        assert_eq!(codes.len(), Exit::ALL.len());
        assert!(codes.is_sorted());
    }
}
