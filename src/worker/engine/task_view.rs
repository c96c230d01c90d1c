//! What the thread that keeps leases may use of a task: nothing of it waits for the task's disk or its payload.

use std::io;
use std::path::Path;
use std::sync::Arc;

use tokio::task::spawn_blocking;

use crate::handler::chain_of_trust::SigningKey;
use crate::handler::context::PublishedLogs;
use crate::handler::log::TaskLog;
use crate::handler::{Context, EndedWork, TaskInfo};
use crate::task::Deployment;
use journeyman_platform::host::containment::ProcessScope;

/// A context without its files, which are for other threads.
#[derive(Debug, Clone)]
pub(super) struct TaskView(Context);

impl TaskView {
    pub(super) const fn of(context: Context) -> Self {
        Self(context)
    }

    /// The whole context, for a call that runs on the threads of the handlers.
    pub(super) fn for_handler(&self) -> Context {
        self.0.clone()
    }

    /// Runs what may wait for the disk on a blocking thread.
    pub(super) async fn off_thread<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Context) -> io::Result<T> + Send + 'static,
    ) -> io::Result<T> {
        let context = self.0.clone();
        spawn_blocking(move || work(&context)).await.map_err(io::Error::other).flatten()
    }

    pub(super) fn task(&self) -> &TaskInfo {
        self.0.task()
    }

    pub(super) const fn scope(&self) -> &ProcessScope {
        self.0.scope()
    }

    pub(super) async fn kill_due(&self) {
        self.0.kill_due().await;
    }

    pub(super) fn progress(&self) -> Option<String> {
        self.0.progress()
    }

    pub(super) fn failure_reason(&self) -> Option<&str> {
        self.0.failure_reason()
    }

    pub(super) fn set_progress(&self, text: &str) {
        self.0.set_progress(text);
    }

    pub(super) fn write_note(&self, text: &str) {
        self.0.log().write_note(text);
    }

    /// Says why the task is not completed.
    pub(super) fn fail(&self, why: &str) {
        self.write_note(why);
        self.0.set_failure_reason(why);
    }

    pub(super) fn log_bytes(&self) -> u64 {
        self.0.used_log().map_or(0, TaskLog::bytes)
    }

    pub(super) fn has_log(&self) -> bool {
        self.0.used_log().is_some_and(|log| !log.is_empty())
    }

    pub(super) fn signing_key(&self) -> Option<&SigningKey> {
        self.0.signing_key()
    }

    pub(super) fn deployment(&self) -> Option<&Arc<dyn Deployment>> {
        self.0.deployment()
    }

    pub(super) fn published_logs(&self) -> PublishedLogs {
        self.0.published_logs()
    }

    pub(super) fn is_handed_over(&self) -> bool {
        self.0.is_handed_over()
    }

    pub(super) fn left_work(&self) -> Option<EndedWork> {
        self.0.leaves_work().then(|| self.0.work_name())
    }

    pub(super) fn has_artifacts(&self) -> bool {
        self.0.has_artifacts()
    }

    /// The task's directory, if it was ever used.
    pub(super) fn workdir(&self) -> Option<&Path> {
        self.0.workdir_result().map(|_| self.0.workdir_path())
    }

    /// The log whose file other threads read.
    pub(super) fn followed_log(&self) -> TaskLog {
        self.0.log().clone()
    }

    /// The log of a lost claim is never finished.
    pub(super) fn end_following(&self) {
        self.0.used_log().iter().for_each(|log| log.end_following());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::handler::log::LogLimits;
    use journeyman_platform::host::clock::Clock;

    #[tokio::test]
    async fn a1_nothing_of_a_view_waits_for_the_disk_of_its_task() {
        let folder = tempfile::tempdir().unwrap();
        let log = TaskLog::new(folder.path().join("log"), LogLimits::default());
        let (definition, workdir) = (crate::task::Definition::default(), folder.path().join("task"));
        let (context, _cancel) =
            Context::without_claim("task", definition, workdir, log.clone(), Clock::boot()).unwrap();
        let (disk, view) = (log.stall_disk(), TaskView::of(context.clone()));
        log.write(b"a write that waits");
        view.write_note("canceled by operator");
        view.set_progress("not reported yet");
        view.scope().kill();
        view.end_following();
        assert!(view.has_log() && view.followed_log().is_finished() && !view.has_artifacts());
        assert_eq!((view.log_bytes(), view.workdir()), (0, None));
        assert_eq!(view.progress().as_deref(), Some("not reported yet"));
        let finishing = view.off_thread(|context| context.log().finish());
        // The last references, one of them to a file.
        drop((view.clone(), context));
        drop(disk);
        assert!(finishing.await.unwrap().is_some());
    }
}
