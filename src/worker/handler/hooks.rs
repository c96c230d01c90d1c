//! Hooks: programs of the operator that run before and after each payload, in its directory, scope and log.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use crate::handler::config::Hooks;
use journeyman_domain::outcome::Outcome;

use super::environment::{self, Variables};
use super::layer::{Inner, Layer, layered};
use super::process::{EndCause, Launch, ProcessStatus, RunLimits, RunningProcess, format_seconds};
use super::{Context, DynHandler, ExecuteError, ExecuteFailure, PreparedPayload, Preparing, use_absolute_program};

/// Between SIGTERM and SIGKILL.
const TERMINATION_GRACE: Duration = Duration::from_secs(1);

#[derive(Debug, Clone, Copy)]
enum Hook {
    PreTask,
    PostTask,
    Error,
}

struct HookRunner {
    config: Hooks,
    /// The variables that the handler passes on from the worker.
    env: Variables,
}

/// Runs the payloads of a handler between hooks. `env` has the variables that the handler passes on from the worker.
pub fn with_hooks(handler: Arc<dyn DynHandler>, mut config: Hooks, env: Variables) -> Arc<dyn DynHandler> {
    let mut programs = [&mut config.pre_task, &mut config.post_task, &mut config.error];
    if programs.iter().all(|program| program.is_empty()) {
        return handler;
    }
    programs.iter_mut().for_each(|program| use_absolute_program(program));
    layered(handler, Arc::new(HookRunner { config, env }))
}

impl Layer for Arc<HookRunner> {
    fn prepare<'a>(&'a self, inner: Inner<'a>, context: &'a Context) -> Preparing<'a> {
        Box::pin(async move {
            let prepared = match inner.prepare(context).await {
                Ok(prepared) => prepared,
                Err(error) => {
                    self.after(Hook::Error, error.reason.outcome(), context).await;
                    return Err(error);
                }
            };
            let hooks = Arc::clone(self);
            let execute: PreparedPayload = Box::new(move |context| {
                Box::pin(async move {
                    let result = match hooks.before(context).await {
                        Ok(()) => prepared(context).await,
                        Err(error) => Err(error),
                    };
                    let outcome = result.as_ref().map_or_else(|error| error.reason.outcome(), |()| Outcome::Completed);
                    if !matches!(outcome, Outcome::Completed | Outcome::Deferred) {
                        hooks.after(Hook::Error, outcome, context).await;
                    }
                    hooks.after(Hook::PostTask, outcome, context).await;
                    result
                })
            });
            Ok(execute)
        })
    }
}

impl HookRunner {
    /// A host that is not ready for a task is not the task's fault.
    async fn before(&self, context: &Context) -> Result<(), ExecuteError> {
        let run = self.run(Hook::PreTask, None, self.config.timeout.0, context);
        run.await.map_err(|error| ExecuteError::new(ExecuteFailure::HostFault, error))
    }

    /// The payload has ended, so its outcome stands. A payload that was stopped leaves its hooks the rest of its grace.
    async fn after(&self, hook: Hook, outcome: Outcome, context: &Context) {
        let mut time_max = self.config.timeout.0;
        let mut name = match outcome {
            Outcome::Completed => "completed",
            Outcome::Failed => "failed",
            Outcome::Exception(reason) => reason.as_str(),
            Outcome::Deferred => "deferred",
        };
        let mut context = context.clone();
        if let Some(cancellation) = context.cancellation() {
            time_max = time_max.min(context.time_until(cancellation.deadline));
            name = "stopped";
            context = context.without_cancellation();
        }
        if let Err(error) = self.run(hook, Some(name), time_max, &context).await {
            tracing::warn!(claim.run = %context.task().run, "{error}");
        }
    }

    async fn run(
        &self,
        hook: Hook,
        outcome: Option<&str>,
        time_max: Duration,
        context: &Context,
    ) -> Result<(), String> {
        let (name, argv) = match hook {
            Hook::PreTask => ("pre_task", &self.config.pre_task),
            Hook::PostTask => ("post_task", &self.config.post_task),
            Hook::Error => ("error", &self.config.error),
        };
        let Some(program) = argv.first() else { return Ok(()) };
        let (log, started) = (context.log(), Instant::now());
        log.write_note(&format!("executing hook {name}: {program}"));
        let mut env = environment::for_task(&self.env, context);
        env.insert("JOURNEYMAN_HOOK".to_owned(), name.to_owned());
        env.extend(outcome.map(|outcome| ("JOURNEYMAN_OUTCOME".to_owned(), outcome.to_owned())));
        let limits = RunLimits { run_time: Some(time_max), termination_grace: TERMINATION_GRACE };
        let run =
            async { RunningProcess::start(Launch::new(argv, &env, context)).await?.finish(limits, context).await };
        let result = match run.await {
            Ok(end) => match (end.cause, end.status) {
                (EndCause::Exited, ProcessStatus::Code(0)) => Ok(end.describe()),
                (EndCause::RunTime, _) => Err(format!("stopped after {}", format_seconds(time_max))),
                (EndCause::Exited | EndCause::Canceled(_) | EndCause::Exceeded(_), _) => Err(end.describe()),
            },
            Err(error) => Err(format!("cannot run {program}: {error}")),
        };
        let text = result.as_ref().map_or_else(String::as_str, String::as_str);
        log.write_note(&format!("hook {name}: {text}, after {}", format_seconds(started.elapsed())));
        result.map(drop).map_err(|text| format!("hook {name}: {text}"))
    }
}
