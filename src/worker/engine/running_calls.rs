//! The calls in flight, and what the engine keeps of the claims and messages that they are about.

use std::collections::HashMap;
use std::future::Future;
use std::sync::{Arc, OnceLock};

use tokio::task::{AbortHandle, JoinSet};

use crate::source::Claim;
use journeyman_domain::id::{LocalToken, Run, SourceId};
use journeyman_domain::limits::{HANDLERS_DROP_TIMEOUT, WORK_DISCARD_EXIT_TIMEOUT};
use journeyman_platform::host::containment::ProcessScope;
use journeyman_platform::tasks::supervised;

use super::calls::CallResult;
use super::claim_runtime::{ClaimRuntime, PolledMessage};
use super::handler_runtime::HandlerRuntime;

/// What a panic outside of handlers and adapters is logged as.
const CALL: &str = "a worker's call";

/// Processes that may remain of an ended payload.
#[derive(Debug, Clone)]
pub(super) struct UncleanedScope {
    pub(super) run: Run,
    pub(super) scope: ProcessScope,
    /// A list of them, once they were looked at.
    pub(super) processes: Arc<OnceLock<String>>,
}

impl UncleanedScope {
    pub(super) fn new(run: Run, scope: ProcessScope) -> Self {
        Self { run, scope, processes: Arc::default() }
    }
}

pub(super) struct RunningCalls {
    pub(super) claims: HashMap<LocalToken, ClaimRuntime>,
    /// The scopes that may have processes, of open and of closed claims.
    pub(super) uncleaned: HashMap<LocalToken, UncleanedScope>,
    pub(super) messages: HashMap<LocalToken, PolledMessage>,
    results: JoinSet<CallResult>,
    /// Removals of what ended claims have left elsewhere.
    discards: JoinSet<()>,
    handlers: HandlerRuntime,
    last_token: u64,
}

impl RunningCalls {
    pub(super) fn new(handlers: HandlerRuntime, last_token: u64) -> Self {
        Self {
            claims: HashMap::new(),
            uncleaned: HashMap::new(),
            messages: HashMap::new(),
            results: JoinSet::new(),
            discards: JoinSet::new(),
            handlers,
            last_token,
        }
    }

    pub(super) fn next_token(&mut self) -> LocalToken {
        self.last_token += 1;
        LocalToken(self.last_token)
    }

    pub(super) fn spawn(&mut self, call: impl Future<Output = CallResult> + Send + 'static) {
        self.results.spawn(supervised(CALL, call));
    }

    pub(super) fn spawn_handler(&mut self, call: impl Future<Output = CallResult> + Send + 'static) {
        self.results.spawn_on(supervised(CALL, call), &self.handlers.handle);
    }

    /// Outlives its claim, and delays the exit by at most [`WORK_DISCARD_EXIT_TIMEOUT`].
    pub(super) fn spawn_discard(&mut self, discard: impl Future<Output = ()> + Send + 'static) {
        while self.discards.try_join_next().is_some() {}
        self.discards.spawn_on(supervised(CALL, discard), &self.handlers.handle);
    }

    /// A call of a granted claim, aborted at the end of the claim.
    pub(super) fn spawn_claim_call<F>(
        &mut self,
        claim: LocalToken,
        call: impl FnOnce(Arc<dyn Claim>) -> F,
    ) -> AbortHandle
    where
        F: Future<Output = CallResult> + Send + 'static,
    {
        let future = call(self.claim(claim).granted());
        let handle = self.results.spawn(supervised(CALL, future));
        self.claim(claim).calls.push(handle.clone());
        handle
    }

    /// The rules perform actions of open claims only.
    pub(super) fn claim(&mut self, claim: LocalToken) -> &mut ClaimRuntime {
        let Some(live) = self.claims.get_mut(&claim) else { unreachable!("{claim:?} is not open") };
        live
    }

    /// The granted claim of a run.
    pub(super) fn find(&self, source: SourceId, run: &Run) -> Option<LocalToken> {
        let is_held = |live: &ClaimRuntime| live.source == source && live.run == *run && live.claim.is_some();
        self.claims.iter().find(|(_, live)| is_held(live)).map(|(claim, _)| *claim)
    }

    pub(super) async fn next_result(&mut self) -> Option<CallResult> {
        loop {
            // An error is the end of a call that was aborted with its claim.
            if let Ok(result) = self.results.join_next().await? {
                return Some(result);
            }
        }
    }

    /// One that has ended already.
    pub(super) fn try_next_result(&mut self) -> Option<CallResult> {
        loop {
            if let Ok(result) = self.results.try_join_next()? {
                return Some(result);
            }
        }
    }

    pub(super) async fn finish_discards(&mut self) {
        let finishing = async { while self.discards.join_next().await.is_some() {} };
        // The next process goes on with the rest.
        _ = tokio::time::timeout(WORK_DISCARD_EXIT_TIMEOUT, finishing).await;
    }

    pub(super) async fn shut_down(&mut self) {
        if tokio::time::timeout(HANDLERS_DROP_TIMEOUT, self.results.shutdown()).await.is_err() {
            tracing::warn!("a handler does not stop when dropped; its processes may remain");
        }
    }
}

#[cfg(test)]
mod tests {
    use journeyman_platform::tasks;

    use super::*;

    #[tokio::test]
    async fn a6_a_panic_outside_of_handlers_and_adapters_is_told_and_not_only_logged() {
        let mut calls = RunningCalls::new(HandlerRuntime::shared(), 0);
        calls.spawn_handler(async { panic!("in a clean-up") });
        let message = tokio::select! {
            message = tasks::failure() => message,
            _ = calls.next_result() => panic!("it has no result"),
        };
        assert!(message.contains("a worker's call panicked: in a clean-up"), "{message}");
    }
}
