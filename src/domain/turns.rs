//! Which sources get the free slots, and whose open poll gives its slots up, where sources want more than there are.
//!
//! A source whose last poll brought something goes first, and one that has waited for [`QUIET_TURN`] before it: an idle
//! source holds up no busy one, and a busy one starves no quiet one.

use alloc::vec::Vec;
use core::time::Duration;

use crate::time::Instant;

/// How long a source waits for a slot before it goes first.
pub const QUIET_TURN: Duration = Duration::from_secs(10);
/// How long an open poll keeps slots that another source wants. A service answers sooner where a task is pending, and a source that
/// keeps its polls short ends one itself.
pub const OPEN_POLL_MIN: Duration = Duration::from_millis(1_500);

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Turn {
    /// It takes no slot: it is in a call that ends soon, or may not poll.
    Out,
    /// It can poll after another call, which takes no slot.
    Next,
    /// It polls from then on.
    Waiting { since: Instant, demand: Demand },
    /// Its long poll holds slots.
    Holding { since: Instant, is_closing: bool },
}

/// What the last poll of a source has shown.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Demand {
    /// There was none yet.
    #[default]
    Unknown,
    Busy,
    Quiet,
}

/// The slots that a source polls for; none if there are none for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Share {
    pub source: usize,
    pub slots: u32,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Rank {
    Overdue,
    Busy,
    Quiet,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Due {
    rank: Rank,
    since: Instant,
    source: usize,
}

/// The poll that is closed for other sources, and when.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Closing {
    pub at: Instant,
    pub source: usize,
}

/// The shares of the sources that wait, in their order.
pub fn shares(turns: &[Turn], free: u32, poll_max: u32, now: Instant) -> Vec<Share> {
    let mut due: Vec<Due> = turns.iter().enumerate().filter_map(|(source, turn)| turn.due(source, now)).collect();
    due.sort_unstable();
    let is_busy = |one: &Due| matches!(turns[one.source], Turn::Waiting { demand: Demand::Busy, .. });
    let mut busy = count(due.iter().filter(|one| is_busy(one)));
    // Each of them will want slots for a poll of its own.
    let mut without_poll = count(turns.iter().filter(|turn| matches!(turn, Turn::Waiting { .. } | Turn::Next)));
    let mut quiet_due = count(due.iter()) - busy;
    let mut left = free;
    let share = |one: Due| {
        let slots = match (is_busy(&one), busy) {
            (true, _) => left.saturating_sub(quiet_due).div_ceil(busy).max(1),
            (false, 0) => left.div_ceil(without_poll),
            (false, _) => 1,
        };
        let slots = slots.min(poll_max).min(left);
        left -= slots;
        without_poll -= 1;
        *(if is_busy(&one) { &mut busy } else { &mut quiet_due }) -= 1;
        Share { source: one.source, slots }
    };
    due.into_iter().map(share).collect()
}

/// The poll to close next while no slot is free. For each source that may go first there is one.
pub fn next_closing(turns: &[Turn]) -> Option<Closing> {
    let closing = turns.iter().filter(|turn| matches!(turn, Turn::Holding { is_closing: true, .. })).count();
    let mut firsts: Vec<Instant> = turns.iter().filter_map(Turn::goes_first_at).collect();
    firsts.sort_unstable();
    let first = firsts.get(closing)?;
    let held_since = |turn: &Turn| match turn {
        Turn::Holding { since, is_closing: false } => Some(*since),
        Turn::Holding { .. } | Turn::Waiting { .. } | Turn::Next | Turn::Out => None,
    };
    let holding = turns.iter().enumerate().filter_map(|(source, turn)| Some((held_since(turn)?, source)));
    let (since, source) = holding.min()?;
    Some(Closing { at: since.plus(OPEN_POLL_MIN).max(*first), source })
}

fn count<T>(items: impl Iterator<Item = T>) -> u32 {
    u32::try_from(items.count()).unwrap_or(u32::MAX)
}

