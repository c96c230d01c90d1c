//! What is said between runner and worker, line by line. Pure: lines in, lines out.

use std::collections::BTreeSet;

use serde::{Deserialize, Deserializer, Serialize};
use serde_json::{Value, json};

use crate::config::values::Secret;

/// What this worker does of what a runner may offer.
const CAPABILITIES: [&str; 5] = ["graceful-termination", "new-credentials", "error-report", "log", "shutdown"];

/// The state of a conversation: silent until the runner has said welcome.
#[derive(Debug, Default)]
pub struct Conversation {
    agreed: Option<BTreeSet<String>>,
    /// The runner has been told what was agreed.
    answered: bool,
}

/// What a line asks for.
#[derive(Debug)]
pub enum Heard {
    /// Nothing: text, an unknown message, or one that cannot be read. The sentence is for the log.
    Nothing(Option<&'static str>),
    /// Say this line, and then [`Conversation::answered`].
    Answer(String),
    /// Go: finish what runs.
    Drain,
    /// Go: hand back what runs.
    HandBack,
    /// From now on, sign with these.
    Renew(Credentials),
}

/// Credentials as the runner hands them out.
#[derive(Debug, Clone)]
pub struct Credentials {
    /// The client id.
    pub client_id: String,
    /// The access token.
    pub access_token: Secret,
    /// The certificate of temporary credentials.
    pub certificate: Option<Secret>,
}

#[derive(Deserialize)]
#[serde(tag = "type", rename_all = "kebab-case")]
enum Message {
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
struct Hello<'a> {
    r#type: &'a str,
    capabilities: &'a BTreeSet<String>,
}

impl Conversation {
    /// Takes in a line of the runner's, without its end.
    pub fn hears(&mut self, line: &[u8]) -> Heard {
        let line = line.trim_ascii();
        let Some(json) = line.strip_prefix(b"~").filter(|json| json.starts_with(b"{") && json.ends_with(b"}")) else {
            return Heard::Nothing(None);
        };
        let Ok(message) = serde_json::from_slice::<Message>(json) else {
            return Heard::Nothing(Some("a message of the worker-runner cannot be read; it is ignored"));
        };
        match message {
            Message::Welcome { capabilities } => self.welcome(capabilities),
            Message::GracefulTermination { .. } | Message::NewCredentials { .. } if self.agreed.is_none() => {
                Heard::Nothing(Some("the worker-runner gave an order before it said welcome; it is ignored"))
            }
            Message::GracefulTermination { finish_tasks: true } => Heard::Drain,
            Message::GracefulTermination { finish_tasks: false } => Heard::HandBack,
            Message::NewCredentials { client_id, access_token, certificate } => {
                Heard::Renew(Credentials { client_id, access_token, certificate })
            }
            Message::Other => Heard::Nothing(None),
        }
    }

