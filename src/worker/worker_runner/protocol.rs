//! The worker-runner protocol as a pure state machine: lines in, lines out.

use std::collections::BTreeSet;

use serde::{Deserialize, Deserializer};
use serde_json::{Value, json};

use crate::source::taskcluster::ClientCredentials;
use journeyman_domain::time::Instant;
use journeyman_domain::worker_pool::AlertReports;
use journeyman_platform::settings::values::Secret;

/// The capabilities that this worker implements.
const CAPABILITIES: [&str; 5] = ["graceful-termination", "new-credentials", "error-report", "log", "shutdown"];

#[derive(Debug)]
pub struct RunnerProtocol {
    agreed_capabilities: Option<BTreeSet<String>>,
    hello_sent: bool,
    reports: AlertReports,
}

#[derive(Debug)]
pub enum RunnerRequest {
    /// Text, an unknown message, or an invalid one, with a message for the log.
    Ignore(Option<&'static str>),
    /// Send this line, and then call [`RunnerProtocol::mark_hello_sent`].
    Reply(String),
    Drain,
    ReleaseClaims,
    NewCredentials(ClientCredentials),
}

#[derive(Deserialize)]
#[serde(tag = "type", rename_all = "kebab-case")]
enum RunnerMessage {
    Welcome {
        #[serde(default)]
        capabilities: BTreeSet<String>,
    },
    #[serde(rename_all = "kebab-case")]
    GracefulTermination { finish_tasks: bool },
    #[serde(rename_all = "kebab-case")]
    NewCredentials {
        client_id: String,
        access_token: Secret,
        #[serde(default, deserialize_with = "certificate")]
        certificate: Option<Secret>,
    },
    #[serde(other)]
    Other,
}

impl RunnerProtocol {
    /// Before `welcome`.
    pub const INITIAL: Self = Self { agreed_capabilities: None, hello_sent: false, reports: AlertReports::NONE };

    /// Handles a line from the runner, without its line break.
    pub fn receive(&mut self, line: &[u8]) -> RunnerRequest {
        let line = line.trim_ascii();
        let Some(json) = line.strip_prefix(b"~").filter(|json| json.starts_with(b"{") && json.ends_with(b"}")) else {
            return RunnerRequest::Ignore(None);
        };
        let Ok(message) = serde_json::from_slice::<RunnerMessage>(json) else {
            return RunnerRequest::Ignore(Some("ignored an unparsable worker-runner message"));
        };
        match message {
            RunnerMessage::Welcome { capabilities } => self.welcome(capabilities),
            RunnerMessage::GracefulTermination { .. } | RunnerMessage::NewCredentials { .. }
                if self.agreed_capabilities.is_none() =>
            {
                RunnerRequest::Ignore(Some("ignored a worker-runner message received before `welcome`"))
            }
            RunnerMessage::GracefulTermination { finish_tasks: true } => RunnerRequest::Drain,
            RunnerMessage::GracefulTermination { finish_tasks: false } => RunnerRequest::ReleaseClaims,
            RunnerMessage::NewCredentials { client_id, access_token, certificate } => {
                RunnerRequest::NewCredentials(ClientCredentials { client_id, access_token, certificate })
            }
            RunnerMessage::Other => RunnerRequest::Ignore(None),
        }
    }

    fn welcome(&mut self, mut capabilities: BTreeSet<String>) -> RunnerRequest {
        capabilities.retain(|name| CAPABILITIES.contains(&name.as_str()));
        let hello = encode_line(&json!({"type": "hello", "capabilities": capabilities}));
        self.agreed_capabilities = Some(capabilities);
        RunnerRequest::Reply(hello)
    }

    /// Other messages may be sent only after `hello`.
    pub const fn mark_hello_sent(&mut self) {
        self.hello_sent = true;
    }

    pub const fn is_welcomed(&self) -> bool {
        self.agreed_capabilities.is_some()
    }

    fn supports(&self, capability: &str) -> bool {
        self.hello_sent && self.agreed_capabilities.as_ref().is_some_and(|agreed| agreed.contains(capability))
    }

    /// `None` if the runner does not accept log entries.
    pub fn log_line(&self, mut entry: serde_json::Map<String, Value>) -> Option<String> {
        let text = entry.remove("message").unwrap_or_else(|| Value::from(""));
        entry.insert("textPayload".to_owned(), text);
        self.supports("log").then(|| encode_line(&json!({"type": "log", "body": entry})))
    }

    /// The report of a line of the log that is an alert.
    pub fn alert_line(&mut self, entry: &serde_json::Map<String, Value>, now: Instant) -> Option<String> {
        let alert =
            entry.get("alert")?.as_str().filter(|_| entry.get("level").is_some_and(|level| level == "ERROR"))?;
        let line = self.error_report_line(alert, entry.get("message")?.as_str()?)?;
        self.reports.is_due(alert, now).then_some(line)
    }

    /// `None` if the runner does not accept error reports.
    pub fn error_report_line(&self, title: &str, description: &str) -> Option<String> {
        let report = json!({
            "type": "error-report", "kind": "journeyman", "title": title, "description": description, "extra": {},
        });
        self.supports("error-report").then(|| encode_line(&report))
    }

