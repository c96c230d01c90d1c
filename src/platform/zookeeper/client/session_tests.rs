//! What a server may do wrong, by one that the tests write. `tests/zookeeper` has a real one for what goes well.

use std::time::Duration;

use bytes::{Buf as _, BufMut as _};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};

use super::records::{Operation, xid};
use super::*;
use journeyman_domain::limits::ZOOKEEPER_ANSWER_BYTES_MAX;

const ID: i64 = 0x17;

pub(super) struct Server {
    listener: TcpListener,
    timeout: Duration,
}

/// A connection of the client's session.
pub(super) struct Line(TcpStream);

/// A request as the server sees it.
#[derive(Debug, PartialEq, Eq)]
struct Seen {
    number: i32,
    operation: i32,
    record: Vec<u8>,
}

impl Server {
    pub(super) async fn start(timeout: Duration) -> Self {
        Self { listener: TcpListener::bind("127.0.0.1:0").await.expect("a port"), timeout }
    }

    pub(super) fn options(&self) -> ConnectOptions {
        ConnectOptions {
            servers: self.listener.local_addr().expect("an address").to_string(),
            session_timeout: self.timeout,
            tls: None,
            auth: None,
        }
    }

    async fn client(&self) -> (Client, Line) {
        let options = self.options();
        let (client, line) = tokio::join!(Client::connect(&options), self.accept());
        (client.expect("it is connected"), line)
    }

    async fn greeted(&self) -> (Line, Vec<u8>) {
        let (stream, _) = self.listener.accept().await.expect("a client");
        let mut line = Line(stream);
        let greeting = line.frame().await.expect("a greeting");
        (line, greeting)
    }

    pub(super) async fn accept(&self) -> Line {
        let (mut line, _) = self.greeted().await;
        let timeout_ms = i32::try_from(self.timeout.as_millis()).expect("it is short");
        line.grant(timeout_ms, ID).await;
        line
    }
}

impl Line {
    /// `None` once the client has closed the connection.
    async fn frame(&mut self) -> Option<Vec<u8>> {
        let length = self.0.read_u32().await.ok()?;
        let mut frame = vec![0; length as usize];
        self.0.read_exact(&mut frame).await.ok()?;
        Some(frame)
    }

    async fn send(&mut self, frame: &[u8]) {
        let mut bytes = u32::try_from(frame.len()).expect("it is short").to_be_bytes().to_vec();
        bytes.extend_from_slice(frame);
        self.0.write_all(&bytes).await.expect("the client reads");
    }

    async fn grant(&mut self, timeout_ms: i32, id: i64) {
        let mut grant = Vec::new();
        grant.put_i32(0);
        grant.put_i32(timeout_ms);
        grant.put_i64(id);
        grant.put_i32(16);
        grant.put_slice(&[7; 16]);
        grant.put_u8(0);
        self.send(&grant).await;
    }

    /// The next request that is no ping.
    async fn request(&mut self) -> Option<Seen> {
        loop {
            let frame = self.frame().await?;
            let mut head = &frame[..];
            let (number, operation) = (head.get_i32(), head.get_i32());
            if operation == Operation::Ping as i32 {
                self.answer(number, 0, b"").await;
            } else {
                return Some(Seen { number, operation, record: head.to_vec() });
            }
        }
    }

    async fn answer(&mut self, number: i32, code: i32, record: &[u8]) {
        let mut frame = Vec::new();
        frame.put_i32(number);
        frame.put_i64(if number > 0 { 99 } else { -1 });
        frame.put_i32(code);
        frame.put_slice(record);
        self.send(&frame).await;
    }

    /// Waits for the client to close the connection.
    async fn is_closed(&mut self) -> bool {
        while let Some(frame) = self.frame().await {
            assert_eq!(frame[4..], (Operation::Ping as i32).to_be_bytes(), "the client sends more");
        }
        true
    }
}

fn long() -> Duration {
    Duration::from_secs(60)
}

