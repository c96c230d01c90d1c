//! Handles termination notices: commands the worker accordingly, and logs what happens to its tasks.

use std::future::Future;
use std::time::Duration;

use jiff::{SignedDuration, Timestamp, Unit};
use tokio::sync::mpsc;

use super::exit::{Exit, Failure};
use crate::config::schema::{self, Config, Host};
use crate::domain::termination_notice::Termination;
use crate::domain::time::Instant;
use crate::host::clock::Clock;
use crate::host::termination_notice::{NOTICES_MAX, Notice, NoticeConfig, NoticeWatch};
use crate::worker::{Control, OnTerminationNotice};

pub(super) const fn on_termination_notice(host: &Host) -> OnTerminationNotice {
    match host.on_termination_notice {
        schema::OnTerminationNotice::Finish => OnTerminationNotice::Finish { margin: host.termination_margin.0 },
        schema::OnTerminationNotice::Release => OnTerminationNotice::Release,
    }
}

pub(super) fn watch_config(host: &Host) -> NoticeConfig {
    NoticeConfig {
        cloud: host.metadata_service,
        endpoint: host.metadata_endpoint.as_ref().map(|url| url.as_str().to_owned()),
        file: host.termination_file.as_ref().map(|file| file.0.clone()),
        schedule: None,
        clock: Clock::boot(),
    }
}

/// Watches for notices and commands the worker. The future resolves if there is nothing to watch.
///
/// # Errors
///
/// [`Exit::Config`] for an invalid endpoint.
///
/// # Cancel safety
///
/// Cancel safe.
pub(super) fn watch_notices(config: &Config, control: Control) -> Result<impl Future<Output = ()> + use<>, Failure> {
    let watch = NoticeWatch::new(watch_config(&config.host))
        .map_err(|error| Failure::new(Exit::Config, format!("host.metadata_endpoint: {error}")))?;
    control.set_watch_statuses(watch.subscribe_statuses());
    let handler = NoticeHandler {
        clock: Clock::boot(),
        on_notice: on_termination_notice(&config.host),
        grace: config.worker.termination_grace.0,
        control,
    };
    Ok(Box::pin(async move {
        let (sender, mut notices) = mpsc::channel(NOTICES_MAX);
        let handling = async {
            while let Some(notice) = notices.recv().await {
                handler.handle(notice).await;
            }
        };
        tokio::join!(watch.run(sender), handling);
    }))
}

struct NoticeHandler {
    clock: Clock,
    on_notice: OnTerminationNotice,
    grace: Duration,
    control: Control,
}

impl NoticeHandler {
    async fn handle(&self, Notice { origin, termination }: Notice) {
        let provider = origin.as_str();
        match termination {
            Termination::At(at) => {
                let now = self.clock.now();
                let remaining = at.since(now).as_secs();
                let tasks = match self.on_notice.release_at(at, self.grace).filter(|until| *until > now) {
                    Some(until) => {
                        format!("running tasks may finish until {}, then they are released", self.wall_clock(until))
                    }
                    None => "releasing running tasks".to_owned(),
                };
                tracing::warn!(
                    provider,
                    deadline = %self.wall_clock(at),
                    remaining_s = remaining,
                    "this host terminates in {remaining} s: claiming nothing more, {tasks}"
                );
                self.control.terminate_from(origin, Some(at)).await;
            }
            Termination::Soon => {
                tracing::warn!(
                    provider,
                    "this host terminates at an unknown time: claiming nothing more, releasing running tasks"
                );
                self.control.terminate_from(origin, None).await;
            }
        }
    }

    /// Converts a time of the worker's clock to UTC, for the log.
    fn wall_clock(&self, at: Instant) -> Timestamp {
        let remaining = SignedDuration::try_from(at.since(self.clock.now())).unwrap_or(SignedDuration::MAX);
        let then = Timestamp::now().saturating_add(remaining).unwrap_or(Timestamp::MAX);
        then.round(Unit::Second).unwrap_or(then)
    }
}
