//! Maps an error response to what the caller must do next, with one sentence for the log.
//!
//! Only the useful line of a body is out: Taskcluster appends request details, which repeat the request body, and
//! Azure appends ids and, for invalid signatures, the signed string.

use std::fmt::Write as _;
use std::time::Duration;

use crate::source::CallError;
use journeyman_domain::limits::REFUSAL_TEXT_BYTES_MAX;
use journeyman_domain::refusal::Refusal;
use journeyman_platform::http::client::{root_cause, tls_hint};

pub(super) struct ErrorResponse {
    pub(super) status: u16,
    pub(super) retry_after: Option<Duration>,
    pub(super) content_type: String,
    pub(super) body: Vec<u8>,
}

#[derive(serde::Deserialize)]
struct ErrorBody {
    code: Option<String>,
    message: Option<String>,
    error: Option<String>,
}

pub(super) fn transport_error(operation: &str, error: reqwest::Error) -> CallError {
    let error = error.without_url();
    let what = if error.is_timeout() {
        format!("{operation}: timed out")
    } else if error.is_connect() {
        format!("{operation}: cannot connect")
    } else {
        format!("{operation}: the connection failed")
    };
    let cause = root_cause(&error);
    CallError::retry(format!("{what}: {}{}", sanitize(&cause), tls_hint(&cause)))
}

pub(super) fn classify_service_error(operation: &str, answered: &ErrorResponse) -> CallError {
    let parsed: Option<ErrorBody> = serde_json::from_slice(&answered.body).ok();
    let ErrorResponse { status, retry_after, .. } = *answered;
    if (300..400).contains(&status) {
        let what = format!("{operation}: {status}, a redirect, which is not followed; is root_url correct?");
        return CallError::retry(what);
    }
    let unknown_route =
        status == 404 && parsed.as_ref().is_some_and(|body| body.code.is_none() && body.error.is_some());
    let is_foreign_page = parsed.is_none() && answered.content_type.contains("html");
    if unknown_route || (is_foreign_page && (400..500).contains(&status)) {
        return CallError::retry(format!(
            "{operation}: {status}, not a response of Taskcluster; is root_url correct, and is there a proxy or a \
             captive portal in between?"
        ));
    }
    let mut what = format!("{operation}: {status}");
    if let Some(body) = parsed {
        if let Some(code) = body.code {
            write!(what, " {}", sanitize(&code)).ok();
        }
        if let Some(message) = body.message.or(body.error) {
            write!(what, ": {}", summary_line(&message)).ok();
        }
    }
    CallError::new(classify_status(status, retry_after), what)
}

pub(super) const fn classify_status(status: u16, retry_after: Option<Duration>) -> Refusal {
    match status {
        401 | 403 => Refusal::Denied,
        404 | 409 | 410 => Refusal::Gone,
        // 407 is never the service's: a proxy wants credentials.
        407 | 425 => Refusal::Retry { retry_after },
        // 408, like 429, asks for a slower pace.
        408 | 429 => Refusal::Throttled { retry_after },
        400..=499 => Refusal::Rejected,
        _ => Refusal::Retry { retry_after },
    }
}

/// The explanation of an error message, on one line and bounded.
pub(super) fn summary_line(message: &str) -> String {
    let text = message.split("\n\n---\n").next().unwrap_or_default();
    // Markdown fences are on lines of their own.
    let lines = text.lines().map(str::trim).filter(|line| !line.is_empty() && *line != "```");
    sanitize(&lines.collect::<Vec<_>>().join(" "))
}

/// Untrusted text for a log line: bounded, control characters escaped.
pub(super) fn sanitize(text: &str) -> String {
    let mut out = String::new();
    for character in text.chars() {
        if out.len() >= REFUSAL_TEXT_BYTES_MAX {
            out.push('…');
            break;
        }
        if character.is_control()
            || matches!(character, '\u{2028}' | '\u{2029}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
        {
            out.extend(character.escape_default());
        } else {
            out.push(character);
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answered(status: u16, content_type: &str, body: &str) -> ErrorResponse {
        ErrorResponse { status, retry_after: None, content_type: content_type.to_owned(), body: body.into() }
    }

    #[test]
    fn the_sentence_keeps_the_useful_line_and_nothing_of_the_request() {
        let body = r#"{"code":"RequestConflict","message":"Run 0 was already claimed by another worker.\n\n---\n\n* method: claimTask","requestInfo":{"payload":{"secret":"CANARY"}}}"#;
        let refused = classify_service_error("claimTask T/0", &answered(409, "application/json", body));
        assert_eq!(refused.refusal, Refusal::Gone);
        assert_eq!(refused.message, "claimTask T/0: 409 RequestConflict: Run 0 was already claimed by another worker.");
    }

    #[test]
    fn a_message_of_several_lines_is_one_sentence() {
        let message = "This request requires:\n\n```\nqueue:claimed-list:a/b\n```\n\n---\n\n* method: m";
        assert_eq!(summary_line(message), "This request requires: queue:claimed-list:a/b");
        assert_eq!(summary_line("Not there.\r\nWas it submitted?"), "Not there. Was it submitted?");
        assert_eq!(summary_line(""), "");
    }

    #[test]
    fn control_characters_are_escaped_and_length_is_bounded() {
        let nasty = format!("{{\"code\":\"X\",\"message\":\"a\\u001b[31m\\nb{}\"}}", "z".repeat(5000));
        let refused = classify_service_error("op", &answered(400, "application/json", &nasty));
        assert!(refused.message.contains("a\\u{1b}[31m b"), "{}", refused.message);
        assert!(refused.message.len() < 400);
        assert!(!refused.message.contains('\u{1b}'));
    }

    #[test]
    fn statuses_ask_for_what_the_port_says() {
        let classified = |status| classify_status(status, None);
        assert_eq!(classified(400), Refusal::Rejected);
        assert_eq!(classified(401), Refusal::Denied);
        assert_eq!(classified(403), Refusal::Denied);
        assert_eq!(classified(404), Refusal::Gone);
        assert_eq!(classified(408), Refusal::Throttled { retry_after: None });
        assert_eq!(classified(409), Refusal::Gone);
        assert_eq!(classified(413), Refusal::Rejected);
        assert_eq!(classified(429), Refusal::Throttled { retry_after: None });
        assert_eq!(classified(500), Refusal::Retry { retry_after: None });
        assert_eq!(classified(503), Refusal::Retry { retry_after: None });
    }

    #[test]
    fn a_proxys_page_and_an_unknown_route_are_never_definite() {
        let page = classify_service_error("op", &answered(404, "text/html", "<html>"));
        assert_eq!(page.refusal, Refusal::Retry { retry_after: None });
        let route = classify_service_error("op", &answered(404, "application/json", r#"{"error":"Not found"}"#));
        assert_eq!(route.refusal, Refusal::Retry { retry_after: None });
        for status in [401, 403] {
            let portal = classify_service_error("op", &answered(status, "text/html", "<html>Log in"));
            assert_eq!(portal.refusal, Refusal::Retry { retry_after: None });
            assert!(portal.message.contains("portal") && portal.message.contains(&status.to_string()), "{portal}");
        }
        assert_eq!(classify_service_error("op", &answered(407, "", "")).refusal, Refusal::Retry { retry_after: None });
        let redirect = classify_service_error("op", &answered(301, "", ""));
        assert_eq!(redirect.refusal, Refusal::Retry { retry_after: None });
    }
}