    fn welcome(&mut self, offered: BTreeSet<String>) -> Heard {
        let ours: BTreeSet<String> = CAPABILITIES.iter().map(|name| (*name).to_owned()).collect();
        let agreed: BTreeSet<String> = offered.intersection(&ours).cloned().collect();
        let hello = line(&json!(Hello { r#type: "hello", capabilities: &agreed }));
        self.agreed = Some(agreed);
        Heard::Answer(hello)
    }

    /// The last answer has been said: only from now on may anything else be.
    pub const fn answered(&mut self) {
        self.answered = true;
    }

    /// Whether the runner has said welcome.
    #[must_use]
    pub const fn has_begun(&self) -> bool {
        self.agreed.is_some()
    }

    fn may(&self, capability: &str) -> bool {
        self.answered && self.agreed.as_ref().is_some_and(|agreed| agreed.contains(capability))
    }

    /// The line that passes on a line of the worker's log; `None` where the runner takes none.
    #[must_use]
    pub fn log(&self, mut entry: serde_json::Map<String, Value>) -> Option<String> {
        let text = entry.remove("message").unwrap_or_else(|| Value::from(""));
        entry.insert("textPayload".to_owned(), text);
        self.may("log").then(|| line(&json!({"type": "log", "body": entry})))
    }

    /// The line that tells the runner's service of an error; `None` where it takes none.
    #[must_use]
    pub fn error_report(&self, title: &str, description: &str) -> Option<String> {
        let report = json!({
            "type": "error-report", "kind": "journeyman", "title": title, "description": description, "extra": {},
        });
        self.may("error-report").then(|| line(&report))
    }

    /// The line that asks the runner to take this host away; `None` where it takes none.
    #[must_use]
    pub fn shutdown(&self) -> Option<String> {
        self.may("shutdown").then(|| line(&json!({"type": "shutdown"})))
    }
}

fn line(message: &Value) -> String {
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

    fn agreed(capabilities: &str) -> Conversation {
        let mut conversation = Conversation::default();
        let welcome = format!("~{{\"type\":\"welcome\",\"capabilities\":{capabilities}}}");
        assert!(matches!(conversation.hears(welcome.as_bytes()), Heard::Answer(_)));
        assert!(conversation.log(serde_json::Map::new()).is_none(), "nothing goes before hello");
        conversation.answered();
        conversation
    }

    #[test]
    fn hello_names_what_both_can_do() {
        let welcome = br#"  ~{"type":"welcome","capabilities":["log","shutdown","teleport"]}  "#;
        let Heard::Answer(hello) = Conversation::default().hears(welcome) else { panic!("no answer") };
        assert_eq!(hello, "~{\"type\":\"hello\",\"capabilities\":[\"log\",\"shutdown\"]}\n");
    }

    #[test]
    fn nothing_is_used_before_welcome_nor_without_being_offered() {
        let mut conversation = Conversation::default();
        assert!(conversation.shutdown().is_none() && conversation.error_report("a", "b").is_none());
        let order = br#"~{"type":"graceful-termination","finish-tasks":false}"#;
        assert!(matches!(conversation.hears(order), Heard::Nothing(Some(_))));
        let conversation = agreed("[\"log\"]");
        assert!(conversation.shutdown().is_none());
        assert!(conversation.log(serde_json::Map::new()).is_some());
    }

    #[test]
    fn orders_are_read_and_everything_else_is_text() {
        let mut conversation = agreed("[]");
        let mut heard = |line: &str| conversation.hears(line.as_bytes());
        assert!(matches!(heard(r#"~{"type":"graceful-termination","finish-tasks":true}"#), Heard::Drain));
        assert!(matches!(heard(r#"~{"type":"graceful-termination","finish-tasks":false}"#), Heard::HandBack));
        for text in ["", "~", "~{", "{}", "plain", "~{}x", r#"~{"type":"of-another-age"}"#] {
            assert!(matches!(heard(text), Heard::Nothing(None)), "{text}");
        }
        for bad in ["~{}", r#"~{"type":7}"#, "~{oops}", r#"~{"type":"new-credentials"}"#] {
            assert!(matches!(heard(bad), Heard::Nothing(Some(_))), "{bad}");
        }
    }

    #[test]
    fn credentials_come_with_a_certificate_in_either_shape_and_are_not_shown() {
        for certificate in [r#""{\"version\":1}""#, r#"{"version":1}"#] {
            let line = format!(
                r#"~{{"type":"new-credentials","client-id":"c","access-token":"runner-canary","certificate":{certificate}}}"#
            );
            let Heard::Renew(new) = agreed("[]").hears(line.as_bytes()) else { panic!("not read") };
            assert_eq!((new.client_id.as_str(), new.access_token.reveal()), ("c", "runner-canary"));
            assert_eq!(new.certificate.as_ref().map(Secret::reveal), Some(r#"{"version":1}"#));
            assert!(!format!("{new:?}").contains("canary"));
        }
    }

    #[test]
    fn an_error_report_has_all_that_the_runner_asks_for() {
        let said = agreed("[\"error-report\"]").error_report("denied", "the queue refuses us").unwrap();
        let said: Value = serde_json::from_str(said.trim_start_matches('~')).unwrap();
        for key in ["type", "kind", "title", "description", "extra"] {
            assert!(!said[key].is_null(), "{key}");
        }
    }
}
