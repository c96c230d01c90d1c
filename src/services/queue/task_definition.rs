//! Parses and completes a `createTask` body. Pure.
//!
//! The payload is stored as the text it was sent as.

use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use serde_json::{Map, Value};

use super::auth::Caller;
use super::clock::UnixMillis;
use super::field_types::{Identifier, Integer, Printable, SlugId, TaskName, TaskQueueId, body_error};
use super::queue_error::{QueueError, QueueErrorCode};
use super::task_state::{Priority, TaskRecord};
use journeyman_domain::limits::{
    QUEUE_CLOCK_DRIFT_MAX, QUEUE_DEADLINE_MAX, QUEUE_DEPENDENCIES_MAX, QUEUE_NESTING_MAX, QUEUE_TASK_RETENTION,
};

/// A task definition as sent and, once every default is filled in, as stored.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct Definition<'a> {
    provisioner_id: Option<Identifier>,
    worker_type: Option<Identifier>,
    task_queue_id: Option<TaskQueueId>,
    #[serde(default = "default_scheduler")]
    scheduler_id: Identifier,
    #[serde(default = "default_project")]
    project_id: Printable,
    task_group_id: Option<SlugId>,
    #[serde(default)]
    dependencies: Vec<SlugId>,
    #[serde(default)]
    requires: Requires,
    #[serde(default)]
    routes: Vec<Printable>,
    #[serde(default)]
    priority: Priority,
    #[serde(default = "default_retries")]
    retries: Integer<0, 49>,
    created: UnixMillis,
    deadline: UnixMillis,
    expires: Option<UnixMillis>,
    #[serde(default)]
    scopes: Vec<Printable>,
    #[serde(borrow)]
    payload: &'a RawValue,
    metadata: Metadata,
    #[serde(default)]
    tags: Map<String, Value>,
    #[serde(borrow)]
    extra: Option<&'a RawValue>,
}

#[derive(Debug, Default, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Requires {
    #[default]
    AllCompleted,
    AllResolved,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Metadata {
    name: TaskName,
    owner: String,
    source: String,
    description: String,
}

fn default_scheduler() -> Identifier {
    Identifier("-".to_owned())
}

fn default_project() -> Printable {
    Printable("none".to_owned())
}

const fn default_retries() -> Integer<0, 49> {
    Integer(5)
}

#[derive(Debug)]
pub(crate) struct NewTask {
    pub(crate) task: TaskRecord,
    /// The definition as JSON text.
    pub(crate) json: String,
    pub(crate) scopes: Vec<String>,
    routes: Vec<Printable>,
    pub(crate) dependencies: Vec<String>,
    pub(crate) requires: Requires,
}

pub(crate) fn parse_create_task(task_id: &str, body: &[u8]) -> Result<NewTask, QueueError> {
    let mut definition: Definition<'_> = serde_json::from_slice(body).map_err(|error| body_error(&error))?;
    // Payload and extra are of any size and content; only their type is checked.
    let opaque = [("payload", Some(definition.payload)), ("extra", definition.extra)];
    if let Some((name, _)) = opaque.into_iter().find(|(_, raw)| raw.is_some_and(|raw| !raw.get().starts_with('{'))) {
        return Err(QueueError::new(QueueErrorCode::InputValidationError, format!("`{name}` must be an object")));
    }
    if opaque.into_iter().any(|(_, raw)| raw.is_some_and(|raw| nesting(raw.get()) > QUEUE_NESTING_MAX)) {
        let message =
            format!("`payload` and `extra` may be nested {QUEUE_NESTING_MAX} deep, so that workers can parse them");
        return Err(QueueError::new(QueueErrorCode::InputValidationError, message));
    }
    let queue = task_queue_of(&definition)?;
    let (provisioner, worker_type) = split_task_queue(&queue);
    definition.provisioner_id = Some(Identifier(provisioner.to_owned()));
    definition.worker_type = Some(Identifier(worker_type.to_owned()));
    definition.task_queue_id = Some(TaskQueueId(queue.clone()));
    let group = definition.task_group_id.get_or_insert_with(|| SlugId(task_id.to_owned())).0.clone();
    let expires = *definition.expires.get_or_insert_with(|| definition.deadline.plus(QUEUE_TASK_RETENTION));
    definition.extra =
        Some(definition.extra.map_or_else(|| serde_json::from_slice(b"{}"), Ok).map_err(|error| body_error(&error))?);
    let json = serde_json::to_string(&definition).map_err(|error| body_error(&error))?;
    let task = TaskRecord {
        task_id: task_id.to_owned(),
        queue,
        scheduler: definition.scheduler_id.0,
        project: definition.project_id.0,
        group,
        priority: definition.priority,
        deadline: definition.deadline,
        expires,
        name: definition.metadata.name.0,
        created: definition.created,
        retries: definition.retries.0,
        retries_left: definition.retries.0,
        runs: Vec::new(),
    };
    Ok(NewTask {
        task,
        json,
        scopes: definition.scopes.into_iter().map(|scope| scope.0).collect(),
        routes: definition.routes,
        dependencies: definition.dependencies.into_iter().map(|task| task.0).collect(),
        requires: definition.requires,
    })
}

/// How deep objects and arrays are nested in a valid JSON text.
fn nesting(json: &str) -> usize {
    let (mut depth, mut deepest, mut in_string, mut is_escaped) = (0_usize, 0, false, false);
    for byte in json.bytes() {
        match byte {
            _ if is_escaped => is_escaped = false,
            b'\\' => is_escaped = in_string,
            b'"' => in_string = !in_string,
            b'{' | b'[' if !in_string => {
                depth += 1;
                deepest = deepest.max(depth);
            }
            b'}' | b']' if !in_string => depth = depth.saturating_sub(1),
            _ => {}
        }
    }
    deepest
}

