//! Which processes hold the other end of a connection on this host.

use std::io;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::path::Path;

/// Whether one of the processes has an open socket whose address is `peer` and that is connected to `local`. Reads `/proc`; blocks.
///
/// # Errors
///
/// The kernel's list of connections cannot be read.
pub fn is_held_by(processes: &[i32], peer: SocketAddr, local: SocketAddr) -> io::Result<bool> {
    let Some(inode) = find_inode(peer, local)? else { return Ok(false) };
    let link = format!("socket:[{inode}]");
    let holds = |pid: &i32| {
        let descriptors = std::fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
        descriptors
            .into_iter()
            .any(|entry| std::fs::read_link(entry.path()).is_ok_and(|target| target == Path::new(&link)))
    };
    Ok(processes.iter().any(holds))
}

fn find_inode(peer: SocketAddr, local: SocketAddr) -> io::Result<Option<u64>> {
    // A socket for both versions of IP is in the second list.
    for file in ["/proc/net/tcp", "/proc/net/tcp6"] {
        let text = match std::fs::read_to_string(file) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            read => read?,
        };
        let is_wanted = |line: &&str| {
            let mut words = line.split_whitespace().skip(1);
            let addresses = (words.next().and_then(parse_address), words.next().and_then(parse_address));
            addresses == (Some(peer), Some(local))
        };
        if let Some(line) = text.lines().find(is_wanted) {
            return Ok(line.split_whitespace().nth(9).and_then(|inode| inode.parse().ok()));
        }
    }
    Ok(None)
}

/// An address as the kernel writes it: each 32 bits of the IP address as a number in the byte order of this machine.
fn parse_address(text: &str) -> Option<SocketAddr> {
    let (ip, port) = text.split_once(':')?;
    let port = u16::from_str_radix(port, 16).ok()?;
    let mut bytes = Vec::new();
    for at in (0..ip.len()).step_by(8) {
        bytes.extend(u32::from_str_radix(ip.get(at..at + 8)?, 16).ok()?.to_ne_bytes());
    }
    let ip = match <[u8; 4]>::try_from(bytes.as_slice()) {
        Ok(v4) => IpAddr::from(v4),
        Err(_) => IpAddr::from(Ipv6Addr::from(<[u8; 16]>::try_from(bytes).ok()?)).to_canonical(),
    };
    Some(SocketAddr::new(ip, port))
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream};

    use super::*;

    #[test]
    fn a_connection_is_held_by_the_process_that_made_it() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let local = listener.local_addr().unwrap();
        for target in [local, SocketAddr::new(IpAddr::from([0, 0, 0, 0, 0, 0xffff, 0x7f00, 1]), local.port())] {
            let Ok(stream) = TcpStream::connect(target) else { continue };
            let (_accepted, peer) = listener.accept().unwrap();
            let own = i32::try_from(std::process::id()).unwrap();
            assert!(is_held_by(&[1, own], peer, local).unwrap(), "{target}");
            assert!(!is_held_by(&[], peer, local).unwrap());
            drop(stream);
        }
        assert!(!is_held_by(&[1], "127.0.0.1:1".parse().unwrap(), local).unwrap());
    }
}
