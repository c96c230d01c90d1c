//! Health, metrics and the status page over HTTP, for those who watch a worker. Nothing here gives an order.
//!
//! | path | answers with |
//! | --- | --- |
//! | `/livez` | 200 where the worker's loop answers in time |
//! | `/readyz` | 200 where it claims, or would if a slot were free; `?verbose` names every check |
//! | `/metrics` | OpenMetrics |
//! | `/` | the status page, which refreshes itself; `/status` does not |
//! | `/status.json` | the same as JSON, as `journeyman status -o json` shows it |

use std::collections::VecDeque;
use std::convert::Infallible;
use std::fmt::Write as _;
use std::future::Future;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use axum::body::Body;
use axum::http::header::{ALLOW, CACHE_CONTROL, CONTENT_SECURITY_POLICY, CONTENT_TYPE, HOST, REFERRER_POLICY};
use axum::http::header::{HeaderValue, X_CONTENT_TYPE_OPTIONS};
use axum::http::{Method, Request, Response, StatusCode};
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::{AbortHandle, JoinSet};
use tokio::time::{sleep, timeout};

use super::metrics;
use super::page::{self, Refresh};
use crate::control::Status;
use crate::limits::{
    HTTP_ACCEPT_REST, HTTP_CONNECTION_MAX, HTTP_CONNECTIONS_MAX, HTTP_HEAD_BYTES_MAX, HTTP_HEAD_TIMEOUT,
    HTTP_LOOK_TIMEOUT,
};
use crate::worker::view::{Blocked, State, View};

/// Looks at the worker: `None` once it has exited.
pub type Look = dyn Fn() -> Looking + Send + Sync;
/// A look that is under way.
pub type Looking = Pin<Box<dyn Future<Output = Option<Status>> + Send>>;

/// Who may be able to reach the address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reach {
    /// This machine alone. Requests have to name it, so that no web site reads the page through a visitor's browser.
    Loopback,
    /// Everybody the network lets through.
    Network,
}

/// An address that is listened on.
#[derive(Debug)]
pub struct Door {
    listener: TcpListener,
    reach: Reach,
}

