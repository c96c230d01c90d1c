//! What the broker's management interface says of a queue: how long it waits for an answer, and whether dead letters go anywhere.

use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use lapin::Connection;

use super::lock;
use super::settings::{Exhausted, Settings, Word};
use crate::amqp::management::NotTold;
use crate::domain::patience::Says;

/// What is known of them.
pub(super) struct Rules {
    /// How long the broker lets a delivery be unacknowledged, as far as that is known.
    patience: Mutex<Option<Duration>>,
    /// What was last looked at for a warning.
    warned: Mutex<Option<Option<Duration>>>,
    /// The connection whose broker was asked for that.
    asked: Mutex<Weak<Connection>>,
}

impl Rules {
    pub(super) fn new(settings: &Settings) -> Self {
        if settings.management.is_none() {
            settings.warn_of(settings.consumer_timeout, Word::Settings);
        }
        Self { patience: Mutex::new(settings.consumer_timeout), warned: Mutex::default(), asked: Mutex::default() }
    }

    pub(super) fn patience(&self) -> Option<Duration> {
        *lock(&self.patience)
    }

    /// Asks the broker how long it waits, once for each connection.
    pub(super) async fn learn(&self, settings: &Settings, connection: &Arc<Connection>) {
        let Some(management) = &settings.management else { return };
        if lock(&self.asked).ptr_eq(&Arc::downgrade(connection)) {
            return;
        }
        let Settings { queue, consumer_timeout, .. } = settings;
        let says = match management.told(queue).await {
            Ok(told) => {
                if settings.exhausted == Exhausted::DeadLettered && !told.dead_letters {
                    tracing::warn!(queue, "{}", nowhere(queue));
                }
                told.says()
            }
            // It is asked again when there is one.
            Err(NotTold::NoQueue) => return,
            Err(NotTold::Unanswered(why)) => {
                tracing::warn!(
                    queue,
                    "how long the broker lets requests of {queue} be worked at cannot be asked, so `amqp.consumer_timeout` counts: {why}"
                );
                Says::Nothing
            }
        };
        *lock(&self.asked) = Arc::downgrade(connection);
        let patience = says.or(*consumer_timeout);
        *lock(&self.patience) = patience;
        tracing::info!(queue, ?patience, ?says, "how long the broker waits for an answer");
        // Once, and again where it has changed.
        if lock(&self.warned).replace(patience) != Some(patience) {
            settings.warn_of(patience, if says == Says::Nothing { Word::Settings } else { Word::Broker });
        }
    }
}

/// What becomes of a request that was tried too often. Asked anew each time, for policies change: what nobody would get is
/// better answered.
pub(super) async fn exhausted(settings: &Settings) -> Exhausted {
    let Settings { exhausted, management, queue, .. } = settings;
    match (exhausted, management) {
        (Exhausted::DeadLettered, Some(management)) => match management.told(queue).await {
            Ok(told) if !told.dead_letters => {
                tracing::warn!(queue, "{}", nowhere(queue));
                Exhausted::Answered
            }
            Ok(_) | Err(_) => Exhausted::DeadLettered,
        },
        (exhausted, _) => exhausted.clone(),
    }
}

/// What is said of `exhausted = "dead-letter"` where it would lose requests.
fn nowhere(queue: &str) -> String {
    format!(
        "`exhausted` is \"dead-letter\", and the queue {queue} has no dead letter exchange: a request that is given up is answered \
         instead; name one by a policy or an argument of the queue, or set `poison_queue`"
    )
}
