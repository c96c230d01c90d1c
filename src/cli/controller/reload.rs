//! Reloads the configuration of a running controller: all of it or nothing. Keys that need a restart are reported.

use std::future::Future;
use std::io;

use tokio::sync::Mutex;

use super::scaling_config;
use crate::cli::config_args::{ConfigArgs, ControllerFlags};
use crate::cli::reload::{changed_keys, on_hangup, reload_message};
use crate::config::pool::PoolConfig;
use crate::config::{Config, Environment};
use crate::controller::ControllerHandle;
use crate::observe::log;

pub(super) struct Reloader {
    settings: ConfigArgs<ControllerFlags>,
    environment: Environment,
    controls: Vec<ControllerHandle>,
    running: Mutex<Config>,
}

impl Reloader {
    pub(super) fn new(
        settings: ConfigArgs<ControllerFlags>,
        environment: Environment,
        controls: Vec<ControllerHandle>,
        running: Config,
    ) -> Self {
        Self { settings, environment, controls, running: Mutex::new(running) }
    }
    pub(super) async fn reload(&self) -> Result<String, String> {
        // Held, so that reloads do not overlap.
        let mut running = self.running.lock().await;
        let new = self.settings.load(&self.environment).map_err(|failure| failure.message)?.config;
        let before = running.clone();
        apply_reloadable(&mut running, &new);
        let (now, mut later) = (changed_keys(&before, &running), changed_keys(&running, &new));
        later.extend(changed_variables(&running, &new));
        if !now.is_empty() {
            for control in &self.controls {
                if let Some(pool) = running.pool.get(&control.pool) {
                    control.reconfigure(scaling_config(pool)).await;
                }
            }
            log::set_filter(&running.log);
        }
        let said = reload_message(&now, &later);
        tracing::info!("configuration read again; {said}");
        Ok(said)
    }
    pub(super) fn on_hangup(&self) -> io::Result<impl Future<Output = ()>> {
        on_hangup(async move || self.reload().await)
    }
}

// Values of variables are never shown.
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

fn apply_reloadable(running: &mut Config, new: &Config) {
    for (name, pool) in &mut running.pool {
        let Some(new) = new.pool.get(name) else { continue };
        let PoolConfig {
            unbind_delay, stop_delay, min, max, min_idle, concurrency, scale_down_delay, max_total, ..
        } = new.clone();
        let kept = pool.clone();
        *pool = PoolConfig {
            unbind_delay,
            stop_delay,
            min,
            max,
            min_idle,
            concurrency,
            scale_down_delay,
            max_total,
            ..kept
        };
    }
    running.log.level = new.log.level.clone();
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroU32;

    use super::*;

    #[test]
    fn numbers_and_delays_take_effect_and_the_rest_waits_for_a_restart() {
        let mut running = Config::default();
        running.pool.insert("core".to_owned(), PoolConfig::default());
        let mut new = running.clone();
        let pool = new.pool.get_mut("core").unwrap();
        (pool.max, pool.max_total, pool.unbind_delay) = (NonZeroU32::MAX, Some(3), "5s".parse().unwrap());
        pool.command = vec!["other".to_owned()];
        new.pool.insert("second".to_owned(), PoolConfig::default());
        let before = running.clone();
        apply_reloadable(&mut running, &new);
        assert_eq!(changed_keys(&before, &running), ["pool.core.max", "pool.core.max_total", "pool.core.unbind_delay"]);
        let later = changed_keys(&running, &new);
        assert!(later.contains(&"pool.core.command".to_owned()), "{later:?}");
        assert!(later.contains(&"pool.second (new)".to_owned()), "{later:?}");
        assert!(changed_keys(&new, &running).contains(&"pool.second (gone)".to_owned()));
        assert!(!later.contains(&"pool.core.max".to_owned()), "{later:?}");
    }

    #[test]
    fn a_variable_of_workers_with_another_value_is_named_and_its_value_is_not() {
        let mut running = Config::default();
        let mut pool = PoolConfig::default();
        let variable = |value: &str| crate::config::pool::EnvValue(value.to_owned());
        pool.env.extend([("SAME".to_owned(), variable("1")), ("OTHER".to_owned(), variable("1"))]);
        running.pool.insert("core".to_owned(), pool);
        let mut new = running.clone();
        new.pool.get_mut("core").unwrap().env.insert("OTHER".to_owned(), variable("2"));
        assert_eq!(changed_keys(&running, &new), [""; 0]);
        assert_eq!(changed_variables(&running, &new), ["pool.core.env.OTHER"]);
    }
}
