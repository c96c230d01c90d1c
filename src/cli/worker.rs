//! `journeyman worker`: claims and runs tasks until stopped.

use std::convert::Infallible;
use std::future::Future;
use std::path::PathBuf;
use std::sync::Arc;

use sd_notify::NotifyState;

use super::config_args::{self, ConfigArgs, WorkerFlags};
use super::doctor::host::open_files_warning;
use super::exit::{EXIT_CODES, Exit, ExitResult, Failure};
use super::reloader::{Reloader, WorkerTarget};
use super::signals::ExitSignals;
use super::worker_identity::WorkerIdentity;
use super::worker_setup::BuiltWorker;
use super::{amqp_setup, notify_setup, screwdriver, systemd_notify, termination_watch, worker_setup};
use crate::config::schema::Config;
use crate::console::app::Console;
use crate::console::http::{self, SnapshotFn};
use crate::console::otlp;
use crate::control::worker_api::{ReloadSender, ServedWorker, Socket};
use crate::control::{WorkerStatusReply, socket_in, worker_api};
use journeyman_domain::limits::ABORT_TIMEOUT;
use journeyman_platform::host::clock::or_pending;
use journeyman_platform::host::containment::{close_inherited_fds_on_exec, harden_process};
use journeyman_platform::host::service_manager::ServiceManager;
use journeyman_platform::http::{Exposure, HttpListener};
use journeyman_platform::log;
use journeyman_platform::settings::Environment;
use journeyman_worker::engine::live_log::LiveLogs;
use journeyman_worker::engine::{ClaimHistory, ExitReason, Worker};
use journeyman_worker::notify::Announcing;
use journeyman_worker::traces::Export;

pub(super) async fn run(settings: ConfigArgs<WorkerFlags>, environment: &Environment) -> ExitResult {
    Box::pin(run_with(worker_setup::build_worker, settings, environment)).await
}

/// Runs `worker` and `bridge`.
pub(super) async fn run_with(
    build: fn(&Config, &Environment) -> Result<BuiltWorker, Failure>,
    settings: ConfigArgs<WorkerFlags>,
    environment: &Environment,
) -> ExitResult {
    let loaded = settings.load(environment)?;
    EXIT_CODES.set(loaded.config.worker.exit_codes).ok();
    log::start(&loaded.config.log, environment);
    config_args::log_warnings(&loaded);
    if let Some(warning) = open_files_warning(&loaded.config)? {
        tracing::warn!("{warning}");
    }
    harden_process();
    let BuiltWorker { worker, apis, mut pools } = build(&loaded.config, environment)?;
    close_inherited_fds_on_exec();
    let control = worker.control();
    let alerts = log::subscribe_alerts();
    pools.join(&control).await?;
    let manager = environment.get("NOTIFY_SOCKET").and_then(|socket| {
        let connected = ServiceManager::connect(socket);
        connected.inspect_err(|error| tracing::warn!("cannot notify the service manager at {socket}: {error}")).ok()
    });
    let target = WorkerTarget { control: control.clone(), service_manager: manager.clone(), apis };
    let (reloader, reloads) = Reloader::new(settings, environment, loaded.config.clone(), target)?;
    let notifications = async {
        match &manager {
            Some(manager) => systemd_notify::report_status(manager.clone(), || control.status()).await,
            None => std::future::pending().await,
        }
    };
    let queue_checks = async {
        screwdriver::log_findings(&loaded.config, environment).await;
        std::future::pending::<Infallible>().await
    };
    let background = async {
        tokio::select! {
            never = reloader.run() => match never {},
            never = notifications => match never {},
            never = queue_checks => match never {},
            never = pools.run(&control, Some(alerts)) => match never {},
        }
    };
    let signals = ExitSignals::listen()?;
    let page = listen_http(&loaded.config, PAGE).await?.map(|listener| (listener, Console::default()));
    let ended = Box::pin(serve(worker, &loaded.config, environment, signals, Some(reloads), page, background)).await;
    if let Some(manager) = &manager {
        let exit = ended.as_ref().map_or_else(|failure| failure.exit, |exit| *exit);
        manager.send(&[NotifyState::Stopping, NotifyState::Status(exit.description())]);
    }
    pools.leave(&ended).await;
    ended
}

