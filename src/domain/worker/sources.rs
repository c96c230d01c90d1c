//! Opening, polling and recovering sources.

use alloc::boxed::Box;
use alloc::collections::BTreeMap;
use alloc::vec::Vec;

use super::claims::Origin;
use super::{Alert, Effect, Exit, Found, Haul, Lanes, POLL_MAX, TROUBLES_SAID, TROUBLES_SAID_EVERY, Work, Worker};
use crate::domain::id::{Run, SourceId, Token};
use crate::domain::poll::Ready;
use crate::domain::refusal::Refusal;
use crate::domain::time::Instant;

impl Worker {
    pub(super) fn on_opened(
        &mut self,
        source: SourceId,
        sent_at: Instant,
        answer: Result<Lanes, Refusal>,
        now: Instant,
    ) {
        let Some(feed) = self.feeds.get_mut(usize::from(source.0)) else { return };
        match answer {
            Ok(lanes) => {
                feed.poller.opened(lanes.count, lanes.usable_for.map(|span| sent_at.plus(span)), now);
                self.retry_stale_deletes(source, now);
            }
            Err(refusal) => self.on_source_refused(source, refusal, now),
        }
    }

    pub(super) fn on_polled(
        &mut self,
        source: SourceId,
        sent_at: Instant,
        answer: Result<Haul, Refusal>,
        now: Instant,
    ) {
        let Some(feed) = self.feeds.get_mut(usize::from(source.0)) else { return };
        let mut slots = core::mem::take(&mut feed.reserved);
        match answer {
            Ok(haul) => {
                let claims = feed.poller.manner().long_poll;
                feed.accepted |= claims;
                feed.polled = true;
                let lost = if claims { haul.messages.len() } else { 0 };
                if lost > 0 {
                    feed.poller.look_for_lost();
                }
                if lost > 0 && haul.claims.is_empty() {
                    // Each further poll may cost one more claim: no faster than after any other trouble.
                    feed.poller.refused(Refusal::Retry { after: None }, now, &mut self.jitter);
                } else {
                    feed.poller.answered(haul.messages.len() + haul.claims.len(), now, &mut self.jitter);
                }
                // I13: of several receptions of one message in a batch, the last one has the valid receipt.
                let latest: BTreeMap<Box<str>, Token> =
                    haul.messages.iter().map(|message| (message.id.clone(), message.token)).collect();
                for message in haul.messages {
                    if claims {
                        self.effects.push_back(Effect::Alert(Alert::Unreadable { source, id: message.id }));
                        self.effects.push_back(Effect::Forget(message.token));
                    } else if latest.get(&message.id) == Some(&message.token) {
                        self.on_message(source, message, &mut slots, now);
                    } else {
                        self.effects.push_back(Effect::Forget(message.token));
                    }
                }
                for brought in haul.claims {
                    self.on_brought(source, brought, sent_at, Origin::Poll(slots.pop()), now);
                }
            }
            Err(refusal) => self.on_source_refused(source, refusal, now),
        }
        self.slots.give(slots);
        self.release(source, now);
    }

    pub(super) fn on_recovered(
        &mut self,
        source: SourceId,
        sent_at: Instant,
        answer: Result<Found, Refusal>,
        now: Instant,
    ) {
        let Some(feed) = self.feeds.get_mut(usize::from(source.0)) else { return };
        match answer {
            Ok(Found { claims, missed, others }) => {
                // I28: what an earlier life of this worker held may have run already, so it is handed back, never resumed.
                // What a lost reply of this life granted has not, where the clocks can tell.
                let began = self.began.unwrap_or(now);
                let fresh = !feed.poller.unread().may_be_of_earlier_life(began);
                if core::mem::replace(&mut feed.others, others) < others {
                    self.effects.push_back(Effect::Alert(Alert::Namesake { source, claims: others }));
                }
                match missed {
                    None => feed.poller.answered(claims.len(), now, &mut self.jitter),
                    Some(refusal) => {
                        feed.poller.refused(refusal, now, &mut self.jitter);
                    }
                }
                for one in claims {
                    let origin = if fresh {
                        Origin::Poll(self.slots.take(1.min(self.allowance())).pop())
                    } else {
                        Origin::EarlierLife
                    };
                    self.on_brought(source, one, sent_at, origin, now);
                }
            }
            Err(refusal) => {
                feed.poller.refused(refusal, now, &mut self.jitter);
            }
        }
    }

