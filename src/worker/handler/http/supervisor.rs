//! Supervises a service: checks its health and, if the worker starts it, starts, stops and restarts it, as
//! [`journeyman_domain::service_supervisor`] decides.

use std::os::unix::fs::FileTypeExt as _;
use std::sync::Arc;

use tokio::net::{TcpStream, UnixStream};
use tokio::time::timeout;

use super::HttpInner;
use crate::handler::environment::{self, Variables};
use crate::handler::process::{Launch, RunLimits, RunningProcess};
use crate::handler::sidecar::{SidecarProcess, SidecarStatus};
use crate::handler::{HandlerFuture, SidecarContext};
use journeyman_domain::limits::{
    SERVICE_ABSENT_PROBE_INTERVAL, SERVICE_FAILED_PROBES_MAX, SERVICE_FAILURES_ALERT_AFTER,
    SERVICE_FAILURES_ALERT_EVERY, SERVICE_PROBE_TIMEOUT_MIN, SERVICE_STARTING_PROBE_INTERVAL,
};
use journeyman_domain::outcome::Cleanup;
use journeyman_domain::service_supervisor::{
    Effect, Event, HealthCheckResult, ManagedBy, ServiceAvailability, ServicePolicy, ServiceSupervisor as Rules,
    StopReason,
};
use journeyman_platform::host::clock::or_pending;

struct RunningService {
    process: SidecarProcess,
    /// Resolves with how the process ended.
    exit: HandlerFuture<'static, String>,
}

/// Supervises the service until the worker stops it.
pub(super) async fn supervise(http: Arc<HttpInner>, context: SidecarContext) {
    let config = &http.config;
    let (managed_by, startup_check_interval) = if config.exec.is_empty() {
        (ManagedBy::External, SERVICE_ABSENT_PROBE_INTERVAL)
    } else {
        (ManagedBy::Worker, SERVICE_STARTING_PROBE_INTERVAL)
    };
    let policy = ServicePolicy {
        managed_by,
        startup_timeout: config.startup_timeout.0,
        startup_check_interval,
        health_interval: config.health_interval.0,
        failures_max: SERVICE_FAILED_PROBES_MAX,
    };
    let state = Rules::new(policy, uuid::Uuid::new_v4().as_u64_pair().0, context.clock().now());
    let status = match managed_by {
        ManagedBy::Worker => SidecarStatus { log_path: Some(context.log_path(&http.name)), ..SidecarStatus::default() },
        ManagedBy::External => {
            let message = format!("external service at {} is not reachable", http.display_address());
            SidecarStatus { message, ..SidecarStatus::default() }
        }
    };
    context.set_status(status.clone());
    Supervisor { http, context, state, status, running: None, probe: None, epoch: 0, stop_reason: None }.run().await;
}

struct Supervisor {
    http: Arc<HttpInner>,
    context: SidecarContext,
    state: Rules,
    status: SidecarStatus,
    running: Option<RunningService>,
    probe: Option<HandlerFuture<'static, HealthCheckResult>>,
    /// How often the service came up.
    epoch: u64,
    /// Why the supervisor stopped the running process, if it did.
    stop_reason: Option<StopReason>,
}

impl Supervisor {
    async fn run(mut self) {
        self.handle(Event::Tick);
        loop {
            while let Some(effect) = self.state.next_effect() {
                self.perform(effect).await;
            }
            let (deadline, clock) = (self.state.next_deadline(), self.context.clock());
            tokio::select! {
                biased;
                () = self.context.stop_requested() => return self.stop().await,
                exit = or_pending(self.running.as_mut().map(|running| running.exit.as_mut())) => {
                    self.on_exit(&exit).await;
                }
                health = or_pending(self.probe.as_mut()) => {
                    self.probe = None;
                    self.handle(Event::HealthChecked(health));
                }
                () = self.http.unreachable.notified() => self.handle(Event::Unreachable),
                () = or_pending(deadline.map(|deadline| clock.sleep_until(deadline))) => {
                    self.handle(Event::Tick);
                }
            }
        }
    }

    fn handle(&mut self, event: Event) {
        self.state.handle(event, self.context.clock().now());
    }

    async fn perform(&mut self, effect: Effect) {
        let http = Arc::clone(&self.http);
        let (name, address) = (&http.name, http.display_address());
        match effect {
            Effect::Start => match self.start().await {
                Ok(()) => self.handle(Event::Started),
                Err(error) => {
                    tracing::error!(handler = name, %error, "cannot start a service");
                    self.handle(Event::StartFailed);
                    self.report_failure(&format!("cannot start: {error}"));
                }
            },
            Effect::CheckHealth => self.probe = Some(Box::pin(probe_health(Arc::clone(&self.http)))),
            Effect::Stop(reason) => {
                tracing::error!(handler = name, "service {}: restarting it", reason_text(reason));
                self.stop_reason = Some(reason);
                self.probe = None;
                if let Some(running) = &self.running {
                    running.process.stop(http.config.termination_grace.0, self.context.clock());
                }
            }
            Effect::Up => {
                tracing::info!(handler = name, address, "service is up");
                self.epoch += 1;
                http.up.send_replace(Some(self.epoch));
                self.set_status(ServiceAvailability::Up, format!("healthy at {address}"));
            }
            Effect::Down => {
                tracing::warn!(handler = name, address, "service is down; the worker claims nothing for it");
                http.up.send_replace(None);
                self.set_status(ServiceAvailability::Down, format!("unhealthy at {address}"));
            }
        }
    }

