//! What is said between runner and worker, line by line. Pure: lines in, lines out.

use std::collections::BTreeSet;

use serde::{Deserialize, Deserializer, Serialize};
use serde_json::{Value, json};

use crate::config::values::Secret;

/// What this worker does of what a runner may offer.
const CAPABILITIES: [&str; 5] = ["graceful-termination", "new-credentials", "error-report", "log", "shutdown"];

/// The state of a conversation: silent until the runner has said welcome.
#[derive(Debug, Default)]
pub struct RunnerProtocol {
    agreed_capabilities: Option<BTreeSet<String>>,
    /// The runner has been told what was agreed.
    hello_sent: bool,
}

/// What a line asks for.
#[derive(Debug)]
pub enum RunnerRequest {
    /// Nothing: text, an unknown message, or one that cannot be read. The sentence is for the log.
    Ignore(Option<&'static str>),
    /// Say this line, and then [`RunnerProtocol::mark_hello_sent`].
    Reply(String),
    /// Go: finish what runs.
    Drain,
    /// Go: hand back what runs.
    ReleaseClaims,
    /// From now on, sign with these.
    NewCredentials(RunnerCredentials),
}

/// Credentials as the runner hands them out.
#[derive(Debug, Clone)]
pub struct RunnerCredentials {
    /// The client id.
    pub client_id: String,
    /// The access token.
    pub access_token: Secret,
    /// The certificate of temporary credentials.
    pub certificate: Option<Secret>,
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

#[derive(Serialize)]
struct HelloMessage<'a> {
    r#type: &'a str,
    capabilities: &'a BTreeSet<String>,
}

impl RunnerProtocol {
    /// Takes in a line of the runner's, without its end.
    pub fn receive(&mut self, line: &[u8]) -> RunnerRequest {
        let line = line.trim_ascii();
        let Some(json) = line.strip_prefix(b"~").filter(|json| json.starts_with(b"{") && json.ends_with(b"}")) else {
            return RunnerRequest::Ignore(None);
        };
        let Ok(message) = serde_json::from_slice::<RunnerMessage>(json) else {
            return RunnerRequest::Ignore(Some("a message of the worker-runner cannot be read; it is ignored"));
        };
        match message {
            RunnerMessage::Welcome { capabilities } => self.welcome(capabilities),
            RunnerMessage::GracefulTermination { .. } | RunnerMessage::NewCredentials { .. }
                if self.agreed_capabilities.is_none() =>
            {
                RunnerRequest::Ignore(Some("the worker-runner gave an order before it said welcome; it is ignored"))
            }
            RunnerMessage::GracefulTermination { finish_tasks: true } => RunnerRequest::Drain,
            RunnerMessage::GracefulTermination { finish_tasks: false } => RunnerRequest::ReleaseClaims,
            RunnerMessage::NewCredentials { client_id, access_token, certificate } => {
                RunnerRequest::NewCredentials(RunnerCredentials { client_id, access_token, certificate })
            }
            RunnerMessage::Other => RunnerRequest::Ignore(None),
        }
    }

