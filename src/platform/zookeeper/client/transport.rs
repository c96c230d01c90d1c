//! Connections to the servers of an ensemble, in turn.

use std::io;
use std::sync::Arc;

use rustls::ClientConfig;
use rustls::pki_types::ServerName;
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tokio_util::either::Either;

use super::Error;
use journeyman_domain::jitter::Jitter;
use journeyman_domain::limits::ZOOKEEPER_RECONNECT_DELAY_MAX;

pub(super) type Stream = Either<TcpStream, TlsStream<TcpStream>>;

const DEFAULT_PORT: u16 = 2181;

#[derive(Debug, Clone, PartialEq, Eq)]
struct Server {
    host: String,
    port: u16,
}

pub(super) struct Transport {
    servers: Vec<Server>,
    pub(super) next: usize,
    tls: Option<TlsConnector>,
}

impl Transport {
    /// In a random order, so that the clients of an ensemble spread over its servers.
    pub(super) fn new(servers: &str, tls: Option<Arc<ClientConfig>>, jitter: &mut Jitter) -> Result<Self, Error> {
        let no_server = || Error::Connect("the servers are hosts with ports, separated by commas".to_owned());
        let servers: Option<Vec<Server>> = servers.split(',').map(|server| parse(server.trim())).collect();
        let mut servers = servers.ok_or_else(no_server)?;
        servers.sort_by_cached_key(|_| jitter.bits());
        Ok(Self { servers, next: 0, tls: tls.map(TlsConnector::from) })
    }

    /// Connects to the next server.
    pub(super) async fn connect(&mut self) -> io::Result<Stream> {
        let server = &self.servers[self.next % self.servers.len()];
        self.next += 1;
        // One that is down may not answer at all.
        let connecting = TcpStream::connect((server.host.as_str(), server.port));
        let stream = timeout(ZOOKEEPER_RECONNECT_DELAY_MAX, connecting).await??;
        stream.set_nodelay(true)?;
        let Some(tls) = &self.tls else { return Ok(Either::Left(stream)) };
        let name = ServerName::try_from(server.host.clone()).map_err(io::Error::other)?;
        Ok(Either::Right(tls.connect(name, stream).await?))
    }
}

/// `None` if it is no host with a port.
fn parse(server: &str) -> Option<Server> {
    let (host, port) = match server.strip_prefix('[') {
        Some(address) => {
            let (host, port) = address.split_once(']')?;
            (host, if port.is_empty() { None } else { Some(port.strip_prefix(':')?) })
        }
        None => server.rsplit_once(':').map_or((server, None), |(host, port)| (host, Some(port))),
    };
    let port = port.map_or(Some(DEFAULT_PORT), |port| port.parse().ok().filter(|port| *port != 0))?;
    (!host.is_empty()).then(|| Server { host: host.to_owned(), port })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn servers_are_hosts_with_ports() {
        let server = |host: &str, port| Some(Server { host: host.to_owned(), port });
        assert_eq!(parse("zk1.example:2281"), server("zk1.example", 2281));
        assert_eq!(parse("zk1"), server("zk1", DEFAULT_PORT));
        assert_eq!((parse("[::1]:1"), parse("[::1]")), (server("::1", 1), server("::1", DEFAULT_PORT)));
        for wrong in ["", ":2181", "zk1:", "zk1:0", "zk1:65536", "zk1:2181/ci", "[::1", "[::1]2181"] {
            assert_eq!(parse(wrong), None, "{wrong:?}");
        }
    }
}
