//! The section of a handler that forwards tasks to a service.

use serde::{Deserialize, Serialize};

use crate::handler::RunTime;
use crate::handler::config::{env_allow, max_run_time, termination_grace};
use journeyman_domain::limits::{SERVICE_PROBE_INTERVAL_MIN_MS, SERVICE_STARTUP_TIMEOUT_MIN_MS};
use journeyman_platform::settings::values::{ServiceAddress, Span, built_in};

/// A handler that forwards tasks to an HTTP service.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(debug_assertions, derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct HttpHandler {
    /// The program and its arguments. With `http`, the worker starts it as a sidecar that serves `url`, checks its health and restarts it.
    #[serde(default)]
    pub exec: Vec<String>,
    /// Base URL of the service, to which the path of a request is appended, or `unix:` and the path of its socket.
    pub url: ServiceAddress,
    /// Path that answers with 2xx while the service is healthy [built-in: the service is healthy if it accepts connections].
    pub health: Option<String>,
    /// Interval of health checks while the service is healthy, and their timeout, at least 1 s. After three failures in a row the service is restarted; a timeout while it works on a request is not a failure.
    #[serde(default = "health_interval")]
    pub health_interval: Span<SERVICE_PROBE_INTERVAL_MIN_MS>,
    /// How long the service may take to become healthy before it is restarted, and how long a task waits for it before its claim is released.
    #[serde(default = "startup_timeout")]
    pub startup_timeout: Span<SERVICE_STARTUP_TIMEOUT_MIN_MS>,
    /// Variables of the worker's environment that the service sees.
    #[serde(default = "env_allow")]
    pub env_allow: Vec<String>,
    /// Maximum run time of a task, whatever it asks for.
    #[serde(default = "max_run_time")]
    pub max_run_time: RunTime,
    /// That of the worker.
    #[serde(skip, default = "termination_grace")]
    pub termination_grace: Span,
}

fn health_interval() -> Span<SERVICE_PROBE_INTERVAL_MIN_MS> {
    built_in("5s")
}

fn startup_timeout() -> Span<SERVICE_STARTUP_TIMEOUT_MIN_MS> {
    built_in("1m")
}
