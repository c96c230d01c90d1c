//! TLS to the broker, with client certificates.

use std::io;
use std::sync::Arc;

use rustls::pki_types::ServerName;
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;

use super::stream::Transport;
use super::{BrokerConfig, InvalidBrokerConfig};
use crate::host::tls_config::client_config;

pub(super) struct TlsClient {
    connector: TlsConnector,
    host: ServerName<'static>,
}

impl TlsClient {
    /// Reads the files. A configured CA replaces the system's.
    pub(super) fn new(host: &str, files: &BrokerConfig) -> Result<Self, InvalidBrokerConfig> {
        let host = ServerName::try_from(host.to_owned())
            .map_err(|_| InvalidBrokerConfig(format!("`{host}` is not a valid host name for a certificate")))?;
        let own = files.client.as_ref().map(|own| (own.certificate.as_path(), own.key.as_path()));
        let config = client_config(files.ca.as_deref(), own).map_err(|error| InvalidBrokerConfig(error.to_string()))?;
        Ok(Self { connector: TlsConnector::from(Arc::new(config)), host })
    }

    pub(super) async fn connect(self, stream: TcpStream) -> io::Result<Transport> {
        Ok(Transport::Right(self.connector.connect(self.host, stream).await?))
    }
}
