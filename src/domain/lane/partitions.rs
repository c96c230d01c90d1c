//! Which partitions of the lanes a node has.
//!
//! Nodes that share a store divide its lanes into partitions, and each partition belongs to one live node. A node that does not
//! renew its lease in time loses its partitions to the others; the token of a partition grows with each change of its owner, and
//! what a former owner stores with an old token is refused.

use alloc::collections::BTreeSet;
use alloc::string::String;
use alloc::vec::Vec;

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Partition(pub u16);

/// A partition in the store.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Owned {
    pub partition: Partition,
    pub owner: Option<String>,
}

/// What a node changes when it renews its lease.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Plan {
    /// They are free, or their owner is dead.
    pub take: Vec<Partition>,
    /// The node has more than its share: it lets these go once no attempt of theirs is under way.
    pub drain: Vec<Partition>,
}

/// Every live node plans for itself, one after another.
///
/// `live` has `me` among its nodes.
pub fn plan(me: &str, live: &BTreeSet<String>, partitions: &[Owned]) -> Plan {
    let share = partitions.len().div_ceil(live.len().max(1));
    let mine = partitions.iter().filter(|one| one.owner.as_deref() == Some(me));
    let (kept, excess): (Vec<_>, Vec<_>) =
        mine.map(|one| one.partition).enumerate().partition(|(index, _)| *index < share);
    let is_free = |one: &&Owned| one.owner.as_ref().is_none_or(|owner| !live.contains(owner));
    let free = partitions.iter().filter(is_free).map(|one| one.partition);
    Plan {
        take: free.take(share - kept.len()).collect(),
        drain: excess.into_iter().map(|(_, partition)| partition).collect(),
    }
}

#[cfg(test)]
mod tests {
    use alloc::borrow::ToOwned as _;

    use super::*;

    /// Renews the lease of a node: what it drains, it lets go at once.
    fn renew(me: &str, live: &[&str], partitions: &mut [Owned]) {
        let live = live.iter().map(|one| (*one).to_owned()).collect();
        let Plan { take, drain } = plan(me, &live, partitions);
        for one in partitions {
            if take.contains(&one.partition) {
                one.owner = Some(me.to_owned());
            } else if drain.contains(&one.partition) {
                one.owner = None;
            }
        }
    }

    fn counts(partitions: &[Owned], nodes: &[&str]) -> Vec<usize> {
        let count = |node: &&str| partitions.iter().filter(|one| one.owner.as_deref() == Some(*node)).count();
        nodes.iter().map(count).collect()
    }

    #[test]
    fn nodes_share_the_partitions_and_take_over_those_of_the_dead() {
        let mut partitions: Vec<_> = (0..64).map(|n| Owned { partition: Partition(n), owner: None }).collect();
        let all = ["a", "b", "c"];
        renew("a", &["a"], &mut partitions);
        assert_eq!(counts(&partitions, &all), [64, 0, 0]);
        for node in ["b", "a", "b", "a"] {
            renew(node, &["a", "b"], &mut partitions);
        }
        assert_eq!(counts(&partitions, &all), [32, 32, 0]);
        for node in all.iter().chain(&all).chain(&all) {
            renew(node, &all, &mut partitions);
        }
        assert_eq!(counts(&partitions, &all), [22, 22, 20]);
        for node in ["c", "b", "c"] {
            renew(node, &["b", "c"], &mut partitions);
        }
        assert_eq!(counts(&partitions, &all), [0, 32, 32]);
    }
}
