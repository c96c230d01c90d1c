//! Which call an address means. Pure: a method and a path go in, a call with its decoded parameters comes out.
//!
//! Slashes within a parameter may be encoded or bare, as the service accepts both.

use std::borrow::Cow;

use serde_json::{Map, Value};

use super::check::{is_name, is_queue_id, is_slug, slug_pattern};

/// A call of the queue's API.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Call {
    Ping,
    CreateTask,
    Task,
    Status,
    ScheduleTask,
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
    FinishArtifact,
    GetArtifact,
    GetLatestArtifact,
    ListArtifacts,
    ListLatestArtifacts,
    PendingTasks,
    ListPendingTasks,
    ListClaimedTasks,
    GetWorker,
    QuarantineWorker,
    CreateUpload,
    FinishUpload,
    /// Our own addition: every task, the newest first.
    JourneymanListTasks,
}

impl Call {
    /// The call's name in the API's reference.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Ping => "ping",
            Self::CreateTask => "createTask",
            Self::Task => "task",
            Self::Status => "status",
            Self::ScheduleTask => "scheduleTask",
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
            Self::FinishArtifact => "finishArtifact",
            Self::GetArtifact => "getArtifact",
            Self::GetLatestArtifact => "getLatestArtifact",
            Self::ListArtifacts => "listArtifacts",
            Self::ListLatestArtifacts => "listLatestArtifacts",
            Self::PendingTasks => "pendingTasks",
            Self::ListPendingTasks => "listPendingTasks",
            Self::ListClaimedTasks => "listClaimedTasks",
            Self::GetWorker => "getWorker",
            Self::QuarantineWorker => "quarantineWorker",
            Self::CreateUpload => "createUpload",
            Self::FinishUpload => "finishUpload",
            Self::JourneymanListTasks => "journeymanListTasks",
        }
    }
}

/// A call with its parameters as they stand in the address.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Route {
    pub(crate) call: Call,
    params: Vec<Param>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Param {
    name: &'static str,
    value: String,
}

impl Route {
    /// A parameter by name; empty where the call has none of it.
    pub(crate) fn param(&self, name: &str) -> &str {
        self.params.iter().find(|param| param.name == name).map_or("", |param| param.value.as_str())
    }

    /// The number of the run; one that cannot be is out of every task's range.
    pub(crate) fn run(&self) -> u32 {
        self.param("runId").parse().unwrap_or(u32::MAX)
    }

    /// The parameters as a refusal shows them.
    pub(crate) fn shown(&self) -> Value {
        let pairs = self.params.iter().map(|param| (param.name.to_owned(), param.value.as_str().into()));
        Value::Object(pairs.collect::<Map<_, _>>())
    }

    /// What is wrong with the parameters, a line each.
    pub(crate) fn findings(&self) -> Vec<String> {
        let mut found = Vec::new();
        for Param { name, value } in &self.params {
            let pattern = match *name {
                "taskId" if !is_slug(value) => slug_pattern(),
                "runId" if !is_number(value) => "^[0-9]+$",
                "taskQueueId" if !is_queue_id(value) => "^[a-zA-Z0-9-_]{1,38}/[a-zA-Z0-9-_]{1,38}$",
                "provisionerId" | "workerType" | "workerGroup" | "workerId"
                    if !is_name(value) || !(1..=38).contains(&value.len()) =>
                {
                    "^[a-zA-Z0-9-_]{1,38}$"
                }
                "name" if !value.bytes().all(|byte| (b' '..=b'~').contains(&byte)) => "^[ -~]+$",
                _ => continue,
            };
            found.push(format!(
                "URL parameter '{name}' given as '{value}' must match regular expression: '/{pattern}/'"
            ));
        }
        found
    }
}

/// Digits alone, that a run's number can hold.
fn is_number(text: &str) -> bool {
    text.bytes().all(|byte| byte.is_ascii_digit()) && text.parse::<u32>().is_ok()
}

