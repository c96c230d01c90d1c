//! What people order of the controller of a pool, and what it says to that.

use std::time::Duration;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::view::{self, Role};
use super::{Controller, Means, Scaling};
use crate::domain::group::orders::{Numbers, Pause};
use crate::domain::group::pool::Event;
use crate::domain::group::{KEY_BYTES_MAX, Key};
use crate::domain::time::Instant;
use crate::limits::{CONTROLLER_GROUPS_MAX, ORDER_SPAN_MAX};

/// What can be ordered of a pool.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub enum Order {
    /// Start nobody and tell nobody to go, in one group or in all of them.
    Pause {
        /// Which group; absent for the whole pool.
        #[serde(default)]
        key: Option<String>,
        /// For how long; absent for until it is resumed.
        #[serde(default)]
        seconds: Option<f64>,
    },
    /// Take a pause back; that of the whole pool takes those of its groups with it.
    Resume {
        /// Which group; absent for the whole pool.
        #[serde(default)]
        key: Option<String>,
    },
    /// Other numbers of workers than those of the configuration, for a time. A group that is not there is made where `min` is more
    /// than nobody.
    Scale {
        /// Which group.
        key: String,
        /// So many at least; absent for that of the configuration.
        #[serde(default)]
        min: Option<u32>,
        /// So many at most; absent for that of the configuration.
        #[serde(default)]
        max: Option<u32>,
        /// For how long; 0 takes such an order back.
        seconds: f64,
    },
    /// Tell a worker to go: it finishes what it holds. Another one takes its place where one is wanted.
    Drain {
        /// Its name.
        worker: String,
    },
    /// Forget that workers of a group did not last, and start the next one now.
    Retry {
        /// Which group.
        key: String,
    },
}

/// Why an order is not obeyed, as a sentence.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Refused {
    /// There is nothing of that name.
    Missing(String),
    /// It cannot be meant.
    Senseless(String),
    /// It cannot be done as things stand.
    Untimely(String),
}

impl Controller {
    /// Obeys. Answers with what comes of it.
    pub(super) fn obey(&mut self, order: Order, by: &str) -> Result<String, Refused> {
        let now = self.clock.now();
        if self.role == Role::Standby {
            let text = "it stands by: another controller has this pool, and that one can be told";
            return Err(Refused::Untimely(text.to_owned()));
        }
        let said = match order {
            Order::Pause { key, seconds } => {
                let until = seconds.map(|seconds| until(seconds, now)).transpose()?;
                let key = key.map(|key| self.known(&key)).transpose()?;
                let whom = self.whom(key.as_ref());
                self.room()?;
                self.orders.pause(key, Pause { until, by: by.into() });
                let long =
                    if until.is_some() { "until the time is over or it is resumed" } else { "until it is resumed" };
                format!("{whom} is paused: nobody is started or told to go {long}")
            }
            Order::Resume { key } => {
                let key = key.map(|key| self.known(&key)).transpose()?;
                let whom = self.whom(key.as_ref());
                if !self.orders.resume(key.as_ref()) {
                    let of_pool = self.orders.of_pool().map(|_| ", but its pool is");
                    return Err(Refused::Untimely(format!("{whom} is not paused{}", of_pool.unwrap_or_default())));
                }
                let still = key.is_some() && self.orders.of_pool().is_some();
                format!("{whom} is resumed{}", if still { "; its pool is still paused" } else { "" })
            }
            Order::Scale { key, min, max, seconds } => self.scale(&key, min, max, seconds, by, now)?,
            Order::Drain { .. } if self.role == Role::Disconnected => {
                let text =
                    "there is no broker at present, and another controller may have this pool: nobody is told to go";
                return Err(Refused::Untimely(text.to_owned()));
            }
            Order::Drain { worker } => {
                if !self.staff.drain(&worker) {
                    let text = format!("pool {} has no worker {worker} that could be told to go", self.settings.pool);
                    return Err(Refused::Missing(text));
                }
                format!("worker {worker} is told to go, and finishes what it holds")
            }
            Order::Retry { key } => {
                let key = self.known(&key)?;
                let whom = self.whom(Some(&key));
                if !self.staff.forgive(&key) {
                    return Err(Refused::Untimely(format!(
                        "no worker of {whom} is waited for: the last ones did last"
                    )));
                }
                format!("that workers of {whom} did not last is forgotten, and the next one starts now")
            }
        };
        tracing::info!(pool = self.settings.pool, "an order of {by}: {said}");
        if self.role == Role::Active {
            self.plan();
        }
        Ok(said)
    }

