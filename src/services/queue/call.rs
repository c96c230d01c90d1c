//! What every call shares: authentication by the head alone, a bounded body, parameters.

use std::future::ready;
use std::sync::Arc;

use axum::body::{Body, Bytes, HttpBody as _, to_bytes};
use axum::extract::Request;
use axum::http::header::{CONTENT_TYPE, HOST};
use axum::http::uri::Authority;
use axum::response::Response;
use futures_util::StreamExt as _;
use parking_lot::Mutex;
use serde::de::DeserializeOwned;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

use super::auth::{AuthenticatedRequest, Caller, Keyring, check_payload_hash};
use super::clock::UnixMillis;
use super::config::Config;
use super::field_types::{
    body_error, header_str, invalid_argument, is_identifier, is_printable, is_queue_id, query_param,
};
use super::queue_error::{Params, QueueError, QueueErrorCode};
use super::store::activity::Activity;
use super::store::tx::{PageRequest, Tx};
use super::store::{Store, StoreError};
use journeyman_domain::limits::{
    QUEUE_BODY_BYTES_MAX, QUEUE_BODY_TIMEOUT, QUEUE_DISCARD_TIMEOUT, QUEUE_PAGE_MAX, QUEUE_SMALL_BODY_BYTES_MAX,
    QUEUE_UNAUTHENTICATED_BODY_BYTES_MAX,
};
use journeyman_worker::task::formats::is_slugid;

pub(crate) type App = Arc<QueueState>;
pub(crate) type ReplyResult = Result<Response, QueueError>;

pub(super) const CREATE_TASK: &str = "createTask";

pub(crate) struct QueueState {
    pub(crate) store: Store,
    pub(crate) keyring: Keyring,
    /// For a request without a `Host` header. Without a trailing slash.
    pub(crate) root_url: String,
    pub(crate) config: Arc<Config>,
    pub(crate) long_poll_permits: Arc<Semaphore>,
    /// Bytes of request bodies in memory together.
    pub(crate) body_budget: Arc<Semaphore>,
    pub(crate) stop: CancellationToken,
    pub(crate) activity: Arc<Mutex<Activity>>,
}

impl QueueState {
    pub(crate) fn now(&self) -> UnixMillis {
        self.config.clock.now()
    }

    /// Reads beside the jobs of the store, so that a long list holds none of them up.
    pub(super) async fn read<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Tx<'_>) -> Result<T, StoreError> + Send + 'static,
    ) -> Result<T, QueueError> {
        let config = Arc::clone(&self.config);
        self.store.read(move |conn| work(&Tx::new(conn, &config))).await
    }
}

fn validate(params: &Params) -> Result<(), QueueError> {
    let is_invalid = |(name, value): &(&String, &String)| match name.as_str() {
        "taskId" | "taskGroupId" => !is_slugid(value),
        "runId" => !(value.bytes().all(|byte| byte.is_ascii_digit()) && value.parse::<u32>().is_ok()),
        "taskQueueId" => !is_queue_id(value),
        "provisionerId" | "workerType" => !is_identifier(value),
        // A reader that stores artifacts by their names would leave its folder.
        "name" => !is_printable(value) || value.split('/').any(|segment| segment == ".."),
        _ => !is_printable(value),
    };
    match params.iter().find(is_invalid) {
        Some((name, _)) => Err(invalid_argument(format!("invalid URL parameter: {name}"))),
        None => Ok(()),
    }
}

/// An authenticated call with valid parameters.
pub(crate) struct Call {
    pub(crate) caller: Caller,
    pub(crate) body: Bytes,
    /// This queue as the caller addressed it, without a trailing slash: `listen` may be `0.0.0.0`.
    pub(crate) root_url: String,
    params: Params,
    query: String,
    /// Held as long as the body.
    _share: BodyShare,
}

