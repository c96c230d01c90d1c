//! What operators see of a notifier and change in it, by command, by API and by webhook.

use std::process::Output;
use std::sync::Arc;
use std::sync::atomic::{AtomicU16, Ordering};

use axum::body::Bytes;
use axum::http::Uri;
use opentelemetry_proto::tonic::collector::metrics::v1::ExportMetricsServiceRequest;
use opentelemetry_proto::tonic::metrics::v1::{NumberDataPoint, metric::Data, number_data_point};
use prost::Message as _;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use crate::cli::server::serve;
use crate::cli::traces::texts;
use crate::notifier::support::{Place, Receiver, Running, TOKEN, event, within};
use crate::notifier::tools::{notifier, text};
use crate::support::gremlin::unused_address;

/// A receiver whose answer can be changed.
async fn changing(status: u16) -> (Receiver, Arc<AtomicU16>) {
    let status = Arc::new(AtomicU16::new(status));
    let answered = Arc::clone(&status);
    (Receiver::by_number(move |_| answered.load(Ordering::SeqCst)).await, status)
}

async fn run(place: &Place, running: &Running<'_>, arguments: &[&str]) -> Output {
    notifier(place, &[arguments, &["--url", running.address()]].concat()).await
}

/// The output of a command that succeeds.
async fn done(place: &Place, running: &Running<'_>, arguments: &[&str]) -> String {
    let output = run(place, running, arguments).await;
    assert_eq!(output.status.code(), Some(0), "{arguments:?}: {}", text(&output.stderr));
    text(&output.stdout)
}

async fn json_of(place: &Place, running: &Running<'_>, arguments: &[&str]) -> Value {
    serde_json::from_str(&done(place, running, &[arguments, &["-o", "json"]].concat()).await).expect("JSON")
}

fn events(ids: &[(&str, &str)]) -> Vec<Value> {
    ids.iter().map(|(id, key)| event(id, key)).collect()
}

#[tokio::test]
async fn an_operator_sees_why_nothing_is_delivered_and_redelivers_in_order() {
    let (receiver, status) = changing(500).await;
    let place = Place::new(&[("ci", &receiver)]);
    let running = place.start().await;
    running.publish_all(&events(&[("1", "a"), ("2", "a"), ("3", "b")])).await;
    running.wait_for_status("ci", |status| status["health"]["failures"].as_u64() >= Some(2)).await;
    let shown = json_of(&place, &running, &["status"]).await["endpoints"]["ci"].clone();
    assert_eq!((&shown["state"], &shown["lanes"], &shown["messages"]), (&json!("active"), &json!(2), &json!(3)));
    assert_eq!(shown["last_failure"]["status"], 500, "{shown}");
    assert!(shown["why"].as_str().is_some_and(|why| why.contains("failed attempts since")), "{shown}");
    assert!(shown["next_try"].is_i64() && shown["oldest"].is_i64(), "{shown}");
    let table = done(&place, &running, &["status"]).await;
    assert!(table.contains("ENDPOINT") && table.contains("HTTP 500") && table.contains("failed attempts"), "{table}");
    let lanes = json_of(&place, &running, &["lanes", "--endpoint", "ci"]).await;
    assert_eq!(
        (lanes.as_array().map(Vec::len), &lanes[0]["key"], &lanes[0]["head"]),
        (Some(2), &json!("a"), &json!(1))
    );
    assert!(done(&place, &running, &["lanes", "--key", "b"]).await.contains("build.finished"));
    let attempts = done(&place, &running, &["attempts", "--limit", "1"]).await;
    assert!(attempts.lines().count() == 2 && attempts.contains("HTTP 500"), "{attempts}");

    let paused = done(&place, &running, &["pause", "ci", "--for", "1h", "--note", "moving house"]).await;
    assert_eq!(paused, "endpoint ci: paused\n");
    let shown = done(&place, &running, &["status"]).await;
    assert!(shown.contains("paused until") && shown.contains("notifier resume ci"), "{shown}");
    assert!(done(&place, &running, &["endpoints"]).await.contains("moving house"));
    status.store(200, Ordering::SeqCst);
    done(&place, &running, &["resume", "ci"]).await;
    done(&place, &running, &["disable", "ci", "--note", "broken"]).await;
    assert_eq!(running.status("ci").await["disabled"], "by-operator");
    assert!(done(&place, &running, &["status"]).await.contains("notifier enable ci"));
    done(&place, &running, &["enable", "ci"]).await;
    assert_eq!(running.status("ci").await["disabled"], Value::Null);
    done(&place, &running, &["disable", "ci"]).await;
    done(&place, &running, &["redeliver", "ci"]).await;
    receiver.wait_for(3).await;
    done(&place, &running, &["test", "ci"]).await;
    receiver.wait_for(4).await;
    running.stop().await;
    assert_eq!(receiver.check_order(), 4);
}

