//! Requests that were acknowledged before their answer and whose run was cut short: each goes back to its queue, or is
//! answered, and then it leaves the disk. So do those that were handed back while their queue was full.

use std::sync::Arc;

use lapin::types::ShortString;
use tokio::sync::Semaphore;
use tokio::time::sleep;

use crate::amqp;
use crate::domain::backoff::Backoff;
use crate::domain::jitter::Jitter;
use crate::domain::poll::POLL_RETRY;
use crate::host::crash_points::crash_point;

use super::Early;
use super::connection::SharedConnection;
use super::counters::AmqpSourceCounters;
use super::delivery;
use super::publisher::PublishResult;
use super::reply_format;
use super::shelf::{Entry, Left, Shelf, Shelved, Unread};

/// Whose requests they are, and what becomes of them.
pub(super) struct Interrupted {
    pub(super) shelf: Arc<Shelf>,
    pub(super) link: Arc<SharedConnection>,
    pub(super) queue: ShortString,
    pub(super) early: Early,
    pub(super) tally: Arc<AmqpSourceCounters>,
    /// As that of the source: closed where it closes.
    pub(super) copying: Arc<Semaphore>,
}

/// A request that nobody works at.
struct OnDisk {
    entry: Entry,
    /// With how many attempts it goes back, where it was handed back; otherwise its worker ended under it.
    returning: Option<u32>,
}

impl Interrupted {
    /// Does that for what an earlier life has left, and then for what is left in this one, until its source closes.
    pub(super) async fn look_after(self) {
        let mut open = self.left_over().await;
        let mut jitter = Jitter::seeded(uuid::Uuid::new_v4().as_u64_pair().0);
        let mut backoff = Backoff::NEW;
        loop {
            while let Some(left) = self.shelf.next() {
                match left {
                    Left::Interrupted(entry) => open.push(OnDisk { entry, returning: None }),
                    Left::Returning(entry, attempts) => open.push(OnDisk { entry, returning: Some(attempts) }),
                    Left::Unneeded(entry, writing) => {
                        if let Some(writing) = writing {
                            // It goes, whatever came of it.
                            drop(writing.await);
                        }
                        self.shelf.clear(entry).await;
                    }
                }
            }
            let mut later = Vec::new();
            for on_disk in std::mem::take(&mut open) {
                let Ok(_copying) = self.copying.acquire().await else { return };
                if let Err(why) = self.settle(&on_disk).await {
                    if backoff.tries() == 0 {
                        tracing::warn!(file = %on_disk.entry, "a request waits on this host's disk: {why}");
                    }
                    later.push(on_disk);
                }
            }
            open = later;
            if open.is_empty() {
                backoff.reset();
                self.shelf.told().await;
            } else {
                let wait = sleep(backoff.wait(POLL_RETRY, None, &mut jitter));
                tokio::select! {
                    () = wait => {}
                    () = self.shelf.told() => {}
                }
            }
        }
    }

    async fn left_over(&self) -> Vec<OnDisk> {
        let shelf = Arc::clone(&self.shelf);
        let found = tokio::task::spawn_blocking(move || shelf.left_over()).await;
        match found.map_err(std::io::Error::other).and_then(|found| found) {
            Ok(found) => found.into_iter().map(|entry| OnDisk { returning: entry.returning(), entry }).collect(),
            Err(error) => {
                tracing::error!(
                    alert = "shelf-unread", %error,
                    "[alert operator] what an earlier life has acknowledged early cannot be read; it waits where it is"
                );
                Vec::new()
            }
        }
    }

    /// Deals with one; says why it has to wait.
    async fn settle(&self, OnDisk { entry, returning }: &OnDisk) -> Result<(), String> {
        let (shelf, place) = (Arc::clone(&self.shelf), entry.clone());
        let read = tokio::task::spawn_blocking(move || shelf.read(&place)).await.map_err(|error| error.to_string())?;
        let request = match read {
            Ok(request) => request,
            Err(Unread::Damaged) => {
                tracing::error!(
                    alert = "shelf-damaged", file = %entry,
                    "[alert operator] a request that was acknowledged early cannot be read any more and is lost; what is left of it is beside it"
                );
                self.shelf.put_aside(entry);
                return Ok(());
            }
            Err(Unread::Elsewhere(of)) => {
                tracing::warn!(file = %entry, "a request that was acknowledged early waits on this host's disk: it is of {of}");
                return Ok(());
            }
            Err(Unread::Io(error)) => return Err(error.to_string()),
        };
        match (returning, self.early) {
            (Some(attempts), _) => self.give_back(&request, *attempts).await?,
            (None, Early::Never | Early::RunAgain) => self.give_back(&request, request.attempts).await?,
            (None, Early::Answer) => self.answer(&request).await?,
        }
        crash_point("shelf-returned");
        self.shelf.clear(entry.clone()).await;
        if returning.is_none() {
            self.tally.interrupted.increment();
        }
        Ok(())
    }

    async fn give_back(&self, request: &Shelved, attempts: u32) -> Result<(), String> {
        let properties = delivery::republish_properties(&request.properties, attempts, request.held());
        match self.publish(self.queue.clone(), properties, &request.body).await? {
            PublishResult::Confirmed => {
                tracing::warn!(attempts, "a request that was on this host's disk went back to its queue");
                Ok(())
            }
            PublishResult::Returned => Err(format!("there is no queue {}", self.queue)),
            PublishResult::Nacked => Err(format!("the broker refused it for {}", self.queue)),
        }
    }

    async fn answer(&self, request: &Shelved) -> Result<(), String> {
        let Some(to) = request.properties.reply_to().clone().filter(|to| !to.as_str().is_empty()) else {
            tracing::warn!("a request that was interrupted is not run again, and nobody waits for its answer");
            return Ok(());
        };
        let message = "its worker ended before it did, and it is not run again";
        let reply = reply_format::error_reply("interrupted", message, Some(request.attempts));
        match self.publish(to, reply_format::last_reply_properties(&reply, &request.properties), &reply.body).await? {
            PublishResult::Confirmed => {
                tracing::warn!(attempts = request.attempts, "a request that was interrupted is answered so");
                self.tally.answers.increment();
            }
            PublishResult::Returned => self.tally.clients_gone.increment(),
            PublishResult::Nacked => return Err("the broker refused its answer".to_owned()),
        }
        Ok(())
    }

    /// Waits as long as the connection stands: what was sent once more while the broker lets nobody publish would come twice.
    async fn publish(
        &self,
        key: ShortString,
        properties: lapin::BasicProperties,
        body: &Arc<[u8]>,
    ) -> Result<PublishResult, String> {
        let published = Arc::clone(&self.link).publish(key, properties, Arc::clone(body)).await;
        published.map_err(|error| amqp::error_text(&error))
    }
}
