//! What the roles of journeyman stand on: this machine, servers and clients, stores, the removal of secrets.

pub mod amqp;
pub mod crypto_provider;
pub mod host;
pub mod http;
pub mod redact;
pub mod sqlite;
