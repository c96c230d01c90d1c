//! Watches a file whose existence is a termination notice. It contains an RFC 3339 time, or nothing, which means at once.
//!
//! Any other content means at once too: releasing too early costs a retry, releasing too late costs a lease.

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

pub(super) async fn watch(path: &Path, clock: Clock, schedule: PollSchedule, seed: u64, sink: NoticeSink) {
    let mut tracker = NoticeFile::new(schedule, seed);
    tracing::info!(path = %path.display(), "watching a file for termination notices");
    loop {
        clock.sleep_until(tracker.next_at()).await;
        let sent_at = clock.now();
        let (content, error) = match read_settled(path, sent_at).await {
            Ok(content) => {
                sink.record_answer();
                (content, None)
            }
            Err(error) => (NoticeFileContent::Unreadable, Some(format!("{}: {error}", path.display()))),
        };
        let event = tracker.on_read(content, sent_at, clock.now());
        if content == NoticeFileContent::Invalid && event == Some(NoticeEvent::Terminating(Termination::Soon)) {
            tracing::warn!(
                path = %path.display(),
                "termination file contains no RFC 3339 time such as 2030-01-31T12:00:00Z; assuming termination at once"
            );
        }
        if let Err(SinkClosed) = sink.report(event, error.as_deref()).await {
            return;
        }
    }
}

/// Reads an empty file twice: a writer may have truncated it just now.
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
        // Opening a FIFO would wait for a writer.
        if !tokio::fs::metadata(&path).await?.is_file() {
            return Err(io::Error::other("not a regular file"));
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
    async fn a_file_that_is_truncated_and_then_written_yields_its_time() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("terminate-at");
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
            "a file that stays empty means at once"
        );
    }
}
