//! The HTTP surface: what each path answers with, and what is refused.

use std::net::SocketAddr;
use std::time::Duration;

use journeyman_domain::limits::HTTP_CONNECTIONS_MAX;
use journeyman_platform::http::{Exposure, HttpListener};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use crate::observe::views::{self, Server};
use crate::support::http::{Answer, exchange, get};

async fn ask(address: SocketAddr, head: &str) -> Answer {
    exchange(address, &format!("{head}\r\nConnection: close\r\n\r\n")).await
}

#[tokio::test]
async fn readiness_lists_the_failing_checks() {
    let server = Server::start(views::running()).await;
    let ready = get(server.address, "/readyz").await;
    assert_eq!(ready.status, 200);
    assert_eq!(
        ready.body,
        "[+] sources: 2 of 2 answer\n[+] not paused\n[+] not shutting down\n[+] host healthy\n[+] sidecars\n[+] disk\n[+] memory\n[+] slots: 1 free\nready\n"
    );

    server.show(Some(views::paused()));
    let paused = get(server.address, "/readyz").await;
    assert_eq!(paused.status, 503);
    assert!(paused.body.contains("[-] not paused: paused for 41m07s\n") && paused.body.contains("[+] disk\n"));

    server.show(Some(views::draining()));
    let draining = get(server.address, "/readyz").await;
    assert_eq!(draining.status, 503);
    assert!(draining.body.contains("[-] not shutting down: draining"), "{}", draining.body);

    let mut silent = views::troubled();
    server.show(Some(silent.clone()));
    let one_down = get(server.address, "/readyz").await;
    assert_eq!(one_down.status, 503, "one is in trouble, the other was never asked: {}", one_down.body);
    assert!(one_down.body.contains("[-] sources: 0 of 2 answer; ci: poll: 502"), "{}", one_down.body);
    assert_eq!(one_down.body.lines().count(), 9, "one line a check: {}", one_down.body);
    silent.snapshot.sources[1].polled_seconds_ago = Some(1.0);
    server.show(Some(silent));
    assert_eq!(get(server.address, "/readyz").await.status, 200, "one source is enough to work");
}

#[tokio::test]
async fn a_full_worker_is_ready() {
    let mut full = views::running();
    full.snapshot.capacity = 3;
    full.snapshot.blocked_reason = Some(journeyman::worker::status::BlockedReason::Full);
    full.snapshot.blocked_message = Some("every slot is taken".into());
    let server = Server::start(full).await;
    let ready = get(server.address, "/readyz").await;
    assert_eq!(ready.status, 200);
    assert!(ready.body.contains("[+] slots: every slot is taken"), "{}", ready.body);
}

#[tokio::test]
async fn a_worker_that_has_exited_is_neither_alive_nor_ready() {
    let server = Server::start(views::idle()).await;
    assert_eq!(get(server.address, "/livez").await.status, 200);
    assert_eq!(get(server.address, "/startupz").await.status, 200);
    server.show(None);
    for path in ["/livez", "/startupz", "/readyz", "/metrics", "/", "/status.json"] {
        assert_eq!(get(server.address, path).await.status, 503, "{path}");
    }
}

#[tokio::test]
async fn idle_connections_are_closed_for_a_probe() {
    let server = Server::start(views::running()).await;
    let mut halves = Vec::new();
    for _ in 0..2 * HTTP_CONNECTIONS_MAX {
        let mut stream = TcpStream::connect(server.address).await.expect("a connection");
        stream.write_all(b"GET /livez HTTP/1.1\r\nConnection: close\r\nHost: ").await.expect("it is read");
        halves.push(stream);
    }
    assert_eq!(get(server.address, "/livez").await.status, 200);
    // The oldest went, and the youngest is still there: it was no time limit that made room.
    let mut text = String::new();
    drop(halves[0].read_to_string(&mut text).await);
    assert_eq!(text, "");
    let youngest = halves.last_mut().expect("there are some");
    youngest.write_all(format!("{}\r\n\r\n", server.address).as_bytes()).await.expect("it is read");
    youngest.read_to_string(&mut text).await.expect("an answer");
    assert!(text.starts_with("HTTP/1.1 200"), "{text}");
}

#[tokio::test(start_paused = true)]
async fn a_loop_that_does_not_answer_is_not_alive() {
    let server = Server::stuck().await;
    let asked = tokio::time::Instant::now();
    let answer = get(server.address, "/livez").await;
    assert_eq!(answer.status, 503);
    assert!(answer.body.contains("did not answer within 5s"), "{}", answer.body);
    assert!(asked.elapsed() >= Duration::from_secs(5));
}

#[tokio::test]
async fn status_json_is_the_status_that_the_command_shows() {
    let server = Server::start(views::running()).await;
    let answer = get(server.address, "/status.json").await;
    let read: journeyman::control::WorkerStatusReply = serde_json::from_str(&answer.body).expect("it can be read back");
    assert_eq!(read, views::running());
}

#[tokio::test]
async fn the_endpoint_is_read_only_and_served_under_loopback_names_only() {
    let server = Server::start(views::idle()).await;
    let address = server.address;
    let host = format!("Host: {address}");
    for method in ["POST", "PUT", "DELETE", "OPTIONS"] {
        let refused = ask(address, &format!("{method} / HTTP/1.1\r\n{host}\r\nContent-Length: 0")).await;
        assert_eq!(refused.status, 405, "{method}");
    }
    let head = ask(address, &format!("HEAD / HTTP/1.1\r\n{host}")).await;
    assert_eq!((head.status, head.body.as_str()), (200, ""));
    assert_eq!(get(address, "/etc/passwd").await.status, 404);
    // A web site whose name was made to lead here reads nothing.
    let rebound = ask(address, "GET /status.json HTTP/1.1\r\nHost: evil.example").await;
    assert_eq!(rebound.status, 421);
    assert!(!rebound.body.contains("eu-central-1"), "{}", rebound.body);
    assert_eq!(ask(address, "GET / HTTP/1.1\r\nHost: localhost:7080").await.status, 200);
}

#[tokio::test]
async fn pages_load_nothing_from_other_origins_and_cannot_be_framed() {
    let server = Server::start(views::idle()).await;
    let page = get(server.address, "/").await;
    for part in ["default-src 'none'", "frame-ancestors 'none'", "x-content-type-options: nosniff", "no-store"] {
        assert!(page.head.contains(part), "{part}: {}", page.head);
    }
    assert!(!page.head.contains("unsafe-inline"), "{}", page.head);
    assert!(!page.body.contains("http://") && !page.body.contains("https://"), "nothing leads elsewhere");
    assert!(page.body.contains("<script>") && page.body.contains("<noscript><meta http-equiv=\"refresh\""));
}

#[tokio::test]
async fn a_remote_listen_address_needs_permission() {
    let any = "0.0.0.0:0".parse().unwrap();
    let refused = HttpListener::listen(any, Exposure::Loopback).await.expect_err("others could reach it");
    assert!(refused.to_string().contains("http.allow_remote = true"), "{refused}");
    HttpListener::listen(any, Exposure::Network).await.expect("it is meant");
}

#[tokio::test]
async fn what_a_task_says_is_text() {
    let server = Server::start(views::running()).await;
    let page = get(server.address, "/").await.body;
    assert!(page.contains("&lt;script&gt;document.title="), "{page}");
    assert!(!page.contains("<script>document.title") && !page.contains("<img"), "{page}");
}
