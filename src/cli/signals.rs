//! What signals ask of a worker: the first TERM or INT drains, the second hands back, the third ends it at once; QUIT
//! hands back. TSTP pauses and CONT ends that, USR1 asks for the state.

use std::convert::Infallible;

use tokio::signal::unix::{Signal, SignalKind, signal};

use super::exit::{Exit, Failure};
use super::steer::status::one_line;
use crate::worker::{Command, Control, Note};

/// A signal that asks a worker to go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Asked {
    /// TERM or INT.
    Leave,
    /// QUIT.
    LeaveNow,
}

/// What is done about it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Step {
    Drain,
    HandBack,
    Abort,
}

/// How far the ladder has been climbed. It is never climbed down, and whichever of two signals that come together is heard
/// first, they lead to the same step.
#[derive(Debug, Default)]
struct Ladder {
    /// How often it was asked to leave.
    leaves: u8,
    now: bool,
}

impl Ladder {
    fn climb(&mut self, asked: Asked) -> Step {
        match asked {
            Asked::Leave => self.leaves = self.leaves.saturating_add(1),
            Asked::LeaveNow => self.now = true,
        }
        let at_least = if self.now { Step::HandBack } else { Step::Drain };
        at_least.max(match self.leaves {
            0 | 1 => Step::Drain,
            2 => Step::HandBack,
            _ => Step::Abort,
        })
    }
}

/// The signals that ask a worker to go, from when it was made. One that comes before somebody waits for it is kept.
#[derive(Debug)]
pub(super) struct Signals {
    term: Signal,
    int: Signal,
    quit: Signal,
}

impl Signals {
    /// Listens from now on; the process no longer ends by itself at one of them.
    ///
    /// # Errors
    ///
    /// [`Exit::Unfit`] where no handler can be installed.
    pub(super) fn listen() -> Result<Self, Failure> {
        Ok(Self {
            term: kept(SignalKind::terminate())?,
            int: kept(SignalKind::interrupt())?,
            quit: kept(SignalKind::quit())?,
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

    async fn receive(&mut self) -> Received {
        tokio::select! {
            _ = self.term.recv() => Received { name: "TERM", asked: Asked::Leave },
            _ = self.int.recv() => Received { name: "INT", asked: Asked::Leave },
            _ = self.quit.recv() => Received { name: "QUIT", asked: Asked::LeaveNow },
        }
    }

    /// Turns signals into orders, and resolves once the last step was ordered.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe; signals are then no longer answered.
    pub(super) async fn obey(mut self, control: Control) {
        let mut ladder = Ladder::default();
        loop {
            let Received { name, asked } = self.receive().await;
            match ladder.climb(asked) {
                Step::Drain => {
                    tracing::info!(
                        signal = name,
                        "draining: no new claims, running tasks finish; once more hands them back"
                    );
                    control.command(Command::Drain { within: None }, Note::of(&format!("SIG{name}"))).await;
                }
                Step::HandBack => {
                    tracing::warn!(
                        signal = name,
                        "handing back what runs; a third TERM or INT ends at once without handing back"
                    );
                    control.command(Command::HandBack { within: None }, Note::of(&format!("SIG{name}"))).await;
                }
                Step::Abort => {
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
pub(super) struct Others {
    tstp: Signal,
    cont: Signal,
    usr1: Signal,
}

impl Others {
    /// Listens from now on; the process is no longer stopped or ended by them.
    ///
    /// # Errors
    ///
    /// [`Exit::Unfit`] where no handler can be installed.
    pub(super) fn listen() -> Result<Self, Failure> {
        let kept = |number| kept(SignalKind::from_raw(number));
        Ok(Self { tstp: kept(TSTP)?, cont: kept(CONT)?, usr1: kept(USR1)? })
    }

    /// Does what they ask. Never resolves.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe; signals are then no longer answered.
    pub(super) async fn obey(mut self, control: Control) -> Infallible {
        loop {
            tokio::select! {
                _ = self.tstp.recv() => control.command(Command::Pause { span: None }, Note::of("SIGTSTP")).await,
                _ = self.cont.recv() => {
                    // Any process that was stopped is told to go on; only a pause of the same kind ends by it.
                    let note = control.look().await.and_then(|view| view.note);
                    if note.is_some_and(|note| note.by == "SIGTSTP") {
                        control.command(Command::Resume, Note::of("SIGCONT")).await;
                    }
                }
                _ = self.usr1.recv() => {
                    if let Some(view) = control.look().await {
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

fn kept(kind: SignalKind) -> Result<Signal, Failure> {
    signal(kind).map_err(|error| Failure::new(Exit::Unfit, format!("no signals can be received: {error}")))
}

struct Received {
    name: &'static str,
    asked: Asked,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn climb(asked: &[Asked]) -> Vec<Step> {
        let mut ladder = Ladder::default();
        asked.iter().map(|asked| ladder.climb(*asked)).collect()
    }

    #[test]
    fn three_times_asked_to_leave_is_drain_hand_back_abort() {
        assert_eq!(climb(&[Asked::Leave; 4]), [Step::Drain, Step::HandBack, Step::Abort, Step::Abort]);
    }

    #[test]
    fn quit_hands_back_and_never_aborts() {
        assert_eq!(climb(&[Asked::LeaveNow; 3]), [Step::HandBack; 3]);
        assert_eq!(
            climb(&[Asked::Leave, Asked::LeaveNow, Asked::Leave, Asked::LeaveNow]),
            [Step::Drain, Step::HandBack, Step::HandBack, Step::HandBack]
        );
    }

    #[test]
    fn who_is_told_to_hand_back_is_not_ended_by_whoever_asks_it_to_leave() {
        // A service manager sends its TERM to a worker that an operator has sent a QUIT.
        let asked = [Asked::LeaveNow, Asked::Leave, Asked::Leave, Asked::Leave];
        assert_eq!(climb(&asked), [Step::HandBack, Step::HandBack, Step::HandBack, Step::Abort]);
    }
}
