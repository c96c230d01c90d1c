//! Finds the processes of claims in `/proc`, for hosts without control groups.

use std::collections::HashMap;
use std::io;

use super::super::process::{self, ProcessStat, ProcessState};
use super::COOKIE_VARIABLE;

/// A snapshot of `/proc`, indexed by claim cookie.
#[derive(Debug)]
pub(super) struct ProcScan {
    pub(super) processes: Vec<ProcessStat>,
    pub(super) pids_by_cookie: HashMap<String, Vec<i32>>,
}

impl ProcScan {
    /// Reads all of `/proc`; blocks.
    pub(super) fn read() -> io::Result<Self> {
        let processes = ProcessStat::read_all()?;
        let mut pids_by_cookie = HashMap::<String, Vec<i32>>::new();
        for stat in processes.iter().filter(|stat| stat.state == ProcessState::Running) {
            if let Some(cookie) = process::environment_variable(stat.pid, COOKIE_VARIABLE) {
                pids_by_cookie.entry(cookie).or_default().push(stat.pid);
            }
        }
        Ok(Self { processes, pids_by_cookie })
    }

    /// The processes with a cookie, and their descendants.
    pub(super) fn processes_of(&self, cookie: &str) -> Vec<i32> {
        process::with_descendants(self.pids_with_cookie(cookie), &self.processes)
    }

    /// Processes without a claim may have an empty cookie.
    pub(super) fn pids_with_cookie(&self, cookie: &str) -> &[i32] {
        self.pids_by_cookie.get(cookie).filter(|_| !cookie.is_empty()).map(Vec::as_slice).unwrap_or_default()
    }
}
