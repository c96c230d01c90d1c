//! Maps signals to commands: the first TERM or INT drains, the second releases claims, the third aborts; QUIT releases.

use tokio::signal::unix::{Signal, SignalKind, signal};

use super::exit::{Exit, Failure};
use crate::worker::{Command, Control, Note};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ExitSignal {
    /// SIGTERM or SIGINT.
    Terminate,
    Quit,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
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
    fn escalate(&mut self, signal: ExitSignal) -> ShutdownStep {
        match signal {
            ExitSignal::Terminate => self.terminate_count = self.terminate_count.saturating_add(1),
            ExitSignal::Quit => self.quit_received = true,
        }
        let minimum = if self.quit_received { ShutdownStep::Release } else { ShutdownStep::Drain };
        minimum.max(match self.terminate_count {
            0 | 1 => ShutdownStep::Drain,
            2 => ShutdownStep::Release,
            _ => ShutdownStep::Abort,
        })
    }
}

/// Listens for TERM, INT and QUIT. A signal that arrives before `next` is called is kept.
#[derive(Debug)]
pub(super) struct ExitSignals {
    term: Signal,
    int: Signal,
    quit: Signal,
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
        })
    }

    /// Waits for the next signal.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe.
    pub(super) async fn next(&mut self) {
        self.receive().await;
    }

    async fn receive(&mut self) -> (&'static str, ExitSignal) {
        tokio::select! {
            _ = self.term.recv() => ("SIGTERM", ExitSignal::Terminate),
            _ = self.int.recv() => ("SIGINT", ExitSignal::Terminate),
            _ = self.quit.recv() => ("SIGQUIT", ExitSignal::Quit),
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
            let (signal, kind) = self.receive().await;
            let command = match escalation.escalate(kind) {
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

    fn steps(signal: &[ExitSignal]) -> Vec<ShutdownStep> {
        let mut escalation = Escalation::default();
        signal.iter().map(|signal| escalation.escalate(*signal)).collect()
    }

    #[test]
    fn three_terminate_signals_drain_release_and_abort() {
        assert_eq!(
            steps(&[ExitSignal::Terminate; 4]),
            [ShutdownStep::Drain, ShutdownStep::Release, ShutdownStep::Abort, ShutdownStep::Abort]
        );
    }

    #[test]
    fn quit_releases_and_never_aborts() {
        assert_eq!(steps(&[ExitSignal::Quit; 3]), [ShutdownStep::Release; 3]);
        assert_eq!(
            steps(&[ExitSignal::Terminate, ExitSignal::Quit, ExitSignal::Terminate, ExitSignal::Quit]),
            [ShutdownStep::Drain, ShutdownStep::Release, ShutdownStep::Release, ShutdownStep::Release]
        );
    }

    #[test]
    fn terminate_signals_after_quit_abort_only_at_the_third() {
        // A service manager sends TERM to a worker to which an operator has sent QUIT.
        let signal = [ExitSignal::Quit, ExitSignal::Terminate, ExitSignal::Terminate, ExitSignal::Terminate];
        assert_eq!(
            steps(&signal),
            [ShutdownStep::Release, ShutdownStep::Release, ShutdownStep::Release, ShutdownStep::Abort]
        );
    }
}
