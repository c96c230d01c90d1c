//! A look at the host before claiming goes on: whether it still has what every task needs.

use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use tokio::sync::Semaphore;

use crate::domain::fitness::Condition;
use crate::limits::{HOST_LOOK_BYTES, HOST_LOOK_FILES, HOST_LOOK_TIME};

/// What is looked at. Clones share the rule that one look at a time is under way.
#[derive(Debug, Clone)]
pub(super) struct Examination {
    tasks: PathBuf,
    /// A look that a dead disk holds up keeps its thread; a second one would keep another.
    one: Arc<Semaphore>,
}

impl Examination {
    pub(super) fn of(tasks: &Path) -> Self {
        Self { tasks: tasks.to_owned(), one: Arc::new(Semaphore::new(1)) }
    }

    /// Looks, and says what is missing.
    pub(super) async fn look(self) -> Condition {
        let Ok(permit) = Arc::clone(&self.one).try_acquire_owned() else {
            tracing::warn!(folder = %self.tasks.display(), "the host is still unfit: its disk has not answered the last look");
            return Condition::Unfit;
        };
        let tasks = self.tasks.clone();
        let looked = tokio::task::spawn_blocking(move || {
            let _permit = permit;
            look(&tasks)
        });
        let missing = match tokio::time::timeout(HOST_LOOK_TIME, looked).await {
            Ok(Ok(Ok(()))) => {
                tracing::info!("the host looks fit again");
                return Condition::Fit;
            }
            Ok(Ok(Err(error))) => error.to_string(),
            Ok(Err(error)) => error.to_string(),
            Err(_) => format!("no answer from its disk within {HOST_LOOK_TIME:?}"),
        };
        tracing::warn!(folder = %self.tasks.display(), "the host is still unfit: {missing}");
        Condition::Unfit
    }
}

/// Makes a folder and a file as a task does, some open files, and a thread, which counts as a process does.
fn look(tasks: &Path) -> io::Result<()> {
    let folder = tasks.join("look");
    let made = fill(&folder);
    match std::fs::remove_dir_all(&folder) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => made.and(Err(error)),
        Ok(()) | Err(_) => made,
    }?;
    let files: Vec<_> = (0..HOST_LOOK_FILES).map(|_| std::fs::File::open("/dev/null")).collect::<io::Result<_>>()?;
    drop(files);
    let thread = std::thread::Builder::new().name("look".to_owned()).spawn(|| ())?;
    thread.join().map_err(|_| io::Error::other("a thread could not be run"))
}

fn fill(folder: &Path) -> io::Result<()> {
    crate::host::folder::make(folder)?;
    let mut file = std::fs::File::create(folder.join("file"))?;
    file.write_all(&vec![0; HOST_LOOK_BYTES])?;
    file.sync_data()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_host_is_fit_while_a_folder_can_be_made_and_nothing_is_left_of_the_look() {
        let base = tempfile::tempdir().unwrap();
        let tasks = base.path().join("tasks");
        assert_eq!(Examination::of(&tasks).look().await, Condition::Fit, "a folder that was removed is made again");
        assert_eq!(std::fs::read_dir(&tasks).unwrap().count(), 0);
        let blocked = base.path().join("file");
        std::fs::write(&blocked, "").unwrap();
        assert_eq!(Examination::of(&blocked).look().await, Condition::Unfit);
        assert_eq!(Examination::of(Path::new("/dev/full")).look().await, Condition::Unfit);
    }

    #[tokio::test]
    async fn a_look_that_has_not_come_back_is_not_joined_by_another() {
        let base = tempfile::tempdir().unwrap();
        let examination = Examination::of(base.path());
        let stuck = examination.one.clone().try_acquire_owned().unwrap();
        assert_eq!(examination.clone().look().await, Condition::Unfit);
        drop(stuck);
        assert_eq!(examination.look().await, Condition::Fit);
    }
}
