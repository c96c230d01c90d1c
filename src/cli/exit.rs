//! What the process says when it ends: one list of exit codes for every command, and the failure that carries one.

use std::process::ExitCode;

use crate::redact;

/// Why the process ended. The numbers are stable; `guide/configuration.md` shows the same list.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Exit {
    /// Done, drained or stopped as asked.
    Success = 0,
    /// The answer is no: refused, not found, not completed, a handler that does not keep the contract, a demo that did not
    /// end as it should.
    Failed = 1,
    /// The command line cannot be understood.
    Usage = 2,
    /// There was nothing to do for as long as `exit_when_idle` says.
    Idle = 10,
    /// The host is taken away: a spot notice, a preemption, a shutdown; what was running has finished or was handed back.
    HostTerminating = 12,
    /// `max_tasks` or `max_uptime` was reached.
    LimitReached = 13,
    /// It was told to stop (`journeyman stop`, QUIT, a second signal), or the drain deadline was reached; what was running has
    /// been handed back.
    HandedBack = 14,
    /// A fault of journeyman itself.
    Internal = 20,
    /// This machine cannot do it: a folder, a port, a program.
    HostUnusable = 21,
    /// The configuration cannot be used.
    Config = 30,
    /// The queue does not accept our credentials.
    Denied = 31,
    /// The queue cannot be reached.
    Unreachable = 32,
    /// A repeated signal ended the process at once; what was running was not handed back.
    Aborted = 40,
    /// Processes of a task are still there although they were killed.
    ProcessesLeft = 41,
}

impl Exit {
    /// Every way to end, in the order of the numbers.
    pub const ALL: [Self; 14] = [
        Self::Success,
        Self::Failed,
        Self::Usage,
        Self::Idle,
        Self::HostTerminating,
        Self::LimitReached,
        Self::HandedBack,
        Self::Internal,
        Self::HostUnusable,
        Self::Config,
        Self::Denied,
        Self::Unreachable,
        Self::Aborted,
        Self::ProcessesLeft,
    ];

    /// The number.
    #[must_use]
    pub const fn code(self) -> u8 {
        self as u8
    }

    /// What it means, for help texts and the guide.
    #[must_use]
    pub const fn description(self) -> &'static str {
        match self {
            Self::Success => "done, drained or stopped as asked",
            Self::Failed => {
                "the answer is no: refused, not found, not completed, or a handler that does not keep the contract"
            }
            Self::Usage => "the command line cannot be understood",
            Self::Idle => "nothing to do for as long as `exit_when_idle` says",
            Self::HostTerminating => {
                "the host is taken away (spot notice, preemption): tasks finished or were handed back"
            }
            Self::LimitReached => "`max_tasks` or `max_uptime` was reached",
            Self::HandedBack => {
                "stopped by `stop`, QUIT or a second signal, or the drain deadline: running tasks were handed back"
            }
            Self::Internal => "a fault of journeyman itself",
            Self::HostUnusable => "this machine cannot do it: a folder, a port, a program",
            Self::Config => "the configuration cannot be used",
            Self::Denied => "the queue does not accept our credentials",
            Self::Unreachable => "the queue cannot be reached",
            Self::ProcessesLeft => "processes of a task are still there although they were killed",
            Self::Aborted => "a third signal: ended at once, tasks were not handed back",
        }
    }
}

/// What a service manager does after an exit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RestartPolicy {
    /// It ended as it should: it counts as success, and is not started again.
    Stop,
    /// It failed, and would fail again until a person has done something: it is not started again.
    NeedsOperator,
    /// It failed, and may do better: it is started again.
    Restart,
}

impl Exit {
    /// What the units under `examples/systemd` do after it; a test holds them to it.
    #[must_use]
    pub const fn restart_policy(self) -> RestartPolicy {
        match self {
            Self::Success | Self::Idle | Self::HostTerminating | Self::LimitReached | Self::HandedBack => {
                RestartPolicy::Stop
            }
            Self::Usage | Self::Config | Self::Denied | Self::Aborted => RestartPolicy::NeedsOperator,
            Self::Failed | Self::Internal | Self::HostUnusable | Self::Unreachable | Self::ProcessesLeft => {
                RestartPolicy::Restart
            }
        }
    }
}

impl From<Exit> for ExitCode {
    fn from(exit: Exit) -> Self {
        Self::from(exit.code())
    }
}

/// Why a command did not do what was asked: the exit code and what to tell the user.
#[derive(Debug)]
pub struct Failure {
    /// How the process ends.
    pub exit: Exit,
    /// What is shown after `error: `; empty where all has been said.
    pub message: String,
}

impl Failure {
    /// A failure with a message.
    pub fn new(exit: Exit, message: impl Into<String>) -> Self {
        Self { exit, message: redact::text(&message.into()).into_owned() }
    }

    /// A failure with the message of an error and its causes.
    pub fn from_error(exit: Exit, error: &dyn std::error::Error) -> Self {
        let mut message = error.to_string();
        let mut cause = error.source();
        while let Some(error) = cause {
            message.push_str(": ");
            message.push_str(&error.to_string());
            cause = error.source();
        }
        Self::new(exit, message)
    }
}

/// How a command ended.
pub type ExitResult = Result<Exit, Failure>;

impl From<crate::config::Problems> for Failure {
    fn from(problems: crate::config::Problems) -> Self {
        Self { exit: Exit::Config, message: problems.to_string() }
    }
}

impl From<crate::config::secrets::SecretError> for Failure {
    fn from(error: crate::config::secrets::SecretError) -> Self {
        Self::from_error(Exit::Config, &error)
    }
}

impl From<std::io::Error> for Failure {
    /// Output that nobody reads any more (`journeyman … | head`) is no failure of ours.
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
    fn every_exit_code_is_its_own() {
        let mut codes: Vec<u8> = Exit::ALL.iter().map(|exit| exit.code()).collect();
        codes.dedup();
        assert_eq!(codes.len(), Exit::ALL.len());
        assert!(codes.is_sorted());
    }
}
