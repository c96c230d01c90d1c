//! Parses and completes a `createTask` body. Pure.
//!
//! The payload is stored as the text it was sent as.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::time::Duration;

use serde::Serialize;
use serde_json::value::RawValue;
use serde_json::{Map, Value};

use super::body_schema::{self, Field, FieldType, optional, required};
use super::clock::UnixMillis;
use super::queue_error::{QueueError, QueueErrorCode};
use super::scopes::{Era, ScopeExpression};
use super::task_state::{Priority, TaskRecord};
use crate::limits::{QUEUE_CLOCK_DRIFT_MAX, QUEUE_DEADLINE_MAX, QUEUE_DEPENDENCIES_MAX};

const FIELDS: &[Field] = &[
    optional("provisionerId", FieldType::Name(38)),
    optional("workerType", FieldType::Name(38)),
    optional("taskQueueId", FieldType::QueueId),
    optional("schedulerId", FieldType::Name(38)),
    optional("projectId", FieldType::Project(500)),
    optional("taskGroupId", FieldType::SlugId),
    optional("dependencies", FieldType::SlugIdList),
    optional("requires", FieldType::OneOf(&["all-completed", "all-resolved"])),
    optional("routes", FieldType::TextList(249)),
    optional("priority", FieldType::OneOf(&["highest", "very-high", "high", "medium", "low", "very-low", "lowest"])),
    optional("retries", FieldType::Integer(0, 49)),
    required("created", FieldType::Time),
    required("deadline", FieldType::Time),
    optional("expires", FieldType::Time),
    optional("scopes", FieldType::TextList(1 << 16)),
    required("payload", FieldType::Object),
    required(
        "metadata",
        FieldType::Nested(&[
            required("name", FieldType::Text(255)),
            required("description", FieldType::Text(32_768)),
            required("owner", FieldType::Text(255)),
            required("source", FieldType::Text(4_096)),
        ]),
    ),
    optional("tags", FieldType::Object),
    optional("extra", FieldType::Object),
];

/// The stored definition, with every default filled in.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct StoredDefinition<'a> {
    provisioner_id: &'a str,
    worker_type: &'a str,
    task_queue_id: &'a str,
    scheduler_id: &'a str,
    project_id: &'a str,
    task_group_id: &'a str,
    dependencies: &'a [String],
    requires: &'a str,
    routes: &'a [String],
    priority: &'a str,
    retries: u8,
    created: String,
    deadline: String,
    expires: String,
    scopes: &'a [String],
    payload: &'a RawValue,
    metadata: Metadata<'a>,
    tags: Value,
    extra: Cow<'a, RawValue>,
}

#[derive(Debug, Serialize)]
struct Metadata<'a> {
    name: &'a str,
    owner: &'a str,
    source: &'a str,
    description: &'a str,
}

#[derive(Debug)]
pub(crate) struct TaskDraft<'a> {
    task_id: String,
    given: Map<String, Value>,
    payload: &'a RawValue,
    extra: Option<&'a RawValue>,
    queue: String,
    scheduler: String,
    project: String,
    group: String,
    priority: Priority,
    routes: Vec<String>,
    scopes: Vec<String>,
    dependencies: Vec<String>,
}

#[derive(Debug)]
pub(crate) struct NewTask {
    pub(crate) task: TaskRecord,
    pub(crate) json: String,
    pub(crate) scopes: Vec<String>,
    pub(crate) dependencies: Vec<String>,
}

pub(crate) fn parse_create_task<'a>(task_id: &str, body: &'a [u8], root: &str) -> Result<TaskDraft<'a>, QueueError> {
    let raw: BTreeMap<String, &RawValue> = serde_json::from_slice(body).map_err(parse_error)?;
    let mut given = Map::new();
    let (mut payload, mut extra) = (None, None);
    for (name, part) in raw {
        // Payload and extra are of any size and content; only their type is checked.
        let opaque = name == "payload" || name == "extra";
        let value = if opaque && part.get().starts_with('{') {
            Value::Object(Map::new())
        } else {
            serde_json::from_str(part.get()).map_err(parse_error)?
        };
        if name == "payload" {
            payload = Some(part);
        } else if name == "extra" {
            extra = Some(part);
        }
        given.insert(name, value);
    }
    let found = body_schema::schema_errors(&given, FIELDS, Era::Modern);
    let (true, Some(payload)) = (found.is_empty(), payload) else {
        let message = body_schema::error_text(root, "create-task-request", &found);
        return Err(QueueError::new(QueueErrorCode::InputValidationError, message));
    };
    let queue = task_queue_of(&given)?;
    let text = |name: &str, other: &str| given.get(name).and_then(Value::as_str).unwrap_or(other).to_owned();
    let (scheduler, project) = (text("schedulerId", "-"), text("projectId", "none"));
    let group = text("taskGroupId", task_id);
    let priority = Priority::parse(&text("priority", "lowest")).unwrap_or(Priority::Lowest);
    let (routes, scopes) = (text_list(&given, "routes"), text_list(&given, "scopes"));
    let dependencies = text_list(&given, "dependencies");
    Ok(TaskDraft {
        task_id: task_id.to_owned(),
        given,
        payload,
        extra,
        queue,
        scheduler,
        project,
        group,
        priority,
        routes,
        scopes,
        dependencies,
    })
}

