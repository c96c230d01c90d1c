//! What the outside sees of a running journeyman.

pub mod http;
pub mod log;
pub mod metrics;
pub mod page;
pub mod traces;
