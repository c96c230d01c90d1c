//! Screwdriver's build messages: what they say, the pods of builds, and what Screwdriver is told of them.
#![allow(dead_code, reason = "the source comes with a later commit")]

mod build_api;
mod cache;
mod message;
mod pod;
mod rules;
pub(crate) mod topology;
