//! Kills the processes that the previous worker process left running, found by its journal.
//!
//! PIDs are reused: a PID is trusted only together with its start time, or with the cookie in the environment. Anything else
//! may be an unrelated process and is not killed.

use std::collections::BTreeSet;
use std::io;
use std::path::{Path, PathBuf};

use rustix::process::Signal;

use super::super::process::{self, PROCESS_POLL_INTERVAL, ProcessStat, ProcessState};
use super::cgroup::Cgroup;
use super::proc_scan::ProcScan;
use super::{CLAIM_CGROUP_PREFIX, kill_and_remove};
use journeyman_domain::journal::{Leader, ProcessRecord};
use journeyman_domain::limits::CONTAINMENT_PROBE_TIMEOUT;

/// Kills the processes of recorded claims: their control groups, processes with their cookies, their process groups, and the
/// descendants. Returns how many of the claims had processes. Blocks for up to a few seconds.
///
/// # Errors
///
/// Processes survive SIGKILL, or `/proc` cannot be read.
pub fn kill_recorded_processes(records: &[ProcessRecord]) -> io::Result<usize> {
    let mut found = BTreeSet::new();
    for (index, record) in records.iter().enumerate() {
        let Some(group) = record.cgroup.as_deref().map(Path::new).filter(|path| is_claim_cgroup(path)) else {
            continue;
        };
        let group = Cgroup::at(PathBuf::from(group));
        if !group.is_empty() {
            found.insert(index);
        }
        kill_and_remove(&group)?;
    }
    if records.is_empty() {
        return Ok(0);
    }
    let mut remaining: Vec<i32> = Vec::new();
    for _ in 0..CONTAINMENT_PROBE_TIMEOUT.as_millis() / PROCESS_POLL_INTERVAL.as_millis() {
        let scan = ProcScan::read()?;
        remaining.clear();
        for (index, record) in records.iter().enumerate() {
            for stat in find_leftovers(record, &scan) {
                stat.signal(Signal::KILL);
                found.insert(index);
                remaining.push(stat.pid);
            }
        }
        if remaining.is_empty() {
            return Ok(found.len());
        }
        std::thread::sleep(PROCESS_POLL_INTERVAL);
    }
    let text = format!("cannot kill processes of a previous worker process: {remaining:?}");
    Err(io::Error::new(io::ErrorKind::ResourceBusy, text))
}

/// Guards against a damaged record that names another group.
fn is_claim_cgroup(path: &Path) -> bool {
    path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(CLAIM_CGROUP_PREFIX))
        && path.join("cgroup.procs").exists()
}

