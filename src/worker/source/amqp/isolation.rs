//! Starts requests one at a time that may have ended a worker or its service, with nothing else in the worker's hands that would be
//! tried again too.

use std::sync::{Arc, Weak};

use tokio::time::{Instant, sleep};

use super::AmqpSourceInner;
use super::claim::RequestClaim;
use crate::source::Grant;
use journeyman_domain::delivery_attempts::Isolation;
use journeyman_domain::limits::{AMQP_CHANNEL_CHECK_INTERVAL, AMQP_ISOLATION_AT_FIRST};

/// The request to start alone that this worker has taken, one at most.
#[derive(Default)]
pub(super) enum IsolatedRequest {
    #[default]
    None,
    /// What else the broker has delivered is being returned.
    Waiting { claim: Arc<RequestClaim>, isolation: Isolation },
    /// Nothing is consumed until it ends, or `until` then.
    Running { claim: Weak<RequestClaim>, until: Option<Instant> },
    /// The next request is consumed alone, since it may be another one.
    Ended,
}

impl AmqpSourceInner {
    /// Stops consuming; the request starts with a later [`Self::next_isolated`].
    pub(super) fn isolate(&self, claim: Arc<RequestClaim>, isolation: Isolation) {
        tracing::info!(claim.run = %claim.run, "a request was tried {} times before: it starts alone", claim.run.run);
        claim.session.retire();
        *self.isolated.lock() = IsolatedRequest::Waiting { claim, isolation };
    }

    /// The request that waits to start alone. Waits until it can start, or has run alone for as long as it must.
    pub(super) async fn next_isolated(&self) -> Option<Grant> {
        loop {
            let changed = {
                let mut isolated = self.isolated.lock();
                match std::mem::take(&mut *isolated) {
                    IsolatedRequest::None => return None,
                    IsolatedRequest::Waiting { claim, .. } if claim.session.is_lost() => return None,
                    IsolatedRequest::Waiting { claim, isolation } if self.can_start(isolation) => {
                        let until = (isolation == Isolation::AtFirst).then(|| Instant::now() + AMQP_ISOLATION_AT_FIRST);
                        *isolated = IsolatedRequest::Running { claim: Arc::downgrade(&claim), until };
                        return Some(self.grant(claim));
                    }
                    IsolatedRequest::Waiting { claim, isolation } => {
                        let session = Arc::clone(&claim.session);
                        *isolated = IsolatedRequest::Waiting { claim, isolation };
                        Some(session)
                    }
                    IsolatedRequest::Running { claim, until }
                        if claim.strong_count() > 0 && until.is_none_or(|until| Instant::now() < until) =>
                    {
                        *isolated = IsolatedRequest::Running { claim, until };
                        None
                    }
                    IsolatedRequest::Running { .. } | IsolatedRequest::Ended => {
                        *isolated = IsolatedRequest::Ended;
                        return None;
                    }
                }
            };
            let consumer_ended = async {
                match &changed {
                    Some(session) => session.arrived.notified().await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                () = self.claim_ended.notified() => {}
                () = consumer_ended => {}
                () = sleep(AMQP_CHANNEL_CHECK_INTERVAL) => {}
            }
        }
    }

    fn can_start(&self, isolation: Isolation) -> bool {
        // RabbitMQ 4.3 redelivers a request before it closes the channel that has lost it.
        if self.check_lost_sessions().is_err() {
            return false;
        }
        let sessions = self.sessions.lock();
        let held: usize = sessions.iter().map(|session| session.held_claims()).sum();
        sessions.iter().all(|session| session.has_returned_deliveries()) && (isolation != Isolation::Alone || held == 1)
    }

    pub(super) fn is_isolating(&self) -> bool {
        matches!(*self.isolated.lock(), IsolatedRequest::Waiting { .. })
    }

    /// The request that has not started.
    pub(super) fn take_waiting(&self) -> Option<Arc<RequestClaim>> {
        let mut isolated = self.isolated.lock();
        match std::mem::take(&mut *isolated) {
            IsolatedRequest::Waiting { claim, .. } => Some(claim),
            other @ (IsolatedRequest::None | IsolatedRequest::Running { .. } | IsolatedRequest::Ended) => {
                *isolated = other;
                None
            }
        }
    }
}
