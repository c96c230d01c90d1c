//! Authentication: Hawk signatures, temporary credentials with certificates, and the credentials of a claim.
//!
//! Verification needs no state: a certificate is signed with its issuer's token, and the token of a temporary
//! credential is derived from it.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, UNIX_EPOCH};

use axum::http::header::{AUTHORIZATION, HOST};
use axum::http::request::Parts;
use base64::Engine as _;
use base64::engine::general_purpose::{STANDARD, URL_SAFE_NO_PAD};
use hawk::mac::Mac;
use hawk::{Bewit, Header, Key, PayloadHasher, RequestBuilder, SHA256};
use secrecy::{ExposeSecret, SecretString};
use serde::{Deserialize, Serialize};
use url::Url;

use super::clock::UnixMillis;
use super::config::{Auth, Config, RegisteredClient};
use super::field_types::{header_str, query_param};
use super::queue_error::{QueueError, QueueErrorCode};
use super::scopes::{satisfies, satisfies_all};
use super::task_state::WorkerIdentity;
use journeyman_domain::limits::{QUEUE_CERTIFICATE_DRIFT, QUEUE_CERTIFICATE_TTL_MAX, QUEUE_CLOCK_DRIFT_MAX};
use journeyman_worker::task::formats::new_task_id;

/// Issuer of the credentials of claims.
const ISSUER: &str = "static/taskcluster/queue";

/// The scope that every caller has, with or without a signature.
const PUBLIC_SCOPE: &str = "queue:get-artifact:public/*";

const CERTIFICATE_VERSION: u8 = 1;

