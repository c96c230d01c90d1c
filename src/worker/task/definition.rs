//! A task's definition, which a request has only once it is asked for.

use std::fmt;
use std::sync::{Arc, OnceLock};

use serde_json::Value;

use super::request::{IdempotencyKey, Request, RequestMessage};

/// The definition of a task.
#[derive(Clone, Default)]
pub struct Definition {
    json: OnceLock<Value>,
    message: Option<Arc<dyn RequestMessage>>,
}

impl Definition {
    /// The definition of a request. It is written when it is first read.
    pub fn of_request(message: Arc<dyn RequestMessage>) -> Self {
        Self { json: OnceLock::new(), message: Some(message) }
    }

    /// The whole definition.
    pub fn json(&self) -> &Value {
        self.json.get_or_init(|| self.message.as_ref().map_or(Value::Null, |message| message.definition()))
    }

    /// The payload; null without one.
    pub fn payload(&self) -> &Value {
        self.json().get("payload").unwrap_or(&Value::Null)
    }

    /// The request, if it is the payload.
    pub fn request(&self) -> Option<Request> {
        let message = self.message.as_ref()?;
        Some(Request { idempotency_key: IdempotencyKey::of(message), ..message.request()? })
    }

    /// The name in the metadata, which a request does not have.
    pub(crate) fn name(&self) -> Option<&str> {
        let json = self.json.get().filter(|_| self.message.is_none())?;
        json.pointer("/metadata/name")?.as_str()
    }

    /// The trace of the task's creator.
    pub(crate) fn traceparent(&self) -> Option<String> {
        match &self.message {
            Some(message) => message.traceparent(),
            None => self.json().pointer("/extra/traceparent")?.as_str().map(str::to_owned),
        }
    }
}

impl From<Value> for Definition {
    fn from(json: Value) -> Self {
        Self { json: json.into(), message: None }
    }
}

/// A payload may contain secrets.
impl fmt::Debug for Definition {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str("Definition")
    }
}
