//! What `createTask` makes of a request body: the checked, completed definition, and the task the rules start from.
//!
//! The payload is kept as the text it came as. Pure: time comes in as an argument.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::time::Duration;

use serde::Serialize;
use serde_json::value::RawValue;
use serde_json::{Map, Value};

use super::check::{self, Field, Kind, may, must};
use super::clock::Millis;
use super::fault::{Code, Fault};
use super::rules::{Priority, Task};
use super::scopes::{Asks, Era};
use crate::limits::{QUEUE_DEADLINE_MAX, QUEUE_DEPENDENCIES_MAX, QUEUE_DRIFT};

const FIELDS: &[Field] = &[
    may("provisionerId", Kind::Name(38)),
    may("workerType", Kind::Name(38)),
    may("taskQueueId", Kind::QueueId),
    may("schedulerId", Kind::Name(38)),
    may("projectId", Kind::Project(500)),
    may("taskGroupId", Kind::Slug),
    may("dependencies", Kind::Slugs),
    may("requires", Kind::Choice(&["all-completed", "all-resolved"])),
    may("routes", Kind::Texts(249)),
    may("priority", Kind::Choice(&["highest", "very-high", "high", "medium", "low", "very-low", "lowest"])),
    may("retries", Kind::Whole(0, 49)),
    must("created", Kind::Time),
    must("deadline", Kind::Time),
    may("expires", Kind::Time),
    may("scopes", Kind::Texts(1 << 16)),
    must("payload", Kind::Object),
    must(
        "metadata",
        Kind::Form(&[
            must("name", Kind::Text(255)),
            must("description", Kind::Text(32_768)),
            must("owner", Kind::Text(255)),
            must("source", Kind::Text(4_096)),
        ]),
    ),
    may("tags", Kind::Object),
    may("extra", Kind::Object),
];

/// A definition as it is kept and shown: every default filled in.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Shown<'a> {
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

/// A request body that has the right form, with its defaults, not yet held against the clock or the caller's scopes.
#[derive(Debug)]
pub(crate) struct Draft<'a> {
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

/// A task ready to be stored.
#[derive(Debug)]
pub(crate) struct Definition {
    pub(crate) task: Task,
    /// The definition as JSON text.
    pub(crate) json: String,
    pub(crate) scopes: Vec<String>,
    pub(crate) dependencies: Vec<String>,
}

