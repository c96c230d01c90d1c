//! Keeps a service there: asks after it, and, where the worker starts it, starts it, ends it and starts it again, as
//! [`crate::domain::service_supervisor`] has it.

use std::future::Future;
use std::os::unix::fs::FileTypeExt as _;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use tokio::io::AsyncReadExt as _;
use tokio::net::{TcpStream, UnixStream};
use tokio::time::timeout;
use url::Url;

use super::{HttpAvailability, HttpInner, ServiceProgram, Target};
use crate::domain::outcome::Cleanup;
use crate::domain::service_supervisor::{
    Effect, Event, HealthCheckResult, ManagedBy, ServiceAvailability, ServicePolicy, ServiceSupervisor as Rules,
    StopReason,
};
use crate::handler::SidecarContext;
use crate::handler::environment::Variables;
use crate::handler::process::{Input, Launch, RunLimits, RunningProcess};
use crate::handler::sidecar::{SidecarProcess, SidecarStatus};
use crate::host::program_path::PATH_DEFAULT;
use crate::limits::{
    SERVICE_ABSENT_PROBE_INTERVAL, SERVICE_CONNECTION_HELD_MIN, SERVICE_FAILED_PROBES_MAX,
    SERVICE_FAILURES_ALERT_AFTER, SERVICE_FAILURES_ALERT_EVERY, SERVICE_STARTING_PROBE_INTERVAL,
};

type BoxFuture<T> = Pin<Box<dyn Future<Output = T> + Send>>;

/// One life of the program.
struct RunningService {
    process: SidecarProcess,
    /// How it ended.
    exit: BoxFuture<String>,
}

/// What is waited for.
enum SupervisorEvent {
    StopRequested,
    Exited(String),
    Service(Event),
}

/// Keeps it there until the worker goes.
pub(super) async fn supervise(http: Arc<HttpInner>, beside: SidecarContext) {
    let settings = &http.config;
    let (keeping, ask_starting) = match settings.service {
        Some(_) => (ManagedBy::Worker, SERVICE_STARTING_PROBE_INTERVAL),
        None => (ManagedBy::External, SERVICE_ABSENT_PROBE_INTERVAL),
    };
    let policy = ServicePolicy {
        managed_by: keeping,
        startup_timeout: settings.startup_timeout,
        startup_check_interval: ask_starting,
        health_interval: settings.health_interval,
        failures_max: SERVICE_FAILED_PROBES_MAX,
    };
    let rules = Rules::new(policy, uuid::Uuid::new_v4().as_u64_pair().0, beside.clock().now());
    let log = settings.service.as_ref().map(|_| beside.log_path(&settings.name));
    let word = SidecarStatus { log_path: log, ..SidecarStatus::default() };
    Supervisor {
        http,
        context: beside,
        state: rules,
        status: word,
        running: None,
        probe: None,
        epoch: 0,
        start_count: 0,
        stop_reason: None,
    }
    .run()
    .await;
}

struct Supervisor {
    http: Arc<HttpInner>,
    context: SidecarContext,
    state: Rules,
    status: SidecarStatus,
    running: Option<RunningService>,
    probe: Option<BoxFuture<HealthCheckResult>>,
    /// How often it came up.
    epoch: u64,
    start_count: u64,
    /// Why it was told to end, if it was.
    stop_reason: Option<StopReason>,
}

impl Supervisor {
    async fn run(mut self) {
        if self.http.config.service.is_none() {
            self.set_status(
                ServiceAvailability::Down,
                format!("it is not started here, and does not answer at {}", self.http.display_address()),
            );
        }
        self.handle(Event::Tick);
        loop {
            while let Some(effect) = self.state.next_effect() {
                self.perform(effect).await;
            }
            match self.next_event().await {
                SupervisorEvent::StopRequested => return self.stop().await,
                SupervisorEvent::Exited(how) => self.on_exit(&how).await,
                SupervisorEvent::Service(event) => {
                    if let Event::HealthChecked(_) = event {
                        self.probe = None;
                    }
                    self.handle(event);
                }
            }
        }
    }

