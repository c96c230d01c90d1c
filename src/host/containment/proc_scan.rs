//! Finds the processes of claims in `/proc`, for hosts without control groups.

use std::collections::HashMap;

use super::super::process::{self, ProcessStat, ProcessState};
use super::COOKIE_VARIABLE;

/// A snapshot of `/proc`, indexed by claim cookie.
#[derive(Debug)]
pub(super) struct ProcScan {
    processes: Vec<ProcessStat>,
    pids_by_cookie: HashMap<String, Vec<i32>>,
}

impl ProcScan {
    /// Reads all of `/proc`; blocks.
    pub(super) fn read() -> Self {
        let processes = ProcessStat::read_all().unwrap_or_default();
        let mut pids_by_cookie = HashMap::<String, Vec<i32>>::new();
        for stat in processes.iter().filter(|stat| stat.state == ProcessState::Running) {
            if let Some(cookie) = process::environment_variable(stat.pid, COOKIE_VARIABLE) {
                pids_by_cookie.entry(cookie).or_default().push(stat.pid);
            }
        }
        Self { processes, pids_by_cookie }
    }

    /// The processes with a cookie, and their descendants.
    pub(super) fn processes_of(&self, cookie: &str) -> Vec<i32> {
        let roots = self.pids_by_cookie.get(cookie).map(Vec::as_slice).unwrap_or_default();
        process::with_descendants(roots, &self.processes)
    }
}
