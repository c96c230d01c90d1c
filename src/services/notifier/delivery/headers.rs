//! The headers that an endpoint gets with each webhook, one `Name: value` in a line.

use reqwest::header::{HeaderMap, HeaderName, HeaderValue};

use super::sender::RESERVED;

/// Names the line and holds nothing of it: a value may be secret.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum InvalidHeaders {
    #[error("line {0} is not `Name: value`")]
    Line(usize),
    #[error("line {0} sets a header that the notifier or HTTP sets")]
    Reserved(usize),
}

/// # Errors
///
/// If a line is no header, or one that is not the endpoint's to set.
pub(crate) fn parse_headers(text: &str) -> Result<HeaderMap, InvalidHeaders> {
    let mut headers = HeaderMap::new();
    for (number, line) in (1..).zip(text.lines()).filter(|(_, line)| !line.trim().is_empty()) {
        let invalid = InvalidHeaders::Line(number);
        let Some((name, value)) = line.split_once(':') else { return Err(invalid) };
        let (Ok(name), Ok(mut value)) = (name.trim().parse::<HeaderName>(), HeaderValue::from_str(value.trim())) else {
            return Err(invalid);
        };
        if RESERVED.contains(&name) || name.as_str().starts_with("journeyman-") {
            return Err(InvalidHeaders::Reserved(number));
        }
        value.set_sensitive(true);
        headers.append(name, value);
    }
    Ok(headers)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_become_headers_that_are_not_shown() {
        let headers = parse_headers("Authorization: Bearer a:b\n\nX-Team:one\r\nx-team: two\n").unwrap();
        assert_eq!(headers["authorization"], "Bearer a:b");
        assert_eq!(headers.get_all("x-team").iter().collect::<Vec<_>>(), ["one", "two"]);
        assert!(!format!("{headers:?}").contains("Bearer"));
    }

    #[test]
    fn a_line_that_is_no_header_of_an_endpoint_is_refused_without_its_text() {
        for (text, error) in [
            ("Bearer secret", InvalidHeaders::Line(1)),
            ("X-A: 1\nX B: secret", InvalidHeaders::Line(2)),
            (": secret", InvalidHeaders::Line(1)),
            ("X-A: se\x01cret", InvalidHeaders::Line(1)),
            ("\nWebhook-Id: secret", InvalidHeaders::Reserved(2)),
            ("Content-Length: 1", InvalidHeaders::Reserved(1)),
            ("Journeyman-Seq: 1", InvalidHeaders::Reserved(1)),
        ] {
            let refused = parse_headers(text).expect_err(text);
            assert!(!refused.to_string().contains("secret"), "{refused}");
            assert_eq!(refused, error, "{text:?}");
        }
    }
}
