//! One container from its start until it is removed.

use std::io;

use tokio::time::{Instant, sleep, timeout};

use journeyman_domain::limits::{
    CONTAINER_COPY_TIMEOUT, DISK_USAGE_INTERVAL, OUTSIDE_REMOVE_ATTEMPTS_MAX, OUTSIDE_REMOVE_INTERVAL,
};
use journeyman_platform::host::containment::wait_larger_than;
use journeyman_platform::host::run_program;

use super::client::succeeded;
use super::options::HOST_SHARED_MEMORY;
use super::{Containers, CopiedArtifact, PreparedContainer};
use crate::handler::mounts::in_mib;
use crate::handler::process::{EndCause, Launch, RunLimits, RunningProcess, format_seconds};
use crate::handler::{Context, ExecuteError};

/// As docker-worker: browsers need more than the 64 MiB of the clients.
const SHARED_MEMORY_BYTES: &str = "1800000000";

/// What the daemon says of a container whose client has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Exited,
    NeverStarted,
    Running,
}

impl Containers {
    pub(super) async fn execute_container(
        &self,
        prepared: PreparedContainer,
        context: &Context,
    ) -> Result<(), ExecuteError> {
        context.log().write_note(&format!("task {}", context.task().run));
        let id = context.scope().cookie().map_or_else(|| uuid::Uuid::new_v4().simple().to_string(), str::to_owned);
        let name = format!("journeyman-{id}");
        let mut outcome = self.run(&name, &prepared, context).await;
        if context.cancellation().is_none() {
            for copy in &prepared.copies {
                self.copy_out(&name, copy, context).await;
            }
        }
        if let Err(why) = remove(context).await {
            // I26: the scope is not empty, so the slot stays closed.
            outcome = Err(ExecuteError::internal(format!("the container may still run: {why}")));
        }
        prepared.begun.end(&outcome, context);
        outcome
    }

    async fn run(&self, name: &str, prepared: &PreparedContainer, context: &Context) -> Result<(), ExecuteError> {
        let PreparedContainer { begun, image, .. } = prepared;
        let remaining = begun.remaining("container", context)?;
        let file = context.workdir().join("env.list");
        let variables = prepared.environment.write(file).await;
        let variables = variables.map_err(|error| ExecuteError::from_io("the variables of the container", &error))?;
        let argv = self.client.argv(&self.run_arguments(name, variables, prepared));
        let quoted = shlex::try_join(prepared.command.iter().map(String::as_str)).unwrap_or_default();
        context.log().write_note(&format!("executing in a container of {image}: {quoted}"));
        context.scope().set_outside(self.client.removal(name));
        let started = Instant::now();
        let limits = RunLimits { run_time: Some(remaining), termination_grace: self.settings.termination_grace };
        // The client passes SIGTERM on.
        let run = async {
            let launch = Launch { user: None, ..Launch::new(&argv, &self.client.env, context) };
            RunningProcess::start(launch).await?.finish(limits, context).await
        };
        let end = run.await.map_err(|error| ExecuteError::from_io("the client of the container", &error))?;
        end.notes.iter().for_each(|note| context.log().write_note(note));
        let state = self.state(name, context).await;
        if state == State::Running || end.cause != EndCause::Exited {
            self.kill(name, context).await;
        }
        context.log().write_note(&format!("container: {}, after {}", end.status, format_seconds(started.elapsed())));
        end.outcome("container", &begun.time_limit(), |code, message| match (state, code) {
            (State::NeverStarted, _) => {
                Err(ExecuteError::failed(format!("{message}: it could not be started; the lines above say why")))
            }
            (State::Running, _) => Err(ExecuteError::internal(format!("{message}: its client ended before it"))),
            (State::Exited, code) => begun.on_exit_status.result(code, message, context),
        })
    }