#[tokio::test]
async fn a_replay_is_counted_first_and_sent_in_order_with_a_header() {
    let receiver = Receiver::answering(200).await;
    let place = Place::new(&[("ci", &receiver)]);
    let running = place.start().await;
    running.publish_all(&events(&[("1", "a"), ("2", "a"), ("3", "b"), ("4", "a")])).await;
    running.wait_for_status("ci", |status| status["messages"] == 0 && status["lanes"] == 0).await;
    let counted = done(&place, &running, &["replay", "--endpoint", "ci", "--since", "1h", "--dry-run"]).await;
    assert_eq!(counted, "4 messages would be sent again\n");
    let none = json_of(&place, &running, &["replay", "--endpoint", "ci", "--until", "1h"]).await;
    assert_eq!(none, json!({ "messages": 0, "dry_run": false }));
    let attempts = json_of(&place, &running, &["attempts"]).await;
    assert_eq!(attempts.as_array().map(Vec::len), Some(4), "a dry run sends nothing");
    let some = ["replay", "--endpoint", "ci", "--key", "a", "--type", "build.finished", "--outcome", "delivered"];
    assert_eq!(done(&place, &running, &some).await, "3 messages are sent again\n");
    within("the replay", receiver.0.wait_asked(|asked| asked.len() == 7)).await;
    done(&place, &running, &["replay", "--endpoint", "ci", "--event", "3"]).await;
    within("the event", receiver.0.wait_asked(|asked| asked.len() == 8)).await;
    let (_, metrics) = running.call("get", "/metrics", "").await;
    assert!(metrics.contains("journeyman_notifier_replayed_total 4.0"), "{metrics}");
    running.stop().await;
    let asked = receiver.0.asked();
    let is_replay: Vec<_> = asked.iter().map(|one| one.header("journeyman-replay") == Some("true")).collect();
    assert_eq!(is_replay, [false, false, false, false, true, true, true, true]);
    let sent: Vec<_> = receiver.got().into_iter().skip(4).map(|got| (got.lane, got.seq)).collect();
    let expected = [("a", 1), ("a", 2), ("a", 3), ("b", 1)].map(|(lane, seq)| (lane.to_owned(), seq));
    assert_eq!(sent, expected);
}

#[tokio::test]
async fn only_the_head_of_a_lane_can_be_skipped_and_the_lane_goes_on() {
    let (receiver, status) = changing(500).await;
    let place = Place::new(&[("ci", &receiver)]);
    let running = place.start().await;
    running.publish_all(&events(&[("1", "a"), ("2", "a")])).await;
    receiver.wait_for(1).await;
    let lane = json_of(&place, &running, &["lanes"]).await[0]["id"].to_string();
    done(&place, &running, &["pause", "--lane", &lane, "--note", "looking"]).await;
    assert!(done(&place, &running, &["status"]).await.contains("1 paused"));
    let wrong = run(&place, &running, &["skip-head", &lane, "--position", "2", "--reason", "poison"]).await;
    assert_eq!(wrong.status.code(), Some(1));
    assert!(text(&wrong.stderr).contains("not its head"), "{}", text(&wrong.stderr));
    assert_eq!(json_of(&place, &running, &["lanes"]).await[0]["head"], 1);
    done(&place, &running, &["skip-head", &lane, "--position", "1", "--reason", "poison"]).await;
    status.store(200, Ordering::SeqCst);
    done(&place, &running, &["resume", "--lane", &lane]).await;
    receiver.wait_for(2).await;
    running.wait_for_status("ci", |status| status["messages"] == 0).await;
    let (_, metrics) = running.call("get", "/metrics", "").await;
    for line in ["deliveries_total{outcome=\"skipped-by-operator\"} 1.0", "deliveries_total{outcome=\"delivered\"} 1.0"]
    {
        assert!(metrics.contains(line), "{line} in {metrics}");
    }
    running.stop().await;
    assert_eq!(receiver.got().last().map(|got| got.seq), Some(2));
}

