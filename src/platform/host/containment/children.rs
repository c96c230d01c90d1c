//! The children of this process: those that it started, and orphans of payloads that it adopted.
//!
//! A payload that leaves its process group can only be found by descent. The kernel gives orphans to the nearest subreaper,
//! which is this process (`PR_SET_CHILD_SUBREAPER`, or PID 1 of a container). When a payload's group is gone, the topmost
//! processes that escaped from it are children of this process that it did not start. The payload's cookie in their
//! environment, or their control group, names their claim. Without either, the start time does, if only one claim had
//! processes at that time. Otherwise the orphan is ambiguous: it is not killed, and the cleanup of those claims stays pending.
//!
//! Children belong to a process, so all workers in it share one registry.

use std::collections::BTreeMap;
use std::io;
use std::sync::LazyLock;

use parking_lot::{Mutex, MutexGuard, RwLock};
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, WaitOptions};

use super::super::process::{self, ProcessStat, ProcessState};
use super::{COOKIE_VARIABLE, cgroup};
use journeyman_domain::limits::ORPHAN_SCANS_MAX;

static REGISTRY: LazyLock<ChildRegistry> = LazyLock::new(ChildRegistry::default);

#[derive(Debug, Default)]
struct ChildRegistry {
    /// Held for reading while a child is started and not yet registered, for writing while orphans are listed: an unregistered
    /// child is an orphan.
    starting: RwLock<()>,
    state: Mutex<RegistryState>,
}

#[derive(Debug, Default)]
struct RegistryState {
    /// Children that this process started and has not reaped. PIDs are reused, so each registration has an id.
    own_children: BTreeMap<i32, u64>,
    last_id: u64,
    /// The claims that may have processes, by cookie.
    claims: BTreeMap<String, ClaimActivity>,
    /// Started children without a registration that are not reaped, with their start ticks.
    abandoned: BTreeMap<i32, u64>,
}

/// A claim that has started processes and was not seen empty since.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct ClaimActivity {
    /// The earliest start in clock ticks since boot.
    first_start_ticks: u64,
    phase: ClaimPhase,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ClaimPhase {
    Running,
    Ended,
}

fn registry_state() -> MutexGuard<'static, RegistryState> {
    REGISTRY.state.lock()
}

#[derive(Debug)]
pub struct StartedChild<T> {
    pub child: T,
    pub registration: ChildRegistration,
}

/// Marks a child as started by this process. Keep it until the child is reaped; without it the child counts as an orphan.
#[derive(Debug)]
pub struct ChildRegistration {
    pid: i32,
    id: u64,
}

impl Drop for ChildRegistration {
    fn drop(&mut self) {
        let mut state = registry_state();
        if state.own_children.get(&self.pid) != Some(&self.id) {
            return;
        }
        state.own_children.remove(&self.pid);
        if is_own_child(self.pid)
            && let Some(stat) = ProcessStat::read(self.pid)
        {
            state.abandoned.insert(self.pid, stat.start_ticks);
        }
    }
}

/// Starts a child so that it never counts as an orphan. With a cookie, its descendants belong to that claim.
pub fn start_child<T>(
    of: Option<&str>,
    start: impl FnOnce() -> io::Result<T>,
    pid: impl FnOnce(&T) -> Option<u32>,
) -> io::Result<StartedChild<T>> {
    let _starting = REGISTRY.starting.read();
    let child = start()?;
    let pid = pid(&child).map_or(0, u32::cast_signed);
    let started = of.map(|cookie| (cookie, ProcessStat::read(pid).map_or(0, |stat| stat.start_ticks)));
    let mut state = registry_state();
    if let Some((cookie, started)) = started {
        let activity = ClaimActivity { first_start_ticks: started, phase: ClaimPhase::Running };
        state.claims.entry(cookie.to_owned()).or_insert(activity).phase = ClaimPhase::Running;
    }
    state.last_id += 1;
    let id = state.last_id;
    state.own_children.insert(pid, id);
    drop(state);
    Ok(StartedChild { child, registration: ChildRegistration { pid, id } })
}

pub(super) fn mark_claim_ended(cookie: &str) {
    if let Some(activity) = registry_state().claims.get_mut(cookie) {
        activity.phase = ClaimPhase::Ended;
    }
}

/// The claim has no processes any more.
pub(super) fn forget_claim(cookie: &str) {
    registry_state().claims.remove(cookie);
}

/// The orphans of a claim.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct OrphanScan {
    /// Orphans of this claim, with their descendants.
    pub(super) owned: Vec<i32>,
    /// Orphans of this claim or of another one.
    pub(super) ambiguous: Vec<i32>,
    /// An orphan that may be this claim's exited during the scan, and may have left children.
    pub(super) changed_during_scan: bool,
    /// An orphan could not be read. That does not keep the others alive.
    pub(super) unreadable: bool,
}