impl TaskDraft<'_> {
    pub(crate) fn required_scopes(&self) -> ScopeExpression {
        let mut all: Vec<ScopeExpression> = self.scopes.iter().map(ScopeExpression::scope).collect();
        all.extend(self.routes.iter().map(|route| ScopeExpression::scope(format!("queue:route:{route}"))));
        all.push(ScopeExpression::scope(format!("queue:create-task:project:{}", self.project)));
        all.push(ScopeExpression::scope(format!("queue:scheduler-id:{}", self.scheduler)));
        let enough = Priority::ALL.into_iter().filter(|level| *level >= self.priority);
        all.push(ScopeExpression::Any(
            enough
                .map(|level| ScopeExpression::scope(format!("queue:create-task:{}:{}", level.as_str(), self.queue)))
                .collect(),
        ));
        ScopeExpression::All(all)
    }

    pub(crate) fn complete(&self, now: UnixMillis) -> Result<NewTask, QueueError> {
        let (created, deadline, expires) = self.checked_times(now)?;
        if self.scopes.iter().any(|scope| scope.ends_with("**")) {
            return Err(QueueError::input("scopes must not end with `**`"));
        }
        if self.dependencies.len() > QUEUE_DEPENDENCIES_MAX {
            return Err(QueueError::input(format!("at most {QUEUE_DEPENDENCIES_MAX} dependencies are supported")));
        }
        let retries = self.given.get("retries").and_then(body_schema::as_integer).unwrap_or(5);
        let retries = u8::try_from(retries).unwrap_or(49);
        let json = self.to_json(created, deadline, expires, retries)?;
        let task = TaskRecord {
            task_id: self.task_id.clone(),
            queue: self.queue.clone(),
            scheduler: self.scheduler.clone(),
            project: self.project.clone(),
            group: self.group.clone(),
            priority: self.priority,
            deadline,
            expires,
            retries,
            retries_left: retries,
            runs: Vec::new(),
        };
        let (scopes, dependencies) = (self.scopes.clone(), self.dependencies.clone());
        Ok(NewTask { task, json, scopes, dependencies })
    }

    pub(crate) fn echo(&self) -> Value {
        let mut shown = self.given.clone();
        let parsed = |raw: &RawValue| serde_json::from_str(raw.get()).unwrap_or_default();
        shown.insert("payload".to_owned(), parsed(self.payload));
        if let Some(extra) = self.extra {
            shown.insert("extra".to_owned(), parsed(extra));
        }
        let (provisioner, worker_type) = split_task_queue(&self.queue);
        let mut fill = |name: &str, value: Value| {
            shown.entry(name).or_insert(value);
        };
        fill("provisionerId", provisioner.into());
        fill("workerType", worker_type.into());
        fill("taskQueueId", self.queue.as_str().into());
        fill("schedulerId", "-".into());
        fill("projectId", "none".into());
        fill("taskGroupId", self.group.as_str().into());
        fill("priority", self.priority.as_str().into());
        fill("requires", "all-completed".into());
        fill("retries", 5.into());
        for name in ["dependencies", "routes", "scopes"] {
            fill(name, Value::Array(Vec::new()));
        }
        for name in ["tags", "extra"] {
            fill(name, Value::Object(Map::new()));
        }
        if let Some(deadline) = self.time("deadline") {
            fill("expires", deadline.plus_year().iso().into());
        }
        for name in ["created", "deadline", "expires"] {
            let at = shown.get(name).and_then(Value::as_str).and_then(UnixMillis::parse);
            if let Some(at) = at {
                shown.insert(name.to_owned(), at.iso().into());
            }
        }
        Value::Object(shown)
    }

    fn time(&self, name: &str) -> Option<UnixMillis> {
        self.given.get(name).and_then(Value::as_str).and_then(UnixMillis::parse)
    }

    fn checked_times(&self, now: UnixMillis) -> Result<(UnixMillis, UnixMillis, UnixMillis), QueueError> {
        let created = self.time("created").unwrap_or_default();
        let deadline = self.time("deadline").unwrap_or_default();
        let refused = |what: &str| Err(QueueError::input(what));
        if created < now.minus(QUEUE_CLOCK_DRIFT_MAX) {
            return refused("`created` cannot be in the past (max 15min drift)");
        }
        if created > now.plus(QUEUE_CLOCK_DRIFT_MAX) {
            return refused("`created` cannot be in the future (max 15min drift)");
        }
        if created > deadline {
            return refused("`deadline` cannot be later than `created`");
        }
        if deadline < now {
            return refused("`deadline` cannot be in the past");
        }
        if now.until(deadline) > QUEUE_DEADLINE_MAX.saturating_add(QUEUE_CLOCK_DRIFT_MAX) {
            return refused("`deadline` cannot be more than 5 days into the future");
        }
        let expires = self.time("expires").unwrap_or_else(|| deadline.plus_year());
        if deadline > expires {
            return refused("`expires` cannot be before `deadline`");
        }
        Ok((created, deadline, expires))
    }

    fn to_json(
        &self,
        created: UnixMillis,
        deadline: UnixMillis,
        expires: UnixMillis,
        retries: u8,
    ) -> Result<String, QueueError> {
        let (provisioner_id, worker_type) = split_task_queue(&self.queue);
        let metadata = self.given.get("metadata");
        let about = |name: &str| metadata.and_then(|all| all.get(name)).and_then(Value::as_str).unwrap_or_default();
        let empty = || serde_json::from_str::<Box<RawValue>>("{}").map_err(parse_error);
        let requires = self.given.get("requires").and_then(Value::as_str);
        let tags = self.given.get("tags").cloned();
        let shown = StoredDefinition {
            provisioner_id,
            worker_type,
            task_queue_id: &self.queue,
            scheduler_id: &self.scheduler,
            project_id: &self.project,
            task_group_id: &self.group,
            dependencies: &self.dependencies,
            requires: requires.unwrap_or("all-completed"),
            routes: &self.routes,
            priority: self.priority.as_str(),
            retries,
            created: created.iso(),
            deadline: deadline.iso(),
            expires: expires.iso(),
            scopes: &self.scopes,
            payload: self.payload,
            metadata: Metadata {
                name: about("name"),
                owner: about("owner"),
                source: about("source"),
                description: about("description"),
            },
            tags: tags.unwrap_or_else(|| Value::Object(Map::new())),
            extra: match self.extra {
                Some(extra) => Cow::Borrowed(extra),
                None => Cow::Owned(empty()?),
            },
        };
        serde_json::to_string(&shown).map_err(parse_error)
    }
}

