//! A server that replies by a script, faults included, and records the requests byte for byte.
//!
//! Raw TCP, so that nothing is parsed or normalized. One request a connection; the replies of a script are used in order, and
//! the last one for every later request.

use std::future::ready;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use futures_util::future::BoxFuture;
use parking_lot::Mutex;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinSet;

/// The reply to one request.
#[derive(Debug, Clone)]
pub(crate) enum Act {
    /// Answer with these bytes and close.
    Say(Vec<u8>),
    /// Answer with these bytes, then reset the connection.
    SayAndReset(Vec<u8>),
    /// Answer with these bytes, then one more byte every few milliseconds, for ever.
    SayAndDrip(Vec<u8>),
    /// Answer with these bytes, then more as fast as they are taken, for ever.
    SayAndFlood(Vec<u8>),
    Silence,
}

/// A request as received.
#[derive(Debug, Clone, Default)]
pub(crate) struct Asked {
    pub(crate) line: String,
    /// The headers, names in lower case.
    pub(crate) headers: Vec<(String, String)>,
    pub(crate) body: Vec<u8>,
}

impl Asked {
    /// A header's value, by its name in lower case.
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(found, _)| found == name).map(|(_, value)| value.as_str())
    }

    pub(crate) fn json(&self) -> serde_json::Value {
        serde_json::from_slice(&self.body).expect("the request's body is JSON")
    }
}

/// A running server. It ends when it is dropped.
pub(crate) struct Gremlin {
    pub(crate) address: SocketAddr,
    shared: Arc<Shared>,
    _tasks: JoinSet<()>,
}

struct Shared {
    respond: Box<Respond>,
    /// The requests so far.
    asked: watch::Sender<Vec<Asked>>,
    sent: AtomicU64,
}

/// The first part runs before the request counts as asked.
type Respond = dyn Fn(&Asked) -> BoxFuture<'static, Act> + Send + Sync;

impl Gremlin {
    /// Starts a server on a free port of the loopback address. `script` gets its address.
    pub(crate) async fn start(script: impl FnOnce(&str) -> Vec<Act>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a loopback port is free");
        let mut script = script(&format!("http://{}", address(&listener)));
        let last = script.pop().unwrap_or(Act::Silence);
        let script = Mutex::new(script.into_iter());
        Self::serve(listener, move |_| Box::pin(ready(script.lock().next().unwrap_or_else(|| last.clone()))))
    }

    /// Starts a server that computes each reply.
    pub(crate) async fn responding(
        respond: impl Fn(&Asked) -> BoxFuture<'static, Act> + Send + Sync + 'static,
    ) -> Self {
        Self::serve(TcpListener::bind("127.0.0.1:0").await.expect("a loopback port is free"), respond)
    }

    fn serve(
        listener: TcpListener,
        respond: impl Fn(&Asked) -> BoxFuture<'static, Act> + Send + Sync + 'static,
    ) -> Self {
        let address = address(&listener);
        let (respond, asked, sent) = (Box::new(respond), watch::Sender::default(), AtomicU64::new(0));
        let shared = Arc::new(Shared { respond, asked, sent });
        let mut tasks = JoinSet::new();
        tasks.spawn(listen(listener, Arc::clone(&shared)));
        Self { address, shared, _tasks: tasks }
    }

    pub(crate) fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// The requests so far.
    pub(crate) fn asked(&self) -> Vec<Asked> {
        self.shared.asked.borrow().clone()
    }

    /// Resolves when the requests so far satisfy a condition.
    pub(crate) async fn wait_asked(&self, condition: impl Fn(&[Asked]) -> bool) {
        drop(self.shared.asked.subscribe().wait_for(|asked| condition(asked)).await);
    }

    /// How many bytes it sent.
    pub(crate) fn sent(&self) -> u64 {
        self.shared.sent.load(Ordering::Relaxed)
    }
}

fn address(listener: &TcpListener) -> SocketAddr {
    listener.local_addr().expect("a bound socket has an address")
}

/// The address of a port on which nothing listens.
pub(crate) async fn unused_address() -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a loopback port is free");
    format!("http://{}", listener.local_addr().expect("a bound socket has an address"))
}

/// A complete reply: status, one more header or none, content type, body, and the current time as `Date`.
pub(crate) fn answer(status: u16, content_type: &str, body: impl AsRef<[u8]>) -> Act {
    answer_with(status, &[("content-type", content_type), ("date", &date(0))], body)
}