impl Turn {
    /// The time from which it takes a slot before others, or has an open poll closed for it.
    fn goes_first_at(&self) -> Option<Instant> {
        match self {
            Self::Waiting { since, demand: Demand::Busy | Demand::Unknown } => Some(*since),
            Self::Waiting { since, demand: Demand::Quiet } => Some(since.plus(QUIET_TURN)),
            Self::Out | Self::Next | Self::Holding { .. } => None,
        }
    }

    fn due(&self, source: usize, now: Instant) -> Option<Due> {
        let Self::Waiting { since, demand } = *self else { return None };
        let rank = match demand {
            _ if now >= since.plus(QUIET_TURN) => Rank::Overdue,
            Demand::Busy => Rank::Busy,
            Demand::Quiet | Demand::Unknown => Rank::Quiet,
        };
        (now >= since).then_some(Due { rank, since, source })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(secs: u64) -> Instant {
        Instant::at(Duration::from_secs(secs))
    }

    fn waiting(secs: u64, demand: Demand) -> Turn {
        Turn::Waiting { since: at(secs), demand }
    }

    fn given(turns: &[Turn], free: u32, secs: u64) -> Vec<(usize, u32)> {
        shares(turns, free, 32, at(secs)).into_iter().map(|share| (share.source, share.slots)).collect()
    }

    #[test]
    fn a3_a_busy_source_goes_first_and_one_that_has_waited_long_before_it() {
        let turns = [waiting(3, Demand::Quiet), waiting(4, Demand::Busy), Turn::Out];
        assert_eq!(given(&turns, 1, 4), [(1, 1), (0, 0)]);
        assert_eq!(given(&turns, 1, 12), [(1, 1), (0, 0)]);
        assert_eq!(given(&turns, 1, 13), [(0, 1), (1, 0)]);
        assert_eq!(given(&turns, 1, 3), [(0, 1)], "the other is not due");
    }

    #[test]
    fn a3_a_busy_source_takes_all_but_one_slot_for_each_that_waits() {
        let turns = [waiting(0, Demand::Quiet), waiting(1, Demand::Busy), waiting(2, Demand::Busy)];
        assert_eq!(given(&turns, 8, 2), [(1, 4), (2, 3), (0, 1)]);
        assert_eq!(given(&turns, 8, 10), [(0, 1), (1, 4), (2, 3)]);
        assert_eq!(given(&turns, 100, 2), [(1, 32), (2, 32), (0, 32)]);
    }

    #[test]
    fn a3_quiet_sources_leave_slots_for_those_that_do_not_poll_yet() {
        assert_eq!(given(&[waiting(0, Demand::Quiet), Turn::Next], 4, 0), [(0, 2)]);
        assert_eq!(given(&[waiting(0, Demand::Quiet), waiting(9, Demand::Quiet)], 4, 0), [(0, 2)]);
        let holding = Turn::Holding { since: at(0), is_closing: false };
        assert_eq!(given(&[waiting(0, Demand::Quiet), holding, Turn::Out], 4, 0), [(0, 4)]);
    }

    #[test]
    fn a3_the_oldest_poll_is_closed_for_a_busy_source_at_once_and_for_a_quiet_one_in_its_turn() {
        let (young, old) =
            (Turn::Holding { since: at(5), is_closing: false }, Turn::Holding { since: at(2), is_closing: false });
        let closing = Turn::Holding { since: at(2), is_closing: true };
        let of = |turns: &[Turn]| next_closing(turns).map(|closing| (closing.source, closing.at));
        assert_eq!(of(&[young, old, waiting(2, Demand::Busy)]), Some((1, at(2).plus(OPEN_POLL_MIN))));
        assert_eq!(of(&[young, old, waiting(4, Demand::Busy)]), Some((1, at(4))));
        assert_eq!(of(&[young, old, waiting(2, Demand::Quiet)]), Some((1, at(12))));
        assert_eq!(of(&[young, old, waiting(4, Demand::Unknown)]), Some((1, at(4))));
        assert_eq!(of(&[young, old]), None, "no other wants their slots");
        // One poll for each.
        assert_eq!(of(&[young, closing, waiting(2, Demand::Busy)]), None);
        assert_eq!(of(&[young, closing, waiting(2, Demand::Busy), waiting(3, Demand::Quiet)]), Some((0, at(13))));
    }
}