    fn on_source_refused(&mut self, source: SourceId, refusal: Refusal, now: Instant) {
        let Some(feed) = self.feeds.get_mut(usize::from(source.0)) else { return };
        let denied = feed.poller.refused(refusal, now, &mut self.jitter);
        match refusal {
            Refusal::Denied => self.on_denied(source, denied, now),
            Refusal::Throttled { .. } => self.effects.push_back(Effect::Alert(Alert::Throttled { source })),
            // A poll that worked before shows that our requests are right; this one met something passing.
            Refusal::Rejected if !feed.accepted && !feed.polled => self.drain(Exit::Misconfigured, now),
            Refusal::Retry { .. } | Refusal::Gone | Refusal::Rejected | Refusal::Stale => {
                let in_a_row = feed.poller.troubles();
                self.say_trouble(source, in_a_row);
            }
        }
    }

    /// A failure that may pass is nobody's business, a row of them is.
    pub(super) fn say_trouble(&mut self, source: SourceId, in_a_row: u32) {
        if in_a_row == TROUBLES_SAID || (in_a_row > 0 && in_a_row.is_multiple_of(TROUBLES_SAID_EVERY)) {
            self.effects.push_back(Effect::Alert(Alert::Trouble { source, in_a_row }));
        }
    }

    pub(super) fn on_denied(&mut self, source: SourceId, in_a_row: u32, now: Instant) {
        self.effects.push_back(Effect::Alert(Alert::Denied { source, in_a_row }));
        if in_a_row >= self.policy.denied_max {
            self.drain(Exit::CredentialsRefused, now);
        }
    }

    /// Sources that have waited longest come first. Long polls under way at the same time share the free slots.
    pub(super) fn start_polls(&mut self, now: Instant) {
        let mut due: Vec<(Instant, usize)> = self
            .feeds
            .iter()
            .enumerate()
            .filter(|(_, feed)| feed.is_wanted() && !matches!(feed.poller.ready(now), Ready::Busy | Ready::At(_)))
            .map(|(index, feed)| (feed.poller.waiting_since(), index))
            .collect();
        due.sort_unstable();
        let mut waiting = u32::try_from(due.len()).unwrap_or(u32::MAX);
        for (_, index) in due {
            self.start(index, waiting, now);
            waiting -= 1;
        }
    }

    /// On the way out a source is opened only where a delete waits for its URLs.
    pub(super) fn open_for_deletes(&mut self, now: Instant) {
        for (index, feed) in self.feeds.iter_mut().enumerate() {
            let source = SourceId(u16::try_from(index).unwrap_or(u16::MAX));
            let waits = self.kept.values().any(|kept| kept.source == source && kept.deletion.due().is_some());
            if waits && feed.poller.ready(now) == Ready::Open {
                feed.poller.opening();
                self.effects.push_back(Effect::Open(source));
            }
        }
    }

    fn start(&mut self, index: usize, waiting: u32, now: Instant) {
        let source = SourceId(u16::try_from(index).unwrap_or(u16::MAX));
        let allowed = self.allowance();
        let Some(feed) = self.feeds.get_mut(index) else { return };
        match feed.poller.ready(now) {
            Ready::Open => {
                feed.poller.opening();
                self.effects.push_back(Effect::Open(source));
            }
            Ready::Recover => {
                feed.poller.recovering();
                let ours = |work: &&Work| work.deployment == feed.deployment;
                let known = self.by_run.keys().chain(self.ended.iter()).chain(self.given_up.iter()).filter(ours);
                let held: Vec<Run> = known.map(|work| work.run.clone()).collect();
                let asked = feed.poller.unread().windows(now);
                self.effects.push_back(Effect::Recover { source, held, asked });
            }
            Ready::Poll(lane) => {
                let share = self.slots.free().div_ceil(waiting.max(1)).min(POLL_MAX).min(allowed);
                if share == 0 {
                    feed.poller.passed_over();
                    return;
                }
                feed.reserved = self.slots.take(share);
                feed.poller.poll_sent(lane, now);
                let max = u8::try_from(share).unwrap_or(u8::MAX);
                self.effects.push_back(Effect::Poll { source, lane, max });
            }
            Ready::Busy | Ready::At(_) => {}
        }
    }
}
