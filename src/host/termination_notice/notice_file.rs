//! A file that says when the host goes: an RFC 3339 time, or nothing, which means at once.
//!
//! That it is there is the notice. What cannot be read in it, in whatever format, means at once too: to go too early costs what
//! runs a retry, to stay costs it a whole lease.

use std::io;
use std::path::{Path, PathBuf};

use jiff::Timestamp;
use tokio::io::AsyncReadExt as _;

use super::{NoticeSink, SinkClosed, time_left};
use crate::domain::termination_notice::notice_file::{NoticeFile, NoticeFileContent};
use crate::domain::termination_notice::{NoticeEvent, PollSchedule, Termination};
use crate::domain::time::Instant;
use crate::host::clock::Clock;
use crate::limits::{METADATA_TIMEOUT, NOTICE_FILE_BYTES_MAX, NOTICE_FILE_EMPTY_DELAY};

pub(super) async fn watch(path: &Path, clock: Clock, pace: PollSchedule, seed: u64, teller: NoticeSink) {
    let mut rules = NoticeFile::new(pace, seed);
    tracing::info!(path = %path.display(), "watching a file for the notice that this host goes");
    loop {
        clock.sleep_until(rules.next_at()).await;
        let sent_at = clock.now();
        let (content, trouble) = match read_settled(path, sent_at).await {
            Ok(content) => {
                teller.record_answer();
                (content, None)
            }
            Err(error) => (NoticeFileContent::Unreadable, Some(format!("{}: {error}", path.display()))),
        };
        let odd_before = rules.was_invalid();
        let news = rules.on_read(content, sent_at, clock.now());
        if rules.was_invalid() && !odd_before {
            warn_unreadable_time(path, "if that is so at the next look too, this host is taken to go at once");
        } else if rules.was_invalid() && news == Some(NoticeEvent::Terminating(Termination::Soon)) {
            warn_unreadable_time(path, "this host is taken to go at once");
        }
        if let Err(SinkClosed) = teller.report(news, trouble.as_deref()).await {
            return;
        }
    }
}

fn warn_unreadable_time(path: &Path, then: &str) {
    tracing::warn!(path = %path.display(), "the notice file is there, and holds no time such as 2030-01-31T12:00:00Z; {then}");
}

/// What it holds. Who writes it may have emptied it a moment ago, so an empty one is looked at twice.
async fn read_settled(path: &Path, sent_at: Instant) -> io::Result<NoticeFileContent> {
    let content = read(path.to_owned(), sent_at).await;
    if !matches!(content, Ok(NoticeFileContent::Empty)) {
        return content;
    }
    tokio::time::sleep(NOTICE_FILE_EMPTY_DELAY).await;
    read(path.to_owned(), sent_at.plus(NOTICE_FILE_EMPTY_DELAY)).await
}

async fn read(path: PathBuf, sent_at: Instant) -> io::Result<NoticeFileContent> {
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
        Ok(text) if text.trim().is_empty() => Ok(NoticeFileContent::Empty),
        Ok(text) => Ok(parse_time(&text, sent_at).map_or(NoticeFileContent::Invalid, NoticeFileContent::Time)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(NoticeFileContent::Missing),
        Err(error) if error.kind() == io::ErrorKind::InvalidData => Ok(NoticeFileContent::Invalid),
        Err(error) => Err(error),
    }
}

fn parse_time(text: &str, sent_at: Instant) -> Option<Instant> {
    let until: Timestamp = text.trim().parse().ok()?;
    Some(sent_at.plus(time_left(until, Timestamp::now())))
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
            tokio::time::sleep(NOTICE_FILE_EMPTY_DELAY / 2).await;
            std::fs::write(&path, "2030-01-31T12:00:00Z\n").unwrap();
        };
        let (content, ()) = tokio::join!(read_settled(&path, at), writing);
        assert!(matches!(content, Ok(NoticeFileContent::Time(_))), "{content:?}");
        std::fs::write(&path, "\n").unwrap();
        assert!(
            matches!(read_settled(&path, at).await, Ok(NoticeFileContent::Empty)),
            "one that stays empty is an order"
        );
    }
}
