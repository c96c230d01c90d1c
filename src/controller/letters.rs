//! Dead letters: each is answered, and those that have ended their workers are put aside.

use lapin::message::Delivery;
use lapin::{Channel, Connection};
use tokio::sync::mpsc;

use super::publish::{self, Obituary, confirming, next};
use super::session::{Over, consume, ended};
use super::tally::Tally;
use super::waiting::Waiting;
use super::{Controller, Settings, poison};
use crate::domain::group::Key;
use crate::limits::{CONTROLLER_DEATH_WAIT, CONTROLLER_LETTERS_MAX, CONTROLLER_LOOK_EVERY};

/// Answers what nobody else will.
pub(super) async fn answer_letters(
    settings: &Settings,
    connection: &Connection,
    killers: mpsc::Sender<Delivery>,
    tally: &Tally,
) -> Over {
    let answering = async {
        let queue = settings.names.dead_letter_queue();
        let mut letters = consume(connection, &queue, Some(CONTROLLER_LETTERS_MAX)).await?;
        let answers = confirming(connection).await?;
        while let Some(letter) = next(&mut letters).await {
            let letter = letter?;
            let obituary = Obituary::of(&letter);
            tracing::info!(reason = obituary.reason, queue = obituary.queue, "a request is answered for its workers");
            let status = &settings.dead_letter_status;
            if obituary.is_poison() {
                publish::reply(&answers, status, &letter, &obituary, tally).await?;
                // As many as there can be have room. Where nobody listens any more, this is over as well.
                killers.send(letter).await.ok();
            } else {
                publish::answer(&answers, status, letter, &obituary, tally).await?;
            }
        }
        Ok::<_, Over>(())
    };
    answering.await.err().unwrap_or_else(|| ended("dead letters"))
}

impl Controller {
    /// Puts requests aside that have ended their workers, each once it is known which.
    pub(super) async fn put_aside(&mut self, channel: &Channel) -> Result<(), Over> {
        let (names, now) = (self.settings.names.clone(), self.clock.now());
        // The broker tells of the end of a worker before its driver does.
        let waits = |waiting: &Waiting, key: Option<&Key>| {
            let earliest = waiting.since.minus(CONTROLLER_LOOK_EVERY);
            self.staff.starts_workers()
                && now.since(waiting.since) < CONTROLLER_DEATH_WAIT
                && key.is_none_or(|key| self.staff.last_end(key).is_none_or(|(at, _)| at <= earliest))
        };
        let (later, due): (Vec<Waiting>, Vec<Waiting>) = std::mem::take(&mut self.here.aside)
            .into_iter()
            .partition(|waiting| waits(waiting, names.key(waiting.delivery.routing_key.as_str()).as_ref()));
        self.here.aside = later;
        for Waiting { delivery, .. } in due {
            let key = names.key(delivery.routing_key.as_str());
            let death = key.as_ref().and_then(|key| self.staff.last_end(key)).map(|(_, death)| death.clone());
            // A limit is on how often it comes back, not on how often it is handed out.
            let tries = self.settings.keeping.delivery_limit.map(|limit| u64::from(limit) + 1);
            let worker = death.as_ref().map(|death| death.worker.as_str());
            tracing::warn!(key = ?delivery.routing_key, worker, "a request under which workers end is put aside");
            self.meanwhile(poison::put_aside(channel, &names, delivery, tries, death.as_ref())).await?;
            self.tally.poison.add();
        }
        Ok(())
    }
}
