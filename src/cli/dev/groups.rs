//! `journeyman dev --rabbitmq URI`: a controller, the workers that it starts on this machine, and a client that asks under keys
//! that are cold, warm, busy and odd, until every call is answered and nobody is left.
//!
//! The pool has a name of its own, and everything of it is taken from the broker again.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::time::Duration;

use lapin::options::{ExchangeDeleteOptions, QueueDeleteOptions};
use rustix::process::{Pid, Signal, kill_process_group};
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};
use tokio_util::sync::CancellationToken;

use super::super::controller::pool_config;
use super::super::exit::{Exit, ExitResult, Failure};
use super::super::output;
use super::super::signals::ExitSignals;
use super::play::{self, Play};
use super::tempdir::{TempDir, WORK_DIR};
use crate::amqp;
use crate::client::RpcRequest;
use crate::config::pool::PoolConfig;
use crate::config::values::{File, Secret, Span};
use crate::config::{Config, Environment};
use crate::controller::status::Role;
use crate::controller::{self, ControllerConfig, ControllerHandle, ScalingConfig};
use crate::domain::group::{Key, scale, tracker};
use crate::limits::{AMQP_CALL_TIMEOUT, DEMO_CALL_TIMEOUT, DEMO_REDRAW_INTERVAL, DEMO_SHUTDOWN_TIMEOUT};

/// What the workers run: they answer with the key that they are for, and take their time under one of them.
const ECHO: &str = r#"#!/bin/sh
[ "$WORKER_KEY" = busy ] && sleep 0.5
printf '{"type":"answer","json":{"key":"%s"}}\n' "$WORKER_KEY" >&3
"#;
/// So soon after its last request a queue is unbound.
const UNBIND: Duration = Duration::from_secs(3);
/// So soon after that its workers end.
const STOP: Duration = Duration::from_secs(1);

/// Runs the demo to its end, and clears up behind it.
///
/// # Errors
///
/// A broker that cannot be used, and what cannot be cleared up.
pub(super) async fn run(uri: &str, room: &TempDir, mut signals: ExitSignals, environment: &Environment) -> ExitResult {
    let stage = Stage::build(uri, room.path(), environment)?;
    // Nobody is to wait for the whole of the demo to hear of this.
    let reached = stage.settings.broker.connect("journeyman dev").await;
    let connection = reached.map_err(|refused| Failure::new(Exit::Unreachable, refused.message))?;
    connection.close(200, "done".into()).await.ok();
    output::line(&format!(
        "broker {}, pool {}: a queue is unbound {} s after its last request, and gone {} s later",
        stage.settings.broker.display_url(),
        stage.settings.pool,
        UNBIND.as_secs(),
        STOP.as_secs()
    ))?;
    let (control, asks) = ControllerHandle::new(&stage.settings.pool);
    let leave = CancellationToken::new();
    let mut controlling = JoinSet::new();
    controlling.spawn(controller::run(stage.settings.clone(), asks, leave.clone()));
    let mut play = Play::new(&stage, environment);
    let ended = tokio::select! {
        ended = play.show(&control) => ended,
        () = signals.next() => Err(Failure::new(Exit::Failed, "ended before every call was answered")),
        _ = controlling.join_next() => Err(Failure::new(Exit::Internal, "the pool is no longer controlled")),
    };
    stage.close(&control).await;
    leave.cancel();
    while controlling.join_next().await.is_some() {}
    let cleared = stage.clear().await;
    play.conclude()?;
    let ended = ended?;
    cleared?;
    Ok(ended)
}

/// What the demo plays on.
pub(super) struct Stage {
    pub(super) settings: ControllerConfig,
}

