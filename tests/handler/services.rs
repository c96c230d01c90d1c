//! Tests the `http` handler against a scripted service.
#![allow(clippy::disallowed_methods, reason = "spawned tasks end with their test")]

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use journeyman::config::Environment;
use journeyman::config::schema::HttpHandler;
use journeyman::config::values::Span;
use journeyman::handler::artifact_collector::CollectedArtifact;
use journeyman::handler::http::Http;
use journeyman::handler::sidecar::{ServiceAvailability, SidecarContext, SidecarHandle};
use journeyman::handler::{DynHandler, PrepareError, PrepareFailure, Request, erase};
use journeyman::source::CallError;
use journeyman::task::{ArtifactBody, PartialReplySink, Reply, ReplyFuture, ReplyLimits, Results};
use journeyman_domain::refusal::Refusal;
use journeyman_domain::trace_context::TraceParent;
use journeyman_platform::host::clock::Clock;
use journeyman_platform::host::containment::Containment;
use serde_json::json;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Notify, mpsc};
use tokio::task::JoinHandle;

use crate::handler::bench::{Bench, RunResult};
use crate::support::gremlin::{Asked, read};
use crate::support::within;

const BOUND: Duration = Duration::from_secs(30);
pub(crate) const REPLY_LIMITS: ReplyLimits = ReplyLimits { body_bytes: 1000, content_type_bytes: 255 };

fn whole(code: &str, headers: &str, body: &str) -> String {
    format!("HTTP/1.1 {code}\r\n{headers}Content-Length: {}\r\n\r\n{body}", body.len())
}

fn chunk(text: &str) -> String {
    format!("{:x}\r\n{text}\r\n", text.len())
}

const COMPLETED: &str = "Ran(Ok(()))";
const FAILED: &str = "Ran(Err(ExecuteError { reason: Failed,";
const RETRIED: &str = "Ran(Err(ExecuteError { reason: Intermittent,";

const LINES: &str = "HTTP/1.1 200 OK\r\nContent-Type: application/x-ndjson\r\nTransfer-Encoding: chunked\r\n\r\n";

/// Answers a request by its path.
async fn act(mut stream: TcpStream, seen: mpsc::Sender<Asked>, go: Arc<Notify>, works: Arc<AtomicBool>) {
    let Some(request) = read(&mut stream).await else { return };
    let path = request.line.split(' ').nth(1).unwrap().to_owned();
    let body = String::from_utf8_lossy(&request.body).into_owned();
    if path != "/health" || works.load(Ordering::Relaxed) {
        seen.send(request).await.unwrap();
    }
    let answer = match path.as_str() {
        // A single-threaded service answers no probe while it works.
        "/health" if works.load(Ordering::Relaxed) => std::future::pending().await,
        "/health" => whole("204 No Content", "", ""),
        "/work" => {
            works.store(true, Ordering::Relaxed);
            go.notified().await;
            works.store(false, Ordering::Relaxed);
            whole("200 OK", "", "done")
        }
        // The request holds the response.
        "/raw" => body,
        "/lines" => {
            for piece in [LINES, &chunk("1\n\n2\n3"), &chunk("3\n")] {
                stream.write_all(piece.as_bytes()).await.unwrap();
            }
            go.notified().await;
            [&chunk("4\n"), &chunk("last"), "0\r\n\r\n"].concat()
        }
        "/hang" => {
            let mut rest = Vec::new();
            stream.read_to_end(&mut rest).await.unwrap();
            go.notify_one();
            return;
        }
        _ => whole("200 OK", "Content-Type: application/json\r\n", &body),
    };
    stream.write_all(answer.as_bytes()).await.unwrap();
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
    seen: mpsc::Receiver<Asked>,
    go: Arc<Notify>,
    lent: SidecarHandle,
    kept: JoinHandle<()>,
    serving: JoinHandle<()>,
    url: String,
    _folder: tempfile::TempDir,
}

