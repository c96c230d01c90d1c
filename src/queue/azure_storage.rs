//! The message queues of the Azure dialect: signed poll and delete URLs, and the XML protocol behind them.
//!
//! The URLs lead back to this queue. They are signed by the storage service's scheme with the queue's own secret.

use std::fmt::Write as _;
use std::time::Duration;

use axum::body::Body;
use axum::http::{HeaderName, HeaderValue, Response, StatusCode, header};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};

use super::QueueState;
use super::auth::constant_time_eq;
use super::clock::UnixMillis;
use super::route::query_param;
use super::scopes::ScopeExpression;
use super::server::ConnectionPermit;
use super::store::StoreError;
use super::store::messages::{DeleteResult, ReceivedMessage};
use super::store::tx::Tx;
use super::task_calls::{CallInput, CallReply, ReplyResult};
use super::task_state::Priority;
use crate::limits::{POLL_MESSAGES_MAX, QUEUE_CLOCK_DRIFT_MAX, QUEUE_VISIBILITY_TIMEOUT_MAX};

/// The version in the signature scheme of Azure Queue Storage.
const SIGNATURE_VERSION: &str = "2015-04-05";
const PROTOCOLS: &str = "https,http";

/// pollTaskUrls: the signed URLs of a task queue, highest priority first.
pub(crate) async fn poll_task_urls(app: &QueueState, input: CallInput) -> ReplyResult {
    let provisioner = input.route.param("provisionerId").to_owned();
    let worker_type = input.route.param("workerType").to_owned();
    let queue = format!("{provisioner}/{worker_type}");
    input.caller.require(&ScopeExpression::Any(vec![
        ScopeExpression::scope(format!("queue:poll-task-urls:{queue}")),
        ScopeExpression::All(vec![
            ScopeExpression::scope("queue:poll-task-urls"),
            ScopeExpression::scope(format!("assume:worker-type:{queue}")),
        ]),
    ]))?;
    let base = format!("queue-{}-{}", queue_name_part(&provisioner), queue_name_part(&worker_type));
    let name = base.clone();
    app.store.execute(move |tx| tx.enable_messages(&queue, &name)).await?;
    let now = app.now();
    let expires = now.plus(app.poll_url_lifetime);
    let urls: Vec<Value> = Priority::ALL
        .into_iter()
        .map(|priority| {
            let name = format!("{base}-{}", priority.rank());
            let access = SasToken {
                start: now.minus(QUEUE_CLOCK_DRIFT_MAX).iso_seconds(),
                end: expires.iso_seconds(),
                permissions: "p".to_owned(),
            };
            let (url, signed) = (format!("{}/azure/{name}/messages", app.root_url), access.query(app, &name));
            let hidden = app.visibility_timeout.as_secs();
            json!({
                "signedPollUrl": format!("{url}?visibilitytimeout={hidden}&{signed}"),
                "signedDeleteUrl": format!("{url}/{{{{messageId}}}}?popreceipt={{{{popReceipt}}}}&{signed}"),
            })
        })
        .collect();
    Ok(CallReply::ok(json!({"queues": urls, "expires": expires.iso()}).to_string()))
}

/// The service's own encoding of an identifier: 24 characters of base32.
fn queue_name_part(identifier: &str) -> String {
    const ALPHABET: &[u8; 32] = b"abcdefghijklmnopqrstuvwxyz234567";
    let digest = Sha256::digest(identifier.as_bytes());
    let (mut out, mut held, mut bits) = (String::with_capacity(24), 0_u32, 0_u32);
    for byte in &digest[..15] {
        held = (held << 8) | u32::from(*byte);
        bits += 8;
        while bits >= 5 {
            bits -= 5;
            out.push(char::from(ALPHABET[((held >> bits) & 31) as usize]));
        }
    }
    out
}

struct SasToken {
    start: String,
    end: String,
    permissions: String,
}