impl Call {
    pub(super) async fn read(
        app: &QueueState,
        name: &str,
        params: Params,
        request: Request,
    ) -> Result<Self, QueueError> {
        let (parts, body) = request.into_parts();
        let request = app.keyring.authenticate(&parts, app.now());
        let accepted = request.and_then(|request| Ok((reserve_body(app, name, &request.caller, &body)?, request)));
        let (share, AuthenticatedRequest { caller, payload_hash }) = match accepted {
            Ok(accepted) => accepted,
            Err(error) => {
                // So that the client reads the response instead of a connection reset.
                timeout(QUEUE_DISCARD_TIMEOUT, body.into_data_stream().for_each(|_| ready(()))).await.ok();
                return Err(error);
            }
        };
        let body = match timeout(QUEUE_BODY_TIMEOUT, to_bytes(body, share.bytes_max)).await {
            Ok(Ok(body)) => body,
            Ok(Err(_)) => return Err(malformed("request body ended early, or is too large")),
            Err(_) => return Err(malformed("request body was not received in time")),
        };
        let media_type = header_str(&parts, CONTENT_TYPE).unwrap_or_default().split(';').next().unwrap_or_default();
        let is_json = media_type.trim().eq_ignore_ascii_case("application/json");
        let is_object = is_json && body.trim_ascii_start().starts_with(b"{");
        if !body.is_empty() && !is_object {
            return Err(malformed("expected a JSON object with the content type application/json"));
        }
        if let Some(hash) = payload_hash {
            check_payload_hash(media_type.trim(), &body, hash)?;
        }
        validate(&params)?;
        let query = parts.uri.query().unwrap_or_default().to_owned();
        let host = header_str(&parts, HOST).filter(|host| host.parse::<Authority>().is_ok());
        let root_url = host.map_or_else(|| app.root_url.clone(), |host| format!("http://{host}"));
        Ok(Self { caller, body, root_url, params, query, _share: share })
    }

    /// An empty body is an empty object.
    pub(crate) fn fields<T: DeserializeOwned>(&self) -> Result<T, QueueError> {
        let body = if self.body.is_empty() { &b"{}"[..] } else { &self.body };
        serde_json::from_slice(body).map_err(|error| body_error(&error))
    }

    /// Empty if the call has no such parameter.
    pub(crate) fn param(&self, name: &str) -> &str {
        self.params.get(name).map_or("", String::as_str)
    }

    pub(crate) fn task_id(&self) -> String {
        self.param("taskId").to_owned()
    }

    pub(crate) fn run(&self) -> u32 {
        // Valid wherever a route has it.
        self.named_run().unwrap_or(u32::MAX)
    }

    /// `None` in the calls that are about the latest run.
    pub(crate) fn named_run(&self) -> Option<u32> {
        self.param("runId").parse().ok()
    }

    pub(crate) fn task_queue(&self) -> String {
        match self.param("taskQueueId") {
            "" => format!("{}/{}", self.param("provisionerId"), self.param("workerType")),
            queue => queue.to_owned(),
        }
    }

    pub(crate) fn query(&self, name: &str) -> Option<String> {
        query_param(&self.query, name)
    }

    pub(crate) fn page(&self) -> Result<PageRequest, QueueError> {
        let number = |name: &str, default| match self.query(name) {
            None => Ok(default),
            Some(text) => text.parse().map_err(|_| invalid_argument(format!("{name} {text:?} is not a number"))),
        };
        let limit = number("limit", QUEUE_PAGE_MAX)?.clamp(1, QUEUE_PAGE_MAX);
        Ok(PageRequest { offset: number("continuationToken", 0)?, limit })
    }
}

fn malformed(message: &str) -> QueueError {
    QueueError::new(QueueErrorCode::MalformedPayload, message)
}

struct BodyShare {
    bytes_max: usize,
    _permit: Option<OwnedSemaphorePermit>,
}

/// Reserves memory for the declared length of a body, or for the most that the call may send.
fn reserve_body(app: &QueueState, call: &str, caller: &Caller, body: &Body) -> Result<BodyShare, QueueError> {
    let bytes_max = match call {
        _ if !caller.is_authenticated() => QUEUE_UNAUTHENTICATED_BODY_BYTES_MAX,
        CREATE_TASK => QUEUE_BODY_BYTES_MAX,
        _ => QUEUE_SMALL_BODY_BYTES_MAX,
    };
    let declared = body.size_hint();
    if declared.lower() > u64::from(bytes_max) {
        let message = format!("request body exceeds the limit of {bytes_max} bytes");
        return Err(QueueError::new(QueueErrorCode::InputTooLarge, message));
    }
    let bytes = declared.upper().and_then(|bytes| u32::try_from(bytes).ok()).unwrap_or(bytes_max);
    let busy = "too many request bodies in flight; retry later";
    let busy = |_| QueueError::new(QueueErrorCode::ServiceUnavailable, busy);
    // Bodies of other callers are small; they must not use up the budget of clients.
    let reserve = || Arc::clone(&app.body_budget).try_acquire_many_owned(bytes).map_err(busy);
    let permit = caller.is_authenticated().then(reserve).transpose()?;
    Ok(BodyShare { bytes_max: bytes_max as usize, _permit: permit })
}
