//! What signals ask of a worker: the first TERM or INT drains, the second hands back, the third ends it at once; QUIT
//! hands back. TSTP pauses and CONT ends that, USR1 asks for the state.

use std::convert::Infallible;

use tokio::signal::unix::{Signal, SignalKind, signal};

use super::control::status::one_line;
use super::exit::{Exit, Failure};
use crate::worker::{Command, Control, Note};

/// A signal that asks a worker to go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ExitSignal {
    /// TERM or INT.
    Terminate,
    /// QUIT.
    Quit,
}

/// What is done about it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum ShutdownStep {
    Drain,
    HandBack,
    Abort,
}

/// How far the ladder has been climbed. It is never climbed down, and whichever of two signals that come together is heard
/// first, they lead to the same step.
#[derive(Debug, Default)]
struct Escalation {
    /// How often it was asked to leave.
    terminate_count: u8,
    quit_received: bool,
}

impl Escalation {
    fn escalate(&mut self, asked: ExitSignal) -> ShutdownStep {
        match asked {
            ExitSignal::Terminate => self.terminate_count = self.terminate_count.saturating_add(1),
            ExitSignal::Quit => self.quit_received = true,
        }
        let at_least = if self.quit_received { ShutdownStep::HandBack } else { ShutdownStep::Drain };
        at_least.max(match self.terminate_count {
            0 | 1 => ShutdownStep::Drain,
            2 => ShutdownStep::HandBack,
            _ => ShutdownStep::Abort,
        })
    }
}

/// The signals that ask a worker to go, from when it was made. One that comes before somebody waits for it is kept.
#[derive(Debug)]
pub(super) struct ExitSignals {
    term: Signal,
    int: Signal,
    quit: Signal,
}

impl ExitSignals {
    /// Listens from now on; the process no longer ends by itself at one of them.
    ///
    /// # Errors
    ///
    /// [`Exit::HostUnusable`] where no handler can be installed.
    pub(super) fn listen() -> Result<Self, Failure> {
        Ok(Self {
            term: subscribe(SignalKind::terminate())?,
            int: subscribe(SignalKind::interrupt())?,
            quit: subscribe(SignalKind::quit())?,
        })
    }

    /// Waits for the next.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe.
    pub(super) async fn next(&mut self) {
        self.receive().await;
    }

    async fn receive(&mut self) -> ReceivedSignal {
        tokio::select! {
            _ = self.term.recv() => ReceivedSignal { name: "TERM", signal: ExitSignal::Terminate },
            _ = self.int.recv() => ReceivedSignal { name: "INT", signal: ExitSignal::Terminate },
            _ = self.quit.recv() => ReceivedSignal { name: "QUIT", signal: ExitSignal::Quit },
        }
    }

    /// Turns signals into orders, and resolves once the last step was ordered.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe; signals are then no longer answered.
    pub(super) async fn apply_to(mut self, control: Control) {
        let mut ladder = Escalation::default();
        loop {
            let ReceivedSignal { name, signal: asked } = self.receive().await;
            match ladder.escalate(asked) {
                ShutdownStep::Drain => {
                    tracing::info!(
                        signal = name,
                        "draining: no new claims, running tasks finish; once more hands them back"
                    );
                    control.command(Command::Drain { within: None }, Note::of(&format!("SIG{name}"))).await;
                }
                ShutdownStep::HandBack => {
                    tracing::warn!(
                        signal = name,
                        "handing back what runs; a third TERM or INT ends at once without handing back"
                    );
                    control.command(Command::Release { within: None }, Note::of(&format!("SIG{name}"))).await;
                }
                ShutdownStep::Abort => {
                    tracing::error!(signal = name, "ending at once; claims are left to expire");
                    control.command(Command::Abort, Note::of(&format!("SIG{name}"))).await;
                    return;
                }
            }
        }
    }
}

/// The signals that ask a worker for something else than to go.
#[derive(Debug)]
pub(super) struct ControlSignals {
    tstp: Signal,
    cont: Signal,
    usr1: Signal,
}

impl ControlSignals {
    /// Listens from now on; the process is no longer stopped or ended by them.
    ///
    /// # Errors
    ///
    /// [`Exit::HostUnusable`] where no handler can be installed.
    pub(super) fn listen() -> Result<Self, Failure> {
        let kept = |number| subscribe(SignalKind::from_raw(number));
        Ok(Self { tstp: kept(TSTP)?, cont: kept(CONT)?, usr1: kept(USR1)? })
    }

    /// Does what they ask. Never resolves.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe; signals are then no longer answered.
    pub(super) async fn apply_to(mut self, control: Control) -> Infallible {
        loop {
            tokio::select! {
                _ = self.tstp.recv() => control.command(Command::Pause { span: None }, Note::of("SIGTSTP")).await,
                _ = self.cont.recv() => {
                    // Any process that was stopped is told to go on; only a pause of the same kind ends by it.
                    let note = control.status().await.and_then(|view| view.note);
                    if note.is_some_and(|note| note.by == "SIGTSTP") {
                        control.command(Command::Resume, Note::of("SIGCONT")).await;
                    }
                }
                _ = self.usr1.recv() => {
                    if let Some(view) = control.status().await {
                        tracing::info!("state: {}", one_line(&view));
                    }
                }
            }
        }
    }
}

const TSTP: i32 = rustix::process::Signal::TSTP.as_raw();
const CONT: i32 = rustix::process::Signal::CONT.as_raw();
const USR1: i32 = rustix::process::Signal::USR1.as_raw();

fn subscribe(kind: SignalKind) -> Result<Signal, Failure> {
    signal(kind).map_err(|error| Failure::new(Exit::HostUnusable, format!("no signals can be received: {error}")))
}

struct ReceivedSignal {
    name: &'static str,
    signal: ExitSignal,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn climb(asked: &[ExitSignal]) -> Vec<ShutdownStep> {
        let mut ladder = Escalation::default();
        asked.iter().map(|asked| ladder.escalate(*asked)).collect()
    }

    #[test]
    fn three_times_asked_to_leave_is_drain_hand_back_abort() {
        assert_eq!(
            climb(&[ExitSignal::Terminate; 4]),
            [ShutdownStep::Drain, ShutdownStep::HandBack, ShutdownStep::Abort, ShutdownStep::Abort]
        );
    }

    #[test]
    fn quit_hands_back_and_never_aborts() {
        assert_eq!(climb(&[ExitSignal::Quit; 3]), [ShutdownStep::HandBack; 3]);
        assert_eq!(
            climb(&[ExitSignal::Terminate, ExitSignal::Quit, ExitSignal::Terminate, ExitSignal::Quit]),
            [ShutdownStep::Drain, ShutdownStep::HandBack, ShutdownStep::HandBack, ShutdownStep::HandBack]
        );
    }

    #[test]
    fn who_is_told_to_hand_back_is_not_ended_by_whoever_asks_it_to_leave() {
        // A service manager sends its TERM to a worker that an operator has sent a QUIT.
        let asked = [ExitSignal::Quit, ExitSignal::Terminate, ExitSignal::Terminate, ExitSignal::Terminate];
        assert_eq!(
            climb(&asked),
            [ShutdownStep::HandBack, ShutdownStep::HandBack, ShutdownStep::HandBack, ShutdownStep::Abort]
        );
    }
}