    async fn start(&mut self) -> std::io::Result<()> {
        let http = Arc::clone(&self.http);
        let name = &http.name;
        // Most programs fail to bind a socket that a previous process left.
        if let Some(socket) = http.config.url.socket()
            && socket.symlink_metadata().is_ok_and(|metadata| metadata.file_type().is_socket())
        {
            std::fs::remove_file(socket)?;
        }
        let process = self.context.prepare_process(name)?;
        let env = environment(&http, &process);
        let running = RunningProcess::start(Launch::new(&http.config.exec, &env, &process.context)).await?;
        let (process_group, log) = (running.group(), process.context.log().path().display());
        tracing::info!(handler = name, process_group, %log, "service started");
        let context = process.context.clone();
        let limits = RunLimits { run_time: None, termination_grace: http.config.termination_grace.0 };
        let exit = Box::pin(async move {
            match running.finish(limits, &context).await {
                Ok(end) => end.describe(),
                Err(error) => error.to_string(),
            }
        });
        self.running = Some(RunningService { process, exit });
        self.stop_reason = None;
        if self.state.consecutive_failures() == 0 {
            self.set_status(ServiceAvailability::Down, "started, not healthy yet".to_owned());
        }
        Ok(())
    }

    async fn on_exit(&mut self, exit: &str) {
        let Some(running) = self.running.take() else { return };
        self.probe = None;
        self.status.restart_count += 1;
        clean_up(&self.http.name, &running.process).await;
        let why = match self.stop_reason.take() {
            Some(reason) => format!("{}, stopped", reason_text(reason)),
            None => format!("exited ({exit})"),
        };
        tracing::error!(handler = self.http.name, exit, "service ended: {why}");
        self.handle(Event::Exited);
        self.http.up.send_replace(None);
        self.report_failure(&why);
    }

    /// Sets the status of a failed service, and alerts the operator about repeated failures.
    fn report_failure(&mut self, why: &str) {
        let consecutive_failures = self.state.consecutive_failures();
        let log = self.status.log_path.as_ref().map(|log| log.display().to_string()).unwrap_or_default();
        let message = format!(
            "{why}; failed {consecutive_failures} times in a row; restarting it; see its logs {log} and {log}.previous"
        );
        if consecutive_failures % SERVICE_FAILURES_ALERT_EVERY == SERVICE_FAILURES_ALERT_AFTER {
            tracing::error!(
                alert = "sidecar-crash-loop",
                handler = self.http.name,
                consecutive_failures,
                "[alert operator] service keeps failing: {why}; the worker claims nothing for it; see its log {log}"
            );
        }
        self.set_status(ServiceAvailability::Down, message);
    }

    fn set_status(&mut self, availability: ServiceAvailability, message: String) {
        (self.status.availability, self.status.message) = (availability, message);
        self.context.set_status(self.status.clone());
    }

    async fn stop(mut self) {
        self.http.up.send_replace(None);
        self.probe = None;
        let Some(RunningService { process, exit }) = self.running.take() else { return };
        process.stop(self.http.config.termination_grace.0, self.context.clock());
        let exit = exit.await;
        clean_up(&self.http.name, &process).await;
        tracing::info!(handler = self.http.name, exit, "service stopped with its worker");
    }
}

/// Kills remaining processes of a service and finishes its log.
async fn clean_up(name: &str, process: &SidecarProcess) {
    match process.context.scope().clean_up().await {
        Cleanup::Complete => process.close_record(),
        Cleanup::Incomplete => {
            tracing::error!(
                alert = "sidecar-cleanup-unproven",
                handler = name,
                "[alert operator] processes of a service may have survived; the next one is started anyway"
            );
        }
    }
    let log = process.context.log().clone();
    if let Ok(Err(error)) = tokio::task::spawn_blocking(move || log.finish()).await {
        tracing::warn!(handler = name, %error, "cannot finish the log of a service");
    }
}

fn environment(http: &HttpInner, process: &SidecarProcess) -> Variables {
    let mut env = environment::base(&http.env, process.context.workdir());
    let mut set = |name: &str, value: String| env.insert(name.to_owned(), value);
    set("JOURNEYMAN_HANDLER", http.name.clone());
    match http.config.url.socket() {
        Some(socket) => set("JOURNEYMAN_SERVICE_SOCKET", socket.to_string_lossy().into_owned()),
        None => set("JOURNEYMAN_SERVICE_URL", http.base.to_string()),
    };
    env
}

async fn probe_health(http: Arc<HttpInner>) -> HealthCheckResult {
    let limit = http.config.health_interval.0.max(SERVICE_PROBE_TIMEOUT_MIN);
    let healthy = match &http.config.health {
        Some(path) => {
            let Some(url) = http.resolve_url(path) else { return HealthCheckResult::Unhealthy };
            match http.client.get(url).timeout(limit).send().await {
                Ok(response) => response.status().is_success(),
                // A single-threaded service cannot answer while it handles a request.
                Err(error) if error.is_timeout() && !error.is_connect() && Arc::strong_count(&http.in_flight) > 1 => {
                    return HealthCheckResult::Busy;
                }
                Err(_) => false,
            }
        }
        None => timeout(limit, can_connect(&http)).await.unwrap_or_default(),
    };
    if healthy { HealthCheckResult::Healthy } else { HealthCheckResult::Unhealthy }
}

async fn can_connect(http: &HttpInner) -> bool {
    match http.config.url.socket() {
        Some(socket) => UnixStream::connect(socket).await.is_ok(),
        None => match (http.base.host_str(), http.base.port_or_known_default()) {
            (Some(host), Some(port)) => TcpStream::connect((host.trim_matches(['[', ']']), port)).await.is_ok(),
            (_, _) => false,
        },
    }
}

const fn reason_text(reason: StopReason) -> &'static str {
    match reason {
        StopReason::StartupTimeout => "not healthy within `startup_timeout`",
        StopReason::Unhealthy => "unhealthy",
    }
}