#[tokio::test]
async fn a_command_that_may_not_or_cannot_says_what_to_do() {
    let receiver = Receiver::answering(200).await;
    let place = Place::new(&[("ci", &receiver)]);
    std::fs::write(place.path().join("read"), "token-to-read").expect("it is written");
    std::fs::write(place.path().join("wrong"), "wrong-token").expect("it is written");
    let running = place.start_with(&[("JOURNEYMAN__NOTIFIER__READ_TOKEN_FILE", "read")]).await;
    for command in ["status", "endpoints", "lanes", "attempts"] {
        done(&place, &running, &[command, "--token-file", "read"]).await;
        let refused = run(&place, &running, &[command, "--token-file", "wrong"]).await;
        assert_eq!(refused.status.code(), Some(31), "{command}");
    }
    for (arguments, code, says) in [
        (&["pause", "ci", "--token-file", "read"][..], 31, "may read only"),
        (&["replay", "--endpoint", "ci", "--dry-run", "--token-file", "read"], 31, "may read only"),
        (&["skip-head", "1", "--position", "1", "--reason", "no", "--token-file", "read"], 31, "may read only"),
        (&["test", "ci", "--token-file", "wrong"], 31, "notifier.token_file"),
        (&["pause", "cd"], 1, "no endpoint \"cd\""),
        (&["pause", "--lane", "77"], 1, "no lane 77"),
        (&["pause", "ci", "--lane", "77"], 2, "cannot be used with"),
        (&["pause"], 2, "required"),
        (&["replay", "--endpoint", "ci", "--since", "yesterday"], 2, "`2h` ago"),
    ] {
        let refused = run(&place, &running, arguments).await;
        let error = text(&refused.stderr);
        assert_eq!(refused.status.code(), Some(code), "{arguments:?}: {error}");
        assert!(error.contains(says) && !error.contains("wrong-token"), "{arguments:?}: {error}");
    }
    let nowhere = notifier(&place, &["status", "--url", &unused_address().await]).await;
    assert_eq!(nowhere.status.code(), Some(32));
    assert!(text(&nowhere.stderr).contains("is it running?"), "{}", text(&nowhere.stderr));
    let unable = Receiver::answering(503).await;
    let unable = notifier(&place, &["status", "--url", &unable.0.url()]).await;
    assert_eq!(unable.status.code(), Some(32));
    let said = text(&unable.stderr);
    assert!(said.contains("503") && !said.contains("is it running?"), "{said}");
    assert_eq!(running.status("ci").await["state"], "active", "nothing was changed");
    running.stop().await;
}

#[tokio::test]
async fn metrics_count_what_comes_and_goes() {
    let (receiver, status) = changing(200).await;
    let place = Place::new(&[("ci", &receiver)]);
    let running = place.start().await;
    running.publish_all(&events(&[("1", "a"), ("2", "b")])).await;
    running.publish(event("1", "a").to_string()).await;
    running.publish("{}").await;
    running.wait_for_status("ci", |status| status["messages"] == 0).await;
    status.store(503, Ordering::SeqCst);
    running.publish_all(&events(&[("3", "a")])).await;
    running.wait_for_status("ci", |status| status["state"] == "resting").await;
    let (code, metrics) = running.call("get", "/metrics", "").await;
    assert_eq!(code, 200);
    for line in [
        "lanes{endpoint=\"ci\",state=\"open\"} 1.0",
        "messages_pending{endpoint=\"ci\"} 1.0",
        "endpoint_state{endpoint=\"ci\",state=\"resting\"} 1.0",
        "endpoint_state{endpoint=\"ci\",state=\"active\"} 0.0",
        "breaker_open 0.0",
        "deliveries_total{outcome=\"delivered\"} 2.0",
        "attempt_duration_seconds_count{outcome=\"delivered\"} 2.0",
        "attempt_duration_seconds_count{outcome=\"failed\"} 1.0",
        "attempt_errors_total{class=\"status\"} 1.0",
        "attempt_errors_total{class=\"dns\"} 0.0",
        "policy_blocked_total 0.0",
        "intake_total{source=\"http\",result=\"accepted\"} 3.0",
        "intake_total{source=\"http\",result=\"refused\"} 1.0",
        "intake_duplicates_total 1.0",
        "end_to_end_seconds_count 2.0",
    ] {
        assert!(metrics.contains(&format!("journeyman_notifier_{line}\n")), "{line} in {metrics}");
    }
    let age = metrics
        .lines()
        .find_map(|line| line.strip_prefix("journeyman_notifier_lane_head_age_seconds{endpoint=\"ci\"} "));
    assert!(age.and_then(|age| age.parse::<f64>().ok()).is_some_and(|age| age > 0.0), "{metrics}");
    running.stop().await;
}

