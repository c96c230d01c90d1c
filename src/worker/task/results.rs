//! The replies of a handler to the sender of a request. Only sources of requests deliver them.

use std::borrow::Cow;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use parking_lot::Mutex;

use journeyman_domain::refusal::{CallError, Refusal};
use journeyman_domain::staged::StagedRecord;

/// A reply.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Reply {
    /// Success or failure.
    pub status: ReplyStatus,
    /// The content, in a format agreed with the sender.
    pub body: Arc<[u8]>,
    /// The media type.
    pub content_type: Option<String>,
}

impl Reply {
    /// A reply with status `ok`.
    pub fn ok(body: impl Into<Arc<[u8]>>) -> Self {
        Self { status: ReplyStatus::OK, body: body.into(), content_type: None }
    }

    /// The same reply with another status.
    pub fn with_status(self, status: ReplyStatus) -> Self {
        Self { status, ..self }
    }
}

/// The status of a reply.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReplyStatus(Cow<'static, str>);

impl ReplyStatus {
    /// Success.
    pub const OK: Self = Self(Cow::Borrowed("ok"));
    /// Failure; the body says more.
    pub const CORE_ERROR: Self = Self(Cow::Borrowed("core_error"));

    /// A status of at most 64 letters, digits, `_`, `-` and `.`; `None` if invalid.
    pub fn parse(word: &str) -> Option<Self> {
        let clean = word.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"_-.".contains(&byte));
        (clean && !word.is_empty() && word.len() <= 64).then(|| Self(Cow::Owned(word.to_owned())))
    }

    /// The status as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

/// The future of a partial reply or a pause.
pub type ReplyFuture<'a> = Pin<Box<dyn Future<Output = Result<(), CallError>> + Send + 'a>>;

/// Delivers partial replies and pauses.
pub trait PartialReplySink: Send + Sync + 'static {
    /// Sends a reply and returns once the queue has accepted it.
    fn send(&self, reply: Reply) -> ReplyFuture<'_>;

    /// Pauses the task and returns once it was resumed. Most queues refuse it as [`Refusal::Gone`].
    fn pause(&self) -> ReplyFuture<'_> {
        Box::pin(std::future::ready(Err(cannot_pause())))
    }

    /// A text that is the same at each delivery of the request; `None` where the run's id is.
    fn work_key(&self) -> Option<String> {
        None
    }
}

pub(crate) fn cannot_pause() -> CallError {
    CallError { refusal: Refusal::Gone, message: "this queue cannot pause a task".to_owned() }
}

/// Lets go of work that runs elsewhere: a message is scheduled that has any worker look at it. Offered by sources that can
/// schedule one, which send it once the task has ended as [`Deferred`](journeyman_domain::outcome::ExecuteFailure::Deferred).
/// Without one, the task's own message is settled without a reply, since another one stands for it.
#[derive(Debug, Default)]
pub struct Deferral {
    record: Option<StagedRecord>,
    next: Mutex<Option<NextCheck>>,
}

/// A look to schedule.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NextCheck {
    /// What the next worker goes on from.
    pub record: StagedRecord,
    /// The time until the look.
    pub wait: Duration,
}

impl Deferral {
    /// For a message that carries `record`; `None` for the first one of the work.
    pub fn new(record: Option<StagedRecord>) -> Self {
        Self { record, next: Mutex::default() }
    }

    /// The record that came with the message.
    pub const fn record(&self) -> Option<&StagedRecord> {
        self.record.as_ref()
    }

    /// Sets the next look.
    pub fn defer(&self, record: StagedRecord, wait: Duration) {
        *self.next.lock() = Some(NextCheck { record, wait });
    }

    /// The next look.
    pub fn next_check(&self) -> Option<NextCheck> {
        self.next.lock().clone()
    }
}

/// How large a reply may be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReplyLimits {
    /// The limit of a body.
    pub body_bytes: usize,
    /// The limit of a media type.
    pub content_type_bytes: usize,
}

/// The replies to one request. Clones share them.
#[derive(Clone)]
pub struct Results {
    inner: Arc<ResultsInner>,
}

struct ResultsInner {
    final_reply: Mutex<Option<Reply>>,
    failure_reason: Mutex<Option<String>>,
    partial: Box<dyn PartialReplySink>,
    limits: ReplyLimits,
    deferral: Option<Deferral>,
    not_started: AtomicBool,
    suspect: AtomicBool,
}

impl std::fmt::Debug for Results {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.write_str("Results")
    }
}

/// Why a reply cannot be sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum ReplyError {
    /// The body is larger than the limit.
    #[error("a reply has {bytes} bytes, more than the limit of {max}")]
    TooLarge {
        /// The size.
        bytes: usize,
        /// The limit.
        max: usize,
    },
    /// The media type is longer than the limit.
    #[error("the content type of a reply has {bytes} bytes, more than the limit of {max}")]
    ContentType {
        /// The length.
        bytes: usize,
        /// The limit.
        max: usize,
    },
}

impl Results {
    /// Keeps the final reply and passes partial ones to `partial`, each within `limits`.
    pub fn new(partial: impl PartialReplySink, limits: ReplyLimits) -> Self {
        Self::with_deferral(partial, limits, None)
    }

