//! The signatures of deliveries, verified by what receivers use: the official libraries of Standard Webhooks.

use std::collections::BTreeMap;
use std::process::Stdio;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use serde_json::{Value, json};
use tokio::io::AsyncWriteExt as _;
use tokio::process::Command;

use crate::notifier::support::{KEY, Place, Receiver, event, within};
use crate::support::gremlin::Asked;
use crate::support::needs;

/// Keys of 24 and 64 bytes, the shortest and the longest.
const OLD: &str = "whsec_xiELVV9YPQDkDWudfzjOSxH3+vYhQm43";
const NEW: &str = "whsec_xiELVV9YPQDkDWudfzjOSxH3+vYhQm439W66gdbMYyCVoh2XLAtYD9jxkksiwmA/x011yEACjbyBj+jUPnfQnw==";
const SECRET: &str = "whsk_nNTrijxg4qnz0bg8ge8pbfvem00RoGtfrOdppByjxULvJOLRuWGg+Xzm/FA0pyNdxIVtz8yMtJ7fiE2VTBkkeQ==";
const PUBLIC: &str = "whpk_7yTi0blhoPl85vxQNKcjXcSFbc/MjLSe34hNlUwZJHk=";
/// The key of the first test of RFC 8032.
const OTHER_PUBLIC: &str = "whpk_11qYAYKxCrfVS/7TyWQHOg7hcvPapiMlrwIaaPcHURo=";

/// A library in a program that verifies deliveries.
struct Library {
    name: &'static str,
    arguments: Vec<String>,
    /// The keys that receivers may have.
    keys: &'static [&'static str],
}

impl Library {
    /// `None` where tests/run did not install them.
    fn all() -> Option<[Self; 2]> {
        let found = ["JOURNEYMAN_TEST_STANDARDWEBHOOKS_PYTHON", "JOURNEYMAN_TEST_STANDARDWEBHOOKS_NODE"].map(needs);
        let [Some(python), Some(folder)] = found else { return None };
        let script = |name: &str| format!("{}/tests/notifier/{name}", env!("CARGO_MANIFEST_DIR"));
        let python = Self {
            name: "Python",
            arguments: vec![python, script("verify.py")],
            keys: &[OLD, NEW, KEY, PUBLIC, OTHER_PUBLIC],
        };
        let node = Self {
            name: "JavaScript",
            arguments: vec!["node".to_owned(), script("verify.mjs"), folder],
            keys: &[OLD, NEW, KEY],
        };
        Some([python, node])
    }

    /// Tells of each if it is accepted.
    async fn verify(&self, checks: &[Value]) -> Vec<bool> {
        let mut command = Command::new(&self.arguments[0]);
        command.args(&self.arguments[1..]).stdin(Stdio::piped()).stdout(Stdio::piped()).kill_on_drop(true);
        let mut process = command.spawn().expect("it starts");
        let mut input = process.stdin.take().expect("it is piped");
        input.write_all(json!(checks).to_string().as_bytes()).await.expect("it reads");
        drop(input);
        let ended = within("the answer of a library", process.wait_with_output()).await.expect("it was waited for");
        assert!(ended.status.success(), "{} failed with {}; its error is above", self.name, ended.status);
        serde_json::from_slice(&ended.stdout).expect("a list")
    }
}

fn check(asked: &Asked, body: &[u8], key: &str) -> Value {
    let headers: BTreeMap<_, _> = asked.headers.iter().cloned().collect();
    json!({ "headers": headers, "body": BASE64.encode(body), "key": key })
}

#[tokio::test]
async fn p8_the_official_libraries_verify_deliveries_while_keys_are_replaced() {
    let Some(libraries) = Library::all() else { return };
    let receiver = Receiver::answering(200).await;
    let place = Place::new(&[]);
    let notifier = place.start().await;
    let steps = [
        ([OLD, SECRET].as_slice(), [OLD, PUBLIC].as_slice()),
        (&[NEW, OLD, SECRET], &[NEW, OLD, PUBLIC]),
        (&[SECRET, NEW], &[NEW, PUBLIC]),
        (&[NEW], &[NEW]),
        (&[SECRET], &[PUBLIC]),
    ];
    for (number, (keys, _)) in (1..).zip(steps) {
        let endpoint = json!({ "url": format!("{}/hook", receiver.0.url()), "events": ["*"], "keys": keys });
        assert_eq!(notifier.call("PUT", "/v1/endpoints/ci", &endpoint.to_string()).await.0, 200);
        let mut event = event(&number.to_string(), "lane");
        event["data"] = json!({ "name": "Übung – ✓" });
        notifier.publish_all(&[event]).await;
        receiver.wait_for(number).await;
    }
    notifier.stop().await;
    let deliveries = receiver.0.asked();
    assert_eq!(deliveries.len(), steps.len());
    for library in libraries {
        let (mut checks, mut expected) = (Vec::new(), Vec::new());
        for (asked, (_, accepting)) in deliveries.iter().zip(steps) {
            for key in library.keys {
                checks.push(check(asked, &asked.body, key));
                expected.push(accepting.contains(key));
                for at in 0..asked.body.len() {
                    let mut body = asked.body.clone();
                    // It is still valid UTF-8, which the libraries need.
                    body[at] ^= 1;
                    checks.push(check(asked, &body, key));
                    expected.push(false);
                }
            }
        }
        let accepted = library.verify(&checks).await;
        assert_eq!(accepted.len(), expected.len());
        for ((check, accepted), expected) in checks.iter().zip(accepted).zip(expected) {
            assert_eq!(accepted, expected, "{}: {check}", library.name);
        }
    }
}
