//! The door for those who look over HTTP: who may knock, how many at once, and for how long. What they see is decided by
//! the site behind it.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::fmt::Write as _;
use std::future::Future;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use axum::body::{Body, Bytes};
use axum::http::header::{ALLOW, AUTHORIZATION, CACHE_CONTROL, CONTENT_TYPE, HOST, REFERRER_POLICY};
use axum::http::header::{HeaderValue, X_CONTENT_TYPE_OPTIONS};
use axum::http::{Method, Request, Response, StatusCode};
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::{AbortHandle, JoinSet};
use tokio::time::{sleep, timeout};

use crate::limits::{
    CONTROL_BODY_BYTES_MAX, HTTP_ACCEPT_RETRY_DELAY, HTTP_BODY_TIMEOUT, HTTP_CONNECTION_AGE_MAX, HTTP_CONNECTIONS_MAX,
    HTTP_HEAD_BYTES_MAX, HTTP_HEAD_TIMEOUT,
};

/// What is behind a door.
pub(super) struct Routes {
    /// Every path that there is.
    pub(super) paths: &'static [&'static str],
    /// For people who ask for another.
    pub(super) hint: &'static str,
    /// Answers to one of them.
    pub(super) handler: Box<RouteHandler>,
    /// What only those may who show that they may.
    pub(super) auth_routes: Vec<AuthRoute>,
}

/// A path that JSON is posted to, and that may be looked at too, by those who may.
pub(super) struct AuthRoute {
    pub(super) path: &'static str,
    pub(super) methods: &'static [Method],
    pub(super) handler: Box<AuthHandler>,
}

/// What somebody wants who says that they may.
pub(super) struct AuthRequest {
    /// How they say it.
    pub(super) authorization: Option<String>,
    pub(super) operation: Operation,
}

/// What somebody wants.
pub(super) enum Operation {
    /// To look, with this query.
    Read(Option<String>),
    /// Something to be done.
    Write(Bytes),
}

/// Answers to those who may.
pub(super) type AuthHandler = dyn Fn(AuthRequest) -> ResponseFuture + Send + Sync;

/// Answers to a path and its query.
pub(super) type RouteHandler = dyn Fn(String, Option<String>) -> ResponseFuture + Send + Sync;
/// An answer that is under way.
pub(super) type ResponseFuture = Pin<Box<dyn Future<Output = Response<Body>> + Send>>;

/// Who may be able to reach the address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Exposure {
    /// This machine alone. Requests have to name it, so that no web site reads the page through a visitor's browser.
    Loopback,
    /// Everybody the network lets through.
    Network,
}

/// An address that is listened on.
#[derive(Debug)]
pub struct HttpListener {
    listener: TcpListener,
    exposure: Exposure,
}

impl HttpListener {
    /// Listens.
    ///
    /// # Errors
    ///
    /// Where the address cannot be had, or others could reach it although `reach` says that they may not.
    pub async fn listen(address: SocketAddr, reach: Exposure) -> io::Result<Self> {
        if reach == Exposure::Loopback && !address.ip().to_canonical().is_loopback() {
            let text = format!("others could reach {address}; `http.allow_remote = true` says that this is meant");
            return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
        }
        let at = |error: io::Error| io::Error::new(error.kind(), format!("{address}: {error}"));
        Ok(Self { listener: TcpListener::bind(address).await.map_err(at)?, exposure: reach })
    }

    /// Where it listens.
    ///
    /// # Errors
    ///
    /// Where the system does not say.
    pub fn address(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }
}