fn parse_error(error: serde_json::Error) -> QueueError {
    QueueError::new(QueueErrorCode::MalformedPayload, format!("Failed to parse JSON: {error}"))
}

fn text_list(given: &Map<String, Value>, name: &str) -> Vec<String> {
    let items = given.get(name).and_then(Value::as_array);
    items.into_iter().flatten().filter_map(|item| item.as_str().map(str::to_owned)).collect()
}

/// Splits `provisionerId/workerType`.
pub(crate) fn split_task_queue(queue: &str) -> (&str, &str) {
    queue.split_once('/').unwrap_or((queue, ""))
}

fn task_queue_of(given: &Map<String, Value>) -> Result<String, QueueError> {
    let text = |name: &str| given.get(name).and_then(Value::as_str);
    let joined = text("provisionerId")
        .zip(text("workerType"))
        .map(|(provisioner, worker_type)| format!("{provisioner}/{worker_type}"));
    match (joined, text("taskQueueId")) {
        (Some(joined), Some(queue)) if joined != queue => {
            Err(QueueError::input("taskQueueId must match \"provisionerId/workerType\""))
        }
        (Some(joined), _) => Ok(joined),
        (None, Some(queue)) => Ok(queue.to_owned()),
        (None, None) => {
            Err(QueueError::input("at least a provisionerId and a workerType or a taskQueueId must be provided\""))
        }
    }
}

