//! The message queues of the Azure dialect: signed poll and delete URLs, and the XML protocol behind them.
//!
//! The URLs lead back to this queue.

use std::fmt::Write as _;
use std::time::Duration;

use axum::extract::{Path, RawQuery, State};
use axum::http::{Method, StatusCode};
use axum::response::{IntoResponse, Response};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde::Deserialize;
use serde_json::{Value, json};

use super::call::{App, Call, QueueState, ReplyResult};
use super::field_types::query_param;
use super::queue_error::QueueError;
use super::store::messages::{DeleteResult, ReceivedMessage};
use super::task_calls::ok;
use super::task_state::Priority;
use journeyman_domain::limits::{POLL_MESSAGES_MAX, QUEUE_POLL_URL_TTL, QUEUE_VISIBILITY_TIMEOUT_MAX};

/// pollTaskUrls: the signed URLs of a task queue, highest priority first.
pub(crate) async fn poll_task_urls(app: App, call: Call) -> ReplyResult {
    let queue = call.task_queue();
    call.caller.require_scope(format!("queue:poll-task-urls:{queue}"))?;
    let expires = app.now().plus(QUEUE_POLL_URL_TTL);
    let urls: Vec<Value> = Priority::ALL
        .into_iter()
        .rev()
        .map(|priority| {
            let name = format!("{queue}/{}", priority.rank());
            let signed = app.keyring.sign_url(&name, expires);
            let url = format!("{}/azure/{name}/messages", call.root_url);
            let hidden = app.config.visibility_timeout.as_secs();
            json!({
                "signedPollUrl": format!("{url}?visibilitytimeout={hidden}&{signed}"),
                "signedDeleteUrl": format!("{url}/{{{{messageId}}}}?popreceipt={{{{popReceipt}}}}&{signed}"),
            })
        })
        .collect();
    ok(json!({"queues": urls, "expires": expires.iso()}).to_string())
}

pub(crate) struct StorageError(StatusCode, &'static str);

impl IntoResponse for StorageError {
    fn into_response(self) -> Response {
        let Self(status, code) = self;
        let xml = format!(
            "<?xml version=\"1.0\" encoding=\"UTF-8\" standalone=\"yes\"?><Error><Code>{code}</Code>\
             <Message>{code}</Message></Error>"
        );
        (status, XML, [("x-ms-error-code", code)], xml).into_response()
    }
}

impl From<QueueError> for StorageError {
    fn from(_: QueueError) -> Self {
        Self(StatusCode::INTERNAL_SERVER_ERROR, "InternalError")
    }
}

const XML: [(&str, &str); 1] = [("content-type", "application/xml")];

/// The path of one of a task queue's message queues.
#[derive(Deserialize)]
pub(crate) struct QueuePath {
    provisioner: String,
    worker_type: String,
    rank: u8,
    #[serde(default)]
    message: String,
}

impl QueuePath {
    /// Checks the signature first, then the method. Returns the task queue.
    fn authorize(&self, app: &QueueState, query: &str, is_allowed: bool) -> Result<String, StorageError> {
        let queue = format!("{}/{}", self.provisioner, self.worker_type);
        if !app.keyring.is_url_valid(&format!("{queue}/{}", self.rank), query, app.now()) {
            return Err(StorageError(StatusCode::FORBIDDEN, "AuthenticationFailed"));
        }
        if !is_allowed {
            return Err(StorageError(StatusCode::FORBIDDEN, "AuthorizationPermissionMismatch"));
        }
        Ok(queue)
    }
}

/// A query parameter from 1 to `max`.
fn query_number(query: &str, name: &str, default: u64, max: u64) -> Result<u64, StorageError> {
    let Some(value) = query_param(query, name) else { return Ok(default) };
    let number = value.parse().ok().filter(|number| (1..=max).contains(number));
    number.ok_or(StorageError(StatusCode::BAD_REQUEST, "OutOfRangeQueryParameterValue"))
}

/// Receives messages.
pub(crate) async fn messages(
    State(app): State<App>,
    method: Method,
    Path(path): Path<QueuePath>,
    RawQuery(query): RawQuery,
) -> Result<Response, StorageError> {
    let query = query.unwrap_or_default();
    let queue = path.authorize(&app, &query, method == Method::GET)?;
    let limit = query_number(&query, "numofmessages", 1, POLL_MESSAGES_MAX as u64)?;
    let limit = u8::try_from(limit).unwrap_or(1);
    let hidden = query_number(&query, "visibilitytimeout", 30, QUEUE_VISIBILITY_TIMEOUT_MAX.as_secs())?;
    let hidden = Duration::from_secs(hidden);
    let received = app.store.execute(move |tx| tx.receive_messages(&queue, path.rank, limit, hidden));
    Ok((XML, messages_xml(&received.await?)).into_response())
}

fn messages_xml(received: &[ReceivedMessage]) -> String {
    let mut xml = String::from(r#"<?xml version="1.0" encoding="UTF-8" standalone="yes"?><QueueMessagesList"#);
    if received.is_empty() {
        xml.push_str("/>");
        return xml;
    }
    xml.push('>');
    for message in received {
        let text = format!(r#"{{"taskId":"{}","runId":{}}}"#, message.task_id, message.run);
        // Writing to a String cannot fail.
        write!(
            xml,
            "<QueueMessage><MessageId>{}</MessageId><InsertionTime>{}</InsertionTime>\
             <ExpirationTime>{}</ExpirationTime><PopReceipt>{}</PopReceipt><TimeNextVisible>{}</TimeNextVisible>\
             <DequeueCount>{}</DequeueCount><MessageText>{}</MessageText></QueueMessage>",
            message.name(),
            message.inserted.http_date(),
            message.expires.http_date(),
            message.receipt,
            message.visible.http_date(),
            message.dequeued,
            STANDARD.encode(text),
        )
        .unwrap_or_default();
    }
    xml.push_str("</QueueMessagesList>");
    xml
}

/// Deletes a message.
pub(crate) async fn message(
    State(app): State<App>,
    method: Method,
    Path(path): Path<QueuePath>,
    RawQuery(query): RawQuery,
) -> Result<StatusCode, StorageError> {
    let query = query.unwrap_or_default();
    let queue = path.authorize(&app, &query, method == Method::DELETE)?;
    let receipt = query_param(&query, "popreceipt").unwrap_or_default();
    let deleted = app.store.execute(move |tx| tx.delete_message(&queue, &path.message, &receipt));
    match deleted.await? {
        DeleteResult::Deleted => Ok(StatusCode::NO_CONTENT),
        DeleteResult::NotFound => Err(StorageError(StatusCode::NOT_FOUND, "MessageNotFound")),
        DeleteResult::ReceiptMismatch => Err(StorageError(StatusCode::BAD_REQUEST, "PopReceiptMismatch")),
    }
}
