//! Watches an EC2 instance: a token first, then the instance action.

use core::time::Duration;

use super::{NextRequest, NoticeEvent, NoticeReading, NoticeTracker, PollSchedule};
use crate::domain::time::Instant;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AwsRequest {
    /// Required by all other requests.
    Token,
    InstanceAction,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AwsReply {
    Reading(NoticeReading),
    /// The token is not accepted.
    Unauthorized,
}

#[derive(Debug, Clone)]
pub struct AwsTracker {
    token: NoticeTracker,
    token_until: Option<Instant>,
    /// Whether the current token has been accepted.
    token_accepted: bool,
    /// A new token was issued, and no reading has confirmed the recovery yet.
    recovery_unreported: bool,
    action: NoticeTracker,
}

impl AwsTracker {
    pub const fn new(pace: PollSchedule, seed: u64) -> Self {
        Self {
            token: NoticeTracker::new(PollSchedule { interval: Duration::ZERO, ..pace }, seed),
            token_until: None,
            token_accepted: false,
            recovery_unreported: false,
            action: NoticeTracker::new(pace, seed ^ 1),
        }
    }

    pub fn next_request(&self, now: Instant) -> NextRequest<AwsRequest> {
        if now < self.action.next_at() {
            NextRequest::WaitUntil(self.action.next_at())
        } else if self.token_until.is_some_and(|until| now < until) {
            NextRequest::Call(AwsRequest::InstanceAction)
        } else if now < self.token.next_at() {
            NextRequest::WaitUntil(self.token.next_at())
        } else {
            NextRequest::Call(AwsRequest::Token)
        }
    }

    /// A token was issued with this lifetime, or none was. It is used for nine tenths of it.
    pub fn on_token(&mut self, life: Option<Duration>, sent_at: Instant, now: Instant) -> Option<NoticeEvent> {
        self.token_accepted = false;
        self.token_until = life.map(|life| sent_at.plus(life - life / 10));
        let usable = self.token_until.is_some_and(|until| now < until);
        let news = self.token.on_reading(
            if usable { NoticeReading::Nothing } else { NoticeReading::Unavailable },
            sent_at,
            now,
        );
        self.recovery_unreported |= news == Some(NoticeEvent::WatchRecovered);
        news.filter(|news| *news != NoticeEvent::WatchRecovered)
    }

    /// Answers [`AwsRequest::InstanceAction`].
    pub fn on_reply(&mut self, reply: AwsReply, sent_at: Instant, now: Instant) -> Option<NoticeEvent> {
        match reply {
            AwsReply::Reading(answer) => {
                self.token_accepted = true;
                let news = self.action.on_reading(answer, sent_at, now);
                let well = answer != NoticeReading::Unavailable && core::mem::take(&mut self.recovery_unreported);
                news.or_else(|| well.then_some(NoticeEvent::WatchRecovered))
            }
            AwsReply::Unauthorized => {
                self.token_until = None;
                // A token that was accepted has expired; one that never was is a failure, or this would spin.
                if core::mem::take(&mut self.token_accepted) {
                    return None;
                }
                self.action.on_reading(NoticeReading::Unavailable, sent_at, now)
            }
        }
    }
}
