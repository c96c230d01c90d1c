//! Dead letters: each is answered, and those that have ended their workers are put aside first.

use std::sync::Arc;

use lapin::message::Delivery;
use lapin::{Channel, Connection};
use tokio::sync::mpsc;

use super::answers::{Answers, Going, Obituary, came_under};
use super::names::Names;
use super::poison::{self, LastWorker};
use super::publish::next;
use super::session::{Over, consume, ended};
use super::tally::Tally;
use super::waiting::Waiting;
use super::{Controller, Ended, Settings};
use crate::domain::group::Key;
use crate::domain::time::Instant;
use crate::limits::{CONTROLLER_DEATH_WAIT, CONTROLLER_LETTERS_MAX, CONTROLLER_LOOK_EVERY};

/// Answers what nobody else will, and hands on what has ended its workers.
pub(super) async fn answer_letters(
    settings: &Settings,
    connection: &Connection,
    killers: mpsc::Sender<Delivery>,
    tally: Arc<Tally>,
) -> Over {
    let answering = async {
        let queue = settings.names.dead_letter_queue();
        let mut letters = consume(connection, &queue, Some(CONTROLLER_LETTERS_MAX)).await?;
        let answers = Answers::open(connection, settings, tally).await?;
        let mut going = Going::default();
        loop {
            let letter = tokio::select! {
                Some(over) = going.over() => return Err(over),
                letter = next(&mut letters) => match letter {
                    Some(letter) => letter?,
                    None => break,
                },
            };
            let obituary = Obituary::of(&letter);
            if obituary.is_poison() {
                // As many as there can be have room. Where nobody listens any more, this is over as well.
                killers.send(letter).await.ok();
            } else {
                tracing::info!(
                    reason = obituary.reason,
                    queue = obituary.queue,
                    "a request is answered for its workers"
                );
                let answers = Arc::clone(&answers);
                going.begin(async move { Ok(answers.answer(letter, obituary).await?) });
            }
        }
        Ok::<_, Over>(())
    };
    answering.await.err().unwrap_or_else(|| ended("dead letters"))
}

/// A dead letter that has ended its workers, and what is known of that.
pub(super) struct Killer {
    letter: Waiting,
    tries: Option<u64>,
    death: Option<LastWorker>,
}

/// Puts requests aside that have ended their workers: the broker has the copy, then the client its answer, and then they are
/// acknowledged. One that the inventory does not take is handed back.
pub(super) async fn put_aside(
    channel: Channel,
    answers: Arc<Answers>,
    names: &Names,
    mut due: mpsc::Receiver<Killer>,
    back: mpsc::Sender<Waiting>,
    tally: Arc<Tally>,
) -> Over {
    let putting = async {
        let mut going = Going::default();
        loop {
            let killer = tokio::select! {
                Some(over) = going.over() => return Err(over),
                killer = due.recv() => killer,
            };
            let Some(Killer { letter, tries, death }) = killer else { break };
            let delivery = &letter.delivery;
            if !poison::put_aside(&channel, names, delivery, tries, death.as_ref()).await? {
                // As many as there can be have room.
                back.send(letter).await.ok();
                continue;
            }
            let (key, worker) = (came_under(names, delivery), death.as_ref().map(|death| death.worker.as_str()));
            tracing::warn!(key, worker, "a request under which workers end is put aside, and answered");
            tally.poison.add();
            let answers = Arc::clone(&answers);
            going.begin(async move {
                let obituary = Obituary::of(&letter.delivery);
                Ok(answers.answer(letter.delivery, obituary).await?)
            });
        }
        Ok::<_, Over>(())
    };
    putting.await.err().unwrap_or_else(|| ended("requests to put aside"))
}

impl Controller {
    /// Has requests put aside that have ended their workers, each once it is known which.
    pub(super) fn condemn(&mut self, due: &mpsc::Sender<Killer>) {
        let (names, now) = (&self.settings.names, self.clock.now());
        let key = |waiting: &Waiting| names.key(&came_under(names, &waiting.delivery));
        // The broker tells of the end of a worker before its driver does.
        let waits = |waiting: &Waiting, key: Option<&Key>| {
            let earliest = waiting.since.minus(CONTROLLER_LOOK_EVERY);
            self.staff.starts_workers()
                && now.since(waiting.since) < CONTROLLER_DEATH_WAIT
                && key.is_none_or(|key| self.staff.last_end(key).is_none_or(|(at, _)| at <= earliest))
        };
        let (later, ready): (Vec<Waiting>, Vec<Waiting>) = std::mem::take(&mut self.here.aside)
            .into_iter()
            .partition(|waiting| now < waiting.not_before || waits(waiting, key(waiting).as_ref()));
        for letter in ready {
            let death = key(&letter).and_then(|key| Some(self.staff.last_end(&key)?.1.clone()));
            // A limit is on how often it comes back, not on how often it is handed out.
            let tries = self.settings.keeping.delivery_limit.map(|limit| u64::from(limit) + 1);
            // As many as there can be have room; otherwise the connection is over, and the broker has them.
            drop(due.try_send(Killer { letter, tries, death }));
        }
        self.here.aside = later;
    }

    /// The inventory did not take one.
    pub(super) fn take_back(&mut self, letter: Waiting, now: Instant) {
        let queue = self.settings.names.poison_queue();
        let what = format!("the queue {queue} does not take a request that ended its workers, which is tried again");
        tracing::warn!(key = came_under(&self.settings.names, &letter.delivery), "{what}");
        self.fault = Some(Ended { at: now, what });
        self.here.aside.push(Waiting { not_before: now.plus(CONTROLLER_DEATH_WAIT), ..letter });
    }
}
