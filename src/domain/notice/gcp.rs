//! The watch over one value of Google's metadata service, which answers when the value changes.

use core::time::Duration;

use super::{Answer, Goes, News, Next, Pace, Watch};
use crate::domain::time::Instant;

/// The time between a preemption's notice and the end of the VM, as Google documents it.
pub const PREEMPTED: Duration = Duration::from_secs(30);
/// The same for maintenance that ends the VM. Hosts with GPUs have an hour, which cannot be told from here.
pub const MAINTENANCE: Duration = Duration::from_secs(60);

/// How a value of Google's metadata service is asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Call {
    /// As it is.
    Read,
    /// When it is another than last time.
    WaitForChange,
}

/// What a value of Google's metadata service says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reply {
    /// The VM stays.
    Stays,
    /// The VM goes.
    Goes,
    /// No answer, or none that can be read.
    Trouble,
}

/// The watch over one value of Google's metadata service.
#[derive(Debug, Clone)]
pub struct Value {
    watch: Watch,
    /// From the change of the value to the end of the VM.
    notice: Duration,
    /// When the VM was last known to stay.
    stayed: Option<Instant>,
}

impl Value {
    /// A value that was never asked for.
    #[must_use]
    pub const fn new(pace: Pace, notice: Duration, seed: u64) -> Self {
        Self { watch: Watch::new(pace, seed), notice, stayed: None }
    }

    /// What to do next.
    #[must_use]
    pub fn next(&self, now: Instant) -> Next<Call> {
        if now < self.watch.due() {
            Next::Rest(self.watch.due())
        } else if self.stayed.is_some() && !self.watch.troubled() {
            Next::Call(Call::WaitForChange)
        } else {
            Next::Call(Call::Read)
        }
    }

    /// The answer. A wait that comes back has seen the change; a read may be late by as much as nobody looked, and the first
    /// one by any time.
    pub fn answered(&mut self, call: Call, reply: Reply, sent_at: Instant, now: Instant) -> Option<News> {
        let answer = match (reply, call, self.stayed) {
            (Reply::Trouble, _, _) => Answer::Trouble,
            (Reply::Stays, _, _) => {
                self.stayed = Some(now);
                Answer::Nothing
            }
            (Reply::Goes, Call::WaitForChange, _) => Answer::Goes(Goes::At(now.plus(self.notice))),
            (Reply::Goes, Call::Read, Some(stayed)) => Answer::Goes(Goes::At(stayed.plus(self.notice))),
            (Reply::Goes, Call::Read, None) => Answer::Goes(Goes::Soon),
        };
        self.watch.answered(answer, sent_at, now)
    }
}
