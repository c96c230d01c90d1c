//! Reloads the configuration of a running worker or controller: all of it or nothing. Keys that need a restart are reported.

use std::collections::{BTreeMap, BTreeSet};
use std::convert::Infallible;

use sd_notify::NotifyState;
use serde_json::{Map, Value};
use tokio::signal::unix::{Signal, SignalKind};
use tokio::sync::mpsc;

use super::config_args::{ConfigArgs, FlagSet};
use super::exit::Failure;
use super::signals::subscribe;
use super::worker_setup;
use crate::config::schema::Config;
use crate::control::worker_api::{ReloadRequest, ReloadSender};
use journeyman_platform::host::service_manager::ServiceManager;
use journeyman_platform::log;
use journeyman_platform::settings::Environment;
use journeyman_worker::engine::{Control, ReloadResult};
use journeyman_worker::source::taskcluster::Api;

/// What a reload changes.
pub(super) trait ReloadTarget {
    /// Copies the values that take effect without a restart.
    fn copy_reloadable(running: &mut Config, new: &Config);
    async fn apply(&self, running: &Config);
    /// Reads credentials in files again; returns the names of the sources whose credentials have changed.
    fn reread_credentials(&self) -> Vec<String> {
        Vec::new()
    }
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
        let pending = changed_keys(&self.running, &new);
        if !applied.is_empty() {
            self.target.apply(&self.running).await;
            log::set_filter(&self.running.log);
        }
        let renewed = self.target.reread_credentials();
        let part = |what: &str, keys: &[String]| (!keys.is_empty()).then(|| format!("{what} {}", keys.join(", ")));
        let parts =
            [part("changed:", &applied), part("new credentials:", &renewed), part("a restart is needed for", &pending)];
        let message = match parts.into_iter().flatten().collect::<Vec<_>>() {
            parts if parts.is_empty() => "the configuration has not changed".to_owned(),
            parts => parts.join("; "),
        };
        tracing::info!("configuration reloaded; {message}");
        Ok(message)
    }
}

pub(super) struct WorkerTarget {
    pub(super) control: Control,
    pub(super) service_manager: Option<ServiceManager>,
    pub(super) apis: BTreeMap<String, Api>,
}

impl ReloadTarget for WorkerTarget {
    fn copy_reloadable(running: &mut Config, new: &Config) {
        let kept = std::mem::replace(&mut running.worker, new.worker.clone());
        running.worker.id = kept.id;
        running.worker.group = kept.group;
        running.worker.work_dir = kept.work_dir;
        running.worker.termination_grace = kept.termination_grace;
        running.worker.exit_codes = kept.exit_codes;
        let (host, new_host) = (&mut running.host, &new.host);
        host.min_free_disk = new_host.min_free_disk;
        host.min_free_memory = new_host.min_free_memory;
        host.on_termination_notice = new_host.on_termination_notice;
        running.log.task_log_max = new.log.task_log_max;
        running.log.task_log_times = new.log.task_log_times;
        running.log.level = new.log.level.clone();
    }

    async fn apply(&self, running: &Config) {
        self.control.reconfigure(worker_setup::worker_config(running)).await;
    }

    fn reread_credentials(&self) -> Vec<String> {
        let renewed = self.apis.iter().filter(|(_, api)| api.reread_credentials());
        renewed.map(|(name, _)| format!("source.{name}")).collect()
    }

    fn on_start(&self) {
        if let Some(manager) = &self.service_manager
            && let Ok(now) = NotifyState::monotonic_usec_now()
        {
            manager.send(&[NotifyState::Reloading, now]);
        }
    }

    fn on_end(&self, result: &Result<String, String>) {
        self.control.count_reload(if result.is_ok() { ReloadResult::Applied } else { ReloadResult::Rejected });
        if let Some(manager) = &self.service_manager {
            // systemd has no notification for a failed reload. Without READY=1 it would wait and then kill the worker.
            let rejected = NotifyState::Status("configuration rejected, keeping the current one; the log says why");
            match result {
                Ok(_) => manager.send(&[NotifyState::Ready]),
                Err(_) => manager.send(&[NotifyState::Ready, rejected]),
            };
        }
    }
}

/// The keys with different values, and the tables that only one of the two has. Secrets are masked, so a change is not seen.
pub(super) fn changed_keys(one: &Config, other: &Config) -> Vec<String> {
    let value = |config| serde_json::to_value(config).unwrap_or_default();
    let mut keys = Vec::new();
    push_changes("", &value(one), &value(other), &mut keys);
    // The values of variables are masked too.
    for (name, pool) in &other.pool {
        let Some(before) = one.pool.get(name) else { continue };
        let differs =
            |(variable, value): &(&String, _)| before.env.get(*variable).is_some_and(|before| before != *value);
        keys.extend(pool.env.iter().filter(differs).map(|(variable, _)| format!("pool.{name}.env.{variable}")));
    }
    keys
}

fn push_changes(key: &str, one: &Value, other: &Value, keys: &mut Vec<String>) {
    if let (Value::Object(one), Value::Object(other)) = (one, other) {
        for name in one.keys().chain(other.keys()).collect::<BTreeSet<_>>() {
            let key = if key.is_empty() { name.clone() } else { format!("{key}.{name}") };
            let value = |table: &Map<String, Value>| table.get(name).cloned().unwrap_or_default();
            push_changes(&key, &value(one), &value(other), keys);
        }
    } else if one != other {
        keys.push(key.to_owned());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use journeyman_services::controller::config::{EnvValue, PoolConfig};

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
        assert_eq!(changed_keys(&running, &new), ["pool.core.env.OTHER"]);
    }
}
