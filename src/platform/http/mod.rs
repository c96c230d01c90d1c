//! The HTTP server of the embedded queue, the status pages and the control sockets: one accept loop with limits for an
//! axum router.

pub mod address;
mod bearer;
mod busy;
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
use std::time::Duration;

use axum::Router;
use axum::body::Body;
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
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpListener;
use tokio::sync::Notify;
use tokio::task::{AbortHandle, JoinSet};
use tokio::time::{sleep, timeout};
use tokio_util::sync::CancellationToken;

pub use self::bearer::BearerToken;
use self::busy::{Activity, Watched};
use journeyman_domain::limits::{
    HTTP_BODY_TIMEOUT, HTTP_CONNECTION_AGE_MAX, HTTP_CONNECTIONS_MAX, HTTP_HEAD_BYTES_MAX, HTTP_HEAD_TIMEOUT,
};

/// Limits of a server and its connections.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    pub connections_max: usize,
    /// Of one peer. Beyond it, the peer's oldest idle connection is closed, or else the new one.
    pub connections_per_peer_max: usize,
    /// The time that the head of a request may take, and the pause between requests.
    pub head_timeout: Duration,
    /// The time that the body of a request may take; `None` where the routes limit it themselves.
    pub body_timeout: Option<Duration>,
    /// After this time the connection ends with its request; `None` if responses may stream for any time.
    pub connection_age_max: Option<Duration>,
}

impl Limits {
    /// At most `connections`, and half of what this process may open: each of them may need another file.
    pub fn for_connections(connections: usize) -> Self {
        let files = getrlimit(Resource::Nofile).current.and_then(|files| files.try_into().ok()).unwrap_or(usize::MAX);
        let connections_max = connections.min(files / 2);
        Self {
            connections_max,
            // Behind a proxy, or on one machine, all callers are one peer.
            connections_per_peer_max: connections_max / 2,
            head_timeout: HTTP_HEAD_TIMEOUT,
            body_timeout: Some(HTTP_BODY_TIMEOUT),
            connection_age_max: Some(HTTP_CONNECTION_AGE_MAX),
        }
    }
}

/// Lets a server that starts no other programs open as many files as it may: programs might not work with many.
pub fn raise_open_files() {
    let files = getrlimit(Resource::Nofile);
    if let Err(error) = setrlimit(Resource::Nofile, Rlimit { current: files.maximum, ..files }) {
        tracing::debug!(%error, "cannot raise the limit of open files");
    }
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

    /// As [`HttpListener::serve`]; without a largest age, responses may take any time.
    pub async fn serve_with(self, router: Router, connection_age_max: Option<Duration>) -> Infallible {
        let limits = Limits { connection_age_max, ..Limits::for_connections(HTTP_CONNECTIONS_MAX) };
        serve(self.listener, pages(router, self.exposure), limits, SocketAddr::ip).await
    }
}

/// What browsers need of pages: they are neither cached nor embedded, and no name of another site leads to those of this host.
pub fn pages(router: Router, exposure: Exposure) -> Router {
    let router = match exposure {
        Exposure::Loopback => router.layer(middleware::from_fn(require_loopback_host)),
        Exposure::Network => router,
    };
    router.layer(middleware::map_response(add_headers))
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
        body_timeout: Some(time_max),
        connection_age_max: Some(time_max),
    };
    let activity = Arc::new(Activity::new(Arc::default()));
    serve_connection(stream, router, limits, activity, CancellationToken::new()).await;
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
    let idle = Arc::<Notify>::default();
    'accept: while let Some((stream, address)) = stop.run_until_cancelled(listener.accept()).await {
        while tasks.try_join_next().is_some() {}
        let connections = peers.entry(peer(&address)).or_default();
        if connections.len() >= limits.connections_per_peer_max {
            let Some(idle_one) = take_idle(connections) else {
                tracing::debug!("connection refused: all that its peer may have are busy");
                continue;
            };
            idle_one.abort();
        }
        while tasks.len() >= limits.connections_max {
            // The peer with the most connections gives one up first.
            let mut all: Vec<_> = peers.values_mut().collect();
            all.sort_unstable_by_key(|connections| Reverse(connections.len()));
            if let Some(idle_one) = all.into_iter().find_map(take_idle) {
                if !idle_one.is_finished() {
                    idle_one.abort();
                    tasks.join_next().await;
                }
                continue;
            }
            tokio::select! {
                _ = tasks.join_next() => {}
                () = idle.notified() => {}
                () = stop.cancelled() => break 'accept,
            }
        }
        let activity = Arc::new(Activity::new(Arc::clone(&idle)));
        let task = tasks.spawn(serve_connection(stream, router.clone(), limits, Arc::clone(&activity), stop.clone()));
        peers.entry(peer(&address)).or_default().push_back(Connection { task, activity });
        if peers.len() > limits.connections_max {
            peers.retain(|_, connections| connections.iter().any(|connection| !connection.task.is_finished()));
        }
    }
    drop(listener);
    while tasks.join_next().await.is_some() {}
}

