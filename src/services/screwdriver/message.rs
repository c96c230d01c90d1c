//! The messages of Screwdriver's queue service, and the headers that count how often one was tried.

use std::fmt;

use lapin::types::{AMQPValue, FieldTable};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use journeyman_domain::staged::Stamp;
use journeyman_platform::amqp::headers;
use journeyman_platform::settings::values::{Secret, Url};

const START_TIME: &str = "x-build-start-time";
const RETRY_COUNT: &str = "x-retry-count";

#[derive(Debug)]
pub enum Message {
    Start(Build),
    /// Look at a build that was started. The existing worker sends it to itself.
    Verify(Build),
    Stop {
        build_id: u64,
    },
    Clear(CacheRequest),
}

/// A build, as its message describes it.
#[derive(Deserialize)]
#[cfg_attr(debug_assertions, derive(schemars::JsonSchema))]
#[serde(try_from = "Value")]
#[cfg_attr(debug_assertions, schemars(with = "Value"))]
pub struct Build {
    pub(super) known: KnownFields,
    /// All of it, token included: published again for the existing worker, and shown to the template.
    raw: Value,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct KnownFields {
    pub(super) build_id: u64,
    pub(super) container: String,
    pub(super) api_uri: Url,
    pub(super) token: Secret,
    #[serde(default, deserialize_with = "lenient")]
    annotations: Map<String, Value>,
    #[serde(default, deserialize_with = "lenient")]
    pub(super) pipeline: Pipeline,
    pub(super) job_id: Option<u64>,
    pub(super) job_name: Option<String>,
    pub(super) event_id: Option<u64>,
    pub(super) pr_num: Option<Value>,
    pub(super) pr_parent_job_id: Option<u64>,
    #[serde(default, deserialize_with = "lenient")]
    pub(super) template: Template,
}

/// A build is started without what it can do without, whatever stands there.
fn lenient<'de, D: serde::Deserializer<'de>, T: Default + serde::de::DeserializeOwned>(from: D) -> Result<T, D::Error> {
    Ok(serde_json::from_value(Value::deserialize(from)?).unwrap_or_default())
}

#[derive(Default, Deserialize)]
pub(super) struct Pipeline {
    pub(super) id: Option<u64>,
    pub(super) name: Option<String>,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Template {
    pub(super) full_name: Option<String>,
    pub(super) version: Option<String>,
}

/// A cache whose folder is to be removed.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct CacheRequest {
    pub(super) resource: String,
    pub(super) action: String,
    pub(super) scope: String,
    #[serde(default)]
    pub(super) prefix: String,
    pub(super) pipeline_id: Value,
    pub(super) id: Value,
}

/// Names what is wrong with a message, and quotes none of it: it holds a token.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("no message of Screwdriver's queue service: {0}")]
pub struct InvalidMessage(String);

#[derive(Deserialize)]
struct Envelope {
    job: Job,
    #[serde(rename = "buildConfig")]
    build: Option<Value>,
    #[serde(rename = "cacheConfig")]
    cache: Option<Value>,
}

#[derive(Deserialize)]
#[serde(rename_all = "lowercase")]
enum Job {
    Start,
    Stop,
    Verify,
    Clear,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct StopFields {
    build_id: u64,
}

impl Message {
    /// # Errors
    ///
    /// If it is no JSON, or a field that is needed is missing or has another type.
    pub(crate) fn parse(body: &[u8]) -> Result<Self, InvalidMessage> {
        let body = serde_json::from_slice(body).map_err(|error| {
            InvalidMessage(format!("invalid JSON at line {}, column {}", error.line(), error.column()))
        })?;
        Self::from_json(body)
    }

