//! The keys of a controller that a reload changes.

use crate::cli::reloader::ReloadTarget;
use crate::config::Config;
use journeyman_services::controller::ControllerHandle;

pub(super) struct PoolsTarget(pub(super) Vec<ControllerHandle>);

impl ReloadTarget for PoolsTarget {
    fn copy_reloadable(running: &mut Config, new: &Config) {
        for (name, pool) in &mut running.pool {
            let Some(new) = new.pool.get(name) else { continue };
            (pool.unbind_delay, pool.stop_delay) = (new.unbind_delay, new.stop_delay);
            (pool.min, pool.max, pool.min_idle) = (new.min, new.max, new.min_idle);
            (pool.concurrency, pool.scale_down_delay) = (new.concurrency, new.scale_down_delay);
            pool.max_total = new.max_total;
        }
        running.log.level = new.log.level.clone();
    }

    async fn apply(&self, running: &Config) {
        for control in &self.0 {
            if let Some(pool) = running.pool.get(&control.pool) {
                control.reconfigure(pool.clone()).await;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroU32;

    use super::*;
    use crate::cli::reloader::changed_keys;
    use journeyman_services::controller::config::PoolConfig;

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
        PoolsTarget::copy_reloadable(&mut running, &new);
        assert_eq!(changed_keys(&before, &running), ["pool.core.max", "pool.core.max_total", "pool.core.unbind_delay"]);
        let later = changed_keys(&running, &new);
        assert!(later.contains(&"pool.core.command".to_owned()), "{later:?}");
        assert!(later.contains(&"pool.second".to_owned()), "{later:?}");
        assert!(!later.contains(&"pool.core.max".to_owned()), "{later:?}");
    }
}