#[tokio::test]
async fn operators_hear_of_an_endpoint_by_webhook_and_never_through_itself() {
    let receiver = Receiver::by_number(|number| match number {
        0..10 => 500,
        10..20 => 200,
        _ => 410,
    })
    .await;
    let operators = Receiver::answering(200).await;
    let place = Place::new(&[("ci", &receiver), ("ops", &operators)]);
    let running = place
        .start_with(&[
            ("JOURNEYMAN__NOTIFIER__ENDPOINT__OPS__EVENTS", "notifier.*"),
            ("JOURNEYMAN__NOTIFIER__ENDPOINT__CI__EVENTS", "*,notifier.*"),
        ])
        .await;
    let all: Vec<Value> = (0..10).map(|number| event(&number.to_string(), &format!("lane-{number}"))).collect();
    running.publish_all(&all).await;
    operators.wait_for(2).await;
    running.wait_for_status("ci", |status| status["messages"] == 0).await;
    running.publish_all(&events(&[("late", "a")])).await;
    operators.wait_for(3).await;
    let log = running.stop().await;
    let told: Vec<Value> = operators.0.asked().iter().map(|asked| asked.json()).collect();
    let types: Vec<_> = told.iter().filter_map(|told| told["type"].as_str()).collect();
    assert_eq!(types, ["notifier.endpoint.failing", "notifier.endpoint.recovered", "notifier.endpoint.disabled"]);
    assert_eq!((&told[0]["data"]["endpoint"], &told[2]["data"]["reason"]), (&json!("ci"), &json!("gone")));
    assert!(operators.got().iter().all(|got| got.lane == "ci"));
    assert!(receiver.0.asked().iter().all(|asked| asked.json()["type"] == "build.finished"), "not through itself");
    for alert in ["endpoint-failing", "endpoint-disabled"] {
        assert!(log.contains(alert), "{alert} in {log}");
    }
}

#[tokio::test]
async fn f7_a_token_may_send_events_and_nothing_else() {
    let (receiver, _) = changing(200).await;
    let place = Place::new(&[("ci", &receiver)]);
    place.configure_first("publish_token_file = \"publish\"\n");
    place.write("publish", "token-that-publishes");
    let running = place.start().await;
    let client = reqwest::Client::builder().no_proxy().build().expect("a client");
    let call = async |method: &str, path: &str, body: String| {
        let method = method.parse().expect("a method");
        let call = client.request(method, format!("{}{path}", running.address())).bearer_auth("token-that-publishes");
        let call = call.header("content-type", "application/json").body(body).send();
        within("an answer", call).await.expect("it answers").status().as_u16()
    };
    assert_eq!(call("POST", "/v1/events", event("1", "a").to_string()).await, 202);
    receiver.wait_for(1).await;
    for (method, path) in [
        ("GET", "/v1/status"),
        ("GET", "/v1/lanes"),
        ("GET", "/v1/attempts"),
        ("GET", "/unavailable"),
        ("POST", "/v1/endpoints/ci/pause"),
        ("DELETE", "/v1/endpoints/ci"),
        ("POST", "/v1/replay"),
    ] {
        assert_eq!(call(method, path, "{}".to_owned()).await, 403, "{method} {path}");
    }
    running.stop().await;
}

