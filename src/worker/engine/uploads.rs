//! Uploads artifacts and log after the payload has ended.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::task::{JoinSet, spawn_blocking};

use crate::handler::Context;
use crate::handler::artifact::Optionality;
use crate::handler::artifact_collector::CollectedArtifact;
use crate::handler::context::PublishedLogs;
use crate::handler::log::{self, FinishedLog};
use crate::source::{Artifact, ArtifactBody, CallError, Claim};
use crate::task::file::ClosedOffThread;
use journeyman_domain::backoff::{Backoff, Policy};
use journeyman_domain::claim::UploadStatus;
use journeyman_domain::jitter::Jitter;
use journeyman_domain::lease::Lease;
use journeyman_domain::limits::{UPLOAD_FULL_RETRY_MAX, UPLOAD_RETRY_MAX, UPLOADS_CONCURRENT_MAX};
use journeyman_domain::refusal::Refusal;
use journeyman_domain::time::Instant;
use journeyman_platform::host::clock::{Clock, or_pending};

use super::counters::WorkerCounters;
use super::log_artifacts;
use super::storage_health::StorageHealth;
use super::task_view::TaskView;

const RETRY: Policy = Policy { first: Duration::from_millis(500), max: Duration::from_secs(15) };

#[derive(Clone)]
pub(super) struct Uploader {
    pub(super) claim: Arc<dyn Claim>,
    pub(super) counters: Arc<WorkerCounters>,
    pub(super) seed: u64,
    pub(super) storage: Arc<StorageHealth>,
    /// The name of the claim's source.
    pub(super) source: String,
    /// `None` where nothing is reported, or the lease is not known.
    pub(super) lease: watch::Receiver<Option<Lease>>,
    pub(super) clock: Clock,
}

impl Uploader {
    /// Uploads the artifacts, then the log, which says how that went.
    pub(super) async fn upload_all(self, task: TaskView) -> UploadStatus {
        let retry_until = self.clock.now().plus(UPLOAD_RETRY_MAX);
        let settled = if task.has_artifacts() {
            let status = self.upload_artifacts(&task, retry_until).await;
            // On failure the end of the claim tries again, and logs it.
            task.off_thread(Context::remove_folder).await.ok();
            status
        } else {
            UploadStatus::Complete
        };
        // The log says how the payload ended, which is not the task's outcome.
        match settled {
            UploadStatus::Complete => {}
            UploadStatus::ArtifactMissing => task.write_note("without all of its artifacts the task is not completed"),
            UploadStatus::UploadFailed => {
                task.write_note("its artifacts could not all be stored, so the task is not completed");
            }
        }
        tokio::select! {
            biased;
            () = self.upload_log(&task, retry_until) => {}
            () = self.report_due() => {
                tracing::warn!(claim.run = %task.task().run, "the task is reported without its log: its lease ends soon");
            }
        }
        settled
    }

    /// Resolves when the lease ends so soon that the log has to wait no longer.
    async fn report_due(&self) {
        let mut lease = self.lease.clone();
        loop {
            let due = lease.borrow_and_update().map(|lease| lease.report_by());
            tokio::select! {
                biased;
                Ok(()) = lease.changed() => {}
                () = or_pending(due.map(|due| self.clock.sleep_until(due))) => return,
            }
        }
    }

    async fn upload_artifacts(&self, task: &TaskView, retry_until: Instant) -> UploadStatus {
        let opened = task.off_thread(|context| Ok(ClosedOffThread::new(context.collect_artifacts()?)));
        let mut items = match opened.await {
            Ok(items) => items,
            Err(error) => {
                task.write_note(&format!("the task's folder cannot be opened for its artifacts: {error}"));
                return UploadStatus::UploadFailed;
            }
        };
        let mut worst = UploadStatus::Complete;
        let mut uploads = JoinSet::new();
        loop {
            let (rest, item) = match spawn_blocking(move || items.next().map(|item| (items, item))).await {
                Ok(Some((rest, item))) => (rest, item),
                Ok(None) => break,
                Err(_) => return UploadStatus::UploadFailed,
            };
            items = rest;
            let artifact = self.artifact_to_upload(item, task, &mut worst);
            if let Some((artifact, need)) = artifact {
                while uploads.len() >= UPLOADS_CONCURRENT_MAX {
                    worst = worst.max(joined(uploads.join_next().await));
                }
                let (store, task) = (self.clone(), task.clone());
                uploads.spawn(async move {
                    match redact_if_log(artifact, &task).await {
                        Ok(artifact) => match (store.upload(&artifact, &task, retry_until).await, need) {
                            (UploadStatus::ArtifactMissing, Optionality::Optional) => UploadStatus::Complete,
                            (status, _) => status,
                        },
                        Err(sentence) => store.fail(UploadStatus::UploadFailed, &task, &sentence),
                    }
                });
            }
        }
        while !uploads.is_empty() {
            worst = worst.max(joined(uploads.join_next().await));
        }
        worst
    }

