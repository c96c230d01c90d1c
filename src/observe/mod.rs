//! What the outside sees of a running journeyman.

pub mod controller_http;
pub mod log;
pub mod metrics;
mod openmetrics;
pub mod page;
mod server;
pub mod traces;
pub mod worker_http;
