//! The end of what an earlier life of this worker has left running, by what it has written down.
//!
//! A number of a process is believed only together with when that process was started, or with the cookie in somebody's
//! environment: what cannot be told from a stranger is left alone.

use std::collections::BTreeSet;
use std::io;
use std::path::{Path, PathBuf};

use rustix::process::Signal;

use super::super::process::{self, PROCESS_POLL_INTERVAL, ProcessStat, ProcessState, environment_variable};
use super::cgroup::Cgroup;
use super::{CLAIM_CGROUP_PREFIX, COOKIE_VARIABLE, kill_and_remove};
use crate::domain::journal::ProcessRecord;
use crate::limits::CONTAINMENT_PROBE_TIMEOUT;

/// Kills what is left of claims that an earlier life of this worker has written down: their control groups, what carries
/// their cookies, what is in their process groups, and what those have started. Answers how many of the claims had anything
/// left. Takes up to a few seconds of this thread.
///
/// # Errors
///
/// Where processes are still there, with their numbers, or where `/proc` cannot be read.
pub fn kill_recorded_processes(list: &[ProcessRecord]) -> io::Result<usize> {
    let mut found = BTreeSet::new();
    for (index, remains) in list.iter().enumerate() {
        let Some(group) = remains.cgroup.as_deref().map(Path::new).filter(|path| is_claim_cgroup(path)) else {
            continue;
        };
        let group = Cgroup::at(PathBuf::from(group));
        if !group.is_empty() {
            found.insert(index);
        }
        kill_and_remove(&group)?;
    }
    if list.is_empty() {
        return Ok(0);
    }
    for _ in 0..CONTAINMENT_PROBE_TIMEOUT.as_millis() / PROCESS_POLL_INTERVAL.as_millis() {
        let left = find_leftovers(list, &ProcessStat::read_all()?, |pid| environment_variable(pid, COOKIE_VARIABLE));
        if left.is_empty() {
            return Ok(found.len());
        }
        for LeftoverProcess { claim_index: claim, stat } in left {
            found.insert(claim);
            process::signal_if(stat.pid, Signal::KILL, |pid| {
                ProcessStat::read(pid).is_some_and(|now| now.start_ticks == stat.start_ticks)
            });
        }
        std::thread::sleep(PROCESS_POLL_INTERVAL);
    }
    let left: Vec<i32> =
        find_leftovers(list, &ProcessStat::read_all()?, |pid| environment_variable(pid, COOKIE_VARIABLE))
            .iter()
            .map(|left| left.stat.pid)
            .collect();
    if left.is_empty() {
        return Ok(found.len());
    }
    Err(io::Error::new(io::ErrorKind::ResourceBusy, format!("processes of earlier tasks cannot be killed: {left:?}")))
}

/// What was written down is believed only as far as it has the form of what is written down.
fn is_claim_cgroup(path: &Path) -> bool {
    path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(CLAIM_CGROUP_PREFIX))
        && path.join("cgroup.procs").exists()
}

/// A process that is left of a claim.
#[derive(Debug, PartialEq, Eq)]
struct LeftoverProcess {
    claim_index: usize,
    stat: ProcessStat,
}

