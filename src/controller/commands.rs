//! Operator commands of a pool: pause, resume, scale, drain, retry.

use serde::{Deserialize, Serialize};

use super::status::{self, Role};
use super::{Controller, scale_limits};
use crate::domain::group::overrides::{Pause, ScaleOverride};
use crate::domain::group::pool::Event;
use crate::domain::group::{KEY_BYTES_MAX, Key};
use crate::domain::time::Instant;
use crate::limits::{COMMAND_DURATION_MAX, CONTROLLER_GROUPS_MAX};

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub enum PoolCommand {
    Pause {
        #[serde(default)]
        key: Option<String>,
        #[serde(default)]
        seconds: Option<f64>,
    },
    Resume {
        #[serde(default)]
        key: Option<String>,
    },
    Scale {
        key: String,
        #[serde(default)]
        min: Option<u32>,
        #[serde(default)]
        max: Option<u32>,
        seconds: f64,
    },
    Drain {
        worker: String,
    },
    Retry {
        key: String,
    },
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CommandError {
    NotFound(String),
    Invalid(String),
    Conflict(String),
}

impl Controller {
    pub(super) fn apply(&mut self, order: PoolCommand, by: &str) -> Result<String, CommandError> {
        let now = self.clock.now();
        if self.role == Role::Standby {
            let text = "standby: another controller holds this pool; send the command to that one";
            return Err(CommandError::Conflict(text.to_owned()));
        }
        let said = match order {
            PoolCommand::Pause { key, seconds } => {
                let until = seconds.map(|seconds| expires_at(seconds, now)).transpose()?;
                let key = key.map(|key| self.existing_key(&key)).transpose()?;
                let whom = self.target_name(key.as_ref());
                self.check_override_limit()?;
                self.overrides.pause(key, Pause { until, note: by.into() });
                let long = if until.is_some() {
                    "until the time is over or the pause is resumed"
                } else {
                    "until it is resumed"
                };
                format!("{whom} is paused {long}: no worker is started or stopped")
            }
            PoolCommand::Resume { key } => {
                let key = key.map(|key| self.existing_key(&key)).transpose()?;
                let whom = self.target_name(key.as_ref());
                if !self.overrides.resume(key.as_ref()) {
                    return Err(CommandError::Conflict(format!("{whom} is not paused itself")));
                }
                let still = key.is_some() && self.overrides.pool_pause().is_some();
                format!("{whom} is resumed{}", if still { "; its pool is still paused" } else { "" })
            }
            PoolCommand::Scale { key, min, max, seconds } => self.apply_scale(&key, min, max, seconds, by, now)?,
            PoolCommand::Drain { .. } if self.role == Role::Disconnected => {
                let text = "no connection to the broker, and another controller may hold the pool";
                return Err(CommandError::Conflict(text.to_owned()));
            }
            PoolCommand::Drain { worker } => {
                if !self.workers.drain(&worker) {
                    let text = format!("pool {} has no worker {worker}", self.config.pool);
                    return Err(CommandError::NotFound(text));
                }
                format!("draining worker {worker}: it finishes what it holds")
            }
            PoolCommand::Retry { key } => {
                let key = self.existing_key(&key)?;
                let whom = self.target_name(Some(&key));
                if !self.workers.reset_failures(&key) {
                    return Err(CommandError::Conflict(format!("{whom} has no failures to reset")));
                }
                format!("failures of {whom} are reset; the next worker starts now")
            }
        };
        tracing::info!(pool = self.config.pool, "command of {by}: {said}");
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
            let text = format!("{whom} has no scale override");
            return if self.overrides.clear_scale(&key) {
                Ok(format!("{whom} has its configured limits again"))
            } else {
                Err(CommandError::Conflict(text))
            };
        }
        if self.config.settings.is_scaled_by_keda() {
            return Err(CommandError::Conflict("KEDA scales the groups of this pool".to_owned()));
        }
        if min.is_none() && max.is_none() {
            return Err(CommandError::Invalid("`min` or `max` is required".to_owned()));
        }
        if let (Some(min), Some(max)) = (min, max)
            && min > max
        {
            return Err(CommandError::Invalid(format!("`min` {min} is larger than `max` {max}")));
        }
        if min.unwrap_or_default() == 0 {
            self.existing_key(key.as_str())?;
        }
        self.check_override_limit()?;
        let numbers = ScaleOverride { min, max, until, note: by.into() };
        let limits = numbers.apply_to(scale_limits(&self.config.settings));
        if min.is_some_and(|min| min > 0) {
            self.pool.handle(Event::demand(key.clone()), now);
        }
        self.overrides.scale(key, numbers);
        let seconds = until.since(now).as_secs();
        Ok(format!("{whom} has {} to {} workers for {seconds} s", limits.min, limits.max))
    }

    fn parse_key(&self, text: &str) -> Result<Key, CommandError> {
        let key = Key::new(text).filter(|key| self.config.names.request_queue(key).is_some());
        key.ok_or_else(|| {
            CommandError::Invalid(format!("a key has at most {KEY_BYTES_MAX} bytes, and so has the name of its queue"))
        })
    }

    fn existing_key(&self, text: &str) -> Result<Key, CommandError> {
        let key = self.parse_key(text)?;
        let there = self.pool.keys().chain(self.workers.keys()).any(|known| *known == key)
            || self.overrides.scale_of(&key).is_some()
            || self.overrides.pause_of(&key).is_some();
        let text = || format!("pool {} has no group {text:?}", self.config.pool);
        if there { Ok(key) } else { Err(CommandError::NotFound(text())) }
    }

    fn check_override_limit(&self) -> Result<(), CommandError> {
        let full = self.overrides.count() >= CONTROLLER_GROUPS_MAX;
        let text = || format!("there are {CONTROLLER_GROUPS_MAX} pauses and overrides already");
        if full { Err(CommandError::Conflict(text())) } else { Ok(()) }
    }

    fn target_name(&self, key: Option<&Key>) -> String {
        match key {
            Some(key) => format!("group {:?} of pool {}", key.as_str(), self.config.pool),
            None => format!("pool {}", self.config.pool),
        }
    }

    pub(super) fn pause_status(pause: &Pause, now: Instant) -> status::PauseStatus {
        let left = pause.until.map(|until| until.since(now).as_secs_f64());
        status::PauseStatus { by: pause.note.to_string(), remaining_seconds: left }
    }
}

fn expires_at(seconds: f64, now: Instant) -> Result<Instant, CommandError> {
    if !(0.0..=COMMAND_DURATION_MAX.as_secs_f64()).contains(&seconds) {
        let most = COMMAND_DURATION_MAX.as_secs();
        return Err(CommandError::Invalid(format!("a duration is between 0 and {most} seconds")));
    }
    Ok(now.plus(status::seconds_to_duration(seconds)))
}
