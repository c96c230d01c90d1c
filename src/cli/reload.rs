//! Reloads the configuration of a running worker or controller: all of it or nothing. Keys that need a restart are reported.

use std::collections::{BTreeMap, BTreeSet};
use std::convert::Infallible;

use sd_notify::NotifyState;
use serde_json::Value;
use tokio::signal::unix::{Signal, SignalKind};
use tokio::sync::mpsc;

use super::config_args::{ConfigArgs, FlagSet};
use super::exit::Failure;
use super::signals::subscribe;
use super::worker_setup;
use crate::config::Environment;
use crate::config::pool::PoolConfig;
use crate::config::schema::Config;
use crate::control::worker_api::{ReloadRequest, ReloadSender};
use crate::host::service_manager::NotifySender;
use crate::observe::log;
use crate::worker::{Control, ReloadResult};

/// What a reload changes.
pub(super) trait ReloadTarget {
    /// Copies the values that take effect without a restart.
    fn copy_reloadable(running: &mut Config, new: &Config);
    async fn apply(&self, running: &Config);
    fn on_start(&self) {}
    fn on_end(&self, _result: &Result<String, String>) {}
}

/// Reloads at every HUP and every request of the control socket. A reload is finished even if its client disconnects.
pub(super) struct Reloader<F: FlagSet, T> {
    settings: ConfigArgs<F>,
    environment: Environment,
    running: Config,
    target: T,
    hangups: Signal,
    requests: mpsc::Receiver<ReloadRequest>,
}

impl<F: FlagSet, T: ReloadTarget> Reloader<F, T> {
    pub(super) fn new(
        settings: ConfigArgs<F>,
        environment: &Environment,
        running: Config,
        target: T,
    ) -> Result<(Self, ReloadSender), Failure> {
        let hangups = subscribe(SignalKind::hangup())?;
        let (sender, requests) = mpsc::channel(1);
        Ok((Self { settings, environment: environment.clone(), running, target, hangups, requests }, sender))
    }

    pub(super) async fn run(mut self) -> Infallible {
        loop {
            let reply = tokio::select! {
                _ = self.hangups.recv() => None,
                Some(reply) = self.requests.recv() => Some(reply),
            };
            self.target.on_start();
            let result = self.reload().await;
            self.target.on_end(&result);
            match (reply, &result) {
                // The client may have disconnected.
                (Some(reply), _) => drop(reply.send(result)),
                (None, Err(error)) => tracing::error!("configuration rejected, keeping the current one: {error}"),
                (None, Ok(_)) => {}
            }
        }
    }

    async fn reload(&mut self) -> Result<String, String> {
        let new = self.settings.load(&self.environment).map_err(|failure| failure.message)?.config;
        let before = self.running.clone();
        T::copy_reloadable(&mut self.running, &new);
        let applied = changed_keys(&before, &self.running);
        let mut pending = changed_keys(&self.running, &new);
        pending.extend(changed_variables(&self.running, &new));
        if !applied.is_empty() {
            self.target.apply(&self.running).await;
            log::set_filter(&self.running.log);
        }
        let message = match (applied.is_empty(), pending.is_empty()) {
            (true, true) => "the configuration has not changed".to_owned(),
            (false, true) => format!("changed: {}", applied.join(", ")),
            (true, false) => format!("nothing has changed; a restart is needed for {}", pending.join(", ")),
            (false, false) => {
                format!("changed: {}; a restart is needed for {}", applied.join(", "), pending.join(", "))
            }
        };
        tracing::info!("configuration reloaded; {message}");
        Ok(message)
    }
}

pub(super) struct WorkerTarget {
    pub(super) control: Control,
    pub(super) service_manager: Option<NotifySender>,
}

