//! Tests the `http` handler against a scripted service.
#![allow(clippy::disallowed_methods, reason = "spawned tasks end with their test")]

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use journeyman::config::Environment;
use journeyman::config::schema::HttpHandler;
use journeyman::config::values::Span;
use journeyman::domain::refusal::Refusal;
use journeyman::handler::artifact_collector::CollectedArtifact;
use journeyman::handler::http::Http;
use journeyman::handler::sidecar::{ServiceAvailability, SidecarContext, SidecarHandle};
use journeyman::handler::{DynHandler, ExecuteError, ExecuteFailure, PrepareError, PrepareFailure, Request, erase};
use journeyman::host::clock::Clock;
use journeyman::host::containment::Containment;
use journeyman::source::CallError;
use journeyman::task::{ArtifactBody, PartialReplySink, Reply, ReplyFuture, ReplyLimits, Results};
use serde_json::json;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Notify, mpsc};
use tokio::task::JoinHandle;

use crate::bench::{Bench, Went};

const BOUND: Duration = Duration::from_secs(30);
pub(crate) const REPLY_LIMITS: ReplyLimits = ReplyLimits { body_bytes: 1000, content_type_bytes: 255 };

async fn within<T>(what: &str, future: impl Future<Output = T>) -> T {
    tokio::time::timeout(BOUND, future).await.unwrap_or_else(|_| panic!("{what}: not in time"))
}

/// A request as the service received it.
#[derive(Debug)]
struct Seen {
    line: String,
    headers: BTreeMap<String, String>,
    body: Vec<u8>,
}

/// Reads one request; `None` at end of file.
async fn read(stream: &mut TcpStream) -> Option<Seen> {
    let (mut bytes, mut buffer) = (Vec::new(), [0; 4096]);
    let head = loop {
        if let Some(end) = bytes.windows(4).position(|four| four == b"\r\n\r\n") {
            break end;
        }
        match stream.read(&mut buffer).await {
            Ok(0) | Err(_) => return None,
            Ok(taken) => bytes.extend_from_slice(&buffer[..taken]),
        }
    };
    let text = String::from_utf8(bytes[..head].to_vec()).unwrap();
    let mut lines = text.split("\r\n");
    let line = lines.next().unwrap().to_owned();
    let pairs = lines.map(|line| line.split_once(": ").unwrap());
    let headers: BTreeMap<_, _> = pairs.map(|(name, value)| (name.to_ascii_lowercase(), value.to_owned())).collect();
    let length: usize = headers.get("content-length").map_or(0, |length| length.parse().unwrap());
    let mut body = bytes.split_off(head + 4);
    while body.len() < length {
        let taken = stream.read(&mut buffer).await.unwrap();
        assert!(taken > 0, "the whole body comes");
        body.extend_from_slice(&buffer[..taken]);
    }
    Some(Seen { line, headers, body })
}

fn whole(code: &str, headers: &str, body: &[u8]) -> Vec<u8> {
    let head = format!("HTTP/1.1 {code}\r\n{headers}Content-Length: {}\r\n\r\n", body.len());
    [head.as_bytes(), body].concat()
}

fn chunk(text: &str) -> String {
    format!("{:x}\r\n{text}\r\n", text.len())
}

const LINES: &str = "HTTP/1.1 200 OK\r\nContent-Type: application/x-ndjson\r\nTransfer-Encoding: chunked\r\n\r\n";

