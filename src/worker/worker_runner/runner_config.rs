//! The configuration file that a worker-runner writes: JSON with the worker's identity and credentials, merged with the
//! configuration of the worker pool.

use std::collections::BTreeMap;

use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::{Map, Value, json};

use super::protocol::certificate;
use crate::source::taskcluster::{ClientCredentials, INSTANCE_TYPE_VARIABLE, LOCATION_VARIABLE};
use journeyman_platform::settings::values::{Secret, merge_json};

pub const SOURCE_NAME: &str = "taskcluster";

/// What a runner tells of the host, which this worker finds out by itself or needs not to know. It never reboots the host.
const OF_HOST: [&str; 10] = [
    "availabilityZone",
    "disableReboots",
    "instanceID",
    "instanceId",
    "privateIP",
    "publicHostname",
    "publicIP",
    "region",
    "workerTypeMetadata",
    "wstAudience",
];

/// Unknown keys, such as those of generic-worker, have no effect.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct RunnerConfig {
    #[serde(rename = "rootURL")]
    root_url: String,
    client_id: String,
    access_token: Secret,
    #[serde(default, deserialize_with = "certificate")]
    certificate: Option<Secret>,
    provisioner_id: String,
    worker_type: String,
    worker_group: String,
    worker_id: String,
    /// The keys of generic-worker, so that a pool's configuration need not change.
    idle_timeout_secs: Option<u64>,
    number_of_tasks_to_run: Option<u32>,
    tasks_dir: Option<String>,
    capacity: Option<u32>,
    max_task_run_time: Option<u64>,
    required_disk_space_megabytes: Option<u64>,
    #[serde(default)]
    create_object_artifacts: bool,
    pub shutdown_machine_on_idle: Option<bool>,
    worker_location: Option<String>,
    instance_type: Option<String>,
    /// Sections of a journeyman configuration.
    #[serde(default)]
    journeyman: Value,
    #[serde(flatten)]
    others: BTreeMap<String, IgnoredAny>,
}

impl RunnerConfig {
    /// # Errors
    ///
    /// The text is not a worker-runner configuration. The error contains no value of the file.
    pub fn parse(text: &str) -> Result<Self, String> {
        serde_json::from_slice(text.as_bytes())
            .map_err(|error| format!("not a worker-runner configuration file: {error}"))
    }

    pub fn credentials(&self) -> ClientCredentials {
        ClientCredentials {
            client_id: self.client_id.clone(),
            access_token: self.access_token.clone(),
            certificate: self.certificate.clone(),
        }
    }

    /// The keys that have no effect, of which the configuration of the pool may expect one.
    pub fn unknown_keys(&self) -> impl Iterator<Item = &str> {
        self.others.keys().map(String::as_str).filter(|key| !OF_HOST.contains(key))
    }

    /// What tasks learn of the host, in the variables of generic-worker.
    pub fn variables(&self) -> impl Iterator<Item = (&str, &str)> {
        let variables = [(LOCATION_VARIABLE, &self.worker_location), (INSTANCE_TYPE_VARIABLE, &self.instance_type)];
        variables.into_iter().filter_map(|(name, value)| Some((name, value.as_deref()?)))
    }

