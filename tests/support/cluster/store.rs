//! What the stand-in for Kubernetes keeps: objects, their changes by version, and logs; with the checks and words of a real
//! API server.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use base64::Engine as _;
use jiff::{SignedDuration, Timestamp};
use serde_json::{Value, json};

pub(super) struct Kind {
    pub(super) resource: &'static str,
    pub(super) kind: &'static str,
}

static KINDS: [Kind; 3] = [
    Kind { resource: "pods", kind: "Pod" },
    Kind { resource: "secrets", kind: "Secret" },
    Kind { resource: "events", kind: "Event" },
];

pub(super) fn kind_of(resource: &str) -> Option<&'static Kind> {
    KINDS.iter().find(|kind| kind.resource == resource)
}

#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Key {
    pub(super) resource: &'static str,
    pub(super) namespace: String,
    pub(super) name: String,
}

/// An answer of the API server that is no success: a code and a Status.
#[derive(Debug)]
pub(super) struct Refused(pub(super) u16, pub(super) Value);

impl Refused {
    pub(super) fn new(code: u16, reason: &str, message: impl Into<String>) -> Self {
        let status = json!({
            "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure", "code": code, "reason": reason,
            "message": message.into(),
        });
        Self(code, status)
    }

    fn of(code: u16, reason: &str, key: &Key, why: &str) -> Self {
        Self::new(code, reason, format!("{} \"{}\" {why}", key.resource, key.name))
    }

    pub(super) fn no_such_route() -> Self {
        Self::new(404, "NotFound", "the server could not find the requested resource")
    }

    pub(super) fn bad_request(message: impl Into<String>) -> Self {
        Self::new(400, "BadRequest", message)
    }

    fn invalid(kind: &Kind, name: &str, field: &str, why: &str) -> Self {
        let message = format!("{} \"{name}\" is invalid: {field}: {why}", kind.kind);
        Self::new(422, "Invalid", message)
    }

    pub(super) fn expired(asked: u64, oldest: u64) -> Self {
        Self::new(410, "Expired", format!("too old resource version: {asked} ({oldest})"))
    }
}

/// One change of an object; without `before` it was created, without `after` removed.
pub(super) struct Change {
    pub(super) version: u64,
    pub(super) key: Key,
    pub(super) before: Option<Arc<Value>>,
    pub(super) after: Option<Arc<Value>>,
}

#[derive(Default)]
pub(super) struct Store {
    pub(super) version: u64,
    /// Watches from an older version are refused.
    pub(super) compacted: u64,
    pub(super) objects: BTreeMap<Key, Arc<Value>>,
    pub(super) changes: Vec<Change>,
    /// The lines of a container, by the pod's uid and the container's name.
    pub(super) logs: BTreeMap<(String, String), Vec<(Timestamp, String)>>,
    /// How far this clock is ahead of the host's.
    pub(super) skew: SignedDuration,
    /// A pod that is deleted stays, with its deletion time, until the test lets it vanish.
    pub(super) keeps_deleted: bool,
}

impl Store {
    pub(super) fn now(&self) -> Timestamp {
        Timestamp::now() + self.skew
    }

    /// The time as it stands in objects.
    pub(super) fn stamp(&self) -> String {
        seconds(self.now())
    }

    pub(super) fn log(&self, of: &(String, String), since: Timestamp) -> &[(Timestamp, String)] {
        let lines = self.logs.get(of).map_or(&[][..], Vec::as_slice);
        &lines[lines.partition_point(|(at, _)| *at < since)..]
    }

    pub(super) fn get(&self, key: &Key) -> Result<&Value, Refused> {
        self.objects.get(key).map(Arc::as_ref).ok_or_else(|| Refused::of(404, "NotFound", key, "not found"))
    }

    pub(super) fn list(&self, resource: &str, namespace: &str) -> impl Iterator<Item = (&Key, &Value)> {
        let all = self.objects.iter().map(|(key, object)| (key, object.as_ref()));
        all.filter(move |(key, _)| key.resource == resource && key.namespace == namespace)
    }