/// Compares two definitions independent of property order.
pub(crate) fn is_same_json(left: &str, right: &str) -> bool {
    if left == right {
        return true;
    }
    let read = |text: &str| serde_json::from_str::<Value>(text).ok();
    read(left).is_some_and(|left| read(right) == Some(left))
}

/// The maximum that Azure Queue Storage allows.
pub(crate) const MESSAGE_TTL_MAX: Duration = Duration::from_secs(7 * 24 * 3600);

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    const TASK: &str = "XJOIQcqPRgykTZR_00-b1w";

    fn body(change: impl FnOnce(&mut Value)) -> String {
        let mut body = json!({
            "taskQueueId": "test-prov/test-wt", "created": "2026-11-21T10:20:44.549Z",
            "deadline": "2026-11-21T11:20:44.549Z", "payload": {"z": 1, "a": [1.50]},
            "metadata": {"name": "n", "description": "d", "owner": "a@b.c", "source": "https://example.com"},
        });
        change(&mut body);
        body.to_string()
    }

    fn finish(body: &str) -> Result<NewTask, QueueError> {
        let now = UnixMillis::parse("2026-11-21T10:20:45Z").unwrap();
        parse_create_task(TASK, body.as_bytes(), "http://root")?.complete(now)
    }

    #[test]
    fn defaults_are_filled_in_and_the_payload_is_kept_as_it_came() {
        let text = body(|_| {}).replace("1.5", "1.500");
        let made = finish(&text).unwrap();
        assert!(made.json.contains("1.500"), "{}", made.json);
        assert_eq!(made.task.expires.iso(), "2027-11-21T11:20:44.549Z");
        assert_eq!((made.task.retries, made.task.priority), (5, Priority::Lowest));
        assert!(made.json.starts_with(
            r#"{"provisionerId":"test-prov","workerType":"test-wt","taskQueueId":"test-prov/test-wt","schedulerId":"-","projectId":"none","taskGroupId":"XJOIQcqPRgykTZR_00-b1w","dependencies":[],"requires":"all-completed""#
        ));
    }

    #[test]
    fn times_that_cannot_be_are_refused_with_the_reason() {
        for (name, value, message) in [
            ("created", "2026-11-21T10:00:00Z", "`created` cannot be in the past"),
            ("created", "2026-11-21T10:40:00Z", "`created` cannot be in the future"),
            ("deadline", "2026-11-21T10:20:44.600Z", "`deadline` cannot be in the past"),
            ("deadline", "2026-11-27T10:20:44Z", "more than 5 days"),
            ("expires", "2026-11-21T11:00:00Z", "`expires` cannot be before"),
        ] {
            let error = finish(&body(|body| body[name] = value.into())).unwrap_err();
            assert_eq!(error.code, QueueErrorCode::InputError);
            assert!(error.message.contains(message), "{}", error.message);
        }
    }

    #[test]
    fn the_old_priority_name_and_unknown_properties_are_refused_by_the_schema() {
        for change in [("priority", "normal"), ("spare", "x"), ("deadline", "soon")] {
            let error = finish(&body(|body| body[change.0] = change.1.into())).unwrap_err();
            assert_eq!(error.code, QueueErrorCode::InputValidationError);
            assert!(error.message.contains("http://root/schemas/queue/v1/create-task-request.json#"));
        }
    }

    #[test]
    fn the_two_names_of_a_task_queue_must_agree() {
        let odd = body(|body| {
            body["provisionerId"] = "other".into();
            body["workerType"] = "test-wt".into();
        });
        assert!(finish(&odd).unwrap_err().message.contains("must match"));
        let old = body(|body| {
            let fields = body.as_object_mut().unwrap();
            fields.remove("taskQueueId");
            fields.insert("provisionerId".into(), "lp".into());
            fields.insert("workerType".into(), "lw".into());
        });
        assert_eq!(finish(&old).unwrap().task.queue, "lp/lw");
    }

    #[test]
    fn a_definition_is_the_same_in_any_order_of_its_properties() {
        assert!(is_same_json(r#"{"a":1,"b":[2]}"#, r#"{"b":[2], "a":1}"#));
        assert!(!is_same_json(r#"{"a":1}"#, r#"{"a":2}"#));
    }
}
