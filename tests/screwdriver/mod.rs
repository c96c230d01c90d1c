//! Builds of a Screwdriver, against a real RabbitMQ and beside Screwdriver's own executor.

mod checks;
mod executor;
mod interop;
mod messages;
mod starts;
mod support;
mod topology;
