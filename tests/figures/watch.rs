//! Stands between worker and source where reclaims are measured, and notes how much of its lease each claim had used
//! when it was extended.

use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use journeyman::domain::id::{PriorityQueue, Run};
use journeyman::domain::outcome::Outcome;
use journeyman::domain::poll::Capabilities;
use journeyman::source::{
    Artifact, Claim, ClaimWindow, Grant, Message, OpenResult, PollBatch, RecoveryBatch, Source, SourceFuture,
};

use crate::roles::now;

/// What has been noted.
#[derive(Default)]
pub(crate) struct Watched(Mutex<Notes>);

#[derive(Default)]
struct Notes {
    /// By the run's hash, so that the watching costs little memory itself.
    leases: HashMap<u64, Lease>,
    answered: u64,
    refused: u64,
    /// Extended when two thirds of the lease were over, or later than our timers may be late after that.
    late: u64,
    worst_permille: u128,
}

#[derive(Clone, Copy)]
struct Lease {
    sent_at: Duration,
    length: Duration,
}

/// How late a timer may fire, as the rules of the lease have it.
const TIMER: Duration = journeyman::domain::lease::TIMER_LATENESS;

impl Watched {
    pub(crate) fn watch(self: &Arc<Self>, source: Arc<dyn Source>) -> Arc<dyn Source> {
        Arc::new(Through { source, watched: Arc::clone(self) })
    }

    /// Reclaims answered, refused, late, and the largest share of a lease, in thousandths, that had passed when its
    /// extension was answered.
    pub(crate) fn told(&self) -> String {
        let notes = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        format!("{} {} {} {}", notes.answered, notes.refused, notes.late, notes.worst_permille)
    }

    fn note(&self, act: impl FnOnce(&mut Notes)) {
        act(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner));
    }

    fn granted(&self, run: &Run, lease: Lease) {
        self.note(|notes| {
            notes.leases.insert(hash(run), lease);
        });
    }

    fn extended(&self, run: &Run, sent_at: Duration, answer: Option<Duration>) {
        let answered_at = now();
        self.note(|notes| {
            let Some(length) = answer else {
                notes.refused += 1;
                return;
            };
            let Some(old) = notes.leases.insert(hash(run), Lease { sent_at, length }) else { return };
            notes.answered += 1;
            let used = answered_at - old.sent_at;
            notes.worst_permille = notes.worst_permille.max(used.as_nanos() * 1000 / old.length.as_nanos().max(1));
            if sent_at - old.sent_at > old.length * 2 / 3 + TIMER {
                notes.late += 1;
            }
        });
    }
}

fn hash(run: &Run) -> u64 {
    let mut hasher = DefaultHasher::new();
    run.hash(&mut hasher);
    hasher.finish()
}

struct Through {
    source: Arc<dyn Source>,
    watched: Arc<Watched>,
}

impl Source for Through {
    fn describe(&self) -> String {
        self.source.describe()
    }

    fn service_id(&self) -> String {
        self.source.service_id()
    }

    fn claimant(&self) -> String {
        self.source.claimant()
    }

    fn capabilities(&self) -> Capabilities {
        self.source.capabilities()
    }

    fn open(&self) -> SourceFuture<'_, OpenResult> {
        self.source.open()
    }

    fn poll(&self, lane: PriorityQueue, max: u8) -> SourceFuture<'_, PollBatch> {
        Box::pin(async move {
            let sent_at = now();
            let batch = self.source.poll(lane, max).await?;
            for grant in &batch.grants {
                // A long poll may have waited long before the claim was made: then the lease is counted from too early.
                self.watched.granted(&grant.run, Lease { sent_at, length: grant.lease });
            }
            Ok(batch)
        })
    }

    fn claim<'a>(&'a self, message: &'a Message) -> SourceFuture<'a, Grant> {
        self.source.claim(message)
    }

    fn delete<'a>(&'a self, lane: PriorityQueue, id: &'a str, receipt: &'a str) -> SourceFuture<'a, ()> {
        self.source.delete(lane, id, receipt)
    }

    fn recover<'a>(&'a self, held: &'a [Run], asked: &'a [ClaimWindow]) -> SourceFuture<'a, RecoveryBatch> {
        self.source.recover(held, asked)
    }

    fn take_over<'a>(&'a self, run: &'a Run) -> SourceFuture<'a, Grant> {
        self.source.take_over(run)
    }

    fn reclaim<'a>(&'a self, claim: &'a Claim) -> SourceFuture<'a, Duration> {
        Box::pin(async move {
            let sent_at = now();
            let answer = self.source.reclaim(claim).await;
            self.watched.extended(claim.run(), sent_at, answer.as_ref().ok().copied());
            answer
        })
    }

    fn report<'a>(&'a self, claim: &'a Claim, outcome: Outcome) -> SourceFuture<'a, ()> {
        self.source.report(claim, outcome)
    }

    fn upload<'a>(&'a self, claim: &'a Claim, artifact: &'a Artifact) -> SourceFuture<'a, ()> {
        self.source.upload(claim, artifact)
    }

    fn is_canceled<'a>(&'a self, claim: &'a Claim) -> SourceFuture<'a, bool> {
        self.source.is_canceled(claim)
    }
}
