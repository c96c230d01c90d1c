//! The calls in flight, and what the engine keeps of the claims and messages that they are about.

use std::collections::HashMap;
use std::future::Future;

use tokio::task::{AbortHandle, JoinSet};

use crate::source::Claim;
use journeyman_domain::id::{LocalToken, Run, SourceId};
use journeyman_domain::limits::HANDLERS_DROP_TIMEOUT;
use journeyman_platform::host::containment::ProcessScope;

use super::calls::CallResult;
use super::claim_runtime::{ClaimRuntime, PolledMessage};
use super::handler_runtime::HandlerRuntime;

/// Processes that may remain of an ended payload.
#[derive(Debug, Clone)]
pub(super) struct UncleanedScope {
    pub(super) run: Run,
    pub(super) scope: ProcessScope,
}

pub(super) struct RunningCalls {
    pub(super) claims: HashMap<LocalToken, ClaimRuntime>,
    /// Also of claims that are closed.
    pub(super) uncleaned: HashMap<LocalToken, UncleanedScope>,
    pub(super) messages: HashMap<LocalToken, PolledMessage>,
    results: JoinSet<CallResult>,
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
            handlers,
            last_token,
        }
    }

    pub(super) fn next_token(&mut self) -> LocalToken {
        self.last_token += 1;
        LocalToken(self.last_token)
    }

    pub(super) fn spawn(&mut self, call: impl Future<Output = CallResult> + Send + 'static) {
        self.results.spawn(call);
    }

    pub(super) fn spawn_handler(&mut self, call: impl Future<Output = CallResult> + Send + 'static) {
        self.results.spawn_on(call, self.handlers.handle());
    }

    /// A call of a granted claim, aborted at the end of the claim.
    pub(super) fn spawn_claim_call<F>(
        &mut self,
        claim: LocalToken,
        call: impl FnOnce(std::sync::Arc<dyn Claim>) -> F,
    ) -> AbortHandle
    where
        F: Future<Output = CallResult> + Send + 'static,
    {
        let future = call(self.claim(claim).granted());
        let handle = self.results.spawn(future);
        self.claim(claim).track_call(handle.clone());
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

    pub(super) async fn next_result(&mut self) -> Option<Result<CallResult, tokio::task::JoinError>> {
        self.results.join_next().await
    }

    pub(super) async fn shut_down(&mut self) {
        if tokio::time::timeout(HANDLERS_DROP_TIMEOUT, self.results.shutdown()).await.is_err() {
            tracing::warn!("a handler does not stop when dropped; its processes may remain");
        }
    }
}
