//! Operator commands of a pool: pause, resume, scale, drain, retry.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::status::Role;
use super::{Controller, scale_limits};
use journeyman_domain::group::Key;
use journeyman_domain::group::overrides::{Pause, ScaleOverride};
use journeyman_domain::group::pool::Event;
use journeyman_domain::limits::{COMMAND_DURATION_MAX, CONTROLLER_GROUPS_MAX};
use journeyman_domain::time::Instant;

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub enum PoolCommand {
    Pause { key: Option<String>, seconds: Option<f64> },
    Resume { key: Option<String> },
    Scale(ScaleCommand),
    Drain { worker: String },
    Retry { key: String },
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ScaleCommand {
    pub key: String,
    pub min: Option<u32>,
    pub max: Option<u32>,
    pub seconds: f64,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CommandError {
    NotFound(String),
    Invalid(String),
    Conflict(String),
}

impl Controller {
    pub(super) fn apply(&mut self, command: PoolCommand, by: &str) -> Result<String, CommandError> {
        let now = self.clock.now();
        if let (Role::Standby, _) | (Role::Disconnected, PoolCommand::Drain { .. }) = (self.role, &command)
            && let Some(reason) = self.role.inactive_reason()
        {
            return Err(CommandError::Conflict(format!("{reason}; send the command to the active controller")));
        }
        let message = match command {
            PoolCommand::Pause { key, seconds } => {
                let until = seconds.map(|seconds| expires_at(seconds, now)).transpose()?;
                let (key, target) = match key.as_deref().map(|key| self.parse_key(key)).transpose()? {
                    // Before its first request, too.
                    Some(key) => (Some(key.clone()), self.group_name(&key)),
                    None => self.target(None)?,
                };
                self.check_room_for_override()?;
                self.overrides.pause(key, Pause { until, note: by.into() });
                let end = if until.is_some() { "for the given time" } else { "until it is resumed" };
                format!("{target} is paused {end}: no worker is started or stopped")
            }
            PoolCommand::Resume { key } => {
                let (key, target) = self.target(key.as_deref())?;
                if !self.overrides.resume(key.as_ref()) {
                    return Err(CommandError::Conflict(format!("{target} is not paused itself")));
                }
                format!("{target} is resumed")
            }
            PoolCommand::Scale(command) => self.apply_scale(&command, by, now)?,
            PoolCommand::Drain { worker } => {
                if !self.workers.drain(&worker) {
                    let text = format!("pool {} has no worker {worker}", self.config.pool);
                    return Err(CommandError::NotFound(text));
                }
                format!("draining worker {worker}: it finishes what it holds")
            }
            PoolCommand::Retry { key } => {
                let (key, target) = self.target(Some(&key))?;
                if !key.is_some_and(|key| self.workers.reset_failures(&key)) {
                    return Err(CommandError::Conflict(format!("{target} has no failures to reset")));
                }
                format!("failures of {target} are reset; the next worker starts now")
            }
        };
        tracing::info!(pool = self.config.pool, "command of {by}: {message}");
        if self.role == Role::Active {
            self.plan();
        }
        Ok(message)
    }

    fn apply_scale(&mut self, command: &ScaleCommand, by: &str, now: Instant) -> Result<String, CommandError> {
        let ScaleCommand { min, max, .. } = *command;
        let key = self.parse_key(&command.key)?;
        let target = self.group_name(&key);
        let until = expires_at(command.seconds, now)?;
        if until == now {
            self.overrides.clear_scale(&key);
            return Ok(format!("{target} has its configured limits"));
        }
        if self.config.settings.is_scaled_by_keda() {
            return Err(CommandError::Conflict("KEDA scales the groups of this pool".to_owned()));
        }
        if min.or(max).is_none() || min.zip(max).is_some_and(|(min, max)| min > max) {
            let text = "`min` or `max` is required, and `min` is at most `max`";
            return Err(CommandError::Invalid(text.to_owned()));
        }
        if min.unwrap_or_default() == 0 {
            self.target(Some(&command.key))?;
        } else {
            self.check_room_for_override()?;
            self.pool.handle(Event::demand(key.clone()), now);
        }
        let scale = ScaleOverride { min, max, until, note: by.into() };
        let limits = scale.apply_to(scale_limits(&self.config.settings));
        self.overrides.scale(key, scale);
        let seconds = until.since(now).as_secs();
        Ok(format!("{target} has {} to {} workers for {seconds} s", limits.min, limits.max))
    }

    fn check_room_for_override(&self) -> Result<(), CommandError> {
        if self.overrides.count() < CONTROLLER_GROUPS_MAX {
            return Ok(());
        }
        Err(CommandError::Conflict(format!("there are {CONTROLLER_GROUPS_MAX} pauses and overrides already")))
    }

    fn parse_key(&self, text: &str) -> Result<Key, CommandError> {
        let key = Key::new(text).filter(|key| self.config.names.request_queue(key).is_some());
        key.ok_or_else(|| CommandError::Invalid("the key is too long for the name of a queue".to_owned()))
    }

    /// The group of a key, or the pool; and its name in messages.
    fn target(&self, key: Option<&str>) -> Result<(Option<Key>, String), CommandError> {
        let Some(key) = key else { return Ok((None, format!("pool {}", self.config.pool))) };
        let key = self.parse_key(key)?;
        let is_known = self.pool.keys().chain(self.workers.keys()).any(|known| *known == key)
            || self.overrides.scale_of(&key).is_some()
            || self.overrides.pause_of(&key).is_some();
        if !is_known {
            return Err(CommandError::NotFound(format!("pool {} has no group {:?}", self.config.pool, key.as_str())));
        }
        let name = self.group_name(&key);
        Ok((Some(key), name))
    }

    fn group_name(&self, key: &Key) -> String {
        format!("group {:?} of pool {}", key.as_str(), self.config.pool)
    }
}

fn expires_at(seconds: f64, now: Instant) -> Result<Instant, CommandError> {
    if !(0.0..=COMMAND_DURATION_MAX.as_secs_f64()).contains(&seconds) {
        let most = COMMAND_DURATION_MAX.as_secs();
        return Err(CommandError::Invalid(format!("a duration is between 0 and {most} seconds")));
    }
    Ok(now.plus(Duration::from_secs_f64(seconds)))
}
