//! `journeyman controller`: keeps worker groups by demand.

use clap::Args;
use secrecy::SecretString;
use tokio::signal::unix::{SignalKind, signal};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use super::exit::{Ended, Exit, Failure};
use super::settings::{self, ControllerFlags, Settings};
use super::{assemble, requests};
use crate::config::pool::{Names, Pool, Profile};
use crate::config::{Config, Environment, secrets};
use crate::controller;
use crate::domain::group::{scale, tracker};
use crate::host::containment::{bequeath_nothing, harden};
use crate::observe::log;

/// `journeyman controller`
#[derive(Debug, Args)]
pub(super) struct ControllerArgs {
    #[command(flatten)]
    settings: Settings<ControllerFlags>,
}

/// Runs it.
///
/// # Errors
///
/// A configuration that cannot be used, or a folder that cannot be had.
pub(super) async fn run(arguments: ControllerArgs, environment: &Environment) -> Ended {
    let loaded = arguments.settings.load(environment)?;
    log::start(&loaded.config.log, log::color(environment));
    settings::log_warnings(&loaded);
    if loaded.config.pool.is_empty() {
        return Err(Failure::new(
            Exit::Config,
            "there is no [pool.NAME], so there is nothing to control; `journeyman guide controller` shows one",
        ));
    }
    assemble::hide_secrets(&loaded.config, environment);
    harden();
    let settings = loaded.config.pool.iter().map(|(name, pool)| settings_of(name, pool, &loaded.config, environment));
    let settings = settings.collect::<Result<Vec<_>, Failure>>()?;
    bequeath_nothing();
    let failed = |error| Failure::new(Exit::Unfit, format!("no signals can be received: {error}"));
    let mut term = signal(SignalKind::terminate()).map_err(failed)?;
    let mut int = signal(SignalKind::interrupt()).map_err(failed)?;
    let leave = CancellationToken::new();
    let mut pools = JoinSet::new();
    for settings in settings {
        pools.spawn(controller::run(settings, leave.clone()));
    }
    tokio::select! {
        _ = term.recv() => {}
        _ = int.recv() => {}
        Some(ended) = pools.join_next() => return match ended {
            Ok(Err(error)) => Err(Failure::new(Exit::Unfit, format!("a pool cannot be controlled: {error}"))),
            Ok(Ok(())) | Err(_) => Err(Failure::new(Exit::Internal, "a pool is no longer controlled")),
        },
    }
    tracing::info!("the controller leaves; workers and queues stay as they are");
    leave.cancel();
    while pools.join_next().await.is_some() {}
    Ok(Exit::Done)
}

/// Each pool has a folder of its own, whatever it is called: what lies in it is taken for workers of the pool.
fn folder_of(pool: &str) -> String {
    // A name may be `..`.
    urlencoding::encode(pool).replace('.', "%2E")
}

fn settings_of(
    name: &str,
    pool: &Pool,
    config: &Config,
    environment: &Environment,
) -> Result<controller::Settings, Failure> {
    let uri = secrets::of_amqp(&config.amqp, environment)?;
    let spelling = match pool.names {
        Names::Implementation => controller::Spelling::Implementation,
        Names::Document => controller::Spelling::Document,
    };
    let names = controller::Names::new(name, spelling);
    if !names.fit() {
        return Err(Failure::new(
            Exit::Config,
            format!(
                "[pool.{name}]: with this name those of its exchanges are too long for AMQP; give it a shorter one"
            ),
        ));
    }
    let ttl = u32::try_from(pool.message_ttl.0.as_millis()).unwrap_or(u32::MAX);
    let program = (!pool.command.is_empty()).then(|| controller::Program {
        command: pool.command.clone(),
        env: pool.env.iter().map(|(name, value)| (name.clone(), value.0.clone())).collect(),
        folder: pool.folder.0.join(folder_of(name)),
        grace: pool.stop_grace.0,
    });
    Ok(controller::Settings {
        pool: name.to_owned(),
        broker: requests::broker(&config.amqp, environment)?,
        uri: SecretString::from(uri.as_ref().map_or(requests::USUAL, |uri| uri.reveal())),
        names,
        keeping: controller::Keeping {
            profile: match pool.profile {
                Profile::Fast => controller::Profile::Fast,
                Profile::Safe => controller::Profile::Safe,
            },
            message_ttl: (ttl > 0).then_some(ttl),
            max_length: pool.max_length,
            delivery_limit: pool.delivery_limit,
        },
        delays: tracker::Policy { unbind_delay: pool.unbind_delay.0, stop_delay: pool.stop_delay.0 },
        limits: scale::Limits {
            min: pool.min,
            max: pool.max,
            spares: pool.spares,
            concurrency: pool.concurrency,
            down_after: pool.down_after.0,
            starting_max: pool.starting_max,
        },
        budget: pool.budget.map(|workers| scale::Budget { workers, turn: pool.turn.0 }),
        program,
        dead_letter_status: pool.dead_letter_status.clone(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_folder_of_a_pool_is_below_the_one_that_is_configured_and_no_other_pools() {
        let names = ["core", "..", ".", "a/b", "a%2Fb", "a.b", "a-b"];
        let folders: std::collections::BTreeSet<String> = names.into_iter().map(folder_of).collect();
        assert_eq!(folders.len(), names.len());
        assert!(folders.contains("core") && folders.contains("a-b"));
        assert!(folders.iter().all(|folder| !folder.contains(['/', '.'])), "{folders:?}");
    }
}
