//! What a handler answers to somebody who waits for it. Sources whose tasks are requests take such answers; others do not.

use std::borrow::Cow;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use super::SourceFuture;
use crate::limits::AMQP_NAME_BYTES_MAX;

/// An answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Reply {
    /// How it went.
    pub status: ReplyStatus,
    /// What it is, in whatever format was agreed on.
    pub body: Arc<[u8]>,
    /// Its media type, where somebody cares.
    pub content_type: Option<String>,
}

impl Reply {
    /// An answer that all is well.
    #[must_use]
    pub fn ok(body: impl Into<Arc<[u8]>>) -> Self {
        Self { status: ReplyStatus::OK, body: body.into(), content_type: None }
    }

    /// The same with another status.
    #[must_use]
    pub fn with_status(self, status: ReplyStatus) -> Self {
        Self { status, ..self }
    }
}

/// How a request went, in one word.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReplyStatus(Cow<'static, str>);

impl ReplyStatus {
    /// All is well.
    pub const OK: Self = Self(Cow::Borrowed("ok"));
    /// It is not; the body says more.
    pub const CORE_ERROR: Self = Self(Cow::Borrowed("core_error"));

    /// A word of one's own: at most 64 letters, digits, `_`, `-` and `.`; `None` where it is not.
    #[must_use]
    pub fn parse(word: &str) -> Option<Self> {
        let clean = word.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"_-.".contains(&byte));
        (clean && !word.is_empty() && word.len() <= 64).then(|| Self(Cow::Owned(word.to_owned())))
    }

    /// The word.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

/// Where partial answers go.
pub trait PartialReplySink: Send + Sync + 'static {
    /// Sends one, and returns when whoever asked has it within reach.
    fn send(&self, reply: Reply) -> SourceFuture<'_, ()>;
}

/// The answers to one request. Clones are the same.
#[derive(Clone)]
pub struct Results {
    inner: Arc<ResultsInner>,
}

struct ResultsInner {
    final_reply: Mutex<Option<Reply>>,
    failure_reason: Mutex<Option<String>>,
    partial: Box<dyn PartialReplySink>,
    max_bytes: usize,
    not_started: AtomicBool,
}

impl std::fmt::Debug for Results {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.write_str("Replies")
    }
}

/// Why an answer cannot be sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum ReplyError {
    /// It is larger than what can be sent.
    #[error("an answer has {bytes} bytes, and {most} can be sent; see `amqp.max_message_size`")]
    TooLarge {
        /// What it has.
        bytes: usize,
        /// What it may have.
        most: usize,
    },
    /// Its media type is longer than what can be sent.
    #[error("the content type of an answer has {bytes} bytes, and {AMQP_NAME_BYTES_MAX} can be sent")]
    ContentType {
        /// What it has.
        bytes: usize,
    },
}

impl Results {
    /// Keeps the last answer, and passes on partial ones, each of at most `most` bytes.
    pub fn new(partial: impl PartialReplySink, most: usize) -> Self {
        Self {
            inner: Arc::new(ResultsInner {
                final_reply: Mutex::default(),
                failure_reason: Mutex::default(),
                partial: Box::new(partial),
                max_bytes: most,
                not_started: AtomicBool::new(false),
            }),
        }
    }

    /// Sets the answer that is sent when the payload has ended. A later one replaces it.
    ///
    /// # Errors
    ///
    /// See [`ReplyError`]; what was set before stays.
    pub fn set_final(&self, reply: Reply) -> Result<(), ReplyError> {
        self.check_size(&reply)?;
        *self.inner.final_reply.lock().unwrap_or_else(PoisonError::into_inner) = Some(reply);
        Ok(())
    }

    /// The answer that is sent at the end, if there is one.
    #[must_use]
    pub fn final_reply(&self) -> Option<Reply> {
        self.inner.final_reply.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Whether there is an answer for the end.
    #[must_use]
    pub fn has_final(&self) -> bool {
        self.inner.final_reply.lock().unwrap_or_else(PoisonError::into_inner).is_some()
    }

    /// Sends a partial answer now.
    ///
    /// # Errors
    ///
    /// [`Gone`](crate::domain::refusal::Refusal::Gone) where nobody waits for it any more, `Rejected` where it is [`ReplyError`].
    pub async fn send_partial(&self, reply: Reply) -> Result<(), super::CallError> {
        let rejected = |what| super::CallError { refusal: crate::domain::refusal::Refusal::Rejected, message: what };
        self.check_size(&reply).map_err(|error| rejected(error.to_string()))?;
        self.inner.partial.send(reply).await
    }

    /// Says why there will be no good answer, for whoever waits. The first word counts.
    pub fn set_failure_reason(&self, sentence: &str) {
        let mut why = self.inner.failure_reason.lock().unwrap_or_else(PoisonError::into_inner);
        why.get_or_insert_with(|| crate::redact::text(sentence).into_owned());
    }

    /// Says that nothing of the request has run, and that whoever is given it next may take it for new.
    pub fn mark_not_started(&self) {
        self.inner.not_started.store(true, Ordering::Relaxed);
    }

    /// Whether somebody said so.
    #[must_use]
    pub fn is_not_started(&self) -> bool {
        self.inner.not_started.load(Ordering::Relaxed)
    }

    /// Why there is no good answer, where somebody said.
    #[must_use]
    pub fn failure_reason(&self) -> Option<String> {
        self.inner.failure_reason.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// How many bytes an answer may have.
    #[must_use]
    pub fn max_bytes(&self) -> usize {
        self.inner.max_bytes
    }

    fn check_size(&self, reply: &Reply) -> Result<(), ReplyError> {
        let (bytes, most) = (reply.body.len(), self.inner.max_bytes);
        let kind = reply.content_type.as_ref().map_or(0, String::len);
        match () {
            () if bytes > most => Err(ReplyError::TooLarge { bytes, most }),
            () if kind > AMQP_NAME_BYTES_MAX => Err(ReplyError::ContentType { bytes: kind }),
            () => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct NoSink;

    impl PartialReplySink for NoSink {
        fn send(&self, _: Reply) -> SourceFuture<'_, ()> {
            Box::pin(async { Ok(()) })
        }
    }

    #[test]
    fn the_last_answer_counts_and_one_that_is_too_large_changes_nothing() {
        let replies = Results::new(NoSink, 3);
        assert!(!replies.has_final());
        replies.set_final(Reply::ok(*b"one")).unwrap();
        assert_eq!(replies.set_final(Reply::ok(*b"four")), Err(ReplyError::TooLarge { bytes: 4, most: 3 }));
        let of_type = |bytes| Reply { content_type: Some("x".repeat(bytes)), ..Reply::ok(*b"two") };
        assert_eq!(replies.set_final(of_type(256)), Err(ReplyError::ContentType { bytes: 256 }));
        assert_eq!(replies.final_reply().map(|reply| reply.body.to_vec()), Some(b"one".to_vec()));
    }

    #[test]
    fn a_status_is_one_clean_word() {
        assert_eq!(ReplyStatus::parse("core_error"), Some(ReplyStatus::CORE_ERROR));
        for odd in ["", "two words", "é", &"x".repeat(65)] {
            assert_eq!(ReplyStatus::parse(odd), None, "{odd}");
        }
    }
}
