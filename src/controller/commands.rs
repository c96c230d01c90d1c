//! What people order of the controller of a pool, and what it says to that.

use std::time::Duration;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::status::{self, Role};
use super::{Controller, DriverKind, Scaling};
use crate::domain::group::overrides::{Pause, ScaleOverride};
use crate::domain::group::pool::Event;
use crate::domain::group::{KEY_BYTES_MAX, Key};
use crate::domain::time::Instant;
use crate::limits::{COMMAND_DURATION_MAX, CONTROLLER_GROUPS_MAX};

/// What can be ordered of a pool.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub enum PoolCommand {
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
pub enum CommandError {
    /// There is nothing of that name.
    NotFound(String),
    /// It cannot be meant.
    Invalid(String),
    /// It cannot be done as things stand.
    Conflict(String),
}

impl Controller {
    /// Obeys. Answers with what comes of it.
    pub(super) fn apply(&mut self, order: PoolCommand, by: &str) -> Result<String, CommandError> {
        let now = self.clock.now();
        if self.role == Role::Standby {
            let text = "it stands by: another controller has this pool, and that one can be told";
            return Err(CommandError::Conflict(text.to_owned()));
        }
        let said = match order {
            PoolCommand::Pause { key, seconds } => {
                let until = seconds.map(|seconds| expires_at(seconds, now)).transpose()?;
                let key = key.map(|key| self.existing_key(&key)).transpose()?;
                let whom = self.target_name(key.as_ref());
                self.check_override_limit()?;
                self.overrides.pause(key, Pause { until, note: by.into() });
                let long =
                    if until.is_some() { "until the time is over or it is resumed" } else { "until it is resumed" };
                format!("{whom} is paused: nobody is started or told to go {long}")
            }
            PoolCommand::Resume { key } => {
                let key = key.map(|key| self.existing_key(&key)).transpose()?;
                let whom = self.target_name(key.as_ref());
                if !self.overrides.resume(key.as_ref()) {
                    let of_pool = self.overrides.pool_pause().map(|_| ", but its pool is");
                    return Err(CommandError::Conflict(format!("{whom} is not paused{}", of_pool.unwrap_or_default())));
                }
                let still = key.is_some() && self.overrides.pool_pause().is_some();
                format!("{whom} is resumed{}", if still { "; its pool is still paused" } else { "" })
            }
            PoolCommand::Scale { key, min, max, seconds } => self.apply_scale(&key, min, max, seconds, by, now)?,
            PoolCommand::Drain { .. } if self.role == Role::Disconnected => {
                let text =
                    "there is no broker at present, and another controller may have this pool: nobody is told to go";
                return Err(CommandError::Conflict(text.to_owned()));
            }
            PoolCommand::Drain { worker } => {
                if !self.workers.drain(&worker) {
                    let text = format!("pool {} has no worker {worker} that could be told to go", self.config.pool);
                    return Err(CommandError::NotFound(text));
                }
                format!("worker {worker} is told to go, and finishes what it holds")
            }
            PoolCommand::Retry { key } => {
                let key = self.existing_key(&key)?;
                let whom = self.target_name(Some(&key));
                if !self.workers.reset_failures(&key) {
                    return Err(CommandError::Conflict(format!(
                        "no worker of {whom} is waited for: the last ones did last"
                    )));
                }
                format!("that workers of {whom} did not last is forgotten, and the next one starts now")
            }
        };
        tracing::info!(pool = self.config.pool, "an order of {by}: {said}");
        if self.role == Role::Active {
            self.plan();
        }
        Ok(said)
    }

    fn apply_scale(
        &mut self,
        key: &str,
        min: Option<u32>,
        max: Option<u32>,
        seconds: f64,
        by: &str,
        now: Instant,
    ) -> Result<String, CommandError> {
        let key = self.parse_key(key)?;
        let whom = self.target_name(Some(&key));
        let until = expires_at(seconds, now)?;
        if until == now {
            let text = format!("no other numbers were ordered of {whom}");
            return if self.overrides.clear_scale(&key) {
                Ok(format!("{whom} has the numbers of the configuration again"))
            } else {
                Err(CommandError::Conflict(text))
            };
        }
        if let DriverKind::Kubernetes(cluster) = &self.config.driver.kind
            && matches!(cluster.scaling, Scaling::Keda { .. })
        {
            return Err(CommandError::Conflict("KEDA decides how many workers a group has".to_owned()));
        }
        if min.is_none() && max.is_none() {
            return Err(CommandError::Invalid("`min` or `max` has to say how many workers are meant".to_owned()));
        }
        if let (Some(min), Some(max)) = (min, max)
            && min > max
        {
            return Err(CommandError::Invalid(format!("at least {min} and at most {max} cannot both be")));
        }
        if min.unwrap_or_default() == 0 {
            self.existing_key(key.as_str())?;
        }
        self.check_override_limit()?;
        let numbers = ScaleOverride { min, max, until, note: by.into() };
        let limits = numbers.apply_to(self.config.scaling.limits);
        if min.is_some_and(|min| min > 0) {
            self.pool.handle(Event::Demand { key: key.clone(), extra: Duration::ZERO }, now);
        }
        self.overrides.scale(key, numbers);
        let (span, configured) = (until.since(now).as_secs(), self.config.scaling.limits);
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
    fn parse_key(&self, text: &str) -> Result<Key, CommandError> {
        let key = Key::new(text).filter(|key| self.config.names.request_queue(key).is_some());
        key.ok_or_else(|| {
            CommandError::Invalid(format!("a key has {KEY_BYTES_MAX} bytes at most, and its queue's name too"))
        })
    }

    /// The key of a group that is there.
    fn existing_key(&self, text: &str) -> Result<Key, CommandError> {
        let key = self.parse_key(text)?;
        let there = self.pool.keys().chain(self.workers.keys()).any(|known| *known == key)
            || self.overrides.scale_of(&key).is_some()
            || self.overrides.pause_of(&key).is_some();
        let text = || format!("pool {} has no group {text:?}: nobody has asked under that key", self.config.pool);
        if there { Ok(key) } else { Err(CommandError::NotFound(text())) }
    }

    fn check_override_limit(&self) -> Result<(), CommandError> {
        let full = self.overrides.count() >= CONTROLLER_GROUPS_MAX;
        let text = || format!("{CONTROLLER_GROUPS_MAX} orders are in force already");
        if full { Err(CommandError::Conflict(text())) } else { Ok(()) }
    }

    fn target_name(&self, key: Option<&Key>) -> String {
        match key {
            Some(key) => format!("group {:?} of pool {}", key.as_str(), self.config.pool),
            None => format!("pool {}", self.config.pool),
        }
    }

    /// A pause, for those who look.
    pub(super) fn pause_status(pause: &Pause, now: Instant) -> status::PauseStatus {
        let left = pause.until.map(|until| until.since(now).as_secs_f64());
        status::PauseStatus { by: pause.note.to_string(), remaining_seconds: left }
    }
}

fn expires_at(seconds: f64, now: Instant) -> Result<Instant, CommandError> {
    if !(0.0..=COMMAND_DURATION_MAX.as_secs_f64()).contains(&seconds) {
        let most = COMMAND_DURATION_MAX.as_secs();
        return Err(CommandError::Invalid(format!("a span has to be between 0 and {most} seconds")));
    }
    Ok(now.plus(status::seconds_to_duration(seconds)))
}