    /// Asks the runner to terminate this host. `None` if it does not accept that.
    pub fn shutdown_line(&self) -> Option<String> {
        self.supports("shutdown").then(|| encode_line(&json!({"type": "shutdown"})))
    }
}

fn encode_line(message: &Value) -> String {
    format!("~{message}\n")
}

/// A certificate is a JSON object, or its text. An empty text stands for no certificate.
pub(super) fn certificate<'de, D: Deserializer<'de>>(from: D) -> Result<Option<Secret>, D::Error> {
    let text = match Value::deserialize(from)? {
        Value::String(text) => Some(text).filter(|text| !text.is_empty()),
        object @ Value::Object(_) => Some(object.to_string()),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::Array(_) => None,
    };
    Ok(text.map(|text| Secret::new(&text)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn agreed(capabilities: &str) -> RunnerProtocol {
        let mut protocol = RunnerProtocol::INITIAL;
        let welcome = format!("~{{\"type\":\"welcome\",\"capabilities\":{capabilities}}}");
        assert!(matches!(protocol.receive(welcome.as_bytes()), RunnerRequest::Reply(_)));
        assert!(protocol.log_line(serde_json::Map::new()).is_none(), "hello is sent first");
        protocol.mark_hello_sent();
        protocol
    }

    #[test]
    fn hello_lists_the_common_capabilities() {
        let welcome = br#"  ~{"type":"welcome","capabilities":["log","shutdown","teleport"]}  "#;
        let mut protocol = RunnerProtocol::INITIAL;
        let RunnerRequest::Reply(hello) = protocol.receive(welcome) else { panic!("no answer") };
        assert_eq!(hello, "~{\"type\":\"hello\",\"capabilities\":[\"log\",\"shutdown\"]}\n");
    }

    #[test]
    fn a_capability_is_used_only_after_welcome_and_if_offered() {
        let mut protocol = RunnerProtocol::INITIAL;
        assert!(protocol.shutdown_line().is_none() && protocol.error_report_line("a", "b").is_none());
        let message = br#"~{"type":"graceful-termination","finish-tasks":false}"#;
        assert!(matches!(protocol.receive(message), RunnerRequest::Ignore(Some(_))));
        let protocol = agreed("[\"log\"]");
        assert!(protocol.shutdown_line().is_none());
        assert!(protocol.log_line(serde_json::Map::new()).is_some());
    }

    #[test]
    fn requests_are_parsed_and_other_lines_are_ignored() {
        let mut protocol = agreed("[]");
        let mut receive = |line: &str| protocol.receive(line.as_bytes());
        assert!(matches!(receive(r#"~{"type":"graceful-termination","finish-tasks":true}"#), RunnerRequest::Drain));
        assert!(matches!(
            receive(r#"~{"type":"graceful-termination","finish-tasks":false}"#),
            RunnerRequest::ReleaseClaims
        ));
        for text in ["", "~", "~{", "{}", "plain", "~{}x", r#"~{"type":"unknown-type"}"#] {
            assert!(matches!(receive(text), RunnerRequest::Ignore(None)), "{text}");
        }
        for bad in ["~{}", r#"~{"type":7}"#, "~{oops}", r#"~{"type":"new-credentials"}"#] {
            assert!(matches!(receive(bad), RunnerRequest::Ignore(Some(_))), "{bad}");
        }
    }

    #[test]
    fn certificates_are_accepted_in_both_forms_and_not_printed() {
        for certificate in [r#""{\"version\":1}""#, r#"{"version":1}"#] {
            let line = format!(
                r#"~{{"type":"new-credentials","client-id":"c","access-token":"runner-canary","certificate":{certificate}}}"#
            );
            let RunnerRequest::NewCredentials(new) = agreed("[]").receive(line.as_bytes()) else { panic!("not read") };
            assert_eq!((new.client_id.as_str(), new.access_token.reveal()), ("c", "runner-canary"));
            assert_eq!(new.certificate.as_ref().map(Secret::reveal), Some(r#"{"version":1}"#));
            assert!(!format!("{new:?}").contains("canary"));
        }
    }

    #[test]
    fn b9_an_alert_is_reported_once_in_a_while() {
        let mut protocol = agreed("[\"error-report\"]");
        let entry = |alert: Value| {
            let entry = json!({"level": "ERROR", "message": "denied", "alert": alert});
            serde_json::from_value(entry).unwrap()
        };
        let mut now = Instant::ORIGIN;
        assert!(protocol.alert_line(&entry(Value::Null), now).is_none(), "no alert");
        let report = protocol.alert_line(&entry("auth-denied".into()), now).unwrap();
        assert!(
            report.contains(r#""title":"auth-denied""#) && report.contains(r#""description":"denied""#),
            "{report}"
        );
        assert!(protocol.alert_line(&entry("auth-denied".into()), now).is_none());
        assert!(protocol.alert_line(&entry("other".into()), now).is_some());
        now = now.plus(AlertReports::INTERVAL);
        assert!(protocol.alert_line(&entry("auth-denied".into()), now).is_some());
        assert!(agreed("[]").alert_line(&entry("auth-denied".into()), now).is_none());
    }

    #[test]
    fn an_error_report_has_all_required_keys() {
        let report = agreed("[\"error-report\"]").error_report_line("denied", "the queue refuses us").unwrap();
        let report: Value = serde_json::from_str(report.trim_start_matches('~')).unwrap();
        for key in ["type", "kind", "title", "description", "extra"] {
            assert!(!report[key].is_null(), "{key}");
        }
    }
}
