//! An OpenTelemetry collector, found by OpenTelemetry's variables and reached by OTLP over HTTP, in protobuf.

use std::time::Duration;

use opentelemetry_proto::tonic::common::v1::{AnyValue, InstrumentationScope, KeyValue, any_value::Value};
use opentelemetry_proto::tonic::resource::v1::Resource;
use reqwest::Client;
use reqwest::header::{CONTENT_TYPE, HeaderMap, HeaderName, HeaderValue};
use url::Url;

use crate::http::client::{client_builder, root_cause};
use crate::redact;
use crate::settings::Environment;
use journeyman_domain::limits::TRACES_EXPORT_TIMEOUT;

const PROTOCOL: &str = "http/protobuf";

/// What is exported.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Signal {
    Traces,
    Metrics,
    Logs,
}

impl Signal {
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Traces => "traces",
            Self::Metrics => "metrics",
            Self::Logs => "logs",
        }
    }

    fn variable<'a>(self, environment: &'a Environment, rest: &str) -> Option<&'a str> {
        environment.get(&format!("OTEL_{}", rest.replace("SIGNAL", &self.as_str().to_ascii_uppercase())))
    }
}

/// The URL to which a signal is exported; `None` if it is not.
///
/// # Errors
///
/// A variable that cannot be used.
fn collector_url(signal: Signal, environment: &Environment) -> Result<Option<Url>, String> {
    let disabled = environment.get("OTEL_SDK_DISABLED").is_some_and(|text| text.eq_ignore_ascii_case("true"));
    if disabled || signal.variable(environment, "SIGNAL_EXPORTER") == Some("none") {
        return Ok(None);
    }
    let exact = signal.variable(environment, "EXPORTER_OTLP_SIGNAL_ENDPOINT").map(str::to_owned);
    let below = |base: &str| format!("{}/v1/{}", base.trim_end_matches('/'), signal.as_str());
    let Some(text) = exact.or_else(|| environment.get("OTEL_EXPORTER_OTLP_ENDPOINT").map(below)) else {
        return Ok(None);
    };
    let protocol =
        [signal.variable(environment, "EXPORTER_OTLP_SIGNAL_PROTOCOL"), environment.get("OTEL_EXPORTER_OTLP_PROTOCOL")];
    if let Some(protocol) = protocol.into_iter().flatten().next().filter(|protocol| *protocol != PROTOCOL) {
        return Err(format!("OTEL_EXPORTER_OTLP_PROTOCOL is {protocol:?}; only {PROTOCOL:?} is supported"));
    }
    let url = Url::parse(&text).ok().filter(|url| matches!(url.scheme(), "http" | "https") && url.has_host());
    url.map(Some).ok_or_else(|| "OTEL_EXPORTER_OTLP_ENDPOINT is not a URL such as http://127.0.0.1:4318".to_owned())
}

/// The headers that an operator sets for the collector. They often carry a token, which no log shows.
fn headers(signal: Signal, environment: &Environment) -> HeaderMap {
    let own = signal.variable(environment, "EXPORTER_OTLP_SIGNAL_HEADERS");
    let all =
        [environment.get("OTEL_EXPORTER_OTLP_HEADERS"), own].into_iter().flatten().flat_map(|text| text.split(','));
    let mut headers = HeaderMap::new();
    for (name, value) in all.filter_map(|pair| pair.split_once('=')) {
        let Ok(value) = urlencoding::decode(value.trim()) else { continue };
        redact::hide([&*value]).until_exit();
        if let (Ok(name), Ok(value)) = (name.trim().parse::<HeaderName>(), HeaderValue::from_str(&value)) {
            headers.insert(name, value);
        }
    }
    headers
}

pub fn attribute(key: &str, value: &str) -> KeyValue {
    let value = Some(AnyValue { value: Some(Value::StringValue(value.to_owned())) });
    KeyValue { key: key.to_owned(), value, ..KeyValue::default() }
}

pub fn scope() -> InstrumentationScope {
    let (name, version) = ("journeyman".to_owned(), env!("CARGO_PKG_VERSION").to_owned());
    InstrumentationScope { name, version, ..InstrumentationScope::default() }
}

pub fn number(key: &str, value: i64) -> KeyValue {
    KeyValue {
        key: key.to_owned(),
        value: Some(AnyValue { value: Some(Value::IntValue(value)) }),
        ..KeyValue::default()
    }
}

/// The attributes of a role.
pub fn resource(environment: &Environment, role: &str, instance: &str) -> Resource {
    resource_of(environment, [attribute("service.instance.id", instance), attribute("journeyman.role", role)])
}

/// The attributes of a process whose role is not known yet.
pub(crate) fn process_resource(environment: &Environment) -> Resource {
    resource_of(environment, [number("process.pid", std::process::id().into())])
}

