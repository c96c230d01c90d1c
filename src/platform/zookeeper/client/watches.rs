//! Watches: of one node, once; and of a node with all below it, as long as the session lasts.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use tokio::sync::{mpsc, oneshot};

use super::path::Chroot;
use super::records::EventKind;
use journeyman_domain::limits::ZOOKEEPER_WATCH_EVENTS_MAX;

/// What happened in a tree.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TreeEvent {
    /// A node was created.
    Created(String),
    /// A node's data changed.
    Changed(String),
    /// A node was deleted.
    Deleted(String),
    /// Events were lost, with a connection or because too many waited: read the tree again.
    EventsLost,
    /// The session has ended. No other event follows.
    Ended,
}

/// A recursive watch. It needs ZooKeeper 3.6. Its events wait until they are read, up to a number.
#[derive(Debug)]
pub struct TreeWatch {
    events: mpsc::Receiver<TreeEvent>,
    has_lost_events: Arc<AtomicBool>,
}

impl TreeWatch {
    /// The next event.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe.
    pub async fn next(&mut self) -> TreeEvent {
        let event = self.events.recv().await;
        if self.has_lost_events.swap(false, Ordering::AcqRel) {
            // A reader of the tree sees after this what these would tell.
            while self.events.try_recv().is_ok() {}
            return TreeEvent::EventsLost;
        }
        event.unwrap_or(TreeEvent::Ended)
    }
}

/// A watch of one node that ends with its first event.
#[derive(Debug)]
pub struct NodeWatch(oneshot::Receiver<Option<i64>>);

impl NodeWatch {
    /// Resolves when the node was created, changed or deleted, or the connection was lost. Returns the transaction, if the server
    /// tells it.
    pub async fn changed(self) -> Option<i64> {
        self.0.await.ok().flatten()
    }
}

/// A watch that a call sets.
pub(super) enum Subscription {
    Node { path: String, changed: oneshot::Sender<Option<i64>> },
    Tree(Tree),
}

pub(super) struct Tree {
    root: String,
    chroot: Chroot,
    events: mpsc::Sender<TreeEvent>,
    has_lost_events: Arc<AtomicBool>,
}

impl Subscription {
    pub(super) fn node(path: String) -> (Self, NodeWatch) {
        let (changed, watch) = oneshot::channel();
        (Self::Node { path, changed }, NodeWatch(watch))
    }

    pub(super) fn tree(root: String, chroot: Chroot) -> (Self, TreeWatch) {
        let (sender, events) = mpsc::channel(ZOOKEEPER_WATCH_EVENTS_MAX);
        let has_lost_events = Arc::new(AtomicBool::new(false));
        let tree = Tree { root, chroot, events: sender, has_lost_events: Arc::clone(&has_lost_events) };
        (Self::Tree(tree), TreeWatch { events, has_lost_events })
    }
}

/// The watches of a session.
#[derive(Default)]
pub(super) struct Watches {
    nodes: HashMap<String, Vec<oneshot::Sender<Option<i64>>>>,
    trees: Vec<Tree>,
}

impl Watches {
    /// Called when the call is sent: an event may overtake its answer. Of a call that fails, the other end is dropped.
    pub(super) fn add(&mut self, subscription: Subscription) {
        match subscription {
            Subscription::Node { path, changed } => {
                self.nodes.retain(|_, waiting| {
                    waiting.retain(|changed| !changed.is_closed());
                    !waiting.is_empty()
                });
                self.nodes.entry(path).or_default().push(changed);
            }
            Subscription::Tree(tree) => self.trees.push(tree),
        }
    }

    pub(super) fn on_event(&mut self, kind: EventKind, path: &str, zxid: Option<i64>) {
        let event = match kind {
            EventKind::Created => TreeEvent::Created,
            EventKind::DataChanged => TreeEvent::Changed,
            EventKind::Deleted => TreeEvent::Deleted,
            EventKind::ChildrenChanged => return,
        };
        for changed in self.nodes.remove(path).unwrap_or_default() {
            changed.send(zxid).ok();
        }
        self.trees.retain(|tree| !tree.contains(path) || tree.tell(event(tree.chroot.strip(path).to_owned())));
    }

