//! The place of one process in an enclosure: how it is started there, told to end, and waited for.

use rustix::process::Signal;

use super::super::super::process::{self, LOOK_AGAIN};
use super::super::{children, forerunner, shim};
use super::{Around, Enclosure, Exceeded, Inner};
use crate::domain::journal::Leader;
use crate::limits::PROCESS_KILLED_WAIT;

/// A process's place in an enclosure, from just before it is started until its end was seen.
#[derive(Debug)]
pub(crate) struct Entry {
    pub(super) enclosure: Enclosure,
}

impl Drop for Entry {
    fn drop(&mut self) {
        // What is in it has to go with the last process whose end somebody waits for.
        if self.alone() {
            self.enclosure.inner.kill();
        }
        let mut state = self.enclosure.inner.state();
        state.running = state.running.saturating_sub(1);
    }
}

/// How a process is to be started.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Way {
    /// As it is.
    Direct,
    /// Through this program, with these arguments before its own.
    Through(Vec<std::ffi::OsString>),
}

impl Entry {
    fn inner(&self) -> &Inner {
        &self.enclosure.inner
    }

    /// How the process is to be started.
    pub(crate) fn way(&self, program: &std::path::Path, argv0: &str) -> Way {
        match &self.inner().around {
            Around::Nothing | Around::Reaper => Way::Direct,
            Around::Cgroup { group, .. } => Way::Through(shim::arguments(&group.entrance(), program, argv0).into()),
        }
    }

    /// The cookie of its claim, where strays of that can be told.
    pub(crate) fn claim(&self) -> Option<&str> {
        let told = !matches!(self.inner().around, Around::Nothing);
        told.then_some(self.inner().name.cookie.as_str())
    }

    /// The process has been started.
    pub(crate) fn started(&self, process: i32) {
        if let (Around::Nothing | Around::Reaper, Some(tell)) = (&self.inner().around, self.inner().witness.0.get())
            && let Some(stat) = process::Stat::of(process)
        {
            tell(Leader { pid: process, started: stat.started });
        }
        if let Around::Reaper = self.inner().around {
            // The forerunner does it where there is one.
            drop(std::fs::write(format!("/proc/{process}/oom_score_adj"), forerunner::OOM_SCORE));
        }
    }

    /// Whether no other process of the enclosure is still to be waited for.
    fn alone(&self) -> bool {
        self.inner().state().running <= 1
    }

    /// Whether the process's group holds nothing that the enclosure does not hold, so that looking through all processes
    /// for it can be saved.
    pub(crate) fn holds_its_group(&self) -> bool {
        matches!(self.inner().around, Around::Cgroup { .. }) && self.alone()
    }

    /// Tells processes that are outside the group to end.
    pub(crate) fn terminate_others(&self, group: i32) {
        if !self.alone() {
            return;
        }
        let outside = |process| process::Stat::of(process).is_some_and(|stat| stat.group != group);
        match &self.inner().around {
            Around::Nothing => {}
            Around::Reaper => {
                drop(children::strays(&self.inner().name.cookie, Some(Signal::TERM)));
            }
            Around::Cgroup { group, .. } => group.signal(Signal::TERM, outside),
        }
    }

    /// Resolves when all processes have gone by themselves.
    ///
    /// Cancel safe.
    pub(crate) async fn deserted(&self) {
        match &self.inner().around {
            Around::Cgroup { group, .. } if self.alone() => group.emptied().await,
            Around::Reaper if self.alone() => loop {
                match children::strays(&self.inner().name.cookie, None) {
                    Ok(strays) if strays.certain.is_empty() => return,
                    Ok(strays) => {
                        for pid in strays.certain {
                            process::gone(pid).await;
                        }
                        drop(children::reap());
                    }
                    Err(_) => return,
                }
            },
            Around::Nothing | Around::Reaper | Around::Cgroup { .. } => {}
        }
    }

    /// Kills whatever is still there, unless another process of the enclosure is to be waited for.
    pub(crate) fn kill(&self) {
        if self.alone() {
            self.inner().kill_at_once();
        }
    }

    /// The processes that are still there a while after they were killed.
    pub(crate) async fn survivors(&self) -> Vec<i32> {
        if !self.alone() {
            return Vec::new();
        }
        let gone = async {
            match &self.inner().around {
                Around::Nothing => {}
                Around::Reaper => self.certain_killed().await,
                Around::Cgroup { group, means } => group.killed(*means).await,
            }
        };
        if tokio::time::timeout(PROCESS_KILLED_WAIT, gone).await.is_ok() {
            return Vec::new();
        }
        match &self.inner().around {
            Around::Nothing => Vec::new(),
            Around::Reaper => {
                children::strays(&self.inner().name.cookie, None).map(|strays| strays.certain).unwrap_or_default()
            }
            Around::Cgroup { group, .. } => group.processes(),
        }
    }

    async fn certain_killed(&self) {
        while let Ok(strays) = children::strays(&self.inner().name.cookie, Some(Signal::KILL)) {
            if strays.certain.is_empty() && !strays.moving {
                return;
            }
            if strays.certain.is_empty() {
                tokio::time::sleep(LOOK_AGAIN).await;
            }
            for pid in strays.certain {
                process::gone(pid).await;
            }
            drop(children::reap());
        }
    }

    /// The limit that a process came up against since this was last asked.
    pub(crate) fn exceeded(&self) -> Option<Exceeded> {
        let Around::Cgroup { group, .. } = &self.inner().around else { return None };
        let limits = &self.inner().limits;
        let mut state = self.inner().state();
        let more = |file, event, seen: &mut u64| {
            let count = group.events(file, event);
            std::mem::replace(seen, count) < count
        };
        if let Some(bytes) = limits.memory
            && more("memory.events", "oom_kill", &mut state.out_of_memory)
        {
            return Some(Exceeded::Memory { bytes });
        }
        let most = limits.processes?;
        more("pids.events", "max", &mut state.processes_refused).then_some(Exceeded::Processes { most })
    }
}
