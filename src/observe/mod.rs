//! Traces of a running process.

pub mod traces;
