//! The payloads of generic-worker, each property against the embedded queue.

mod deployment;
mod files;
mod mounts;
mod proxy;
mod taskgraph;
mod users;
