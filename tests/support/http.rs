//! Requests to a status page, and their answers, taken apart by hand.

use std::fmt::Display;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpStream, ToSocketAddrs};

/// The head in small letters, and the body.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) status: u16,
    pub(crate) head: String,
    pub(crate) body: String,
}

/// Sends a request as it is, and reads until the connection is closed.
pub(crate) async fn exchange(address: impl ToSocketAddrs, request: &str) -> Answer {
    let mut stream = TcpStream::connect(address).await.expect("a connection");
    stream.write_all(request.as_bytes()).await.expect("it is read");
    let mut text = String::new();
    stream.read_to_string(&mut text).await.expect("it is UTF-8");
    let (head, body) = text.split_once("\r\n\r\n").expect("a head");
    let status = head.split(' ').nth(1).and_then(|status| status.parse().ok()).expect("a status");
    Answer { status, head: head.to_ascii_lowercase(), body: body.to_owned() }
}

pub(crate) async fn get(address: impl ToSocketAddrs + Display, path: &str) -> Answer {
    let request = format!("GET {path} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n");
    exchange(address, &request).await
}
