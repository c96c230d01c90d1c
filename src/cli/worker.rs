//! `journeyman worker`: claims and runs tasks until it is told to go.

use std::future::Future;
use std::path::PathBuf;
use std::sync::Arc;

use clap::Args;
use sd_notify::NotifyState;

use super::config_args::{self, ConfigArgs, WorkerFlags};
use super::doctor::host::open_files_warning;
use super::exit::{Exit, ExitResult, Failure};
use super::reload::Reloader;
use super::signals::{ControlSignals, ExitSignals};
use super::{amqp_setup, systemd_notify, termination_watch, worker_setup};
use crate::config::schema::Config;
use crate::config::{Environment, collector};
use crate::control::worker_api::{ReloadFn, ServedWorker, Socket};
use crate::control::{WorkerStatusReply, socket_in, worker_api};
use crate::host::containment::{close_inherited_fds_on_exec, harden_process};
use crate::host::service_manager::ServiceManager;
use crate::limits::ABORT_TIMEOUT;
use crate::observe::log;
use crate::observe::traces::Export;
use crate::observe::worker_http::{self, HttpListener, WorkerSnapshotFn};
use crate::worker::{self, Control, Worker};

/// `journeyman worker`
#[derive(Debug, Args)]
pub(super) struct WorkerArgs {
    #[command(flatten)]
    settings: ConfigArgs<WorkerFlags>,
}

/// Runs it.
///
/// # Errors
///
/// A configuration that cannot be used, a work folder or a control socket that cannot be had.
pub(super) async fn run(arguments: WorkerArgs, environment: &Environment) -> ExitResult {
    Box::pin(run_with(worker_setup::build_worker, arguments, environment)).await
}

/// Runs what `make` makes of the configuration.
///
/// # Errors
///
/// As [`run`].
pub(super) async fn run_with(
    make: fn(&Config, &Environment) -> Result<Worker, Failure>,
    arguments: WorkerArgs,
    environment: &Environment,
) -> ExitResult {
    let loaded = arguments.settings.load(environment)?;
    log::start(&loaded.config.log, log::color_from_environment(environment));
    config_args::log_warnings(&loaded);
    if let Some(told) = open_files_warning(&loaded.config)? {
        tracing::warn!("{told}");
    }
    harden_process();
    let worker = make(&loaded.config, environment)?;
    close_inherited_fds_on_exec();
    let export = start_trace_export(&loaded.config, environment);
    let worker = with_trace_export(worker, export.as_ref());
    let control = worker.control();
    let obey = ExitSignals::listen()?.apply_to(control.clone());
    let others = ControlSignals::listen()?.apply_to(control.clone());
    let watch = termination_watch::watch_notices(&loaded.config, control.clone())?;
    let config = loaded.config.clone();
    let manager = ServiceManager::from_socket_variable(environment.get("NOTIFY_SOCKET"))
        .map_err(|error| Failure::new(Exit::HostUnusable, format!("no thread for the service manager: {error}")))?;
    let teller = manager.as_ref().map(|manager| manager.sender.clone());
    let reloader = Arc::new(Reloader::new(
        arguments.settings,
        environment.clone(),
        control.clone(),
        loaded.config,
        teller.clone(),
    ));
    let reload: Arc<ReloadFn> = {
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
            Some(teller) => systemd_notify::report_status(teller, watchdog, || control.status()).await,
            None => std::future::pending().await,
        }
    };
    let watched = serve_http(&config, &control).await?;
    let answers = serve_control_socket(&config, control.clone(), reload)?;
    let reports = amqp_setup::report_activity(&config, &control, environment)?;
    let hup = reloader
        .on_hangup()
        .map_err(|error| Failure::new(Exit::HostUnusable, format!("no signals can be received: {error}")))?;
    let ended = tokio::select! {
        ended = run_until_exit(worker, attend) => ended,
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
        // `close` waits until every other sender is dropped.
        drop(reloader);
        manager.sender.send(&[NotifyState::Stopping, NotifyState::Status(exit.description())]);
        manager.close().await;
    }
    ended
}

/// The export of traces, where somebody wants them. What is wrong with it keeps no worker from working.
pub(super) fn start_trace_export(config: &Config, environment: &Environment) -> Option<Export> {
    let name = worker_setup::WorkerIdentity::from_config(config);
    let started = collector::collector_config(&config.telemetry, environment).and_then(|collector| {
        let Some(collector) = collector else { return Ok(None) };
        crate::redact::hide(collector.headers.iter().map(|header| header.value.as_str())).until_exit();
        Export::start(collector, &name.id, &name.group).map(Some)
    });
    started.unwrap_or_else(|why| {
        tracing::error!("traces are not exported: {why}");
        None
    })
}

/// The same worker, whose claims are told to the export.
pub(super) fn with_trace_export(worker: Worker, export: Option<&Export>) -> Worker {
    match export {
        Some(export) => worker.with_trace_recorder(export.recorder()),
        None => worker,
    }
}

/// Where a worker of this configuration takes orders.
pub(super) fn control_socket(config: &Config) -> PathBuf {
    config.control.socket.as_ref().map_or_else(|| socket_in(&config.worker.work_dir.0), |socket| socket.0.clone())
}

