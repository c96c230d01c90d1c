//! What signals ask of a worker: the first TERM or INT drains, the second hands back, the third ends it at once; QUIT
//! hands back.

use std::future::Future;
use std::io;

use tokio::signal::unix::{SignalKind, signal};

use crate::worker::Control;

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

/// How far the ladder has been climbed. It is never climbed down.
#[derive(Debug, Default)]
struct Ladder(Option<Step>);

impl Ladder {
    fn climb(&mut self, asked: Asked) -> Step {
        let step = match (self.0, asked) {
            (None, Asked::Leave) => Step::Drain,
            (None | Some(Step::Drain), Asked::LeaveNow) | (Some(Step::Drain), Asked::Leave) => Step::HandBack,
            (Some(Step::HandBack | Step::Abort), Asked::Leave) => Step::Abort,
            (Some(step @ (Step::HandBack | Step::Abort)), Asked::LeaveNow) => step,
        };
        self.0 = Some(step);
        step
    }
}

/// Listens from now on. The future turns signals into orders; it resolves once the last step was ordered.
///
/// # Errors
///
/// Where no handler can be installed.
///
/// # Cancel safety
///
/// Cancel safe; signals are then no longer answered.
pub(super) fn obey(control: Control) -> io::Result<impl Future<Output = ()>> {
    let mut term = signal(SignalKind::terminate())?;
    let mut int = signal(SignalKind::interrupt())?;
    let mut quit = signal(SignalKind::quit())?;
    Ok(async move {
        let mut ladder = Ladder::default();
        loop {
            let (name, asked) = tokio::select! {
                _ = term.recv() => ("TERM", Asked::Leave),
                _ = int.recv() => ("INT", Asked::Leave),
                _ = quit.recv() => ("QUIT", Asked::LeaveNow),
            };
            match ladder.climb(asked) {
                Step::Drain => {
                    tracing::info!(
                        signal = name,
                        "draining: no new claims, running tasks finish; once more hands them back"
                    );
                    control.drain().await;
                }
                Step::HandBack => {
                    tracing::warn!(
                        signal = name,
                        "handing back what runs; once more ends at once without handing back"
                    );
                    control.hand_back(None).await;
                }
                Step::Abort => {
                    tracing::error!(signal = name, "ending at once; claims are left to expire");
                    control.abort().await;
                    return;
                }
            }
        }
    })
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
            [Step::Drain, Step::HandBack, Step::Abort, Step::Abort]
        );
    }
}
