//! Sends notifications to systemd (`sd_notify`), in order and without blocking the worker.

use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::time::Duration;

use sd_notify::NotifyState;

use crate::limits::{SYSTEMD_CLOSE_TIMEOUT, SYSTEMD_MESSAGES_QUEUED_MAX};

/// Queues notifications for the thread that sends them. Cheap to clone.
#[derive(Debug, Clone)]
pub(crate) struct NotifySender(SyncSender<String>);

impl NotifySender {
    /// Sends states in one datagram. Drops them if the queue is full because the service manager does not read.
    pub(crate) fn send(&self, states: &[NotifyState<'_>]) {
        let lines: Vec<String> = states.iter().map(ToString::to_string).collect();
        if let Err(TrySendError::Full(text) | TrySendError::Disconnected(text)) = self.0.try_send(lines.join("\n")) {
            tracing::debug!(text, "dropped a service manager notification: its queue is full");
        }
    }

    pub(crate) fn channel() -> (Self, Receiver<String>) {
        let (sender, receiver) = sync_channel(SYSTEMD_MESSAGES_QUEUED_MAX);
        (Self(sender), receiver)
    }
}

/// The service manager that started this process and expects notifications.
#[derive(Debug)]
pub(crate) struct ServiceManager {
    pub(crate) sender: NotifySender,
    /// The service manager restarts the service if no watchdog notification arrives within this time.
    pub(crate) watchdog: Option<Duration>,
    /// Resolves when everything was sent and every sender was dropped.
    all_sent: tokio::sync::oneshot::Receiver<()>,
}

impl ServiceManager {
    /// `None` if `NOTIFY_SOCKET` is not set.
    ///
    /// # Errors
    ///
    /// The thread cannot be started.
    pub(crate) fn from_socket_variable(notify_socket: Option<&str>) -> std::io::Result<Option<Self>> {
        if notify_socket.is_none() {
            return Ok(None);
        }
        let (sender, receiver) = NotifySender::channel();
        let (end, all_sent) = tokio::sync::oneshot::channel();
        // Sending blocks while the service manager does not read.
        std::thread::Builder::new().name("sd-notify".to_owned()).spawn(move || {
            while let Ok(text) = receiver.recv() {
                if let Err(error) = sd_notify::notify(&[NotifyState::Custom(&text)]) {
                    tracing::debug!(%error, text, "cannot notify the service manager");
                }
            }
            // The process may end without waiting for this.
            end.send(()).ok();
        })?;
        let watchdog = sd_notify::watchdog_enabled().filter(|span| !span.is_zero());
        Ok(Some(Self { sender, watchdog, all_sent }))
    }

    /// Waits until everything was sent, for at most [`SYSTEMD_CLOSE_TIMEOUT`]. Every clone of the sender has to be dropped.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe.
    pub(crate) async fn close(self) {
        let Self { sender, all_sent, .. } = self;
        drop(sender);
        drop(tokio::time::timeout(SYSTEMD_CLOSE_TIMEOUT, all_sent).await);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_a_socket_there_is_no_service_manager() {
        assert!(ServiceManager::from_socket_variable(None).unwrap().is_none());
    }

    #[test]
    fn sending_does_not_block_if_the_service_manager_does_not_read() {
        let (sender, receiver) = NotifySender::channel();
        for _ in 0..=SYSTEMD_MESSAGES_QUEUED_MAX {
            sender.send(&[NotifyState::Watchdog]);
        }
        assert_eq!(receiver.try_iter().count(), SYSTEMD_MESSAGES_QUEUED_MAX);
    }
}
