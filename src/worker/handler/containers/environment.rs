//! The variables of a container. Their values are on no argument list, which every user of the host can read.

use std::io::{self, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::PathBuf;

use journeyman_platform::host::containment::COOKIE_VARIABLE;

use super::client::steers_client;
use crate::handler::environment::{Variables, variable_error};

/// A line of the clients' files of variables may have 64 KiB.
const FILE_VALUE_BYTES_MAX: usize = 32 * 1024;
/// What the kernel passes on, with a name.
const VALUE_BYTES_MAX: usize = 120 * 1024;

#[derive(Debug, Default)]
pub(super) struct ContainerEnvironment {
    file: String,
    /// Copied from the environment of the client: files have no line breaks.
    pub(super) copied: Variables,
}

impl ContainerEnvironment {
    pub(super) fn of(variables: Variables, violations: &mut Vec<String>) -> Self {
        let mut environment = Self::default();
        for (name, value) in variables.iter().filter(|(name, _)| *name != COOKIE_VARIABLE) {
            let is_line = !value.contains(['\n', '\r']) && value.len() <= FILE_VALUE_BYTES_MAX;
            if let Some(why) = variable_error(name, value) {
                violations.push(format!("payload/env/{name}: {why}"));
            } else if name.starts_with('#') || name.contains(|char: char| char.is_whitespace() || char.is_control()) {
                violations.push(format!("payload/env/{name}: a name has no spaces and does not begin with '#'"));
            } else if !is_line && (steers_client(name) || value.len() > VALUE_BYTES_MAX) {
                violations
                    .push(format!("payload/env/{name}: a value of this length, or with line breaks, cannot be passed"));
            } else if is_line {
                environment.set(name, value);
            } else {
                environment.copied.insert(name.clone(), value.clone());
            }
        }
        environment
    }

    pub(super) fn set(&mut self, name: &str, value: &str) {
        self.file.push_str(&format!("{name}={value}\n"));
    }

    /// Writes the file, and returns the options of the client's `run`.
    pub(super) async fn write(&self, file: PathBuf) -> io::Result<Vec<String>> {
        let mut options = vec!["--env-file".to_owned(), file.to_string_lossy().into_owned()];
        let text = self.file.clone();
        let written = tokio::task::spawn_blocking(move || {
            let mut opened = std::fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(file)?;
            opened.write_all(text.as_bytes())
        });
        written.await.map_err(io::Error::other).flatten()?;
        for name in self.copied.keys().map(String::as_str).chain([COOKIE_VARIABLE]) {
            options.extend(["-e".to_owned(), name.to_owned()]);
        }
        Ok(options)
    }
}