    /// # Errors
    ///
    /// Parses JSON as [`Message::parse`] does.
    pub(crate) fn from_json(body: Value) -> Result<Self, InvalidMessage> {
        let Envelope { job, build, cache } = read("", body)?;
        let part = |part: Option<Value>, name: &str| part.ok_or_else(|| InvalidMessage(format!("{name} is missing")));
        let build = || part(build, BUILD);
        Ok(match job {
            Job::Start => Self::Start(build()?.try_into()?),
            Job::Verify => Self::Verify(build()?.try_into()?),
            Job::Stop => Self::Stop { build_id: read::<StopFields>(BUILD, build()?)?.build_id },
            Job::Clear => Self::Clear(read(CACHE, part(cache, CACHE)?)?),
        })
    }
}

const BUILD: &str = "buildConfig";
const CACHE: &str = "cacheConfig";

fn read<T: serde::de::DeserializeOwned>(part: &str, value: Value) -> Result<T, InvalidMessage> {
    // A list would be read as fields in their order.
    let value = if value.is_object() { value } else { Value::Null };
    serde_path_to_error::deserialize(value).map_err(|error| {
        // Further words of serde's may quote the value.
        let message = error.inner().to_string();
        let missing = message.strip_prefix("missing field `").and_then(|rest| rest.split('`').next());
        let path = error.path().to_string();
        let names: Vec<&str> =
            [part, &path, missing.unwrap_or_default()].into_iter().filter(|name| !matches!(*name, "" | ".")).collect();
        let what = if missing.is_some() { "is missing" } else { "has an unexpected value" };
        InvalidMessage(format!("{} {what}", if names.is_empty() { "the body".to_owned() } else { names.join(".") }))
    })
}

impl TryFrom<Value> for Build {
    type Error = InvalidMessage;

    fn try_from(raw: Value) -> Result<Self, InvalidMessage> {
        Ok(Self { known: read(BUILD, raw.clone())?, raw })
    }
}

impl fmt::Debug for Build {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "Build({})", self.id())
    }
}

impl Build {
    pub(crate) fn id(&self) -> u64 {
        self.known.build_id
    }

    /// The value of `screwdriver.cd/NAME`.
    pub(super) fn annotation(&self, name: &str) -> Option<&Value> {
        let of = |start: &str| self.known.annotations.get(&format!("{start}screwdriver.cd/{name}"));
        of("").or_else(|| of("beta."))
    }

    /// An annotation that is a number, or the text of one.
    pub(super) fn number(&self, name: &str) -> Option<u64> {
        let value = self.annotation(name)?;
        value.as_u64().or_else(|| value.as_str()?.parse().ok())
    }

    /// The fields of the message, without the token.
    pub(super) fn shown(&self) -> impl Serialize {
        let mut shown = self.raw.clone();
        shown.as_object_mut().map(|fields| fields.remove("token"));
        shown
    }

    /// The body of a message that lets this worker or the existing one look at the build again.
    pub(crate) fn verify_body(&self) -> Vec<u8> {
        json!({ "job": "verify", BUILD: self.raw }).to_string().into_bytes()
    }
}

/// How often a message was tried, by what the existing worker and the broker write. Any other header is ignored.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct RetryHeaders {
    /// The time at which the first check of the build was published.
    pub(crate) started_at: Option<Stamp>,
    pub(crate) retry_count: Option<u32>,
    /// How often the queue's consumers have rejected the message.
    pub(crate) rejected: u32,
}

impl RetryHeaders {
    /// Reads the headers of a message of this queue.
    pub(crate) fn read(table: &FieldTable, queue: &str) -> Self {
        let started_at = number(table, START_TIME).and_then(|millis| i64::try_from(millis).ok()).map(Stamp);
        let retry_count = number(table, RETRY_COUNT).map(|count| u32::try_from(count).unwrap_or(u32::MAX));
        let deaths =
            table.inner().get("x-death").and_then(AMQPValue::as_array).map_or(&[][..], |deaths| deaths.as_slice());
        let rejected = deaths
            .iter()
            .filter_map(AMQPValue::as_field_table)
            .filter(|death| {
                headers::text(death, "queue") == Some(queue) && headers::text(death, "reason") == Some("rejected")
            })
            .map(|death| number(death, "count").unwrap_or(1))
            .fold(0, u64::saturating_add);
        Self { started_at, retry_count, rejected: u32::try_from(rejected).unwrap_or(u32::MAX) }
    }

    /// Of a message of the retry queue: its counter, or how often it was rejected there.
    pub(crate) fn retry_queue_retries(&self) -> u32 {
        self.retry_count.unwrap_or(self.rejected)
    }

    /// Writes the counters of a message to the retry queue.
    pub(crate) fn write(&self, table: &mut FieldTable) {
        if let Some(Stamp(millis)) = self.started_at {
            table.insert(START_TIME.into(), AMQPValue::LongLongInt(millis));
        }
        let count = i32::try_from(self.retry_count.unwrap_or(0)).unwrap_or(i32::MAX);
        table.insert(RETRY_COUNT.into(), AMQPValue::LongInt(count));
    }
}

fn number(table: &FieldTable, name: &str) -> Option<u64> {
    headers::number(table, name).or_else(|| headers::text(table, name)?.trim().parse().ok())
}

#[cfg(test)]
mod tests {
    use super::*;
    use journeyman_platform::amqp::header_table;

