//! The HTTP server of the embedded queue, the status pages and the control sockets: one accept loop with limits for an
//! axum router.

pub mod address;
mod bearer;
pub mod client;
pub mod resolver;

use std::cmp::Reverse;
use std::collections::{HashMap, VecDeque};
use std::convert::Infallible;
use std::hash::Hash;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use axum::Router;
use axum::extract::Request;
use axum::http::header::{CACHE_CONTROL, HOST, HeaderValue, REFERRER_POLICY, X_CONTENT_TYPE_OPTIONS};
use axum::http::{HeaderMap, StatusCode};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse as _, Response};
use axum::serve::Listener;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::{Service as _, service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpListener;
use tokio::task::{AbortHandle, JoinSet};
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

pub use self::bearer::BearerToken;
use journeyman_domain::limits::{
    HTTP_CONNECTION_AGE_MAX, HTTP_CONNECTIONS_MAX, HTTP_HEAD_BYTES_MAX, HTTP_HEAD_TIMEOUT,
};

/// Limits of a server and its connections.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    pub connections_max: usize,
    /// Of one peer. Beyond it, the peer's oldest idle connection is closed, or else the new one.
    pub connections_per_peer_max: usize,
    /// The time that the head of a request may take.
    pub head_timeout: Duration,
    /// `None` if responses may stream for any time; then a connection that has sent a request is never evicted.
    pub connection_age_max: Option<Duration>,
}

/// Who can connect to an address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Exposure {
    /// This machine. The `Host` header must name it, so that no web site reads the page through a browser (DNS rebinding).
    Loopback,
    Network,
}

#[derive(Debug)]
pub struct HttpListener {
    listener: TcpListener,
    exposure: Exposure,
}

impl HttpListener {
    /// Fails for an address that other machines can reach, unless `exposure` allows it.
    pub async fn listen(address: SocketAddr, exposure: Exposure) -> io::Result<Self> {
        if exposure == Exposure::Loopback && !address.ip().to_canonical().is_loopback() {
            let text = format!("other machines can connect to {address}; set `http.allow_remote = true` to allow that");
            return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
        }
        let with_address = |error: io::Error| io::Error::new(error.kind(), format!("{address}: {error}"));
        Ok(Self { listener: TcpListener::bind(address).await.map_err(with_address)?, exposure })
    }

    pub fn address(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }

    /// Serves until dropped, with headers that keep browsers from caching and embedding the responses.
    pub async fn serve(self, router: Router) -> Infallible {
        self.serve_with(router, Some(HTTP_CONNECTION_AGE_MAX)).await
    }

    /// As [`HttpListener::serve`], for responses that may take any time.
    pub async fn serve_streams(self, router: Router) -> Infallible {
        self.serve_with(router, None).await
    }

    async fn serve_with(self, router: Router, connection_age_max: Option<Duration>) -> Infallible {
        let router = match self.exposure {
            Exposure::Loopback => router.layer(middleware::from_fn(require_loopback_host)),
            Exposure::Network => router,
        };
        let limits = Limits {
            connections_max: HTTP_CONNECTIONS_MAX,
            connections_per_peer_max: HTTP_CONNECTIONS_MAX / 2,
            head_timeout: HTTP_HEAD_TIMEOUT,
            connection_age_max,
        };
        let router = router.layer(middleware::map_response(add_headers));
        serve(self.listener, router, limits, SocketAddr::ip).await
    }
}

/// Serves until dropped.
pub async fn serve<L: Listener, P: Eq + Hash>(
    listener: L,
    router: Router,
    limits: Limits,
    peer: fn(&L::Addr) -> P,
) -> Infallible {
    serve_until(listener, router, limits, peer, CancellationToken::new()).await;
    std::future::pending().await
}

/// Serves one connection for at most `time_max`.
pub async fn serve_one(
    stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
    router: Router,
    time_max: Duration,
) {
    let limits = Limits {
        connections_max: 1,
        connections_per_peer_max: 1,
        head_timeout: time_max,
        connection_age_max: Some(time_max),
    };
    serve_connection(stream, router, limits, Arc::default(), CancellationToken::new()).await;
}

/// Serves until `stop` is cancelled, then closes the listener and finishes the requests in flight. Beyond
/// `connections_max`, connections wait in the backlog of the listener, unless an idle one can be evicted.
pub async fn serve_until<L: Listener, P: Eq + Hash>(
    mut listener: L,
    router: Router,
    limits: Limits,
    peer: fn(&L::Addr) -> P,
    stop: CancellationToken,
) {
    let mut tasks = JoinSet::new();
    let mut peers: HashMap<P, VecDeque<Connection>> = HashMap::new();
    while let Some((stream, address)) = stop.run_until_cancelled(listener.accept()).await {
        while tasks.try_join_next().is_some() {}
        let connections = peers.entry(peer(&address)).or_default();
        if connections.len() >= limits.connections_per_peer_max {
            let Some(oldest) = take_idle(connections) else {
                tracing::debug!("connection refused: all that its peer may have are busy");
                continue;
            };
            oldest.abort();
        }
        while tasks.len() >= limits.connections_max {
            // The peer with the most connections gives one up first.
            let mut all: Vec<_> = peers.values_mut().collect();
            all.sort_unstable_by_key(|connections| Reverse(connections.len()));
            match all.into_iter().find_map(take_idle) {
                Some(ended) if ended.is_finished() => {}
                idle => {
                    idle.inspect(AbortHandle::abort);
                    tasks.join_next().await;
                }
            }
        }
        let is_busy = Arc::<AtomicBool>::default();
        let task = tasks.spawn(serve_connection(stream, router.clone(), limits, Arc::clone(&is_busy), stop.clone()));
        peers.entry(peer(&address)).or_default().push_back(Connection { task, is_busy });
        if peers.len() > limits.connections_max {
            peers.retain(|_, connections| connections.iter().any(|connection| !connection.task.is_finished()));
        }
    }
    drop(listener);
    while tasks.join_next().await.is_some() {}
}