#[derive(Debug, Clone, Serialize, Deserialize)]
struct Certificate {
    version: u8,
    scopes: Vec<String>,
    start: i64,
    expiry: i64,
    seed: String,
    signature: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    issuer: Option<String>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Ext {
    certificate: Option<Certificate>,
    authorized_scopes: Option<Vec<String>>,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct TemporaryCredentials {
    client_id: String,
    access_token: String,
    certificate: String,
}

#[derive(Debug, Clone)]
pub(crate) struct Caller {
    client: Option<Arc<str>>,
    scopes: Arc<[String]>,
}

impl Caller {
    pub(crate) fn require_all(&self, scopes: impl IntoIterator<Item = String>) -> Result<(), QueueError> {
        let missing: Vec<_> = scopes.into_iter().filter(|scope| !satisfies(&self.scopes, scope)).collect();
        if missing.is_empty() { Ok(()) } else { Err(self.insufficient_scopes(&missing.join(", "))) }
    }

    pub(crate) fn require_any(&self, scopes: &[String]) -> Result<(), QueueError> {
        if scopes.iter().any(|scope| satisfies(&self.scopes, scope)) {
            return Ok(());
        }
        Err(self.insufficient_scopes(&format!("one of {}", scopes.join(", "))))
    }

    pub(crate) fn require_scope(&self, scope: String) -> Result<(), QueueError> {
        self.require_all([scope])
    }

    fn insufficient_scopes(&self, missing: &str) -> QueueError {
        let caller =
            self.client.as_deref().map_or_else(|| "an anonymous caller".to_owned(), |id| format!("client {id}"));
        QueueError::new(QueueErrorCode::InsufficientScopes, format!("{caller} lacks required scopes: {missing}"))
    }

    pub(crate) const fn is_authenticated(&self) -> bool {
        self.client.is_some()
    }

    pub(crate) fn require_claim_scopes(
        &self,
        call: &str,
        queue: &str,
        worker: &WorkerIdentity,
    ) -> Result<(), QueueError> {
        let worker_scope = format!("queue:worker-id:{}/{}", worker.group, worker.id);
        self.require_all([format!("queue:{call}:{queue}"), worker_scope])
    }
}

#[derive(Debug)]
pub(crate) struct AuthenticatedRequest {
    pub(crate) caller: Caller,
    /// The body hash that the caller signed.
    pub(crate) payload_hash: Option<Vec<u8>>,
}

pub(crate) struct Keyring {
    auth: Auth,
    clients: HashMap<String, RegisteredClient>,
    own_secret: SecretString,
}

fn auth_error(message: impl Into<String>) -> QueueError {
    QueueError::new(QueueErrorCode::AuthenticationFailed, message)
}

fn check(is_valid: bool, message: &str) -> Result<(), QueueError> {
    if is_valid { Ok(()) } else { Err(auth_error(message)) }
}

/// HMAC-SHA256. Fails for no key or data used here; an empty result matches nothing.
fn hmac(key: &[u8], data: &[u8]) -> Vec<u8> {
    Key::new(key, SHA256).and_then(|key| key.sign(data)).unwrap_or_default()
}

fn constant_time_eq(left: Vec<u8>, right: Vec<u8>) -> bool {
    !left.is_empty() && Mac::from(left) == Mac::from(right)
}

impl Keyring {
    pub(crate) fn new(config: &Config, own_secret: SecretString) -> Self {
        let issuer = RegisteredClient {
            client_id: ISSUER.to_owned(),
            access_token: own_secret.clone(),
            scopes: vec!["*".to_owned()],
        };
        let clients = config.clients.iter().cloned().chain([issuer]).map(|client| (client.client_id.clone(), client));
        Self { auth: config.auth, clients: clients.collect(), own_secret }
    }

    fn url_signature(&self, subject: &str, end: UnixMillis) -> Vec<u8> {
        hmac(self.own_secret.expose_secret().as_bytes(), format!("url\n{subject}\n{}", end.0).as_bytes())
    }

    /// The query of a URL that needs no other credentials until `end`.
    pub(crate) fn sign_url(&self, subject: &str, end: UnixMillis) -> String {
        format!("end={}&sig={}", end.0, URL_SAFE_NO_PAD.encode(self.url_signature(subject, end)))
    }

    pub(crate) fn is_url_valid(&self, subject: &str, query: &str, now: UnixMillis) -> bool {
        let part = |name| query_param(query, name).unwrap_or_default();
        let given = URL_SAFE_NO_PAD.decode(part("sig")).unwrap_or_default();
        let end = part("end").parse().map(UnixMillis);
        end.is_ok_and(|end| now < end && constant_time_eq(self.url_signature(subject, end), given))
    }

    pub(crate) fn issue(
        &self,
        client_id: String,
        scopes: Vec<String>,
        start: UnixMillis,
        expiry: UnixMillis,
    ) -> TemporaryCredentials {
        let token = self.own_secret.expose_secret();
        let mut certificate = Certificate {
            version: CERTIFICATE_VERSION,
            scopes,
            start: start.0,
            expiry: expiry.0,
            seed: format!("{}{}", new_task_id(), new_task_id()),
            signature: String::new(),
            issuer: Some(ISSUER.to_owned()),
        };
        certificate.signature = STANDARD.encode(certificate_signature(token, &certificate, &client_id));
        TemporaryCredentials {
            client_id,
            access_token: URL_SAFE_NO_PAD.encode(hmac(token.as_bytes(), certificate.seed.as_bytes())),
            certificate: serde_json::to_string(&certificate).unwrap_or_default(),
        }
    }

    /// Authenticates by the head alone. A request without a signature is anonymous, which is not an error.
    pub(crate) fn authenticate(&self, request: &Parts, now: UnixMillis) -> Result<AuthenticatedRequest, QueueError> {
        let unhashed = |caller| AuthenticatedRequest { caller, payload_hash: None };
        if matches!(self.auth, Auth::Open | Auth::OpenToNetwork) {
            return Ok(unhashed(Caller { client: Some("open".into()), scopes: Arc::new(["*".to_owned()]) }));
        }
        let query = request.uri.query().unwrap_or_default();
        let bewit = query.split('&').find_map(|pair| pair.strip_prefix("bewit="));
        match (request.headers.get(AUTHORIZATION), bewit) {
            // An unreadable header is an invalid signature, not a missing one.
            (Some(header), _) => self.authenticate_header(request, header.to_str().unwrap_or_default(), now),
            (None, Some(bewit)) => self.authenticate_bewit(request, bewit, now).map(unhashed),
            (None, None) => Ok(unhashed(Caller { client: None, scopes: Arc::new([PUBLIC_SCOPE.to_owned()]) })),
        }
    }

    fn authenticate_header(
        &self,
        request: &Parts,
        header: &str,
        now: UnixMillis,
    ) -> Result<AuthenticatedRequest, QueueError> {
        let header: Header = header
            .strip_prefix("Hawk ")
            .filter(|rest| has_bounded_timestamp(rest.split_once("ts=\"").map(|(_, rest)| rest)))
            .and_then(|rest| rest.parse().ok())
            .ok_or_else(|| auth_error("Unauthorized: Bad header format"))?;
        let id = header.id.clone().ok_or_else(|| auth_error("Unauthorized: Missing attributes"))?;
        let (key, caller) = self.resolve_credentials(&id, header.ext.as_deref(), now)?;
        // The timestamp is checked separately below, to report `Stale timestamp`.
        let anytime = Duration::from_secs(u64::from(u32::MAX) * 4);
        let valid = requested_address(request).is_some_and(|(host, port)| {
            RequestBuilder::new(request.method.as_str(), &host, port, target(request))
                .request()
                .validate_header(&header, &key, anytime)
        });
        check(valid, "Unauthorized: Bad mac")?;
        let sent = header.ts.and_then(|at| at.duration_since(UNIX_EPOCH).ok()).unwrap_or_default();
        let sent = UnixMillis(0).plus(sent);
        let is_recent = sent.until(now).max(now.until(sent)) <= QUEUE_CLOCK_DRIFT_MAX;
        check(is_recent, "Unauthorized: Stale timestamp")?;
        Ok(AuthenticatedRequest { caller, payload_hash: header.hash })
    }

    fn authenticate_bewit(&self, request: &Parts, text: &str, now: UnixMillis) -> Result<Caller, QueueError> {
        let plain = URL_SAFE_NO_PAD.decode(text.trim_end_matches('=')).unwrap_or_default();
        let plain = String::from_utf8_lossy(&plain);
        let bewit: Bewit<'_> = has_bounded_timestamp(plain.split_once('\\').map(|(_, rest)| rest))
            .then(|| text.parse().ok())
            .flatten()
            .ok_or_else(|| auth_error("Unauthorized: Invalid bewit encoding"))?;
        let (key, caller) = self.resolve_credentials(bewit.id(), bewit.ext(), now)?;
        let bare = without_bewit(target(request));
        let valid = requested_address(request).is_some_and(|(host, port)| {
            RequestBuilder::new("GET", &host, port, &bare).request().validate_bewit(&bewit, &key)
        });
        check(request.method == "GET" && valid, "Unauthorized: Bad mac")?;
        Ok(caller)
    }

    fn client(&self, id: &str) -> Result<&RegisteredClient, QueueError> {
        self.clients.get(id).ok_or_else(|| auth_error(format!("Unauthorized: Client ID {id} is not known")))
    }

    fn resolve_credentials(&self, id: &str, ext: Option<&str>, now: UnixMillis) -> Result<(Key, Caller), QueueError> {
        let ext = match ext {
            Some(text) if !text.is_empty() => parse_ext(text)?,
            Some(_) | None => Ext::default(),
        };
        let (token, mut scopes) = match ext.certificate {
            None => {
                let client = self.client(id)?;
                (client.access_token.expose_secret().to_owned(), client.scopes.clone())
            }
            Some(certificate) => self.verify_certificate(id, certificate, now)?,
        };
        if let Some(narrowed) = ext.authorized_scopes {
            check(satisfies_all(&scopes, &narrowed), "ext.authorizedScopes exceeds the scopes of its credentials")?;
            scopes = narrowed;
        }
        scopes.push(PUBLIC_SCOPE.to_owned());
        let key = Key::new(token.as_bytes(), SHA256).map_err(|_| auth_error("Unauthorized: Bad credentials"))?;
        Ok((key, Caller { client: Some(id.into()), scopes: scopes.into() }))
    }

    fn verify_certificate(
        &self,
        id: &str,
        certificate: Certificate,
        now: UnixMillis,
    ) -> Result<(String, Vec<String>), QueueError> {
        let named = certificate.issuer.as_deref();
        let (start, expiry) = (UnixMillis(certificate.start), UnixMillis(certificate.expiry));
        check(certificate.version == CERTIFICATE_VERSION, "ext.certificate.version must be 1")?;
        check(certificate.seed.len() == 44, "ext.certificate.seed must be 44 characters")?;
        check(named != Some(id), "ext.certificate.issuer must differ from the supplied clientId")?;
        check(start <= now.plus(QUEUE_CERTIFICATE_DRIFT), "ext.certificate.start > now")?;
        check(expiry >= now.minus(QUEUE_CERTIFICATE_DRIFT), "ext.certificate.expiry < now")?;
        check(start.until(expiry) <= QUEUE_CERTIFICATE_TTL_MAX, "ext.certificate cannot last longer than 31 days")?;
        let issuer = self.client(named.unwrap_or(id))?;
        let token = issuer.access_token.expose_secret();
        let may_name = named.is_none() || satisfies(&issuer.scopes, &format!("auth:create-client:{id}"));
        check(may_name, "ext.certificate.issuer lacks auth:create-client for the clientId")?;
        check(
            satisfies_all(&issuer.scopes, &certificate.scopes),
            "ext.certificate.issuer lacks some of the certificate scopes",
        )?;
        let signed = STANDARD.decode(&certificate.signature).unwrap_or_default();
        let fits = constant_time_eq(certificate_signature(token, &certificate, id), signed);
        check(fits, "ext.certificate.signature is not valid")?;
        let key = hmac(token.as_bytes(), certificate.seed.as_bytes());
        Ok((URL_SAFE_NO_PAD.encode(key), certificate.scopes))
    }
}

fn certificate_signature(token: &str, certificate: &Certificate, client_id: &str) -> Vec<u8> {
    let named = certificate.issuer.as_ref().map(|issuer| format!("clientId:{client_id}\nissuer:{issuer}\n"));
    let named = named.unwrap_or_default();
    let text = format!(
        "version:{}\n{named}seed:{}\nstart:{}\nexpiry:{}\nscopes:\n{}",
        certificate.version,
        certificate.seed,
        certificate.start,
        certificate.expiry,
        certificate.scopes.join("\n"),
    );
    hmac(token.as_bytes(), text.as_bytes())
}

/// Accepts both alphabets of base64, padded or not: clients differ.
fn parse_ext(text: &str) -> Result<Ext, QueueError> {
    let text = text.trim_end_matches('=').replace('+', "-").replace('/', "_");
    let read = URL_SAFE_NO_PAD.decode(text).ok().and_then(|bytes| serde_json::from_slice(&bytes).ok());
    read.ok_or_else(|| auth_error("Failed to parse ext"))
}

pub(crate) fn check_payload_hash(media_type: &str, body: &[u8], sent: Vec<u8>) -> Result<(), QueueError> {
    let ours = PayloadHasher::hash(media_type.to_ascii_lowercase(), SHA256, body).unwrap_or_default();
    check(constant_time_eq(ours, sent), "the hash of the payload does not match the signed one")
}

/// Bounds the timestamp: the hawk crate panics when it adds a larger one to the epoch.
fn has_bounded_timestamp(text: Option<&str>) -> bool {
    text.is_some_and(|text| text.bytes().take_while(u8::is_ascii_digit).count() <= 11)
}

fn without_bewit(target: &str) -> String {
    let Some((path, query)) = target.split_once('?') else { return target.to_owned() };
    let rest: Vec<_> = query.split('&').filter(|pair| !pair.starts_with("bewit=")).collect();
    if rest.is_empty() { path.to_owned() } else { format!("{path}?{}", rest.join("&")) }
}

/// Path and query as sent.
fn target(request: &Parts) -> &str {
    request.uri.path_and_query().map_or("/", |target| target.as_str())
}

fn requested_address(request: &Parts) -> Option<(String, u16)> {
    let url = Url::parse(&format!("http://{}", header_str(request, HOST)?)).ok()?;
    Some((url.host_str()?.trim_matches(['[', ']']).to_owned(), url.port_or_known_default()?))
}