/// Runs a worker with everything that accompanies it: signals, termination notices, control socket, HTTP, activity reports and
/// traces. `background` runs beside it, and `page` serves its page.
pub(super) async fn serve(
    mut worker: Worker,
    config: &Config,
    environment: &Environment,
    signals: ExitSignals,
    reloads: Option<ReloadSender>,
    page: Option<(HttpListener, Console)>,
    background: impl Future<Output = Failure>,
) -> ExitResult {
    let name = WorkerIdentity::from_config(config);
    let export = start_trace_export(&name, environment);
    worker.config.recorder = export.as_ref().map(Export::recorder);
    let source = format!("worker/{}/{}", name.group, name.id);
    let (announcer, announcing) = notify_setup::announcer(&config.notify, source, environment)?;
    worker.config.announcer = announcer;
    let live_logs = serve_live_logs(&mut worker, config).await?;
    let control = worker.control();
    let watch = termination_watch::watch_notices(config, control.clone())?;
    let http = serve_http(page, &name, config, &worker);
    let (of_metrics, instance) = (control.clone(), name.clone());
    let metrics = async move {
        let WorkerIdentity { group, id } = &instance;
        let snapshot = async || Some(WorkerStatusReply::new(id.clone(), group.clone(), of_metrics.status().await?));
        otlp::export(environment, "worker", &format!("{group}/{id}"), snapshot, crate::console::worker::metrics).await;
    };
    let WorkerIdentity { group, id } = name;
    let socket =
        Socket::listen(&control_socket(config)).map_err(|error| Failure::from_error(Exit::HostUnusable, &error))?;
    let socket = worker_api::serve(socket, ServedWorker { id, group, control: control.clone(), reloads });
    let reports = amqp_setup::report_activity(config, &control, environment)?;
    let serving = async {
        tokio::select! {
        ended = run_until_exit(worker, signals.apply_to(control)) => ended,
        failure = background => Err(failure),
        // The end of the watch has no effect.
        never = async { (watch.await, std::future::pending::<Infallible>().await).1 } => match never {},
        never = socket => match never {},
        never = http => match never {},
        never = live_logs => match never {},
        () = metrics => Err(Failure::new(Exit::Internal, "the export of metrics ended")),
        () = reports => Err(Failure::new(Exit::Internal, "activity reporting stopped")),
        }
    };
    let ended = Announcing::beside(announcing, serving).await;
    if let Some(export) = export {
        export.close().await;
    }
    ended
}

/// Errors are logged and do not prevent the worker from starting.
fn start_trace_export(name: &WorkerIdentity, environment: &Environment) -> Option<Export> {
    Export::start(environment, &format!("{}/{}", name.group, name.id)).unwrap_or_else(|error| {
        tracing::error!("{error}");
        None
    })
}

pub(super) fn control_socket(config: &Config) -> PathBuf {
    config.control.socket.as_ref().map_or_else(|| socket_in(&config.worker.work_dir.0), |socket| socket.0.clone())
}

/// What the page of a worker has.
pub(super) const PAGE: &str = "health, metrics and a status page";

/// Pending forever without a listener.
fn serve_http(
    page: Option<(HttpListener, Console)>,
    name: &WorkerIdentity,
    config: &Config,
    worker: &Worker,
) -> impl Future<Output = Infallible> + use<> {
    let (control, name, sources) = (worker.control(), name.clone(), worker.inspected_sources());
    let task_queue = |name: &str| config.source.get(name)?.as_taskcluster().map(|source| source.task_queue.to_string());
    let schemas = worker.payload_schemas().into_iter();
    let schemas = schemas.filter_map(|(source, schema)| Some((task_queue(&source)?, schema))).collect();
    let history_of = control.clone();
    let history: Arc<SnapshotFn<Vec<ClaimHistory>>> = Arc::new(move || {
        let control = history_of.clone();
        Box::pin(async move { control.claim_history().await })
    });
    let snapshot: Arc<SnapshotFn<WorkerStatusReply>> = Arc::new(move || {
        let (control, name) = (control.clone(), name.clone());
        Box::pin(async move { Some(WorkerStatusReply::new(name.id, name.group, control.status().await?)) })
    });
    async move {
        match page {
            Some((listener, console)) => {
                let console = Console { schemas, history: Some(history), ..console };
                http::worker::serve(listener, snapshot, sources, console).await
            }
            None => std::future::pending().await,
        }
    }
}