impl ReloadTarget for WorkerTarget {
    fn copy_reloadable(running: &mut Config, new: &Config) {
        let kept = std::mem::replace(&mut running.worker, new.worker.clone());
        running.worker.id = kept.id;
        running.worker.group = kept.group;
        running.worker.work_dir = kept.work_dir;
        let kept = std::mem::replace(&mut running.host, new.host.clone());
        running.host.containment = kept.containment;
        running.host.on_cleanup_failure = kept.on_cleanup_failure;
        running.host.task_memory = kept.task_memory;
        running.host.task_pids = kept.task_pids;
        running.host.task_disk = kept.task_disk;
        running.host.metadata_service = kept.metadata_service;
        running.host.metadata_endpoint = kept.metadata_endpoint;
        running.host.termination_file = kept.termination_file;
        running.log.task_log_max = new.log.task_log_max;
        running.log.level = new.log.level.clone();
    }

    async fn apply(&self, running: &Config) {
        self.control.reconfigure(worker_setup::worker_config(running)).await;
    }

    fn on_start(&self) {
        if let Some(sender) = &self.service_manager
            && let Ok(now) = NotifyState::monotonic_usec_now()
        {
            sender.send(&[NotifyState::Reloading, now]);
        }
    }

    fn on_end(&self, result: &Result<String, String>) {
        self.control.count_reload(if result.is_ok() { ReloadResult::Applied } else { ReloadResult::Rejected });
        if let Some(sender) = &self.service_manager {
            // systemd has no notification for a failed reload. Without READY=1 it would wait and then kill the worker.
            let rejected = NotifyState::Status("configuration rejected, keeping the current one; the log says why");
            match result {
                Ok(_) => sender.send(&[NotifyState::Ready]),
                Err(_) => sender.send(&[NotifyState::Ready, rejected]),
            }
        }
    }
}

/// The keys whose values differ, and the named tables that only one of the two has.
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

/// The named table of a key, such as `source.ci`.
fn named_table(key: &str) -> Option<&str> {
    let (kind, rest) = key.split_once('.')?;
    let (name, _) = rest.split_once('.')?;
    key.get(..kind.len() + 1 + name.len()).filter(|_| NAMED_TABLES.contains(&kind))
}

const NAMED_TABLES: [&str; 4] = ["source", "handler", "pool", "demand"];

fn has_table(flat: &BTreeMap<String, Value>, named: &str) -> bool {
    flat.keys().any(|key| named_table(key) == Some(named))
}

/// Every value by its dotted key. Secrets are masked, so a changed one is not seen.
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

/// The changed variables of pools, whose values are masked.
fn changed_variables(running: &Config, new: &Config) -> Vec<String> {
    let of_pool = |(name, pool): (&String, &PoolConfig)| {
        let before = running.pool.get(name).map(|before| &before.env);
        let other = |(variable, value): (&String, _)| {
            let is_other = before?.get(variable).is_some_and(|before| before != value);
            is_other.then(|| format!("pool.{name}.env.{variable}"))
        };
        pool.env.iter().filter_map(other).collect::<Vec<_>>()
    };
    new.pool.iter().flat_map(of_pool).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::pool::EnvValue;

    #[test]
    fn keys_that_take_effect_are_distinguished_from_keys_that_need_a_restart() {
        let mut running = Config::default();
        let mut new = Config::default();
        new.worker.capacity = 7;
        new.worker.group = "elsewhere".parse().unwrap();
        new.log.level = "debug".parse().unwrap();
        new.host.termination_file = Some("/run/host-goes".parse().unwrap());
        let before = running.clone();
        WorkerTarget::copy_reloadable(&mut running, &new);
        assert_eq!(changed_keys(&before, &running), ["log.level", "worker.capacity"]);
        assert_eq!(changed_keys(&running, &new), ["host.termination_file", "worker.group"]);
    }

    #[test]
    fn a_changed_variable_of_a_pool_is_named_without_its_value() {
        let mut running = Config::default();
        let mut pool = PoolConfig::default();
        let variable = |value: &str| EnvValue(value.to_owned());
        pool.env.extend([("SAME".to_owned(), variable("1")), ("OTHER".to_owned(), variable("1"))]);
        running.pool.insert("core".to_owned(), pool);
        let mut new = running.clone();
        new.pool.get_mut("core").unwrap().env.insert("OTHER".to_owned(), variable("2"));
        assert_eq!(changed_keys(&running, &new), [""; 0]);
        assert_eq!(changed_variables(&running, &new), ["pool.core.env.OTHER"]);
    }
}
