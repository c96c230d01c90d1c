//! The log of this process for an OpenTelemetry collector. The thread that writes it sends it, so nothing waits for a collector; lines
//! that come meanwhile are sent together.

use std::io::{self, Write};

use opentelemetry_proto::tonic::collector::logs::v1::ExportLogsServiceRequest;
use opentelemetry_proto::tonic::common::v1::{AnyValue, any_value::Value};
use opentelemetry_proto::tonic::logs::v1::{LogRecord, ResourceLogs, ScopeLogs};
use opentelemetry_proto::tonic::resource::v1::Resource;
use serde_json::{Map, Value as Json};
use tokio::runtime::{Builder, Runtime};

use crate::otlp::{Exporter, Signal, attribute, process_resource, scope};
use crate::settings::Environment;
use crate::tasks::build_runtime;
use journeyman_domain::limits::LOG_LINES_SENT_MAX;

/// The crates that send lines. To send what they log would make them log more, without an end.
const SENDING_CRATES: [&str; 8] =
    ["hyper", "hyper_rustls", "hyper_util", "mio", "reqwest", "rustls", "rustls_platform_verifier", "want"];

/// Writes lines of JSON to a collector.
pub(crate) struct OtlpWriter {
    exporter: Exporter,
    resource: Resource,
    runtime: Runtime,
    lines: Vec<LogRecord>,
}

impl OtlpWriter {
    /// `None` if logs are not exported.
    ///
    /// # Errors
    ///
    /// Why they cannot be.
    pub(crate) fn from_environment(environment: &Environment) -> Result<Option<Self>, String> {
        let Some(exporter) = Exporter::from_environment(Signal::Logs, environment)? else { return Ok(None) };
        let runtime = build_runtime(&mut Builder::new_current_thread())
            .map_err(|error| format!("cannot export logs: {error}"))?;
        let resource = process_resource(environment);
        Ok(Some(Self { exporter, resource, runtime, lines: Vec::new() }))
    }
}

impl Write for OtlpWriter {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        let parsed = serde_json::from_slice::<Map<String, Json>>(line).ok();
        let is_sent = |line: &Map<String, Json>| {
            let target = line.get("target").and_then(Json::as_str).unwrap_or_default();
            !SENDING_CRATES.contains(&target.split("::").next().unwrap_or_default())
        };
        self.lines.extend(parsed.filter(is_sent).map(record));
        if self.lines.len() >= LOG_LINES_SENT_MAX {
            self.flush()?;
        }
        Ok(line.len())
    }

    /// Called when no line waits.
    fn flush(&mut self) -> io::Result<()> {
        let log_records = std::mem::take(&mut self.lines);
        if !log_records.is_empty() {
            let scope_logs = vec![ScopeLogs { scope: Some(scope()), log_records, ..ScopeLogs::default() }];
            let resource = Some(self.resource.clone());
            let resource_logs = vec![ResourceLogs { resource, scope_logs, ..ResourceLogs::default() }];
            self.runtime.block_on(self.exporter.send(&ExportLogsServiceRequest { resource_logs }));
        }
        Ok(())
    }
}

fn record(mut line: Map<String, Json>) -> LogRecord {
    let mut take = |key: &str| line.remove(key).and_then(|value| value.as_str().map(str::to_owned)).unwrap_or_default();
    let (at, level, message, trace) = (take("timestamp"), take("level"), take("message"), take("trace_id"));
    let nanos =
        at.parse::<jiff::Timestamp>().ok().and_then(|at| u64::try_from(at.as_nanosecond()).ok()).unwrap_or_default();
    let severity_number = match level.as_str() {
        "TRACE" => 1,
        "DEBUG" => 5,
        "WARN" => 13,
        "ERROR" => 17,
        _ => 9,
    };
    let text = |value: &Json| value.as_str().map_or_else(|| value.to_string(), str::to_owned);
    let trace_id = u128::from_str_radix(&trace, 16).map_or_else(|_| Vec::new(), |trace| trace.to_be_bytes().to_vec());
    LogRecord {
        time_unix_nano: nanos,
        observed_time_unix_nano: nanos,
        severity_number,
        severity_text: level,
        body: Some(AnyValue { value: Some(Value::StringValue(message)) }),
        attributes: line.iter().map(|(key, value)| attribute(key, &text(value))).collect(),
        trace_id,
        ..LogRecord::default()
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn lines_of_own_handlers_are_sent_and_those_of_sending_are_not() {
        let url = ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1");
        let mut writer = OtlpWriter::from_environment(&Environment::from_pairs(&[url])).unwrap().unwrap();
        for target in ["reqwest::connect", "my_handler::render", "journeyman_worker::engine"] {
            writer.write_all(json!({ "target": target, "message": target }).to_string().as_bytes()).unwrap();
        }
        assert_eq!(writer.lines.len(), 2);
    }

    #[test]
    fn a_line_keeps_its_time_level_fields_and_trace() {
        let line = json!({
            "timestamp": "2026-11-29T10:00:00.5Z", "level": "WARN", "message": "claim lost", "claim.run": "T/0", "slots": 3,
            "trace_id": "0af7651916cd43dd8448eb211c80319c",
        });
        let Json::Object(line) = line else { panic!("an object") };
        let record = record(line);
        assert_eq!((record.time_unix_nano, record.severity_number), (1_795_946_400_500_000_000, 13));
        assert_eq!(record.body, Some(AnyValue { value: Some(Value::StringValue("claim lost".to_owned())) }));
        assert_eq!(record.attributes, [attribute("claim.run", "T/0"), attribute("slots", "3")]);
        assert_eq!((record.trace_id.len(), record.trace_id[0]), (16, 0x0a));
    }
}