/// Pending forever if `worker.live_log` is not set.
async fn serve_live_logs(
    worker: &mut Worker,
    config: &Config,
) -> Result<impl Future<Output = Infallible> + use<>, Failure> {
    let mut serving = None;
    if let Some(listen) = config.worker.live_log {
        let failed = |error| Failure::new(Exit::HostUnusable, format!("cannot listen for readers of logs: {error}"));
        // The address of a log is its protection; a proxy may use any name for this host.
        let listener = HttpListener::listen(listen.0, Exposure::Network).await.map_err(failed)?;
        let address = listener.address().map_err(failed)?;
        let url = config.worker.live_log_url.as_ref().map(|url| url.as_str().to_owned());
        let live_logs = LiveLogs::new(&url.unwrap_or_else(|| format!("http://{address}")));
        worker.config.live_logs = Some(live_logs.clone());
        serving = Some(listener.serve_with(live_logs.into_router(), None));
    }
    Ok(or_pending(serving))
}

pub(super) async fn listen_http(config: &Config, what: &str) -> Result<Option<HttpListener>, Failure> {
    let Some(listen) = config.http.listen else { return Ok(None) };
    let exposure = if config.http.allow_remote { Exposure::Network } else { Exposure::Loopback };
    let failed = |error| Failure::new(Exit::HostUnusable, format!("cannot listen for HTTP: {error}"));
    let listener = HttpListener::listen(listen.0, exposure).await.map_err(failed)?;
    let address = listener.address().map_err(failed)?;
    tracing::info!(%address, "{what}: http://{address}/");
    Ok(Some(listener))
}

/// Waits up to [`ABORT_TIMEOUT`] for the worker once `aborted` has resolved.
pub(super) async fn run_until_exit(worker: Worker, aborted: impl Future<Output = ()>) -> ExitResult {
    let mut running = Box::pin(worker.run());
    let ended = tokio::select! {
        ended = &mut running => Some(ended),
        () = aborted => tokio::time::timeout(ABORT_TIMEOUT, &mut running).await.ok(),
    };
    match ended {
        None => Ok(Exit::Aborted),
        Some(Ok(reason)) => exit_result(reason),
        Some(Err(error)) => Err(Failure::new(Exit::HostUnusable, error.to_string())),
    }
}

fn exit_result(reason: ExitReason) -> ExitResult {
    let (exit, message) = match reason {
        ExitReason::Drained => return Ok(Exit::Success),
        ExitReason::Idle => return Ok(Exit::Idle),
        ExitReason::LimitReached => return Ok(Exit::LimitReached),
        ExitReason::NotNeeded => return Ok(Exit::NotNeeded),
        ExitReason::Released => return Ok(Exit::Released),
        ExitReason::HostTerminating => return Ok(Exit::HostTerminating),
        ExitReason::Aborted => return Ok(Exit::Aborted),
        ExitReason::ProcessesLeft => return Ok(Exit::ProcessesLeft),
        ExitReason::CredentialsRejected => (
            Exit::Denied,
            "the queue keeps rejecting the credentials (its messages are in the log); check client id, access token, scopes and \
             the clock, or user and password of the broker (`journeyman doctor` does)",
        ),
        ExitReason::RegistrationRefused => {
            (Exit::Denied, "the worker pool does not renew the credentials of this worker (its message is in the log)")
        }
        ExitReason::Misconfigured => (
            Exit::Config,
            "the queue rejects every request as invalid (its messages are in the log); check task_queue, worker.id and \
             worker.group. The rejected tasks stay in the queue",
        ),
        ExitReason::WorkDirLost => (
            Exit::HostUnusable,
            "the work directory was removed or replaced while the worker was running; check what removes files there, and \
             restart the worker",
        ),
    };
    Err(Failure::new(exit, message))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_exit_that_needs_an_operator_names_what_to_check() {
        for (why, exit, word) in [
            (ExitReason::Misconfigured, Exit::Config, "task_queue"),
            (ExitReason::CredentialsRejected, Exit::Denied, "token"),
        ] {
            let failure = exit_result(why).unwrap_err();
            assert_eq!(failure.exit, exit);
            assert!(failure.message.contains(word), "{}", failure.message);
        }
        assert_eq!(exit_result(ExitReason::Drained).unwrap(), Exit::Success);
    }
}
