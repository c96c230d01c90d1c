//! Maps a method and a path to a call with decoded parameters. Pure.
//!
//! Slashes within a parameter may be encoded or bare; real clients send both.

use std::borrow::Cow;

use serde_json::{Map, Value};

use super::field_types::{is_identifier, is_printable, is_queue_id, is_slugid};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ApiMethod {
    Ping,
    CreateTask,
    Task,
    Status,
    RerunTask,
    CancelTask,
    PollTaskUrls,
    ClaimWork,
    ClaimTask,
    ReclaimTask,
    ReportCompleted,
    ReportFailed,
    ReportException,
    CreateArtifact,
    GetArtifact,
    GetLatestArtifact,
    ListArtifacts,
    PendingTasks,
    ListPendingTasks,
    ListClaimedTasks,
    /// An extension of this project: lists all tasks, newest first.
    JourneymanListTasks,
}

impl ApiMethod {
    /// The name in the API reference.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Ping => "ping",
            Self::CreateTask => "createTask",
            Self::Task => "task",
            Self::Status => "status",
            Self::RerunTask => "rerunTask",
            Self::CancelTask => "cancelTask",
            Self::PollTaskUrls => "pollTaskUrls",
            Self::ClaimWork => "claimWork",
            Self::ClaimTask => "claimTask",
            Self::ReclaimTask => "reclaimTask",
            Self::ReportCompleted => "reportCompleted",
            Self::ReportFailed => "reportFailed",
            Self::ReportException => "reportException",
            Self::CreateArtifact => "createArtifact",
            Self::GetArtifact => "getArtifact",
            Self::GetLatestArtifact => "getLatestArtifact",
            Self::ListArtifacts => "listArtifacts",
            Self::PendingTasks => "pendingTasks",
            Self::ListPendingTasks => "listPendingTasks",
            Self::ListClaimedTasks => "listClaimedTasks",
            Self::JourneymanListTasks => "journeymanListTasks",
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Route {
    pub(crate) method: ApiMethod,
    params: Vec<Param>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Param {
    name: &'static str,
    value: String,
}

impl Route {
    /// Empty if the call has no such parameter.
    pub(crate) fn param(&self, name: &str) -> &str {
        self.params.iter().find(|param| param.name == name).map_or("", |param| param.value.as_str())
    }

    /// An invalid run number maps to one that no task has.
    pub(crate) fn run(&self) -> u32 {
        self.param("runId").parse().unwrap_or(u32::MAX)
    }

    pub(crate) fn params_json(&self) -> Value {
        let pairs = self.params.iter().map(|param| (param.name.to_owned(), param.value.as_str().into()));
        Value::Object(pairs.collect::<Map<_, _>>())
    }

    pub(crate) fn invalid_params(&self) -> Vec<&'static str> {
        let is_invalid = |param: &&Param| match param.name {
            "taskId" => !is_slugid(&param.value),
            "runId" => !is_number(&param.value),
            "taskQueueId" => !is_queue_id(&param.value),
            "provisionerId" | "workerType" => !is_identifier(&param.value),
            _ => !is_printable(&param.value),
        };
        self.params.iter().filter(is_invalid).map(|param| param.name).collect()
    }
}

fn is_number(text: &str) -> bool {
    text.bytes().all(|byte| byte.is_ascii_digit()) && text.parse::<u32>().is_ok()
}

pub(crate) fn queue_route(method: &str, path: &str) -> Option<Route> {
    let parts: Vec<&str> = path.split('/').collect();
    let (call, names): (ApiMethod, &[&'static str]) = match (method, parts.as_slice()) {
        ("GET", ["ping"]) => (ApiMethod::Ping, &[]),
        ("PUT", ["task", _]) => (ApiMethod::CreateTask, &["taskId"]),
        ("GET", ["task", _]) => (ApiMethod::Task, &["taskId"]),
        ("GET", ["task", _, "status"]) => (ApiMethod::Status, &["taskId"]),
        ("POST", ["task", _, "rerun"]) => (ApiMethod::RerunTask, &["taskId"]),
        ("POST", ["task", _, "cancel"]) => (ApiMethod::CancelTask, &["taskId"]),
        ("POST", ["task", _, "runs", _, verb]) => (run_method(verb)?, &["taskId", "runId"]),
        ("GET", ["task", _, "runs", _, "artifacts"]) => (ApiMethod::ListArtifacts, &["taskId", "runId"]),
        (_, ["task", task, "runs", run, "artifacts", name @ ..]) => {
            let call = match method {
                "POST" => ApiMethod::CreateArtifact,
                "GET" => ApiMethod::GetArtifact,
                _ => return None,
            };
            let values = vec![param("taskId", task), param("runId", run), joined_param("name", name)];
            return Some(Route { method: call, params: values });
        }
        ("GET", ["task", task, "artifacts", name @ ..]) => {
            let params = vec![param("taskId", task), joined_param("name", name)];
            return Some(Route { method: ApiMethod::GetLatestArtifact, params });
        }
        ("GET", ["poll-task-url", _, _]) => (ApiMethod::PollTaskUrls, &["provisionerId", "workerType"]),
        ("POST", ["claim-work", queue @ ..]) => return task_queue_route(ApiMethod::ClaimWork, queue),
        ("GET", ["pending", queue @ ..]) => return task_queue_route(ApiMethod::PendingTasks, queue),
        ("GET", ["task-queues", queue @ .., "pending"]) => {
            return task_queue_route(ApiMethod::ListPendingTasks, queue);
        }
        ("GET", ["task-queues", queue @ .., "claimed"]) => {
            return task_queue_route(ApiMethod::ListClaimedTasks, queue);
        }
        ("GET", ["journeyman", "tasks"]) => (ApiMethod::JourneymanListTasks, &[]),
        _ => return None,
    };
    let fixed = ["task", "runs", "poll-task-url"];
    let values = parts.iter().filter(|part| !fixed.contains(part));
    let params = names.iter().zip(values).map(|(name, value)| param(name, value)).collect();
    Some(Route { method: call, params })
}

fn run_method(verb: &str) -> Option<ApiMethod> {
    Some(match verb {
        "claim" => ApiMethod::ClaimTask,
        "reclaim" => ApiMethod::ReclaimTask,
        "completed" => ApiMethod::ReportCompleted,
        "failed" => ApiMethod::ReportFailed,
        "exception" => ApiMethod::ReportException,
        _ => return None,
    })
}

fn task_queue_route(call: ApiMethod, parts: &[&str]) -> Option<Route> {
    (!parts.is_empty()).then(|| Route { method: call, params: vec![joined_param("taskQueueId", parts)] })
}

fn joined_param(name: &'static str, parts: &[&str]) -> Param {
    param(name, &parts.join("/"))
}

fn param(name: &'static str, value: &str) -> Param {
    let value = urlencoding::decode(value).map_or_else(|_| value.to_owned(), Cow::into_owned);
    Param { name, value }
}

/// Decodes a query parameter; `+` is a space.
pub(crate) fn query_param(query: &str, name: &str) -> Option<String> {
    query.split('&').find_map(|pair| {
        let (key, value) = pair.split_once('=').unwrap_or((pair, ""));
        (key == name).then(|| decode_query_value(value))
    })
}

fn decode_query_value(value: &str) -> String {
    let spaced = value.replace('+', " ");
    urlencoding::decode(&spaced).map_or_else(|_| spaced.clone(), Cow::into_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_task_queue_may_be_written_with_an_encoded_or_a_bare_slash() {
        for path in ["claim-work/test-prov%2Ftest-wt", "claim-work/test-prov/test-wt"] {
            let route = queue_route("POST", path).unwrap();
            assert_eq!((route.method, route.param("taskQueueId")), (ApiMethod::ClaimWork, "test-prov/test-wt"));
        }
        for path in ["task-queues/p%2Fw/claimed", "task-queues/p/w/claimed"] {
            let route = queue_route("GET", path).unwrap();
            assert_eq!((route.method, route.param("taskQueueId")), (ApiMethod::ListClaimedTasks, "p/w"));
        }
    }

    #[test]
    fn an_artifact_name_may_hold_slashes() {
        let task = "XJOIQcqPRgykTZR_00-b1w";
        for name in ["public%2Flogs%2Flive.log", "public/logs/live.log"] {
            let route = queue_route("POST", &format!("task/{task}/runs/3/artifacts/{name}")).unwrap();
            assert_eq!(route.method, ApiMethod::CreateArtifact);
            assert_eq!((route.param("name"), route.run()), ("public/logs/live.log", 3));
        }
        let bad = queue_route("GET", &format!("task/{task}/artifacts/a%0Ab")).unwrap();
        assert_eq!(bad.invalid_params().len(), 1);
    }

    #[test]
    fn an_address_without_a_call_is_none() {
        for (method, path) in [
            ("GET", "nosuch"),
            ("DELETE", "task/x"),
            ("POST", "task/x/runs/0/explode"),
            ("GET", "task"),
            ("POST", "task/x/runs/0/claim/y"),
        ] {
            assert_eq!(queue_route(method, path), None, "{method} {path}");
        }
    }

    #[test]
    fn a_parameter_that_cannot_be_is_told() {
        for run in ["-1", "+0", "1.0", "4294967296", "%20"] {
            let route = queue_route("POST", &format!("task/nope/runs/{run}/reclaim")).unwrap();
            assert_eq!(route.invalid_params().len(), 2, "{run}");
        }
    }

    #[test]
    fn a_bare_plus_in_a_query_is_a_space() {
        assert_eq!(query_param("a=1&popreceipt=x+y%2B=", "popreceipt").unwrap(), "x y+=");
        assert_eq!(query_param("a=1", "b"), None);
    }
}
