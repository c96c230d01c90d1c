//! Screwdriver's build messages: what they say, the pods of builds, and what Screwdriver is told of them.

mod build_api;
mod builds;
mod cache;
mod checks;
pub(crate) mod config;
mod message;
mod pod;
mod rules;
pub(crate) mod topology;

pub(crate) use builds::ScrewdriverHandler;
pub(crate) use checks::BuildChecks;
