//! The sender against receivers that misbehave.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use bytes::Bytes;
use reqwest::header::{HeaderMap, HeaderValue};
use rustls::pki_types::PrivateKeyDer;
use rustls::server::WebPkiClientVerifier;
use rustls::{RootCertStore, ServerConfig};
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio_rustls::TlsAcceptor;

use super::sender::*;
use journeyman_domain::lane::{Control, ErrorClass};
use journeyman_domain::limits::WEBHOOK_ANSWER_BYTES_MAX;
use journeyman_platform::crypto_provider::install_crypto_provider;
use journeyman_platform::http::resolver::Lookup;

const LONG: Duration = Duration::from_secs(30);
const SHORT: Duration = Duration::from_millis(300);

/// What a receiver does after the beginning of its answer.
#[derive(Clone, Copy)]
enum Then {
    Close,
    Reset,
    Silence,
    /// Writes this as long as it is read.
    Forever(&'static str),
}

/// Serves one connection after the other until it is dropped.
struct Receiver {
    address: SocketAddr,
    connections: Arc<AtomicUsize>,
    _server: JoinSet<()>,
}

impl Receiver {
    async fn start<F, S>(mut serve: F) -> Self
    where
        F: FnMut(TcpStream) -> S + Send + 'static,
        S: Future<Output = ()> + Send + 'static,
    {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.expect("a port is free");
        let address = listener.local_addr().expect("it is bound");
        let connections = Arc::new(AtomicUsize::new(0));
        let (counter, mut server) = (Arc::clone(&connections), JoinSet::new());
        server.spawn(async move {
            loop {
                let (stream, _) = listener.accept().await.expect("it listens");
                counter.fetch_add(1, Ordering::Relaxed);
                serve(stream).await;
            }
        });
        Self { address, connections, _server: server }
    }

    /// Reads a request and writes `answer`; then the connection ends.
    async fn answering(answer: impl Into<Bytes>) -> Self {
        let answer = answer.into();
        Self::start(move |mut stream| {
            let answer = answer.clone();
            async move {
                read_request(&mut stream).await;
                stream.write_all(&answer).await.ok();
            }
        })
        .await
    }

    /// Answers 204 and passes each request on.
    async fn recording() -> (Self, mpsc::Receiver<String>) {
        let (requests, received) = mpsc::channel(4);
        let receiver = Self::start(move |mut stream| {
            let requests = requests.clone();
            async move { requests.send(answer_ok(&mut stream).await).await.expect("the test waits") }
        })
        .await;
        (receiver, received)
    }

    /// Reads a request, and answers it in this way.
    async fn hostile(answer: Vec<u8>, then: Then) -> Self {
        let answer = Bytes::from(answer);
        Self::start(move |mut stream| {
            let answer = answer.clone();
            async move {
                read_request(&mut stream).await;
                stream.write_all(&answer).await.ok();
                match then {
                    Then::Close => {}
                    Then::Reset => stream.set_zero_linger().expect("it is a TCP connection"),
                    Then::Silence => until_closed(&mut stream).await,
                    Then::Forever(text) => {
                        let chunk = text.repeat(4096 / text.len());
                        while stream.write_all(chunk.as_bytes()).await.is_ok() {}
                    }
                }
            }
        })
        .await
    }

    fn url(&self) -> String {
        format!("http://{}/hook", self.address)
    }

