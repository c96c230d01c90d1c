//! Keeps the lease of this node, in a task that waits for nothing but the store: the lease ends in time whatever the store and the
//! engine do.

use std::time::Duration;

use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::store::{Lease, StoreFailure};
use journeyman_domain::lane::partitions::Partition;
use journeyman_domain::limits::{NOTIFIER_LEASE_RENEWAL, NOTIFIER_STORE_RETRY};
use journeyman_domain::time::Instant;
use journeyman_platform::host::clock::Clock;

/// What this node may deliver.
#[derive(Clone)]
pub(super) struct Term {
    pub(super) lease: Lease,
    /// Nothing is sent later. `None` is for ever. Attempts look at it too, in case this process has slept.
    pub(super) until: Option<Instant>,
    renew_at: Instant,
    /// Ends the attempts of this lease.
    pub(super) ended: CancellationToken,
}

impl Term {
    pub(super) fn new((lease, lasts): (Lease, Option<Duration>), asked_at: Instant) -> Self {
        let until = lasts.map(|lasts| asked_at.plus(lasts * 3 / 4));
        Self { lease, until, renew_at: asked_at.plus(NOTIFIER_LEASE_RENEWAL), ended: CancellationToken::new() }
    }

    pub(super) fn has(&self, partition: Partition) -> bool {
        self.lease.has.contains(&partition) && !self.lease.drain.contains(&partition)
    }
}

/// Renews the lease until the caller drops it. `let_go` has the partitions that another node is to have, and of which no attempt is
/// under way.
pub(super) async fn keep<F: Future<Output = Result<(Lease, Option<Duration>), StoreFailure>>>(
    renew: impl Fn(Vec<Partition>) -> F,
    clock: Clock,
    term: watch::Sender<Term>,
    let_go: watch::Receiver<Vec<Partition>>,
) {
    loop {
        let (until, renew_at) = {
            let term = term.borrow();
            (term.until, term.renew_at)
        };
        let Some(until) = until else { return std::future::pending().await };
        let renewing = async {
            clock.sleep_until(renew_at).await;
            loop {
                let (asked_at, partitions) = (clock.now(), let_go.borrow().clone());
                match renew(partitions).await {
                    Ok(renewed) => {
                        let renewed = Term::new(renewed, asked_at);
                        if renewed.until.is_none_or(|until| clock.now() < until) {
                            break renewed;
                        }
                    }
                    Err(error) => {
                        tracing::error!("cannot renew the lease of this node, retrying: {error}");
                        clock.sleep_until(clock.now().plus(NOTIFIER_STORE_RETRY)).await;
                    }
                }
            }
        };
        let ending = async {
            clock.sleep_until(until).await;
            term.send_if_modified(|term| {
                let is_new = !term.ended.is_cancelled();
                if is_new {
                    tracing::warn!("this node could not renew its lease in time; its attempts are repeated");
                    term.lease = Lease::default();
                    term.ended.cancel();
                }
                is_new
            });
            std::future::pending().await
        };
        let renewed = tokio::select! {
            renewed = renewing => renewed,
            never = ending => never,
        };
        term.send_modify(|term| {
            let ended = if term.ended.is_cancelled() { renewed.ended.clone() } else { term.ended.clone() };
            *term = Term { ended, ..renewed };
        });
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use journeyman_domain::limits::NOTIFIER_LEASE;

    use super::*;

    fn lease() -> (Lease, Option<Duration>) {
        let has = [Partition(7)].into();
        (Lease { has, nodes: 1, ..Lease::default() }, Some(NOTIFIER_LEASE))
    }

    #[tokio::test(start_paused = true)]
    async fn f4_a_lease_ends_in_time_while_the_store_hangs_and_begins_anew_when_it_answers() {
        let clock = Clock::tokio();
        let (sender, mut term) = watch::channel(Term::new(lease(), clock.now()));
        let (_let_go, partitions) = watch::channel(Vec::new());
        let first = term.borrow().clone();
        let calls = Cell::new(0);
        let renew = |_| {
            calls.set(calls.get() + 1);
            let is_away = calls.get() == 2;
            async move {
                if is_away {
                    tokio::time::sleep(NOTIFIER_LEASE * 4).await;
                    return Err(StoreFailure::Unusable("timeout".to_owned()));
                }
                Ok(lease())
            }
        };
        let checking = async {
            term.changed().await.unwrap();
            let renewed = term.borrow_and_update().clone();
            assert!(renewed.until > first.until && !first.ended.is_cancelled(), "attempts go on");
            first.ended.cancelled().await;
            assert_eq!(Some(clock.now()), renewed.until);
            term.changed().await.unwrap();
            assert!(!term.borrow_and_update().has(Partition(7)), "nothing is begun");
            term.changed().await.unwrap();
            assert!(term.borrow().has(Partition(7)) && !term.borrow().ended.is_cancelled());
        };
        tokio::select! {
            () = keep(renew, clock, sender, partitions) => {}
            () = checking => {}
        }
        assert_eq!(calls.get(), 3);
    }
}