    /// The resulting configuration as TOML, without credentials. The pool's `journeyman` object takes precedence over
    /// generic-worker's keys, and the runner's identity over both.
    ///
    /// # Errors
    ///
    /// `journeyman` is not an object.
    pub fn to_toml(&self) -> Result<String, String> {
        let mut config = Value::Object(Map::new());
        let seconds = self.idle_timeout_secs.filter(|seconds| *seconds > 0).map(|seconds| format!("{seconds}s"));
        let worker = [
            ("exit_when_idle", seconds.map(Value::from)),
            ("max_tasks", self.number_of_tasks_to_run.map(Value::from)),
            ("work_dir", self.tasks_dir.clone().map(Value::from)),
            ("capacity", self.capacity.map(Value::from)),
        ];
        let worker: Map<String, Value> =
            worker.into_iter().filter_map(|(key, value)| Some((key.to_owned(), value?))).collect();
        merge_json(&mut config, json!({"worker": worker}));
        if let Some(seconds) = self.max_task_run_time {
            let command = json!({"kind": "command", "max_run_time": format!("{seconds}s")});
            merge_json(&mut config, json!({"handler": {"command": command}}));
        }
        if let Some(megabytes) = self.required_disk_space_megabytes {
            merge_json(&mut config, json!({"host": {"min_free_disk": format!("{megabytes}MiB")}}));
        }
        if self.create_object_artifacts {
            merge_json(&mut config, json!({"source": {SOURCE_NAME: {"artifact_storage": "object"}}}));
        }
        match &self.journeyman {
            Value::Null => {}
            Value::Object(_) => merge_json(&mut config, self.journeyman.clone()),
            Value::Bool(_) | Value::Number(_) | Value::String(_) | Value::Array(_) => {
                let example = r#"{"worker": {"capacity": 2}}"#;
                return Err(format!("`journeyman` must be an object with configuration sections, such as {example}"));
            }
        }
        let identity = json!({
            "worker": {"id": self.worker_id, "group": self.worker_group},
            "source": {SOURCE_NAME: {
                "kind": "taskcluster",
                "root_url": self.root_url,
                "task_queue": format!("{}/{}", self.provisioner_id, self.worker_type),
                "worker_pool": {},
            }},
        });
        merge_json(&mut config, identity);
        toml::to_string_pretty(&config).map_err(|error| format!("cannot convert it to TOML: {error}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILE: &str = r#"{
        "rootURL": "https://tc.example.com", "clientId": "worker/aws/i-1", "accessToken": "runner-file-canary",
        "certificate": "{\"version\":1}", "provisionerId": "build", "workerType": "linux", "workerGroup": "eu",
        "workerId": "i-1", "workerLocation": "{\"cloud\":\"aws\"}", "publicIP": "192.0.2.1", "idleTimeoutSecs": 600,
        "numberOfTasksToRun": 1, "shutdownMachineOnIdle": true,
        "journeyman": {"worker": {"capacity": 3, "max_tasks": 9}, "source": {"taskcluster": {"dialect": "azure"}}}
    }"#;

    #[test]
    fn a_runner_file_becomes_a_configuration_without_credentials() {
        let runner_config = RunnerConfig::parse(FILE).unwrap();
        let text = runner_config.to_toml().unwrap();
        assert!(!text.contains("canary") && !format!("{runner_config:?}").contains("canary"));
        let config: toml::Value = toml::from_str(&text).unwrap();
        let worker = &config["worker"];
        assert_eq!(worker["id"].as_str(), Some("i-1"));
        assert_eq!((worker["capacity"].as_integer(), worker["max_tasks"].as_integer()), (Some(3), Some(9)));
        assert_eq!(worker["exit_when_idle"].as_str(), Some("600s"));
        let source = &config["source"][SOURCE_NAME];
        assert_eq!((source["task_queue"].as_str(), source["dialect"].as_str()), (Some("build/linux"), Some("azure")));
        assert_eq!(runner_config.credentials().access_token.reveal(), "runner-file-canary");
    }

    #[test]
    fn b9_keys_of_generic_worker_are_used_or_named() {
        let mut file: Value = serde_json::from_str(FILE).unwrap();
        merge_json(
            &mut file,
            json!({"capacity": 2, "maxTaskRunTime": 7200, "instanceType": "m5.large", "livelogExecutable": "/canary",
                   "requiredDiskSpaceMegabytes": 10240, "createObjectArtifacts": true, "cleanUpTaskDirs": false}),
        );
        let runner_config = RunnerConfig::parse(&file.to_string()).unwrap();
        let unknown: Vec<_> = runner_config.unknown_keys().collect();
        assert_eq!(unknown, ["cleanUpTaskDirs", "livelogExecutable"]);
        assert_eq!(runner_config.shutdown_machine_on_idle, Some(true));
        assert!(!format!("{runner_config:?}").contains("canary"));
        let variables: Vec<_> = runner_config.variables().collect();
        let location = ("TASKCLUSTER_WORKER_LOCATION", r#"{"cloud":"aws"}"#);
        assert_eq!(variables, [location, ("TASKCLUSTER_INSTANCE_TYPE", "m5.large")]);
        file["journeyman"] = Value::Null;
        let text = RunnerConfig::parse(&file.to_string()).unwrap().to_toml().unwrap();
        let config: toml::Value = toml::from_str(&text).unwrap();
        assert_eq!(config["worker"]["capacity"].as_integer(), Some(2));
        assert_eq!(config["handler"]["command"]["max_run_time"].as_str(), Some("7200s"));
        assert_eq!(config["host"]["min_free_disk"].as_str(), Some("10240MiB"));
        let source = &config["source"][SOURCE_NAME];
        assert_eq!(source["artifact_storage"].as_str(), Some("object"));
        assert!(source["worker_pool"].is_table(), "{text}");
    }

    #[test]
    fn an_error_names_the_missing_key_and_repeats_no_value() {
        let error =
            RunnerConfig::parse(r#"{"rootURL": "u", "clientId": 7, "accessToken": "runner-bad-canary"}"#).unwrap_err();
        assert!(!error.contains("canary"), "{error}");
        let error = RunnerConfig::parse(r#"{"rootURL": "https://x"}"#).unwrap_err();
        assert!(error.contains("clientId"), "{error}");
        let mut file: Value = serde_json::from_str(FILE).unwrap();
        file["journeyman"] = json!("capacity = 3");
        let error = RunnerConfig::parse(&file.to_string()).unwrap().to_toml().unwrap_err();
        assert!(error.contains("must be an object"), "{error}");
    }
}
