//! `journeyman worker`: claims and runs tasks until it is told to go.

use std::future::Future;
use std::path::PathBuf;
use std::sync::Arc;

use clap::Args;

use super::doctor::host::too_few_files;
use super::exit::{Ended, Exit, Failure};
use super::reload::Reloader;
use super::settings::{self, Settings, WorkerFlags};
use super::signals::{Others, Signals};
use super::{assemble, requests, spot, supervised};
use crate::config::schema::{self, Config};
use crate::config::{Environment, telemetry};
use crate::control::server::{Desk, Reload, Socket};
use crate::control::{Status, server, socket_in};
use crate::host::containment::{bequeath_nothing, harden};
use crate::host::systemd::{Manager, Word};
use crate::limits::ABORT_WAIT;
use crate::observe::http::{self, Door, Look};
use crate::observe::log;
use crate::observe::traces::Export;
use crate::worker::{self, Control, Worker};

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
/// A configuration that cannot be used, a work folder or a control socket that cannot be had.
pub(super) async fn run(arguments: WorkerArgs, environment: &Environment) -> Ended {
    Box::pin(run_made_by(assemble::worker, arguments, environment)).await
}

/// Runs what `make` makes of the configuration.
///
/// # Errors
///
/// As [`run`].
pub(super) async fn run_made_by(
    make: fn(&Config, &Environment) -> Result<Worker, Failure>,
    arguments: WorkerArgs,
    environment: &Environment,
) -> Ended {
    let loaded = arguments.settings.load(environment)?;
    log::start(&loaded.config.log, log::color(environment));
    settings::log_warnings(&loaded);
    if let Some(told) = too_few_files(&loaded.config)? {
        tracing::warn!("{told}");
    }
    harden();
    let worker = make(&loaded.config, environment)?;
    bequeath_nothing();
    let export = traced(&loaded.config, environment);
    let worker = recorded(worker, export.as_ref());
    let control = worker.control();
    let obey = Signals::listen()?.obey(control.clone());
    let others = Others::listen()?.obey(control.clone());
    let watch = spot::watch(&loaded.config, control.clone())?;
    let config = loaded.config.clone();
    let manager = Manager::of_process(environment.get("NOTIFY_SOCKET"))
        .map_err(|error| Failure::new(Exit::Unfit, format!("no thread for the service manager: {error}")))?;
    let teller = manager.as_ref().map(|manager| manager.teller.clone());
    let reloader = Arc::new(Reloader::new(
        arguments.settings,
        environment.clone(),
        control.clone(),
        loaded.config,
        teller.clone(),
    ));
    let reload: Arc<Reload> = {
        let reloader = Arc::clone(&reloader);
        Arc::new(move || {
            let reloader = Arc::clone(&reloader);
            Box::pin(async move { reloader.reload().await })
        })
    };
    // The order to end at once is the last one; that there is nothing to watch is no order.
    let attend = async {
        tokio::select! {
            () = obey => {}
            () = async { (watch.await, std::future::pending().await).1 } => {}
        }
    };
    let watchdog = manager.as_ref().and_then(|manager| manager.watchdog);
    let told = async {
        match teller {
            Some(teller) => supervised::tell(teller, watchdog, || control.look()).await,
            None => std::future::pending().await,
        }
    };
    let watched = watched(&config, &control).await?;
    let answers = answer(&config, control.clone(), reload)?;
    let reports = requests::reports(&config, &control, environment)?;
    let hup =
        reloader.at_hup().map_err(|error| Failure::new(Exit::Unfit, format!("no signals can be received: {error}")))?;
    let ended = tokio::select! {
        ended = until_gone(worker, attend) => ended,
        broken = answers => Err(broken),
        () = watched => Err(Failure::new(Exit::Internal, "the status page is no longer served")),
        () = hup => Err(Failure::new(Exit::Internal, "signals are no longer received")),
        never = told => match never {},
        never = others => match never {},
        () = reports => Err(Failure::new(Exit::Internal, "activity is no longer reported")),
    };
    if let Some(export) = export {
        export.close().await;
    }
    if let Some(manager) = manager {
        let exit = ended.as_ref().map_or_else(|failure| failure.exit, |exit| *exit);
        // The last teller but the manager's own.
        drop(reloader);
        manager.teller.tell(vec![Word::Stopping, Word::Status(exit.meaning().to_owned())]);
        manager.close().await;
    }
    ended
}

/// The export of traces, where somebody wants them. What is wrong with it keeps no worker from working.
pub(super) fn traced(config: &Config, environment: &Environment) -> Option<Export> {
    let name = assemble::Name::of(config);
    let started = telemetry::collector(&config.telemetry, environment).and_then(|collector| {
        let Some(collector) = collector else { return Ok(None) };
        crate::redact::hide(collector.headers.iter().map(|header| header.value.as_str())).for_good();
        Export::start(collector, &name.id, &name.group).map(Some)
    });
    started.unwrap_or_else(|why| {
        tracing::error!("traces are not exported: {why}");
        None
    })
}

