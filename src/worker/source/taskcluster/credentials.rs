//! Taskcluster credentials and their Hawk signatures.
//!
//! A signature covers method, path, query, host and port. Bodies are not hashed: the hash is optional in
//! Taskcluster, and TLS protects the body.

use std::sync::Arc;
use std::time::SystemTime;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use parking_lot::RwLock;
use reqwest::header::HeaderValue;
use secrecy::{ExposeSecret, SecretString};
use serde_json::value::RawValue;
use url::{Position, Url};

use journeyman_platform::redact;

/// A Taskcluster client: permanent, or temporary with a certificate. Deliberately without `Debug`.
#[derive(Clone)]
pub struct Credentials {
    client_id: String,
    access_token: SecretString,
    ext: Option<SecretString>,
    /// Redacts them in logs for their lifetime.
    _redaction: Arc<redact::HiddenSecrets>,
}

/// Invalid credentials.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct InvalidCredentials(&'static str);

impl Credentials {
    /// Creates credentials as Taskcluster issues them; `certificate` is the JSON text of temporary ones.
    ///
    /// # Errors
    ///
    /// They cannot sign a request.
    pub fn new(
        client_id: &str,
        access_token: SecretString,
        certificate: Option<&SecretString>,
    ) -> Result<Self, InvalidCredentials> {
        let valid = |byte: u8| byte.is_ascii_graphic() && byte != b'"' && byte != b'\\' || byte == b' ';
        if client_id.is_empty() || !client_id.bytes().all(valid) {
            let what = "the client id is empty or contains a quote, a backslash or a control character";
            return Err(InvalidCredentials(what));
        }
        if access_token.expose_secret().is_empty() {
            return Err(InvalidCredentials("the access token is empty"));
        }
        let certificate = match certificate.map(ExposeSecret::expose_secret) {
            Some(text) if !text.is_empty() => Some(parse_object(text).ok_or(InvalidCredentials(
                "the certificate is not a JSON object; pass it as Taskcluster issued it, or omit it for permanent \
                 credentials",
            ))?),
            Some(_) | None => None,
        };
        let signature = certificate.and_then(certificate_signature);
        let secrets = [Some(&access_token), signature.as_ref()];
        let redaction = redact::hide(secrets.into_iter().flatten().map(ExposeSecret::expose_secret));
        let ext = certificate.map(|text| STANDARD.encode(format!(r#"{{"certificate":{}}}"#, text.get())).into());
        Ok(Self { client_id: client_id.to_owned(), access_token, ext, _redaction: Arc::new(redaction) })
    }

    /// Returns true if both say the same.
    pub fn is_same(&self, other: &Self) -> bool {
        let secrets = |of: &Self| {
            let ext = of.ext.as_ref().map(|ext| ext.expose_secret().to_owned());
            (of.client_id.clone(), of.access_token.expose_secret().to_owned(), ext)
        };
        secrets(self) == secrets(other)
    }

    /// The client id; not a secret.
    pub fn client_id(&self) -> &str {
        &self.client_id
    }

    /// The `Authorization` header of one request at time `at`, with a fresh nonce. `None` if the URL has no host.
    pub(super) fn sign(&self, method: &str, url: &Url, at: SystemTime) -> Option<HeaderValue> {
        let key = ::hawk::Key::new(self.access_token.expose_secret().as_bytes(), ::hawk::SHA256).ok()?;
        let signer = ::hawk::Credentials { id: self.client_id.clone(), key };
        let path = &url[Position::BeforePath..Position::AfterQuery];
        let host = url.host_str()?;
        let port = url.port_or_known_default()?;
        let header = ::hawk::RequestBuilder::new(method, host, port, path)
            .ext(self.ext.as_ref().map(ExposeSecret::expose_secret))
            .request()
            .make_header_full(&signer, at, uuid::Uuid::new_v4().simple().to_string())
            .ok()?;
        let mut value = HeaderValue::from_str(&format!("Hawk {header}")).ok()?;
        value.set_sensitive(true);
        Some(value)
    }
}

/// The certificate is kept as text; it is never changed.
fn parse_object(text: &str) -> Option<&RawValue> {
    serde_json::from_slice::<&RawValue>(text.as_bytes()).ok().filter(|value| value.get().starts_with('{'))
}

/// The only secret part of a certificate; the rest is scopes and times.
fn certificate_signature(certificate: &RawValue) -> Option<SecretString> {
    #[derive(serde::Deserialize)]
    struct Signed {
        signature: SecretString,
    }
    serde_json::from_slice(certificate.get().as_bytes()).ok().map(|Signed { signature }| signature)
}

/// A value that is replaced as a whole while others read it.
pub(super) struct Swap<T>(RwLock<Arc<T>>);

impl<T> Swap<T> {
    pub(super) fn new(value: T) -> Self {
        Self(RwLock::new(Arc::new(value)))
    }

    pub(super) fn load(&self) -> Arc<T> {
        Arc::clone(&self.0.read())
    }

    pub(super) fn store(&self, value: T) {
        *self.0.write() = Arc::new(value);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::Value;
    use std::time::{Duration, UNIX_EPOCH};

    fn temporary() -> Credentials {
        Credentials::new("task-client/x/0", "token".into(), Some(&r#"{"version":1,"scopes":["a"]}"#.into())).unwrap()
    }

    fn header(value: &HeaderValue) -> ::hawk::Header {
        value.to_str().unwrap()["Hawk ".len()..].parse().unwrap()
    }

    #[test]
    fn the_signature_covers_the_query_and_carries_the_certificate() {
        let at = UNIX_EPOCH + Duration::from_secs(1_795_256_444);
        let url = Url::parse("http://tc.example:8080/api/queue/v1/x?limit=1&continuationToken=a%2Fb").unwrap();
        let header = header(&temporary().sign("GET", &url, at).unwrap());

        let key = ::hawk::Key::new("token", ::hawk::SHA256).unwrap();
        let with = |path| {
            ::hawk::RequestBuilder::new("GET", "tc.example", 8080, path)
                .ext(header.ext.as_deref())
                .request()
                .validate_header(&header, &key, Duration::from_secs(u64::from(u32::MAX)))
        };
        assert!(with("/api/queue/v1/x?limit=1&continuationToken=a%2Fb"));
        assert!(!with("/api/queue/v1/x"));
        let ext = STANDARD.decode(header.ext.as_deref().unwrap()).unwrap();
        let ext: Value = serde_json::from_slice(&ext).unwrap();
        assert_eq!(ext["certificate"]["scopes"][0], "a");
    }

    #[test]
    fn every_request_has_its_own_nonce() {
        let url = Url::parse("http://tc.example/x").unwrap();
        let nonce = || header(&temporary().sign("GET", &url, UNIX_EPOCH).unwrap()).nonce;
        assert_ne!(nonce(), nonce());
    }

    #[test]
    fn credentials_that_cannot_sign_are_refused() {
        assert!(Credentials::new("", "t".into(), None).is_err());
        assert!(Credentials::new("a\"b", "t".into(), None).is_err());
        assert!(Credentials::new("a", "".into(), None).is_err());
        assert!(Credentials::new("a", "t".into(), Some(&"no json".into())).is_err());
        assert!(Credentials::new("a", "t".into(), Some(&"".into())).is_ok());
    }
}
