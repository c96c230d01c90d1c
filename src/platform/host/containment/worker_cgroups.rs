//! Control groups of programs that outlive this process: the workers of a controller. A worker starts in its group, and any
//! process that knows the group's path can kill it with everything it started.

use std::ffi::OsString;
use std::io;
use std::path::Path;

use super::cgroup::{Cgroup, own_cgroup_path};
use super::exec_shim::EXEC;
use super::shim_launch::shim_path;
use super::{create_parent_cgroup, try_kill};

/// The parent of the groups of a pool's workers.
#[derive(Debug)]
pub struct WorkerCgroups {
    parent: Cgroup,
}

impl WorkerCgroups {
    /// Checks that this host has control groups with `cgroup.kill`, by using one. Blocks for milliseconds, at most a few seconds.
    ///
    /// # Errors
    ///
    /// Why they cannot be used.
    pub fn probe(name: &str) -> Result<Self, String> {
        let (_, parent) = create_parent_cgroup("journeyman-group", name)?;
        let groups = Self { parent };
        // Another controller may probe for the same pool.
        let trial = Cgroup::at(groups.parent.path().join(format!("probe-{}", uuid::Uuid::new_v4().simple())));
        let tried = try_kill(&trial);
        if tried.is_err() {
            drop(trial.remove());
        }
        tried.map(|()| groups)
    }

    pub fn create(&self, id: &str) -> io::Result<Cgroup> {
        self.parent.create()?;
        let group = Cgroup::at(self.parent.path().join(id));
        group.create()?;
        Ok(group)
    }
}

impl Drop for WorkerCgroups {
    fn drop(&mut self) {
        // Succeeds only if it has no groups.
        drop(std::fs::remove_dir(self.parent.path()));
    }
}

/// Moves this process into the group that it is in already. The kernel delays the first move of a process after a rest by some 10 ms,
/// so that a worker enters its group sooner if this runs while its start is prepared.
pub fn prepare_entry() {
    if let Ok(path) = own_cgroup_path() {
        drop(std::fs::write(Cgroup::at(path).procs_path(), "0"));
    }
}

/// The program to start, and the arguments before the actual program and its arguments, so that it starts in a group.
pub fn command_prefix(group: &Cgroup) -> io::Result<(&'static Path, [OsString; 2])> {
    Ok((shim_path()?, [EXEC.into(), group.procs_path().into()]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_prepared_entry_leaves_this_process_in_its_group() {
        let before = own_cgroup_path();
        prepare_entry();
        assert_eq!(own_cgroup_path(), before);
    }
}
