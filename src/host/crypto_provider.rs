//! Which library does TLS.

/// Chooses it for the whole process; to be called before an HTTP client is made. Repeating it changes nothing.
pub(crate) fn install_crypto_provider() {
    // An error says that one was chosen already, which is what is wanted.
    rustls::crypto::ring::default_provider().install_default().ok();
}
