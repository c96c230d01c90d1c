//! The watch over an EC2 instance: a token first, then two questions in turn.

use core::time::Duration;

use super::{Answer, News, Next, Pace, Watch};
use crate::domain::time::Instant;

/// What EC2's metadata service is asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Call {
    /// For a token; nothing is answered without.
    Token,
    /// Whether the instance is interrupted.
    Action,
    /// Whether the instance is at risk of it.
    Rebalance,
}

/// How EC2's metadata service takes a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reply {
    /// It answers.
    Answer(Answer),
    /// It does not accept the token.
    Unauthorized,
}

/// The watch over an EC2 instance.
#[derive(Debug, Clone)]
pub struct Aws {
    token: Watch,
    token_until: Option<Instant>,
    /// Whether the token at hand has been accepted.
    accepted: bool,
    /// A token is given again, and it has not been said yet whether there is a notice.
    well_owed: bool,
    action: Watch,
    rebalance: Watch,
}

impl Aws {
    /// An instance that was never asked.
    #[must_use]
    pub const fn new(pace: Pace, seed: u64) -> Self {
        Self {
            token: Watch::new(Pace { every: Duration::ZERO, ..pace }, seed),
            token_until: None,
            accepted: false,
            well_owed: false,
            action: Watch::new(pace, seed ^ 1),
            rebalance: Watch::new(pace, seed ^ 2),
        }
    }

    /// What to do next.
    #[must_use]
    pub fn next(&self, now: Instant) -> Next<Call> {
        let due = self.action.due().min(self.rebalance.due());
        if now < due {
            Next::Rest(due)
        } else if self.token_until.is_some_and(|until| now < until) {
            Next::Call(if now >= self.action.due() { Call::Action } else { Call::Rebalance })
        } else if now < self.token.due() {
            Next::Rest(self.token.due())
        } else {
            Next::Call(Call::Token)
        }
    }

    /// A token was given that lives so long, or none was. It is used for nine tenths of its life.
    pub fn token(&mut self, life: Option<Duration>, sent_at: Instant, now: Instant) -> Option<News> {
        self.accepted = false;
        self.token_until = life.map(|life| sent_at.plus(life - life / 10));
        let usable = self.token_until.is_some_and(|until| now < until);
        let news = self.token.answered(if usable { Answer::Nothing } else { Answer::Trouble }, sent_at, now);
        self.well_owed |= news == Some(News::Well);
        news.filter(|news| *news != News::Well)
    }

    /// The answer to [`Call::Action`] or [`Call::Rebalance`].
    pub fn answered(&mut self, call: Call, reply: Reply, sent_at: Instant, now: Instant) -> Option<News> {
        let watch = if call == Call::Rebalance { &mut self.rebalance } else { &mut self.action };
        match reply {
            Reply::Answer(answer) => {
                self.accepted = true;
                let news = watch.answered(answer, sent_at, now);
                let well = call == Call::Action && answer != Answer::Trouble && core::mem::take(&mut self.well_owed);
                news.or_else(|| well.then_some(News::Well))
            }
            Reply::Unauthorized => {
                self.token_until = None;
                // A token that was good has come to its end; one that never was is trouble, or this would spin.
                if core::mem::take(&mut self.accepted) {
                    return None;
                }
                watch.answered(Answer::Trouble, sent_at, now)
            }
        }
    }
}
