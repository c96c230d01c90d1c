//! What a part of the tree holds, as one walk through it sees: queues, the contenders of locks, and leftovers.

use std::collections::{BTreeMap, BTreeSet};

use futures_util::{StreamExt as _, stream};

use super::client::Stat;
use super::janitor::OWNERS;
use super::job_queue::RequestState;
use super::json_object::JsonObject;
use super::lock::{LockMode, may_hold};
use super::{Error, Session, client as zk, is_leftover};
use journeyman_domain::limits::{ZOOKEEPER_INSPECT_ROWS_MAX, ZOOKEEPER_READS_CONCURRENT_MAX};

/// The nodes that were seen.
#[derive(Debug, Clone, Default)]
pub struct Walk {
    /// Their stats, by their paths.
    pub nodes: BTreeMap<String, Stat>,
    /// Nodes that this client may not read.
    pub denied: Vec<String>,
    /// There are more than were read.
    pub is_cut: bool,
}

/// A queue of requests.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct QueueSummary {
    /// Its path.
    pub root: String,
    /// Its requests, whatever their state.
    pub requests: usize,
    /// Those whose lock is held.
    pub running: usize,
    /// The others that were seen, the oldest first: when each was created, in milliseconds since 1970, and its path.
    pub unlocked: Vec<(i64, String)>,
}

/// A node that holds a lock or waits for it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Contender {
    /// The folder of the lock; in the native layout the lock itself.
    pub lock: String,
    /// Its path.
    pub path: String,
    /// The session that it ends with.
    pub session: i64,
    /// Its time of creation, in milliseconds since 1970.
    pub since_ms: i64,
    /// It holds the lock.
    pub holds: bool,
}

impl Session {
    /// Adds at most `max` nodes at and below `root` to a walk, the upper levels first.
    ///
    /// # Errors
    ///
    /// See [`Error`]. Nodes that may not be read are no error.
    pub async fn walk(
        &self,
        walk: &mut Walk,
        root: &str,
        max: usize,
        descends: impl Fn(&str) -> bool,
    ) -> Result<(), Error> {
        let (mut level, mut room) = (vec![root.to_owned()], max);
        while !level.is_empty() {
            walk.is_cut |= level.len() > room;
            level.truncate(room);
            room -= level.len();
            let reads = level.drain(..).map(|path| async move { (self.list(&path).await, path) });
            let mut reads = stream::iter(reads.collect::<Vec<_>>()).buffer_unordered(ZOOKEEPER_READS_CONCURRENT_MAX);
            while let Some((found, path)) = reads.next().await {
                match found {
                    Ok(Some((names, stat))) => {
                        if descends(&path) {
                            let parent = path.trim_end_matches('/');
                            level.extend(names.iter().map(|name| format!("{parent}/{name}")));
                        }
                        walk.nodes.insert(path, stat);
                    }
                    Ok(None) => {}
                    Err(error) if error.cause == zk::Error::NoAuth => walk.denied.push(path),
                    Err(error) => return Err(error),
                }
            }
        }
        Ok(())
    }
}

impl Session {
    /// When the oldest request of a queue that waits for a worker was created, in milliseconds since 1970. Others without a lock
    /// are completed and await their removal, or are held back.
    ///
    /// # Errors
    ///
    /// See [`Error`].
    pub async fn oldest_waiting_ms(&self, queue: &QueueSummary) -> Result<Option<i64>, Error> {
        for (created_ms, path) in queue.unlocked.iter().take(ZOOKEEPER_INSPECT_ROWS_MAX) {
            let Some((data, _)) = self.get(path).await? else { continue };
            let state = JsonObject::parse(&data).map(|json| json.get::<RequestState>("state"));
            // A task has no state.
            if matches!(state, Ok(None | Some(RequestState::Requested))) {
                return Ok(Some(*created_ms));
            }
        }
        Ok(None)
    }
}

