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

use super::super::process::{self, ProcessStat, ProcessState};
use super::{COOKIE_VARIABLE, cgroup};
use crate::limits::ORPHAN_SCANS_MAX;

static REGISTRY: LazyLock<ChildRegistry> = LazyLock::new(ChildRegistry::default);

#[derive(Debug, Default)]
struct ChildRegistry {
    /// Held for reading while a child is started and not yet noted, for writing while orphans are reaped: whoever is not
    /// noted then is an orphan.
    starting: RwLock<()>,
    state: Mutex<RegistryState>,
}

#[derive(Debug, Default)]
struct RegistryState {
    /// Children of our own, until they are reaped. Numbers come again, so each note has a number of its own.
    own_children: BTreeMap<i32, u64>,
    last_id: u64,
    /// The claims that may have processes, by cookie.
    claims: BTreeMap<String, ClaimActivity>,
    /// Children of our own that nobody waits for any more and that were not reaped, with when they were started.
    abandoned: BTreeMap<i32, u64>,
    /// Processes of which was said that nobody knows whose they are.
    reported_ambiguous: BTreeSet<i32>,
}

/// A claim that has started processes and was not seen empty since.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct ClaimActivity {
    /// When its first process was started, in clock ticks since the host was.
    first_start_ticks: u64,
    phase: ClaimPhase,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ClaimPhase {
    /// It may have processes.
    Running,
    /// It may have none.
    Ended,
}

fn registry_state() -> MutexGuard<'static, RegistryState> {
    REGISTRY.state.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A child that was started here.
#[derive(Debug)]
pub(crate) struct StartedChild<T> {
    pub(crate) child: T,
    pub(crate) registration: ChildRegistration,
}

/// The note that a child is our own. It is to be kept until the child has been reaped, or is left to whoever finds it.
#[derive(Debug)]
pub(crate) struct ChildRegistration {
    pid: i32,
    id: u64,
}

impl Drop for ChildRegistration {
    fn drop(&mut self) {
        let mut book = registry_state();
        if book.own_children.get(&self.pid) != Some(&self.id) {
            return;
        }
        book.own_children.remove(&self.pid);
        if is_own_child(self.pid)
            && let Some(stat) = ProcessStat::read(self.pid)
        {
            book.abandoned.insert(self.pid, stat.start_ticks);
        }
    }
}

/// Starts a child in such a way that it is never taken for an orphan. Where it is a process of the claim with the cookie `of`,
/// what it starts is that claim's from then on.
pub(crate) fn start_child<T>(
    of: Option<&str>,
    start: impl FnOnce() -> io::Result<T>,
    pid: impl FnOnce(&T) -> Option<u32>,
) -> io::Result<StartedChild<T>> {
    let _starting = REGISTRY.starting.read().unwrap_or_else(PoisonError::into_inner);
    let child = start()?;
    let pid = pid(&child).map_or(0, u32::cast_signed);
    let since = of.map(|cookie| (cookie, ProcessStat::read(pid).map_or(0, |stat| stat.start_ticks)));
    let mut book = registry_state();
    if let Some((cookie, since)) = since {
        let tenure = ClaimActivity { first_start_ticks: since, phase: ClaimPhase::Running };
        book.claims.entry(cookie.to_owned()).or_insert(tenure).phase = ClaimPhase::Running;
    }
    book.last_id += 1;
    let note = book.last_id;
    book.own_children.insert(pid, note);
    drop(book);
    Ok(StartedChild { child, registration: ChildRegistration { pid, id: note } })
}

/// A claim may have no processes any more.
pub(super) fn mark_claim_ended(cookie: &str) {
    if let Some(tenure) = registry_state().claims.get_mut(cookie) {
        tenure.phase = ClaimPhase::Ended;
    }
}

/// A claim has no processes any more.
pub(super) fn forget_claim(cookie: &str) {
    registry_state().claims.remove(cookie);
}

/// What a claim may have left.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct OrphanScan {
    /// Its own, with what they started.
    pub(super) owned: Vec<i32>,
    /// Its own or those of another claim.
    pub(super) ambiguous: Vec<i32>,
    /// One that may be its own ended under the look, and may have left others since.
    pub(super) changed_during_scan: bool,
    /// One cannot be looked at; it keeps none of the others alive.
    pub(super) unreadable: bool,
}

impl OrphanScan {
    pub(super) const fn is_empty(&self) -> bool {
        self.owned.is_empty() && self.ambiguous.is_empty() && !self.changed_during_scan && !self.unreadable
    }
}