/// Answers until it is dropped.
pub(super) async fn serve(door: HttpListener, site: Routes) -> Infallible {
    let site = Arc::new(site);
    let mut connections = JoinSet::new();
    let mut seats: VecDeque<Connection> = VecDeque::new();
    loop {
        let stream = accept(&door.listener).await;
        while connections.try_join_next().is_some() {}
        seats.retain(|seat| !seat.task.is_finished());
        while seats.len() >= HTTP_CONNECTIONS_MAX {
            // One that asks for nothing makes room for one that may: a probe is not kept waiting by idle ones.
            match seats.iter().position(|seat| !seat.is_busy.load(Ordering::Relaxed)) {
                Some(idle) => drop(seats.remove(idle).map(|seat| seat.task.abort())),
                None => {
                    connections.join_next().await;
                    seats.retain(|seat| !seat.task.is_finished());
                }
            }
        }
        let (site, reach, answering) = (Arc::clone(&site), door.exposure, Arc::<AtomicBool>::default());
        let busy = Arc::clone(&answering);
        let task = connections.spawn(async move {
            // What is left of a connection that takes too long is dropped.
            if timeout(HTTP_CONNECTION_AGE_MAX, serve_connection(stream, site, reach, busy)).await.is_err() {
                tracing::debug!("a connection of the status page has lasted long enough");
            }
        });
        seats.push_back(Connection { task, is_busy: answering });
    }
}

/// A connection.
struct Connection {
    task: AbortHandle,
    /// Whether a request of it is being answered.
    is_busy: Arc<AtomicBool>,
}

async fn accept(listener: &TcpListener) -> TcpStream {
    loop {
        match listener.accept().await {
            Ok((stream, _)) => return stream,
            Err(error) => {
                tracing::debug!(%error, "no connection of the status page can be accepted");
                sleep(HTTP_ACCEPT_RETRY_DELAY).await;
            }
        }
    }
}

async fn serve_connection(stream: TcpStream, site: Arc<Routes>, reach: Exposure, answering: Arc<AtomicBool>) {
    let service = service_fn(move |request: Request<Incoming>| {
        let (site, answering) = (Arc::clone(&site), Arc::clone(&answering));
        async move {
            answering.store(true, Ordering::Relaxed);
            let answer = handle_request(request, &site, reach).await;
            answering.store(false, Ordering::Relaxed);
            Ok::<_, Infallible>(answer)
        }
    });
    let mut builder = http1::Builder::new();
    builder.timer(TokioTimer::new()).header_read_timeout(HTTP_HEAD_TIMEOUT).max_buf_size(HTTP_HEAD_BYTES_MAX);
    if let Err(error) = builder.serve_connection(TokioIo::new(stream), service).await {
        tracing::debug!(%error, "a connection of the status page has ended");
    }
}

pub(super) const TEXT: &str = "text/plain; charset=utf-8";

async fn handle_request(request: Request<Incoming>, site: &Routes, reach: Exposure) -> Response<Body> {
    let host = request.headers().get(HOST).and_then(|host| host.to_str().ok());
    if reach == Exposure::Loopback && !host.is_none_or(is_loopback_host) {
        let text = "this is served to this machine alone: ask for localhost or 127.0.0.1, or set `http.allow_remote`\n";
        return response(StatusCode::MISDIRECTED_REQUEST, TEXT, text.to_owned());
    }
    if let Some(guarded) = site.auth_routes.iter().find(|guarded| request.uri().path() == guarded.path) {
        return handle_authenticated(request, guarded).await;
    }
    if !matches!(*request.method(), Method::GET | Method::HEAD) {
        let mut refused = response(StatusCode::METHOD_NOT_ALLOWED, TEXT, "only looking is possible here\n".to_owned());
        refused.headers_mut().insert(ALLOW, HeaderValue::from_static("GET, HEAD"));
        return refused;
    }
    let path = request.uri().path();
    if !site.paths.contains(&path) {
        return response(StatusCode::NOT_FOUND, TEXT, format!("there is: {}\n", site.hint));
    }
    (site.handler)(path.to_owned(), request.uri().query().map(str::to_owned)).await
}

