//! The payloads of generic-worker, each property against the embedded queue.

mod chain_of_trust;
mod containers;
mod deployment;
mod files;
mod mounts;
mod proxy;
mod switches;
mod table;
mod taskgraph;
mod users;
