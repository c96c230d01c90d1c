//! The roles beside the worker. None knows commands, pages or the configuration as a whole.

pub mod bridge;
pub mod client;
pub mod controller;
pub mod notifier;
pub mod queue;
pub mod screwdriver;
