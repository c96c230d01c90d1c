//! Maps signals to commands: the first TERM or INT drains, the second releases claims, the third aborts; QUIT releases; TSTP
//! pauses, CONT resumes, USR1 logs the status.

use std::convert::Infallible;

use tokio::signal::unix::{Signal, SignalKind, signal};

use super::control::status::one_line;
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

/// Listens for TSTP, CONT and USR1.
#[derive(Debug)]
pub(super) struct ControlSignals {
    tstp: Signal,
    cont: Signal,
    usr1: Signal,
}

impl ControlSignals {
    /// Replaces the signals' default actions, which stop or end the process.
    ///
    /// # Errors
    ///
    /// [`Exit::HostUnusable`] if no handler can be installed.
    pub(super) fn listen() -> Result<Self, Failure> {
        let listen = |number| subscribe(SignalKind::from_raw(number));
        Ok(Self { tstp: listen(TSTP)?, cont: listen(CONT)?, usr1: listen(USR1)? })
    }

    /// Never resolves.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe; later signals are then ignored.
    pub(super) async fn apply_to(mut self, control: Control) -> Infallible {
        loop {
            tokio::select! {
                _ = self.tstp.recv() => control.command(Command::Pause { span: None }, Note::of("SIGTSTP")).await,
                _ = self.cont.recv() => {
                    // Every stopped process gets a CONT when it continues; only a pause by SIGTSTP ends with it.
                    let note = control.status().await.and_then(|view| view.note);
                    if note.is_some_and(|note| note.by == "SIGTSTP") {
                        control.command(Command::Resume, Note::of("SIGCONT")).await;
                    }
                }
                _ = self.usr1.recv() => {
                    if let Some(view) = control.status().await {
                        tracing::info!("status: {}", one_line(&view));
                    }
                }
            }
        }
    }
}

const TSTP: i32 = rustix::process::Signal::TSTP.as_raw();
const CONT: i32 = rustix::process::Signal::CONT.as_raw();
const USR1: i32 = rustix::process::Signal::USR1.as_raw();

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
