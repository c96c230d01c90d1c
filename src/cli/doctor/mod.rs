//! `journeyman doctor`: checks this host and the services that the configuration names, and says how to fix what fails.
//!
//! Changes nothing except for one empty file in the work directory, which it removes. Prints no secrets.

mod broker;
mod cluster;
pub(super) mod host;
mod taskcluster;
pub(super) mod zookeeper;

use std::fmt::Write as _;

use clap::Args;
use futures_util::future::{BoxFuture, join_all};
use serde::Serialize;
use tokio::time::timeout;

use super::config_args::{ConfigArgs, NoFlags};
use super::exit::{Exit, ExitResult};
use super::file_checks;
use super::output::{self, Format};
use super::screwdriver;
use super::worker::control_socket;
use super::worker_identity::WorkerIdentity;
use super::worker_setup;
use crate::config::LoadedConfig;
use crate::config::schema::{Config, Source};
use crate::handler::config::Handler;
use journeyman_domain::limits::DOCTOR_CHECK_TIMEOUT;
use journeyman_platform::redact;
use journeyman_platform::settings::Environment;
use journeyman_platform::settings::values::File;

#[derive(Debug, Args)]
pub(super) struct DoctorArgs {
    /// Output format
    #[arg(short, long, value_enum, default_value_t = Format::Table)]
    output: Format,
    #[command(flatten)]
    settings: ConfigArgs<NoFlags>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum State {
    Ok,
    Warning,
    Failed,
}

#[derive(Debug, Clone, Serialize)]
pub(super) struct Check {
    name: String,
    state: State,
    result: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    fix: Option<String>,
}

impl Check {
    pub(super) fn ok(name: impl Into<String>, result: impl Into<String>) -> Self {
        Self { name: name.into(), state: State::Ok, result: redacted(result.into()), fix: None }
    }

    pub(super) fn warning(name: impl Into<String>, result: impl Into<String>, fix: impl Into<String>) -> Self {
        let fix = Some(redacted(fix.into()));
        Self { name: name.into(), state: State::Warning, result: redacted(result.into()), fix }
    }