#[tokio::test]
async fn f0_half_sent_and_idle_callers_keep_nobody_out_and_hold_up_no_stop() {
    let (receiver, _) = changing(200).await;
    let place = Place::new(&[("ci", &receiver)]);
    let running = place.start().await;
    let address = running.address().trim_start_matches("http://").to_owned();
    let mut open = Vec::new();
    let half = "content-length: 100\r\n\r\n{".to_owned();
    for (request, count, answered) in [
        (format!("POST /v1/events HTTP/1.1\r\nhost: x\r\n{half}"), 40, Some("HTTP/1.1 401 ")),
        ("GET /metrics HTTP/1.1\r\nhost: x\r\n\r\n".to_owned(), 600, Some("HTTP/1.1 200 ")),
        (format!("POST /v1/events HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {TOKEN}\r\n{half}"), 40, None),
    ] {
        for _ in 0..count {
            let mut stream = within("a connection", TcpStream::connect(&address)).await.expect("it listens");
            stream.write_all(request.as_bytes()).await.expect("it is written");
            if let Some(answered) = answered {
                let mut head = vec![0; answered.len()];
                within("an answer", stream.read_exact(&mut head)).await.expect("it answers");
                assert_eq!(String::from_utf8_lossy(&head), answered);
            }
            open.push(stream);
        }
    }
    running.publish_all(&events(&[("1", "a")])).await;
    receiver.wait_for(1).await;
    let log = running.stop().await;
    assert!(!log.contains("still under way"), "{log}");
}

/// An event that says what is to come of it.
fn telling(id: &str, key: &str, outcome: &str) -> Value {
    let trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
    let data = json!({ "id": id, "outcome": outcome, "note": format!("<{id}>"), "traceparent": trace });
    json!({ "source": "test", "id": id, "type": "build.finished", "key": key, "data": data })
}

/// Endpoints `all`, and `failures`, which gets failed builds only.
async fn messages_are_found_and_exported(place: Place, all: &Receiver, failures: &Receiver) {
    place.configure("\n[notifier.endpoint.failures.filter]\n\"/outcome\" = [\"failed\", \"exception\"]\n");
    let running = place.start().await;
    let many: Vec<Value> = (0..5)
        .map(|number| telling(&format!("e{number}"), "k", if number == 3 { "failed" } else { "completed" }))
        .collect();
    running.publish_all(&many).await;
    all.wait_for(5).await;
    failures.wait_for(1).await;
    let got = failures.got();
    assert!(
        got.len() == 1 && String::from_utf8_lossy(&got[0].body).contains("<e3>"),
        "only what the filter lets through: {got:?}"
    );
    assert_eq!(got[0].traceparent.as_deref(), Some("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"));
    running.wait_for_status("all", |status| status["messages"] == 0).await;
    running.wait_for_status("failures", |status| status["messages"] == 0).await;

    let ids = |page: &Value| {
        let messages = page["messages"].as_array().expect("a list");
        messages.iter().map(|one| one["event_id"].as_str().expect("an id").to_owned()).collect::<Vec<_>>()
    };
    let page = json_of(&place, &running, &["messages", "--endpoint", "all", "--limit", "2"]).await;
    assert_eq!(ids(&page), ["e4", "e3"]);
    let before = page["next"].to_string();
    let page = json_of(&place, &running, &["messages", "--endpoint", "all", "--before", &before]).await;
    assert_eq!((ids(&page), &page["next"]), (vec!["e2".to_owned(), "e1".to_owned(), "e0".to_owned()], &Value::Null));
    for (arguments, found) in [
        (&["--event", "e3"][..], 2),
        (&["--contains", "<e1>"], 1),
        (&["--contains", "no such text"], 0),
        (&["--key", "other"], 0),
        (&["--outcome", "delivered", "--endpoint", "failures"], 1),
        (&["--outcome", "dead"], 0),
    ] {
        let page = json_of(&place, &running, &[&["messages"], arguments].concat()).await;
        assert_eq!(ids(&page).len(), found, "{arguments:?}: {page}");
    }
    let table = done(&place, &running, &["messages"]).await;
    assert!(table.contains("delivered") && !table.contains("<e1>"), "data is shown where it is asked for: {table}");
    let lines = done(&place, &running, &["messages", "--export", "--limit", "1"]).await;
    let lines: Vec<Value> = lines.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
    assert_eq!((lines.len(), &lines[0]["data"]["note"]), (6, &json!("<e4>")), "every page");

    let one = json_of(&place, &running, &["messages", "--event", "e3", "--endpoint", "failures"]).await["messages"][0]
        .clone();
    let (lane, position) = (one["lane"].to_string(), one["position"].to_string());
    let shown = done(&place, &running, &["message", &lane, &position]).await;
    assert!(shown.contains("\"note\":\"<e3>\"") && shown.contains("HTTP 200"), "{shown}");
    let missing = run(&place, &running, &["message", &lane, "999"]).await;
    assert!(text(&missing.stderr).contains("has no message 999"), "{}", text(&missing.stderr));
    let definition: Value =
        serde_json::from_str(&done(&place, &running, &["endpoint", "failures"]).await).expect("JSON");
    assert_eq!((&definition["filter"]["/outcome"][0], &definition["configured"]), (&json!("failed"), &json!(true)));
    assert!(!definition.to_string().contains("/hook"), "the path of a URL may be a secret: {definition}");
    running.stop().await;
}