    /// What is recorded as JSON, as the broker sends it.
    fn to_amqp(value: &Value) -> AMQPValue {
        match value {
            Value::Null => AMQPValue::Void,
            Value::Bool(yes) => AMQPValue::Boolean(*yes),
            Value::Number(number) => AMQPValue::LongLongInt(number.as_i64().unwrap()),
            Value::String(text) => AMQPValue::LongString(text.as_str().into()),
            Value::Array(values) => AMQPValue::FieldArray(values.iter().map(to_amqp).collect::<Vec<_>>().into()),
            Value::Object(fields) if fields.contains_key("!") => {
                AMQPValue::Timestamp(fields["value"].as_u64().unwrap())
            }
            Value::Object(_) => AMQPValue::FieldTable(to_table(value)),
        }
    }

    fn to_table(value: &Value) -> FieldTable {
        let mut table = FieldTable::default();
        for (name, value) in value.as_object().unwrap() {
            table.insert(name.as_str().into(), to_amqp(value));
        }
        table
    }

    fn recorded() -> Vec<Value> {
        let lines = include_str!("../../../fixtures/screwdriver/messages.jsonl").lines();
        lines.map(|line| serde_json::from_str(line).unwrap()).collect()
    }

    fn start() -> Value {
        recorded().swap_remove(0)["body"].take()
    }

    #[test]
    fn every_recorded_message_is_read_and_a_check_is_published_as_the_existing_worker_reads_it() {
        for one in recorded() {
            let body = one["body"].to_string();
            let message = Message::parse(body.as_bytes()).unwrap();
            let build_id = &one["body"]["buildConfig"]["buildId"];
            match message {
                Message::Start(build) | Message::Verify(build) => {
                    assert_eq!(build.id(), build_id.as_u64().unwrap());
                    let again: Value = serde_json::from_slice(&build.verify_body()).unwrap();
                    assert_eq!(again["buildConfig"], one["body"]["buildConfig"], "nothing is lost");
                    assert_eq!(again["job"], "verify");
                }
                Message::Stop { build_id: stopped } => assert_eq!(stopped, build_id.as_u64().unwrap()),
                Message::Clear(cache) => assert_eq!((cache.scope.as_str(), cache.prefix.as_str()), ("pipelines", "")),
            }
        }
    }

    #[test]
    fn s6_the_recorded_headers_tell_how_often_a_message_was_tried() {
        for one in recorded() {
            let queue = one["queue"].as_str().unwrap();
            let found = RetryHeaders::read(&to_table(&one["headers"]), queue);
            let of_queue = |death: &&Value| death["queue"] == queue && death["reason"] == "rejected";
            let rejected = one["headers"]["x-death"].as_array().and_then(|deaths| deaths.iter().find(of_queue));
            let rejected = rejected.map_or(0, |death| death["count"].as_u64().unwrap());
            assert_eq!(u64::from(found.rejected), rejected, "{one}");
            let counter = one["headers"]["x-retry-count"].as_u64().unwrap_or(rejected);
            assert_eq!(u64::from(found.retry_queue_retries()), counter, "{one}");
            assert_eq!(found.started_at.map(|at| at.0), one["headers"]["x-build-start-time"].as_i64(), "{one}");
        }
    }

    #[test]
    fn s6_headers_of_any_type_are_read_and_foreign_ones_are_ignored() {
        let none = RetryHeaders::default();
        assert_eq!(RetryHeaders::read(&FieldTable::default(), "q"), none);
        let trace = header_table([("traceparent", AMQPValue::LongString("00-1-2-03".into()))]);
        assert_eq!(RetryHeaders::read(&trace, "q"), none);
        let death = |queue: AMQPValue, reason: AMQPValue, count: AMQPValue| {
            AMQPValue::FieldTable(header_table([("queue", queue), ("reason", reason), ("count", count)]))
        };
        let text = |text: &str| AMQPValue::LongString(text.into());
        let bytes = |text: &str| AMQPValue::ByteArray(text.as_bytes().to_vec().into());
        let deaths = vec![
            AMQPValue::Void,
            AMQPValue::FieldTable(FieldTable::default()),
            death(text("qdlr"), text("expired"), AMQPValue::LongLongInt(9)),
            death(bytes("q"), AMQPValue::ShortString("rejected".into()), AMQPValue::ShortUInt(2)),
            death(text("q"), text("expired"), AMQPValue::LongLongInt(9)),
            death(text("q"), bytes("rejected"), text("1")),
        ];
        let table = header_table([
            ("x-death", AMQPValue::FieldArray(deaths.into())),
            ("x-retry-count", bytes("5")),
            ("x-build-start-time", AMQPValue::Timestamp(1_795_255_420_154)),
        ]);
        let found = RetryHeaders::read(&table, "q");
        let started_at = Some(Stamp(1_795_255_420_154));
        assert_eq!(found, RetryHeaders { started_at, retry_count: Some(5), rejected: 3 });
        for odd in [AMQPValue::Void, text("soon"), AMQPValue::LongInt(-1), AMQPValue::FieldArray(vec![].into())] {
            let table =
                header_table(["x-death", "x-retry-count", "x-build-start-time"].map(|name| (name, odd.clone())));
            assert_eq!(RetryHeaders::read(&table, "q"), none, "{odd:?}");
        }
    }

