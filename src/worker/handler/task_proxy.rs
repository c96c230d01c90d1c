//! The proxy of a task: signs its calls to the services of its deployment.
//!
//! It listens on a loopback port of its own while the task runs, and serves connections that a process of the task has made: the
//! kernel names the socket of each connection, and the task's scope names its processes. A process that gets an open connection
//! from one of them, or that runs as the worker's user and traces one of them, can use it as well.
//!
//! Calls are signed by the credentials of the last reclaim, restricted to the scopes of the task.

use std::convert::Infallible;
use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;

use axum::body::{Body, to_bytes};
use axum::extract::{Request, State};
use axum::http::header::{
    AUTHORIZATION, CONNECTION, CONTENT_LENGTH, CONTENT_TYPE, HOST, LOCATION, TE, TRAILER, TRANSFER_ENCODING, UPGRADE,
};
use axum::http::{HeaderMap, HeaderName, HeaderValue, StatusCode};
use axum::response::{IntoResponse as _, Response};
use axum::routing::{any, get, post};
use axum::serve::Listener;
use axum::{Json, Router};
use reqwest::Client;
use secrecy::ExposeSecret as _;
use serde_json::{Value, json};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::{JoinSet, spawn_blocking};
use url::Url;

use crate::task::{Deployment, RunCredentials};
use journeyman_domain::limits::{BEWIT_LIFETIME, HTTP_HEAD_TIMEOUT, PROXY_BEWIT_BYTES_MAX, PROXY_CONNECTIONS_MAX};
use journeyman_platform::host::containment::ProcessScope;
use journeyman_platform::http::client::root_cause;
use journeyman_platform::http::{Limits, serve};

use super::layer::{Inner, Layer, layered};
use super::log::TaskLog;
use super::{Context, DynHandler, PrepareError, PreparedPayload, Preparing};

/// Headers about one connection, which the next one has its own of.
const HOP_HEADERS: [HeaderName; 7] = [CONNECTION, TE, TRAILER, TRANSFER_ENCODING, UPGRADE, HOST, AUTHORIZATION];

/// A proxy that serves until it is dropped.
#[derive(Debug)]
pub(super) struct TaskProxy {
    url: String,
    _server: JoinSet<Infallible>,
}

/// Says whether a task may ask for the credentials themselves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Credentials {
    Shown,
    Hidden,
}

#[derive(Clone)]
struct Proxy {
    deployment: Arc<dyn Deployment>,
    client: Client,
}

/// Accepts connections of the task's processes.
struct TaskListener {
    listener: TcpListener,
    address: SocketAddr,
    scope: ProcessScope,
    log: TaskLog,
    /// The log has one line about it, however many there are.
    has_refused: bool,
}

impl TaskProxy {
    /// # Errors
    ///
    /// Malformed for a task whose queue belongs to no deployment.
    pub(super) async fn start(
        client: Client,
        credentials: Credentials,
        context: &Context,
    ) -> Result<Self, PrepareError> {
        let Some(deployment) = context.deployment().cloned() else {
            let text = "the task's queue belongs to no deployment whose services a proxy could call".to_owned();
            return Err(PrepareError::malformed(vec![text]));
        };
        let failed = |error: io::Error| PrepareError::from_io("the proxy of the task", &error);
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.map_err(failed)?;
        let address = listener.local_addr().map_err(failed)?;
        let mut router = Router::new().route("/bewit", post(sign_url)).fallback(any(forward));
        if credentials == Credentials::Shown {
            router = router.route("/credentials", get(show_credentials));
        }
        let router = router.with_state(Proxy { deployment, client });
        let limits = Limits {
            connections_max: PROXY_CONNECTIONS_MAX,
            connections_per_peer_max: PROXY_CONNECTIONS_MAX,
            head_timeout: HTTP_HEAD_TIMEOUT,
            body_timeout: None,
            connection_age_max: None,
        };
        let (scope, log) = (context.scope().clone(), context.log().clone());
        let listener = TaskListener { listener, address, scope, log, has_refused: false };
        let mut server = JoinSet::new();
        server.spawn(serve(listener, router, limits, SocketAddr::ip));
        Ok(Self { url: format!("http://{address}"), _server: server })
    }

    pub(super) fn url(&self) -> &str {
        &self.url
    }
}

impl Listener for TaskListener {
    type Io = TcpStream;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (TcpStream, SocketAddr) {
        loop {
            let (stream, peer) = Listener::accept(&mut self.listener).await;
            let (scope, local) = (self.scope.clone(), self.address);
            let is_own = spawn_blocking(move || scope.holds_connection(peer, local));
            match is_own.await.map_err(io::Error::other).flatten() {
                Ok(true) => return (stream, peer),
                Ok(false) if std::mem::replace(&mut self.has_refused, true) => {}
                Ok(false) => self.log.write_note("the task's proxy refused a process that is not of this task"),
                Err(error) => {
                    self.log.write_note(&format!("the task's proxy cannot tell whose a connection is: {error}"))
                }
            }
        }
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        Ok(self.address)
    }
}

