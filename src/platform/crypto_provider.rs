//! Selects ring as the TLS crypto provider.

/// Has to be called before an HTTP client is built. May be called repeatedly.
pub fn install_crypto_provider() {
    // An error means that a provider is installed already.
    rustls::crypto::ring::default_provider().install_default().ok();
}