/// A complete reply with these headers.
pub(crate) fn answer_with(status: u16, headers: &[(&str, &str)], body: impl AsRef<[u8]>) -> Act {
    let body = body.as_ref();
    let mut bytes = head(status, headers);
    bytes.truncate(bytes.len() - 2);
    bytes.extend(format!("content-length: {}\r\n\r\n", body.len()).bytes());
    bytes.extend(body);
    Act::Say(bytes)
}

pub(crate) fn json(status: u16, body: &serde_json::Value) -> Act {
    answer(status, "application/json; charset=utf-8", body.to_string())
}

/// The head of a reply with the empty line after it.
pub(crate) fn head(status: u16, headers: &[(&str, &str)]) -> Vec<u8> {
    let mut head = format!("HTTP/1.1 {status} Said\r\nconnection: close\r\n");
    for (name, value) in headers {
        head.push_str(&format!("{name}: {value}\r\n"));
    }
    head.push_str("\r\n");
    head.into_bytes()
}

/// The current time, shifted, in the format of a `Date` header.
pub(crate) fn date(shift_s: i64) -> String {
    let at = jiff::Timestamp::now() + jiff::SignedDuration::from_secs(shift_s);
    at.strftime("%a, %d %b %Y %H:%M:%S GMT").to_string()
}

async fn listen(listener: TcpListener, shared: Arc<Shared>) {
    let mut connections = JoinSet::new();
    while let Ok((stream, _)) = listener.accept().await {
        connections.spawn(serve(stream, Arc::clone(&shared)));
        while connections.try_join_next().is_some() {}
    }
}

async fn serve(mut stream: TcpStream, shared: Arc<Shared>) {
    let Some(asked) = read(&mut stream).await else { return };
    let mut act = None;
    shared.asked.send_modify(|all| {
        act = Some((shared.respond)(&asked));
        all.push(asked);
    });
    let Some(act) = act else { return };
    act.await.perform(&mut stream, &shared.sent).await;
}

impl Act {
    /// Replies to a request, and counts the bytes.
    async fn perform(self, stream: &mut TcpStream, sent: &AtomicU64) {
        let count = |bytes: usize| sent.fetch_add(bytes as u64, Ordering::Relaxed);
        match self {
            Self::Say(bytes) => {
                if stream.write_all(&bytes).await.is_ok() {
                    count(bytes.len());
                }
                stream.shutdown().await.ok();
            }
            Self::SayAndReset(bytes) => {
                stream.write_all(&bytes).await.ok();
                stream.set_zero_linger().ok();
            }
            Self::SayAndDrip(bytes) => {
                let mut pace = tokio::time::interval(Duration::from_millis(5));
                let mut alive = stream.write_all(&bytes).await.is_ok();
                while alive {
                    pace.tick().await;
                    alive = stream.write_all(b" ").await.is_ok();
                }
            }
            Self::SayAndFlood(bytes) => {
                let flood = vec![b' '; 64 << 10];
                let mut alive = stream.write_all(&bytes).await.is_ok();
                while alive {
                    alive = stream.write_all(&flood).await.is_ok();
                    count(flood.len());
                }
            }
            // Waits until the client closes the connection.
            Self::Silence => drop(stream.read_exact(&mut [0]).await),
        }
    }
}

/// Reads one request.
pub(crate) async fn read(stream: &mut TcpStream) -> Option<Asked> {
    let mut bytes = Vec::new();
    let mut byte = [0; 1];
    while !bytes.ends_with(b"\r\n\r\n") {
        if stream.read(&mut byte).await.ok()? == 0 {
            return None;
        }
        bytes.push(byte[0]);
    }
    let head = String::from_utf8(bytes).ok()?;
    let mut lines = head.lines();
    let line = lines.next()?.to_owned();
    let headers: Vec<_> = lines
        .filter_map(|line| line.split_once(": "))
        .map(|(name, value)| (name.to_ascii_lowercase(), value.to_owned()))
        .collect();
    let mut asked = Asked { line, headers, body: Vec::new() };
    let length = asked.header("content-length").and_then(|text| text.parse().ok()).unwrap_or(0);
    asked.body = vec![0; length];
    stream.read_exact(&mut asked.body).await.ok()?;
    Some(asked)
}