impl OrphanScan {
    pub(super) const fn is_empty(&self) -> bool {
        self.owned.is_empty() && self.ambiguous.is_empty() && !self.changed_during_scan && !self.unreadable
    }
}

/// Scans for the orphans of a claim, repeatedly while one exits during the scan, because its children arrive too late for
/// that scan. Sends `signal` to each owned orphan; children that those start meanwhile are found by the next scan.
pub(super) fn find_orphans(cookie: &str, signal: Option<Signal>) -> io::Result<OrphanScan> {
    // Reap once for all claims, so that each scan has fewer processes to read.
    reap_orphans()?;
    let mut scan = scan_orphans(cookie, signal)?;
    for _ in 1..ORPHAN_SCANS_MAX {
        if !scan.changed_during_scan || !scan.owned.is_empty() {
            break;
        }
        reap_orphans()?;
        scan = scan_orphans(cookie, signal)?;
    }
    Ok(scan)
}

fn scan_orphans(cookie: &str, signal: Option<Signal>) -> io::Result<OrphanScan> {
    let send = |stat: &ProcessStat| {
        if let Some(signal) = signal {
            stat.signal(signal);
        }
    };
    let mut scan = OrphanScan::default();
    for pid in orphan_pids()? {
        let stat = match ProcessStat::try_read(pid) {
            Ok(Some(stat)) if stat.state == ProcessState::Running => stat,
            Ok(Some(stat)) => {
                scan.changed_during_scan |=
                    ownership(cookie, &cgroup::claim_cookies_of(pid), stat.start_ticks, &registry_state().claims)
                        != Ownership::Foreign;
                continue;
            }
            Ok(None) => {
                scan.changed_during_scan = true;
                continue;
            }
            Err(error) => {
                tracing::debug!(process = pid, %error, "cannot read a child of this process");
                scan.unreadable = true;
                continue;
            }
        };
        match ownership(cookie, &claim_cookies(pid), stat.start_ticks, &registry_state().claims) {
            Ownership::Owned => {
                // It is killed at once: an orphan may fork and exit while the others are read.
                send(&stat);
                scan.owned.push(pid);
            }
            Ownership::Ambiguous => scan.ambiguous.push(pid),
            Ownership::Foreign => {}
        }
    }
    if !scan.owned.is_empty() {
        let all = ProcessStat::read_all()?;
        let tree = process::with_descendants(&scan.owned, &all);
        all.iter().filter(|stat| tree.contains(&stat.pid) && !scan.owned.contains(&stat.pid)).for_each(send);
        scan.owned = tree;
    }
    Ok(scan)
}

#[derive(Debug, PartialEq, Eq)]
enum Ownership {
    Owned,
    Foreign,
    Ambiguous,
}

/// The cookies that a process shows: that of its environment, and if no claim has it, those of its control groups.
fn claim_cookies(pid: i32) -> Vec<String> {
    let mut cookies: Vec<String> = process::environment_variable(pid, COOKIE_VARIABLE).into_iter().collect();
    if !cookies.iter().any(|cookie| registry_state().claims.contains_key(cookie)) {
        cookies.extend(cgroup::claim_cookies_of(pid));
    }
    cookies
}

/// Decides to which claim an orphan belongs. A cookie counts only if a claim has it, because a process can set any other.
fn ownership(cookie: &str, cookies: &[String], started: u64, claims: &BTreeMap<String, ClaimActivity>) -> Ownership {
    let known = cookies.iter().find_map(|cookie| claims.get_key_value(cookie));
    if let Some((claim, activity)) = known {
        // Orphans of an ended claim may be killed by any claim.
        let foreign = claim != cookie && activity.phase == ClaimPhase::Running;
        return if foreign { Ownership::Foreign } else { Ownership::Owned };
    }
    let possible: Vec<_> = claims.iter().filter(|(_, activity)| started >= activity.first_start_ticks).collect();
    if !possible.iter().any(|(claim, _)| *claim == cookie) {
        return Ownership::Foreign;
    }
    // If every other possible claim has ended, it does not matter which one it was.
    let ended = |(claim, activity): &(&String, &ClaimActivity)| *claim == cookie || activity.phase == ClaimPhase::Ended;
    if possible.iter().all(ended) { Ownership::Owned } else { Ownership::Ambiguous }
}

fn is_own_child(pid: i32) -> bool {
    let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
    Pid::from_raw(pid).is_some_and(|pid| rustix::process::waitid(WaitId::Pid(pid), options).is_ok())
}