    #[test]
    fn headers_are_written_as_the_existing_worker_writes_them() {
        let headers = RetryHeaders { started_at: Some(Stamp(17)), retry_count: Some(3), rejected: 0 };
        let mut table = FieldTable::default();
        headers.write(&mut table);
        assert_eq!(RetryHeaders::read(&table, "q"), headers);
        assert_eq!(table.inner()["x-build-start-time"], AMQPValue::LongLongInt(17));
        RetryHeaders::default().write(&mut table);
        assert_eq!(table.inner()["x-retry-count"], AMQPValue::LongInt(0));
    }

    #[test]
    fn s18_an_error_names_the_field_and_quotes_nothing() {
        let with = |path: &str, value: Option<Value>| {
            let mut body = start();
            let (parent, name) = path.rsplit_once('/').unwrap();
            let fields = body.pointer_mut(parent).unwrap().as_object_mut().unwrap();
            match value {
                Some(value) => fields.insert(name.to_owned(), value),
                None => fields.remove(name),
            };
            Message::from_json(body).unwrap_err().to_string()
        };
        for (error, words) in [
            (with("/job", None), "job is missing"),
            (with("/job", Some(json!("s3cret"))), "job has an unexpected value"),
            (with("/buildConfig", None), "buildConfig is missing"),
            (with("/buildConfig", Some(json!("s3cret"))), "buildConfig has an unexpected value"),
            (with("/buildConfig/token", None), "buildConfig.token is missing"),
            (with("/buildConfig/buildId", Some(json!("s3cret"))), "buildConfig.buildId has an unexpected value"),
            (with("/buildConfig/apiUri", Some(json!("s3cret"))), "buildConfig.apiUri has an unexpected value"),
            (with("/buildConfig/apiUri", Some(json!("ftp://s3cret"))), "buildConfig.apiUri has an unexpected value"),
        ] {
            assert_eq!(error, format!("no message of Screwdriver's queue service: {words}"));
        }
        for (body, words) in [
            ("{\"job\": s3cret", "invalid JSON at line 1, column 9"),
            ("[\"s3cret\"]", "the body has an unexpected value"),
            ("{\"job\": \"clear\", \"cacheConfig\": {\"resource\": \"s3cret\"}}", "cacheConfig.action is missing"),
            ("{\"job\": \"stop\", \"buildConfig\": {}}", "buildConfig.buildId is missing"),
        ] {
            let error = Message::parse(body.as_bytes()).unwrap_err().to_string();
            assert_eq!(error, format!("no message of Screwdriver's queue service: {words}"));
        }
    }

    #[test]
    fn s18_the_token_is_neither_shown_nor_seen_by_a_template() {
        let mut body = start();
        body["buildConfig"]["token"] = "eyJhbGciOiJIUzI1NiJ9.e30.c2ln".into();
        let Message::Start(build) = Message::from_json(body).unwrap() else { panic!("a start") };
        let shown = serde_json::to_string(&build.shown()).unwrap();
        assert!(shown.contains("\"jobName\":\"main\"") && !shown.contains("eyJ"), "{shown}");
        let debug = format!("{build:?} {:?}", build.known.token);
        assert!(!debug.contains("eyJ"), "{debug}");
    }

    #[test]
    fn an_annotation_is_found_with_and_without_the_prefix_of_a_beta() {
        let mut body = start();
        body["buildConfig"]["annotations"] = json!({ "beta.screwdriver.cd/cpu": 3, "screwdriver.cd/timeout": "45" });
        let Message::Start(build) = Message::from_json(body).unwrap() else { panic!("a start") };
        assert_eq!((build.number("cpu"), build.number("timeout"), build.number("ram")), (Some(3), Some(45), None));
    }
}
