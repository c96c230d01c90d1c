//! How a claim that takes long is put on the shelf and acknowledged before its answer.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::amqp;
use crate::domain::refusal::Refusal;
use crate::host::clock;
use crate::host::crash_points::crash_point;
use crate::source::CallError;

use super::claim::{RequestClaim, State};
use super::session::AckKind;
use super::shelf::{Entry, Left, Shelf, Shelved, Writing};

/// The broker is told what becomes of a request, and was heard to be there then.
pub(super) type Telling = Pin<Box<dyn Future<Output = lapin::Result<bool>> + Send>>;

/// How far an early acknowledgement is. It, too, is kept over a call that was dropped.
#[derive(Default)]
pub(super) enum Shelving {
    #[default]
    No,
    Writing(Entry, Writing),
    Written(Entry),
    Acknowledging(Entry, Telling),
    /// Its connection ended before anybody knew.
    Unknown(Entry),
    Done(Entry),
}

impl RequestClaim {
    /// Whether it is to be put on the shelf, and nobody is about to.
    pub(super) fn is_to_be_shelved(&self) -> bool {
        self.context.shelf.is_some() && !self.is_shelved() && !self.shelving.swap(true, Ordering::AcqRel)
    }

    /// Puts it on the shelf and acknowledges it. Where that cannot be done nothing is changed, and said, and it may be tried again.
    pub(super) async fn shelve(&self) {
        // Otherwise it is being settled.
        if let Ok(mut state) = self.state.try_lock()
            && state.may_be_shelved()
            && let Err(refused) = self.shelve_on(&mut state).await
        {
            tracing::warn!(claim.run = %self.run, "not acknowledged before its answer: {}", refused.message);
        }
        self.shelving.store(false, Ordering::Release);
    }

    pub(super) async fn shelve_on(&self, state: &mut State) -> Result<(), CallError> {
        let Some(shelf) = &self.context.shelf else { return Ok(()) };
        loop {
            match &mut state.shelving {
                Shelving::No => {
                    let attempts = self.run.run.saturating_add(1);
                    let since = clock::unix_time().saturating_sub(self.received_at.elapsed());
                    let (properties, body) = (self.properties.clone(), Arc::clone(&self.body));
                    let (entry, there) = (shelf.entry(), Arc::clone(shelf));
                    let place = entry.clone();
                    let writing = tokio::task::spawn_blocking(move || {
                        there.write(&place, &Shelved { attempts, since, properties, body })
                    });
                    state.shelving = Shelving::Writing(entry, writing);
                }
                Shelving::Writing(entry, writing) => {
                    let written = writing.await.map_err(std::io::Error::other).and_then(|written| written);
                    let entry = entry.clone();
                    if let Err(error) = written {
                        state.shelving = Shelving::No;
                        return self.unshelved(&error);
                    }
                    state.shelving = Shelving::Written(entry);
                }
                Shelving::Written(entry) => {
                    let entry = entry.clone();
                    state.shelving = Shelving::Acknowledging(entry, self.acknowledge(AckKind::Acknowledge));
                }
                Shelving::Acknowledging(entry, acknowledging) => {
                    let answer = acknowledging.await;
                    let entry = entry.clone();
                    return self.acknowledged_early(state, shelf, entry, answer);
                }
                Shelving::Unknown(_) => return Err(self.call_error(Refusal::Gone, "its connection was lost")),
                Shelving::Done(_) => return Ok(()),
            }
        }
    }

    fn acknowledged_early(
        &self,
        state: &mut State,
        shelf: &Shelf,
        entry: Entry,
        answer: lapin::Result<bool>,
    ) -> Result<(), CallError> {
        match answer {
            Ok(true) => {
                crash_point("shelf-acknowledged");
                state.shelving = Shelving::Done(entry);
                shelf.hold();
                self.shelved.store(true, Ordering::Release);
                // What becomes of its channel is nothing to it any more.
                self.session.mark_settled(&self.run);
                self.uncount();
                self.context.counters.shelved.increment();
                tracing::info!(claim.run = %self.run, "acknowledged before its answer; the request is on this host's disk until then");
                Ok(())
            }
            // It was never sent.
            Ok(false) => {
                state.shelving = Shelving::No;
                shelf.leave(Left::Unneeded(entry, None));
                Err(self.unacknowledged_error("its channel is closed"))
            }
            // Whether the broker has heard of it nobody knows. What is here stays, so that it may run twice and is not lost.
            Err(error) => {
                state.shelving = Shelving::Unknown(entry);
                Err(self.unacknowledged_error(&amqp::error_text(&error)))
            }
        }
    }

    fn unshelved(&self, error: &std::io::Error) -> Result<(), CallError> {
        self.context.counters.unshelved.increment();
        tracing::error!(
            alert = "not-shelved", claim.run = %self.run, %error,
            "[alert operator] a request cannot be put on this host's disk, so it is not acknowledged before its answer, and is ended when \
             the broker's patience is"
        );
        Ok(())
    }

    /// Leaves word of what is on the shelf and is not needed there, or has nobody any more.
    pub(super) fn leave(&self, shelving: Shelving) {
        let Some(shelf) = &self.context.shelf else { return };
        let settled = self.is_settled.load(Ordering::Relaxed);
        match shelving {
            Shelving::No => {}
            Shelving::Writing(entry, writing) => shelf.leave(Left::Unneeded(entry, Some(writing))),
            Shelving::Written(entry) => shelf.leave(Left::Unneeded(entry, None)),
            Shelving::Done(entry) => {
                shelf.release();
                if !settled {
                    shelf.leave(Left::Interrupted(entry));
                }
            }
            Shelving::Acknowledging(entry, _) | Shelving::Unknown(entry) => {
                shelf.leave(if settled { Left::Unneeded(entry, None) } else { Left::Interrupted(entry) });
            }
        }
    }
}