/// Adopted children, and started ones without a registration. Children that a handler starts by other means are neither,
/// as long as the thread that started them lives and is not the first.
fn orphan_pids() -> io::Result<Vec<i32>> {
    let found = unregistered_children()?;
    if found.is_empty() {
        return Ok(found);
    }
    // Wait for starts in progress: their children are registered when the lock is granted.
    let _starting = REGISTRY.starting.write();
    unregistered_children()
}

fn unregistered_children() -> io::Result<Vec<i32>> {
    let mut children = process::adopted_children()?;
    let mut state = registry_state();
    let RegistryState { own_children, abandoned, .. } = &mut *state;
    abandoned.retain(|pid, started| ProcessStat::read(*pid).is_some_and(|now| now.start_ticks == *started));
    children.extend(abandoned.keys());
    children.retain(|child| !own_children.contains_key(child));
    children.sort_unstable();
    children.dedup();
    Ok(children)
}

/// True if there may be orphans; reads one file.
pub(super) fn has_orphans() -> bool {
    unregistered_children().map_or(true, |orphans| !orphans.is_empty())
}

/// Reaps orphans that have exited. Children that this process started are reaped by their owners.
pub(super) fn reap_orphans() -> io::Result<()> {
    for pid in orphan_pids()?.into_iter().filter_map(Pid::from_raw) {
        // A running orphan is skipped, and a missing one is an expected error.
        rustix::process::waitpid(Some(pid), WaitOptions::NOHANG).ok();
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn claims(list: &[(&str, u64, ClaimPhase)]) -> BTreeMap<String, ClaimActivity> {
        list.iter()
            .map(|(cookie, started, state)| {
                ((*cookie).to_owned(), ClaimActivity { first_start_ticks: *started, phase: *state })
            })
            .collect()
    }

    fn cookies(names: &[&str]) -> Vec<String> {
        names.iter().map(|name| (*name).to_owned()).collect()
    }

    #[test]
    fn an_orphan_with_a_cookie_belongs_to_that_claim() {
        let claims = claims(&[("a", 10, ClaimPhase::Ended), ("b", 20, ClaimPhase::Running)]);
        assert_eq!(ownership("a", &cookies(&["a"]), 30, &claims), Ownership::Owned);
        assert_eq!(ownership("a", &cookies(&["b"]), 15, &claims), Ownership::Foreign);
        assert_eq!(ownership("b", &cookies(&["a"]), 30, &claims), Ownership::Owned, "a has ended");
    }

    #[test]
    fn an_unknown_cookie_is_ignored_and_the_next_one_counts() {
        let claims = claims(&[("a", 10, ClaimPhase::Running), ("b", 20, ClaimPhase::Running)]);
        assert_eq!(ownership("a", &cookies(&["forged"]), 15, &claims), Ownership::Owned, "b had not started");
        assert_eq!(ownership("a", &cookies(&["forged"]), 25, &claims), Ownership::Ambiguous);
        assert_eq!(
            ownership("a", &cookies(&["forged", "b"]), 25, &claims),
            Ownership::Foreign,
            "it is in b's control group"
        );
        assert_eq!(ownership("b", &cookies(&["forged", "b"]), 25, &claims), Ownership::Owned);
    }

    #[test]
    fn an_orphan_without_a_cookie_belongs_to_the_only_claim_running_at_its_start() {
        let claims = claims(&[("a", 10, ClaimPhase::Ended), ("b", 20, ClaimPhase::Running)]);
        assert_eq!(ownership("a", &[], 15, &claims), Ownership::Owned, "b had not started");
        assert_eq!(ownership("a", &[], 25, &claims), Ownership::Ambiguous, "it may belong to b, which runs");
        assert_eq!(ownership("b", &[], 15, &claims), Ownership::Foreign);
        assert_eq!(ownership("a", &[], 5, &claims), Ownership::Foreign, "older than any claim");
    }

    #[test]
    fn an_orphan_of_ended_claims_may_be_killed_by_any_of_them() {
        let claims = claims(&[("a", 10, ClaimPhase::Ended), ("b", 20, ClaimPhase::Running)]);
        assert_eq!(ownership("b", &[], 25, &claims), Ownership::Owned, "a has ended and b is ending");
    }

    #[test]
    #[expect(clippy::disallowed_methods, reason = "a test may block")]
    fn a_child_without_a_registration_is_an_orphan_until_it_is_reaped() {
        let start_one = || std::process::Command::new("sleep").arg("600").spawn();
        let StartedChild { mut child, registration } = start_child(None, start_one, |child| Some(child.id())).unwrap();
        let pid = child.id().cast_signed();
        assert!(!unregistered_children().unwrap().contains(&pid));
        drop(registration);
        assert!(unregistered_children().unwrap().contains(&pid));
        child.kill().unwrap();
        // Another test may have reaped it.
        child.wait().ok();
        assert!(!unregistered_children().unwrap().contains(&pid));
    }
}
