//! Commands the worker at termination notices.

use std::future::Future;

use tokio::sync::mpsc;

use super::exit::{Exit, Failure};
use crate::config::schema::Config;
use journeyman_domain::limits::NOTICE_MARGIN;
use journeyman_domain::termination_notice::Termination;
use journeyman_platform::host::clock::Clock;
use journeyman_platform::host::termination_notice::{NOTICES_MAX, Notice, NoticeConfig, NoticeWatch};
use journeyman_worker::engine::config::{self, Host};
use journeyman_worker::engine::{Control, OnTerminationNotice};

pub(super) const fn on_termination_notice(host: &Host) -> OnTerminationNotice {
    match host.on_termination_notice {
        config::OnTerminationNotice::Finish => OnTerminationNotice::Finish { margin: NOTICE_MARGIN },
        config::OnTerminationNotice::Release => OnTerminationNotice::Release,
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
pub(super) fn watch_notices(config: &Config, control: Control) -> Result<impl Future<Output = ()> + use<>, Failure> {
    let watch = NoticeWatch::new(watch_config(&config.host))
        .map_err(|error| Failure::new(Exit::Config, format!("host.metadata_endpoint: {error}")))?;
    control.set_watch_statuses(watch.subscribe_statuses());
    Ok(Box::pin(async move {
        let (sender, mut notices) = mpsc::channel(NOTICES_MAX);
        let handling = async {
            while let Some(Notice { origin, termination }) = notices.recv().await {
                let deadline = match termination {
                    Termination::At(deadline) => Some(deadline),
                    Termination::Soon => None,
                };
                let remaining = deadline.map(|deadline| deadline.since(Clock::boot().now()).as_secs());
                let when = remaining.map_or_else(|| "soon".to_owned(), |seconds| format!("in {seconds} s"));
                tracing::warn!(
                    provider = origin.as_str(),
                    remaining_s = remaining,
                    "this host terminates {when}: claiming nothing more"
                );
                control.terminate_from(origin, deadline).await;
            }
        };
        tokio::join!(watch.run(sender), handling);
    }))
}
