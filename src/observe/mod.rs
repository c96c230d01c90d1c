//! Logs, metrics, traces and HTTP pages of a running process.

pub mod controller_http;
pub mod log;
pub mod metrics;
pub(crate) mod openmetrics;
pub mod page;
pub mod status_routes;
pub mod traces;
pub mod untrusted_text;
pub mod worker_http;
