//! TLS for connections that are not HTTP: whom to trust, and the own certificate.

use std::path::Path;

use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::{ClientConfig, RootCertStore};
use rustls_platform_verifier::BuilderVerifierExt as _;

/// Files that cannot be used.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct InvalidTls(String);

/// Reads the files. A CA replaces the system's; the own certificate comes with its key.
pub fn client_config(ca: Option<&Path>, own: Option<(&Path, &Path)>) -> Result<ClientConfig, InvalidTls> {
    crate::crypto_provider::install_crypto_provider();
    let builder = match ca {
        Some(path) => {
            let mut roots = RootCertStore::empty();
            if roots.add_parsable_certificates(read_certificates(path)?).0 == 0 {
                return Err(InvalidTls(format!("{} holds no certificate (PEM)", path.display())));
            }
            ClientConfig::builder().with_root_certificates(roots)
        }
        None => ClientConfig::builder()
            .with_platform_verifier()
            .map_err(|error| InvalidTls(format!("cannot use the system's certificates: {error}")))?,
    };
    let Some((certificate, key_file)) = own else { return Ok(builder.with_no_client_auth()) };
    let key = PrivateKeyDer::from_pem_file(key_file)
        .map_err(|error| InvalidTls(format!("{} holds no private key (PEM): {error}", key_file.display())))?;
    builder
        .with_client_auth_cert(read_certificates(certificate)?, key)
        .map_err(|error| InvalidTls(format!("cannot use {} with its key: {error}", certificate.display())))
}

fn read_certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, InvalidTls> {
    CertificateDer::pem_file_iter(path)
        .and_then(Iterator::collect)
        .map_err(|error| InvalidTls(format!("cannot read certificates (PEM) from {}: {error}", path.display())))
}