impl Stage {
    fn build(uri: &str, room: &Path, environment: &Environment) -> Result<Self, Failure> {
        let unfit = |error| Failure::new(Exit::HostUnusable, format!("cannot write in {}: {error}", room.display()));
        let (echo, worker) = (room.join("echo.sh"), room.join("worker.toml"));
        let executable = fs::Permissions::from_mode(0o700);
        fs::write(&echo, ECHO).and_then(|()| fs::set_permissions(&echo, executable)).map_err(unfit)?;
        let text =
            format!("[handler.echo]\nkind = \"program\"\nexec = [{echo:?}]\n[host]\nmetadata_service = \"off\"\n");
        fs::write(&worker, text).map_err(unfit)?;
        let program = std::env::current_exe().map_err(unfit)?;
        let start = "exec \"$0\" worker --config \"$1\" --work-dir \"$2/$WORKER_ID\"";
        let paths = [&program, &worker, &room.join(WORK_DIR)].map(|path| path.display().to_string());
        let pool = PoolConfig {
            command: ["/bin/sh", "-c", start].into_iter().map(str::to_owned).chain(paths).collect(),
            state_dir: File(room.join("pool")),
            unbind_delay: Span(UNBIND),
            stop_delay: Span(STOP),
            scale_down_delay: Span(UNBIND),
            termination_grace: Span(DEMO_SHUTDOWN_TIMEOUT / 3),
            max: 2,
            ..PoolConfig::default()
        };
        let name = format!("dev-{:.8}", uuid::Uuid::new_v4().simple().to_string());
        let mut config = Config::default();
        config.amqp.uri = Some(Secret::new(uri));
        Ok(Self { settings: pool_config(&name, &pool, &config, environment)? })
    }

    /// A request under a key.
    pub(super) fn call(&self, key: &str) -> RpcRequest {
        RpcRequest {
            exchange: self.settings.names.requests_exchange(),
            routing_key: key.to_owned(),
            path: Some("/echo".to_owned()),
            body: b"{}".to_vec(),
            timeout: DEMO_CALL_TIMEOUT,
            ..RpcRequest::default()
        }
    }

    /// Has everybody go, and waits for that as long as it takes a worker to be killed.
    async fn close(&self, control: &ControllerHandle) {
        let delays = tracker::TrackerPolicy { unbind_delay: Duration::ZERO, stop_delay: Duration::ZERO };
        let limits = scale::ScaleLimits { min: 0, ..self.settings.scaling.limits };
        control.reconfigure(ScalingConfig { delays, limits, ..self.settings.scaling }).await;
        let emptied = async {
            while control.status().await.is_some_and(|seen| seen.role == Role::Active && !seen.groups.is_empty()) {
                sleep(DEMO_REDRAW_INTERVAL).await;
            }
        };
        // Who has not gone by then is killed.
        timeout(DEMO_SHUTDOWN_TIMEOUT, emptied).await.ok();
    }

    /// Ends who is left, and takes what the pool has from the broker.
    async fn clear(&self) -> Result<(), Failure> {
        self.kill();
        let names = &self.settings.names;
        let of_keys = play::KEYS.iter().filter_map(|key| names.request_queue(&Key::new(key)?));
        let queues: Vec<String> =
            of_keys.chain([names.orphan_queue(), names.dead_letter_queue(), names.poison_queue()]).collect();
        let exchanges = [
            names.requests_exchange(),
            names.orphan_exchange(),
            names.dead_letter_exchange(),
            names.activity_exchange(),
        ];
        let clearing = async {
            let connection = self.settings.broker.connect("journeyman dev").await.map_err(|refused| refused.message)?;
            let shown = |error: lapin::Error| amqp::error_text(&error);
            let channel = connection.create_channel().await.map_err(shown)?;
            for queue in queues {
                channel.queue_delete(queue.into(), QueueDeleteOptions::default()).await.map_err(shown)?;
            }
            for exchange in exchanges {
                channel.exchange_delete(exchange.into(), ExchangeDeleteOptions::default()).await.map_err(shown)?;
            }
            connection.close(200, "done".into()).await.ok();
            Ok::<_, String>(())
        };
        let failed = |why: String| {
            let pool = &self.settings.pool;
            Failure::new(Exit::Failed, format!("what the broker has of the pool {pool} could not be deleted: {why}"))
        };
        match timeout(AMQP_CALL_TIMEOUT, clearing).await {
            Ok(cleared) => cleared.map_err(failed),
            Err(_) => Err(failed(format!("not done in {AMQP_CALL_TIMEOUT:?}"))),
        }
    }

    /// Workers outlive their controller; those of a demo do not.
    fn kill(&self) {
        for entry in fs::read_dir(&self.settings.driver.folder).into_iter().flatten().flatten() {
            let record = fs::read(entry.path()).unwrap_or_default();
            let record: serde_json::Value = serde_json::from_slice(&record).unwrap_or_default();
            let pid = record.get("pid").and_then(serde_json::Value::as_i64).and_then(|pid| i32::try_from(pid).ok());
            if let Some(group) = pid.and_then(Pid::from_raw) {
                // It may have ended meanwhile.
                kill_process_group(group, Signal::KILL).ok();
            }
        }
    }
}