    fn connections(&self) -> usize {
        self.connections.load(Ordering::Relaxed)
    }
}

async fn read_request(stream: &mut (impl AsyncRead + Unpin)) -> String {
    let (mut text, mut buffer) = (String::new(), [0; 4096]);
    loop {
        let bytes = stream.read(&mut buffer).await.unwrap_or(0);
        text.push_str(&String::from_utf8_lossy(&buffer[..bytes]));
        let length = text.split("content-length: ").nth(1).and_then(|rest| rest.split("\r\n").next());
        let is_whole = text
            .split_once("\r\n\r\n")
            .is_some_and(|(_, body)| body.len() >= length.and_then(|length| length.parse().ok()).unwrap_or(0));
        if is_whole || bytes == 0 {
            return text;
        }
    }
}

async fn answer_ok(stream: &mut (impl AsyncRead + AsyncWrite + Unpin)) -> String {
    let request = read_request(stream).await;
    stream.write_all(b"HTTP/1.1 204 No Content\r\n\r\n").await.ok();
    request
}

/// Waits until the other side closes.
async fn until_closed(stream: &mut TcpStream) {
    let mut buffer = [0; 4096];
    while stream.read(&mut buffer).await.is_ok_and(|bytes| bytes > 0) {}
}

fn request(url: &str, timeout: Duration) -> DeliveryRequest {
    DeliveryRequest {
        url: url.parse().expect("a URL"),
        webhook_id: "msg_1".parse().expect("an id"),
        at: Duration::from_secs(1_795_737_600),
        headers: HeaderMap::new(),
        content_type: HeaderValue::from_static("application/json"),
        body: Bytes::from_static(b"{}"),
        keys: Arc::new([]),
        timeout,
    }
}

fn loopback() -> SenderConfig {
    SenderConfig { allowed_networks: vec!["127.0.0.1/32".parse().expect("a network")], ..SenderConfig::default() }
}

fn sender() -> Sender {
    Sender::new(loopback()).expect("it is valid")
}

async fn send(url: &str) -> Result<Answer, DeliveryError> {
    sender().send(&request(url, LONG)).await.result
}

async fn error_class(sender: &Sender, url: &str, timeout: Duration) -> ErrorClass {
    sender.send(&request(url, timeout)).await.result.expect_err("no answer").class
}

/// Answers each look-up with the next of `answers`; the last is repeated.
fn lookup(answers: &'static [&'static [&'static str]]) -> (Lookup, Arc<AtomicUsize>) {
    let asked = Arc::new(AtomicUsize::new(0));
    let counter = Arc::clone(&asked);
    let lookup: Lookup = Arc::new(move |_| {
        let answer = answers[counter.fetch_add(1, Ordering::Relaxed).min(answers.len() - 1)];
        Box::pin(async move {
            Ok(answer.iter().map(|ip| SocketAddr::new(ip.parse::<IpAddr>().expect("an IP"), 0)).collect())
        })
    });
    (lookup, asked)
}

#[tokio::test]
async fn a_message_is_posted_once_with_its_headers_and_signatures() {
    let (receiver, mut received) = Receiver::recording().await;
    let mut request = request(&receiver.url(), LONG);
    request.keys = Arc::new(["whsec_xiELVV9YPQDkDWudfzjOSxH3+vYhQm43".parse().expect("a key")]);
    request.headers.insert("authorization", HeaderValue::from_static("Bearer t"));
    request.headers.insert("journeyman-seq", HeaderValue::from_static("7"));
    request.headers.insert("webhook-id", HeaderValue::from_static("forged"));
    request.headers.insert("host", HeaderValue::from_static("internal"));
    request.headers.insert("content-length", HeaderValue::from_static("1"));
    request.headers.insert("transfer-encoding", HeaderValue::from_static("chunked"));

    let result = sender().send(&request).await;

    assert_eq!(result.result.expect("an answer").status, 204);
    let text = received.recv().await.expect("a request");
    let (head, body) = text.split_once("\r\n\r\n").expect("it is whole");
    let mut lines = head.split("\r\n");
    assert_eq!(lines.next(), Some("POST /hook HTTP/1.1"));
    let mut lines: Vec<_> = lines.map(|line| line.replace(&receiver.address.to_string(), "ADDRESS")).collect();
    lines.sort_unstable();
    assert_eq!(
        lines,
        [
            "accept: */*",
            "authorization: Bearer t",
            "content-length: 2",
            "content-type: application/json",
            "host: ADDRESS",
            "journeyman-seq: 7",
            concat!("user-agent: journeyman/", env!("CARGO_PKG_VERSION")),
            "webhook-id: msg_1",
            "webhook-signature: v1,y5GfimFxbo7zFpjrG/XAkoQWLa9IUz1PVQP1aLke4EA=",
            "webhook-timestamp: 1795737600",
        ]
    );
    assert_eq!(body, "{}");
    assert_eq!(receiver.connections(), 1);
}

#[tokio::test]
async fn a_content_type_of_the_endpoint_is_kept() {
    let (receiver, mut received) = Receiver::recording().await;
    let mut request = request(&receiver.url(), LONG);
    request.headers.insert("content-type", HeaderValue::from_static("application/cloudevents+json"));

    assert!(sender().send(&request).await.result.is_ok());

    let text = received.recv().await.expect("a request");
    assert!(text.contains("content-type: application/cloudevents+json\r\n"), "{text}");
    assert!(!text.contains("application/json") && !text.contains("webhook-signature"), "{text}");
}

#[tokio::test]
async fn p6_p7_hostile_receivers_are_bounded_and_told_apart() {
    use ErrorClass::{Protocol, Timeout};
    use Then::{Close, Forever, Reset, Silence};
    let ok = |rest: &str| format!("HTTP/1.1 200 OK\r\n{rest}");
    let redirect = |location: &str| format!("HTTP/1.1 302 Found\r\nlocation: {location}\r\ncontent-length: 0\r\n\r\n");
    let chunked = |body: &str| format!("HTTP/1.1 503 Busy\r\ntransfer-encoding: chunked\r\n\r\n{body}");
    let rows: Vec<(String, Then, Result<u16, ErrorClass>)> = vec![
        // Redirects lead nowhere.
        (redirect("http://169.254.169.254/latest/meta-data/"), Close, Ok(302)),
        (redirect("http://[::1]/"), Close, Ok(302)),
        (redirect("/elsewhere"), Close, Ok(302)),
        (redirect("file:///etc/passwd"), Close, Ok(302)),
        (redirect("gopher://127.0.0.1:6379/_x"), Close, Ok(302)),
        (redirect("javascript:x"), Close, Ok(302)),
        (redirect("\u{ff}"), Close, Ok(302)),
        (redirect("http://a/").replace("302", "301"), Close, Ok(301)),
        (redirect("http://a/").replace("302", "307"), Close, Ok(307)),
        (redirect("http://a/").replace("302", "308"), Close, Ok(308)),
        ("HTTP/1.1 300 Choices\r\nrefresh: 0; url=http://a/\r\ncontent-length: 0\r\n\r\n".to_owned(), Close, Ok(300)),
        // What is no HTTP.
        (String::new(), Close, Err(Protocol)),
        (String::new(), Reset, Err(Protocol)),
        ("SSH-2.0-OpenSSH_9.9\r\n".to_owned(), Silence, Err(Protocol)),
        ("220 mail.example.com ESMTP\r\n".to_owned(), Silence, Err(Protocol)),
        ("-ERR unknown command 'POST'\r\n".to_owned(), Silence, Err(Protocol)),
        ("\u{16}\u{3}\u{1}\u{2}".to_owned(), Close, Err(Protocol)),
        ("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_owned(), Silence, Err(Protocol)),
        ("<html>no head</html>".to_owned(), Close, Err(Protocol)),
        ("HTTP/1.1 2000 OK\r\n\r\n".to_owned(), Close, Err(Protocol)),
        ("HTTP/1.1 20\r\n\r\n".to_owned(), Close, Err(Protocol)),
        ("HTTP/3.0 200 OK\r\n\r\n".to_owned(), Close, Err(Protocol)),
        (ok(""), Close, Err(Protocol)),
        (ok(""), Reset, Err(Protocol)),
        (ok("no colon\r\n\r\n"), Close, Err(Protocol)),
        (ok("x-nul: a\0b\r\n\r\n"), Close, Err(Protocol)),
        (ok("x-folded: a\r\n b\r\n\r\n"), Close, Err(Protocol)),
        (ok("x spaced: a\r\n\r\n"), Close, Err(Protocol)),
        (ok("content-length: -1\r\n\r\n"), Close, Err(Protocol)),
        (ok("content-length: 1\r\ncontent-length: 2\r\n\r\nx"), Close, Err(Protocol)),
        (ok("content-length: 99999999999999999999\r\n\r\n"), Close, Err(Protocol)),
        // Heads without an end.
        (ok(&"x-many: a\r\n".repeat(101)), Silence, Err(Protocol)),
        (ok(""), Forever("x-a: b\r\n"), Err(Protocol)),
        (ok("x-endless: "), Forever("xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx"), Err(Protocol)),
        ("HTTP/1.1 200 ".to_owned(), Forever("OOOOOOOOOOOOOOOOOOOOOOOOOOOOOOOOOOOOOOOOOOOOOOOO"), Err(Protocol)),
        (String::new(), Forever("HTTP/1.1 103 Early Hints\r\n\r\n"), Err(Timeout)),
        (String::new(), Forever("\r\n"), Err(Protocol)),
        (String::new(), Silence, Err(Timeout)),
        (ok("x-slow: loris\r\n"), Silence, Err(Timeout)),
        ("HTTP/1.1 100 Continue\r\n\r\n".to_owned(), Silence, Err(Timeout)),
        // Bodies that break off, lie or never end: the status counts.
        (chunked("4\r\nhead\r\nnonsense\r\n"), Close, Ok(503)),
        (chunked("4\r\nhead\r\nffffffffffffffffffff\r\n"), Close, Ok(503)),
        (chunked("4\r\nhead\r\n10\r\n"), Close, Ok(503)),
        (chunked("4\r\nhead\r\n"), Reset, Ok(503)),
        (chunked("4\r\nhead\r\n"), Silence, Ok(503)),
        (chunked("-4\r\nhead\r\n"), Close, Ok(503)),
        (chunked("4\r\nheadless"), Close, Ok(503)),
        (chunked("4;x="), Forever("xxxxxxxxxxxxxxxx"), Ok(503)),
        (chunked("0\r\n"), Forever("x-trailer: a\r\n"), Ok(503)),
        (chunked(""), Forever("1\r\nx\r\n"), Ok(503)),
        (ok("content-length: 1000\r\n\r\nhead"), Close, Ok(200)),
        (ok("content-length: 1000\r\n\r\nhead"), Silence, Ok(200)),
        (ok("content-length: 4\r\n\r\nheadless"), Close, Ok(200)),
        (ok("\r\n"), Forever("xxxxxxxxxxxxxxxx"), Ok(200)),
        (ok("content-encoding: gzip\r\n\r\n\u{1f}bomb"), Close, Ok(200)),
        (ok("transfer-encoding: gzip\r\n\r\nhead"), Close, Ok(200)),
        // Odd, and understood.
        ("HTTP/1.0 200 OK\r\n\r\nhead".to_owned(), Close, Ok(200)),
        ("HTTP/1.1 200 OK\n\nhead".to_owned(), Close, Ok(200)),
        ("HTTP/1.1 204 No Content\r\ncontent-length: 4\r\n\r\nhead".to_owned(), Close, Ok(204)),
        ("HTTP/1.1 999 X\r\ncontent-length: 0\r\n\r\n".to_owned(), Close, Ok(999)),
        ("HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n\0".to_owned(), Close, Ok(101)),
        (ok("set-cookie: a=b; domain=.com\r\nalt-svc: h3=\":443\"\r\ncontent-length: 0\r\n\r\n"), Close, Ok(200)),
    ];
    assert!(rows.len() >= 60, "{}", rows.len());
    let sender = sender();
    for (answer, then, expected) in rows {
        let receiver = Receiver::hostile(answer.clone().into_bytes(), then).await;
        // Only what the end of the time decides waits for it.
        let waits = expected == Err(Timeout) || (expected.is_ok() && matches!(then, Silence | Forever(_)));
        let timeout = if waits { SHORT } else { LONG };
        let result = sender.send(&request(&receiver.url(), timeout)).await.result;
        let shown: String = answer.chars().take(80).collect();
        match result {
            Ok(answer) => {
                assert!(answer.head.len() <= WEBHOOK_ANSWER_BYTES_MAX, "{shown:?}");
                assert_eq!(Ok(answer.status), expected, "{shown:?}");
            }
            Err(error) => {
                assert!(!error.text.is_empty() && error.text.chars().count() <= 500, "{shown:?}: {error}");
                assert_eq!(Err(error.class), expected, "{shown:?}: {error}");
            }
        }
        assert_eq!(receiver.connections(), 1, "{shown:?}");
    }
}

#[tokio::test]
async fn f6_a_receiver_that_echoes_the_request_puts_no_secret_into_the_record() {
    let echo = "authorization: Bearer canary-token-7; /hook/canary-in-the-path?key=canary-query; canary-token-7";
    let answer = format!("HTTP/1.1 500 X\r\ncontent-length: {}\r\n\r\n{echo}", echo.len());
    let receiver = Receiver::answering(answer).await;
    let mut request = request(&format!("{}/hook/canary-in-the-path?key=canary-query", receiver.url()), LONG);
    request.headers.insert("authorization", "Bearer canary-token-7".parse().expect("a value"));
    let answer = sender().send(&request).await.result.expect("an answer");
    let head = String::from_utf8_lossy(&answer.head).into_owned();
    assert!(head.starts_with("authorization: ") && head.contains("/hook/") && !head.contains("canary"), "{head}");
}

#[tokio::test]
async fn f6_a_secret_that_begins_where_the_answer_is_cut_is_not_in_the_record() {
    let echo = format!("{}canary-token-7{}", "x".repeat(WEBHOOK_ANSWER_BYTES_MAX - 10), "y".repeat(100));
    let answer = format!("HTTP/1.1 500 X\r\ncontent-length: {}\r\n\r\n{echo}", echo.len());
    let receiver = Receiver::answering(answer).await;
    let mut request = request(&receiver.url(), LONG);
    request.headers.insert("authorization", "Bearer canary-token-7".parse().expect("a value"));
    let answer = sender().send(&request).await.result.expect("an answer");
    let head = String::from_utf8_lossy(&answer.head).into_owned();
    assert!(head.len() > WEBHOOK_ANSWER_BYTES_MAX / 2 && !head.contains("canary"), "{}", head.len());
}

#[tokio::test]
async fn p6_urls_of_private_addresses_are_denied_in_every_spelling() {
    let sender = Sender::new(SenderConfig::default()).expect("it is valid");
    let receiver = Receiver::start(|_| async {}).await;
    let port = receiver.address.port();
    for host in [
        "127.0.0.1",
        "127.1",
        "2130706433",
        "0x7f.1",
        "0x7f000001",
        "0177.0.0.1",
        "017700000001",
        "127.0.0.1.",
        "１２７.0.0.1",
        "127%2e0.0.1",
        "0",
        "10.0.0.1",
        "169.254.169.254",
        "0xa9fea9fe",
        "[::1]",
        "[::]",
        "[::ffff:127.0.0.1]",
        "[::ffff:169.254.169.254]",
        "[::ffff:a9fe:a9fe]",
        "[0:0:0:0:0:ffff:a9fe:a9fe]",
        "[::169.254.169.254]",
        "[64:ff9b::169.254.169.254]",
        "[64:ff9b:1::169.254.169.254]",
        "[2002:a9fe:a9fe::]",
        "[2001:0:a9fe:a9fe::]",
        "[fd00:ec2::254]",
        "[fe80::1]",
        // Resolved by the system.
        "localhost",
        "LOCALHOST",
        "user:secret@localhost",
    ] {
        for scheme in ["http", "https"] {
            let url = format!("{scheme}://{host}:{port}/");
            assert_eq!(error_class(&sender, &url, LONG).await, ErrorClass::Policy, "{url}");
        }
    }
    assert_eq!(receiver.connections(), 0);
}

#[tokio::test]
async fn p6_urls_of_other_schemes_are_denied() {
    for url in ["file:///etc/passwd", "ftp://127.0.0.1/", "gopher://127.0.0.1/", "unix:/run/docker.sock", "data:,x"] {
        assert_eq!(error_class(&sender(), url, LONG).await, ErrorClass::Policy, "{url}");
    }
    let sender = Sender::new(SenderConfig { https_only: true, ..loopback() }).expect("it is valid");
    assert_eq!(error_class(&sender, "http://127.0.0.1:9/", LONG).await, ErrorClass::Policy);
    assert_eq!(error_class(&sender, "http://example.com/", LONG).await, ErrorClass::Policy);
}

#[tokio::test]
async fn p6_the_address_that_was_judged_is_the_one_connected_to() {
    let receiver = Receiver::answering("HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n").await;
    let (lookup, asked) = lookup(&[&["127.0.0.2", "127.0.0.1"], &["127.0.0.2"], &["127.0.0.1"]]);
    let sender = Sender::with_lookup(loopback(), lookup).expect("it is valid");
    let url = format!("http://hooks.example.com:{}/", receiver.address.port());

    assert!(sender.send(&request(&url, LONG)).await.result.is_ok());
    assert_eq!(asked.load(Ordering::Relaxed), 1, "an attempt looks the host up once");

    // Rebound to an address that is not allowed.
    assert_eq!(error_class(&sender, &url, LONG).await, ErrorClass::Policy);
    assert_eq!(receiver.connections(), 1);

    assert!(sender.send(&request(&url, LONG)).await.result.is_ok());
    assert_eq!(receiver.connections(), 2);
}

#[tokio::test]
async fn p7_the_connection_is_closed_after_the_head_of_a_large_answer() {
    const BODY: usize = 100 << 20;
    for framing in [format!("content-length: {BODY}"), "connection: close".to_owned()] {
        let (counts, mut written) = mpsc::channel(1);
        let receiver = Receiver::start(move |mut stream| {
            let (framing, counts) = (framing.clone(), counts.clone());
            async move {
                read_request(&mut stream).await;
                stream.write_all(format!("HTTP/1.1 200 OK\r\n{framing}\r\n\r\n").as_bytes()).await.ok();
                let (chunk, mut count) = (vec![b'x'; 64 << 10], 0);
                while count < BODY && stream.write_all(&chunk).await.is_ok() {
                    count += chunk.len();
                }
                counts.send(count).await.expect("the test waits");
            }
        })
        .await;

        let answer = send(&receiver.url()).await.expect("an answer");

        assert_eq!(answer.head.len(), WEBHOOK_ANSWER_BYTES_MAX);
        assert!(written.recv().await.expect("a count") < BODY, "the connection was not closed");
    }
}

#[tokio::test]
async fn the_status_counts_when_the_body_takes_too_long() {
    let receiver = Receiver::start(|mut stream| async move {
        read_request(&mut stream).await;
        stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\ndrip").await.ok();
        until_closed(&mut stream).await;
    })
    .await;

    let result = sender().send(&request(&receiver.url(), SHORT)).await;

    let answer = result.result.expect("an answer");
    assert_eq!((answer.status, &*answer.head), (200, &b"drip"[..]));
    assert!(result.took >= SHORT && result.took < LONG, "{:?}", result.took);
}

#[tokio::test]
async fn an_endpoint_that_is_not_there_is_told_apart() {
    let unused =
        TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.expect("a port is free").local_addr().expect("bound");
    assert_eq!(error_class(&sender(), &format!("http://{unused}/"), LONG).await, ErrorClass::Connect);

    let failing: Lookup = Arc::new(|_| Box::pin(async { Err(std::io::Error::other("SERVFAIL")) }));
    let sender = Sender::with_lookup(loopback(), failing).expect("it is valid");
    assert_eq!(error_class(&sender, "http://hooks.example.com/", LONG).await, ErrorClass::Dns);

    let pending: Lookup = Arc::new(|_| Box::pin(std::future::pending()));
    let sender = Sender::with_lookup(loopback(), pending).expect("it is valid");
    assert_eq!(error_class(&sender, "http://hooks.example.com/", SHORT).await, ErrorClass::Timeout);
}

#[tokio::test]
async fn errors_hold_nothing_secret_of_the_url() {
    let receiver = Receiver::start(|mut stream| async move {
        stream.write_all(b"nonsense").await.ok();
        until_closed(&mut stream).await;
    })
    .await;
    let (lookup, _) = lookup(&[&["10.0.0.1"]]);
    let sender = Sender::with_lookup(loopback(), lookup).expect("it is valid");
    for host in [receiver.address.to_string(), "127.0.0.1:1".to_owned(), "hooks.example.com".to_owned()] {
        for scheme in ["http", "https", "ftp"] {
            let mut request = request(&format!("{scheme}://user:secret@{host}/secret?token=secret#secret"), LONG);
            request.headers.insert("authorization", HeaderValue::from_static("secret"));

            let error = sender.send(&request).await.result.expect_err("no answer");

            assert!(!format!("{error:?}").contains("secret"), "{error}");
            assert!(scheme == "ftp" || error.text.contains(&host), "{error}");
        }
    }
}

#[tokio::test]
async fn what_the_receiver_asks_for_is_read() {
    let seconds = |seconds| Some(Duration::from_secs(seconds));
    for (status, header, retry_after, control) in [
        (429, "retry-after: 120", seconds(120), None),
        (429, "Retry-After:  0 ", seconds(0), None),
        (503, "retry-after: Fri, 27 Nov 2026 00:02:00 GMT", seconds(120), None),
        (503, "retry-after: Friday, 27-Nov-26 00:02:00 GMT", seconds(120), None),
        (503, "retry-after: Fri, 27 Nov 2020 00:02:00 GMT", seconds(0), None),
        (503, "retry-after: soon", None, None),
        (503, "retry-after: -1", None, None),
        (503, "retry-after: 99999999999999999999", None, None),
        (410, "x-other: 1", None, None),
        (410, "webhook-delivery: disable", None, Some(Control::DisableEndpoint)),
        (400, "Webhook-Delivery: abort-message", None, Some(Control::AbortMessage)),
        (400, "webhook-delivery: explode", None, None),
    ] {
        let receiver =
            Receiver::answering(format!("HTTP/1.1 {status} X\r\n{header}\r\ncontent-length: 3\r\n\r\nwhy")).await;

        let answer = send(&receiver.url()).await.expect("an answer");

        assert_eq!((answer.status, answer.retry_after, answer.control), (status, retry_after, control), "{header}");
        assert_eq!(&*answer.head, b"why");
    }
}

struct Pki {
    folder: tempfile::TempDir,
    server: rcgen::CertifiedKey<rcgen::KeyPair>,
    client: rcgen::CertifiedKey<rcgen::KeyPair>,
}

impl Pki {
    fn generate() -> Self {
        install_crypto_provider();
        let generate = |name: &str| rcgen::generate_simple_self_signed([name.to_owned()]).expect("it is a name");
        let (folder, server, client) =
            (tempfile::tempdir().expect("a folder"), generate("127.0.0.1"), generate("notifier"));
        for (name, pem) in [
            ("ca.pem", server.cert.pem()),
            ("client.pem", client.cert.pem()),
            ("client.key", client.signing_key.serialize_pem()),
        ] {
            std::fs::write(folder.path().join(name), pem).expect("it is written");
        }
        Self { folder, server, client }
    }

    fn path(&self, name: &str) -> Option<PathBuf> {
        Some(self.folder.path().join(name))
    }

    fn client_certificate(&self) -> Option<ClientCertificate> {
        let key = self.client.signing_key.serialize_pem().into();
        Some(ClientCertificate { certificate: self.path("client.pem")?, key })
    }

    /// A receiver that asks for the client's certificate if `mutual`.
    async fn receiver(&self, mutual: bool) -> Receiver {
        let mut roots = RootCertStore::empty();
        roots.add(self.client.cert.der().clone()).expect("it is a certificate");
        let builder = ServerConfig::builder();
        let builder = if mutual {
            builder
                .with_client_cert_verifier(WebPkiClientVerifier::builder(roots.into()).build().expect("it has a root"))
        } else {
            builder.with_no_client_auth()
        };
        let key = PrivateKeyDer::try_from(self.server.signing_key.serialize_der()).expect("it is a key");
        let config = builder.with_single_cert(vec![self.server.cert.der().clone()], key).expect("they belong together");
        let acceptor = TlsAcceptor::from(Arc::new(config));
        Receiver::start(move |stream| {
            let acceptor = acceptor.clone();
            async move {
                match acceptor.accept(stream).into_fallible().await {
                    Ok(mut stream) => {
                        answer_ok(&mut stream).await;
                        stream.shutdown().await.ok();
                    }
                    // Closed at once, unread bytes of the client would reset the connection before it has read the alert.
                    Err((_, mut stream)) => until_closed(&mut stream).await,
                }
            }
        })
        .await
    }
}

#[tokio::test]
async fn an_additional_ca_and_a_client_certificate_are_used() {
    let pki = Pki::generate();
    let receiver = pki.receiver(true).await;
    let url = format!("https://{}/", receiver.address);

    let config = SenderConfig { ca: pki.path("ca.pem"), client_certificate: pki.client_certificate(), ..loopback() };
    let sender = Sender::new(config).expect("it is valid");
    assert_eq!(sender.send(&request(&url, LONG)).await.result.expect("an answer").status, 204);

    let sender = Sender::new(SenderConfig { ca: pki.path("ca.pem"), ..loopback() }).expect("it is valid");
    assert_eq!(error_class(&sender, &url, LONG).await, ErrorClass::Tls, "no client certificate");
}

#[tokio::test]
async fn tls_faults_are_told_apart() {
    let pki = Pki::generate();
    let receiver = pki.receiver(false).await;
    assert_eq!(
        error_class(&sender(), &format!("https://{}/", receiver.address), LONG).await,
        ErrorClass::Tls,
        "unknown CA"
    );

    let trusting = Sender::new(SenderConfig { ca: pki.path("ca.pem"), ..loopback() }).expect("it is valid");
    let (to_loopback, _) = lookup(&[&["127.0.0.1"]]);
    let config = SenderConfig { ca: pki.path("ca.pem"), ..loopback() };
    let by_name = Sender::with_lookup(config, to_loopback).expect("it is valid");
    let url = format!("https://hooks.example.com:{}/", receiver.address.port());
    assert_eq!(error_class(&by_name, &url, LONG).await, ErrorClass::Tls, "certificate of another host");

    for answer in ["HTTP/1.1 400 Bad Request\r\n\r\n", "", "\x15\x03\x03\0\x02\x02\x28"] {
        let plain = Receiver::start(move |mut stream| async move {
            let mut buffer = [0; 4096];
            assert!(stream.read(&mut buffer).await.is_ok_and(|bytes| bytes > 0));
            stream.write_all(answer.as_bytes()).await.ok();
        })
        .await;
        let url = format!("https://{}/", plain.address);
        assert_eq!(error_class(&trusting, &url, LONG).await, ErrorClass::Tls, "{answer:?}");
    }
}

#[tokio::test]
async fn a_certificate_that_has_expired_and_a_handshake_without_an_end_are_told_apart() {
    let pki = Pki::generate();
    let mut params = rcgen::CertificateParams::new(["127.0.0.1".to_owned()]).expect("it is a name");
    params.not_after = rcgen::date_time_ymd(2020, 1, 1);
    let certificate = params.self_signed(&pki.server.signing_key).expect("it is signed");
    let expired = pki.folder.path().join("expired.pem");
    std::fs::write(&expired, certificate.pem()).expect("it is written");
    let key = PrivateKeyDer::try_from(pki.server.signing_key.serialize_der()).expect("it is a key");
    let config = ServerConfig::builder().with_no_client_auth().with_single_cert(vec![certificate.der().clone()], key);
    let acceptor = TlsAcceptor::from(Arc::new(config.expect("they belong together")));
    let receiver = Receiver::start(move |stream| {
        let acceptor = acceptor.clone();
        async move {
            if let Err((_, mut stream)) = acceptor.accept(stream).into_fallible().await {
                until_closed(&mut stream).await;
            }
        }
    })
    .await;
    let sender = Sender::new(SenderConfig { ca: Some(expired), ..loopback() }).expect("it is valid");
    let error =
        sender.send(&request(&format!("https://{}/", receiver.address), LONG)).await.result.expect_err("expired");
    assert_eq!(error.class, ErrorClass::Tls, "{error}");
    assert!(error.text.contains("xpired"), "{error}");

    let silent = Receiver::start(|mut stream| async move { until_closed(&mut stream).await }).await;
    let url = format!("https://{}/", silent.address);
    assert_eq!(error_class(&sender, &url, SHORT).await, ErrorClass::Timeout);
}

#[tokio::test]
async fn a_receiver_that_does_not_read_is_given_up() {
    let receiver = Receiver::start(|stream| async move {
        std::future::pending::<()>().await;
        drop(stream);
    })
    .await;
    let mut request = request(&receiver.url(), SHORT);
    request.body = vec![b'x'; 64 << 20].into();
    assert_eq!(sender().send(&request).await.result.expect_err("no answer").class, ErrorClass::Timeout);
}

#[tokio::test]
async fn a_proxy_that_fails_is_told_apart_without_its_password() {
    for (answer, url, class) in [
        ("HTTP/1.1 407 Proxy Authentication Required\r\n\r\n", "https://hooks.example.com/", ErrorClass::Connect),
        ("nonsense", "https://hooks.example.com/", ErrorClass::Connect),
        ("", "https://hooks.example.com/", ErrorClass::Connect),
        ("nonsense", "http://hooks.example.com/", ErrorClass::Protocol),
        ("HTTP/1.1 200 OK\r\n\r\nnonsense", "https://hooks.example.com/", ErrorClass::Tls),
    ] {
        let proxy = Receiver::answering(answer).await;
        let sender = through(format!("http://user:hunter2@{}", proxy.address));
        let error = sender.send(&request(url, LONG)).await.result.expect_err("no answer");
        assert_eq!(error.class, class, "{answer:?}: {error}");
        assert!(!error.text.contains("hunter2"), "{error}");
    }
}

fn through(proxy: String) -> Sender {
    let panics: Lookup = Arc::new(|host| panic!("{host} was looked up here"));
    Sender::with_lookup(SenderConfig { proxy: Some(proxy.into()), ..SenderConfig::default() }, panics)
        .expect("it is valid")
}

#[tokio::test]
async fn a_proxy_resolves_names_and_addresses_are_judged_all_the_same() {
    let (requests, mut received) = mpsc::channel(4);
    let proxy = Receiver::start(move |mut stream| {
        let requests = requests.clone();
        async move {
            let text = read_request(&mut stream).await;
            let refused = text.starts_with("CONNECT");
            requests.send(text).await.expect("the test waits");
            let answer = if refused { "HTTP/1.1 403 Forbidden\r\n\r\n" } else { "HTTP/1.1 204 No Content\r\n\r\n" };
            stream.write_all(answer.as_bytes()).await.ok();
        }
    })
    .await;
    let sender = through(format!("http://user:secret@{}", proxy.address));

    let answer = sender.send(&request("http://hooks.example.com/a", LONG)).await.result.expect("an answer");
    assert_eq!(answer.status, 204);
    let text = received.recv().await.expect("a request");
    assert!(text.starts_with("POST http://hooks.example.com/a HTTP/1.1\r\n"), "{text}");

    let error = sender.send(&request("https://hooks.example.com/a", LONG)).await.result.expect_err("refused");
    assert_eq!(error.class, ErrorClass::Connect, "{error}");
    let text = received.recv().await.expect("a request");
    assert!(text.starts_with("CONNECT hooks.example.com:443 HTTP/1.1\r\n"), "{text}");
    assert!(!text.contains("webhook-id"), "{text}");

    assert_eq!(error_class(&sender, "http://169.254.169.254/", LONG).await, ErrorClass::Policy);
    assert_eq!(proxy.connections(), 2);
}

#[tokio::test]
async fn a_socks_proxy_resolves_names() {
    let (hosts, mut asked) = mpsc::channel(4);
    let proxy = Receiver::start(move |mut stream| {
        let hosts = hosts.clone();
        async move {
            let mut greeting = [0; 3];
            stream.read_exact(&mut greeting).await.expect("a greeting");
            stream.write_all(&[5, 0]).await.expect("it reads");
            let mut head = [0; 5];
            stream.read_exact(&mut head).await.expect("a request");
            assert_eq!(head[..4], [5, 1, 0, 3], "connect to a name");
            let mut host = vec![0; usize::from(head[4]) + 2];
            stream.read_exact(&mut host).await.expect("a host and a port");
            host.truncate(host.len() - 2);
            hosts.send(String::from_utf8(host).expect("a name")).await.expect("the test waits");
            stream.write_all(&[5, 0, 0, 1, 0, 0, 0, 0, 0, 0]).await.expect("it reads");
            answer_ok(&mut stream).await;
        }
    })
    .await;
    let sender = through(format!("socks5://{}", proxy.address));

    let answer = sender.send(&request("http://hooks.example.com/", LONG)).await.result.expect("an answer");

    assert_eq!(answer.status, 204);
    assert_eq!(asked.recv().await.as_deref(), Some("hooks.example.com"));
    assert_eq!(error_class(&sender, "http://[::1]/", LONG).await, ErrorClass::Policy);
}

#[test]
fn settings_that_cannot_be_used_are_refused_without_credentials() {
    let pki = Pki::generate();
    let keyless = ClientCertificate { certificate: pki.path("client.pem").expect("a path"), key: "secret".into() };
    let configs = [
        (SenderConfig { proxy: Some("ftp://user:secret@proxy".into()), ..SenderConfig::default() }, "proxy"),
        (SenderConfig { proxy: Some("user:secret".into()), ..SenderConfig::default() }, "proxy"),
        (SenderConfig { ca: pki.path("absent.pem"), ..SenderConfig::default() }, "absent.pem"),
        (SenderConfig { ca: pki.path("client.key"), ..SenderConfig::default() }, "no certificate"),
        (SenderConfig { client_certificate: Some(keyless), ..SenderConfig::default() }, "client.pem"),
    ];
    for (config, part) in configs {
        let error = Sender::new(config).err().expect("it is invalid").to_string();
        assert!(error.contains(part) && !error.contains("secret"), "{error}");
    }
}
