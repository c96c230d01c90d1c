//! The notifier as a process, against receivers that misbehave.

mod amqp;
mod announcements;
mod delivery;
mod memory;
mod mistral;
mod nodes;
mod operate;
mod outbox;
mod page;
mod signatures;
mod support;
mod tools;
