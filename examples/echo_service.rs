//! An echo service for a handler of kind `http`: `cargo run --example echo_service`, or let a worker start it.
//!
//! It listens on the address or the Unix socket that the worker names. `POST PATH` answers with what was sent, `POST /count`
//! with a line for each number up to the one that was sent, and `GET /health` with 200 as soon as it is ready.

use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use axum::Router;
use axum::body::{Body, Bytes};
use axum::http::{HeaderMap, StatusCode, Uri, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use futures_core::Stream;
use tokio::net::{TcpListener, UnixListener};
use tokio::signal::unix::{SignalKind, signal};
use tokio::time::Interval;

async fn echo(uri: Uri, headers: HeaderMap, body: Bytes) -> Response {
    let Ok(json) = serde_json::from_slice::<serde_json::Value>(&body) else {
        return (StatusCode::BAD_REQUEST, "{\"message\": \"the body is not JSON\"}").into_response();
    };
    let task = headers.get("x-task-id").and_then(|task| task.to_str().ok());
    let answer = serde_json::json!({ "echo": json, "path": uri.path(), "task": task });
    ([(header::CONTENT_TYPE, "application/json")], answer.to_string()).into_response()
}

/// Each line is a partial answer, and what follows the last line's end is the last one.
async fn count(body: Bytes) -> Response {
    let Ok(numbers) = serde_json::from_slice(&body) else { return StatusCode::BAD_REQUEST.into_response() };
    let lines = Lines { next: 1, numbers, pace: tokio::time::interval(Duration::from_millis(10)) };
    ([(header::CONTENT_TYPE, "application/x-ndjson")], Body::from_stream(lines)).into_response()
}

struct Lines {
    next: u32,
    numbers: u32,
    pace: Interval,
}

impl Stream for Lines {
    type Item = Result<String, std::convert::Infallible>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        ready!(self.pace.poll_tick(context));
        let number = self.next;
        self.next += 1;
        Poll::Ready(match number {
            number if number <= self.numbers => Some(Ok(format!("{number}\n"))),
            number if number == self.numbers + 1 => Some(Ok("\"done\"".to_owned())),
            _ => None,
        })
    }
}

#[tokio::main]
async fn main() -> std::io::Result<()> {
    serve().await
}

/// Serves until SIGTERM.
#[expect(clippy::disallowed_methods, reason = "the worker passes the address in environment variables")]
pub(crate) async fn serve() -> std::io::Result<()> {
    let service = Router::new()
        .route("/health", get(|| async { StatusCode::OK }))
        .route("/count", post(count))
        .fallback(post(echo));
    // Finishes requests in progress; the worker sends SIGKILL after `termination_grace`.
    let mut sigterm = signal(SignalKind::terminate())?;
    let terminated = async move {
        sigterm.recv().await;
    };
    if let Ok(socket) = std::env::var("JOURNEYMAN_SERVICE_SOCKET") {
        return axum::serve(UnixListener::bind(socket)?, service).with_graceful_shutdown(terminated).await;
    }
    let address = std::env::var("JOURNEYMAN_SERVICE_URL").unwrap_or_else(|_| "http://127.0.0.1:8080".to_owned());
    let address = address.trim_start_matches("http://").trim_end_matches('/').to_owned();
    axum::serve(TcpListener::bind(address).await?, service).with_graceful_shutdown(terminated).await
}
