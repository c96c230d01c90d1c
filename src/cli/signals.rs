//! Maps signals to commands: the first TERM or INT drains, the second releases claims, the third aborts; QUIT releases.

use tokio::signal::unix::{Signal, SignalKind, signal};

use super::exit::{Exit, Failure};
use journeyman_platform::host::clock::or_pending;
use journeyman_worker::engine::{Command, Control, Note};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ShutdownStep {
    Drain,
    Release,
    Abort,
}

/// The step never decreases, and does not depend on the order of two signals that arrive together.
#[derive(Debug, Default)]
struct Escalation {
    terminate_count: u8,
    quit_received: bool,
}

impl Escalation {
    fn escalate(&mut self, signal: &str) -> ShutdownStep {
        if signal == QUIT {
            self.quit_received = true;
        } else {
            self.terminate_count = self.terminate_count.saturating_add(1);
        }
        match self.terminate_count {
            3.. => ShutdownStep::Abort,
            2 => ShutdownStep::Release,
            0 | 1 if self.quit_received => ShutdownStep::Release,
            0 | 1 => ShutdownStep::Drain,
        }
    }
}

const QUIT: &str = "SIGQUIT";

/// Listens for TERM, INT and QUIT. A signal that arrives before `next` is called is kept.
#[derive(Debug)]
pub(super) struct ExitSignals {
    term: Signal,
    int: Signal,
    quit: Signal,
    hangup: Option<Signal>,
}

impl ExitSignals {
    /// Replaces the signals' default action, which ends the process.
    ///
    /// # Errors
    ///
    /// [`Exit::HostUnusable`] if no handler can be installed.
    pub(super) fn listen() -> Result<Self, Failure> {
        Ok(Self {
            term: subscribe(SignalKind::terminate())?,
            int: subscribe(SignalKind::interrupt())?,
            quit: subscribe(SignalKind::quit())?,
            hangup: None,
        })
    }

    /// Takes the end of the terminal for a QUIT.
    pub(super) fn with_hangup(self) -> Result<Self, Failure> {
        Ok(Self { hangup: Some(subscribe(SignalKind::hangup())?), ..self })
    }

    /// Waits for the next signal and returns its name.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe.
    pub(super) async fn next(&mut self) -> &'static str {
        tokio::select! {
            _ = self.term.recv() => "SIGTERM",
            _ = self.int.recv() => "SIGINT",
            _ = self.quit.recv() => QUIT,
            _ = or_pending(self.hangup.as_mut().map(Signal::recv)) => QUIT,
        }
    }

    /// Sends a command for each signal; resolves after an abort.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe; later signals are then ignored.
    pub(super) async fn apply_to(mut self, control: Control) {
        let mut escalation = Escalation::default();
        loop {
            let signal = self.next().await;
            let command = match escalation.escalate(signal) {
                ShutdownStep::Drain => {
                    tracing::info!(
                        signal,
                        "draining: no new claims, running tasks finish; repeat the signal to release them"
                    );
                    Command::Drain { within: None }
                }
                ShutdownStep::Release => {
                    tracing::warn!(
                        signal,
                        "releasing all claims; a third TERM or INT ends the worker at once without releasing"
                    );
                    Command::Release { within: None }
                }
                ShutdownStep::Abort => {
                    tracing::error!(signal, "ending at once; claims will expire");
                    return control.command(Command::Abort, Note::of(signal)).await;
                }
            };
            control.command(command, Note::of(signal)).await;
        }
    }
}

pub(super) fn subscribe(kind: SignalKind) -> Result<Signal, Failure> {
    signal(kind).map_err(|error| Failure::new(Exit::HostUnusable, format!("cannot install a signal handler: {error}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn steps(signals: &[&str]) -> Vec<ShutdownStep> {
        let mut escalation = Escalation::default();
        signals.iter().map(|signal| escalation.escalate(signal)).collect()
    }

    #[test]
    fn three_terminate_signals_drain_release_and_abort() {
        assert_eq!(
            steps(&["SIGTERM"; 4]),
            [ShutdownStep::Drain, ShutdownStep::Release, ShutdownStep::Abort, ShutdownStep::Abort]
        );
    }

    #[test]
    fn quit_releases_and_never_aborts() {
        assert_eq!(steps(&[QUIT; 3]), [ShutdownStep::Release; 3]);
        assert_eq!(
            steps(&["SIGTERM", QUIT, "SIGTERM", QUIT]),
            [ShutdownStep::Drain, ShutdownStep::Release, ShutdownStep::Release, ShutdownStep::Release]
        );
    }

    #[test]
    fn terminate_signals_after_quit_abort_only_at_the_third() {
        // A service manager sends TERM to a worker to which an operator has sent QUIT.
        let signal = [QUIT, "SIGTERM", "SIGTERM", "SIGTERM"];
        assert_eq!(
            steps(&signal),
            [ShutdownStep::Release, ShutdownStep::Release, ShutdownStep::Release, ShutdownStep::Abort]
        );
    }
}
