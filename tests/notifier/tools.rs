//! `journeyman notifier send` and `listen`, and what an endpoint may be configured to get.

use std::process::{Command, Output, Stdio};

use rustix::process::Signal;

use crate::notifier::support::{Place, Receiver, within};
use crate::support::gremlin::{Act, Gremlin, answer, answer_with, unused_address};
use crate::support::process::Process;

/// Runs `journeyman notifier` with these arguments in the folder of a place.
pub(crate) async fn notifier(place: &Place, arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_journeyman"));
    command.arg("notifier").args(arguments).current_dir(place.path()).env_clear().stdin(Stdio::null());
    let running = tokio::task::spawn_blocking(move || command.output().expect("it runs"));
    within("the end of a command", running).await.expect("it was waited for")
}

pub(crate) fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

const EVENT: [&str; 7] = ["send", "--type", "build.finished", "--key", "build 7", "--data", "{\"a\":  1}"];

#[tokio::test]
async fn an_event_of_a_script_is_sent_once_whatever_answers_are_lost() {
    let receiver = Receiver::answering(200).await;
    let place = Place::new(&[("ci", &receiver)]);
    let running = place.start().await;
    let url = running.address().to_owned();
    let sent = notifier(&place, &[&EVENT[..], &["--url", &url, "--id", "7", "--epoch", "2"]].concat()).await;
    assert_eq!((sent.status.code(), text(&sent.stdout)), (Some(0), "7\n".to_owned()), "{}", text(&sent.stderr));
    let again = notifier(&place, &[&EVENT[..], &["--url", &url, "--id", "7"]].concat()).await;
    assert_eq!((again.status.code(), text(&again.stdout)), (Some(0), "7\n".to_owned()));
    let random = notifier(&place, &[&EVENT[..], &["--url", &url]].concat()).await;
    assert_eq!((random.status.code(), text(&random.stdout).len()), (Some(0), 37), "a UUID");
    receiver.wait_for(2).await;
    running.stop().await;
    let got = receiver.got();
    assert_eq!((got.len(), got[0].epoch, got[0].seq), (2, 2, 1));
    assert!(text(&got[0].body).ends_with(r#""data":{"a":  1}}"#), "byte for byte");
}

#[tokio::test]
async fn an_event_is_sent_again_with_its_id_until_the_notifier_has_it() {
    let accepted = answer(202, "application/json", r#"{"accepted":0,"duplicates":1}"#);
    let script = vec![
        Act::SayAndReset(Vec::new()),
        answer_with(429, &[("retry-after", "0")], r#"{"message":"too many calls"}"#),
        answer(503, "text/plain", "down"),
        accepted,
    ];
    let notifier_of_test = Gremlin::start(|_| script).await;
    let place = Place::new(&[]);
    let sent = notifier(&place, &[&EVENT[..], &["--url", &notifier_of_test.url()]].concat()).await;
    assert_eq!(sent.status.code(), Some(0), "{}", text(&sent.stderr));
    let asked = notifier_of_test.asked();
    assert_eq!(asked.len(), 4);
    let ids: Vec<_> = asked.iter().map(|asked| asked.json()[0]["id"].clone()).collect();
    assert!(ids.iter().all(|id| id == text(&sent.stdout).trim()), "{ids:?}");
}

#[tokio::test]
async fn a_script_learns_why_an_event_was_not_sent() {
    let place = Place::new(&[]);
    std::fs::write(place.path().join("wrong"), "wrong-token").expect("it is written");
    let running = place.start().await;
    let url = running.address().to_owned();
    let (nowhere, long) = (unused_address().await, "k".repeat(256));
    let refusing = Gremlin::start(|_| vec![answer(400, "application/json", r#"{"message":"not today"}"#)]).await;
    for (arguments, code, says) in [
        (&["--url", &url, "--token-file", "wrong"][..], 31, "wrong token"),
        (&["--url", &nowhere, "--timeout", "1s"], 32, "refused"),
        (&["--url", &refusing.url()], 1, "not today"),
        (&["--url", &url, "--source", &long], 1, "source is empty, longer"),
        (&["--url", &url, "--token-file", "absent"], 30, "absent"),
    ] {
        let sent = notifier(&place, &[&EVENT[..], arguments].concat()).await;
        let error = text(&sent.stderr);
        assert_eq!(sent.status.code(), Some(code), "{error}");
        assert!(error.contains(says) && !error.contains("wrong-token"), "{error}");
    }
    let no_json = ["send", "--type", "a", "--key", "b", "--data", "{secret"];
    let sent = notifier(&place, &no_json).await;
    assert_eq!((sent.status.code(), text(&sent.stderr).contains("secret")), (Some(2), false));
    running.stop().await;
}

#[tokio::test]
async fn a_local_receiver_shows_checks_and_fails_deliveries() {
    let place = Place::new(&[]);
    let mut command = Command::new("sh");
    // The log of a process in a test is its standard error.
    let script = "exec \"$0\" notifier listen --listen 127.0.0.1:0 --key-file key --fail-first 1 --retry-after 0 >&2";
    command.args(["-c", script, env!("CARGO_BIN_EXE_journeyman")]).current_dir(place.path()).env_clear();
    command.stdin(Stdio::null()).stderr(Stdio::piped());
    let mut listener = Process::of(command);
    listener.says("listening on http://").await;
    let url = listener.log().trim().trim_start_matches("listening on ").to_owned();
    let running = place
        .start_with(&[
            ("JOURNEYMAN__NOTIFIER__ENDPOINT__HERE__URL_FILE", "env:URL"),
            ("URL", &format!("{url}/secret-path")),
            ("JOURNEYMAN__NOTIFIER__ENDPOINT__HERE__KEY_FILES", "key"),
        ])
        .await;
    let url = running.address().to_owned();
    for id in ["1", "2"] {
        let sent = notifier(&place, &[&EVENT[..], &["--url", &url, "--id", id]].concat()).await;
        assert_eq!(sent.status.code(), Some(0), "{}", text(&sent.stderr));
    }
    for line in [
        "build.finished lane=build 7 epoch=0 seq=1 id=evt_",
        "signature=v1 → 500",
        "signature=v1 attempt=2 → 204",
        "seq=2 id=evt_",
    ] {
        listener.says(line).await;
    }
    let log = running.stop().await;
    assert!(!log.contains("secret-path"), "{log}");
    listener.signal(Signal::TERM);
    assert_eq!(listener.ends().await.code(), Some(0));
}

#[tokio::test]
async fn an_endpoint_has_a_format_headers_and_a_rate_of_its_own() {
    let receiver = Receiver::answering(200).await;
    let place = Place::new(&[("ci", &receiver)]);
    let running = place
        .start_with(&[
            ("JOURNEYMAN__NOTIFIER__ENDPOINT__CI__FORMAT", "cloudevents"),
            ("JOURNEYMAN__NOTIFIER__ENDPOINT__CI__HEADERS_FILE", "env:HEADERS"),
            ("JOURNEYMAN__NOTIFIER__ENDPOINT__CI__RATE", "100/s"),
            ("HEADERS", "Authorization: Bearer of-the-endpoint\nX-Team: one"),
        ])
        .await;
    let url = running.address().to_owned();
    notifier(&place, &[&EVENT[..], &["--url", &url, "--id", "7", "--source", "ci"]].concat()).await;
    receiver.wait_for(1).await;
    let asked = receiver.0.asked().remove(0);
    for (name, value) in [
        ("authorization", "Bearer of-the-endpoint"),
        ("x-team", "one"),
        ("content-type", "application/cloudevents+json"),
        ("journeyman-seq", "1"),
    ] {
        assert_eq!(asked.header(name), Some(value), "{name}");
    }
    let body = asked.json();
    for (name, value) in [("specversion", "1.0"), ("id", "7"), ("source", "ci"), ("partitionkey", "build 7")] {
        assert_eq!(body[name], value);
    }
    let log = running.stop().await;
    assert!(!log.contains("of-the-endpoint"), "{log}");
}

#[tokio::test]
async fn endpoints_that_cannot_be_used_are_refused_without_their_secrets() {
    let place = Place::new(&[]);
    for (variables, says) in [
        (&[("URL", "ftp://example.com/hunter2")][..], "url: expected a URL"),
        (&[("URL", "https://example.com/"), ("HEADERS", "hunter2")], "headers: line 1"),
        (&[("URL", "http://example.com/hunter2"), ("JOURNEYMAN__NOTIFIER__HTTPS_ONLY", "true")], "no TLS"),
        (
            &[("URL", "https://example.com/hunter2"), ("JOURNEYMAN__NOTIFIER__CLIENT_CERTIFICATE_FILE", "a")],
            "both or none",
        ),
        (&[("URL", "https://example.com/"), ("JOURNEYMAN__NOTIFIER__SEAL_KEY_FILES", "env:URL")], "32 random bytes"),
        (&[("URL", "https://a/"), ("JOURNEYMAN__NOTIFIER__PROXY_FILE", "env:PROXY"), ("PROXY", "x:hunter2")], "proxy"),
    ] {
        let mut command = Command::new(env!("CARGO_BIN_EXE_journeyman"));
        command.args(["notifier", "-c", "journeyman.toml"]).current_dir(place.path()).env_clear();
        command.env("JOURNEYMAN__NOTIFIER__ENDPOINT__A__URL_FILE", "env:URL").envs(variables.iter().copied());
        if variables.iter().any(|(name, _)| *name == "HEADERS") {
            command.env("JOURNEYMAN__NOTIFIER__ENDPOINT__A__HEADERS_FILE", "env:HEADERS");
        }
        let output = tokio::task::spawn_blocking(move || command.output().expect("it runs"));
        let output = within("the end of a command", output).await.expect("it was waited for");
        let error = text(&output.stderr);
        assert_eq!(output.status.code(), Some(30), "{error}");
        assert!(error.contains(says) && !error.contains("hunter2"), "{error}");
    }
}
