//! `journeyman worker`: claims and runs tasks until it is told to go.

use std::future::Future;

use clap::Args;

use super::exit::{Ended, Exit, Failure};
use super::settings::{self, Settings, WorkerFlags};
use super::signals::Signals;
use super::{assemble, spot};
use crate::config::Environment;
use crate::limits::ABORT_WAIT;
use crate::observe::log;
use crate::worker::{self, Worker};

/// `journeyman worker`
#[derive(Debug, Args)]
pub(super) struct WorkerArgs {
    #[command(flatten)]
    settings: Settings<WorkerFlags>,
}

/// Runs it.
///
/// # Errors
///
/// A configuration that cannot be used, a work folder that cannot be made.
pub(super) async fn run(arguments: WorkerArgs, environment: &Environment) -> Ended {
    let loaded = arguments.settings.load(environment)?;
    log::start(&loaded.config.log, log::color(environment));
    settings::log_warnings(&loaded);
    let worker = assemble::worker(&loaded.config, environment)?;
    let obey = Signals::listen()?.obey(worker.control());
    let watch = spot::watch(&loaded.config, worker.control())?;
    // The order to end at once is the last one; that there is nothing to watch is no order.
    let attend = async {
        tokio::select! {
            () = obey => {}
            () = async { (watch.await, std::future::pending().await).1 } => {}
        }
    };
    until_gone(worker, attend).await
}

/// Runs a worker while `obey` gives it orders.
///
/// # Errors
///
/// A work folder that cannot be made.
pub(super) async fn until_gone(worker: Worker, obey: impl Future<Output = ()>) -> Ended {
    let mut running = Box::pin(worker.run());
    let gone = tokio::select! {
        gone = &mut running => Some(gone),
        () = obey => tokio::time::timeout(ABORT_WAIT, &mut running).await.ok(),
    };
    match gone {
        None => Ok(Exit::Aborted),
        Some(Ok(why)) => Ok(exit(why)),
        Some(Err(error)) => Err(Failure::new(Exit::Unfit, format!("the work folder cannot be used: {error}"))),
    }
}

/// What the end of a worker means for whoever started the process.
#[must_use]
pub(super) const fn exit(why: worker::Exit) -> Exit {
    match why {
        worker::Exit::Drained => Exit::Done,
        worker::Exit::Idle => Exit::Idle,
        worker::Exit::Limit => Exit::Limit,
        worker::Exit::HandedBack | worker::Exit::DrainDeadline => Exit::HandedBack,
        worker::Exit::HostGoes => Exit::HostGoes,
        worker::Exit::CredentialsRefused => Exit::Denied,
        worker::Exit::Misconfigured => Exit::Config,
        worker::Exit::Aborted => Exit::Aborted,
    }
}
