//! Ensures that two workers of this host do not claim under the same worker id.
//!
//! To a queue, two workers with one id are the same worker: the second finds the first one's claims at its start and takes
//! them for those of a previous process. Different work directories do not prevent that. The lock is an abstract socket, which
//! belongs to the network namespace and which the kernel closes however the process ends.

use std::io;
use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::net::{SocketAddr, UnixDatagram};

use super::file_lock::retry_while_held;

/// A locked name. Dropping it releases the lock.
#[derive(Debug)]
pub struct WorkerIdLock {
    _socket: UnixDatagram,
}

impl WorkerIdLock {
    /// `None` if another process holds the name. Retries for the same reason as [`FileLock`](super::file_lock::FileLock).
    pub fn acquire(name: &str) -> io::Result<Option<Self>> {
        use sha2::Digest as _;
        let digest = sha2::Sha256::digest(name.as_bytes());
        let address = SocketAddr::from_abstract_name(format!("journeyman/{}", hex::encode(digest)))?;
        retry_while_held(|| match UnixDatagram::bind_addr(&address) {
            Ok(socket) => Ok(Some(Self { _socket: socket })),
            Err(error) if error.kind() == io::ErrorKind::AddrInUse => Ok(None),
            Err(error) => Err(error),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_has_one_owner_at_a_time() {
        let name = format!("a test of process {}", std::process::id());
        let first = WorkerIdLock::acquire(&name).unwrap().unwrap();
        assert!(WorkerIdLock::acquire(&name).unwrap().is_none());
        assert!(WorkerIdLock::acquire(&format!("{name}!")).unwrap().is_some());
        drop(first);
        assert!(WorkerIdLock::acquire(&name).unwrap().is_some());
    }
}