/// Finds the call behind a method and a path below `/api/queue/v1/`.
pub(crate) fn queue(method: &str, path: &str) -> Option<Route> {
    let parts: Vec<&str> = path.split('/').collect();
    let (call, names): (Call, &[&'static str]) = match (method, parts.as_slice()) {
        ("GET", ["ping"]) => (Call::Ping, &[]),
        ("PUT", ["task", _]) => (Call::CreateTask, &["taskId"]),
        ("GET", ["task", _]) => (Call::Task, &["taskId"]),
        ("GET", ["task", _, "status"]) => (Call::Status, &["taskId"]),
        ("POST", ["task", _, "schedule"]) => (Call::ScheduleTask, &["taskId"]),
        ("POST", ["task", _, "rerun"]) => (Call::RerunTask, &["taskId"]),
        ("POST", ["task", _, "cancel"]) => (Call::CancelTask, &["taskId"]),
        ("POST", ["task", _, "runs", _, verb]) => (of_run(verb)?, &["taskId", "runId"]),
        ("GET", ["task", _, "runs", _, "artifacts"]) => (Call::ListArtifacts, &["taskId", "runId"]),
        ("GET", ["task", _, "artifacts"]) => (Call::ListLatestArtifacts, &["taskId"]),
        (_, ["task", task, "runs", run, "artifacts", name @ ..]) => {
            let call = match method {
                "POST" => Call::CreateArtifact,
                "PUT" => Call::FinishArtifact,
                "GET" => Call::GetArtifact,
                _ => return None,
            };
            let values = vec![param("taskId", task), param("runId", run), joined("name", name)];
            return Some(Route { call, params: values });
        }
        ("GET", ["task", task, "artifacts", name @ ..]) => {
            let params = vec![param("taskId", task), joined("name", name)];
            return Some(Route { call: Call::GetLatestArtifact, params });
        }
        ("GET", ["poll-task-url", _, _]) => (Call::PollTaskUrls, &["provisionerId", "workerType"]),
        ("POST", ["claim-work", queue @ ..]) => return of_queue(Call::ClaimWork, queue),
        ("GET", ["pending", queue @ ..]) => return of_queue(Call::PendingTasks, queue),
        ("GET", ["task-queues", queue @ .., "pending"]) => {
            return of_queue(Call::ListPendingTasks, queue);
        }
        ("GET", ["task-queues", queue @ .., "claimed"]) => {
            return of_queue(Call::ListClaimedTasks, queue);
        }
        (_, ["provisioners", _, "worker-types", _, "workers", _, _]) => {
            let call = match method {
                "GET" => Call::GetWorker,
                "PUT" => Call::QuarantineWorker,
                _ => return None,
            };
            (call, &["provisionerId", "workerType", "workerGroup", "workerId"])
        }
        ("GET", ["journeyman", "tasks"]) => (Call::JourneymanListTasks, &[]),
        _ => return None,
    };
    let fixed = ["task", "runs", "poll-task-url", "provisioners", "worker-types", "workers"];
    let values = parts.iter().filter(|part| !fixed.contains(part));
    let params = names.iter().zip(values).map(|(name, value)| param(name, value)).collect();
    Some(Route { call, params })
}

/// Finds the call behind a method and a path below `/api/object/v1/`.
pub(crate) fn object(method: &str, path: &str) -> Option<Route> {
    let parts: Vec<&str> = path.split('/').collect();
    let (call, name) = match (method, parts.as_slice()) {
        ("PUT", ["upload", name @ ..]) => (Call::CreateUpload, name),
        ("POST", ["finish-upload", name @ ..]) => (Call::FinishUpload, name),
        _ => return None,
    };
    Some(Route { call, params: vec![joined("name", name)] })
}

fn of_run(verb: &str) -> Option<Call> {
    Some(match verb {
        "claim" => Call::ClaimTask,
        "reclaim" => Call::ReclaimTask,
        "completed" => Call::ReportCompleted,
        "failed" => Call::ReportFailed,
        "exception" => Call::ReportException,
        _ => return None,
    })
}

fn of_queue(call: Call, parts: &[&str]) -> Option<Route> {
    (!parts.is_empty()).then(|| Route { call, params: vec![joined("taskQueueId", parts)] })
}

fn joined(name: &'static str, parts: &[&str]) -> Param {
    param(name, &parts.join("/"))
}

fn param(name: &'static str, value: &str) -> Param {
    let value = urlencoding::decode(value).map_or_else(|_| value.to_owned(), Cow::into_owned);
    Param { name, value }
}

/// A parameter of a query, decoded; a `+` is a space, as everywhere on the web.
pub(crate) fn query_param(query: &str, name: &str) -> Option<String> {
    query.split('&').find_map(|pair| {
        let (key, value) = pair.split_once('=').unwrap_or((pair, ""));
        (key == name).then(|| decoded(value))
    })
}

fn decoded(value: &str) -> String {
    let spaced = value.replace('+', " ");
    urlencoding::decode(&spaced).map_or_else(|_| spaced.clone(), Cow::into_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_task_queue_may_be_written_with_an_encoded_or_a_bare_slash() {
        for path in ["claim-work/test-prov%2Ftest-wt", "claim-work/test-prov/test-wt"] {
            let route = queue("POST", path).unwrap();
            assert_eq!((route.call, route.param("taskQueueId")), (Call::ClaimWork, "test-prov/test-wt"));
        }
        for path in ["task-queues/p%2Fw/claimed", "task-queues/p/w/claimed"] {
            let route = queue("GET", path).unwrap();
            assert_eq!((route.call, route.param("taskQueueId")), (Call::ListClaimedTasks, "p/w"));
        }
    }

    #[test]
    fn an_artifact_name_may_hold_slashes() {
        let task = "XJOIQcqPRgykTZR_00-b1w";
        for name in ["public%2Flogs%2Flive.log", "public/logs/live.log"] {
            let route = queue("POST", &format!("task/{task}/runs/3/artifacts/{name}")).unwrap();
            assert_eq!(route.call, Call::CreateArtifact);
            assert_eq!((route.param("name"), route.run()), ("public/logs/live.log", 3));
        }
        let bad = queue("GET", &format!("task/{task}/artifacts/a%0Ab")).unwrap();
        assert_eq!(bad.findings().len(), 1);
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
            assert_eq!(queue(method, path), None, "{method} {path}");
        }
    }

    #[test]
    fn a_parameter_that_cannot_be_is_told() {
        for run in ["-1", "+0", "1.0", "4294967296", "%20"] {
            let route = queue("POST", &format!("task/nope/runs/{run}/reclaim")).unwrap();
            assert_eq!(route.findings().len(), 2, "{run}");
        }
    }

    #[test]
    fn a_bare_plus_in_a_query_is_a_space() {
        assert_eq!(query_param("a=1&popreceipt=x+y%2B=", "popreceipt").unwrap(), "x y+=");
        assert_eq!(query_param("a=1", "b"), None);
    }
}
