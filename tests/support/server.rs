//! Servers of one test or measurement, which the scripts beside this file start: a RabbitMQ, a PostgreSQL, a ZooKeeper.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// A server in a directory, killed on drop.
pub(crate) struct Server {
    script: &'static str,
    folder: PathBuf,
    said: String,
}

impl Server {
    /// It is not started yet.
    pub(crate) fn new(script: &'static str, folder: &Path) -> Self {
        Self { script, folder: folder.to_owned(), said: String::new() }
    }

    /// # Errors
    ///
    /// Why it does not start.
    pub(crate) fn start(&mut self) -> Result<(), String> {
        self.said = self.run("start", &[])?;
        Ok(())
    }

    /// Runs its script, which is told what to do.
    pub(crate) fn run(&self, what: &str, arguments: &[&str]) -> Result<String, String> {
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/support").join(self.script);
        let mut command = Command::new(script);
        command.arg(what).arg(&self.folder).args(arguments).stdin(Stdio::null());
        let output = command.output().map_err(|error| error.to_string())?;
        let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).into_owned();
        if output.status.success() { Ok(text(output.stdout)) } else { Err(text(output.stderr)) }
    }

    /// What it has said of itself at its start.
    pub(crate) fn value(&self, name: &str) -> Option<String> {
        self.said.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix('=')).map(str::to_owned)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.run("kill", &[]).ok();
    }
}
