//! A worker that exports traces, metrics and logs, and collectors good and bad.

use std::collections::BTreeMap;
use std::net::TcpListener;
use std::sync::mpsc;

use axum::body::Bytes;
use axum::http::{HeaderMap, Uri};
use axum::response::Redirect;
use opentelemetry_proto::tonic::collector::logs::v1::ExportLogsServiceRequest;
use opentelemetry_proto::tonic::collector::metrics::v1::ExportMetricsServiceRequest;
use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceRequest;
use opentelemetry_proto::tonic::common::v1::{KeyValue, any_value::Value};
use opentelemetry_proto::tonic::metrics::v1::{NumberDataPoint, metric::Data, number_data_point};
use opentelemetry_proto::tonic::trace::v1::Span;
use prost::Message as _;
use rustix::process::Signal;

use crate::cli::host::Host;
use crate::cli::server::{Server, serve};
use crate::cli::support::TIMEOUT;

/// A request to a collector.
struct Posted {
    path: String,
    headers: HeaderMap,
    body: ExportTraceServiceRequest,
}

/// A collector that takes everything, its address, and the traces that it gets.
fn collector() -> (String, mpsc::Receiver<Posted>) {
    let (sender, posted) = mpsc::channel();
    let router = axum::Router::new().fallback(async move |uri: Uri, headers: HeaderMap, body: Bytes| {
        if uri.path() == "/v1/traces" {
            let body = ExportTraceServiceRequest::decode(body).expect("OTLP");
            // The test may have ended.
            sender.send(Posted { path: uri.path().to_owned(), headers, body }).unwrap_or_default();
        }
    });
    (serve(router), posted)
}

fn spans(all: &[Posted]) -> impl Iterator<Item = &Span> {
    all.iter().flat_map(|one| &one.body.resource_spans).flat_map(|one| &one.scope_spans).flat_map(|one| &one.spans)
}

/// The requests until so many claims have their spans.
fn receive_spans_of(claims: usize, posted: &mpsc::Receiver<Posted>) -> Vec<Posted> {
    let mut all = Vec::new();
    while spans(&all).filter(|span| span.name == "task").count() < claims {
        all.push(posted.recv_timeout(TIMEOUT).expect("the spans come"));
    }
    all
}

