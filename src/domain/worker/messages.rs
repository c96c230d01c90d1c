//! What becomes of a message: claimed, attached to a claim, deleted, or left alone.

use alloc::vec::Vec;

use super::{Alert, DELETE_RETRY, DELETES_MAX, Deletion, Effect, Entry, Kept, Retried, Seen, Worker};
use crate::domain::backoff::Backoff;
use crate::domain::claim::Machine;
use crate::domain::id::{SourceId, Token};
use crate::domain::refusal::Refusal;
use crate::domain::slots::Slot;
use crate::domain::time::Instant;

impl Worker {
    pub(super) fn on_message(&mut self, source: SourceId, seen: Seen, slots: &mut Vec<Slot>, now: Instant) {
        self.replace_reception(source, &seen.id);
        let entry = Entry { source, id: seen.id.clone() };
        if seen.dequeue_count > self.policy.dequeue_alert && self.alerted.insert(&entry) {
            let alert = Alert::DequeueCount { message: seen.token, id: seen.id.clone(), count: seen.dequeue_count };
            self.effects.push_back(Effect::Alert(alert));
        }
        let kept = Kept {
            source,
            id: seen.id.clone(),
            dequeue_count: seen.dequeue_count,
            deletion: Deletion::NotYet,
            retry: Backoff::NEW,
        };
        self.kept.insert(seen.token, kept);
        let Some(run) = seen.run else {
            let alert = Alert::Undecodable { message: seen.token, id: seen.id, count: seen.dequeue_count };
            self.effects.push_back(Effect::Alert(alert));
            self.delete(seen.token);
            return;
        };
        let work = self.work(source, &run);
        if let Some(token) = self.by_run.get(&work).copied() {
            self.attach(token, seen.token);
        } else if self.is_over(&work) {
            // I12, I25: it was granted to us and is over here. Were it asked for again before it is over at the queue,
            // it would be granted again, and executed twice.
            self.delete(seen.token);
        } else if !self.takes_up(source) {
            // Left alone: it becomes visible again, to another worker.
            self.forget(seen.token);
        } else if let Some(slot) = slots.pop() {
            let mut acts = Vec::new();
            let machine = Machine::requested(self.claim_policy(source), &mut acts);
            self.hold(seen.token, source, run, Some(slot), machine);
            self.attach(seen.token, seen.token);
            self.perform(seen.token, acts, now);
        } else {
            self.forget(seen.token);
        }
    }

    /// I6: another message about a run in hand leads to no second claim; it shares the first one's answer.
    fn attach(&mut self, claim: Token, message: Token) {
        let Some(held) = self.held.get_mut(&claim) else { return };
        if held.machine.granted() {
            self.delete(message);
        } else {
            held.messages.push(message);
        }
    }

    /// I13: once a message was received again, its earlier receipt is never used again.
    fn replace_reception(&mut self, source: SourceId, id: &str) {
        let same = |kept: &Kept| kept.source == source && *kept.id == *id;
        let earlier: Vec<Token> = self.kept.iter().filter(|(_, kept)| same(kept)).map(|(token, _)| *token).collect();
        for token in earlier {
            self.forget(token);
        }
    }

    pub(super) fn delete(&mut self, message: Token) {
        if let Some(kept) = self.kept.get_mut(&message) {
            kept.deletion = Deletion::UnderWay;
            self.effects.push_back(Effect::Delete(message));
        }
    }

    pub(super) fn forget(&mut self, message: Token) {
        if self.kept.remove(&message).is_some() {
            self.effects.push_back(Effect::Forget(message));
        }
    }

    pub(super) fn on_deleted(&mut self, message: Token, answer: Result<(), Refusal>, now: Instant) {
        let Some(kept) = self.kept.get_mut(&message) else { return };
        let refusal = match answer {
            Ok(()) | Err(Refusal::Gone) => return self.forget(message),
            Err(refusal) => refusal,
        };
        let again = match refusal {
            Refusal::Rejected => None,
            Refusal::Retry { .. } | Refusal::Throttled { .. } | Refusal::Stale | Refusal::Denied | Refusal::Gone
                if kept.retry.tries() + 1 >= DELETES_MAX =>
            {
                None
            }
            Refusal::Retry { after } | Refusal::Throttled { after } => Some(after),
            Refusal::Stale | Refusal::Denied | Refusal::Gone => Some(None),
        };
        let retried = if again.is_some() { Retried::Yes } else { Retried::No };
        let alert = Alert::DeleteFailed { message, id: kept.id.clone(), count: kept.dequeue_count, retried };
        self.effects.push_back(Effect::Alert(alert));
        let Some(after) = again else { return self.forget(message) };
        let wait = kept.retry.wait(DELETE_RETRY, after, &mut self.jitter);
        kept.deletion = Deletion::At(now.plus(wait));
        if matches!(refusal, Refusal::Stale | Refusal::Denied)
            && let Some(feed) = self.feeds.get_mut(usize::from(kept.source.0))
        {
            feed.poller.reopen();
        }
    }

    pub(super) fn retry_stale_deletes(&mut self, source: SourceId, now: Instant) {
        for kept in self.kept.values_mut() {
            if kept.source == source && kept.deletion.due().is_some() {
                kept.deletion = Deletion::At(now);
            }
        }
    }

    /// Sends the deletes whose time has come.
    pub(super) fn tick_deletes(&mut self, now: Instant) {
        let due = |kept: &Kept| kept.deletion.due().is_some_and(|at| now >= at);
        let due: Vec<Token> = self.kept.iter().filter(|(_, kept)| due(kept)).map(|(token, _)| *token).collect();
        for message in due {
            self.delete(message);
        }
    }
}