impl Door {
    /// Listens.
    ///
    /// # Errors
    ///
    /// Where the address cannot be had, or others could reach it although `reach` says that they may not.
    pub async fn listen(address: SocketAddr, reach: Reach) -> io::Result<Self> {
        if reach == Reach::Loopback && !address.ip().to_canonical().is_loopback() {
            let text = format!("others could reach {address}; `http.reach = \"network\"` says that this is meant");
            return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
        }
        let at = |error: io::Error| io::Error::new(error.kind(), format!("{address}: {error}"));
        Ok(Self { listener: TcpListener::bind(address).await.map_err(at)?, reach })
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
pub async fn serve(door: Door, look: Arc<Look>) -> Infallible {
    let mut connections = JoinSet::new();
    let mut seats: VecDeque<Seat> = VecDeque::new();
    loop {
        let stream = accept(&door.listener).await;
        while connections.try_join_next().is_some() {}
        seats.retain(|seat| !seat.task.is_finished());
        while seats.len() >= HTTP_CONNECTIONS_MAX {
            // One that asks for nothing makes room for one that may: a probe is not kept waiting by idle ones.
            match seats.iter().position(|seat| !seat.answering.load(Ordering::Relaxed)) {
                Some(idle) => drop(seats.remove(idle).map(|seat| seat.task.abort())),
                None => {
                    connections.join_next().await;
                    seats.retain(|seat| !seat.task.is_finished());
                }
            }
        }
        let (look, reach, answering) = (Arc::clone(&look), door.reach, Arc::<AtomicBool>::default());
        let busy = Arc::clone(&answering);
        let task = connections.spawn(async move {
            // What is left of a connection that takes too long is dropped.
            if timeout(HTTP_CONNECTION_MAX, connection(stream, look, reach, busy)).await.is_err() {
                tracing::debug!("a connection of the status page has lasted long enough");
            }
        });
        seats.push_back(Seat { task, answering });
    }
}

/// A connection.
struct Seat {
    task: AbortHandle,
    /// Whether a request of it is being answered.
    answering: Arc<AtomicBool>,
}

async fn accept(listener: &TcpListener) -> TcpStream {
    loop {
        match listener.accept().await {
            Ok((stream, _)) => return stream,
            Err(error) => {
                tracing::debug!(%error, "no connection of the status page can be accepted");
                sleep(HTTP_ACCEPT_REST).await;
            }
        }
    }
}

async fn connection(stream: TcpStream, look: Arc<Look>, reach: Reach, answering: Arc<AtomicBool>) {
    let service = service_fn(move |request: Request<Incoming>| {
        let (look, answering) = (Arc::clone(&look), Arc::clone(&answering));
        async move {
            answering.store(true, Ordering::Relaxed);
            let answer = answer(&request, &*look, reach).await;
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

const TEXT: &str = "text/plain; charset=utf-8";
const PATHS: &str = "/livez, /readyz?verbose, /metrics, /, /status, /status.json";

async fn answer<B>(request: &Request<B>, look: &Look, reach: Reach) -> Response<Body> {
    let host = request.headers().get(HOST).and_then(|host| host.to_str().ok());
    if reach == Reach::Loopback && !host.is_none_or(names_this_machine) {
        let text = "this is served to this machine alone: ask for localhost or 127.0.0.1, or set `http.reach`\n";
        return said(StatusCode::MISDIRECTED_REQUEST, TEXT, text.to_owned());
    }
    if !matches!(*request.method(), Method::GET | Method::HEAD) {
        let mut refused = said(StatusCode::METHOD_NOT_ALLOWED, TEXT, "only looking is possible here\n".to_owned());
        refused.headers_mut().insert(ALLOW, HeaderValue::from_static("GET, HEAD"));
        return refused;
    }
    let path = request.uri().path();
    if !["/livez", "/readyz", "/metrics", "/", "/status", "/status.json"].contains(&path) {
        return said(StatusCode::NOT_FOUND, TEXT, format!("there is: {PATHS}\n"));
    }
    let status = match timeout(HTTP_LOOK_TIMEOUT, look()).await {
        Ok(Some(status)) => status,
        Ok(None) => return said(StatusCode::SERVICE_UNAVAILABLE, TEXT, "the worker has exited\n".to_owned()),
        Err(_) => {
            let text = format!("the worker's loop did not answer within {HTTP_LOOK_TIMEOUT:?}\n");
            return said(StatusCode::SERVICE_UNAVAILABLE, TEXT, text);
        }
    };
    match path {
        "/livez" => said(StatusCode::OK, TEXT, "ok\n".to_owned()),
        "/readyz" => ready(&status.view, request.uri().query()),
        "/metrics" => match metrics::text(status) {
            Ok(text) => said(StatusCode::OK, metrics::CONTENT_TYPE, text),
            Err(_) => said(StatusCode::INTERNAL_SERVER_ERROR, TEXT, "the metrics cannot be written\n".to_owned()),
        },
        "/status.json" => {
            let json = serde_json::to_string_pretty(&status).unwrap_or_default();
            said(StatusCode::OK, "application/json", json + "\n")
        }
        _ => page(&status, if path == "/" { Refresh::ByItself } else { Refresh::Never }),
    }
}

fn page(status: &Status, refresh: Refresh) -> Response<Body> {
    let shown = page::show(status, refresh, jiff::Timestamp::now());
    let mut answer = said(StatusCode::OK, "text/html; charset=utf-8", shown.html);
    let policy =
        HeaderValue::from_str(&shown.policy).unwrap_or_else(|_| HeaderValue::from_static("default-src 'none'"));
    answer.headers_mut().insert(CONTENT_SECURITY_POLICY, policy);
    answer
}

fn said(status: StatusCode, content_type: &'static str, text: String) -> Response<Body> {
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
fn names_this_machine(host: &str) -> bool {
    let name = match host.strip_prefix('[') {
        Some(rest) => rest.split(']').next().unwrap_or_default(),
        None => host.split(':').next().unwrap_or_default(),
    };
    name.eq_ignore_ascii_case("localhost") || name.parse::<IpAddr>().is_ok_and(|ip| ip.to_canonical().is_loopback())
}

/// One thing that has to be so for tasks to be claimed.
struct Check {
    name: &'static str,
    /// What is in the way.
    wrong: Option<String>,
    /// What else to know.
    remark: Option<String>,
}

fn ready(view: &View, query: Option<&str>) -> Response<Body> {
    let checks = checks(view);
    let fine = checks.iter().all(|check| check.wrong.is_none());
    let verbose = query.is_some_and(|query| query.split('&').any(|word| word.split('=').next() == Some("verbose")));
    let mut text = String::new();
    for check in checks.iter().filter(|_| verbose || !fine) {
        // Writing to a String cannot fail.
        _ = match (&check.wrong, &check.remark) {
            (Some(wrong), _) => writeln!(text, "[-] {}: {wrong}", check.name),
            (None, Some(remark)) => writeln!(text, "[+] {}: {remark}", check.name),
            (None, None) => writeln!(text, "[+] {}", check.name),
        };
    }
    text.push_str(if fine { "ready\n" } else { "not ready\n" });
    said(if fine { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE }, TEXT, text)
}

fn checks(view: &View) -> Vec<Check> {
    let why = view.not_claiming.clone().unwrap_or_default();
    let unless = |words: &[Blocked]| view.blocked.filter(|blocked| words.contains(blocked)).map(|_| why.clone());
    let held = |name, words: &[Blocked]| Check { name, wrong: unless(words), remark: None };
    let going = view.state != State::Running && view.state != State::Paused;
    let free = view.capacity.saturating_sub(u32::try_from(view.tasks.len()).unwrap_or(u32::MAX));
    let remark =
        if free == 0 { "every slot is taken; the next that is free claims".to_owned() } else { format!("{free} free") };
    vec![
        sources(view),
        held("not paused", &[Blocked::Paused]),
        Check { name: "stays", wrong: going.then(|| why.clone()), remark: None },
        held("host is fit", &[Blocked::Unfit]),
        held("services", &[Blocked::Service]),
        held("disk", &[Blocked::Disk]),
        held("memory", &[Blocked::Memory]),
        Check { name: "slots", wrong: None, remark: Some(remark) },
    ]
}

/// One source that answers is enough to work.
fn sources(view: &View) -> Check {
    let up = view.sources.iter().filter(|source| source.polled_seconds_ago.is_some() && !source.in_trouble).count();
    let of = format!("{up} of {} answer", view.sources.len());
    let troubles = view.sources.iter().filter_map(|source| {
        source.error.as_ref().map(|error| format!("; {}: {}", source.name, error.text.replace(['\n', '\r'], " ")))
    });
    let text = troubles.fold(of, |text, trouble| text + &trouble);
    match up {
        0 => Check { name: "sources", wrong: Some(text), remark: None },
        _ => Check { name: "sources", wrong: None, remark: Some(text) },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_names_of_this_machine_are_taken_for_it() {
        for host in ["localhost", "LOCALHOST:7080", "127.0.0.1:7080", "127.8.9.1", "[::1]:7080", "[::ffff:127.0.0.1]"] {
            assert!(names_this_machine(host), "{host}");
        }
        for host in
            ["", "evil.example", "127.0.0.1.evil.example:7080", "10.0.0.1", "[::2]:80", "localhost.evil.example"]
        {
            assert!(!names_this_machine(host), "{host}");
        }
    }
}
