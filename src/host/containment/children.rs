//! The children of this process: those it started, and those that payloads left to it.
//!
//! What a payload moves out of its group can only be found by descent. The kernel gives orphans to the nearest ancestor
//! that asked for them, which is this process once it is their reaper (`PR_SET_CHILD_SUBREAPER`, or by being the first
//! process of a container). So when a payload's group is gone, the topmost processes of what it left are children of ours
//! that we did not start: its strays. Whose stray one is, the payload's cookie in its environment tells, or the control group that it
//! is in; where it has neither, the time it was started does, if only one claim had processes then. Where nothing does,
//! nobody's processes are killed on suspicion, and the claim's emptiness is not proven.
//!
//! Children are a matter of the whole process, so there is one register for all workers in it.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError, RwLock};

use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, WaitOptions};

use super::super::process::{self, Life, Stat};
use super::{COOKIE, cgroup};
use crate::limits::STRAYS_LOOKS_MAX;

static REGISTER: LazyLock<Register> = LazyLock::new(Register::default);

#[derive(Debug, Default)]
struct Register {
    /// Held for reading while a child is started and not yet noted, for writing while orphans are reaped: whoever is not
    /// noted then is an orphan.
    starting: RwLock<()>,
    book: Mutex<Book>,
}

#[derive(Debug, Default)]
struct Book {
    /// Children of our own, until they are reaped. Numbers come again, so each note has a number of its own.
    own: BTreeMap<i32, u64>,
    notes: u64,
    /// The claims that may have processes, by cookie.
    claims: BTreeMap<String, Tenure>,
    /// Children of our own that nobody waits for any more and that were not reaped, with when they were started.
    given_up: BTreeMap<i32, u64>,
    /// Processes of which was said that nobody knows whose they are.
    doubted: BTreeSet<i32>,
}

/// A claim that has started processes and was not seen empty since.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Tenure {
    /// When its first process was started, in clock ticks since the host was.
    since: u64,
    state: State,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// It may have processes.
    Running,
    /// It may have none.
    Over,
}

fn book() -> MutexGuard<'static, Book> {
    REGISTER.book.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A child that was started here.
#[derive(Debug)]
pub(crate) struct Started<T> {
    pub(crate) child: T,
    pub(crate) known: Known,
}

/// The note that a child is our own. It is to be kept until the child has been reaped, or is left to whoever finds it.
#[derive(Debug)]
pub(crate) struct Known {
    pid: i32,
    note: u64,
}

impl Drop for Known {
    fn drop(&mut self) {
        let mut book = book();
        if book.own.get(&self.pid) != Some(&self.note) {
            return;
        }
        book.own.remove(&self.pid);
        if is_child(self.pid)
            && let Some(stat) = Stat::of(self.pid)
        {
            book.given_up.insert(self.pid, stat.started);
        }
    }
}

/// Starts a child in such a way that it is never taken for an orphan. Where it is a process of the claim with the cookie `of`,
/// what it starts is that claim's from then on.
pub(crate) fn start<T>(
    of: Option<&str>,
    start: impl FnOnce() -> io::Result<T>,
    pid: impl FnOnce(&T) -> Option<u32>,
) -> io::Result<Started<T>> {
    let _starting = REGISTER.starting.read().unwrap_or_else(PoisonError::into_inner);
    let child = start()?;
    let pid = pid(&child).map_or(0, u32::cast_signed);
    let since = of.map(|cookie| (cookie, Stat::of(pid).map_or(0, |stat| stat.started)));
    let mut book = book();
    if let Some((cookie, since)) = since {
        let tenure = Tenure { since, state: State::Running };
        book.claims.entry(cookie.to_owned()).or_insert(tenure).state = State::Running;
    }
    book.notes += 1;
    let note = book.notes;
    book.own.insert(pid, note);
    drop(book);
    Ok(Started { child, known: Known { pid, note } })
}

/// A claim may have no processes any more.
pub(super) fn over(cookie: &str) {
    if let Some(tenure) = book().claims.get_mut(cookie) {
        tenure.state = State::Over;
    }
}

/// A claim has no processes any more.
pub(super) fn left(cookie: &str) {
    book().claims.remove(cookie);
}

/// What a claim may have left.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Strays {
    /// Its own, with what they started.
    pub(super) certain: Vec<i32>,
    /// Its own or those of another claim.
    pub(super) doubtful: Vec<i32>,
    /// One that may be its own ended under the look, and may have left others since.
    pub(super) moving: bool,
    /// One cannot be looked at; it keeps none of the others alive.
    pub(super) unseen: bool,
}

