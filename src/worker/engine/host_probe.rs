//! Probes whether the host has what every task needs, before claiming resumes.

use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Semaphore;

use journeyman_domain::host_health::ProbeResult;
use journeyman_domain::limits::{HOST_PROBE_BYTES, HOST_PROBE_FILES, HOST_PROBE_TIMEOUT};

use super::catch_panic::catch_panic;

/// Clones share one permit.
#[derive(Debug, Clone)]
pub(super) struct HostProbe {
    tasks_dir: PathBuf,
    in_flight: Arc<Semaphore>,
}

impl HostProbe {
    pub(super) fn new(tasks: &Path) -> Self {
        Self { tasks_dir: tasks.to_owned(), in_flight: Arc::new(Semaphore::new(1)) }
    }

    pub(super) async fn run(self) -> ProbeResult {
        let tasks = self.tasks_dir.clone();
        let error = match blocking_probe(&self.in_flight, HOST_PROBE_TIMEOUT, move || probe_host(&tasks)).await {
            Some(Ok(())) => {
                tracing::info!("the host is healthy again");
                return ProbeResult::Healthy;
            }
            Some(Err(error)) => error.to_string(),
            None => format!("its disk does not answer within {HOST_PROBE_TIMEOUT:?}, or no thread can be started"),
        };
        tracing::warn!(folder = %self.tasks_dir.display(), "host still unhealthy: {error}");
        ProbeResult::Unhealthy
    }
}

/// Runs `probe` on a blocking thread. `None` if it does not return in time. It waits for the previous one: on a dead disk each would
/// keep a thread.
pub(super) async fn blocking_probe<T: Send + 'static>(
    in_flight: &Arc<Semaphore>,
    timeout: Duration,
    probe: impl FnOnce() -> T + Send + 'static,
) -> Option<T> {
    let in_flight = Arc::clone(in_flight);
    // A host without a free thread panics.
    let probing = catch_panic(Box::pin(async move {
        let permit = in_flight.acquire_owned().await;
        tokio::task::spawn_blocking(move || {
            let _permit = permit;
            probe()
        })
        .await
    }));
    tokio::time::timeout(timeout, probing).await.ok()?.ok()?.ok()
}

/// Creates a directory and a file as a task does, opens some files, and starts a thread, which counts against the
/// process limit.
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
    thread.join().map_err(|_| io::Error::other("cannot run a thread"))
}

fn write_probe_file(folder: &Path) -> io::Result<()> {
    journeyman_platform::host::work_dir::create_task_dir(folder)?;
    let mut file = std::fs::File::create(folder.join("file"))?;
    file.write_all(&vec![0; HOST_PROBE_BYTES])?;
    file.sync_data()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_probe_succeeds_while_a_directory_can_be_created_and_leaves_nothing() {
        let base = tempfile::tempdir().unwrap();
        let tasks = base.path().join("tasks");
        assert_eq!(HostProbe::new(&tasks).run().await, ProbeResult::Healthy, "a removed directory is created again");
        assert_eq!(std::fs::read_dir(&tasks).unwrap().count(), 0);
        let blocked = base.path().join("file");
        std::fs::write(&blocked, "").unwrap();
        assert_eq!(HostProbe::new(&blocked).run().await, ProbeResult::Unhealthy);
        assert_eq!(HostProbe::new(Path::new("/dev/full")).run().await, ProbeResult::Unhealthy);
    }

    #[tokio::test(start_paused = true)]
    async fn b7_a_reading_that_hangs_is_waited_for_and_not_joined_by_another() {
        let base = tempfile::tempdir().unwrap();
        let examination = HostProbe::new(base.path());
        let stuck = examination.in_flight.clone().try_acquire_owned().unwrap();
        assert_eq!(examination.clone().run().await, ProbeResult::Unhealthy);
        drop(stuck);
        assert_eq!(examination.run().await, ProbeResult::Healthy);
    }
}
