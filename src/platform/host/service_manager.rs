//! Sends notifications to systemd (`sd_notify`) without blocking the worker.

use std::io;
use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::sync::Arc;
use std::time::Duration;

use sd_notify::NotifyState;

/// The service manager that started this process and expects notifications. Cheap to clone.
#[derive(Debug, Clone)]
pub struct ServiceManager {
    socket: Arc<UnixDatagram>,
    /// The service manager restarts the service if no watchdog notification arrives within this time.
    pub watchdog: Option<Duration>,
}

impl ServiceManager {
    /// Connects to the socket that `NOTIFY_SOCKET` names.
    pub fn connect(notify_socket: &str) -> io::Result<Self> {
        let socket = UnixDatagram::unbound()?;
        match notify_socket.strip_prefix('@') {
            Some(name) => socket.connect_addr(&SocketAddr::from_abstract_name(name)?)?,
            None => socket.connect(notify_socket)?,
        }
        Self::new(socket, sd_notify::watchdog_enabled().filter(|span| !span.is_zero()))
    }

    fn new(socket: UnixDatagram, watchdog: Option<Duration>) -> io::Result<Self> {
        socket.set_nonblocking(true)?;
        Ok(Self { socket: Arc::new(socket), watchdog })
    }

    /// Sends states in one datagram, and returns whether it was sent. It is not if the socket is full because the service manager
    /// does not read.
    pub fn send(&self, states: &[NotifyState<'_>]) -> bool {
        let lines: Vec<String> = states.iter().map(ToString::to_string).collect();
        let sent = self.socket.send(lines.join("\n").as_bytes());
        if let Err(error) = &sent {
            tracing::debug!(%error, ?lines, "cannot notify the service manager");
        }
        sent.is_ok()
    }

    /// Returns the service manager's end of the socket too.
    pub fn pair(watchdog: Option<Duration>) -> io::Result<(Self, UnixDatagram)> {
        let (socket, received) = UnixDatagram::pair()?;
        received.set_nonblocking(true)?;
        Ok((Self::new(socket, watchdog)?, received))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn path_and_abstract_sockets_are_reached() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("notify");
        let abstract_name = format!("journeyman-test-{}", std::process::id());
        let sockets = [
            (path.display().to_string(), UnixDatagram::bind(&path).unwrap()),
            (
                format!("@{abstract_name}"),
                UnixDatagram::bind_addr(&SocketAddr::from_abstract_name(&abstract_name).unwrap()).unwrap(),
            ),
        ];
        for (name, received) in sockets {
            assert!(ServiceManager::connect(&name).unwrap().send(&[NotifyState::Ready, NotifyState::Status("up")]));
            let mut buffer = [0; 64];
            let count = received.recv(&mut buffer).unwrap();
            assert_eq!(buffer[..count], *b"READY=1\nSTATUS=up", "{name}");
        }
        ServiceManager::connect("/nowhere/at/all").unwrap_err();
    }

    #[test]
    fn sending_does_not_block_if_the_service_manager_does_not_read() {
        let (manager, _received) = ServiceManager::pair(None).unwrap();
        assert!((0..10_000).any(|_| !manager.send(&[NotifyState::Watchdog])));
    }
}