pub(crate) fn texts(attributes: &[KeyValue]) -> BTreeMap<&str, String> {
    let text = |pair: &KeyValue| {
        let value = pair.value.as_ref()?.value.as_ref()?;
        let number = if let Value::IntValue(number) = value { Some(number.to_string()) } else { None };
        if let Value::StringValue(text) = value { Some(text.clone()) } else { number }
    };
    attributes.iter().filter_map(|pair| Some((pair.key.as_str(), text(pair)?))).collect()
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[test]
fn a_run_is_a_child_span_of_its_creator_with_child_spans_for_its_phases() {
    let host = Host::with_queue();
    let (address, posted) = collector();
    let mut command = host.worker();
    command.env("OTEL_EXPORTER_OTLP_ENDPOINT", &address).env("OTEL_SERVICE_NAME", "builders");
    command.env("OTEL_EXPORTER_OTLP_HEADERS", "x-key=otel-canary-7391").env("OTEL_RESOURCE_ATTRIBUTES", "zone=eu");
    // This dialect has no long poll that its end would wait for.
    let mut server = Server::start(command.args(["--set", "source.ci.dialect=azure"]));
    server.logs("traces are exported");
    let definition = serde_json::json!({
        "provisionerId": "build", "workerType": "linux",
        "payload": { "command": [["/bin/sh", "-c", "echo TRACE $TRACEPARENT"]], "maxRunTime": 600 },
        "extra": { "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01" },
    });
    let create = |definition: &str| {
        let created = host.task(&["create", "--wait", "--definition", definition]);
        assert_eq!(created.code, 0, "{}{}", created.out, created.err);
        created.out.split_whitespace().next().expect("the id").to_owned()
    };
    let id = create(&definition.to_string());
    create(&definition.to_string().replace("331-01", "331-00"));
    assert_eq!(host.task(&["create", "--wait", "--queue", "build/linux", "--", "/bin/false"]).code, 1);
    // An exiting worker waits for its last export only for a moment.
    let mut all = receive_spans_of(2, &posted);
    server.signal(Signal::QUIT);
    let said = server.ends_with(14);
    assert!(!said.err.contains("otel-canary"), "{}", said.err);

    all.extend(posted.try_iter());
    for one in &all {
        assert_eq!(one.path, "/v1/traces");
        let headers = ["content-type", "x-key"].map(|name| one.headers[name].to_str().expect("text"));
        assert_eq!(headers, ["application/x-protobuf", "otel-canary-7391"]);
        let resource = one.body.resource_spans[0].resource.as_ref().expect("a resource");
        let texts = texts(&resource.attributes);
        assert_eq!((texts["service.name"].as_str(), texts["zone"].as_str()), ("builders", "eu"), "{texts:?}");
        assert!(texts.contains_key("service.instance.id") && texts.contains_key("service.version"), "{texts:?}");
    }
    let spans: Vec<&Span> = spans(&all).collect();
    let runs: Vec<&&Span> = spans.iter().filter(|span| span.name == "task").collect();
    assert_eq!(runs.len(), 2, "an unsampled trace has no span");
    let mine = runs.iter().find(|span| texts(&span.attributes)["journeyman.task"] == id).expect("its span");
    assert_eq!(hex(&mine.trace_id), "0af7651916cd43dd8448eb211c80319c");
    assert_eq!(hex(&mine.parent_span_id), "b7ad6b7169203331");
    let attributes = texts(&mine.attributes);
    let attributes = ["journeyman.run", "journeyman.source", "journeyman.end"].map(|key| attributes[key].as_str());
    assert_eq!(attributes, ["0", "ci", "completed"]);
    assert_eq!(mine.status.as_ref().map(|status| status.code), Some(0));

    let below: Vec<&&Span> = spans.iter().filter(|span| span.parent_span_id == mine.span_id).collect();
    let names: Vec<&str> = below.iter().map(|span| span.name.as_str()).collect();
    assert_eq!(names, ["claim", "prepare", "run", "upload", "report"]);
    let mut last = mine.start_time_unix_nano;
    for span in &below {
        assert_eq!(span.trace_id, mine.trace_id);
        assert!(last <= span.start_time_unix_nano && span.start_time_unix_nano <= span.end_time_unix_nano, "{span:?}");
        assert!(span.end_time_unix_nano <= mine.end_time_unix_nano, "{span:?}");
        last = span.start_time_unix_nano;
    }
    let log = host.task(&["log", &id]).out;
    let expected = format!("TRACE 00-0af7651916cd43dd8448eb211c80319c-{}-01", hex(&below[2].span_id));
    assert!(log.contains(&expected), "{expected} in {log}");

    let other = runs.iter().find(|span| texts(&span.attributes)["journeyman.task"] != id).expect("its span");
    assert!(other.parent_span_id.is_empty() && other.trace_id != mine.trace_id, "a trace of its own: {other:?}");
    let status = other.status.as_ref().expect("a status");
    assert_eq!((status.message.as_str(), status.code), ("failed", 2));
}

#[test]
fn metrics_and_the_log_go_to_the_collector_without_secrets() {
    let host = Host::with_queue();
    let (sender, posted) = mpsc::channel();
    let address = serve(axum::Router::new().fallback(async move |uri: Uri, headers: HeaderMap, body: Bytes| {
        sender.send((uri.path().to_owned(), headers, body)).unwrap_or_default();
    }));
    let mut command = host.worker();
    command.env("OTEL_EXPORTER_OTLP_ENDPOINT", &address).env("OTEL_TRACES_EXPORTER", "none");
    command.env("OTEL_METRIC_EXPORT_INTERVAL", "100").env("OTEL_EXPORTER_OTLP_HEADERS", "x-key=otel-canary-7393");
    let mut server = Server::start(command.args(["--set", "source.ci.dialect=azure"]));
    server.logs("source: ");
    let id = host.create(&["--", "/bin/true"]);
    assert_eq!(host.task(&["wait", &id]).code, 0);
    let (mut completed, mut logged) = (false, false);
    while !(completed && logged) {
        let (path, headers, body) = posted.recv_timeout(TIMEOUT).expect("metrics and lines come");
        assert_eq!(headers["x-key"], "otel-canary-7393");
        assert!(!String::from_utf8_lossy(&body).contains("otel-canary"), "{path}");
        if path == "/v1/metrics" {
            let request = ExportMetricsServiceRequest::decode(body).expect("OTLP");
            let of = &request.resource_metrics[0];
            let texts = texts(&of.resource.as_ref().expect("a resource").attributes);
            assert_eq!((texts["service.name"].as_str(), texts["journeyman.role"].as_str()), ("journeyman", "worker"));
            let found =
                of.scope_metrics[0].metrics.iter().find(|metric| metric.name == "journeyman_tasks").expect("the tasks");
            let Some(Data::Sum(sum)) = &found.data else { panic!("{found:?}") };
            let is_completed = |point: &&NumberDataPoint| {
                crate::cli::traces::texts(&point.attributes).get("outcome").map(String::as_str) == Some("completed")
            };
            let point = sum.data_points.iter().find(is_completed).expect("an outcome");
            completed |= point.value == Some(number_data_point::Value::AsDouble(1.0));
        } else {
            assert_eq!(path, "/v1/logs");
            let request = ExportLogsServiceRequest::decode(body).expect("OTLP");
            let lines = request.resource_logs.iter().flat_map(|of| &of.scope_logs).flat_map(|of| &of.log_records);
            for line in lines {
                let texts = texts(&line.attributes);
                logged |= texts.get("claim.run") == Some(&format!("{id}/0"))
                    && texts.get("outcome").map(String::as_str) == Some("completed");
            }
        }
    }
    server.quit();
}

#[test]
fn an_unreachable_or_silent_collector_does_not_affect_tasks() {
    let silent = TcpListener::bind("127.0.0.1:0").expect("a port");
    let dead = TcpListener::bind("127.0.0.1:0").expect("a port").local_addr().expect("bound");
    for (address, message) in [
        (format!("http://{}", silent.local_addr().expect("bound")), "the last spans are lost"),
        (format!("http://{dead}"), "dropping traces, tasks are not affected"),
    ] {
        let host = Host::with_queue();
        let mut command = host.worker();
        command.env("OTEL_EXPORTER_OTLP_ENDPOINT", address);
        let server = Server::start(command.args(["--max-tasks", "20", "--capacity", "4"]));
        for _ in 0..20 {
            host.create(&["--", "/bin/true"]);
        }
        let said = server.ends_with(13);
        assert_eq!(said.err.matches("\"outcome\":\"completed\"").count(), 20, "{}", said.err);
        assert!(said.err.contains(message), "{}", said.err);
    }
}

#[test]
fn a_redirect_of_the_collector_is_not_followed() {
    let (other, posted) = collector();
    let address = serve(axum::Router::new().fallback(async move || Redirect::temporary(&other)));
    let host = Host::with_queue();
    let mut command = host.worker();
    command.env("OTEL_EXPORTER_OTLP_ENDPOINT", &address).env("OTEL_EXPORTER_OTLP_HEADERS", "x-key=otel-canary-7392");
    let server = Server::start(command.args(["--max-tasks", "1"]));
    host.create(&["--", "/bin/true"]);
    let said = server.ends();
    assert!(said.err.contains("dropping traces"), "{}", said.err);
    assert!(posted.try_recv().is_err(), "the spans and the headers went to another host");
}

#[test]
fn invalid_trace_variables_are_logged_and_do_not_stop_the_worker() {
    let host = Host::with_queue();
    let mut command = host.worker();
    command.env("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:4317").env("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc");
    let mut server = Server::start(&mut command);
    server.logs("cannot export logs");
    let line = server.logs("cannot export traces");
    assert!(line.contains("OTEL_EXPORTER_OTLP_PROTOCOL"), "{line}");
    server.logs("source: ");
    server.quit();
}
