//! Control groups of programs that outlive this process: the workers of a controller. Each enters its own before its first line,
//! and whoever knows the folder can end it with all that it has started.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::cgroup::{self, Cgroup, KillMethod};
use super::{name_digest, try_kill_method};

/// Enters the group whose entrance it is told, and becomes the program.
const ENTER: [&str; 3] = ["/bin/sh", "-c", r#"echo 0 >"$0" && exec "$@""#];

/// What some shell sets itself or drops, whatever it finds.
const OF_SHELLS: [&str; 28] = [
    "_",
    "BASH",
    "BASHOPTS",
    "BASHPID",
    "BASH_ARGV0",
    "BASH_VERSION",
    "COMP_WORDBREAKS",
    "DIRSTACK",
    "EPOCHREALTIME",
    "EPOCHSECONDS",
    "EUID",
    "FUNCNAME",
    "GROUPS",
    "HISTCMD",
    "IFS",
    "LINENO",
    "OLDPWD",
    "OPTIND",
    "PPID",
    "PS1",
    "PS4",
    "PWD",
    "RANDOM",
    "SECONDS",
    "SHELLOPTS",
    "SHLVL",
    "SRANDOM",
    "UID",
];

/// Whether a program that enters its group finds a variable of this name as it was set.
pub(crate) fn passes_on(name: &str) -> bool {
    let is_word = name.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_');
    is_word && !name.starts_with(|first: char| first.is_ascii_digit()) && !OF_SHELLS.contains(&name)
}

/// Where the groups of a pool's workers are made.
#[derive(Debug)]
pub(crate) struct WorkerCgroups {
    parent: Cgroup,
}

impl WorkerCgroups {
    /// Finds out whether this host has control groups that are killed as a whole, by doing it once. Takes milliseconds of this
    /// thread, and a few seconds at most.
    ///
    /// # Errors
    ///
    /// Why there are none.
    pub(crate) fn probe(name: &str) -> Result<Self, String> {
        let own = Cgroup::at(cgroup::own_cgroup_path()?);
        let groups = Self { parent: Cgroup::at(own.path().join(format!("journeyman-group-{}", name_digest(name)))) };
        groups.parent.create().map_err(|error| format!("{error} (under systemd, set Delegate=yes)"))?;
        // Somebody else may try it for the same pool.
        let trial = Cgroup::at(groups.parent.path().join(format!("probe-{}", uuid::Uuid::new_v4().simple())));
        #[expect(clippy::disallowed_methods, reason = "at the start only, and for milliseconds")]
        let mut waiting = std::process::Command::new(ENTER[0]);
        waiting.args(&ENTER[1..]).arg(trial.procs_path()).arg("cat");
        let tried = try_kill_method(&trial, KillMethod::Kill, waiting);
        if tried.is_err() {
            drop(trial.remove());
        }
        tried.map(|()| groups)
    }

    /// Those that were made some time ago, by the names they were made under: whose are not known are of a controller that was
    /// killed while it started one.
    pub(crate) fn older_than(&self, age: Duration) -> Vec<(String, PathBuf)> {
        let entries = std::fs::read_dir(self.parent.path()).into_iter().flatten().flatten();
        let is_old = |entry: &std::fs::DirEntry| {
            let about = entry.metadata().ok().filter(std::fs::Metadata::is_dir);
            about.and_then(|about| about.modified().ok()?.elapsed().ok()).is_some_and(|since| since > age)
        };
        let old =
            entries.filter(is_old).filter_map(|entry| Some((entry.file_name().into_string().ok()?, entry.path())));
        old.collect()
    }

    /// Makes a group.
    ///
    /// # Errors
    ///
    /// What the operating system said.
    pub(crate) fn create(&self, id: &str) -> io::Result<WorkerCgroup> {
        self.parent.create()?;
        let group = Cgroup::at(self.parent.path().join(id));
        group.create()?;
        Ok(WorkerCgroup(group))
    }
}

impl Drop for WorkerCgroups {
    fn drop(&mut self) {
        // Only where nothing is in it.
        drop(std::fs::remove_dir(self.parent.path()));
    }
}

/// What a program is in, and whatever it starts.
#[derive(Debug)]
pub(crate) struct WorkerCgroup(Cgroup);

impl WorkerCgroup {
    /// One that was made before.
    pub(crate) const fn at(folder: PathBuf) -> Self {
        Self(Cgroup::at(folder))
    }

    /// By which it is found again.
    pub(crate) fn path(&self) -> &Path {
        self.0.path()
    }

    /// What a program's own words come after, so that it begins in the group.
    pub(crate) fn command_prefix(&self) -> (&'static str, [PathBuf; 3]) {
        (ENTER[0], [ENTER[1].into(), ENTER[2].into(), self.0.procs_path()])
    }

    /// Ends everything that is in it.
    pub(crate) fn kill(&self) {
        self.0.kill(KillMethod::Kill);
    }

    /// Takes it away. Says whether it is gone: not while anything is in it.
    pub(crate) fn try_remove(&self) -> bool {
        self.0.remove().is_ok()
    }
}
