//! What the outside sees of a running journeyman.

pub mod controller;
mod door;
mod family;
pub mod http;
pub mod log;
pub mod metrics;
pub mod page;
pub mod traces;