    /// Stores an object as one change, if it is one.
    pub(super) fn put(&mut self, key: &Key, mut object: Value) -> Arc<Value> {
        let before = self.objects.get(key).cloned();
        if let Some(before) = before.as_ref().filter(|before| ***before == object) {
            return Arc::clone(before);
        }
        self.version += 1;
        object["metadata"]["resourceVersion"] = json!(self.version.to_string());
        let after = Arc::new(object);
        self.objects.insert(key.clone(), Arc::clone(&after));
        self.changes.push(Change { version: self.version, key: key.clone(), before, after: Some(Arc::clone(&after)) });
        after
    }

    pub(super) fn remove(&mut self, key: &Key) {
        let Some(before) = self.objects.remove(key) else { return };
        self.version += 1;
        self.changes.push(Change { version: self.version, key: key.clone(), before: Some(before), after: None });
        self.collect_garbage();
    }

    /// Removes what only belongs to objects that are gone.
    fn collect_garbage(&mut self) {
        let uids: BTreeSet<_> =
            self.objects.values().map(|one| &one["metadata"]["uid"]).filter_map(Value::as_str).collect();
        let orphan = self.objects.iter().find(|(_, object)| {
            let mut owners = object["metadata"]["ownerReferences"].as_array().into_iter().flatten().peekable();
            owners.peek().is_some() && owners.all(|owner| !uids.contains(owner["uid"].as_str().unwrap_or_default()))
        });
        if let Some(key) = orphan.map(|(key, _)| key.clone()) {
            self.remove(&key);
        }
    }

    pub(super) fn create(&mut self, kind: &Kind, namespace: &str, mut object: Value) -> Result<Arc<Value>, Refused> {
        object = decode(kind, object)?;
        let given = &object["metadata"]["namespace"];
        if given.as_str().is_some_and(|given| given != namespace) {
            let why = "the namespace of the provided object does not match the namespace sent on the request";
            return Err(Refused::bad_request(why));
        }
        let key = Key {
            resource: kind.resource,
            namespace: namespace.to_owned(),
            name: object["metadata"]["name"].as_str().unwrap_or_default().to_owned(),
        };
        validate(kind, &key.name, &object)?;
        if self.objects.contains_key(&key) {
            return Err(Refused::of(409, "AlreadyExists", &key, "already exists"));
        }
        object["metadata"]["namespace"] = json!(namespace);
        object["metadata"]["uid"] = json!(uuid::Uuid::new_v4().to_string());
        object["metadata"]["creationTimestamp"] = json!(self.stamp());
        if kind.kind == "Pod" {
            let spec = &mut object["spec"];
            let defaults = [
                ("restartPolicy", json!("Always")),
                ("terminationGracePeriodSeconds", json!(30)),
                ("dnsPolicy", json!("ClusterFirst")),
                ("schedulerName", json!("default-scheduler")),
            ];
            for (field, value) in defaults {
                if spec[field].is_null() {
                    spec[field] = value;
                }
            }
            object["status"] = json!({ "phase": "Pending" });
        } else if kind.kind == "Secret" {
            encode_string_data(&mut object);
        }
        let made = self.put(&key, object);
        if !made["metadata"]["ownerReferences"].is_null() {
            self.collect_garbage();
        }
        Ok(made)
    }