/// Answers a request by its path.
async fn act(mut stream: TcpStream, seen: mpsc::Sender<Seen>, go: Arc<Notify>, works: Arc<AtomicBool>) {
    let Some(request) = read(&mut stream).await else { return };
    let path = request.line.split(' ').nth(1).unwrap().to_owned();
    let body = request.body.clone();
    if path != "/health" || works.load(Ordering::Relaxed) {
        seen.send(request).await.unwrap();
    }
    let answer = match path.as_str() {
        // A single-threaded service answers no probe while it works.
        "/health" if works.load(Ordering::Relaxed) => std::future::pending().await,
        "/health" => whole("204 No Content", "", b""),
        "/work" => {
            works.store(true, Ordering::Relaxed);
            go.notified().await;
            works.store(false, Ordering::Relaxed);
            whole("200 OK", "", b"done")
        }
        "/word" => whole("200 OK", "x-status: not_found\r\nContent-Type: text/plain\r\n", b"no such train"),
        "/word-500" => whole("500 Odd", "x-status: no_route\r\n", b"no route"),
        "/odd-word" => whole("200 OK", "x-status: two words\r\n", b"well"),
        "/odd-word-500" => whole("500 Odd", "x-status: two words\r\n", b"not well"),
        "/liar" => whole("500 Odd", "x-status: ok\r\n", b"all is well"),
        "/away" => whole("302 Found", "Location: /echo\r\n", b""),
        "/busy" => whole("503 Busy", "Retry-After: 6\r\n", b"later"),
        "/busy-large" => whole("503 Busy", "Retry-After: 0\r\n", &[b'x'; 1001]),
        "/busy-odd" => {
            let kind = format!("Retry-After: 0\r\nContent-Type: text/{}\r\n", "x".repeat(300));
            whole("429 Busy", &kind, b"later")
        }
        "/large" => whole("200 OK", "", &[b'x'; 1001]),
        "/cut" => b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nhalf".to_vec(),
        "/nothing" => Vec::new(),
        "/one-line" => [LINES, &chunk("1\r\n"), "0\r\n\r\n"].concat().into_bytes(),
        "/cut-lines" => [LINES, &chunk("1\n")].concat().into_bytes(),
        "/lines" => {
            for piece in [LINES, &chunk("1\n\n2\n3"), &chunk("3\n")] {
                stream.write_all(piece.as_bytes()).await.unwrap();
            }
            go.notified().await;
            [&chunk("4\n"), &chunk("last"), "0\r\n\r\n"].concat().into_bytes()
        }
        "/hang" => {
            let mut rest = Vec::new();
            stream.read_to_end(&mut rest).await.unwrap();
            go.notify_one();
            return;
        }
        path if path.starts_with("/code/") => whole(&format!("{} Word", &path[6..]), "", path.as_bytes()),
        _ => whole("200 OK", "Content-Type: application/json\r\n", &body),
    };
    stream.write_all(&answer).await.unwrap();
    stream.shutdown().await.unwrap();
}

/// Collects partial replies.
#[derive(Clone, Default)]
pub(crate) struct Parts {
    heard: Arc<Mutex<Vec<(String, String)>>>,
    gone: bool,
    came: Arc<Notify>,
}

impl PartialReplySink for Parts {
    fn send(&self, reply: Reply) -> ReplyFuture<'_> {
        let body = String::from_utf8(reply.body.to_vec()).unwrap();
        self.heard.lock().unwrap().push((reply.status.as_str().to_owned(), body));
        self.came.notify_one();
        let gone = self.gone;
        Box::pin(async move {
            let what = "the client is gone".to_owned();
            if gone { Err(CallError { refusal: Refusal::Gone, message: what }) } else { Ok(()) }
        })
    }
}

impl Parts {
    fn heard(&self) -> Vec<String> {
        self.heard.lock().unwrap().iter().map(|(_, body)| body.clone()).collect()
    }
}

/// A scripted service and its handler.
struct Stage {
    handler: Arc<dyn DynHandler>,
    seen: mpsc::Receiver<Seen>,
    go: Arc<Notify>,
    lent: SidecarHandle,
    kept: JoinHandle<()>,
    serving: JoinHandle<()>,
    url: String,
    _folder: tempfile::TempDir,
}

fn settings(url: &str) -> HttpHandler {
    HttpHandler {
        url: Some(url.parse().unwrap()),
        health_interval: Span(Duration::from_millis(100)),
        startup_timeout: Span(BOUND),
        max_run_time: Span(BOUND),
        ..HttpHandler::default()
    }
}

fn http(config: HttpHandler) -> Http {
    Http::new("warm", config, &Environment::default()).unwrap()
}

impl Stage {
    async fn new() -> Self {
        Self::with(|settings| settings).await
    }