async fn within<T>(future: impl Future<Output = T>) -> T {
    tokio::time::timeout(long(), future).await.expect("it takes too long")
}

/// A call that the server answers in another way than the protocol allows.
async fn misbehaves(answer: impl AsyncFnOnce(&mut Line, Seen)) {
    let server = Server::start(long()).await;
    let (client, mut line) = server.client().await;
    let call = client.get_data("/a");
    let serving = async {
        let request = line.request().await.expect("a call");
        answer(&mut line, request).await;
        assert!(line.is_closed().await);
        // The session goes on, and the call is not repeated.
        let mut line = server.accept().await;
        let call = client.children("/b");
        let serving = async {
            let request = line.request().await.expect("a call");
            assert_eq!(request.operation, Operation::GetChildren as i32);
            line.answer(request.number, 0, &[0; 72]).await;
        };
        let (children, ()) = tokio::join!(call, serving);
        assert_eq!(children, Ok((Vec::new(), Stat::default())));
    };
    let (answer, ()) = within(async { tokio::join!(call, serving) }).await;
    assert_eq!(answer, Err(Error::ConnectionLoss));
}

#[tokio::test]
async fn an_answer_that_is_too_long_closes_the_connection_before_it_is_read() {
    for length in [u32::try_from(ZOOKEEPER_ANSWER_BYTES_MAX).expect("it fits") + 1, 1 << 31, u32::MAX] {
        misbehaves(async |line, _| line.0.write_u32(length).await.expect("the client reads")).await;
    }
}

#[tokio::test]
async fn an_answer_to_another_call_closes_the_connection() {
    misbehaves(async |line, request| line.answer(request.number + 1, 0, b"").await).await;
}

#[tokio::test]
async fn an_answer_that_is_no_record_closes_the_connection() {
    misbehaves(async |line, request| line.answer(request.number, 0, &i32::MAX.to_be_bytes()).await).await;
    misbehaves(async |line, _| line.send(b"short").await).await;
    misbehaves(async |line, _| line.answer(xid::EVENT, 0, &[9; 12]).await).await;
}

#[tokio::test]
async fn a_connection_that_is_reset_costs_the_calls_in_flight() {
    misbehaves(async |line, _| line.0.shutdown().await.expect("it is open")).await;
}

#[tokio::test]
async fn a_silent_server_is_left_before_the_session_expires_and_the_session_ends_without_one() {
    let server = Server::start(Duration::from_millis(600)).await;
    // Before the last word of the server.
    let began = tokio::time::Instant::now();
    let (client, mut line) = server.client().await;
    assert!(within(line.is_closed()).await);
    assert!(began.elapsed() >= Duration::from_millis(400), "{:?}", began.elapsed());
    drop(server);
    within(client.ended()).await;
    assert!(began.elapsed() >= Duration::from_millis(900), "{:?}", began.elapsed());
    assert_eq!((client.state(), client.get_data("/a").await), (SessionState::Expired, Err(Error::SessionExpired)));
}

#[tokio::test]
async fn an_idle_session_is_kept_alive() {
    let server = Server::start(Duration::from_millis(300)).await;
    let (client, mut line) = server.client().await;
    for _ in 0..5 {
        let ping = within(line.frame()).await.expect("a ping");
        assert_eq!(ping[4..], (Operation::Ping as i32).to_be_bytes());
        line.answer(xid::PING, 0, b"").await;
    }
    assert_eq!(client.state(), SessionState::Connected);
}

/// A lease counts from there: not from when an answer came, and not from a later request.
#[tokio::test]
async fn d2_an_answer_proves_that_the_session_stood_when_its_request_was_sent() {
    let server = Server::start(long()).await;
    let (client, mut line) = server.client().await;
    let granted = client.proved_at();
    let call = client.children("/a");
    let serving = async {
        let request = line.request().await.expect("a call");
        let seen_at = connection::boot_now();
        line.answer(request.number, 0, &[0; 72]).await;
        seen_at
    };
    let (children, seen_at) = within(async { tokio::join!(call, serving) }).await;
    assert_eq!(children, Ok((Vec::new(), Stat::default())));
    // The answer to a call wakes its caller before the session has noted the proof.
    within(async {
        while client.proved_at() == granted {
            tokio::task::yield_now().await;
        }
    })
    .await;
    assert!(granted < client.proved_at() && client.proved_at() <= seen_at);
}

