//! Locks that Zuul and kazoo respect: the first of the sequential nodes in a folder holds it, and its session is its lease.

use std::sync::Arc;
use std::time::Duration;

use super::client::CreateMode;
use super::{Error, Session};
use journeyman_domain::limits::ZOOKEEPER_RETRY_DELAY;

/// How a contender shares its lock.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LockMode {
    /// Alone; as `kazoo.recipe.lock.Lock`.
    Exclusive,
    /// Beside other readers; as `ReadLock`.
    Read,
    /// Alone, where others read; as `WriteLock`.
    Write,
}

impl LockMode {
    const fn marker(self) -> &'static str {
        match self {
            Self::Exclusive | Self::Write => "__lock__",
            Self::Read => "__rlock__",
        }
    }

    /// How a contender that is seen in a lock shares it; `None` for another node.
    pub(super) fn of_contender(name: &str) -> Option<Self> {
        let is_reader = Contender::parse(name)?.marker == Self::Read.marker();
        Some(if is_reader { Self::Read } else { Self::Write })
    }

    /// True if a lower contender with this marker has to leave first.
    fn waits_for(self, marker: &str) -> bool {
        match self {
            Self::Exclusive | Self::Read => marker == "__lock__",
            Self::Write => marker == "__lock__" || marker == "__rlock__",
        }
    }
}

/// A contender of a lock: the name of its node, taken apart.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
struct Contender<'a> {
    number: u64,
    marker: &'a str,
    name: &'a str,
}

impl<'a> Contender<'a> {
    /// `None` for a node that is no contender.
    fn parse(name: &'a str) -> Option<Self> {
        let (head, digits) = name.split_at_checked(name.len().checked_sub(10)?)?;
        let marker = ["__lock__", "__rlock__"].into_iter().find(|marker| head.ends_with(marker))?;
        let is_number = digits.bytes().all(|byte| byte.is_ascii_digit());
        is_number.then(|| digits.parse().ok()).flatten().map(|number| Self { number, marker, name })
    }
}

/// Who stands before `own` and keeps it from the lock: the last of them, since it leaves last.
fn predecessor<'a>(names: impl Iterator<Item = &'a str>, own: &str, mode: LockMode) -> Option<&'a str> {
    let own = Contender::parse(own)?.number;
    let before = names.filter_map(Contender::parse);
    before.filter(|one| one.number < own && mode.waits_for(one.marker)).max().map(|one| one.name)
}

/// Tells whether a contender that is seen among others holds the lock.
pub(super) fn may_hold<'a>(names: impl Iterator<Item = &'a str>, own: &str) -> bool {
    LockMode::of_contender(own).is_some_and(|mode| predecessor(names, own, mode).is_none())
}

/// A lock that is held. It ends with its session; without [`HeldLock::release`] it is held until then.
#[derive(Debug)]
pub struct HeldLock {
    session: Arc<Session>,
    folder: String,
    name: String,
}

impl HeldLock {
    /// Takes a lock if it is free.
    ///
    /// # Errors
    ///
    /// See [`Error`].
    ///
    /// # Cancel safety
    ///
    /// Not cancel safe: the lock may be held until the session ends.
    pub async fn try_take(session: &Arc<Session>, folder: &str, mode: LockMode) -> Result<Option<Self>, Error> {
        let id = uuid::Uuid::new_v4().simple().to_string();
        let path = format!("{folder}/{id}{}", mode.marker());
        // Together, since a server answers the calls of a session in their order.
        let (_, mut entered, mut names) = tokio::join!(
            biased;
            session.create(folder, b"", CreateMode::Persistent),
            session.create(&path, b"", CreateMode::EphemeralSequential),
            session.children(folder),
        );
        let lock = loop {
            let error = match entered {
                Ok(path) => {
                    let name = path[folder.len() + 1..].to_owned();
                    break Self { session: Arc::clone(session), folder: folder.to_owned(), name };
                }
                Err(error) => error,
            };
            if error.is_no_node() {
                session.ensure(folder).await?;
            } else if error.is_unanswered() && !session.is_ended() {
                tokio::time::sleep(ZOOKEEPER_RETRY_DELAY).await;
            } else {
                return Err(error);
            }
            // The node may exist although the answer was lost.
            let found = session.retry(|| session.children(folder)).await?.unwrap_or_default();
            entered = match found.into_iter().find(|name| name.starts_with(&id)) {
                Some(name) => Ok(format!("{folder}/{name}")),
                None => session.create(&path, b"", CreateMode::EphemeralSequential).await,
            };
            names = session.retry(|| session.children(folder)).await;
        };
        let free = match names {
            Err(error) if error.is_unanswered() => session.retry(|| session.children(folder)).await,
            names => names,
        };
        let free = free.map(|names| {
            let names = names.unwrap_or_default();
            predecessor(names.iter().map(String::as_str), &lock.name, mode).is_none()
        });
        match free {
            Ok(true) => Ok(Some(lock)),
            Ok(false) => lock.release().await.map(|()| None),
            Err(error) => {
                // Another contender would wait for this one.
                lock.release().await.ok();
                Err(error)
            }
        }
    }

    /// The path of its node, which exists as long as the lock is held.
    pub fn path(&self) -> String {
        format!("{}/{}", self.folder, self.name)
    }

    /// Gives it up. Succeeds if the node is gone.
    ///
    /// # Errors
    ///
    /// Fails if the session has ended, which gave the lock up.
    pub async fn release(self) -> Result<(), Error> {
        let path = self.path();
        self.session.retry(|| self.session.delete(&path)).await
    }
}

impl Session {
    /// Repeats a call that is safe to repeat until it is answered or the session ends.
    pub async fn retry<T, F>(&self, call: impl Fn() -> F) -> Result<T, Error>
    where
        F: Future<Output = Result<T, Error>>,
    {
        let mut delay = Duration::ZERO;
        loop {
            match call().await {
                Err(error) if error.is_unanswered() && !self.is_ended() => {
                    tracing::debug!(%error, "trying again");
                    tokio::time::sleep(delay).await;
                    delay = ZOOKEEPER_RETRY_DELAY;
                }
                answer => return answer,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_contender_that_stands_before_is_found_by_number_and_mode() {
        let names = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>();
        let line = names(&["b__lock__0000000007", "a__rlock__0000000003", "z__rlock__0000000009", "cancel"]);
        let before = |own, mode| predecessor(line.iter().map(String::as_str), own, mode);
        assert_eq!(before("b__lock__0000000007", LockMode::Exclusive), None);
        assert_eq!(before("b__lock__0000000007", LockMode::Write), Some("a__rlock__0000000003"));
        assert_eq!(before("z__rlock__0000000009", LockMode::Read), Some("b__lock__0000000007"));
        assert_eq!(before("a__rlock__0000000003", LockMode::Read), None);
    }
}