fn settings(url: &str) -> HttpHandler {
    HttpHandler {
        health_interval: Span(Duration::from_millis(100)),
        startup_timeout: Span(BOUND),
        max_run_time: Span(BOUND),
        ..serde_json::from_value(json!({ "url": url })).unwrap()
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

    async fn ask(&self, path: &str, parts: &Parts) -> (RunResult, Option<Reply>) {
        let request = Request { path: Some(path.to_owned()), body: "{}".into(), ..Request::default() };
        self.forward(&request, parts).await
    }

    /// Forwards a request that the service answers with these bytes.
    async fn answered(&self, response: &str, parts: &Parts) -> (RunResult, Option<Reply>) {
        let request = Request { path: Some("/raw".into()), body: response.to_owned().into(), ..Request::default() };
        self.forward(&request, parts).await
    }

    async fn forward(&self, request: &Request, parts: &Parts) -> (RunResult, Option<Reply>) {
        let mut bench = Bench::new();
        let replies = Results::new(parts.clone(), REPLY_LIMITS);
        bench.context = bench.context.with_results(Some(replies.clone()));
        let result = within("the task", bench.run(&*self.handler, serde_json::to_value(request).unwrap())).await;
        (result, replies.final_reply())
    }

    async fn sees(&mut self) -> Asked {
        within("a request", self.seen.recv()).await.unwrap()
    }

    /// Stops the sidecar.
    async fn ends(self) {
        self.lent.stop.send_replace(true);
        within("the end", self.kept).await.unwrap();
        self.serving.abort();
    }
}

async fn accept(listener: TcpListener, seen: mpsc::Sender<Asked>, go: Arc<Notify>) {
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
        idempotency_key: Some("k-1".to_owned()).into(),
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
        body: (&[0xff, 0, 1][..]).into(),
    };
    let mut bench = Bench::new();
    let trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
    let mut task = bench.context.task().clone();
    task.trace = TraceParent::parse(trace);
    bench = bench.of(task);
    within("the task", bench.run(&*stage.handler, serde_json::to_value(&request).unwrap())).await.completed();
    let seen = stage.sees().await;
    assert_eq!((seen.line.as_str(), seen.body.as_slice()), ("POST /a/b?c=d HTTP/1.1", &[0xff, 0, 1][..]));
    let mut headers: BTreeMap<_, _> = seen.headers.into_iter().collect();
    let seconds_left: f64 = headers.remove("x-seconds-left").unwrap().parse().unwrap();
    assert!(seconds_left > 0.0 && seconds_left <= 20.0, "{seconds_left}");
    headers.retain(|name, _| !["accept", "user-agent"].contains(&name.as_str()));
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
    assert_eq!(headers, wanted);
    stage.ends().await;
}

#[tokio::test]
async fn the_status_code_decides_the_outcome_and_the_body_is_the_reply() {
    let stage = Stage::new().await;
    let parts = Parts::default();
    let (away, word) = ("Location: /echo\r\n", "x-status: not_found\r\nContent-Type: text/plain\r\n");
    let long_type = format!("Retry-After: 0\r\nContent-Type: text/{}\r\n", "x".repeat(300));
    let large = "x".repeat(1001);
    for (response, outcome, expected) in [
        (whole("200 OK", "", "a"), COMPLETED, Some(("ok", "a"))),
        (whole("201 Created", "", "a"), COMPLETED, Some(("ok", "a"))),
        (whole("404 Not Found", "", "a"), FAILED, Some(("core_error", "a"))),
        (whole("500 Error", "", "a"), FAILED, Some(("core_error", "a"))),
        (whole("429 Busy", "Retry-After: 0\r\n", "a"), RETRIED, Some(("core_error", "a"))),
        (whole("503 Busy", "", "a"), RETRIED, Some(("core_error", "a"))),
        (whole("302 Found", away, ""), FAILED, Some(("core_error", ""))),
        (whole("200 OK", word, "no such train"), COMPLETED, Some(("not_found", "no such train"))),
        (whole("500 Error", "x-status: no_route\r\n", "a"), FAILED, Some(("no_route", "a"))),
        (whole("500 Error", "x-status: ok\r\n", "all is well"), FAILED, Some(("core_error", "all is well"))),
        (whole("200 OK", "x-status: two words\r\n", "a"), FAILED, None),
        (whole("500 Error", "x-status: two words\r\n", "a"), FAILED, Some(("core_error", "a"))),
        (whole("200 OK", "", &large), FAILED, None),
        (whole("503 Busy", "Retry-After: 0\r\n", &large), RETRIED, None),
        (whole("429 Busy", &long_type, "later"), RETRIED, None),
        ("HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nhalf".to_owned(), RETRIED, None),
        (String::new(), RETRIED, None),
    ] {
        let (result, reply) = stage.answered(&response, &parts).await;
        assert!(format!("{result:?}").starts_with(outcome), "{response}: {result:?}");
        assert_eq!(reply.as_ref().map(|reply| (reply.status.as_str(), text(reply))), expected, "{response}");
    }
    assert_eq!(parts.heard(), Vec::<String>::new());
    let (_, reply) = stage.answered(&whole("200 OK", word, "no such train"), &parts).await;
    assert_eq!(reply.unwrap().content_type.as_deref(), Some("text/plain"));
    let (result, _) = stage.answered(&whole("302 Found", away, ""), &parts).await;
    assert!(result.failed().contains("redirects are not followed"));
    stage.ends().await;
}

