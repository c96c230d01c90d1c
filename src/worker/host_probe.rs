//! A look at the host before claiming goes on: whether it still has what every task needs.

use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use tokio::sync::Semaphore;

use crate::domain::host_health::ProbeResult;
use crate::limits::{HOST_PROBE_BYTES, HOST_PROBE_FILES, HOST_PROBE_TIMEOUT};

/// What is looked at. Clones share the rule that one look at a time is under way.
#[derive(Debug, Clone)]
pub(super) struct HostProbe {
    tasks_dir: PathBuf,
    /// A look that a dead disk holds up keeps its thread; a second one would keep another.
    in_flight: Arc<Semaphore>,
}

impl HostProbe {
    pub(super) fn new(tasks: &Path) -> Self {
        Self { tasks_dir: tasks.to_owned(), in_flight: Arc::new(Semaphore::new(1)) }
    }

    /// Looks, and says what is missing.
    pub(super) async fn run(self) -> ProbeResult {
        let Ok(permit) = Arc::clone(&self.in_flight).try_acquire_owned() else {
            tracing::warn!(folder = %self.tasks_dir.display(), "the host is still unfit: its disk has not answered the last look");
            return ProbeResult::Unhealthy;
        };
        let tasks = self.tasks_dir.clone();
        let looked = tokio::task::spawn_blocking(move || {
            let _permit = permit;
            probe_host(&tasks)
        });
        let missing = match tokio::time::timeout(HOST_PROBE_TIMEOUT, looked).await {
            Ok(Ok(Ok(()))) => {
                tracing::info!("the host looks fit again");
                return ProbeResult::Healthy;
            }
            Ok(Ok(Err(error))) => error.to_string(),
            Ok(Err(error)) => error.to_string(),
            Err(_) => format!("no answer from its disk within {HOST_PROBE_TIMEOUT:?}"),
        };
        tracing::warn!(folder = %self.tasks_dir.display(), "the host is still unfit: {missing}");
        ProbeResult::Unhealthy
    }
}

/// Makes a folder and a file as a task does, some open files, and a thread, which counts as a process does.
fn probe_host(tasks: &Path) -> io::Result<()> {
    let folder = tasks.join("probe");
    let made = write_probe_file(&folder);
    match std::fs::remove_dir_all(&folder) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => made.and(Err(error)),
        Ok(()) | Err(_) => made,
    }?;
    let files: Vec<_> = (0..HOST_PROBE_FILES).map(|_| std::fs::File::open("/dev/null")).collect::<io::Result<_>>()?;
    drop(files);
    let thread = std::thread::Builder::new().name("probe".to_owned()).spawn(|| ())?;
    thread.join().map_err(|_| io::Error::other("a thread could not be run"))
}

fn write_probe_file(folder: &Path) -> io::Result<()> {
    crate::host::work_dir::create_task_dir(folder)?;
    let mut file = std::fs::File::create(folder.join("file"))?;
    file.write_all(&vec![0; HOST_PROBE_BYTES])?;
    file.sync_data()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_host_is_fit_while_a_folder_can_be_made_and_nothing_is_left_of_the_look() {
        let base = tempfile::tempdir().unwrap();
        let tasks = base.path().join("tasks");
        assert_eq!(HostProbe::new(&tasks).run().await, ProbeResult::Healthy, "a folder that was removed is made again");
        assert_eq!(std::fs::read_dir(&tasks).unwrap().count(), 0);
        let blocked = base.path().join("file");
        std::fs::write(&blocked, "").unwrap();
        assert_eq!(HostProbe::new(&blocked).run().await, ProbeResult::Unhealthy);
        assert_eq!(HostProbe::new(Path::new("/dev/full")).run().await, ProbeResult::Unhealthy);
    }

    #[tokio::test]
    async fn a_look_that_has_not_come_back_is_not_joined_by_another() {
        let base = tempfile::tempdir().unwrap();
        let examination = HostProbe::new(base.path());
        let stuck = examination.in_flight.clone().try_acquire_owned().unwrap();
        assert_eq!(examination.clone().run().await, ProbeResult::Unhealthy);
        drop(stuck);
        assert_eq!(examination.run().await, ProbeResult::Healthy);
    }
}