    /// Makes what [`Results::new`] makes, for a source that can schedule messages.
    pub fn with_deferral(partial: impl PartialReplySink, limits: ReplyLimits, deferral: Option<Deferral>) -> Self {
        Self {
            inner: Arc::new(ResultsInner {
                final_reply: Mutex::default(),
                failure_reason: Mutex::default(),
                partial: Box::new(partial),
                limits,
                deferral,
                not_started: AtomicBool::new(false),
                suspect: AtomicBool::new(false),
            }),
        }
    }

    /// Sets the reply that is sent when the payload has ended. A later one replaces it.
    ///
    /// # Errors
    ///
    /// See [`ReplyError`]; the previous reply stays.
    pub fn set_final(&self, reply: Reply) -> Result<(), ReplyError> {
        self.check_size(&reply)?;
        *self.inner.final_reply.lock() = Some(reply);
        Ok(())
    }

    /// The final reply.
    pub fn final_reply(&self) -> Option<Reply> {
        self.inner.final_reply.lock().clone()
    }

    /// Sends a partial reply.
    ///
    /// # Errors
    ///
    /// [`Refusal::Gone`] if the sender no longer waits, `Rejected` for a
    /// [`ReplyError`].
    pub async fn send_partial(&self, reply: Reply) -> Result<(), CallError> {
        let rejected = |what| CallError { refusal: Refusal::Rejected, message: what };
        self.check_size(&reply).map_err(|error| rejected(error.to_string()))?;
        self.inner.partial.send(reply).await
    }

    /// Pauses the task and returns once it was resumed.
    ///
    /// # Errors
    ///
    /// [`Refusal::Gone`] if the queue cannot pause a task, or the task has ended meanwhile; `Rejected` if it is paused already.
    pub async fn pause(&self) -> Result<(), CallError> {
        self.inner.partial.pause().await
    }

    /// Sets why there is no successful reply. The first reason applies.
    pub fn set_failure_reason(&self, sentence: &str) {
        let mut why = self.inner.failure_reason.lock();
        why.get_or_insert_with(|| journeyman_platform::redact::text(sentence).into_owned());
    }

    /// The request has not started; a redelivery does not count it as an attempt.
    pub fn mark_not_started(&self) {
        self.inner.not_started.store(true, Ordering::Relaxed);
    }

    /// True after [`Results::mark_not_started`].
    pub fn is_not_started(&self) -> bool {
        self.inner.not_started.load(Ordering::Relaxed)
    }

    /// The service closed the connection, perhaps because of this request; its next attempt starts alone.
    pub fn mark_suspect(&self) {
        self.inner.suspect.store(true, Ordering::Relaxed);
    }

    /// True after [`Results::mark_suspect`].
    pub fn is_suspect(&self) -> bool {
        self.inner.suspect.load(Ordering::Relaxed)
    }

    /// Why there is no successful reply.
    pub fn failure_reason(&self) -> Option<String> {
        self.inner.failure_reason.lock().clone()
    }

    /// How the task lets go of work that runs elsewhere; `None` if the claim is held until it ends.
    pub fn deferral(&self) -> Option<&Deferral> {
        self.inner.deferral.as_ref()
    }

    /// See [`PartialReplySink::work_key`].
    pub fn work_key(&self) -> Option<String> {
        self.inner.partial.work_key()
    }

    /// The limits of a reply.
    pub fn limits(&self) -> ReplyLimits {
        self.inner.limits
    }

    fn check_size(&self, reply: &Reply) -> Result<(), ReplyError> {
        let (bytes, max) = (reply.body.len(), self.inner.limits.body_bytes);
        if bytes > max {
            return Err(ReplyError::TooLarge { bytes, max });
        }
        let (bytes, max) = (reply.content_type.as_ref().map_or(0, String::len), self.inner.limits.content_type_bytes);
        if bytes > max { Err(ReplyError::ContentType { bytes, max }) } else { Ok(()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct NoSink;

    impl PartialReplySink for NoSink {
        fn send(&self, _: Reply) -> ReplyFuture<'_> {
            Box::pin(async { Ok(()) })
        }
    }

    #[test]
    fn the_last_reply_applies_and_one_over_the_limit_changes_nothing() {
        let replies = Results::new(NoSink, ReplyLimits { body_bytes: 3, content_type_bytes: 255 });
        assert_eq!(replies.final_reply(), None);
        replies.set_final(Reply::ok(*b"one")).unwrap();
        assert_eq!(replies.set_final(Reply::ok(*b"four")), Err(ReplyError::TooLarge { bytes: 4, max: 3 }));
        let of_type = |bytes| Reply { content_type: Some("x".repeat(bytes)), ..Reply::ok(*b"two") };
        assert_eq!(replies.set_final(of_type(256)), Err(ReplyError::ContentType { bytes: 256, max: 255 }));
        assert_eq!(replies.final_reply().map(|reply| reply.body.to_vec()), Some(b"one".to_vec()));
    }

    #[test]
    fn a_status_is_one_word() {
        assert_eq!(ReplyStatus::parse("core_error"), Some(ReplyStatus::CORE_ERROR));
        for odd in ["", "two words", "é", &"x".repeat(65)] {
            assert_eq!(ReplyStatus::parse(odd), None, "{odd}");
        }
    }
}
