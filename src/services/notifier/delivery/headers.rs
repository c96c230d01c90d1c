//! The headers that an endpoint gets with each webhook, one `Name: value` in a line.

use reqwest::header::{HeaderMap, HeaderName, HeaderValue};

use super::sender::RESERVED;

/// # Errors
///
/// If a line is no header, or one that is not the endpoint's to set. The error names the line and holds nothing of it: a value may
/// be secret.
pub(crate) fn parse_headers(text: &str) -> Result<HeaderMap, String> {
    let mut headers = HeaderMap::new();
    for (number, line) in (1..).zip(text.lines()).filter(|(_, line)| !line.trim().is_empty()) {
        let invalid = || Err(format!("line {number} is not `Name: value`"));
        let Some((name, value)) = line.split_once(':') else { return invalid() };
        let (Ok(name), Ok(mut value)) = (name.trim().parse::<HeaderName>(), HeaderValue::from_str(value.trim())) else {
            return invalid();
        };
        if RESERVED.contains(&name) || name.as_str().starts_with("journeyman-") {
            return Err(format!("line {number} sets a header that the notifier or HTTP sets"));
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
            ("Bearer secret", "line 1 is not"),
            ("X-A: 1\nX B: secret", "line 2 is not"),
            (": secret", "line 1 is not"),
            ("X-A: se\x01cret", "line 1 is not"),
            ("\nWebhook-Id: secret", "line 2 sets a header"),
            ("Content-Length: 1", "line 1 sets a header"),
            ("Journeyman-Seq: 1", "line 1 sets a header"),
        ] {
            let refused = parse_headers(text).expect_err(text);
            assert!(refused.starts_with(error) && !refused.contains("secret"), "{text:?}: {refused}");
        }
    }
}