async fn forward(State(proxy): State<Proxy>, request: Request) -> Response {
    let (parts, body) = request.into_parts();
    let target = parts.uri.path_and_query().map_or("", |target| target.as_str());
    // Older tasks leave `/api` out.
    let prefix = if target.starts_with("/api/") { "" } else { "/api" };
    let root = proxy.deployment.root_url();
    let Some(url) = Url::parse(&format!("{root}{prefix}{target}")).ok().filter(|url| is_of(root, url)) else {
        return (StatusCode::NOT_FOUND, "use /api/SERVICE/VERSION/PATH, or /bewit\n").into_response();
    };
    let Some(signature) = proxy.deployment.sign(parts.method.as_str(), &url) else {
        return (StatusCode::BAD_REQUEST, "this URL cannot be signed\n").into_response();
    };
    let has_body = parts.headers.contains_key(TRANSFER_ENCODING)
        || parts.headers.get(CONTENT_LENGTH).is_some_and(|length| length != "0");
    let mut headers = end_to_end(&parts.headers);
    headers.insert(AUTHORIZATION, signature);
    if has_body && !headers.contains_key(CONTENT_TYPE) {
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    }
    let mut forwarded = proxy.client.request(parts.method, url.clone()).headers(headers);
    if has_body {
        forwarded = forwarded.body(reqwest::Body::wrap_stream(body.into_data_stream()));
    }
    match forwarded.send().await {
        Ok(answer) => {
            let (status, headers) = (answer.status(), end_to_end(answer.headers()));
            let mut response = Response::new(Body::from_stream(answer.bytes_stream()));
            *response.status_mut() = status;
            *response.headers_mut() = headers;
            response.headers_mut().extend(HeaderValue::from_str(url.as_str()).ok().map(|url| (ENDPOINT, url)));
            response
        }
        Err(error) => {
            let text = format!("the deployment cannot be reached: {}\n", root_cause(&error.without_url()));
            (StatusCode::BAD_GATEWAY, text).into_response()
        }
    }
}

const ENDPOINT: HeaderName = HeaderName::from_static("x-taskcluster-endpoint");

/// Signs the URL in the body for GET requests of its bearer.
async fn sign_url(State(proxy): State<Proxy>, request: Request) -> Response {
    let root = proxy.deployment.root_url();
    let body = to_bytes(request.into_body(), PROXY_BEWIT_BYTES_MAX).await.unwrap_or_default();
    let url = std::str::from_utf8(&body).ok().and_then(|text| Url::parse(text.trim()).ok());
    let signed = url.filter(|url| is_of(root, url)).and_then(|url| proxy.deployment.sign_url(&url, BEWIT_LIFETIME));
    match signed {
        Some(signed) => (StatusCode::SEE_OTHER, [(LOCATION, signed.to_string())], signed.to_string()).into_response(),
        None => (StatusCode::BAD_REQUEST, format!("send the URL to sign, which begins with {root}/\n")).into_response(),
    }
}

async fn show_credentials(State(proxy): State<Proxy>) -> Json<Value> {
    let RunCredentials { client_id, access_token, certificate } = proxy.deployment.run_credentials();
    let certificate = certificate.as_ref().map(|text| text.expose_secret().to_owned());
    let root_url = proxy.deployment.root_url();
    Json(json!({
        "rootUrl": root_url, "clientId": client_id, "accessToken": access_token.expose_secret(), "certificate": certificate,
    }))
}

/// Other hosts, and other paths after `..`, get no signature.
fn is_of(root: &str, url: &Url) -> bool {
    url.as_str().strip_prefix(root).is_some_and(|path| path.starts_with("/api/"))
}

fn end_to_end(headers: &HeaderMap) -> HeaderMap {
    let kept = headers.iter().filter(|(name, _)| !HOP_HEADERS.contains(name));
    kept.map(|(name, value)| (name.clone(), value.clone())).collect()
}

struct ProxyOfCredentials(Client);

/// Starts a proxy for each task of a handler, which also answers with the credentials of the run.
pub fn with_task_credentials(handler: Arc<dyn DynHandler>, client: Client) -> Arc<dyn DynHandler> {
    layered(handler, ProxyOfCredentials(client))
}

impl Layer for ProxyOfCredentials {
    fn prepare<'a>(&'a self, inner: Inner<'a>, context: &'a Context) -> Preparing<'a> {
        Box::pin(async move {
            let proxy = TaskProxy::start(self.0.clone(), Credentials::Shown, context).await?;
            let context = context.clone().with_proxy(proxy.url());
            let prepared = inner.prepare(&context).await?;
            let execute: PreparedPayload = Box::new(move |context| {
                Box::pin(async move {
                    let context = context.clone().with_proxy(proxy.url());
                    prepared(&context).await
                })
            });
            Ok(execute)
        })
    }
}