    fn run_arguments(&self, name: &str, variables: Vec<String>, prepared: &PreparedContainer) -> Vec<String> {
        let has_own = !prepared.options.iter().any(|option| option == HOST_SHARED_MEMORY);
        let shared = has_own.then_some(SHARED_MEMORY_BYTES);
        let limits = &self.config.limits;
        let memory = limits.memory.map(|bytes| bytes.to_string());
        let processes = limits.processes.map_or_else(|| "-1".to_owned(), |max| max.to_string());
        let pairs = [
            ("--name", Some(name)),
            ("--label", Some(&*self.client.label)),
            ("--pull", Some("never")),
            ("--log-driver", Some("none")),
            // A removal kills at once.
            ("--stop-timeout", Some("0")),
            ("--network", Some(&*self.config.network)),
            ("--add-host", Some("localhost.localdomain:127.0.0.1")),
            ("--shm-size", shared),
            ("--memory", memory.as_deref()),
            ("--memory-swap", memory.as_deref()),
            ("--pids-limit", Some(&*processes)),
        ];
        let pairs = pairs.into_iter().filter_map(|(option, value)| Some([option, value?])).flatten();
        let mut arguments: Vec<String> = ["run"].into_iter().chain(pairs).map(str::to_owned).collect();
        arguments.extend(variables);
        arguments.extend_from_slice(&prepared.options);
        arguments.push(prepared.image.clone());
        arguments.extend_from_slice(&prepared.command);
        arguments
    }

    /// One that has ended cannot be killed, and its removal is what counts.
    async fn kill(&self, name: &str, context: &Context) {
        if let Err(error) = self.client.ask(&["kill", name], Some(context.scope())).await {
            tracing::debug!(claim.run = %context.task().run, "cannot kill a container: {error}");
        }
    }

    async fn state(&self, name: &str, context: &Context) -> State {
        let format = "{{.State.Status}} {{.State.OOMKilled}}";
        match self.client.ask(&["inspect", "-f", format, name], Some(context.scope())).await {
            Ok(said) => {
                if said.ends_with("true") {
                    context.log().write_note("container: the kernel killed a process of it for want of memory");
                }
                match said.split(' ').next() {
                    Some("exited" | "stopped") => State::Exited,
                    Some("created" | "configured" | "initialized") => State::NeverStarted,
                    Some(_) | None => State::Running,
                }
            }
            // The client refused what it was asked for.
            Err(error) if error.to_ascii_lowercase().contains("no such object") => State::NeverStarted,
            // Its client says how it has ended.
            Err(error) => {
                context.log().write_note(&format!("container: its state is unknown: {error}"));
                State::Exited
            }
        }
    }

    /// A missing artifact fails no task; its upload says that it is missing.
    async fn copy_out(&self, name: &str, copy: &CopiedArtifact, context: &Context) {
        let CopiedArtifact { artifact, from, to } = copy;
        let dir = context.workdir().join(to);
        if let Err(error) = tokio::fs::create_dir(&dir).await {
            return context.log().write_note(&format!("artifact {artifact}: {error}"));
        }
        let (source, dir) = (format!("{name}:{from}"), dir.to_string_lossy());
        let copying = run_program::run(self.client.command(&["cp", &source, &dir], Some(context.scope())), &[]);
        let bytes_max =
            self.settings.mounter.room(context.workdir()).min(context.scope().disk_limit().unwrap_or(u64::MAX));
        let copied = tokio::select! {
            copied = timeout(CONTAINER_COPY_TIMEOUT, copying) => copied.map_err(io::Error::other).flatten(),
            () = wait_larger_than(context.workdir().to_owned(), bytes_max, DISK_USAGE_INTERVAL) => {
                Err(io::Error::other(format!("there is room for {}", in_mib(bytes_max))))
            }
            _ = context.canceled() => return,
        };
        if let Err(why) = succeeded(copied) {
            context.log().write_note(&format!("artifact {artifact}: {from} cannot be copied: {why}"));
        }
    }
}

async fn remove(context: &Context) -> io::Result<()> {
    let mut attempts = 1;
    while let Err(error) = context.scope().remove_outside().await {
        if attempts >= OUTSIDE_REMOVE_ATTEMPTS_MAX {
            return Err(error);
        }
        attempts += 1;
        sleep(OUTSIDE_REMOVE_INTERVAL).await;
    }
    Ok(())
}
