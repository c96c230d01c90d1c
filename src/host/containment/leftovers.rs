//! The end of what an earlier life of this worker has left running, by what it has written down.
//!
//! A number of a process is believed only together with when that process was started, or with the cookie in somebody's
//! environment: what cannot be told from a stranger is left alone.

use std::collections::BTreeSet;
use std::io;
use std::path::{Path, PathBuf};

use rustix::process::Signal;

use super::super::process::{self, LOOK_AGAIN, Life, Stat, variable};
use super::cgroup::Group;
use super::{CLAIM_PREFIX, COOKIE, end};
use crate::domain::journal::Remains;
use crate::limits::CONTAINMENT_PROBE_WAIT;

/// Kills what is left of claims that an earlier life of this worker has written down: their control groups, what carries
/// their cookies, what is in their process groups, and what those have started. Answers how many of the claims had anything
/// left. Takes up to a few seconds of this thread.
///
/// # Errors
///
/// Where processes are still there, with their numbers, or where `/proc` cannot be read.
pub fn kill_leftovers(list: &[Remains]) -> io::Result<usize> {
    let mut found = BTreeSet::new();
    for (index, remains) in list.iter().enumerate() {
        let Some(group) = remains.cgroup.as_deref().map(Path::new).filter(|path| is_ours(path)) else { continue };
        let group = Group::at(PathBuf::from(group));
        if !group.empty() {
            found.insert(index);
        }
        end(&group)?;
    }
    if list.is_empty() {
        return Ok(0);
    }
    for _ in 0..CONTAINMENT_PROBE_WAIT.as_millis() / LOOK_AGAIN.as_millis() {
        let left = left(list, &Stat::all()?, |pid| variable(pid, COOKIE));
        if left.is_empty() {
            return Ok(found.len());
        }
        for Left { claim, stat } in left {
            found.insert(claim);
            process::signal(stat.pid, Signal::KILL, |pid| Stat::of(pid).is_some_and(|now| now.started == stat.started));
        }
        std::thread::sleep(LOOK_AGAIN);
    }
    let left: Vec<i32> =
        left(list, &Stat::all()?, |pid| variable(pid, COOKIE)).iter().map(|left| left.stat.pid).collect();
    if left.is_empty() {
        return Ok(found.len());
    }
    Err(io::Error::new(io::ErrorKind::ResourceBusy, format!("processes of earlier tasks cannot be killed: {left:?}")))
}

/// What was written down is believed only as far as it has the form of what is written down.
fn is_ours(path: &Path) -> bool {
    path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(CLAIM_PREFIX))
        && path.join("cgroup.procs").exists()
}

/// A process that is left of a claim.
#[derive(Debug, PartialEq, Eq)]
struct Left {
    claim: usize,
    stat: Stat,
}

/// Which processes are left of which claim. Pure but for `cookie_of`.
fn left(list: &[Remains], all: &[Stat], cookie_of: impl Fn(i32) -> Option<String>) -> Vec<Left> {
    let own = std::process::id().cast_signed();
    let running: Vec<(Stat, Option<String>)> = all
        .iter()
        .filter(|stat| stat.life == Life::Running && stat.pid != own)
        .map(|stat| (*stat, cookie_of(stat.pid)))
        .collect();
    let mut left = Vec::new();
    for (claim, remains) in list.iter().enumerate() {
        let carries =
            |cookie: &Option<String>| !remains.cookie.is_empty() && cookie.as_deref() == Some(&*remains.cookie);
        // A group is its own as long as its leader is the one that was written down, or a member carries the cookie: the
        // kernel gives a group's number to nobody while there is a group.
        let certain_group = |pid: i32, started: u64| {
            all.iter().any(|stat| stat.pid == pid && stat.group == pid && stat.started == started)
                || running.iter().any(|(stat, cookie)| stat.group == pid && carries(cookie))
        };
        let written = remains.leaders.iter().filter(|leader| certain_group(leader.pid, leader.started));
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
            running.iter().filter(|(stat, _)| with.contains(&stat.pid)).map(|(stat, _)| Left { claim, stat: *stat }),
        );
    }
    left
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::domain::journal::Leader;

    fn stat(pid: i32, parent: i32, group: i32, started: u64) -> Stat {
        Stat { pid, life: Life::Running, parent, group, started }
    }

    fn remains(cookie: &str, leaders: &[(i32, u64)]) -> Remains {
        let leaders = leaders.iter().map(|(pid, started)| Leader { pid: *pid, started: *started }).collect();
        Remains { cookie: cookie.into(), cgroup: None, leaders }
    }

    fn killed(remains: Remains, all: &[Stat], cookies: &[(i32, &str)]) -> Vec<i32> {
        let cookie = |pid| cookies.iter().find(|(of, _)| *of == pid).map(|(_, cookie)| (*cookie).to_owned());
        let mut pids: Vec<i32> = left(&[remains], all, cookie).into_iter().map(|left| left.stat.pid).collect();
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
        let ended = Stat { life: Life::Ended, ..stat(100, 1, 100, 50) };
        assert_eq!(killed(remains("", &[(100, 50)]), &[ended, stat(101, 1, 100, 51)], &[]), [101]);
    }

    #[test]
    fn only_what_looks_like_a_claims_group_is_taken_for_one() {
        let folder = tempfile::tempdir().unwrap();
        for (name, ours) in [("claim-1", true), ("system.slice", false)] {
            let path = folder.path().join(name);
            std::fs::create_dir(&path).unwrap();
            assert!(!is_ours(&path), "it is no control group");
            std::fs::write(path.join("cgroup.procs"), "").unwrap();
            assert_eq!(is_ours(&path), ours);
        }
    }
}
