//! Uploads artifacts and log after the payload has ended.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::watch;
use tokio::task::{JoinSet, spawn_blocking};

use crate::handler::Context;
use crate::handler::artifact::Optionality;
use crate::handler::artifact_collector::CollectedArtifact;
use crate::handler::chain_of_trust;
use crate::handler::context::PublishedLogs;
use crate::handler::log::{self, FinishedLog};
use crate::source::{Artifact, ArtifactBody, CallError, Claim};
use crate::task::ContentEncoding;
use crate::task::file::{ClosedOffThread, digest};
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
        let digests = Digests::default();
        let settled = if task.has_artifacts() {
            let status = self.upload_artifacts(&task, &digests, retry_until).await;
            // On failure the end of the claim tries again, and logs it.
            task.off_thread(Context::remove_folder).await.ok();
            status
        } else {
            UploadStatus::Complete
        };
        // The log says how the payload ended, which is not the task's outcome.
        match settled {
            UploadStatus::Complete => {}
            UploadStatus::ArtifactMissing => task.fail("without all of its artifacts the task is not completed"),
            UploadStatus::UploadFailed => {
                task.fail("its artifacts could not all be stored, so the task is not completed")
            }
        }
        // A task that asks for a chain of trust is not completed without it.
        let is_signed = task.signing_key().is_some();
        let mut certified = if is_signed { UploadStatus::UploadFailed } else { UploadStatus::Complete };
        let finishing = async {
            let log = finish_log(&task).await;
            if is_signed {
                certified = self.certify(&task, log.clone(), &digests, retry_until).await;
            }
            self.upload_log(&task, log, retry_until).await;
        };
        tokio::select! {
            biased;
            () = finishing => {}
            () = self.report_due() => {
                tracing::warn!(claim.run = %task.task().run, "the task is reported without its log: its lease ends soon");
            }
        }
        settled.max(certified)
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

    /// Stores the signed list of the artifacts, and the log that is in it.
    async fn certify(
        &self,
        task: &TaskView,
        log: Option<ArtifactBody>,
        digests: &Digests,
        retry_until: Instant,
    ) -> UploadStatus {
        let (Some(key), Some(deployment)) = (task.signing_key(), task.deployment()) else {
            return UploadStatus::Complete;
        };
        let mut worst = UploadStatus::Complete;
        if let Some(body) = log {
            let log = Artifact { name: chain_of_trust::LOG_NAME.to_owned(), expires: None, body };
            worst = worst.max(self.upload_listed(log, task, digests, retry_until).await);
        }
        let list = chain_of_trust::list(task.task(), &**deployment, &digests.0.lock());
        let signature = key.sign(&list);
        for (name, content, content_type) in [
            (chain_of_trust::LIST_NAME, list, "application/json"),
            (chain_of_trust::SIGNATURE_NAME, signature, "application/octet-stream"),
        ] {
            let written = task.off_thread(move |context| {
                let beside = context.log().path();
                log_artifacts::file_of(&content, beside.parent().unwrap_or(beside))
            });
            worst = worst.max(match written.await {
                Ok((file, bytes)) => {
                    let (content_type, encoding) = (content_type.to_owned(), ContentEncoding::Identity);
                    let body = ArtifactBody::File { file, bytes, content_type, encoding };
                    self.upload(&Artifact { name: name.to_owned(), expires: None, body }, task, retry_until).await
                }
                Err(error) => self.fail(UploadStatus::UploadFailed, task, &format!("artifact {name}: {error}")),
            });
        }
        worst
    }

    /// Uploads an artifact whose digest is listed if the artifacts are signed.
    async fn upload_listed(
        &self,
        artifact: Artifact,
        task: &TaskView,
        digests: &Digests,
        retry_until: Instant,
    ) -> UploadStatus {
        if let (Some(_), ArtifactBody::File { file, bytes, .. }) = (task.signing_key(), &artifact.body) {
            let (file, bytes) = (file.clone(), *bytes);
            match task.off_thread(move |_| digest(&file, bytes)).await {
                Ok(digest) => drop(digests.0.lock().insert(artifact.name.clone(), digest)),
                Err(error) => {
                    let text = format!("artifact {}: cannot be read for its digest: {error}", artifact.name);
                    return self.fail(UploadStatus::UploadFailed, task, &text);
                }
            }
        }
        let artifact = self.compressed(artifact, task).await;
        self.upload(&artifact, task, retry_until).await
    }

    async fn upload_artifacts(&self, task: &TaskView, digests: &Digests, retry_until: Instant) -> UploadStatus {
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
                let (store, task, digests) = (self.clone(), task.clone(), digests.clone());
                uploads.spawn(async move {
                    match redact_if_log(artifact, &task).await {
                        Ok(artifact) => match (store.upload_listed(artifact, &task, &digests, retry_until).await, need)
                        {
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

    /// Compresses what is to be stored compressed, if the queue does that. A disk without room for it stores the content as it is.
    async fn compressed(&self, mut artifact: Artifact, task: &TaskView) -> Artifact {
        let ArtifactBody::File { file, bytes, encoding, .. } = &mut artifact.body else { return artifact };
        if std::mem::take(encoding) == ContentEncoding::Identity || !self.claim.stores_encodings() {
            return artifact;
        }
        let (plain, plain_bytes) = (file.clone(), *bytes);
        let packed = task.off_thread(move |context| {
            let beside = context.log().path();
            log_artifacts::gzipped_copy(&plain, plain_bytes, beside.parent().unwrap_or(beside))
        });
        match packed.await {
            Ok((packed, length)) => (*file, *bytes, *encoding) = (packed, length, ContentEncoding::Gzip),
            Err(error) => task.write_note(&format!("artifact {}: stored without compression: {error}", artifact.name)),
        }
        artifact
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

    async fn upload_log(&self, task: &TaskView, log: Option<ArtifactBody>, retry_until: Instant) {
        let (PublishedLogs { live, backing: Some(name), .. }, Some(body)) = (task.published_logs(), log) else {
            return;
        };
        let backing = Artifact { name: name.clone(), expires: None, body };
        let backing = self.compressed(backing, task).await;
        if self.upload(&backing, task, retry_until).await == UploadStatus::Complete {
            let Some(live) = live else { return };
            let body = ArtifactBody::Link { target: name, content_type: log::CONTENT_TYPE.to_owned() };
            self.upload(&Artifact { name: live, expires: None, body }, task, retry_until).await;
        } else if let ArtifactBody::File { file, .. } = backing.body {
            // The queue may need the space to store the outcome.
            task.off_thread(move |_| file.set_len(0)).await.ok();
        }
    }
}

/// The digests of artifacts by their names. Clones share them.
#[derive(Clone, Default)]
struct Digests(Arc<Mutex<BTreeMap<String, String>>>);

/// The whole log; `None` if it is empty, not wanted or not to be read.
async fn finish_log(task: &TaskView) -> Option<ArtifactBody> {
    let PublishedLogs { backing, encoding, .. } = task.published_logs();
    if !task.has_log() || (backing.is_none() && task.signing_key().is_none()) {
        return None;
    }
    match task.off_thread(|context| context.log().finish()).await {
        Ok(finished) => finished.map(|FinishedLog { file, bytes, .. }| ArtifactBody::File {
            file,
            bytes,
            content_type: log::CONTENT_TYPE.to_owned(),
            encoding,
        }),
        Err(error) => {
            tracing::warn!(%error, "a task's log cannot be read back; it is not stored");
            None
        }
    }
}

/// Redacts secrets in a file that is called a log. The redacted copy is stored beside the task's own log.
async fn redact_if_log(artifact: Artifact, task: &TaskView) -> Result<Artifact, String> {
    let ArtifactBody::File { file, bytes, content_type, encoding } = artifact.body else { return Ok(artifact) };
    let body = |file, bytes, content_type| ArtifactBody::File { file, bytes, content_type, encoding };
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
