//! Where traces go: the configuration's own table, and the variables that every OpenTelemetry program knows.

use std::time::Duration;

use super::Environment;
use super::schema::Telemetry;
use crate::limits::{TRACES_TIMEOUT, TRACES_TIMEOUT_MAX};

/// The only protocol that is spoken.
const PROTOCOL: &str = "http/protobuf";
/// Where traces go below a collector's address.
const TRACES_PATH: &str = "v1/traces";

/// A collector, and what to tell it of this process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CollectorConfig {
    /// Where traces are posted.
    pub endpoint: url::Url,
    /// What every request carries on top; often a secret.
    pub headers: Vec<NameValue>,
    /// How long it may take to answer.
    pub timeout: Duration,
    /// What this service is called.
    pub service_name: String,
    /// What else is known of this process.
    pub attributes: Vec<NameValue>,
}

/// A name and its value.
#[derive(Clone, PartialEq, Eq)]
pub struct NameValue {
    /// The name.
    pub name: String,
    /// The value.
    pub value: String,
}

impl std::fmt::Debug for NameValue {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(out, "{}=...", self.name)
    }
}

/// The collector that is named, if any is.
///
/// # Errors
///
/// A sentence that says what is wrong with the variables.
pub fn collector_config(telemetry: &Telemetry, environment: &Environment) -> Result<Option<CollectorConfig>, String> {
    let variable = |name: &str| environment.get(name).map(str::trim).filter(|text| !text.is_empty());
    let either = |name: &str| {
        let [traces, all] = [format!("OTEL_EXPORTER_OTLP_TRACES_{name}"), format!("OTEL_EXPORTER_OTLP_{name}")];
        variable(&traces).or_else(|| variable(&all))
    };
    let off = variable("OTEL_SDK_DISABLED").is_some_and(|text| text.eq_ignore_ascii_case("true"))
        || variable("OTEL_TRACES_EXPORTER") == Some("none");
    let own = telemetry.otlp_endpoint.as_ref().map(|url| traces_url(url.as_str()));
    let named = || variable("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT").map(str::to_owned);
    let base = || variable("OTEL_EXPORTER_OTLP_ENDPOINT").map(traces_url);
    let given = own.is_none();
    let Some(endpoint) = own.or_else(|| (!off).then(|| named().or_else(base)).flatten()) else { return Ok(None) };
    if let Some(protocol) = either("PROTOCOL").filter(|protocol| given && *protocol != PROTOCOL) {
        return Err(format!("OTEL_EXPORTER_OTLP_PROTOCOL is {protocol:?}, but only {PROTOCOL:?} is spoken"));
    }
    let endpoint = url::Url::parse(&endpoint)
        .ok()
        .filter(|url| matches!(url.scheme(), "http" | "https") && url.has_host())
        .ok_or("OTEL_EXPORTER_OTLP_ENDPOINT is no address such as http://127.0.0.1:4318")?;
    let timeout = match either("TIMEOUT").map(str::parse) {
        None => TRACES_TIMEOUT,
        Some(Ok(millis)) => Duration::from_millis(millis).clamp(Duration::from_millis(1), TRACES_TIMEOUT_MAX),
        Some(Err(_)) => return Err("OTEL_EXPORTER_OTLP_TIMEOUT is no number of milliseconds".to_owned()),
    };
    let headers = pairs(either("HEADERS").unwrap_or_default());
    let headers = headers.ok_or("OTEL_EXPORTER_OTLP_HEADERS is no list of NAME=VALUE with commas between")?;
    let mut attributes = pairs(variable("OTEL_RESOURCE_ATTRIBUTES").unwrap_or_default())
        .ok_or("OTEL_RESOURCE_ATTRIBUTES is no list of NAME=VALUE with commas between")?;
    let called = attributes.iter().position(|pair| pair.name == "service.name").map(|at| attributes.remove(at).value);
    let service_name =
        variable("OTEL_SERVICE_NAME").map(str::to_owned).or(called).unwrap_or_else(|| "journeyman".to_owned());
    Ok(Some(CollectorConfig { endpoint, headers, timeout, service_name, attributes }))
}

