//! A file that says when the host goes: an RFC 3339 time, or nothing, which means at once.
//!
//! That it is there is the notice. What cannot be read in it, in whatever format, means at once too: to go too early costs what
//! runs a retry, to stay costs it a whole lease.

use std::io;
use std::path::{Path, PathBuf};

use jiff::Timestamp;
use tokio::io::AsyncReadExt as _;

use super::{NobodyListens, Teller, left};
use crate::domain::notice::file::{Content, NoticeFile};
use crate::domain::notice::{Goes, News, Pace};
use crate::domain::time::Instant;
use crate::host::clock::Clock;
use crate::limits::{METADATA_TIMEOUT, NOTICE_FILE_BYTES_MAX, NOTICE_FILE_EMPTY_WAIT};

pub(super) async fn watch(path: &Path, clock: Clock, pace: Pace, seed: u64, teller: Teller) {
    let mut rules = NoticeFile::new(pace, seed);
    tracing::info!(path = %path.display(), "watching a file for the notice that this host goes");
    loop {
        clock.sleep_until(rules.due()).await;
        let sent_at = clock.now();
        let (content, trouble) = match settled(path, sent_at).await {
            Ok(content) => {
                teller.answered();
                (content, None)
            }
            Err(error) => (Content::Unreadable, Some(format!("{}: {error}", path.display()))),
        };
        let odd_before = rules.odd();
        let news = rules.read(content, sent_at, clock.now());
        if rules.odd() && !odd_before {
            warn(path, "if that is so at the next look too, this host is taken to go at once");
        } else if rules.odd() && news == Some(News::Goes(Goes::Soon)) {
            warn(path, "this host is taken to go at once");
        }
        if let Err(NobodyListens) = teller.tell(news, trouble.as_deref()).await {
            return;
        }
    }
}

fn warn(path: &Path, then: &str) {
    tracing::warn!(path = %path.display(), "the notice file is there, and holds no time such as 2030-01-31T12:00:00Z; {then}");
}

/// What it holds. Who writes it may have emptied it a moment ago, so an empty one is looked at twice.
async fn settled(path: &Path, sent_at: Instant) -> io::Result<Content> {
    let content = read(path.to_owned(), sent_at).await;
    if !matches!(content, Ok(Content::Empty)) {
        return content;
    }
    tokio::time::sleep(NOTICE_FILE_EMPTY_WAIT).await;
    read(path.to_owned(), sent_at.plus(NOTICE_FILE_EMPTY_WAIT)).await
}

async fn read(path: PathBuf, sent_at: Instant) -> io::Result<Content> {
    let text = async {
        // Opening a pipe would wait for a writer.
        if !tokio::fs::metadata(&path).await?.is_file() {
            return Err(io::Error::other("it is no regular file"));
        }
        let mut text = String::new();
        tokio::fs::File::open(&path).await?.take(NOTICE_FILE_BYTES_MAX).read_to_string(&mut text).await?;
        Ok(text)
    };
    let text: io::Result<String> = tokio::time::timeout(METADATA_TIMEOUT, text).await?;
    match text {
        Ok(text) if text.trim().is_empty() => Ok(Content::Empty),
        Ok(text) => Ok(time(&text, sent_at).map_or(Content::Odd, Content::Time)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Content::Missing),
        Err(error) if error.kind() == io::ErrorKind::InvalidData => Ok(Content::Odd),
        Err(error) => Err(error),
    }
}

fn time(text: &str, sent_at: Instant) -> Option<Instant> {
    let until: Timestamp = text.trim().parse().ok()?;
    Some(sent_at.plus(left(until, Timestamp::now())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_file_that_is_written_a_moment_after_it_was_emptied_says_its_time() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("terminate-at");
        std::fs::write(&path, "").unwrap();
        let at = Instant::default();
        let writing = async {
            tokio::time::sleep(NOTICE_FILE_EMPTY_WAIT / 2).await;
            std::fs::write(&path, "2030-01-31T12:00:00Z\n").unwrap();
        };
        let (content, ()) = tokio::join!(settled(&path, at), writing);
        assert!(matches!(content, Ok(Content::Time(_))), "{content:?}");
        std::fs::write(&path, "\n").unwrap();
        assert!(matches!(settled(&path, at).await, Ok(Content::Empty)), "one that stays empty is an order");
    }
}
