//! The variables of a container. Their values are on no argument list, which every user of the host can read.

use std::io::{self, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::PathBuf;

use journeyman_platform::host::containment::COOKIE_VARIABLE;

use crate::handler::environment::{Variables, variable_error};

/// A line of the clients' files of variables may have 64 KiB.
const VALUE_BYTES_MAX: usize = 32 * 1024;

/// The file of variables, which the client reads.
#[derive(Debug, Default)]
pub(super) struct ContainerEnvironment(String);

impl ContainerEnvironment {
    pub(super) fn of(variables: Variables, violations: &mut Vec<String>) -> Self {
        let mut environment = Self::default();
        for (name, value) in variables.iter().filter(|(name, _)| *name != COOKIE_VARIABLE) {
            if let Some(why) = variable_error(name, value) {
                violations.push(format!("payload/env/{name}: {why}"));
            } else if name.starts_with('#') || name.contains(|char: char| char.is_whitespace() || char.is_control()) {
                violations.push(format!("payload/env/{name}: a name has no spaces and does not begin with '#'"));
            } else if value.contains(['\n', '\r']) || value.len() > VALUE_BYTES_MAX {
                let why = "a container gets no values with line breaks or of more than 32 KiB";
                violations.push(format!("payload/env/{name}: {why}"));
            } else {
                environment.set(name, value);
            }
        }
        environment
    }

    pub(super) fn set(&mut self, name: &str, value: &str) {
        self.0.push_str(&format!("{name}={value}\n"));
    }

    /// Writes the file, and returns the options of the client's `run`.
    pub(super) async fn write(&self, file: PathBuf) -> io::Result<Vec<String>> {
        let option = format!("--env-file={}", file.display());
        let text = self.0.clone();
        let written = tokio::task::spawn_blocking(move || {
            let mut opened = std::fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(file)?;
            opened.write_all(text.as_bytes())
        });
        written.await.map_err(io::Error::other).flatten()?;
        Ok(vec![option, format!("--env={COOKIE_VARIABLE}")])
    }
}