impl NewTask {
    pub(crate) fn authorize(&self, caller: &Caller) -> Result<(), QueueError> {
        let TaskRecord { queue, project, scheduler, priority, .. } = &self.task;
        let routes = self.routes.iter().map(|route| format!("queue:route:{}", route.0));
        let required = [format!("queue:create-task:project:{project}"), format!("queue:scheduler-id:{scheduler}")];
        caller.require_all(self.scopes.iter().cloned().chain(routes).chain(required))?;
        let levels = Priority::ALL.into_iter().filter(|level| level >= priority);
        let sufficient = levels.map(|level| format!("queue:create-task:{}:{queue}", level.as_str()));
        caller.require_any(&sufficient.collect::<Vec<_>>())
    }

    /// Checks the task against the clock and the limits.
    pub(crate) fn check(&self, now: UnixMillis) -> Result<(), QueueError> {
        let TaskRecord { created, deadline, expires, .. } = self.task;
        let problem = if created < now.minus(QUEUE_CLOCK_DRIFT_MAX) {
            "`created` cannot be in the past (max 15min drift)"
        } else if created > now.plus(QUEUE_CLOCK_DRIFT_MAX) {
            "`created` cannot be in the future (max 15min drift)"
        } else if created > deadline {
            "`deadline` cannot be before `created`"
        } else if deadline < now {
            "`deadline` cannot be in the past"
        } else if now.until(deadline) > QUEUE_DEADLINE_MAX.saturating_add(QUEUE_CLOCK_DRIFT_MAX) {
            "`deadline` cannot be more than 5 days into the future"
        } else if deadline > expires {
            "`expires` cannot be before `deadline`"
        } else if self.scopes.iter().any(|scope| scope.ends_with("**")) {
            "scopes must not end with `**`"
        } else if self.dependencies.len() > QUEUE_DEPENDENCIES_MAX {
            "it has too many dependencies"
        } else {
            return Ok(());
        };
        Err(QueueError::input(problem))
    }
}

/// Splits `provisionerId/workerType`.
pub(crate) fn split_task_queue(queue: &str) -> (&str, &str) {
    queue.split_once('/').unwrap_or((queue, ""))
}

fn task_queue_of(definition: &Definition<'_>) -> Result<String, QueueError> {
    let joined = definition.provisioner_id.as_ref().zip(definition.worker_type.as_ref());
    let joined = joined.map(|(provisioner, worker_type)| format!("{}/{}", provisioner.0, worker_type.0));
    match (joined, &definition.task_queue_id) {
        (Some(joined), Some(queue)) if joined != queue.0 => {
            Err(QueueError::input("taskQueueId must match provisionerId/workerType"))
        }
        (Some(queue), _) => Ok(queue),
        (None, Some(queue)) => Ok(queue.0.clone()),
        (None, None) => Err(QueueError::input("taskQueueId, or provisionerId and workerType, must be set")),
    }
}

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
        let task = parse_create_task(TASK, body.as_bytes())?;
        task.check(now).map(|()| task)
    }

    #[test]
    fn defaults_are_filled_in_and_the_payload_is_stored_verbatim() {
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
    fn invalid_times_are_rejected_with_the_reason() {
        for (name, value, message) in [
            ("created", "2026-11-21T10:00:00Z", "`created` cannot be in the past"),
            ("created", "2026-11-21T10:40:00Z", "`created` cannot be in the future"),
            ("deadline", "2026-11-21T10:20:44.600Z", "`deadline` cannot be in the past"),
            ("deadline", "2026-11-21T10:20:44Z", "`deadline` cannot be before `created`"),
            ("deadline", "2026-11-27T10:20:44Z", "more than 5 days"),
            ("expires", "2026-11-21T11:00:00Z", "`expires` cannot be before"),
        ] {
            let error = finish(&body(|body| body[name] = value.into())).unwrap_err();
            assert_eq!(error.code, QueueErrorCode::InputError);
            assert!(error.message.contains(message), "{}", error.message);
        }
    }

    #[test]
    fn unknown_priorities_and_properties_are_rejected() {
        for change in [("priority", "normal"), ("spare", "x"), ("deadline", "soon")] {
            let error = finish(&body(|body| body[change.0] = change.1.into())).unwrap_err();
            assert_eq!(error.code, QueueErrorCode::InputValidationError);
        }
    }

    #[test]
    fn d6_payloads_that_a_worker_cannot_parse_are_rejected() {
        let nested = |depth: usize| {
            let inner = format!("{}\"]}}\\\"[\"{}", "[".repeat(depth - 1), "]".repeat(depth - 1));
            body(|_| {}).replace(r#"{"z":1,"a":[1.5]}"#, &format!(r#"{{"x":{inner}}}"#))
        };
        let made = finish(&nested(QUEUE_NESTING_MAX)).unwrap();
        let claim = format!(r#"{{"tasks":[{{"task":{}}}]}}"#, made.json);
        serde_json::from_str::<Value>(&claim).unwrap();
        for depth in [QUEUE_NESTING_MAX + 1, 129, 100_000] {
            let error = finish(&nested(depth)).unwrap_err();
            assert_eq!(error.code, QueueErrorCode::InputValidationError);
            assert!(error.message.contains("120 deep"), "{}", error.message);
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
}
