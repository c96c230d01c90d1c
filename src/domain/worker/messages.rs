//! Decides about a message: claim, attach to a claim, delete, or leave alone.

use alloc::vec::Vec;

use super::{Alert, DELETE_ATTEMPTS_MAX, DELETE_RETRY, Effect, MessageEntry, MessageKey, ReceivedMessage, Worker};
use crate::backoff::Backoff;
use crate::claim::ClaimState;
use crate::id::{LocalToken, SourceId};
use crate::refusal::Refusal;
use crate::slots::Slot;
use crate::time::Instant;

impl Worker {
    pub(super) fn on_message(
        &mut self,
        source: SourceId,
        message: ReceivedMessage,
        slots: &mut Vec<Slot>,
        now: Instant,
    ) {
        let key = MessageKey { source, id: message.id.clone() };
        self.drop_earlier_receptions(&key);
        if message.dequeue_count > self.policy.dequeue_alert && self.alerted_messages.insert(&key) {
            let alert = Alert::DequeueCount { id: message.id.clone(), count: message.dequeue_count };
            self.effects.push_back(Effect::Alert(alert));
        }
        let kept =
            MessageEntry { key, dequeue_count: message.dequeue_count, delete_retry_at: None, retry: Backoff::NEW };
        self.messages.insert(message.token, kept);
        let Some(run) = message.run else {
            let alert = Alert::Undecodable { id: message.id, count: message.dequeue_count };
            self.effects.push_back(Effect::Alert(alert));
            self.delete_message(message.token);
            return;
        };
        let key = self.run_key(source, &run);
        if let Some(token) = self.claims_by_run.get(&key).copied() {
            self.attach_message(token, message.token);
        } else if self.is_ended(&key) {
            // I12, I25: the run was granted to us and is over here. A request before it is over at the queue would be
            // granted again, and the payload executed twice.
            self.delete_message(message.token);
        } else if !self.accepts_messages(source, now) {
            // It becomes visible again, to another worker.
            self.drop_message(message.token);
        } else if let Some(slot) = slots.pop() {
            let mut actions = Vec::new();
            let state = ClaimState::requested(self.claim_policy(source), &mut actions);
            self.insert_claim(message.token, source, run, Some(slot), state);
            self.attach_message(message.token, message.token);
            self.perform(message.token, actions, now);
        } else {
            self.drop_message(message.token);
        }
    }

    /// I6: a further message about a claimed run makes no second claim; it shares the first one's answer.
    fn attach_message(&mut self, claim: LocalToken, message: LocalToken) {
        let entry = self.entry(claim);
        if entry.state.is_granted() {
            self.delete_message(message);
        } else {
            entry.messages.push(message);
        }
    }

    /// I13: once a message is received again, its earlier receipt is never used.
    fn drop_earlier_receptions(&mut self, key: &MessageKey) {
        let earlier = self.messages.iter().filter(|(_, kept)| kept.key == *key);
        for token in earlier.map(|(token, _)| *token).collect::<Vec<_>>() {
            self.drop_message(token);
        }
    }

    /// No effect if it was received again since.
    pub(super) fn delete_message(&mut self, message: LocalToken) {
        if let Some(kept) = self.messages.get_mut(&message) {
            kept.delete_retry_at = None;
            self.effects.push_back(Effect::Delete(message));
        }
    }

    pub(super) fn drop_message(&mut self, message: LocalToken) {
        if self.messages.remove(&message).is_some() {
            self.effects.push_back(Effect::DropMessage(message));
        }
    }

    /// A message that was received again while it was being deleted is ignored.
    pub(super) fn on_deleted(&mut self, message: LocalToken, answer: Result<(), Refusal>, now: Instant) {
        let Some(kept) = self.messages.get_mut(&message) else { return };
        let refusal = match answer {
            Ok(()) | Err(Refusal::Gone) => return self.drop_message(message),
            Err(refusal) => refusal,
        };
        let again = refusal != Refusal::Rejected && kept.retry.tries() + 1 < DELETE_ATTEMPTS_MAX;
        let alert = Alert::DeleteFailed { id: kept.key.id.clone(), count: kept.dequeue_count, retried: again };
        self.effects.push_back(Effect::Alert(alert));
        if !again {
            return self.drop_message(message);
        }
        let wait = kept.retry.wait(DELETE_RETRY, refusal.retry_after(), &mut self.jitter);
        kept.delete_retry_at = Some(now.plus(wait));
        if matches!(refusal, Refusal::Stale | Refusal::Denied) {
            self.sources[kept.key.source.index()].poller.reopen();
        }
    }

    pub(super) fn retry_stale_deletes(&mut self, source: SourceId, now: Instant) {
        for kept in self.messages.values_mut() {
            if kept.key.source == source && kept.delete_retry_at.is_some() {
                kept.delete_retry_at = Some(now);
            }
        }
    }

    pub(super) fn send_due_deletes(&mut self, now: Instant) {
        let due = self.messages.iter().filter(|(_, kept)| kept.delete_retry_at.is_some_and(|at| now >= at));
        for message in due.map(|(token, _)| *token).collect::<Vec<_>>() {
            self.delete_message(message);
        }
    }
}
