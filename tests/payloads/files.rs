//! A server of files whose answers a test chooses.

use std::sync::Arc;

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::{Request, State};
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse as _, Response};

use parking_lot::Mutex;

/// What it serves, at every path.
#[derive(Default)]
pub(crate) struct Files {
    pub(crate) content: Vec<u8>,
    pub(crate) etag: Option<&'static str>,
    /// Statuses of the next answers, before the content.
    pub(crate) failures: Vec<u16>,
    /// Cuts the next answer after so many bytes.
    pub(crate) cut_at: Option<usize>,
    /// The `Range` of each request.
    pub(crate) ranges: Vec<String>,
}

pub(crate) type Served = Arc<Mutex<Files>>;

pub(crate) fn router(files: &Served) -> Router {
    Router::new().fallback(serve).with_state(Arc::clone(files))
}

async fn serve(State(files): State<Served>, request: Request) -> Response {
    let mut files = files.lock();
    let range = request.headers().get(header::RANGE).map_or("", |range| range.to_str().expect("text")).to_owned();
    files.ranges.push(range.clone());
    if !files.failures.is_empty() {
        return StatusCode::from_u16(files.failures.remove(0)).expect("a status").into_response();
    }
    let start: usize =
        range.strip_prefix("bytes=").map_or(0, |range| range.trim_end_matches('-').parse().expect("a number"));
    let (total, rest) = (files.content.len(), files.content[start..].to_vec());
    let mut headers = HeaderMap::new();
    headers.extend(files.etag.map(|etag| (header::ETAG, etag.parse().expect("a header"))));
    headers.insert(header::CONTENT_LENGTH, rest.len().into());
    let mut status = StatusCode::OK;
    if start > 0 {
        status = StatusCode::PARTIAL_CONTENT;
        let range = format!("bytes {start}-{}/{total}", total - 1);
        headers.insert(header::CONTENT_RANGE, range.parse().expect("a header"));
    }
    let Some(cut_at) = files.cut_at.take() else { return (status, headers, rest).into_response() };
    let chunks = [Ok(Bytes::from(rest[..cut_at].to_vec())), Err(std::io::Error::other("cut"))];
    (status, headers, Body::from_stream(futures_util::stream::iter(chunks))).into_response()
}
