//! What a service manager is told (`sd_notify`), in the order in which it is said and without ever waiting for the manager.
//!
//! It knows the protocol alone; when to say what is decided where the worker is looked at.

use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::time::Duration;

use sd_notify::NotifyState;

use crate::limits::{SYSTEMD_CLOSE_TIMEOUT, SYSTEMD_MESSAGES_QUEUED_MAX, SYSTEMD_STATUS_CHARS_MAX};

/// Something to tell.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NotifyMessage {
    /// The service is up.
    Ready,
    /// The configuration is being read again; [`NotifyMessage::Ready`] follows.
    Reloading,
    /// The service is on its way out.
    Stopping,
    /// One line for people.
    Status(String),
    /// It is alive.
    Watchdog,
    /// Starting, reloading or stopping takes so much longer.
    ExtendTimeout(Duration),
}

/// Tells the manager. Cheap to clone.
#[derive(Debug, Clone)]
pub struct NotifySender(SyncSender<Vec<NotifyMessage>>);

impl NotifySender {
    /// Tells these together. What a manager that does not read has no room for is dropped.
    pub fn send(&self, words: Vec<NotifyMessage>) {
        match self.0.try_send(words) {
            Ok(()) => {}
            Err(TrySendError::Full(words) | TrySendError::Disconnected(words)) => {
                tracing::debug!(?words, "the service manager was not told");
            }
        }
    }

    /// A teller whose words somebody else hears.
    #[must_use]
    pub fn channel() -> NotifyChannel {
        let (teller, heard) = sync_channel(SYSTEMD_MESSAGES_QUEUED_MAX);
        NotifyChannel { sender: Self(teller), receiver: heard }
    }
}

/// Both ends of a teller.
#[derive(Debug)]
pub struct NotifyChannel {
    /// Tells.
    pub sender: NotifySender,
    /// Hears.
    pub receiver: Receiver<Vec<NotifyMessage>>,
}

/// The manager that started this process and wants to hear of it.
#[derive(Debug)]
pub struct ServiceManager {
    /// What tells it.
    pub sender: NotifySender,
    /// Where [`NotifyMessage::Watchdog`] is missing for so long, it restarts the service.
    pub watchdog: Option<Duration>,
    /// Resolves once everything was sent and no teller is left.
    all_sent: tokio::sync::oneshot::Receiver<()>,
}

impl ServiceManager {
    /// The one that `NOTIFY_SOCKET` names; `None` where nobody wants to hear.
    ///
    /// # Errors
    ///
    /// Where no thread can be started.
    pub fn from_socket_variable(notify_socket: Option<&str>) -> std::io::Result<Option<Self>> {
        if notify_socket.is_none() {
            return Ok(None);
        }
        let NotifyChannel { sender: teller, receiver: heard } = NotifySender::channel();
        let (end, done) = tokio::sync::oneshot::channel();
        // Sending blocks while the manager does not read, so it has a thread of its own.
        std::thread::Builder::new().name("sd-notify".to_owned()).spawn(move || {
            while let Ok(words) = heard.recv() {
                if let Err(error) = send(&words) {
                    tracing::debug!(%error, ?words, "the service manager cannot be told");
                }
            }
            // Nobody waits where the process ends in a hurry.
            end.send(()).ok();
        })?;
        let watchdog = sd_notify::watchdog_enabled().filter(|span| !span.is_zero());
        Ok(Some(Self { sender: teller, watchdog, all_sent: done }))
    }

    /// Waits until everything has been sent, for a second at most. Every clone of the teller has to be gone.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe.
    pub async fn close(self) {
        let Self { sender: teller, all_sent: done, .. } = self;
        drop(teller);
        drop(tokio::time::timeout(SYSTEMD_CLOSE_TIMEOUT, done).await);
    }
}

fn send(words: &[NotifyMessage]) -> std::io::Result<()> {
    let status = words.iter().find_map(|word| match word {
        NotifyMessage::Status(text) => Some(single_line(text)),
        NotifyMessage::Ready
        | NotifyMessage::Reloading
        | NotifyMessage::Stopping
        | NotifyMessage::Watchdog
        | NotifyMessage::ExtendTimeout(_) => None,
    });
    let mut states = Vec::with_capacity(words.len() + 1);
    for word in words {
        match word {
            NotifyMessage::Ready => states.push(NotifyState::Ready),
            NotifyMessage::Reloading => states.extend([NotifyState::Reloading, NotifyState::monotonic_usec_now()?]),
            NotifyMessage::Stopping => states.push(NotifyState::Stopping),
            NotifyMessage::Status(_) => states.push(NotifyState::Status(status.as_deref().unwrap_or_default())),
            NotifyMessage::Watchdog => states.push(NotifyState::Watchdog),
            NotifyMessage::ExtendTimeout(span) => {
                states.push(NotifyState::ExtendTimeoutUsec(u32::try_from(span.as_micros()).unwrap_or(u32::MAX)));
            }
        }
    }
    sd_notify::notify(&states)
}

/// A line break would begin another assignment.
fn single_line(text: &str) -> String {
    let plain = text.chars().map(|char| if char.is_control() { ' ' } else { char });
    plain.take(SYSTEMD_STATUS_CHARS_MAX).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_status_stays_one_assignment() {
        assert_eq!(single_line("a\nREADY=1\tb"), "a READY=1 b");
        assert_eq!(single_line(&"x".repeat(5000)).len(), SYSTEMD_STATUS_CHARS_MAX);
    }

    #[test]
    fn nobody_is_told_where_nobody_asked() {
        assert!(ServiceManager::from_socket_variable(None).unwrap().is_none());
    }

    #[test]
    fn a_manager_that_does_not_read_holds_nobody_up() {
        let line = NotifySender::channel();
        for _ in 0..=SYSTEMD_MESSAGES_QUEUED_MAX {
            line.sender.send(vec![NotifyMessage::Watchdog]);
        }
        assert_eq!(line.receiver.try_iter().count(), SYSTEMD_MESSAGES_QUEUED_MAX);
    }
}
