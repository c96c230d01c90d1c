//! Connects two queues: a request of an AMQP queue becomes a task, and a task becomes a request.
//!
//! A bridge is a worker whose handlers forward what they get and wait for the result. Leases, drain, journal and reports are those of
//! the worker. The id of what a handler creates derives from what it was given, so that a redelivered request, or a task that is run
//! again, finds what already exists.

pub mod config;
pub mod requests_to_tasks;
pub mod tasks_to_requests;

use serde_json::Value;

use crate::client::RpcRequest;
use journeyman_worker::handler::Request;

/// Reads the payload of a task as a request.
fn request_from_payload(payload: Value) -> Result<Request, String> {
    // serde_json may quote the payload, so only the position is reported.
    serde_json::from_value(payload)
        .map_err(|error| format!("payload: not a request (line {}, column {})", error.line(), error.column()))
}

/// The message for a request, without address, id and timeouts.
fn rpc_request(request: Request) -> RpcRequest {
    let Request { path, body, headers, content_type, content_encoding, .. } = request;
    RpcRequest { path, body: body.into(), headers, content_type, content_encoding, ..RpcRequest::default() }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_request_passes_both_bridges_unchanged() {
        for bytes in [&b"{\"x\":1}"[..], b"text", b"", &[0xff, 0]] {
            let request = Request {
                body: bytes::Bytes::from_static(bytes),
                path: Some("/echo".to_owned()),
                content_type: Some("text/plain".to_owned()),
                content_encoding: Some("gzip".to_owned()),
                ..Request::default()
            };
            let copy = request_from_payload(request.clone().into_value()).unwrap();
            assert_eq!(&copy, &request);
            let sent = rpc_request(copy);
            assert_eq!((sent.path, sent.body), (request.path, bytes.to_vec()));
            assert_eq!((sent.content_type, sent.content_encoding), (request.content_type, request.content_encoding));
        }
    }

    #[test]
    fn a_task_may_give_the_body_as_json_and_an_invalid_request_is_reported() {
        let converted = request_from_payload(json!({"path": "/echo", "json": {"x": 1}})).unwrap();
        assert_eq!((converted.path.as_deref(), &*converted.body), (Some("/echo"), &b"{\"x\":1}"[..]));
        let error = request_from_payload(json!({"path": {"secret": 1}})).unwrap_err();
        assert!(error.contains("not a request") && !error.contains("secret"), "{error}");
    }
}
