//! That no other worker of this host claims under the same name.
//!
//! To a queue, two workers of one name are one: what the first has claimed, the second finds at its start and takes for
//! an earlier life's. Their work folders do not show it, since each may have one of its own. So a name is taken by an
//! abstract socket, which belongs to the network namespace, and which the kernel frees however the process ends.

use std::io;
use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::net::{SocketAddr, UnixDatagram};

use crate::limits::{LOCK_ATTEMPTS_MAX, LOCK_RETRY_INTERVAL};

/// A name that is ours. Dropping it frees it.
#[derive(Debug)]
pub(crate) struct NameLock {
    _socket: UnixDatagram,
}

impl NameLock {
    /// Takes a name for this process. `None` is that somebody has it.
    ///
    /// A process that is killed while it starts a program leaves the name to that program until its `exec`; that is waited
    /// for, as [`Locked`](super::lock::Locked) does.
    ///
    /// # Errors
    ///
    /// Where the system has no such sockets.
    pub(crate) fn acquire(name: &str) -> io::Result<Option<Self>> {
        use sha2::Digest as _;
        let digest = sha2::Sha256::digest(name.as_bytes());
        let digest: String = digest.iter().take(16).map(|byte| format!("{byte:02x}")).collect();
        let address = SocketAddr::from_abstract_name(format!("journeyman/{digest}"))?;
        for left in (0..LOCK_ATTEMPTS_MAX).rev() {
            match UnixDatagram::bind_addr(&address) {
                Ok(socket) => return Ok(Some(Self { _socket: socket })),
                Err(error) if error.kind() == io::ErrorKind::AddrInUse && left > 0 => {
                    std::thread::sleep(LOCK_RETRY_INTERVAL)
                }
                Err(error) if error.kind() == io::ErrorKind::AddrInUse => {}
                Err(error) => return Err(error),
            }
        }
        Ok(None)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_has_one_owner_at_a_time() {
        let name = format!("a test of process {}", std::process::id());
        let first = NameLock::acquire(&name).unwrap().unwrap();
        assert!(NameLock::acquire(&name).unwrap().is_none());
        assert!(NameLock::acquire(&format!("{name}!")).unwrap().is_some());
        drop(first);
        assert!(NameLock::acquire(&name).unwrap().is_some());
    }
}