/// The same worker, whose claims are told to the export.
pub(super) fn recorded(worker: Worker, export: Option<&Export>) -> Worker {
    match export {
        Some(export) => worker.recorded_by(export.recorder()),
        None => worker,
    }
}

/// Where a worker of this configuration takes orders.
pub(super) fn socket_of(config: &Config) -> PathBuf {
    config.control.socket.as_ref().map_or_else(|| socket_in(&config.worker.work_dir.0), |socket| socket.0.clone())
}

/// Answers on the control socket for as long as it is polled.
///
/// # Errors
///
/// Where the socket cannot be had.
pub(super) fn answer(
    config: &Config,
    control: Control,
    reload: Arc<Reload>,
) -> Result<impl Future<Output = Failure>, Failure> {
    let unfit = |error: std::io::Error| Failure::new(Exit::Unfit, format!("the control socket cannot be had: {error}"));
    let socket = Socket::listen(&socket_of(config)).map_err(unfit)?;
    let name = assemble::Name::of(config);
    let desk = Desk { id: name.id, group: name.group, control, reload };
    Ok(async move { match server::serve(socket, desk).await {} })
}

/// Serves health, metrics and the status page where the configuration says so, for as long as it is polled.
///
/// # Errors
///
/// Where the address cannot be had.
pub(super) async fn watched(config: &Config, control: &Control) -> Result<impl Future<Output = ()> + use<>, Failure> {
    let door = door(config, "health, metrics and a status page", "/").await?;
    let name = assemble::Name::of(config);
    let control = control.clone();
    let look: Arc<Look> = Arc::new(move || {
        let (control, name) = (control.clone(), name.clone());
        Box::pin(async move { Some(Status::of(name.id, name.group, control.look().await?)) })
    });
    Ok(async move {
        match door {
            Some(door) => match http::serve(door, look).await {},
            None => std::future::pending().await,
        }
    })
}

/// Listens where the configuration says so, and says what is served there.
///
/// # Errors
///
/// Where the address cannot be had.
pub(super) async fn door(config: &Config, what: &str, path: &str) -> Result<Option<Door>, Failure> {
    let Some(listen) = config.http.listen else { return Ok(None) };
    let reach = match config.http.reach {
        schema::Reach::Loopback => http::Reach::Loopback,
        schema::Reach::Network => http::Reach::Network,
    };
    let unfit = |error| Failure::new(Exit::Unfit, format!("the status page cannot be served: {error}"));
    let door = Door::listen(listen.0, reach).await.map_err(unfit)?;
    let address = door.address().map_err(unfit)?;
    tracing::info!(%address, "{what}: http://{address}{path}");
    Ok(Some(door))
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
        Some(Ok(why)) => ended(why),
        Some(Err(error)) => Err(Failure::new(Exit::Unfit, error.to_string())),
    }
}

/// What the end of a worker means for whoever started the process.
fn ended(why: worker::Exit) -> Ended {
    match why {
        worker::Exit::Drained => Ok(Exit::Done),
        worker::Exit::Idle => Ok(Exit::Idle),
        worker::Exit::Limit => Ok(Exit::Limit),
        worker::Exit::HandedBack | worker::Exit::DrainDeadline => Ok(Exit::HandedBack),
        worker::Exit::HostGoes => Ok(Exit::HostGoes),
        worker::Exit::CredentialsRefused => Err(Failure::new(
            Exit::Denied,
            "the queue has refused our credentials again and again; the log says in its words why: check client id, access \
             token, scopes and this host's clock, or user and password of a broker (`journeyman doctor` does)",
        )),
        worker::Exit::Misconfigured => Err(Failure::new(
            Exit::Config,
            "the queue calls our requests wrong and has accepted none, so the fault lies in our own configuration; the log \
             says in its words what is wrong: check task_queue, worker.id and worker.group. What was refused so stays in the queue",
        )),
        worker::Exit::FolderLost => Err(Failure::new(
            Exit::Unfit,
            "the work folder was removed or replaced under this worker: start it again, and see what removes files there",
        )),
        worker::Exit::Aborted => Ok(Exit::Aborted),
        worker::Exit::Occupied => Ok(Exit::Survivors),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_end_that_only_a_person_can_mend_says_what_to_look_at() {
        for (why, exit, word) in [
            (worker::Exit::Misconfigured, Exit::Config, "task_queue"),
            (worker::Exit::CredentialsRefused, Exit::Denied, "token"),
        ] {
            let failure = ended(why).unwrap_err();
            assert_eq!(failure.exit, exit);
            assert!(failure.message.contains(word), "{}", failure.message);
        }
        assert_eq!(ended(worker::Exit::Drained).unwrap(), Exit::Done);
    }
}