#[tokio::test]
async fn retry_after_may_exceed_max_run_time() {
    let stage = Stage::with(|settings| HttpHandler { max_run_time: Span(Duration::from_secs(5)), ..settings }).await;
    let busy = whole("503 Busy", "Retry-After: 6\r\n", "later");
    let (result, reply) = stage.answered(&busy, &Parts::default()).await;
    assert!(format!("{result:?}").starts_with(RETRIED), "{result:?}");
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
    let (result, reply) = tokio::select! {
        done = ask => done,
        () = lets_go => panic!("it never ends"),
    };
    result.completed();
    assert_eq!(parts.heard(), ["1", "2", "33", "4"]);
    assert_eq!(reply, Some(Reply { content_type: Some("application/x-ndjson".to_owned()), ..Reply::ok(*b"last") }));

    let parts = Parts::default();
    let one_line = [LINES, &chunk("1\r\n"), "0\r\n\r\n"].concat();
    let (result, reply) = stage.answered(&one_line, &parts).await;
    result.completed();
    assert_eq!((parts.heard(), text(&reply.unwrap())), (vec!["1".to_owned()], "null"));
    stage.ends().await;
}

#[tokio::test]
async fn a_broken_stream_is_not_retried_and_one_without_a_client_is_dropped() {
    let stage = Stage::new().await;
    let (result, reply) = stage.answered(&[LINES, &chunk("1\n")].concat(), &Parts::default()).await;
    result.failed();
    assert_eq!(reply, None);
    let gone = Parts { gone: true, ..Parts::default() };
    let (result, _) = stage.ask("/lines", &gone).await;
    assert!(result.failed().contains("no longer waits"));
    assert_eq!(gone.heard(), ["1"]);
    stage.ends().await;
}

#[tokio::test]
async fn the_response_to_a_task_becomes_an_artifact() {
    let stage = Stage::new().await;
    let bench = Bench::new();
    within("the task", bench.run(&*stage.handler, json!({"path": "/x", "json": {"a": 1}}))).await.completed();
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
        let sentences = Bench::new().run(&*stage.handler, payload).await.malformed();
        assert!(sentences.join("\n").contains(words), "{sentences:?}");
    }
    stage.ends().await;
}

#[tokio::test]
async fn a_path_never_leaves_the_base_url_of_the_service() {
    let mut stage =
        Stage::with(|settings| HttpHandler { url: format!("{}/v1/", settings.url).parse().unwrap(), ..settings }).await;
    for (path, line) in [
        ("/echo", "POST /v1/echo HTTP/1.1"),
        ("echo/", "POST /v1/echo/ HTTP/1.1"),
        ("", "POST /v1/ HTTP/1.1"),
        ("/a%20b?c=%2F", "POST /v1/a%20b?c=%2F HTTP/1.1"),
        ("//evil.example/x", "POST /v1/evil.example/x HTTP/1.1"),
        ("@evil.example", "POST /v1/@evil.example HTTP/1.1"),
        ("http://evil.example/#x", "POST /v1/http://evil.example/%23x HTTP/1.1"),
    ] {
        let (result, _) = stage.ask(path, &Parts::default()).await;
        result.completed();
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
    tokio::select! {
        result = within("the task", run) => result,
        () = cancel => panic!("it never ends"),
    }
    .failed();
    within("the connection is dropped", stage.go.notified()).await;
    stage.ends().await;
}

#[tokio::test]
async fn max_run_time_limits_a_request() {
    let stage = Stage::with(|settings| HttpHandler { max_run_time: Span(Duration::from_secs(3)), ..settings }).await;
    let (result, _) = stage.ask("/hang", &Parts::default()).await;
    assert!(result.failed().contains("within 3 s"));
    within("the connection is dropped", stage.go.notified()).await;
    let late = Request { seconds_left: Some(0.0), ..Request::default() };
    let (result, _) = stage.forward(&late, &Parts::default()).await;
    assert!(result.failed().contains("the request expired"));
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
    let (result, reply) = tokio::select! {
        done = ask => done,
        () = comes_back => panic!("it never ends"),
    };
    result.completed();
    assert_eq!(text(&reply.unwrap()), "{}");
    // The service stays down.
    stage.until(ServiceAvailability::Down).await;
    let short = HttpHandler { startup_timeout: Span(Duration::from_millis(50)), ..settings(&stage.url) };
    stage.handler = erase(http(short));
    let (result, _) = stage.ask("/echo", &parts).await;
    assert!(
        matches!(result, RunResult::Refused(PrepareError { reason: PrepareFailure::ServiceDown, .. })),
        "{result:?}"
    );
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
    let (result, ()) = tokio::join!(within("the task", work), watched);
    result.completed();
    stage.ends().await;
}
