//! What a service manager is told (`sd_notify`), in the order in which it is said and without ever waiting for the manager.
//!
//! It knows the protocol alone; when to say what is decided where the worker is looked at.

use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::time::Duration;

use sd_notify::NotifyState;

use crate::limits::{MANAGER_CLOSE_WAIT, MANAGER_MESSAGES_MAX, MANAGER_STATUS_CHARS_MAX};

/// Something to tell.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Word {
    /// The service is up.
    Ready,
    /// The configuration is being read again; [`Word::Ready`] follows.
    Reloading,
    /// The service is on its way out.
    Stopping,
    /// One line for people.
    Status(String),
    /// It is alive.
    Alive,
    /// Starting, reloading or stopping takes so much longer.
    Extend(Duration),
}

/// Tells the manager. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Teller(SyncSender<Vec<Word>>);

impl Teller {
    /// Tells these together. What a manager that does not read has no room for is dropped.
    pub fn tell(&self, words: Vec<Word>) {
        match self.0.try_send(words) {
            Ok(()) => {}
            Err(TrySendError::Full(words) | TrySendError::Disconnected(words)) => {
                tracing::debug!(?words, "the service manager was not told");
            }
        }
    }

    /// A teller whose words somebody else hears.
    #[must_use]
    pub fn to_channel() -> Line {
        let (teller, heard) = sync_channel(MANAGER_MESSAGES_MAX);
        Line { teller: Self(teller), heard }
    }
}

/// Both ends of a teller.
#[derive(Debug)]
pub struct Line {
    /// Tells.
    pub teller: Teller,
    /// Hears.
    pub heard: Receiver<Vec<Word>>,
}

/// The manager that started this process and wants to hear of it.
#[derive(Debug)]
pub struct Manager {
    /// What tells it.
    pub teller: Teller,
    /// Where [`Word::Alive`] is missing for so long, it restarts the service.
    pub watchdog: Option<Duration>,
    /// Resolves once everything was sent and no teller is left.
    done: tokio::sync::oneshot::Receiver<()>,
}

impl Manager {
    /// The one that `NOTIFY_SOCKET` names; `None` where nobody wants to hear.
    ///
    /// # Errors
    ///
    /// Where no thread can be started.
    pub fn of_process(notify_socket: Option<&str>) -> std::io::Result<Option<Self>> {
        if notify_socket.is_none() {
            return Ok(None);
        }
        let Line { teller, heard } = Teller::to_channel();
        let (end, done) = tokio::sync::oneshot::channel();
        // Sending blocks while the manager does not read, so it has a thread of its own.
        std::thread::Builder::new().name("notify".to_owned()).spawn(move || {
            while let Ok(words) = heard.recv() {
                if let Err(error) = send(&words) {
                    tracing::debug!(%error, ?words, "the service manager cannot be told");
                }
            }
            // Nobody waits where the process ends in a hurry.
            end.send(()).ok();
        })?;
        let watchdog = sd_notify::watchdog_enabled().filter(|span| !span.is_zero());
        Ok(Some(Self { teller, watchdog, done }))
    }

    /// Waits until everything has been sent, for a second at most. Every clone of the teller has to be gone.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe.
    pub async fn close(self) {
        let Self { teller, done, .. } = self;
        drop(teller);
        drop(tokio::time::timeout(MANAGER_CLOSE_WAIT, done).await);
    }
}

fn send(words: &[Word]) -> std::io::Result<()> {
    let status = words.iter().find_map(|word| match word {
        Word::Status(text) => Some(one_line(text)),
        Word::Ready | Word::Reloading | Word::Stopping | Word::Alive | Word::Extend(_) => None,
    });
    let mut states = Vec::with_capacity(words.len() + 1);
    for word in words {
        match word {
            Word::Ready => states.push(NotifyState::Ready),
            Word::Reloading => states.extend([NotifyState::Reloading, NotifyState::monotonic_usec_now()?]),
            Word::Stopping => states.push(NotifyState::Stopping),
            Word::Status(_) => states.push(NotifyState::Status(status.as_deref().unwrap_or_default())),
            Word::Alive => states.push(NotifyState::Watchdog),
            Word::Extend(span) => {
                states.push(NotifyState::ExtendTimeoutUsec(u32::try_from(span.as_micros()).unwrap_or(u32::MAX)));
            }
        }
    }
    sd_notify::notify(&states)
}

/// A line break would begin another assignment.
fn one_line(text: &str) -> String {
    let plain = text.chars().map(|char| if char.is_control() { ' ' } else { char });
    plain.take(MANAGER_STATUS_CHARS_MAX).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_status_stays_one_assignment() {
        assert_eq!(one_line("a\nREADY=1\tb"), "a READY=1 b");
        assert_eq!(one_line(&"x".repeat(5000)).len(), MANAGER_STATUS_CHARS_MAX);
    }

    #[test]
    fn nobody_is_told_where_nobody_asked() {
        assert!(Manager::of_process(None).unwrap().is_none());
    }

    #[test]
    fn a_manager_that_does_not_read_holds_nobody_up() {
        let line = Teller::to_channel();
        for _ in 0..=MANAGER_MESSAGES_MAX {
            line.teller.tell(vec![Word::Alive]);
        }
        assert_eq!(line.heard.try_iter().count(), MANAGER_MESSAGES_MAX);
    }
}
