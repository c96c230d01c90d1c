//! What a handler answers to somebody who waits for it. Sources whose tasks are requests take such answers; others do not.

use std::borrow::Cow;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use super::Answer;
use crate::limits::AMQP_NAME_BYTES_MAX;

/// An answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Reply {
    /// How it went.
    pub status: Status,
    /// What it is, in whatever format was agreed on.
    pub body: Arc<[u8]>,
    /// Its media type, where somebody cares.
    pub content_type: Option<String>,
}

impl Reply {
    /// An answer that all is well.
    #[must_use]
    pub fn ok(body: impl Into<Arc<[u8]>>) -> Self {
        Self { status: Status::OK, body: body.into(), content_type: None }
    }

    /// The same with another status.
    #[must_use]
    pub fn with_status(self, status: Status) -> Self {
        Self { status, ..self }
    }
}

/// How a request went, in one word.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Status(Cow<'static, str>);

impl Status {
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
pub trait Partial: Send + Sync + 'static {
    /// Sends one, and returns when whoever asked has it within reach.
    fn send(&self, reply: Reply) -> Answer<'_, ()>;
}

/// The answers to one request. Clones are the same.
#[derive(Clone)]
pub struct Replies {
    inner: Arc<Inner>,
}

struct Inner {
    last: Mutex<Option<Reply>>,
    why: Mutex<Option<String>>,
    partial: Box<dyn Partial>,
    most: usize,
    untouched: AtomicBool,
}

impl std::fmt::Debug for Replies {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.write_str("Replies")
    }
}

/// Why an answer cannot be sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Unfit {
    /// It is larger than what can be sent.
    #[error("an answer has {bytes} bytes, and {most} can be sent; see `amqp.max_message`")]
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

impl Replies {
    /// Keeps the last answer, and passes on partial ones, each of at most `most` bytes.
    pub fn new(partial: impl Partial, most: usize) -> Self {
        Self {
            inner: Arc::new(Inner {
                last: Mutex::default(),
                why: Mutex::default(),
                partial: Box::new(partial),
                most,
                untouched: AtomicBool::new(false),
            }),
        }
    }

    /// Sets the answer that is sent when the payload has ended. A later one replaces it.
    ///
    /// # Errors
    ///
    /// See [`Unfit`]; what was set before stays.
    pub fn set(&self, reply: Reply) -> Result<(), Unfit> {
        self.fits(&reply)?;
        *self.inner.last.lock().unwrap_or_else(PoisonError::into_inner) = Some(reply);
        Ok(())
    }

    /// The answer that is sent at the end, if there is one.
    #[must_use]
    pub fn last(&self) -> Option<Reply> {
        self.inner.last.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Whether there is an answer for the end.
    #[must_use]
    pub fn is_set(&self) -> bool {
        self.inner.last.lock().unwrap_or_else(PoisonError::into_inner).is_some()
    }

    /// Sends a partial answer now.
    ///
    /// # Errors
    ///
    /// [`Gone`](crate::domain::refusal::Refusal::Gone) where nobody waits for it any more, `Rejected` where it is [`Unfit`].
    pub async fn send(&self, reply: Reply) -> Result<(), super::Refused> {
        let rejected = |what| super::Refused { refusal: crate::domain::refusal::Refusal::Rejected, what };
        self.fits(&reply).map_err(|error| rejected(error.to_string()))?;
        self.inner.partial.send(reply).await
    }

    /// Says why there will be no good answer, for whoever waits. The first word counts.
    pub fn explain(&self, sentence: &str) {
        let mut why = self.inner.why.lock().unwrap_or_else(PoisonError::into_inner);
        why.get_or_insert_with(|| crate::redact::text(sentence).into_owned());
    }

    /// Says that nothing of the request has run, and that whoever is given it next may take it for new.
    pub fn leave_untouched(&self) {
        self.inner.untouched.store(true, Ordering::Relaxed);
    }

    /// Whether somebody said so.
    #[must_use]
    pub fn is_untouched(&self) -> bool {
        self.inner.untouched.load(Ordering::Relaxed)
    }

    /// Why there is no good answer, where somebody said.
    #[must_use]
    pub fn why(&self) -> Option<String> {
        self.inner.why.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// How many bytes an answer may have.
    #[must_use]
    pub fn most(&self) -> usize {
        self.inner.most
    }

    fn fits(&self, reply: &Reply) -> Result<(), Unfit> {
        let (bytes, most) = (reply.body.len(), self.inner.most);
        let kind = reply.content_type.as_ref().map_or(0, String::len);
        match () {
            () if bytes > most => Err(Unfit::TooLarge { bytes, most }),
            () if kind > AMQP_NAME_BYTES_MAX => Err(Unfit::ContentType { bytes: kind }),
            () => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Nowhere;

    impl Partial for Nowhere {
        fn send(&self, _: Reply) -> Answer<'_, ()> {
            Box::pin(async { Ok(()) })
        }
    }

    #[test]
    fn the_last_answer_counts_and_one_that_is_too_large_changes_nothing() {
        let replies = Replies::new(Nowhere, 3);
        assert!(!replies.is_set());
        replies.set(Reply::ok(*b"one")).unwrap();
        assert_eq!(replies.set(Reply::ok(*b"four")), Err(Unfit::TooLarge { bytes: 4, most: 3 }));
        let of_type = |bytes| Reply { content_type: Some("x".repeat(bytes)), ..Reply::ok(*b"two") };
        assert_eq!(replies.set(of_type(256)), Err(Unfit::ContentType { bytes: 256 }));
        assert_eq!(replies.last().map(|reply| reply.body.to_vec()), Some(b"one".to_vec()));
    }

    #[test]
    fn a_status_is_one_clean_word() {
        assert_eq!(Status::parse("core_error"), Some(Status::CORE_ERROR));
        for odd in ["", "two words", "é", &"x".repeat(65)] {
            assert_eq!(Status::parse(odd), None, "{odd}");
        }
    }
}
