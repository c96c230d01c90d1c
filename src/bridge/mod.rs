//! Has the work of one queue done by another: a request of an AMQP queue becomes a task, a task becomes a request.
//!
//! A bridge is a worker whose handlers run nothing themselves. Lease, reclaim, drain, journal and report are the worker's
//! own; a handler here only hands on, waits, and brings back what came of it. What it hands on is named after what it was
//! given, so that work which is given again finds what was begun, and begins nothing anew.

pub mod requests;
pub mod tasks;

use serde_json::Value;

use crate::client::Call;
use crate::domain::backoff::{Backoff, Policy};
use crate::domain::jitter::Jitter;
use crate::handler::Request;

/// What the other side is given.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Form {
    /// The whole request as a [`Request`] document: what a program is given of a request, it is given of the task too.
    Whole,
    /// What the body of the request says in JSON, as the payload of the task; and the other way round.
    Body,
}

/// What is not as it has to be to become the other.
const NO_JSON: &str = "the body is not JSON, and JSON is what the payload of a task is";

/// The payload of the task that a request becomes.
fn payload(request: &Request, form: Form) -> Result<Value, &'static str> {
    match form {
        Form::Whole => serde_json::to_value(request).map_err(|_| NO_JSON),
        Form::Body => match &request.json {
            Some(json) => Ok(json.clone()),
            // What is too long to be read for everybody is read here.
            None => serde_json::from_slice(&request.bytes()).map_err(|_| NO_JSON),
        },
    }
}

/// The request that a task becomes.
fn request(payload: Value, form: Form) -> Result<Request, String> {
    match form {
        Form::Whole => serde_json::from_value(payload).map_err(|error| {
            // serde_json may quote the payload; only the place is told.
            format!("payload: it is no request (line {}, column {})", error.line(), error.column())
        }),
        Form::Body => Ok(Request { body: Some(payload.to_string()), ..Request::default() }),
    }
}

/// What is sent for a request; where to, under which name and how long it may take is said by who sends it.
fn call(request: Request) -> Call {
    let body = body(&request);
    let Request { path, headers, content_type, content_encoding, .. } = request;
    Call { path, body, headers, content_type, content_encoding, ..Call::default() }
}

/// What is sent as the body: `body` or `bodyBase64`, or `json` where there is neither.
fn body(request: &Request) -> Vec<u8> {
    match &request.json {
        Some(json) if request.body.is_none() && request.body_base64.is_none() => json.to_string().into_bytes(),
        Some(_) | None => request.bytes(),
    }
}

/// A row of waits, spread so that what was begun together does not ask together.
struct Waits {
    backoff: Backoff,
    jitter: Jitter,
    policy: Policy,
}

impl Waits {
    fn new(policy: Policy) -> Self {
        let (seed, _) = uuid::Uuid::new_v4().as_u64_pair();
        Self { backoff: Backoff::NEW, jitter: Jitter::seeded(seed), policy }
    }

    async fn next(&mut self, asked: Option<std::time::Duration>) {
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
            one.put(bytes, 64);
            let other = request(payload(&one, Form::Whole).unwrap(), Form::Whole).unwrap();
            assert_eq!(&other, &one);
            let sent = call(other);
            assert_eq!((sent.path, sent.body), (one.path, bytes.to_vec()));
            assert_eq!((sent.content_type, sent.content_encoding), (one.content_type, one.content_encoding));
        }
    }

    #[test]
    fn a_body_becomes_a_payload_and_a_payload_a_body() {
        let mut one = Request::default();
        one.put(b"{\"command\":[[\"true\"]]}", 4);
        assert!(one.json.is_none(), "it is longer than what is read for everybody");
        let made = payload(&one, Form::Body).unwrap();
        assert_eq!(made, json!({"command": [["true"]]}));
        assert_eq!(body(&request(made, Form::Body).unwrap()), one.bytes());
        one.put(b"no json", 64);
        assert_eq!(payload(&one, Form::Body), Err(NO_JSON));
    }

    #[test]
    fn a_task_may_write_the_body_as_json_and_is_told_what_is_no_request() {
        let made = request(json!({"path": "/echo", "json": {"x": 1}}), Form::Whole).unwrap();
        assert_eq!((made.path.as_deref(), body(&made)), (Some("/echo"), b"{\"x\":1}".to_vec()));
        let error = request(json!({"path": {"secret": 1}}), Form::Whole).unwrap_err();
        assert!(error.contains("no request") && !error.contains("secret"), "{error}");
    }
}
