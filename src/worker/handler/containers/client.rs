//! The client of docker or podman. Only flags that both have are used.

use std::io;
use std::path::Path;

use tokio::process::Command;
use tokio::time::timeout;

use journeyman_domain::limits::{
    CONTAINER_CALL_TIMEOUT, OUTSIDE_REMOVE_ATTEMPTS_MAX, OUTSIDE_REMOVE_INTERVAL, OUTSIDE_REMOVE_TIMEOUT,
};
use journeyman_platform::host::containment::{COOKIE_VARIABLE, ProcessScope, Removal};
use journeyman_platform::host::program_path::find_program;
use journeyman_platform::host::run_program::{self, ProgramOutput};
use journeyman_platform::settings::Environment;

use super::config::ContainersConfig;
use crate::handler::environment::Variables;

/// Beginnings of the variables that the client has of the worker.
const CLIENT_VARIABLES: &str = "PATH HOME USER TMPDIR DOCKER CONTAINER _CONTAINER PODMAN BUILDAH STORAGE_ REGISTR XDG_ DBUS_ SSL_ \
    HTTP_PROXY HTTPS_PROXY NO_PROXY ALL_PROXY GODEBUG LD_ RES_ HOSTALIASES";

/// Says which worker a container is of.
const LABEL: &str = "journeyman.work-dir";

#[derive(Debug)]
pub(super) struct Client {
    argv: Vec<String>,
    pub(super) env: Variables,
    pub(super) label: String,
}

impl Client {
    /// # Errors
    ///
    /// The program is not there.
    pub(super) fn new(config: &ContainersConfig, environment: &Environment, work_dir: &Path) -> io::Result<Self> {
        // Podman would pass the worker's own proxies on to each container.
        let is_passed = |name: &String| steers_client(name) && !name.to_ascii_uppercase().ends_with("_PROXY");
        let env: Variables = environment.pairs().filter(|(name, _)| is_passed(name)).collect();
        let program = std::path::absolute(find_program(&config.program, &env, Path::new(""))?)?;
        let mut argv = vec![program.to_string_lossy().into_owned()];
        argv.extend_from_slice(&config.options);
        let work_dir = std::path::absolute(work_dir)?;
        Ok(Self { argv, env, label: format!("{LABEL}={}", work_dir.display()) })
    }

    pub(super) fn argv<A: AsRef<str>>(&self, arguments: &[A]) -> Vec<String> {
        self.argv.iter().map(String::as_str).chain(arguments.iter().map(A::as_ref)).map(str::to_owned).collect()
    }

    /// A call for a claim, by whose cookie the next start finds its process.
    pub(super) fn command(&self, arguments: &[&str], scope: Option<&ProcessScope>) -> Command {
        let argv = self.argv(arguments);
        let mut command = Command::new(&argv[0]);
        command.args(&argv[1..]).env_clear().envs(&self.env);
        command.envs(scope.and_then(ProcessScope::cookie).map(|cookie| (COOKIE_VARIABLE, cookie)));
        command
    }

    /// Asks the daemon something, and returns what it prints on success.
    ///
    /// # Errors
    ///
    /// What the client says, or that it does not end.
    pub(super) async fn ask(&self, arguments: &[&str], scope: Option<&ProcessScope>) -> Result<String, String> {
        let asked = timeout(CONTAINER_CALL_TIMEOUT, run_program::run(self.command(arguments, scope), &[]));
        let output = asked.await.map_err(|_| format!("no answer within {} s", CONTAINER_CALL_TIMEOUT.as_secs()))?;
        succeeded(output)
    }

    /// `--stop-timeout 0` of the container makes it immediate.
    pub(super) fn removal(&self, name: &str) -> Removal {
        Removal::new(self.argv(&["rm", "-f", "-v", name]), self.env.clone())
    }

    /// Removes the containers of this worker, and says how many there were.
    ///
    /// # Errors
    ///
    /// Some may still be there.
    pub(super) async fn remove_all(&self) -> Result<usize, String> {
        let filter = format!("label={}", self.label);
        let mut found = None;
        let mut last_error = String::new();
        for _ in 0..OUTSIDE_REMOVE_ATTEMPTS_MAX {
            let listed = self.ask(&["ps", "-aq", "--no-trunc", "--filter", &filter], None).await?;
            let ids: Vec<&str> = listed.split_whitespace().collect();
            let count = *found.get_or_insert(ids.len());
            if ids.is_empty() {
                return Ok(count);
            }
            let arguments: Vec<&str> = ["rm", "-f", "-v"].into_iter().chain(ids).collect();
            let removed = timeout(OUTSIDE_REMOVE_TIMEOUT, run_program::run(self.command(&arguments, None), &[]));
            match removed.await {
                Ok(output) => last_error = succeeded(output).err().unwrap_or_default(),
                Err(_) => "no answer".clone_into(&mut last_error),
            }
            tokio::time::sleep(OUTSIDE_REMOVE_INTERVAL).await;
        }
        Err(format!("containers with the label {} stay: {last_error}", self.label))
    }
}

pub(super) fn succeeded(output: io::Result<ProgramOutput>) -> Result<String, String> {
    let output = output.map_err(|error| error.to_string())?;
    if output.status.success() { Ok(output.stdout.trim().to_owned()) } else { Err(output.last_error()) }
}

fn steers_client(name: &str) -> bool {
    let name = name.to_ascii_uppercase();
    CLIENT_VARIABLES.split_whitespace().any(|start| name.starts_with(start))
}