/// The operator's attributes override these.
fn resource_of(environment: &Environment, own: impl IntoIterator<Item = KeyValue>) -> Resource {
    let mut attributes = vec![
        attribute("service.name", environment.get("OTEL_SERVICE_NAME").unwrap_or("journeyman")),
        attribute("service.version", env!("CARGO_PKG_VERSION")),
    ];
    attributes.extend(own);
    let given = environment.get("OTEL_RESOURCE_ATTRIBUTES").unwrap_or_default().split(',');
    for (key, value) in given.filter_map(|pair| pair.split_once('=')) {
        let value = urlencoding::decode(value.trim()).unwrap_or_default();
        attributes.retain(|known| known.key != key.trim());
        attributes.push(attribute(key.trim(), &value));
    }
    Resource { attributes, ..Resource::default() }
}

/// Sends what one signal exports. A collector that does not accept it costs what was sent, and is logged once.
#[derive(Debug)]
pub struct Exporter {
    signal: Signal,
    url: Url,
    http: Client,
    is_failing: bool,
}

impl Exporter {
    /// `None` if the signal is not exported.
    ///
    /// # Errors
    ///
    /// A variable that cannot be used.
    pub fn from_environment(signal: Signal, environment: &Environment) -> Result<Option<Self>, String> {
        let made = collector_url(signal, environment).and_then(|url| {
            let Some(url) = url else { return Ok(None) };
            let client = client_builder().timeout(TRACES_EXPORT_TIMEOUT).default_headers(headers(signal, environment));
            let http = client.build().map_err(|error| error.to_string())?;
            tracing::info!(host = url.host_str().unwrap_or_default(), "{} are exported", signal.as_str());
            Ok(Some(Self { signal, url, http, is_failing: false }))
        });
        made.map_err(|error| format!("cannot export {}: {error}", signal.as_str()))
    }

    /// Sends one request, once; returns whether the collector has accepted it.
    pub async fn send(&mut self, request: &impl prost::Message) -> bool {
        let sent = self
            .http
            .post(self.url.clone())
            .header(CONTENT_TYPE, "application/x-protobuf")
            .body(request.encode_to_vec());
        let failure = match sent.send().await {
            Ok(answer) if answer.status().is_success() => None,
            Ok(answer) => Some(format!("it answered {}", answer.status())),
            Err(error) => Some(root_cause(&error)),
        };
        let was_failing = std::mem::replace(&mut self.is_failing, failure.is_some());
        let signal = self.signal.as_str();
        match failure {
            // A log about logs would be one more to send.
            Some(why) if !was_failing => {
                tracing::warn!("dropping {signal}, tasks are not affected: the collector: {why}")
            }
            None if was_failing => tracing::info!("the collector accepts {signal} again"),
            Some(_) | None => {}
        }
        !self.is_failing
    }
}

/// How often metrics are exported: `OTEL_METRIC_EXPORT_INTERVAL`, in milliseconds.
pub fn metric_interval(environment: &Environment) -> Duration {
    let millis = environment.get("OTEL_METRIC_EXPORT_INTERVAL").and_then(|text| text.parse().ok());
    Duration::from_millis(millis.unwrap_or(60_000).max(100))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_variables_of_opentelemetry_name_the_collector() {
        let url = |variables: &[(&str, &str)]| {
            collector_url(Signal::Traces, &Environment::from_pairs(variables)).unwrap().map(|url| url.to_string())
        };
        let all = ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://a:4318/");
        let traces = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "https://b/here");
        assert_eq!(url(&[]), None);
        assert_eq!(url(&[all]).as_deref(), Some("http://a:4318/v1/traces"));
        assert_eq!(url(&[all, traces]).as_deref(), Some("https://b/here"));
        for off in [("OTEL_SDK_DISABLED", "true"), ("OTEL_TRACES_EXPORTER", "none")] {
            assert_eq!(url(&[all, off]), None);
        }
    }

    #[test]
    fn headers_are_those_of_the_signal_and_of_all() {
        let all = ("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Basic%20otlp-canary-7c1d, x-a=1");
        let own = ("OTEL_EXPORTER_OTLP_LOGS_HEADERS", "x-a=2,broken,=,bad name=1");
        let environment = Environment::from_pairs(&[all, own]);
        let found = headers(Signal::Logs, &environment);
        let text = |headers: &HeaderMap, name: &str| headers[name].to_str().unwrap().to_owned();
        assert_eq!([text(&found, "authorization"), text(&found, "x-a")], ["Basic otlp-canary-7c1d", "2"]);
        assert_eq!((found.len(), text(&headers(Signal::Metrics, &environment), "x-a").as_str()), (2, "1"));
        assert!(!redact::text("Basic otlp-canary-7c1d").contains("canary"), "no log shows it");
    }
}