    /// Deletes an object. A pod on a node gets its grace period first.
    pub(super) fn delete(&mut self, key: &Key, options: &Value) -> Result<Value, Refused> {
        let mut object = self.get(key)?.clone();
        let is_over = ["Succeeded", "Failed"].map(|phase| object["status"]["phase"] == phase).contains(&true);
        let grace = [&options["gracePeriodSeconds"], &object["spec"]["terminationGracePeriodSeconds"]]
            .into_iter()
            .find_map(Value::as_i64)
            .filter(|_| key.resource == "pods" && !object["spec"]["nodeName"].is_null() && !is_over)
            .unwrap_or(0);
        if grace == 0 {
            self.remove(key);
            return Ok(object);
        }
        if object["metadata"]["deletionTimestamp"].is_null() {
            object["metadata"]["deletionTimestamp"] = json!(seconds(self.now() + SignedDuration::from_secs(grace)));
            object["metadata"]["deletionGracePeriodSeconds"] = json!(grace);
            object = self.put(key, object).as_ref().clone();
        }
        if !self.keeps_deleted {
            self.remove(key);
        }
        Ok(object)
    }
}

pub(super) fn seconds(time: Timestamp) -> String {
    time.strftime("%Y-%m-%dT%H:%M:%SZ").to_string()
}

fn decode(kind: &Kind, mut object: Value) -> Result<Value, Refused> {
    if !object.is_object() || object["kind"].as_str().is_some_and(|given| given != kind.kind) {
        return Err(Refused::bad_request(format!("the body is no {}", kind.kind)));
    }
    object["kind"] = json!(kind.kind);
    object["apiVersion"] = json!("v1");
    remove_nulls(&mut object);
    if let Some(field) = misfit(&object) {
        let message = format!("{} in version \"v1\" cannot be handled as a {}: {field}", kind.kind, kind.kind);
        return Err(Refused::bad_request(message));
    }
    // Within a list they are left out.
    for own in ["kind", "apiVersion"] {
        object.as_object_mut().expect("an object").remove(own);
    }
    Ok(object)
}

/// What is null is not set.
fn remove_nulls(value: &mut Value) {
    if let Some(fields) = value.as_object_mut() {
        fields.retain(|_, field| !field.is_null());
        fields.values_mut().for_each(remove_nulls);
    }
    value.as_array_mut().into_iter().flatten().for_each(remove_nulls);
}

/// A field of another type than the API server's, of those that are easily mistaken.
fn misfit(object: &Value) -> Option<String> {
    let is_text = |value: &Value| value.is_null() || value.is_string();
    for field in ["labels", "annotations"] {
        let values = &object["metadata"][field];
        if !(values.is_null() || values.as_object().is_some_and(|values| values.values().all(is_text))) {
            return Some(format!("metadata.{field}"));
        }
    }
    for list in ["initContainers", "containers"] {
        let containers = &object["spec"][list];
        if !(containers.is_null() || containers.is_array()) {
            return Some(format!("spec.{list}"));
        }
        for container in containers.as_array().into_iter().flatten() {
            let is_list_of = |field: &str, fits: &dyn Fn(&Value) -> bool| {
                container[field].is_null() || container[field].as_array().is_some_and(|items| items.iter().all(fits))
            };
            let is_variable = |one: &Value| one["name"].is_string() && is_text(&one["value"]);
            let fits = [
                ("name", is_text(&container["name"])),
                ("image", is_text(&container["image"])),
                ("command", is_list_of("command", &is_text)),
                ("args", is_list_of("args", &is_text)),
                ("env", is_list_of("env", &is_variable)),
            ];
            if let Some((field, _)) = fits.iter().find(|(_, fits)| !fits) {
                return Some(format!("spec.{list}.{field}"));
            }
        }
    }
    None
}

fn encode_string_data(object: &mut Value) {
    let texts = object.as_object_mut().and_then(|object| object.remove("stringData"));
    for (name, text) in texts.iter().filter_map(Value::as_object).flatten() {
        let text = text.as_str().unwrap_or_default();
        object["data"][name] = json!(base64::engine::general_purpose::STANDARD.encode(text));
    }
}