#[tokio::test]
async fn messages_are_found_by_what_they_are_and_carry_and_are_exported() {
    let (all, failures) = (Receiver::answering(200).await, Receiver::answering(200).await);
    let place = || Place::new(&[("all", &all), ("failures", &failures)]);
    messages_are_found_and_exported(place(), &all, &failures).await;
}

#[tokio::test]
async fn messages_are_found_in_postgresql_as_well() {
    let (all, failures) = (Receiver::answering(200).await, Receiver::answering(200).await);
    let Some(place) = Place::new(&[("all", &all), ("failures", &failures)]).on_postgres().await else { return };
    messages_are_found_and_exported(place, &all, &failures).await;
}

#[tokio::test]
async fn what_was_never_delivered_is_listed_as_dead() {
    let receiver = Receiver::answering(500).await;
    let place = Place::new(&[("ci", &receiver)]);
    let running = place.start().await;
    running.publish_all(&events(&[("1", "a")])).await;
    running.wait_for_status("ci", |status| status["health"]["failures"].as_u64() >= Some(1)).await;
    let waiting = json_of(&place, &running, &["messages", "--outcome", "waiting"]).await;
    assert_eq!(waiting["messages"][0]["event_id"], "1");
    let lane = waiting["messages"][0]["lane"].to_string();
    done(&place, &running, &["skip-head", &lane, "--position", "1", "--reason", "obsolete"]).await;
    let dead = json_of(&place, &running, &["messages", "--outcome", "dead"]).await;
    assert_eq!(
        (&dead["messages"][0]["outcome"], &dead["messages"][0]["note"]),
        (&json!("skipped-by-operator"), &json!("obsolete"))
    );
    running.stop().await;
}

#[tokio::test]
async fn metrics_go_to_the_collector_of_opentelemetry() {
    let (sender, mut posted) = tokio::sync::mpsc::unbounded_channel();
    let collector = serve(axum::Router::new().fallback(async move |uri: Uri, body: Bytes| {
        if uri.path() == "/v1/metrics" {
            sender.send(ExportMetricsServiceRequest::decode(body).expect("OTLP")).unwrap_or_default();
        }
    }));
    let receiver = Receiver::answering(200).await;
    let place = Place::new(&[("ci", &receiver)]);
    let variables = [("OTEL_EXPORTER_OTLP_ENDPOINT", collector.as_str()), ("OTEL_METRIC_EXPORT_INTERVAL", "100")];
    let running = place.start_with(&variables).await;
    running.publish_all(&events(&[("1", "a"), ("2", "b")])).await;
    let delivered = |request: &ExportMetricsServiceRequest| {
        let of = &request.resource_metrics[0];
        assert_eq!(texts(&of.resource.as_ref().expect("a resource").attributes)["journeyman.role"], "notifier");
        let mut metrics = of.scope_metrics[0].metrics.iter();
        let found = metrics.find(|metric| metric.name == "journeyman_notifier_deliveries").expect("the deliveries");
        let Some(Data::Sum(sum)) = &found.data else { panic!("{found:?}") };
        let is_delivered = |point: &&NumberDataPoint| texts(&point.attributes)["outcome"] == "delivered";
        sum.data_points.iter().find(is_delivered).expect("an outcome").value
    };
    let both = async {
        while delivered(&posted.recv().await.expect("a request")) != Some(number_data_point::Value::AsDouble(2.0)) {}
    };
    within("two deliveries in the metrics", both).await;
}
