//! The worker on request queues of a real RabbitMQ.

mod bridge;
mod claims;
mod client;
mod configuration;
mod connection_cuts;
mod consumer_timeout;
mod controller;
mod deferred;
mod delays;
mod faults;
mod groups;
mod invalid_replies;
mod own_handlers;
mod replies;
mod reports;
mod services;
mod support;
mod worker_kills;
