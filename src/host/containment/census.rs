//! Which of the host's processes are whose, where no control group says so.

use std::collections::HashMap;

use super::super::process::{self, Life, Stat};
use super::COOKIE;

/// The processes of the host at one moment, and the claims that they were started for.
#[derive(Debug)]
pub(super) struct Census {
    all: Vec<Stat>,
    carriers: HashMap<String, Vec<i32>>,
}

impl Census {
    /// Reads all of `/proc`: not to be called where nothing may wait.
    pub(super) fn take() -> Self {
        let all = Stat::all().unwrap_or_default();
        let mut carriers = HashMap::<String, Vec<i32>>::new();
        for stat in all.iter().filter(|stat| stat.life == Life::Running) {
            if let Some(cookie) = process::variable(stat.pid, COOKIE) {
                carriers.entry(cookie).or_default().push(stat.pid);
            }
        }
        Self { all, carriers }
    }

    /// The processes that carry a cookie, and what they started that still has its parents.
    pub(super) fn processes(&self, cookie: &str) -> Vec<i32> {
        let carriers = self.carriers.get(cookie).map(Vec::as_slice).unwrap_or_default();
        process::with_descendants(carriers, &self.all)
    }
}