fn validate(kind: &Kind, name: &str, object: &Value) -> Result<(), Refused> {
    let invalid = |field: &str, value: &str, why: &str| {
        Refused::invalid(kind, name, field, &format!("Invalid value: \"{value}\": {why}"))
    };
    if name.len() > 253 || !name.split('.').all(is_dns_label) {
        let why = "a lowercase RFC 1123 subdomain must consist of lower case alphanumeric characters, '-' or '.', and must start \
                   and end with an alphanumeric character; must be no more than 253 characters";
        return Err(invalid("metadata.name", name, why));
    }
    for (label, value) in object["metadata"]["labels"].as_object().into_iter().flatten() {
        let (prefix, short) = label.split_once('/').unwrap_or(("none", label));
        let value = value.as_str().unwrap_or_default();
        if !prefix.split('.').all(is_dns_label) || short.is_empty() || !is_label_value(short) {
            return Err(invalid(
                "metadata.labels",
                label,
                "name part must consist of alphanumeric characters, '-', '_' or '.'",
            ));
        }
        if !is_label_value(value) {
            let why = "a valid label must be an empty string or consist of alphanumeric characters, '-', '_' or '.', and must \
                       start and end with an alphanumeric character; must be no more than 63 characters";
            return Err(invalid("metadata.labels", value, why));
        }
    }
    if kind.kind != "Pod" {
        return Ok(());
    }
    let required = |field: &str| Refused::invalid(kind, name, field, "Required value");
    if object["spec"]["containers"].as_array().is_none_or(Vec::is_empty) {
        return Err(required("spec.containers"));
    }
    let mut names = BTreeSet::new();
    for list in ["initContainers", "containers"] {
        for (index, container) in object["spec"][list].as_array().into_iter().flatten().enumerate() {
            let (field, own) = (format!("spec.{list}[{index}]"), container["name"].as_str().unwrap_or_default());
            if !is_dns_label(own) {
                let why = "a lowercase RFC 1123 label must consist of lower case alphanumeric characters or '-', and must start and \
                           end with an alphanumeric character; must be no more than 63 characters";
                return Err(invalid(&format!("{field}.name"), own, why));
            }
            if !names.insert(own) {
                return Err(Refused::invalid(
                    kind,
                    name,
                    &format!("{field}.name"),
                    &format!("Duplicate value: \"{own}\""),
                ));
            }
            if container["image"].as_str().is_none_or(str::is_empty) {
                return Err(required(&format!("{field}.image")));
            }
        }
    }
    Ok(())
}

fn is_dns_label(text: &str) -> bool {
    let is_inner = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
    !text.is_empty() && text.len() <= 63 && text.bytes().all(is_inner) && !text.starts_with('-') && !text.ends_with('-')
}

fn is_label_value(text: &str) -> bool {
    let is_inner = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
    let is_end = |byte: Option<u8>| byte.is_none_or(|byte| byte.is_ascii_alphanumeric());
    text.len() <= 63 && text.bytes().all(is_inner) && is_end(text.bytes().next()) && is_end(text.bytes().last())
}

/// A field selector and a label selector: what an object has, or has not.
pub(super) struct Selector(Vec<Requirement>);

struct Requirement {
    /// The names that lead to the value.
    path: Vec<String>,
    value: String,
    is_equal: bool,
}

impl Selector {
    pub(super) fn parse(labels: &str, fields: &str) -> Self {
        let requirements = |text: &str, path: fn(&str) -> Vec<String>| -> Vec<Requirement> {
            let all = text.split(',').filter_map(|one| {
                let (name, value) = one.split_once('=')?;
                let is_equal = !name.ends_with('!');
                Some(Requirement { path: path(name.trim_end_matches('!')), value: value.to_owned(), is_equal })
            });
            all.collect()
        };
        let mut all = requirements(labels, |label| ["metadata", "labels", label].map(str::to_owned).to_vec());
        all.extend(requirements(fields, |field| field.split('.').map(str::to_owned).collect()));
        Self(all)
    }

    pub(super) fn matches(&self, object: &Value) -> bool {
        self.0.iter().all(|one| {
            let found = one.path.iter().fold(object, |value, name| &value[name]);
            (found.as_str() == Some(one.value.as_str())) == one.is_equal
        })
    }
}
