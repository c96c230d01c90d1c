//! A report that is begun by what ran the payload, before the rules have asked for it: asking first would take a word to another
//! thread, and a request waits for it.
//!
//! When that may be is decided in [`crate::domain::prompt`]. The rules hear of it as of any other report, and of where they would
//! have reported something else by then: the source knows what it was told first.

use std::future::{Future, ready};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Poll, Waker};

use crate::domain::outcome::Outcome;
use crate::domain::prompt::{AtEnd, Left, Orders, may_be_prompt};
use crate::handler::Context;
use crate::host::crash_points::crash_point;
use crate::source::{CallError, Claim, Source};

use super::calls::{CallResult, call_guarded};

/// Who may begin it.
pub(super) struct Prompt {
    source: Arc<dyn Source>,
    claim: Claim,
}

/// A report under way, which somebody has to wait for.
pub(super) struct Begun(Pin<Box<dyn Future<Output = Result<(), CallError>> + Send>>);

impl Prompt {
    /// Where nothing is written down of what was decided. A report that a later life would repeat is begun by the rules alone.
    pub(super) fn of(source: &Arc<dyn Source>, claim: &Claim) -> Option<Self> {
        may_be_prompt(source.capabilities()).then(|| Self { source: Arc::clone(source), claim: claim.clone() })
    }

    /// Begins it, if that is how the payload ended.
    pub(super) fn begin(self, back: &mut CallResult, context: &Context) {
        let CallResult::Ended { verdict, emptiness, report, .. } = back else { return };
        let nothing_left = context.artifacts().is_empty() && context.log().is_empty();
        let end = AtEnd {
            verdict: *verdict,
            emptiness: *emptiness,
            left: if nothing_left { Left::Nothing } else { Left::Something },
            orders: if context.cancellation().is_none() { Orders::None } else { Orders::ToEnd },
            usable_until: context.expires_at(),
        };
        if end.reported_at_once(context.now()) != Some(Begun::OUTCOME) {
            return;
        }
        crash_point("before-report");
        let Self { source, claim } = self;
        let mut begun: Begun =
            Begun(Box::pin(async move { call_guarded("report", source.report(&claim, Begun::OUTCOME)).await }));
        // Whoever waits for it polls it again.
        if let Poll::Ready(answer) = begun.0.as_mut().poll(&mut std::task::Context::from_waker(Waker::noop())) {
            begun = Begun(Box::pin(ready(answer)));
        }
        *report = Some(begun);
    }
}

impl Begun {
    /// What it reports.
    pub(super) const OUTCOME: Outcome = Outcome::Completed;

    /// What came of it.
    pub(super) async fn answer(self) -> Result<(), CallError> {
        self.0.await
    }
}
