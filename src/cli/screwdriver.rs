//! `journeyman screwdriver`: looks at what a Screwdriver source needs, and declares it.

use clap::{Args, Subcommand};

use super::amqp_setup::{build_broker, build_management};
use super::checks::{Check, report};
use super::exit::{Exit, ExitResult, Failure};
use super::source_args::SourceArgs;
use crate::config::schema::{Config, Source};
use journeyman_domain::limits::AMQP_CLOSE_TIMEOUT;
use journeyman_domain::refusal::{CallError, Refusal};
use journeyman_platform::amqp;
use journeyman_platform::settings::Environment;
use journeyman_platform::settings::broker::Amqp;
use journeyman_services::screwdriver::config::ScrewdriverSource;
use journeyman_services::screwdriver::topology::{self, Facts, Finding, Severity};

/// `journeyman screwdriver`
#[derive(Debug, Subcommand)]
pub(super) enum ScrewdriverCommand {
    /// Check the exchange and the queues of a source, and say what is missing and what loses messages
    Topology(TopologyArgs),
}

#[derive(Debug, Args)]
pub(super) struct TopologyArgs {
    /// Declare what is missing; nothing that exists is changed
    #[arg(long)]
    apply: bool,
    #[command(flatten)]
    source: SourceArgs,
}

/// Runs the command.
///
/// # Errors
///
/// [`Exit::Unreachable`] or [`Exit::Denied`] about the broker.
pub(super) async fn run(command: ScrewdriverCommand, environment: &Environment) -> ExitResult {
    let ScrewdriverCommand::Topology(TopologyArgs { apply, source: arguments }) = command;
    let config = arguments.settings.load(environment)?.config;
    let (_, source) = arguments.find(&config, "screwdriver", |source| match source {
        Source::Screwdriver(source) => Some(&**source),
        Source::Zookeeper(_) | Source::Taskcluster(_) | Source::Amqp(_) => None,
    })?;
    let found = look(source, &config.amqp, environment, apply).await?;
    report(&found.into_iter().map(to_check).collect::<Vec<_>>(), arguments.output)
}

/// Looks at the broker, and declares what is missing first if that is asked for.
async fn look(
    source: &ScrewdriverSource,
    amqp: &Amqp,
    environment: &Environment,
    applies: bool,
) -> Result<Vec<Finding>, Failure> {
    let broker = build_broker(amqp, environment)?;
    let management = build_management(amqp, &broker)?;
    let connection = broker.connect("journeyman screwdriver topology").await.map_err(failure)?;
    let mut facts = Facts::read(&connection, management.as_ref(), source).await.map_err(failure)?;
    let mut found = Vec::new();
    if applies {
        found = topology::apply(&connection, &facts, source).await.map_err(failure)?;
        facts = Facts::read(&connection, management.as_ref(), source).await.map_err(failure)?;
    }
    amqp::close(&connection, AMQP_CLOSE_TIMEOUT).await;
    found.extend(topology::judge(source, &facts));
    Ok(found)
}

/// The checks of one source for `journeyman doctor`.
pub(super) async fn check_source(
    name: &str,
    source: &ScrewdriverSource,
    config: &Config,
    environment: &Environment,
) -> Vec<Check> {
    match look(source, &config.amqp, environment, false).await {
        Ok(found) => found
            .into_iter()
            .map(|one| Finding { subject: format!("{name}: {}", one.subject), ..one })
            .map(to_check)
            .collect(),
        Err(failure) => vec![Check::failed(format!("{name}: broker"), failure.message, "see [amqp]")],
    }
}

/// For `journeyman worker`: logs once what is missing and what loses messages, as far as the broker answers.
pub(super) async fn log_findings(config: &Config, environment: &Environment) {
    for (name, source) in &config.source {
        let Source::Screwdriver(source) = source else { continue };
        let found = match look(source, &config.amqp, environment, false).await {
            Ok(found) => found,
            Err(failure) => {
                tracing::warn!(source = name, "cannot check the queues of [source.{name}]: {}", failure.message);
                continue;
            }
        };
        for Finding { subject, severity, text, fix } in found {
            let text = format!("[source.{name}]: {subject} {text}; {fix} (`journeyman screwdriver topology`)");
            match severity {
                Severity::Ok => {}
                Severity::Danger => tracing::warn!(source = name, "{text}"),
                Severity::Broken => tracing::error!(source = name, "{text}"),
            }
        }
    }
}

fn to_check(Finding { subject, severity, text, fix }: Finding) -> Check {
    match severity {
        Severity::Ok => Check::ok(subject, text),
        Severity::Danger => Check::warning(subject, text, fix),
        Severity::Broken => Check::failed(subject, text, fix),
    }
}

fn failure(error: CallError) -> Failure {
    Failure::new(if error.refusal == Refusal::Denied { Exit::Denied } else { Exit::Unreachable }, error.message)
}