struct Connection {
    task: AbortHandle,
    activity: Arc<Activity>,
}

/// The oldest connection that has ended or is idle.
fn take_idle(connections: &mut VecDeque<Connection>) -> Option<AbortHandle> {
    let at = connections.iter().position(|one| one.task.is_finished() || one.activity.is_idle())?;
    connections.remove(at).map(|connection| connection.task)
}

async fn serve_connection(
    stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
    router: Router,
    limits: Limits,
    activity: Arc<Activity>,
    stop: CancellationToken,
) {
    let router = TowerToHyperService::new(router);
    let seen = Arc::clone(&activity);
    let service = service_fn(move |request: hyper::Request<Incoming>| {
        let (router, busy) = (router.clone(), seen.begin());
        let request = request.map(|body| match limits.body_timeout {
            Some(limit) => Body::new(Watched::until(body, limit)),
            None => Body::new(body),
        });
        // The connection is busy until all of the response has been given to it, or the call is dropped.
        async move { router.call(request).await.map(|response| response.map(|body| Watched::holding(body, busy))) }
    });
    let mut builder = http1::Builder::new();
    builder
        .timer(TokioTimer::new())
        .header_read_timeout(limits.head_timeout)
        .max_header_size(HTTP_HEAD_BYTES_MAX)
        .max_buf_size(HTTP_HEAD_BYTES_MAX);
    let mut connection = pin!(builder.serve_connection(TokioIo::new(stream), service));
    let until_end = async {
        tokio::select! {
            ended = &mut connection => return ended,
            () = stop.cancelled() => {}
            () = sleep(limits.connection_age_max.unwrap_or_default()), if limits.connection_age_max.is_some() => {}
        }
        if activity.is_idle() {
            return Ok(());
        }
        connection.as_mut().graceful_shutdown();
        match limits.connection_age_max {
            Some(last) => timeout(last, connection).await.unwrap_or(Ok(())),
            None => connection.await,
        }
    };
    if let Err(error) = until_end.await {
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
    use axum::routing::{get, post};
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
            body_timeout: None,
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

    /// Limits for so many connections that stream.
    const fn streams(connections_max: usize) -> Limits {
        Limits {
            connections_max,
            connections_per_peer_max: connections_max,
            head_timeout: Duration::from_secs(3600),
            body_timeout: Some(HTTP_BODY_TIMEOUT),
            connection_age_max: None,
        }
    }

    /// Routes of which `/gated` tells that it has begun, and answers once it is told to.
    fn gated() -> (Router, Arc<Notify>, Arc<Notify>) {
        let (begun, going) = (Arc::<Notify>::default(), Arc::<Notify>::default());
        let (starts, goes) = (Arc::clone(&begun), Arc::clone(&going));
        let gated = get(async move || {
            starts.notify_one();
            goes.notified().await;
            "ok"
        });
        (Router::new().route("/", get(async || "ok")).route("/gated", gated), begun, going)
    }

    async fn answer(stream: &mut TcpStream) -> String {
        let mut text = vec![0; 4096];
        let read = stream.read(&mut text).await.unwrap();
        String::from_utf8(text[..read].to_vec()).unwrap()
    }

    #[tokio::test]
    async fn f0_connections_that_keep_alive_give_way_to_a_new_one() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (router, begun, going) = gated();
        let mut server = JoinSet::new();
        server.spawn(async move { serve(listener, router, streams(3), |_| ()).await });
        let mut idle = Vec::new();
        for _ in 0..3 {
            let mut stream = connect([127, 0, 0, 1], address).await;
            stream.write_all(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n").await.unwrap();
            assert!(answer(&mut stream).await.starts_with("HTTP/1.1 200"));
            idle.push(stream);
        }
        assert!(is_answered(connect([127, 0, 0, 1], address).await).await, "the oldest idle one is closed");
        assert_eq!(idle[0].read(&mut [0]).await.unwrap_or(0), 0);
        let mut busy = connect([127, 0, 0, 1], address).await;
        busy.write_all(b"GET /gated HTTP/1.1\r\nhost: x\r\n\r\n").await.unwrap();
        begun.notified().await;
        for _ in 0..4 {
            assert!(is_answered(connect([127, 0, 0, 1], address).await).await);
        }
        going.notify_one();
        assert!(answer(&mut busy).await.starts_with("HTTP/1.1 200"), "a busy connection stays");
    }

    #[tokio::test]
    async fn f0_connections_that_have_ended_stand_before_no_idle_one() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let mut server = JoinSet::new();
        server.spawn(async move { serve(listener, gated().0, streams(2), SocketAddr::ip).await });
        for _ in 0..3 {
            assert!(is_answered(connect([127, 0, 0, 1], address).await).await);
        }
        let mut idle = Vec::new();
        for peer in [2, 3] {
            let mut stream = connect([127, 0, 0, peer], address).await;
            stream.write_all(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n").await.unwrap();
            assert!(answer(&mut stream).await.starts_with("HTTP/1.1 200"));
            idle.push(stream);
        }
        assert!(is_answered(connect([127, 0, 0, 4], address).await).await);
    }

    #[tokio::test]
    async fn f0_a_full_server_accepts_once_a_request_has_been_answered() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (router, begun, going) = gated();
        let limits = Limits { connections_per_peer_max: 2, ..streams(1) };
        let mut server = JoinSet::new();
        server.spawn(async move { serve(listener, router, limits, |_| ()).await });
        let mut busy = connect([127, 0, 0, 1], address).await;
        busy.write_all(b"GET /gated HTTP/1.1\r\nhost: x\r\n\r\n").await.unwrap();
        begun.notified().await;
        let mut waiting = JoinSet::new();
        waiting.spawn(is_answered(connect([127, 0, 0, 1], address).await));
        going.notify_one();
        assert!(answer(&mut busy).await.starts_with("HTTP/1.1 200"));
        assert!(waiting.join_next().await.unwrap().unwrap());
    }

    #[tokio::test(start_paused = true)]
    async fn f0_half_sent_requests_end_in_time_and_hold_up_no_stop() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let router = Router::new().route("/", post(async |body: String| body));
        let stop = CancellationToken::new();
        let mut server = JoinSet::new();
        server.spawn(serve_until(listener, router, streams(4), |_| (), stop.clone()));
        let mut half = connect([127, 0, 0, 1], address).await;
        half.write_all(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\n{").await.unwrap();
        assert!(answer(&mut half).await.starts_with("HTTP/1.1 400"));
        let mut half_heads = Vec::new();
        for _ in 0..5 {
            let mut stream = connect([127, 0, 0, 1], address).await;
            stream.write_all(b"POST / HTTP/1.1\r\nx: ").await.unwrap();
            half_heads.push(stream);
        }
        let mut last = connect([127, 0, 0, 1], address).await;
        last.write_all(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\n{").await.unwrap();
        let began = tokio::time::Instant::now();
        stop.cancel();
        server.join_next().await.unwrap().unwrap();
        assert!(began.elapsed() <= HTTP_BODY_TIMEOUT + Duration::from_secs(1), "{:?}", began.elapsed());
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