/// Reads and checks a `createTask` body.
pub(crate) fn draft<'a>(task_id: &str, body: &'a [u8], root: &str) -> Result<Draft<'a>, Fault> {
    let raw: BTreeMap<String, &RawValue> = serde_json::from_slice(body).map_err(unreadable)?;
    let mut given = Map::new();
    let (mut payload, mut extra) = (None, None);
    for (name, part) in raw {
        // Payload and extra may be of any size; they are looked at no closer than whether they are objects.
        let opaque = name == "payload" || name == "extra";
        let value = if opaque && part.get().starts_with('{') {
            Value::Object(Map::new())
        } else {
            serde_json::from_str(part.get()).map_err(unreadable)?
        };
        if name == "payload" {
            payload = Some(part);
        } else if name == "extra" {
            extra = Some(part);
        }
        given.insert(name, value);
    }
    let found = check::findings(&given, FIELDS, Era::Modern);
    let (true, Some(payload)) = (found.is_empty(), payload) else {
        let told = check::told(root, "create-task-request", &found);
        return Err(Fault::new(Code::InputValidationError, told));
    };
    let queue = queue_of(&given)?;
    let text = |name: &str, other: &str| given.get(name).and_then(Value::as_str).unwrap_or(other).to_owned();
    let (scheduler, project) = (text("schedulerId", "-"), text("projectId", "none"));
    let group = text("taskGroupId", task_id);
    let priority = Priority::parse(&text("priority", "lowest")).unwrap_or(Priority::Lowest);
    let (routes, scopes) = (texts(&given, "routes"), texts(&given, "scopes"));
    let dependencies = texts(&given, "dependencies");
    Ok(Draft {
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

impl Draft<'_> {
    /// What the caller must hold to create this task.
    pub(crate) fn asks(&self) -> Asks {
        let mut all: Vec<Asks> = self.scopes.iter().map(Asks::scope).collect();
        all.extend(self.routes.iter().map(|route| Asks::scope(format!("queue:route:{route}"))));
        all.push(Asks::scope(format!("queue:create-task:project:{}", self.project)));
        all.push(Asks::scope(format!("queue:scheduler-id:{}", self.scheduler)));
        let enough = Priority::ALL.into_iter().filter(|level| *level >= self.priority);
        all.push(Asks::Any(
            enough.map(|level| Asks::scope(format!("queue:create-task:{}:{}", level.as_str(), self.queue))).collect(),
        ));
        Asks::All(all)
    }

    /// Holds the draft's times against the clock and writes the definition out.
    pub(crate) fn finish(&self, now: Millis) -> Result<Definition, Fault> {
        let (created, deadline, expires) = self.times(now)?;
        if self.scopes.iter().any(|scope| scope.ends_with("**")) {
            return Err(Fault::input("scopes must not end with `**`"));
        }
        if self.dependencies.len() > QUEUE_DEPENDENCIES_MAX {
            return Err(Fault::input(format!("a task may depend on at most {QUEUE_DEPENDENCIES_MAX} tasks here")));
        }
        let retries = self.given.get("retries").and_then(check::whole_number).unwrap_or(5);
        let retries = u8::try_from(retries).unwrap_or(49);
        let json = self.write(created, deadline, expires, retries)?;
        let task = Task {
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
        Ok(Definition { task, json, scopes, dependencies })
    }

    /// The request body with the defaults that were filled in, as a refusal repeats it.
    pub(crate) fn echo(&self) -> Value {
        let mut shown = self.given.clone();
        let parsed = |raw: &RawValue| serde_json::from_str(raw.get()).unwrap_or_default();
        shown.insert("payload".to_owned(), parsed(self.payload));
        if let Some(extra) = self.extra {
            shown.insert("extra".to_owned(), parsed(extra));
        }
        let (provisioner, worker_type) = split(&self.queue);
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
            let at = shown.get(name).and_then(Value::as_str).and_then(Millis::parse);
            if let Some(at) = at {
                shown.insert(name.to_owned(), at.iso().into());
            }
        }
        Value::Object(shown)
    }

    fn time(&self, name: &str) -> Option<Millis> {
        self.given.get(name).and_then(Value::as_str).and_then(Millis::parse)
    }

    fn times(&self, now: Millis) -> Result<(Millis, Millis, Millis), Fault> {
        let created = self.time("created").unwrap_or_default();
        let deadline = self.time("deadline").unwrap_or_default();
        let refused = |what: &str| Err(Fault::input(what));
        if created < now.minus(QUEUE_DRIFT) {
            return refused("`created` cannot be in the past (max 15min drift)");
        }
        if created > now.plus(QUEUE_DRIFT) {
            return refused("`created` cannot be in the future (max 15min drift)");
        }
        if created > deadline {
            return refused("`deadline` cannot be later than `created`");
        }
        if deadline < now {
            return refused("`deadline` cannot be in the past");
        }
        if now.until(deadline) > QUEUE_DEADLINE_MAX.saturating_add(QUEUE_DRIFT) {
            return refused("`deadline` cannot be more than 5 days into the future");
        }
        let expires = self.time("expires").unwrap_or_else(|| deadline.plus_year());
        if deadline > expires {
            return refused("`expires` cannot be before `deadline`");
        }
        Ok((created, deadline, expires))
    }

    fn write(&self, created: Millis, deadline: Millis, expires: Millis, retries: u8) -> Result<String, Fault> {
        let (provisioner_id, worker_type) = split(&self.queue);
        let metadata = self.given.get("metadata");
        let about = |name: &str| metadata.and_then(|all| all.get(name)).and_then(Value::as_str).unwrap_or_default();
        let empty = || serde_json::from_str::<Box<RawValue>>("{}").map_err(unreadable);
        let requires = self.given.get("requires").and_then(Value::as_str);
        let tags = self.given.get("tags").cloned();
        let shown = Shown {
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
        serde_json::to_string(&shown).map_err(unreadable)
    }
}

fn unreadable(error: serde_json::Error) -> Fault {
    Fault::new(Code::MalformedPayload, format!("Failed to parse JSON: {error}"))
}

fn texts(given: &Map<String, Value>, name: &str) -> Vec<String> {
    let items = given.get(name).and_then(Value::as_array);
    items.into_iter().flatten().filter_map(|item| item.as_str().map(str::to_owned)).collect()
}

/// The two halves of `provisionerId/workerType`.
pub(crate) fn split(queue: &str) -> (&str, &str) {
    queue.split_once('/').unwrap_or((queue, ""))
}

fn queue_of(given: &Map<String, Value>) -> Result<String, Fault> {
    let text = |name: &str| given.get(name).and_then(Value::as_str);
    let joined = text("provisionerId")
        .zip(text("workerType"))
        .map(|(provisioner, worker_type)| format!("{provisioner}/{worker_type}"));
    match (joined, text("taskQueueId")) {
        (Some(joined), Some(queue)) if joined != queue => {
            Err(Fault::input("taskQueueId must match \"provisionerId/workerType\""))
        }
        (Some(joined), _) => Ok(joined),
        (None, Some(queue)) => Ok(queue.to_owned()),
        (None, None) => {
            Err(Fault::input("at least a provisionerId and a workerType or a taskQueueId must be provided\""))
        }
    }
}

/// Whether two definitions say the same, whatever the order of their properties.
pub(crate) fn same(left: &str, right: &str) -> bool {
    if left == right {
        return true;
    }
    let read = |text: &str| serde_json::from_str::<Value>(text).ok();
    read(left).is_some_and(|left| read(right) == Some(left))
}

/// The longest that a message about a task is kept; the storage service allows no more.
pub(crate) const MESSAGE_LIFE_MAX: Duration = Duration::from_secs(7 * 24 * 3600);

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

    fn finish(body: &str) -> Result<Definition, Fault> {
        let now = Millis::parse("2026-11-21T10:20:45Z").unwrap();
        draft(TASK, body.as_bytes(), "http://root")?.finish(now)
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
        for (name, value, told) in [
            ("created", "2026-11-21T10:00:00Z", "`created` cannot be in the past"),
            ("created", "2026-11-21T10:40:00Z", "`created` cannot be in the future"),
            ("deadline", "2026-11-21T10:20:44.600Z", "`deadline` cannot be in the past"),
            ("deadline", "2026-11-27T10:20:44Z", "more than 5 days"),
            ("expires", "2026-11-21T11:00:00Z", "`expires` cannot be before"),
        ] {
            let fault = finish(&body(|body| body[name] = value.into())).unwrap_err();
            assert_eq!(fault.code, Code::InputError);
            assert!(fault.message.contains(told), "{}", fault.message);
        }
    }

    #[test]
    fn the_old_priority_name_and_unknown_properties_are_refused_by_the_schema() {
        for change in [("priority", "normal"), ("spare", "x"), ("deadline", "soon")] {
            let fault = finish(&body(|body| body[change.0] = change.1.into())).unwrap_err();
            assert_eq!(fault.code, Code::InputValidationError);
            assert!(fault.message.contains("http://root/schemas/queue/v1/create-task-request.json#"));
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
        assert!(same(r#"{"a":1,"b":[2]}"#, r#"{"b":[2], "a":1}"#));
        assert!(!same(r#"{"a":1}"#, r#"{"a":2}"#));
    }
}