#[tokio::test]
async fn recursive_watches_are_set_again_and_their_readers_read_again() {
    let server = Server::start(long()).await;
    let (client, mut line) = server.client().await;
    let client = client.chroot("/ci").expect("a path");
    let serving = async {
        let request = line.request().await.expect("a call");
        line.answer(request.number, 0, b"").await;
    };
    let (watch, ()) = within(async { tokio::join!(client.watch_tree("/q"), serving) }).await;
    let mut watch = watch.expect("it is set");
    drop(line);
    let mut line = within(server.accept()).await;
    let again = within(line.request()).await.expect("watches");
    let mut record = Vec::new();
    record.put_i64(99);
    record.put_slice(&[0; 16]);
    record.put_i32(1);
    record.put_i32(5);
    record.put_slice(b"/ci/q");
    let expected = Seen { number: xid::SET_WATCHES, operation: Operation::SetWatches as i32, record };
    assert_eq!(again, expected);
    line.answer(xid::SET_WATCHES, 0, b"").await;
    assert_eq!(within(watch.next()).await, TreeEvent::EventsLost);
    let mut event = Vec::new();
    event.put_i32(1);
    event.put_i32(3);
    event.put_i32(7);
    event.put_slice(b"/ci/q/a");
    line.answer(xid::EVENT, 0, &event).await;
    assert_eq!(within(watch.next()).await, TreeEvent::Created("/q/a".to_owned()));
}

#[tokio::test]
async fn a_session_that_the_server_has_forgotten_ends() {
    let server = Server::start(long()).await;
    let (client, line) = server.client().await;
    drop(line);
    let (mut line, greeting) = within(server.greeted()).await;
    let id: [u8; 8] = greeting[16..24].try_into().expect("an id");
    assert_eq!(i64::from_be_bytes(id), ID);
    line.grant(0, 0).await;
    within(client.ended()).await;
    assert_eq!(client.state(), SessionState::Expired);
}

#[tokio::test]
async fn a_call_whose_caller_has_left_before_there_was_a_connection_is_not_sent() {
    let server = Server::start(long()).await;
    let (client, line) = server.client().await;
    drop(line);
    let (mut line, _) = within(server.greeted()).await;
    // There is no session yet.
    let mut left = Box::pin(client.get_data("/left"));
    assert!(futures_util::poll!(&mut left).is_pending());
    drop(left);
    line.grant(60_000, ID).await;
    let serving = async {
        let request = line.request().await.expect("a call");
        assert_eq!(request.operation, Operation::GetChildren as i32);
        line.answer(request.number, -101, b"").await;
    };
    let (children, ()) = within(async { tokio::join!(client.children("/stays"), serving) }).await;
    assert_eq!(children, Err(Error::NoNode));
}

#[tokio::test]
async fn a_client_that_is_dropped_closes_its_session() {
    let server = Server::start(long()).await;
    let (client, mut line) = server.client().await;
    drop(client);
    let last = within(line.request()).await.expect("a request");
    assert_eq!(last.operation, Operation::Close as i32);
    line.answer(last.number, 0, b"").await;
    assert!(within(line.is_closed()).await);
}

#[tokio::test]
async fn a_request_over_the_limit_of_servers_is_not_sent() {
    let server = Server::start(long()).await;
    let (client, _line) = server.client().await;
    let data = vec![0; ZOOKEEPER_REQUEST_BYTES_MAX / 2];
    let write = Write::Set { path: "/a", data: &data, version: None };
    let refused = client.multi(&[write, write]).await.expect_err("it is too long");
    assert!(matches!(refused.cause, Error::BadArguments(_)), "{refused:?}");
}
