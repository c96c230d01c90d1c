//! By what a service beside the tasks is found again by the next life of a worker that was killed: a small file each, of
//! lines that are only ever added.
//!
//! The journal does the same for claims. A service is no claim: nothing of it is reported, and it lives as long as the worker.
//! What is read here is killed by [`crate::host::containment::kill_recorded_processes`].

use std::fs::{File, OpenOptions};
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use crate::domain::journal::{BootId, Leader, ProcessRecord as Left};
use crate::host::containment::ScopeName;
use crate::limits::SERVICE_RECORD_BYTES_MAX;

/// How these files end.
const SUFFIX: &str = ".remains";

/// What is written down of one life of a service.
#[derive(Debug)]
pub(crate) struct ServiceRecord {
    path: PathBuf,
    file: Mutex<File>,
}

impl ServiceRecord {
    /// Writes down by what its processes will be found, before there are any.
    ///
    /// # Errors
    ///
    /// Where the file cannot be written.
    pub(crate) fn create(folder: &Path, name: &str, of: &ScopeName) -> io::Result<Self> {
        let path = folder.join(format!("{name}{SUFFIX}"));
        let Left { cookie, cgroup, .. } = of.to_record();
        let mut file = OpenOptions::new().create(true).write(true).truncate(true).open(&path)?;
        let BootId(boot) = super::journal::current_boot();
        file.write_all(format!("boot {boot}\ncookie {cookie}\n").as_bytes())?;
        if let Some(cgroup) = cgroup {
            file.write_all(format!("cgroup {cgroup}\n").as_bytes())?;
        }
        Ok(Self { path, file: Mutex::new(file) })
    }

    /// A process group of it exists.
    pub(crate) fn record_leader(&self, Leader { pid, start_ticks: started }: Leader) {
        let mut file = self.file.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        if let Err(error) = file.write_all(format!("leader {pid} {started}\n").as_bytes()) {
            // Its cookie is written down already.
            tracing::debug!(%error, "the leader of a service's group cannot be written down");
        }
    }

    /// Nothing of it is left.
    pub(crate) fn remove(&self) {
        if let Err(error) = std::fs::remove_file(&self.path) {
            tracing::debug!(%error, "what was written down of a service cannot be removed");
        }
    }
}

/// What an earlier life of the worker may have left of its services. Files that cannot be read are passed over.
pub(crate) fn read_all(folder: &Path, boot: &BootId) -> Vec<Left> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let paths = entries.map(|entry| entry.path()).filter(|path| path.to_string_lossy().ends_with(SUFFIX));
    paths.filter_map(|path| parse(&read_text(&path)?, boot)).collect()
}

/// To be called once what was found is gone.
pub(crate) fn remove_all(folder: &Path) {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    for path in entries.map(|entry| entry.path()).filter(|path| path.to_string_lossy().ends_with(SUFFIX)) {
        if let Err(error) = std::fs::remove_file(&path) {
            tracing::debug!(%error, "what an earlier life has written down of a service cannot be removed");
        }
    }
}

fn read_text(path: &Path) -> Option<String> {
    use std::io::Read as _;
    let mut text = String::new();
    File::open(path).ok()?.take(SERVICE_RECORD_BYTES_MAX).read_to_string(&mut text).ok()?;
    Some(text)
}

/// `None` where it is of another boot of the host, of which nothing can be left, or says nothing.
fn parse(text: &str, boot: &BootId) -> Option<Left> {
    let mut left = Left::default();
    let mut this_boot = false;
    // A line without an end was being written when the worker was killed.
    for line in text.split_inclusive('\n').filter_map(|line| line.strip_suffix('\n')) {
        match line.split_once(' ') {
            Some(("boot", then)) => this_boot = then == &*boot.0,
            Some(("cookie", cookie)) => left.cookie = cookie.into(),
            Some(("cgroup", cgroup)) => left.cgroup = Some(cgroup.into()),
            Some(("leader", leader)) => {
                let leader = leader.split_once(' ').and_then(|(pid, started)| {
                    Some(Leader { pid: pid.parse().ok()?, start_ticks: started.parse().ok()? })
                });
                left.leaders.extend(leader);
            }
            _ => {}
        }
    }
    (this_boot && !left.cookie.is_empty()).then_some(left)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_down_is_read_again_during_the_same_boot_alone() {
        let folder = tempfile::tempdir().unwrap();
        let name = ScopeName { cookie: "c1".to_owned(), cgroup: Some("/sys/fs/cgroup/x/claim-c1".into()) };
        let remains = ServiceRecord::create(folder.path(), "echo", &name).unwrap();
        remains.record_leader(Leader { pid: 7, start_ticks: 99 });
        let boot = super::super::journal::current_boot();
        let wanted = Left {
            cookie: "c1".into(),
            cgroup: Some("/sys/fs/cgroup/x/claim-c1".into()),
            leaders: vec![Leader { pid: 7, start_ticks: 99 }],
        };
        assert_eq!(read_all(folder.path(), &boot), [wanted]);
        assert_eq!(read_all(folder.path(), &BootId("another".into())), []);
        remains.remove();
        assert_eq!(read_all(folder.path(), &boot), []);
    }

    #[test]
    fn a_line_that_was_not_finished_says_nothing() {
        let boot = BootId("b".into());
        let left = |text| parse(text, &boot);
        assert_eq!(left("boot b\ncookie c"), None);
        assert_eq!(left("boot b\ncookie c\nleader 7 9").unwrap().leaders, []);
        assert_eq!(left("boot b\ncookie c\nleader 7 9\nleader x\n").unwrap().leaders.len(), 1);
        assert_eq!(left(""), None);
    }
}