impl SasToken {
    fn signature(&self, app: &QueueState, queue: &str) -> Vec<u8> {
        let Self { start, end, permissions } = self;
        app.keyring.sign(
            "azure",
            &format!("{permissions}\n{start}\n{end}\n/queue/journeyman/{queue}\n\n\n{PROTOCOLS}\n{SIGNATURE_VERSION}"),
        )
    }

    fn query(&self, app: &QueueState, queue: &str) -> String {
        let encode = urlencoding::encode;
        let signature = STANDARD.encode(self.signature(app, queue));
        format!(
            "sv={SIGNATURE_VERSION}&se={}&sp={}&spr={}&sig={}&st={}",
            encode(&self.end),
            self.permissions,
            encode(PROTOCOLS),
            encode(&signature),
            encode(&self.start)
        )
    }

    /// Parses and verifies a signed URL.
    fn verify(app: &QueueState, queue: &str, query: &str) -> Option<Self> {
        let part = |name: &str| query_param(query, name);
        let access = Self { start: part("st")?, end: part("se")?, permissions: part("sp")? };
        let signed = STANDARD.decode(part("sig")?).ok()?;
        let now = app.now();
        let in_time = UnixMillis::parse(&access.start)? <= now && now < UnixMillis::parse(&access.end)?;
        let known = part("sv")? == SIGNATURE_VERSION && part("spr")? == PROTOCOLS;
        (known && in_time && constant_time_eq(access.signature(app, queue), signed)).then_some(access)
    }
}

enum StorageError {
    AuthenticationFailed,
    PermissionMismatch,
    QueueNotFound,
    MessageNotFound,
    PopReceiptMismatch,
    OutOfRange(OutOfRange),
    InvalidValue,
    /// 400 with an empty body.
    Bare,
    NotSupported,
    Internal,
}

struct OutOfRange {
    name: &'static str,
    value: String,
    max: u64,
}

impl StorageError {
    const fn code(&self) -> &'static str {
        match self {
            Self::AuthenticationFailed => "AuthenticationFailed",
            Self::PermissionMismatch => "AuthorizationPermissionMismatch",
            Self::QueueNotFound => "QueueNotFound",
            Self::MessageNotFound => "MessageNotFound",
            Self::PopReceiptMismatch => "PopReceiptMismatch",
            Self::OutOfRange(_) => "OutOfRangeQueryParameterValue",
            Self::InvalidValue | Self::Bare => "InvalidQueryParameterValue",
            Self::NotSupported => "UnsupportedHttpVerb",
            Self::Internal => "InternalError",
        }
    }

    const fn status(&self) -> StatusCode {
        match self {
            Self::AuthenticationFailed | Self::PermissionMismatch => StatusCode::FORBIDDEN,
            Self::QueueNotFound | Self::MessageNotFound => StatusCode::NOT_FOUND,
            Self::PopReceiptMismatch | Self::OutOfRange(_) | Self::InvalidValue | Self::Bare => StatusCode::BAD_REQUEST,
            Self::NotSupported => StatusCode::METHOD_NOT_ALLOWED,
            Self::Internal => StatusCode::INTERNAL_SERVER_ERROR,
        }
    }

    const fn message(&self) -> &'static str {
        match self {
            Self::AuthenticationFailed => {
                "Server failed to authenticate the request.Make sure the value of the Authorization header is formed \
                 correctly including the signature."
            }
            Self::PermissionMismatch => {
                "This request is not authorized to perform this operation using this permission."
            }
            Self::QueueNotFound => "The specified queue does not exist.",
            Self::MessageNotFound => "The specified message does not exist.",
            Self::PopReceiptMismatch => {
                "The specified pop receipt did not match the pop receipt for a dequeued message."
            }
            Self::OutOfRange(_) => {
                "One of the query parameters specified in the request URI is outside the permissible range."
            }
            Self::InvalidValue | Self::Bare => {
                "Value for one of the query parameters specified in the request URI is invalid."
            }
            Self::NotSupported => "The resource doesn't support the specified HTTP verb.",
            Self::Internal => "The server encountered an internal error. Please retry the request.",
        }
    }
}