/// Finds the running processes of a record.
fn find_leftovers<'a>(record: &ProcessRecord, scan: &'a ProcScan) -> Vec<&'a ProcessStat> {
    let own = std::process::id().cast_signed();
    let running: Vec<&ProcessStat> =
        scan.processes.iter().filter(|stat| stat.state == ProcessState::Running && stat.pid != own).collect();
    let with_cookie = scan.pids_with_cookie(&record.cookie);
    let has_cookie = |stat: &&&ProcessStat| with_cookie.contains(&stat.pid);
    // A group is the claim's while its leader is the recorded one, or a member has the cookie: the kernel does not reuse the
    // number of an existing group.
    let is_claim_group = |leader: &&Leader| {
        let Leader { pid, start_ticks } = **leader;
        scan.processes.iter().any(|stat| (stat.pid, stat.group, stat.start_ticks) == (pid, pid, start_ticks))
            || running.iter().filter(has_cookie).any(|stat| stat.group == pid)
    };
    let recorded = record.leaders.iter().filter(is_claim_group).map(|leader| leader.pid);
    // A leader that started just before the crash may not be recorded.
    let unrecorded = running.iter().filter(has_cookie).filter(|stat| stat.pid == stat.group).map(|stat| stat.pid);
    let groups: Vec<i32> = recorded.chain(unrecorded).collect();
    let in_claim = running.iter().filter(|stat| has_cookie(stat) || groups.contains(&stat.group));
    let roots: Vec<i32> = in_claim.map(|stat| stat.pid).collect();
    let tree = process::with_descendants(&roots, &scan.processes);
    running.into_iter().filter(|stat| tree.contains(&stat.pid)).collect()
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;

    fn stat(pid: i32, parent: i32, group: i32, started: u64) -> ProcessStat {
        ProcessStat { pid, state: ProcessState::Running, parent, group, start_ticks: started }
    }

    fn record(cookie: &str, leaders: &[(i32, u64)]) -> ProcessRecord {
        let leaders = leaders.iter().map(|(pid, started)| Leader { pid: *pid, start_ticks: *started }).collect();
        ProcessRecord { cookie: cookie.into(), cgroup: None, leaders }
    }

    fn killed(record: ProcessRecord, all: &[ProcessStat], cookies: &[(i32, &str)]) -> Vec<i32> {
        let mut scan = ProcScan { processes: all.to_vec(), pids_by_cookie: HashMap::new() };
        for (pid, cookie) in cookies {
            scan.pids_by_cookie.entry((*cookie).to_owned()).or_default().push(*pid);
        }
        let mut pids: Vec<i32> = find_leftovers(&record, &scan).into_iter().map(|stat| stat.pid).collect();
        pids.sort_unstable();
        pids
    }

    #[test]
    fn a_group_with_its_recorded_leader_is_killed_with_its_descendants() {
        let all = [stat(100, 1, 100, 50), stat(101, 100, 100, 51), stat(102, 101, 102, 52), stat(200, 1, 200, 50)];
        assert_eq!(
            killed(record("", &[(100, 50)]), &all, &[]),
            [100, 101, 102],
            "with the process that left the group"
        );
    }

    #[test]
    fn a_process_with_a_reused_pid_is_not_killed() {
        let all = [stat(100, 1, 100, 999), stat(101, 100, 100, 1000)];
        assert_eq!(killed(record("c", &[(100, 50)]), &all, &[]), [0; 0]);
        // Nor a process with the recorded PID that belongs to another group.
        assert_eq!(killed(record("c", &[(100, 50)]), &[stat(100, 1, 7, 50)], &[]), [0; 0]);
    }

    #[test]
    fn a_group_without_its_leader_is_killed_only_if_a_member_has_the_cookie() {
        let all = [stat(101, 1, 100, 51), stat(102, 1, 100, 52)];
        assert_eq!(killed(record("c", &[(100, 50)]), &all, &[(102, "c")]), [101, 102]);
        assert_eq!(killed(record("c", &[(100, 50)]), &all, &[(102, "d")]), [0; 0]);
    }

    #[test]
    fn a_process_with_the_cookie_is_killed_with_its_descendants_in_any_group() {
        let all = [stat(101, 1, 101, 51), stat(102, 101, 102, 52), stat(103, 1, 103, 53)];
        assert_eq!(killed(record("c", &[]), &all, &[(101, "c")]), [101, 102]);
        assert_eq!(killed(record("", &[]), &all, &[(103, "")]), [0; 0], "an empty cookie matches no process");
    }

    #[test]
    fn a_group_with_an_unrecorded_leader_is_found_by_the_leaders_cookie() {
        let all = [stat(100, 1, 100, 50), stat(101, 1, 100, 51)];
        assert_eq!(killed(record("c", &[]), &all, &[(100, "c")]), [100, 101]);
    }

    #[test]
    fn a_zombie_leader_still_identifies_its_group() {
        let ended = ProcessStat { state: ProcessState::Zombie, ..stat(100, 1, 100, 50) };
        assert_eq!(killed(record("", &[(100, 50)]), &[ended, stat(101, 1, 100, 51)], &[]), [101]);
    }

    #[test]
    fn only_a_claims_control_group_is_accepted() {
        let dir = tempfile::tempdir().unwrap();
        for (name, ours) in [("claim-1", true), ("system.slice", false)] {
            let path = dir.path().join(name);
            std::fs::create_dir(&path).unwrap();
            assert!(!is_claim_cgroup(&path), "not a control group");
            std::fs::write(path.join("cgroup.procs"), "").unwrap();
            assert_eq!(is_claim_cgroup(&path), ours);
        }
    }
}
