//! After the payload: its artifacts and its log go to the source.

use std::sync::Arc;
use std::time::Duration;

use tokio::task::{JoinSet, spawn_blocking};

use crate::domain::backoff::{Backoff, Policy};
use crate::domain::claim::Settled;
use crate::domain::jitter::Jitter;
use crate::domain::refusal::Refusal;
use crate::handler::artifact::Need;
use crate::handler::collect::{Collected, Item};
use crate::handler::log::{self, FinishedLog, TaskLog};
use crate::limits::{LOG_FINISH_BYTES_INLINE, UPLOAD_PATIENCE, UPLOADS_AT_ONCE};
use crate::source::{Artifact, ArtifactBody, Claim, Source};

use super::cleanse;
use super::counters::{Counters, count};
use super::live::Job;

const RETRY: Policy = Policy { first: Duration::from_millis(500), max: Duration::from_secs(15) };

/// What uploads go through.
#[derive(Clone)]
pub(super) struct Store {
    pub(super) source: Arc<dyn Source>,
    pub(super) claim: Claim,
    pub(super) counters: Arc<Counters>,
    pub(super) seed: u64,
}

/// What became of one upload.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Sent {
    Stored,
    Refused,
    /// The task may succeed without it.
    RefusedAndOptional,
    GaveUp,
}

impl Store {
    /// Stores the artifacts, then the log that tells how that went.
    pub(super) async fn settle(self, job: Job) -> Settled {
        let settled = if job.context.artifacts().is_empty() { Settled::Clean } else { self.artifacts(&job).await };
        // The log has told how the payload ended, and that is not how the task ends.
        match settled {
            Settled::Clean => {}
            Settled::Missing => job.context.log().note("without all of its artifacts the task is not completed"),
            Settled::Unstored => {
                job.context.log().note("its artifacts could not all be stored, so the task is not completed");
            }
        }
        self.log(job.context.log()).await;
        settled
    }

    async fn artifacts(&self, job: &Job) -> Settled {
        let context = job.context.clone();
        let opened = spawn_blocking(move || context.artifacts().open(context.workdir())).await;
        let mut items = match opened {
            Ok(Ok(items)) => items,
            Ok(Err(error)) => {
                job.context.log().note(&format!("the task's folder cannot be opened for its artifacts: {error}"));
                return Settled::Unstored;
            }
            Err(_) => return Settled::Unstored,
        };
        let mut worst = Settled::Clean;
        let mut uploads = JoinSet::new();
        loop {
            let (rest, item) = match spawn_blocking(move || next(items)).await {
                Ok(Some((rest, item))) => (rest, item),
                Ok(None) => break,
                Err(_) => return Settled::Unstored,
            };
            items = rest;
            let artifact = self.take(item, job.context.log(), &mut worst);
            if let Some((artifact, need)) = artifact {
                while uploads.len() >= UPLOADS_AT_ONCE {
                    worst = worse(worst, finished(uploads.join_next().await));
                }
                let (store, log) = (self.clone(), job.context.log().clone());
                uploads.spawn(async move {
                    match without_secrets(artifact, &log).await {
                        Ok(artifact) => match (store.upload(&artifact, &log).await, need) {
                            (Sent::Refused, Need::Optional) => Sent::RefusedAndOptional,
                            (sent, _) => sent,
                        },
                        Err(sentence) => {
                            count(&store.counters.artifacts_failed);
                            tracing::warn!("{sentence}");
                            log.note(&sentence);
                            Sent::GaveUp
                        }
                    }
                });
            }
        }
        while let Some(result) = uploads.join_next().await {
            worst = worse(worst, finished(Some(result)));
        }
        worst
    }

    fn take(&self, item: Item, log: &TaskLog, worst: &mut Settled) -> Option<(Artifact, Need)> {
        match item {
            Item::Found(artifact, need) => Some((artifact, need)),
            Item::Missing { error, sentence } => {
                log.note(&sentence);
                *worst = worse(*worst, Settled::Missing);
                Some((error?, Need::Required))
            }
            Item::Skipped { sentence } => {
                log.note(&sentence);
                None
            }
        }
    }