    async fn with(change: impl FnOnce(HttpHandler) -> HttpHandler) -> Self {
        // A random loopback address, so that no other process binds it while the service is down.
        let bytes = uuid::Uuid::new_v4().into_bytes();
        let host = std::net::Ipv4Addr::new(127, bytes[0], bytes[1], bytes[2].clamp(1, 254));
        let listener = TcpListener::bind((host, 0)).await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let (sender, seen) = mpsc::channel(64);
        let go = Arc::new(Notify::new());
        let serving = tokio::spawn(accept(listener, sender, Arc::clone(&go)));
        let handler = erase(http(change(settings(&url))));
        let folder = tempfile::tempdir().unwrap();
        let (beside, lent) =
            SidecarContext::channel(folder.path().join("services"), Clock::boot(), Containment::disabled());
        let kept = tokio::spawn((handler.sidecar().unwrap().run)(beside));
        Self { handler, seen, go, lent, kept, serving, url, _folder: folder }
    }

    async fn until(&self, serving: ServiceAvailability) {
        let mut word = self.lent.status.clone();
        within("a word", word.wait_for(|word| word.availability == serving)).await.unwrap();
    }

    async fn ask(&self, path: &str, parts: &Parts) -> (Went, Option<Reply>) {
        let request = Request { path: Some(path.to_owned()), body: Some("{}".to_owned()), ..Request::default() };
        self.forward(&request, parts).await
    }

    async fn forward(&self, request: &Request, parts: &Parts) -> (Went, Option<Reply>) {
        let mut bench = Bench::new();
        let replies = Results::new(parts.clone(), REPLY_LIMITS);
        bench.context = bench.context.with_results(Some(replies.clone()));
        let went = within("the task", bench.run(&*self.handler, serde_json::to_value(request).unwrap())).await;
        (went, replies.final_reply())
    }

    async fn sees(&mut self) -> Seen {
        within("a request", self.seen.recv()).await.unwrap()
    }

    /// Stops the sidecar.
    async fn ends(self) {
        self.lent.stop.send_replace(true);
        within("the end", self.kept).await.unwrap();
        self.serving.abort();
    }
}

async fn accept(listener: TcpListener, seen: mpsc::Sender<Seen>, go: Arc<Notify>) {
    let (mut open, works) = (tokio::task::JoinSet::new(), Arc::new(AtomicBool::new(false)));
    loop {
        let (stream, _) = listener.accept().await.unwrap();
        open.spawn(act(stream, seen.clone(), Arc::clone(&go), Arc::clone(&works)));
    }
}

fn text(reply: &Reply) -> &str {
    std::str::from_utf8(&reply.body).unwrap()
}

#[tokio::test]
async fn a_request_is_forwarded_with_the_allowed_headers_only() {
    let mut stage = Stage::new().await;
    let header = |name: &str, value: &str| (name.to_owned(), value.to_owned());
    let request = Request {
        path: Some("/a/b?c=d".to_owned()),
        routing_key: "42".to_owned(),
        correlation_id: Some("c-1".to_owned()),
        idempotency_key: Some("k-1".to_owned()),
        headers: BTreeMap::from([
            header("x-rpc-path", "/a/b?c=d"),
            header("X-Own", "passed on"),
            header("tracestate", "passed on too"),
            header("x-task-id", "forged"),
            header("X-Journeyman-Attempts", "1"),
            header("Idempotency-Key", "forged"),
            header("authorization", "a secret"),
            header("cookie", "a secret"),
            header("host", "elsewhere"),
            header("content-length", "7"),
            header("content-encoding", "br"),
            header("transfer-encoding", "chunked"),
            header("x-odd", "a\nb"),
        ]),
        content_type: Some("text/plain".to_owned()),
        content_encoding: Some("gzip".to_owned()),
        seconds_left: Some(20.0),
        body_base64: Some("/wAB".to_owned()),
        ..Request::default()
    };
    let mut bench = Bench::new();
    let trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
    let mut task = bench.context.task().clone();
    task.env.insert("TRACEPARENT".to_owned(), trace.to_owned());
    bench = bench.of(task);
    let went = within("the task", bench.run(&*stage.handler, serde_json::to_value(&request).unwrap())).await;
    assert!(matches!(went, Went::Ran(Ok(()))), "{went:?}");
    let mut seen = stage.sees().await;
    assert_eq!((seen.line.as_str(), seen.body.as_slice()), ("POST /a/b?c=d HTTP/1.1", &[0xff, 0, 1][..]));
    let left: f64 = seen.headers.remove("x-seconds-left").unwrap().parse().unwrap();
    assert!(left > 0.0 && left <= 20.0, "{left}");
    for own in ["accept", "user-agent"] {
        seen.headers.remove(own);
    }
    let wanted = BTreeMap::from([
        header("host", stage.url.trim_start_matches("http://")),
        header("content-length", "3"),
        header("content-type", "text/plain"),
        header("content-encoding", "gzip"),
        header("x-task-id", "fN1SbArXTPSVFNUvaOlinQ"),
        header("x-run-id", "3"),
        header("x-correlation-id", "c-1"),
        header("idempotency-key", "k-1"),
        header("x-rpc-path", "/a/b?c=d"),
        header("x-worker-key", "42"),
        header("x-own", "passed on"),
        header("tracestate", "passed on too"),
        header("traceparent", trace),
    ]);
    assert_eq!(seen.headers, wanted);
    stage.ends().await;
}

