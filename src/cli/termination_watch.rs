//! Heeds the notices that this host goes: what each one means for the worker, and what is said about it.

use std::future::Future;
use std::time::Duration;

use jiff::{SignedDuration, Timestamp, Unit};
use tokio::sync::mpsc;

use super::exit::{Exit, Failure};
use crate::config::schema::{self, Config, Host, MetadataService, Rebalance};
use crate::domain::termination_notice::{Provider, Termination};
use crate::domain::time::Instant;
use crate::host::clock::Clock;
use crate::host::termination_notice::{
    MetadataProvider, NOTICES_MAX, Notice, NoticeConfig, NoticeKind, NoticeWatch, PollPaces,
};
use crate::worker::{Control, OnTerminationNotice};

/// What becomes of running tasks at a notice.
#[must_use]
pub(super) const fn on_termination_notice(host: &Host) -> OnTerminationNotice {
    match host.on_termination_notice {
        schema::OnTerminationNotice::Finish => OnTerminationNotice::Finish { margin: host.termination_margin.0 },
        schema::OnTerminationNotice::Release => OnTerminationNotice::Release,
    }
}

/// What is watched.
#[must_use]
pub(super) fn watch_config(host: &Host) -> NoticeConfig {
    NoticeConfig {
        cloud: match host.metadata_service {
            MetadataService::Auto => MetadataProvider::Auto,
            MetadataService::Aws => MetadataProvider::Fixed(Provider::Aws),
            MetadataService::Gcp => MetadataProvider::Fixed(Provider::Gcp),
            MetadataService::Azure => MetadataProvider::Fixed(Provider::Azure),
            MetadataService::Off => MetadataProvider::Off,
        },
        endpoint: host.metadata_endpoint.as_ref().map(|url| url.as_str().to_owned()),
        file: host.termination_file.as_ref().map(|file| file.0.clone()),
        paces: PollPaces::default(),
        clock: Clock::boot(),
    }
}

/// Watches this host and passes notices on as orders. The future resolves when there is nothing to watch.
///
/// # Errors
///
/// [`Exit::Config`] for an endpoint that cannot be one.
///
/// # Cancel safety
///
/// Cancel safe.
pub(super) fn watch_notices(config: &Config, control: Control) -> Result<impl Future<Output = ()> + use<>, Failure> {
    let (host, clock) = (&config.host, Clock::boot());
    let settings = watch_config(host);
    let watch = NoticeWatch::new(settings)
        .map_err(|error| Failure::new(Exit::Config, format!("host.metadata_endpoint: {error}")))?;
    control.set_watch_statuses(watch.subscribe_statuses());
    let heed = NoticeHandler {
        clock,
        on_notice: on_termination_notice(host),
        grace: config.worker.termination_grace.0,
        rebalance: host.rebalance,
        control,
    };
    Ok(Box::pin(async move {
        let (notices, mut heard) = mpsc::channel(NOTICES_MAX);
        let heeding = async {
            while let Some(notice) = heard.recv().await {
                heed.handle(notice).await;
            }
        };
        tokio::join!(watch.run(notices), heeding);
    }))
}

struct NoticeHandler {
    clock: Clock,
    on_notice: OnTerminationNotice,
    grace: Duration,
    rebalance: Rebalance,
    control: Control,
}

impl NoticeHandler {
    async fn handle(&self, Notice { origin, kind: said }: Notice) {
        let provider = origin.as_str();
        match said {
            NoticeKind::Termination(Termination::At(at)) => {
                let now = self.clock.now();
                let left = at.since(now);
                let done = match self.on_notice.release_at(at, self.grace).filter(|until| *until > now) {
                    Some(until) => {
                        format!("running tasks may finish until {}, the rest is handed back", self.wall_clock(until))
                    }
                    None => "running tasks are handed back".to_owned(),
                };
                tracing::warn!(
                    provider,
                    deadline = %self.wall_clock(at),
                    left_s = left.as_secs(),
                    "this host goes in {} s: nothing new is claimed, {done}", left.as_secs()
                );
                self.control.terminate_from(origin, Some(at)).await;
            }
            NoticeKind::Termination(Termination::Soon) => {
                tracing::warn!(
                    provider,
                    "this host goes, at a time that is not known: nothing new is claimed, running tasks are handed back"
                );
                self.control.terminate_from(origin, None).await;
            }
            NoticeKind::AtRisk => {
                self.control.count_hint(origin);
                match self.rebalance {
                    Rebalance::Ignore => {
                        tracing::warn!(provider, "this host may be taken away before long; work goes on");
                    }
                    Rebalance::Drain => {
                        tracing::warn!(
                            provider,
                            "this host may be taken away before long: nothing new is claimed, running tasks finish"
                        );
                        self.control.retire().await;
                    }
                }
            }
        }
    }

    /// A time on our clock as people read it.
    fn wall_clock(&self, at: Instant) -> Timestamp {
        let left = SignedDuration::try_from(at.since(self.clock.now())).unwrap_or(SignedDuration::MAX);
        let then = Timestamp::now().saturating_add(left).unwrap_or(Timestamp::MAX);
        then.round(Unit::Second).unwrap_or(then)
    }
}