    fn scale(
        &mut self,
        key: &str,
        min: Option<u32>,
        max: Option<u32>,
        seconds: f64,
        by: &str,
        now: Instant,
    ) -> Result<String, Refused> {
        let key = self.key(key)?;
        let whom = self.whom(Some(&key));
        let until = until(seconds, now)?;
        if until == now {
            let text = format!("no other numbers were ordered of {whom}");
            return if self.orders.unscale(&key) {
                Ok(format!("{whom} has the numbers of the configuration again"))
            } else {
                Err(Refused::Untimely(text))
            };
        }
        if let Means::Kubernetes(cluster) = &self.settings.posting.means
            && matches!(cluster.scaling, Scaling::Keda { .. })
        {
            return Err(Refused::Untimely("KEDA decides how many workers a group has".to_owned()));
        }
        if min.is_none() && max.is_none() {
            return Err(Refused::Senseless("`min` or `max` has to say how many workers are meant".to_owned()));
        }
        if let (Some(min), Some(max)) = (min, max)
            && min > max
        {
            return Err(Refused::Senseless(format!("at least {min} and at most {max} cannot both be")));
        }
        if min.unwrap_or_default() == 0 {
            self.known(key.as_str())?;
        }
        self.room()?;
        let numbers = Numbers { min, max, until, by: by.into() };
        let limits = numbers.over(self.settings.tuning.limits);
        if min.is_some_and(|min| min > 0) {
            self.pool.handle(Event::Demand { key: key.clone(), extra: Duration::ZERO }, now);
        }
        self.orders.scale(key, numbers);
        let (span, configured) = (until.since(now).as_secs(), self.settings.tuning.limits);
        let over = if max.is_none() && limits.max > configured.max {
            format!(", over the {} of `max`", configured.max)
        } else if min.is_none() && limits.min < configured.min {
            format!(", under the {} of `min`", configured.min)
        } else {
            String::new()
        };
        Ok(format!("{whom} has {} to {} workers for {span} s{over}", limits.min, limits.max))
    }

    /// A key that can be one here.
    fn key(&self, text: &str) -> Result<Key, Refused> {
        let key = Key::new(text).filter(|key| self.settings.names.request_queue(key).is_some());
        key.ok_or_else(|| {
            Refused::Senseless(format!("a key has {KEY_BYTES_MAX} bytes at most, and its queue's name too"))
        })
    }

    /// The key of a group that is there.
    fn known(&self, text: &str) -> Result<Key, Refused> {
        let key = self.key(text)?;
        let there = self.pool.keys().chain(self.staff.keys()).any(|known| *known == key)
            || self.orders.numbers(&key).is_some()
            || self.orders.paused(&key).is_some();
        let text = || format!("pool {} has no group {text:?}: nobody has asked under that key", self.settings.pool);
        if there { Ok(key) } else { Err(Refused::Missing(text())) }
    }

    fn room(&self) -> Result<(), Refused> {
        let full = self.orders.count() >= CONTROLLER_GROUPS_MAX;
        let text = || format!("{CONTROLLER_GROUPS_MAX} orders are in force already");
        if full { Err(Refused::Untimely(text())) } else { Ok(()) }
    }

    fn whom(&self, key: Option<&Key>) -> String {
        match key {
            Some(key) => format!("group {:?} of pool {}", key.as_str(), self.settings.pool),
            None => format!("pool {}", self.settings.pool),
        }
    }

    /// A pause, for those who look.
    pub(super) fn seen_pause(pause: &Pause, now: Instant) -> view::Paused {
        let left = pause.until.map(|until| until.since(now).as_secs_f64());
        view::Paused { by: pause.by.to_string(), seconds_left: left }
    }
}

fn until(seconds: f64, now: Instant) -> Result<Instant, Refused> {
    if !(0.0..=ORDER_SPAN_MAX.as_secs_f64()).contains(&seconds) {
        let most = ORDER_SPAN_MAX.as_secs();
        return Err(Refused::Senseless(format!("a span has to be between 0 and {most} seconds")));
    }
    Ok(now.plus(view::span(seconds)))
}