impl Strays {
    pub(super) const fn none(&self) -> bool {
        self.certain.is_empty() && self.doubtful.is_empty() && !self.moving && !self.unseen
    }
}

/// Looks for the strays of a claim, again where one ended meanwhile: what it has left came to us too late for that look.
/// Those that are certain are told `word`, if there is one. What they start then comes to us, and is found at the next look.
pub(super) fn strays(cookie: &str, word: Option<Signal>) -> io::Result<Strays> {
    // What many claims have left and has ended is looked at once, and not by each of them.
    reap()?;
    let mut strays = look(cookie, word)?;
    for _ in 1..STRAYS_LOOKS_MAX {
        if !strays.moving || !strays.certain.is_empty() {
            break;
        }
        reap()?;
        strays = look(cookie, word)?;
    }
    Ok(strays)
}

fn look(cookie: &str, word: Option<Signal>) -> io::Result<Strays> {
    let tell = |stat: &Stat| {
        if let Some(word) = word {
            process::signal(stat.pid, word, |pid| Stat::of(pid).is_some_and(|now| now.started == stat.started));
        }
    };
    let mut strays = Strays::default();
    for pid in orphans()? {
        let stat = match Stat::seen(pid) {
            Ok(Some(stat)) if stat.life == Life::Running => stat,
            Ok(Some(stat)) => {
                strays.moving |= whose(cookie, &cgroup::claims_of(pid), stat.started, &book().claims) != Whose::Others;
                continue;
            }
            Ok(None) => {
                strays.moving = true;
                continue;
            }
            Err(error) => {
                tracing::debug!(process = pid, %error, "a child of this process cannot be looked at");
                strays.unseen = true;
                continue;
            }
        };
        match whose(cookie, &tokens(pid), stat.started, &book().claims) {
            Whose::Its => {
                // At once: some are gone, with another in their place, before the others are looked at.
                tell(&stat);
                strays.certain.push(pid);
            }
            Whose::Doubtful => strays.doubtful.push(pid),
            Whose::Others => {}
        }
    }
    if !strays.certain.is_empty() {
        let all = Stat::all()?;
        let with = process::with_descendants(&strays.certain, &all);
        all.iter().filter(|stat| with.contains(&stat.pid) && !strays.certain.contains(&stat.pid)).for_each(tell);
        strays.certain = with;
    }
    Ok(strays)
}

#[derive(Debug, PartialEq, Eq)]
enum Whose {
    Its,
    Others,
    Doubtful,
}

/// The cookies that a process shows: that of its environment, and where no claim is called so, those of the control groups
/// that it is in.
fn tokens(pid: i32) -> Vec<String> {
    let mut shown: Vec<String> = process::variable(pid, COOKIE).into_iter().collect();
    if !shown.iter().any(|shown| book().claims.contains_key(shown)) {
        shown.extend(cgroup::claims_of(pid));
    }
    shown
}

/// Decides whose stray a process is. Pure.
///
/// What it shows counts where a claim is called so: a process may have given itself any other name.
fn whose(cookie: &str, shown: &[String], started: u64, claims: &BTreeMap<String, Tenure>) -> Whose {
    let known = shown.iter().find_map(|shown| claims.get_key_value(shown));
    if let Some((claim, tenure)) = known {
        // Nobody needs what a claim that is over has left.
        let wanted = claim != cookie && tenure.state == State::Running;
        return if wanted { Whose::Others } else { Whose::Its };
    }
    let possible: Vec<_> = claims.iter().filter(|(_, tenure)| started >= tenure.since).collect();
    if !possible.iter().any(|(claim, _)| *claim == cookie) {
        return Whose::Others;
    }
    // Where every claim that it may belong to is over, it does not matter which it is.
    let over = |(claim, tenure): &(&String, &Tenure)| *claim == cookie || tenure.state == State::Over;
    if possible.iter().all(over) { Whose::Its } else { Whose::Doubtful }
}

fn is_child(pid: i32) -> bool {
    let look = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
    Pid::from_raw(pid).is_some_and(|pid| rustix::process::waitid(WaitId::Pid(pid), look).is_ok())
}

/// The children that were left to us, and those of our own that nobody waits for. What a handler has started by itself is among
/// neither, for as long as the thread that did so lives and is not the first.
fn orphans() -> io::Result<Vec<i32>> {
    let found = unknown()?;
    if found.is_empty() {
        return Ok(found);
    }
    // A child that is just being started is noted when this lock is had.
    let _starting = REGISTER.starting.write().unwrap_or_else(PoisonError::into_inner);
    unknown()
}

