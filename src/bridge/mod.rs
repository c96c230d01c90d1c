//! Has the work of one queue done by another: a request of an AMQP queue becomes a task, a task becomes a request.
//!
//! A bridge is a worker whose handlers run nothing themselves. Lease, reclaim, drain, journal and report are the worker's
//! own; a handler here only hands on, waits, and brings back what came of it. What it hands on is named after what it was
//! given, so that work which is given again finds what was begun, and begins nothing anew.

pub mod requests_to_tasks;
pub mod tasks_to_requests;

use serde_json::Value;

use crate::client::RpcRequest;
use crate::domain::backoff::{Backoff, Policy};
use crate::domain::jitter::Jitter;
use crate::handler::Request;

/// What the other side is given.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BridgeForm {
    /// The whole request as a [`Request`] document: what a program is given of a request, it is given of the task too.
    Whole,
    /// What the body of the request says in JSON, as the payload of the task; and the other way round.
    Body,
}

/// What is not as it has to be to become the other.
const NOT_JSON: &str = "the body is not JSON, and JSON is what the payload of a task is";

/// The payload of the task that a request becomes.
fn task_payload(request: &Request, form: BridgeForm) -> Result<Value, &'static str> {
    match form {
        BridgeForm::Whole => serde_json::to_value(request).map_err(|_| NOT_JSON),
        BridgeForm::Body => match &request.json {
            Some(json) => Ok(json.clone()),
            // What is too long to be read for everybody is read here.
            None => serde_json::from_slice(&request.body_bytes()).map_err(|_| NOT_JSON),
        },
    }
}

/// The request that a task becomes.
fn request_from_payload(payload: Value, form: BridgeForm) -> Result<Request, String> {
    match form {
        BridgeForm::Whole => serde_json::from_value(payload).map_err(|error| {
            // serde_json may quote the payload; only the place is told.
            format!("payload: it is no request (line {}, column {})", error.line(), error.column())
        }),
        BridgeForm::Body => Ok(Request { body: Some(payload.to_string()), ..Request::default() }),
    }
}

/// What is sent for a request; where to, under which name and how long it may take is said by who sends it.
fn rpc_request(request: Request) -> RpcRequest {
    let body = request_body(&request);
    let Request { path, headers, content_type, content_encoding, .. } = request;
    RpcRequest { path, body, headers, content_type, content_encoding, ..RpcRequest::default() }
}

/// What is sent as the body: `body` or `bodyBase64`, or `json` where there is neither.
fn request_body(request: &Request) -> Vec<u8> {
    match &request.json {
        Some(json) if request.body.is_none() && request.body_base64.is_none() => json.to_string().into_bytes(),
        Some(_) | None => request.body_bytes(),
    }
}

/// A row of waits, spread so that what was begun together does not ask together.
struct RetryTimer {
    backoff: Backoff,
    jitter: Jitter,
    policy: Policy,
}

impl RetryTimer {
    fn new(policy: Policy) -> Self {
        let (seed, _) = uuid::Uuid::new_v4().as_u64_pair();
        Self { backoff: Backoff::NEW, jitter: Jitter::seeded(seed), policy }
    }

    async fn wait(&mut self, asked: Option<std::time::Duration>) {
        tokio::time::sleep(self.backoff.wait(self.policy, asked, &mut self.jitter)).await;
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_request_comes_through_both_bridges_as_it_was() {
        for bytes in [&b"{\"x\":1}"[..], b"text", b"", &[0xff, 0]] {
            let mut one = Request {
                path: Some("/echo".to_owned()),
                content_type: Some("text/plain".to_owned()),
                content_encoding: Some("gzip".to_owned()),
                ..Request::default()
            };
            one.set_body(bytes, 64);
            let other =
                request_from_payload(task_payload(&one, BridgeForm::Whole).unwrap(), BridgeForm::Whole).unwrap();
            assert_eq!(&other, &one);
            let sent = rpc_request(other);
            assert_eq!((sent.path, sent.body), (one.path, bytes.to_vec()));
            assert_eq!((sent.content_type, sent.content_encoding), (one.content_type, one.content_encoding));
        }
    }

    #[test]
    fn a_body_becomes_a_payload_and_a_payload_a_body() {
        let mut one = Request::default();
        one.set_body(b"{\"command\":[[\"true\"]]}", 4);
        assert!(one.json.is_none(), "it is longer than what is read for everybody");
        let made = task_payload(&one, BridgeForm::Body).unwrap();
        assert_eq!(made, json!({"command": [["true"]]}));
        assert_eq!(request_body(&request_from_payload(made, BridgeForm::Body).unwrap()), one.body_bytes());
        one.set_body(b"no json", 64);
        assert_eq!(task_payload(&one, BridgeForm::Body), Err(NOT_JSON));
    }

    #[test]
    fn a_task_may_write_the_body_as_json_and_is_told_what_is_no_request() {
        let made = request_from_payload(json!({"path": "/echo", "json": {"x": 1}}), BridgeForm::Whole).unwrap();
        assert_eq!((made.path.as_deref(), request_body(&made)), (Some("/echo"), b"{\"x\":1}".to_vec()));
        let error = request_from_payload(json!({"path": {"secret": 1}}), BridgeForm::Whole).unwrap_err();
        assert!(error.contains("no request") && !error.contains("secret"), "{error}");
    }
}
