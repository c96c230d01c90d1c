//! Work in pods, against a Kubernetes API server in the test's process.

mod pods;
mod worker;
