//! The command line as a user meets it: the built binary, its texts, its exit codes.

mod config;
mod console;
mod controller;
mod dev;
mod doctor;
mod exec_shim;
mod help;
mod host;
mod new;
mod one_task;
mod own_handlers;
mod readme;
mod runner;
mod running;
mod secrets;
pub(crate) mod server;
mod services;
mod steering;
pub(crate) mod support;
mod systemd;
mod tasks;
pub(crate) mod traces;
mod unwell;
mod why;
mod worker_pool;
