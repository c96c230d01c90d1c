//! The control socket of a controller.

use std::path::PathBuf;

use super::exit::{Exit, Failure};
use crate::config::Config;
use crate::control::controller_api::socket_in;

pub(super) fn no_pools() -> Failure {
    let text = "no [pool.NAME] is configured; `journeyman guide controller` shows an example";
    Failure::new(Exit::Config, text)
}

/// `None` if no pool is configured.
pub(super) fn controller_socket(config: &Config) -> Option<PathBuf> {
    let (_, first) = config.pool.first_key_value()?;
    let configured = config.control.socket.as_ref().map(|socket| socket.0.clone());
    Some(configured.unwrap_or_else(|| socket_in(&first.state_dir.0)))
}
