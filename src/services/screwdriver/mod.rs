//! Screwdriver's build messages: what they say, the pods of builds, and what Screwdriver is told of them.

mod build_api;
mod builds;
mod cache;
mod checks;
pub mod config;
mod message;
mod pod;
mod rules;
pub mod topology;

pub use builds::ScrewdriverHandler;
pub use checks::BuildChecks;