pub(crate) async fn handle(
    app: &QueueState,
    permit: &ConnectionPermit,
    method: &str,
    path: &str,
    query: &str,
) -> Response<Body> {
    let request = uuid::Uuid::new_v4().to_string();
    let answered = match path.split('/').collect::<Vec<_>>().as_slice() {
        [queue, "messages"] => handle_messages(app, permit, method, queue, query).await,
        [queue, "messages", name] => handle_message(app, permit, method, queue, name, query).await,
        _ => Err(StorageError::QueueNotFound),
    };
    let mut answer = match answered {
        Ok(Some(xml)) => xml_response(StatusCode::OK, xml),
        Ok(None) => empty_response(StatusCode::NO_CONTENT),
        Err(StorageError::Bare) => return empty_response(StatusCode::BAD_REQUEST),
        Err(refusal) => error_response(&refusal, &request, app.now()),
    };
    let headers = answer.headers_mut();
    if let Ok(value) = HeaderValue::from_str(&request) {
        headers.insert(HeaderName::from_static("x-ms-request-id"), value);
    }
    headers.insert(HeaderName::from_static("x-ms-version"), HeaderValue::from_static("2025-11-05"));
    answer
}

fn empty_response(status: StatusCode) -> Response<Body> {
    let mut answer = Response::new(Body::empty());
    *answer.status_mut() = status;
    answer
}

fn xml_response(status: StatusCode, xml: String) -> Response<Body> {
    let mut answer = Response::new(Body::from(xml));
    *answer.status_mut() = status;
    let kind = HeaderValue::from_static("application/xml");
    answer.headers_mut().insert(header::CONTENT_TYPE, kind);
    answer
}

fn error_response(refusal: &StorageError, request: &str, now: UnixMillis) -> Response<Body> {
    let mut xml = format!(
        "<?xml version=\"1.0\" encoding=\"UTF-8\" standalone=\"yes\"?>\n<Error>\n  <Code>{}</Code>\n  \
         <Message>{}\nRequestId:{request}\nTime:{}</Message>\n",
        refusal.code(),
        refusal.message(),
        now.iso(),
    );
    if let StorageError::OutOfRange(OutOfRange { name, value, max }) = refusal {
        // Writing to a String cannot fail.
        write!(
            xml,
            "  <QueryParameterName>{name}</QueryParameterName>\n  \
             <QueryParameterValue>{value}</QueryParameterValue>\n  <MinimumAllowed>1</MinimumAllowed>\n  \
             <MaximumAllowed>{max}</MaximumAllowed>\n"
        )
        .unwrap_or_default();
    }
    xml.push_str("</Error>");
    let mut answer = xml_response(refusal.status(), xml);
    let code = HeaderValue::from_static(refusal.code());
    answer.headers_mut().insert(HeaderName::from_static("x-ms-error-code"), code);
    answer
}

struct SignedQueue {
    base: String,
    rank: u8,
}

fn authorize(
    app: &QueueState,
    permit: &ConnectionPermit,
    name: &str,
    query: &str,
) -> Result<SignedQueue, StorageError> {
    let access = SasToken::verify(app, name, query).ok_or(StorageError::AuthenticationFailed)?;
    permit.mark_authenticated();
    if access.permissions != "p" || query_param(query, "peekonly").is_some() {
        return Err(StorageError::PermissionMismatch);
    }
    let (base, rank) = name.rsplit_once('-').ok_or(StorageError::QueueNotFound)?;
    let rank = rank.parse().map_err(|_| StorageError::QueueNotFound)?;
    Ok(SignedQueue { base: base.to_owned(), rank })
}

/// One store job for the lookup and the action, since a worker polls seven queues in a row.
async fn with_queue<T, F>(app: &QueueState, target: SignedQueue, act: F) -> Result<T, StorageError>
where
    T: Send + 'static,
    F: Send + 'static + FnOnce(&mut Tx<'_>, &str, u8) -> Result<T, StoreError>,
{
    let SignedQueue { base, rank } = target;
    let found = app.store.execute(move |tx| match tx.task_queue_by_base(&base)? {
        Some(queue) => act(tx, &queue, rank).map(Some),
        None => Ok(None),
    });
    found.await.map_err(|_| StorageError::Internal)?.ok_or(StorageError::QueueNotFound)
}

