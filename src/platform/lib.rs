//! What the roles of journeyman stand on: this machine, what the configuration is made of, clients of protocols, servers, stores, the removal of secrets.

pub mod amqp;
pub mod committed_schema;
pub mod crypto_provider;
pub mod histogram;
pub mod host;
pub mod http;
pub mod kubernetes;
pub mod log;
pub mod otlp;
mod otlp_logs;
pub mod redact;
pub mod retry;
pub mod settings;
pub mod sqlite;
pub mod tasks;
pub mod unpack;
pub mod zookeeper;
