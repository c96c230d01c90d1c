//! Reading the configuration again while a worker runs: all of it is accepted or none, and what only a restart can change
//! is said by name.

use std::collections::{BTreeMap, BTreeSet};
use std::future::Future;
use std::io;

use sd_notify::NotifyState;
use serde_json::Value;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::Mutex;

use super::config_args::{ConfigArgs, WorkerFlags};
use super::worker_setup;
use crate::config::Environment;
use crate::config::schema::Config;
use crate::host::service_manager::NotifySender;
use crate::observe::log;
use crate::worker::{Control, ReloadResult};

/// What a service manager shows after a refusal, until something else is to be said.
const REFUSED_STATUS: &str = "the configuration is refused and the old one stays; the log says why";

/// What reads the configuration again.
pub(super) struct Reloader {
    settings: ConfigArgs<WorkerFlags>,
    environment: Environment,
    control: Control,
    /// What the worker works with.
    running: Mutex<Config>,
    /// Where a service manager wants to hear of it.
    notify_sender: Option<NotifySender>,
}

impl Reloader {
    /// For a worker that was started with `running`.
    pub(super) fn new(
        settings: ConfigArgs<WorkerFlags>,
        environment: Environment,
        control: Control,
        running: Config,
        notify_sender: Option<NotifySender>,
    ) -> Self {
        Self { settings, environment, control, running: Mutex::new(running), notify_sender }
    }

    /// Reads it again. Answers with what has changed, and what waits for a restart.
    ///
    /// # Errors
    ///
    /// Everything that is wrong with it; nothing has changed then.
    pub(super) async fn reload(&self) -> Result<String, String> {
        if let Some(sender) = &self.notify_sender
            && let Ok(now) = NotifyState::monotonic_usec_now()
        {
            sender.send(&[NotifyState::Reloading, now]);
        }
        let ended = self.load_and_apply().await;
        if let Some(sender) = &self.notify_sender {
            // systemd has no notification for a failed reload. Without READY=1 it would wait and then kill the worker.
            let refused = ended.is_err().then_some(NotifyState::Status(REFUSED_STATUS));
            let states: Vec<NotifyState<'_>> = std::iter::once(NotifyState::Ready).chain(refused).collect();
            sender.send(&states);
        }
        self.control.count_reload(if ended.is_ok() { ReloadResult::Applied } else { ReloadResult::Rejected });
        ended
    }

    async fn load_and_apply(&self) -> Result<String, String> {
        let mut running = self.running.lock().await;
        let new = self.settings.load(&self.environment).map_err(|failure| failure.message)?.config;
        let before = running.clone();
        apply_reloadable(&mut running, &new);
        let (now, later) = (changed_keys(&before, &running), changed_keys(&running, &new));
        if !now.is_empty() {
            self.control.reconfigure(worker_setup::worker_config(&running)).await;
            log::set_filter(&running.log);
        }
        drop(running);
        let said = reload_message(&now, &later);
        tracing::info!("configuration read again; {said}");
        Ok(said)
    }

    /// Reads it again at every HUP. Never resolves.
    ///
    /// # Errors
    ///
    /// Where no handler can be installed.
    pub(super) fn on_hangup(&self) -> io::Result<impl Future<Output = ()>> {
        on_hangup(async move || self.reload().await)
    }
}

/// Reads a configuration again at every HUP. Never resolves.
///
/// # Errors
///
/// Where no handler can be installed.
pub(super) fn on_hangup(reload: impl AsyncFn() -> Result<String, String>) -> io::Result<impl Future<Output = ()>> {
    let mut hup = signal(SignalKind::hangup())?;
    Ok(async move {
        while hup.recv().await.is_some() {
            if let Err(error) = reload().await {
                tracing::error!("the configuration is refused and the old one stays: {error}");
            }
        }
        std::future::pending::<()>().await;
    })
}