/// A query parameter from 1 to `max`.
fn query_number(query: &str, name: &'static str, default: u64, max: u64) -> Result<u64, StorageError> {
    let Some(value) = query_param(query, name) else { return Ok(default) };
    let number: u64 = value.parse().map_err(|_| StorageError::InvalidValue)?;
    match number {
        0 if name == "numofmessages" => Err(StorageError::Bare),
        1.. if number <= max => Ok(number),
        _ => Err(StorageError::OutOfRange(OutOfRange { name, value: number.to_string(), max })),
    }
}

async fn handle_messages(
    app: &QueueState,
    permit: &ConnectionPermit,
    method: &str,
    name: &str,
    query: &str,
) -> Result<Option<String>, StorageError> {
    let target = authorize(app, permit, name, query)?;
    match method {
        "GET" => {}
        // A signed URL allows only receive and delete.
        "POST" | "PUT" | "DELETE" => return Err(StorageError::PermissionMismatch),
        _ => return Err(StorageError::NotSupported),
    }
    let limit = query_number(query, "numofmessages", 1, POLL_MESSAGES_MAX as u64)?;
    let limit = u8::try_from(limit).unwrap_or(1);
    let hidden = query_number(query, "visibilitytimeout", 30, QUEUE_VISIBILITY_TIMEOUT_MAX.as_secs())?;
    let hidden = Duration::from_secs(hidden);
    let received =
        with_queue(app, target, move |tx, queue, rank| tx.receive_messages(queue, rank, limit, hidden)).await?;
    Ok(Some(messages_xml(&received)))
}

fn messages_xml(received: &[ReceivedMessage]) -> String {
    let mut xml = String::from(r#"<?xml version="1.0" encoding="UTF-8" standalone="yes"?><QueueMessagesList"#);
    if received.is_empty() {
        xml.push_str("/>");
        return xml;
    }
    xml.push('>');
    for message in received {
        let text = format!(r#"{{"taskId":"{}","runId":{},"hintId":"{}"}}"#, message.task_id, message.run, message.hint);
        // Writing to a String cannot fail.
        write!(
            xml,
            "<QueueMessage><MessageId>{}</MessageId><InsertionTime>{}</InsertionTime>\
             <ExpirationTime>{}</ExpirationTime><PopReceipt>{}</PopReceipt><TimeNextVisible>{}</TimeNextVisible>\
             <DequeueCount>{}</DequeueCount><MessageText>{}</MessageText></QueueMessage>",
            message.name,
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

async fn handle_message(
    app: &QueueState,
    permit: &ConnectionPermit,
    method: &str,
    queue: &str,
    name: &str,
    query: &str,
) -> Result<Option<String>, StorageError> {
    let target = authorize(app, permit, queue, query)?;
    match method {
        "DELETE" => {}
        "PUT" => return Err(StorageError::PermissionMismatch),
        _ => return Err(StorageError::NotSupported),
    }
    let name = urlencoding::decode(name).map_or_else(|_| name.to_owned(), Into::into);
    let receipt = query_param(query, "popreceipt").unwrap_or_default();
    let deleted =
        with_queue(app, target, move |tx, queue, rank| tx.delete_message(queue, rank, &name, &receipt)).await?;
    match deleted {
        DeleteResult::Deleted => Ok(None),
        DeleteResult::NotFound => Err(StorageError::MessageNotFound),
        DeleteResult::ReceiptMismatch => Err(StorageError::PopReceiptMismatch),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_queues_name_is_the_services_own() {
        assert_eq!(queue_name_part("lp"), "bj5kzlu3ip4tismbqvlg2kug");
        assert_eq!(queue_name_part("lw"), "zpjh5g3wy6wyllr7g3f6pdsu");
    }
}
