//! Logs and traces of a running process, and text that is not trusted.

pub mod log;
pub mod traces;
pub mod untrusted_text;