#[tokio::test]
async fn the_status_code_decides_the_outcome_and_the_body_is_the_reply() {
    let stage = Stage::new().await;
    let parts = Parts::default();
    for (path, verdict, answer) in [
        ("/code/200", "Ran(Ok(()))", Some(("ok", "/code/200"))),
        ("/code/201", "Ran(Ok(()))", Some(("ok", "/code/201"))),
        ("/code/404", "Ran(Err(ExecuteError { reason: Failed,", Some(("core_error", "/code/404"))),
        ("/code/500", "Ran(Err(ExecuteError { reason: Failed,", Some(("core_error", "/code/500"))),
        ("/code/429", "Ran(Err(ExecuteError { reason: Intermittent,", Some(("core_error", "/code/429"))),
        ("/code/503", "Ran(Err(ExecuteError { reason: Intermittent,", Some(("core_error", "/code/503"))),
        ("/away", "Ran(Err(ExecuteError { reason: Failed,", Some(("core_error", ""))),
        ("/word", "Ran(Ok(()))", Some(("not_found", "no such train"))),
        ("/word-500", "Ran(Err(ExecuteError { reason: Failed,", Some(("no_route", "no route"))),
        ("/liar", "Ran(Err(ExecuteError { reason: Failed,", Some(("core_error", "all is well"))),
        ("/odd-word", "Ran(Err(ExecuteError { reason: Failed,", None),
        ("/odd-word-500", "Ran(Err(ExecuteError { reason: Failed,", Some(("core_error", "not well"))),
        ("/large", "Ran(Err(ExecuteError { reason: Failed,", None),
        ("/busy-large", "Ran(Err(ExecuteError { reason: Intermittent,", None),
        ("/busy-odd", "Ran(Err(ExecuteError { reason: Intermittent,", None),
        ("/cut", "Ran(Err(ExecuteError { reason: Intermittent,", None),
        ("/nothing", "Ran(Err(ExecuteError { reason: Intermittent,", None),
    ] {
        let (went, reply) = stage.ask(path, &parts).await;
        assert!(format!("{went:?}").starts_with(verdict), "{path}: {went:?}");
        let reply = reply.as_ref().map(|reply| (reply.status.as_str(), text(reply)));
        assert_eq!(reply, answer, "{path}");
    }
    assert_eq!(parts.heard(), Vec::<String>::new());
    let (_, reply) = stage.ask("/word", &parts).await;
    assert_eq!(reply.unwrap().content_type.as_deref(), Some("text/plain"));
    let (went, _) = stage.ask("/away", &parts).await;
    assert!(format!("{went:?}").contains("redirects are not followed"), "{went:?}");
    stage.ends().await;
}

#[tokio::test]
async fn retry_after_may_exceed_max_run_time() {
    let stage = Stage::with(|settings| HttpHandler { max_run_time: Span(Duration::from_secs(5)), ..settings }).await;
    let (went, reply) = stage.ask("/busy", &Parts::default()).await;
    assert!(format!("{went:?}").starts_with("Ran(Err(ExecuteError { reason: Intermittent,"), "{went:?}");
    assert_eq!(reply.as_ref().map(text), Some("later"));
    stage.ends().await;
}