impl Walk {
    /// The names of a node's children.
    fn children<'a>(&'a self, folder: &str) -> impl Iterator<Item = (&'a str, &'a Stat)> + use<'a> {
        let start = format!("{folder}/");
        self.nodes
            .range(start.clone()..)
            .map_while(move |(path, stat)| path.strip_prefix(&start).map(|name| (name, stat)))
            .filter(|(name, _)| !name.contains('/'))
    }

    /// The roots of the queues of requests.
    fn queue_roots(&self) -> impl Iterator<Item = &str> {
        let roots = self.nodes.keys().filter_map(|path| path.strip_suffix("/requests"));
        roots.filter(|root| {
            ["locks", "params"].iter().all(|folder| self.nodes.contains_key(&format!("{root}/{folder}")))
        })
    }

    /// The queues of requests.
    pub fn queues(&self) -> Vec<QueueSummary> {
        let locked: BTreeSet<String> = self.contenders().into_iter().map(|contender| contender.lock).collect();
        let summary = |root: &str| {
            let folder = format!("{root}/requests");
            let (running, unlocked): (Vec<_>, Vec<_>) =
                self.children(&folder).partition(|(id, _)| locked.contains(&format!("{root}/locks/{id}")));
            let requests = self.nodes.get(&folder).map_or(0, |stat| usize::try_from(stat.num_children).unwrap_or(0));
            let unlocked = unlocked.into_iter().map(|(id, stat)| (stat.ctime, format!("{folder}/{id}")));
            let mut unlocked: Vec<_> = unlocked.collect();
            unlocked.sort_unstable();
            QueueSummary { root: root.to_owned(), requests, running: running.len(), unlocked }
        };
        self.queue_roots().map(summary).collect()
    }

    /// The contenders of every lock.
    pub fn contenders(&self) -> Vec<Contender> {
        let ephemerals = self.nodes.iter().filter(|(_, stat)| stat.ephemeral_owner != 0);
        let contenders = ephemerals.filter_map(|(path, stat)| {
            let (folder, name) = path.rsplit_once('/')?;
            let (lock, holds) = match LockMode::of_contender(name) {
                Some(_) => (folder, may_hold(self.children(folder).map(|(name, _)| name), name)),
                None if folder.ends_with("/locks") => (path.as_str(), true),
                None => return None,
            };
            let (session, since_ms) = (stat.ephemeral_owner, stat.ctime);
            Some(Contender { lock: lock.to_owned(), path: path.clone(), session, since_ms, holds })
        });
        contenders.collect()
    }

    /// The contenders whose session owns no other node: it is neither a component nor a waiter.
    pub fn lone_contenders(&self) -> Vec<Contender> {
        let mut owned: BTreeMap<i64, usize> = BTreeMap::new();
        for stat in self.nodes.values() {
            *owned.entry(stat.ephemeral_owner).or_default() += 1;
        }
        let is_lone = |one: &Contender| one.path != one.lock && owned.get(&one.session) == Some(&1);
        self.contenders().into_iter().filter(is_lone).collect()
    }

    /// What belongs to no request and no waiter, and is old enough for a clean-up.
    pub fn leftovers(&self, now_ms: i64) -> Vec<String> {
        let mut found = Vec::new();
        for root in self.queue_roots() {
            for (folder, owners) in OWNERS {
                let ownerless = self.children(&format!("{root}/{folder}")).filter(|(id, stat)| {
                    !self.nodes.contains_key(&format!("{root}/{owners}/{id}")) && is_leftover(stat, now_ms)
                });
                found.extend(ownerless.map(|(id, _)| format!("{root}/{folder}/{id}")));
            }
        }
        found
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn walk(nodes: &[(&str, i64, i64)]) -> Walk {
        let stat = |ctime, ephemeral_owner| Stat { ctime, ephemeral_owner, num_children: 2, ..Stat::default() };
        let nodes = nodes.iter().map(|(path, ctime, owner)| ((*path).to_owned(), stat(*ctime, *owner)));
        Walk { nodes: nodes.collect(), ..Walk::default() }
    }

    #[test]
    fn queues_contenders_and_leftovers_are_told_apart() {
        let walk = walk(&[
            ("/q/requests", 0, 0),
            ("/q/requests/a", 1_000, 0),
            ("/q/requests/b", 2_000, 0),
            ("/q/requests/b/cancel", 100, 0),
            ("/q/locks", 0, 0),
            ("/q/locks/a", 0, 0),
            ("/q/locks/a/y__lock__0000000001", 5, 8),
            ("/q/locks/a/x__lock__0000000002", 6, 7),
            ("/q/locks/c", 900_000, 0),
            ("/q/locks/d", 1, 0),
            ("/q/params", 0, 0),
            ("/q/waiters", 0, 0),
            ("/q/waiters/w", 3, 7),
            ("/q/results", 0, 0),
            ("/q/results/w", 3, 0),
        ]);
        let unlocked = vec![(2_000, "/q/requests/b".to_owned())];
        let expected = QueueSummary { root: "/q".to_owned(), requests: 2, running: 1, unlocked };
        assert_eq!(walk.queues(), [expected]);
        let holds: Vec<(i64, bool)> = walk.contenders().iter().map(|one| (one.session, one.holds)).collect();
        assert_eq!(holds, [(7, false), (8, true)]);
        assert_eq!(walk.lone_contenders().iter().map(|one| one.session).collect::<Vec<_>>(), [8]);
        assert_eq!(walk.leftovers(1_000_000), ["/q/locks/d"]);
    }
}