    fn artifact_to_upload(
        &self,
        item: CollectedArtifact,
        task: &TaskView,
        worst: &mut UploadStatus,
    ) -> Option<(Artifact, Optionality)> {
        match item {
            CollectedArtifact::Found(artifact, need) => Some((artifact, need)),
            CollectedArtifact::Missing { error, message: sentence } => {
                task.write_note(&sentence);
                *worst = UploadStatus::ArtifactMissing.max(*worst);
                Some((error?, Optionality::Required))
            }
            CollectedArtifact::Skipped { message: sentence } => {
                task.write_note(&sentence);
                None
            }
        }
    }

    async fn upload(&self, artifact: &Artifact, task: &TaskView, mut retry_until: Instant) -> UploadStatus {
        let (mut backoff, mut jitter) = (Backoff::NEW, Jitter::seeded(self.seed));
        let mut retried = false;
        loop {
            let Err(CallError { refusal, message }) = self.claim.upload(artifact).await else {
                self.counters.add(|counts| counts.artifacts += 1);
                self.storage.on_success(&self.source, self.clock.now());
                if retried {
                    task.set_progress("");
                }
                return UploadStatus::Complete;
            };
            let name = &artifact.name;
            if let Refusal::Gone | Refusal::Rejected = refusal {
                let sentence = format!("artifact {name} is refused: {message}");
                return self.fail(UploadStatus::ArtifactMissing, task, &sentence);
            }
            retried = true;
            if refusal == Refusal::Full {
                retry_until = retry_until.min(self.clock.now().plus(UPLOAD_FULL_RETRY_MAX));
            }
            self.storage.on_failure(&self.source, &message, self.clock.now());
            task.set_progress(&format!("not stored yet, retrying: {message}"));
            if self.clock.now() >= retry_until {
                let sentence = format!("artifact {name} could not be stored: {message}");
                return self.fail(UploadStatus::UploadFailed, task, &sentence);
            }
            tokio::time::sleep(backoff.wait(RETRY, refusal.retry_after(), &mut jitter)).await;
        }
    }

    fn fail(&self, status: UploadStatus, task: &TaskView, sentence: &str) -> UploadStatus {
        self.counters.add(|counts| counts.artifacts_failed += 1);
        tracing::warn!("{sentence}");
        task.write_note(sentence);
        status
    }

    async fn upload_log(&self, task: &TaskView, retry_until: Instant) {
        if !task.has_log() || task.published_logs() == PublishedLogs::None {
            return;
        }
        let finished = match task.off_thread(|context| context.log().finish()).await {
            Ok(Some(FinishedLog { file, bytes, .. })) => {
                ArtifactBody::File { file, bytes, content_type: log::CONTENT_TYPE.to_owned() }
            }
            Ok(None) => return,
            Err(error) => {
                tracing::warn!(%error, "a task's log cannot be read back; it is not stored");
                return;
            }
        };
        let backing = Artifact { name: log::BACKING_NAME.to_owned(), expires: None, body: finished };
        if self.upload(&backing, task, retry_until).await == UploadStatus::Complete {
            if task.published_logs() == PublishedLogs::Stored {
                return;
            }
            let link =
                ArtifactBody::Link { target: log::BACKING_NAME.to_owned(), content_type: log::CONTENT_TYPE.to_owned() };
            let live = Artifact { name: log::LIVE_NAME.to_owned(), expires: None, body: link };
            self.upload(&live, task, retry_until).await;
        } else if let ArtifactBody::File { file, .. } = backing.body {
            // The queue may need the space to store the outcome.
            task.off_thread(move |_| file.set_len(0)).await.ok();
        }
    }
}

/// Redacts secrets in a file that is called a log. The redacted copy is stored beside the task's own log.
async fn redact_if_log(artifact: Artifact, task: &TaskView) -> Result<Artifact, String> {
    let ArtifactBody::File { file, bytes, content_type } = artifact.body else { return Ok(artifact) };
    let body = |file, bytes, content_type| ArtifactBody::File { file, bytes, content_type };
    if !log_artifacts::is_log(&artifact.name) {
        return Ok(Artifact { body: body(file, bytes, content_type), ..artifact });
    }
    let looked_at = file.clone();
    let cleansed = task.off_thread(move |context| {
        let (own, beside) = (context.log().task_secrets(), context.log().path());
        log_artifacts::redacted_copy(&looked_at, bytes, own.as_deref(), beside.parent().unwrap_or(beside))
    });
    match cleansed.await {
        Ok(None) => Ok(Artifact { body: body(file, bytes, content_type), ..artifact }),
        Ok(Some(cleansed)) => {
            let what = match cleansed.redactions {
                1 => "a secret in it was replaced".to_owned(),
                many => format!("{many} secrets in it were replaced"),
            };
            task.write_note(&format!("artifact {}: {what}", artifact.name));
            Ok(Artifact { body: body(cleansed.file, cleansed.bytes, content_type), ..artifact })
        }
        Err(error) => Err(format!("artifact {} could not be stored without the secrets in it: {error}", artifact.name)),
    }
}

fn joined(upload: Option<Result<UploadStatus, tokio::task::JoinError>>) -> UploadStatus {
    upload.map_or(UploadStatus::Complete, |upload| upload.unwrap_or(UploadStatus::UploadFailed))
}
