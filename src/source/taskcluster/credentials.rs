//! Who we are to a Taskcluster service, and the Hawk signature that says so.
//!
//! A signature covers the method, the path with its query, the host and the port. Bodies are not hashed: the hash
//! is optional in Taskcluster, and TLS covers the body.

use std::sync::{Arc, PoisonError, RwLock};
use std::time::SystemTime;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use reqwest::header::HeaderValue;
use secrecy::{ExposeSecret, SecretString};
use serde::Serialize;
use serde_json::value::RawValue;
use url::{Position, Url};

use crate::redact;

/// A Taskcluster client: permanent, or temporary with a certificate. Deliberately without `Debug`.
#[derive(Clone)]
pub struct Credentials {
    client_id: String,
    access_token: SecretString,
    ext: Option<SecretString>,
    /// No log shows them as long as somebody can sign with them.
    _redaction: Arc<redact::HiddenSecrets>,
}

/// Credentials that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum InvalidCredentials {
    /// The client id is empty or holds a character that no header can carry.
    #[error("the client id is empty or holds a quote, a backslash or a control character")]
    ClientId,
    /// The access token is empty.
    #[error("the access token is empty")]
    AccessToken,
    /// The certificate of temporary credentials is not the JSON object that Taskcluster hands out.
    #[error(
        "the certificate is not a JSON object; give it as Taskcluster handed it out, or leave it out for permanent credentials"
    )]
    Certificate,
}

impl Credentials {
    /// Takes credentials as Taskcluster hands them out; `certificate` is the JSON text of temporary ones.
    ///
    /// # Errors
    ///
    /// Where a request could not be signed with them.
    pub fn new(
        client_id: &str,
        access_token: SecretString,
        certificate: Option<&SecretString>,
    ) -> Result<Self, InvalidCredentials> {
        Self::restricted(client_id, access_token, certificate, None)
    }

    /// As [`Credentials::new`], restricted to `scopes`, which the credentials must satisfy.
    ///
    /// # Errors
    ///
    /// Where a request could not be signed with them.
    pub fn restricted(
        client_id: &str,
        access_token: SecretString,
        certificate: Option<&SecretString>,
        scopes: Option<&[String]>,
    ) -> Result<Self, InvalidCredentials> {
        let clean = |byte: u8| byte.is_ascii_graphic() && byte != b'"' && byte != b'\\' || byte == b' ';
        if client_id.is_empty() || !client_id.bytes().all(clean) {
            return Err(InvalidCredentials::ClientId);
        }
        if access_token.expose_secret().is_empty() {
            return Err(InvalidCredentials::AccessToken);
        }
        let certificate = match certificate.map(ExposeSecret::expose_secret) {
            Some(text) if !text.is_empty() => Some(parse_object(text).ok_or(InvalidCredentials::Certificate)?),
            Some(_) | None => None,
        };
        let signature = certificate.and_then(certificate_signature);
        let secrets = [Some(&access_token), signature.as_ref()];
        let in_logs = redact::hide(secrets.into_iter().flatten().map(ExposeSecret::expose_secret));
        let ext = Ext { certificate, authorized_scopes: scopes };
        let ext = match ext {
            Ext { certificate: None, authorized_scopes: None } => None,
            ext => Some(serde_json::to_vec(&ext).map_err(|_| InvalidCredentials::Certificate)?),
        };
        let ext = ext.map(|text| STANDARD.encode(text).into());
        Ok(Self { client_id: client_id.to_owned(), access_token, ext, _redaction: Arc::new(in_logs) })
    }

    /// Who this is; not a secret.
    #[must_use]
    pub fn client_id(&self) -> &str {
        &self.client_id
    }

    /// The value of the `Authorization` header for one request made at `at`, with a fresh nonce. `None` where the
    /// URL has no host.
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

/// What a signature carries besides the request.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Ext<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    certificate: Option<&'a RawValue>,
    #[serde(skip_serializing_if = "Option::is_none")]
    authorized_scopes: Option<&'a [String]>,
}

/// The text of a JSON object, as it came: claims bring a certificate each, and none of them is ours to change.
fn parse_object(text: &str) -> Option<&RawValue> {
    serde_json::from_str::<&RawValue>(text).ok().filter(|value| value.get().starts_with('{'))
}

/// What makes a certificate one. The rest of it is scopes and times, which are in every log.
fn certificate_signature(certificate: &RawValue) -> Option<SecretString> {
    #[derive(serde::Deserialize)]
    struct Signed {
        signature: SecretString,
    }
    serde_json::from_str(certificate.get()).ok().map(|Signed { signature }| signature)
}

/// A value that is replaced as a whole while others read it.
pub(super) struct Swap<T>(RwLock<Arc<T>>);

impl<T> Swap<T> {
    pub(super) fn new(value: T) -> Self {
        Self(RwLock::new(Arc::new(value)))
    }

    pub(super) fn load(&self) -> Arc<T> {
        Arc::clone(&self.0.read().unwrap_or_else(PoisonError::into_inner))
    }

    pub(super) fn store(&self, value: T) {
        *self.0.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(value);
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
