//! One container from its start until it is removed.

use std::io;
use std::path::Path;

use tokio::time::{Instant, sleep, timeout};

use journeyman_domain::limits::{CONTAINER_COPY_TIMEOUT, OUTSIDE_REMOVE_ATTEMPTS_MAX, OUTSIDE_REMOVE_INTERVAL};
use journeyman_platform::host::run_program;
use journeyman_platform::unpack::{self, ArchiveFormat};

use super::client::succeeded;
use super::{Containers, CopiedArtifact, PreparedContainer};
use crate::handler::process::{EndCause, Launch, ProcessEnd, RunLimits, RunningProcess, format_seconds};
use crate::handler::{Context, ExecuteError};

/// As docker-worker: browsers need more than the 64 MiB of the clients.
const SHARED_MEMORY_BYTES: &str = "1800000000";

/// What the daemon says of a container whose client has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Exited,
    NeverStarted,
    /// It runs on, or the daemon does not answer.
    Unknown,
}

impl Containers {
    pub(super) async fn execute_container(
        &self,
        mut prepared: PreparedContainer,
        context: &Context,
    ) -> Result<(), ExecuteError> {
        let log = context.log();
        log.write_note(&format!("task {}", context.task().run));
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
        for artifact in std::mem::take(&mut prepared.artifacts) {
            if let Err(error) = context.artifacts().declare(artifact) {
                log.write_note(&error.to_string());
            }
        }
        let result = if outcome.is_ok() { "completed" } else { "not completed" };
        log.write_note(&format!("result: {result} after {}", format_seconds(prepared.started.elapsed())));
        outcome
    }

    async fn run(&self, name: &str, prepared: &PreparedContainer, context: &Context) -> Result<(), ExecuteError> {
        let time_limit = format!("maxRunTime, {} s", prepared.run_time.as_secs());
        let remaining = prepared.run_time.saturating_sub(prepared.started.elapsed());
        if let Some(cancellation) = context.cancellation() {
            return Err(ExecuteError::failed(format!("container: {}", cancellation.cause.message())));
        }
        let image = match &prepared.image {
            Some(image) if !remaining.is_zero() => image,
            Some(_) | None => return Err(ExecuteError::failed(format!("container: stopped after {time_limit}"))),
        };
        let file = context.workdir().join("env.list");
        let variables = prepared.environment.write(file).await;
        let variables = variables.map_err(|error| ExecuteError::from_io("the variables of the container", &error))?;
        let argv = self.client.argv(&self.run_arguments(name, image, variables, prepared));
        let mut env = self.client.env.clone();
        env.extend(prepared.environment.copied.clone());
        let quoted = shlex::try_join(prepared.command.iter().map(String::as_str)).unwrap_or_default();
        context.log().write_note(&format!("executing in a container of {image}: {quoted}"));
        context.scope().set_outside(self.client.removal(name));
        let started = Instant::now();
        let limits = RunLimits { run_time: Some(remaining), termination_grace: self.termination_grace };
        let end = self.run_client(&argv, &env, name, limits, context).await;
        let end = end.map_err(|error| ExecuteError::from_io("the client of the container", &error))?;
        end.notes.iter().for_each(|note| context.log().write_note(note));
        let state = self.state(name, context).await;
        if state == State::Unknown || end.cause != EndCause::Exited {
            self.kill(name, context).await;
        }
        context.log().write_note(&format!("container: {}, after {}", end.status, format_seconds(started.elapsed())));
        end.outcome("container", &time_limit, |code, message| match (state, code) {
            (State::NeverStarted, _) => {
                Err(ExecuteError::failed(format!("{message}: it could not be started; the lines above say why")))
            }
            (State::Unknown, _) => Err(ExecuteError::internal(format!("{message}: its client ended before it"))),
            (State::Exited, code) => prepared.on_exit_status.result(code, message, context),
        })
    }

    fn run_arguments(
        &self,
        name: &str,
        image: &str,
        variables: Vec<String>,
        prepared: &PreparedContainer,
    ) -> Vec<String> {
        let shared = if prepared.options.iter().any(|option| option.starts_with("/dev/shm")) {
            None
        } else {
            Some(SHARED_MEMORY_BYTES)
        };
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
        arguments.push(image.to_owned());
        arguments.extend_from_slice(&prepared.command);
        arguments
    }

    async fn run_client(
        &self,
        argv: &[String],
        env: &crate::handler::environment::Variables,
        name: &str,
        limits: RunLimits,
        context: &Context,
    ) -> io::Result<ProcessEnd> {
        let running = RunningProcess::start(Launch { user: None, ..Launch::new(argv, env, context) }).await?;
        let mut finish = std::pin::pin!(running.finish(limits, context));
        // The client passes SIGTERM on. It has to see the container's end before it is killed itself, so its container has half
        // of the grace.
        let killing = async {
            let grace = tokio::select! {
                cancellation = context.canceled() => context.time_until(cancellation.deadline).min(limits.termination_grace),
                () = sleep(limits.run_time.unwrap_or_default()) => limits.termination_grace,
            };
            sleep(grace / 2).await;
            self.kill(name, context).await;
        };
        tokio::select! {
            biased;
            end = &mut finish => end,
            () = killing => finish.await,
        }
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
                    Some(_) | None => State::Unknown,
                }
            }
            // The client refused what it was asked for.
            Err(error) if error.to_ascii_lowercase().contains("no such object") => State::NeverStarted,
            Err(error) => {
                context.log().write_note(&format!("container: its state is unknown: {error}"));
                State::Unknown
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
        let mut limits = self.mounter.unpack_limits(&dir);
        limits.bytes_max = limits.bytes_max.min(context.scope().disk_limit().unwrap_or(u64::MAX));
        let source = format!("{name}:{from}");
        let command = self.client.command(&["cp", &source, "-"], Some(context.scope()));
        let unpacking = move |archive| unpack::unpack(archive, ArchiveFormat::Tar, Path::new(&dir), &limits, &|| false);
        let copying = run_program::run_piped(command, unpacking);
        let copied = tokio::select! {
            copied = timeout(CONTAINER_COPY_TIMEOUT, copying) => copied,
            _ = context.canceled() => return,
        };
        let copied = copied.map_err(io::Error::other).flatten().map_err(|error| error.to_string());
        let why = match copied {
            Err(why) => why,
            // The reason for a broken archive is what the client says.
            Ok((output, unpacked)) => match (succeeded(Ok(output)), unpacked) {
                (_, Err(error @ unpack::UnpackError::Entry { .. })) => error.to_string(),
                (Err(why), _) => why,
                (Ok(_), Err(error)) => error.to_string(),
                (Ok(_), Ok(())) => return,
            },
        };
        context.log().write_note(&format!("artifact {artifact}: {from} cannot be copied: {why}"));
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