/// Looks for the strays of a claim, again where one ended meanwhile: what it has left came to us too late for that look.
/// Those that are certain are told `word`, if there is one. What they start then comes to us, and is found at the next look.
pub(super) fn find_orphans(cookie: &str, word: Option<Signal>) -> io::Result<OrphanScan> {
    // What many claims have left and has ended is looked at once, and not by each of them.
    reap_orphans()?;
    let mut strays = scan_orphans(cookie, word)?;
    for _ in 1..ORPHAN_SCANS_MAX {
        if !strays.changed_during_scan || !strays.owned.is_empty() {
            break;
        }
        reap_orphans()?;
        strays = scan_orphans(cookie, word)?;
    }
    Ok(strays)
}

fn scan_orphans(cookie: &str, word: Option<Signal>) -> io::Result<OrphanScan> {
    let tell = |stat: &ProcessStat| {
        if let Some(word) = word {
            process::signal_if(stat.pid, word, |pid| {
                ProcessStat::read(pid).is_some_and(|now| now.start_ticks == stat.start_ticks)
            });
        }
    };
    let mut strays = OrphanScan::default();
    for pid in orphan_pids()? {
        let stat = match ProcessStat::try_read(pid) {
            Ok(Some(stat)) if stat.state == ProcessState::Running => stat,
            Ok(Some(stat)) => {
                strays.changed_during_scan |=
                    ownership(cookie, &cgroup::claim_cookies_of(pid), stat.start_ticks, &registry_state().claims)
                        != Ownership::Foreign;
                continue;
            }
            Ok(None) => {
                strays.changed_during_scan = true;
                continue;
            }
            Err(error) => {
                tracing::debug!(process = pid, %error, "a child of this process cannot be looked at");
                strays.unreadable = true;
                continue;
            }
        };
        match ownership(cookie, &claim_cookies(pid), stat.start_ticks, &registry_state().claims) {
            Ownership::Owned => {
                // At once: some are gone, with another in their place, before the others are looked at.
                tell(&stat);
                strays.owned.push(pid);
            }
            Ownership::Ambiguous => strays.ambiguous.push(pid),
            Ownership::Foreign => {}
        }
    }
    if !strays.owned.is_empty() {
        let all = ProcessStat::read_all()?;
        let with = process::with_descendants(&strays.owned, &all);
        all.iter().filter(|stat| with.contains(&stat.pid) && !strays.owned.contains(&stat.pid)).for_each(tell);
        strays.owned = with;
    }
    Ok(strays)
}

#[derive(Debug, PartialEq, Eq)]
enum Ownership {
    Owned,
    Foreign,
    Ambiguous,
}

/// The cookies that a process shows: that of its environment, and where no claim is called so, those of the control groups
/// that it is in.
fn claim_cookies(pid: i32) -> Vec<String> {
    let mut shown: Vec<String> = process::environment_variable(pid, COOKIE_VARIABLE).into_iter().collect();
    if !shown.iter().any(|shown| registry_state().claims.contains_key(shown)) {
        shown.extend(cgroup::claim_cookies_of(pid));
    }
    shown
}

/// Decides whose stray a process is. Pure.
///
/// What it shows counts where a claim is called so: a process may have given itself any other name.
fn ownership(cookie: &str, shown: &[String], started: u64, claims: &BTreeMap<String, ClaimActivity>) -> Ownership {
    let known = shown.iter().find_map(|shown| claims.get_key_value(shown));
    if let Some((claim, tenure)) = known {
        // Nobody needs what a claim that is over has left.
        let wanted = claim != cookie && tenure.phase == ClaimPhase::Running;
        return if wanted { Ownership::Foreign } else { Ownership::Owned };
    }
    let possible: Vec<_> = claims.iter().filter(|(_, tenure)| started >= tenure.first_start_ticks).collect();
    if !possible.iter().any(|(claim, _)| *claim == cookie) {
        return Ownership::Foreign;
    }
    // Where every claim that it may belong to is over, it does not matter which it is.
    let over = |(claim, tenure): &(&String, &ClaimActivity)| *claim == cookie || tenure.phase == ClaimPhase::Ended;
    if possible.iter().all(over) { Ownership::Owned } else { Ownership::Ambiguous }
}

fn is_own_child(pid: i32) -> bool {
    let look = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
    Pid::from_raw(pid).is_some_and(|pid| rustix::process::waitid(WaitId::Pid(pid), look).is_ok())
}

/// The children that were left to us, and those of our own that nobody waits for. What a handler has started by itself is among
/// neither, for as long as the thread that did so lives and is not the first.
fn orphan_pids() -> io::Result<Vec<i32>> {
    let found = unregistered_children()?;
    if found.is_empty() {
        return Ok(found);
    }
    // A child that is just being started is noted when this lock is had.
    let _starting = REGISTRY.starting.write().unwrap_or_else(PoisonError::into_inner);
    unregistered_children()
}

