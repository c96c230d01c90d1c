//! What runs for a claim outside of its processes, such as a container: it is removed by a program.

use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;

use tokio::process::Command;
use tokio::runtime::Handle;
use tokio::task::spawn_blocking;
use tokio::time::timeout;

use super::super::super::run_program;
use super::ProcessScope;
use journeyman_domain::limits::{OUTSIDE_REMOVE_BACKOFF_MAX, OUTSIDE_REMOVE_INTERVAL, OUTSIDE_REMOVE_TIMEOUT};

/// A program whose success proves that what it removes is gone, and that may run several times.
#[derive(Debug)]
pub struct Removal {
    argv: Vec<String>,
    env: BTreeMap<String, String>,
    one_at_a_time: tokio::sync::Mutex<()>,
}

impl Removal {
    pub fn new(argv: Vec<String>, env: BTreeMap<String, String>) -> Self {
        Self { argv, env, one_at_a_time: tokio::sync::Mutex::default() }
    }

    /// Runs the program once.
    ///
    /// # Errors
    ///
    /// It failed, or took longer than [`OUTSIDE_REMOVE_TIMEOUT`].
    pub async fn run(&self) -> io::Result<()> {
        let _one_at_a_time = self.one_at_a_time.lock().await;
        let (program, arguments) = self.argv.split_first().ok_or(io::ErrorKind::InvalidInput)?;
        let mut command = Command::new(program);
        command.args(arguments).env_clear().envs(&self.env);
        let output = timeout(OUTSIDE_REMOVE_TIMEOUT, run_program::run(command, &[]))
            .await
            .map_err(|_| io::Error::other(format!("no end within {} s", OUTSIDE_REMOVE_TIMEOUT.as_secs())))
            .flatten()
            .map_err(|error| io::Error::other(format!("{self}: {error}")))?;
        if output.status.success() { Ok(()) } else { Err(io::Error::other(format!("{self}: {}", output.last_error()))) }
    }

    /// Runs the program in the background, unless it runs already.
    pub(super) fn start(self: Arc<Self>) {
        if self.one_at_a_time.try_lock().is_ok() {
            let runtime = Handle::current();
            // `wait_cleaned_up` waits for a removal that succeeds.
            drop(spawn_blocking(move || runtime.block_on(self.run())));
        }
    }
}

impl std::fmt::Display for Removal {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.write_str(&self.argv.join(" "))
    }
}

impl ProcessScope {
    /// Has the scope removed by a program as well: it is empty once the program has succeeded after all processes are gone.
    pub fn set_outside(&self, removal: Removal) {
        *self.inner.outside.lock() = Some(Arc::new(removal));
    }

    pub(super) fn outside(&self) -> Option<Arc<Removal>> {
        self.inner.outside.lock().clone()
    }

    /// Removes what runs outside. What creates it must have ended.
    ///
    /// # Errors
    ///
    /// It may not be gone.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe.
    pub async fn remove_outside(&self) -> io::Result<()> {
        if let Some(removal) = self.outside() {
            removal.run().await?;
            *self.inner.outside.lock() = None;
        }
        Ok(())
    }

    /// Resolves when nothing runs outside.
    pub(super) async fn wait_outside_removed(&self) {
        let mut failures = 0;
        while let Err(error) = self.remove_outside().await {
            if failures == 0 {
                tracing::warn!("cannot remove what a task has left outside of its processes, retrying: {error}");
            }
            failures = (failures + 1).min(OUTSIDE_REMOVE_BACKOFF_MAX);
            tokio::time::sleep(OUTSIDE_REMOVE_INTERVAL * failures).await;
        }
    }
}
