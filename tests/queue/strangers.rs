//! What a caller may make the queue hold: little before it has proved itself, and all callers together within a bound.

use std::net::SocketAddr;
use std::time::Duration;

use journeyman::queue::{Auth, Config, Db, StartError, start};
use serde_json::json;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::sync::watch;
use tokio::task::JoinSet;

use super::client::{Api, slugid};
use super::place::Place;

async fn connect(place: &Place) -> TcpStream {
    TcpStream::connect(place.running.address()).await.expect("the queue listens")
}

/// The head of a `PUT` with a body of so many bytes.
fn head(api: &Api, path: &str, authorization: &str, length: usize) -> String {
    let host = api.root.trim_start_matches("http://");
    format!(
        "PUT {path} HTTP/1.1\r\nhost: {host}\r\nauthorization: {authorization}\r\ncontent-type: application/json\r\n\
         content-length: {length}\r\n\r\n"
    )
}

/// Reads to the end of an answer's head.
async fn answer_head(stream: &mut TcpStream) -> String {
    let mut text = Vec::new();
    while !text.windows(4).any(|end| end == b"\r\n\r\n") {
        let byte = stream.read_u8().await.expect("an answer comes");
        text.push(byte);
    }
    String::from_utf8(text).expect("a head is text").to_ascii_lowercase()
}

#[tokio::test]
async fn a_caller_who_cannot_sign_is_refused_before_its_body_is_read() {
    let place = Place::new().await;
    let path = format!("/api/queue/v1/task/{}", slugid());
    let forger = Api { token: "not the token".to_owned(), ..place.api.clone() };
    let mut stream = connect(&place).await;
    stream.write_all(head(&place.api, &path, &forger.header("PUT", &path, None), 9 << 20).as_bytes()).await.unwrap();
    let told = answer_head(&mut stream).await;
    assert!(told.starts_with("http/1.1 401 ") && told.contains("connection: close"), "{told}");
    place.running.stop().await;
}

#[tokio::test]
async fn a_stranger_gets_one_answer_a_connection_and_a_client_as_many_as_it_likes() {
    let place = Place::new().await;
    let ping = place.api.anonymous("GET", "ping", None).await;
    assert_eq!(ping.headers["connection"], "close");
    assert!(!place.api.get("ping").await.headers.contains_key("connection"));
    place.running.stop().await;
}

#[tokio::test]
async fn strangers_who_say_nothing_make_room_for_a_client() {
    let place = Place::new().await;
    let mut silent = Vec::new();
    for _ in 0..200 {
        let mut stream = connect(&place).await;
        stream.write_all(b"GET /api/queue/v1/ping HTTP/1.1\r\nx: ").await.unwrap();
        silent.push(stream);
    }
    // More than were let in stand before it, and each crowd inside is sent away after a second.
    place.api.create("p/w", json!({})).await;
    let mut byte = [0];
    assert!(matches!(silent[0].read(&mut byte).await, Ok(0) | Err(_)), "the first was told to go");
    place.running.stop().await;
}

#[tokio::test(start_paused = true)]
async fn a_stranger_whose_head_does_not_end_is_left() {
    let place = Place::new().await;
    let mut stream = connect(&place).await;
    let began = tokio::time::Instant::now();
    stream.write_all(b"GET /api/queue/v1/ping HTTP/1.1\r\nx: ").await.unwrap();
    assert!(matches!(stream.read(&mut [0]).await, Ok(0) | Err(_)), "no answer is due");
    assert!(began.elapsed() <= Duration::from_secs(31), "{:?}", began.elapsed());
    place.running.stop().await;
}

#[tokio::test(start_paused = true)]
async fn a_client_whose_body_does_not_end_is_told_so() {
    let place = Place::new().await;
    let path = format!("/api/queue/v1/task/{}", slugid());
    let mut stream = connect(&place).await;
    let began = tokio::time::Instant::now();
    stream.write_all(head(&place.api, &path, &place.api.header("PUT", &path, None), 100).as_bytes()).await.unwrap();
    stream.write_all(b"{").await.unwrap();
    assert!(answer_head(&mut stream).await.starts_with("http/1.1 400 "));
    assert!(began.elapsed() <= Duration::from_secs(61), "{:?}", began.elapsed());
    place.running.stop().await;
}