#[tokio::test]
async fn ndjson_lines_are_partial_replies_and_the_rest_is_the_final_reply() {
    let stage = Stage::new().await;
    let parts = Parts::default();
    let ask = stage.ask("/lines", &parts);
    let lets_go = async {
        while parts.heard().len() < 3 {
            parts.came.notified().await;
        }
        // Partial replies arrive before the response is complete.
        stage.go.notify_one();
        std::future::pending::<()>().await;
    };
    let (went, reply) = tokio::select! {
        done = ask => done,
        () = lets_go => panic!("it never ends"),
    };
    assert!(matches!(went, Went::Ran(Ok(()))), "{went:?}");
    assert_eq!(parts.heard(), ["1", "2", "33", "4"]);
    assert_eq!(reply, Some(Reply { content_type: Some("application/x-ndjson".to_owned()), ..Reply::ok(*b"last") }));

    let parts = Parts::default();
    let (went, reply) = stage.ask("/one-line", &parts).await;
    assert!(matches!(went, Went::Ran(Ok(()))), "{went:?}");
    assert_eq!((parts.heard(), text(&reply.unwrap())), (vec!["1".to_owned()], "null"));
    stage.ends().await;
}

#[tokio::test]
async fn a_broken_stream_is_not_retried_and_one_without_a_client_is_dropped() {
    let stage = Stage::new().await;
    let (went, reply) = stage.ask("/cut-lines", &Parts::default()).await;
    assert!(format!("{went:?}").starts_with("Ran(Err(ExecuteError { reason: Failed,"), "{went:?}");
    assert_eq!(reply, None);
    let gone = Parts { gone: true, ..Parts::default() };
    let (went, _) = stage.ask("/lines", &gone).await;
    assert!(format!("{went:?}").contains("no longer waits"), "{went:?}");
    assert_eq!(gone.heard(), ["1"]);
    stage.ends().await;
}

#[tokio::test]
async fn the_response_to_a_task_becomes_an_artifact() {
    let stage = Stage::new().await;
    let bench = Bench::new();
    let went = within("the task", bench.run(&*stage.handler, json!({"path": "/x", "json": {"a": 1}}))).await;
    assert!(matches!(went, Went::Ran(Ok(()))), "{went:?}");
    let mut items = bench.context.artifacts().collect(bench.workdir()).unwrap();
    let Some(CollectedArtifact::Found(artifact, _)) = items.next() else { panic!("there is one") };
    assert_eq!(artifact.name, "public/answer");
    let ArtifactBody::File { file, content_type, .. } = &artifact.body else { panic!("it is a file") };
    assert_eq!(
        (std::io::read_to_string(&**file).unwrap().as_str(), content_type.as_str()),
        ("{\"a\":1}", "application/json")
    );
    assert!(bench.log().contains("POST /x: 200 OK, 7 bytes"), "{}", bench.log());
    for (payload, words) in [
        (json!({"path": "/../x"}), "payload/path"),
        (json!({"path": "/%2E%2e/x"}), "payload/path"),
        (json!({"path": "/a\\..\\x"}), "payload/path"),
        (json!({"bodyBase64": "!"}), "payload/bodyBase64"),
        (json!({"pth": "/x"}), "pth"),
    ] {
        let went = Bench::new().run(&*stage.handler, payload).await;
        let sentences = went.malformed();
        assert!(sentences.join("\n").contains(words), "{sentences:?}");
    }
    stage.ends().await;
}

#[tokio::test]
async fn a_path_never_leaves_the_base_url_of_the_service() {
    let mut stage = Stage::with(|settings| {
        let url = format!("{}/v1/", settings.url.unwrap().as_str());
        HttpHandler { url: Some(url.parse().unwrap()), ..settings }
    })
    .await;
    for (path, line) in [
        ("/echo", "POST /v1/echo HTTP/1.1"),
        ("echo/", "POST /v1/echo/ HTTP/1.1"),
        ("", "POST /v1/ HTTP/1.1"),
        ("/a%20b?c=%2F", "POST /v1/a%20b?c=%2F HTTP/1.1"),
        ("//evil.example/x", "POST /v1/evil.example/x HTTP/1.1"),
        ("@evil.example", "POST /v1/@evil.example HTTP/1.1"),
        ("http://evil.example/#x", "POST /v1/http://evil.example/%23x HTTP/1.1"),
    ] {
        let (went, _) = stage.ask(path, &Parts::default()).await;
        assert!(matches!(went, Went::Ran(Ok(()))), "{path}: {went:?}");
        assert_eq!(stage.sees().await.line, line);
    }
    stage.ends().await;
}

