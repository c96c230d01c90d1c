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

use crate::task::deployment::RunCredentials;
use journeyman_platform::redact;

/// A Taskcluster client: permanent, or temporary with a certificate. Deliberately without `Debug`.
#[derive(Clone)]
pub struct Credentials {
    client_id: String,
    access_token: SecretString,
    /// JSON text; it is never changed.
    certificate: Option<SecretString>,
    /// Restricts requests to these scopes.
    authorized_scopes: Option<Arc<[String]>>,
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
        let parsed = match certificate.map(ExposeSecret::expose_secret) {
            Some(text) if !text.is_empty() => Some(parse_object(text).ok_or(InvalidCredentials(
                "the certificate is not a JSON object; pass it as Taskcluster issued it, or omit it for permanent \
                 credentials",
            ))?),
            Some(_) | None => None,
        };
        let signature = parsed.and_then(certificate_signature);
        let secrets = [Some(&access_token), signature.as_ref()];
        let redaction = redact::hide(secrets.into_iter().flatten().map(ExposeSecret::expose_secret));
        let certificate = parsed.map(|text| text.get().to_owned().into());
        let (client_id, redaction) = (client_id.to_owned(), Arc::new(redaction));
        Ok(Self { client_id, access_token, certificate, authorized_scopes: None, _redaction: redaction })
    }

    /// The same credentials for requests that may use these scopes only. They must have them.
    pub(super) fn restricted_to(&self, scopes: Arc<[String]>) -> Self {
        Self { authorized_scopes: Some(scopes), ..self.clone() }
    }

    /// The credentials themselves, for a task.
    pub(super) fn exposed(&self) -> RunCredentials {
        let Self { client_id, access_token, certificate, .. } = self.clone();
        RunCredentials { client_id, access_token, certificate }
    }

    /// What a signature carries besides.
    fn ext(&self) -> Option<SecretString> {
        let certificate = self.certificate.as_ref().map(|text| format!(r#""certificate":{}"#, text.expose_secret()));
        let scopes = self.authorized_scopes.as_ref();
        let scopes = scopes.map(|scopes| format!(r#""authorizedScopes":{}"#, serde_json::Value::from(scopes.to_vec())));
        let keys: Vec<_> = certificate.into_iter().chain(scopes).collect();
        (!keys.is_empty()).then(|| STANDARD.encode(format!("{{{}}}", keys.join(","))).into())
    }

    /// Returns true if both say the same.
    pub fn is_same(&self, other: &Self) -> bool {
        let secrets = |of: &Self| {
            let certificate = of.certificate.as_ref().map(|text| text.expose_secret().to_owned());
            (of.client_id.clone(), of.access_token.expose_secret().to_owned(), certificate)
        };
        secrets(self) == secrets(other)
    }

    /// The client id; not a secret.
    pub fn client_id(&self) -> &str {
        &self.client_id
    }

    /// The `Authorization` header of one request at time `at`, with a fresh nonce. `None` if the URL has no host.
    pub(super) fn sign(&self, method: &str, url: &Url, at: SystemTime) -> Option<HeaderValue> {
        let ext = self.ext();
        let request = hawk_request(method, url, ext.as_ref())?;
        let nonce = uuid::Uuid::new_v4().simple().to_string();
        let header = request.make_header_full(&self.signer()?, at, nonce).ok()?;
        let mut value = HeaderValue::from_str(&format!("Hawk {header}")).ok()?;
        value.set_sensitive(true);
        Some(value)
    }

    /// The URL with a signature of its own (a bewit), for GET requests until `end`.
    pub(super) fn sign_url(&self, url: &Url, end: SystemTime) -> Option<Url> {
        let ext = self.ext();
        let signer = self.signer()?;
        let bewit = hawk_request("GET", url, ext.as_ref())?.make_bewit(&signer, end).ok()?.to_str();
        let mut signed = url.clone();
        signed.set_fragment(None);
        signed.query_pairs_mut().append_pair("bewit", &bewit);
        Some(signed)
    }

    fn signer(&self) -> Option<::hawk::Credentials> {
        let key = ::hawk::Key::new(self.access_token.expose_secret().as_bytes(), ::hawk::SHA256).ok()?;
        Some(::hawk::Credentials { id: self.client_id.clone(), key })
    }
}

fn hawk_request<'a>(method: &'a str, url: &'a Url, ext: Option<&'a SecretString>) -> Option<::hawk::Request<'a>> {
    let path = &url[Position::BeforePath..Position::AfterQuery];
    let request = ::hawk::RequestBuilder::new(method, url.host_str()?, url.port_or_known_default()?, path);
    Some(request.ext(ext.map(ExposeSecret::expose_secret)).request())
}

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