/// What came of it, by keys: those that have changed, and those that wait for a restart.
pub(super) fn reload_message(now: &[String], later: &[String]) -> String {
    match (now.is_empty(), later.is_empty()) {
        (true, true) => "the configuration is as it was".to_owned(),
        (false, true) => format!("changed: {}", now.join(", ")),
        (true, false) => format!("nothing has changed; a restart is needed for {}", later.join(", ")),
        (false, false) => format!("changed: {}; a restart is needed for {}", now.join(", "), later.join(", ")),
    }
}

/// The keys that take effect while a worker runs.
fn apply_reloadable(running: &mut Config, new: &Config) {
    let kept = running.worker.clone();
    running.worker = new.worker.clone();
    running.worker.id = kept.id;
    running.worker.group = kept.group;
    running.worker.work_dir = kept.work_dir;
    let established = std::mem::replace(&mut running.host, new.host.clone());
    running.host.containment = established.containment;
    running.host.on_cleanup_failure = established.on_cleanup_failure;
    running.host.task_memory = established.task_memory;
    running.host.task_pids = established.task_pids;
    running.host.task_disk = established.task_disk;
    running.host.metadata_service = established.metadata_service;
    running.host.metadata_endpoint = established.metadata_endpoint;
    running.host.termination_file = established.termination_file;
    running.log.task_log_max = new.log.task_log_max;
    running.log.level = new.log.level.clone();
}

/// The keys whose values differ, and the tables that have come or gone as a whole.
pub(super) fn changed_keys(one: &Config, other: &Config) -> Vec<String> {
    let (one, other) = (flatten(one), flatten(other));
    let keys = one.keys().chain(other.keys().filter(|key| !one.contains_key(*key)));
    let differ = keys.filter(|key| one.get(*key) != other.get(*key));
    let named = |key: &String| match named_table(key) {
        Some(table) if !has_table(&one, table) => format!("{table} (new)"),
        Some(table) if !has_table(&other, table) => format!("{table} (gone)"),
        Some(_) | None => key.clone(),
    };
    let named: BTreeSet<String> = differ.map(named).collect();
    named.into_iter().collect()
}

/// The table with a name of its own that a key is in, such as `source.ci`.
fn named_table(key: &str) -> Option<&str> {
    let (kind, rest) = key.split_once('.')?;
    let (name, _) = rest.split_once('.')?;
    key.get(..kind.len() + 1 + name.len()).filter(|_| NAMED_TABLES.contains(&kind))
}

/// Tables of tables whose names are the operator's.
const NAMED_TABLES: [&str; 4] = ["source", "handler", "pool", "demand"];

fn has_table(flat: &BTreeMap<String, Value>, named: &str) -> bool {
    flat.keys().any(|key| named_table(key) == Some(named))
}

/// Every value by its dotted key. Secrets are masked, so that a changed one is not seen here; its file is read at a start.
fn flatten(config: &Config) -> BTreeMap<String, Value> {
    let mut flat = BTreeMap::new();
    flatten_into("", serde_json::to_value(config).unwrap_or_default(), &mut flat);
    flat
}

fn flatten_into(key: &str, value: Value, flat: &mut BTreeMap<String, Value>) {
    match value {
        Value::Object(entries) => {
            for (name, value) in entries {
                let key = if key.is_empty() { name } else { format!("{key}.{name}") };
                flatten_into(&key, value, flat);
            }
        }
        value @ (Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) | Value::Array(_)) => {
            flat.insert(key.to_owned(), value);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_takes_effect_and_what_waits_is_told_apart() {
        let mut running = Config::default();
        let mut new = Config::default();
        new.worker.capacity = 7;
        new.worker.group = "elsewhere".parse().unwrap();
        new.log.level = "debug".parse().unwrap();
        new.host.termination_file = Some("/run/host-goes".parse().unwrap());
        let before = running.clone();
        apply_reloadable(&mut running, &new);
        assert_eq!(changed_keys(&before, &running), ["log.level", "worker.capacity"]);
        assert_eq!(changed_keys(&running, &new), ["host.termination_file", "worker.group"]);
    }
}
