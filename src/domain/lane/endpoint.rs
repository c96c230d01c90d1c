//! What attempts mean for an endpoint: whether it rests, whether it is failing, and when it is disabled.

use core::time::Duration;

use serde::{Deserialize, Serialize};

use super::retry::RETRY_AFTER_MAX;
use super::{Control, Reply};
use crate::named_enum;
use crate::staged::Stamp;

/// An endpoint without one success for so long is disabled, if it was tried often enough.
pub const DISABLE_AFTER: Duration = Duration::from_secs(5 * 24 * 60 * 60);
pub const DISABLE_ATTEMPTS_MIN: u32 = 10;
/// An endpoint without one success for so long is degraded.
pub const DEGRADED_AFTER: Duration = Duration::from_secs(60 * 60);
/// The rest of an endpoint that asks for one and does not say how long.
pub const THROTTLE_REST: Duration = Duration::from_secs(5);

named_enum! {
    /// Why an endpoint gets nothing.
    #[derive(Hash)]
    pub enum DisableReason {
        /// It answered 410.
        Gone = "gone",
        /// It asked for that.
        ByReceiver = "by-receiver",
        /// All attempts have failed for days.
        Failing = "failing",
        ByOperator = "by-operator",
    }
}

/// What attempts have shown of an endpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
pub struct EndpointHealth {
    /// Since the last success.
    pub failing_since: Option<Stamp>,
    /// Since the last success.
    pub failures: u32,
    pub rests_until: Option<Stamp>,
}

impl EndpointHealth {
    /// Returns why the endpoint gets nothing from now on, if so.
    pub fn on_reply(&mut self, reply: Reply, now: Stamp) -> Option<DisableReason> {
        if reply.is_success() {
            *self = Self::default();
        } else {
            self.failures = self.failures.saturating_add(1);
            self.failing_since.get_or_insert(now);
        }
        if let Some(asked) = reply.throttles() {
            self.rests_until = Some(now.plus(asked.max(THROTTLE_REST).min(RETRY_AFTER_MAX)));
        }
        let fails_for = self.failing_since.map_or(Duration::ZERO, |since| now.since(since));
        match reply {
            Reply::Answered { control: Some(Control::DisableEndpoint), .. } => Some(DisableReason::ByReceiver),
            Reply::Answered { status: 410, .. } => Some(DisableReason::Gone),
            Reply::Answered { .. } | Reply::Failed(_)
                if fails_for >= DISABLE_AFTER && self.failures >= DISABLE_ATTEMPTS_MIN =>
            {
                Some(DisableReason::Failing)
            }
            Reply::Answered { .. } | Reply::Failed(_) => None,
        }
    }

    /// Whether it has failed for long enough that an operator should look at it before it is disabled.
    pub fn is_degraded(&self, now: Stamp) -> bool {
        self.failures >= DISABLE_ATTEMPTS_MIN
            && self.failing_since.is_some_and(|since| now.since(since) >= DEGRADED_AFTER)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lane::ErrorClass;

    fn answered(status: u16, retry_after: Option<u64>, control: Option<Control>) -> Reply {
        Reply::Answered { status, retry_after: retry_after.map(Duration::from_secs), control }
    }

    #[test]
    fn an_endpoint_is_disabled_after_days_without_a_success_and_enough_attempts() {
        let days = i64::try_from(DISABLE_AFTER.as_millis()).unwrap();
        let failed = Reply::Failed(ErrorClass::Timeout);
        let mut rarely_tried = EndpointHealth::default();
        rarely_tried.on_reply(failed, Stamp(0));
        assert_eq!(rarely_tried.on_reply(failed, Stamp(days)), None);
        let mut health = EndpointHealth::default();
        for _ in 0..DISABLE_ATTEMPTS_MIN {
            assert_eq!(health.on_reply(failed, Stamp(0)), None);
        }
        assert_eq!((health.is_degraded(Stamp(3_599_999)), health.is_degraded(Stamp(3_600_000))), (false, true));
        health.on_reply(answered(200, None, None), Stamp(days - 2));
        assert_eq!((health.on_reply(failed, Stamp(days)), health.failures), (None, 1), "a success starts over");
        for _ in 2..DISABLE_ATTEMPTS_MIN {
            assert_eq!(health.on_reply(failed, Stamp(2 * days)), None);
        }
        assert_eq!(health.on_reply(failed, Stamp(2 * days)), Some(DisableReason::Failing));
    }

    #[test]
    fn a_receiver_disables_itself_and_says_when_it_wants_more() {
        for (reply, disabled, rests) in [
            (answered(410, None, None), Some(DisableReason::Gone), None),
            (answered(200, None, Some(Control::DisableEndpoint)), Some(DisableReason::ByReceiver), None),
            (answered(429, Some(60), None), None, Some(60_000)),
            (answered(503, None, None), None, Some(5_000)),
            (answered(500, Some(60), None), None, None),
        ] {
            let mut health = EndpointHealth::default();
            assert_eq!(
                (health.on_reply(reply, Stamp(0)), health.rests_until),
                (disabled, rests.map(Stamp)),
                "{reply:?}"
            );
        }
    }
}
