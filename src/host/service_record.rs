//! Records the processes of sidecars, so that the worker's next start can kill them: an append-only file for each sidecar.
//!
//! The journal does the same for claims. [`crate::host::containment::kill_recorded_processes`] kills what is read here.

use std::fs::{File, OpenOptions};
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};

use parking_lot::Mutex;

use crate::domain::journal::{BootId, Leader, ProcessRecord};
use crate::host::containment::ScopeName;
use crate::limits::SERVICE_RECORD_BYTES_MAX;

const SUFFIX: &str = ".remains";

/// The record of one start of a sidecar.
#[derive(Debug)]
pub(crate) struct ServiceRecord {
    path: PathBuf,
    file: Mutex<File>,
}

impl ServiceRecord {
    /// Has to be called before the first process starts (I27).
    pub(crate) fn create(dir: &Path, name: &str, scope: &ScopeName) -> io::Result<Self> {
        let path = dir.join(format!("{name}{SUFFIX}"));
        let ProcessRecord { cookie, cgroup, .. } = scope.to_record();
        let mut file = OpenOptions::new().create(true).write(true).truncate(true).open(&path)?;
        let BootId(boot) = super::journal::current_boot();
        file.write_all(format!("boot {boot}\ncookie {cookie}\n").as_bytes())?;
        if let Some(cgroup) = cgroup {
            file.write_all(format!("cgroup {cgroup}\n").as_bytes())?;
        }
        Ok(Self { path, file: Mutex::new(file) })
    }

    pub(crate) fn record_leader(&self, Leader { pid, start_ticks: started }: Leader) {
        let mut file = self.file.lock();
        if let Err(error) = file.write_all(format!("leader {pid} {started}\n").as_bytes()) {
            // Its cookie is recorded already.
            tracing::debug!(%error, "cannot record the leader of a sidecar's process group");
        }
    }

    /// To be called when no process is left.
    pub(crate) fn remove(&self) {
        if let Err(error) = std::fs::remove_file(&self.path) {
            tracing::debug!(%error, "cannot remove the record of a sidecar");
        }
    }
}

/// The sidecars of the previous worker process. Skips unreadable files.
pub(crate) fn read_all(dir: &Path, boot: &BootId) -> Vec<ProcessRecord> {
    let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
    let paths = entries.map(|entry| entry.path()).filter(|path| path.to_string_lossy().ends_with(SUFFIX));
    paths.filter_map(|path| parse(&read_text(&path)?, boot)).collect()
}

/// To be called once the recorded processes are gone.
pub(crate) fn remove_all(dir: &Path) {
    let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
    for path in entries.map(|entry| entry.path()).filter(|path| path.to_string_lossy().ends_with(SUFFIX)) {
        if let Err(error) = std::fs::remove_file(&path) {
            tracing::debug!(%error, "cannot remove the record of a previous sidecar");
        }
    }
}

fn read_text(path: &Path) -> Option<String> {
    use std::io::Read as _;
    let mut text = String::new();
    File::open(path).ok()?.take(SERVICE_RECORD_BYTES_MAX).read_to_string(&mut text).ok()?;
    Some(text)
}

/// `None` if the record is of another boot, whose processes are gone, or has no cookie.
fn parse(text: &str, boot: &BootId) -> Option<ProcessRecord> {
    let mut record = ProcessRecord::default();
    let mut this_boot = false;
    // The worker was killed while it wrote a line without an end.
    for line in text.split_inclusive('\n').filter_map(|line| line.strip_suffix('\n')) {
        match line.split_once(' ') {
            Some(("boot", then)) => this_boot = then == &*boot.0,
            Some(("cookie", cookie)) => record.cookie = cookie.into(),
            Some(("cgroup", cgroup)) => record.cgroup = Some(cgroup.into()),
            Some(("leader", leader)) => {
                let leader = leader.split_once(' ').and_then(|(pid, started)| {
                    Some(Leader { pid: pid.parse().ok()?, start_ticks: started.parse().ok()? })
                });
                record.leaders.extend(leader);
            }
            _ => {}
        }
    }
    (this_boot && !record.cookie.is_empty()).then_some(record)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_is_read_only_during_the_same_boot() {
        let dir = tempfile::tempdir().unwrap();
        let name = ScopeName { cookie: "c1".to_owned(), cgroup: Some("/sys/fs/cgroup/x/claim-c1".into()) };
        let record = ServiceRecord::create(dir.path(), "echo", &name).unwrap();
        record.record_leader(Leader { pid: 7, start_ticks: 99 });
        let boot = super::super::journal::current_boot();
        let expected = ProcessRecord {
            cookie: "c1".into(),
            cgroup: Some("/sys/fs/cgroup/x/claim-c1".into()),
            leaders: vec![Leader { pid: 7, start_ticks: 99 }],
        };
        assert_eq!(read_all(dir.path(), &boot), [expected]);
        assert_eq!(read_all(dir.path(), &BootId("another".into())), []);
        record.remove();
        assert_eq!(read_all(dir.path(), &boot), []);
    }

    #[test]
    fn an_incomplete_line_is_ignored() {
        let boot = BootId("b".into());
        let read = |text| parse(text, &boot);
        assert_eq!(read("boot b\ncookie c"), None);
        assert_eq!(read("boot b\ncookie c\nleader 7 9").unwrap().leaders, []);
        assert_eq!(read("boot b\ncookie c\nleader 7 9\nleader x\n").unwrap().leaders.len(), 1);
        assert_eq!(read(""), None);
    }
}