    fn welcome(&mut self, offered: BTreeSet<String>) -> RunnerRequest {
        let ours: BTreeSet<String> = CAPABILITIES.iter().map(|name| (*name).to_owned()).collect();
        let agreed: BTreeSet<String> = offered.intersection(&ours).cloned().collect();
        let hello = encode_line(&json!(HelloMessage { r#type: "hello", capabilities: &agreed }));
        self.agreed_capabilities = Some(agreed);
        RunnerRequest::Reply(hello)
    }

    /// The last answer has been said: only from now on may anything else be.
    pub const fn mark_hello_sent(&mut self) {
        self.hello_sent = true;
    }

    /// Whether the runner has said welcome.
    #[must_use]
    pub const fn is_welcomed(&self) -> bool {
        self.agreed_capabilities.is_some()
    }

    fn supports(&self, capability: &str) -> bool {
        self.hello_sent && self.agreed_capabilities.as_ref().is_some_and(|agreed| agreed.contains(capability))
    }

    /// The line that passes on a line of the worker's log; `None` where the runner takes none.
    #[must_use]
    pub fn log_line(&self, mut entry: serde_json::Map<String, Value>) -> Option<String> {
        let text = entry.remove("message").unwrap_or_else(|| Value::from(""));
        entry.insert("textPayload".to_owned(), text);
        self.supports("log").then(|| encode_line(&json!({"type": "log", "body": entry})))
    }

    /// The line that tells the runner's service of an error; `None` where it takes none.
    #[must_use]
    pub fn error_report_line(&self, title: &str, description: &str) -> Option<String> {
        let report = json!({
            "type": "error-report", "kind": "journeyman", "title": title, "description": description, "extra": {},
        });
        self.supports("error-report").then(|| encode_line(&report))
    }

    /// The line that asks the runner to take this host away; `None` where it takes none.
    #[must_use]
    pub fn shutdown_line(&self) -> Option<String> {
        self.supports("shutdown").then(|| encode_line(&json!({"type": "shutdown"})))
    }
}

fn encode_line(message: &Value) -> String {
    format!("~{message}\n")
}

/// A certificate is a JSON object, handed out as such or as its text; an empty one is none.
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
        let mut conversation = RunnerProtocol::default();
        let welcome = format!("~{{\"type\":\"welcome\",\"capabilities\":{capabilities}}}");
        assert!(matches!(conversation.receive(welcome.as_bytes()), RunnerRequest::Reply(_)));
        assert!(conversation.log_line(serde_json::Map::new()).is_none(), "nothing goes before hello");
        conversation.mark_hello_sent();
        conversation
    }

    #[test]
    fn hello_names_what_both_can_do() {
        let welcome = br#"  ~{"type":"welcome","capabilities":["log","shutdown","teleport"]}  "#;
        let RunnerRequest::Reply(hello) = RunnerProtocol::default().receive(welcome) else { panic!("no answer") };
        assert_eq!(hello, "~{\"type\":\"hello\",\"capabilities\":[\"log\",\"shutdown\"]}\n");
    }

    #[test]
    fn nothing_is_used_before_welcome_nor_without_being_offered() {
        let mut conversation = RunnerProtocol::default();
        assert!(conversation.shutdown_line().is_none() && conversation.error_report_line("a", "b").is_none());
        let order = br#"~{"type":"graceful-termination","finish-tasks":false}"#;
        assert!(matches!(conversation.receive(order), RunnerRequest::Ignore(Some(_))));
        let conversation = agreed("[\"log\"]");
        assert!(conversation.shutdown_line().is_none());
        assert!(conversation.log_line(serde_json::Map::new()).is_some());
    }

    #[test]
    fn orders_are_read_and_everything_else_is_text() {
        let mut conversation = agreed("[]");
        let mut heard = |line: &str| conversation.receive(line.as_bytes());
        assert!(matches!(heard(r#"~{"type":"graceful-termination","finish-tasks":true}"#), RunnerRequest::Drain));
        assert!(matches!(
            heard(r#"~{"type":"graceful-termination","finish-tasks":false}"#),
            RunnerRequest::ReleaseClaims
        ));
        for text in ["", "~", "~{", "{}", "plain", "~{}x", r#"~{"type":"of-another-age"}"#] {
            assert!(matches!(heard(text), RunnerRequest::Ignore(None)), "{text}");
        }
        for bad in ["~{}", r#"~{"type":7}"#, "~{oops}", r#"~{"type":"new-credentials"}"#] {
            assert!(matches!(heard(bad), RunnerRequest::Ignore(Some(_))), "{bad}");
        }
    }

    #[test]
    fn credentials_come_with_a_certificate_in_either_shape_and_are_not_shown() {
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
    fn an_error_report_has_all_that_the_runner_asks_for() {
        let said = agreed("[\"error-report\"]").error_report_line("denied", "the queue refuses us").unwrap();
        let said: Value = serde_json::from_str(said.trim_start_matches('~')).unwrap();
        for key in ["type", "kind", "title", "description", "extra"] {
            assert!(!said[key].is_null(), "{key}");
        }
    }
}
