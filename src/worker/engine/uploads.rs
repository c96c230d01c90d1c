//! Uploads artifacts and log after the payload has ended.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::task::{JoinSet, spawn_blocking};

use crate::handler::Context;
use crate::handler::artifact::Optionality;
use crate::handler::artifact_collector::CollectedArtifact;
use crate::handler::context::PublishedLogs;
use crate::handler::log::{self, FinishedLog, TaskLog};
use crate::source::{Artifact, ArtifactBody, CallError, Claim};
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
    pub(super) async fn upload_all(self, context: Context) -> UploadStatus {
        let retry_until = self.clock.now().plus(UPLOAD_RETRY_MAX);
        let settled = if context.artifacts().is_empty() {
            UploadStatus::Complete
        } else {
            let status = self.upload_artifacts(&context, retry_until).await;
            let context = context.clone();
            // On failure the end of the claim tries again, and logs it.
            drop(spawn_blocking(move || context.remove_folder()).await);
            status
        };
        // The log says how the payload ended, which is not the task's outcome.
        match settled {
            UploadStatus::Complete => {}
            UploadStatus::ArtifactMissing => {
                context.log().write_note("without all of its artifacts the task is not completed")
            }
            UploadStatus::UploadFailed => {
                context.log().write_note("its artifacts could not all be stored, so the task is not completed");
            }
        }
        tokio::select! {
            biased;
            () = self.upload_log(&context, retry_until) => {}
            () = self.report_due() => {
                tracing::warn!(claim.run = %context.task().run, "the task is reported without its log: its lease ends soon");
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

    async fn upload_artifacts(&self, context: &Context, retry_until: Instant) -> UploadStatus {
        let opened = context.clone();
        let opened = spawn_blocking(move || opened.artifacts().collect(opened.workdir())).await;
        let mut items = match opened.map_err(std::io::Error::other).flatten() {
            Ok(items) => items,
            Err(error) => {
                context.log().write_note(&format!("the task's folder cannot be opened for its artifacts: {error}"));
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
            let artifact = self.artifact_to_upload(item, context.log(), &mut worst);
            if let Some((artifact, need)) = artifact {
                while uploads.len() >= UPLOADS_CONCURRENT_MAX {
                    worst = worst.max(joined(uploads.join_next().await));
                }
                let (store, context) = (self.clone(), context.clone());
                uploads.spawn(async move {
                    let log = context.log();
                    match redact_if_log(artifact, log).await {
                        Ok(artifact) => match (store.upload(&artifact, &context, retry_until).await, need) {
                            (UploadStatus::ArtifactMissing, Optionality::Optional) => UploadStatus::Complete,
                            (status, _) => status,
                        },
                        Err(sentence) => store.fail(UploadStatus::UploadFailed, log, &sentence),
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
        log: &TaskLog,
        worst: &mut UploadStatus,
    ) -> Option<(Artifact, Optionality)> {
        match item {
            CollectedArtifact::Found(artifact, need) => Some((artifact, need)),
            CollectedArtifact::Missing { error, message: sentence } => {
                log.write_note(&sentence);
                *worst = UploadStatus::ArtifactMissing.max(*worst);
                Some((error?, Optionality::Required))
            }
            CollectedArtifact::Skipped { message: sentence } => {
                log.write_note(&sentence);
                None
            }
        }
    }

    async fn upload(&self, artifact: &Artifact, context: &Context, mut retry_until: Instant) -> UploadStatus {
        let (mut backoff, mut jitter) = (Backoff::NEW, Jitter::seeded(self.seed));
        let (log, mut retried) = (context.log(), false);
        loop {
            let Err(CallError { refusal, message }) = self.claim.upload(artifact).await else {
                self.counters.add(|counts| counts.artifacts += 1);
                self.storage.on_success(&self.source, self.clock.now());
                if retried {
                    context.set_progress("");
                }
                return UploadStatus::Complete;
            };
            let name = &artifact.name;
            if let Refusal::Gone | Refusal::Rejected = refusal {
                let sentence = format!("artifact {name} is refused: {message}");
                return self.fail(UploadStatus::ArtifactMissing, log, &sentence);
            }
            retried = true;
            if refusal == Refusal::Full {
                retry_until = retry_until.min(self.clock.now().plus(UPLOAD_FULL_RETRY_MAX));
            }
            self.storage.on_failure(&self.source, &message, self.clock.now());
            context.set_progress(&format!("not stored yet, retrying: {message}"));
            if self.clock.now() >= retry_until {
                let sentence = format!("artifact {name} could not be stored: {message}");
                return self.fail(UploadStatus::UploadFailed, log, &sentence);
            }
            tokio::time::sleep(backoff.wait(RETRY, refusal.retry_after(), &mut jitter)).await;
        }
    }

    fn fail(&self, status: UploadStatus, log: &TaskLog, sentence: &str) -> UploadStatus {
        self.counters.add(|counts| counts.artifacts_failed += 1);
        tracing::warn!("{sentence}");
        log.write_note(sentence);
        status
    }

    async fn upload_log(&self, context: &Context, retry_until: Instant) {
        let log = context.log();
        if log.is_empty() || context.published_logs() == PublishedLogs::None {
            return;
        }
        let finishing = log.clone();
        let finished = match spawn_blocking(move || finishing.finish()).await.map_err(std::io::Error::other).flatten() {
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
        if self.upload(&backing, context, retry_until).await == UploadStatus::Complete {
            if context.published_logs() == PublishedLogs::Stored {
                return;
            }
            let link =
                ArtifactBody::Link { target: log::BACKING_NAME.to_owned(), content_type: log::CONTENT_TYPE.to_owned() };
            let live = Artifact { name: log::LIVE_NAME.to_owned(), expires: None, body: link };
            self.upload(&live, context, retry_until).await;
        } else if let ArtifactBody::File { file, .. } = backing.body {
            // The queue may need the space to store the outcome.
            file.set_len(0).ok();
        }
    }
}

/// Redacts secrets in a file that is called a log. The redacted copy is stored beside the task's own log.
async fn redact_if_log(artifact: Artifact, log: &TaskLog) -> Result<Artifact, String> {
    let ArtifactBody::File { file, bytes, content_type } = artifact.body else { return Ok(artifact) };
    let body = |file, bytes, content_type| ArtifactBody::File { file, bytes, content_type };
    if !log_artifacts::is_log(&artifact.name) {
        return Ok(Artifact { body: body(file, bytes, content_type), ..artifact });
    }
    let (own, looked_at, beside) = (log.task_secrets(), Arc::clone(&file), log.path().to_owned());
    let cleansed = spawn_blocking(move || {
        let folder = beside.parent().unwrap_or(&beside);
        log_artifacts::redacted_copy(&looked_at, bytes, own.as_deref(), folder)
    });
    match cleansed.await.map_err(std::io::Error::other).flatten() {
        Ok(None) => Ok(Artifact { body: body(file, bytes, content_type), ..artifact }),
        Ok(Some(cleansed)) => {
            let what = match cleansed.redactions {
                1 => "a secret in it was replaced".to_owned(),
                many => format!("{many} secrets in it were replaced"),
            };
            log.write_note(&format!("artifact {}: {what}", artifact.name));
            Ok(Artifact { body: body(cleansed.file, cleansed.bytes, content_type), ..artifact })
        }
        Err(error) => Err(format!("artifact {} could not be stored without the secrets in it: {error}", artifact.name)),
    }
}

fn joined(upload: Option<Result<UploadStatus, tokio::task::JoinError>>) -> UploadStatus {
    upload.map_or(UploadStatus::Complete, |upload| upload.unwrap_or(UploadStatus::UploadFailed))
}