    /// Watches of nodes end with their connection: waiters look again.
    pub(super) fn on_connection_lost(&mut self) {
        self.nodes.clear();
    }

    /// The roots that are still watched.
    pub(super) fn tree_roots(&mut self) -> impl ExactSizeIterator<Item = &str> {
        self.trees.retain(|tree| !tree.events.is_closed());
        self.trees.iter().map(|tree| tree.root.as_str())
    }

    /// Called when the watches of trees are set again.
    pub(super) fn on_reconnected(&mut self) {
        self.trees.iter().for_each(Tree::lose_events);
    }
}

impl Tree {
    fn contains(&self, path: &str) -> bool {
        let below = path.strip_prefix(&self.root);
        self.root == "/" || below.is_some_and(|below| below.is_empty() || below.starts_with('/'))
    }

    /// `false` if no listener is left.
    fn tell(&self, event: TreeEvent) -> bool {
        match self.events.try_send(event) {
            Ok(()) => true,
            Err(mpsc::error::TrySendError::Full(_)) => {
                self.lose_events();
                true
            }
            Err(mpsc::error::TrySendError::Closed(_)) => false,
        }
    }

    fn lose_events(&self) {
        self.has_lost_events.store(true, Ordering::Release);
        // It wakes the other end. In a full queue there is something to read.
        self.events.try_send(TreeEvent::EventsLost).ok();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn watched(root: &str) -> (Watches, TreeWatch) {
        let mut watches = Watches::default();
        let (subscription, watch) = Subscription::tree(root.to_owned(), Chroot::new("/ci").expect("a path"));
        watches.add(subscription);
        (watches, watch)
    }

    #[tokio::test]
    async fn a_tree_is_its_root_and_what_is_below_it() {
        let (mut watches, mut watch) = watched("/ci/a");
        for path in ["/ci/ab", "/ci/a", "/ci", "/ci/a/b"] {
            watches.on_event(EventKind::Created, path, None);
        }
        watches.on_event(EventKind::ChildrenChanged, "/ci/a", None);
        drop(watches);
        assert_eq!(watch.next().await, TreeEvent::Created("/a".to_owned()));
        assert_eq!(watch.next().await, TreeEvent::Created("/a/b".to_owned()));
        assert_eq!(watch.next().await, TreeEvent::Ended);
    }

    #[tokio::test]
    async fn who_reads_too_slowly_is_told_to_read_the_tree_again() {
        let (mut watches, mut watch) = watched("/ci");
        for _ in 0..=ZOOKEEPER_WATCH_EVENTS_MAX {
            watches.on_event(EventKind::DataChanged, "/ci/a", None);
        }
        assert_eq!(watch.next().await, TreeEvent::EventsLost);
        watches.on_event(EventKind::Deleted, "/ci/a", None);
        assert_eq!(watch.next().await, TreeEvent::Deleted("/a".to_owned()));
        for _ in 0..=ZOOKEEPER_WATCH_EVENTS_MAX {
            watches.on_event(EventKind::DataChanged, "/ci/a", None);
        }
        drop(watches);
        assert_eq!(watch.next().await, TreeEvent::EventsLost);
        assert_eq!(watch.next().await, TreeEvent::Ended);
    }

    #[test]
    fn a_watch_that_nobody_waits_for_is_forgotten() {
        let (mut watches, watch) = watched("/ci");
        drop(watch);
        assert_eq!(watches.tree_roots().len(), 0);
        for number in 0..3 {
            watches.add(Subscription::node(format!("/{number}")).0);
        }
        assert_eq!(watches.nodes.len(), 1);
    }
}