#[tokio::test]
async fn each_call_has_a_bound_for_its_body() {
    let place = Place::new().await;
    let task = place.api.create("p/w", json!({})).await;
    let padded = |bytes: usize| json!({"x": "y".repeat(bytes)});
    let large = padded(100_000);
    let path = format!("task/{task}/cancel");
    assert_eq!(place.api.queue("POST", &path, Some(&large)).await.refusal(413).0, "InputTooLarge");
    assert_eq!(place.api.anonymous("POST", &path, Some(&padded(20_000))).await.refusal(413).0, "InputTooLarge");
    place.api.create("p/w", json!({"payload": padded(9 << 20)})).await;
    place.running.stop().await;
}

#[tokio::test]
async fn bodies_beyond_what_may_be_held_at_once_are_told_to_come_again() {
    let place = Place::new().await;
    let body = place.api.definition("p/w", json!({"payload": {"x": "y".repeat(10_000_000)}})).to_string();
    let (most, last) = body.split_at(body.len() - 1);
    // Seven times 10 MB are more than 64 MiB, and six times are less.
    let mut sent = JoinSet::new();
    let (go, going) = watch::channel(());
    for _ in 0..7 {
        let path = format!("/api/queue/v1/task/{}", slugid());
        let head = head(&place.api, &path, &place.api.header("PUT", &path, None), body.len());
        let mut stream = connect(&place).await;
        let (most, last, mut going) = (most.to_owned(), last.to_owned(), going.clone());
        sent.spawn(async move {
            stream.write_all(head.as_bytes()).await.unwrap();
            stream.write_all(most.as_bytes()).await.unwrap();
            tokio::select! {
                // Only a refusal comes before the body has ended.
                _ = stream.readable() => {}
                _ = going.changed() => stream.write_all(last.as_bytes()).await.unwrap(),
            }
            answer_head(&mut stream).await
        });
    }
    let refused = sent.join_next().await.unwrap().unwrap();
    assert!(refused.starts_with("http/1.1 503 ") && refused.contains("retry-after: 1"), "{refused}");
    go.send_replace(());
    for told in sent.join_all().await {
        assert!(told.starts_with("http/1.1 200 "), "{told}");
    }
    place.running.stop().await;
}

#[tokio::test]
async fn heads_have_a_bound_too() {
    let place = Place::new().await;
    for line in ["x: y\r\n".repeat(200), format!("x: {}\r\n", "y".repeat(40_000))] {
        let mut stream = connect(&place).await;
        let head = format!("GET /api/queue/v1/ping HTTP/1.1\r\nhost: x\r\n{line}\r\n");
        stream.write_all(head.as_bytes()).await.unwrap();
        assert!(answer_head(&mut stream).await.starts_with("http/1.1 431 "));
    }
    place.running.stop().await;
}

#[tokio::test]
async fn a_queue_that_checks_nobody_is_not_started_where_others_reach_it() {
    let folder = tempfile::tempdir().expect("a folder");
    let settings = || Config::new(Db::Memory, folder.path().to_owned());
    let everywhere = SocketAddr::from(([0, 0, 0, 0], 0));
    let outside = [
        Config { auth: Auth::Open, listen: everywhere, ..settings() },
        Config { auth: Auth::Open, public_root_url: Some("https://queue.example.com".to_owned()), ..settings() },
    ];
    for settings in outside {
        let refused = start(settings).await.expect_err("everybody could do everything");
        assert!(matches!(refused, StartError::UnauthenticatedAddress(_)), "{refused}");
        assert!(refused.to_string().contains("open-to-network"), "{refused}");
    }
    for settings in [
        Config { auth: Auth::OpenToNetwork, listen: everywhere, ..settings() },
        Config { auth: Auth::Open, ..settings() },
        Config { listen: everywhere, ..settings() },
    ] {
        start(settings).await.expect("it starts").stop().await;
    }
}

#[tokio::test]
async fn spans_that_are_too_short_to_work_with_are_refused_by_name() {
    let folder = tempfile::tempdir().expect("a folder");
    let settings = || Config::new(Db::Memory, folder.path().to_owned());
    let nothing = Duration::ZERO;
    for (settings, name) in [
        (Config { claim_timeout: Duration::from_nanos(1), ..settings() }, "claim_timeout"),
        (Config { poll_url_lifetime: nothing, ..settings() }, "poll_url_life"),
        (Config { visibility_timeout: nothing, ..settings() }, "visibility"),
    ] {
        let refused = start(settings).await.expect_err("it could not work");
        assert!(refused.to_string().contains(name), "{refused}");
    }
}
