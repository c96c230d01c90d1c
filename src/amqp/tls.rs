//! Who the broker is, and who we are, by certificates.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::{ClientConfig, RootCertStore};
use rustls_platform_verifier::BuilderVerifierExt as _;
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_util::compat::TokioAsyncReadCompatExt as _;

use super::wire::Wire;
use super::{Certificates, Unusable};

/// What encrypts a connection.
#[derive(Clone)]
pub(super) struct Tls {
    connector: TlsConnector,
    host: ServerName<'static>,
}

impl Tls {
    /// Reads the files. Where a CA is named, nobody else's word counts; otherwise that of this system's does.
    pub(super) fn new(host: &str, files: &Certificates) -> Result<Self, Unusable> {
        crate::host::tls::choose();
        let host = ServerName::try_from(host.to_owned())
            .map_err(|_| Unusable(format!("`{host}` is not a name that a certificate could be for")))?;
        let builder = match &files.ca {
            Some(path) => {
                let mut roots = RootCertStore::empty();
                let (added, _) = roots.add_parsable_certificates(certificates(path)?);
                if added == 0 {
                    return Err(Unusable(format!("{} holds no certificate (PEM)", path.display())));
                }
                ClientConfig::builder().with_root_certificates(roots)
            }
            None => ClientConfig::builder()
                .with_platform_verifier()
                .map_err(|error| Unusable(format!("this system's certificates cannot be used: {error}")))?,
        };
        let config = match &files.own {
            Some(own) => {
                let chain = certificates(&own.certificate)?;
                let key = PrivateKeyDer::from_pem_file(&own.key)
                    .map_err(|error| Unusable(format!("{} holds no private key (PEM): {error}", own.key.display())))?;
                builder.with_client_auth_cert(chain, key).map_err(|error| {
                    Unusable(format!("{} and its key cannot be used: {error}", own.certificate.display()))
                })?
            }
            None => builder.with_no_client_auth(),
        };
        Ok(Self { connector: TlsConnector::from(Arc::new(config)), host })
    }

    /// Encrypts.
    pub(super) async fn around(&self, stream: TcpStream) -> io::Result<Wire> {
        let stream = self.connector.connect(self.host.clone(), stream).await?;
        Ok(stream.compat().into())
    }
}

fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, Unusable> {
    let read = CertificateDer::pem_file_iter(path).and_then(Iterator::collect);
    read.map_err(|error| {
        Unusable(format!("{} cannot be read as certificates (PEM): {error}", PathBuf::from(path).display()))
    })
}