fn traces_url(base: &str) -> String {
    format!("{}/{TRACES_PATH}", base.trim_end_matches('/'))
}

/// `NAME=VALUE` with commas between, values encoded as in a URL.
fn pairs(text: &str) -> Option<Vec<NameValue>> {
    let parts = text.split(',').map(str::trim).filter(|part| !part.is_empty());
    let pair = |part: &str| {
        let (name, value) = part.split_once('=')?;
        let decoded = |text: &str| urlencoding::decode(text.trim()).ok().map(std::borrow::Cow::into_owned);
        Some(NameValue { name: decoded(name)?, value: decoded(value)? }).filter(|pair| !pair.name.is_empty())
    };
    parts.map(pair).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(otlp: Option<&str>, variables: &[(&str, &str)]) -> Result<Option<CollectorConfig>, String> {
        let telemetry = Telemetry { otlp_endpoint: otlp.map(|url| url.parse().unwrap()) };
        collector_config(&telemetry, &Environment::from_pairs(variables))
    }

    fn endpoint(otlp: Option<&str>, variables: &[(&str, &str)]) -> Option<String> {
        of(otlp, variables).unwrap().map(|collector| collector.endpoint.to_string())
    }

    #[test]
    fn the_configuration_comes_before_the_variables_and_nothing_is_sent_unless_one_of_them_says_so() {
        let all = ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://a:4318/");
        let traces = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "https://b/here");
        assert_eq!(endpoint(None, &[]), None);
        assert_eq!(endpoint(None, &[all]).as_deref(), Some("http://a:4318/v1/traces"));
        assert_eq!(endpoint(None, &[all, traces]).as_deref(), Some("https://b/here"));
        assert_eq!(endpoint(Some("http://c:1/x"), &[all, traces]).as_deref(), Some("http://c:1/x/v1/traces"));
        for off in [("OTEL_SDK_DISABLED", "true"), ("OTEL_TRACES_EXPORTER", "none")] {
            assert_eq!(endpoint(None, &[all, off]), None);
            assert!(endpoint(Some("http://c:1"), &[off]).is_some(), "who writes it into the configuration means it");
        }
    }

    #[test]
    fn headers_attributes_names_and_times_are_read_as_the_specification_says() {
        let read = of(
            None,
            &[
                ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://a"),
                ("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Bearer%20x%3D, x-tenant = t "),
                ("OTEL_EXPORTER_OTLP_TIMEOUT", "2500"),
                ("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf"),
                ("OTEL_RESOURCE_ATTRIBUTES", "service.name=old,deployment.environment=test"),
            ],
        );
        let read = read.unwrap().unwrap();
        let pair = |name: &str, value: &str| NameValue { name: name.to_owned(), value: value.to_owned() };
        assert_eq!(read.headers, [pair("authorization", "Bearer x="), pair("x-tenant", "t")]);
        assert_eq!(read.attributes, [pair("deployment.environment", "test")]);
        assert_eq!((read.service_name.as_str(), read.timeout), ("old", Duration::from_millis(2500)));
        assert!(!format!("{read:?}").contains("Bearer"), "a header is often a secret");
        let all = ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://a");
        let named = of(None, &[all, ("OTEL_SERVICE_NAME", "new"), ("OTEL_RESOURCE_ATTRIBUTES", "service.name=old")]);
        assert_eq!(named.unwrap().unwrap().service_name, "new");
    }

    #[test]
    fn what_cannot_be_read_or_spoken_is_said_by_its_name_and_without_its_value() {
        let all = ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://a");
        for (name, value) in [
            ("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc"),
            ("OTEL_EXPORTER_OTLP_TIMEOUT", "soon"),
            ("OTEL_EXPORTER_OTLP_HEADERS", "s3cret"),
            ("OTEL_RESOURCE_ATTRIBUTES", "=x"),
        ] {
            let said = of(None, &[all, (name, value)]).unwrap_err();
            assert!(said.contains(name) && !said.contains("s3cret"), "{said}");
        }
        assert!(of(None, &[("OTEL_EXPORTER_OTLP_ENDPOINT", "localhost:4317")]).is_err());
    }
}
