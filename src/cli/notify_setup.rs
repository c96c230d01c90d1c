//! Builds what tells a notifier of the ends of tasks, claims and requests, from `[notify]`.

use super::exit::{Exit, Failure};
use crate::config::schema;
use crate::notify::{Announcer, Announcing, NotifierClient, NotifyConfig, Publisher, TypePattern};
use journeyman_platform::settings::Environment;

/// `None` without a notifier.
pub(super) fn notify_config(
    config: &schema::Notify,
    environment: &Environment,
) -> Result<Option<NotifyConfig>, Failure> {
    let (Some(url), Some(token)) = (&config.url, &config.token_file) else { return Ok(None) };
    let token = token.load("a token", environment)?;
    let publisher = NotifierClient::new(url.parts().clone(), token)
        .map(Publisher::new)
        .map_err(|error| Failure::from_error(Exit::Internal, &error))?;
    let wanted = config.events.iter().map(|text| TypePattern::new(text)).collect();
    Ok(Some(NotifyConfig { publisher, wanted }))
}

/// Makes the announcer of a role without a store.
pub(super) fn announcer(
    config: &schema::Notify,
    source: String,
    environment: &Environment,
) -> Result<(Option<Announcer>, Option<Announcing>), Failure> {
    let config = notify_config(config, environment)?;
    Ok(config.map(|config| Announcer::new(config, source)).unzip())
}