    pub(super) fn failed(name: impl Into<String>, result: impl Into<String>, fix: impl Into<String>) -> Self {
        Self { state: State::Failed, ..Self::warning(name, result, fix) }
    }
}

fn redacted(text: String) -> String {
    redact::text(&text).into_owned()
}

pub(super) async fn run(arguments: DoctorArgs, environment: &Environment) -> ExitResult {
    let checks = match arguments.settings.load(environment) {
        Ok(loaded) => {
            worker_setup::redact_secrets(&loaded.config, environment);
            let mut checks = check_configuration(&loaded, environment);
            checks.extend(run_checks(&loaded, environment).await);
            checks
        }
        Err(failure) => {
            vec![Check::failed("configuration", failure.message, "see `journeyman config check`")]
        }
    };
    report(&checks, arguments.output)
}

/// Prints checks; the exit status says whether one failed.
pub(super) fn report(checks: &[Check], format: Format) -> ExitResult {
    let (warnings, failed) = (count(checks, State::Warning), count(checks, State::Failed));
    match format {
        Format::Table => output::print(&render(checks))?,
        Format::Json => {
            output::json(&serde_json::json!({ "checks": checks, "warnings": warnings, "failed": failed }))?;
        }
    }
    Ok(if failed == 0 { Exit::Success } else { Exit::Failed })
}

fn count(checks: &[Check], state: State) -> usize {
    checks.iter().filter(|check| check.state == state).count()
}

fn render(checks: &[Check]) -> String {
    let width = checks.iter().map(|check| check.name.chars().count()).max().unwrap_or(0);
    let mut out = String::new();
    for check in checks {
        let (color, state) = match check.state {
            State::Ok => ("\x1b[32m", "ok"),
            State::Warning => ("\x1b[33m", "warning"),
            State::Failed => ("\x1b[31m", "failed"),
        };
        let indent = format!("\n{:7}  {:width$}  ", "", "");
        let mut text = check.result.trim_end().replace('\n', &indent);
        if let Some(fix) = check.fix.as_ref().filter(|fix| !fix.is_empty()) {
            // Writing to a String cannot fail.
            _ = write!(text, "{indent}> {}", fix.trim_end().replace('\n', &format!("{indent}  ")));
        }
        _ = writeln!(out, "{color}{state:<7}\x1b[0m  {:width$}  {text}", check.name);
    }
    let (warnings, failed) = (count(checks, State::Warning), count(checks, State::Failed));
    let noun = if warnings == 1 { "warning" } else { "warnings" };
    _ = writeln!(out, "\n{} ok, {warnings} {noun}, {failed} failed", checks.len() - warnings - failed);
    out
}

fn check_configuration(loaded: &LoadedConfig, environment: &Environment) -> Vec<Check> {
    let config = &loaded.config;
    let named = loaded.document.as_ref().map_or("built-in defaults", |document| &document.name);
    let mut checks = vec![if is_controller_config(config) {
        Check::ok("configuration", format!("{named}: pools {}", config.pool.len()))
    } else if config.source.is_empty() {
        let fix = "`journeyman config init journeyman.toml` writes an example";
        Check::failed("configuration", format!("{named}: no [source.NAME] is configured"), fix)
    } else {
        let (sources, capacity) = (config.source.len(), config.worker.capacity);
        Check::ok("configuration", format!("{named}: sources {sources}, capacity {capacity}"))
    }];
    let problems: Vec<_> =
        loaded.warnings.iter().cloned().chain(file_checks::check_files(loaded, environment)).collect();
    for problem in &problems {
        let fix = problem.help.clone().unwrap_or_default();
        checks.push(match problem.is_warning() {
            false => Check::failed("files", &problem.message, fix),
            true => Check::warning("files", &problem.message, fix),
        });
    }
    if problems.is_empty() {
        checks.push(Check::ok("files", "secrets are private, programs and schemas exist"));
    }
    checks
}

/// A controller claims nothing itself, so it needs fewer checks.
fn is_controller_config(config: &Config) -> bool {
    !config.pool.is_empty() && config.source.keys().all(|name| is_only_counted(config, name))
}

/// A controller counts the tasks of the sources of its demands.
fn is_only_counted(config: &Config, source_name: &str) -> bool {
    config.demand.values().any(|demand| demand.source == source_name)
        && config.bridge.values().all(|bridge| bridge.from != source_name && bridge.to != source_name)
}

/// Runs the checks concurrently; the order of the lines is fixed.
async fn run_checks(loaded: &LoadedConfig, environment: &Environment) -> Vec<Check> {
    let config = &loaded.config;
    let worker = WorkerIdentity::from_config(config);
    let mut groups: Vec<(&str, BoxFuture<'_, Vec<Check>>)> = Vec::new();
    for (name, source) in &config.source {
        let claims_as = (!is_only_counted(config, name)).then_some(&worker);
        groups.push((
            name,
            match source {
                Source::Taskcluster(source) => {
                    Box::pin(taskcluster::check_source(name, source, claims_as, environment))
                }
                Source::Zookeeper(source) => Box::pin(zookeeper::check_source(name, source)),
                Source::Amqp(source) => Box::pin(broker::check_source(name, source, config, environment)),
                Source::Screwdriver(source) => Box::pin(screwdriver::check_source(name, source, config, environment)),
            },
        ));
    }
    for (name, kubeconfig, namespace) in clusters(config) {
        let check = async move { vec![cluster::check(name.to_owned(), kubeconfig, namespace).await] };
        groups.push((name, Box::pin(check)));
    }
    if !config.pool.is_empty() {
        groups.push(("pools", Box::pin(broker::check_pools_broker(config, environment))));
    }
    if !is_controller_config(config) {
        groups.push(("cloud", Box::pin(host::check_cloud(&config.host))));
        groups.push(("host", Box::pin(host::check_host(config.clone()))));
        groups.push(("control socket", Box::pin(host::check_control_socket(control_socket(config)))));
    }
    let with_timeout = groups.into_iter().map(async |(name, checks)| {
        let found = || format!("no response within {} s", DOCTOR_CHECK_TIMEOUT.as_secs());
        let fix = "the service neither responds nor refuses; check it by hand";
        let late = |_| vec![Check::failed(name, found(), fix)];
        timeout(DOCTOR_CHECK_TIMEOUT, checks).await.unwrap_or_else(late)
    });
    join_all(with_timeout).await.concat()
}

/// Where pods of tasks and builds run, by the names of their handlers and sources.
fn clusters(config: &Config) -> impl Iterator<Item = (&str, Option<&File>, &str)> {
    let handlers = config.handler.iter().filter_map(|(name, handler)| match handler {
        Handler::Kubernetes(pods) => Some((name.as_str(), pods.kubeconfig.as_ref(), pods.namespace.as_str())),
        Handler::Command(_) | Handler::Program(_) | Handler::Http(_) => None,
    });
    let sources = config.source.iter().filter_map(|(name, source)| match source {
        Source::Screwdriver(builds) => Some((name.as_str(), builds.kubeconfig.as_ref(), builds.namespace.as_str())),
        Source::Taskcluster(_) | Source::Zookeeper(_) | Source::Amqp(_) => None,
    });
    handlers.chain(sources)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_aligned_and_an_empty_fix_is_not_shown() {
        let checks = [
            Check::ok("a", "one line"),
            Check::failed("a longer name", "two\nlines", "mend\nboth"),
            Check::warning("b", "found", ""),
        ];
        let plain = anstream::adapter::strip_str(&render(&checks)).to_string();
        let expected = "\
ok       a              one line
failed   a longer name  two
                        lines
                        > mend
                          both
warning  b              found

1 ok, 1 warning, 1 failed
";
        assert_eq!(plain, expected);
    }
}