    fn handle(&mut self, event: Event) {
        self.state.handle(event, self.context.clock().now());
    }

    async fn next_event(&mut self) -> SupervisorEvent {
        let Self { running: life, probe: asking, context: beside, http, state: rules, .. } = self;
        let (due, clock) = (rules.next_deadline(), beside.clock());
        let ended = async {
            match life {
                Some(life) => life.exit.as_mut().await,
                None => std::future::pending().await,
            }
        };
        let answered = async {
            match asking {
                Some(question) => question.as_mut().await,
                None => std::future::pending().await,
            }
        };
        let time = async {
            match due {
                Some(at) => clock.sleep_until(at).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            biased;
            () = beside.stop_requested() => SupervisorEvent::StopRequested,
            how = ended => SupervisorEvent::Exited(how),
            health = answered => SupervisorEvent::Service(Event::HealthChecked(health)),
            () = http.connection_refused.notified() => SupervisorEvent::Service(Event::Unreachable),
            () = http.disconnected.notified() => SupervisorEvent::Service(Event::ConnectionBroken),
            () = time => SupervisorEvent::Service(Event::Tick),
        }
    }

    async fn perform(&mut self, effect: Effect) {
        let http = Arc::clone(&self.http);
        let (name, place) = (&http.config.name, http.display_address());
        match effect {
            Effect::Start => {
                let event = match self.start().await {
                    Ok(()) => Event::Started,
                    Err(error) => {
                        tracing::error!(handler = name, %error, "a service cannot be started");
                        self.handle(Event::StartFailed);
                        return self.report_failure(&format!("it cannot be started: {error}"));
                    }
                };
                self.handle(event);
            }
            Effect::CheckHealth => self.probe = Some(Box::pin(probe(Arc::clone(&self.http)))),
            Effect::Stop(why) => {
                tracing::error!(handler = name, "a service {}: it is ended, and started again", reason_text(why));
                self.stop_reason = Some(why);
                self.probe = None;
                if let (Some(life), Some(service)) = (&self.running, &http.config.service) {
                    life.process.stop(service.termination_grace, self.context.clock());
                }
            }
            Effect::Up => {
                tracing::info!(handler = name, at = place, "a service is up");
                self.epoch += 1;
                http.availability.send_replace(HttpAvailability::Up { epoch: self.epoch });
                self.set_status(ServiceAvailability::Up, format!("it answers at {place}"));
            }
            Effect::Down => {
                tracing::warn!(
                    handler = name,
                    at = place,
                    "a service is not there any more; nothing is claimed for it"
                );
                http.availability.send_replace(HttpAvailability::Down);
                self.set_status(ServiceAvailability::Down, format!("it does not answer at {place}"));
            }
        }
    }

    async fn start(&mut self) -> std::io::Result<()> {
        let http = Arc::clone(&self.http);
        let Some(service) = &http.config.service else { return Ok(()) };
        let name = &http.config.name;
        // What an earlier life has left would be in the way of most programs.
        if let Target::Unix(socket) = &http.config.target
            && socket.symlink_metadata().is_ok_and(|about| about.file_type().is_socket())
        {
            std::fs::remove_file(socket)?;
        }
        let one = self.context.prepare_process(name)?;
        let env = environment(&http, service, &one);
        let launch = Launch {
            argv: &service.exec,
            env: &env,
            workdir: one.folder(),
            input: Input::Null,
            message_channel: None,
            scope: one.context.scope(),
        };
        let running = tokio::select! {
            biased;
            () = self.context.stop_requested() => return Ok(()),
            running = RunningProcess::start(launch) => running?,
        };
        tracing::info!(handler = name, group = running.group(), log = %one.context.log().path().display(), "a service is started");
        let (context, bounds) =
            (one.context.clone(), RunLimits { run_time: None, termination_grace: service.termination_grace });
        let end = Box::pin(async move {
            match running.finish(bounds, &context).await {
                Ok(ended) => ended.describe(),
                Err(error) => error.to_string(),
            }
        });
        self.running = Some(RunningService { process: one, exit: end });
        self.stop_reason = None;
        self.status.restart_count = self.start_count;
        self.start_count += 1;
        if self.state.consecutive_failures() == 0 {
            self.set_status(ServiceAvailability::Down, "it was started, and does not answer yet".to_owned());
        }
        Ok(())
    }

    /// A life of it is over.
    async fn on_exit(&mut self, how: &str) {
        let Some(life) = self.running.take() else { return };
        self.probe = None;
        clean_up(&self.http.config.name, &life.process).await;
        let why = match self.stop_reason.take() {
            Some(why) => format!("it {} and was ended", reason_text(why)),
            None => format!("it ended ({how})"),
        };
        tracing::error!(handler = self.http.config.name, "a service: {why}");
        self.handle(Event::Exited);
        // Said at once: nothing of it is there.
        self.http.availability.send_replace(HttpAvailability::Down);
        self.report_failure(&why);
    }

    /// Says why it is not there, and tells the operator where that goes on.
    fn report_failure(&mut self, why: &str) {
        let failures = self.state.consecutive_failures();
        let log = self.status.log_path.as_ref().map(|log| log.display().to_string()).unwrap_or_default();
        let what = match failures {
            0 | 1 => format!("{why}; it is started again, and {log}.before is the log of that"),
            many => format!(
                "{why}, and did not last {many} times in a row; it is started again, later each time, and its logs are {log} \
                 and {log}.before"
            ),
        };
        if failures == SERVICE_FAILURES_ALERT_AFTER
            || (failures > 0 && failures.is_multiple_of(SERVICE_FAILURES_ALERT_EVERY))
        {
            tracing::error!(
                alert = "service",
                handler = self.http.config.name,
                failures,
                "[alert operator] a service does not last: {why}; nothing is claimed for it, and its log is {log}"
            );
        }
        self.set_status(ServiceAvailability::Down, what);
    }

    fn set_status(&mut self, serving: ServiceAvailability, what: String) {
        (self.status.availability, self.status.message) = (serving, what);
        self.context.set_status(self.status.clone());
    }

    /// The worker goes.
    async fn stop(mut self) {
        self.http.availability.send_replace(HttpAvailability::Down);
        self.probe = None;
        let Some(RunningService { process: one, exit: end }) = self.running.take() else { return };
        if let Some(service) = &self.http.config.service {
            one.stop(service.termination_grace, self.context.clock());
        }
        let how = end.await;
        clean_up(&self.http.config.name, &one).await;
        tracing::info!(handler = self.http.config.name, how, "a service has ended with its worker");
    }
}

/// Ends what a life has left, and puts its log together.
async fn clean_up(name: &str, one: &SidecarProcess) {
    match one.context.scope().clean_up().await {
        Cleanup::Complete => one.remove_record(),
        Cleanup::Incomplete => {
            tracing::error!(
                handler = name,
                "[alert operator] processes of a service may still be there; the next one is started all the same"
            );
        }
    }
    let log = one.context.log().clone();
    if let Ok(Err(error)) = tokio::task::spawn_blocking(move || log.finish()).await {
        tracing::warn!(handler = name, %error, "the log of a service is not whole");
    }
}

/// What it finds in its environment, each line over the one before.
fn environment(http: &HttpInner, service: &ServiceProgram, one: &SidecarProcess) -> Variables {
    let mut env = Variables::new();
    let mut set = |name: &str, value: String| env.insert(name.to_owned(), value);
    set("PATH", PATH_DEFAULT.to_owned());
    set("HOME", one.folder().to_string_lossy().into_owned());
    for (name, value) in &service.env {
        set(name, value.clone());
    }
    set("JOURNEYMAN_HANDLER", http.config.name.clone());
    match &http.config.target {
        Target::Tcp(url) => set("JOURNEYMAN_SERVICE_URL", url.to_string()),
        Target::Unix(socket) => set("JOURNEYMAN_SERVICE_SOCKET", socket.to_string_lossy().into_owned()),
    };
    env
}

/// Asks whether it is well.
async fn probe(http: Arc<HttpInner>) -> HealthCheckResult {
    probe_health(&http).await
}

/// Whether it answers after it has broken off. A process that is being ended may take connections still; it does not keep them.
pub(super) async fn holds_connection(http: &HttpInner) -> bool {
    if http.config.health_path.is_some() {
        return probe_health(http).await != HealthCheckResult::Unhealthy;
    }
    let mut byte = [0];
    let closed = async {
        match &http.config.target {
            Target::Unix(socket) => {
                if let Ok(mut open) = UnixStream::connect(socket).await {
                    drop(open.read(&mut byte).await);
                }
            }
            Target::Tcp(url) => {
                if let Some(mut open) = connect_tcp(url).await {
                    drop(open.read(&mut byte).await);
                }
            }
        }
    };
    timeout(SERVICE_CONNECTION_HELD_MIN, closed).await.is_err()
}

async fn probe_health(http: &HttpInner) -> HealthCheckResult {
    let well = match &http.config.health_path {
        Some(path) => {
            let Some(url) = http.resolve_url(path) else { return HealthCheckResult::Unhealthy };
            match http.client.get(url).timeout(http.config.health_timeout).send().await {
                Ok(response) => response.status().is_success(),
                // One that takes one request at a time is busy with it.
                Err(error)
                    if error.is_timeout() && !error.is_connect() && http.in_flight.load(Ordering::Relaxed) > 0 =>
                {
                    return HealthCheckResult::Busy;
                }
                Err(_) => false,
            }
        }
        None => timeout(http.config.health_timeout, can_connect(http)).await.unwrap_or_default(),
    };
    if well { HealthCheckResult::Healthy } else { HealthCheckResult::Unhealthy }
}

async fn can_connect(http: &HttpInner) -> bool {
    match &http.config.target {
        Target::Unix(socket) => UnixStream::connect(socket).await.is_ok(),
        Target::Tcp(url) => connect_tcp(url).await.is_some(),
    }
}

async fn connect_tcp(url: &Url) -> Option<TcpStream> {
    let (host, port) = (url.host_str()?, url.port_or_known_default()?);
    TcpStream::connect((host.trim_matches(['[', ']']), port)).await.ok()
}

const fn reason_text(why: StopReason) -> &'static str {
    match why {
        StopReason::StartupTimeout => "was not well within `startup_timeout`",
        StopReason::Unhealthy => "was no longer well",
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tokio::net::UnixListener;

    use super::super::{Http, HttpConfig};
    use super::*;

    #[tokio::test]
    async fn who_takes_a_connection_and_drops_it_is_not_there() {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("service.sock");
        let settings = HttpConfig {
            name: "service".to_owned(),
            target: Target::Unix(socket.clone()),
            health_path: None,
            health_interval: Duration::from_secs(1),
            health_timeout: Duration::from_secs(1),
            startup_timeout: Duration::from_secs(1),
            max_run_time: Duration::from_secs(1),
            forward_headers: Vec::new(),
            service: None,
        };
        let http = Http::new(settings).unwrap();
        assert!(!holds_connection(&http.inner).await, "nobody listens");
        let listener = UnixListener::bind(&socket).unwrap();
        assert!(holds_connection(&http.inner).await);
        let dropping = async {
            // The first is the one that lasted.
            while let Ok((open, _)) = listener.accept().await {
                drop(open);
            }
        };
        // Where the machine stalls it is not dropped in time, and seems to stay.
        let gone = timeout(Duration::from_secs(60), async { while holds_connection(&http.inner).await {} });
        let seen = tokio::select! {
            seen = gone => seen,
            () = dropping => unreachable!("it listens for ever"),
        };
        seen.expect("it is not there");
    }
}