    async fn upload(&self, artifact: &Artifact, log: &TaskLog) -> Sent {
        let (mut backoff, mut jitter) = (Backoff::NEW, Jitter::seeded(self.seed));
        let began = tokio::time::Instant::now();
        loop {
            let refused = match self.source.upload(&self.claim, artifact).await {
                Ok(()) => {
                    count(&self.counters.artifacts);
                    return Sent::Stored;
                }
                Err(refused) => refused,
            };
            let after = match refused.refusal {
                Refusal::Retry { after } | Refusal::Throttled { after } => after,
                Refusal::Stale | Refusal::Denied => None,
                Refusal::Gone | Refusal::Rejected => {
                    count(&self.counters.artifacts_failed);
                    log.note(&format!("artifact {} is refused: {}", artifact.name, refused.what));
                    tracing::warn!(artifact = artifact.name, error = refused.what, "artifact refused");
                    return Sent::Refused;
                }
            };
            if began.elapsed() >= UPLOAD_PATIENCE {
                count(&self.counters.artifacts_failed);
                log.note(&format!("artifact {} could not be stored: {}", artifact.name, refused.what));
                tracing::warn!(artifact = artifact.name, error = refused.what, "artifact not stored");
                return Sent::GaveUp;
            }
            tokio::time::sleep(backoff.wait(RETRY, after, &mut jitter)).await;
        }
    }

    async fn log(&self, log: &TaskLog) {
        if log.is_empty() {
            return;
        }
        let finished = match finish(log).await {
            Ok(Some(finished)) => finished,
            Ok(None) => return,
            Err(error) => {
                tracing::warn!(%error, "a task's log cannot be read back; it is not stored");
                return;
            }
        };
        let file = ArtifactBody::File {
            file: finished.file,
            bytes: finished.bytes,
            content_type: log::CONTENT_TYPE.to_owned(),
        };
        let backing = Artifact { name: log::BACKING_NAME.to_owned(), expires: None, body: file };
        if self.upload(&backing, log).await == Sent::Stored {
            let link =
                ArtifactBody::Link { target: log::BACKING_NAME.to_owned(), content_type: log::CONTENT_TYPE.to_owned() };
            let live = Artifact { name: log::LIVE_NAME.to_owned(), expires: None, body: link };
            self.upload(&live, log).await;
        }
    }
}

/// The same artifact; where it is a file that is called a log, without the secrets in it. The copy of one that has some goes
/// beside the task's own log.
async fn without_secrets(artifact: Artifact, log: &TaskLog) -> Result<Artifact, String> {
    let ArtifactBody::File { file, bytes, content_type } = artifact.body else { return Ok(artifact) };
    let body = |file, bytes, content_type| ArtifactBody::File { file, bytes, content_type };
    if !cleanse::is_log(&artifact.name) {
        return Ok(Artifact { body: body(file, bytes, content_type), ..artifact });
    }
    let (own, looked_at, beside) = (log.hidden(), Arc::clone(&file), log.path().to_owned());
    let cleansed = spawn_blocking(move || {
        let folder = beside.parent().unwrap_or(&beside);
        cleanse::cleanse(&looked_at, bytes, own.as_deref(), folder)
    });
    match cleansed.await.map_err(std::io::Error::other).flatten() {
        Ok(None) => Ok(Artifact { body: body(file, bytes, content_type), ..artifact }),
        Ok(Some(cleansed)) => {
            let what = match cleansed.redactions {
                1 => "a secret in it was replaced".to_owned(),
                many => format!("{many} secrets in it were replaced"),
            };
            log.note(&format!("artifact {}: {what}", artifact.name));
            Ok(Artifact { body: body(cleansed.file, cleansed.bytes, content_type), ..artifact })
        }
        Err(error) => Err(format!("artifact {} could not be stored without the secrets in it: {error}", artifact.name)),
    }
}

/// A short log is finished on the spot: that is quicker than asking another thread to.
async fn finish(log: &TaskLog) -> std::io::Result<Option<FinishedLog>> {
    if log.bytes() <= LOG_FINISH_BYTES_INLINE {
        return log.finish();
    }
    let log = log.clone();
    spawn_blocking(move || log.finish()).await.map_err(std::io::Error::other)?
}

fn next(mut items: Collected) -> Option<(Collected, Item)> {
    let item = items.next()?;
    Some((items, item))
}

fn finished(result: Option<Result<Sent, tokio::task::JoinError>>) -> Settled {
    match result {
        Some(Ok(Sent::Stored | Sent::RefusedAndOptional)) | None => Settled::Clean,
        Some(Ok(Sent::Refused)) => Settled::Missing,
        Some(Ok(Sent::GaveUp) | Err(_)) => Settled::Unstored,
    }
}

fn worse(one: Settled, other: Settled) -> Settled {
    one.max(other)
}
