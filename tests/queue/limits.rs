//! Limits on what callers may make the queue hold, before and after authentication.

use std::net::SocketAddr;
use std::time::Duration;

use journeyman_services::queue::{Auth, Config, Db, StartError, start};
use serde_json::json;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::sync::watch;
use tokio::task::JoinSet;

use super::client::{Api, slugid};
use super::test_queue::TestQueue;

async fn connect(server: &TestQueue) -> TcpStream {
    TcpStream::connect(server.running.address()).await.expect("the queue listens")
}

fn head(api: &Api, path: &str, authorization: &str, length: usize) -> String {
    let host = api.root.trim_start_matches("http://");
    format!(
        "PUT {path} HTTP/1.1\r\nhost: {host}\r\nauthorization: {authorization}\r\ncontent-type: application/json\r\n\
         content-length: {length}\r\n\r\n"
    )
}

async fn answer_head(stream: &mut TcpStream) -> String {
    let mut text = Vec::new();
    while !text.windows(4).any(|end| end == b"\r\n\r\n") {
        let byte = stream.read_u8().await.expect("an answer comes");
        text.push(byte);
    }
    String::from_utf8(text).expect("a head is text").to_ascii_lowercase()
}

#[tokio::test]
async fn an_unauthenticated_caller_is_rejected_before_its_body_is_read() {
    let server = TestQueue::new().await;
    let path = format!("/api/queue/v1/task/{}", slugid());
    let forger = Api { token: "not the token".to_owned(), ..server.api.clone() };
    let mut stream = connect(&server).await;
    stream.write_all(head(&server.api, &path, &forger.header("PUT", &path, None), 9 << 20).as_bytes()).await.unwrap();
    let response = answer_head(&mut stream).await;
    assert!(response.starts_with("http/1.1 401 "), "{response}");
}

#[tokio::test(start_paused = true)]
async fn an_unfinished_request_head_times_out() {
    let server = TestQueue::new().await;
    let mut stream = connect(&server).await;
    let began = tokio::time::Instant::now();
    stream.write_all(b"GET /api/queue/v1/ping HTTP/1.1\r\nx: ").await.unwrap();
    assert!(matches!(stream.read(&mut [0]).await, Ok(0) | Err(_)), "no answer is due");
    assert!(began.elapsed() <= Duration::from_secs(91), "{:?}", began.elapsed());
}

#[tokio::test(start_paused = true)]
async fn an_unfinished_body_times_out_with_a_response() {
    let server = TestQueue::new().await;
    let path = format!("/api/queue/v1/task/{}", slugid());
    let mut stream = connect(&server).await;
    let began = tokio::time::Instant::now();
    stream.write_all(head(&server.api, &path, &server.api.header("PUT", &path, None), 100).as_bytes()).await.unwrap();
    stream.write_all(b"{").await.unwrap();
    assert!(answer_head(&mut stream).await.starts_with("http/1.1 400 "));
    assert!(began.elapsed() <= Duration::from_secs(61), "{:?}", began.elapsed());
}

#[tokio::test]
async fn each_call_has_a_body_limit() {
    let server = TestQueue::new().await;
    let task = server.api.create("p/w", json!({})).await;
    let padded = |bytes: usize| json!({"x": "y".repeat(bytes)});
    let large = padded(100_000);
    let path = format!("task/{task}/cancel");
    assert_eq!(server.api.queue("POST", &path, Some(&large)).await.refusal(413).0, "InputTooLarge");
    assert_eq!(server.api.anonymous("POST", &path, Some(&padded(20_000))).await.refusal(413).0, "InputTooLarge");
    server.api.create("p/w", json!({"payload": padded(9 << 20)})).await;
    let huge = server.api.definition("p/w", json!({"payload": padded(11 << 20)}));
    let answer = server.api.queue("PUT", &format!("task/{}", slugid()), Some(&huge)).await;
    assert_eq!(answer.refusal(413).0, "InputTooLarge");
}

#[tokio::test]
async fn bodies_beyond_the_total_budget_are_rejected_with_retry_after() {
    let server = TestQueue::new().await;
    let body = server.api.definition("p/w", json!({"payload": {"x": "y".repeat(10_000_000)}})).to_string();
    let (most, last) = body.split_at(body.len() - 1);
    // Seven times 10 MB are more than 64 MiB, and six times are less.
    let mut sent = JoinSet::new();
    let (go, going) = watch::channel(());
    for _ in 0..7 {
        let path = format!("/api/queue/v1/task/{}", slugid());
        let head = head(&server.api, &path, &server.api.header("PUT", &path, None), body.len());
        let mut stream = connect(&server).await;
        let (most, last, mut going) = (most.to_owned(), last.to_owned(), going.clone());
        sent.spawn(async move {
            stream.write_all(head.as_bytes()).await.unwrap();
            stream.write_all(most.as_bytes()).await.unwrap();
            tokio::select! {
                // Only an error response arrives before the end of the body.
                _ = stream.readable() => {}
                _ = going.changed() => stream.write_all(last.as_bytes()).await.unwrap(),
            }
            answer_head(&mut stream).await
        });
    }
    let refused = sent.join_next().await.unwrap().unwrap();
    assert!(refused.starts_with("http/1.1 503 ") && refused.contains("retry-after: 1"), "{refused}");
    go.send_replace(());
    for response in sent.join_all().await {
        assert!(response.starts_with("http/1.1 200 "), "{response}");
    }
}

#[tokio::test]
async fn request_heads_are_limited() {
    let server = TestQueue::new().await;
    for line in ["x: y\r\n".repeat(200), format!("x: {}\r\n", "y".repeat(40_000))] {
        let mut stream = connect(&server).await;
        let head = format!("GET /api/queue/v1/ping HTTP/1.1\r\nhost: x\r\n{line}\r\n");
        stream.write_all(head.as_bytes()).await.unwrap();
        assert!(answer_head(&mut stream).await.starts_with("http/1.1 431 "));
    }
}

#[tokio::test]
async fn an_open_queue_starts_on_loopback_only() {
    let folder = tempfile::tempdir().expect("a folder");
    let settings = || Config::new(Db::Memory, folder.path().to_owned());
    let everywhere = SocketAddr::from(([0, 0, 0, 0], 0));
    let open = Config { auth: Auth::Open, listen: everywhere, ..settings() };
    let refused = start(open).await.expect_err("authentication is off");
    assert!(matches!(refused, StartError::UnauthenticatedAddress(_)), "{refused}");
    assert!(refused.to_string().contains("open-to-network"), "{refused}");
    for settings in [
        Config { auth: Auth::OpenToNetwork, listen: everywhere, ..settings() },
        Config { auth: Auth::Open, ..settings() },
        Config { listen: everywhere, ..settings() },
    ] {
        start(settings).await.expect("it starts").stop().await;
    }
}