#[tokio::test]
async fn cancellation_drops_the_connection() {
    let mut stage = Stage::new().await;
    let bench = Bench::new();
    let run = bench.run(&*stage.handler, json!({"path": "/hang"}));
    let cancel = async {
        stage.seen.recv().await.unwrap();
        bench.cancel(Duration::from_secs(60));
        std::future::pending::<()>().await;
    };
    let went = tokio::select! {
        went = within("the task", run) => went,
        () = cancel => panic!("it never ends"),
    };
    assert!(matches!(went, Went::Ran(Err(ExecuteError { reason: ExecuteFailure::Failed, .. }))), "{went:?}");
    within("the connection is dropped", stage.go.notified()).await;
    stage.ends().await;
}

#[tokio::test]
async fn max_run_time_limits_a_request() {
    let stage = Stage::with(|settings| HttpHandler { max_run_time: Span(Duration::from_secs(3)), ..settings }).await;
    let (went, _) = stage.ask("/hang", &Parts::default()).await;
    assert!(format!("{went:?}").contains("within 3 s"), "{went:?}");
    within("the connection is dropped", stage.go.notified()).await;
    let late = Request { seconds_left: Some(0.0), ..Request::default() };
    let (went, _) = stage.forward(&late, &Parts::default()).await;
    assert!(format!("{went:?}").contains("the request expired"), "{went:?}");
    stage.ends().await;
}

#[tokio::test]
async fn a_task_waits_for_a_service_and_is_released_in_the_end() {
    let mut stage = Stage::new().await;
    stage.until(ServiceAvailability::Up).await;
    let address = stage.url.trim_start_matches("http://").to_owned();
    stage.serving.abort();
    within("the port is closed", async { while TcpStream::connect(&address).await.is_ok() {} }).await;
    // The service counts as up until a request is refused.
    let parts = Parts::default();
    let ask = stage.ask("/echo", &parts);
    let comes_back = async {
        stage.until(ServiceAvailability::Down).await;
        let listener = TcpListener::bind(&address).await.unwrap();
        let (sender, _seen) = mpsc::channel(64);
        accept(listener, sender, Arc::new(Notify::new())).await;
    };
    let (went, reply) = tokio::select! {
        done = ask => done,
        () = comes_back => panic!("it never ends"),
    };
    assert!(matches!(went, Went::Ran(Ok(()))), "{went:?}");
    assert_eq!(text(&reply.unwrap()), "{}");
    // The service stays down.
    stage.until(ServiceAvailability::Down).await;
    let short = HttpHandler { startup_timeout: Span(Duration::from_millis(50)), ..settings(&stage.url) };
    stage.handler = erase(http(short));
    let (went, _) = stage.ask("/echo", &parts).await;
    assert!(matches!(went, Went::Refused(PrepareError { reason: PrepareFailure::ServiceDown, .. })), "{went:?}");
    stage.ends().await;
}

#[tokio::test]
async fn a_busy_service_that_does_not_answer_probes_stays_up() {
    let probed = |settings| {
        let health_interval = Span(Duration::from_millis(50));
        HttpHandler { health: Some("/health".to_owned()), health_interval, ..settings }
    };
    let mut stage = Stage::with(probed).await;
    let bench = Bench::new();
    let work = bench.run(&*stage.handler, json!({"path": "/work"}));
    let watched = async {
        // More unanswered probes than an idle service may have.
        for request in ["POST /work", "GET /health", "GET /health", "GET /health", "GET /health"] {
            let seen = stage.seen.recv().await.unwrap();
            assert!(seen.line.starts_with(request), "{}", seen.line);
            assert_eq!(stage.lent.status.borrow().availability, ServiceAvailability::Up);
        }
        stage.go.notify_one();
    };
    let (went, ()) = tokio::join!(within("the task", work), watched);
    assert!(matches!(went, Went::Ran(Ok(()))), "{went:?}");
    stage.ends().await;
}