struct Connection {
    task: AbortHandle,
    is_busy: Arc<AtomicBool>,
}

/// The oldest connection that has ended or is idle.
fn take_idle(connections: &mut VecDeque<Connection>) -> Option<AbortHandle> {
    let is_free = |one: &Connection| one.task.is_finished() || !one.is_busy.load(Ordering::Relaxed);
    let oldest = connections.iter().position(is_free)?;
    connections.remove(oldest).map(|connection| connection.task)
}

async fn serve_connection(
    stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
    router: Router,
    limits: Limits,
    is_busy: Arc<AtomicBool>,
    stop: CancellationToken,
) {
    let router = TowerToHyperService::new(router);
    let service = service_fn(move |request: hyper::Request<Incoming>| {
        let (router, is_busy) = (router.clone(), Arc::clone(&is_busy));
        async move {
            is_busy.store(true, Ordering::Relaxed);
            let response = router.call(request).await;
            is_busy.store(limits.connection_age_max.is_none(), Ordering::Relaxed);
            response
        }
    });
    let mut builder = http1::Builder::new();
    builder
        .timer(TokioTimer::new())
        .header_read_timeout(limits.head_timeout)
        .max_header_size(HTTP_HEAD_BYTES_MAX)
        .max_buf_size(HTTP_HEAD_BYTES_MAX);
    let mut connection = pin!(builder.serve_connection(TokioIo::new(stream), service));
    let until_end = async {
        if let Some(ended) = stop.run_until_cancelled(&mut connection).await {
            return ended;
        }
        connection.as_mut().graceful_shutdown();
        connection.await
    };
    let ended = match limits.connection_age_max {
        Some(age_max) => timeout(age_max, until_end).await.unwrap_or(Ok(())),
        None => until_end.await,
    };
    if let Err(error) = ended {
        tracing::debug!(%error, "HTTP connection failed");
    }
}

/// That keep browsers from caching responses and guessing their type.
pub async fn add_headers(mut response: Response) -> Response {
    let headers = response.headers_mut();
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    headers.insert(X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    headers.insert(REFERRER_POLICY, HeaderValue::from_static("no-referrer"));
    response
}

async fn require_loopback_host(headers: HeaderMap, request: Request, next: Next) -> Response {
    let host = headers.get(HOST).and_then(|host| host.to_str().ok());
    if host.is_none_or(is_loopback_host) {
        return next.run(request).await;
    }
    let text = "served to this machine only: use localhost or 127.0.0.1, or set `http.allow_remote`\n";
    (StatusCode::MISDIRECTED_REQUEST, text).into_response()
}

pub fn is_loopback_host(host: &str) -> bool {
    let name = match host.strip_prefix('[') {
        Some(rest) => rest.split(']').next().unwrap_or_default(),
        None => host.split(':').next().unwrap_or_default(),
    };
    name.eq_ignore_ascii_case("localhost") || name.parse::<IpAddr>().is_ok_and(|ip| ip.to_canonical().is_loopback())
}

#[cfg(test)]
mod tests {
    use axum::routing::get;
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio::net::{TcpSocket, TcpStream};

    use super::*;

    async fn connect(from: [u8; 4], to: SocketAddr) -> TcpStream {
        let socket = TcpSocket::new_v4().unwrap();
        socket.bind((from, 0).into()).unwrap();
        socket.connect(to).await.unwrap()
    }

    async fn is_answered(mut stream: TcpStream) -> bool {
        stream.write_all(b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").await.unwrap();
        let mut text = String::new();
        stream.read_to_string(&mut text).await.is_ok_and(|_| text.starts_with("HTTP/1.1 200"))
    }

    #[tokio::test]
    async fn d5_idle_connections_of_a_peer_close_none_of_another() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let limits = Limits {
            connections_max: 8,
            connections_per_peer_max: 4,
            head_timeout: Duration::from_secs(60),
            connection_age_max: None,
        };
        let (router, mut server) = (Router::new().route("/", get(async || "ok")), JoinSet::new());
        server.spawn(async move { serve(listener, router, limits, SocketAddr::ip).await });
        let honest = connect([127, 0, 0, 2], address).await;
        let mut idle = Vec::new();
        for _ in 0..100 {
            idle.push(connect([127, 0, 0, 1], address).await);
        }
        assert!(matches!(idle[90].read(&mut [0]).await, Ok(0) | Err(_)), "a peer may have four");
        assert!(is_answered(honest).await);
        assert!(is_answered(connect([127, 0, 0, 1], address).await).await);
    }

    #[test]
    fn only_loopback_names_are_accepted_as_host() {
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