/// Which processes are left of which claim. Pure but for `cookie_of`.
fn find_leftovers(
    list: &[ProcessRecord],
    all: &[ProcessStat],
    cookie_of: impl Fn(i32) -> Option<String>,
) -> Vec<LeftoverProcess> {
    let own = std::process::id().cast_signed();
    let running: Vec<(ProcessStat, Option<String>)> = all
        .iter()
        .filter(|stat| stat.state == ProcessState::Running && stat.pid != own)
        .map(|stat| (*stat, cookie_of(stat.pid)))
        .collect();
    let mut left = Vec::new();
    for (claim, remains) in list.iter().enumerate() {
        let carries =
            |cookie: &Option<String>| !remains.cookie.is_empty() && cookie.as_deref() == Some(&*remains.cookie);
        // A group is its own as long as its leader is the one that was written down, or a member carries the cookie: the
        // kernel gives a group's number to nobody while there is a group.
        let certain_group = |pid: i32, started: u64| {
            all.iter().any(|stat| stat.pid == pid && stat.group == pid && stat.start_ticks == started)
                || running.iter().any(|(stat, cookie)| stat.group == pid && carries(cookie))
        };
        let written = remains.leaders.iter().filter(|leader| certain_group(leader.pid, leader.start_ticks));
        // One that was started a moment before the end may not have been written down.
        let leading = running.iter().filter(|(stat, cookie)| stat.pid == stat.group && carries(cookie));
        let groups: Vec<i32> = written.map(|leader| leader.pid).chain(leading.map(|(stat, _)| stat.pid)).collect();
        let roots: Vec<i32> = running
            .iter()
            .filter(|(stat, cookie)| carries(cookie) || groups.contains(&stat.group))
            .map(|(stat, _)| stat.pid)
            .collect();
        let with = process::with_descendants(&roots, all);
        left.extend(
            running
                .iter()
                .filter(|(stat, _)| with.contains(&stat.pid))
                .map(|(stat, _)| LeftoverProcess { claim_index: claim, stat: *stat }),
        );
    }
    left
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::domain::journal::Leader;

    fn stat(pid: i32, parent: i32, group: i32, started: u64) -> ProcessStat {
        ProcessStat { pid, state: ProcessState::Running, parent, group, start_ticks: started }
    }

    fn remains(cookie: &str, leaders: &[(i32, u64)]) -> ProcessRecord {
        let leaders = leaders.iter().map(|(pid, started)| Leader { pid: *pid, start_ticks: *started }).collect();
        ProcessRecord { cookie: cookie.into(), cgroup: None, leaders }
    }

    fn killed(remains: ProcessRecord, all: &[ProcessStat], cookies: &[(i32, &str)]) -> Vec<i32> {
        let cookie = |pid| cookies.iter().find(|(of, _)| *of == pid).map(|(_, cookie)| (*cookie).to_owned());
        let mut pids: Vec<i32> =
            find_leftovers(&[remains], all, cookie).into_iter().map(|left| left.stat.pid).collect();
        pids.sort_unstable();
        pids
    }

    #[test]
    fn a_group_is_killed_whole_as_long_as_its_leader_is_the_one_that_was_written_down() {
        let all = [stat(100, 1, 100, 50), stat(101, 100, 100, 51), stat(102, 101, 102, 52), stat(200, 1, 200, 50)];
        assert_eq!(killed(remains("", &[(100, 50)]), &all, &[]), [100, 101, 102], "with what left the group");
    }

    #[test]
    fn a_number_that_was_given_to_somebody_else_since_is_not_killed() {
        let all = [stat(100, 1, 100, 999), stat(101, 100, 100, 1000)];
        assert_eq!(killed(remains("c", &[(100, 50)]), &all, &[]), [0; 0]);
        // Nor where the leader only has the number, and belongs to another group.
        assert_eq!(killed(remains("c", &[(100, 50)]), &[stat(100, 1, 7, 50)], &[]), [0; 0]);
    }

    #[test]
    fn a_group_without_its_leader_is_known_by_a_cookie_in_it_and_left_alone_without() {
        let all = [stat(101, 1, 100, 51), stat(102, 1, 100, 52)];
        assert_eq!(killed(remains("c", &[(100, 50)]), &all, &[(102, "c")]), [101, 102]);
        assert_eq!(killed(remains("c", &[(100, 50)]), &all, &[(102, "d")]), [0; 0]);
    }

    #[test]
    fn what_carries_the_cookie_is_killed_with_what_it_has_started_wherever_that_is() {
        let all = [stat(101, 1, 101, 51), stat(102, 101, 102, 52), stat(103, 1, 103, 53)];
        assert_eq!(killed(remains("c", &[]), &all, &[(101, "c")]), [101, 102]);
        assert_eq!(killed(remains("", &[]), &all, &[(103, "")]), [0; 0], "no cookie is nobody's cookie");
    }

    #[test]
    fn a_group_whose_leader_was_not_written_down_in_time_is_known_by_the_leaders_cookie() {
        let all = [stat(100, 1, 100, 50), stat(101, 1, 100, 51)];
        assert_eq!(killed(remains("c", &[]), &all, &[(100, "c")]), [100, 101]);
    }

    #[test]
    fn a_leader_that_waits_to_be_reaped_still_stands_for_its_group() {
        let ended = ProcessStat { state: ProcessState::Zombie, ..stat(100, 1, 100, 50) };
        assert_eq!(killed(remains("", &[(100, 50)]), &[ended, stat(101, 1, 100, 51)], &[]), [101]);
    }

    #[test]
    fn only_what_looks_like_a_claims_group_is_taken_for_one() {
        let folder = tempfile::tempdir().unwrap();
        for (name, ours) in [("claim-1", true), ("system.slice", false)] {
            let path = folder.path().join(name);
            std::fs::create_dir(&path).unwrap();
            assert!(!is_claim_cgroup(&path), "it is no control group");
            std::fs::write(path.join("cgroup.procs"), "").unwrap();
            assert_eq!(is_claim_cgroup(&path), ours);
        }
    }
}
