//! TLS to the broker, with client certificates.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::{ClientConfig, RootCertStore};
use rustls_platform_verifier::BuilderVerifierExt as _;
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_util::either::Either;

use super::stream::BrokerStream;
use super::{BrokerConfig, InvalidBrokerConfig};

#[derive(Clone)]
pub(super) struct TlsClient {
    connector: TlsConnector,
    host: ServerName<'static>,
}

impl TlsClient {
    /// Reads the files. A configured CA replaces the system's.
    pub(super) fn new(host: &str, files: &BrokerConfig) -> Result<Self, InvalidBrokerConfig> {
        crate::host::crypto_provider::install_crypto_provider();
        let host = ServerName::try_from(host.to_owned())
            .map_err(|_| InvalidBrokerConfig(format!("`{host}` is not a valid host name for a certificate")))?;
        let builder = match &files.ca {
            Some(path) => {
                let mut roots = RootCertStore::empty();
                let (added, _) = roots.add_parsable_certificates(read_certificates(path)?);
                if added == 0 {
                    return Err(InvalidBrokerConfig(format!("{} holds no certificate (PEM)", path.display())));
                }
                ClientConfig::builder().with_root_certificates(roots)
            }
            None => ClientConfig::builder()
                .with_platform_verifier()
                .map_err(|error| InvalidBrokerConfig(format!("cannot use the system's certificates: {error}")))?,
        };
        let config = match &files.client {
            Some(own) => {
                let chain = read_certificates(&own.certificate)?;
                let key = PrivateKeyDer::from_pem_file(&own.key).map_err(|error| {
                    InvalidBrokerConfig(format!("{} holds no private key (PEM): {error}", own.key.display()))
                })?;
                builder.with_client_auth_cert(chain, key).map_err(|error| {
                    InvalidBrokerConfig(format!("cannot use {} with its key: {error}", own.certificate.display()))
                })?
            }
            None => builder.with_no_client_auth(),
        };
        Ok(Self { connector: TlsConnector::from(Arc::new(config)), host })
    }

    pub(super) async fn connect(&self, stream: TcpStream) -> io::Result<BrokerStream> {
        let stream = self.connector.connect(self.host.clone(), stream).await?;
        Ok(BrokerStream::new(Either::Right(stream)))
    }
}

fn read_certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, InvalidBrokerConfig> {
    let certificates = CertificateDer::pem_file_iter(path).and_then(Iterator::collect);
    certificates.map_err(|error| {
        InvalidBrokerConfig(format!("cannot read certificates (PEM) from {}: {error}", PathBuf::from(path).display()))
    })
}