fn unregistered_children() -> io::Result<Vec<i32>> {
    let mut children = process::adopted_children()?;
    let mut book = registry_state();
    let RegistryState { own_children: own, abandoned: given_up, .. } = &mut *book;
    given_up.retain(|pid, started| ProcessStat::read(*pid).is_some_and(|now| now.start_ticks == *started));
    children.extend(given_up.keys());
    children.retain(|child| !own.contains_key(child));
    children.sort_unstable();
    children.dedup();
    Ok(children)
}

/// Whether there may be any, at the price of one file.
pub(super) fn has_orphans() -> bool {
    unregistered_children().map_or(true, |unknown| !unknown.is_empty())
}

/// Those of them that were not given before.
pub(super) fn newly_ambiguous(doubtful: &[i32]) -> Vec<i32> {
    let mut book = registry_state();
    book.reported_ambiguous.retain(|pid| ProcessStat::read(*pid).is_some());
    doubtful.iter().copied().filter(|pid| book.reported_ambiguous.insert(*pid)).collect()
}

/// Reaps orphans that have ended. Our own children are left to who waits for them.
pub(super) fn reap_orphans() -> io::Result<()> {
    for pid in orphan_pids()?.into_iter().filter_map(Pid::from_raw) {
        // One that runs is passed over, and one that is gone meanwhile is no trouble.
        rustix::process::waitpid(Some(pid), WaitOptions::NOHANG).ok();
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn claims(list: &[(&str, u64, ClaimPhase)]) -> BTreeMap<String, ClaimActivity> {
        list.iter()
            .map(|(cookie, since, state)| {
                ((*cookie).to_owned(), ClaimActivity { first_start_ticks: *since, phase: *state })
            })
            .collect()
    }

    fn shown(names: &[&str]) -> Vec<String> {
        names.iter().map(|name| (*name).to_owned()).collect()
    }

    #[test]
    fn a_stray_that_kept_its_cookie_is_known_by_it() {
        let claims = claims(&[("a", 10, ClaimPhase::Ended), ("b", 20, ClaimPhase::Running)]);
        assert_eq!(ownership("a", &shown(&["a"]), 30, &claims), Ownership::Owned);
        assert_eq!(ownership("a", &shown(&["b"]), 15, &claims), Ownership::Foreign);
        assert_eq!(ownership("b", &shown(&["a"]), 30, &claims), Ownership::Owned, "a is over, and nobody needs it");
    }

    #[test]
    fn a_name_that_no_claim_has_tells_nothing_and_the_next_one_counts() {
        let claims = claims(&[("a", 10, ClaimPhase::Running), ("b", 20, ClaimPhase::Running)]);
        assert_eq!(ownership("a", &shown(&["forged"]), 15, &claims), Ownership::Owned, "b had no process then");
        assert_eq!(ownership("a", &shown(&["forged"]), 25, &claims), Ownership::Ambiguous);
        assert_eq!(
            ownership("a", &shown(&["forged", "b"]), 25, &claims),
            Ownership::Foreign,
            "it is in b's control group"
        );
        assert_eq!(ownership("b", &shown(&["forged", "b"]), 25, &claims), Ownership::Owned);
    }

    #[test]
    fn a_stray_without_a_cookie_is_known_by_when_it_was_started_if_that_tells() {
        let claims = claims(&[("a", 10, ClaimPhase::Ended), ("b", 20, ClaimPhase::Running)]);
        assert_eq!(ownership("a", &[], 15, &claims), Ownership::Owned, "b had no process then");
        assert_eq!(ownership("a", &[], 25, &claims), Ownership::Ambiguous, "it may be one of b's, which runs");
        assert_eq!(ownership("b", &[], 15, &claims), Ownership::Foreign);
        assert_eq!(ownership("a", &[], 5, &claims), Ownership::Foreign, "older than any claim");
    }

    #[test]
    fn a_stray_of_claims_that_are_all_over_is_anybodys() {
        let claims = claims(&[("a", 10, ClaimPhase::Ended), ("b", 20, ClaimPhase::Running)]);
        assert_eq!(ownership("b", &[], 25, &claims), Ownership::Owned, "a is over and b asks because it ends");
    }

    #[test]
    #[expect(clippy::disallowed_methods, reason = "a test may block")]
    fn a_child_that_nobody_waits_for_any_more_is_an_orphan_until_it_is_reaped() {
        let start_one = || std::process::Command::new("sleep").arg("600").spawn();
        let StartedChild { mut child, registration: known } =
            start_child(None, start_one, |child| Some(child.id())).unwrap();
        let pid = child.id().cast_signed();
        assert!(!unregistered_children().unwrap().contains(&pid));
        drop(known);
        assert!(unregistered_children().unwrap().contains(&pid));
        child.kill().unwrap();
        // Another test may have reaped it.
        child.wait().ok();
        assert!(!unregistered_children().unwrap().contains(&pid));
    }
}