/// Answers on the control socket for as long as it is polled.
///
/// # Errors
///
/// Where the socket cannot be had.
pub(super) fn serve_control_socket(
    config: &Config,
    control: Control,
    reload: Arc<ReloadFn>,
) -> Result<impl Future<Output = Failure>, Failure> {
    let unfit =
        |error: std::io::Error| Failure::new(Exit::HostUnusable, format!("the control socket cannot be had: {error}"));
    let socket = Socket::listen(&control_socket(config)).map_err(unfit)?;
    let name = worker_setup::WorkerIdentity::from_config(config);
    let desk = ServedWorker { id: name.id, group: name.group, control, reload };
    Ok(async move { match worker_api::serve(socket, desk).await {} })
}

/// Serves health, metrics and the status page where the configuration says so, for as long as it is polled.
///
/// # Errors
///
/// Where the address cannot be had.
pub(super) async fn serve_http(
    config: &Config,
    control: &Control,
) -> Result<impl Future<Output = ()> + use<>, Failure> {
    let door = listen_http(config, "health, metrics and a status page", "/").await?;
    let name = worker_setup::WorkerIdentity::from_config(config);
    let control = control.clone();
    let look: Arc<WorkerSnapshotFn> = Arc::new(move || {
        let (control, name) = (control.clone(), name.clone());
        Box::pin(async move { Some(WorkerStatusReply::new(name.id, name.group, control.status().await?)) })
    });
    Ok(async move {
        match door {
            Some(door) => match worker_http::serve(door, look).await {},
            None => std::future::pending().await,
        }
    })
}

/// Listens where the configuration says so, and says what is served there.
///
/// # Errors
///
/// Where the address cannot be had.
pub(super) async fn listen_http(config: &Config, what: &str, path: &str) -> Result<Option<HttpListener>, Failure> {
    let Some(listen) = config.http.listen else { return Ok(None) };
    let exposure =
        if config.http.allow_remote { worker_http::Exposure::Network } else { worker_http::Exposure::Loopback };
    let unfit = |error| Failure::new(Exit::HostUnusable, format!("the status page cannot be served: {error}"));
    let door = HttpListener::listen(listen.0, exposure).await.map_err(unfit)?;
    let address = door.address().map_err(unfit)?;
    tracing::info!(%address, "{what}: http://{address}{path}");
    Ok(Some(door))
}

/// Runs a worker while `obey` gives it orders.
///
/// # Errors
///
/// A work folder that cannot be made.
pub(super) async fn run_until_exit(worker: Worker, obey: impl Future<Output = ()>) -> ExitResult {
    let mut running = Box::pin(worker.run());
    let gone = tokio::select! {
        gone = &mut running => Some(gone),
        () = obey => tokio::time::timeout(ABORT_TIMEOUT, &mut running).await.ok(),
    };
    match gone {
        None => Ok(Exit::Aborted),
        Some(Ok(why)) => exit_result(why),
        Some(Err(error)) => Err(Failure::new(Exit::HostUnusable, error.to_string())),
    }
}

/// What the end of a worker means for whoever started the process.
fn exit_result(why: worker::ExitReason) -> ExitResult {
    match why {
        worker::ExitReason::Drained => Ok(Exit::Success),
        worker::ExitReason::Idle => Ok(Exit::Idle),
        worker::ExitReason::LimitReached => Ok(Exit::LimitReached),
        worker::ExitReason::Released | worker::ExitReason::DrainDeadline => Ok(Exit::HandedBack),
        worker::ExitReason::HostTerminating => Ok(Exit::HostTerminating),
        worker::ExitReason::CredentialsRejected => Err(Failure::new(
            Exit::Denied,
            "the queue has refused our credentials again and again; the log says in its words why: check client id, access \
             token, scopes and this host's clock, or user and password of a broker (`journeyman doctor` does)",
        )),
        worker::ExitReason::Misconfigured => Err(Failure::new(
            Exit::Config,
            "the queue calls our requests wrong and has accepted none, so the fault lies in our own configuration; the log \
             says in its words what is wrong: check task_queue, worker.id and worker.group. What was refused so stays in the queue",
        )),
        worker::ExitReason::WorkDirLost => Err(Failure::new(
            Exit::HostUnusable,
            "the work folder was removed or replaced under this worker: start it again, and see what removes files there",
        )),
        worker::ExitReason::Aborted => Ok(Exit::Aborted),
        worker::ExitReason::ProcessesLeft => Ok(Exit::ProcessesLeft),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_end_that_only_a_person_can_mend_says_what_to_look_at() {
        for (why, exit, word) in [
            (worker::ExitReason::Misconfigured, Exit::Config, "task_queue"),
            (worker::ExitReason::CredentialsRejected, Exit::Denied, "token"),
        ] {
            let failure = exit_result(why).unwrap_err();
            assert_eq!(failure.exit, exit);
            assert!(failure.message.contains(word), "{}", failure.message);
        }
        assert_eq!(exit_result(worker::ExitReason::Drained).unwrap(), Exit::Success);
    }
}