async fn handle_authenticated(request: Request<Incoming>, guarded: &AuthRoute) -> Response<Body> {
    if !guarded.methods.contains(request.method()) {
        let mut refused = json_error(StatusCode::METHOD_NOT_ALLOWED, "orders are posted here");
        let methods = guarded.methods.iter().map(Method::as_str).collect::<Vec<_>>().join(", ");
        if let Ok(methods) = HeaderValue::from_str(&methods) {
            refused.headers_mut().insert(ALLOW, methods);
        }
        return refused;
    }
    let text = |name| request.headers().get(name).and_then(|value| value.to_str().ok()).map(str::to_owned);
    if *request.method() == Method::GET {
        let what = Operation::Read(request.uri().query().map(str::to_owned));
        return (guarded.handler)(AuthRequest { authorization: text(AUTHORIZATION), operation: what }).await;
    }
    let media = text(CONTENT_TYPE).unwrap_or_default();
    // What a form of another site can send without asking is of no such type.
    if media.split(';').next().is_none_or(|media| !media.trim().eq_ignore_ascii_case("application/json")) {
        return json_error(StatusCode::UNSUPPORTED_MEDIA_TYPE, "an order is JSON: `Content-Type: application/json`");
    }
    let authorization = text(AUTHORIZATION);
    let reading = axum::body::to_bytes(Body::new(request.into_body()), CONTROL_BODY_BYTES_MAX);
    match timeout(HTTP_BODY_TIMEOUT, reading).await {
        Ok(Ok(body)) => (guarded.handler)(AuthRequest { authorization, operation: Operation::Write(body) }).await,
        Ok(Err(_)) => json_error(StatusCode::PAYLOAD_TOO_LARGE, "this is no order: it is far too large, or breaks off"),
        Err(_) => json_error(StatusCode::REQUEST_TIMEOUT, "the order did not come in time"),
    }
}

/// A refusal as orders are answered.
fn json_error(status: StatusCode, text: &str) -> Response<Body> {
    let answer = serde_json::json!({ "message": text });
    response(status, "application/json", format!("{answer}\n"))
}

/// An answer that nobody keeps and no browser takes for something else.
pub(super) fn response(status: StatusCode, content_type: &'static str, text: String) -> Response<Body> {
    let mut answer = Response::new(Body::from(text));
    *answer.status_mut() = status;
    let headers = answer.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static(content_type));
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    headers.insert(X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    headers.insert(REFERRER_POLICY, HeaderValue::from_static("no-referrer"));
    answer
}

/// Whether a `Host` is this machine in its own eyes.
fn is_loopback_host(host: &str) -> bool {
    let name = match host.strip_prefix('[') {
        Some(rest) => rest.split(']').next().unwrap_or_default(),
        None => host.split(':').next().unwrap_or_default(),
    };
    name.eq_ignore_ascii_case("localhost") || name.parse::<IpAddr>().is_ok_and(|ip| ip.to_canonical().is_loopback())
}

/// One thing that has to be so.
pub(super) struct ReadinessCheck {
    pub(super) name: String,
    /// What is in the way.
    pub(super) problem: Option<String>,
    /// What else to know.
    pub(super) note: Option<String>,
}

/// Whether all of it is so; with `verbose` in the query, or where it is not, each check by name.
pub(super) fn readiness_response(checks: &[ReadinessCheck], query: Option<&str>) -> Response<Body> {
    let fine = checks.iter().all(|check| check.problem.is_none());
    let verbose = query.is_some_and(|query| query.split('&').any(|word| word.split('=').next() == Some("verbose")));
    let mut text = String::new();
    for check in checks.iter().filter(|_| verbose || !fine) {
        // Writing to a String cannot fail.
        _ = match (&check.problem, &check.note) {
            (Some(wrong), _) => writeln!(text, "[-] {}: {wrong}", check.name),
            (None, Some(remark)) => writeln!(text, "[+] {}: {remark}", check.name),
            (None, None) => writeln!(text, "[+] {}", check.name),
        };
    }
    text.push_str(if fine { "ready\n" } else { "not ready\n" });
    response(if fine { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE }, TEXT, text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_names_of_this_machine_are_taken_for_it() {
        for host in ["localhost", "LOCALHOST:7080", "127.0.0.1:7080", "127.8.9.1", "[::1]:7080", "[::ffff:127.0.0.1]"] {
            assert!(is_loopback_host(host), "{host}");
        }
        for host in
            ["", "evil.example", "127.0.0.1.evil.example:7080", "10.0.0.1", "[::2]:80", "localhost.evil.example"]
        {
            assert!(!is_loopback_host(host), "{host}");
        }
    }
}