fn unknown() -> io::Result<Vec<i32>> {
    let mut children = process::adopted()?;
    let mut book = book();
    let Book { own, given_up, .. } = &mut *book;
    given_up.retain(|pid, started| Stat::of(*pid).is_some_and(|now| now.started == *started));
    children.extend(given_up.keys());
    children.retain(|child| !own.contains_key(child));
    children.sort_unstable();
    children.dedup();
    Ok(children)
}

/// Whether there may be any, at the price of one file.
pub(super) fn any() -> bool {
    unknown().map_or(true, |unknown| !unknown.is_empty())
}

/// Those of them that were not given before.
pub(super) fn anew(doubtful: &[i32]) -> Vec<i32> {
    let mut book = book();
    book.doubted.retain(|pid| Stat::of(*pid).is_some());
    doubtful.iter().copied().filter(|pid| book.doubted.insert(*pid)).collect()
}

/// Reaps orphans that have ended. Our own children are left to who waits for them.
pub(super) fn reap() -> io::Result<()> {
    for pid in orphans()?.into_iter().filter_map(Pid::from_raw) {
        // One that runs is passed over, and one that is gone meanwhile is no trouble.
        rustix::process::waitpid(Some(pid), WaitOptions::NOHANG).ok();
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn claims(list: &[(&str, u64, State)]) -> BTreeMap<String, Tenure> {
        list.iter()
            .map(|(cookie, since, state)| ((*cookie).to_owned(), Tenure { since: *since, state: *state }))
            .collect()
    }

    fn shown(names: &[&str]) -> Vec<String> {
        names.iter().map(|name| (*name).to_owned()).collect()
    }

    #[test]
    fn a_stray_that_kept_its_cookie_is_known_by_it() {
        let claims = claims(&[("a", 10, State::Over), ("b", 20, State::Running)]);
        assert_eq!(whose("a", &shown(&["a"]), 30, &claims), Whose::Its);
        assert_eq!(whose("a", &shown(&["b"]), 15, &claims), Whose::Others);
        assert_eq!(whose("b", &shown(&["a"]), 30, &claims), Whose::Its, "a is over, and nobody needs it");
    }

    #[test]
    fn a_name_that_no_claim_has_tells_nothing_and_the_next_one_counts() {
        let claims = claims(&[("a", 10, State::Running), ("b", 20, State::Running)]);
        assert_eq!(whose("a", &shown(&["forged"]), 15, &claims), Whose::Its, "b had no process then");
        assert_eq!(whose("a", &shown(&["forged"]), 25, &claims), Whose::Doubtful);
        assert_eq!(whose("a", &shown(&["forged", "b"]), 25, &claims), Whose::Others, "it is in b's control group");
        assert_eq!(whose("b", &shown(&["forged", "b"]), 25, &claims), Whose::Its);
    }

    #[test]
    fn a_stray_without_a_cookie_is_known_by_when_it_was_started_if_that_tells() {
        let claims = claims(&[("a", 10, State::Over), ("b", 20, State::Running)]);
        assert_eq!(whose("a", &[], 15, &claims), Whose::Its, "b had no process then");
        assert_eq!(whose("a", &[], 25, &claims), Whose::Doubtful, "it may be one of b's, which runs");
        assert_eq!(whose("b", &[], 15, &claims), Whose::Others);
        assert_eq!(whose("a", &[], 5, &claims), Whose::Others, "older than any claim");
    }

    #[test]
    fn a_stray_of_claims_that_are_all_over_is_anybodys() {
        let claims = claims(&[("a", 10, State::Over), ("b", 20, State::Running)]);
        assert_eq!(whose("b", &[], 25, &claims), Whose::Its, "a is over and b asks because it ends");
    }

    #[test]
    #[expect(clippy::disallowed_methods, reason = "a test may block")]
    fn a_child_that_nobody_waits_for_any_more_is_an_orphan_until_it_is_reaped() {
        let start_one = || std::process::Command::new("sleep").arg("600").spawn();
        let Started { mut child, known } = start(None, start_one, |child| Some(child.id())).unwrap();
        let pid = child.id().cast_signed();
        assert!(!unknown().unwrap().contains(&pid));
        drop(known);
        assert!(unknown().unwrap().contains(&pid));
        child.kill().unwrap();
        // Another test may have reaped it.
        child.wait().ok();
        assert!(!unknown().unwrap().contains(&pid));
    }
}
